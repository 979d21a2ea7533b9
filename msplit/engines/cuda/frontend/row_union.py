"""Rows of a sparse gradient divided by a dense tensor, as Keras' optimizers do, with as many rows in every step.

Keras 3 divides the rows of some ids by the rows of a tensor at these ids, such as the root of an accumulator. Where any row of the tensor
has a zero or NaN, a cond gives more rows: zero divided by each such row, since that is no zero. How many there are depends on values.
Here there are always as many as the tensor has, below those of the ids: what is none of them is zero. So sums of rows by their ids, as
variables take them, are the same. The pass `split_row_unions` adds those below without looking at ids.

Keras' own union has rows of other ids where ids are not in rising order or come twice; here each row is that of its id.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from msplit.engines.cuda.frontend.list_values import Values, zeros_of
from msplit.engines.cuda.ir.functions import Bodies, Body, BodyOp, functions_of
from msplit.engines.cuda.ir.graph import Key, Op, known, require
from msplit.engines.cuda.ir.node import Unsupported
from msplit.formats.tensors import numpy_dtype
from msplit.opset.traits import GATHERS, IF, ops_with

_SAME = ops_with("identity") | {"Cast"}
_DIVISION = "RealDiv"


@dataclass(frozen=True)
class RowUnion:
    """Arguments of a cond's branches, by number.

    Attributes:
        rows: What is divided.
        ids: The row of the divisor for each.
        divisor: The tensor.
        marked: Whether each row of it has to be among the results, too.
    """

    rows: int
    ids: int
    divisor: int
    marked: int


class _Look:
    """A function, read from its results backwards."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._ops = {op.node: op for op in body.ops}
        self._arguments = {key: number for number, key in enumerate(body.parameters)}

    def _through(self, key: Key) -> Key:
        while key[0] in self._ops and self._ops[key[0]].op in _SAME:
            key = self._ops[key[0]].inputs[0]
        return key

    def argument(self, key: Key) -> int:
        """Number of the argument that a value is."""
        return known(self._arguments.get(self._through(key)))

    def op(self, key: Key, *names: str) -> BodyOp:
        """The op that gives a value, one of these."""
        number, port = self._through(key)
        found = known(self._ops.get(number))
        require(found.op in names and not port)
        return found

    def lookup(self, key: Key) -> tuple[Key, Key]:
        """A table, and the ids of its rows that a value is."""
        gather = self.op(key, *GATHERS)
        axis = known(self.body.constants.get(gather.inputs[2])) if len(gather.inputs) > 2 else 0
        require(not int(axis) and not gather.attrs.get("batch_dims", 0))
        return gather.inputs[0], gather.inputs[1]

    def is_true(self, key: Key) -> bool:
        """Returns whether a value is true everywhere."""
        if key not in self.body.constants:
            key = self.op(key, "Fill").inputs[1]
        value = self.body.constants.get(key)
        return value is not None and value.dtype == bool and bool(value.all())

    def where(self, key: Key) -> Key:
        """The vector of truths that a value has the places of."""
        return self.op(self.op(key, "Squeeze").inputs[0], "Where").inputs[0]

    def places(self, key: Key) -> Key:
        """The places that are true in a vector of truths."""
        scatter = self.op(key, "ScatterNd")
        require(self.is_true(scatter.inputs[1]))
        return self.op(scatter.inputs[0], "ExpandDims").inputs[0]


def row_union(bodies: Bodies, otherwise: Body, then: Body) -> RowUnion:
    """Arguments that a cond divides, if its branches are those of such a division: the rows as they are, or more of them.

    Raises:
        Unproved: They are others.
    """
    plain, union = _Look(otherwise), _Look(then)
    require(len(otherwise.results) == len(then.results) >= 2)
    rows, divisor, ids = _plain(plain)
    at = then.results[1]
    given, marked = (union.places(key) for key in union.op(union.where(at), "LogicalOr").inputs)
    quotient = union.op(then.results[0], _DIVISION)
    table, places = union.lookup(quotient.inputs[1])
    require(union.argument(table) == divisor and union.argument(given) == ids and _is_one(union, places, at))
    _check_rows(union, bodies, quotient.inputs[0], at, RowUnion(rows, ids, divisor, -1))
    sizes = zip(otherwise.results[2:], then.results[2:], strict=True)
    require(all(plain.argument(one) == union.argument(other) for one, other in sizes))
    return RowUnion(rows, ids, divisor, union.argument(union.where(marked)))


def _plain(look: _Look) -> tuple[int, int, int]:
    """Arguments of the branch that divides rows as they are."""
    quotient = look.op(look.body.results[0], _DIVISION)
    table, ids = look.lookup(quotient.inputs[1])
    found = look.argument(ids)
    require(look.argument(look.body.results[1]) == found)
    return look.argument(quotient.inputs[0]), look.argument(table), found


def _is_one(look: _Look, one: Key, other: Key) -> bool:
    """Returns whether two values are the same places."""
    return look.op(one, "Squeeze") is look.op(other, "Squeeze")


def _check_rows(look: _Look, bodies: Bodies, key: Key, at: Key, found: RowUnion) -> None:
    """Checks that a value is the rows, zeros between them: another cond gives it, unless there are as many of both."""
    cond = look.op(key, *IF)
    look.op(cond.inputs[0], "Equal")
    given = cond.inputs[1:]
    branches = [known(bodies.of(ref.name)) for ref in functions_of(cond.op, cond.attrs)]
    require(len(branches) == 2 and all(len(one.results) == 1 for one in branches))
    spread, same = map(_Look, branches)
    joined, places = spread.lookup(spread.body.results[0])
    numbers, wanted = spread.lookup(places)
    scatter = spread.op(numbers, "ScatterNd")
    spread.op(scatter.inputs[1], "Range")
    ids = look.op(given[spread.argument(scatter.inputs[0])], "ExpandDims").inputs[0]
    last = spread.op(joined, "ConcatV2").inputs[1]
    rows = (given[spread.argument(last)], given[same.argument(same.body.results[0])])
    require(all(look.argument(one) == found.rows for one in rows) and look.argument(ids) == found.ids)
    require(_is_one(look, given[spread.argument(wanted)], at))


def below(
    values: Values, op: Op, found: RowUnion, condition: Key, arguments: Sequence[Key], plain: Sequence[Key]
) -> Generator[Op, None, list[Key]]:
    """Puts a row for every row of the divisor below those of the ids.

    Args:
        values: What is known.
        op: The cond.
        found: What it divides.
        condition: Whether there are more rows.
        arguments: Of its branches.
        plain: What it gives if there are none: quotients, ids, and perhaps a shape.
    """
    divisor, marked, ids = arguments[found.divisor], arguments[found.marked], plain[1]
    shape, given = values.graph.shape(divisor), values.graph.shape(ids)
    if not shape or given is None or values.graph.shape(marked) != shape[:1]:
        raise Unsupported("how many rows are divided depends on values that only the run knows")
    first = values.graph.constant(np.asarray(0, np.int32))
    last = values.graph.constant(np.asarray(1, np.int32))
    zero = zeros_of(values, values.dtype(divisor), ())
    sizes = values.graph.constant(np.asarray([shape[0]] + [1] * (len(shape) - 1), np.int64))
    own = values.graph.constant(np.arange(shape[0], dtype=numpy_dtype(values.dtype(ids))))

    steps: list[Op] = []

    def add(name: str, *inputs: Key) -> Key:
        steps.append(values.new(name, op, {}, inputs))
        return steps[-1].node, 0

    there = add("ExpandDims", ids, last)
    missing = add("LogicalAnd", condition, add("TensorScatterUpdate", marked, there, zeros_of(values, "bool", given)))
    quotient = add("SelectV2", add("Reshape", missing, sizes), add(_DIVISION, zero, divisor), zero)
    results = [add("ConcatV2", plain[0], quotient, first), add("ConcatV2", ids, own, first), *plain[2:]]
    yield from steps
    return results
