"""Whether to split a model over several GPUs: one judgement, which every command tells in the same words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from msplit.cost.gpus import gpu_title
from msplit.schedule.algorithms import LIST
from msplit.schedule.judge import STREAMS, WORTH
from msplit.schedule.search.choose import best, choose
from msplit.schedule.split.place import Split, splits
from msplit.schedule.split.problem import SplitProblem

_ALL = 20_000
"""Blocks up to which all algorithms are tried for the one GPU that a split is held against."""


@dataclass(frozen=True, eq=False)
class SplitJudgement:
    """What a split is worth.

    Attributes:
        kind: ``nothing`` (no node launches a kernel), ``too large`` (the weights fit on no number of GPUs asked for), ``needed`` (they
            do not fit on one), ``pays`` (it is at least `WORTH` times as fast as one GPU), ``loses``.
        gpus: How many were asked for.
        one_us: Simulated step on one GPU, on the streams that are best there; None where its weights do not fit.
        best: The fastest split that uses several GPUs and fits; None where there is none.
        words: All this, in one to four sentences.
    """

    kind: str
    gpus: int
    one_us: float | None
    best: Split | None
    words: str

    @property
    def helps(self) -> bool:
        """Whether the model should be split."""
        return self.kind in ("needed", "pays")

    @property
    def gain(self) -> float | None:
        """How many times faster the split is than one GPU; None where one of the two is not to be had."""
        return None if self.one_us is None or self.best is None else self.one_us / self.best.makespan_us


def judge_split(split: SplitProblem, gpu: str, *, streams: int = STREAMS) -> SplitJudgement:
    """Simulates one GPU and all ways to use several.

    Args:
        gpu: Name of the data sheet, for the words.
        streams: Most streams of each GPU.
    """
    if not (split.blocks.kernels > 0).any():
        words = f"{split.gpus} GPUs can not help this model: no node launches a kernel."
        return SplitJudgement("nothing", split.gpus, None, None, words)
    one = _one(split, streams) if split.fits_one else None
    found = next((way for way in splits(split, streams) if way.several), None)
    if one is None and found is None:
        return SplitJudgement("too large", split.gpus, None, None, _too_large(split, gpu))
    if one is None:
        assert found is not None
        words = f"The weights, {_size(split.weight_bytes)}, do not fit on one {gpu_title(gpu)} ({_size(split.memory)} for weights). "
        return SplitJudgement("needed", split.gpus, None, found, words + f"On {_told(found, split)}.")
    if found is None or one < WORTH * found.makespan_us:
        return SplitJudgement("loses", split.gpus, one, found, _loses(split, one, found))
    words = (
        f"{split.gpus} GPUs pay for a shorter step: {one / found.makespan_us:.2f}x predicted over one, {one:.0f} µs there. On "
        f"{_told(found, split)}. {_copies_instead(split)}"
    )
    return SplitJudgement("pays", split.gpus, one, found, words)


def _one(split: SplitProblem, streams: int) -> float:
    """A step on the first GPU, what was placed on others before included."""
    problem = split.blocks
    problem = replace(problem, pin=np.where(problem.pin < streams, problem.pin, -1).astype(np.int32))
    names = None if len(split.blocks) <= _ALL else (LIST,)
    return best(choose(problem, streams, names, refining=0)).makespan_us


def _told(found: Split, split: SplitProblem) -> str:
    """What is where, and what crosses."""
    held = " and ".join(_size(bytes) for bytes in found.weights)
    tables = f" ({' and '.join(map(str, found.tables))} tables)" if split.tables else ""
    return f"{split.gpus} GPUs a step takes {found.makespan_us:.0f} µs, with {held} of weights{tables} and {_copies(found)} between them"


def _copies(found: Split) -> str:
    if found.copies == 1:
        return f"one copy of {_size(found.copied)}"
    return f"{found.copies} copies of {_size(found.copied)} in all"


def _loses(split: SplitProblem, one: float, found: Split | None) -> str:
    instead = _copies_instead(split)
    if found is None:
        return f"{split.gpus} GPUs do not pay: no way to use more than one was found. {instead}"
    link = split.link
    price = (
        f"{_copies(found)} between them, {link.copy_us:.0f} µs each beside their bytes, and {link.launch_us:.0f} µs until the next GPU "
        "starts cost more than what runs side by side saves"
    )
    return f"{split.gpus} GPUs do not pay: the best split takes {found.makespan_us:.0f} µs, one GPU {one:.0f}: {price}. {instead}"


def _copies_instead(split: SplitProblem) -> str:
    return f"For more requests per second, a copy of the model on each gives up to {split.gpus}x."


def _too_large(split: SplitProblem, gpu: str) -> str:
    largest = max(split.weights, key=lambda weight: weight.bytes)
    if largest.bytes > split.memory:
        why = f"'{largest.name}' alone takes {_size(largest.bytes)}: divide it by rows (a partitioned variable)"
    else:
        why = f"use {_least(split)} or more"
    return (
        f"{split.gpus} GPUs can not hold this model: its weights take {_size(split.weight_bytes)}, and each "
        f"{gpu_title(gpu)} has {_size(split.memory)} for them; {why}."
    )


def _least(split: SplitProblem) -> int:
    return max(split.gpus + 1, -int(-split.weight_bytes // split.memory))


def _size(bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if bytes >= scale:
            return f"{bytes / scale:.1f} {unit}"
    return f"{bytes / 1e3:.1f} kB"
