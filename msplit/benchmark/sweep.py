"""Repeats a bench for several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msplit.benchmark.benchmark import bench_for
from msplit.benchmark.results import BatchSweep, Bench
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress
from msplit.run.request import refuse_exclusions
from msplit.run.setup import BenchRequest


def sweep(
    flat: FlatGraph, request: BenchRequest, batches: Sequence[int], *, progress: Progress | None = None
) -> BatchSweep:
    """Measures a model with each of several batches, one after the other. See `bench`.

    What one batch can not do, such as fit into memory, does not lose what the others gave.

    Args:
        request: What to run. It can have no reference, no plan and no tuning: these are for one batch.
        batches: Sizes of unknown leading dimensions.

    Raises:
        MsplitError: The request does not go with several batches, or none of them could be run.
    """
    refuse_exclusions({**request.given, "batches_in_turn": batches})
    if len(batches) > 1 and not any(end.shape is None or None in end.shape for end in flat.model.inputs):
        raise MsplitError(
            "no input has an unknown size, so every batch would measure the same", fix="leave the batches out"
        )
    runs: dict[int, Bench] = {}
    failed: dict[int, str] = {}
    for number, batch in enumerate(dict.fromkeys(batches)):

        def tell(what: str, share: float, number: int = number, batch: int = batch) -> None:
            if progress is not None:
                progress(f"batch {batch}: {what}", (number + share) / len(batches))

        try:
            runs[batch] = bench_for(flat, replace(request, run=request.run.sized(batch=batch)), progress=tell)
        except EngineError as problem:
            failed[batch] = problem.what
            if not runs and len(failed) == len(set(batches)):
                raise
        finally:
            CUDA.forget(flat)  # programs of this batch
    return BatchSweep(runs, failed)
