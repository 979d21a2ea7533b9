"""Model for Triton's Python backend, whose requests a pool answers; `triton` exports it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from msplit.errors import Busy, Closed, EngineError, MsplitError, TimedOut
from msplit.run.request import RunRequest
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.triton import PARAMETER

try:
    import triton_python_backend_utils as backend  # there is one in Triton only
except ModuleNotFoundError:
    backend = None

PRIORITY = "msplit_priority"
"""Parameter of a request: its level in the pool, 0 the most urgent. Triton's own ``priority`` does not reach a Python model."""

_SENDERS = 4
"""Threads that send answers: each waits until Triton has taken it."""


class TritonPythonModel:
    """One per GPU. Triton makes it and calls its methods."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens what lies in the version's folder. What is raised is what Triton's log and its clients are told."""
        config = json.loads(args["model_config"])
        served = json.loads(config["parameters"][PARAMETER]["string_value"])
        if args.get("model_instance_kind") == "GPU":
            _see_only(args["model_instance_device_id"])
        from msplit.serving.pool.sources import pool  # once it is known which GPU is ours

        source = Path(args["model_repository"]) / args["model_version"] / served["source"]
        request = RunRequest(device="cpu", engine="cuda") if served["device"] == "cpu" else None
        self._pool = pool(source, request, PoolSettings(**served["pool"]))
        self._inputs = [port["name"] for port in config["input"]]
        self._outputs = [port["name"] for port in config["output"]]
        lacking = {*self._inputs} ^ {*self._pool.inputs} or {*self._outputs} - {*self._pool.outputs}
        if lacking:
            self._pool.close()
            what = f"config.pbtxt and the model differ in {', '.join(sorted(lacking))}"
            raise MsplitError(what, fix="export it again: msplit export")
        self._senders = ThreadPoolExecutor(_SENDERS, thread_name_prefix="msplit-triton")

    def execute(self, requests: Sequence[Any]) -> None:
        """Hands requests to the pool. Answers are sent when they are there."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                feeds = {name: _array(backend.get_input_tensor_by_name(request, name)) for name in self._inputs}
                waits = request.timeout() / 1e6 or None
                future = self._pool.submit(feeds, priority=_priority(request), timeout=waits)
            except MsplitError as problem:
                _send(sender, _failed(problem, backend.TritonError.INVALID_ARG))
            else:
                future.add_done_callback(partial(self._done, sender, request))

    def finalize(self) -> None:
        """Answers what there is, and gives the device back."""
        self._pool.close()
        self._senders.shutdown()

    def _done(self, sender: Any, request: Any, done: Future[dict[str, Any]]) -> None:
        del request  # kept until now: its tensors lie in memory that goes with it
        self._senders.submit(self._answer, sender, done)

    def _answer(self, sender: Any, done: Future[dict[str, Any]]) -> None:
        problem = done.exception()
        if problem is not None:
            _send(sender, _failed(problem, backend.TritonError.INTERNAL))
            return
        found = done.result()
        tensors = [backend.Tensor(name, np.asarray(found[name], order="C")) for name in self._outputs]
        _send(sender, backend.InferenceResponse(tensors))


def _see_only(device: str) -> None:
    """Leaves this process one GPU, the instance's. Triton counts among those that it was given."""
    given = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    os.environ["CUDA_VISIBLE_DEVICES"] = given[int(device)] if int(device) < len(given) else device


def _array(tensor: Any) -> Any:
    """A tensor's values.

    Raises:
        EngineError: They would be read from the wrong places.
    """
    if tensor is None:
        raise EngineError("an input is missing", fix="send all inputs")
    array = tensor.as_numpy()
    if not array.flags.c_contiguous:
        what = f"this Triton does not go together with NumPy {np.__version__}: it reads arrays wrongly"
        raise EngineError(what, fix="take Triton 24.11 or newer, or NumPy 1.26")
    return array


def _priority(request: Any) -> int:
    said = request.parameters()
    return int(json.loads(said).get(PRIORITY, 0)) if PRIORITY in said else 0


def _failed(problem: BaseException, code: int) -> Any:
    """An error, with the code by which clients tell what may be tried again."""
    if isinstance(problem, Busy | Closed | TimedOut):
        code = backend.TritonError.UNAVAILABLE
    return backend.InferenceResponse(error=backend.TritonError(str(problem), code))


def _send(sender: Any, response: Any) -> None:
    sender.send(response, flags=backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
