"""Special values for made-up inputs: at them, and seldom elsewhere, a wrong kernel or rewrite shows."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGE = 2.0**8
"""Factor of large values. A power of two leaves the rounding of sums and products as it is. ``exp`` of 88.8 overflows in float32: so a
softmax that does not subtract the maximum gives NaN. Cubes (GELU) and squares of sums over 1,000 values (norms) stay below 1e14, where
float32 is as precise as at 1."""

SMALL = (2.0**-5, 2.0**-8, 2.0**-13, 2.0**-20)
"""Factors of small values, row by row: their variances lie around the epsilons of norms, 1e-3, 1e-5, 1e-8 and 1e-12. Squares stay far above
1.2e-38, below which TensorFlow's kernels flush to zero and others do not."""

LARGE_INTEGER = (1 << 30) + 1
"""Of integers with which is only calculated: twice this wraps around in 32 bits."""

COUNTS = (0, 5, 1, 17, 2, 3)
"""Of such integers otherwise: lengths, 0 among them, and ends of ranges."""

_ROWS = 8
"""Kinds of rows in a set of edges."""


class Name(StrEnum):
    """The kinds of sets."""

    RANDOM = "random"
    ZEROS = "zeros"
    """Numbers and masks are 0, ids are those of a table's first row; sparse and ragged rows are empty and longer than usual by turns."""
    LARGE = "large"
    """Numbers are large, masks are all set, ids are those of the last row; as many sparse and ragged rows as can be are full."""
    SMALL = "small"
    """Numbers are small, row by row; one id repeats. Sparse and ragged rows but the last are as empty as can be."""
    EDGES = "edges"
    """Rows by turns hold steps of a half, one value all along, zeros of both signs, small values, zeros, what the row before holds; ids are
    by turns the ends of a table and of its parts, what is outside of it where that is defined, and any others."""


@dataclass(frozen=True)
class Kind:
    """A kind of sets of made-up inputs.

    Attributes:
        first: Where rows of edges begin: a later set holds what did not fit into the rows of the first.
        apart: Whether inputs begin at another kind of row each.
    """

    name: Name
    first: int = 0
    apart: bool = False

    def shift(self, input_name: str) -> int:
        """Where the rows of an input begin."""
        return self.first + (zlib.crc32(input_name.encode()) % _ROWS if self.apart else 0)


RANDOM = Kind(Name.RANDOM)


def kinds(rows: int) -> tuple[Kind, ...]:
    """All kinds of sets beside random ones, for inputs of so many rows: of few rows there are more sets."""
    edges = (Kind(Name.EDGES, number * max(rows, 1), bool(number % 2)) for number in range(2 if rows >= _ROWS else 4))
    return (Kind(Name.ZEROS), Kind(Name.LARGE), Kind(Name.SMALL), *edges)


@dataclass(frozen=True)
class Fresh:
    """Makes sets of inputs from seeds: random ones, and of these kinds.

    Attributes:
        refused: Names of kinds on which the model does not run, and why: who verifies adds them.
    """

    make: Callable[[int, Kind], Mapping[str, NDArray[Any]]]
    kinds: tuple[Kind, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    def __call__(self, seed: int, kind: Kind = RANDOM) -> Mapping[str, NDArray[Any]]:
        """A set."""
        return self.make(seed, kind)

    def covered(self, seconds: float) -> tuple[str, ...]:
        """A sentence on what was verified, and how long that took; none where there are no kinds."""
        names = list(dict.fromkeys(kind.name.value for kind in self.kinds if kind.name.value not in self.refused))
        left_out = "".join(f"; not on {name}: {why}" for name, why in self.refused.items())
        text = f"verified on {len(self.kinds)} sets of made-up inputs ({', '.join(names)}) in {seconds:.1f} s{left_out}"
        return (text,) if self.kinds else ()


def numbers(drawn: NDArray[Any], kind: Kind, name: str) -> NDArray[Any]:
    """Floating-point numbers of a kind, from standard normal ones."""
    if not drawn.ndim or not drawn.size or kind.name is Name.RANDOM:
        return drawn
    row = np.arange(len(drawn)).reshape(-1, *(1,) * (drawn.ndim - 1))
    if kind.name is Name.SMALL:
        return np.asarray(drawn * np.asarray(SMALL)[row % len(SMALL)])
    if kind.name is not Name.EDGES:
        return drawn * (LARGE if kind.name is Name.LARGE else 0.0) + 0.0
    halves = np.round(drawn * 8) / 2
    # Of few bits: its mean is itself, and its variance 0, whatever the order in which it is summed.
    one_value = np.broadcast_to(halves.reshape(len(drawn), -1)[:, :1].reshape(row.shape), drawn.shape)
    signed = np.where(np.asarray(drawn.real < 0), -0.0, 0.0)
    choices = (halves, one_value, signed, drawn * SMALL[0], np.zeros_like(drawn), drawn, drawn * SMALL[1])
    turn = (row + kind.shift(name)) % _ROWS
    made = np.select([turn == number for number in range(len(choices))], choices, drawn)
    again: NDArray[np.intp] = np.flatnonzero((turn == _ROWS - 1) & (row > 0))
    made[again] = made[again - 1]
    return made


def chosen(drawn: NDArray[Any], pool: NDArray[Any], first: Any, last: Any, kind: Kind, name: str) -> NDArray[Any]:
    """Values of a kind where only some are allowed, or lead anywhere.

    Args:
        drawn: Any of them, at random.
        pool: Those that are special.
        first: The one for zeros.
        last: The one for large values.
    """
    if not drawn.size or kind.name is Name.RANDOM:
        return drawn
    if kind.name is not Name.EDGES:
        ends = {Name.ZEROS: first, Name.LARGE: last, Name.SMALL: drawn.reshape(-1)[0]}
        return np.full_like(drawn, ends[kind.name])
    at = np.arange(drawn.size).reshape(drawn.shape)
    row = np.arange(len(drawn)).reshape(-1, *(1,) * (drawn.ndim - 1)) + kind.shift(name)
    # Values that lie one behind the other may be rows of a sparse or ragged tensor: of these some hold one value only, too.
    whole, others, random = (4, 6, 2) if drawn.ndim == 1 else (1, 2, 1)
    turn, turns = row % (whole + others + random), row // (whole + others + random)
    choices = [pool[(turns + kind.first) % len(pool)], pool[(at + turns + kind.first) % len(pool)]]
    return np.asarray(np.select([turn < whole, turn < whole + others], np.broadcast_arrays(*choices), drawn))


def lengths(rows: int, usual: int, most: int, kind: Kind) -> list[int]:
    """Entries of each row of a sparse or ragged input: as many in all as if each had the usual number, since what was compiled is
    for so many; `most` in none."""
    patterns = {Name.ZEROS: (0, 4), Name.LARGE: (most,), Name.SMALL: (0,), Name.EDGES: (1, 0, 3, 4, 2)}
    pattern = patterns.get(kind.name, (usual,))
    found: list[int] = []
    left = rows * usual
    for row in range(rows):
        wanted = pattern[(row + kind.first) % len(pattern)]
        found.append(min(max(wanted, left - (rows - row - 1) * most), most, left))
        left -= found[-1]
    return found
