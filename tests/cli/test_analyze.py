"""What `analyze` says of every sample, and how text looks on a terminal and in a pipe."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import msplit as library
from msplit.opset import schema
from tests import forked
from tests.campaign import sampled
from tests.cli.runner import ALL, ROOT, SAMPLES, fine, msplit, on_terminal, options_of, process
from tests.large_tables import recommender


@pytest.mark.parametrize("model", ALL)
def test_every_sample_is_analyzed(model: str) -> None:
    done = fine("analyze", SAMPLES / model, *options_of(model))
    assert done.out.startswith(f"{SAMPLES / model}"[:78])
    verdict = " ".join(done.out[-1600:].split())
    helps = "Streams help this model: " in verdict
    assert helps or "Streams can not help this model: " in verdict or "Streams gain next to nothing here: " in verdict
    assert ("msplit assign sample_graphs" in verdict.replace(f"{ROOT}/", "")) == helps
    assert ("Next: msplit bench " in verdict) == ("no node launches a kernel" not in verdict)
    one_launch = "Next:" in done.out and "--cuda capture=no" not in done.out
    assert ("msplit's engine runs a step as one launch" in " ".join(done.out.split())) == one_launch
    found = fine("analyze", SAMPLES / model, *options_of(model), "--show", "all", "--format", "json").json
    assert (found["schema_version"], found["command"]) == (1, "analyze")
    assert found["nodes"]["total"] == len(found["node_list"]) >= found["nodes"]["host"]
    assert sum(op["gpu"] + op["host"] for op in found["ops"]) == found["nodes"]["total"]
    assert found["bounds_us"]["lower_bound"] <= found["bounds_us"]["serial"] + 1e-6
    judged = found["judgement"]
    assert judged["words"] in " ".join(done.out.split())
    assert 1 <= judged["gain"] <= judged["most"] <= found["gain_at_most"]["any"] + 1e-9
    assert found["suggestion"]["helps"] == helps


@pytest.mark.parametrize("engine", [(), ("--engine", "cuda")], ids=["any", "cuda"])
def test_sparse_and_ragged_inputs_lead_to_no_build_but_to_what_works(engine: tuple[str, ...]) -> None:
    done = fine("analyze", SAMPLES / "ragged_sparse", *engine)
    assert "tags, tags_1, tags_2, words, words_1 are parts of sparse or ragged tensors" in " ".join(done.out.split())
    commands = fine("analyze", SAMPLES / "ragged_sparse", *engine, "--format", "json").json["commands"]
    assert [shlex.split(command)[1] for command in commands] == ["bench", "assign"]
    if importlib.util.find_spec("torch") is not None:
        _, *bench = shlex.split(commands[0])
        fine(*bench, "--measure", "duration=0", "--measure", "builds=1")
        graph = library.load(SAMPLES / "ragged_sparse")
        with pytest.raises(library.EngineError, match="depends on values, so they can not be captured"):
            library.prepare(graph, device="cpu", engine="cuda", effort="fast")
        library.prepare(graph, device="cpu", engine="cuda", effort="fast", capture=False).close()


def test_shapes_that_depend_on_values_lead_to_no_build_but_to_steps_launch_by_launch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    graph, nodes = (
        schema.graph_pb2.GraphDef(),
        [("x", "Placeholder", ()), ("where", "Where", ("x",)), ("y", "GatherNd", ("x", "where"))],
    )
    for name, op, inputs in nodes:
        node = graph.node.add(name=name, op=op, input=inputs)
        for key in {"Placeholder": ["dtype"], "Where": ["T"], "GatherNd": ["Tparams"]}[op]:
            node.attr[key].type = 1
    graph.node[0].attr["shape"].shape.dim.add(size=4)
    graph.node[2].attr["Tindices"].type = 9
    (tmp_path / "model.pb").write_bytes(graph.SerializeToString())
    done = fine("analyze", tmp_path / "model.pb", "--format", "json")
    commands = [shlex.split(command)[1:] for command in done.json["commands"]]
    assert [command[0] for command in commands] == ["bench", "serve"], commands
    assert all("--cuda capture=no" in shlex.join(command) for command in commands)


def test_what_analyze_says_to_run_next_runs_and_predicts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model.pb").write_bytes((SAMPLES / "towers_small.pb").read_bytes())
    monkeypatch.chdir(tmp_path)
    found = fine("analyze", "my model.pb", "--batch", "64", "--costs", "gpu=a100", "--format", "json").json
    commands = [shlex.split(command) for command in found["commands"]]
    assert [command[:3] for command in commands] == [
        ["msplit", "bench", "my model.pb"],
        ["msplit", "build", "my model.pb"],
        ["msplit", "serve", "my model.build"],
        ["msplit", "assign", "my model.pb"],
    ]
    assert shlex.split(found["next"]) == commands[0]
    fine(*commands[0][1:], "--engine", "tensorflow", "--measure", "duration=0", "--measure", "builds=1")
    if importlib.util.find_spec("torch") is not None:
        fine(*commands[1][1:], "--device", "cpu", "--cuda", "effort=fast")
        assert (tmp_path / "my model.build").is_dir()
    assigned = fine(*commands[3][1:], "--format", "json").json
    assert assigned["judgement"]["gain"] == pytest.approx(found["judgement"]["gain"], rel=0.05)
    assert (tmp_path / "my model.streams.pb").exists()


@pytest.mark.tf
def test_what_can_not_be_built_is_not_said_to_be() -> None:
    """What the host runs is built with the rest, where it reads no data of its own; what trains is neither built nor served."""
    text = fine("analyze", SAMPLES / "keras_lookup", "--engine", "cuda").out
    assert f"msplit build {SAMPLES / 'keras_lookup'}" in text
    assert "LookupTableFindV2" in text
    assert "without TensorFlow, in a build, too" in " ".join(text.split())
    trains = fine("analyze", SAMPLES / "training.meta", "--engine", "cuda").out
    assert "It can be trained, not built or served: a step changes variables (" in " ".join(trains.split())
    assert "msplit serve" not in trains


def test_a_shape_is_asked_for_only_where_one_is_open() -> None:
    settled = fine("analyze", SAMPLES / "feature_columns", "--batch", "64").out
    assert "may settle it" not in settled
    assert "No option settles it" in " ".join(settled.split())


def test_analyze_looks_inside_a_function_on_request():
    model = SAMPLES / "gru_while"
    name = next(name for name in library.load(model).model.graph.functions if "while_body" in name)
    assert "MatMul" in fine("analyze", model, "--part", f"function={name}", "--batch", "4").out
    wrong = msplit("analyze", model, "--part", f"function={name[:-1]}")
    assert wrong.code == 2
    assert name in wrong.err
    assert re.search(r"it has (__\w+, ){5}\w+ and \d+ more", msplit("analyze", model, "--part", "function=-").err)
    assert "it has no functions" in msplit("analyze", SAMPLES / "while_v1.pb", "--part", "function=-").err


TEXT = ("mmoe_small.pb", "training.meta", "keras_lookup", "while_v1.pb", "ragged_sparse")


@sampled(6, style=["table", "md", "json"], model=TEXT)
def test_colour_is_for_terminals_only(style: str, model: str) -> None:
    for arguments in (("analyze",), ("assign", "--dry-run")):
        command, *extra = arguments
        done = fine(command, SAMPLES / model, *extra, "--format", style, NO_COLOR="1")
        assert "\x1b" not in done.out
        assert done.out.endswith("\n")
        assert not re.search(r"[ \t]$", done.out, re.MULTILINE)


def test_a_terminal_gets_colour_unless_it_wants_none() -> None:
    def shown(**environment: str) -> str:
        variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
        command = [sys.executable, "-m", "msplit", "assign", str(SAMPLES / "cond_v1.pb"), "--dry-run"]
        return on_terminal(command, {**variables, **environment})[0]

    assert "\x1b[1m" in shown()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown(NO_COLOR="1"))


def test_a_pipe_is_at_least_100_columns_wide() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    command = [sys.executable, "-m", "msplit", "analyze", "sample_graphs/feature_columns"]
    done = forked.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0
    assert 80 < max(map(len, done.stdout.splitlines())) <= 100


def test_errors_of_a_real_process() -> None:
    done = process("analyze", "sample_graphs/two_tags")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: sample_graphs/two_tags: the SavedModel holds 2 graphs: serve; serve,gpu\n  fix: choose one with --part tag=TAGS\n"
    )


def test_whether_several_gpus_pay_is_told_without_allocating_a_table(tmp_path: Path) -> None:
    """Eight tables of 25.6 GB each, announced by their shapes."""
    model = tmp_path / "tables.pbtxt"
    model.write_text(recommender({f"t{number}": 50_000_000 for number in range(8)}))
    done = fine("analyze", model, "--batch", 4096, "--gpus", 2, columns=2000)
    assert "The weights, 204.8 GB, do not fit on one H200 (126.9 GB for weights)" in done.out
    assert "102.4 GB and 102.4 GB of weights (4 and 4 tables)" in done.out
    assert f"msplit assign {model} --rules device" in done.out
    found = fine("analyze", model, "--batch", 4096, "--gpus", 2, "--format", "json").json["split"]
    assert (found["kind"], found["helps"], found["one_us"], found["gain"]) == ("needed", True, None, None)
    assert sum(found["best"]["weight_bytes"]) == pytest.approx(204.8e9, rel=0.01)
    assert found["best"]["tables"] == [4, 4]
    found = fine("analyze", model, "--batch", 4096, "--gpus", 2, "--costs", "gpu=h100", "--format", "json").json[
        "split"
    ]
    assert (found["kind"], found["best"]) == ("too large", None)
    assert "use 3 or more" in found["words"]


def test_small_towers_are_said_to_lose_on_several_gpus() -> None:
    model = SAMPLES / "towers_small.pb"
    found = fine("analyze", model, "--batch", 128, "--gpus", 2, "--format", "json").json
    assert (found["split"]["kind"], found["split"]["helps"]) == ("loses", False)
    assert found["split"]["gain"] < 0.5
    assert "2 GPUs do not pay" in fine("analyze", model, "--batch", 128, "--gpus", 2).out
    assert "split" not in fine("analyze", model, "--batch", 128, "--format", "json").json
