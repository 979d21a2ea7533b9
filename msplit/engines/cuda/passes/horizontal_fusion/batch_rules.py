"""Rules by which ops of several branches are one op, and signatures of ops that are alike.

Rules of ops that can be done for several members at once: each gets one more axis in front, the members.

Signatures of ops that are alike: the same op, attributes, shapes and types. Names and the values of weights do not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, attrs_key, gpus_of, known, proved, require
from msplit.engines.cuda.ir.interpret import static_slots
from msplit.engines.cuda.ops.embedding import IN_ORDER
from msplit.engines.cuda.passes.horizontal_fusion.builder import Batch
from msplit.engines.cuda.passes.horizontal_fusion.weights import grouped_attrs
from msplit.engines.cuda.passes.pattern import Readers, channels_last, heights, value_key
from msplit.opset import schema, traits

Build = Callable[[Batch], list[Key]]
"""Makes the ops of a merge; the stacked value per output port. It raises `Unproved` where these members can not be merged."""

_POINTWISE = 0.35
"""Kernels that merging a pointwise op saves per member: fusion would have put most of them into another kernel anyway."""


@dataclass(frozen=True)
class BatchRule:
    """A way to merge an op.

    Attributes:
        build: Does it.
        kernels: What of a kernel one member costs.
        weights: Slot of an operand that members may each have a constant of their own for, which is stacked once.
        lookup: Whether those are tables, which may differ in their number of rows.
    """

    build: Build
    kernels: float = _POINTWISE
    weights: int | None = None
    lookup: bool = False


def weight_slot(graph: OpGraph, op: Op) -> int | None:
    """The slot of an op's weights where they are constant, or a variable that is not looked up in."""
    rule = BATCH_RULES.get(op.op)
    if rule is None or rule.weights is None or len(op.inputs) <= rule.weights:
        return None
    key = op.inputs[rule.weights]
    held = key in graph.constants or (not rule.lookup and graph.variable(key) is not None)
    return rule.weights if held else None


def pointwise(m: Batch) -> list[Key]:
    """The op as it is, every operand with the members' axis in front: ops of elements, and products, which get one more batch axis."""
    rank = len(m.out(0))
    inputs = [m.input(slot, rank) for slot in range(m.slots)]
    return m.outputs(m.op.op, m.op.attrs, inputs)


def bias_add(m: Batch) -> list[Key]:
    """A sum, where channels are last."""
    rank = len(m.out(0))
    require(rank <= 2 or channels_last(m.op))
    return m.outputs("AddV2", {"T": m.type_of(0)}, [m.input(0, rank), m.input(1, rank)])


def stacked(m: Batch) -> list[Key]:
    """The op as it is, every operand stacked: sums of tensors of one shape, and what runs along the last axis, which stays the last."""
    return m.outputs(m.op.op, m.op.attrs, [m.stacked(slot) for slot in range(m.slots)])


def reduction(m: Batch) -> list[Key]:
    """Over axes, which each come one later."""
    rank = len(m.shape(0))
    axes = m.static(1)
    moved = np.where(axes < 0, axes + rank, axes) + 1
    return m.outputs(m.op.op, m.op.attrs, [m.stacked(0), m.constant(moved.astype(axes.dtype))])


def reshape(m: Batch) -> list[Key]:
    """A reshape of all."""
    return [m.reshape(m.stacked(0), m.stacked_shape(0))]


def bias_gradient(m: Batch) -> list[Key]:
    """A sum over all axes but that of the channels, which are last."""
    rank = len(m.shape(0))
    require(rank <= 2 or channels_last(m.op))
    return m.outputs("Sum", {"T": m.type_of(0)}, [m.stacked(0), m.constant(np.arange(1, rank, dtype=np.int32))])


def transpose(m: Batch) -> list[Key]:
    """The members' axis stays in front."""
    order = np.concatenate([[0], m.static(1).astype(np.int64) + 1])
    return m.outputs("Transpose", {"T": m.type_of(0)}, [m.stacked(0), m.constant(order)])


def _later(axis: int) -> int:
    """An axis behind the members'; one that is counted from the end stays."""
    return axis + 1 if axis >= 0 else axis


def _later_axis(m: Batch, slot: int) -> Key:
    return m.constant(np.asarray(_later(int(m.static(slot).reshape(()))), np.int32))


def split(m: Batch) -> list[Key]:
    """Parts along an axis that comes one later."""
    return m.outputs(m.op.op, m.op.attrs, [_later_axis(m, 0), m.stacked(1)])


def split_v(m: Batch) -> list[Key]:
    """Parts of given sizes along an axis that comes one later."""
    moved = _later_axis(m, 2)
    return m.outputs(m.op.op, m.op.attrs, [m.stacked(0), m.constant(m.static(1)), moved])


def pack(m: Batch) -> list[Key]:
    """Along an axis, which is an attribute and comes one later. Unpack likewise."""
    attrs = {**m.op.attrs, "axis": _later(int(m.op.attrs.get("axis", 0)))}
    return m.outputs(m.op.op, attrs, [m.stacked(slot) for slot in range(m.slots)])


def slice_(m: Batch) -> list[Key]:
    """Cuts the same part out of every member."""
    begin = np.concatenate([[0], m.static(1).astype(np.int64)])
    size = np.concatenate([[m.count], m.static(2).astype(np.int64)])
    return m.outputs("Slice", {"T": m.type_of(0)}, [m.stacked(0), m.constant(begin), m.constant(size)])


def strided_slice(m: Batch) -> list[Key]:
    """Cuts the same part out of every member: all masks move by one axis."""
    attrs = {"T": m.type_of(0), **m.op.attrs}
    for name in ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"):
        attrs[name] = int(attrs.get(name, 0)) << 1
    attrs["begin_mask"] |= 1
    attrs["end_mask"] |= 1
    begin, end, strides = (np.concatenate([[first], m.static(slot)]) for slot, first in ((1, 0), (2, 0), (3, 1)))
    inputs = [m.stacked(0), *(m.constant(part.astype(np.int64)) for part in (begin, end, strides))]
    return m.outputs("StridedSlice", attrs, inputs)


def concat(m: Batch) -> list[Key]:
    """Along an axis that comes one later."""
    moved = _later_axis(m, m.slots - 1)
    return m.outputs("ConcatV2", m.op.attrs, [*(m.stacked(slot) for slot in range(m.slots - 1)), moved])


def product(m: Batch) -> list[Key]:
    """Matrix products: of one matrix with all rows below each other, or batched."""
    attrs = m.op.attrs
    steps = tuple(str(step) for step in attrs.get("fused_ops", ())) if m.op.op == "_FusedMatMul" else ()
    simple = not steps or (steps[0] == "BiasAdd" and len(steps) <= 2 and traits.EPILOGUE_STEPS.isdisjoint(steps[1:]))
    turned = bool(attrs.get("transpose_a"))
    require(simple and m.slots == 2 + bool(steps) and not (turned and steps))
    if m.shared(1) and not turned:
        return _tall_product(m)
    if (m.constants(1) or m.variables(1)) and not turned:
        return _weighted_product(m, steps)
    require(not steps)
    batched = {"T": m.type_of(0), "adj_x": turned, "adj_y": bool(attrs.get("transpose_b"))}
    return m.outputs("BatchMatMulV2", batched, [m.input(0, 2), m.input(1, 2)])


def _tall_product(m: Batch) -> list[Key]:
    require(all(m.shared(slot) for slot in range(1, m.slots)))
    rows, inner = m.shape(0)
    tall = m.reshape(m.stacked(0), (m.count * rows, inner))
    inputs = [tall, *(m.key(slot) for slot in range(1, m.slots))]
    key = m.emit(m.op.op, m.op.attrs, inputs, (m.count * rows, m.out(0)[1]))
    return [m.reshape(key, m.stacked_shape(0))]


def _weighted_product(m: Batch, steps: tuple[str, ...]) -> list[Key]:
    layer, stacks = m.layer(steps)
    return m.outputs("_GroupedMatMul", grouped_attrs(m.op, steps, layer), [m.input(0, 2), *stacks])


def segment_sum(m: Batch) -> list[Key]:
    """Sums of rows by a vector of ids, each member's in rows of its own."""
    require(len(m.shape(1)) == 1 and int(m.static(2)))
    attrs = {"T": m.type_of(0), IN_ORDER: m.op.attrs.get(IN_ORDER, False)}
    return m.outputs("_StackedSegmentSum", attrs, [m.stacked(0), m.stacked(1), m.constant(m.static(2))])


def lookup(m: Batch) -> list[Key]:
    """Rows of tables: one lookup in all tables below each other."""
    require(not m.op.attrs.get("batch_dims", 0) and (m.slots <= 2 or int(m.static(2).reshape(())) == 0))
    if m.shared(0):
        attrs = {**m.op.attrs, "Tparams": m.type_of(0)}
        return m.outputs(m.op.op, attrs, [m.key(0), m.stacked(1), *(m.key(slot) for slot in range(2, m.slots))])
    require(m.constants(0))
    table, starts, sizes = m.tables(0)
    return m.outputs("_GroupedLookup", {"T": m.type_of(0), "count": m.count}, [table, m.stacked(1), starts, sizes])


def large(graph: OpGraph, op: Op) -> bool:
    """Returns whether one member alone keeps a GPU busy, so that merging gains nothing and takes the choice of streams away."""
    if BATCH_RULES[op.op].build is product:
        rows, columns = graph.shapes[op.node, 0]
        return 2 * rows * columns * graph.shapes[op.inputs[0]][-1] > _LARGE_PRODUCT
    return math.prod(graph.shapes[op.node, 0]) > _LARGE_VALUE


_LARGE_PRODUCT = 1 << 31
"""Floating point operations: some 10 µs of a large GPU."""

_LARGE_VALUE = 1 << 22
"""Elements: likewise, in reading and writing."""

BATCH_RULES: dict[str, BatchRule] = {
    **dict.fromkeys(sorted(traits.ops_with("stacks")), BatchRule(pointwise)),
    "BiasAdd": BatchRule(bias_add),
    "BiasAddGrad": BatchRule(bias_gradient, 1.0),
    **dict.fromkeys(sorted(traits.ops_with("operands agree")), BatchRule(stacked)),
    "AddN": BatchRule(stacked, 1.0),
    **dict.fromkeys(sorted(traits.ops_with("softmax")), BatchRule(stacked, 1.0)),
    **dict.fromkeys(sorted(traits.ops_with("reduction")), BatchRule(reduction, 1.0)),
    **dict.fromkeys(sorted(traits.RESHAPES), BatchRule(reshape, 0.0)),
    "Transpose": BatchRule(transpose, 0.0),
    "_Bucketize": BatchRule(stacked, 1.0),
    "UnsortedSegmentSum": BatchRule(segment_sum, 1.0),
    "Split": BatchRule(split, 0.0),
    "SplitV": BatchRule(split_v, 0.0),
    "Unpack": BatchRule(pack, 0.0),
    "Slice": BatchRule(slice_, 0.0),
    "StridedSlice": BatchRule(strided_slice, 0.0),
    "ConcatV2": BatchRule(concat, 1.0),
    "Pack": BatchRule(pack, 1.0),
    **dict.fromkeys(sorted(traits.BATCH_MATMULS), BatchRule(pointwise, 1.0)),
    **dict.fromkeys(sorted(traits.MATMULS), BatchRule(product, 1.0, weights=1)),
    **dict.fromkeys(sorted(traits.GATHERS), BatchRule(lookup, 1.0, weights=0, lookup=True)),
}


FORWARD = 3
"""Ops ahead that must read two ops alike for a merge that costs something."""
_MEETINGS = traits.JOINS | traits.EXCHANGES
_CHAIN = 12
"""Ops ahead whose kernels are counted for what a merge saves."""


class Signatures:
    """Numbers for ops: equal for alike ops.

    Attributes:
        own: Op -> its signature; ops that can not be merged have none.
        forward: Op -> signature of itself and of what reads it, `FORWARD` ops deep.
        height: Op -> kernels on the longest path from it to an output, itself included.
        chain: Op -> what of that path, `_CHAIN` ops deep, a merge of it may take along, in kernels.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._gpus = gpus_of(graph)
        self.dtypes = value_types(graph)
        self._numbers: dict[Any, int] = {}
        self.own: dict[int, int] = {}
        for number, op in graph.ops.items():
            found = proved(self._own, op)
            if found is not None:
                self.own[number] = self._number(found)
        self._readers: dict[int, list[tuple[int, int, int]]] = {}  # op -> (port, slot, reader)
        for number, op in graph.ops.items():
            for slot, (producer, port) in enumerate(op.inputs):
                self._readers.setdefault(producer, []).append((port, slot, number))
        self.forward = self._forward()
        self.height = heights(graph, Readers(graph), lambda op: op.op not in traits.VIEWS)
        self.chain = self._chain()

    def _number(self, what: Any) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _own(self, op: Op) -> tuple[Any, ...]:
        rule = known(BATCH_RULES.get(op.op))
        shapes, types = self._graph.shapes, self.dtypes
        static = static_slots(op)
        weights = weight_slot(self._graph, op)
        slots: list[Any] = []
        for slot, key in enumerate(op.inputs):
            if slot in static:
                slots.append(value_key(known(self._graph.constants.get(key))))
                continue
            shape, dtype = known(shapes.get(key)), known(types.get(key))
            if slot == weights and rule.lookup:
                slots.append((shape[1:], dtype, "table"))  # tables may differ in their rows
            else:
                slots.append((shape, dtype, slot == weights))
        ports = range(max(self._graph.ports(op.node), 1))
        outputs = tuple(known(shapes.get((op.node, port))) for port in ports)
        return op.op, attrs_key(op.attrs), tuple(slots), outputs, self._gpus.get(op.node, 0)

    def _forward(self) -> dict[int, int]:
        ops, current = self._graph.ops, {number: self.own.get(number, -1) for number in self._graph.ops}
        for _ in range(FORWARD):
            following = {}
            for number in self._graph.ops:
                read = self._readers.get(number, ())
                # Where a branch enters a join differs from branch to branch, and which gradient it is of those that processes exchange.
                after = {
                    (port, -1, ops[by].op) if ops[by].op in _MEETINGS else (port, slot, current[by])
                    for port, slot, by in read
                }
                following[number] = self._number((current[number], tuple(sorted(after, key=repr))))
            current = following
        return current

    def _chain(self) -> dict[int, float]:
        ops, current = self._graph.ops, dict.fromkeys(self._graph.ops, 0.0)
        own = {number: BATCH_RULES[ops[number].op].kernels for number in self.own if ops[number].op not in traits.JOINS}
        for _ in range(_CHAIN):
            ahead = ((number, [current[by] for _, _, by in self._readers.get(number, ())]) for number in own)
            current = current | {number: own[number] + max(behind, default=0.0) for number, behind in ahead}
        return current


def value_types(graph: OpGraph) -> dict[Key, str]:
    """The dtype name of every value that it is known of: as it ran once, else by the attributes of what makes or reads it."""
    types = graph.dtypes | {key: value.dtype.name for key, value in graph.constants.items()}
    for number, op in graph.ops.items():
        if any(key not in types for key in op.inputs):
            for key, found in zip(op.inputs, schema.input_dtypes(op.op, op.attrs) or (), strict=False):
                if found is not None:
                    types.setdefault(key, found)
        ports = graph.ports(number)
        if all((number, port) in types for port in range(ports)):
            continue
        made = schema.output_dtypes(op.op, op.attrs, ports) or ()
        first = types.get(op.inputs[0]) if op.inputs and op.op in _ONE_TYPE else None
        for port in range(ports):
            # Ops that passes added lack attributes; those that do not say hand on the type of their first input.
            found = (made[port] if port < len(made) else None) or first
            if found is not None:
                types.setdefault((number, port), found)
    return types


_ONE_TYPE = traits.VIEWS | traits.ops_with("one type")
