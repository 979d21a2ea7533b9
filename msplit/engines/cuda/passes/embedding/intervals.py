"""Bounds of integers, and chains of ops in front of a lookup that they are proved of.

Bounds of integers and truth values, whatever is fed: an abstract interpretation with intervals.

An interval is a pair ``(low, high)``, both ends included; truth values are 0 and 1. None says nothing. Every rule is sound for every
input of its op: where an op could wrap around its type's limits, the caller drops the interval (`within`).

Chains of ops in front of a lookup: how its ids come from values that are there already.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, known, proved, require
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.embedding import HIGHEST, LOWEST, Term
from msplit.engines.cuda.passes.pattern import constant_slot
from msplit.opset.traits import ADD, GATHERS, RESHAPES, SELECT, ops_with

Range = tuple[int, int]


class Facts(Protocol):
    """Facts about values."""

    def range(self, key: Key) -> Range | None:
        """Interval of a value."""

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Shape of a value, where that is the same in every run."""


Rule = Callable[[Facts, Op], Range | None]

TRUE, FALSE, EITHER = (1, 1), (0, 0), (0, 1)

COUNTED = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
"""Types of which intervals are kept."""


def of(facts: Facts, op: Op) -> Range | None:
    """Interval of the first output of an op, which must be of integers or truth values."""
    rule = _RULES.get(op.op)
    return proved(rule, facts, op) if rule is not None else None


def _range(facts: Facts, op: Op, slot: int) -> Range:
    return known(facts.range(op.inputs[slot]))


def within(found: Range | None, dtype: np.dtype[Any]) -> Range | None:
    """The interval, if every value in it can be had in a type: an op whose result may not be may wrap around."""
    if found is None:
        return None
    limits = of_type(dtype.name)
    return found if limits is not None and limits[0] <= found[0] <= found[1] <= limits[1] else None


def of_type(dtype: str) -> Range | None:
    """All values of a type; None for one of which no intervals are kept."""
    if dtype not in COUNTED:
        return None
    return EITHER if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def of_array(value: NDArray[Any]) -> Range | None:
    """Interval of a known value."""
    if value.dtype.kind not in "iub" or not value.size:
        return None
    return int(value.min()), int(value.max())


def _rows(facts: Facts, op: Op) -> Range | None:
    """Rows that a gather takes, or the zeros that the GPU writes for an index out of range."""
    low, high = _range(facts, op, 0)
    return min(low, 0), max(high, 0)


def _some_of(facts: Facts, op: Op) -> Range | None:
    """Extremes over axes of which none is empty."""
    shape = facts.shape(op.inputs[0])
    return facts.range(op.inputs[0]) if shape is not None and 0 not in shape else None


def _union(facts: Facts, keys: list[Key]) -> Range | None:
    found = [known(facts.range(key)) for key in keys]
    require(found)
    return min(low for low, _ in found), max(high for _, high in found)


def _binary(rule: Callable[[Range, Range], Range | None]) -> Rule:
    return lambda facts, op: rule(_range(facts, op, 0), _range(facts, op, 1))


def _modulo(facts: Facts, op: Op) -> Range | None:
    low, high = _range(facts, op, 1)
    return (0, high - 1) if low > 0 else None


def _corners(combine: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """A function that has its extremes where both operands have theirs."""

    def apply(a: Range, b: Range) -> Range:
        corners = [combine(x, y) for x in a for y in b]
        return min(corners), max(corners)

    return apply


def _compare(always: Callable[[Range, Range], bool], never: Callable[[Range, Range], bool]) -> Rule:
    """A comparison of integers. (Of floats nothing is known, so that a NaN plays no part.)"""

    return _binary(lambda a, b: TRUE if always(a, b) else FALSE if never(a, b) else EITHER)


def _disjoint(a: Range, b: Range) -> bool:
    return a[1] < b[0] or b[1] < a[0]


def _equal(a: Range, b: Range) -> bool:
    return a[0] == a[1] == b[0] == b[1]


def _bool(facts: Facts, key: Key) -> Range:
    return facts.range(key) or EITHER


def _logical(combine: Callable[[int, int], int]) -> Rule:
    def apply(facts: Facts, op: Op) -> Range:
        first, second = (_bool(facts, key) for key in op.inputs)
        return combine(first[0], second[0]), combine(first[1], second[1])

    return apply


def _not(facts: Facts, op: Op) -> Range:
    low, high = _bool(facts, op.inputs[0])
    return 1 - high, 1 - low


def _select(facts: Facts, op: Op) -> Range | None:
    condition = facts.range(op.inputs[0])
    if condition in (TRUE, FALSE):
        return facts.range(op.inputs[1 if condition == TRUE else 2])
    return _union(facts, op.inputs[1:3])


def _clip(facts: Facts, op: Op) -> Range | None:
    low, high = _range(facts, op, 1), _range(facts, op, 2)
    x = facts.range(op.inputs[0]) or (low[0], high[1])
    # The lower limit wins where the limits cross.
    return max(min(x[0], high[0]), low[0]), max(min(x[1], high[1]), low[1])


def _extreme(choose: Callable[[int, int], int]) -> Rule:
    """An operand of which nothing is known is somewhere in its type: what it is cut off at holds all the same."""

    def apply(facts: Facts, op: Op) -> Range | None:
        found = [facts.range(key) for key in op.inputs[:2]]
        limits = of_type(str(op.attrs.get("T", "")))
        if found == [None, None] or (None in found and limits is None):
            return None
        (a, b), (c, d) = (item or limits or (0, 0) for item in found)
        return choose(a, c), choose(b, d)

    return apply


def _arg_extreme(facts: Facts, op: Op) -> Range | None:
    shape = facts.shape(op.inputs[0])
    return (0, max(shape) - 1) if shape and min(shape) > 0 else None


def _absolute(facts: Facts, op: Op) -> Range | None:
    low, high = _range(facts, op, 0)
    return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _all_of(facts: Facts, op: Op) -> Range:
    """All and Any over axes of which none is empty; over an empty one All is true and Any is false."""
    shape = facts.shape(op.inputs[0])
    return _bool(facts, op.inputs[0]) if shape is not None and 0 not in shape else EITHER


_RULES: dict[str, Rule] = {
    **dict.fromkeys(ops_with("picks values"), lambda facts, op: facts.range(op.inputs[0])),
    **dict.fromkeys([*GATHERS, "GatherNd"], _rows),
    "Max": _some_of,
    "Min": _some_of,
    "Pack": lambda facts, op: _union(facts, op.inputs),
    "ConcatV2": lambda facts, op: _union(facts, op.inputs[:-1]),
    "Concat": lambda facts, op: _union(facts, op.inputs[1:]),
    "Fill": lambda facts, op: facts.range(op.inputs[1]),
    "Cast": lambda facts, op: facts.range(op.inputs[0]),  # none of floats; one that would wrap around is dropped
    **dict.fromkeys(ADD, _binary(_corners(operator.add))),
    "Sub": _binary(_corners(operator.sub)),
    "Mul": _binary(_corners(operator.mul)),
    "Neg": lambda facts, op: None if (x := facts.range(op.inputs[0])) is None else (-x[1], -x[0]),
    "Abs": _absolute,
    "FloorMod": _modulo,
    "FloorDiv": _binary(lambda a, b: _corners(operator.floordiv)(a, b) if b[0] > 0 else None),
    "Minimum": _extreme(min),
    "Maximum": _extreme(max),
    "ClipByValue": _clip,
    "Bucketize": lambda facts, op: (0, len(op.attrs.get("boundaries", ()))),
    "ArgMax": _arg_extreme,
    "ArgMin": _arg_extreme,
    **dict.fromkeys(SELECT, _select),
    "ZerosLike": lambda facts, op: (0, 0),
    "OnesLike": lambda facts, op: (1, 1),
    "Where": lambda facts, op: (0, 2**62),
    "Equal": _compare(_equal, _disjoint),
    "NotEqual": _compare(_disjoint, _equal),
    "GreaterEqual": _compare(lambda a, b: a[0] >= b[1], lambda a, b: a[1] < b[0]),
    "Greater": _compare(lambda a, b: a[0] > b[1], lambda a, b: a[1] <= b[0]),
    "LessEqual": _compare(lambda a, b: a[1] <= b[0], lambda a, b: a[0] > b[1]),
    "Less": _compare(lambda a, b: a[1] < b[0], lambda a, b: a[0] >= b[1]),
    "LogicalAnd": _logical(min),
    "LogicalOr": _logical(max),
    "LogicalNot": _not,
    "All": _all_of,
    "Any": _all_of,
}


_LIMITS = ops_with("limit")
_REPEATS = ops_with("repeat")
_LONGEST = 16
_SMALL = 1 << 30
"""Constants up to here can be added to 32-bit ids in 64 bits: where 32 bits wrap around, both ids are out of every table."""

SLICES = ops_with("slice")


class Chain:
    """The ids of one lookup, taken back to values that no op of the chain makes.

    Attributes:
        key: Those values.
        terms: One term for all ids of a row, or one per id where ids are treated unequally; sources and tables are left open.
        nodes: Flat nodes that the chain does the work of.
    """

    def __init__(self, graph: OpGraph, ids: Key, per_row: int) -> None:
        self.key = ids
        self.nodes: list[int] = []
        self._offsets: NDArray[np.int64] = np.zeros(1, np.int64)  # per id of a row, or one for all
        self._term = Term(-1, -1)
        self._per_row = per_row
        self._first, self._step = 0, per_row
        for op, key in _backwards(graph, ids):
            if op.op in SLICES:
                lies = where_rows_lie(graph, op, per_row)
                if lies is None:
                    break
                # What is in front of a slice is of another shape, and numbers there are other places.
                self.key, (self._first, self._step) = key, lies
                self.nodes += op.source_nodes
                break
            if op.op in _REPEATS and proved(_one_row, graph, op) == per_row:
                self.key, self._step = key, 0  # which all rows read
                self.nodes += op.source_nodes
                break
            if op.op not in RESHAPES and (self._term.boundaries is not None or not proved(self._take, graph, op)):
                break
            self.key = key
            self.nodes += op.source_nodes

    @property
    def terms(self) -> list[Term]:
        """The terms of the class's description."""
        term = replace(self._term, first=self._first, step=self._step)
        if self._offsets.size == 1:
            return [replace(term, count=self._per_row, offset=int(self._offsets[0]))]
        return [replace(term, first=self._first + at, offset=int(offset)) for at, offset in enumerate(self._offsets)]

    def _take(self, graph: OpGraph, op: Op) -> bool:
        """Takes one op more, if it can be done on the way."""
        term = self._term
        if op.op not in ADD and op.op != "Sub":
            self._term = _with(graph, op, term)
            return True
        require(not term.narrow and not term.modulo and (term.low, term.high) == (LOWEST, HIGHEST))
        offsets = self._offsets + _addend(graph, op, self._per_row)
        require(np.abs(offsets).max() < _SMALL)
        self._offsets = offsets
        return True


def _one_row(graph: OpGraph, op: Op) -> int:
    """Elements of the one row that an op repeats along the first axis."""
    few, every = known(graph.shape(op.inputs[0])), known(graph.shape(op.out))
    require(few == (1, *every[1:]))
    return math.prod(few)


def _with(graph: OpGraph, op: Op, term: Term) -> Term:
    """The term with an op before what it does to an id so far."""
    if op.op == "Cast":
        kinds = (op.attrs.get("SrcT"), op.attrs.get("DstT"))
        if kinds == ("int32", "int64"):
            return term
        # Nothing but a view may come before: what is taken later would see the upper half.
        require(kinds == ("int64", "int32") and not term.narrow)
        return replace(term, narrow=True)
    require(not term.narrow)
    if op.op == "Bucketize":
        return replace(term, boundaries=tuple(float(np.float32(one)) for one in op.attrs.get("boundaries", ())))
    require(not term.modulo)
    if op.op == "FloorMod":
        divisor = _scalar(graph, op.inputs[1])
        require(divisor >= 1)
        return replace(term, modulo=divisor)
    require(op.op in _LIMITS)
    return _clipped(graph, op, term)


def _clipped(graph: OpGraph, op: Op, term: Term) -> Term:
    """The term with limits that say something new and do not cross."""
    limits = [_scalar(graph, key) for key in op.inputs[1:]]
    lowest, highest = op.op != "Minimum", op.op != "Maximum"
    require((not lowest or term.low == LOWEST) and (not highest or term.high == HIGHEST))
    low, high = limits[0] if lowest else term.low, limits[-1] if highest else term.high
    require(low <= high and op.inputs[0] not in graph.constants)
    return replace(term, low=low, high=high)


def where_rows_lie(graph: OpGraph, op: Op, per_row: int) -> tuple[int, int] | None:
    """Place of the rows of a slice in what it is a slice of: the first element of the first row, and how far it is from row to row.

    A kernel that is told this needs no copy of the slice (an op of `SLICES`). None where elements of a row do not lie side by side, or
    rows not equally far apart.
    """
    given = [graph.constants.get(key) for key in op.inputs[1:]]
    source = torch.empty(graph.shapes[op.inputs[0]], dtype=torch.int8, device="meta")
    if any(number is None for number in given):
        return None
    try:
        rows = table()[op.op].function(Node("", op.op, op.attrs), source, *given).view(-1, per_row)
    except (RuntimeError, Unsupported):
        return None
    # A negative step makes a copy, whose memory is not the source's.
    inside = rows._base is source or rows is source
    beside = per_row == 1 or rows.stride(1) == 1
    return (rows.storage_offset(), rows.stride(0)) if inside and beside else None


def _scalar(graph: OpGraph, key: Key) -> int:
    """A known integer."""
    value = known(graph.constants.get(key))
    require(value.size == 1 and value.dtype.kind in "iu")
    return int(value.reshape(-1)[0])


def _backwards(graph: OpGraph, key: Key) -> Iterator[tuple[Op, Key]]:
    """The ops that made a value, the last first, each with the input of it that is no constant."""
    for _ in range(_LONGEST):
        op = graph.ops.get(key[0])
        if op is None or not op.inputs or key[1] != 0:
            return
        varying = [slot for slot in op.inputs if slot not in graph.constants]
        if len(varying) != 1 or varying[0] not in graph.shapes:
            return
        key = varying[0]
        yield op, key


def _addend(graph: OpGraph, op: Op, per_row: int) -> NDArray[np.int64]:
    """The number that is added to every id of a row: one for all, or one for each."""
    slot = known(constant_slot(graph, op))
    value = graph.constants[op.inputs[slot]]
    shape = graph.shapes[op.inputs[1 - slot]]
    require(value.dtype.kind in "iu" and graph.shapes.get((op.node, 0)) == shape and (op.op != "Sub" or slot))
    sign = -1 if op.op == "Sub" else 1
    if value.size == 1:
        return np.asarray(sign * value.reshape(1), np.int64)
    full = np.broadcast_to(value, shape).reshape(-1, per_row)
    require((full == full[0]).all())
    row = np.asarray(sign * full[0], np.int64)
    return row[:1] if (row == row[0]).all() else row
