"""The committed files of sample_graphs/: whole, small, described, and taken by TensorFlow."""

from pathlib import Path

import numpy as np
import pytest

from msplit import samples
from msplit.engines.tensorflow.runtime import session_config
from msplit.opset import schema
from msplit.samples import recommenders
from tools.sample_graphs.__main__ import EXPORTS, main, readme

ROOT = Path(__file__).parents[2] / "sample_graphs"
NAMES = [export.name for export in EXPORTS]
RUNNABLE = {
    "mmoe_small.pb": ["tower_0/out/Sigmoid", "tower_1/out/Sigmoid"],
    "mmoe_small.pbtxt": ["tower_0/out/Sigmoid"],
    "towers_small.pb": ["head/out/Sigmoid"],
    "lstm_small.pb": ["output"],
    "inception_v3_stripped.pb": ["Identity"],
    "annotated.pb": ["head/out/Sigmoid"],
    "while_v1.pb": ["output"],
    "cond_v1.pb": ["output"],
}
# Folder -> signature -> inputs of a batch of three.
FEEDS = {
    "tf1_saved_model": {"serving_default": {"item": np.array([0, 59, 119]), "numbers": np.eye(3, 6, dtype=np.float32)}},
    "feature_columns": {
        "serving_default": {
            "country": np.array([["de"], ["us"], ["atlantis"]]),
            "device": np.array([["phone"], ["desk"], [""]]),
            "user": np.array([[1], [2], [3]]),
            "age": np.array([[17.0], [40.0], [80.0]], np.float32),
            "price": np.array([[0.1], [1.0], [2.0]], np.float32),
        }
    },
    "two_signatures": {
        "serving_default": {"left": np.eye(3, 10, dtype=np.float32), "right": np.ones((3, 10), np.float32)},
        "embed": {"item": np.eye(3, 10, dtype=np.float32)},
    },
    "control_flow_v2": {"serving_default": {"x": np.eye(3, 8, dtype=np.float32), "steps": np.int32(4)}},
    "ragged_sparse": {
        "serving_default": {
            "words": np.array([3, 7, 11, 49]),
            "words_1": np.array([0, 2, 3, 4]),
            "tags": np.array([[0, 0], [0, 1], [2, 0]]),
            "tags_1": np.array([5, 29, 1]),
            "tags_2": np.array([3, 2]),
        }
    },
    "keras_lookup": {
        "serving_default": {
            "city": np.array(["city_0", "city_39", "nowhere"]),
            "amount": np.eye(3, 4, dtype=np.float32),
        }
    },
    "gru_while": {"serving_default": {"ids": np.arange(36, dtype=np.int32).reshape(3, 12)}},
    "keras_inception": {
        "serving_default": {"image": np.random.default_rng(0).normal(size=(3, 32, 32, 3)).astype(np.float32)}
    },
}


def read(name):
    """Read a .pb, .pbtxt or .meta file of sample_graphs/."""
    path = ROOT / name
    if name.endswith(".pbtxt"):
        from google.protobuf import text_format

        return text_format.Parse(path.read_text(encoding="utf-8"), schema.graph_pb2.GraphDef())
    kind = schema.meta_graph_pb2.MetaGraphDef if name.endswith(".meta") else schema.graph_pb2.GraphDef
    return kind.FromString(path.read_bytes())


def read_saved_model(name):
    return schema.saved_model_pb2.SavedModel.FromString((ROOT / name / "saved_model.pb").read_bytes())


def ops(graph_def):
    return {node.op for node in graph_def.node} | {
        node.op for function in graph_def.library.function for node in function.node_def
    }


def saved_model_ops(name):
    return ops(read_saved_model(name).meta_graphs[0].graph_def)


def execute(graph_def, fetches, feeds):
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph_def.SerializeToString()), name="")
        with tf.compat.v1.Session(graph=graph, config=session_config(1, cpu_only=True, optimized=False)) as session:
            return session.run(fetches, feeds)


def make_feeds(graph_def, batch=3):
    """Return values for every placeholder of a frozen graph, by dtype and shape."""
    rng = np.random.default_rng(0)
    feeds = {}
    for node in graph_def.node:
        if node.op == "Placeholder":
            shape = [batch if dim.size < 0 else dim.size for dim in node.attr["shape"].shape.dim]
            kind = node.attr["dtype"].type
            feeds[f"{node.name}:0"] = (
                rng.normal(size=shape) if kind == 1 else rng.integers(0, 100, shape) if kind == 3 else np.True_
            )
    return feeds


def test_the_folder_holds_the_exports_and_their_table_and_nothing_else():
    assert sorted(path.name for path in ROOT.iterdir()) == sorted([*NAMES, "README.md"])
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme()


@pytest.mark.parametrize("name", NAMES)
def test_every_export_is_under_a_megabyte(name):
    path = ROOT / name
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    assert 0 < sum(file.stat().st_size for file in files) < 1_000_000


def test_every_export_is_tried_here():
    others = {"custom_op.pb", "training.meta", "training_resource.meta", "two_tags"}
    assert sorted([*RUNNABLE, *FEEDS, *others]) == sorted(NAMES)


@pytest.mark.tf
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_graph_runs_and_its_outputs_mean_something(name):
    graph_def = read(name)
    if "stripped" in name:
        graph_def = samples.fill(graph_def)
    feeds = make_feeds(
        graph_def, batch=1 if "inception" in name else 3
    )  # a large one has a thousand classes to differ in
    for output in execute(graph_def, [f"{node}:0" for node in RUNNABLE[name]], feeds):
        assert np.isfinite(output).all()
        assert np.ptp(output) > 1e-3


@pytest.mark.tf
@pytest.mark.parametrize("name", FEEDS)
def test_a_saved_model_loads_and_its_signatures_answer(name):
    import tensorflow as tf

    model = tf.saved_model.load(str(ROOT / name))
    for signature, feeds in FEEDS[name].items():
        outputs = model.signatures[signature](**{key: tf.constant(value) for key, value in feeds.items()})
        assert outputs
        for output in outputs.values():
            assert np.isfinite(output).all()
            assert output.shape[0] == 3
            assert np.ptp(output.numpy()) > 1e-3


@pytest.mark.tf
@pytest.mark.parametrize("tags", [["serve"], ["serve", "gpu"]])
def test_both_tag_sets_load(tags):
    import tensorflow as tf

    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        meta = tf.compat.v1.saved_model.load(session, tags, str(ROOT / "two_tags"))
        signature = meta.signature_def["serving_default"]
        x = np.random.default_rng(0).normal(size=(8, 12))
        y = session.run(signature.outputs["y"].name, {signature.inputs["x"].name: x})
        assert y.shape == (8, 2)
        assert np.ptp(y) > 1e-3


@pytest.mark.tf
@pytest.mark.parametrize("name", ["training.meta", "training_resource.meta"])
def test_a_training_graph_learns(name):
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.train.import_meta_graph(str(ROOT / name))
        ids = np.arange(100)
        feeds = {"id_0:0": ids, "id_1:0": ids[::-1], "label:0": (ids % 2)[:, None]}
        with v1.Session(graph=graph) as session:
            session.run(v1.global_variables_initializer())
            before = session.run("loss/value:0", feeds)
            for _ in range(30):
                session.run(v1.get_collection("train_op"), feeds)
            assert session.run("loss/value:0", feeds) < 0.8 * before


@pytest.mark.tf
def test_tensorflow_does_not_know_the_custom_ops():
    graph_def = read("custom_op.pb")
    with pytest.raises(Exception, match="not registered"):
        execute(graph_def, ["head/out/Sigmoid:0"], {})


@pytest.mark.tf
@pytest.mark.parametrize(
    "name", ["mmoe_small.pb", "mmoe_small.pbtxt", "towers_small.pb", "lstm_small.pb", "annotated.pb", "custom_op.pb"]
)
def test_the_command_makes_the_committed_graph_again(name, tmp_path):
    assert main([str(tmp_path), "--only", name]) == 0
    again = (tmp_path / name).read_bytes()
    if name.endswith(".pbtxt"):
        from google.protobuf import text_format

        graph_def = text_format.Parse(again.decode(), schema.graph_pb2.GraphDef())
    else:
        graph_def = schema.graph_pb2.GraphDef.FromString(again)
    committed = read(name)
    # Another TensorFlow in the supported range writes its own version number.
    graph_def.ClearField("versions")
    committed.ClearField("versions")
    assert graph_def == committed
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme()


def test_the_annotated_graph_has_three_streams_and_nodes_without_one():
    ids = [node.attr["_stream_id"].i if "_stream_id" in node.attr else None for node in read("annotated.pb").node]
    assert set(ids) == {0, 1, 2, None}


def test_the_files_hold_what_their_table_says():
    assert {"Enter", "Switch", "Merge", "NextIteration", "Exit", "LoopCond"} <= ops(read("while_v1.pb"))
    assert {"Switch", "Merge"} <= ops(read("cond_v1.pb"))
    assert "Enter" not in ops(read("cond_v1.pb"))
    assert {"KvVarHandleOp", "KvResourceGather", "Vendor>FusedCross"} <= ops(read("custom_op.pb"))
    training = read("training.meta").graph_def
    assert {"VariableV2", "SparseApplyAdagrad", "ReluGrad"} <= ops(training)
    assert any("_class" in node.attr for node in training.node)
    assert {"VarHandleOp", "ResourceApplyAdam", "ResourceGather"} <= ops(read("training_resource.meta").graph_def)
    assert {"While"} <= saved_model_ops("gru_while")
    assert {"While", "StatelessWhile", "If"} <= saved_model_ops("control_flow_v2")
    assert {"LookupTableFindV2", "InitializeTableFromTextFileV2"} <= saved_model_ops("keras_lookup")
    assert [file.name for file in (ROOT / "keras_lookup" / "assets").iterdir()] == ["cities.txt"]
    assert {"Bucketize", "Unique", "StringToHashBucketFast", "LookupTableFindV2", "ResourceGather"} <= saved_model_ops(
        "feature_columns"
    )
    assert {"SparseFillEmptyRows", "SparseSegmentSum"} <= saved_model_ops("ragged_sparse")
    tags = [list(meta.meta_info_def.tags) for meta in read_saved_model("two_tags").meta_graphs]
    assert sorted(map(sorted, tags)) == [["gpu", "serve"], ["serve"]]
    signatures = read_saved_model("two_signatures").meta_graphs[0].signature_def
    assert {"serving_default", "embed"} <= set(signatures)
    assert (
        len([name for name in ("part_0", "part_1", "part_2") if name in str(read_saved_model("tf1_saved_model"))]) == 3
    )


def write_feature_columns(path: Path, columns: int, *, buckets: int, width: int = 8, units: tuple[int, ...] = (64, 32)):
    """Writes the sample's model as a TF1 SavedModel; its signature gives `score`."""
    v1 = recommenders.tensorflow().compat.v1
    with v1.Graph().as_default() as graph:
        features, score = recommenders.feature_columns(columns, buckets, width, units, batch=None)
        with v1.Session(graph=graph) as session:
            recommenders.load_seeded_values(session, v1.global_variables(), 0)
            v1.saved_model.simple_save(session, str(path), features, {"score": score})


@pytest.mark.tf
def test_feature_columns_come_in_any_number(tmp_path):
    import tensorflow as tf

    write_feature_columns(tmp_path / "model", 5, buckets=10, width=3, units=(6,))
    model = tf.saved_model.load(str(tmp_path / "model"))
    feeds = {f"feature_{index}": tf.random.stateless_normal((4, 1), (index, 0)) for index in range(5)}
    score = model.signatures["serving_default"](**feeds)["score"]
    assert score.shape == (4, 1)
    assert np.ptp(score.numpy()) > 1e-3
    found = schema.saved_model_pb2.SavedModel.FromString((tmp_path / "model" / "saved_model.pb").read_bytes())
    nodes = [node.op for node in found.meta_graphs[0].graph_def.node]
    assert nodes.count("Bucketize") == nodes.count("SparseSegmentMean") == 5


def test_too_few_buckets_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least 3"):
        write_feature_columns(tmp_path / "model", 1, buckets=2)
    assert not (tmp_path / "model").exists()
