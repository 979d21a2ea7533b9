"""A bias behind a sum of products moves into one of them: ``(p + q) + b = (p + b) + q``.

A product takes its bias along for nothing; behind the sum it is a kernel of its own, in every step of a recurrent layer. Of two
products the one that is ready first takes it, so that the other one's path becomes shorter.
"""

from __future__ import annotations

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.pattern import FLOATS, Readers, other_input, per_channel
from msplit.opset.traits import ADD, BIASES


def reassociate_bias(graph: OpGraph) -> bool:
    """Moves every constant bias that it can."""
    readers = Readers(graph)
    changed = False
    place = {number: position for position, number in enumerate(graph.ops)}
    for sum_op in list(graph.ops.values()):
        if sum_op.op not in ADD or sum_op.attrs.get("T") not in FLOATS:
            continue
        shape, bias_op = graph.shapes.get(sum_op.out), readers.only(sum_op.out)
        if shape is None or bias_op is None or sum_op.inputs[0] == sum_op.inputs[1]:
            continue
        products = [key for key in sum_op.inputs if _is_product(graph, readers, key, shape)]
        bias = _bias(graph, bias_op, sum_op.out, shape) if products else None
        if bias is None:
            continue
        first = min(products, key=lambda key: place[key[0]])
        attrs = {"T": sum_op.attrs.get("T"), "data_format": "NHWC"}
        moved = graph.add("BiasAdd", bias_op, attrs, [first, bias], shape)
        moved.source_nodes = list(bias_op.source_nodes)
        rest = next(key for key in sum_op.inputs if key != first)
        bias_op.op, bias_op.attrs = sum_op.op, sum_op.attrs
        bias_op.inputs, bias_op.source_nodes = [moved.out, rest], list(sum_op.source_nodes)
        del graph.ops[sum_op.node]
        changed = True
    return changed


def _is_product(graph: OpGraph, readers: Readers, key: Key, shape: tuple[int, ...]) -> bool:
    op = readers.maker(key)
    return op is not None and op.op == "MatMul" and graph.shapes.get(key) == shape


def _bias(graph: OpGraph, op: Op, key: Key, shape: tuple[int, ...]) -> Key | None:
    """The vector along the last axis that an op adds to a matrix, if that is all it does."""
    other = other_input(op, key)
    value = graph.constants.get(other) if other is not None else None
    if other is None or value is None or graph.shapes.get((op.node, 0)) != shape:
        return None
    if op.op in BIASES and op.inputs[0] == key:
        return other
    if op.op not in ADD or value.size != shape[-1]:
        return None
    vector = per_channel(value, shape, (len(shape) - 1,))
    return None if vector is None else graph.constant(vector.astype(value.dtype))
