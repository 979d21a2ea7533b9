from __future__ import annotations

import importlib
import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.graph import Assignment
from msplit.opset import schema
from msplit.report import trace
from msplit.report.trace import Slice, TracedRun
from msplit.schedule.judge import predict
from tests.campaign import examples
from tests.cli.runner import SAMPLES, msplit
from tests.graphs import parse
from tests.report.perfetto import complaints

FORK = """
    x:Placeholder; a:MatMul(x)@10us; b1:MatMul(a)@20us; b2:Relu(b1)@5us; c1:MatMul(a)@18us; c2:Relu(c1)@4us; d:AddV2(b2,c2)@6us
"""


def simulated(text: str, lanes: list[int], assignment: Assignment | None = None) -> dict:
    flat, costs = parse(text)
    return trace.from_simulation(flat, costs, predict(flat, costs, np.asarray(lanes, np.int32)), assignment)


def measured(slices: list[Slice], waits: list[tuple[int, int]]) -> dict:
    return trace.from_runs([TracedRun("measured", slices, waits)])


def slices_of(found: dict) -> list[dict]:
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def test_a_simulated_fork_has_a_track_per_stream_a_slice_per_kernel_and_an_arrow_per_wait():
    found = simulated(FORK, [0, 0, 0, 0, 3, 3, 0])
    assert complaints(found) == []
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == ["stream 0", "stream 3"]
    by_track = {name: [e["name"] for e in slices_of(found) if names[e["tid"]] == name] for name in names.values()}
    assert by_track == {"stream 0": ["a", "b1", "b2", "d", "start and end of the step"], "stream 3": ["c1", "c2"]}
    flows = [(e["ph"], names[e["tid"]]) for e in found["traceEvents"] if e["ph"] in "sf"]
    assert sorted(flows) == [("f", "stream 0"), ("f", "stream 3"), ("s", "stream 0"), ("s", "stream 3")]


def test_the_trace_ends_with_the_predicted_time():
    flat, costs = parse(FORK + "; e:MatMul(a)@90us")
    prediction = predict(flat, costs, np.asarray([0, 0, 0, 0, 1, 1, 0, 2], np.int32))
    found = trace.from_simulation(flat, costs, prediction)
    assert complaints(found) == []
    assert max(e["ts"] + e["dur"] for e in slices_of(found)) == pytest.approx(prediction.makespan_us, abs=0.002)
    join, step = slices_of(found)[-2:]
    machine = prediction.problem.machine
    assert (join["name"], step["name"]) == ("join", "start and end of the step")
    assert join["dur"] == pytest.approx(machine.join_us * len(prediction.plan.join), abs=0.002)
    assert step["dur"] == pytest.approx(machine.step_us, abs=0.002)


def test_slices_carry_the_rule_and_the_cost():
    flat, _ = parse(FORK)
    claimed = Assignment.empty(len(flat)).claim(np.asarray([4, 5]), 1, "branch", "a branch from 'a'")
    found = simulated(FORK, [0, 0, 0, 0, 1, 1, 0], claimed)
    args = {e["name"]: e["args"] for e in slices_of(found)}
    assert args["c1"]["rule"] == "branch"
    assert args["c1"]["why"] == "a branch from 'a'"
    assert args["c1"]["cost_us"] == 18.0
    assert args["c1"]["op"] == "MatMul"
    assert "rule" not in args["a"]


def test_a_graph_without_kernels_gives_an_empty_trace():
    found = simulated("x:Placeholder; y:Identity(x)", [0, 0])
    assert slices_of(found) == []
    assert complaints(found) == []


def test_overlapping_clocks_are_cut_and_told():
    found = measured([Slice("a", 0, 0.0, 5.0), Slice("b", 0, 4.9, 3.0), Slice("c", 1, 0.0, 9.0)], [])
    assert complaints(found) == []
    assert found["otherData"]["clipped_us"] == pytest.approx(0.1)


def test_a_wait_that_would_point_back_in_time_is_left_out_and_counted():
    found = measured([Slice("late", 0, 10.0, 5.0), Slice("early", 1, 0.0, 3.0)], [(0, 1)])
    assert complaints(found) == []
    assert found["otherData"]["waits_not_drawn"] == 1


@pytest.mark.parametrize(("start", "duration"), [(0.0, -1.0), (math.nan, 1.0), (0.0, math.inf)])
def test_impossible_times_are_refused(start: float, duration: float):
    with pytest.raises(ValueError, match="no valid time"):
        measured([Slice("a", 0, start, duration)], [])


def test_the_file_is_plain_json_whatever_the_arguments_are():
    found = measured([Slice('</script>"\u2028', 0, 0.0, 1.0, {"x": math.inf, "n": np.int64(3), "t": (1, 2)})], [])
    args = slices_of(json.loads(trace.to_bytes(found)))[0]["args"]
    assert args == {"x": "inf", "n": 3, "t": "(1, 2)"}


def test_the_validator_finds_what_it_is_there_for():
    good = simulated(FORK, [0, 0, 0, 0, 1, 1, 0])
    for fault, what in (
        (lambda events: events.append({**events[-1], "ph": "s", "id": 99}), "starts on no slice|never ends"),
        (lambda events: events.reverse(), "out of order"),
        (lambda events: [e.update(dur=e["dur"] + 0.5) for e in events if e["name"] == "b1"], "overlaps"),
        (lambda events: [e.update(dur=0) for e in events if e["name"] == "b1"], "no duration"),
        (lambda events: events.remove(next(e for e in events if e["ph"] == "s")), "without a start"),
        (lambda events: events.remove(next(e for e in events if e["ph"] == "f")), "never ends"),
    ):
        broken = json.loads(json.dumps(good))
        fault(broken["traceEvents"])
        assert any(part in text for text in complaints(broken) for part in what.split("|")), what


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Slice], list[tuple[int, int]]]:
    """Slices as a careless clock gives them, and waits between any two."""
    times = st.floats(0, 1e6, allow_nan=False)
    pieces = draw(
        st.lists(
            st.builds(Slice, st.text(max_size=3), st.integers(0, 3), times, st.floats(0, 1e3)), min_size=1, max_size=30
        )
    )
    number = st.integers(0, len(pieces) - 1)
    pairs = draw(st.lists(st.tuples(number, number).filter(lambda pair: pair[0] != pair[1]), max_size=20))
    return pieces, pairs


@given(runs())
@settings(max_examples=examples(60, 200), deadline=None)
def test_no_run_gives_a_trace_that_viewers_complain_about(run: tuple[list[Slice], list[tuple[int, int]]]):
    pieces, pairs = run
    found = measured(pieces, pairs)
    assert complaints(found) == []
    arrows = sum(event["ph"] == "s" for event in found["traceEvents"])
    assert arrows + found["otherData"]["waits_not_drawn"] == len(pairs)
    assert len(slices_of(found)) == len(pieces)


@pytest.mark.parametrize("model", ["annotated.pb", "control_flow_v2"])
def test_files_for_model_explorer(model: str, tmp_path: Path) -> None:
    """Every edge, overlay and value is of a node that is there; the package's own classes take the files where it is installed."""
    folder = tmp_path / "explorer"
    assert msplit("report", SAMPLES / model, "--model-explorer", folder).code == 0
    files = {path.stem: json.loads(path.read_text("ascii")) for path in folder.iterdir()}
    assert {f"{name}.json" for name in files} == set(trace.EXPLORER_FILES)
    (graph,) = files["graph"]["graphs"]
    ids = [node["id"] for node in graph["nodes"]]
    known = set(ids)
    assert len(known) == len(ids) > 10
    assert all(edge["sourceNodeId"] in known for node in graph["nodes"] for edge in node["incomingEdges"])
    waits = graph["tasksData"]["edgeOverlaysDataListLeftPane"][0]["overlays"][0]["edges"]
    assert known >= {name for wait in waits for name in wait.values()}
    data = {name: files[name][graph["id"]] for name in ("stream", "time", "bytes", "findings")}
    assert all(known >= set(one["results"]) for one in data.values())
    assert all(data[name]["results"] for name in ("stream", "time", "bytes"))
    told = {pair["key"]: pair["value"] for node in graph["nodes"] for pair in node["attrs"]}
    # Checks run for a model that has ids.
    assert bool(data["findings"]["results"]) == any(key.startswith("MS0") for key in told) == (model == "annotated.pb")
    if importlib.util.find_spec("model_explorer"):
        dacite, builder = importlib.import_module("dacite"), importlib.import_module("model_explorer.graph_builder")
        strict = dacite.Config(strict=True)
        assert dacite.from_dict(builder.GraphCollection, files["graph"], strict).graphs[0].nodes
        results = importlib.import_module("model_explorer.node_data_builder").GraphNodeData
        assert dacite.from_dict(results, data["time"], strict).results


def test_places_for_model_explorer_that_are_refused(tmp_path: Path) -> None:
    model, taken = SAMPLES / "annotated.pb", tmp_path / "taken"
    assert "-o/--output is missing" in msplit("report", model).err
    taken.touch()
    assert "is there already" in msplit("report", model, "--model-explorer", taken).err
    assert "can not be written" in msplit("report", model, "--model-explorer", taken, "--force").err
    assert "make the folder first" in msplit("report", model, "--model-explorer", tmp_path / "no" / "folder").err


def test_model_explorer_is_given_no_id_that_javascript_takes_for_another(tmp_path: Path):
    """With the id `constructor`, or a scope without a name, Model Explorer draws nothing."""
    message = schema.graph_pb2.GraphDef()
    message.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    for name, source in (("constructor", "x"), ("a//toString", "constructor"), ("toString", "a//toString")):
        node = message.node.add(name=name, op="Relu", input=[source])
        node.attr["T"].type, node.attr["_stream_id"].i = 1, 1
    (tmp_path / "m.pb").write_bytes(message.SerializeToString())
    assert msplit("report", tmp_path / "m.pb", "--model-explorer", tmp_path / "out").code == 0
    (graph,) = json.loads((tmp_path / "out" / "graph.json").read_text())["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert set(nodes) == {"x", "constructor:0", "a//toString", "toString:0"}
    assert nodes["a//toString"]["namespace"] == "a"
    assert [edge["sourceNodeId"] for edge in nodes["a//toString"]["incomingEdges"]] == ["constructor:0"]
    times = json.loads((tmp_path / "out" / "time.json").read_text())[graph["id"]]["results"]
    assert {"constructor:0", "toString:0"} < set(times) < set(nodes)
