"""Ensembles: each replica computes what its model does, whatever all of them share, and their outputs are combined."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from msplit import api, formats
from msplit.analysis.rows.walk import Rows, independent_rows
from msplit.api import Replication
from msplit.cost.profile import Workload
from msplit.engines.tensorflow.engine import reference
from msplit.engines.tensorflow.variables import save_bundle
from msplit.errors import LoadError
from msplit.formats.tensors import numpy_dtype
from msplit.inputs.make import feeds_for
from msplit.opset.traits import VARIABLES
from msplit.verify.compare import compare
from tests.campaign import CAMPAIGN, examples
from tests.cli.runner import SAMPLES, fine, msplit, unchanged
from tests.engines.cuda.cases import CudaEngine, job, run
from tests.engines.cuda.random_graphs import random_graphs
from tests.formats.models import graph, signatures
from tests.formats.models import save as save_meta
from tests.weights import other_variables, other_weights

SAVED_MODELS = ["control_flow_v2", "feature_columns", "keras_lookup", "ragged_sparse", "tf1_saved_model"]
SAVED_MODELS += ["gru_while", "keras_inception", "two_signatures", "two_tags"] if CAMPAIGN else []
FROZEN = ["mmoe_small.pbtxt", "while_v1.pb", "cond_v1.pb", *(["towers_small.pb", "lstm_small.pb"] if CAMPAIGN else [])]
Arrays = Mapping[str, NDArray[Any]]


def outputs(path: Path, feeds: Arrays | None = None) -> tuple[dict[str, NDArray[Any]], Arrays]:
    """What TensorFlow computes of a model, and what it was fed."""
    flat = api.load(path, tags=["serve"] if path.is_dir() else None)
    feeds = feeds_for(flat, Workload(batch=3)) if feeds is None else feeds
    return reference(flat, feeds), feeds


def assert_members(stacked: Arrays, members: list[dict[str, NDArray[Any]]]) -> None:
    """Each slice is what that member alone computes, to the bit, and they differ from each other."""
    for name, value in stacked.items():
        for part, member in zip(value, members, strict=True):
            np.testing.assert_array_equal(part, member[name], strict=True)
    assert len({tuple(value.tobytes() for value in member.values()) for member in members}) == len(members)


@pytest.mark.tf
@pytest.mark.parametrize("name", FROZEN)
def test_replicas_of_a_frozen_model_compute_what_their_models_do(name: str, tmp_path: Path) -> None:
    own = SAMPLES / name
    weights = [other_weights(own, seed, tmp_path / f"{seed}.pb") for seed in (1, 2)]
    members = [outputs(path)[0] for path in (*weights, own)]
    feeds = outputs(own)[1]
    for combine in ("stack", "mean"):
        out = tmp_path / f"{combine}.pb"
        api.replicate(own, Replication(3, weights, combine), out)
        found, _ = outputs(out, feeds)
        if combine == "stack":
            assert_members(found, members)
        else:
            for key, value in found.items():
                np.testing.assert_allclose(value, np.mean([one[key] for one in members], 0), rtol=1e-6, atol=1e-7)


@pytest.mark.tf
@pytest.mark.parametrize("name", SAVED_MODELS)
def test_replicas_of_a_saved_model_compute_what_their_models_do(name: str, tmp_path: Path) -> None:
    own, other, out = SAMPLES / name, other_variables(SAMPLES / name, 1, tmp_path / "other"), tmp_path / "out"
    flat = api.load(own, tags=["serve"])
    api.replicate(flat, Replication(3, [other, own / "variables" / "variables"], "stack"), out)
    first, feeds = outputs(
        other, {"x": np.ones((3, 8), np.float32), "steps": np.int32(3)} if name == "control_flow_v2" else None
    )
    second, _ = outputs(own, feeds)
    found, _ = outputs(out, feeds)
    assert_members({key: value[:2] for key, value in found.items()}, [first, second])
    for value in found.values():
        np.testing.assert_array_equal(value[1], value[2])
    meta = formats.read(out).meta
    assert meta.signature_def["serving_default"].inputs == flat.model.meta.signature_def["serving_default"].inputs
    assert set(meta.signature_def["serving_default"].outputs) == set(found)
    needed = {end.node for end in flat.model.outputs}
    variables = flat.model.graph.ancestors(flat.model.graph.index[node] for node in needed)
    variables &= flat.model.graph.with_ops(VARIABLES)
    assert len(meta.collection_def["variables"].bytes_list.value) == 3 * variables.sum() > 0


@pytest.mark.tf
@pytest.mark.parametrize("name", ["keras_lookup", "tf1_saved_model"])
def test_tensorflow_loads_it_in_both_ways(name: str, tmp_path: Path) -> None:
    import tensorflow as tf

    other, out = other_variables(SAMPLES / name, 1, tmp_path / "other"), tmp_path / "out"
    api.replicate(SAMPLES / name, Replication(2, [other]), out)
    shutil.rmtree(tmp_path / "other")
    expected, feeds = outputs(out)
    ends = formats.read(out).meta.signature_def["serving_default"]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.saved_model.load(session, ["serve"], str(out))
        fed = {ends.inputs[key].name: value for key, value in feeds.items()}
        found = session.run({key: info.name for key, info in ends.outputs.items()}, fed)
    loaded = tf.saved_model.load(str(out)).signatures["serving_default"]
    again = loaded(**{key: tf.constant(value) for key, value in feeds.items()})
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6)
        np.testing.assert_allclose(again[key].numpy(), value, rtol=1e-6)


@pytest.mark.tf
@settings(max_examples=examples(8, 500), deadline=None)
@given(random_graphs())
def test_any_graph_in_copies_computes_itself(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    made, feeds, ends = case
    folder = tmp_path_factory.mktemp("any")
    (folder / "model.pb").write_bytes(made.SerializeToString())
    flat = api.load(folder / "model.pb", outputs=ends)
    tensors = api.replicate(flat, Replication(2, combine="stack"), folder / "out.pb").outputs
    copies = api.load(folder / "out.pb", outputs=list(tensors.values()))
    expected = reference(flat, {tensor.name: feeds[tensor.name] for tensor in flat.inputs})
    found = reference(copies, {tensor.name: feeds[tensor.name] for tensor in copies.inputs})
    whole = flat.graph
    for tensor in flat.outputs:
        before = np.flatnonzero(whole.ancestors([tensor.node]))
        constants = [whole.attrs[node]["value"] for node in before if whole.ops[node] == "Const"]
        weighs = any(value.dtype == "float32" and value.shape for value in constants)
        value = found[tensors[tensor.name]]
        for part in value if weighs else [value]:
            np.testing.assert_array_equal(part, expected[tensor.name], strict=True)


def parts(path: Path, **options: Any) -> Any:
    """The nodes of an ensemble by name."""
    model = formats.read(path, **options)
    return {node.name: node for node in model.graph_def.node}


def replicas_of(tmp_path: Path, text: str, times: int = 2, **options: Any) -> dict[str, Any]:
    """The nodes of copies of a small graph, by name."""
    (tmp_path / "model.pb").write_bytes(graph(text).SerializeToString())
    ends = options.pop("outputs", None)
    flat = api.load(tmp_path / "model.pb", outputs=ends)
    api.replicate(flat, Replication(times, **options), tmp_path / "out.pb")
    return parts(tmp_path / "out.pb", outputs=ends)


CONSTANT = 'Const | attr {{ key: "dtype" value {{ type: {0} }} }} attr {{ key: "value" value {{ tensor {{ dtype: {0} {1} }} }} }}'
WEIGHT = CONSTANT.format("DT_FLOAT", "tensor_shape { dim { size: 2 } } float_val: 1")
SHAPE = CONSTANT.format("DT_INT32", "tensor_shape { dim { size: 2 } } int_val: 2")
FLOAT = 'attr { key: "T" value { type: DT_FLOAT } }'
INPUT = 'Placeholder | attr { key: "dtype" value { type: DT_FLOAT } }'


def test_what_no_weight_reaches_is_there_once(tmp_path: Path) -> None:
    text = f"""
        x {INPUT}
        w {WEIGHT}
        shape {SHAPE}
        relu Relu x | {FLOAT}
        noise RandomStandardNormal shape | attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} {FLOAT.replace("FLOAT", "INT32")}
        array TensorArrayV3 shape
        sum AddV2 relu noise ^array | {FLOAT}
        y Mul sum w | {FLOAT}
        queue FIFOQueueV2 | attr {{ key: "shared_name" value {{ s: "q" }} }}
        next QueueDequeueV2 queue
        z Mul y next | {FLOAT}
    """
    nodes = replicas_of(tmp_path, text, outputs=["z"])
    shared = {name for name in nodes if "/" not in name}
    assert shared == {"x", "shape", "relu", "queue", "next", "z"}
    own = {name.removeprefix("replica_0/") for name in nodes if name.startswith("replica_0/")}
    assert own == {"w", "noise", "array", "sum", "y", "z"}  # each draws for itself, and writes arrays of its own
    assert list(nodes["replica_1/sum"].input) == ["relu", "replica_1/noise", "^replica_1/array"]


def test_loops_have_frames_of_their_own(tmp_path: Path) -> None:
    api.replicate(SAMPLES / "while_v1.pb", Replication(2), tmp_path / "out.pb")
    frames = Counter(
        node.attr["frame_name"].s.partition(b"/")[0]
        for node in parts(tmp_path / "out.pb").values()
        if node.op == "Enter"
    )
    assert set(frames) == {b"replica_0", b"replica_1"}
    assert len(set(frames.values())) == 1


def stream_of(node: Any) -> set[int]:
    return {node.attr["_stream_id"].i} if "_stream_id" in node.attr else set()


@pytest.mark.tf
def test_each_replica_is_on_its_stream_with_the_functions_that_it_calls(tmp_path: Path) -> None:
    api.replicate(SAMPLES / "control_flow_v2", Replication(4, streams=3), tmp_path / "out")
    model = formats.read(tmp_path / "out")
    bodies = {function.signature.name: function.node_def for function in model.graph_def.library.function}
    ids: dict[int, set[int]] = {number: set() for number in range(4)}
    for node in model.graph_def.node:
        if node.name.startswith("replica_"):
            ids[int(node.name.partition("/")[0].removeprefix("replica_"))] |= stream_of(node)
        else:
            assert not stream_of(node)
    for name, body in bodies.items():
        number = int(name.rpartition("_")[2])
        assert name.endswith(f"_replica_{number}")
        ids[number].update(*map(stream_of, body))
        called = [value.func.name for node in body for value in node.attr.values() if value.HasField("func")]
        assert all(one.endswith(f"_replica_{number}") for one in called)
    assert ids == {number: {number % 3} for number in range(4)}
    assert len(bodies) % 4 == 0
    assert fine("check", tmp_path / "out").code == 0


@pytest.mark.tf
@pytest.mark.parametrize("name", ["feature_columns", "ragged_sparse"])
def test_check_finds_nothing_that_the_model_has_not(name: str, tmp_path: Path) -> None:
    api.replicate(SAMPLES / name, Replication(3), tmp_path / "out")

    def codes(path: Path) -> set[str]:
        return {finding["code"] for finding in msplit("check", path, "--format", "json").json["findings"]}

    assert codes(tmp_path / "out") <= codes(SAMPLES / name) - {"MS020"}


@pytest.mark.tf
def test_each_replica_runs_on_its_device(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    api.replicate(SAMPLES / "cond_v1.pb", Replication(3, devices=["/cpu:1", "/device:CPU:2"]), tmp_path / "out.pb")
    message = formats.read(tmp_path / "out.pb").graph_def
    with v1.Graph().as_default() as graph_:
        tf.import_graph_def(message, name="")
        config = v1.ConfigProto(device_count={"CPU": 3})
        ran = v1.RunMetadata()
        full = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        feeds = outputs(SAMPLES / "cond_v1.pb")[1]
        with v1.Session(graph=graph_, config=config) as session:
            session.run("output:0", {f"{name}:0": value for name, value in feeds.items()}, full, ran)
    devices = {
        node.node_name.partition("/")[0]: stats.device[-1]
        for stats in ran.step_stats.dev_stats
        for node in stats.node_stats
        if node.node_name.startswith("replica_")
    }
    assert devices == {"replica_0": "1", "replica_1": "2", "replica_2": "1"}


@pytest.mark.parametrize(
    ("device", "pinned", "expected"),
    [
        ("/gpu:1", "", "/gpu:1"),
        ("/gpu:1", "/device:GPU:0", "/gpu:1"),
        ("/gpu:1", "/cpu:0", "/device:CPU:0"),
        ("/job:worker/task:2/device:GPU:0", "/device:CPU:0", "/job:worker/task:2/device:CPU:0"),
    ],
)
def test_what_is_pinned_to_a_cpu_stays_on_one(device: str, pinned: str, expected: str, tmp_path: Path) -> None:
    text = f"x {INPUT}\nw {WEIGHT}\ny Mul x w | {FLOAT} device: '{pinned}'"
    assert replicas_of(tmp_path, text, devices=[device])["replica_1/y"].device == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("mmoe_small.pb", (25, 104, 8, 9)), ("towers_small.pb", (20, 82, 4, 10))]
)
def test_the_cuda_engine_runs_alike_replicas_in_the_kernels_of_one(
    name: str, expected: tuple[int, ...], tmp_path: Path
) -> None:
    weights = [other_weights(SAMPLES / name, seed, tmp_path / f"{seed}.pb") for seed in range(4)]
    api.replicate(SAMPLES / name, Replication(4, weights), tmp_path / "out.pb")
    one, copies = api.load(SAMPLES / name), api.load(tmp_path / "out.pb")
    feeds = feeds_for(one, Workload(batch=4))
    alone = [run(api.load(path), feeds) for path in weights]

    def launched(flat: Any, **options: bool) -> int:
        program = CudaEngine().compile(job(flat, feeds, **options)).program
        return sum(step.launches for step in program.steps)

    larger = {"group": True, "fuse": True}
    kernels = launched(one), launched(copies), launched(one, **larger), launched(copies, **larger)
    assert kernels == expected  # of one and of four, op by op and in larger kernels
    for streams, options in ((1, {}), (4, larger)):
        found = compare(
            run(copies, feeds, streams, **options), {key: np.mean([part[key] for part in alone], 0) for key in alone[0]}
        )
        assert found.passed, found.describe()


@pytest.mark.tf
@pytest.mark.parametrize("bare", [False, True])
def test_replicas_of_a_training_graph_predict_by_their_checkpoints(bare: bool, tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph_, v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        kernel = v1.get_variable("kernel", [2, 3], initializer=v1.glorot_uniform_initializer(seed=7))
        bias = v1.get_variable("bias", [3], initializer=v1.zeros_initializer(), use_resource=True)
        y = tf.add(x @ kernel, bias, name="y")
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(
            tf.reduce_mean(tf.square(y - 1.0), name="loss"), name="train"
        )
        saver, fed = v1.train.Saver(), {x: np.arange(8, dtype=np.float32).reshape(4, 2)}
        session.run(v1.global_variables_initializer())
        expected, weights = [], []
        for number in range(3):
            weights.append(saver.save(session, str(tmp_path / "model"), global_step=number))
            expected.append(session.run(y, fed))
            session.run(train, fed)
        (tmp_path / "graph.pb").write_bytes(graph_.as_graph_def().SerializeToString())
    path = tmp_path / "graph.pb" if bare else Path(f"{weights[2]}.meta")
    flat = api.load(path, outputs=["y"])
    made = api.replicate(flat, Replication(3, weights if bare else weights[:2], "stack"), tmp_path / "out")
    assert made.outputs == {"y": "y"}
    found, _ = outputs(tmp_path / "out", {"x": fed[x]})
    np.testing.assert_array_equal(found["y"], expected)
    with pytest.raises(LoadError, match="of another model"):
        api.replicate(flat, Replication(3, [*weights[:2], saved_elsewhere(tmp_path)]), tmp_path / "none")


def saved_elsewhere(tmp_path: Path) -> Path:
    """A checkpoint with the same names and another shape."""
    save_bundle(tmp_path / "wider", {("kernel", ""): np.ones((2, 4), np.float32), ("bias", ""): np.ones(3, np.float32)})
    return tmp_path / "wider"


@pytest.mark.tf
def test_a_variable_that_an_input_has_by_default_keeps_its_value(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        kernel, rate = (
            v1.get_variable(name, [2], initializer=v1.constant_initializer(3.0)) for name in ("kernel", "rate")
        )
        y = x * kernel * v1.placeholder_with_default(rate, [2], name="scale")
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(tmp_path / "model"), {"x": x}, {"y": y})
    api.replicate(tmp_path / "model", Replication(2), tmp_path / "out")
    found, _ = outputs(tmp_path / "out", {"x": np.ones((1, 2), np.float32)})
    assert found["y"].tolist() == [[9.0, 9.0]]


@pytest.mark.tf
def test_what_is_fed_inside_of_the_model_is_fed_to_all(tmp_path: Path) -> None:
    inner = "expert_0/dense_0/Relu"
    flat = api.load(SAMPLES / "mmoe_small.pb", inputs=[inner], outputs=["expert_0/dense_1/Relu"])
    weights = [other_weights(SAMPLES / "mmoe_small.pb", seed, tmp_path / f"{seed}.pb") for seed in (1, 2)]
    api.replicate(flat, Replication(2, weights, "stack"), tmp_path / "out.pb")
    copies = api.load(tmp_path / "out.pb")
    (fed,) = copies.inputs
    value = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    found = reference(copies, {fed.name: value})["expert_0/dense_1/Relu"]
    for part, path in zip(found, weights, strict=True):
        alone = api.load(path, inputs=[inner], outputs=["expert_0/dense_1/Relu"])
        np.testing.assert_array_equal(part, reference(alone, {inner: value})["expert_0/dense_1/Relu"])


@pytest.mark.tf
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_the_mean_of_every_floating_type(dtype: str, tmp_path: Path) -> None:
    kind = f"DT_{dtype.upper().replace('FLOAT64', 'DOUBLE').replace('FLOAT16', 'HALF').replace('BHALF', 'BFLOAT16')}"
    text = f"""
        x Placeholder | attr {{ key: "dtype" value {{ type: {kind} }} }}
        w {CONSTANT.format(kind, "tensor_shape { dim { size: 4 } }")}
        y AddV2 x w | attr {{ key: "T" value {{ type: {kind} }} }}
    """
    replicas_of(tmp_path, text, times=4)
    value = np.array([0.5, 1, -2, 3]).astype(numpy_dtype(dtype))
    found = reference(api.load(tmp_path / "out.pb"), {"x": value})["y"]
    np.testing.assert_array_equal(found, value, strict=True)


@pytest.mark.tf
def test_replicas_draw_numbers_of_their_own_though_seeds_are_given(tmp_path: Path) -> None:
    seeds = 'attr { key: "seed" value { i: 5 } } attr { key: "seed2" value { i: 6 } }'
    text = f"""
        x {INPUT}
        w {WEIGHT}
        shape {SHAPE}
        noise RandomStandardNormal shape | attr {{ key: "dtype" value {{ type: DT_FLOAT }} }} {FLOAT.replace("FLOAT", "INT32")} {seeds}
        sum AddV2 noise w | {FLOAT}
        y Mul sum x | {FLOAT}
    """
    replicas_of(tmp_path, text, times=3, combine="stack")
    fed = {"x": np.float32(1)}
    (found,), (alone,) = (list(outputs(tmp_path / name, fed)[0].values()) for name in ("out.pb", "model.pb"))
    np.testing.assert_array_equal(found[0], alone)
    assert len(set(found.ravel().tolist())) == found.size


def test_rows_of_an_average_stay_independent(tmp_path: Path) -> None:
    api.replicate(SAMPLES / "mmoe_small.pb", Replication(3), tmp_path / "out.pb")
    rows = independent_rows(api.load(tmp_path / "out.pb"))
    assert isinstance(rows, Rows)
    assert rows == independent_rows(api.load(SAMPLES / "mmoe_small.pb"))


def test_the_same_files_come_out_each_time_and_the_model_stays(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(SAMPLES / "while_v1.pb", source)
    with unchanged(source):
        for out in ("a.pb", "b.pb"):
            done = fine("replicate", source / "while_v1.pb", "--times", 3, "-o", tmp_path / out, columns=200)
    assert done.out.splitlines() == [
        f"Written: {tmp_path / 'b.pb'}, 3 replicas of 46 nodes, 3 shared; mean of output.",
        "Replicas have equal weights, and so give equal results: --weights PATH gives each its own.",
    ]
    assert (tmp_path / "a.pb").read_bytes() == (tmp_path / "b.pb").read_bytes()


def test_copies_of_copies_can_be_made(tmp_path: Path) -> None:
    api.replicate(SAMPLES / "cond_v1.pb", Replication(2), tmp_path / "two.pb")
    api.replicate(tmp_path / "two.pb", Replication(2), tmp_path / "four.pb")
    own = list(parts(SAMPLES / "cond_v1.pb"))
    nodes = parts(tmp_path / "four.pb")
    assert {f"replicas_{outer}/replica_{inner}/{own[-1]}" for outer in (0, 1) for inner in (0, 1)} <= set(nodes)


def test_what_can_not_be_done_is_said(tmp_path: Path) -> None:
    mmoe, out = SAMPLES / "mmoe_small.pb", tmp_path / "out.pb"
    (tmp_path / "ints.pb").write_bytes(
        graph(
            f"x {INPUT}\nw {WEIGHT}\ny Mul x w | {FLOAT}\nz Rank y | {FLOAT}\nbest ArgMax y z | {FLOAT}"
        ).SerializeToString()
    )
    sparse = signatures("serving_default")
    of = sparse.signature_def["serving_default"].outputs["y"].coo_sparse
    of.values_tensor_name = of.indices_tensor_name = of.dense_shape_tensor_name = "y:0"
    (tmp_path / "sparse").mkdir()
    save_meta(tmp_path / "sparse", sparse)
    for arguments, said in (
        ((tmp_path / "sparse", "--times", 2), "output 'y' is of several tensors, sparse or ragged"),
        ((mmoe,), "--times or --weights is missing"),
        ((mmoe, "--times", 1, "--weights", mmoe, "--weights", mmoe), "weights for 2 replicas, and 1 are to be made"),
        ((mmoe, "--weights", SAMPLES / "towers_small.pb"), "is not the same graph as"),
        ((mmoe, "--weights", tmp_path / "none.pb"), "none.pb"),
        ((mmoe, "--times", 2, "--devices", "gpu0"), "'gpu0' is no device"),
        ((mmoe, "--times", 2, "-o", mmoe), "is the input"),
        ((SAMPLES / "custom_op.pb", "--times", 2), "a variable of a custom op (KvVarHandleOp)"),
        ((SAMPLES / "training.meta", "--times", 2), "which changes variables; replicas are for inference"),
        ((SAMPLES / "training_resource.meta", "--times", 2), "without the values of its variables"),
        ((SAMPLES / "keras_lookup", "--weights", tmp_path / "none"), "there is no checkpoint"),
        ((SAMPLES / "keras_lookup", "--weights", SAMPLES / "gru_while"), "the checkpoint has no value for variable"),
        ((tmp_path / "ints.pb", "--times", 2), "output 'best' is of type int64, of which there is no mean"),
    ):
        done = msplit("replicate", *arguments, *(() if "-o" in arguments else ("-o", out)))
        assert done.code == 2, arguments
        assert said in done.err.replace("\n", " "), done.err
        assert "Traceback" not in done.err
        assert not out.exists()
