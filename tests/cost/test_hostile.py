"""Files that lie about sizes must fill neither the memory nor the day. Each case here filled one of them before it was mended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msplit.core.graph import Argument, Function, FunctionRef
from msplit.cost import estimate
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.shapes import Shapes
from msplit.shapes.infer import infer
from tests.fuzz.limits import limited
from tests.shapes.small import Builder


def priced(flat: FlatGraph, seconds: float = 1.0, megabytes: float = 300.0) -> tuple[Shapes, Costs]:
    with limited(seconds, megabytes) as used:
        shapes = infer(flat, batch=2)
        costs = estimate(flat, shapes)
    assert used.seconds < seconds
    assert used.megabytes < megabytes
    return shapes, costs


def test_operands_that_broadcast_to_billions() -> None:
    b = Builder()
    x, y, z = b.const([[[1]]] * 4000, "int32"), b.const([[[1]] * 4000], "int32"), b.const([[[1] * 4000]], "int32")
    b.add("SelectV2", x, y, z)
    for _ in range(20):
        b.add("AddV2", x, y, T="int32")
    shapes, _ = priced(b.flat())
    assert shapes.shape(3) == (4000, 4000, 4000)


def test_a_gather_of_many_long_rows() -> None:
    b = Builder()
    table, rows, axis = b.const([[1] * 4000], "int32"), b.const([0] * 4000, "int32"), b.scalar(0)
    for _ in range(20):
        b.add("GatherV2", table, rows, axis)
    shapes, _ = priced(b.flat())
    assert shapes.shape(4) == (4000, 4000)


@pytest.mark.parametrize("op", ["Pack", "ConcatV2", "DynamicStitch"])
def test_one_constant_joined_to_itself_many_times(op: str) -> None:
    b = Builder()
    part, axis = b.const([1] * 4000, "int32"), b.scalar(0)
    b.add(op, *[part] * 20_000, *([axis] if op == "ConcatV2" else []), N=20_000)
    priced(b.flat())


def test_many_values_of_many_elements() -> None:
    b = Builder()
    size, value = b.ints(4000), b.scalar(1)
    for _ in range(20_000):
        b.add("Fill", size, value)
    priced(b.flat(), seconds=4)


def test_many_constants_taken_apart() -> None:
    b = Builder()
    part = b.const([1] * 4000, "int32")
    for _ in range(2000):
        b.add("Unpack", part, num=4000)
    priced(b.flat(), seconds=2)


def test_repetitions_that_contradict_the_shape() -> None:
    b = Builder()
    b.add("Tile", b.const([1], "int32"), b.const([2**40, 1], "int64"), _output_shapes=((1,),))
    priced(b.flat())


def test_a_slice_of_a_billion_axes() -> None:
    b = Builder()
    x, spec = b.input("x", (1, 2)), b.input("spec", (2**40,), "int32")
    b.add("StridedSlice", x, spec, spec, spec)
    shapes, _ = priced(b.flat())
    assert shapes.shape(2) is None


@pytest.mark.parametrize("op", ["Diag", "Gather", "RandomGamma"])
def test_ranks_that_double(op: str) -> None:
    b = Builder()
    last = b.input("x", (2, 2))
    for _ in range(60):
        last = b.add(op, *[last] * (1 if op == "Diag" else 2))
    priced(b.flat())


def test_sizes_that_grow_without_end() -> None:
    b = Builder()
    last, times = b.input("x", (2, 2)), b.const([2**62, 2**62], "int64")
    for _ in range(20_000):
        last = b.add("Tile", last, times)
    priced(b.flat(), seconds=3)


def test_windows_of_a_million_axes() -> None:
    b = Builder()
    b.add("MaxPool", b.input("x", (1, 8, 8, 1)), ksize=(2**60,) * 200_000, strides=(1, 1, 1, 1), padding="SAME")
    priced(b.flat())


@pytest.mark.parametrize("attr", [("Split", "num_split"), ("Unpack", "num"), ("DynamicPartition", "num_partitions")])
def test_many_nodes_that_claim_a_million_outputs(attr: tuple[str, str]) -> None:
    op, name = attr
    b = Builder()
    x, axis = b.input("x", None), b.scalar(0)
    for number in range(2000):
        b.add(op, axis, x, T="float32", **{name: 1_000_000 - number})
    _, costs = priced(b.flat(), seconds=2)
    assert len(costs.time_us) == 2002


@pytest.mark.parametrize("op", ["Acme>Custom", "Relu", "Split"])
def test_ports_that_can_not_be(op: str) -> None:
    b = Builder()
    x = b.input("x", (2, 2))
    node = b.add(op, x, x)
    for port in (99, 10**6, 10**9, 2**31 - 1):
        b.add("Relu", (node, port))
    shapes, _ = priced(b.flat())
    assert shapes.shape(5) is None


def function(name: str, fill: Any, *, parameters: int = 1) -> Function:
    """A function whose body `fill` adds to a builder that holds its parameters; it gives back the result's node."""
    b = Builder()
    for number in range(parameters):
        b.add("_Arg", index=number, T="float32")
    result = fill(b)
    arguments = tuple(Argument(f"x{number}", "float32", number) for number in range(parameters))
    return Function(name, b.graph(), arguments, (Argument("y", "float32", result),))


def nested_ifs(depth: int, inside: Any) -> FlatGraph:
    """An If whose branches hold an If, and so on: each level calls the next one twice."""
    functions = {f"f{depth}": function(f"f{depth}", lambda b: b.add("Relu", 0))}
    for level in reversed(range(depth)):

        def fill(b: Builder, level: int = level) -> int:
            following = FunctionRef(f"f{level + 1}", {})
            condition = b.add("Const", value=True)
            first = b.add("If", condition, 0, then_branch=following, else_branch=following)
            return b.add("If", condition, inside(b, first), then_branch=following, else_branch=following)

        functions[f"f{level}"] = function(f"f{level}", fill)
    b = Builder()
    x = b.input("x", (2, 2))
    b.add("If", b.input("c", (), "bool"), x, then_branch=FunctionRef("f0", {}), else_branch=FunctionRef("f0", {}))
    return b.flat(functions=functions)


@pytest.mark.parametrize("depth", [30, 5000])
def test_branches_inside_branches(depth: int) -> None:
    priced(nested_ifs(depth, lambda b, node: node), seconds=2)


def test_branches_that_each_change_the_shape() -> None:
    priced(nested_ifs(40, lambda b, node: b.add("ExpandDims", node, b.scalar(0))), seconds=2)


def test_a_condition_that_asks_itself_twice_over() -> None:
    def condition(b: Builder) -> int:
        last = b.add("Less", 0, b.scalar(7))
        for _ in range(60):
            last = b.add("LogicalAnd", last, last)
        return last

    functions = {
        "cond": function("cond", condition),
        "body": function("body", lambda b: b.add("AddV2", 0, b.scalar(1))),
    }
    b = Builder()
    b.add("While", b.scalar(0), cond=FunctionRef("cond", {}), body=FunctionRef("body", {}))
    shapes, _ = priced(b.flat(functions=functions))
    assert shapes.trip_counts == {1: 7}


@pytest.mark.parametrize(("limit", "dtype"), [(2**31 - 1, "int32"), (1e300, "float64")])
def test_loops_inside_loops_that_all_count_far(limit: float, dtype: str) -> None:
    functions = {}
    for level in range(40):
        test, body = Builder(), Builder()
        test.add("Less", test.add("_Arg", T=dtype), test.const(limit, dtype), T=dtype)
        argument = body.add("_Arg", T=dtype)
        x = body.add("_Arg", T="float32")
        test.add("_Arg", T="float32")
        inner = {"cond": FunctionRef(f"cond{level + 1}"), "body": FunctionRef(f"body{level + 1}")}
        if level < 39:
            result = (body.add("While", body.const(0, dtype), x, T=(dtype, "float32"), **inner), 1)
        else:
            result = (body.add("Tanh", x, T="float32"), 0)
        following = body.add("AddV2", argument, body.const(1, dtype), T=dtype)
        parameters = (Argument("i", dtype, argument), Argument("x", "float32", x))
        functions[f"body{level}"] = Function(
            f"body{level}",
            body.graph(),
            parameters,
            (Argument("j", dtype, following), Argument("y", "float32", *result)),
        )
        functions[f"cond{level}"] = Function(
            f"cond{level}",
            test.graph(),
            (Argument("i", dtype, 0), Argument("x", "float32", 3)),
            (Argument("p", "bool", 2),),
        )
    b = Builder()
    loop = b.add(
        "While",
        b.const(0, dtype),
        b.input("x", (2, 4)),
        T=(dtype, "float32"),
        cond=FunctionRef("cond0"),
        body=FunctionRef("body0"),
    )
    shapes, costs = priced(b.flat(functions=functions))
    assert loop in shapes.trip_counts
    for array in (costs.flops, costs.bytes, costs.time_us, costs.share):
        assert np.isfinite(array).all()
