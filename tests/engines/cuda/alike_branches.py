"""Random GraphDefs of alike and nearly alike branches, with what is fed. Needs no TensorFlow."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.engines.cuda.random_graphs import FLOAT, INT32, _Graph

_UNARY = ["Relu", "Tanh", "Sigmoid", "Neg", "Square", "Abs"]
ROWS = 3


class Branches(_Graph):
    """Branches of one template; each works on (name, width) of a tensor of `ROWS` rows."""

    def step(self, kind, value, width, shared):
        """One step of a branch; `shared` holds what all branches use."""
        if kind == "dense":
            return self.dense(value, width, shared["width"], self.normal(width, shared["width"]))
        if kind == "siamese":
            key = ("kernel", width, shared["width"])
            shared.setdefault(key, self.normal(width, shared["width"]))
            return self.dense(value, width, shared["width"], shared[key])
        if kind == "product":
            weights = self.normal(shared["width"], width)
            y = self.node("MatMul", [value, weights], T=FLOAT, transpose_a=False, transpose_b=True)
            return y, shared["width"]
        if kind == "softmax":
            return self.node("Softmax", [value], T=FLOAT), width
        if kind == "scale":
            return self.node("Mul", [value, self.normal(width)], T=FLOAT), width
        if kind == "common":
            key = ("row", width)
            shared.setdefault(key, self.normal(1, width))
            return self.node("AddV2", [value, shared[key]], T=FLOAT), width
        if kind == "half" and width % 2 == 0:
            y = self.node("Split", [self.constant(np.int32(1)), value], T=FLOAT, num_split=2)
            return self.node("Mul", [y, f"{y}:1"], T=FLOAT), width // 2
        if kind == "mean":
            axis = self.constant(np.array([1], np.int32))
            mean = self.node("Mean", [value, axis], T=FLOAT, Tidx=INT32, keep_dims=True)
            return self.node("Sub", [value, mean], T=FLOAT), width
        if kind == "flat":
            shape = self.constant(np.array([1, ROWS, width], np.int32))
            y = self.node("Reshape", [value, shape], T=FLOAT, Tshape=INT32)
            axis = self.constant(np.array([0], np.int32))
            return self.node("Max", [y, axis], T=FLOAT, Tidx=INT32, keep_dims=False), width
        if kind == "turned":
            order = self.constant(np.array([1, 0], np.int32))
            y = self.node("Transpose", [value, order], T=FLOAT, Tperm=INT32)
            y = self.node("Neg", [y], T=FLOAT)
            return self.node("Transpose", [y, order], T=FLOAT, Tperm=INT32), width
        return self.node(kind if kind in _UNARY else "Relu", [value], T=FLOAT), width

    def dense(self, value, width, units, weights):
        y = self.node("MatMul", [value, weights], T=FLOAT, transpose_a=False, transpose_b=False)
        y = self.node("BiasAdd", [y, self.normal(units)], T=FLOAT, data_format="NHWC")
        return self.node("Relu", [y], T=FLOAT), units

    def embed(self, name, rows, width):
        axis = self.constant(np.int32(0))
        return self.node(
            "GatherV2", [self.normal(rows, width), name, axis], Tparams=FLOAT, Tindices=INT32, Taxis=INT32, batch_dims=0
        )


_KINDS = [
    "dense",
    "dense",
    "siamese",
    "product",
    "softmax",
    "scale",
    "common",
    "half",
    "mean",
    "flat",
    "turned",
    *_UNARY,
]


@st.composite
def alike_branches(draw, most=5):
    """(GraphDef, feeds, outputs): branches of one template, some with a step more or another width, and how they end."""
    g = Branches(draw)
    count = draw(st.integers(2, most))
    template = draw(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=5))
    start = draw(st.sampled_from(["shared", "own", "lookup", "sequence"]))
    shared = {"width": draw(st.sampled_from([2, 4]))}
    width = 4
    feeds = {}
    if start == "shared":
        g.placeholder("x", (ROWS, width))
        feeds["x"] = g.rng.standard_normal((ROWS, width)).astype(np.float32)
    if start == "sequence":
        axis = draw(st.integers(0, 1))
        shape = (count, ROWS, width) if axis == 0 else (ROWS, count, width)
        g.placeholder("x", shape)
        g.node("Unpack", ["x"], T=FLOAT, num=count, axis=axis)
        parts = g.graph_def.node[-1].name
        feeds["x"] = g.rng.standard_normal(shape).astype(np.float32)
    ends = []
    for branch in range(count):
        value, size = "x", width
        if start == "own":
            value = g.placeholder(f"x{branch}", (ROWS, width))
            feeds[value] = g.rng.standard_normal((ROWS, width)).astype(np.float32)
        elif start == "lookup":
            ids = g.placeholder(f"ids{branch}", (ROWS,), INT32)
            rows = draw(st.integers(2, 6))
            feeds[ids] = g.rng.integers(0, rows, ROWS).astype(np.int32)
            value = g.embed(ids, rows, width)
        elif start == "sequence":
            value = f"{parts}:{branch}" if branch else parts
        extra = draw(st.integers(-1, len(template))) if draw(st.booleans()) else -1
        mine = dict(shared)
        if draw(st.integers(0, 5)) == 0:
            mine["width"] = 3
        for place, kind in enumerate(template):
            if place == extra:
                value, size = g.step("Tanh", value, size, mine)
            value, size = g.step(kind, value, size, mine)
        shared |= {key: kept for key, kept in mine.items() if key != "width"}
        if extra == len(template):
            value, size = g.step("Neg", value, size, mine)
        ends.append((value, size))
    outputs = _end(g, ends)
    if draw(st.booleans()):
        outputs.append(draw(st.sampled_from(ends))[0])
    return g.graph_def, feeds, list(dict.fromkeys(outputs))


def _end(g, ends):
    """How the branches come together."""
    kind = g.draw(st.sampled_from(["apart", "concat", "pack", "sum", "backwards"]))
    equal = len({size for _, size in ends}) == 1
    names = [name for name, _ in ends]
    if kind == "backwards":
        names.reverse()
    if kind == "apart" or (not equal and kind in ("pack", "sum")):
        return names
    if kind == "pack":
        y = g.node("Pack", names, T=FLOAT)
        g.graph_def.node[-1].attr["axis"].i = g.draw(st.integers(-1, 2))
    elif kind == "sum":
        y = g.node("AddN", names, T=FLOAT)
    else:
        y = g.node("ConcatV2", [*names, g.constant(np.int32(1))], T=FLOAT, Tidx=INT32)
    g.graph_def.node[-1].attr["N"].i = len(names)
    return [y]
