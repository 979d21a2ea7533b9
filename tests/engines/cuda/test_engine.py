"""Whole models on simulated streams against TensorFlow."""

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.tensorflow.engine import reference
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from msplit.samples import fill
from msplit.verify.compare import compare
from tests import forked
from tests.campaign import campaign
from tests.engines.cuda.cases import (
    SAMPLES,
    assert_equals_tensorflow,
    bits,
    built_sample,
    flat_of,
    graph_of,
    job,
    kernels,
    program_of,
    run,
    scattered,
)

CAPTURED = ["mmoe_small.pb", "mmoe_small.pbtxt", "towers_small.pb", "lstm_small.pb", "annotated.pb"]
CAPTURED += ["keras_inception", "two_signatures", "tf1_saved_model"]

SMALL = {
    "bert": {"layers": 2, "hidden": 32, "heads": 2, "sequence": 8, "vocabulary": 50},
    "deepfm": {"categorical": 4, "numeric": 3, "rows": 20, "width": 4, "units": (8, 4)},
    "dlrm": {"tables": 4, "numeric": 3, "rows": 20, "width": 4, "bottom": (8, 4), "top": (8, 4)},
    "lstm": {"layers": 3, "steps": 4, "hidden": 8},
    "mmoe": {"experts": 3, "features": 8, "units": (8, 4), "tower_units": (4,)},
    "squeezenet": {"image": 64, "classes": 10},
    "towers": {"towers": 4, "rows": 20, "width": 4, "units": (8, 4)},
}
LARGE = {
    "googlenet": {"image": 32, "classes": 10},
    "inception_v3": {"image": 75, "classes": 10},
    "nasnet_mobile": {"image": 32, "classes": 10},
}

KERNELS = {
    # Two experts' layers and one tower's are one product each, however many nodes that were.
    "bert": {"_FusedMatMul": 13, "_Attention": 2},
    "deepfm": {"_FusedMatMul": 4, "GatherV2": 8},
    "dlrm": {"_FusedMatMul": 6, "GatherV2": 5},
    "lstm": {"_FusedMatMul": 12, "MatMul": 9, "BiasAdd": 0},
    "mmoe": {"_FusedMatMul": 12, "MatMul": 0},
    "squeezenet": {"_FusedConv2D": 26, "Conv2D": 0},
    "towers": {"_FusedMatMul": 9, "GatherV2": 4},
    # Eight of its convolutions are of one pixel here, and so products; of NASNet's, 53.
    "googlenet": {"_FusedConv2D": 49, "_FusedMatMul": 8, "_Classifier": 1, "FusedBatchNormV3": 0},
    "inception_v3": {"_FusedConv2D": 94, "_Classifier": 1, "FusedBatchNormV3": 0},
    "nasnet_mobile": {"_FusedConv2D": 135, "_FusedMatMul": 53, "_Classifier": 1, "FusedBatchNormV3": 0},
}


def load(name):
    return flatten(read(SAMPLES / name))


@pytest.mark.tf
@pytest.mark.parametrize("name", CAPTURED)
def test_a_sample_equals_tensorflow_on_any_number_of_streams(name):
    flat = load(name)
    assert_equals_tensorflow(flat, make_inputs(flat, {}, batch=3), streams=(1, 2, 3, 8))


@pytest.mark.tf
def test_a_sample_whose_shapes_depend_on_values_runs_launch_by_launch():
    flat = load("ragged_sparse")
    feeds = make_inputs(flat, {}, batch=3)
    assert_equals_tensorflow(flat, feeds, streams=(1, 3), capture=False)
    with pytest.raises(EngineError, match=r"(?s)depends on values.*Where.*--cuda capture=no"):
        run(flat, feeds)


@pytest.mark.tf
@pytest.mark.slow
def test_inception_v3_in_full_size_equals_tensorflow_in_the_expected_kernels():
    model = read(SAMPLES / "inception_v3_stripped.pb")
    flat = flat_of(fill(model.graph_def))
    # TensorFlow itself is 6e-5 off what float64 gives, through 94 convolutions in a row.
    check(flat, make_inputs(flat, {}, batch=1), "inception_v3", streams=(4,), tolerance=2e-4)


def small(name):
    sample = built_sample(name, **{**SMALL, **LARGE}[name])
    return flat_of(sample.graph_def, outputs=sample.outputs)


def check_builder(name):
    flat = small(name)
    check(flat, make_inputs(flat, {}, batch=2), name, streams=(1, 3))


def check(flat, feeds, name, **options):
    assert_equals_tensorflow(flat, feeds, **options)
    found = Counter(kernels(program_of(flat, feeds)))
    assert {op: found[op] for op in KERNELS[name]} == KERNELS[name]


@pytest.mark.tf
@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_builders_model_equals_tensorflow_in_the_expected_kernels(name):
    check_builder(name)


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.parametrize(
    # Inception-v3 is tried in full size.
    "name",
    [pytest.param(name, marks=campaign if name in ("inception_v3", "nasnet_mobile") else ()) for name in sorted(LARGE)],
)
def test_every_image_builders_model_equals_tensorflow_in_the_expected_kernels(name):
    check_builder(name)


@pytest.mark.tf
def test_no_identity_constant_or_shape_is_left_as_a_step():
    for name in CAPTURED:
        flat = load(name)
        program = program_of(flat, make_inputs(flat, {}, batch=2))
        ops = {step.op.op for step in program.steps}
        assert not ops & {"Identity", "IdentityN", "ReadVariableOp", "Const", "Shape", "StopGradient"}, name
        assert all(step.inputs for step in program.steps), f"{name}: a step that depends on nothing"


def test_a_sample_runs_the_same_to_the_bit_on_any_interleaving():
    flat = load("lstm_small.pb")
    feeds = make_inputs(flat, {}, batch=1)
    executable = ENGINE.build(job(flat, feeds, scattered(flat, 5), streams=5))
    expected = bits(run(flat, feeds, 1))
    for _ in range(10):
        assert bits(executable.step(feeds)) == expected


def test_inputs_may_change_from_step_to_step():
    flat = load("mmoe_small.pb")
    first, second = (make_inputs(flat, {}, batch=2, seed=seed) for seed in (1, 2))
    executable = ENGINE.build(job(flat, first, scattered(flat, 3), streams=3))
    a, b = executable.step(first), executable.step(second)
    assert bits(a) != bits(b)
    assert bits(executable.step(first)) == bits(a)
    assert bits(b) == bits(run(flat, second))


def test_an_input_of_another_shape_or_type_is_refused():
    flat = load("mmoe_small.pb")
    feeds = make_inputs(flat, {}, batch=2)
    executable = ENGINE.build(job(flat, feeds))
    (name,) = feeds
    for wrong, fix in (
        (make_inputs(flat, {}, batch=3)[name], "prepare one per shape"),
        (feeds[name].astype(np.float64), r"convert it to that type: array.astype\('float32'\)"),
        (feeds[name].astype(">f4"), r"convert it to that type: array.astype\('float32'\)"),
    ):
        with pytest.raises(EngineError, match=rf"was prepared as float32 .*\n  fix: .*{fix}"):
            executable.step({name: wrong})
    with pytest.raises(EngineError, match="no value for input"):
        executable.step({})


def test_one_graph_is_prepared_once_for_all_assignments():
    flat = load("towers_small.pb")
    feeds = make_inputs(flat, {}, batch=2)
    one = ENGINE.build(job(flat, feeds))
    many = ENGINE.build(job(flat, feeds, scattered(flat, 4), streams=4))
    assert one.program is many.program
    assert one.facts()["streams"] == 1
    assert many.facts()["waits"] > 0


def test_facts_say_what_a_report_needs():
    flat = load("towers_small.pb")
    feeds = make_inputs(flat, {}, batch=2)
    facts = ENGINE.build(job(flat, feeds, scattered(flat, 4), streams=4)).facts()
    assert facts["kernels"] == len(kernels(program_of(flat, feeds)))
    assert 0 < facts["peak_bytes_one_stream"] <= facts["peak_bytes"]
    assert facts["weight_bytes"] > 0
    assert facts["waits"] <= facts["waits_before_reduction"]


def test_without_a_gpu_the_engine_says_what_would_help():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    flat = load("towers_small.pb")
    with pytest.raises(EngineError, match="--engine tensorflow"):
        ENGINE.build(Job(flat, np.zeros(len(flat), np.int32), 1, make_inputs(flat, {})))


@pytest.mark.tf
def test_an_input_that_is_an_output_and_a_constant_that_is_one():
    def build_(tf, v1):
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        tf.identity(x, name="same")
        tf.constant(np.arange(3.0, dtype=np.float32), name="three")
        tf.add(x, 1.0, name="more")

    flat = graph_of(build_, outputs=["same", "three", "more"])
    feeds = {"x": np.ones((2, 2), np.float32)}
    assert_equals_tensorflow(flat, feeds)
    executable = ENGINE.build(job(flat, feeds))
    first = executable.step(feeds)
    kept = {name: value.copy() for name, value in first.items()}
    for value in first.values():  # the caller's own, so that nothing of the model changes with them
        value[...] = 7
    assert (feeds["x"] == 1).all()
    for name, value in executable.step(feeds).items():
        np.testing.assert_array_equal(value, kept[name])


@pytest.mark.tf
def test_a_tensor_inside_of_the_graph_can_be_fed():
    """One output of a Split is fed, the other one is computed."""

    def build_(tf, v1):
        x = v1.placeholder(tf.float32, [2, 4], name="x")
        first, second = tf.split(x * 3.0, 2, axis=1, name="split")
        tf.add(first, 10.0 * second, name="out")

    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        build_(tf, tf.compat.v1)
    flat = flat_of(graph.as_graph_def(), inputs=["x", "split:1"], outputs=["out"])
    feeds = {"x": np.ones((2, 4), np.float32), "split:1": np.full((2, 2), 7, np.float32)}
    assert {tensor.name for tensor in flat.inputs} == set(feeds)
    assert_equals_tensorflow(flat, feeds)


BLOCKED = """
import importlib.abc, importlib.machinery, sys

class Refuse(importlib.abc.Loader):
    def exec_module(self, module):
        raise AssertionError(f"{module.__name__} was imported")

class Block(importlib.abc.MetaPathFinder):
    # TensorFlow may be looked for, since its protobuf modules lie in it; it may not be run.
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("tensorflow", "keras") or name.endswith("_pb2"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = Refuse()
        return spec

assert "tensorflow" not in sys.modules  # what was imported before the fork, the engine, did not, either
sys.meta_path.insert(0, Block())
import numpy as np
from msplit.formats import read
from msplit.flatten import flatten
from msplit.inputs.make import make_inputs
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions

for model in sys.argv[1:]:
    flat = flatten(read(model))
    feeds = make_inputs(flat, {}, batch=2)
    ids = np.arange(len(flat), dtype=np.int32) % 3
    outputs = ENGINE.build(Job(flat, ids, 3, feeds, options=EngineOptions("cpu"))).step(feeds)
    assert outputs
    assert all(np.isfinite(value).all() for value in outputs.values())
    assert "tensorflow" not in sys.modules
try:
    import tensorflow
except AssertionError:
    print("blocked")
"""


def test_a_graph_is_read_and_run_without_importing_tensorflow():
    models = [str(SAMPLES / name) for name in ("mmoe_small.pb", "two_signatures")]
    done = forked.run([sys.executable, "-c", BLOCKED, *models], server=forked.ENGINE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "blocked\n"


@pytest.mark.tf
def test_outputs_of_a_sample_verify_as_bench_verifies_them():
    flat = load("keras_inception")
    feeds = make_inputs(flat, {}, batch=2)
    assert compare(run(flat, feeds, 4), reference(flat, feeds)).passed


def test_what_is_compiled_of_one_graph_shares_its_weights_on_the_device(monkeypatch):
    """In another precision, in a hurry or in full: a weight that no kernel wants in another way is there once, as long as it is needed."""
    from msplit.engines.cuda.ir import program as state
    from msplit.engines.cuda.passes import tracing

    put = []

    def copied(array, device="cpu"):
        put.append(array.nbytes)
        return torch.from_numpy(np.array(array))  # on a GPU it would be no view, either

    for module in (tracing, state):  # inputs, and weights
        monkeypatch.setattr(module, "to_torch", copied)
    flat = flatten(read(SAMPLES / "mmoe_small.pb"))
    feeds = make_inputs(flat, {}, batch=4, seed=0)
    one = job(flat, feeds)
    first = ENGINE.compile(one).program
    weights = sum(tensor.nbytes for tensor in first.constants.values())
    assert weights > 10_000
    put.clear()
    others = [
        ENGINE.compile(replace(one, precision=Precision.TF32)).program,
        ENGINE.compile(replace(one, options=replace(one.options, measure=False))).program,
    ]
    assert sum(put) < weights / 10, "inputs"
    for other in others:
        assert other is not first
        assert other.constants.keys() == first.constants.keys()
        assert all(tensor is first.constants[key] for key, tensor in other.constants.items())
    ENGINE.forget(flat)
    put.clear()
    again = ENGINE.compile(one).program
    assert sum(put) >= weights, "of a graph that was forgotten nothing is left, although programs hold theirs"
    assert not any(tensor is first.constants.get(key) for key, tensor in again.constants.items())


def test_a_cudnn_of_another_version_is_told_before_anything_fails_for_it(monkeypatch):
    """As where TensorFlow, with one of its own, was imported first."""
    said = "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found runtime version (9, 14, 0). More."

    def version():
        raise RuntimeError(said)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    told = ENGINE.unavailable()
    assert "found runtime version (9, 14, 0); where TensorFlow" in told
    assert "import torch before tensorflow" in told
