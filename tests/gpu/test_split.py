"""One graph on two real GPUs: the same bits as on one, captured as one CUDA graph or not, step after step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit import api
from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import Torture
from msplit.inputs.make import feeds_for
from tests.engines.cuda.cases import SAMPLES, bits, flat_of, options_of, scattered
from tests.engines.cuda.random_graphs import random_graphs

pytestmark = [pytest.mark.gpu, pytest.mark.needs_gpus(2)]

REPLAYS = 4


def build(flat, feeds, streams=4, split=(0, 1), **options):
    ids = scattered(flat, streams, streams)
    return CudaEngine().build(
        Job(flat, ids, streams, feeds, precision=Precision.IEEE, options=options_of("cuda", split=split, **options))
    )


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=random_graphs(), seed=st.integers(0, 99))
def test_random_graphs_on_two_gpus_equal_one(capture, case, seed):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    feeds = {tensor.name: feeds[tensor.name] for tensor in flat.inputs}
    one = build(flat, feeds, split=(), capture=capture)
    two = build(flat, feeds, capture=capture, torture=Torture(poison=True, delay_cycles=20_000, seed=seed))
    for replay in range(REPLAYS):
        fresh = {
            name: np.random.default_rng(replay).standard_normal(value.shape).astype(value.dtype)
            if value.dtype.kind == "f"
            else np.roll(value, replay)
            for name, value in feeds.items()
        }
        assert bits(two.step(fresh)) == bits(one.step(fresh))
    one.close()
    two.close()


@pytest.mark.parametrize("name", ["mmoe_small.pb", "towers_small.pb", "lstm_small.pb"])
@pytest.mark.parametrize("group", [False, True], ids=["plain", "grouped"])
def test_samples_run_on_two_gpus(name, group):
    flat = api.load(SAMPLES / name)
    feeds = feeds_for(flat, Workload(64))
    one, two = build(flat, feeds, split=(), group=group), build(flat, feeds, group=group)
    expected = one.step(feeds)
    for _ in range(REPLAYS):
        for key, value in two.step(feeds).items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-4, atol=1e-5)
    assert two.facts()["copies"] > 0
    assert one.facts()["captured"]
    assert two.facts()["captured"]
    assert len(two.device_times(10)) == 10
    one.close()
    two.close()
