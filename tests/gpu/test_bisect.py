"""Steps that train on a real GPU, value by value beside TensorFlow on the CPU, and their variables in a bench."""

from __future__ import annotations

import pytest

from msplit.benchmark.benchmark import bench
from msplit.benchmark.bisect import bisect
from msplit.run.request import RunRequest
from msplit.verify.results import Settings
from tests.training_graphs import BATCH, graph

pytestmark = [pytest.mark.gpu, pytest.mark.tf]

CASES = [("mmoe", "Adam", "resource"), ("lstm", "Momentum", "ref"), ("deepfm", "Adagrad", "resource")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_gradients_and_updates_agree(case):
    flat, _ = graph(*case)
    found = bisect(flat, RunRequest.of(batch=BATCH))
    assert (found.device, found.culprit, found.drift) == ("cuda", None, None)
    assert found.variables


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_variables_of_a_bench_are_held_against_tensorflows(case, precision):
    flat, _ = graph(*case)
    settings = Settings(duration=0, warmup=0, min_rounds=1, builds=1)
    request = {"engine": "cuda", "batch": BATCH, "streams": (2,), "precision": precision, "settings": settings}
    result = bench(flat, **request).result
    assert not result.failed, result.describe_failures()
    ours = [one for one in result.variants if one.label.startswith("msplit")]
    assert ours
    for one in ours:
        assert "variables of TensorFlow on the CPU" in [check.against for check in one.checks]
