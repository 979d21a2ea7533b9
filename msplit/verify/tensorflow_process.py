"""TensorFlow in a process of its own: some options are decided once in a process, so rows with and without them need two.

The values that variables begin with: of the model's checkpoint, or what its initializers give.

Whether a saved reference fits the model and the batch that it is to verify; where no batch is asked for, the file's is taken.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.assignment.model import load
from msplit.engines.base import Arrays, Engine, Executable, Job, TensorFlowOptions, timed
from msplit.engines.process import Process, RemoteError, serve, told
from msplit.engines.table_rows import shareable
from msplit.engines.tensorflow import runtime
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.tensorflow.placed import unplaced
from msplit.engines.tensorflow.session import SessionExecutable
from msplit.engines.variables import storage
from msplit.errors import EngineError, LoadError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import ReadOptions
from msplit.formats.tensors import fits, numpy_dtype
from msplit.inputs.make import composite_inputs, input_specs, make_inputs
from msplit.inputs.reference import Reference
from msplit.opset.traits import VARIABLES
from msplit.progress import phase
from msplit.shapes.registry import shape_text

LONGEST = 600.0
"""Seconds after which what such a process does is given up."""


_SENT = ("ids", "streams", "feeds", "precision", "tensorflow", "op_libraries")
"""Attributes of a job that travel. Its graph does not: where its model is and what was chosen of it do."""


@dataclass(frozen=True)
class OwnProcess(Engine):
    """The tensorflow engine, a process for each job. See `Engine`."""

    name: str = TENSORFLOW.name

    def unavailable(self) -> str | None:
        """Reason why it can not run here, as `Engine` says."""
        return TENSORFLOW.unavailable()

    def device(self, job: Job) -> str:
        """Name of the device."""
        return TENSORFLOW.device(job)

    def build(self, job: Job) -> Executable:
        """Build a job, as `Engine` says. What is built has the clock of its process.

        Raises:
            EngineError: There is no GPU, so that none of these options means anything; or it can not run there.
        """
        if self.device(job) == "CPU":
            raise EngineError("NVIDIA's switches are for GPUs, and TensorFlow sees none", fix="leave them out")
        return TensorFlowProcess(job)


OWN_PROCESS = OwnProcess()


class TensorFlowProcess(Executable):
    """A job in a process of its own. See `Executable`."""

    keeps_state = True

    def __init__(self, job: Job) -> None:
        model = job.flat.model
        self._process = Process("msplit.verify.tensorflow_process", "TensorFlow with other options")
        given = {name: getattr(job, name) for name in _SENT}
        try:
            self._facts = self._ask("build", (model.path, model.choice, given))
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
        """Run a step, as `Executable` says."""
        outputs: dict[str, NDArray[Any]] = self._ask("step", dict(feeds))
        return outputs

    def times(self, count: int) -> list[float]:
        """Time steps."""
        found: list[float] = self._ask("times", count)
        return found

    def launch(self) -> None:
        """One more step on the inputs of the last one."""
        self.times(1)

    def save_state(self) -> Arrays:
        """Values of the variables."""
        state: Arrays = self._ask("save")
        return state

    def load_state(self, state: Arrays) -> None:
        """Set the variables."""
        self._ask("load", dict(state))

    def close(self) -> None:
        """Ends the process."""
        self._process.close()


def build(path: Path, choice: ReadOptions, given: Mapping[str, Any]) -> Executable:
    """Makes a job ready, in the process that runs it. `given` are its attributes (`_SENT`)."""
    options: TensorFlowOptions = given["tensorflow"]
    if options.private_threads:  # read when a device is made
        os.environ["TF_GPU_THREAD_MODE"] = "gpu_private"
        os.environ["TF_GPU_THREAD_COUNT"] = str(options.private_threads)
    flat = load(path, **vars(choice))
    return TENSORFLOW.build(Job(flat=flat, **given))


def main(arguments: Sequence[str]) -> None:
    """Builds what it is told, and runs steps of it until nobody asks any more."""
    built: list[Executable] = []
    last: list[Arrays] = []

    def answer(message: Any) -> Any:
        what, given = message
        try:
            if what == "build":
                built.append(build(*given))
                last.append(given[-1]["feeds"])
                return dict(built[0].facts())
            if what == "step":
                outputs, last[0] = built[0].step(given), given
                return outputs
            if what == "times":
                return [timed(partial(built[0].step, last[0])) for _ in range(given)]
            return built[0].save_state() if what == "save" else built[0].load_state(given)
        except Exception as problem:  # noqa: BLE001  the other process tells it
            return RemoteError.of(problem)

    serve(arguments, answer)
    for executable in built:
        executable.close()


def initial_state(flat: FlatGraph, *, op_libraries: Sequence[Path] = ()) -> dict[str, NDArray[Any]]:
    """The value of each variable before the first step, by the name of its node: see `Placed.variables`.

    A checkpoint with the model (a SavedModel's, or that beside a .meta file) is read without TensorFlow. Otherwise TensorFlow runs the
    initializers, once, on the CPU: those that the file names, or those that TensorFlow calls ``VARIABLE/Assign``. Random ones that have
    no seed get one that follows from their name. Variables of the file that the graph does not need are there, too, where they have a
    value, for the file's saver wants them.

    Args:
        flat: The graph.
        op_libraries: Shared objects with custom TensorFlow ops.

    Raises:
        EngineError: A variable that the graph needs has no value.
        LoadError: The checkpoint is damaged.
    """
    needed, others = variables_of(flat)
    names = (*needed, *others)
    found = _of_checkpoint(flat, needed, names) if names else {}
    if found is None:
        found = _of_initializers(flat, names, op_libraries)
    missing = [name for name in needed if name not in found]
    if missing:
        raise EngineError(
            f"variable {missing[0]!r} has no initial value: no checkpoint is with the model, and no initializer is in the file",
            where=str(flat.model.path),
            fix="put a checkpoint beside it, or give the values: msplit.Trainer(…, state={…}), or --restore PREFIX",
        )
    return found


def variables_of(flat: FlatGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The variables that the graph needs, each by the first of its nodes that refers to it, and the others of its file, which a saver may
    save, too."""
    needed = unplaced(flat).variables
    graph = flat.model.graph
    stored = {
        name: storage(op, name, attrs) or name
        for name, op, attrs in zip(graph.names, graph.ops, graph.attrs, strict=True)
        if op in VARIABLES
    }
    seen = {stored[name] for name in needed}
    others: dict[Any, str] = {}
    for name, where in stored.items():
        if where not in seen:
            others.setdefault(where, name)
    return needed, tuple(others.values())


def _of_checkpoint(flat: FlatGraph, needed: Sequence[str], names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
    """Values in the checkpoint of the model; None where it has none, or not all that the graph needs."""
    model = flat.model
    if not model.is_saved_model and not Path(f"{model.path.with_suffix('')}.index").is_file():
        return None
    try:
        values = formats.variables(model)
    except LoadError:
        if model.is_saved_model:
            return None  # without variables of its own, or of a kind that TensorFlow has to read
        raise
    if not all(name in values for name in needed):
        return None
    found = shareable({name: values[name] for name in names if name in values})
    return {name: np.array(value) if value is values[name] else value for name, value in found.items()}


def _of_initializers(flat: FlatGraph, names: tuple[str, ...], op_libraries: Sequence[Path]) -> dict[str, NDArray[Any]]:
    model = flat.model
    if not model.init_ops:
        assigns = [name for name in (f"{name}/Assign" for name in names) if name in model.graph.index]
        model = replace(model, init_ops=tuple(assigns))
    with phase("initializing variables in TensorFlow"):
        runtime.load_op_libraries(op_libraries)
        config = runtime.session_config(1, cpu_only=True, optimized=False)
        placed = replace(unplaced(flat), variables=names, fetches={}, targets=names[:1])  # no step of it runs
        with closing(SessionExecutable(model, placed, config, ieee=True, facts={})) as session:
            return session.save_state()


_TRIED = 4
"""Batches that are tried before the file's shapes are taken one by one."""

Shapes = Mapping[str, tuple[int, ...]]


def fit(
    flat: FlatGraph, reference: Reference, path: Path, *, batch: int | None, shapes: Shapes
) -> tuple[int | None, Shapes]:
    """The batch and the shapes to run with: those that were asked for or, where none were, those of the reference, read from `path`.

    Raises:
        LoadError: The file is of another model, or of another batch than was asked for.
    """
    _of_this_model(flat, reference, path)
    if batch is None and not shapes:
        return _of_file(flat, reference)
    specs, shaped = input_specs(flat, batch or 1, shapes)
    loose = composite_inputs(flat, specs, batch or 1)
    for spec in specs:
        has = reference.feeds[spec.name].shape
        wanted = shaped.get((spec.node, spec.port))
        if wanted is None or spec.name in loose or fits(has, wanted):
            continue
        option = "--shape" if batch is None or spec.name in shapes else f"--batch {batch}"
        raise LoadError(
            f"the reference has input {spec.name!r} of shape {shape_text(has)}, {option} asks for {shape_text(wanted)}",
            where=str(path),
            fix=f"leave {option.split()[0]} out, then the file says it; or make a reference of these shapes: "
            f"msplit bench MODEL {option if ' ' in option else '--shape …'} --measure save-reference=FILE.npz",
        )
    return batch, shapes


def _of_this_model(flat: FlatGraph, reference: Reference, path: Path) -> None:
    fix = "make one of this model: msplit bench MODEL --measure save-reference=FILE.npz"
    has, wants = set(reference.feeds), {tensor.name for tensor in flat.inputs}
    if has != wants:
        what = f"its inputs are {_listed(has)}, those of the model {_listed(wants)}"
        raise LoadError(f"the reference is of another model: {what}", where=str(path), fix=fix)
    try:
        specs, _ = input_specs(flat, 1, {name: value.shape for name, value in reference.feeds.items()})
    except MsplitError as error:
        raise LoadError(f"the reference is of another model: {error.what}", where=str(path), fix=fix) from error
    for spec in specs:
        there = reference.feeds[spec.name].dtype
        same = there.kind == "O" if spec.dtype == "string" else there == numpy_dtype(spec.dtype)
        if not same:
            name = "string" if there.kind == "O" else there.name
            what = f"its input {spec.name!r} is {name}, that of the model {spec.dtype}"
            raise LoadError(f"the reference is of another model: {what}", where=str(path), fix=fix)


def _of_file(flat: FlatGraph, reference: Reference) -> tuple[int | None, Shapes]:
    """A batch that gives the shapes of the file; else those shapes."""
    found = {name: value.shape for name, value in reference.feeds.items()}
    leading = Counter(shape[0] for shape in found.values() if shape and shape[0] > 0)
    # Rows of sparse and ragged inputs: in the dense shape, and one less than row splits.
    largest = max(leading, default=0)
    for value in reference.feeds.values():
        if value.ndim == 1 and value.dtype.kind == "i" and len(value):
            leading.update(size for size in (int(value[0]), len(value) - 1) if 0 < size <= largest)
    for size, _ in leading.most_common(_TRIED):
        try:
            made = make_inputs(flat, {}, batch=size)
        except MsplitError:  # values that can not be made up come with --input
            break
        if all(made[name].shape == shape for name, shape in found.items()):
            return (None, {}) if size == 1 else (size, {})
    return None, found


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "") or "none"


if __name__ == "__main__":
    main(sys.argv[1:])
