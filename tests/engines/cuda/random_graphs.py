"""Random GraphDefs of ops that the engine runs, all shapes known, with what is fed. Needs no TensorFlow."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from msplit.opset import schema

FLOAT, INT32 = 1, 3


class _Graph:
    """Adds nodes to a GraphDef and knows the shape of every float tensor."""

    def __init__(self, draw):
        self.draw = draw
        self.graph_def = schema.graph_pb2.GraphDef()
        self.graph_def.versions.producer = 1987
        self.rng = np.random.default_rng(draw(st.integers(0, 2**20)))
        self.values: list[tuple[str, tuple[int, ...]]] = []

    def node(self, op, inputs, **attrs):
        node = self.graph_def.node.add(name=f"{op}_{len(self.graph_def.node)}", op=op, input=inputs)
        for name, value in attrs.items():
            if name.isupper() or name[0] == "T" or name == "dtype":
                node.attr[name].type = value
            elif isinstance(value, bool):
                node.attr[name].b = value
            elif isinstance(value, int):
                node.attr[name].i = value
            elif isinstance(value, list):
                node.attr[name].list.i.extend(value)
                node.attr[name].list.SetInParent()
            else:
                node.attr[name].s = value.encode()
        return node.name

    def count(self, node, **attrs):
        for name, value in attrs.items():
            self.graph_def.node[-1].attr[name].i = value
        return node

    def constant(self, array):
        array = np.asarray(array)
        kind = FLOAT if array.dtype == np.float32 else INT32
        node = self.graph_def.node.add(name=f"Const_{len(self.graph_def.node)}", op="Const")
        node.attr["dtype"].type = kind
        tensor = node.attr["value"].tensor
        tensor.dtype = kind
        for size in array.shape:
            tensor.tensor_shape.dim.add(size=size)
        tensor.tensor_content = array.tobytes()
        return node.name

    def placeholder(self, name, shape, kind=FLOAT):
        node = self.graph_def.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = kind
        for size in shape:
            node.attr["shape"].shape.dim.add(size=size)
        return name

    def pick(self, rank=None):
        options = [value for value in self.values if rank is None or len(value[1]) == rank]
        return self.draw(st.sampled_from(options)) if options else None

    def normal(self, *shape):
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def add(self, name, shape, ports=1):
        self.values += [(name if not port else f"{name}:{port}", shape) for port in range(ports)]


def _unary(g):
    (x, shape) = g.pick()
    g.add(
        g.node(g.draw(st.sampled_from(["Relu", "Tanh", "Sigmoid", "Neg", "Square", "Softplus", "Abs"])), [x], T=FLOAT),
        shape,
    )


def _binary(g):
    (x, shape) = g.pick()
    same = [value for value in g.values if value[1] == shape]
    other = g.draw(st.sampled_from(same))[0] if g.draw(st.booleans()) else g.normal(*shape[-1:])
    op = g.draw(st.sampled_from(["AddV2", "Sub", "Mul", "Maximum", "Minimum", "SquaredDifference"]))
    inputs = [x, other] if g.draw(st.booleans()) else [other, x]
    g.add(g.node(op, inputs, T=FLOAT), shape)


def _dense(g):
    (x, shape) = g.pick(2)
    units = g.draw(st.integers(1, 5))
    y = g.node("MatMul", [x, g.normal(shape[1], units)], T=FLOAT, transpose_a=False, transpose_b=False)
    if g.draw(st.booleans()):
        y = g.node("BiasAdd", [y, g.normal(units)], T=FLOAT)
    if g.draw(st.booleans()):
        y = g.node("Relu", [y], T=FLOAT)
    g.add(y, (shape[0], units))


def _product(g):
    (x, shape) = g.pick(2)
    turned = [value for value in g.values if len(value[1]) == 2 and value[1][1] == shape[1]]
    (y, other) = g.draw(st.sampled_from(turned))
    g.add(g.node("MatMul", [x, y], T=FLOAT, transpose_a=False, transpose_b=True), (shape[0], other[0]))


def _split(g):
    (x, shape) = g.pick(2)
    axis = g.draw(st.integers(0, 1))
    parts = g.draw(st.sampled_from([n for n in (1, 2, 3, 4) if shape[axis] % n == 0]))
    y = g.node("Split", [g.constant(np.int32(axis)), x], T=FLOAT, num_split=parts)
    g.add(y, tuple(size // parts if i == axis else size for i, size in enumerate(shape)), parts)


def _unpack(g):
    (x, shape) = g.pick(2)
    axis = g.draw(st.integers(0, 1))
    y = g.node("Unpack", [x], T=FLOAT, num=shape[axis], axis=axis)
    for port in range(shape[axis]):
        source = y if not port else f"{y}:{port}"
        if port < 2:
            rows = g.constant(np.array([1, shape[1 - axis]], np.int32))
            g.add(g.node("Reshape", [source, rows], T=FLOAT, Tshape=INT32), (1, shape[1 - axis]))


def _pack(g):
    (x, shape) = g.pick(2)
    same = [value[0] for value in g.values if value[1] == shape]
    chosen = [x, *(g.draw(st.sampled_from(same)) for _ in range(g.draw(st.integers(0, 2))))]
    y = g.node("Pack", chosen, T=FLOAT, N=FLOAT)
    g.graph_def.node[-1].attr["N"].i = len(chosen)
    flat = g.constant(np.array([len(chosen) * shape[0], shape[1]], np.int32))
    g.add(g.node("Reshape", [y, flat], T=FLOAT, Tshape=INT32), (len(chosen) * shape[0], shape[1]))


def _concat(g):
    (x, shape) = g.pick(2)
    axis = g.draw(st.integers(0, 1))
    fitting = [value for value in g.values if len(value[1]) == 2 and value[1][1 - axis] == shape[1 - axis]]
    chosen = [(x, shape), *(g.draw(st.sampled_from(fitting)) for _ in range(g.draw(st.integers(1, 2))))]
    total = sum(value[1][axis] for value in chosen)
    if total > 12:
        return
    y = g.node("ConcatV2", [*(value[0] for value in chosen), g.constant(np.int32(axis))], T=FLOAT, Tidx=INT32)
    g.graph_def.node[-1].attr["N"].i = len(chosen)
    g.add(y, (shape[0], total) if axis else (total, shape[1]))


def _identity_n(g):
    chosen = [g.pick() for _ in range(g.draw(st.integers(1, 3)))]
    y = g.node("IdentityN", [value[0] for value in chosen])
    g.graph_def.node[-1].attr["T"].list.type.extend([FLOAT] * len(chosen))
    for port, value in enumerate(chosen):
        g.add(y if not port else f"{y}:{port}", value[1])


def _reduce(g):
    (x, shape) = g.pick(2)
    axis = g.draw(st.integers(0, 1))
    op = g.draw(st.sampled_from(["Sum", "Mean", "Max", "Min"]))
    y = g.node(op, [x, g.constant(np.array([axis], np.int32))], T=FLOAT, Tidx=INT32, keep_dims=True)
    g.add(y, tuple(1 if i == axis else size for i, size in enumerate(shape)))


def _gather(g):
    (x, shape) = g.pick(2)
    rows = g.constant(g.rng.integers(0, shape[0], g.draw(st.integers(1, 4))).astype(np.int32))
    y = g.node("GatherV2", [x, rows, g.constant(np.int32(0))], Tparams=FLOAT, Tindices=INT32, Taxis=INT32, batch_dims=0)

    size = next(n for n in g.graph_def.node if n.name == rows).attr["value"].tensor.tensor_shape.dim[0].size
    g.add(y, (size, shape[1]))


def _embed(g):
    table = g.normal(7, g.draw(st.integers(1, 4)))
    width = next(n for n in g.graph_def.node if n.name == table).attr["value"].tensor.tensor_shape.dim[1].size
    y = g.node(
        "GatherV2", [table, "ids", g.constant(np.int32(0))], Tparams=FLOAT, Tindices=INT32, Taxis=INT32, batch_dims=0
    )
    g.add(y, (3, width))


def _transpose(g):
    (x, shape) = g.pick(2)
    y = g.node("Transpose", [x, g.constant(np.array([1, 0], np.int32))], T=FLOAT, Tperm=INT32)
    g.add(y, (shape[1], shape[0]))


def _slice(g):
    (x, shape) = g.pick(2)
    begin = [g.draw(st.integers(0, size - 1)) for size in shape]
    size = [g.draw(st.integers(1, whole - start)) for whole, start in zip(shape, begin, strict=True)]
    y = g.node(
        "Slice", [x, g.constant(np.array(begin, np.int32)), g.constant(np.array(size, np.int32))], T=FLOAT, Index=INT32
    )
    g.graph_def.node[-1].attr["Index"].type = INT32
    g.add(y, tuple(size))


def _conv(g):
    (x, shape) = g.pick(2)
    if shape[0] < 2 or shape[1] < 2:
        return
    image = g.node("Reshape", [x, g.constant(np.array([1, *shape, 1], np.int32))], T=FLOAT, Tshape=INT32)
    y = g.node(
        "Conv2D",
        [image, g.normal(2, 2, 1, 2)],
        T=FLOAT,
        strides=[1, 1, 1, 1],
        dilations=[1, 1, 1, 1],
        padding="SAME",
        data_format="NHWC",
    )
    y = g.node("Mul", [y, g.normal(2)], T=FLOAT)
    y = g.node("AddV2", [y, g.normal(2)], T=FLOAT)
    y = g.node("Relu", [y], T=FLOAT)
    flat = g.constant(np.array([shape[0], 2 * shape[1]], np.int32))
    g.add(g.node("Reshape", [y, flat], T=FLOAT, Tshape=INT32), (shape[0], 2 * shape[1]))


def _softmax(g):
    (x, shape) = g.pick(2)
    g.add(g.node("Softmax", [x], T=FLOAT), shape)


_STEPS = [_unary, _binary, _dense, _product, _split, _unpack, _pack, _concat, _identity_n, _reduce, _gather, _embed]
_STEPS += [_transpose, _slice, _conv, _softmax]


def _square(g):
    (x, shape) = g.pick(2)
    g.add(g.node("MatMul", [x, g.normal(shape[1], shape[1])], T=FLOAT, transpose_a=False, transpose_b=False), shape)


POINTWISE = [*[_unary, _binary, _binary, _square] * 3, _dense, _split, _slice, _reduce, _softmax, _concat, _transpose]
"""Steps of graphs in which most can be fused."""


@st.composite
def random_graphs(draw, most=25, steps=_STEPS):
    """(GraphDef, feeds, outputs): up to `most` steps, the last tensors and some of those between as outputs."""
    g = _Graph(draw)
    shapes = {"x": (3, 4), "y": (3, 4), "z": (2, 6)}
    for name, shape in shapes.items():
        g.add(g.placeholder(name, shape), shape)
    g.placeholder("ids", (3,), INT32)
    for _ in range(draw(st.integers(1, most))):
        draw(st.sampled_from(steps))(g)
    if len(g.values) == len(shapes):
        _unary(g)
    made = [name for name, _ in g.values[len(shapes) :]]
    outputs = list(dict.fromkeys([made[-1], *(draw(st.sampled_from(made)) for _ in range(draw(st.integers(0, 3))))]))
    feeds = {name: g.rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["ids"] = g.rng.integers(0, 7, 3).astype(np.int32)
    return g.graph_def, feeds, outputs
