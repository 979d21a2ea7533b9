"""Shape inference without TensorFlow: inputs, what is unknown, loops, lists, malformed nodes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.core.graph import Argument, Edges, Function, FunctionRef, Graph
from msplit.cost import estimate
from msplit.errors import MsplitError
from msplit.formats.model import Endpoint
from msplit.shapes import Shapes, infer, registry
from msplit.shapes.registry import broadcast, join, merge
from tests.campaign import examples
from tests.shapes.small import Builder

sizes = st.lists(st.integers(1, 3), max_size=4)


def unknown_ops(shapes: Shapes) -> Counter[str]:
    """How many nodes of each op have an output of unknown shape."""
    return Counter(shapes.graph.ops[node] for node in np.flatnonzero(~shapes.known))


def test_unknown_batch_is_one_and_that_is_said() -> None:
    b = Builder()
    x = b.input("x", (None, 8))
    y = b.add("MatMul", x, b.weight(8, 3), T="float32")
    shapes = infer(b.flat())
    assert shapes.shape(y) == (1, 3)
    assert shapes.assumed == ("the batch of x is not in the file: 1 was taken (--batch N says another)",)


def test_batch_sets_the_first_unknown_dimension_of_every_input_and_no_other() -> None:
    b = Builder()
    x, y, z = b.input("x", (None, 8)), b.input("y", (5, None)), b.input("z", (None, None))
    shapes = infer(b.flat(), batch=32)
    assert [shapes.shape(node) for node in (x, y, z)] == [(32, 8), (5, 32), (32, None)]
    assert shapes.assumed == ("the shape of z is not known in full (--shape z=1,128 says it)",)


def test_batch_that_nothing_takes_is_said() -> None:
    b = Builder()
    b.input("x", (2, 8))
    assert infer(b.flat(), batch=32).assumed == ("no input has an unknown dimension: the batch of 32 changed nothing",)


def test_given_shape_wins_and_any_name_of_the_input_will_do() -> None:
    for name in ("x", "x:0"):
        b = Builder()
        x = b.input("x", None)
        assert infer(b.flat(), shapes={name: (2, 3)}).shape(x) == (2, 3)


def test_shape_of_the_signature_helps_where_the_node_says_nothing() -> None:
    b = Builder()
    x = b.input("x", None)
    endpoint = Endpoint("x", "x", 0, "float32", (None, 7))
    assert infer(b.flat(endpoints=(endpoint,)), batch=4).shape(x) == (4, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": {"nope": (1,)}}, "there is no input called 'nope'"),
        ({"shapes": {"x": (1, 2, 3)}}, r"has the shape \[\?, 8\] in the graph and is given \[1, 2, 3\]"),
        ({"shapes": {"x": (1, 9)}}, r"has the shape \[\?, 8\] in the graph and is given \[1, 9\]"),
        ({"shapes": {"x": (-1, 8)}}, "negative"),
        ({"batch": 0}, "the batch is 0"),
    ],
)
def test_wrong_input_shapes_are_clear_errors(arguments: dict[str, object], message: str) -> None:
    b = Builder()
    b.input("x", (None, 8))
    with pytest.raises(MsplitError, match=message):
        infer(b.flat(), **arguments)  # type: ignore[arg-type]


def test_unknown_op_is_unknown_and_counted_and_so_is_what_follows() -> None:
    b = Builder()
    x = b.input("x", (2, 8))
    custom = b.add("Vendor>Magic", x)
    after = b.add("Relu", custom, T="float32")
    other = b.add("Relu", (custom, 1), T="float32")
    shapes = infer(b.flat())
    assert [shapes.shape(node) for node in (custom, after, other)] == [None, None, None]
    assert len(shapes.outputs[custom]) == 2
    assert shapes.known.tolist() == [True, False, False, False]
    assert unknown_ops(shapes) == {"Vendor>Magic": 1, "Relu": 2}


def test_exported_output_shapes_fill_what_is_unknown_and_never_replace_what_is_known() -> None:
    b = Builder()
    x = b.input("x", (2, 8))
    custom = b.add("Vendor>Magic", x, _output_shapes=((None, 5),))
    relu = b.add("Relu", x, T="float32", _output_shapes=((None, 9),))
    partly = b.add("Relu", custom, T="float32", _output_shapes=((2, 5),))
    shapes = infer(b.flat())
    assert [shapes.shape(node) for node in (custom, relu, partly)] == [(None, 5), (2, 8), (2, 5)]


def test_node_that_contradicts_itself_is_unknown_and_raises_nothing() -> None:
    b = Builder()
    x = b.input("x", (2, 8))
    nodes = [
        b.add("Transpose", x, b.ints(0, 7)),
        b.add("ConcatV2", x, x, b.scalar(5)),
        b.add("Conv2D", x, x),
        b.add("Einsum", x, equation="abc->a"),
        b.add("Unpack", x, num="seven"),
        b.add("Const"),
        b.add("MatMul"),
        b.add("StridedSlice", x, b.ints(0, 0, 0), b.ints(1, 1, 1), b.ints(1, 1, 1)),
    ]
    shapes = infer(b.flat())
    assert not shapes.known[nodes].any()


def test_partly_known_values_still_give_the_rank_and_the_known_sizes() -> None:
    b = Builder()
    x = b.input("x", (None, None, 4))
    shape = b.add("Shape", x, T="float32")
    ends = (b.ints(1), b.ints(2), b.ints(1))
    length = b.add("StridedSlice", shape, *ends, shrink_axis_mask=1)
    doubled = b.add("Mul", length, b.scalar(2), T="int32")
    target = b.add("Pack", b.scalar(3), doubled, b.scalar(5), axis=0)
    filled = b.add("Fill", target, b.const(0.0))
    assert infer(b.flat()).shape(filled) == (3, None, 5)


def test_shape_arithmetic_of_a_flatten_layer_resolves() -> None:
    b = Builder()
    x = b.input("x", (None, 7, 7, 64))
    shape = b.add("Shape", x, T="float32")
    rows = b.add("StridedSlice", shape, b.ints(0), b.ints(1), b.ints(1), shrink_axis_mask=1)
    rest = b.add("Prod", b.add("StridedSlice", shape, b.ints(1), b.ints(4), b.ints(1)), b.scalar(0))
    target = b.add("Pack", rows, rest, axis=0)
    flatten = b.add("Reshape", x, target, T="float32")
    shapes = infer(b.flat(), batch=3)
    assert shapes.shape(flatten) == (3, 3136)
    assert shapes.folded[[shape, rows, rest, target]].all()
    assert not shapes.folded[[x, flatten]].any()


def test_value_of_a_second_output_goes_through_an_identity() -> None:
    b = Builder()
    parts = b.add("Unpack", b.ints(3, 4), num=2, axis=0)
    target = b.add("Pack", b.add("Identity", (parts, 1)), (parts, 0), axis=0)
    filled = b.add("Fill", target, b.const(0.0))
    assert infer(b.flat()).shape(filled) == (4, 3)


def test_large_integer_constants_are_not_decoded() -> None:
    b = Builder()
    table = b.weight(100_000, dtype="int64")
    y = b.add("Cast", table, DstT="int32")
    assert infer(b.flat()).shape(y) == (100_000,)


def test_v1_loop_that_grows_what_it_carries_is_not_taken_for_a_constant_shape() -> None:
    b = Builder()
    x = b.input("x", (2, 4))
    enter = b.add("Enter", x, T="float32")
    merge_ = b.add("Merge", enter, N=1)
    grown = b.add("ConcatV2", merge_, merge_, b.scalar(0), N=2)
    same = b.add("Relu", merge_, T="float32")
    step = b.add("NextIteration", grown)
    shapes = infer(b.flat(back_edges=((step, 0, merge_, 1),)))
    assert shapes.shape(merge_) == (None, 4)
    assert shapes.shape(same) == (None, 4)


def test_v1_loop_that_keeps_its_shape_keeps_it() -> None:
    b = Builder()
    merge_ = b.add("Merge", b.add("Enter", b.input("x", (2, 4))), N=1)
    step = b.add("NextIteration", b.add("Tanh", merge_, T="float32"))
    assert infer(b.flat(back_edges=((step, 0, merge_, 1),))).shape(merge_) == (2, 4)


def _function(op: str, name: str = "body") -> Function:
    """A function of one argument that applies an op to it."""
    body = Builder()
    argument = body.add("_Arg", name="a", T="float32", index=0)
    result = body.add(op, argument, *([argument, body.scalar(0)] if op == "ConcatV2" else []), T="float32", N=2)
    return Function(name, body.graph(), (Argument("a", "float32", argument),), (Argument("r", "float32", result),))


@pytest.mark.parametrize(("op", "wanted"), [("Tanh", (2, 4)), ("ConcatV2", (None, 4))])
def test_while_gives_the_shape_that_its_body_keeps(op: str, wanted: tuple[int | None, ...]) -> None:
    function = _function(op)
    b = Builder()
    x = b.input("x", (2, 4))
    loop = b.add("While", x, body=FunctionRef("body"), cond=FunctionRef("none"), T=("float32",))
    shapes = infer(b.flat(functions={"body": function}))
    assert shapes.shape(loop) == wanted
    assert shapes.bodies[loop]["body"].shape(function.results[0].node) == wanted


def _counting(
    limit: int | None, step: int = 1, start: int = 0, extra: str = ""
) -> tuple[Builder, dict[str, Function], int]:
    """A loop over (counter, limit, x) that runs while counter < limit; a limit of None is fed."""
    arguments = ("counter", "limit", "x")
    dtypes = ("int32", "int32", "float32")
    cond, body = Builder(), Builder()
    for part in (cond, body):
        for name, dtype in zip(arguments, dtypes, strict=True):
            part.add("_Arg", name=name, T=dtype)
    less = cond.add("Less", 0, 1, T="int32")
    if extra:
        less = cond.add("LogicalAnd", less, cond.add(extra, 2))
    test = cond.add("Identity", less, T="bool")
    results = (
        body.add("AddV2", body.add("Identity", 0), body.scalar(step), T="int32"),
        body.add("Identity", 1, T="int32"),
        body.add("Tanh", 2, T="float32"),
    )
    parameters = tuple(Argument(n, d, i) for i, (n, d) in enumerate(zip(arguments, dtypes, strict=True)))
    functions = {
        "cond": Function("cond", cond.graph(), parameters, (Argument("t", "bool", test),)),
        "body": Function(
            "body",
            body.graph(),
            parameters,
            tuple(Argument(n, d, r) for n, d, r in zip(arguments, dtypes, results, strict=True)),
        ),
    }
    b = Builder()
    end = b.input("limit", (), "int32") if limit is None else b.scalar(limit)
    loop = b.add(
        "While",
        b.scalar(start),
        end,
        b.input("x", (2, 4)),
        T=dtypes,
        cond=FunctionRef("cond"),
        body=FunctionRef("body"),
    )
    return b, functions, loop


@pytest.mark.parametrize(
    ("limit", "step", "start", "trips"), [(12, 1, 0, 12), (12, 5, 0, 3), (12, 1, 10, 2), (3, 1, 7, 0)]
)
def test_trip_counts_of_counting_loops_are_known(limit: int, step: int, start: int, trips: int) -> None:
    b, functions, loop = _counting(limit, step, start)
    shapes = infer(b.flat(functions=functions))
    assert shapes.trip_counts == {loop: trips}
    assert shapes.shape(loop, 2) == (2, 4)


@pytest.mark.parametrize("case", [{"limit": None}, {"limit": 12, "step": 0}, {"limit": 12, "extra": "Vendor>Stop"}])
def test_turns_of_a_loop_that_may_end_otherwise_are_not_known(case: dict[str, object]) -> None:
    b, functions, _ = _counting(**case)  # type: ignore[arg-type]
    assert infer(b.flat(functions=functions)).trip_counts == {}


def test_turns_multiply_the_cost_of_the_body() -> None:
    costs = []
    for limit in (1, 12):
        b, functions, loop = _counting(limit)
        flat = b.flat(functions=functions)
        found = estimate(flat, infer(flat))
        assert found.known[loop]
        costs.append(found.time_us[loop])
    assert costs[1] == pytest.approx(12 * costs[0])


def test_branches_of_different_shape_leave_unknown_what_differs() -> None:
    same, twice = _function("Tanh", "s"), _function("ConcatV2", "t")
    b = Builder()
    choice = b.add(
        "If", b.const(True, "bool"), b.input("x", (2, 4)), then_branch=FunctionRef("s"), else_branch=FunctionRef("t")
    )
    assert infer(b.flat(functions={"s": same, "t": twice})).shape(choice) == (None, 4)


def test_function_that_calls_itself_ends_and_is_unknown() -> None:
    body = Builder()
    argument = body.add("_Arg", T="float32", index=0)
    again = body.add("PartitionedCall", argument, f=FunctionRef("f"))
    function = Function("f", body.graph(), (Argument("a", "float32", argument),), (Argument("r", "float32", again),))
    b = Builder()
    call = b.add("PartitionedCall", b.input("x", (2,)), f=FunctionRef("f"))
    assert infer(b.flat(functions={"f": function})).shape(call) is None


def test_a_long_chain_needs_no_recursion() -> None:
    b = Builder()
    node = b.input("x", (None, 3))
    value = b.scalar(1)
    for _ in range(examples(20_000, 100_000)):
        node = b.add("Tanh", node)
        value = b.add("Identity", value)
    filled = b.add("Fill", b.add("Pack", value, axis=0), b.const(0.0))
    shapes = infer(b.flat())
    assert shapes.shape(node) == (1, 3)
    assert shapes.shape(filled) == (1,)


def test_damaged_control_flow_is_unknown() -> None:
    b, functions, loop = _counting(3)
    b.add("Case", 0, 1, branches=5)
    b.add("If", 0, then_branch=7, else_branch="cond", output_shapes=3)
    cond = functions["cond"]
    broken = [edge for edge in zip(*vars(cond.body.edges).values(), strict=True) if edge[2:] != (3, 1)]
    edges = Edges.of(*zip(*broken, strict=True))
    graph = Graph(cond.body.names, cond.body.ops, cond.body.devices, cond.body.attrs, edges)
    functions["cond"] = Function("cond", graph, cond.parameters, cond.results)
    shapes = infer(b.flat(functions=functions))
    assert loop not in shapes.trip_counts
    assert unknown_ops(shapes)["Case"] == 1
    assert unknown_ops(shapes)["If"] == 1


def test_damaged_counts_and_types_are_no_statement() -> None:
    b = Builder()
    x = b.input("x", (2, 8))
    parts = b.add("Split", b.scalar(1), x, num_split=2**40, T="float32")
    cast = b.add("Cast", x, DstT=7)
    reserve = b.add("Placeholder", shape=7)
    shapes = infer(b.flat())
    assert [shapes.shape(node) for node in (parts, reserve)] == [None, None]
    assert shapes.dtype(cast) == ""


def test_shape_of_a_billion_axes_is_no_statement_and_takes_no_memory() -> None:
    b = Builder()
    shape = b.input("shape", (10**9,), "int32")
    noise = b.add("RandomUniform", shape, T="int32", dtype="float32")
    few = b.add("RandomUniform", b.input("few", (3,), "int32"), T="int32", dtype="float32")
    shapes = infer(b.flat())
    assert shapes.shape(noise) is None
    assert shapes.shape(few) == (None, None, None)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_value_that_is_no_number_is_unknown_and_warns_of_nothing() -> None:
    b = Builder()
    root = b.add("Sqrt", b.ints(-1, 4), T="int32")
    filled = b.add("Fill", root, b.const(0.0))
    assert infer(b.flat()).shape(filled) == (None, 2)


def test_dtypes_come_from_attributes_and_the_op_table() -> None:
    b = Builder()
    x = b.input("x", (2, 8), "float16")
    cast = b.add("Cast", x, SrcT="float16", DstT="float64")
    where = b.add("Greater", x, x, T="float16")
    shape = b.add("Shape", x, T="float16")
    custom = b.add("Vendor>Magic", x)
    shapes = infer(b.flat())
    assert [shapes.dtype(node) for node in (x, cast, where, shape, custom)] == [
        "float16",
        "float64",
        "bool",
        "int32",
        "",
    ]


@given(sizes, sizes)
def test_broadcasting_known_shapes_is_numpys(first: list[int], second: list[int]) -> None:
    try:
        wanted = np.broadcast_shapes(tuple(first), tuple(second))
    except ValueError:
        return
    assert broadcast(tuple(first), tuple(second)) == wanted


@given(sizes, sizes, st.data())
def test_hiding_sizes_never_makes_broadcasting_say_something_wrong(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    try:
        wanted = np.broadcast_shapes(tuple(first), tuple(second))
    except ValueError:
        return
    hidden = [tuple(None if data.draw(st.booleans()) else size for size in shape) for shape in (first, second)]
    found = broadcast(*hidden)
    assert found is not None
    assert len(found) == len(wanted)
    assert all(size is None or size == true for size, true in zip(found, wanted, strict=True))


shapes_ = st.none() | st.lists(st.none() | st.integers(0, 3), max_size=3).map(tuple)


@given(shapes_, shapes_)
def test_join_holds_of_both_and_merge_says_no_less_than_the_first(
    first: registry.Shape, second: registry.Shape
) -> None:
    joined, merged = join(first, second), merge(first, second)
    assert joined == join(second, first)
    for shape in (first, second):
        if joined is not None:
            assert shape is not None
            assert all(a is None or a == b for a, b in zip(joined, shape, strict=True))
    if first is not None:
        assert merged is not None
        assert all(a is None or a == b for a, b in zip(first, merged, strict=True))


def test_ops_are_registered_once() -> None:
    with pytest.raises(ValueError, match="has a function already"):
        registry.shape_function("MatMul")(lambda node: (None,))
    with pytest.raises(ValueError, match="has a function already"):
        registry.shape_function("Relu")(lambda node: (None,))
