"""Static costs: formulas, textbook numbers, what is free, what is unknown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msplit.core.graph import Argument, Function, FunctionRef
from msplit.cost import estimate
from msplit.cost.gpus import ACCESS, REACHED, SM_BYTES_PER_CYCLE, TILE_SETUP, data_sheet, gpu_names
from msplit.errors import MsplitError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.shapes.infer import infer
from tests.shapes import tf_graphs
from tests.shapes.small import Builder, costs_of

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


def test_product_counts_two_operations_per_multiplication_and_reads_everything_once() -> None:
    b = Builder()
    x = b.input("x", (128, 512))
    y = b.add("MatMul", x, b.weight(256, 512), T="float32", transpose_b=True)
    costs = costs_of(b.flat())
    assert costs.flops[y] == 2 * 128 * 512 * 256
    assert costs.bytes[y] == 4 * (128 * 512 + 512 * 256 + 128 * 256)
    assert costs.out_bytes[y] == 4 * 128 * 256
    assert costs.known.all()


@pytest.mark.parametrize(
    ("equation", "a", "c", "flops"),
    [
        ("abc,cde->abde", (2, 3, 4), (4, 5, 6), 2 * 2 * 3 * 4 * 5 * 6),
        ("bid,bjd->bij", (2, 3, 4), (2, 5, 4), 2 * 2 * 3 * 4 * 5),
        ("...c,cd->...d", (2, 3, 4), (4, 5), 2 * 2 * 3 * 4 * 5),
    ],
)
def test_einsum_counts_like_the_product_that_it_is(
    equation: str, a: tuple[int, ...], c: tuple[int, ...], flops: int
) -> None:
    b = Builder()
    y = b.add("Einsum", b.input("a", a), b.input("c", c), equation=equation, T="float32", N=2)
    assert costs_of(b.flat()).flops[y] == flops


def test_batched_product_with_broadcast_batch() -> None:
    b = Builder()
    y = b.add("BatchMatMulV2", b.input("x", (5, 1, 2, 3)), b.input("y", (7, 3, 4)), T="float32")
    assert costs_of(b.flat()).flops[y] == 2 * 5 * 7 * 2 * 3 * 4


def test_grouped_and_depthwise_convolutions_count_only_their_own_channels() -> None:
    b = Builder()
    x = b.input("x", (1, 10, 10, 8))
    plain = {"strides": (1, 1, 1, 1), "padding": "SAME", "T": "float32"}
    full = b.add("Conv2D", x, b.weight(3, 3, 8, 16), **plain)
    grouped = b.add("Conv2D", x, b.weight(3, 3, 2, 16), **plain)
    depthwise = b.add("DepthwiseConv2dNative", x, b.weight(3, 3, 8, 2), **plain)
    costs = costs_of(b.flat())
    assert costs.flops[full] == 2 * 100 * 16 * 9 * 8
    assert costs.flops[grouped] == 2 * 100 * 16 * 9 * 2
    assert costs.flops[depthwise] == 2 * 100 * 16 * 9


def test_gather_reads_rows_and_not_the_table() -> None:
    b = Builder()
    ids = b.input("ids", (64,), "int32")
    y = b.add("GatherV2", b.weight(1_000_000, 32), ids, b.scalar(0), Tparams="float32", Tindices="int32", Taxis="int32")
    pooled = b.add("SparseSegmentSum", b.weight(1_000_000, 32), ids, b.input("segments", (64,), "int32"), T="float32")
    costs = costs_of(b.flat())
    assert costs.bytes[y] == 64 * 4 + 4 + 2 * 64 * 32 * 4
    assert costs.bytes[pooled] < 3 * 64 * 32 * 4
    assert costs.time_us[y] < 5


def test_a_tensor_that_goes_in_twice_is_read_once() -> None:
    b = Builder()
    x = b.input("x", (1000,))
    square, product = b.add("Mul", x, x, T="float32"), b.add("Mul", x, b.input("y", (1000,)), T="float32")
    costs = costs_of(b.flat())
    assert costs.bytes[square] == 2 * 4000
    assert costs.bytes[product] == 3 * 4000


def test_what_launches_nothing_costs_nothing() -> None:
    b = Builder()
    x = b.input("x", (2, 6))
    w = b.weight(6, 6)
    free = [
        x, w, b.add("Identity", x), b.add("Reshape", x, b.ints(3, 4), T="float32"), b.add("Shape", x), b.add("NoOp"),
        b.add("VarHandleOp", shape=(3,), dtype="float32"), b.add("Rsqrt", w, T="float32"),
    ]  # fmt: skip
    free.append(b.add("Mul", free[-1], b.weight(6, 6), T="float32"))
    pays = b.add("MatMul", x, free[-1], T="float32")
    host = b.add("AsString", x, T="float32")
    flat = b.flat(host=np.arange(len(b.ops)) == host)
    costs = costs_of(flat)
    assert costs.time_us[[*free, host]].tolist() == [0.0] * (len(free) + 1)
    assert costs.bytes[[*free, host]].sum() == 0
    assert costs.time_us[pays] > 0
    assert costs.known.all()


def test_handles_of_custom_tables_cost_nothing() -> None:
    flat = flatten(read(SAMPLES / "custom_op.pb"))
    handles = [node for node, op in enumerate(flat.graph.ops) if op == "KvVarHandleOp"]
    lookups = [node for node, op in enumerate(flat.graph.ops) if op == "KvResourceGather"]
    costs = costs_of(flat)
    assert len(handles) == len(lookups) == 2
    assert costs.time_us[handles].tolist() == [0.0, 0.0]
    assert (costs.time_us[lookups] > 0).all()


def test_what_is_random_or_reads_state_is_not_prepared_once() -> None:
    b = Builder()
    noise = b.add("RandomUniform", b.ints(4, 4), dtype="float32", T="int32")
    after = b.add("Relu", noise, T="float32")
    flat = b.flat(stateful=np.array([op == "RandomUniform" for op in b.ops]))
    assert (costs_of(flat).time_us[[noise, after]] > 0).all()


def normalization(b: Builder, *, writer: str | None = None, reference: bool = False) -> int:
    """The scale of a batch normalization: Rsqrt of a variable that the graph reads, and that `writer` writes by another handle."""
    if reference:
        held = b.add("VariableV2", shape=(8,), dtype="float32", shared_name="v")
        value = b.add("Identity", held, T="float32")
        if writer:
            b.add(writer, held, b.input("new", (8,)), T="float32")
    else:
        held = b.add("VarHandleOp", shape=(8,), dtype="float32", shared_name="v")
        value = b.add("ReadVariableOp", b.add("Identity", held, T="resource"), dtype="float32")
        if writer:
            other = b.add("VarHandleOp", shape=(8,), dtype="float32", shared_name="v")
            b.add(writer, other, b.input("new", (8,)), dtype="float32", T="float32")
    return b.add("Rsqrt", value, T="float32")


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    ("writer", "free"), [(None, True), ("AssignVariableOp", False), ("Assign", False), ("Vendor>Reads", False)]
)
def test_what_depends_on_variables_that_nothing_assigns_is_prepared_once(
    reference: bool, writer: str | None, free: bool
) -> None:
    b = Builder()
    scale = normalization(b, writer=writer, reference=reference)
    pays = b.add("Mul", b.input("x", (4, 8)), scale, T="float32")
    stateful = ("VarHandleOp", "VariableV2", "ReadVariableOp", "AssignVariableOp")
    costs = costs_of(b.flat(stateful=np.array([op in stateful for op in b.ops])))
    assert (costs.time_us[scale] == 0) == free
    assert costs.time_us[pays] > 0


def test_unknown_shapes_are_never_zero_and_are_marked() -> None:
    b = Builder()
    custom = b.add("Vendor>Magic", b.input("x", (2, 8)))
    after = b.add("MatMul", custom, b.weight(8, 4), T="float32")
    costs = costs_of(b.flat())
    launch = data_sheet("h200").launch_us
    assert (costs.time_us[[custom, after]] >= 2 * launch).all()
    assert not costs.known[[custom, after]].any()
    assert costs.known.sum() == len(costs.known) - 2


def test_an_unused_output_of_unknown_shape_does_not_make_a_cost_unknown() -> None:
    b = Builder()
    x = b.input("x", (1, 4, 4, 32))
    y = b.add("FusedBatchNormV3", x, *(b.weight(32) for _ in range(4)), T="float32", U="float32", is_training=False)
    costs = costs_of(b.flat())
    assert costs.known[y]
    assert costs.flops[y] == 2 * 512


@pytest.mark.parametrize("window", [(-1,), (1, -3, 3, 1), (1, 10**400, 1, 1)])
def test_windows_of_no_possible_size_never_give_a_negative_or_endless_cost(window: tuple[int, ...]) -> None:
    b = Builder()
    y = b.add("MaxPoolWithArgmax", b.input("x", (1, 4, 4, 32)), T="float32", ksize=window)
    gradient = b.add("AvgPoolGrad", b.ints(1, 4, 4, 32), b.input("g", (1, 2, 2, 32)), T="float32", ksize=window)
    costs = costs_of(b.flat())
    assert (costs.flops[[y, gradient]] >= 0).all()
    assert np.isfinite(costs.time_us).all()


def test_nodes_of_a_v1_loop_run_an_unknown_number_of_times() -> None:
    b = Builder()
    inside, outside = b.add("Tanh", b.input("x", (2, 4)), T="float32"), b.add("Tanh", b.input("y", (2, 4)), T="float32")
    known = costs_of(b.flat(**b.looped(inside))).known
    assert not known[inside]
    assert known[outside]


def _body(name: str, count: int) -> Function:
    body = Builder()
    node = argument = body.add("_Arg", T="float32", index=0)
    for _ in range(count):
        node = body.add("Tanh", node, T="float32")
    return Function(name, body.graph(), (Argument("a", "float32", argument),), (Argument("r", "float32", node),))


def test_loop_costs_one_turn_and_branch_its_costlier_side_and_both_are_guesses() -> None:
    functions = {"long": _body("long", 3), "short": _body("short", 1)}
    b = Builder()
    x = b.input("x", (2, 4))
    loop = b.add("While", x, body=FunctionRef("long"), cond=FunctionRef("none"), T=("float32",))
    branch = b.add(
        "If",
        b.input("p", (), "bool"),
        x,
        then_branch=FunctionRef("short"),
        else_branch=FunctionRef("long"),
        Tout=("float32",),
    )
    one = b.add("Tanh", x, T="float32")
    costs = costs_of(b.flat(functions=functions))
    assert costs.time_us[one] >= data_sheet("h200").launch_us
    assert costs.time_us[[loop, branch]] == pytest.approx(3 * costs.time_us[one])
    assert not costs.known[[loop, branch]].any()


def test_small_kernels_take_the_launch_floor_and_large_ones_the_hardware_limit() -> None:
    sheet = data_sheet("h200")
    b = Builder()
    tiny = b.add("Relu", b.input("a", (10,)), T="float32")
    wide = b.add("Relu", b.input("c", (1 << 28,)), T="float32")
    square = b.add("MatMul", b.input("d", (8192, 8192)), b.input("e", (8192, 8192)), T="float32")
    half = b.add("MatMul", b.input("f", (8192, 8192), "float16"), b.input("g", (8192, 8192), "float16"), T="float16")
    costs = costs_of(b.flat())
    # Of a hundredth of a block: its waiting, and its operations and bytes on one SM.
    cycles = ACCESS * 10 / 1024 + 2 * 40 / SM_BYTES_PER_CYCLE
    floor = sheet.launch_us + cycles / sheet.clock_mhz + 10 / (67e6 / sheet.sms)
    assert costs.time_us[tiny] == pytest.approx(floor)
    assert floor < 1.01 * sheet.launch_us
    assert costs.share[tiny] == pytest.approx(1 / sheet.sms)
    moved = np.array([8 * (1 << 28), 4 * 3 * 8192**2, 2 * 3 * 8192**2]) / sheet.bytes_per_us
    reached = np.array([(1 << 28) / 67e6, *(2 * 8192**3 / (np.array([494.7e6, 989.4e6]) * REACHED))])
    waits = sheet.launch_us + np.array([ACCESS, TILE_SETUP, TILE_SETUP]) / sheet.clock_mhz
    large = [wide, square, half]
    assert costs.time_us[large] == pytest.approx(waits + reached + moved)
    assert (waits < 0.01 * costs.time_us[large]).all()
    assert costs.share[large] == pytest.approx(1 - sheet.launch_us / costs.time_us[large])  # others launch meanwhile


def test_a_small_grid_does_not_reach_the_peak() -> None:
    b = Builder()
    y = b.add("MatMul", b.input("x", (64, 300)), b.weight(300, 64), T="float32")
    costs = costs_of(b.flat(), "t4")
    assert costs.share[y] == pytest.approx(1 / 40)
    assert costs.time_us[y] >= 2 * 64 * 300 * 64 / (8.1e6 / 40)


def test_more_work_never_takes_less_time() -> None:
    times = []
    for rows in (1, 16, 128, 1024, 8192):
        b = Builder()
        y = b.add("MatMul", b.input("x", (rows, 1024)), b.weight(1024, 1024), T="float32")
        times.append(costs_of(b.flat()).time_us[y])
    assert times == sorted(times)


@pytest.mark.parametrize("gpu", gpu_names())
def test_every_data_sheet_prices_a_sample(gpu: str) -> None:
    flat = flatten(read(SAMPLES / "mmoe_small.pb"))
    costs = costs_of(flat, gpu)
    assert costs.gpu == gpu
    assert costs.time_us.sum() > 0
    assert ((costs.share > 0) & (costs.share <= 1)).all()


def test_unknown_gpu_lists_what_there_is() -> None:
    with pytest.raises(MsplitError, match=r"called 'h20' \(did you mean h200\?\)[^$]*h200, h100, a100, l4, t4"):
        data_sheet("h20")


def test_empty_graph_costs_nothing() -> None:
    costs = costs_of(Builder().flat())
    assert len(costs.time_us) == 0


def _mobilenet_v2() -> Builder:
    """The network of Sandler et al. 2018, table 2, at 224 x 224, without batch norm."""
    b = Builder()
    node, channels = b.input("image", (1, 224, 224, 3)), 3

    def conv(source: int, size: int, into: int, stride: int = 1, depthwise: bool = False) -> int:
        nonlocal channels
        weights = b.weight(size, size, channels, 1 if depthwise else into)
        op = "DepthwiseConv2dNative" if depthwise else "Conv2D"
        channels = channels if depthwise else into
        return b.add(op, source, weights, strides=(1, stride, stride, 1), padding="SAME", T="float32")

    node = conv(node, 3, 32, 2)
    blocks = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for expansion, out, count, first_stride in blocks:
        for index in range(count):
            node = conv(node, 1, channels * expansion) if expansion > 1 else node
            node = conv(node, 3, channels, first_stride if index == 0 else 1, depthwise=True)
            node = conv(node, 1, out)
    node = conv(node, 1, 1280)
    mean = b.add("Mean", node, b.ints(1, 2), T="float32", Tidx="int32")
    b.add("MatMul", mean, b.weight(1280, 1000), T="float32")
    return b


def test_mobilenet_v2_has_the_300_million_multiplications_of_its_paper() -> None:
    flat = _mobilenet_v2().flat()
    costs = costs_of(flat)
    assert flat.graph.ops[-1] == "MatMul"
    products = [node for node, op in enumerate(flat.graph.ops) if "Conv" in op or op == "MatMul"]
    assert costs.flops[products].sum() / 2 == pytest.approx(300e6, rel=0.01)


def test_inception_v3_has_the_5_7_billion_multiplications_of_its_paper() -> None:
    flat = flatten(read(SAMPLES / "inception_v3_stripped.pb"))
    costs = costs_of(flat)
    products = [node for node, op in enumerate(flat.graph.ops) if op in ("Conv2D", "MatMul")]
    assert costs.flops[products].sum() / 2 == pytest.approx(5.71e9, rel=0.01)


@pytest.mark.tf
@pytest.mark.parametrize("name", ["inception_v3_stripped.pb", "mmoe_small.pb"])
def test_products_and_convolutions_count_as_in_tensorflows_profiler(name: str) -> None:
    import tensorflow as tf

    flat = flatten(read(SAMPLES / name))
    shapes = infer(flat, batch=2)
    costs = estimate(flat, shapes)
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(tf_graphs.graph_def(flat, shapes), name="")
        options = tf.compat.v1.profiler.ProfileOptionBuilder(
            tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
        ).with_empty_output()
        profile = tf.compat.v1.profiler.profile(graph, cmd="scope", options=options.build())
    theirs = {}
    waiting = [profile]
    while waiting:
        node = waiting.pop()
        theirs[node.name] = node.float_ops
        waiting += node.children
    compared = [
        (flat.graph.names[node], costs.flops[node], theirs[flat.graph.names[node]])
        for node, op in enumerate(flat.graph.ops)
        if op in ("Conv2D", "MatMul", "DepthwiseConv2dNative")
    ]
    assert len(compared) > 10
    assert [(name, ours) for name, ours, _ in compared] == [(name, other) for name, _, other in compared]
