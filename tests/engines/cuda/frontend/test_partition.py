"""What the engine can run is known, and said, before anything runs."""

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.frontend.functionalize import raise_control
from msplit.engines.cuda.frontend.partition import divide, partition_graph
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from msplit.shapes import infer
from tests.engines.cuda.cases import SAMPLES, assert_equals_tensorflow, graph_of, run

pytestmark = pytest.mark.tf


def load(name):
    return flatten(read(SAMPLES / name))


@pytest.mark.parametrize(
    "name", ["mmoe_small.pb", "towers_small.pb", "lstm_small.pb", "keras_inception", "two_signatures"]
)
def test_a_sample_is_covered(name):
    found = cover(load(name))
    assert not found.missing
    assert not found.stuck
    assert not found.host
    assert not found.dynamic
    assert sum(found.covered.values()) > 10


def test_ops_without_a_lowering_are_all_listed_with_a_node_and_the_way_out():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [2, 2], name="x")
        tf.add(tf.linalg.eigh(x)[1] + tf.linalg.eigh(x + 1.0)[1], tf.linalg.svd(x)[1], name="out")

    flat = graph_of(graph, outputs=["out"])
    missing = {"SelfAdjointEigV2", "Svd"}
    found = cover(flat)
    assert missing <= set(found.missing)
    with pytest.raises(EngineError) as caught:
        run(flat, make_inputs(flat, {}, batch=2))
    text = str(caught.value)
    for op, names in found.missing.items():
        assert f"{op}: {len(names)} node" in text
        assert names[0] in text
    assert "--engine tensorflow" in text
    assert "\\n" not in text, "each op is on a line of its own"
    assert len(text.splitlines()) == len(found.missing) + 3


def test_custom_ops_are_missing():
    flat = load("custom_op.pb")
    assert "KvVarHandleOp" in cover(flat).missing
    with pytest.raises(EngineError, match="KvVarHandleOp: 2 nodes") as caught:
        run(flat, make_inputs(flat, {}, batch=2))
    assert "find rows by keys" in str(caught.value)
    assert "a variable whose rows are numbered" in str(caught.value)


@pytest.mark.parametrize("named", ["KvResource", "TFRA>CuckooHashTable", "TFRA>HkvHashTable"])
def test_tables_by_key_of_others_are_refused_by_name(named, tmp_path):
    graph = read(SAMPLES / "custom_op.pb").graph_def
    for node in graph.node:
        node.op = node.op.replace("KvResource", named)
    (tmp_path / "model.pb").write_bytes(graph.SerializeToString())
    flat = flatten(read(tmp_path / "model.pb"))
    assert f"{named}Gather" in cover(flat).missing
    with pytest.raises(EngineError, match=f"{named}Gather: 2 nodes") as caught:
        run(flat, make_inputs(flat, {}, batch=2))
    assert "a variable whose rows are numbered" in str(caught.value)


def test_ops_whose_shapes_depend_on_values_are_told():
    found = cover(load("ragged_sparse"))
    assert {"Where", "Unique"} <= set(found.dynamic)
    assert not found.missing


def test_what_is_not_needed_is_not_asked_for():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        tf.linalg.eigh(tf.matmul(x, x, transpose_a=True))
        tf.print(x)
        tf.tanh(x, name="out")

    found = cover(graph_of(graph, outputs=["out"]))
    assert not found.missing
    assert found.covered == {"Tanh": 1}


def test_a_gpu_op_without_a_lowering_is_missing_even_in_front():
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [3, 3], name="x")
        tf.tanh(tf.linalg.eigh(x)[1], name="out")

    assert list(cover(graph_of(graph, outputs=["out"])).missing) == ["SelfAdjointEigV2"]


def strings_in_the_middle(tf, v1):
    x = v1.placeholder(tf.float32, [None, 4], name="x")
    y = tf.matmul(x, np.ones((4, 1), np.float32))
    ids = tf.strings.to_hash_bucket_fast(tf.strings.as_string(y, name="text"), 10, name="bucket")
    rows = tf.gather(tf.constant(np.ones((10, 2), np.float32)), ids)
    tf.matmul(rows[:, 0], np.ones((2, 3), np.float32), name="out")


def test_host_nodes_in_the_middle_are_refused_by_name():
    flat = graph_of(strings_in_the_middle, outputs=["out"])
    found = cover(flat)
    assert found.stuck == {"AsString": ["text"], "StringToHashBucketFast": ["bucket"]}
    assert not found.missing
    with pytest.raises(
        EngineError, match=r"(?s)depend on what the device computes.*AsString.*text.*--engine tensorflow"
    ):
        run(flat, {"x": np.ones((2, 4), np.float32)})


def test_only_host_nodes_in_the_middle_are_blamed():
    def graph(tf, v1):
        strings_in_the_middle(tf, v1)
        tf.strings.as_string(
            tf.linalg.matmul(np.ones((2, 2), np.float32), v1.placeholder(tf.float32, [2, 2])), name="end"
        )

    assert cover(graph_of(graph, outputs=["out", "end"])).stuck == {
        "AsString": ["text"],
        "StringToHashBucketFast": ["bucket"],
    }
    assert cover(graph_of(graph, outputs=["end"])).behind == {"AsString": ["end"]}


def test_the_host_takes_no_more_than_it_must():
    def graph(tf, v1):
        city = v1.placeholder(tf.string, [None], name="city")
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        ids = tf.strings.to_hash_bucket_fast(tf.strings.lower(city), 10)
        y = tf.gather(tf.constant(np.ones((10, 4), np.float32)), ids + 0)
        tf.add(tf.tanh(x), y, name="out")

    flat = graph_of(graph, outputs=["out"])
    partition = partition_graph(flat)
    assert [flat.graph.ops[node] for node in partition.host] == ["StringLower", "StringToHashBucketFast"]
    assert [flat.graph.ops[node] for node, _ in partition.frontier] == ["StringToHashBucketFast"]
    assert "GatherV2" in {flat.graph.ops[node] for node in partition.device}
    assert not set(partition.host) & set(partition.device)


def test_analyze_tells_what_runs_on_the_host_and_what_can_not():
    from msplit.engines.cuda.coverage import Coverage
    from msplit.report.analysis import _coverage, _coverage_note

    found = cover(graph_of(strings_in_the_middle, outputs=["out"]))
    rows = {row[0]: row[2] for row in _coverage(found).rows}
    assert rows["AsString"].startswith("no: host, in the middle (such as text")
    assert "can not run" in _coverage_note(found)
    before = cover(load("keras_lookup"))
    rows = {row[0]: row[2] for row in _coverage(before).rows}
    assert rows["LookupTableFindV2"] == "on the host, before"
    assert "every op" in _coverage_note(before)
    assert "no lowering for SelfAdjointEigV2 (e)" in _coverage_note(Coverage({}, {"SelfAdjointEigV2": ["e"]}, {}))
    assert "was not tried, for PyTorch is not installed" in _coverage_note(
        Coverage({}, {}, {}, unbuilt="PyTorch is not installed")
    )


def test_host_nodes_in_front_of_what_writes_variables_are_refused_by_name():
    """Rows of a ragged tensor that depend on a variable, and change it: no work behind the device."""

    def graph(tf, v1):
        x = v1.placeholder(tf.int64, [4], name="x")
        own = v1.get_variable("own", [5], use_resource=True)
        ragged = tf.RaggedTensor.from_row_splits(tf.gather(own, x), np.array([0, 1, 4]), validate=False)
        rows = ragged.to_sparse()
        tf.group(v1.scatter_add(own, x, rows.values), name="train")

    flat = graph_of(graph, outputs=["train"])
    assert "RaggedTensorToSparse" in cover(flat).stuck
    with pytest.raises(EngineError, match="RaggedTensorToSparse: 1 node"):
        run(flat, {"x": np.arange(4)})


def test_a_list_that_the_host_goes_along_with_in_vain_holds_back_no_other():
    """Unlike ids have as many elements as values say, and a product is the device's; the sum of other ids is a scalar."""

    def graph(tf, v1):
        ids = []
        for name in "ab":
            words = tf.strings.split(v1.placeholder(tf.string, [3], name=name)).flat_values
            ids.append(tf.cast(tf.strings.to_hash_bucket_fast(words, 10), tf.float32))
        unlike = tf.unique(ids[0], name="unlike").y
        product = tf.raw_ops.Einsum(inputs=[unlike, unlike], equation="i,i->")
        total = tf.fill([2, 2], tf.reduce_sum(ids[1], name="sum"))
        tf.add(tf.linalg.matmul(np.ones((2, 2), np.float32), total), product, name="out")

    flat = graph_of(graph, outputs=["out"])
    raised = raise_control(flat)
    partition = divide(raised, lambda: infer(flat))
    on_host = {raised.flat.graph.names[node] for node in partition.host}
    assert "sum" in on_host
    assert "unlike" not in on_host
    assert not partition.missing
    text = np.array([b"a b c", b"d", b"e a"], object)
    assert_equals_tensorflow(flat, {"a": text, "b": text[::-1].copy()}, capture=False)
