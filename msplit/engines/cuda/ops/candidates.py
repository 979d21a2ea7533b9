"""Classes drawn for losses over many classes (sampled softmax, noise contrastive estimation), and true classes that are among them."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.philox import bits, uniform, unsigned_remainder
from msplit.engines.cuda.ops.random import generator_of_step

_RESERVED = 2048
"""Words of 32 bits that TensorFlow sets aside for every class that is drawn; a try takes two."""

_SURPRISE = 35.0
"""Natural logarithm of the number of steps of which at most one does not find as many distinct classes as it is to."""

_LOG_UNIFORM = "LogUniformCandidateSampler"


@lowering("_SampleCandidates", own=True)
def sample_candidates(node: Node, true_classes: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The classes that TensorFlow's sampler draws in one step, and how often true classes and those are expected among them.

    Where they are to be distinct, TensorFlow draws until it has as many. Here a fixed number is drawn, of which the first distinct ones
    are taken: so many that they suffice in all but one of 10**15 steps.
    """
    count, size, unique = int(node.attrs["num_sampled"]), int(node.attrs["range_max"]), bool(node.attrs["unique"])
    log_uniform = node.attrs["draws"] == _LOG_UNIFORM
    if unique and count > size:
        raise Unsupported(f"{node.name}: {count} distinct classes of {size}")
    draws = enough(count, size, log_uniform) if unique else count
    generator = generator_of_step(node, steps, count * _RESERVED // 4)
    if log_uniform:
        found = (torch.exp(uniform(generator, draws, torch.float64) * math.log1p(size)).to(torch.int64) - 1) % size
    else:
        found = unsigned_remainder(bits(generator, draws, wide=True), torch.full_like(steps, size))
    tries = None
    if unique:
        found, tries = _first(found, count)

    def expected(classes: Tensor) -> Tensor:
        """TensorFlow computes probabilities in double precision and the rest in single precision."""
        if log_uniform:
            ranks = classes.double()
            chance = (torch.log((ranks + 2) / (ranks + 1)) / math.log1p(size)).float()
        else:
            chance = torch.full_like(classes, 1.0 / size, dtype=torch.float32)
        plain = chance * count
        if tries is None:
            return plain
        return torch.where(tries == count, plain, -torch.expm1(tries.float() * torch.log1p(-chance)))

    return found, expected(true_classes), expected(found)


def _first(drawn: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first distinct ones of what was drawn, in order, and how many tries that took."""
    ordered, order = torch.sort(drawn, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    first = torch.empty_like(new).index_copy_(0, order, new)
    number = first.cumsum(0)
    places = torch.where(first & (number <= count), number - 1, count)
    found = drawn.new_zeros(count + 1).index_copy_(0, places, drawn)[:count]
    return found, (number < count).sum() + 1


@functools.cache
def enough(count: int, size: int, log_uniform: bool) -> int:
    """Number of draws in which so many distinct classes are found, but for one of 10**15 steps.

    Too few are found where all draws are among fewer classes: it is known how many sets of these there are, and how likely the likeliest
    is. And how many are found is rarely far from its mean, since no draw changes it by more than one (McDiarmid). Either is enough.

    Raises:
        Unsupported: TensorFlow sets fewer numbers aside for it.
    """
    last = _ranks(size) if log_uniform else np.asarray([size - 1.0])
    chance = np.log((last + 2) / (last + 1)) / math.log1p(size) if log_uniform else np.asarray([1 / size])
    alike = np.diff(last, prepend=-1.0)
    sets = math.lgamma(size + 1) - math.lgamma(count) - math.lgamma(size - count + 2)
    among = math.log(count) / math.log1p(size) if log_uniform else (count - 1) / size
    draws = count
    while draws <= count * _RESERVED // 2:
        missing = float(alike @ np.exp(draws * np.log1p(-np.minimum(chance, 1 - 1e-16))))
        spare = size - missing - count
        if not among or sets + draws * math.log(among) < -_SURPRISE or (spare > 0 and spare**2 * 2 / draws > _SURPRISE):
            return draws
        draws *= 2
    raise Unsupported(f"{count} distinct classes of {size} take more draws than can be made in a step")


def _ranks(size: int) -> NDArray[np.float64]:
    """Classes up to a size, from the likeliest on: each the last of those that are counted as if they were as rare as it."""
    first = min(size, 1 << 12)
    return np.unique([*range(first), *np.geomspace(first, size, 1 << 12).astype(np.int64) - 1]).astype(np.float64)


@lowering("ComputeAccidentalHits", dynamic=True, unless="padded")
def compute_accidental_hits(node: Node, true_classes: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of true classes that were drawn, too, where among those, and a weight that rules them out. Of equal ones the last is named.

    Padded, there is one for each true class, at place -1 where it was not drawn.
    """
    wanted = true_classes.reshape(-1, 1)
    ranks = torch.arange(1, sampled.shape[0] + 1, device=sampled.device)
    places = torch.where(wanted == sampled, ranks, 0).amax(1) - 1
    rows = torch.arange(true_classes.shape[0], dtype=torch.int32, device=sampled.device)
    rows = rows.repeat_interleave(true_classes.shape[1], output_size=places.shape[0])
    if not node.attrs.get("padded"):
        rows, places = rows[places >= 0], places[places >= 0]
    return rows, places, torch.full_like(places, -torch.finfo(torch.float32).max, dtype=torch.float32)
