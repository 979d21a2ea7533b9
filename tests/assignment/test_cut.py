"""Parts of models: in TensorFlow they compute what the whole model does, and what can not be cut is refused before anything is written."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from msplit import api, formats
from msplit.cost.profile import Workload
from msplit.engines.tensorflow.engine import reference
from msplit.errors import LoadError, MsplitError, WriteError
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import STREAM_ID, Format
from msplit.inputs.make import feeds_for
from tests.campaign import CAMPAIGN, examples
from tests.cli.runner import SAMPLES, fine, msplit, unchanged
from tests.engines.cuda.random_graphs import random_graphs
from tests.formats.models import graph, read

Arrays = Mapping[str, NDArray[Any]]
FEEDS = {"control_flow_v2": {"x": np.ones((3, 8), np.float32), "steps": np.int32(3)}}
MODELS = ["control_flow_v2", "gru_while", "keras_lookup", "ragged_sparse", "tf1_saved_model", "mmoe_small.pbtxt"]
MODELS += ["feature_columns", "keras_inception", "two_signatures", "lstm_small.pb", "annotated.pb"] if CAMPAIGN else []


def loaded(path: Path) -> FlatGraph:
    return api.load(path, tags=["serve"] if path.is_dir() else None)


def computed(made: api.Cut, feeds: Arrays) -> dict[str, NDArray[Any]]:
    """Values of a part's outputs in TensorFlow."""
    if formats.sniff(made.path).binary is Format.GRAPH_DEF:
        flat = api.load(made.path, inputs=list(made.inputs.values()), outputs=list(made.outputs.values()))
    else:
        flat = api.load(made.path)
    names = {tensor: name for ends in (made.inputs, made.outputs) for name, tensor in ends.items()}
    found = reference(flat, {end.name: feeds[names.get(end.name, end.name)] for end in flat.inputs})
    return {names.get(name, name): value for name, value in found.items()}


def frontier(flat: FlatGraph, level: int) -> list[str]:
    """Tensors that cross a level of a graph and depend on what is fed: they cut the model in two."""
    graph, edges = flat.graph, flat.graph.edges
    across = (graph.level[edges.src] <= level) & (graph.level[edges.dst] > level) & (edges.port >= 0)
    depends = graph.descendants(end.node for end in flat.inputs)
    fed = {(end.node, end.port) for end in flat.inputs}
    pairs = sorted(set(zip(edges.src[across].tolist(), edges.port[across].tolist(), strict=True)) - fed)
    pairs = [(node, port) for node, port in pairs if depends[node] and flat.dtype(node, port) not in ("resource", "")]
    return [f"{graph.names[node]}:{port}" for node, port in pairs if not flat.dtype(node, port).endswith("_ref")]


def assert_halves(flat: FlatGraph, level: int, expected: Arrays, feeds: Arrays, folder: Path) -> None:
    """What is in front of a level, and what is behind it fed with that, compute together what the model does, to the bit."""
    middle, own = frontier(flat, level), [end.name for end in flat.inputs]
    if not middle:
        return
    front = computed(api.cut(flat, folder / f"front{level}", outputs=middle), feeds)
    back = api.cut(flat, folder / f"back{level}", inputs=[*middle, *own])
    found = computed(back, {**feeds, **front})
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], strict=True)


@pytest.mark.tf
@pytest.mark.parametrize("name", MODELS)
def test_the_halves_of_a_model_compute_what_it_does(name: str, tmp_path: Path) -> None:
    flat = loaded(SAMPLES / name)
    feeds = FEEDS.get(name) or feeds_for(flat, Workload(batch=3))
    expected = reference(flat, feeds)
    levels = range(1, int(flat.graph.level.max()))
    for level in random.Random(name).sample(levels, 20 if CAMPAIGN else 2):
        assert_halves(flat, level, expected, feeds, tmp_path)


@pytest.mark.tf
@settings(max_examples=examples(6, 300), deadline=None)
@given(random_graphs())
def test_the_halves_of_any_graph_compute_what_it_does(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    made, feeds, ends = case
    folder = tmp_path_factory.mktemp("any")
    (folder / "model.pb").write_bytes(made.SerializeToString())
    flat = api.load(folder / "model.pb", outputs=ends)
    feeds = {end.name: feeds[end.name] for end in flat.inputs}
    assert_halves(flat, int(flat.graph.level.max()) // 2, reference(flat, feeds), feeds, folder)


@pytest.mark.tf
def test_tensorflow_loads_a_part_with_a_vocabulary_and_weights_in_both_ways(tmp_path: Path) -> None:
    import tensorflow as tf

    flat, out = loaded(SAMPLES / "keras_lookup"), tmp_path / "part"
    feeds = feeds_for(flat, Workload(batch=3))
    gathered = "city_dense_1/Relu"  # is short for the one node whose name ends so
    made = api.cut(flat, out, outputs=[gathered])
    assert [*made.inputs] == ["city"]
    assert made.variables == 3
    signature = formats.read(out).meta.signature_def["serving_default"]
    assert signature.inputs["city"].tensor_shape.dim[0].size == -1
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.saved_model.load(session, ["serve"], str(out))
        first = session.run(signature.outputs[gathered].name, {signature.inputs["city"].name: feeds["city"]})
    again = tf.saved_model.load(str(out)).signatures["serving_default"](city=tf.constant(feeds["city"]))[gathered]
    found = computed(made, feeds)[gathered]
    np.testing.assert_array_equal(first, found)
    np.testing.assert_array_equal(again.numpy(), found)
    kept = {node.name: node for node in formats.read(out).graph_def.node}
    table = next(name for name, node in kept.items() if node.op == "HashTableV2")
    assert any(node.op == "StatefulPartitionedCall" and table in node.input for node in kept.values())


@pytest.mark.tf
def test_a_meta_graph_takes_its_checkpoint_along(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], "x")
        used, unused = (
            v1.Variable(np.arange(6.0, dtype=np.float32).reshape(3, 2), name="used"),
            v1.Variable(1.0, name="unused"),
        )
        hidden = tf.matmul(x, used, name="hidden")
        tf.add(hidden, unused, name="y")
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(tmp_path / "model"))
    made = api.cut(tmp_path / "model.meta", tmp_path / "part.meta", outputs=["hidden"])
    assert made.variables == 1
    assert sorted(path.name for path in tmp_path.glob("part*")) == [
        "part.data-00000-of-00001",
        "part.index",
        "part.meta",
    ]
    value = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(computed(made, {"x": value})["hidden"], value @ np.arange(6.0).reshape(3, 2))
    assert [*formats.variables(formats.read(made.path))] == ["used"]
    with pytest.raises(WriteError, match="is there already"):
        api.cut(tmp_path / "model.meta", tmp_path / "part.meta", outputs=["hidden"])


def cut_of(tmp_path: Path, text: str, out: str = "part.pb", **ends: Sequence[str]) -> tuple[api.Cut, dict[str, Any]]:
    """A part of a small graph, and its nodes by name."""
    read(tmp_path, graph(text))
    made = api.cut(tmp_path / "model.pb", tmp_path / out, **ends)
    return made, {node.name: node for node in formats.read(made.path).graph_def.node}


FLOAT = '| attr { key: "T" value { type: DT_FLOAT } }'
X = '| attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "shape" value { shape { dim { size: -1 } dim { size: 4 } } } }'
TWO = f"x Placeholder {X}\ny Placeholder {X}\na Relu x {FLOAT}\nb Add a y {FLOAT}\nc Relu b {FLOAT}"


def test_what_is_fed_becomes_a_placeholder_of_its_name_type_and_shape(tmp_path: Path) -> None:
    made, nodes = cut_of(tmp_path, TWO, inputs=["b"], outputs=["c"])
    assert (made.inputs, made.outputs) == ({"b": "b:0"}, {"c": "c:0"})
    assert {name: node.op for name, node in nodes.items()} == {"b": "Placeholder", "c": "Relu"}
    assert [dim.size for dim in nodes["b"].attr["shape"].shape.dim] == [-1, 4]


def test_without_inputs_those_of_the_model_stay_that_are_needed(tmp_path: Path) -> None:
    made, nodes = cut_of(tmp_path, TWO, outputs=["a"])
    assert [*made.inputs] == ["x"]
    assert [*nodes] == ["x", "a"]


def test_an_input_that_nothing_needs_stays_and_is_said(tmp_path: Path) -> None:
    made, nodes = cut_of(tmp_path, TWO, inputs=["x", "y"], outputs=["a"])
    assert [*made.inputs] == ["x", "y"]
    assert "y" in nodes
    assert made.notes == ("No output needs y.",)


def test_an_output_that_is_fed_is_handed_through(tmp_path: Path) -> None:
    made, nodes = cut_of(tmp_path, TWO, inputs=["a", "y"], outputs=["a", "c"])
    assert made.outputs["a"] == "a_through:0"
    assert nodes["a_through"].op == "Identity"


def test_of_a_node_with_several_outputs_one_may_be_fed(tmp_path: Path) -> None:
    text = f'x Placeholder {X}\naxis Const | attr {{ key: "dtype" value {{ type: DT_INT32 }} }} '
    text += 'attr { key: "value" value { tensor { dtype: DT_INT32 tensor_shape {} int_val: 1 } } }\n'
    text += f's Split axis x {FLOAT} attr {{ key: "num_split" value {{ i: 2 }} }}\nb Add s s:1 {FLOAT}'
    made, nodes = cut_of(tmp_path, text, inputs=["x", "s:1"], outputs=["b"])
    assert nodes["s_1"].op == "Placeholder"
    assert [*nodes["b"].input] == ["s", "s_1"]
    assert made.inputs == {"x": "x:0", "s:1": "s_1:0"}


def test_an_output_that_others_read_has_to_be_named_to_other_commands(tmp_path: Path) -> None:
    made, _ = cut_of(tmp_path, TWO, outputs=["b", "c"])
    assert made.notes == ("A GraphDef does not name its outputs: give other commands --part outputs=b,c.",)


def test_what_waits_for_a_fed_node_waits_for_its_placeholder(tmp_path: Path) -> None:
    _, nodes = cut_of(tmp_path, f"{TWO}\nd Relu b ^c {FLOAT}", inputs=["b", "c"], outputs=["d"])
    assert [*nodes["d"].input] == ["b", "^c"]
    assert nodes["c"].op == "Placeholder"


def test_stream_ids_and_devices_stay(tmp_path: Path) -> None:
    message = graph(TWO)
    message.node[4].attr[STREAM_ID].i = 3
    message.node[4].device = "/device:GPU:0"
    read(tmp_path, message)
    node = formats.read(api.cut(tmp_path / "model.pb", tmp_path / "o.pb", inputs=["b"]).path).graph_def.node[1]
    assert (node.attr[STREAM_ID].i, node.device) == (3, "/device:GPU:0")


WRONG = {
    "unknown": ({"outputs": ["cc"]}, "names 'cc', which the graph does not have", "did you mean c"),
    "port": ({"outputs": ["c:1"]}, "has 1 output", ""),
    "unnamed": (
        {"inputs": ["x"], "outputs": ["c"]},
        "the outputs need 'y', which inputs does not name",
        "name it with inputs",
    ),
    "twice": ({"inputs": ["x", "x:0", "y"], "outputs": ["c"]}, "one tensor twice: 'x' and 'x:0'", ""),
}


def test_a_name_that_is_short_for_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="short for several nodes: tower_0/out/Sigmoid, tower_1/out/Sigmoid"):
        api.cut(SAMPLES / "mmoe_small.pb", tmp_path / "out.pb", outputs=["out/Sigmoid"])


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_cut_is_refused_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    ends, what, fix = WRONG[case]
    with pytest.raises(MsplitError, match=what) as refused:
        cut_of(tmp_path, TWO, **ends)
    assert fix in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pb"]


@pytest.mark.parametrize(
    ("model", "ends", "what"),
    [
        ("while_v1.pb", {"outputs": ["loop/MatMul"]}, "inside of the loop 'loop/while_context'"),
        ("while_v1.pb", {"inputs": ["loop/inner/Exit"]}, "inside of the loop"),
        ("cond_v1.pb", {"inputs": ["choice/MatMul"]}, "inside of the cond of 'flag'"),
        ("training.meta", {}, "without the values of its variables"),
        ("custom_op.pb", {"outputs": ["nothing"]}, "which the graph does not have"),
    ],
)
def test_loops_and_conds_stay_whole(model: str, ends: dict[str, Any], what: str, tmp_path: Path) -> None:
    flat = api.load(SAMPLES / model)
    ends = {
        key: [next((n for n in flat.graph.names if n.startswith(name)), name) for name in names]
        for key, names in ends.items()
    }
    with pytest.raises(MsplitError, match=what):
        api.cut(flat, tmp_path / "out.pb", **ends)
    assert not [*tmp_path.iterdir()]


@pytest.mark.tf
@pytest.mark.parametrize("model", ["while_v1.pb", "cond_v1.pb"])
def test_a_loop_or_cond_that_stays_whole_computes_the_same(model: str, tmp_path: Path) -> None:
    flat = api.load(SAMPLES / model)
    feeds = feeds_for(flat, Workload(batch=3))
    found = computed(api.cut(flat, tmp_path / "part.pb"), feeds)
    for name, value in reference(flat, feeds).items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def test_the_same_part_gives_the_same_bytes_and_leaves_the_model_alone(tmp_path: Path) -> None:
    own = SAMPLES / "mmoe_small.pb"
    with unchanged(SAMPLES):
        for name in ("a", "b"):
            api.cut(own, tmp_path / name, outputs=["tower_0/out/Sigmoid"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    shutil.copy(own, tmp_path / "own.pb")
    with pytest.raises(WriteError, match="is the input"):
        api.cut(tmp_path / "own.pb", tmp_path / "own.pb", force=True)


@pytest.mark.parametrize("name", ["two_signatures", "two_tags"])
def test_the_command_takes_a_signature_and_names_near_ones(name: str, tmp_path: Path) -> None:
    part = "signature=serving_default" if name == "two_signatures" else "tag=serve"
    done = msplit("cut", SAMPLES / name, "--part", part, "--outputs", "nothing_like_it", "-o", tmp_path / "out")
    assert done.code == 2
    assert "--outputs names 'nothing_like_it'" in done.err
    assert not [*tmp_path.iterdir()]


@pytest.mark.tf
def test_the_command_says_what_it_has_written(tmp_path: Path) -> None:
    done = fine("cut", SAMPLES / "mmoe_small.pb", "--outputs", "tower_1/out/Sigmoid", "-o", tmp_path / "out.pb")
    assert (
        done.out
        == f"Written: {tmp_path}/out.pb, 112 nodes with 0 variables.\ninputs: x\noutputs: tower_1/out/Sigmoid\n"
    )


def test_values_that_are_damaged_are_not_written(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "tf1_saved_model", tmp_path / "model")
    data = next((tmp_path / "model" / "variables").glob("*.data*"))
    data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(LoadError):
        api.cut(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.tf
def test_what_is_behind_a_layer_does_not_need_what_was_read_in_front_of_it(tmp_path: Path) -> None:
    """The results of a function of TensorFlow 2 wait for all that it reads: lookups of tables, weights of other layers."""
    flat = loaded(SAMPLES / "keras_lookup")
    feeds = feeds_for(flat, Workload(batch=3))
    middle = ["joined_1/concat"]
    front = api.cut(flat, tmp_path / "front", outputs=middle)
    back = api.cut(flat, tmp_path / "back", inputs=middle)
    assert [*back.inputs] == middle
    assert (front.variables, back.variables) == (5, 2)
    assert "LookupTableFindV2" not in {node.op for node in formats.read(back.path).graph_def.node}
    found = computed(back, computed(front, feeds))
    for name, value in reference(flat, feeds).items():
        np.testing.assert_array_equal(found[name], value, strict=True)


def test_what_has_effects_stays_where_it_needs_no_other_input(tmp_path: Path) -> None:
    dtype = 'attr { key: "dtype" value { type: DT_FLOAT } }'
    one = f'{dtype} attr {{ key: "value" value {{ tensor {{ dtype: DT_FLOAT tensor_shape {{}} float_val: 1 }} }} }}'
    text = f"""{TWO}
        v VarHandleOp | {dtype} attr {{ key: "shape" value {{ shape {{}} }} }}
        one Const | {one}
        count AssignAddVariableOp v one | {dtype}
        sink NoOp ^count ^a
        d Relu c ^sink {FLOAT}"""
    _, nodes = cut_of(tmp_path, text, inputs=["c"], outputs=["d"])
    assert {*nodes} == {"c", "d", "sink", "count", "one", "v"}
    assert [*nodes["sink"].input] == ["^count"]
