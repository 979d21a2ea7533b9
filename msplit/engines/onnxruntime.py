"""ONNX Runtime on what tf2onnx makes of a model: what a user would take instead, as rows of `bench`. Both packages are optional."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Engine, Executable, Job
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import Format, Model
from msplit.opset.traits import DRAWN_ON_DEVICE, written
from msplit.progress import phase

OPSET = 18
"""Version of ONNX's ops: the newest that tf2onnx 1.17 writes."""

_PATIENCE = 300.0
"""Seconds that a conversion may take."""

_PACKAGES = ("onnxruntime", "tf2onnx", "tensorflow")

_GPU = "CUDAExecutionProvider"


@dataclass(frozen=True)
class OnnxRuntime(Engine):
    """Builds it. See `engines.base.Engine`.

    Attributes:
        captured: Whether steps are replays of the CUDA graph that ONNX Runtime makes. Whatever ops it leaves to the CPU, it then refuses.
    """

    captured: bool = False
    name: str = "onnxruntime"

    def unavailable(self) -> str | None:
        """Why it can not run here; None where it can."""
        missing = next((name for name in _PACKAGES if importlib.util.find_spec(name) is None), None)
        return None if missing is None else f"{missing} is not installed"

    def device(self, job: Job) -> str:
        """Device that a job will run on: "GPU" or "CPU"."""
        return "GPU" if job.options.on_gpu else "CPU"

    def build(self, job: Job) -> Executable:
        """Converts the model and opens a session.

        Raises:
            EngineError: It can not be converted, or not run; the message names why.
        """
        if why_not := self.unavailable():
            raise EngineError(why_not, fix="pip install tf2onnx onnxruntime-gpu (onnxruntime where there is no GPU)")
        if job.state:
            raise EngineError("ONNX Runtime has the model's own values of variables and tables")
        with phase("converting to ONNX"):
            data = converted(job.flat)
        with phase("opening a session of ONNX Runtime"):
            return Session(data, job, captured=self.captured)


def runs_on_gpu() -> bool:
    """True if it is installed here with support for NVIDIA GPUs."""
    if OnnxRuntime().unavailable() is not None:
        return False
    import onnxruntime

    return _GPU in onnxruntime.get_available_providers()


class Session(Executable):
    """A session with the model. See `Executable`.

    Args:
        data: The ONNX model.
    """

    def __init__(self, data: bytes, job: Job, *, captured: bool) -> None:
        import onnxruntime

        self._device = "cuda" if job.options.on_gpu else "cpu"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it can not do, it raises
        tuned = {"use_tf32": str(int(not job.precision.ieee)), "enable_cuda_graph": str(int(captured))}
        providers: list[Any] = [(_GPU, tuned)] if self._device == "cuda" else []
        try:
            self._session = onnxruntime.InferenceSession(data, options, [*providers, "CPUExecutionProvider"])
        except Exception as error:  # its exceptions have no class in common
            raise EngineError(f"ONNX Runtime can not open this model: {_first_line(error)}") from error
        if self._device == "cuda" and _GPU not in self._session.get_providers():
            raise EngineError("ONNX Runtime finds no GPU", fix="install onnxruntime-gpu for this CUDA")
        self._inputs = _matched(job.flat.model, self._session.get_inputs(), "inputs")
        self._outputs = _matched(job.flat.model, self._session.get_outputs(), "outputs")
        self._captured = captured
        self._last: Arrays | None = None
        self._binding: Any = None
        self._fed: dict[str, Any] = {}
        self._facts = {
            "engine": "onnxruntime",
            "streams": 1,
            "device": self._device,
            "version": onnxruntime.__version__,
        }

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """One step. See `Executable`."""
        self._last = feeds
        try:
            if self._captured:
                values = self._replay(feeds)
            else:
                fed = {theirs: np.asarray(feeds[name]) for name, theirs in self._inputs.items()}
                values = self._session.run([*self._outputs.values()], fed)
        except Exception as error:  # as above
            raise EngineError(f"ONNX Runtime can not run this model: {_first_line(error)}") from error
        return dict(zip(self._outputs, map(np.asarray, values), strict=True))

    def _replay(self, feeds: Arrays) -> list[NDArray[Any]]:
        """A step with inputs and outputs where the graph has them."""
        if self._binding is None:
            self._bind(feeds)
        for name, value in self._fed.items():
            value.update_inplace(np.ascontiguousarray(feeds[name]))
        self._session.run_with_iobinding(self._binding)
        found: list[NDArray[Any]] = self._binding.copy_outputs_to_cpu()
        return found

    def _bind(self, feeds: Arrays) -> None:
        import onnxruntime

        self._binding = self._session.io_binding()
        for name, theirs in self._inputs.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(feeds[name]), self._device, 0)
            self._fed[name] = value
            self._binding.bind_ortvalue_input(theirs, value)
        for theirs in self._outputs.values():
            self._binding.bind_output(theirs, self._device, 0)
        # The first step allocates the outputs, which have to stay where they are from then on: it is not captured.
        first = onnxruntime.RunOptions()
        first.add_run_config_entry("gpu_graph_id", "-1")
        self._session.run_with_iobinding(self._binding, first)
        for theirs, value in zip(self._outputs.values(), self._binding.get_outputs(), strict=True):
            self._binding.bind_ortvalue_output(theirs, value)

    def launch(self) -> None:
        """One step on the inputs of the last one, which lie on the device, as outputs do."""
        if self._last is None:
            raise EngineError("launch was called before the first step", fix="call step once")
        if self._binding is None:
            self._bind(self._last)
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()

    def close(self) -> None:
        """Lets go of the session."""
        self._session, self._binding, self._fed = None, None, {}


def _matched(model: Model, theirs: Any, which: str) -> dict[str, str]:
    """Our name of each input, or output -> the name that tf2onnx gave it.

    Raises:
        EngineError: There are others.
    """
    there = {one.name: one.name for one in theirs} | {one.name.partition(":")[0]: one.name for one in theirs}
    found = {}
    for endpoint in model.inputs if which == "inputs" else model.outputs:
        names = (endpoint.tensor, endpoint.name, f"{model.signature}_{endpoint.name}")
        name = next((there[name] for name in names if name in there), None)
        if name is None:
            raise EngineError(f"tf2onnx leaves {endpoint.name!r} out of the {which}")
        found[endpoint.name] = name
    return found


def why_not(flat: FlatGraph) -> str | None:
    """Why a model is not for ONNX Runtime, as far as is known before it is converted; None where nothing is."""
    if any(map(written, flat.graph.ops)):
        return "ONNX has no variables"
    if not DRAWN_ON_DEVICE.isdisjoint(flat.graph.ops):
        return "ONNX Runtime draws other random numbers"
    return None


@functools.lru_cache(maxsize=1)
def converted(flat: FlatGraph) -> bytes:
    """The model in ONNX's format, by tf2onnx in a process of its own, which sees no GPU.

    Raises:
        EngineError: tf2onnx can not convert it, or not in five minutes.
    """
    model = flat.model
    if said := why_not(flat):
        raise EngineError(said)
    with tempfile.TemporaryDirectory(prefix="msplit-") as folder:
        target = Path(folder) / "model.onnx"
        source = ["--saved-model", str(model.path.resolve()), "--tag", ",".join(model.tags)]
        if model.is_saved_model and model.signature is not None:
            source += ["--signature_def", model.signature]
        if model.format.binary is Format.META_GRAPH:
            raise EngineError("tf2onnx is given frozen graphs and SavedModels only")
        if not model.is_saved_model:
            graph = Path(folder) / "graph.pb"
            graph.write_bytes(model.graph_def.SerializeToString())
            source = ["--graphdef", str(graph)]
            for option, endpoints in (("--inputs", model.inputs), ("--outputs", model.outputs)):
                source += [option, ",".join(endpoint.tensor for endpoint in endpoints)]
        command = [sys.executable, "-m", "tf2onnx.convert", *source, "--opset", str(OPSET), "--output", str(target)]
        own = {
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        try:
            ran = subprocess.run(
                command, capture_output=True, env={**os.environ, **own}, timeout=_PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"tf2onnx has not converted it after {_PATIENCE:.0f} s") from None
        if ran.returncode or not target.is_file():
            lines = ran.stderr.decode(errors="replace").strip().splitlines()
            raise EngineError(
                f"tf2onnx can not convert it: {lines[-1] if lines else f'it ended with {ran.returncode}'}"
            )
        return target.read_bytes()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
