"""Rows that are the same in many rows of a step, such as those of a user beside many items: what is made of them alone is computed once
for each user.

The graph is specialized twice: to all rows, and to one row of each input for each user. What depends on shared inputs and on constants
alone is taken from the second one. Where a step has one user, what other ops read of it is broadcast, which is a view; ops on single
elements read it as it is, and a product of values side by side becomes a sum of products: ``[u, i] · W = u · W_u + i · W_i``, of which the
first has one row and is a bias. Where a step has several, rows are gathered by the user of each row, an input that is added:
``(u · W_u)[users] + i · W_i``.

A model may repeat rows itself, with a Tile, in front of what joins them with items. What lies behind is computed of one row then, up to
where they meet, if costs say that this is faster.

That is right where rows are independent, which the caller has proved: then each row of a value is the same function of its own row. A value
that is not the rows of the small graph, repeated along one axis, is computed for all rows as before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from msplit.engines.base import USERS
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape, known, mutated, require
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.passes import pattern
from msplit.engines.cuda.passes.repeated_rows import differing, equal, outputs, pays, pays_to_split
from msplit.opset.traits import BATCH_MATMULS, BIASES, ops_with

_BROADCASTS = ops_with("broadcasts") | {"SelectV2"}
_PLACED = re.compile("_|Where|Sparse|Ragged|Unique|Dynamic|(Tensor)?Scatter|(Unsorted)?Segment|Cum")
"""Beginnings of the names of ops that are not shared, whatever they read: those that draw numbers, and those of which rows may get their
own number."""
_CONCAT = "ConcatV2"
_VIEWED = _BROADCASTS | BATCH_MATMULS | {_CONCAT}
"""Ops that read a row that is repeated without a copy."""
_MATRICES = 2
_REPEATS, _NAMED, _FOUND = "_repeats", "named", "found"
"""Attribute of what gives all rows of the rows of users: broadcasts the one, or gathers them."""


@dataclass(frozen=True, eq=False)
class Sharing:
    """Inputs of which a step reads one row for each user.

    Attributes:
        inputs: Their names.
        small: The graph, specialized to as many rows as there are users, of every input that has rows.
        users: Most users of a step.
        rows: Rows of a step.
        entries: Where the inputs have no rows, and the graph repeats what it makes of them: gives of a value of which all rows are proved
            to be equal the entries of a row, and 0 of any other. None where the inputs have rows.
        whole: Whether all rows are computed: inputs alone have one for each user.
    """

    inputs: Collection[str]
    small: OpGraph
    users: int
    rows: int
    entries: Callable[[Key], int] | None = None
    whole: bool = False


def share_rows(graph: OpGraph, sharing: Sharing) -> bool:
    """Computes what depends on some inputs alone for one row of each user. True if there is anything. The graph is specialized to all
    rows."""
    small = sharing.small
    once, read, fed = _shareable(graph, small, sharing)
    if not fed or not (sharing.entries is None or pays(graph, small, once, _VIEWED)):
        return False
    wide = {key: known(graph.shape(key)) for key in read}
    for number in once:
        _shrink(graph, small, number)
    for key in fed:
        graph.shapes[key] = known(small.shape(key))
    if sharing.users > 1:
        index = graph.feeds[USERS] = graph.fresh(), 0
        graph.describe(index, (sharing.rows,), "int32")
    spread = {key: _spread(graph, key, like, wide[key], sharing) for key, like in read.items()}
    for number, op in graph.ops.items():
        if number not in once and not op.attrs.get(_REPEATS):
            op.inputs = [spread.get(key, key) for key in op.inputs]
    graph.fetches = {name: spread.get(key, key) for name, key in graph.fetches.items()}
    graph.sort()
    if sharing.whole:  # the rows are as others, of which no product is split
        for number, _ in spread.values():
            del graph.ops[number].attrs[_REPEATS]
    pattern.offered(graph, lambda op: _reads_narrow(graph, op))
    return True


def _shareable(graph: OpGraph, small: OpGraph, sharing: Sharing) -> tuple[set[int], dict[Key, Op], set[Key]]:
    """Ops that compute one row for each user, the values of theirs that others read, each with an op near it, and what they are fed."""
    fed = {graph.feeds[name] for name in sharing.inputs if name in graph.feeds and name in small.feeds}
    banned, proved = set(graph.ops if sharing.whole else ()), sharing.entries
    while True:
        once = _once(graph, small, fed, banned)
        if proved is None:
            read = dict(_read_outside(graph, once, fed))
            wrong = fed.intersection(graph.fetches.values())
        else:
            once = differing(graph, small, once)
            read = dict(_read_outside(graph, once, ()))
            wrong = {key for key in read if not proved(key)}
        wrong |= {key for key in read if _repeated(small.shape(key), graph.shape(key), sharing) is None}
        if not wrong:
            return once, read, fed
        fed -= wrong
        banned |= {key[0] for key in wrong}


def split_products(graph: OpGraph) -> bool:
    """Makes sums of products where some of what is multiplied is the same in all rows. True if there is anything."""
    if not any(op.attrs.get(_REPEATS) for op in graph.ops.values()):
        return False
    readers = pattern.Readers(graph)
    changed = pattern.offered(graph, lambda op: _split_product(graph, readers, op))
    return pattern.offered(graph, lambda op: _gather_together(graph, op)) or changed


def _once(graph: OpGraph, small: OpGraph, fed: Collection[Key], banned: Collection[int]) -> set[int]:
    """Ops that read shared values and constants alone, and are the same ops in the small graph."""
    found = set[int]()
    for number, op in graph.ops.items():
        read = [key for key in op.inputs if key not in graph.constants]
        if not read or number in banned or _PLACED.match(op.op) or mutated(op):
            continue
        if all(key in fed or key[0] in found for key in read) and _alike(graph, small, op):
            found.add(number)
    return found


def _alike(graph: OpGraph, small: OpGraph, op: Op) -> bool:
    other = small.ops.get(op.node)
    if other is None or other.op != op.op or len(other.inputs) != len(op.inputs):
        return False
    if any(one != two and one not in graph.constants for one, two in zip(op.inputs, other.inputs, strict=True)):
        return False
    # A constant that goes with the number of rows may hold the rows' numbers, unless it is read as a shape.
    static = table()[op.op].static
    for slot, (key, taken) in enumerate(zip(op.inputs, other.inputs, strict=True)):
        if key in graph.constants and (
            taken not in small.constants
            or (slot not in static and not equal(graph.constants[key], small.constants[taken]))
        ):
            return False
    made = outputs(graph, op.node)
    return bool(made) and all(key in graph.shapes and key in small.shapes for key in made)


def _read_outside(graph: OpGraph, once: Collection[int], fed: Collection[Key]) -> Iterator[tuple[Key, Op]]:
    """Shared values that other ops read, or that are wanted in the end, each with an op near it."""
    for number, op in graph.ops.items():
        if number not in once:
            yield from ((key, op) for key in op.inputs if key in fed or key[0] in once)
    for key in graph.fetches.values():
        if key[0] in once:
            yield key, graph.ops[key[0]]


def _repeated(few: Shape | None, every: Shape | None, sharing: Sharing) -> int | None:
    """The axis along which a value has one row for each user, and all rows in another shape; None where that is not all that differs."""
    if few is None or every is None or len(few) != len(every):
        return None
    differ = _different(few, every)
    if len(differ) != 1 or few[differ[0]] != sharing.users or (sharing.users > 1 and every[differ[0]] != sharing.rows):
        return None
    return differ[0]


def _different(one: Shape, other: Shape) -> list[int]:
    """Axes along which two shapes of as many differ."""
    return [axis for axis, (size, wanted) in enumerate(zip(one, other, strict=True)) if size != wanted]


def _shrink(graph: OpGraph, small: OpGraph, number: int) -> None:
    """Takes an op as the small graph has it."""
    op, other = graph.ops[number], small.ops[number]
    op.attrs = dict(other.attrs)
    for slot, (key, taken) in enumerate(zip(op.inputs, other.inputs, strict=True)):
        if key in graph.constants:
            value = small.constants[taken]
            if not equal(value, graph.constants[key]):
                op.inputs[slot] = graph.constant(value)
    for key in outputs(graph, number):
        graph.shapes[key] = small.shapes[key]


def _spread(graph: OpGraph, key: Key, like: Op, shape: Shape, sharing: Sharing) -> Key:
    """The value for all rows."""
    if sharing.users > 1:
        return _gathered(graph, key, like, known(_repeated(graph.shape(key), shape, sharing)), shape)
    attrs = {"T": graph.dtype(key), "Tidx": "int64", _REPEATS: _NAMED if sharing.entries is None else _FOUND}
    return graph.add("BroadcastTo", like, attrs, [key, graph.sizes(shape)], shape, graph.dtype(key)).out


def _gathered(graph: OpGraph, key: Key, like: Op, axis: int, shape: Shape) -> Key:
    """The value for all rows, by the user of each."""
    attrs = {"Tparams": graph.dtype(key), "Tindices": "int32", "Taxis": "int32", "batch_dims": 0, _REPEATS: True}
    inputs = [key, graph.feeds[USERS], graph.constant(np.asarray(axis, np.int32))]
    return graph.add("GatherV2", like, attrs, inputs, shape, graph.dtype(key)).out


def _narrow(graph: OpGraph, key: Key) -> Key | None:
    """What a value repeats for all rows; None where it does not."""
    op = graph.ops.get(key[0])
    return op.inputs[0] if op is not None and op.attrs.get(_REPEATS) else None


def _reads_narrow(graph: OpGraph, op: Op) -> bool:
    """Has an op on single elements, or on pairs of matrices, read one row, where the others make the shape."""
    require(op.op in _BROADCASTS or op.op in BATCH_MATMULS)
    one = {key: _narrow(graph, key) for key in op.inputs if USERS not in graph.feeds}
    inputs = [one.get(key) or key for key in op.inputs]
    require(inputs != op.inputs)
    end = -_MATRICES if op.op in BATCH_MATMULS else None
    shapes = [known(graph.shape(key))[:end] for key in inputs]
    require(np.broadcast_shapes(*shapes) == known(graph.shape(op.out))[:end])
    # Rows of a matrix are not pairs of matrices.
    require(
        end is None
        or all(
            known(graph.shape(one))[end:] == known(graph.shape(key))[end:]
            for one, key in zip(inputs, op.inputs, strict=True)
        )
    )
    op.inputs = inputs
    return True


def _split_product(graph: OpGraph, readers: pattern.Readers, op: Op) -> bool:
    """Multiplies what is the same in many rows by itself, and adds it to the rest: as a bias, together with the bias that is there, where
    it is one vector."""
    require(op.op == "MatMul" and not op.attrs.get("transpose_a") and not op.attrs.get("transpose_b"))
    left, right = op.inputs
    weights, parts = known(graph.constants.get(right)), graph.ops.get(left[0])
    if parts is not None and parts.op == "Reshape":  # matrices that lie one behind the other
        left = parts.inputs[0]
        parts = graph.ops.get(left[0])
    require(parts is not None and parts.op == _CONCAT and weights.ndim == _MATRICES)
    assert parts is not None
    shape, axis, values = known(graph.shape(left)), graph.constants.get(parts.inputs[-1]), parts.inputs[:-1]
    require(axis is not None and int(axis) % len(shape) == len(shape) - 1 and weights.shape[0] == shape[-1])
    narrow = [_narrow(graph, key) for key in values]
    require(any(narrow) and not all(narrow))
    few, *others = {known(graph.shape(key))[:-1] for key in narrow if key is not None}
    require(not others and (USERS not in graph.feeds or _different(few, shape[:-1])))
    widths = [known(graph.shape(key))[-1] for key in values]
    rows = np.split(weights, list(accumulate(widths))[:-1])
    _require_gain(
        graph, op, {key: width for key, one, width in zip(values, narrow, widths, strict=True) if one}, len(values)
    )

    def product(shared: bool, before: Shape) -> Key:
        """Of the parts that are shared, or of the others: a matrix."""
        taken = [place for place, one in enumerate(narrow) if bool(one) == shared]
        made, size = narrow[taken[0]] or values[taken[0]], sum(widths[place] for place in taken)
        if len(taken) > 1:
            last = graph.constant(np.asarray(len(shape) - 1, np.int32))
            keys = [*(narrow[place] or values[place] for place in taken), last]
            made = graph.add(_CONCAT, op, dict(parts.attrs), keys, (*before, size), graph.dtype(made)).out
        made, wanted = _reshaped(graph, op, made, (math.prod(before), size)), (math.prod(before), weights.shape[1])
        part = graph.constant(np.concatenate([rows[place] for place in taken]))
        return graph.add("MatMul", op, dict(op.attrs), [made, part], wanted, graph.dtype(made)).out

    _add_products(graph, readers, op, product(True, few), product(False, shape[:-1]), few, shape[:-1])
    return True


def _require_gain(graph: OpGraph, op: Op, own: Mapping[Key, int], parts: int) -> None:
    """Lets a product of so many parts, of which some are repeated, be, where that was not asked for and does not gain."""
    if any(graph.ops[node].attrs.get(_REPEATS) == _FOUND for node, _ in own):
        require(pays_to_split(graph, op, sum(own.values()), alone=len(own) + 1 == parts))


def _gather_together(graph: OpGraph, op: Op) -> bool:
    """Has what is added up, or lies side by side, be so in the rows of users: it is gathered in one piece."""
    is_concat = op.op == _CONCAT
    require(USERS in graph.feeds and (is_concat or op.op == "AddN"))
    count = len(op.inputs) - is_concat
    values, more = op.inputs[:count], op.inputs[count:]
    axes = [int(graph.constants[graph.ops[key[0]].inputs[2]]) if _narrow(graph, key) else -1 for key in values]
    order, along = sorted(range(count), key=axes.__getitem__), -1
    if is_concat:
        order, along = [*range(count)], int(known(graph.constants.get(more[0]))) % len(known(graph.shape(op.out)))
    found = list[Key]()
    for axis, run in groupby(order, axes.__getitem__):
        keys = [values[place] for place in run]
        if axis in (-1, along) or len(keys) == 1:
            found += keys
            continue
        few = [known(_narrow(graph, key)) for key in keys]
        size, wide = ([*known(graph.shape(one[0]))] for one in (few, keys))
        if is_concat:
            size[along] = wide[along] = sum(known(graph.shape(key))[along] for key in keys)
        made = graph.add(op.op, op, {**op.attrs, "N": len(few)}, [*few, *more], tuple(size), graph.dtype(few[0])).out
        found.append(_gathered(graph, made, op, axis, tuple(wide)))
    require(len(found) < count)
    op.inputs, op.attrs = [*found, *more], {**op.attrs, "N": len(found)}
    return True


def _add_products(
    graph: OpGraph, readers: pattern.Readers, op: Op, one: Key, rest: Key, few: Shape, before: Shape
) -> None:
    """Has a product be the sum of two: of what has the axes `few` in front, and of what has all rows."""
    shape, attrs = graph.shapes[op.out], {"T": op.attrs.get("T")}
    width = shape[-1]
    if USERS in graph.feeds:
        one = _reshaped(graph, op, one, (*few, width))
        one = _gathered(graph, one, op, _different(few, before)[0], (*before, width))
        graph.rename({op.out: _added(graph, op, rest, _reshaped(graph, op, one, shape), shape)})
        graph.drop([op])
        return
    if math.prod(few) > 1:
        wide = _reshaped(graph, op, rest, (*before, width))
        total = _added(graph, op, wide, _reshaped(graph, op, one, (*few, width)), (*before, width))
        op.op, op.attrs, op.inputs = "Reshape", attrs, [total, graph.sizes(shape)]
        return
    vector, last = _reshaped(graph, op, one, (width,)), readers.only(op.out)
    if last is not None and last.op in BIASES and last.inputs[0] == op.out and last.inputs[1] in graph.constants:
        vector = _added(graph, last, vector, last.inputs[1], (width,))
        graph.drop([op])
        op = last
    op.op, op.attrs, op.inputs = "BiasAdd", {**attrs, "data_format": "NHWC"}, [rest, vector]


def _reshaped(graph: OpGraph, like: Op, key: Key, wanted: Shape) -> Key:
    if graph.shape(key) == wanted:
        return key
    inputs = [key, graph.sizes(wanted)]
    return graph.add("Reshape", like, {"T": like.attrs.get("T")}, inputs, wanted, graph.dtype(key)).out


def _added(graph: OpGraph, like: Op, one: Key, other: Key, wanted: Shape) -> Key:
    return graph.add("AddV2", like, {"T": like.attrs.get("T")}, [one, other], wanted, graph.dtype(one)).out
