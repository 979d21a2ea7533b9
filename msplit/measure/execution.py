"""A model ready to run: what a service calls, after `bench` has said what it gains."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.decide.model import opened
from msplit.decide.shown import Facts, Shown
from msplit.engines.base import Arrays, Executable, HasBuffers, refuse
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.measure.compilation import Compiled, compiled
from msplit.measure.request import BenchRequest
from msplit.measure.results import Check
from msplit.measure.variants import Setup, as_it_runs, plan_label, set_up
from msplit.measure.verified import Running, Variant, Verification, verified
from msplit.progress import Progress, Sums, prepared, silent, timing

_ON_ONE = "TensorFlow runs the model on one stream; several are for the cuda engine"


@dataclass(frozen=True, eq=False, repr=False)
class Runner(Shown):
    """A model that is ready to run, for inputs of fixed shapes. Close it, or use it in a ``with`` statement.

    Threads that call it take turns; for steps side by side make one each.

    Attributes:
        label: What it is called in a bench.
        why: Why this engine.
        inputs: Type and shape of every input by name. Each step takes all of them.
        buffers: An array for every input by name, to be filled in place: what a step is given from here is not copied on the host once
            more, where the engine can spare it. They may be filled again when the step has returned.
        outputs: Names of the outputs that each step gives.
        checks: What its outputs were held against.
        notes: What was done to the assignment, and what was not verified.
        facts: Streams, waits, kernels, bytes: whatever the engine tells.
        preparation: Where the time of `prepare` went: `seconds` in all, and in `phases`, the longest first, what was done (`phase`), its
            own `seconds` and how often (`times`).
    """

    label: str
    engine: str
    why: str
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    buffers: Arrays
    outputs: tuple[str, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]
    executable: Executable
    preparation: Sums = field(default_factory=lambda: Sums(0.0, ()))
    _turn: Lock = field(default_factory=Lock, init=False, repr=False)

    def _facts(self) -> Facts:
        inputs = [(f"input {name}", f"{dtype} {list(shape)}") for name, (dtype, shape) in self.inputs.items()]
        return [("variant", self.label), ("engine", self.engine), *inputs, ("outputs", ", ".join(self.outputs))]

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """One step: arrays in by name, the `buffers` or any others, and arrays of the caller's own back.

        Raises:
            EngineError: An input is missing, or has another type or shape than the one that was prepared.
        """
        # TensorFlow would take other shapes and types, and the cuda engine looks for what it needs only.
        if self.engine == TENSORFLOW.name or len(feeds) != len(self.inputs):
            refuse(feeds, self.inputs)
        with self._turn:
            outputs = self.executable.step(feeds)
        if self.engine == TENSORFLOW.name:  # a session hands out its very constants: who changes one changes the model
            return {name: value.copy() for name, value in outputs.items()}
        return outputs

    def close(self) -> None:
        """Gives streams and memory back. It can not run afterwards."""
        with self._turn:
            self.executable.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prepare(
    flat: FlatGraph | str | os.PathLike[str],
    request: BenchRequest | None = None,
    *,
    variant: str | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Makes a model ready to run, and verifies it once, with the request that `bench` took.

    This executes the model.

    Args:
        flat: From `load`, or where the model is.
        request: As for `bench`: the engine, the largest number of streams, the rules or the plan, batch and shapes. What says how to
            measure is not looked at.
        variant: Label of the variant of the bench to run, or what it were called if all streams asked for were used. By
            default the plan, where there is one, else that of the layers of the bench
            (one stream, streams, fused, grouped, what `auto` takes) which should be the fastest by simulation. TensorFlow runs on one
            stream, where it is the fastest.
        progress: Told what is being done and how much of it is done.

    Raises:
        EngineError: The engine can not run the model, or its outputs are not those of the reference.
        MsplitError: An input does not fit, or there is no such variant.
    """
    request = request or BenchRequest()
    if request.tune is not None:
        raise MsplitError("tuning is for bench", fix="bench with it, write the plan, and prepare with that plan")
    with timing() as phases:
        runner = _prepared(opened(flat), request, variant, progress)
        prepared()
    return replace(runner, preparation=phases.stop())


def _prepared(flat: FlatGraph, request: BenchRequest, variant: str | None, progress: Progress | None) -> Runner:
    """See `prepare`."""
    asked = replace(request, compare_tensorflow=False, save_reference=None, timelines=False)
    # Only what is chosen gets kernels that are timed and compiled. A plan was made for such kernels.
    setup = set_up(flat, asked, sketch=request.plan is None)
    made = compiled(setup, progress)
    sketched = _chosen(setup, made, variant)
    # Streams and larger kernels are held against one stream of plain kernels on changing inputs, as in a bench.
    one = next(one for one in made.variants if one.engine is sketched.engine and one.against is None)
    chosen = as_it_runs(sketched, request)
    how = Verification(setup.fresh, request.settings, setup.reference, progress or silent)
    with verified([chosen] if sketched is one else [one, replace(chosen, against=one.label)], how) as running:
        _refuse_wrong(running)
        ready = running.pop()  # what is still listed is closed
    executable = ready.running
    notes = made.notes if chosen.engine is CUDA or chosen.job.streams > 1 else (_ON_ONE,)
    CUDA.forget(flat)  # weights of other kernels, and in another precision
    return Runner(
        label=chosen.label,
        engine=setup.engine.name,
        why=setup.why,
        inputs={name: (value.dtype.name, value.shape) for name, value in chosen.job.feeds.items()},
        buffers=_buffers(executable, chosen.job.feeds),
        outputs=tuple(output.name for output in flat.outputs),
        checks=tuple(ready.checks),
        notes=(*notes, *setup.unverified),
        facts=executable.facts(),
        executable=executable,
    )


def _refuse_wrong(running: Sequence[Running]) -> None:
    """Raises what is wrong with outputs.

    Raises:
        EngineError: A variant gives other outputs than it must.
    """
    for one in running:
        for check in one.checks:
            if not check.passed:
                raise EngineError(
                    f"{one.variant.label} gives other outputs than {check.against} ({check.precision}):",
                    details=check.comparison.describe().splitlines(),
                    fix="see `msplit bench`, which compares every way to run the model",
                )


def _buffers(executable: Executable, feeds: Arrays) -> Arrays:
    """The executable's own where it has some."""
    own = executable.buffers() if isinstance(executable, HasBuffers) else {}
    return {name: own[name] if name in own else np.array(value) for name, value in feeds.items()}


def _chosen(setup: Setup, made: Compiled, label: str | None) -> Variant:
    """The variant to run.

    Raises:
        MsplitError: There is none of this label.
    """
    if label is not None:
        label = made.labels.get(label, label)
        for one in made.variants:
            if one.label == label:
                return one
        labels = ", ".join(one.label for one in made.variants)
        raise MsplitError(f"there is no variant {label!r}", fix=f"one of: {labels}")
    if setup.engine is not CUDA:
        return made.variants[0]
    if setup.request.plan is not None:
        planned = made.labels[plan_label(setup.request.plan)]
        return next(one for one in made.variants if one.label == planned)
    known = [step for step in made.steps if step.predicted_us is not None]
    if not known:
        return max(made.variants, key=lambda one: one.job.streams)
    best = min(known, key=lambda step: step.predicted_us or 0.0).label
    return next(one for one in made.variants if one.label == best)
