"""Which weights may be rounded to TF32 when they are laid: constants that nothing but products reads, as weights."""

import numpy as np
import pytest

from msplit.engines.cuda.autotune.batched_matmul import TILE
from msplit.engines.cuda.autotune.matmul import rounds_weights, weights_of
from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.windows import ROUNDED_WEIGHTS
from msplit.engines.cuda.kernels.tiles import Tile
from msplit.engines.cuda.passes.tracing import Tracer
from tests.engines.cuda.cases import CPU, flat_of
from tests.engines.cuda.random_graphs import FLOAT, _Graph

PLAIN = {"transpose_a": False, "transpose_b": False}


@pytest.mark.parametrize(
    ("layers", "slots"),
    [
        ([{}], [1]),
        ([{"bias": 0}], [1]),
        ([{}, {}], [1, 3]),
        ([{"bias": 0}, {}], [1, 4]),
        ([{"bias": 0}, {"bias": 0}], [1, 4]),
    ],
)
def test_weights_of_grouped_products_stand_behind_their_data(layers, slots):
    assert weights_of(Op(9, "n", "_GroupedMatMul", {"layers": layers}, [], [9])) == slots


@pytest.mark.parametrize(
    ("tile", "rounds"),
    [(None, False), (Tile(1, 32, 64, 4), False), (Tile(16, 1, 64, 4), False), (Tile(16, 32, 64, 4), True)],
)
def test_only_tensor_cores_want_them_rounded(tile, rounds):
    attrs = {ROUNDED_WEIGHTS: True, **({} if tile is None else {TILE: tile})}
    assert rounds_weights(Op(9, "n", "MatMul", attrs, [], [9])) == rounds
    attrs.pop(ROUNDED_WEIGHTS)
    assert not rounds_weights(Op(9, "n", "MatMul", attrs, [], [9]))


def traced(*, summed=False, fetched=False, as_data=False):
    """Whether the weights of a product may be rounded, in TF32 and in IEEE precision."""
    graph = _Graph(lambda strategy: 0)
    x, weights = graph.placeholder("x", [8, 8]), graph.normal(8, 8)
    ends = [graph.node("MatMul", [x, weights], T=FLOAT, **PLAIN)]
    ends += [graph.node("AddV2", [x, weights], T=FLOAT)] if summed else []
    ends += [graph.node("MatMul", [weights, x], T=FLOAT, **PLAIN)] if as_data else []
    ends += [weights] if fetched else []
    flat = flat_of(graph.graph_def, outputs=[graph.node("Identity", [end], T=FLOAT) for end in ends])
    feeds = {"x": np.ones((8, 8), np.float32)}
    found = []
    for ieee in (False, True):
        with precision(ieee):
            source = optimize(flat, feeds, CPU).graph
            tracer = Tracer(source, CPU, nchw=False)
            tracer.feed(feeds)
            op = next(op for op in source.ops.values() if op.op == "MatMul" and op.inputs[1] in source.constants)
            arguments = tracer.arguments(tuple(op.inputs))
            found.append(ROUNDED_WEIGHTS in tracer.rounding.of_weights(op, arguments, tracer.constants).attrs)
    return tuple(found)


def test_weights_of_products_alone_may_be_rounded_in_tf32():
    assert traced() == (True, False)


@pytest.mark.parametrize("how", ["summed", "as_data"])
def test_what_others_read_stays_as_it_is(how):
    assert traced(**{how: True}) == (False, False)
