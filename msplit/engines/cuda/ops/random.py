"""Ops that draw numbers and classes, by the generator that TensorFlow uses.

Stateless random ops: the numbers that TensorFlow gives for the same seed, see `msplit.engines.cuda.ops.random`.

Classes drawn for losses over many classes (sampled softmax, noise contrastive estimation), and true classes that are among them.

The counter-based random numbers of TensorFlow's stateless ops: Philox 4x32-10.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). TensorFlow documents that its stateless ops give the
same numbers for the same seed on every device, so these are its numbers, computed with PyTorch's integer arithmetic: on any
device, without reading a value.

Words are held in int64 tensors, which PyTorch computes with everywhere: 32-bit words as 0 to 2**32 - 1, 64-bit words by
their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.shape import integer, integers

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
    # Without values one round has the shapes of all, each op of which takes PyTorch a hundred microseconds on `meta`.
    for _ in range(1 if a.is_meta else _ROUNDS):
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


# Numbers of the algorithms in TensorFlow's graphs. Where the device may choose, it is Philox on the CPU and the GPU.
_PHILOX = 1
_AUTO = 3

_Draw = Callable[[PhiloxState, int, torch.dtype], Tensor]
_DRAWS: dict[str, _Draw] = {
    "RandomUniform": uniform,
    "RandomNormal": normal,
    "RandomStandardNormal": normal,
    "TruncatedNormal": truncated_normal,
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
    words = bits(_generator(node, state), math.prod(sizes), dtype.itemsize == 8)
    return _from_words(words, dtype).reshape(sizes)


def _generator(node: Node, state: Sequence[Any]) -> PhiloxState:
    """Generator of a seed, or of a key, a counter and the number of an algorithm."""
    if len(state) == 1:
        return from_seed(state[0])
    key, counter, algorithm = state
    if integer(algorithm) not in (_PHILOX, _AUTO):
        raise Unsupported(
            f"{node.op} {node.name}: random number algorithm {integer(algorithm)} is not supported, only Philox (1)"
        )
    return from_key(key, counter)


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
    return PhiloxState(split(seed), (*split(low), *split(seed2)))


@lowering("StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")
def stateless_random_key_counter(node: Node, seed: Tensor) -> tuple[Tensor, ...]:
    """The key and the counter of a seed, and (Alg) the number of the algorithm."""
    found = to_key(from_seed(seed))
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
    drawn = uniform(from_seed(seed), rows * count, torch.float64).reshape(rows, count) * sums[:, -1:]
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
    numbers = bits(generator, math.prod(sizes), wide)
    return _from_words(unsigned_remainder(numbers, span) + low, dtype).reshape(sizes)


def _as_words(number: Tensor) -> Tensor:
    """An integer as 64 bits, since PyTorch does not compute with unsigned words."""
    return number.view(torch.int64) if number.dtype == torch.uint64 else number.to(torch.int64)


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """64 bits cut down to the integer type."""
    return (words if dtype.itemsize == 8 else words.to(torch.int32)).view(dtype)


_CANDIDATES_RESERVED = 2048
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
    generator = generator_of_step(node, steps, count * _CANDIDATES_RESERVED // 4)
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
    while draws <= count * _CANDIDATES_RESERVED // 2:
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
