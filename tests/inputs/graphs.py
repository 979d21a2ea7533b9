"""Flat graphs made by hand for the tests of bench: no TensorFlow."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from msplit.core.graph import Edges, Graph, TensorValue
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.formats.model import Endpoint, Format, Model
from msplit.opset import schema


def const(array):
    array = np.asarray(array)
    return {"dtype": array.dtype.name, "value": TensorValue(array.dtype.name, array.shape, lambda: array)}


def flat_of(nodes, inputs, outputs=()):
    """A flat graph.

    Args:
        nodes: (name, op, inputs as "node" or "node:port", attributes).
        inputs: (name, dtype, shape) of what is fed; the node has the input's name.
        outputs: Names of nodes.
    """
    names = [name for name, *_ in nodes]
    columns = ([], [], [], [])
    for v, (_, _, sources, _) in enumerate(nodes):
        for slot, source in enumerate(sources):
            name, _, port = source.partition(":")
            for column, item in zip(columns, (names.index(name), int(port or 0), v, slot), strict=True):
                column.append(item)
    attrs = [dict(a) for *_, a in nodes]
    ops = [op for _, op, _, _ in nodes]
    graph = Graph(names, ops, [""] * len(names), attrs, Edges.of(*columns))
    model = Model(
        path=Path("made.pb"),
        format=Format.GRAPH_DEF,
        proto=None,
        graph_def=None,
        graph=graph,
        inputs=tuple(Endpoint(name, name, 0, dtype, shape) for name, dtype, shape in inputs),
        outputs=tuple(Endpoint(name, name, 0, "float32", None) for name in outputs),
    )
    count = len(names)
    return FlatGraph(
        model=model,
        graph=graph,
        back_edges=Edges.of([], [], [], []),
        origin_function=np.full(count, -1, np.int32),
        origin_node=np.arange(count, dtype=np.int32),
        function_names=(),
        region=np.full(count, -1, np.int32),
        regions=(),
        host=np.array(
            ["string" in (schema.output_dtypes(op, a) or ()) for op, a in zip(ops, attrs, strict=True)], bool
        ),
        stateful=np.zeros(count, bool),
        inputs=tuple(Tensor(name, names.index(name), 0) for name, *_ in inputs),
        outputs=tuple(Tensor(name, names.index(name), 0) for name in outputs),
    )


def placeholder(name, dtype, shape):
    return (name, "Placeholder", [], {"dtype": dtype, "shape": shape})
