"""Runners: models that are ready to run, step by step, and may be replaced by a better one between two steps."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread, current_thread
from typing import Any

import numpy as np

from msplit import escape
from msplit.assignment.model import DisplayMixin, Facts
from msplit.engines.base import USERS, Arrays, Executable, Feeds, Following, called_with, refuse
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.tensors import as_array
from msplit.errors import Closed, EngineError, WrongShape
from msplit.progress import LOG, Sums
from msplit.run.buckets import Buckets, RowProof
from msplit.verify.results import NewRows, NewValues, OutputCheck, ValueUpdate


@dataclass(frozen=True)
class Improvement:
    """What came of preparing in full.

    Attributes:
        label: What runs now.
        before_us: A step on the device of what ran first, the median of some, without copies of inputs and outputs; None without a GPU.
        after_us: Likewise of what was prepared in full.
        taken: Whether it took over; it did not where its steps are no faster.
    """

    label: str
    before_us: float | None
    after_us: float | None
    taken: bool

    @property
    def gain(self) -> float | None:
        """How many times faster; None without a GPU."""
        return None if self.before_us is None or not self.after_us else self.before_us / self.after_us


class FairLock:
    """A lock that nobody who holds it again and again keeps from who waits: a plain one may be taken back before the other has woken up,
    up to 215 times where it was held for 0.1 ms each time.

    Attributes:
        count: How often it was taken.
    """

    def __init__(self) -> None:
        self._gate, self._held = threading.Lock(), threading.Lock()
        self.count = 0

    def __enter__(self) -> None:
        with self._gate:
            self._held.acquire()
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self._held.release()


@dataclass(eq=False, repr=False)
class Runner(DisplayMixin):
    """A model that is ready to run: call it. Close it, or use it in a ``with`` statement.

    Shapes are fixed, but where rows are independent a step may have any number of them: it is run in several, filled up and cut.

    Threads that call it take turns; for steps side by side make one each.

    Attributes:
        label: What it is called in a bench.
        engine: The engine that runs it.
        why: Why this engine.
        inputs: Type and shape of every input by name. Each step takes all of them.
        buffers: An array for every input by name, to be filled in place: what a step is given from here is not copied on the host once
            more, where the engine can spare it. They may be filled again when the step has returned. Steps that are given other arrays, or
            tensors of the host, write those here. They stay what they are; what takes over later copies them like any others.
        outputs: Names of the outputs that each step gives.
        checks: What its outputs were held against.
        notes: What was done to the assignment, and what was not verified.
        facts: Streams, waits, kernels, bytes: whatever the engine tells.
        executable: What the engine made. Steps take turns on it.
        preparation: Where the time of `prepare` went: `seconds` in all, and in `phases`, the longest first, what was done (`phase`), its
            own `seconds` and how often (`times`).
        rows: How rows are cut and filled up to those of a step; None where that is not known.
        turn: Held for a step, and while something else takes over.
        renews: What `update` calls; None where it can not.
        improved: Of `prepare` with ``improve=True``: what came of it, once it is there; `improved.cancel()` gives it up. What takes over
            replaces `label`, `checks`, `notes`, `facts`, `executable` and `preparation`. None otherwise.
    """

    label: str
    engine: str
    why: str
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    buffers: Arrays
    outputs: tuple[str, ...]
    checks: tuple[OutputCheck, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    executable: Executable
    preparation: Sums = field(default_factory=lambda: Sums(0.0, ()))
    rows: RowProof | None = None
    turn: FairLock = field(default_factory=FairLock, init=False)
    renews: Callable[[NewValues | None, NewRows | None], ValueUpdate] | None = field(default=None, init=False)
    improved: Future[Improvement] | None = field(default=None, init=False)
    _thread: Thread | None = field(default=None, init=False)
    _told: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    def _facts(self) -> Facts:
        inputs = [(f"input {name}", f"{dtype} {list(shape)}") for name, (dtype, shape) in self.inputs.items()]
        return [("variant", self.label), ("engine", self.engine), *inputs, ("outputs", ", ".join(self.outputs))]

    def __call__(self, /, *values: Any, **named: Any) -> dict[str, Any]:
        """One step on inputs by name or, where there is one, by position. Returns and raises what `step` does."""
        return self.step(called_with(self.inputs, values, named))

    def step(self, feeds: Feeds, *, on_device: bool = False, then: Feeds | Following | None = None) -> dict[str, Any]:
        """One step, which is over when this returns.

        Args:
            feeds: By name, the `buffers` or any other arrays, or tensors of any library that speaks DLPack. What is on the GPU does not
                come through the host (but for a model of which a part runs there).
            on_device: Leave outputs on the GPU.
            then: What the next step will be fed, where that is known: arrays are copied to the GPU while this step runs. That step is given
                this very mapping, whose arrays are not changed before; what is wrong with them it says itself. Where another step comes
                first, they were copied in vain. A function that gives it, or None, is called while this step runs. Where GPUs share the
                rows, or TensorFlow runs the model, it is not looked at.

        Returns:
            Outputs by name, of the caller's own: arrays or, `on_device`, PyTorch tensors, which other libraries take by DLPack (outputs
            that the host makes, such as strings, are arrays all the same).

        Raises:
            EngineError: An input is missing, or has another type or shape than the one that was prepared (but for the number of rows, where
                they are independent); or the engine has no device to leave outputs on.
            Closed: It was closed.
        """
        if self.improved is not None and not self._told and self.improved.done():
            self._tell(self.improved)
        # The engine looks for what it needs only.
        if not isinstance(feeds, Mapping) or len(feeds) != len(self.inputs) or USERS in feeds:
            refuse(feeds, self.inputs)
        with self.turn:
            self._refuse_closed()
            executable = self.executable if self.engine != TENSORFLOW.name else _Session(self.executable, self.inputs)
            try:
                return _step(executable, feeds, then, on_device=on_device)
            except WrongShape as problem:
                return _step(self._in_parts(executable, feeds, problem), feeds, then, on_device=on_device)

    def _in_parts(self, executable: Executable, feeds: Feeds, problem: WrongShape) -> Executable:
        """Gives what runs a step of another number of rows than was prepared.

        Raises:
            WrongShape: Rows are not independent, or something else is wrong with the inputs.
        """
        if self.rows is None or isinstance(executable, Buckets):
            raise problem
        found = Buckets({self.rows.batch: executable}, self.rows)
        if found.batch(feeds) == self.rows.batch and self.rows.shared.users == 1:
            raise problem
        if self.rows.counts is None:
            problem.details = (f"they can not be cut or filled up to it: {self.rows.mixes}",)
            raise problem
        return found

    def update(self, source: NewValues | None = None, *, rows: NewRows | None = None) -> ValueUpdate:
        """Gives the model other values, between two steps: each step has either the old ones or the new ones, all of them.

        The model is made again with them beside the steps, and held against TensorFlow (where that is not installed, against plain ops; of
        a build, against its stored answers). Then what differs is copied to where it lies: no graph is captured again.

        Args:
            source: The model with other values or its path, or the path of a checkpoint (without ``.index``), or arrays by the names of
                variables. Of a build another build.
            rows: Rows of variables on top of that: their numbers, and their values.

        Raises:
            EngineError: They are of another model, or give wrong outputs. Nothing has changed then.
            LoadError: They can not be read.
        """
        if self.renews is None:
            raise EngineError("this model takes no other values", fix="prepare or open it anew")
        if source is None and not rows:
            raise EngineError("there are no values", fix="give a model, a checkpoint, or rows")
        return self.renews(source, rows)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("the model is closed", fix="prepare or open it again")

    def _tell(self, improved: Future[Improvement]) -> None:
        """Warns of what went wrong."""
        self._told = True
        if not improved.cancelled() and (problem := improved.exception()) is not None:
            said = escape.line(str(problem))
            warnings.warn(f"{self.label} goes on, prepared with effort fast: {said}", RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Gives streams and memory back, and gives up what would improve it. It can not run afterwards."""
        if self.improved is not None:
            self.improved.cancel()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join()
        with self.turn:
            self._closed, self.renews = True, None
            self.executable.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_over(self, better: Runner) -> None:
        """Runs what another one ran from the next step on. In a turn."""
        self.label, self.checks, self.notes = better.label, better.checks, better.notes
        self.facts, self.preparation, self.executable = better.facts, better.preparation, better.executable


def _step(executable: Executable, feeds: Feeds, then: Feeds | Following | None, *, on_device: bool) -> dict[str, Any]:
    if then is not None:
        following: Following = then if callable(then) else lambda: then
        return executable.step_prefetching(feeds, following, on_device=on_device)
    return executable.step_on_device(feeds) if on_device else executable.step(feeds)


@dataclass(frozen=True)
class _Session(Executable):
    """A session of TensorFlow, which would take other shapes and types, and hands out its very constants: who changes one changes the
    model."""

    executable: Executable
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]

    def step(self, feeds: Feeds) -> dict[str, Any]:
        refuse(feeds, self.inputs)
        outputs = self.executable.step({name: as_array(name, value) for name, value in feeds.items()})
        return {name: value.copy() for name, value in outputs.items()}

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        return self.executable.step_on_device(feeds)  # which it refuses


def runner_of(
    executable: Executable, feeds: Arrays, *, outputs: tuple[str, ...], engine: str = "cuda", **told: Any
) -> Runner:
    """A runner of what is ready to run on inputs of such types and shapes; `told` are its other attributes."""
    for note in told.get("notes", ()):
        LOG.info("%s: %s", told.get("label"), escape.line(note))
    return Runner(
        engine=engine,
        inputs={name: (value.dtype.name, value.shape) for name, value in feeds.items()},
        buffers=_buffers(executable, feeds),
        outputs=outputs,
        facts=executable.facts(),
        executable=executable,
        **told,
    )


def _buffers(executable: Executable, feeds: Arrays) -> Arrays:
    """The executable's own where it has some."""
    own = executable.buffers()
    return {name: own[name] if name in own else np.array(value) for name, value in feeds.items()}
