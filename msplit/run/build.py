"""Builds: a model that is compiled once, kept on the disk with all that it takes to run, and ready again in a second or two."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.analysis.rows.proof import independent_rows
from msplit.assignment.model import DisplayMixin, Facts, opened
from msplit.core.arguments import listed, whole
from msplit.engines.base import Arrays, timed
from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import ENGINE
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import build as files
from msplit.formats.build import KERNELS, WEIGHTS, Manifest, Rung
from msplit.inputs.reference import Reference, packed_reference
from msplit.opset.traits import written
from msplit.progress import Progress, phase, prepared, silent, timing
from msplit.run.prepare import Ready, make_ready
from msplit.run.request import BuildOptions, RunRequest, refuse_exclusions, request_of
from msplit.run.runner import Runner
from msplit.run.variants import as_recorded
from msplit.shapes.infer import stated_shapes
from msplit.verify.compare import computed_in

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import Packed, Weights

STEPS = 30
"""Steps that tell how fast a build is."""

LARGEST_REFERENCE = 4 << 20
"""Bytes of inputs that a build keeps for each batch, to verify it with."""

_ITSELF = "itself, when it was built"


@dataclass(frozen=True, eq=False, repr=False)
class Build(DisplayMixin):
    """A build on the disk.

    Attributes:
        path: Its folder.
        manifest: What it says of itself.
    """

    path: Path
    manifest: Manifest

    @property
    def bytes(self) -> int:
        """Of all its files but the manifest."""
        return sum(size for size, _ in self.manifest.files.values())

    @property
    def weight_bytes(self) -> int:
        """Of its weights."""
        return self.manifest.files[WEIGHTS][0]

    def _facts(self) -> Facts:
        batches = ", ".join(str(rung.batch) for rung in self.manifest.rungs if rung.batch is not None)
        return [("build", str(self.path)), ("runs", self.manifest.label), ("batches", batches or "as the model says")]


@dataclass(frozen=True, eq=False)
class Made:
    """A model that is compiled, with all that it takes to run, in memory.

    Attributes:
        manifest: What it says of itself; it names no files.
        packed: What runs, by the name of its program.
        references: Likewise inputs, for some rows at least, and outputs of a step.
    """

    manifest: Manifest
    weights: Weights
    packed: Mapping[str, Packed]
    references: Mapping[str, Reference]


def build(
    flat: FlatGraph | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    batches: Sequence[int] = (),
    force: bool = False,
    progress: Progress | None = None,
    **options: Unpack[BuildOptions],
) -> Build:
    """Makes a model ready to run, as `prepare` does, and keeps it: `msplit.open` has it running again in a second or two.

    This executes the model.

    Args:
        flat: From `load`, or where the model is.
        path: A folder to make.
        batches: Sizes of unknown leading dimensions, in place of one `batch`: each is compiled by itself, with the same weights.
        force: Whether to replace what is there.
        progress: Told what is being done and how much of it is done.
        options: As for `prepare`, on the cuda engine; `tune` searches for the fastest plan first. See `BuildOptions`.

    Raises:
        EngineError: The engine can not run the model, or its outputs are not those of the reference, or a build can not hold it.
        WriteError: The folder can not be written. What was there before is unharmed.
    """
    flat, path, request = opened(flat), Path(path), request_of(build, BuildOptions, options)
    files.check_place(path, force=force)
    _check_batches(flat, request, batches)
    if host := cover(flat, build=False).of_host:
        raise EngineError(
            f"a part of the model runs on the host ({', '.join(host[:5])}), and a build holds only what runs on the GPU",
            fix="prepare it with `msplit.prepare`, or cut that part off with --part inputs= and outputs=",
        )
    made = make(flat, request, batches=batches, progress=progress)
    packed = dict[str, bytes]()
    for rung in made.manifest.rungs:
        one = made.packed[rung.program]
        packed |= {f"{KERNELS}/{name}": data for name, data in one.kernels.items()}
        packed[rung.program] = one.program
        packed[rung.reference] = packed_reference(made.references[rung.program])
    return Build(path, files.write(path, made.manifest, packed, made.weights.pieces(), force=force))


def make(
    flat: FlatGraph,
    request: RunRequest | None = None,
    *,
    batches: Sequence[int] = (),
    progress: Progress | None = None,
) -> Made:
    """What `build` does before it writes, on the first of the request's GPUs. A model may have a part that the host runs.

    Raises:
        EngineError: See `build`.
    """
    _check_batches(flat, request, batches)
    _refuse_to_train(flat)
    request = request or RunRequest()
    request = replace(request, engine="cuda", devices=request.devices[:1])  # it runs on whichever it is opened on
    request, said = as_recorded(flat, request)
    wanted: list[int | None] = [*sorted(set(batches))] or [request.workload.batch]
    builds, references, rungs = ENGINE.builds(request.places[0]), dict[str, Reference](), list[Rung]()
    packed: dict[str, Packed] = {}
    chosen: list[tuple[str, str, tuple[str, ...]]] = []
    with timing() as phases:
        for number, batch in enumerate(wanted, 1):
            ready = make_ready(flat, request.sized(batch=batch), progress=progress)
            with ready.runner as runner:
                (progress or silent)("packing", number / len(wanted))
                with phase("packing"):
                    rung = _rung(number, batch, runner, ready.chosen.job.feeds)
                    job = ready.chosen.job
                    packed[rung.program] = builds.pack(ENGINE.compile(job), job, runner.executable)
                    references[rung.program] = _reference(ready)
                rungs.append(rung)
                chosen.append((runner.label, ready.why, runner.notes))
            ENGINE.forget(flat)
    prepared()
    rows, mixes = rows_of(flat, request)
    label, why, _ = chosen[-1]
    manifest = Manifest(
        made_for=builds.made_for,
        model=str(flat.model.path),
        digest=formats.graph_hash(flat.model) if flat.model.graph_def is not None else "",
        label=label,
        why=why,
        notes=tuple(dict.fromkeys([*said, *(note for _, _, told in chosen for note in told)])),
        precision=request.precision,
        capture=request.capture,
        measured=not request.is_fast,
        outputs=tuple(output.name for output in flat.outputs),
        computed=computed_in(flat),
        rows=rows,
        mixes=mixes,
        rungs=tuple(rungs),
        preparation={one.phase: one.seconds for one in phases.stop().phases},
        files={},
    )
    return Made(manifest, builds.weights, packed, references)


def _check_batches(flat: FlatGraph, request: RunRequest | None, batches: Sequence[int]) -> None:
    """Refuses batches that make no sense, and what no build holds, before any work is done for them."""
    if request is not None and request.split:
        raise MsplitError(
            "builds and pools are for one GPU, and the request splits each step over several",
            fix="prepare it (`msplit.prepare`, `msplit bench --cuda split=`), or leave split out",
        )
    for each in listed("batches", batches):
        if whole("a batch", each, -sys.maxsize) < 1:
            raise MsplitError(f"a batch of {each} has no rows", fix="give batches of one or more")
    if len(set(batches)) > 1:
        if not any(shape is None or shape[:1] == (None,) for shape in stated_shapes(flat).values()):
            raise MsplitError("the model's inputs have the same shapes at every batch", fix="build it without --batch")
        refuse_exclusions({**(request.given if request is not None else {}), "batches": batches})


def _refuse_to_train(flat: FlatGraph) -> None:
    """Refuses steps that change variables: a build has constants, and each arena of a pool would have variables of its own."""
    found = [name for name, op in zip(flat.graph.names, flat.graph.ops, strict=True) if written(op)]
    if found:
        more = f" and {len(found) - 1} more" if found[1:] else ""
        raise EngineError(
            f"a step of the model changes variables (in {found[0]}{more}): it can be trained, but not be built or shared by requests",
            where=str(flat.model.path),
            fix="name the tensors that requests want with --part outputs=; `msplit train` and msplit.Trainer train it",
        )


def _reference(ready: Ready) -> Reference:
    """What a step gives: as the reference has it, where its inputs are small; else what this one gives, which is verified, for a few rows.

    The rows are repeated when it is read.
    """
    feeds, known = ready.chosen.job.feeds, ready.setup.reference
    ready.runner.executable.load_state({})  # what is opened draws the numbers of a first step
    if sum(value.nbytes for value in feeds.values()) <= LARGEST_REFERENCE:
        return known or Reference(feeds, ready.runner.step(feeds), _ITSELF)
    few = {name: _first_rows(value, LARGEST_REFERENCE // len(feeds)) for name, value in feeds.items()}
    whole = {name: np.resize(value, feeds[name].shape) for name, value in few.items()}
    return Reference(few, ready.runner.step(whole), _ITSELF)


def _first_rows(value: NDArray[Any], most: int) -> NDArray[Any]:
    """As many rows as there are in so many bytes, but one at least."""
    if not value.ndim or value.nbytes <= most:
        return value
    return value[: max(most * len(value) // value.nbytes, 1)]


def rows_of(flat: FlatGraph, request: RunRequest) -> tuple[tuple[Mapping[str, int], Mapping[str, int]] | None, str]:
    """Entries per row of inputs and outputs, as `Manifest.rows` has them; or None, and why rows are not independent."""
    try:
        found = independent_rows(flat, shapes=request.workload.shapes)
        found.check()
    except MsplitError as problem:
        return None, "; ".join([problem.what, *problem.details])
    return (found.inputs, found.outputs), ""


def _rung(number: int, batch: int | None, runner: Runner, feeds: Arrays) -> Rung:
    with phase("timing steps"):
        times = runner.executable.device_times(STEPS) if runner.facts.get("captured") else None
        host = [timed(partial(runner.executable.step, feeds)) for _ in range(STEPS)]
    return Rung(
        batch=batch,
        inputs={name: value.shape for name, value in feeds.items()},
        program=f"{number}.json",
        reference=f"{number}.npz",
        streams=int(runner.facts.get("streams", 1)),
        kernels=int(runner.facts.get("kernels", 0)),
        step_us=statistics.median(times) * 1e6 if times else None,
        host_us=statistics.median(host) * 1e6,
    )
