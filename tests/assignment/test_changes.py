"""What changed between two models: nothing with itself, nothing but names where it was renamed, and every edit."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit import api
from msplit.analysis.matching import distance
from msplit.assignment.changes import ModelDifference, PricedModel, structure
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.shapes import infer
from tests.campaign import examples
from tests.cli.runner import SAMPLES, fine, msplit
from tests.formats.models import graph
from tests.graphs import parse
from tests.strategies import graph_defs
from tests.weights import other_variables


def loaded(message: Any, folder: Path, name: str = "model.pb") -> FlatGraph:
    (folder / name).write_bytes(message.SerializeToString())
    return api.load(folder / name)


def priced(flat: FlatGraph) -> PricedModel:
    return PricedModel(flat, infer(flat), np.arange(len(flat), dtype=np.float64))


def compared(old: Any, new: Any, folder: Path) -> ModelDifference:
    return structure(priced(loaded(old, folder)), priced(loaded(new, folder, "new.pb")))


def of(old: str, new: str) -> ModelDifference:
    """Changes between two graphs in the words of `tests.graphs`."""
    return structure(*(PricedModel(flat, None, costs.time_us) for flat, costs in (parse(old), parse(new))))


def copied(message: Any) -> Any:
    return schema.graph_pb2.GraphDef.FromString(message.SerializeToString())


def renamed(message: Any, order: Any) -> Any:
    """Another order, and all nodes in a scope."""
    found = copied(message)
    names = {node.name for node in found.node}

    def named(text: str) -> str:
        node = text.removeprefix("^").partition(":")[0]
        return text.replace(node, f"scope/{node}", 1) if node in names else text

    nodes = list(copied(message).node)
    del found.node[:]
    for place in order:
        node = found.node.add()
        node.CopyFrom(nodes[place])
        node.name = f"scope/{node.name}"
        inputs = [named(text) for text in node.input]
        node.input[:] = inputs
        if "_class" in node.attr:
            node.attr["_class"].list.s[:] = [b"loc:@scope/" + text[5:] for text in node.attr["_class"].list.s]
    return found


@settings(max_examples=examples(40, 600), deadline=None)
@given(graph_defs())
def test_a_graph_and_itself_are_the_same(tmp_path_factory: pytest.TempPathFactory, message: Any) -> None:
    found = compared(message, message, tmp_path_factory.mktemp("same"))
    assert found.same
    assert (found.renamed, found.scopes, found.left, found.joined, found.not_compared) == ((), (), (), (), ())


@settings(max_examples=examples(60, 700), deadline=None)
@given(graph_defs(), st.data())
def test_of_a_graph_in_another_order_and_scope_only_names_change(
    tmp_path_factory: pytest.TempPathFactory, message: Any, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(message.node))))
    folder = tmp_path_factory.mktemp("renamed")
    found = compared(message, renamed(message, order), folder)
    assert found.same, (found.added, found.removed, found.changed, found.ends)
    assert sum(nodes for *_, nodes in found.renamed) == len(api.load(folder / "new.pb"))


def _attribute(node: Any, _: Any) -> None:
    node.attr["edited"].i = 7


def _op(node: Any, _: Any) -> None:
    node.op = "Edited"


def _insert(node: Any, message: Any) -> None:
    producer = node.input[0]
    between = message.node.add(name="between", op="Between", input=[producer])
    between.attr["T"].type = 1
    node.input[0] = "between"


def _device(node: Any, _: Any) -> None:
    node.device = "/device:GPU:7"


EDITS: dict[str, Callable[[Any, Any], None]] = {
    "attribute": _attribute,
    "op": _op,
    "insert": _insert,
    "device": _device,
}


@settings(max_examples=examples(60, 700), deadline=None)
@given(graph_defs(loops=False), st.sampled_from(sorted(EDITS)), st.booleans(), st.data())
def test_every_edit_is_found_renamed_or_not(
    tmp_path_factory: pytest.TempPathFactory, message: Any, edit: str, moved: bool, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    needed = loaded(message, folder).graph.index  # calls, and what no output needs, are not there
    places = [
        place
        for place, node in enumerate(message.node)
        if node.name in needed and node.op != "Placeholder" and node.input and node.input[0][0] != "^"
    ]
    if not places:
        return
    new = copied(message)
    EDITS[edit](new.node[data.draw(st.sampled_from(places))], new)
    if moved:
        new = renamed(new, data.draw(st.permutations(range(len(new.node)))))
    found = compared(message, new, folder)
    assert not found.same
    if not moved and edit in ("attribute", "device"):
        (one,) = found.changed
        assert [aspect.what for aspect in one.aspects] == ["edited" if edit == "attribute" else "device"]


CHAIN = "x:Placeholder; a:MatMul(x)@9us; b:Relu(a)@1us; c:MatMul(b)@9us; d:Tanh(c)@1us"


def test_a_node_that_is_put_between_others_moves_nothing_else():
    found = of(CHAIN, CHAIN.replace("c:MatMul(b)", "e:Sigmoid(b)@3us; c:MatMul(e)"))
    assert [node.name for node in found.added] == ["e"]
    assert [(node.name, [(one.what, one.old, one.new) for one in node.aspects]) for node in found.changed] == [
        ("c", [("input 0", "b", "e")])
    ]
    assert (found.removed, found.work_us, found.critical_path_us) == ((), (20.0, 23.0), (20.0, 23.0))
    assert found.joined == ("e",)
    assert [(one.scope, one.added, one.changed, one.old_us, one.new_us) for one in found.scopes] == [
        ("e", 1, 0, 0.0, 3.0),
        ("c", 0, 1, 9.0, 9.0),
    ]


def test_numbers_of_layers_that_move_up_are_renamings_and_no_changes():
    """As Keras numbers its layers: one more in front gives all others another name, and each the name of another."""
    ops = ("Selu", "Relu", "Tanh", "Sigmoid", "Elu")

    def layers(first: int) -> str:
        numbered = list(enumerate(range(first, len(ops))))
        dense = [f"d{i}/dense:MatMul({f'd{i - 1}/act' if i else 'x'})[units={own}]" for i, own in numbered]
        return "; ".join(["x:Placeholder", *dense, *(f"d{i}/act:{ops[own]}(d{i}/dense)" for i, own in numbered)])

    found = of(layers(1), layers(0))
    assert {node.name for node in found.added} == {"d0/dense", "d0/act"}
    assert found.removed == ()
    assert {(one[0], one[1]) for one in found.renamed} == {(f"d{i}", f"d{i + 1}") for i in range(4)}


def test_a_node_with_another_op_and_name_in_the_same_place_is_one_change():
    found = of(CHAIN, CHAIN.replace("b:Relu", "z:Gelu").replace("(b)", "(z)"))
    assert (found.added, found.removed) == ((), ())
    assert [(node.was, node.name, node.aspects[0].what, node.aspects[0].old) for node in found.changed] == [
        ("b", "z", "op", "Relu")
    ]


def test_equal_towers_are_matched_each_as_a_whole():
    tower = "{0}/a:MatMul(x); {0}/b:Relu({0}/a); {0}/c:Tanh({0}/b)"
    old = "; ".join(tower.format(f"t{i}") for i in range(4))
    new = "; ".join(tower.format(f"u{i}") for i in reversed(range(4)))
    found = of(f"x:Placeholder; {old}", f"x:Placeholder; {new}")
    assert found.same
    assert all(nodes == 3 for *_, nodes in found.renamed)


def test_inputs_and_outputs_are_held_against_each_other(tmp_path: Path) -> None:
    flat = [api.load(SAMPLES / "two_signatures", signature=name) for name in ("serving_default", "embed")]
    found = structure(*map(priced, flat))
    assert {(aspect.what, aspect.old) for aspect in found.ends} >= {("output", flat[0].outputs[0].name)}


@pytest.mark.tf
def test_values_of_variables_are_told_by_how_far_they_are(tmp_path: Path) -> None:
    other = other_variables(SAMPLES / "keras_lookup", 1, tmp_path / "other")
    found = api.diff(SAMPLES / "keras_lookup", other)
    assert {node.op for node in found.changed} == {"VarHandleOp"}
    assert len(found.changed) == 7
    assert all(node.weights.largest > 0 and not node.aspects for node in found.changed)
    assert (found.added, found.removed, found.not_compared) == ((), (), ())
    shutil.rmtree(other / "variables")
    assert "Values of variables" in api.diff(SAMPLES / "keras_lookup", other).not_compared[0]


def test_bodies_of_loops_are_compared(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "control_flow_v2", tmp_path / "new")
    saved = schema.saved_model_pb2.SavedModel.FromString((tmp_path / "new" / "saved_model.pb").read_bytes())
    bodies = [f for f in saved.meta_graphs[0].graph_def.library.function if "while_body" in f.signature.name]
    node = next(node for body in bodies for node in body.node_def if node.op in ("Tanh", "MatMul", "AddV2", "Mul"))
    node.attr["edited"].i = 1
    (tmp_path / "new" / "saved_model.pb").write_bytes(saved.SerializeToString())
    (change,) = api.diff(SAMPLES / "control_flow_v2", tmp_path / "new").changed
    assert (change.name, change.function != "") == (node.name, True)


@pytest.mark.parametrize(
    ("old", "new", "differing", "largest", "relative"),
    [
        ([1.0, 2.0], [1.0, 3.0], 1, 1.0, 1 / 3),
        ([1.0, -1.0], [-1.0, -1.0], 1, 2.0, 2.0),
        ([0.0, np.nan], [-0.0, np.nan], 0, 0.0, 0.0),
        ([1.0, np.nan], [1.0, 0.0], 1, np.inf, np.inf),
        ([2**62, 1], [2**62 + 1, 1], 1, 0.0, 0.0),
    ],
)
def test_distance_of_values(old: Any, new: Any, differing: int, largest: float, relative: float) -> None:
    found = distance(np.array(old), np.array(new))
    assert (found.differing, found.largest) == (differing, largest) if found else differing == 0
    assert found is None or found.relative == pytest.approx(relative)


def test_distance_of_texts_halves_and_other_shapes() -> None:
    import ml_dtypes

    assert distance(np.array([b"a", b"b"], object), np.array([b"a", b"c"], object)).differing == 1
    half = np.array([1, 2], ml_dtypes.bfloat16)
    assert distance(half, half + half).largest == 2
    assert distance(half, np.array([[1, 2]], ml_dtypes.bfloat16)).elements == 0
    assert distance(np.zeros(0), np.zeros(0)) is None


def operations(count: int) -> int:
    """Lines of Python that run while two graphs of about so many nodes are compared, which differ in names, order and an op."""
    towers, length = 8, count // 16
    nodes = ["x:Placeholder"]
    for t in range(towers):
        for i in range(length):
            before = f"t{t}/l{i - 1}/act" if i else "x"
            nodes += [f"t{t}/l{i}/dense:MatMul({before})", f"t{t}/l{i}/act:Relu(t{t}/l{i}/dense)"]
    ends = ",".join(f"t{t}/l{length - 1}/act" for t in range(towers))
    old = "; ".join([*nodes, f"sum:AddN({ends})"])
    new = (
        "; ".join(reversed([*nodes, f"sum:AddN({ends})"]))
        .replace("t1/", "u1/")
        .replace("t3/l3/act:Relu", "t3/l3/act:Elu")
    )
    models = [PricedModel(flat, None, costs.time_us) for flat, costs in (parse(old), parse(new))]
    lines = 0

    def count_lines(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count_lines if "msplit" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(count_lines)
    try:
        found = structure(*models)
    finally:
        sys.settrace(before)
    assert [node.aspects[0].what for node in found.changed] == ["op"]
    assert (found.added, found.removed) == ((), ())
    return lines


@pytest.mark.no_cover
def test_work_grows_with_the_graph() -> None:
    assert operations(4_000) < 4.4 * operations(1_000)


def test_of_a_text_file_and_its_binary_form_nothing_changes(tmp_path: Path) -> None:
    from google.protobuf import text_format

    message = schema.graph_pb2.GraphDef.FromString((SAMPLES / "mmoe_small.pb").read_bytes())
    (tmp_path / "same.pbtxt").write_text(text_format.MessageToString(message))
    assert api.diff(SAMPLES / "mmoe_small.pb", tmp_path / "same.pbtxt").same


HOSTILE = "<script>alert(1)</script>\x1b[31m"


@pytest.mark.parametrize("style", ["table", "md", "json"])
def test_a_hostile_text_is_text_everywhere(style: str, tmp_path: Path) -> None:
    old = graph('x Placeholder | attr { key: "dtype" value { type: DT_FLOAT } }\nb Relu x')
    new = copied(old)
    new.node[1].attr[HOSTILE].s = HOSTILE.encode()
    for name, message in (("old.pb", old), ("new.pb", new)):
        (tmp_path / name).write_bytes(message.SerializeToString())
    done = fine("diff", tmp_path / "old.pb", tmp_path / "new.pb", "--format", style, "--html", tmp_path / "out.html")
    assert "alert(1)" in done.out
    assert "\x1b" not in done.out
    page = (tmp_path / "out.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script>alert" not in page
    assert not re.search(r"(?:src|href)=", page)


def test_each_side_of_the_page_has_its_own_op(tmp_path: Path) -> None:
    old = graph("x Placeholder\nbefore Relu x")
    new = copied(old)
    new.node[1].op = "Relu6"
    for name, message in (("old.pb", old), ("new.pb", new)):
        (tmp_path / name).write_bytes(message.SerializeToString())
    fine("diff", tmp_path / "old.pb", tmp_path / "new.pb", "--html", tmp_path / "out.html")
    cells = re.findall(r"<td>(before<br>.*?)</td>", (tmp_path / "out.html").read_text())
    assert [cell.split("<br>")[1] for cell in cells] == ["Relu", "Relu6"]


def test_the_html_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "out.html").write_text("mine")
    done = msplit("diff", SAMPLES / "mmoe_small.pb", SAMPLES / "mmoe_small.pbtxt", "--html", tmp_path / "out.html")
    assert done.code == 2
    assert (tmp_path / "out.html").read_text() == "mine"
    done = fine(
        "diff", SAMPLES / "mmoe_small.pb", SAMPLES / "mmoe_small.pbtxt", "--html", tmp_path / "out.html", "--force"
    )
    page = (tmp_path / "out.html").read_text()
    assert 'class="changed"' in page
    assert page.count("<script>") == 1
    assert "expert_0/dense_0" in page


def test_names_of_storage_may_be_others_but_not_what_shares_it() -> None:
    """As TensorFlow numbers tables by chance when it exports them."""
    text = "x:Placeholder; a:HashTableV2[shared_name={}]; b:HashTableV2[shared_name={}]; c:Find(a,x); d:Find(b,x)"
    assert of(text.format("one", "two"), text.format("three", "four")).same
    assert of(text.format("one", "two"), text.format("two", "one")).same
    (found,) = {node.name for node in of(text.format("one", "two"), text.format("one", "one")).changed} - {"a"}
    assert found == "b"


def test_what_was_trained_is_carried_along_where_a_layer_is_put_in_front(tmp_path: Path) -> None:
    """Values tell layers apart that look alike: those behind the new one keep theirs."""

    def model(first: int, last: int) -> Any:
        lines = ['x Placeholder | attr { key: "dtype" value { type: DT_FLOAT } }']
        for place, own in enumerate(range(first, last)):
            value = f"dtype: DT_FLOAT tensor_shape {{ dim {{ size: 2 }} }} float_val: {own} float_val: 1"
            before = f"l{place - 1}/act" if place else "x"
            dtype = 'attr { key: "dtype" value { type: DT_FLOAT } }'
            lines += [
                f'l{place}/kernel Const | {dtype} attr {{ key: "value" value {{ tensor {{ {value} }} }} }}',
                f'l{place}/mul Mul {before} l{place}/kernel | attr {{ key: "T" value {{ type: DT_FLOAT }} }}',
                f'l{place}/act Tanh l{place}/mul | attr {{ key: "T" value {{ type: DT_FLOAT }} }}',
            ]
        return graph("\n".join(lines))

    found = compared(model(1, 6), model(0, 6), tmp_path)
    assert {node.name for node in found.added} == {"l0/kernel", "l0/mul", "l0/act"}
    assert [(node.was, node.name, node.aspects[0].what) for node in found.changed] == [("l0/mul", "l1/mul", "input 0")]
    assert found.removed == ()
