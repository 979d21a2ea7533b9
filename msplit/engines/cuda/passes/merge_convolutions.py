"""Convolutions of the same data (siblings) as one step: horizontal fusion.

A block of Inception starts with three or four 1×1 convolutions of one tensor, each of which fills a tenth of a large GPU. Their filters
side by side are one filter with more output channels (Jia et al., TASO, SOSP 2019, merge them so and cut the result afterwards); here each
one's result is a tensor of its own, so that nothing is cut or copied. Siblings depend on nothing but the tensor that they share and on
constants, so that none of them can depend on another. Whether one kernel for all beats each with its own, one after the other and side by
side, is measured (`merged_conv`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Merge, Op, OpGraph
from msplit.engines.cuda.ir.windows import SIBLINGS, TILES
from msplit.opset.traits import CONV2D

MOST = 4
"""Convolutions that one step does."""

EPILOGUES = ((), ("BiasAdd",), ("BiasAdd", "Relu"))
"""What may follow each of them in the same step."""

Decide = Callable[[OpGraph, Sequence[Op]], "tuple[int, ...] | None"]
"""How to cut the work of siblings into tiles (`tiles.Tiles`), or None to leave them as they are."""

_WINDOW = ("strides", "padding", "explicit_paddings", "dilations", "T")


def merge_siblings(graph: OpGraph, decide: Decide) -> bool:
    """Makes siblings one op each where that is decided, and notes it in `merges`.

    Args:
        graph: After all other passes but pointwise fusion, so that biases and activations are in.
        decide: Called once per set of siblings.
    """
    before = len(graph.ops)
    for members in find_siblings(graph):
        tiles = decide(graph, members)
        if tiles is not None:
            _merge(graph, members, tiles)
            graph.merges.append(Merge(members[0].op, len(members), 0, launches=True))
    if len(graph.ops) == before:
        return False
    graph.forget_constants()
    return True


def find_siblings(graph: OpGraph) -> list[list[Op]]:
    """Sets of 2 to `MOST` siblings, the member first that most convolutions come behind: it decides on the stream of all."""
    readers = graph.consumers()
    found: dict[tuple[Any, ...], list[Op]] = {}
    for op in graph.ops.values():
        kind = _kind(graph, op, readers)
        if kind is not None:
            found.setdefault(kind, []).append(op)
    if all(len(members) < 2 for members in found.values()):
        return []
    behind = _behind(graph, readers)
    sets = []
    for members in found.values():
        members.sort(key=lambda op: -behind[op.node])
        sets += [part for part in _parts(members) if len(part) > 1]
    return sets


def _kind(graph: OpGraph, op: Op, readers: dict[Key, list[int]]) -> tuple[Any, ...] | None:
    """What siblings have in common; None for what can have none."""
    if op.op not in CONV2D or str(op.attrs.get("data_format", "NHWC")) != "NHWC":
        return None
    steps = tuple(str(step) for step in op.attrs.get("fused_ops", ())) if op.op == "_FusedConv2D" else ()
    data, *rest = op.inputs
    shape, filter = graph.shapes.get(data), graph.constants.get(rest[0])
    if steps not in EPILOGUES or len(rest) != 1 + bool(steps) or shape is None or filter is None or filter.ndim != 4:
        return None
    if shape[-1] != filter.shape[2] or 0 in (*shape, *filter.shape) or data in graph.constants:
        return None
    # A filter that others read too would be held twice.
    if any(key not in graph.constants for key in rest) or len(readers[rest[0]]) > 1:
        return None
    if rest[0] in graph.fetches.values():
        return None
    window = tuple(str(op.attrs.get(name)) for name in _WINDOW)
    return data, steps, filter.shape[:3], filter.dtype.name, window


def _behind(graph: OpGraph, readers: dict[Key, list[int]]) -> dict[int, int]:
    """Per op the convolutions on the longest way from it to an output, itself included."""
    behind: dict[int, int] = {}
    follow: dict[int, list[int]] = {}
    for (producer, _), users in readers.items():
        follow.setdefault(producer, []).extend(users)
    for number, op in reversed(graph.ops.items()):
        longest = max((behind[user] for user in follow.get(number, ())), default=0)
        behind[number] = longest + (op.op in CONV2D)
    return behind


def _parts(members: list[Op]) -> Iterator[list[Op]]:
    """Parts of nearly equal size, none larger than `MOST`."""
    count = -(-len(members) // MOST)
    size, larger = divmod(len(members), count)
    start = 0
    for number in range(count):
        end = start + size + (number < larger)
        yield members[start:end]
        start = end


def _merge(graph: OpGraph, members: Sequence[Op], tiles: tuple[int, ...]) -> None:
    first = members[0]
    filters = [graph.constants[op.inputs[1]] for op in members]
    sizes = tuple(int(filter.shape[3]) for filter in filters)
    inputs = [first.inputs[0], graph.constant(np.concatenate(filters, 3))]
    if len(first.inputs) > 2:
        inputs.append(graph.constant(np.concatenate([graph.constants[op.inputs[2]].reshape(-1) for op in members])))
    attrs = {**first.attrs, SIBLINGS: sizes, TILES: tiles}
    source_nodes = [node for op in members for node in op.source_nodes]
    number = graph.fresh()
    names: dict[Key, Key] = {}
    for port, op in enumerate(members):
        names[op.node, 0] = number, port
        graph.shapes[number, port] = graph.shapes[op.node, 0]
        if (op.node, 0) in graph.dtypes:
            graph.dtypes[number, port] = graph.dtypes[op.node, 0]
        del graph.ops[op.node]
    graph.ops[number] = Op(number, first.name, "_SiblingConv2D", attrs, inputs, source_nodes, len(members))
    graph.rename(names)
