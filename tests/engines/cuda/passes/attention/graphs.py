"""Attention as a GraphDef, made without TensorFlow."""

from __future__ import annotations

import numpy as np

from tests.engines.cuda.cases import flat_of
from tests.engines.cuda.random_graphs import FLOAT, _Graph


class Fixed:
    def __call__(self, strategy):
        return 0


def attention_graph(batch, heads, rows, columns, depth, least):
    """Attention with a mask by a condition, as a GraphDef: queries, keys and values as dense layers give them."""
    g = _Graph(Fixed())
    laid = []
    for name, size in (("q", rows), ("k", columns), ("v", columns)):
        g.placeholder(name, (batch, size, heads, depth))
        laid.append(g.node("Transpose", [name, g.constant(np.asarray([0, 2, 1, 3], np.int32))], T=FLOAT, Tperm=3))
    g.placeholder("mask", (batch, 1, 1, columns))
    kept = g.node("Greater", ["mask", g.constant(np.zeros((), np.float32))], T=FLOAT)
    scores = g.node("BatchMatMulV2", laid[:2], T=FLOAT, adj_x=False, adj_y=True)
    scores = g.node("Mul", [scores, g.constant(np.asarray(depth**-0.5, np.float32))], T=FLOAT)
    scores = g.node("SelectV2", [kept, scores, g.constant(np.asarray(least, np.float32))], T=FLOAT)
    mixed = g.node("BatchMatMulV2", [g.node("Softmax", [scores], T=FLOAT), laid[2]], T=FLOAT, adj_x=False, adj_y=False)
    out = g.node("Transpose", [mixed, g.constant(np.asarray([0, 2, 1, 3], np.int32))], T=FLOAT, Tperm=3)
    flat = flat_of(g.graph_def, outputs=[g.node("Identity", [out], T=FLOAT)])
    rng = np.random.default_rng(0)
    shapes = {
        "q": (batch, rows, heads, depth),
        "k": (batch, columns, heads, depth),
        "v": (batch, columns, heads, depth),
    }
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    mask = rng.standard_normal((batch, 1, 1, columns)).astype(np.float32)
    mask[0] = -1  # nothing counts
    return flat, {**feeds, "mask": mask}
