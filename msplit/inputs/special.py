"""Special values for made-up inputs: at them, and seldom elsewhere, a wrong kernel or rewrite shows."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import memoize
from msplit.flatten.flat import FlatGraph
from msplit.inputs import lookups
from msplit.opset.traits import BIASES, CONVOLUTIONS, MATMULS, ops_with, traits
from msplit.shapes.values import BINARY

LARGE = 2.0**8
"""Factor of large values. A power of two leaves the rounding of sums and products as it is. ``exp`` of 88.8 overflows in float32: so a
softmax that does not subtract the maximum gives NaN. Cubes (GELU) and squares of sums over 1,000 values (norms) stay below 1e14, where
float32 is as precise as at 1."""

SMALL = (2.0**-5, 2.0**-8, 2.0**-13, 2.0**-20)
"""Factors of small values, row by row: their variances lie around the epsilons of norms, 1e-3, 1e-5, 1e-8 and 1e-12. Squares stay far above
1.2e-38, below which TensorFlow's kernels flush to zero and others do not."""

LARGE_INTEGERS = (1 << 30) + 1, (1 << 53) + 1
"""Integers that are only calculated with: twice the first wraps around in 32 bits, and no float64 holds the other."""

COUNTS = (0, -77, 5, 1, 17, 2, 3, 77)
"""Such integers otherwise: lengths, 0 among them, and ends of ranges; and what is divided, or moved by bits, otherwise below 0."""

_JUMPS, _LIMITS = ops_with("jumps"), ops_with("limit")
_DEFINED = (
    lookups.CALCULATES | ops_with("wraps") | ops_with("unary", "exact") | ops_with("reduction") | ops_with("moves bits")
)
_ENDS_NAN = ops_with("comparison") | ops_with("tells NaN") | ops_with("shape of")
_PER_ELEMENT = ops_with("unary") | ops_with("binary") | ops_with("select")
_TAKES_NAN = _ENDS_NAN | _LIMITS | _PER_ELEMENT | ops_with("view") | ops_with("join") | lookups.MOVES
_BEHIND_ROWS = MATMULS | CONVOLUTIONS | BIASES | ops_with("softmax") | ops_with("reduction", "linear")
_ENDS = (_JUMPS - _LIMITS - lookups.DIVIDES) | ops_with("shape of")

_Range = tuple[float, float]
_ANY = 2.0**70
_MOST_WHERE_OPEN = 2**30
"""Beyond this, ids that only some limits guard might wrap around on the way to their table."""
_MOST_STATES, _MOST_MARKS = 512, 64

_MOST_PAIRS = 1 << 12
"""Pairs of boxes beside each other, whose places no rounding changes."""

_ROWS = 8
"""Kinds of rows in a set of edges."""


class InputKindName(StrEnum):
    """The kinds of sets."""

    RANDOM = "random"
    ZEROS = "zeros"
    """Numbers and masks are 0, ids are those of a table's first row; sparse and ragged rows are empty and longer than usual by turns."""
    LARGE = "large"
    """Numbers are large, masks are all set, ids are those of the last row; as many sparse and ragged rows as can be are full."""
    SMALL = "small"
    """Numbers are small, row by row; one id repeats. Sparse and ragged rows but the last are as empty as can be."""
    EDGES = "edges"
    """Rows by turns hold steps of a half, one value all along, zeros of both signs, small values, zeros before a last one, what the row
    before holds; ids are by turns the ends of a table and of its parts, what is outside of it where that is defined, and any others.
    Strings are by turns empty, in no table, no UTF-8, long, the ends of a table, and any others."""

    NAN = "NaN"
    """Some numbers are NaN or infinite, of inputs that nothing but ops read which are defined for these; a row by turns has none else."""


@dataclass(frozen=True)
class InputKind:
    """A kind of sets of made-up inputs.

    Attributes:
        first: Where rows of edges begin: a later set holds what did not fit into the rows of the first.
        apart: Whether inputs begin at another kind of row each.
    """

    name: InputKindName
    first: int = 0
    apart: bool = False

    def shift(self, input_name: str) -> int:
        """Offset at which the rows of an input begin."""
        return self.first + (zlib.crc32(input_name.encode()) % _ROWS if self.apart else 0)


RANDOM = InputKind(InputKindName.RANDOM)


def kinds(rows: int) -> tuple[InputKind, ...]:
    """All kinds of sets beside random ones, for inputs of so many rows: of few rows there are more sets."""
    edges = (
        InputKind(InputKindName.EDGES, number * max(rows, 1), bool(number % 2))
        for number in range(2 if rows >= _ROWS else 4)
    )
    names = (InputKindName.ZEROS, InputKindName.LARGE, InputKindName.SMALL, InputKindName.NAN)
    return (*map(InputKind, names), *edges)


_MOST_KEPT = 1 << 20
"""Bytes of a set of inputs that is kept."""


@dataclass(frozen=True)
class Fresh:
    """Makes sets of inputs from seeds: random ones, and of these kinds.

    Attributes:
        refused: Names of kinds on which the model does not run, and why: who verifies adds them.
        usual: Names of kinds -> names of inputs that keep usual values there, and why the model does not run on special ones of these.
        undetermined: Variables that are not compared since TensorFlow's own rounding decides what a step makes of them.
        made: Sets that were made, by seed and kind.
    """

    make: Callable[[int, InputKind], Mapping[str, NDArray[Any]]]
    kinds: tuple[InputKind, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    usual: dict[str, tuple[dict[str, None], str]] = field(default_factory=dict)
    undetermined: dict[str, None] = field(default_factory=dict)
    made: dict[tuple[int, InputKind], Mapping[str, NDArray[Any]]] = field(default_factory=dict, repr=False)

    def __call__(self, seed: int, kind: InputKind = RANDOM) -> Mapping[str, NDArray[Any]]:
        """A set, in arrays of its own. Small ones are made once: variants are stepped on the same again and again."""
        found = self.made.get((seed, kind))
        if found is None:
            found = self.make(seed, kind)
            if sum(value.nbytes for value in found.values()) <= _MOST_KEPT:
                self.made[seed, kind] = found
        return {name: value.copy() for name, value in found.items()}

    def covered(self, seconds: float) -> tuple[str, ...]:
        """A sentence on what was verified, and how long that took; none where there are no kinds."""
        names = list(dict.fromkeys(kind.name.value for kind in self.kinds if kind.name.value not in self.refused))
        left_out = "".join(f"; not on {name}: {why}" for name, why in self.refused.items())
        left_out += "".join(
            f"; on {name} with usual values of {_some(list(inputs))}: {why}"
            for name, (inputs, why) in self.usual.items()
            if name not in self.refused
        )
        if variables := list(dict.fromkeys(name.removeprefix("change of ") for name in self.undetermined)):
            left_out += (
                f"; not of {_some(variables)}: nothing but rounding decides what TensorFlow's step makes of them"
            )
        text = f"verified on {len(self.kinds)} sets of made-up inputs ({', '.join(names)}) in {seconds:.1f} s{left_out}"
        return (text,) if self.kinds else ()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(repr, names[:4])) + more


def numbers(drawn: NDArray[Any], kind: InputKind, name: str) -> NDArray[Any]:
    """Floating-point numbers of a kind, from standard normal ones."""
    if not drawn.ndim or not drawn.size or kind.name is InputKindName.RANDOM:
        return drawn
    row = np.arange(len(drawn)).reshape(-1, *(1,) * (drawn.ndim - 1))
    if kind.name is InputKindName.SMALL:
        return np.asarray(drawn * np.asarray(SMALL)[row % len(SMALL)])
    if kind.name is not InputKindName.EDGES:
        return drawn * (LARGE if kind.name is InputKindName.LARGE else 0.0) + 0.0
    halves = np.round(drawn * 8) / 2
    # Of few bits: its mean is itself, and its variance 0, whatever the order in which it is summed.
    one_value = np.broadcast_to(halves.reshape(len(drawn), -1)[:, :1].reshape(row.shape), drawn.shape)
    signed, zeros = np.where(np.asarray(drawn.real < 0), -0.0, 0.0), np.zeros_like(drawn)
    zeros.reshape(len(drawn), -1)[:, 1:][:, -1:] = 1  # what looks for any has to look at all
    if drawn.size == len(drawn) and not kind.apart:
        # Labels: rows of other inputs are zeros there, so equal that their distance is 0, which is learned from as of a pair that matches.
        signed = zeros = zeros + 1
    choices = (halves, one_value, signed, drawn * SMALL[0], zeros, drawn, drawn * SMALL[1])
    turn = (row + kind.shift(name)) % _ROWS
    made = np.select([turn == number for number in range(len(choices))], choices, drawn)
    again: NDArray[np.intp] = np.flatnonzero((turn == _ROWS - 1) & (row > 0))
    made[again] = made[again - 1]
    return made


def takes_nan(flat: FlatGraph, node: int, port: int) -> tuple[bool, bool]:
    """Returns whether what becomes of NaN in an input is defined: it is only moved, calculated with element by element, compared, or
    searched for the largest or the least; and whether it also is multiplied by weights, added up, or goes through a softmax, which is
    defined for rows that are NaN alone."""
    graph, seen, waiting, products = flat.graph, {(node, port)}, [(node, port)], False
    while waiting and len(seen) < _MOST_STATES:
        source, at = waiting.pop()
        for user, slot in graph.uses(source, at):
            op = graph.ops[user]
            rows = op in _BEHIND_ROWS and slot == 0 and not graph.attrs[user].get("transpose_a")
            if not rows and (op not in _TAKES_NAN or _range(str(graph.attrs[user].get("DstT")))[1] < _ANY):
                return False, False
            products |= rows
            if op not in _ENDS_NAN:
                further = {(user, out) for out in lookups.ports(flat, user)} - seen
                seen |= further
                waiting += further
    return not waiting, products


def with_nan(drawn: NDArray[Any], rng: np.random.Generator, *, alone: bool) -> NDArray[Any]:
    """Numbers, a quarter of which become NaN or infinite, unless rows are to be NaN alone; every fourth row is."""
    pool = np.array([np.nan, np.inf, -np.inf, np.nan], drawn.dtype)
    made = np.where((rng.random(drawn.shape) < 0.25) & (not alone), rng.choice(pool, drawn.shape), drawn)
    made[1::4] = np.nan
    return made


def nested_boxes(made: NDArray[Any], thresholds: Sequence[float], kind: InputKind) -> NDArray[Any]:
    """Boxes, half of which lie one in another by twos: those overlap by exactly a threshold, as TensorFlow's kernels calculate it.

    Args:
        made: Boxes of other values, as (..., 4).
        thresholds: What is held against their overlaps.
    """
    if made.shape[-1] != 4 or made.dtype.kind != "f":
        return made
    one = made.dtype.type(1)
    # Of a box of height 1 and one of this height in it, of the same width: so rounded, few widths give the threshold itself.
    width = np.arange(1, 65).astype(made.dtype)
    pairs = []
    for threshold in thresholds:
        height = made.dtype.type(threshold)
        for least in (np.nextafter(height, -one), height, np.nextafter(height, one)):
            overlap = (least * width) / (width + least * width - least * width)
            pairs += [(least, each) for each in width[overlap == height][:2].tolist()]
    rows = made.reshape(-1, 4).copy()
    for number in range(min(max(len(rows) // 4, len(rows) > 1), _MOST_PAIRS) if pairs else 0):
        height, across = pairs[(number + kind.first) % len(pairs)]
        left, at = 64 * number, 4 * number + 2 * (kind.apart and len(rows) > 3)
        rows[at : at + 2] = [[0, left, 1, left + across], [0, left, height, left + across]]
    return rows.reshape(made.shape)


def chosen(drawn: NDArray[Any], pool: NDArray[Any], first: Any, last: Any, kind: InputKind, name: str) -> NDArray[Any]:
    """Values of a kind where only some are allowed, or lead anywhere.

    Args:
        drawn: Any of them, at random.
        pool: Those that are special.
        first: The one for zeros.
        last: The one for large values.
    """
    if not drawn.size or kind.name in (InputKindName.RANDOM, InputKindName.NAN):
        return drawn
    if kind.name is not InputKindName.EDGES:
        ends = {InputKindName.ZEROS: first, InputKindName.LARGE: last, InputKindName.SMALL: drawn.reshape(-1)[0]}
        return np.full_like(drawn, ends[kind.name])
    row = np.arange(len(drawn)).reshape(-1, *(1,) * (drawn.ndim - 1)) + kind.shift(name)
    # Values that lie one behind the other may be rows of a sparse or ragged tensor: of these some hold one value only, too.
    whole, others, random = (4, 6, 2) if drawn.ndim == 1 else (1, 2, 1)
    turn, turns = row % (whole + others + random), row // (whole + others + random)
    at = np.cumsum(np.broadcast_to((turn >= whole) & (turn < whole + others), drawn.shape)).reshape(drawn.shape)
    choices = [pool[(turns + kind.first) % len(pool)], pool[(at + kind.first) % len(pool)]]
    return np.asarray(np.select([turn < whole, turn < whole + others], np.broadcast_arrays(*choices), drawn))


def lengths(rows: int, usual: int, most: int, kind: InputKind) -> list[int]:
    """Entries of each row of a sparse or ragged input: as many in all as if each had the usual number, since what was compiled is
    for so many; `most` in none."""
    patterns = {
        InputKindName.ZEROS: (0, 4),
        InputKindName.LARGE: (most,),
        InputKindName.SMALL: (0,),
        InputKindName.EDGES: (1, 0, 3, 4, 2),
    }
    pattern = patterns.get(kind.name, (usual,))
    found: list[int] = []
    left = rows * usual
    for row in range(rows):
        wanted = pattern[(row + kind.first) % len(pattern)]
        found.append(min(max(wanted, left - (rows - row - 1) * most), most, left))
        left -= found[-1]
    return found


@dataclass(eq=False)
class ValueLimits:
    """Boundaries at which a graph treats an input's numbers in another way, and the range that they may be in.

    Attributes:
        marks: Limits, divisors, boundaries of buckets, what they are compared with, and ends of tables, less what is added on the way.
        rows: Rows of the smallest table that they index, as `Use` has it, limits in front of it or not.
        least: What they may be at least where they index tables: limits in front of these take others, too.
        most: What they may be at most.
        followed: Whether all is known that becomes of them.
    """

    marks: dict[float, None] = field(default_factory=dict)
    rows: int | None = None
    least: float = -math.inf
    most: float = math.inf
    followed: bool = True

    def mark(self, *numbers: Any, less: int | None) -> None:
        """Notes numbers, each as it is where it comes in."""
        found = np.unique(np.concatenate([np.ravel(some) for some in numbers]))[:_MOST_MARKS] - (less or 0)
        self.marks |= dict.fromkeys(found[np.isfinite(found)].tolist())

    def look_up(self, table: lookups.InputLookup, offset: int | None, least: float, most: float) -> None:
        """Notes a table that is indexed by what lies between two numbers."""
        rows, floor = table.rows or 1, 0 if traits(table.op).bound is None else -1
        self.mark([0, rows - 1], table.ends(), less=offset)
        if table.op not in lookups.MAKES and not floor <= least <= most < rows:
            self.followed &= offset is not None
            self.least = max(self.least, floor if least < floor else -_MOST_WHERE_OPEN)
            self.most = min(self.most, rows - 1 - (offset or 0) if most >= rows else _MOST_WHERE_OPEN)
            if offset is None:
                return
        self.rows = min(self.rows or rows, max(1, rows - (offset or 0)))


def limits(flat: FlatGraph, node: int, port: int, dtype: np.dtype[Any]) -> ValueLimits:
    """Follows numbers as far as they are only moved, compared, limited, sorted into buckets and, where they are integers, calculated
    with. Nobody may change what is found: it is kept."""
    return memoize(flat, f"limits of {node}:{port}", (dtype,), lambda: _limits(flat, node, port, dtype))


def _limits(flat: FlatGraph, node: int, port: int, dtype: np.dtype[Any]) -> ValueLimits:
    graph, found = flat.graph, ValueLimits()
    waiting: list[tuple[int, int, int | None, _Range]] = [(node, port, 0, _range(dtype.name))]
    seen = set(waiting)
    while waiting and len(seen) < _MOST_STATES:
        source, at, offset, between = waiting.pop()
        uses = [(user, slot, lookups.looked_up(flat, user, slot, 0)) for user, slot in graph.uses(source, at)]
        in_parts = any(table and graph.ops[user] in lookups.DIVIDES for user, _, table in uses)
        for user, slot, table in uses:
            if table is not None and table.rows is not None:
                found.look_up(table, offset, *between)
            elif table is None and traits(graph.ops[user]).ids == slot:
                found.followed = False  # a table of a size that is not known
            elif not in_parts or graph.ops[user] not in BINARY:  # these find the part of a table, and the row there
                further = _limited(flat, user, slot, found, offset, between, dtype.kind in "iu")
                states = {(user, out, *further) for out in lookups.ports(flat, user)} - seen if further else set()
                seen |= states
                waiting += states
    found.followed &= not waiting
    return found


def _limited(
    flat: FlatGraph, node: int, slot: int, found: ValueLimits, offset: int | None, between: _Range, exact: bool
) -> tuple[int | None, _Range] | None:
    """Sum that was added to numbers once a node has handed them on, and their range then; None where it does not. Notes where it
    does something else with them than below."""
    op, attrs = flat.graph.ops[node], flat.graph.attrs[node]
    known = _operands(flat, node, slot)
    if op in _JUMPS:
        found.mark([0] * (op in lookups.DIVIDES), attrs.get("boundaries") or [], *known, less=offset)
    ranged = _range(str(attrs.get("DstT")))
    casts = exact and op == "Cast"
    if op in _ENDS or (casts and ranged[1] == _ANY):
        return None
    if (op in lookups.MOVES and not slot) or op in lookups.PARTS:
        return offset, between
    if casts:
        fits = ranged[0] <= between[0] and between[1] <= ranged[1]
        found.mark([] if fits else ranged, less=offset)
        return offset, between if fits else ranged
    then = _between(op, slot, known, between) if exact and op in _DEFINED | lookups.DIVIDES else None
    found.followed &= then is not None
    added = offset if offset is None or op in _LIMITS | lookups.DIVIDES else lookups.handed_on(flat, node, slot, offset)
    return then and (added, then)


def _operands(flat: FlatGraph, node: int, slot: int) -> list[NDArray[Any]]:
    """The constant numbers beside an input of a node."""
    others = [lookups.constant(flat, node, other) for other in range(len(flat.graph.inputs(node))) if other != slot]
    return [one.astype(float) for one in others if one is not None and one.size and one.dtype.kind in "iuf"]


def _range(name: str) -> _Range:
    """The least and the most that a type of integers holds; of others, anything."""
    dtype = np.dtype(name if hasattr(np, name) else "float64")
    return (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)) if dtype.kind in "iu" else (-_ANY, _ANY)


def _between(op: str, slot: int, known: list[NDArray[Any]], between: _Range) -> _Range | None:
    """The range of the results of an op, from that of an operand; None where it is not defined for all of that."""
    if op in lookups.DIVIDES and (slot or not known or not known[0].all()):
        return None
    if op not in BINARY:
        return -_ANY, _ANY
    other = known[0].reshape(1, -1) if known else np.array([[-_ANY, 0, _ANY]])
    steps = [0, 1, -1, *(other[0] - 1), *(1 - other[0])] if op in lookups.DIVIDES else []
    given = np.array([*between, *np.clip(steps, *between)]).reshape(-1, 1)
    made = BINARY[op](*((other, given) if slot else (given, other)))
    return float(made.min()), float(made.max())
