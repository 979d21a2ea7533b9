"""Measures the speed of a build, beside one stream of the same kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from msplit.benchmark.timing import bench
from msplit.core.arguments import Precision
from msplit.engines.base import Engine, Executable, Job
from msplit.engines.cuda.options import EngineOptions
from msplit.formats.build import Manifest
from msplit.progress import Progress
from msplit.run.open import LoadedBuild, load
from msplit.run.setup import plural
from msplit.verify.results import BenchResult, Settings, Variant


@dataclass(frozen=True, eq=False)
class BuildBench:
    """A measured build.

    Attributes:
        results: By batch, None where the model's inputs have shapes of their own.
        notes: What differs from what it was made for.
    """

    manifest: Manifest
    results: tuple[tuple[int | None, BenchResult], ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """True if outputs are wrong."""
        return any(result.failed for _, result in self.results)


@dataclass(frozen=True, eq=False)
class _OneRung(Engine):
    """Engine that makes one batch of a build run."""

    loaded: LoadedBuild
    program: str
    one_stream: bool
    name: str = "cuda"

    def build(self, job: Job) -> Executable:
        del job  # all is settled
        restored = self.loaded.restored[self.program]
        return self.loaded.opened.run(restored, alone=True, one_stream=self.one_stream)


def bench_build(
    path: str | os.PathLike[str],
    settings: Settings | None = None,
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> BuildBench:
    """Opens a build, verifies and measures each of its batches, and one stream of the same kernels beside it.

    Raises:
        LoadError: It is no build, is damaged, or somebody else may write to it.
        EngineError: It can not run here.
    """
    loaded = load(path)
    settings, manifest = settings or Settings(), loaded.manifest
    found = []
    for rung in manifest.rungs:
        reference = loaded.references[rung.program]
        one = f"msplit, 1 stream of {plural(rung.kernels, 'kernel')}"
        job = Job(
            flat=None,  # type: ignore[arg-type]  # a build has no graph: the reference says what verification needs
            ids=np.zeros(0, np.int32),
            streams=1,
            feeds=reference.feeds,
            options=EngineOptions(measure=False),
            precision=Precision(manifest.precision),
        )
        variants = [Variant(one, _OneRung(loaded, rung.program, True), job)]
        if rung.streams > 1:
            engine = _OneRung(loaded, rung.program, False)
            variants.append(Variant(manifest.label, engine, replace(job, streams=rung.streams), one))
        result = bench(
            variants,
            fresh=lambda seed, feeds=reference.feeds: feeds,  # type: ignore[misc]
            settings=replace(settings, verify_inputs=1),
            reference=reference,
            command=command,
            progress=progress,
        )
        found.append((rung.batch, result))
    return BuildBench(manifest, tuple(found), loaded.notes)
