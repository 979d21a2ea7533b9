"""Several that train together, each on some rows of a batch, and one that trains on all of them: the same losses and variables."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from benchmarks import training_models
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import KernelMode, Shards
from tests.engines.cuda.cases import options_of, scattered
from tests.engines.cuda.together import together
from tests.training_graphs import apart, loaded

pytestmark = pytest.mark.tf

BATCH, STREAMS, WITHIN = 8, 3, 1e-5


@functools.cache
def graph(name, optimizer, kind="resource", batch=None):
    meta, training = training_models.build(name, optimizer, resource=kind == "resource", batch=batch, small=True)
    return loaded(meta.SerializeToString(deterministic=True)), training


def job_of(flat, feeds, state, mode=KernelMode.PLAIN):
    options = options_of("cpu", fuse=mode.fuses, group=mode.groups)
    return Job(flat, scattered(flat, STREAMS), STREAMS, feeds, ieee=True, options=options, state=state)


def alone(flat, batches, state, mode=KernelMode.PLAIN):
    executable = ENGINE.build(job_of(flat, batches[0], state, mode))
    executable.load_state(state)
    return [executable.step(feeds) for feeds in batches], executable.save_state()


def assert_same(flat, batches, state, shards, *, mode=KernelMode.PLAIN, fetched=("loss",), within=WITHIN):
    expected, after = alone(flat, batches, state, mode)
    every, variables = together(lambda feeds: job_of(flat, feeds, state, mode), batches, shards, state)
    for outputs, own in zip(every, variables, strict=True):
        for name in fetched:
            np.testing.assert_allclose([one[name] for one in outputs], [one[name] for one in expected], rtol=within)
        assert {name: value.tobytes() for name, value in own.items()} == {
            name: value.tobytes() for name, value in variables[0].items()
        }
        wrong = {name: away for name, away in apart(own, after).items() if away > within}
        assert not wrong


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("mmoe", "Adam"), ("deepfm", "Adagrad"), ("deepfm", "Adam"), ("lstm", "Momentum"), ("deepfm", "GradientDescent")],
)
@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.FUSED_AND_GROUPED])
def test_models(name, optimizer, mode):
    flat, training = graph(name, optimizer)
    batches = [training.feeds(BATCH, step) for step in range(3)]
    assert_same(flat, batches, training.state(), Shards(2, tuple(batches[0])), mode=mode)
