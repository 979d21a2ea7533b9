"""Stateless random ops: the numbers that TensorFlow gives for the same seed, see `msplit.engines.cuda.kernels.philox`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.philox import (
    Generator,
    bits,
    from_key,
    from_seed,
    normal,
    split,
    to_key,
    truncated_normal,
    uniform,
    unsigned_remainder,
)

# Numbers of the algorithms in TensorFlow's graphs. Where the device may choose, it is Philox on the CPU and the GPU.
_PHILOX = 1
_AUTO = 3

_Draw = Callable[[Generator, int, torch.dtype], Tensor]
_DRAWS: dict[str, _Draw] = {
    "StatelessRandomUniform": uniform,
    "StatelessRandomNormal": normal,
    "StatelessTruncatedNormal": truncated_normal,
}
_STATEFUL: dict[str, _Draw] = {
    "RandomUniform": uniform,
    "RandomStandardNormal": normal,
    "TruncatedNormal": truncated_normal,
}
_RESERVED_PER_NUMBER = 256


@lowering("StatelessRandomUniform", "StatelessRandomNormal", "StatelessTruncatedNormal", static=(0,))
def stateless_random(node: Node, shape: np.ndarray, seed: Tensor) -> Tensor:
    """Floats of a distribution, of a seed."""
    return _floats(node, shape, from_seed(seed), _DRAWS[node.op])


@lowering("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", static=(0, 3))
def stateless_random_v2(node: Node, shape: np.ndarray, key: Tensor, counter: Tensor, alg: np.ndarray) -> Tensor:
    """Floats of a distribution, of a key and a counter."""
    _check_algorithm(node, alg)
    return _floats(node, shape, from_key(key, counter), _DRAWS[node.op.removesuffix("V2")])


@lowering("StatelessRandomUniformInt", static=(0,))
def stateless_random_integers(node: Node, shape: np.ndarray, seed: Tensor, minval: Tensor, maxval: Tensor) -> Tensor:
    """Integers from minval up to, but without, maxval, of a seed."""
    return _integers(shape, from_seed(seed), minval, maxval)


@lowering("StatelessRandomUniformIntV2", static=(0, 3))
def stateless_random_integers_v2(
    node: Node, shape: np.ndarray, key: Tensor, counter: Tensor, alg: np.ndarray, minval: Tensor, maxval: Tensor
) -> Tensor:
    """Integers from minval up to, but without, maxval, of a key and a counter."""
    _check_algorithm(node, alg)
    return _integers(shape, from_key(key, counter), minval, maxval)


@lowering("StatelessRandomUniformFullInt", static=(0,))
def stateless_random_words(node: Node, shape: np.ndarray, seed: Tensor) -> Tensor:
    """Integers over the whole range of their type, of a seed."""
    return _words(node, shape, from_seed(seed))


@lowering("StatelessRandomUniformFullIntV2", static=(0, 3))
def stateless_random_words_v2(node: Node, shape: np.ndarray, key: Tensor, counter: Tensor, alg: np.ndarray) -> Tensor:
    """Integers over the whole range of their type, of a key and a counter."""
    _check_algorithm(node, alg)
    return _words(node, shape, from_key(key, counter))


@lowering("_StatefulRandom", static=(0,), own=True)
def stateful_random(node: Node, shape: np.ndarray, *inputs: Tensor) -> Tensor:
    """The numbers that a random op with a state draws in one step, of its seeds and of how many steps there were before.

    Each run of TensorFlow's kernel sets 256 results of the generator aside for every number.
    """
    *limits, steps = inputs
    seed, seed2 = (torch.full_like(steps, value) for value in node.attrs["seeds"])
    low = steps * (math.prod(_sizes(shape)) * _RESERVED_PER_NUMBER)
    generator = Generator(split(seed), (*split(low), *split(seed2)))
    if limits:
        return _integers(shape, generator, limits[0], limits[1])
    return _floats(node, shape, generator, _STATEFUL[node.attrs["draws"]])


@lowering("StatelessRandomGetKeyCounter")
def stateless_random_key_counter(node: Node, seed: Tensor) -> tuple[Tensor, Tensor]:
    """The key and the counter of a seed."""
    return to_key(from_seed(seed))


@lowering("StatelessRandomGetKeyCounterAlg")
def stateless_random_key_counter_algorithm(node: Node, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The key and the counter of a seed, and the number of the algorithm."""
    return (*to_key(from_seed(seed)), torch.full((), _PHILOX, dtype=torch.int32, device=seed.device))


@lowering("StatelessRandomGetAlg")
def stateless_random_algorithm(node: Node) -> Tensor:
    """The number of the algorithm; on the CPU, since there is no input whose device it could be on."""
    return torch.tensor(_PHILOX, dtype=torch.int32)


def _floats(node: Node, shape: np.ndarray, generator: Generator, draw: _Draw) -> Tensor:
    sizes = _sizes(shape)
    return draw(generator, math.prod(sizes), torch_dtype(node.get("dtype", "float32"))).reshape(sizes)


def _integers(shape: np.ndarray, generator: Generator, minval: Tensor, maxval: Tensor) -> Tensor:
    sizes = _sizes(shape)
    dtype = minval.dtype
    wide = dtype.itemsize == 8
    low, high = _as_words(minval), _as_words(maxval)
    span = high - low if wide else (high - low) & 0xFFFFFFFF
    numbers = bits(generator, math.prod(sizes), wide)
    return _from_words(unsigned_remainder(numbers, span) + low, dtype).reshape(sizes)


def _words(node: Node, shape: np.ndarray, generator: Generator) -> Tensor:
    sizes = _sizes(shape)
    dtype = torch_dtype(node.get("dtype", "uint64"))
    return _from_words(bits(generator, math.prod(sizes), dtype.itemsize == 8), dtype).reshape(sizes)


def _as_words(number: Tensor) -> Tensor:
    """An integer as 64 bits, since PyTorch does not compute with unsigned words."""
    return number.view(torch.int64) if number.dtype == torch.uint64 else number.to(torch.int64)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """64 bits cut down to the integer type."""
    if dtype.itemsize == 8:
        return words.view(dtype)
    return words.to(torch.int32).view(dtype)


def _sizes(shape: np.ndarray) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)


def _check_algorithm(node: Node, alg: np.ndarray) -> None:
    if int(alg) not in (_PHILOX, _AUTO):
        raise Unsupported(
            f"{node.op} {node.name}: random number algorithm {int(alg)} is not supported, only Philox (1)"
        )
