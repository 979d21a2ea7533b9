"""Graphs run on several logical devices give what plain TensorFlow gives."""

import os
import shutil

import numpy as np
import pytest

import msplit
from msplit.api import load
from msplit.core.arguments import Precision
from msplit.engines.base import Job, TensorFlowOptions
from msplit.engines.tensorflow import runtime, session
from msplit.engines.tensorflow.cluster import foreign_text, here
from msplit.engines.tensorflow.engine import ENGINE, reference
from msplit.errors import EndOfData, EngineError, MsplitError
from msplit.formats.model import Format
from tests.engines.cuda.cases import SAMPLES, graph_of
from tests.formats import foreign
from tests.formats.foreign import built

from . import models

pytestmark = pytest.mark.tf


def zeros(flat):
    return np.zeros(len(flat), np.int32)


def build(flat, ids, streams, feeds=None, **more):
    return ENGINE.build(Job(flat, np.asarray(ids, np.int32), streams, feeds or {}, **more))


def run(flat, ids, streams, feeds, **more):
    executable = build(flat, ids, streams, feeds, **more)
    try:
        return executable.step(feeds)
    finally:
        executable.close()


def tower_ids(seed, rows=50):
    return {"ids": np.random.default_rng(seed).integers(0, rows, (16, 4)).astype(np.int32)}


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_towers_on_streams_equal_one_stream(streams):
    flat = models.towers()
    one = run(flat, zeros(flat), 1, tower_ids(1))
    executable = build(flat, models.by_scope(flat, streams), streams)
    many = executable.step(tower_ids(1))
    assert list(one) == ["out"]
    assert one["out"].shape == (16, 32)
    np.testing.assert_allclose(many["out"], one["out"], rtol=1e-6)
    assert executable.facts()["streams"] == streams
    assert executable.facts()["cross_stream_tensors"] >= streams
    executable.close()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [models.towers, models.loop])
def test_an_assignment_without_sense_still_gives_right_outputs(make, seed):
    flat = make()
    feeds = tower_ids(seed) if make is models.towers else {"x": np.random.default_rng(seed).random((3, 4), np.float32)}
    one = run(flat, zeros(flat), 1, feeds)
    np.testing.assert_allclose(run(flat, models.scattered(flat, 4, seed), 4, feeds)["out"], one["out"], rtol=1e-5)


def test_nodes_really_run_on_the_device_of_their_stream():
    flat = models.towers(count=2)
    executable = build(flat, models.by_scope(flat, 2), 2)
    v1 = models.tensorflow().compat.v1
    metadata = v1.RunMetadata()
    executable._session.run(
        "out:0",
        {"ids:0": np.zeros((3, 2), np.int32)},
        options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE),
        run_metadata=metadata,
    )
    ran = {(stats.device[-5:], node.node_name) for stats in metadata.step_stats.dev_stats for node in stats.node_stats}
    executable.close()
    assert ("CPU:0", "tower_0/relu") in ran
    assert ("CPU:1", "tower_1/relu") in ran
    assert ("CPU:1", "tower_0/relu") not in ran


@pytest.mark.parametrize("resource", [True, False], ids=["resource variables", "reference variables"])
def test_training_on_streams_gives_the_losses_of_one_stream(resource):
    flat, _, _ = models.training(resource=resource)
    rng = np.random.default_rng(0)
    data = {"a": rng.random((32, 3), np.float32), "b": rng.random((32, 3), np.float32)}
    data["y"] = data["a"].sum(1, keepdims=True) - data["b"].sum(1, keepdims=True)
    one, many = build(flat, zeros(flat), 1), build(flat, models.scattered(flat, 3), 3)
    many.load_state(one.save_state())
    losses = [[float(e.step(data)["loss"]) for _ in range(80)] for e in (one, many)]
    assert losses[0][-1] < losses[0][0] / 2
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert set(one.step(data)) == {"loss"}, "a train step runs but gives no tensor"
    states = one.save_state(), many.save_state()
    assert set(states[0]) == {"w_a", "w_b", "bias"}
    many.step(data)
    for name, value in one.save_state().items():
        np.testing.assert_allclose(many.save_state()[name], value, rtol=1e-4, atol=1e-6)
    one.load_state(states[0])
    for name, value in one.save_state().items():
        np.testing.assert_array_equal(value, states[0][name])
    one.close()
    many.close()


@pytest.mark.parametrize("resource", [True, False], ids=["resource variables", "reference variables"])
def test_a_checkpoint_beside_the_meta_file_gives_the_variables(tmp_path, resource):
    tf = models.tensorflow()
    flat, graph, saver = models.training(resource=resource, path=tmp_path / "model.ckpt.meta")
    weights = np.array([[1.0], [2.0], [3.0]], np.float32)
    with tf.compat.v1.Session(graph=graph) as session:
        session.run("init")
        variables = {v.op.name: v for v in graph.get_collection("variables")}
        variables["w_a"].load(weights, session)
        saver.save(session, str(tmp_path / "model.ckpt"), write_meta_graph=False)
    for ids, streams in ((zeros(flat), 1), (models.scattered(flat, 3), 3)):
        executable = build(flat, ids, streams)
        np.testing.assert_array_equal(executable.save_state()["w_a"], weights)
        executable.close()


def test_a_bare_graph_with_variables_says_that_they_have_no_values():
    flat, _, _ = models.training(resource=True)
    bare = models.flat_of(flat.model.graph_def, [("a", "a:0"), ("b", "b:0")], [("prediction", "prediction:0")])
    feeds = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 3), np.float32)}
    with pytest.raises(EngineError, match="no values here"):
        run(bare, zeros(bare), 1, feeds)


def test_random_ops_without_a_seed_can_be_compared():
    flat = models.dropout()
    feeds = {"x": np.ones(8, np.float32)}
    one, many = build(flat, zeros(flat), 1), build(flat, models.by_scope(flat, 2), 2)
    for _ in range(3):
        first = one.step(feeds)["out"]
        np.testing.assert_array_equal(many.step(feeds)["out"], first)
    assert not np.array_equal(one.step(feeds)["out"], first), "it is still random from step to step"
    assert not any(node.attr["seed"].i for node in flat.model.graph_def.node), "the user's model stays as it is"
    one.close()
    many.close()


def test_strings_stay_on_the_host():
    flat = models.strings()
    feeds = {"city": np.array(["Graz", "Linz", "Wien"])}
    one = run(flat, zeros(flat), 1, feeds)
    many = run(flat, models.by_scope(flat, 2), 2, feeds)
    assert many["upper"].tolist() == [b"GRAZ", b"LINZ", b"WIEN"]
    np.testing.assert_array_equal(many["vector"], one["vector"])


def test_launch_repeats_the_last_step():
    flat, _, _ = models.training(resource=True)
    feeds = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 3), np.float32), "y": np.ones((2, 1), np.float32)}
    executable = build(flat, zeros(flat), 1)
    with pytest.raises(EngineError, match="before the first step"):
        executable.launch()
    executable.step(feeds)
    before = executable.save_state()["w_a"]
    executable.launch()
    assert not np.array_equal(before, executable.save_state()["w_a"])
    assert executable.device_times(3) is None
    executable.close()


def test_a_session_is_prepared_for_launches_only_where_there_are_any(monkeypatch):
    """TensorFlow optimizes the whole graph for every callable: 40 seconds for one of 98,000 nodes."""
    made = []
    make = session.callable_of
    monkeypatch.setattr(session, "callable_of", lambda *parts, **options: made.append(parts) or make(*parts, **options))
    flat = models.towers()
    executable = build(flat, zeros(flat), 1)
    executable.step(tower_ids(0))
    assert len(made) == 1
    executable.launch()
    executable.launch()
    executable.step(tower_ids(1))
    assert len(made) == 2
    executable.close()


def test_wrong_input_names_are_told():
    flat = models.towers()
    executable = build(flat, zeros(flat), 1)
    with pytest.raises(EngineError, match="'ids' has no value"):
        executable.step({})
    with pytest.raises(EngineError, match="no input 'other'"):
        executable.step({**tower_ids(0), "other": np.zeros(1)})
    executable.close()


def test_an_input_that_does_not_fit_is_an_engine_error():
    flat = models.towers()
    with pytest.raises(EngineError, match="check the inputs"):
        run(flat, zeros(flat), 1, tower_ids(0, rows=51) | {"ids": np.full((2, 4), 99, np.int32)})


def test_an_unknown_op_points_to_op_libraries():
    flat = models.towers(count=2)
    flat.model.graph_def.node[-1].op = "NoSuchOp"
    with pytest.raises(EngineError, match="op-library"):
        build(flat, zeros(flat), 1)


def test_a_library_that_is_none_is_told(tmp_path):
    (tmp_path / "ops.so").write_bytes(b"not a library")
    flat = models.towers(count=2)
    with pytest.raises(EngineError, match="op library"):
        build(flat, zeros(flat), 1, op_libraries=[tmp_path / "ops.so"])


def test_xla_compiles_a_whole_frozen_graph():
    flat = models.towers()
    executable = build(flat, zeros(flat), 1, tower_ids(0), tensorflow=TensorFlowOptions(xla=True))
    assert executable.facts()["xla"] == "whole model"
    for seed in range(2):
        expected = run(flat, zeros(flat), 1, tower_ids(seed))["out"]
        np.testing.assert_allclose(executable.step(tower_ids(seed))["out"], expected, rtol=1e-5, atol=1e-6)
    executable.launch()
    executable.close()


def test_xla_falls_back_to_clusters_and_says_why():
    flat = models.strings()
    feeds = {"city": np.array(["Graz", "Linz"], object)}
    executable = build(flat, zeros(flat), 1, feeds, tensorflow=TensorFlowOptions(xla=True))
    assert executable.facts()["xla"] == "clusters"
    assert executable.facts()["xla_why"]
    assert executable.step(feeds)["upper"].tolist() == [b"GRAZ", b"LINZ"]
    executable.close()


def test_xla_is_for_one_stream():
    flat = models.towers()
    with pytest.raises(EngineError, match="one stream"):
        build(flat, models.by_scope(flat, 2), 2, tensorflow=TensorFlowOptions(xla=True))


def test_the_reference_is_plain_tensorflow():
    flat = models.towers()
    np.testing.assert_array_equal(
        reference(flat, tower_ids(3))["out"], run(flat, zeros(flat), 1, tower_ids(3), precision=Precision.IEEE)["out"]
    )


def test_precision_is_switched_for_the_build_and_the_run():
    flat = models.towers()
    enabled = models.tensorflow().config.experimental.tensor_float_32_execution_enabled
    ieee, fast = build(flat, zeros(flat), 1, precision=Precision.IEEE), build(flat, zeros(flat), 1)
    ieee.step(tower_ids(0))
    assert not enabled()
    fast.step(tower_ids(0))
    assert enabled()
    ieee.launch()
    assert not enabled()
    ieee.close()
    fast.close()
    models.tensorflow().config.experimental.enable_tensor_float_32_execution(True)


def test_a_keras_model_that_was_saved_without_its_variables_is_told_how_to_be_exported(tmp_path):
    """github.com/tensorflow/tensorflow/issues/72963: TensorFlow's own loader can not run it either."""
    import tensorflow as tf

    class Wrapped(tf.Module):
        def __init__(self):
            super().__init__()
            self.net = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)])

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def run(self, x):
            return self.net(x)

    wrapped = Wrapped()
    tf.saved_model.save(wrapped, str(tmp_path / "saved"), signatures=wrapped.run)
    flat = load(tmp_path / "saved")
    with pytest.raises(EngineError, match="Could not find variable") as caught:
        reference(flat, {"x": np.ones((1, 3), np.float32)})
    assert "model.export()" in caught.value.fix


@pytest.mark.parametrize("output", ["map/while/Identity_5", "map/TensorArrayV2_1"])
def test_an_output_that_has_no_value_points_to_outputs(tmp_path, output):
    graph_def = built(foreign.map_fn, v2=True).as_graph_def()
    (tmp_path / "map.pb").write_bytes(graph_def.SerializeToString())
    flat = load(tmp_path / "map.pb", outputs=[output])
    with pytest.raises(EngineError, match=r"not convertible(.|\n)*name other outputs with --part outputs="):
        reference(flat, {"x": np.zeros((2, 4), np.float32)})


def test_calls_from_several_threads_keep_their_inputs(monkeypatch):
    """Another thread may come in between taking inputs and running: played by a call from inside of the call."""
    flat = models.towers()
    executable = build(flat, zeros(flat), 1, tower_ids(0))
    expected = [executable.step(tower_ids(seed))["out"] for seed in range(2)]
    inner = []

    def another(ieee):
        if not inner:
            inner.append(None)
            inner[0] = executable.step(tower_ids(1))["out"]

    monkeypatch.setattr(session, "set_precision", another)
    outer = executable.step(tower_ids(0))["out"]
    np.testing.assert_array_equal(outer, expected[0])
    np.testing.assert_array_equal(inner[0], expected[1])
    executable.close()


def test_options_of_sessions(tmp_path):
    path = tmp_path / "config"
    path.write_text(
        "inter_op_parallelism_threads: 3\nonly_in_a_fork: 1\n"
        "gpu_options { experimental { virtual_devices { memory_limit_mb: 7 } num_dev_to_dev_copy_streams: 2 } }\n"
    )
    config = runtime.session_config(1, cpu_only=True, merge_streams=True, base=runtime.config_of(path))
    experimental = config.gpu_options.experimental
    merged = experimental.stream_merge_options
    assert config.inter_op_parallelism_threads == 3
    assert experimental.num_dev_to_dev_copy_streams == 2
    assert not experimental.virtual_devices  # they are the process's
    assert config.device_count["GPU"] == 0
    assert config.allow_soft_placement
    assert merged.merge_host_to_device_stream
    assert merged.merge_device_to_host_stream
    assert merged.merge_device_to_device_stream
    assert not runtime.session_config(1, cpu_only=True).gpu_options.experimental.HasField("stream_merge_options")
    flat = models.towers()
    options = TensorFlowOptions(config=path, merge_streams=True)
    assert run(flat, zeros(flat), 1, tower_ids(1), tensorflow=options)["out"].shape == (16, 32)


@pytest.mark.parametrize("text", [b"gpu_options {", b"allow_soft_placement: maybe", b"\xff\xfe", None])
def test_a_file_that_holds_no_options_of_sessions(text, tmp_path):
    path = tmp_path / "config"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(MsplitError, match="config"):
        runtime.config_of(path)


def initialized_by(names_of, count=3):
    """A file without a checkpoint: variables, one of which begins with what another holds."""
    tf, v1 = runtime.tensorflow(), runtime.tensorflow().compat.v1
    graph = tf.Graph()
    with graph.as_default(), v1.variable_scope("", use_resource=True):
        every = [v1.get_variable(f"v{k}", initializer=tf.constant([float(k)])) for k in range(count)]
        last = v1.get_variable("last", initializer=every[-1] + 1.0)
        tf.add_n([*every, last], name="out")
        meta = v1.train.export_meta_graph()
    return models.flat_of(
        meta.graph_def,
        [],
        [("out", "out:0")],
        init_ops=names_of([*every, last]),
        fmt=Format.META_GRAPH,
        proto=meta,
    )


def test_a_variable_that_begins_with_what_another_holds_is_initialized_after_it():
    flat = initialized_by(lambda variables: [one.initializer.name for one in variables])
    assert run(flat, zeros(flat), 1, {})["out"] == 0 + 1 + 2 + 3


def test_many_variables_are_initialized_at_once(monkeypatch):
    runs = []
    usual = runtime.tensorflow().compat.v1.Session.run
    monkeypatch.setattr(
        runtime.tensorflow().compat.v1.Session, "run", lambda self, *args: (runs.append(args), usual(self, *args))[1]
    )
    flat = initialized_by(lambda variables: [one.initializer.name for one in variables], count=20)
    assert run(flat, zeros(flat), 1, {})["out"] == sum(range(21))
    assert len(runs) <= 2  # all, and the one that waits for another


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_variable_that_is_fetched_has_its_value_when_all_else_is_done(resource, streams):
    def build_graph(tf, v1):
        x = v1.placeholder(tf.float32, [2], "x")
        variable = v1.get_variable("v", [2], use_resource=resource, initializer=v1.zeros_initializer())
        before = tf.multiply(variable, 1.0, "before")  # an identity of a reference would share its memory
        with tf.control_dependencies([before]):
            first = variable.assign_add(x)
        with tf.control_dependencies([first]):
            variable.assign_add(10.0 * x, name="last")

    flat = graph_of(build_graph, outputs=["v", "before", "last"])
    executable = build(flat, models.scattered(flat, streams, 0), streams)
    executable.load_state({"v": np.zeros(2, np.float32)})
    x = np.array([1, 2], np.float32)
    for step in range(3):
        found = executable.step({"x": x})
        np.testing.assert_array_equal(found["before"], 11 * step * x)
        np.testing.assert_array_equal(found["v"], 11 * (step + 1) * x)
    executable.close()


def test_a_handle_of_something_else_is_refused():
    def build_graph(tf, v1):
        queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.float32], name="queue")
        tf.raw_ops.QueueSizeV2(handle=queue, name="size")

    flat = graph_of(build_graph, outputs=["queue", "size"])
    with pytest.raises(EngineError, match="'queue' is the handle of a FIFOQueueV2, which has no value"):
        build(flat, zeros(flat), 1)


def towers_of_a_cluster(tf, v1):
    x = v1.placeholder("float", [None, 4], "x")
    towers = []
    for task in range(3):
        with tf.device(f"/job:worker/replica:0/task:{task}/device:GPU:0"):
            towers.append(tf.function(lambda h, task=task: tf.tanh(h * (task + 1.0)))(x))
    with tf.device("/job:ps/task:1/cpu:0"):
        tf.add_n(towers, name="y")


@pytest.mark.parametrize("streams", [1, 2])
def test_jobs_and_tasks_that_are_not_here_are_left_out_of_devices(streams):
    flat = graph_of(towers_of_a_cluster, outputs=["y"])
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    found = run(flat, zeros(flat) if streams == 1 else np.arange(len(flat)) % 2, streams, {"x": x})
    np.testing.assert_allclose(found["y"], sum(np.tanh(x * k) for k in (1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize(
    ("device", "left"),
    [
        ("/job:ps/task:1/cpu:0", "/cpu:0"),
        ("/job:worker/replica:0/task:0/device:GPU:0", "/device:GPU:0"),
        ("/job:localhost/replica:0/task:0/device:GPU:1", "/job:localhost/replica:0/task:0/device:GPU:1"),
        ("/job:localhost/task:3", ""),
        ("/replica:2/device:CPU:0", "/device:CPU:0"),
        ("/device:GPU:2", "/device:GPU:2"),
        ("", ""),
    ],
)
def test_a_device_of_this_process_stays(device, left):
    assert here(device) == left
    assert (foreign_text([device]) == "") == (device == left)


def test_a_saved_model_without_its_variables_says_so(tmp_path):
    import shutil

    import tensorflow as tf

    module = tf.Module()
    module.w = tf.Variable(tf.ones([8, 2]))
    spec = tf.TensorSpec([None, 8], tf.float32, name="x")
    module.run = tf.function(lambda x: {"y": x @ module.w}, input_signature=[spec])
    tf.saved_model.save(module, tmp_path / "m", signatures={"serving_default": module.run})
    shutil.rmtree(tmp_path / "m" / "variables")
    flat = load(tmp_path / "m")
    with pytest.raises(EngineError, match="not a valid checkpoint") as told:
        build(flat, zeros(flat), 1)
    assert "its variables are not with it" in told.value.fix


@pytest.mark.parametrize("checkpoint", [False, True])
def test_lost_data_that_is_not_the_checkpoints_is_not_said_to_be(monkeypatch, checkpoint):
    """Such as a file of records or of words that an initializer reads."""
    import tensorflow as tf

    def fail(*_):
        raise tf.errors.DataLossError(None, None, "corrupted record at 12")

    without = graph_of(lambda tf, v1: tf.tanh(v1.placeholder("float", [2], "x"), name="y"))
    model = load(SAMPLES / "gru_while").model if checkpoint else without.model
    monkeypatch.setattr(session, "_here", fail)
    with pytest.raises(tf.errors.DataLossError, match="corrupted record at 12"):
        session._load(None, model, None)


def test_an_iterator_that_a_program_begins_is_to_be_fed(tmp_path):
    def data(tf, v1):
        feed = v1.placeholder("float", [None, 12], "feed")
        pair = tf.data.Dataset.from_tensor_slices((feed, feed + 1.0)).repeat().batch(4)
        a, b = v1.data.make_initializable_iterator(pair).get_next()
        tf.tanh(a + b, name="y")

    flat = graph_of(data)
    assert [end.name for end in flat.model.outputs] == ["y"]
    with pytest.raises(EngineError, match="a program initializes it") as told:
        run(flat, zeros(flat), 1, {})
    names = told.value.fix.rpartition("--part inputs=")[2]
    assert names == "IteratorGetNext:0,IteratorGetNext:1"
    fed = load(flat.model.path, inputs=names.split(","), outputs=["y"])
    assert fed.model.inputs[1].shape == (None, 12)
    feeds = {end.name: np.full((4, 12), 0.25, np.float32) for end in fed.model.inputs}
    np.testing.assert_allclose(run(fed, zeros(fed), 1, feeds)["y"], np.tanh(0.5), rtol=1e-6)


def test_parts_that_tensorrt_has_made_are_told(tmp_path):
    import tensorflow as tf

    made = built(lambda tf, v1: tf.identity(v1.placeholder(tf.float32, [2], "x"), name="y")).as_graph_def()
    for node in made.node:
        if node.name == "y":
            node.op = "TRTEngineOp"
            node.attr["InT"].list.type.append(tf.float32.as_datatype_enum)
    path = tmp_path / "trt.pb"
    path.write_bytes(made.SerializeToString())
    flat = load(path, outputs=["y"])
    with pytest.raises(EngineError, match="TRTEngineOp") as told:
        build(flat, zeros(flat), 1)
    assert "from before that" in told.value.fix


@pytest.mark.tf
@pytest.mark.parametrize(
    ("ids", "weights", "words", "said"),
    [
        (np.array([1.7, 0.2], np.float32), None, None, "input ids is int32, not float32"),
        (np.array([1 << 32, 0]), None, None, "input ids is int32, not int64"),
        (np.array([b"a", b"b"]), None, None, "input ids is int32, not text"),
        (None, np.array([b"a", b"b"]), None, "input weights is float32, not text"),
        (None, None, np.array([1, 2]), "input words is string, not int64"),
    ],
)
def test_what_a_conversion_would_change_is_refused(ids, weights, words, said):
    """A model with a part that the host runs: what comes before it is fed to a session."""

    def build(tf, v1):
        i, w = v1.placeholder(tf.int32, [2], "ids"), v1.placeholder(tf.float32, [2], "weights")
        hashed = tf.strings.to_hash_bucket_fast(v1.placeholder(tf.string, [2], "words"), 9)
        text = tf.strings.to_hash_bucket_fast(tf.strings.as_string(i), 9)
        tf.add(tf.cast(hashed + text, tf.float32), w, name="y")

    fine = {"ids": np.array([1, 2], np.int32), "weights": np.ones(2, np.float32), "words": np.array([b"a", b"b"])}
    given = {name: value for name, value in (("ids", ids), ("weights", weights), ("words", words)) if value is not None}
    with msplit.prepare(graph_of(build, outputs=["y"]), engine="cuda", device="cpu", effort="fast") as model:
        model(**fine)
        with pytest.raises(EngineError, match=said if weights is None else "weights"):
            model(**{**fine, **given})


def test_a_checkpoint_that_is_cut_off_is_no_end_of_data(tmp_path):
    """TensorFlow's restore says that it read less than was asked for by the error with which data end: it is a failure, and no end."""
    model = tmp_path / "model"
    shutil.copytree(SAMPLES / "tf1_saved_model", model)
    (data,) = (model / "variables").glob("*.data-*")
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(EngineError, match="RestoreV2") as told:
        msplit.bench(model, engine="tensorflow", batch=4)
    assert not isinstance(told.value, EndOfData)
    assert "cut off or damaged" in told.value.fix
