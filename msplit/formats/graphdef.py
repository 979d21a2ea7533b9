"""A GraphDef as plain data: names, ops and integer edges."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, BrokenInput, Edges, Function, Graph, numbered
from msplit.formats.decode import AttrTable

Resolve = Callable[[str], "tuple[int, int] | str"]
"""Producer and port of a data input as written, or what is wrong with it."""

_TENSOR_NAME = re.compile(r"(.+):([0-9]{1,9})", re.DOTALL)

_SCALARS_UNTOLD = 21
"""Newest producer, TensorFlow 1.1, whose placeholders have ``shape {}`` whatever their shape is. A graph that names none is as old."""


def to_graph(graph_def: Any, functions: Mapping[str, Function]) -> Graph:
    """The nodes of a GraphDef as a Graph, which keeps it alive. An input that names nothing becomes a `BrokenInput`, not an error."""
    nodes = graph_def.node
    names = [node.name for node in nodes]
    index = numbered(names)

    def resolve(text: str) -> tuple[int, int] | str:
        match = _TENSOR_NAME.fullmatch(text)
        if not match:
            return "has a port that is not a number" if text.partition(":")[0] in index else "names no node"
        producer = index.get(match[1])
        return "names no node" if producer is None else (producer, int(match[2]))

    edges, broken = connect(nodes, index, resolve)
    return Graph(
        names=names,
        ops=interned(node.op for node in nodes),
        devices=interned(node.device for node in nodes),
        attrs=AttrTable(nodes, untold=graph_def.versions.producer <= _SCALARS_UNTOLD),
        edges=edges,
        functions=functions,
        broken_inputs=broken,
    )


def interned(texts: Iterable[str]) -> Sequence[str]:
    """A list that holds each different text once."""
    intern = sys.intern
    return [intern(text) for text in texts]


def connect(
    nodes: Any,
    index: Mapping[str, int],
    resolve: Resolve,
    first: int = 0,
    control_index: Mapping[str, int] | None = None,
) -> tuple[Edges, tuple[BrokenInput, ...]]:
    """Edges of NodeDefs.

    Args:
        nodes: The NodeDefs.
        index: Node number by name: a data input that is found here is port 0 of that node.
        resolve: Resolves all other data inputs.
        first: Number of the first NodeDef.
        control_index: Node number by name for control inputs, where it differs from `index`.

    Returns:
        The edges, and the inputs that could not be made edges.
    """
    src, port, dst, slot = array("i"), array("i"), array("i"), array("i")
    broken: list[BrokenInput] = []
    controls = index if control_index is None else control_index
    sorted_already = True
    for number, node in enumerate(nodes, first):
        position = 0
        control_seen = False
        for text in node.input:
            producer = index.get(text)
            if producer is not None and not control_seen:
                src.append(producer)
                port.append(0)
                dst.append(number)
                slot.append(position)
                position += 1
                continue
            if text.startswith("^"):
                control_seen = True
                producer = controls.get(text[1:])
                if producer is None:
                    broken.append(BrokenInput(number, text, "names no node"))
                    continue
                src.append(producer)
                port.append(CONTROL)
                dst.append(number)
                slot.append(CONTROL)
                continue
            if control_seen:
                broken.append(BrokenInput(number, text, "stands after a control input"))
                sorted_already = False
            found = (producer, 0) if producer is not None else resolve(text)
            if isinstance(found, str):
                broken.append(BrokenInput(number, text, found))
            else:
                src.append(found[0])
                port.append(found[1])
                dst.append(number)
                slot.append(position)
            position += 1
    columns = [
        np.frombuffer(column, dtype=np.int32) if column else np.empty(0, np.int32) for column in (src, port, dst, slot)
    ]
    return (Edges(*columns) if sorted_already else Edges.of(*columns)), tuple(broken)
