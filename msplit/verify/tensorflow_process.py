"""TensorFlow in a process of its own: some options are decided once in a process, so rows with and without them need two."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.assignment.model import load
from msplit.core.graph import Ints
from msplit.core.precision import Precision
from msplit.engines.base import Arrays, Executable, HasState, Job, TensorFlowOptions
from msplit.engines.process import Problem, Process, serve, told
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError
from msplit.formats.record import Choice

LONGEST = 600.0
"""Seconds after which what such a process does is given up."""


@dataclass(frozen=True, eq=False)
class Spec:
    """What it is to run: a `Job`, of which the graph does not travel, but where its model is and what was chosen of it."""

    model: Path
    choice: Choice
    ids: Ints
    streams: int
    feeds: Arrays
    precision: Precision
    options: TensorFlowOptions
    op_libraries: Sequence[Path]


@dataclass(frozen=True)
class OwnProcess:
    """The tensorflow engine, a process for each job. See `Engine`."""

    name: str = TENSORFLOW.name

    def unavailable(self) -> str | None:
        """See `Engine`."""
        return TENSORFLOW.unavailable()

    def device(self, job: Job) -> str:
        """See `KnowsDevice`."""
        return TENSORFLOW.device(job)

    def build(self, job: Job) -> Executable:
        """See `Engine`. What is built has the clock of its process.

        Raises:
            EngineError: There is no GPU, so that none of these options means anything; or it can not run there.
        """
        if self.device(job) == "CPU":
            raise EngineError("NVIDIA's switches are for GPUs, and TensorFlow sees none", fix="leave them out")
        return Elsewhere(job)


OWN_PROCESS = OwnProcess()


class Elsewhere:
    """A job in a process of its own. See `Executable`, `HasOwnClock` and `HasState`."""

    def __init__(self, job: Job) -> None:
        model = job.flat.model
        self._process = Process("msplit.verify.tensorflow_process", "TensorFlow with other options")
        spec = Spec(
            model.path, model.choice, job.ids, job.streams, job.feeds, job.precision, job.tensorflow, job.op_libraries
        )
        try:
            self._facts: Mapping[str, Any] = self._ask("build", spec)
        except BaseException:
            self.close()
            raise

    def _ask(self, what: str, given: Any = None) -> Any:
        self._process.send((what, given))
        end = time.monotonic() + LONGEST
        while not self._process.said(0.5):
            self._process.alive()
            if time.monotonic() > end:
                self._process.kill()
                raise EngineError(
                    f"a process of TensorFlow said nothing for {LONGEST:.0f} seconds", fix="give --tensorflow timeout="
                )
        return told(self._process.receive())

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """See `Executable`."""
        outputs: dict[str, NDArray[Any]] = self._ask("step", dict(feeds))
        return outputs

    def times(self, count: int) -> list[float]:
        """See `HasOwnClock`."""
        found: list[float] = self._ask("times", count)
        return found

    def launch(self) -> None:
        """One more step on the inputs of the last one."""
        self.times(1)

    def device_times(self, count: int) -> None:
        """None: the stock runtime does not tell a step's time on the device."""

    def facts(self) -> Mapping[str, Any]:
        """What is known of the run."""
        return dict(self._facts)

    def save_state(self) -> Arrays:
        """See `HasState`."""
        state: Arrays = self._ask("save")
        return state

    def load_state(self, state: Arrays) -> None:
        """See `HasState`."""
        self._ask("load", dict(state))

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def build(spec: Spec) -> Executable:
    """Makes it ready, in the process that runs it."""
    if spec.options.private_threads:  # read when a device is made
        os.environ["TF_GPU_THREAD_MODE"] = "gpu_private"
        os.environ["TF_GPU_THREAD_COUNT"] = str(spec.options.private_threads)
    choice = spec.choice
    flat = load(spec.model, tags=choice.tags, signature=choice.signature, inputs=choice.inputs, outputs=choice.outputs)
    return TENSORFLOW.build(
        Job(
            flat=flat,
            ids=np.asarray(spec.ids),
            streams=spec.streams,
            feeds=spec.feeds,
            tensorflow=spec.options,
            op_libraries=spec.op_libraries,
            precision=spec.precision,
        )
    )


def main(arguments: Sequence[str]) -> None:
    """Builds what it is told, and runs steps of it until nobody asks any more."""
    built: list[Executable] = []
    last: list[Arrays] = []

    def answer(message: Any) -> Any:
        what, given = message
        try:
            if what == "build":
                built.append(build(given))
                last.append(given.feeds)
                return dict(built[0].facts())
            return _done(built[0], what, given, last)
        except Exception as problem:  # noqa: BLE001  the other process tells it
            return Problem.of(problem)

    serve(arguments, answer)
    for executable in built:
        executable.close()


def _done(executable: Executable, what: str, given: Any, last: list[Arrays]) -> Any:
    if what == "step":
        outputs = executable.step(given)
        last[0] = given
        return outputs
    if what == "times":
        return [_timed(executable, last[0]) for _ in range(given)]
    assert isinstance(executable, HasState)
    return executable.save_state() if what == "save" else executable.load_state(given)


def _timed(executable: Executable, feeds: Arrays) -> float:
    start = time.perf_counter()
    executable.step(feeds)
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1:])
