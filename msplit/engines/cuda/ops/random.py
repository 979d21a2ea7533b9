"""Stateless random ops: the numbers that TensorFlow gives for the same seed, see `msplit.engines.cuda.kernels.philox`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels import philox
from msplit.engines.cuda.kernels.philox import (
    PhiloxState,
)
from msplit.engines.cuda.ops.axes import integer, integers

# Numbers of the algorithms in TensorFlow's graphs. Where the device may choose, it is Philox on the CPU and the GPU.
_PHILOX = 1
_AUTO = 3

_Draw = Callable[[PhiloxState, int, torch.dtype], Tensor]
_DRAWS: dict[str, _Draw] = {
    "RandomUniform": philox.uniform,
    "RandomNormal": philox.normal,
    "RandomStandardNormal": philox.normal,
    "TruncatedNormal": philox.truncated_normal,
}
_RESERVED_PER_NUMBER = 256


@lowering("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", static=(0, 3))
@lowering("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal", static=(0,))
def stateless_random(node: Node, shape: np.ndarray, *state: Any) -> Tensor:
    """Floats of a distribution, of a seed or (V2) of a key and a counter."""
    return _floats(node, shape, _generator(node, state), _DRAWS[node.op.removeprefix("Stateless").removesuffix("V2")])


@lowering("StatelessRandomUniformIntV2", static=(0, 3))
@lowering("StatelessRandomUniformInt", static=(0,))
def stateless_random_integers(node: Node, shape: np.ndarray, *inputs: Any) -> Tensor:
    """Integers from minval up to, but without, maxval, of a seed or (V2) of a key and a counter."""
    *state, minval, maxval = inputs
    return _integers(shape, _generator(node, state), minval, maxval)


@lowering("StatelessRandomUniformFullIntV2", static=(0, 3))
@lowering("StatelessRandomUniformFullInt", static=(0,))
def stateless_random_words(node: Node, shape: np.ndarray, *state: Any) -> Tensor:
    """Integers over the whole range of their type, of a seed or (V2) of a key and a counter."""
    sizes, dtype = integers(shape), torch_dtype(node.get("dtype", "uint64"))
    words = philox.bits(_generator(node, state), math.prod(sizes), dtype.itemsize == 8)
    return _from_words(words, dtype).reshape(sizes)


def _generator(node: Node, state: Sequence[Any]) -> PhiloxState:
    """Generator of a seed, or of a key, a counter and the number of an algorithm."""
    if len(state) == 1:
        return philox.from_seed(state[0])
    key, counter, algorithm = state
    if integer(algorithm) not in (_PHILOX, _AUTO):
        raise Unsupported(
            f"{node.op} {node.name}: random number algorithm {integer(algorithm)} is not supported, only Philox (1)"
        )
    return philox.from_key(key, counter)


@lowering("_StatefulRandom", static=(0,), own=True)
def stateful_random(node: Node, shape: np.ndarray, *inputs: Tensor) -> Tensor:
    """The numbers that a random op with a state draws in one step, of its seeds and of how many steps there were before.

    Each run of TensorFlow's kernel sets 256 results of the generator aside for every number.
    """
    *limits, steps = inputs
    generator = generator_of_step(node, steps, math.prod(integers(shape)) * _RESERVED_PER_NUMBER)
    if limits:
        return _integers(shape, generator, *limits)
    return _floats(node, shape, generator, _DRAWS[node.attrs["draws"]])


def generator_of_step(node: Node, steps: Tensor, reserved: int) -> PhiloxState:
    """The generator of a random op with a state, behind what that has set aside in the steps before.

    Args:
        node: Has the op's seeds.
        steps: How many steps there were.
        reserved: Results of the generator that are set aside in each.
    """
    seed, seed2 = (torch.full_like(steps, value) for value in node.attrs["seeds"])
    low = steps * reserved
    return PhiloxState(philox.split(seed), (*philox.split(low), *philox.split(seed2)))


@lowering("StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")
def stateless_random_key_counter(node: Node, seed: Tensor) -> tuple[Tensor, ...]:
    """The key and the counter of a seed, and (Alg) the number of the algorithm."""
    found = philox.to_key(philox.from_seed(seed))
    with_algorithm = node.op.endswith("Alg")
    return (*found, torch.full((), _PHILOX, dtype=torch.int32, device=seed.device)) if with_algorithm else found


@lowering("StatelessRandomGetAlg")
def stateless_random_algorithm(node: Node) -> Tensor:
    """The number of the algorithm; on the CPU, since there is no input whose device it could be on."""
    return torch.tensor(_PHILOX, dtype=torch.int32)


@lowering("StatelessMultinomial", static=(1,))
def stateless_multinomial(node: Node, logits: Tensor, num_samples: np.ndarray, seed: Tensor) -> Tensor:
    """Classes drawn by the logarithms of their probabilities, rows one after the other, as one thread of TensorFlow's CPU kernel does."""
    count, (rows, classes) = integer(num_samples), logits.shape
    finite = logits.isfinite()
    largest = logits.masked_fill(~finite, -torch.inf).amax(1, keepdim=True)
    sums = (logits - largest).double().exp().masked_fill(~finite, 0).cumsum(1)
    drawn = philox.uniform(philox.from_seed(seed), rows * count, torch.float64).reshape(rows, count) * sums[:, -1:]
    found = torch.searchsorted(sums, drawn, right=True)
    return found.clamp(max=classes - 1).to(torch_dtype(node.get("output_dtype", "int64")))


def _floats(node: Node, shape: np.ndarray, generator: PhiloxState, draw: _Draw) -> Tensor:
    sizes = integers(shape)
    return draw(generator, math.prod(sizes), torch_dtype(node.get("dtype", "float32"))).reshape(sizes)


def _integers(shape: np.ndarray, generator: PhiloxState, minval: Tensor, maxval: Tensor) -> Tensor:
    sizes = integers(shape)
    dtype = minval.dtype
    wide = dtype.itemsize == 8
    low, high = _as_words(minval), _as_words(maxval)
    span = high - low if wide else (high - low) & 0xFFFFFFFF
    numbers = philox.bits(generator, math.prod(sizes), wide)
    return _from_words(philox.unsigned_remainder(numbers, span) + low, dtype).reshape(sizes)


def _as_words(number: Tensor) -> Tensor:
    """An integer as 64 bits, since PyTorch does not compute with unsigned words."""
    return number.view(torch.int64) if number.dtype == torch.uint64 else number.to(torch.int64)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """64 bits cut down to the integer type."""
    return (words if dtype.itemsize == 8 else words.to(torch.int32)).view(dtype)
