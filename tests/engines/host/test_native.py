"""Parts of a host program that run in C, beside TensorFlow's session."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from msplit.engines.cuda.runtime.host_stage import lowered
from msplit.engines.host import hashing, native
from msplit.engines.host.program import HostGraph, HostProgram
from msplit.engines.host.table import native_forms
from msplit.errors import InvalidInput
from msplit.formats.wire import parse_binary
from msplit.opset import schema
from tests.engines.host.kernels import options, same, texts

pytestmark = pytest.mark.tf


def test_each_function_in_c_has_one_in_numpy_and_the_other_way_round():
    library = hashing.native()
    if library is None:
        pytest.skip("no C compiler has made host_ops.native: python hatch_build.py says why")
    assert [op for op in native_forms() if library.step_number(op.encode()) < 0] == []
    assert library.step_number(b"DecodeRaw") == -1


def program_of(build, whole=True):
    """A program of a graph of TensorFlow with inputs `words`, of strings, `x` of floats and `ids`; and what TensorFlow answers."""
    tf = importlib.import_module("tensorflow")
    graph = tf.Graph()
    with graph.as_default():
        v1 = tf.compat.v1
        shapes = {"words": (tf.string, [None]), "x": (tf.float32, [None, 3]), "ids": (tf.int32, [None, 2])}
        inputs = {name: v1.placeholder(*shape, name=name) for name, shape in shapes.items()}
        made = {f"out_{number}": value for number, value in enumerate(build(tf, **inputs))}
    data = parse_binary(graph.as_graph_def().SerializeToString(), schema.graph_pb2.GraphDef(), "a graph")
    feeds = {name: value.name for name, value in inputs.items()}
    program = HostProgram(HostGraph(data, feeds, {name: value.name for name, value in made.items()}), lowered)
    assert not program.missing or not whole

    def answers(feeds):
        with tf.compat.v1.Session(graph=graph, config=options(tf)) as session:
            found = session.run(made, {inputs[name]: value for name, value in feeds.items()})
        return {name: np.asarray(value) for name, value in found.items()}

    return program, answers


FEEDS = {
    "words": texts(b"a b", b"", b"\xff \0"),
    "x": np.array([[1.5, np.nan, -0.0], [-2.5, 1e20, 3], [0, 1, 2]], np.float32),
    "ids": np.array([[2, 0], [1, 1], [0, 2]], np.int32),
}


LEFT = {
    "batched": lambda raw, x, ids: raw.GatherV2(params=x, indices=ids, axis=1, batch_dims=1),
    "another axis": lambda raw, x, ids: raw.OneHot(indices=ids, depth=3, on_value=1.0, off_value=0.0, axis=0),
    "shapes that differ": lambda raw, x, ids: raw.Equal(x=x, y=x[:2], incompatible_shape_error=False),
    "floats": lambda raw, x, ids: raw.Maximum(x=x, y=0.0),
    "made whole": lambda raw, x, ids: raw.Cast(x=x[1:], DstT=np.int32),
}


@pytest.mark.parametrize("made", LEFT)
def test_attributes_and_types_that_the_table_leaves_to_others_are_not_taken_for_those_in_c(made):
    def build(tf, words, x, ids):
        yield LEFT[made](tf.raw_ops, x, ids)
        yield tf.shape(words) + tf.shape(ids)[:1]

    program, answers = program_of(build)
    feeds = {**FEEDS, "x": np.array([[1.5, 2, -0.0], [-2.5, 100, 3], [0, 1, 2]], np.float32)}
    expected = answers(feeds)
    found = program.step(feeds)
    same([*map(found.get, expected)], [*expected.values()], made)


def test_parts_in_c_and_in_numpy_hand_each_other_values_of_all_kinds():
    """Strings out of C and into it again; an output that is an input; one that is both asked for and read; one that is a constant."""

    def build(tf, words, x, ids):
        lower = tf.strings.upper(words)
        joined = tf.strings.join([lower, lower], "-")
        again = tf.strings.lower(tf.strings.strip(joined))
        yield again
        yield lower
        yield tf.identity(words)
        yield tf.strings.to_hash_bucket_fast(again, 50)
        yield tf.strings.length(again) + tf.shape(x)[0]
        yield tf.reshape(x[:, ::-1], tf.stack([-1, tf.size(words)]))
        yield tf.concat([tf.where(ids > 0), tf.zeros([1, 2], tf.int64)], 0)

    program, answers = program_of(build)
    for rows in (3, 1, 0):
        feeds = {name: value[:rows] for name, value in FEEDS.items()}
        if not rows:
            feeds["words"] = FEEDS["words"]  # by which rows are divided
        expected = answers(feeds)
        for _ in range(2):
            found = program.step(feeds)
            same([*map(found.get, expected)], [*expected.values()], rows)
        assert all(value.flags.writeable for value in found.values())


def test_what_a_part_in_c_refuses_is_told_of_the_node_that_refuses_it(monkeypatch):
    def build(tf, words, x, ids):
        yield tf.reshape(x, tf.concat([tf.shape(ids), [1]], 0), name="impossible")

    said = []
    for compiled in (True, False):
        with monkeypatch.context() as patch:
            if not compiled:
                patch.setattr(native, "native", lambda: None)
            program, _ = program_of(build)
        with pytest.raises(InvalidInput, match="Reshape can not take these values") as problem:
            program.step(FEEDS)
        said.append(str(problem.value))
    assert said[0] == said[1]
    assert "node impossible" in said[0]


def guarded(tf, words, x, ids):
    """A row is chosen by a condition, behind assertions, one inside of a branch; and something that asserts nothing."""

    @tf.function
    def rows(x, ids):
        tf.debugging.assert_less(tf.reduce_max(ids), 3, "too large")
        if tf.shape(ids)[0] > 1:
            tf.debugging.assert_positive(ids[1, 0] + 1)
            return tf.cumsum(x), tf.shape(x)[0]
        return x * 2, tf.size(ids)

    more = tf.cond(tf.size(words) > 2, lambda: tf.strings.lower(words), lambda: tf.strings.join([words, words]))
    made, size = rows(x, ids)
    yield from (made, size, more)


def test_functions_and_branches_run_as_in_tensorflow():
    program, answers = program_of(guarded)
    ops = {step.node.op for step in program.steps}
    assert any(op.endswith("If") for op in ops), ops
    for rows in (3, 2, 1):
        feeds = {name: value[:rows] for name, value in FEEDS.items()}
        expected = answers(feeds)
        found = program.step(feeds)
        same([*map(found.get, expected)], [*expected.values()], rows)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_assertion_that_does_not_hold_is_told_of_its_node(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(native, "native", lambda: None)
    program, _ = program_of(guarded)
    for ids in ([[3, 0], [1, 1]], [[0, 0], [-1, 1]]):
        with pytest.raises(InvalidInput, match="Assert can not take these values: assertion failed") as problem:
            program.step({**FEEDS, "ids": np.array(ids, np.int32)})
        assert "Assert" in problem.value.where


def test_a_branch_that_nobody_has_is_told_by_its_ops():
    def build(tf, words, x, ids):
        yield tf.cond(tf.size(words) > 2, lambda: tf.strings.unicode_transcode(words, "UTF-8", "UTF-8"), lambda: words)

    program, _ = program_of(build, whole=False)
    assert [*program.missing] == ["UnicodeTranscode"]


def test_functions_that_call_each_other_without_an_end_are_not_ours():
    tf = importlib.import_module("tensorflow")
    graph = tf.Graph().as_graph_def()
    function = graph.library.function.add()
    function.signature.name = "again"
    function.signature.input_arg.add(name="x", type=1)
    function.signature.output_arg.add(name="y", type=1)
    for nodes, source in ((function.node_def, "x"), (graph.node, "x")):
        node = nodes.add(name="call", op="PartitionedCall", input=[source])
        node.attr["f"].func.name = "again"
        for name in ("Tin", "Tout"):
            node.attr[name].list.type.append(1)
    function.ret["y"] = "call:output:0"
    graph.node.insert(0, tf.compat.v1.NodeDef(name="x", op="Placeholder"))
    graph.node[0].attr["dtype"].type = 1
    data = parse_binary(graph.SerializeToString(), schema.graph_pb2.GraphDef(), "a graph")
    program = HostProgram(HostGraph(data, {"x": "x:0"}, {"y": "call:0"}), lowered)
    assert [*program.missing] == ["PartitionedCall"]
