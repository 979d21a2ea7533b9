"""Graphs run on several logical devices give what plain TensorFlow gives."""

import numpy as np
import pytest

from msplit.engines.base import Job
from msplit.errors import EngineError

pytestmark = pytest.mark.tf
models = pytest.importorskip("tests.engines.tensorflow.models")
tf = models.tf
v1 = tf.compat.v1


def build(flat, ids, streams, feeds=None, **more):
    from msplit.engines.tensorflow.engine import ENGINE

    return ENGINE.build(Job(flat, np.asarray(ids, np.int32), streams, feeds or {}, **more))


def run(flat, ids, streams, feeds, **more):
    executable = build(flat, ids, streams, feeds, **more)
    try:
        return executable.step(feeds)
    finally:
        executable.close()


@pytest.mark.parametrize("streams", [2, 3, 4])
def test_towers_on_streams_equal_one_stream(streams):
    flat = models.towers()
    feeds = {"ids": np.random.default_rng(1).integers(0, 50, (16, 4)).astype(np.int32)}
    one = run(flat, np.zeros(len(flat)), 1, feeds)
    many = run(flat, models.by_scope(flat, streams), streams, feeds)
    assert list(one) == ["out"]
    np.testing.assert_allclose(many["out"], one["out"], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_an_assignment_without_sense_still_gives_right_outputs(seed):
    flat = models.towers()
    feeds = {"ids": np.random.default_rng(seed).integers(0, 50, (5, 4)).astype(np.int32)}
    one = run(flat, np.zeros(len(flat)), 1, feeds)
    np.testing.assert_allclose(run(flat, models.scattered(flat, 4, seed), 4, feeds)["out"], one["out"], rtol=1e-6)
