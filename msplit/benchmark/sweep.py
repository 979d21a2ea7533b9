"""Repeats a bench for several batch sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msplit.benchmark.benchmark import Bench, bench_for
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress
from msplit.run.exclusions import refuse_exclusions
from msplit.run.request import RunRequest
from msplit.verify.results import VariantResult


@dataclass(frozen=True, eq=False)
class Sweep:
    """Benches of one model by batch, in the order asked for, and why a batch could not be run."""

    runs: Mapping[int, Bench]
    failed: Mapping[int, str]


@dataclass(frozen=True, eq=False)
class Line:
    """One way to run the model, over the batches.

    Attributes:
        name: The variant's label; where that differs from batch to batch, what was asked for.
        variants: Batch -> what was measured; batches where it was left out, or gave wrong outputs, are missing.
    """

    name: str
    variants: Mapping[int, VariantResult]


def sweep(flat: FlatGraph, request: RunRequest, batches: Sequence[int], *, progress: Progress | None = None) -> Sweep:
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
            runs[batch] = bench_for(flat, replace(request, batch=batch), progress=tell)
        except EngineError as problem:
            failed[batch] = problem.what
            if not runs and len(failed) == len(set(batches)):
                raise
        finally:
            CUDA.forget(flat)  # programs of this batch
    return Sweep(runs, failed)


def lines(found: Sweep) -> list[Line]:
    """Each way to run the model, over the batches; ways that ran as the same variants throughout once."""
    names: dict[str, dict[int, str]] = {}
    for batch, run in found.runs.items():
        asked = run.labels or {variant.label: variant.label for variant in run.result.variants}
        for name, label in asked.items():
            names.setdefault(re.sub(r"^(msplit, \w+): .*", r"\1", name), {})[batch] = label
    result: dict[tuple[tuple[int, str], ...], Line] = {}
    for name, labels in names.items():
        key = tuple(labels.items())
        if key in result:
            continue
        used = set(labels.values())
        variants = {}
        for batch, label in labels.items():
            variant = next(one for one in found.runs[batch].result.variants if one.label == label)
            if variant.host is not None:
                variants[batch] = variant
        result[key] = Line(used.pop() if len(used) == 1 else name, variants)
    return list(result.values())
