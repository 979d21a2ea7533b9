"""Whatever a file says, the inference and the costs answer: no exception, no negative or infinite time."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.cost import estimate
from msplit.cost.formulas import FORMULAS
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.shapes import registry
from msplit.shapes.infer import infer
from msplit.shapes.values import TABLE
from tests.campaign import examples
from tests.shapes.small import Builder

OPS = sorted({*registry.SHAPE_FUNCTIONS, *registry.SAME_SHAPE, *TABLE, *FORMULAS, *schema.lowered()})
ATTRIBUTES = [
    "T", "dtype", "axis", "N", "num", "num_split", "strides", "ksize", "padding", "data_format", "dilations",
    "explicit_paddings", "equation", "squeeze_dims", "keep_dims", "begin_mask", "end_mask", "ellipsis_mask",
    "new_axis_mask", "shrink_axis_mask", "transpose_a", "adj_x", "batch_dims", "shape", "block_size", "output_shapes",
    "dense_shapes", "num_partitions", "is_training", "element_shape", "num_elements", "k", "ksizes", "rates", "out_type",
    "type", "depth_radius", "direction",
]  # fmt: skip

sizes = st.none() | st.integers(0, 5)
values = st.one_of(
    st.integers(-3, 5) | st.sampled_from([2**31, -(2**63), 2**40]),
    st.booleans(),
    st.none(),
    st.sampled_from(
        ["float32", "int32", "SAME", "VALID", "EXPLICIT", "NCHW", "NHWC", "ab,bc->ac", "...a->a", "->", "x"]
    ),
    st.lists(st.integers(-2, 4), max_size=6).map(tuple),
    st.lists(st.none() | st.lists(sizes, max_size=3).map(tuple), max_size=3).map(tuple),
)


@st.composite
def nonsense(draw: st.DrawFn) -> FlatGraph:
    """A graph of real ops with inputs and attributes that mostly do not fit them."""
    b = Builder()
    for name in ("x", "y"):
        b.input(name, draw(st.none() | st.lists(sizes, max_size=5).map(tuple)))
    for _ in range(3):
        b.const(draw(st.lists(st.integers(-3, 6) | st.just(2**31 - 1), max_size=5) | st.integers(-3, 6)), "int32")
    b.const(draw(st.lists(st.floats(-2, 2), max_size=3)), "float32")
    for _ in range(draw(st.integers(1, 12))):
        inputs = draw(st.lists(st.tuples(st.integers(0, len(b.ops) - 1), st.sampled_from([0, 0, 0, 1])), max_size=5))
        attrs: dict[str, Any] = draw(st.dictionaries(st.sampled_from(ATTRIBUTES), values, max_size=6))
        b.add(draw(st.sampled_from(OPS)), *inputs, **attrs)
    return b.flat()


@settings(max_examples=examples(100, 2_500), suppress_health_check=[HealthCheck.too_slow])
@given(nonsense())
def test_nonsense_is_answered_and_never_with_a_negative_or_infinite_cost(flat: FlatGraph) -> None:
    shapes = infer(flat, batch=2)
    for outputs in shapes.outputs:
        for shape in outputs:
            assert shape is None or all(size is None or (type(size) is int and size >= 0) for size in shape)
    costs = estimate(flat, shapes)
    for array in (costs.flops, costs.bytes, costs.time_us, costs.share, costs.out_bytes):
        assert np.isfinite(array).all()
        assert (array >= 0).all()
    assert ((costs.share > 0) & (costs.share <= 1)).all()


def test_a_window_of_nonsense_makes_no_negative_work():
    import numpy as np

    from tests.graphs import flat

    found = flat("x:Placeholder; p:MaxPoolWithArgmax(x)")
    graph = found[0] if isinstance(found, tuple) else found
    attrs = graph.graph.attrs[graph.graph.index["p"]]
    attrs.update({"ksize": (1, -1, 1, 1), "strides": (1, 1, 1, 1), "padding": "VALID", "T": "float32"})
    costs = estimate(graph, infer(graph, shapes={}), "h200")
    assert (np.asarray(costs.flops) >= 0).all()
    assert (np.asarray(costs.bytes) >= 0).all()
