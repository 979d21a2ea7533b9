"""Chains of ops in front of a lookup: how its ids come from values that are there already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.embedding_spec import HIGHEST, LOWEST, Term
from msplit.engines.cuda.passes.pattern import constant_slot
from msplit.opset.traits import ADD, RESHAPES, ops_with

_LIMITS = ops_with("limit")
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
            if op.op not in RESHAPES and (self._term.boundaries is not None or not self._take(graph, op)):
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
            found = _with(graph, op, term)
            self._term = found or term
            return found is not None
        if term.narrow or term.modulo or (term.low, term.high) != (LOWEST, HIGHEST):
            return False
        added = _addend(graph, op, self._per_row)
        if added is None or np.abs(self._offsets + added).max() >= _SMALL:
            return False
        self._offsets = self._offsets + added
        return True


def _with(graph: OpGraph, op: Op, term: Term) -> Term | None:
    """The term with an op before what it does to an id so far."""
    if op.op == "Cast":
        kinds = (op.attrs.get("SrcT"), op.attrs.get("DstT"))
        if kinds == ("int32", "int64"):
            return term
        # Nothing but a view may come before: what is taken later would see the upper half.
        return replace(term, narrow=True) if kinds == ("int64", "int32") and not term.narrow else None
    if term.narrow:
        return None
    if op.op == "Bucketize":
        return replace(term, boundaries=tuple(float(np.float32(one)) for one in op.attrs.get("boundaries", ())))
    if term.modulo:
        return None
    if op.op == "FloorMod":
        divisor = _scalar(graph, op.inputs[1])
        return replace(term, modulo=divisor) if divisor is not None and divisor >= 1 else None
    return _clipped(graph, op, term) if op.op in _LIMITS else None


def _clipped(graph: OpGraph, op: Op, term: Term) -> Term | None:
    """The term with limits that say something new and do not cross."""
    limits = [limit for key in op.inputs[1:] if (limit := _scalar(graph, key)) is not None]
    if len(limits) != len(op.inputs) - 1 or op.inputs[0] in graph.constants:
        return None
    lowest, highest = op.op != "Minimum", op.op != "Maximum"
    if (lowest and term.low != LOWEST) or (highest and term.high != HIGHEST):
        return None
    low, high = limits[0] if lowest else term.low, limits[-1] if highest else term.high
    return replace(term, low=low, high=high) if low <= high else None


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


def _scalar(graph: OpGraph, key: Key) -> int | None:
    """A known integer."""
    value = graph.constants.get(key)
    return int(value.reshape(-1)[0]) if value is not None and value.size == 1 and value.dtype.kind in "iu" else None


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


def _addend(graph: OpGraph, op: Op, per_row: int) -> NDArray[np.int64] | None:
    """The number that is added to every id of a row: one for all, or one for each."""
    slot = constant_slot(graph, op)
    if slot is None or (op.op == "Sub" and slot == 0):
        return None
    value = graph.constants[op.inputs[slot]]
    shape = graph.shapes[op.inputs[1 - slot]]
    if value.dtype.kind not in "iu" or graph.shapes.get((op.node, 0)) != shape:
        return None
    sign = -1 if op.op == "Sub" else 1
    if value.size == 1:
        return np.asarray(sign * value.reshape(1), np.int64)
    full = np.broadcast_to(value, shape).reshape(-1, per_row)
    if not (full == full[0]).all():
        return None
    row = np.asarray(sign * full[0], np.int64)
    return row[:1] if (row == row[0]).all() else row
