"""`msplit show`: what a file holds, before anything has to be chosen."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from msplit import formats
from msplit.opset import schema
from tests import forked
from tests.cli.runner import ROOT, SAMPLES, fine, msplit


def shown(name: str | Path) -> dict:
    return fine("show", SAMPLES / name, "--format", "json").json


def test_tag_sets_and_signatures_are_listed_where_other_commands_ask_for_a_choice() -> None:
    assert msplit("analyze", SAMPLES / "two_tags").code == 2
    found = shown("two_tags")
    assert (found["command"], found["format"]) == ("show", "savedmodel")
    assert [graph["tags"] for graph in found["graphs"]] == [["serve"], ["serve", "gpu"]]
    text = fine("show", SAMPLES / "two_tags").out
    assert "Other commands need --part tag=, such as --part tag=serve." in text
    assert "serve,gpu: signature serving_default" in text
    (graph,) = shown("two_signatures")["graphs"]
    assert [one["name"] for one in graph["signatures"]] == ["embed", "serving_default"]
    (embed, _) = graph["signatures"]
    assert embed["inputs"] == [{"name": "item", "tensor": "embed_item:0", "dtype": "float32", "shape": [None, 10]}]
    assert {one["name"]: one["shape"] for one in embed["outputs"]} == {"norm": [None], "vector": [None, 16]}


def test_the_graph_without_tags_can_be_chosen(tmp_path: Path) -> None:
    """As modules of TensorFlow Hub hold two, of which the one with dropout is tagged."""
    model = shutil.copytree(SAMPLES / "two_tags", tmp_path / "hub")
    saved = schema.saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    for graph, tags in zip(saved.meta_graphs, ([], ["train"]), strict=True):
        graph.meta_info_def.tags[:] = tags
    (model / "saved_model.pb").write_bytes(saved.SerializeToString())
    assert 'such as --part tag="".' in fine("show", model).out
    refused = msplit("analyze", model)
    assert refused.code == 2
    assert '--part tag=""' in refused.err
    found = fine("analyze", model, "--part", "tag=", "--format", "json").json
    assert found["model"]["tags"] == []
    assert "--part tag=" in str(found["next"])
    fine("assign", model, "--part", "tag=", "--rules", "default", "-o", tmp_path / "out")
    fine("check", tmp_path / "out", "--part", "tag=")
    fine("check", tmp_path / "out")  # as its record says


def test_functions_are_listed_with_what_they_take() -> None:
    (graph,) = shown("control_flow_v2")["graphs"]
    names = [one["name"] for one in graph["functions"]]
    text = fine("show", SAMPLES / "control_flow_v2", columns=60).out
    assert all(name in text for name in names)  # whole, to be copied
    body = next(one for one in graph["functions"] if one["name"].startswith("while_body"))
    assert [argument["dtype"] for argument in body["inputs"]].count("int32") == 4
    assert fine("analyze", SAMPLES / "control_flow_v2", "--part", f"function={body['name']}").out


def test_many_functions_are_cut_and_all_shows_them(tmp_path: Path) -> None:
    graph = schema.graph_pb2.GraphDef()
    graph.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    for number in range(25):
        graph.library.function.add().signature.name = f"f{number}"
    (tmp_path / "m.pb").write_bytes(graph.SerializeToString())
    assert "and 5 smaller functions (--all)" in fine("show", tmp_path / "m.pb").out
    assert "f24" in fine("show", tmp_path / "m.pb", "--all").out


@pytest.mark.parametrize("name", ["mmoe_small.pb", "mmoe_small.pbtxt", "training.meta"])
def test_without_signatures_it_shows_what_other_commands_take(name: str) -> None:
    (graph,) = shown(name)["graphs"]
    model = formats.read(SAMPLES / name)
    assert graph["signatures"] == []
    assert [one["tensor"] for one in graph["guessed"]["inputs"]] == [end.tensor for end in model.inputs]
    assert [one["tensor"] for one in graph["guessed"]["outputs"]] == [end.tensor for end in model.outputs]


def test_what_can_not_be_guessed_is_said_and_no_error(tmp_path: Path) -> None:
    saved = schema.saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = saved.meta_graphs.add()
    meta.graph_def.node.add(name="x", op="NoOp")
    meta.object_graph_def.nodes.add()
    (tmp_path / "saved_model.pb").write_bytes(saved.SerializeToString())
    done = fine("show", tmp_path)
    assert "inputs and outputs are not known: the SavedModel has no signatures" in " ".join(done.out.split())


def test_it_loads_no_tensorflow() -> None:
    code = (
        "import sys; from msplit.cli import main; assert main.run(['show', 'sample_graphs/gru_while']) == 0; "
        "assert not {'torch', 'tensorflow.python'} & set(sys.modules)"
    )
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_is_no_model_is_one_message() -> None:
    done = msplit("show", "gone.pb")
    assert (done.code, done.out) == (2, "")
    assert "there is no such file" in done.err


def test_an_unknown_number_of_axes_is_told_from_one_axis_of_unknown_size(tmp_path: Path) -> None:
    graph = schema.graph_pb2.GraphDef()
    for name in ("one", "more"):
        node = graph.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = 1
        node.attr["shape"].shape.unknown_rank = name == "more"
        graph.node.add(name=f"{name}/y", op="Neg", input=[name]).attr["T"].type = 1
    graph.node[0].attr["shape"].shape.dim.add(size=-1)
    (tmp_path / "m.pb").write_bytes(graph.SerializeToString())
    done = fine("show", tmp_path / "m.pb")
    assert [line.split()[-1] for line in done.out.splitlines() if line.startswith("input")] == ["?", "any"]
    assert "any: of any number of axes" in done.out
