"""The models that grouping is for: equal to TensorFlow, in the kernels that are expected, weights held once."""

from collections import Counter

import pytest

from msplit import samples
from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.passes.tracing import trace
from msplit.verify.compare import compare
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, built_sample, flat_of, graph_of, job
from tests.engines.cuda.passes.harness import normal, weight_bytes

pytestmark = pytest.mark.tf


def sample(name, *, batch=3, **sizes):
    made = built_sample(name, **sizes)
    return flat_of(made.graph_def, outputs=list(made.outputs)), samples.make_inputs(made, batch)


def kernels(program):
    return Counter(step.op.op for step in program.steps if step.launches)


def check(flat, feeds):
    """The merged program, after it has been found equal to TensorFlow on 1 and 3 streams."""
    assert_equals_tensorflow(flat, feeds, streams=(1, 3), group=True)
    plain, merged = (optimize(flat, feeds, CPU, group=group) for group in (False, True))
    before, after = (trace(optimized.graph, optimized.feeds, CPU) for optimized in (plain, merged))
    assert weight_bytes(after) <= 1.02 * weight_bytes(before) + 4096
    return after, merged.graph.merges


@pytest.mark.parametrize("batch", [1, 5])
def test_mmoe(batch):
    flat, feeds = sample("mmoe", batch=batch, experts=4, features=24, units=(16, 12))
    program, groups = check(flat, feeds)
    assert kernels(program) == {"_GroupedMatMul": 5, "Softmax": 1, "Mul": 1, "Sum": 1}
    products = [group.members for group in groups if group.op == "_FusedMatMul"]
    assert sorted(products) == [2, 2, 2, 4, 4]
    assert not sum(group.copies for group in groups)


def test_towers():
    flat, feeds = sample("towers", towers=6, rows=30, width=8, units=(8, 4))
    program, groups = check(flat, feeds)
    # Nothing is copied: lookups are stacked as the first product reads them, and its rows lie as the last one's.
    assert kernels(program) == {"_Columns": 1, "_GroupedMatMul": 2, "_FusedMatMul": 1}
    assert not sum(group.copies for group in groups)
    assert {group.members for group in groups if group.op == "_FusedMatMul"} == {6}


def test_deepfm_and_dlrm():
    for name, sizes in (
        ("deepfm", {"categorical": 5, "rows": 20, "width": 4, "units": (8,)}),
        ("dlrm", {"tables": 5, "rows": 20, "width": 8, "bottom": (16,), "top": (8,)}),
    ):
        flat, feeds = sample(name, **sizes)
        program, _ = check(flat, feeds)
        assert kernels(program)["GatherV2"] <= 1


@pytest.mark.parametrize("batch", [1, 2])
def test_the_layers_of_an_unrolled_lstm_run_as_wavefronts(batch):
    layers, steps = 4, 7
    flat, feeds = sample("lstm", batch=batch, layers=layers, steps=steps, hidden=8)
    program, groups = check(flat, feeds)
    found = kernels(program)
    wavefronts = layers + steps - 1
    # Per wavefront both products of all layers in one op; the first layer's input is one product for the whole sequence.
    assert found["_GroupedMatMul"] + found["MatMul"] + found["_FusedMatMul"] <= 2 * wavefronts
    assert sum(found.values()) <= 13 * wavefronts
    assert max(group.members for group in groups if group.op == "Tanh") == layers


def test_weights_that_wavefronts_share_are_held_once():
    flat, feeds = sample("lstm", batch=1, layers=3, steps=6, hidden=128)  # 256 KB per matrix
    optimized = optimize(flat, feeds, CPU, group=True)
    large = [value for value in optimized.graph.constants.values() if value.nbytes > 1 << 15]
    assert sum(value.nbytes for value in large) == 6 * 128 * 512 * 4
    program = trace(optimized.graph, optimized.feeds, CPU)
    assert weight_bytes(program) <= 1.05 * 6 * 128 * 512 * 4


def dense(tf, x, inner, units, act=True):
    y = tf.nn.bias_add(tf.matmul(x, normal(inner, units)), normal(units))
    return tf.nn.relu(y) if act else y


def test_nearly_alike_branches_are_merged_where_they_are_alike():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        x = v1.placeholder("float32", [None, 6], name="x")
        ends = []
        for branch in range(4):
            y = tf.math.square(x) if branch == 1 else x
            y = dense(tf, y, 6, 8)
            y = tf.math.exp(-y) if branch == 2 else y
            ends.append(dense(tf, y, 8, 3))
        tf.concat(ends, 1, name="out")

    program, groups = check(graph_of(build, outputs=["out"]), feeds)
    products = [group.members for group in groups if group.op == "_FusedMatMul"]
    assert products[0] >= 3
    assert products[1] == 4
    assert kernels(program)["_FusedMatMul"] <= 1


def test_branches_of_other_widths_stay_apart():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        x = v1.placeholder("float32", [None, 6], name="x")
        tf.concat([dense(tf, x, 6, units) for units in (4, 8, 4, 8, 5)], 1, name="out")

    program, groups = check(graph_of(build, outputs=["out"]), feeds)
    assert [group.members for group in groups if group.op == "_FusedMatMul"] == [2, 2]
    assert kernels(program)["_FusedMatMul"] == 1


def test_ops_that_depend_on_each_other_are_not_merged():
    feeds = {"x": normal(2, 6)}

    def build(tf, v1):
        y = v1.placeholder("float32", [None, 6], name="x")
        for _ in range(4):
            y = dense(tf, y, 6, 6)
        tf.identity(y, name="out")

    _, groups = check(graph_of(build, outputs=["out"]), feeds)
    assert not groups


def test_merging_two_pairs_makes_no_cycle():
    feeds = {"x": normal(4, 6), "y": normal(4, 6)}

    def build(tf, v1):
        # Two chains whose steps come in the opposite order: either pair may be merged, both would wait for each other.
        x, y = (v1.placeholder("float32", [None, 6], name=name) for name in "xy")
        first = tf.nn.softmax(tf.matmul(x, normal(6, 6)))
        second = tf.matmul(tf.nn.softmax(y), normal(6, 6))
        tf.concat([first, second, tf.nn.softmax(second), tf.matmul(first, normal(6, 6))], 1, name="out")

    check(graph_of(build, outputs=["out"]), feeds)


def test_a_member_that_is_an_output_and_one_that_something_else_reads():
    feeds = {"x": normal(4, 6)}

    def build(tf, v1):
        x = v1.placeholder("float32", [None, 6], name="x")
        ends = [dense(tf, x, 6, 5) for _ in range(3)]
        tf.identity(ends[1], name="one")
        tf.concat([tf.cumsum(ends[0]), *ends[1:]], 1, name="out")

    program, _ = check(graph_of(build, outputs=["out", "one"]), feeds)
    assert kernels(program)["_GroupedMatMul"] == 1


def test_products_with_the_same_weights_are_one_product():
    feeds = {f"x{number}": normal(4, 6) for number in range(6)}

    def build(tf, v1):
        weights, bias = tf.constant(normal(6, 5)), tf.constant(normal(5))
        ends = [
            tf.nn.relu(tf.nn.bias_add(tf.matmul(v1.placeholder("float32", [None, 6], name=name), weights), bias))
            for name in feeds
        ]
        tf.stack(ends, name="out")

    program, _ = check(graph_of(build, outputs=["out"]), feeds)
    assert kernels(program)["_FusedMatMul"] == 1


def test_products_of_constants_with_the_same_weights_are_one_product():
    feeds = {"w": normal(6, 5)}

    def build(tf, v1):
        weights = v1.placeholder("float32", [6, 5], name="w")
        tf.stack([tf.matmul(tf.constant(normal(4, 6)), weights) for _ in range(3)], name="out")

    program, _ = check(graph_of(build, outputs=["out"]), feeds)
    assert kernels(program)["MatMul"] == 1


def test_a_group_and_what_reads_its_weights_alone_share_one_copy_of_them():
    feeds = {"x": normal(4, 128)}

    def build(tf, v1):
        x = v1.placeholder("float32", [None, 128], name="x")
        weights = [tf.constant(normal(128, 128)) for _ in range(3)]  # too large to be held twice
        ends = [tf.nn.relu(tf.matmul(x, kernel)) for kernel in weights]
        tf.matmul(tf.cumsum(ends[0]), weights[1], name="out")
        tf.concat(ends, 1, name="ends")

    program, _ = check(graph_of(build, outputs=["out", "ends"]), feeds)
    assert kernels(program)["_GroupedMatMul"] == 2


def test_weights_that_something_else_reads_too_keep_a_group_from_being_made():
    feeds = {"x": normal(4, 128), "y": normal(128, 128)}

    def build(tf, v1):
        x, y = (v1.placeholder("float32", [None, 128], name=name) for name in "xy")
        weights = [tf.constant(normal(128, 128)) for _ in range(3)]
        tf.concat([tf.nn.relu(tf.matmul(x, kernel)) for kernel in weights], 1, name="out")
        tf.add(weights[0], y, name="other")

    program, _ = check(graph_of(build, outputs=["out", "other"]), feeds)
    assert kernels(program)["_GroupedMatMul"] == 0


def test_the_first_step_of_the_report_says_what_was_merged():
    flat, feeds = sample("mmoe", experts=4, features=24, units=(16, 12))
    facts = ENGINE.build(job(flat, feeds, group=True)).facts()
    assert facts["groups"] == 8
    assert facts["group_sizes"] == {"4": 2, "2": 6}
    assert facts["grouped_ops"] == 20


def test_grouping_and_fusion_together():
    for name, sizes in (("mmoe", {"experts": 4, "features": 24}), ("lstm", {"layers": 3, "steps": 5, "hidden": 8})):
        flat, feeds = sample(name, batch=1, **sizes)
        outputs = [
            ENGINE.build(job(flat, feeds, group=flag, fuse=flag, compile=False)).step(feeds) for flag in (False, True)
        ]
        assert compare(outputs[1], outputs[0]).passed


def test_members_cost_what_they_take_side_by_side():
    from msplit.api import price
    from msplit.engines.cuda.profiling.step_costs import estimated

    flat, feeds = sample("mmoe", experts=4, features=24, units=(16, 12))
    _, costs = price(flat, batch=3)
    plain, merged = (
        trace(optimized.graph, optimized.feeds, CPU)
        for optimized in (optimize(flat, feeds, CPU, group=g) for g in (False, True))
    )
    assert [step.op.batch for step in merged.steps if step.op.op == "_GroupedMatMul"].count(4) == 2
    # All of these are tiny: four take as long as one, not as long as four.
    times = {step.op.batch: time for step, time in zip(merged.steps, estimated(merged, costs).time_us, strict=True)}
    longest = max(estimated(plain, costs).time_us)
    assert times[4] <= 1.01 * longest
