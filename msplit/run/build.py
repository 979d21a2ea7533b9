"""Builds of a model: made once, and opened again.

Builds: a model that is compiled once, kept on the disk with all that it takes to run, and ready again in a second or two.

Opening builds: what is on the disk is verified, brought to the device, and runs.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.assignment.model import DisplayMixin, Facts, opened
from msplit.core import arguments
from msplit.core.arguments import Precision, listed, whole
from msplit.engines.base import Arrays, Executable, Job, timed
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions, SharedRows
from msplit.engines.user_rows import taken_rows
from msplit.errors import Closed, EngineError, LoadError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import build as files
from msplit.formats.build import KERNELS, WEIGHTS, Bucket, Manifest
from msplit.formats.files import open_regular
from msplit.inputs.reference import Reference, load_reference, packed_reference
from msplit.opset.traits import written
from msplit.progress import Progress, phase, prepared, silent, timing
from msplit.run.buckets import Buckets, Lengths, RowProof, rows_of
from msplit.run.prepare import Ready, WithLengths, make_ready
from msplit.run.renew import making_beside
from msplit.run.request import BuildOptions, RunRequest, refuse_exclusions, request_of
from msplit.run.runner import Runner, runner_of
from msplit.run.variants import as_recorded
from msplit.shapes.infer import stated_shapes
from msplit.verify.compare import compare, computed_in, held_to
from msplit.verify.results import OutputCheck, ValueUpdate

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import Opened, Packed, Renewal, Restored, Weights


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
        batches = ", ".join(str(bucket.batch) for bucket in self.manifest.rungs if bucket.batch is not None)
        return [("build", str(self.path)), ("runs", self.manifest.label), ("batches", batches or "as the model says")]


@dataclass(frozen=True, eq=False)
class Made:
    """A model that is compiled, with all that it takes to run, in memory.

    Attributes:
        manifest: What it says of itself; it names no files.
        packed: What runs, by the name of its program.
        references: Likewise inputs, for some rows at least, and outputs of a step.
        jobs: Likewise what it was made of.
    """

    manifest: Manifest
    weights: Weights
    packed: Mapping[str, Packed]
    references: Mapping[str, Reference]
    jobs: Mapping[str, Job]


def build(
    flat: FlatGraph | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    batches: Sequence[int] = (),
    lengths: Sequence[int] = (),
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
        lengths: Sizes of an unknown second dimension, as for `prepare`; each batch is compiled for each.
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
    made = make(flat, request, batches=batches, lengths=lengths, progress=progress)
    packed = dict[str, bytes]()
    for bucket in made.manifest.rungs:
        one = made.packed[bucket.program]
        packed |= {f"{KERNELS}/{name}": data for name, data in one.kernels.items()}
        packed[bucket.program] = one.program
        packed[bucket.reference] = packed_reference(made.references[bucket.program])
        packed |= {name or _host_file(bucket): data for name, data in one.host_files().items()}
    return Build(path, files.write(path, made.manifest, packed, made.weights.pieces(), force=force))


def _host_file(bucket: Bucket) -> str:
    """The file that says what the host runs around a bucket; there is none where it runs nothing."""
    return f"{Path(bucket.program).stem}.host.json"


def make(
    flat: FlatGraph,
    request: RunRequest | None = None,
    *,
    batches: Sequence[int] = (),
    lengths: Sequence[int] = (),
    progress: Progress | None = None,
) -> Made:
    """What `build` does before it writes, on the first of the request's GPUs. A model may have a part that the host runs.

    Raises:
        EngineError: See `build`.
    """
    _check_batches(flat, request, batches)
    _refuse_to_train(flat)
    request = request or RunRequest()
    check_lengths(request, lengths)
    request = replace(request, engine="cuda", devices=request.devices[:1])  # it runs on whichever it is opened on
    request, said = as_recorded(flat, request)
    own, sizes = flat, list[int | None](sorted(set(batches))) or [request.workload.batch or (1 if lengths else None)]
    builds, references, buckets = ENGINE.builds(request.places[0]), dict[str, Reference](), list[Bucket]()
    packed: dict[str, Packed] = {}
    jobs: dict[str, Job] = {}
    precision = Precision(request.precision).on(gpu=request.device != "cpu")
    chosen: list[tuple[str, str, tuple[str, ...]]] = []
    with timing() as phases, ExitStack() as stack:
        several = stack.enter_context(WithLengths.of(own, lengths, request))
        flat, wanted = several.flat, [(batch, length) for length in several.lengths for batch in sizes]
        for number, (batch, length) in enumerate(wanted, 1):
            sized = request.sized(batch=batch)
            ready = make_ready(flat, several.sized(sized, length), progress=progress)
            with ready.runner as runner:
                (progress or silent)("packing", number / len(wanted))
                with phase("packing"):
                    bucket = _bucket(number, batch, runner, ready.chosen.job.feeds)
                    job = ready.chosen.job
                    packed[bucket.program] = builds.pack(ENGINE.compile(job), job, runner.executable)
                    references[bucket.program], jobs[bucket.program] = (
                        _reference(ready, precision, computed_in(flat)),
                        job,
                    )
                if length:
                    several.check(ready, sized, length)
                buckets.append(bucket)
                chosen.append((runner.label, ready.why, runner.notes))
            ENGINE.forget(flat)
    prepared(own.model.path)
    rows, mixes = rows_of(flat, ready.setup.request)
    label, why, _ = chosen[-1]
    said = (*said, *_about_host(packed.values()))
    manifest = Manifest(
        made_for=builds.made_for,
        model=str(own.model.source),
        digest=formats.graph_hash(own.model) if own.model.graph_def is not None else "",
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
        rungs=tuple(buckets),
        preparation={one.phase: one.seconds for one in phases.stop().phases},
        files={},
        method=own.model.method,
        tables=builds.weights.sizes[1],
        lengths=several.about if lengths else None,
    )
    return Made(manifest, builds.weights, packed, references, jobs)


def _about_host(packed: Iterable[Packed]) -> Iterator[str]:
    """A note on what TensorFlow runs, where there is such."""
    hosts = [one.host for one in packed if one.host is not None]
    needs = {op: names[:1] for host in hosts for op, names in host.in_tensorflow.items()}
    if needs:
        listed_ops = ", ".join(" ".join([op, *(f"({name})" for name in names)]) for op, names in sorted(needs.items()))
        yield f"TensorFlow runs the host's part, and must be installed where a build is opened: {listed_ops}"


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


def check_lengths(request: RunRequest, lengths: Sequence[int]) -> None:
    """Refuses what several lengths do not go with. Of GPUs each has all of them, and each of them may be tuned."""
    if lengths:
        given = {name: value for name, value in request.given.items() if name not in ("devices", "tune")}
        refuse_exclusions({**given, "lengths": lengths})


def _refuse_to_train(flat: FlatGraph) -> None:
    """Refuses steps that change variables: a build has constants, and each slot of a pool would have variables of its own."""
    found = [name for name, op in zip(flat.graph.names, flat.graph.ops, strict=True) if written(op)]
    if found:
        more = f" and {len(found) - 1} more" if found[1:] else ""
        raise EngineError(
            f"a step of the model changes variables (in {found[0]}{more}): it can be trained, but not be built or shared by requests",
            where=str(flat.model.source),
            fix="name the tensors that requests want with --part outputs=; `msplit train` and msplit.Trainer train it",
        )


def _reference(ready: Ready, precision: Precision, computed: Mapping[str, str]) -> Reference:
    """What a step gives: as the reference has it, where its inputs are small; else what this one gives, which is verified, for a few rows.

    The rows are repeated when it is read. What is opened is held to it as closely as this step, and other right ones, came.
    """
    feeds, known = ready.chosen.job.feeds, ready.setup.reference
    ready.runner.executable.load_state({})  # what is opened draws the numbers of a first step
    few = feeds
    if sum(value.nbytes for value in feeds.values()) > LARGEST_REFERENCE:
        few = {name: _first_rows(value, LARGEST_REFERENCE // len(feeds)) for name, value in feeds.items()}
        few |= _of_users(ready.chosen.job.options.shared, feeds, few)
        feeds, known = {name: np.resize(value, feeds[name].shape) for name, value in few.items()}, None
    outputs = ready.runner.step(feeds)
    own = known or Reference(few, outputs, _ITSELF)
    checks = [one.comparison for one in ready.runner.checks if one.precision == precision.value]
    checks.append(compare(outputs, own.outputs, precision=precision, computed=computed))
    found = [(one.name, one.needed) for check in checks for one in check.outputs if math.isfinite(one.needed)]
    return replace(own, needed={name: max(one for other, one in found if other == name) for name, _ in found})


def _of_users(shared: SharedRows | None, feeds: Arrays, few: Arrays) -> Arrays:
    """Of inputs that are shared, the same rows of all, from each user if there are enough: else these would be of more users, repeated."""
    if shared is None or shared.users == 1:
        return {}
    entries, rows = dict(shared.entries), shared.rows(feeds)
    kept = max(min(len(few[name]) // entries[name] for name in shared.inputs), 1)
    numbers = np.arange(kept) * rows // kept
    return {name: taken_rows(feeds[name], numbers, entries[name]) for name in shared.inputs}


def _first_rows(value: NDArray[Any], most: int) -> NDArray[Any]:
    """As many rows as there are in so many bytes, but one at least."""
    if not value.ndim or value.nbytes <= most:
        return value
    return value[: max(most * len(value) // value.nbytes, 1)]


def _bucket(number: int, batch: int | None, runner: Runner, feeds: Arrays) -> Bucket:
    with phase("timing steps"):
        times = runner.executable.device_times(STEPS) if runner.facts.get("captured") else None
        host = [timed(partial(runner.executable.step, feeds)) for _ in range(STEPS)]
    return Bucket(
        batch=batch,
        inputs={name: value.shape for name, value in feeds.items()},
        program=f"{number}.json",
        reference=f"{number}.npz",
        streams=int(runner.facts.get("streams", 1)),
        kernels=int(runner.facts.get("kernels", 0)),
        step_us=statistics.median(times) * 1e6 if times else None,
        host_us=statistics.median(host) * 1e6,
    )


def open(
    path: str | os.PathLike[str], *, strict: bool = False, verify: bool = True, progress: Progress | None = None
) -> Runner:
    """Makes a build run.

    A build is a program: it holds machine code, and runs. Open none that you have not made or do not trust; see `docs/security.md`.

    Args:
        path: The folder that `build` made.
        strict: Refuse a build that was made for another GPU or other versions. Otherwise its kernels are chosen and compiled anew, which
            takes as long as the first time; weights, ops and streams stay.
        verify: Run one step of each batch and hold it against the outputs that the build has.
        progress: Told what is being done.

    Raises:
        LoadError: It is no build, is damaged, or somebody else may write to it.
        EngineError: It can not run here, or gives other outputs than it should.
    """
    tell = progress or silent
    with timing() as phases:
        tell("reading the build", 0.0)
        loaded = load(path, strict=strict)
        manifest, references = loaded.manifest, loaded.references
        running = dict[str, Executable]()
        try:
            for bucket in reversed(manifest.rungs):  # the largest is captured first: the others find room in its memory
                with _whole_or_not(path):
                    running[bucket.program] = loaded.opened.run(loaded.restored[bucket.program])
            checks = []
            for number, bucket in enumerate(manifest.rungs if verify else ()):
                tell("verifying", number / len(manifest.rungs))
                with phase("verifying outputs"):
                    checks.append(verify_step(running[bucket.program].step, references[bucket.program], manifest))
        except BaseException:
            for executable in running.values():
                executable.close()
            raise
        prepared(os.fspath(path))
    unverified = () if verify else ("outputs were not verified when the build was opened",)
    largest, about = manifest.rungs[-1].program, manifest.lengths
    with _whole_or_not(path):
        executable, proof = _by_length(loaded, running)
    runner = runner_of(
        running[largest] if len(running) == 1 and about is None else executable,
        {name: value for name, value in references[largest].feeds.items() if about is None or name != about.name},
        rows=proof,
        label=manifest.label,
        why=f"{os.fspath(path)} is a build for it",
        outputs=manifest.outputs,
        checks=tuple(checks),
        notes=(*manifest.notes, *loaded.notes, *unverified),
    )
    runner.preparation = phases.stop()

    def renews(source: Any, rows: Any) -> ValueUpdate:
        with making_beside(loaded.place, lambda: runner.turn.count):
            renewal, found = values_of(loaded, source, rows)
        with runner.turn:
            if runner.renews is None:
                raise Closed("the model is closed", fix="prepare or open it again")
            renewal.take_over()
        return ValueUpdate(renewal.bytes, False, tuple(found))

    runner.renews = renews
    return runner


def _by_length(loaded: LoadedBuild, running: Mapping[str, Executable]) -> tuple[Executable, RowProof | None]:
    """What runs any batch of a build; where it has several lengths any of these, and no rows beside."""
    manifest, made, about = loaded.manifest, dict[int, Buckets](), loaded.manifest.lengths
    lengths = [0 if about is None else bucket.inputs[about.inputs[0]][1] for bucket in manifest.rungs]
    for length in dict.fromkeys(lengths):
        some = {one.batch or 0: one.program for one, of in zip(manifest.rungs, lengths, strict=True) if of == length}
        *_, last = some.values()
        proof = RowProof.of(manifest.rows, manifest.mixes, loaded.references[last].feeds, loaded.restored[last].shared)
        made[length] = Buckets({batch: running[one] for batch, one in some.items()}, proof)
    return (made[0], proof) if about is None else (Lengths(made, about), None)


def values_of(loaded: LoadedBuild, source: Any, rows: Any) -> tuple[Renewal, list[OutputCheck]]:
    """Brings the values of another build beside those of a build that is loaded, and verifies them by its stored answers.

    Raises:
        EngineError: It is a build of another model, for another machine, or gives other outputs than it should.
        LoadError: It is no build.
    """
    if rows or not isinstance(source, str | os.PathLike):
        raise EngineError(
            "a build takes the values of another build, and no variables",
            fix="build the model with them, and give that",
        )
    new, checks = load(source, loaded.place, strict=True), list[OutputCheck]()
    renewal, manifest = ENGINE.builds(new.place).renewal, new.manifest
    buckets = [[(one.batch, one.inputs) for one in each.manifest.rungs] for each in (loaded, new)]
    if buckets[0] != buckets[1]:
        raise EngineError("the build has other batches", where=os.fspath(source), fix="build it with the same ones")
    hosts = [[each.manifest.files.get(_host_file(one)) for one in manifest.rungs] for each in (loaded, new)]
    if hosts[0] != hosts[1]:  # the files name tables and vocabularies by what is in them
        what = "the part that the host runs has other values in the build, and keeps the old ones"
        raise EngineError(what, where=os.fspath(source), fix="open that build, then close this one")
    options = EngineOptions(device=new.place, measure=manifest.measured)
    for bucket in manifest.rungs:
        one = new.restored[bucket.program]
        made = renewal.beside(one.compiled, one.plan, options, ieee=Precision(manifest.precision).ieee)
        with closing(made) as running:
            checks.append(verify_step(running.step, new.references[bucket.program], manifest))
    programs = [[each.restored[one.program].compiled.program for one in each.manifest.rungs] for each in (loaded, new)]
    return renewal.Renewal.of(*programs), checks


@dataclass(frozen=True, eq=False)
class LoadedBuild:
    """A build on its device, not yet running.

    Attributes:
        references: By program, inputs and outputs of one step.
        notes: What differs from what it was made for.
        opened: What makes its buckets run.
        restored: By program, what it makes run.
        place: Its device.
    """

    manifest: Manifest
    references: Mapping[str, Reference]
    notes: tuple[str, ...]
    opened: Opened
    restored: Mapping[str, Restored]
    place: str


def load(path: str | os.PathLike[str], device: str = "", *, strict: bool = False) -> LoadedBuild:
    """Reads a build, and brings its weights and kernels to a device, such as ``cuda:1``; by default the current one. See `open`."""
    folder = arguments.path(path)
    with phase("reading the build"):
        manifest = files.read(folder)
        memory = files.verify(folder, manifest)
    kind = "cpu" if manifest.made_for.get("device") == "cpu" else "cuda"
    if kind == "cuda" and (why := ENGINE.unavailable()):
        raise EngineError(f"the build can not run here: {why}", where=str(folder), fix="see `msplit doctor`")
    place = kind + device[len(device.partition(":")[0]) :]
    if why := ENGINE.unavailable([place]):
        raise EngineError(why, where=str(folder), fix="see `msplit doctor`; CUDA_VISIBLE_DEVICES may hide some")
    tables = dict[int, NDArray[np.uint8]]()
    if memory is None:
        with _whole_or_not(folder), phase("loading weights"), open_regular(folder / WEIGHTS) as file:
            # Of tables that stay in the host's memory there is no second copy but the system's own of the file.
            tables[0] = np.memmap(file, np.uint8, "r")[-manifest.tables :]
            memory = np.memmap(file, np.uint8, "c")[: -manifest.tables]
    return _bring(folder, manifest, memory, tables, place, strict=strict)


def _bring(
    folder: Path,
    manifest: Manifest,
    memory: NDArray[np.uint8],
    tables: Mapping[int, NDArray[np.uint8]],
    device: str,
    *,
    strict: bool,
) -> LoadedBuild:
    """Brings a build that was read to a device."""
    builds = ENGINE.builds(device)
    differs = _differences(manifest.made_for, builds.made_for)
    serious = {name: text for name, text in differs.items() if name not in builds.harmless}
    if serious and strict:
        raise EngineError(
            f"the build is for another machine: {'; '.join(serious.values())}",
            where=str(folder),
            fix="build it here, or open it without `strict`: its kernels are then chosen and compiled anew",
        )
    notes = [f"the build was made elsewhere ({'; '.join(differs.values())})"] if differs else []
    if serious:
        notes[0] += ": its kernels were chosen and compiled anew"
    options = EngineOptions(device=device, capture=manifest.capture, measure=manifest.measured)
    with _whole_or_not(folder):
        with phase("loading weights"):
            opened = builds.open(
                memory,
                folder / KERNELS,
                options,
                ieee=Precision(manifest.precision).ieee,
                fits=not serious,
                tables=tables,
                name=manifest.files[WEIGHTS][1],
            )
        notes += opened.notes
        restored, references = {}, dict[str, Reference]()
        for bucket in manifest.rungs:
            with phase("loading kernels"):
                found = whole_reference(load_reference(folder / bucket.reference), bucket, manifest.computed)
                references[bucket.program] = found
                feeds, host, place = found.feeds, None, _host_file(bucket)
                if place in manifest.files:
                    host = builds.host_part(
                        (folder / place).read_bytes(), lambda name: _file(folder, manifest, name), str(folder)
                    )
                    feeds, _ = host.run(feeds)
                restored[bucket.program] = opened.restore((folder / bucket.program).read_bytes(), feeds, host)
    return LoadedBuild(manifest, references, tuple(notes), opened, restored, device)


def _file(folder: Path, manifest: Manifest, name: str) -> bytes:
    """The bytes of a file that the manifest names, and that was held against its hash."""
    if name not in manifest.files:
        raise ValueError(f"{name} is no file of the build")
    return (folder / name).read_bytes()


@contextmanager
def _whole_or_not(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says of what comes of reading what is no build that it is damaged."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as problem:
        raise LoadError(
            f"the build is damaged: {type(problem).__name__}", where=os.fspath(path), fix="build it anew, with --force"
        ) from problem


def whole_reference(reference: Reference, bucket: Bucket, computed: Mapping[str, str]) -> Reference:
    """A reference with its rows repeated, where only a few were kept.

    Raises:
        ValueError: The bucket's inputs are not these rows repeated. They are asked first: a damaged size may be one of terabytes.
    """
    for name, value in reference.feeds.items():
        shape = tuple(bucket.inputs[name])
        most = len(value) * (bucket.batch or 1) if shape else 0
        if shape != value.shape and not (shape[1:] == value.shape[1:] and len(value) <= shape[0] <= most):
            raise ValueError(f"{name} has the shape {list(shape)}, and its reference {list(value.shape)}")
    feeds = {name: np.resize(value, bucket.inputs[name]) for name, value in reference.feeds.items()}
    return replace(reference, feeds=feeds, computed=computed)


def _differences(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """What a build was made for and is not here, in words."""
    names = {**there, **here}
    return {
        name: f"{name} {there.get(name) or 'none'}, here {here.get(name) or 'none'}"
        for name in names
        if there.get(name, "") != here.get(name, "")
    }


def verify_step(step: Callable[[Arrays], Arrays], reference: Reference, manifest: Manifest) -> OutputCheck:
    """One step against its reference.

    Raises:
        EngineError: It gives other outputs.
    """
    precision = Precision(manifest.precision).on(gpu=manifest.made_for.get("device") != "cpu")
    made = step(reference.feeds)
    if manifest.tables:
        made = step(reference.feeds)  # rows that the first step read from the host are in the cache now
    found = compare(made, reference.outputs, precision=precision, computed=reference.computed)
    found = held_to(found, reference.needed, precision)
    if not found.passed:
        raise EngineError(
            f"it gives other outputs than {reference.source}:",
            details=found.describe().splitlines(),
            fix="build it anew, with --force",
        )
    return OutputCheck(reference.source, precision, 1, found)
