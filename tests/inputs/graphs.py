"""Flat graphs made by hand for the tests of bench: no TensorFlow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from msplit.core.graph import TensorValue
from msplit.flatten.flat import Tensor
from msplit.formats.model import Endpoint
from msplit.opset import schema
from tests.graphs import build


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
    edges = []
    for v, (_, _, sources, _) in enumerate(nodes):
        for slot, source in enumerate(sources):
            name, _, port = source.partition(":")
            edges.append((names.index(name), int(port or 0), v, slot))
    attrs = [dict(a) for *_, a in nodes]
    ops = [op for _, op, _, _ in nodes]
    host = ["string" in (schema.output_dtypes(op, a) or ()) for op, a in zip(ops, attrs, strict=True)]
    flat, _ = build(names, ops, edges, [0.0] * len(names), attrs=attrs, host=host)
    model = replace(
        flat.model,
        path=Path("made.pb"),
        inputs=tuple(Endpoint(name, name, 0, dtype, shape) for name, dtype, shape in inputs),
        outputs=tuple(Endpoint(name, name, 0, "float32", None) for name in outputs),
    )
    return replace(
        flat,
        model=model,
        inputs=tuple(Tensor(name, names.index(name), 0) for name, *_ in inputs),
        outputs=tuple(Tensor(name, names.index(name), 0) for name in outputs),
    )


def placeholder(name, dtype, shape):
    return (name, "Placeholder", [], {"dtype": dtype, "shape": shape})
