"""Measured costs: how they take the place of static ones, and the file that holds them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit import api, formats
from msplit.cost import profile as profile_file
from msplit.cost.costs import Constants
from msplit.cost.gpus import data_sheet
from msplit.cost.profile import (
    InputShape,
    Profile,
    ProfiledDevice,
    ProfiledKernel,
    ProfiledStep,
    apply,
    check,
    check_shapes,
    roofline,
)
from msplit.errors import MsplitError
from msplit.opset import schema
from msplit.schedule.judge import bounds, predict
from msplit.schedule.machine import Machine
from tests.campaign import examples
from tests.graphs import parse

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_graphs"
SCHEMA = json.loads((ROOT / "docs" / "schemas" / "profile.json").read_text("utf-8"))

H200 = Constants(
    launch_us=3.4,
    node_us=1.09,
    wait_us=0.5,
    join_us=0.2,
    root_us=1.0,
    issue_us=0.24,
    copy_bytes_per_us=4.1e6,
    l2_bytes_per_us=7e6,
    crossing_us=0.01,
    fork_join_us={2: 1.0, 16: 6.0},
    roots_us={16: 15.0},
    deep_us={1: 54.5, 4: 60.0, 8: 70.0, 16: 190.0},
    spin_us={1: 60.0, 16: 75.0},
    concurrency={"gemm+gemm": 1.1},
)


def kernel(time: float, share: float | None = 0.1, moved: float = 100.0) -> ProfiledKernel:
    return ProfiledKernel("MatMul", (("float32", (2, 3), (3, 1)),), time, share, moved)


def made(steps: list[tuple[list[str], int]], kernels: list[ProfiledKernel], **fields) -> Profile:
    defaults = {
        "graph_hash": "0" * 64,
        "ops": {"MatMul": 1},
        "inputs": {"x": InputShape("float32", (2, 3))},
        "device": ProfiledDevice("NVIDIA H200", 132, "580.1", "13.0", "2.11.0"),
        "precision": "tf32",
        "layout": "nhwc",
        "constants": H200,
        "made": {"msplit": "0.1.0"},
    }
    return Profile(
        kernels=tuple(kernels),
        steps=tuple(ProfiledStep(tuple(nodes), kind) for nodes, kind in steps),
        **{**defaults, **fields},
    )


def test_measured_times_go_to_the_node_that_decides_the_stream_and_add_up():
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us; b:BiasAdd(p)@2us; r:Relu(b)@2us; t:Tanh(r)@3us")
    costs = apply(made([(["p", "b", "r"], 0), (["t"], 1)], [kernel(5.0, 0.25), kernel(1.5)]), flat, static)
    index = flat.graph.index
    assert costs.time_us.tolist() == [0.0, 5.0, 0.0, 0.0, 1.5]
    assert costs.share[index["p"]] == 0.25
    assert costs.bytes[[index["b"], index["r"]]].tolist() == [0.0, 0.0]
    assert costs.flops.tolist() == static.flops.tolist()
    assert costs.inside.tolist() == [False, False, True, True, False]
    assert costs.source.startswith("2 of 2 steps measured on NVIDIA H200")
    assert bounds(flat, costs).serial_us == pytest.approx(6.5)


def test_a_node_that_needs_several_steps_has_their_sum():
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us")
    costs = apply(made([(["p"], 0), (["p"], 1)], [kernel(5.0, 0.4), kernel(5.0, 0.2)]), flat, static)
    assert costs.time_us.tolist() == [0.0, 10.0]
    assert costs.share[1] == pytest.approx(0.3)


def test_what_was_not_measured_keeps_its_static_cost_and_what_is_not_run_costs_nothing():
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us; late:Tanh(p)@3us; gone:Abs(x)@4us; o:Add(late,gone)@1us")
    profile = made([(["p"], 0), (["late"], -1), (["o"], 0)], [kernel(5.0)], unmeasured={"there was no time left": 1})
    costs = apply(profile, flat, static)
    assert costs.time_us.tolist() == [0.0, 5.0, 3.0, 0.0, 5.0]
    assert costs.bytes[3] == costs.flops[3] == 0.0
    assert "1 are priced statically" in costs.source


def test_without_a_measured_share_the_largest_estimate_of_its_nodes_counts():
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us; b:BiasAdd(p)@2us")
    static = replace(static, share=np.asarray([0.01, 0.1, 0.3]))
    assert apply(made([(["p", "b"], 0)], [kernel(5.0, None)]), flat, static).share[1] == 0.3


def test_a_gather_is_not_charged_for_its_table():
    flat, static = parse("x:Placeholder; p:GatherV2(x)@1us")
    assert apply(made([(["p"], 0)], [kernel(5.0, moved=1e9)]), flat, static).bytes[1] == static.bytes[1]


def test_the_simulator_goes_by_the_measured_machine():
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us")
    machine = Machine.of_costs(apply(made([(["p"], 0)], [kernel(5.0)]), flat, static))
    assert (machine.wait_us, machine.bandwidth) == (0.5, 7e6)
    assert machine.step_us == pytest.approx(H200.launch_us + 2 * H200.node_us)
    assert machine.crowd_us == pytest.approx(np.median([(60 - 54.5) / 50 / 3, (70 - 54.5) / 50 / 7]))
    assert machine.issue_us == pytest.approx(70 / 50 / 8)
    # 16 chains: a start every 190 / 50 / 16 µs.
    assert machine.issue_us * 16 / machine.issue_lanes == pytest.approx(190 / 50 / 16)


@pytest.mark.parametrize(
    "constants",
    [
        Constants(wait_us=-1.0, join_us=-2.0, root_us=-3.0, l2_bytes_per_us=0.0, fork_join_us={16: -5.0}),
        Constants(deep_us={1: 0.0, 16: -1.0}),
        Constants(deep_us={0: 1.0, 1: 1.0, 8: 1e9}, fork_join_us={0: 1.0, 3: 1e9}),
    ],
)
def test_constants_that_can_not_be_make_no_machine_that_can_not_be(constants):
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us; q:MatMul(x)@9us; r:Add(p,q)@1us")
    costs = apply(made([(["p"], 0), (["q"], 0)], [kernel(5.0)], constants=constants), flat, static)
    machine = Machine.of_costs(costs)
    assert all(value >= 0 and np.isfinite(value) for value in vars(machine).values())
    assert machine.bandwidth > 0
    assert machine.issue_lanes >= 1
    assert predict(flat, costs, np.asarray([0, 0, 1, 0], np.int32)).makespan_us > 0


def test_nothing_measured_changes_nothing():
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us")
    nothing = apply(made([(["p"], 0)], [kernel(5.0)], constants=Constants()), flat, static)
    assert Machine.of_costs(nothing) == Machine.of_costs(replace(static, bytes=nothing.bytes))


def test_kernels_take_as_much_longer_in_the_model_as_a_whole_step_shows():
    flat, static = parse("x:Placeholder; p:MatMul(x)@9us; q:MatMul(x)@9us")
    steps, kernels = [(["p"], 0), (["q"], 0)], [kernel(50.0)]
    whole = 120.0 + H200.launch_us + 2 * H200.node_us
    machine = Machine.of_costs(apply(made(steps, kernels, one_us=whole), flat, static))
    assert machine.company == pytest.approx(1.2)
    assert Machine.of_costs(apply(made(steps, kernels, one_us=90.0), flat, static)).company == 1.0  # noise
    assert Machine.of_costs(apply(made(steps, kernels), flat, static)).company == 1.0
    costs = apply(made(steps, kernels, one_us=whole), flat, static)
    one = predict(flat, costs, np.zeros(len(flat), np.int32)).makespan_us
    assert one == pytest.approx(whole)  # on one stream the simulator gives back what was measured
    assert bounds(flat, costs).serial_us == pytest.approx(100.0)  # no bound rests on what caches did


def test_kernels_that_move_little_share_the_bandwidth_of_the_cache():
    _, little = parse("x:Placeholder; p:MatMul(x)@9us")
    much = replace(little, bytes=np.asarray([0.0, 1e9]))
    assert Machine.of_costs(little).bandwidth > Machine.of_costs(much).bandwidth


FULL = replace(
    made([(["a", "b"], 1), (["c"], -1)], [kernel(5.0), kernel(2.5, None)], one_us=12.5, unmeasured={"late": 1}),
    source="p.json",
)


def test_a_file_gives_back_what_was_written_in_the_same_bytes():
    text = profile_file.dumps(FULL)
    found = profile_file.parse(text, "p.json")
    assert profile_file.dumps(found) == text
    assert found.kernels == FULL.kernels
    assert found.steps == FULL.steps
    assert found.constants == FULL.constants
    assert found.device == FULL.device
    assert list(json.loads(text))[:3] == ["schema_version", "kind", "graph_hash"]
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_profile_from_before_whole_steps_were_measured_is_read():
    text = profile_file.dumps(FULL)
    older = {key: value for key, value in json.loads(text).items() if key != "one_us"}
    jsonschema.validate(older, SCHEMA)
    assert profile_file.dumps(profile_file.parse(json.dumps(older), "p.json")) == profile_file.dumps(
        replace(FULL, one_us=None)
    )
    assert profile_file.parse(text, "p.json").one_us == 12.5


def damaged(data: object, chance: random.Random) -> object:
    """The same with one thing replaced, removed or added somewhere."""
    junk = [None, True, -1, 1.5, 10**400, "x", "", [], {}, [[]], float("nan")]
    if isinstance(data, dict) and data and chance.random() < 0.8:
        key = chance.choice(sorted(data))
        if chance.random() < 0.2:
            return {name: value for name, value in data.items() if name != key}
        if chance.random() < 0.1:
            return {**data, "more": 1}
        return {**data, key: damaged(data[key], chance)}
    if isinstance(data, list) and data and chance.random() < 0.8:
        place = chance.randrange(len(data))
        return [*data[:place], damaged(data[place], chance), *data[place + 1 :]]
    return chance.choice(junk)


def outcome(text: str) -> Profile | MsplitError:
    """What reading gives; any other exception is a failure."""
    try:
        return profile_file.parse(text, "p.json")
    except MsplitError as error:
        return error


@settings(max_examples=examples(80, 300))
@given(st.integers(0, 2**31))
def test_a_damaged_file_is_one_clear_error_or_a_profile(seed):
    data = damaged(json.loads(profile_file.dumps(FULL)), random.Random(seed))
    text = json.dumps(data)
    found = outcome(text)
    if isinstance(found, MsplitError):
        assert found.where.startswith("p.json")
        assert found.fix
    else:
        jsonschema.validate(json.loads(profile_file.dumps(found)), SCHEMA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "the profile is not one of version 1, but of 2"),
        ({"kind": "plan"}, "the profile is not one of version 1"),
        ({"kernels": 3}, "`kernels` is not a list"),
        ({"layout": "nwhc"}, "`layout` is 'nwhc', not one of nhwc, nchw, none"),
        ({"steps": [{"nodes": ["a"], "kernel": 2}]}, "`steps[0].kernel` is 2, but there are 2 kernels"),
        ({"steps": [{"nodes": [], "kernel": 0}]}, "`steps[0]` has no node"),
        ({"steps": [{"nodes": ["a"], "kernel": 0, "time": 1}]}, "`steps[0]` has no key 'time'"),
        ({"ops": {"Add": -1}}, "`ops.Add` is not a whole number of 0 or more"),
    ],
)
def test_mistakes_are_named_with_their_place(change, message):
    text = json.dumps({**json.loads(profile_file.dumps(FULL)), **change})
    with pytest.raises(MsplitError) as caught:
        profile_file.parse(text, "p.json")
    assert caught.value.what == message


def test_files_that_are_no_text_or_not_there_are_named(tmp_path):
    with pytest.raises(MsplitError, match="can not be read: No such file"):
        profile_file.load(tmp_path / "gone.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MsplitError, match="not UTF-8"):
        profile_file.load(tmp_path / "bytes")
    (tmp_path / "cut").write_text(profile_file.dumps(FULL)[:-20])
    with pytest.raises(MsplitError, match="not valid JSON"):
        profile_file.load(tmp_path / "cut")


def changed(tmp_path: Path, change) -> str:
    """The structure hash of a sample after a change of its GraphDef."""
    graph = schema.graph_pb2.GraphDef.FromString((SAMPLES / "mmoe_small.pb").read_bytes())
    change(graph)
    (tmp_path / "changed.pb").write_bytes(graph.SerializeToString())
    return formats.structure_hash(formats.read(tmp_path / "changed.pb"))


def weights(graph):
    return next(
        node for node in graph.node if node.op == "Const" and len(node.attr["value"].tensor.tensor_content) > 1000
    )


def retrain(graph):
    tensor = weights(graph).attr["value"].tensor
    tensor.tensor_content = bytes(len(tensor.tensor_content))


def widen(graph):
    weights(graph).attr["value"].tensor.tensor_shape.dim[0].size += 1


def strip(graph):
    weights(graph).attr["value"].tensor.ClearField("tensor_content")


def annotate(graph):
    for node in graph.node:
        node.attr["_stream_id"].i = 3


def turn(graph):
    node = next(
        node
        for node in graph.node
        if node.op == "Const" and node.attr["dtype"].type == 3 and node.attr["value"].tensor.int_val
    )
    node.attr["value"].tensor.int_val[0] += 1


def transpose(graph):
    next(node for node in graph.node if node.op == "MatMul").attr["transpose_a"].b = True


@pytest.mark.parametrize("change", [retrain, strip, annotate])
def test_weights_and_ids_do_not_count(tmp_path, change):
    assert changed(tmp_path, change) == changed(tmp_path, lambda graph: None)


@pytest.mark.parametrize("change", [widen, turn, transpose])
def test_shapes_axes_and_attributes_count(tmp_path, change):
    assert changed(tmp_path, change) != changed(tmp_path, lambda graph: None)


def test_a_profile_of_another_graph_is_refused_with_what_differs():
    here, there = api.load(SAMPLES / "mmoe_small.pb"), api.load(SAMPLES / "towers_small.pb")
    profile = made([], [], graph_hash=formats.structure_hash(there.model), ops={"MatMul": 13, "GatherV2": 6})
    with pytest.raises(MsplitError) as caught:
        check(profile, here)
    assert "measured on another graph: it has 19 nodes, this one 138" in caught.value.what
    assert "(+40 Const, " in caught.value.what
    check(replace(profile, graph_hash=formats.structure_hash(here.model)), here)


def test_a_profile_that_names_nodes_that_are_not_there_is_refused():
    here = api.load(SAMPLES / "mmoe_small.pb")
    profile = made([(["nobody"], -1)], [], graph_hash=formats.structure_hash(here.model))
    with pytest.raises(MsplitError, match="its node 'nobody' is not in this graph"):
        check(profile, here)


def test_other_shapes_are_refused():
    check_shapes(FULL, {"x": (2, 3)})
    check_shapes(FULL, {"x": (None, 3)})
    check_shapes(FULL, {"x": None})
    for shape in ((4, 3), (2, 3, 1)):
        with pytest.raises(MsplitError, match="measured with x of 2×3, not of"):
            check_shapes(FULL, {"x": shape})


def test_data_sheets_are_found_by_the_name_of_the_driver():
    assert ProfiledDevice("NVIDIA H200", 132).sheet() == "h200"
    assert ProfiledDevice("NVIDIA A100-SXM4-80GB", 108).sheet() == "a100"
    assert ProfiledDevice("Tesla T4", 40).sheet() == "t4"
    assert ProfiledDevice("NVIDIA GeForce RTX 4090", 128).sheet() is None


def test_a_roofline_of_measured_kernels():
    """Rates are those of one step, against the ceiling that its types, its size and the profile's precision leave it."""
    flat, static = parse(
        "x:Placeholder; p:MatMul(x)@9us; t:Tanh(p)@3us; q:MatMul(t)@9us; r:Tanh(q)@1us; s:MatMul(r)@1us"
    )
    index = flat.graph.index
    static.flops[:] = [0, 4e9, 1e5, 4e9, 1e5, 8e3]
    static.bytes[:] = [0, 2e7, 4e6, 2e7, 4e6, 6e3]
    steps = [(["p"], 0), (["q"], 0), (["t"], 1), (["r"], 2), (["r"], 2), (["s"], 3)]
    kernels = [kernel(20.0, moved=2e7), kernel(500.0, moved=4e8), kernel(9.0), kernel(3.0, moved=6e3)]
    made_of = made(steps, kernels)
    sheet = data_sheet(static.gpu)
    wide, product, tiny = roofline(made_of, flat, static)
    assert [one.kernel for one in (wide, product, tiny)] == [1, 0, 3]  # no 2: nothing says which part of "r" is its
    assert (product.steps, product.flops_per_s, product.bytes_per_s, product.intensity) == (2, 2e14, 1e12, 200.0)
    assert product.peak_flops_per_s == sheet.flops_per_us("float32", product=True) * 1e6
    assert (product.bound, product.share) == ("compute", pytest.approx(4e9 / product.peak_flops_per_s / 20e-6))
    # It moves no more than its node does, but what it was given did not fit in the cache.
    assert (wide.bytes, wide.peak_bytes_per_s) == (4e6, sheet.bytes_per_us * 1e6)
    assert wide.peak_flops_per_s == sheet.flops_per_us("float32") * 1e6
    assert (tiny.bound, tiny.peak_bytes_per_s) == ("launch", sheet.l2_bytes_per_us * 1e6)
    peaks = {
        name: roofline(replace(made_of, precision=name), flat, static)[1].peak_flops_per_s for name in ("ieee", "bf16")
    }
    assert peaks == {"ieee": wide.peak_flops_per_s, "bf16": sheet.flops_per_us("bfloat16", product=True) * 1e6}
    assert roofline(made_of, flat, apply(made_of, flat, static)) == (wide, product, tiny)
    odd = [kernel(5e-324, moved=2e7), kernel(500.0, moved=5e-324), kernel(9.0), kernel(3.0, moved=6e3)]
    assert [one.kernel for one in roofline(made(steps, odd), flat, static)] == [3]
    static.known[index["t"]] = False
    assert [one.kernel for one in roofline(made_of, flat, static)] == [0, 3]
    assert roofline(replace(made_of, device=ProfiledDevice("CPU")), flat, static) == ()
