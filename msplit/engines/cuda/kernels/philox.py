"""The counter-based random numbers of TensorFlow's stateless ops: Philox 4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). TensorFlow documents that its stateless ops give the
same numbers for the same seed on every device, so these are its numbers, computed with PyTorch's integer arithmetic: on any
device, without reading a value.

Words are held in int64 tensors, which PyTorch computes with everywhere: 32-bit words as 0 to 2**32 - 1, 64-bit words by
their bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# TensorFlow scrambles a seed by one step of the generator under this key.
_SCRAMBLE_KEY = (0x3EC8F720, 0x02461E29)

# A number below this would make the logarithm of the Box-Muller transform too large.
_EPSILON = 1e-7

# TensorFlow gives each number of a truncated normal distribution 256 draws of 32 bits, before those of the next begin.
_RESERVED = 256
_TRUNCATE_AT = 2.0
# Pairs of normal numbers tried per group of four. All but one in 10**30 groups find four within two deviations.
_TRIES = 16


@dataclass(frozen=True)
class PhiloxState:
    """A generator's state.

    Attributes:
        key: Its two 32-bit words.
        counter: Its four 32-bit words, least significant first. Scalars, as are the words of the key.
    """

    key: tuple[Tensor, Tensor]
    counter: tuple[Tensor, Tensor, Tensor, Tensor]

    def words(self, first: int, groups: int, step: int = 1, length: int = 1) -> Tensor:
        """Words of `groups` groups, each of `length` results in a row, `step` results apart.

        Args:
            first: Results to skip in front.
            groups: Number of groups.
            step: Results from the start of a group to that of the next.
            length: Results of each group.

        Returns:
            32-bit words of shape (groups, 4 * length).
        """
        device = self.key[0].device
        index = torch.arange(groups, device=device)[:, None] * step + torch.arange(length, device=device) + first
        carry = index
        counter = []
        for word in self.counter:
            total = word + (carry & _WORD)
            counter.append(total & _WORD)
            carry = (carry >> 32) + (total >> 32)
        return torch.stack(_philox(self.key, counter), -1).reshape(groups, 4 * length)


def from_seed(seed: Tensor) -> PhiloxState:
    """The generator of a seed of two numbers, as stateless ops without a key make it."""
    low, high = seed.long().unbind()
    key = [torch.full_like(low, word) for word in _SCRAMBLE_KEY]
    mixed = _philox((key[0], key[1]), [*split(low), *split(high)])
    zero = torch.zeros_like(low)
    return PhiloxState((mixed[0], mixed[1]), (zero, zero, mixed[2], mixed[3]))


def from_key(key: Tensor, counter: Tensor) -> PhiloxState:
    """The generator of a key (1 number) and a counter (2 numbers), both uint64."""
    low, high = counter.view(torch.int64)[:2].unbind()
    key_low, key_high = split(key.view(torch.int64)[0])
    return PhiloxState((key_low, key_high), (*split(low), *split(high)))


def to_key(generator: PhiloxState) -> tuple[Tensor, Tensor]:
    """The inverse of `from_key`: key and counter as uint64 tensors."""
    words = generator.counter
    key = _join(*generator.key).reshape(1)
    counter = torch.stack((_join(words[0], words[1]), _join(words[2], words[3])))
    return key.view(torch.uint64), counter.view(torch.uint64)


def bits(generator: PhiloxState, count: int, wide: bool) -> Tensor:
    """`count` random words of 64 bits if `wide`, else of 32."""
    if not wide:
        return generator.words(0, -(-count // 4)).reshape(-1)[:count]
    words = generator.words(0, -(-count // 2)).reshape(-1, 2)
    return _join(words[:, 0], words[:, 1])[:count]


def uniform(generator: PhiloxState, count: int, dtype: torch.dtype) -> Tensor:
    """`count` floats of the dtype, uniform in [0, 1)."""
    if dtype == torch.float64:
        words = generator.words(0, -(-count // 2)).reshape(-1, 2)
        return _double(words[:, 0], words[:, 1])[:count]
    words = bits(generator, count, False)
    if dtype == torch.float32:
        return _float(words)
    # The mantissa's bits behind the exponent of one give a number in [1, 2).
    mantissa, one = (10, 15) if dtype == torch.float16 else (7, 127)
    number = (words & ((1 << mantissa) - 1)) | (one << mantissa)
    return number.to(torch.int16).view(dtype) - 1


def normal(generator: PhiloxState, count: int, dtype: torch.dtype) -> Tensor:
    """`count` floats of the dtype from the standard normal distribution."""
    double = dtype == torch.float64
    return _normals(generator.words(0, -(-count // (2 if double else 4))), double).reshape(-1)[:count].to(dtype)


def truncated_normal(generator: PhiloxState, count: int, dtype: torch.dtype) -> Tensor:
    """`count` floats of the dtype from the standard normal distribution, those beyond two deviations drawn again."""
    double = dtype == torch.float64
    size = 2 if double else 4  # Numbers per group.
    groups = -(-count // size)
    step = (size * _RESERVED + 3) // 4
    length = _TRIES if double else _TRIES // 2
    numbers = _normals(generator.words(0, groups, step, length), double)
    rejected = (numbers.abs() >= _TRUNCATE_AT).to(torch.uint8)
    order = rejected.sort(dim=-1, stable=True).indices[:, :size]
    return numbers.gather(-1, order).reshape(-1)[:count].to(dtype)


def unsigned_remainder(number: Tensor, divisor: Tensor) -> Tensor:
    """The remainder of 64-bit words as unsigned numbers, held by their bits in int64 tensors.

    Half of the number is divided as a signed one, which leaves less than two divisors. Warren, "Hacker's Delight", 9-3.
    """
    sign = torch.full_like(number, torch.iinfo(torch.int64).min)
    positive = divisor.clamp(min=1)
    half = (number >> 1) & torch.iinfo(torch.int64).max
    rest = number - ((half // positive) << 1) * positive
    rest = torch.where((rest ^ sign) >= (positive ^ sign), rest - positive, rest)
    # A divisor of 2**63 and more fits once at most.
    once = torch.where((number ^ sign) >= (divisor ^ sign), number - divisor, number)
    return torch.where(divisor < 0, once, rest)


def _philox(key: tuple[Tensor, Tensor], counter: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds: four words of random bits per counter."""
    a, b, c, d = counter
    left, right = key
    for _ in range(_ROUNDS):
        # Products wrap around in int64, and their bits are right.
        high, low = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (
            ((low >> 32) & _WORD) ^ b ^ left,
            low & _WORD,
            ((high >> 32) & _WORD) ^ d ^ right,
            high & _WORD,
        )
        left, right = (left + _WEYL[0]) & _WORD, (right + _WEYL[1]) & _WORD
    return a, b, c, d


def split(number: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high word of 64 bits."""
    return number & _WORD, (number >> 32) & _WORD


def _join(low: Tensor, high: Tensor) -> Tensor:
    return low | (high << 32)


def _float(word: Tensor) -> Tensor:
    """A float32 in [0, 1) of a word's low 23 bits."""
    return ((word & 0x7FFFFF) | 0x3F800000).to(torch.int32).view(torch.float32) - 1


def _double(first: Tensor, second: Tensor) -> Tensor:
    """A float64 in [0, 1) of 20 bits of the first word and the second word."""
    return (((first & 0xFFFFF) << 32) | second | (1023 << 52)).view(torch.float64) - 1


def _normals(words: Tensor, double: bool) -> Tensor:
    """The normal numbers of each row of words, by Box and Muller: two of two uniform ones."""
    if double:
        quads = words.unflatten(1, (-1, 4))
        first, second = _double(quads[..., 0], quads[..., 1]), _double(quads[..., 2], quads[..., 3])
    else:
        pairs = words.unflatten(1, (-1, 2))
        first, second = _float(pairs[..., 0]), _float(pairs[..., 1])
    radius = (-2 * first.clamp(min=_EPSILON).log()).sqrt()
    angle = 2 * math.pi * second
    return torch.stack((angle.sin() * radius, angle.cos() * radius), -1).flatten(1)
