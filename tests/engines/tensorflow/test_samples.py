"""Every sample graph, its nodes scattered over four devices, gives what plain TensorFlow gives."""

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest

from msplit.benchmark.timing import bench
from msplit.engines.base import Job, TensorFlowOptions
from msplit.engines.tensorflow.engine import ENGINE, REFERENCE, reference
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from msplit.inputs.reference import Reference
from msplit.verify.compare import compare
from msplit.verify.results import Settings, Variant

pytestmark = pytest.mark.tf

ROOT = Path(__file__).parents[3] / "sample_graphs"
REFUSED = {"custom_op.pb"}
"""It has ops that no TensorFlow knows."""
TAGS = {"two_tags": ("serve",)}
SAMPLES = sorted(
    path.name
    for path in ROOT.iterdir()
    if path.suffix not in (".md", ".txt", ".json", ".yaml") and path.name not in REFUSED
)


def load(name):
    return flatten(read(ROOT / name, tags=TAGS.get(name)))


@pytest.mark.parametrize("name", SAMPLES)
def test_scattered_over_four_devices_it_equals_plain_tensorflow(name):
    flat = load(name)
    batch = 1 if name.startswith("inception") else 3  # its images are large
    feeds = make_inputs(flat, {}, batch=batch)
    ids = np.random.default_rng(0).integers(0, 4, len(flat)).astype(np.int32)
    one = REFERENCE.build(Job(flat, np.zeros(len(flat), np.int32), 1, feeds))
    many = ENGINE.build(Job(flat, ids, 4, feeds))
    many.load_state(one.save_state())
    for seed in (1, 2):
        feeds = make_inputs(flat, {}, batch=batch, seed=seed)
        expected = one.step(feeds)
        found = compare(many.step(feeds), expected)
        assert found.passed, found.describe()
        # A train step gives no tensor.
        assert set(expected) == {end.name for end in flat.model.outputs if end.dtype}
    found = compare(many.save_state(), one.save_state())
    assert found.passed, found.describe()
    one.close()
    many.close()


def test_ops_that_tensorflow_does_not_know_are_refused_with_the_way_out():
    flat = load("custom_op.pb")
    for streams in (1, 2):
        with pytest.raises(EngineError) as caught:
            ENGINE.build(Job(flat, np.arange(len(flat), dtype=np.int32) % streams, streams, {}))
        assert caught.value.what.endswith("Op type not registered 'KvVarHandleOp'"), "and no advice on tf.contrib"
        assert "op-library=" in caught.value.fix


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def test_the_users_files_stay_as_they_are_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = digest(ROOT / "keras_lookup")
    flat = load("keras_lookup")
    proto = flat.model.proto.SerializeToString(deterministic=True)
    executable = ENGINE.build(Job(flat, np.arange(len(flat), dtype=np.int32) % 3, 3, {}))
    executable.step(make_inputs(flat, {}, batch=2))
    executable.close()
    assert digest(ROOT / "keras_lookup") == before
    assert flat.model.proto.SerializeToString(deterministic=True) == proto
    assert list(tmp_path.iterdir()) == []


def test_a_lookup_table_gives_real_ids():
    """Two cities of the vocabulary differ, two unknown ones do not."""
    flat = load("keras_lookup")
    cities = np.array([b"city_1", b"city_2", b"nowhere", b"elsewhere"], object)
    ids = np.arange(len(flat), dtype=np.int32) % 2
    executable = ENGINE.build(Job(flat, ids, 2, {}))
    (scores,) = executable.step({"city": cities, "amount": np.ones((4, 4), np.float32)}).values()
    executable.close()
    assert scores[0] != scores[1]
    assert scores[2] == scores[3]


def test_a_bench_of_a_sample_verifies_and_measures():
    flat = load("mmoe_small.pb")
    feeds = make_inputs(flat, {}, batch=4)
    ids = np.zeros(len(flat), np.int32)
    for node, name in enumerate(flat.graph.names):
        if name.startswith("expert_"):
            ids[node] = int(name.split("/")[0].removeprefix("expert_"))
    plain = Job(flat, np.zeros(len(flat), np.int32), 1, feeds)
    variants = [
        Variant("TensorFlow", ENGINE, plain),
        Variant(
            "TensorFlow + XLA",
            ENGINE,
            Job(flat, plain.ids, 1, feeds, tensorflow=TensorFlowOptions(xla=True)),
            optional=True,
        ),
        Variant("4 devices", ENGINE, Job(flat, ids, 4, feeds)),
    ]
    result = bench(
        variants,
        fresh=lambda seed: make_inputs(flat, {}, batch=4, seed=seed),
        settings=Settings(duration=0.05, warmup=0.01, builds=2),
        reference=Reference(feeds, reference(flat, feeds), "TensorFlow on the CPU"),
    )
    assert not result.failed, result.describe_failures()
    assert [len(variant.checks) for variant in result.variants] == [1, 2, 2]
    assert result.variants[2].ratio_over("TensorFlow").builds == 2
    assert "say nothing about GPU streams" in result.diagnosis[0]
