"""What loops and calls cost: their bodies times their trips, without what is only counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.core.graph import Argument, Function, FunctionRef
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats import read
from msplit.shapes import infer

from .small import Builder, costs_of


class Loop:
    """A loop of TensorFlow 1 over a counter and x: `trips` runs of what `work` makes of x."""

    def __init__(self, b: Builder, start: int, limit: int, x: int, step: float, frame: str) -> None:
        self.b, self.frame, self.step = b, frame, step
        self.counter, self.x = (self._variable(first) for first in (start, x))
        self.less = b.add("Less", self.counter, limit, T="int32")
        self.condition = b.add("LoopCond", self.less)
        self.i, self.value = (b.add("Switch", merge, self.condition, T="float32") for merge in (self.counter, self.x))
        self.inside = b.add("Identity", (self.value, 1), T="float32")
        self.back: list[tuple[int, int, int, int]] = []

    def _variable(self, first: int) -> int:
        enter = self.b.add("Enter", first, T="float32", frame_name=self.frame, is_constant=False)
        return self.b.add("Merge", enter, T="float32", N=1)

    def close(self, result: int) -> int:
        """Lets the next iteration begin with the result, and gives what the loop leaves behind."""
        step = self.b.const(self.step, "float32" if isinstance(self.step, float) else "int32")
        following = self.b.add("AddV2", self.b.add("Identity", (self.i, 1)), step, T="int32")
        for merge, source in ((self.counter, following), (self.x, result)):
            self.back.append((self.b.add("NextIteration", source, T="float32"), 0, merge, 1))
        return self.b.add("Exit", self.value, T="float32")


def _loop(limit: int, step: int = 1, start: int = 0, *, fed: bool = False) -> tuple[FlatGraph, dict[str, int]]:
    b = Builder()
    x = b.input("x", (2, 4))
    loop = Loop(b, b.scalar(start), b.input("limit", (), "int32") if fed else b.scalar(limit), x, step, "outer")
    tanh = b.add("Tanh", loop.inside, T="float32")
    end = loop.close(tanh)
    outside = b.add("Tanh", end, T="float32")
    nodes = {"tanh": tanh, "outside": outside, "less": loop.less}
    return b.flat(back_edges=tuple(loop.back)), nodes


@pytest.mark.parametrize(
    ("limit", "step", "start", "trips"), [(12, 1, 0, 12), (12, 5, 0, 3), (12, 1, 10, 2), (3, 1, 7, 0)]
)
def test_what_is_in_a_v1_loop_costs_its_trips(limit: int, step: int, start: int, trips: int) -> None:
    flat, nodes = _loop(limit, step, start)
    costs = costs_of(flat)
    assert costs.known.all()
    assert costs.time_us[nodes["tanh"]] == pytest.approx(trips * costs.time_us[nodes["outside"]])
    assert costs.flops[nodes["tanh"]] == trips * costs.flops[nodes["outside"]]
    assert costs.bytes[nodes["tanh"]] == trips * costs.bytes[nodes["outside"]]


def test_what_a_v1_loop_counts_is_known_before_the_first_step() -> None:
    flat, nodes = _loop(12)
    costs = costs_of(flat)
    assert costs.time_us[nodes["less"]] == 0
    assert costs.time_us.sum() == pytest.approx(13 * costs.time_us[nodes["outside"]])


FLOATS = [(0.0, 2.5, 1.0, 3), (0.5, 3.0, 1.0, 3), (0.0, 3.0, 1.0, 3), (0.0, 2.0, 0.1, None), (0.0, np.inf, 1.0, None)]


@pytest.mark.parametrize(("start", "limit", "step", "trips"), FLOATS)
def test_a_v1_loop_may_count_in_floats(start: float, limit: float, step: float, trips: int | None) -> None:
    b = Builder()
    loop = Loop(b, b.const(start), b.const(limit), b.input("x", (2, 4)), step, "outer")
    tanh = b.add("Tanh", loop.inside, T="float32")
    loop.close(tanh)
    runs = infer(b.flat(back_edges=tuple(loop.back))).runs
    assert runs is not None
    assert (None if np.isnan(runs[tanh]) else runs[tanh]) == trips


@pytest.mark.parametrize(("start", "limit", "step", "trips"), FLOATS)
def test_a_while_may_count_in_floats(start: float, limit: float, step: float, trips: int | None) -> None:
    functions = {
        "cond": _function("cond", {"i": "float32"}, lambda f: [f.add("Less", 0, f.const(limit), T="float32")]),
        "body": _function("body", {"i": "float32"}, lambda f: [f.add("AddV2", 0, f.const(step), T="float32")]),
    }
    b = Builder()
    loop = b.add("While", b.const(start), T=("float32",), cond=FunctionRef("cond"), body=FunctionRef("body"))
    shapes = infer(b.flat(functions=functions))
    assert shapes.shape(loop) == ()
    assert shapes.trip_counts.get(loop) == trips


def test_a_v1_loop_to_a_limit_that_is_fed_is_a_guess() -> None:
    flat, nodes = _loop(0, fed=True)
    costs = costs_of(flat)
    assert not costs.known[[nodes["tanh"], nodes["less"]]].any()
    assert costs.known[nodes["outside"]]
    assert costs.time_us[nodes["less"]] > 0


@pytest.mark.parametrize("fed", [False, True])
def test_v1_loops_inside_each_other_multiply(fed: bool) -> None:
    b = Builder()
    x = b.input("x", (2, 4))
    outer = Loop(b, b.scalar(0), b.scalar(3), x, 1, "outer")
    limit = b.add("Enter", b.input("limit", (), "int32") if fed else b.scalar(5), frame_name="outer", is_constant=True)
    start = b.add("Const", **b.attrs[b.scalar(0)], after=(outer.inside,))
    inner = Loop(b, start, limit, outer.inside, 1, "inner")
    tanh = b.add("Tanh", inner.inside, T="float32")
    between = b.add("Tanh", inner.close(tanh), T="float32")
    outside = b.add("Tanh", outer.close(between), T="float32")
    costs = costs_of(b.flat(back_edges=(*outer.back, *inner.back)))
    one = costs.time_us[outside]
    assert costs.known[[tanh, between, outside]].tolist() == [not fed, True, True]
    assert costs.time_us[between] == pytest.approx(3 * one)
    if not fed:
        assert costs.time_us[tanh] == pytest.approx(15 * one)


def test_a_state_that_starts_with_a_constant_is_no_constant() -> None:
    b = Builder()
    x = b.input("x", (2, 4))
    zeros = b.const([[0.0] * 4] * 2)
    loop = Loop(b, b.scalar(0), b.scalar(4), zeros, 1, "outer")
    squared = b.add("Square", loop.inside, T="float32")
    entered = b.add("Enter", x, T="float32", frame_name="outer", is_constant=True)
    end = loop.close(b.add("AddV2", squared, entered, T="float32"))
    b.add("Tanh", end, T="float32")
    assert costs_of(b.flat(back_edges=tuple(loop.back))).time_us[squared] > 0


def test_a_loop_over_constants_is_known_before_the_first_step() -> None:
    b = Builder()
    loop = Loop(b, b.scalar(0), b.scalar(4), b.const([1.0, 2.0]), 1, "outer")
    end = loop.close(b.add("Tanh", loop.inside, T="float32"))
    b.add("AddV2", b.input("x", (2,)), end, name="sum", T="float32")
    costs = costs_of(b.flat(back_edges=tuple(loop.back)))
    assert (costs.time_us > 0).sum() == 1


def _function(name: str, dtypes: dict[str, str], build: Any) -> Function:
    body = Builder()
    for argument, dtype in dtypes.items():
        body.add("_Arg", name=argument, T=dtype)
    results = build(body)
    return Function(
        name,
        body.graph(),
        tuple(Argument(n, d, i) for i, (n, d) in enumerate(dtypes.items())),
        tuple(Argument(f"r{i}", "float32", node) for i, node in enumerate(results)),
    )


def test_what_a_while_counts_is_known_before_the_first_step_and_its_state_is_not() -> None:
    dtypes = {"i": "int32", "h": "float32", "x": "float32"}
    functions = {
        "cond": _function("cond", dtypes, lambda f: [f.add("Less", 0, f.scalar(7), T="int32")]),
        "body": _function(
            "body",
            dtypes,
            lambda f: [
                f.add("AddV2", 0, f.scalar(1), T="int32"),
                f.add("AddV2", f.add("Tanh", 1, T="float32"), 2, T="float32"),
                f.add("Identity", 2, T="float32"),
            ],
        ),
    }
    b = Builder()
    x = b.input("x", (2, 4))
    one = b.add("Tanh", x, T="float32")
    state = b.const([[0.0] * 4] * 2)
    loop = b.add(
        "While", b.scalar(0), state, x, T=tuple(dtypes.values()), cond=FunctionRef("cond"), body=FunctionRef("body")
    )
    costs = costs_of(b.flat(functions=functions))
    assert costs.known[loop]
    # Tanh and AddV2 of the state, seven times: nothing for the counter.
    assert costs.time_us[loop] == pytest.approx(14 * costs.time_us[one], rel=0.05)


@pytest.mark.parametrize("op", ["PartitionedCall", "StatefulPartitionedCall", "XlaLaunch"])
def test_a_call_that_xla_compiles_costs_what_its_kernels_do(op: str) -> None:
    def build(f: Builder) -> list[int]:
        node = 0
        for _ in range(5):
            node = f.add("Tanh", node, T="float32")
        return [node]

    b = Builder()
    x = b.input("x", (2, 4))
    one = b.add("Tanh", x, T="float32")
    attribute = "function" if op == "XlaLaunch" else "f"
    attrs: dict[str, Any] = {attribute: FunctionRef("f"), "Tout": ("float32",), "_XlaMustCompile": True}
    call = b.add(op, x, **attrs)
    costs = costs_of(b.flat(functions={"f": _function("f", {"a": "float32"}, build)}))
    assert costs.known[call]
    assert costs.time_us[call] == pytest.approx(5 * costs.time_us[one])


def test_functions_with_a_way_per_path_through_them_are_priced_in_time() -> None:
    """Each function calls the next one twice, once with a constant in place of one argument: 2 ** 40 ways to be called."""
    depth = 40
    dtypes = {f"a{i}": "float32" for i in range(depth)}
    functions = {}
    for level in range(depth):

        def build(f: Builder, level: int = level) -> list[int]:
            arguments = list(range(depth))
            if level == depth - 1:
                return [f.add("AddN", *arguments, T="float32", N=depth)]
            constant = f.weight(100, 100)
            changed = [constant if i == level else i for i in arguments]
            called = [
                f.add("PartitionedCall", *given, f=FunctionRef(f"f{level + 1}")) for given in (arguments, changed)
            ]
            return [f.add("AddV2", *called, T="float32")]

        functions[f"f{level}"] = _function(f"f{level}", dtypes, build)
    b = Builder()
    inputs = [b.input(f"x{i}", (100, 100)) for i in range(depth)]
    call = b.add("PartitionedCall", *inputs, f=FunctionRef("f0"))
    assert costs_of(b.flat(functions=functions)).time_us[call] > 0


@pytest.mark.tf
def test_a_loop_costs_the_same_in_tensorflow_1_and_2(tmp_path: Path) -> None:
    import tensorflow as tf

    weights = np.zeros((64, 64), np.float32)
    totals = []
    for version in (1, 2):
        with tf.Graph().as_default() as graph:
            if version == 1:
                tf.compat.v1.disable_control_flow_v2()
            x = tf.compat.v1.placeholder(tf.float32, (10, 8, 64), name="x")

            def turn(i: Any, h: Any, x: Any = x) -> tuple[Any, Any]:
                return i + 1, tf.tanh(x[i] + tf.matmul(h, weights))

            try:
                _, h = tf.compat.v1.while_loop(lambda i, h: i < 10, turn, (0, tf.zeros((8, 64))))
            finally:
                tf.compat.v1.enable_control_flow_v2()
            tf.identity(h, name="out")
        path = tmp_path / f"{version}.pb"
        path.write_bytes(graph.as_graph_def().SerializeToString())
        flat = flatten(read(path))
        assert ("LoopCond" in flat.graph.ops) == (version == 1)
        costs = costs_of(flat)
        assert costs.known.all()
        totals.append(costs.time_us.sum())
    assert totals[0] == pytest.approx(totals[1])
