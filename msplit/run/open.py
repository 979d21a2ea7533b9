"""Opening builds: what is on the disk is verified, brought to the device, and runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from msplit.core import arguments
from msplit.core.arguments import Precision
from msplit.engines.base import Arrays, Executable
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions
from msplit.errors import EngineError, LoadError
from msplit.formats import build as files
from msplit.formats.build import KERNELS, WEIGHTS, Manifest, Rung
from msplit.inputs.reference import Reference, load_reference
from msplit.progress import Progress, phase, prepared, silent, timing
from msplit.run.buckets import Ladder
from msplit.run.runner import Runner, runner_of
from msplit.verify.compare import compare
from msplit.verify.results import OutputCheck

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import Opened, Restored, StepCounter


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
            for rung in reversed(manifest.rungs):  # the largest is captured first: the others find room in its memory
                with _whole_or_not(path):
                    running[rung.program] = loaded.opened.run(loaded.restored[rung.program])
            checks = []
            for number, rung in enumerate(manifest.rungs if verify else ()):
                tell("verifying", number / len(manifest.rungs))
                with phase("verifying outputs"):
                    checks.append(verify_step(running[rung.program].step, references[rung.program], manifest))
        except BaseException:
            for executable in running.values():
                executable.close()
            raise
        prepared()
    unverified = () if verify else ("outputs were not verified when the build was opened",)
    largest = manifest.rungs[-1].program
    batches = {rung.batch or 0: running[rung.program] for rung in manifest.rungs}
    inputs = list(references[largest].feeds)
    runner = runner_of(
        running[largest] if len(running) == 1 else Ladder(batches, manifest.rows, manifest.mixes, inputs),
        references[largest].feeds,
        label=manifest.label,
        why=f"{os.fspath(path)} is a build for it",
        outputs=manifest.outputs,
        checks=tuple(checks),
        notes=(*manifest.notes, *loaded.notes, *unverified),
    )
    runner.preparation = phases.stop()
    return runner


@dataclass(frozen=True, eq=False)
class LoadedBuild:
    """A build on its device, not yet running.

    Attributes:
        references: By program, inputs and outputs of one step.
        notes: What differs from what it was made for.
        opened: What makes its rungs run.
        restored: By program, what it makes run.
    """

    manifest: Manifest
    references: Mapping[str, Reference]
    notes: tuple[str, ...]
    opened: Opened
    restored: Mapping[str, Restored]


def load(path: str | os.PathLike[str], *, strict: bool = False) -> LoadedBuild:
    """Reads a build, holds it against its hashes, and brings its weights and kernels to the device. See `open`."""
    return load_on(path, (), strict=strict)[0]


def load_on(path: str | os.PathLike[str], gpus: Sequence[int], *, strict: bool = False) -> tuple[LoadedBuild, ...]:
    """The same for each of several GPUs; none: the current one."""
    folder = arguments.path(path)
    with phase("reading the build"):
        manifest = files.read(folder)
        files.verify(folder, manifest)
    device = "cpu" if manifest.made_for.get("device") == "cpu" else "cuda"
    if device == "cuda" and (why := ENGINE.unavailable()):
        raise EngineError(f"the build can not run here: {why}", where=str(folder), fix="see `msplit doctor`")
    places = [f"{device}:{number}" for number in gpus] or [device]
    if why := ENGINE.unavailable(places):
        raise EngineError(why, where=str(folder), fix="see `msplit doctor`; CUDA_VISIBLE_DEVICES may hide some")
    with _whole_or_not(folder), phase("loading weights"):
        memory = np.fromfile(folder / WEIGHTS, np.uint8)
    loaded, steps = list[LoadedBuild](), None
    for place in places:
        loaded.append(_bring(folder, manifest, memory, place, steps, strict=strict))
        steps = loaded[0].opened.steps
    return tuple(loaded)


def _bring(
    folder: Path, manifest: Manifest, memory: NDArray[np.uint8], device: str, steps: StepCounter | None, *, strict: bool
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
                steps=steps,
            )
        restored, references = {}, dict[str, Reference]()
        for rung in manifest.rungs:
            with phase("loading kernels"):
                found = whole_reference(load_reference(folder / rung.reference), rung, manifest.computed)
                references[rung.program] = found
                restored[rung.program] = opened.restore((folder / rung.program).read_bytes(), found.feeds)
    return LoadedBuild(manifest, references, tuple(notes), opened, restored)


@contextmanager
def _whole_or_not(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says of what comes of reading what is no build that it is damaged."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as problem:
        raise LoadError(
            f"the build is damaged: {type(problem).__name__}", where=os.fspath(path), fix="build it anew, with --force"
        ) from problem


def whole_reference(reference: Reference, rung: Rung, computed: Mapping[str, str]) -> Reference:
    """A reference with its rows repeated, where only a few were kept."""
    feeds = {name: np.resize(value, rung.inputs[name]) for name, value in reference.feeds.items()}
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
    found = compare(step(reference.feeds), reference.outputs, precision=precision, computed=reference.computed)
    if not found.passed:
        raise EngineError(
            f"it gives other outputs than {reference.source}:",
            details=found.describe().splitlines(),
            fix="build it anew, with --force",
        )
    return OutputCheck(reference.source, precision, 1, found)
