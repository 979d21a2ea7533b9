"""A bias behind a sum of products moves into one of them: ``(p + q) + b = (p + b) + q``.

A product takes its bias along for nothing; behind the sum it is a kernel of its own, in every step of a recurrent layer. Of two
products the one that is ready first takes it, so that the other one's path becomes shorter.
"""

from __future__ import annotations

from msplit.engines.cuda.ir.program import Key, Op, Source
from msplit.engines.cuda.passes.pattern import Readers, per_channel

_FLOATS = ("float16", "bfloat16", "float32", "float64")


def move_biases(source: Source) -> None:
    """Moves every constant bias that it can."""
    readers = Readers(source)
    place = {number: position for position, number in enumerate(source.ops)}
    for sum_op in list(source.ops.values()):
        if sum_op.op not in ("Add", "AddV2") or sum_op.attrs.get("T") not in _FLOATS:
            continue
        shape = source.shapes.get((sum_op.node, 0))
        bias_op = readers.only((sum_op.node, 0))
        if shape is None or bias_op is None or sum_op.inputs[0] == sum_op.inputs[1]:
            continue
        bias = _bias(source, bias_op, (sum_op.node, 0), shape)
        products = [key for key in sum_op.inputs if _is_product(source, readers, key, shape)]
        if bias is None or not products:
            continue
        first = min(products, key=lambda key: place[key[0]])
        attrs = {"T": sum_op.attrs.get("T"), "data_format": "NHWC"}
        moved = source.add("BiasAdd", bias_op, attrs, [first, bias], shape)
        moved.covers = list(bias_op.covers)
        rest = sum_op.inputs[1] if sum_op.inputs[0] == first else sum_op.inputs[0]
        bias_op.op, bias_op.attrs = sum_op.op, sum_op.attrs
        bias_op.inputs, bias_op.covers = [(moved.node, 0), rest], list(sum_op.covers)
        del source.ops[sum_op.node]


def _is_product(source: Source, readers: Readers, key: Key, shape: tuple[int, ...]) -> bool:
    op = source.ops.get(key[0])
    return op is not None and op.op == "MatMul" and source.shapes.get(key) == shape and readers.only(key) is not None


def _bias(source: Source, op: Op, key: Key, shape: tuple[int, ...]) -> Key | None:
    """The vector along the last axis that an op adds to a value, if that is all it does."""
    if source.shapes.get((op.node, 0)) != shape or len(op.inputs) != 2:
        return None
    if op.op in ("BiasAdd", "BiasAddV1") and op.inputs[0] == key and len(shape) == 2:
        return op.inputs[1] if op.inputs[1] in source.constants else None
    if op.op not in ("Add", "AddV2") or (op.inputs[0] == key) == (op.inputs[1] == key):
        return None
    other = op.inputs[1] if op.inputs[0] == key else op.inputs[0]
    value = source.constants.get(other)
    vector = per_channel(value, shape, (len(shape) - 1,)) if value is not None and value.size == shape[-1] else None
    return source.constant(vector.astype(value.dtype)) if vector is not None and value is not None else None
