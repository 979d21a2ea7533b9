"""Classes that are drawn for losses over many of them: TensorFlow's, step by step; and true ones among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.random import compute_accidental_hits, enough, sample_candidates
from msplit.engines.tensorflow.engine import REFERENCE as TENSORFLOW
from tests.campaign import examples
from tests.engines.cuda.cases import graph_of, job, scattered

from .harness import run_lowering, run_tensorflow

SIZES = [(8, 20, True), (8, 20, False), (64, 10_000, True), (5, 1 << 40, True)]
SAMPLERS = {"LogUniform": "log_uniform_candidate_sampler", "Uniform": "uniform_candidate_sampler"}


@pytest.mark.tf
def test_every_step_draws_what_tensorflow_draws() -> None:
    """Also without a seed, and as often as a class may be drawn twice."""
    names: list[str] = []

    def build(tf: Any, v1: Any) -> None:
        true = v1.placeholder(tf.int64, [4, 2], "true")
        for kind, sampler in SAMPLERS.items():
            for count, size, unique in SIZES:
                found = getattr(tf.random, sampler)(true, 2, count, unique, size, seed=count % 5 or None)
                for what, value in zip(("drawn", "true", "sampled"), found, strict=True):
                    names.append(f"{kind}_{count}_{size}_{unique}_{what}")
                    tf.identity(value, names[-1])

    flat = graph_of(build, outputs=names)
    feeds = {"true": np.arange(8, dtype=np.int64).reshape(4, 2)}
    ours = ENGINE.build(job(flat, feeds, scattered(flat, 3), streams=3))
    theirs = TENSORFLOW.build(Job(flat, np.zeros(len(flat), np.int32), 1, feeds, precision=Precision.IEEE))
    before: Any = None
    for _ in range(3):
        found, wanted = ours.step(feeds), theirs.step(feeds)
        for name in names:
            np.testing.assert_allclose(found[name], wanted[name], rtol=2e-6 if "drawn" not in name else 0, err_msg=name)
        assert before is None or not np.array_equal(before, found["LogUniform_64_10000_True_drawn"])
        before = found["LogUniform_64_10000_True_drawn"]
    ours.close()
    theirs.close()


@settings(max_examples=examples(20, 2000))
@given(st.integers(1, 300), st.integers(0, 5000), st.booleans(), st.integers(0, 1000))
def test_distinct_classes_are_distinct(count: int, more: int, log_uniform: bool, step: int) -> None:
    name = "LogUniformCandidateSampler" if log_uniform else "UniformCandidateSampler"
    size = count + more
    attrs = {"num_sampled": count, "range_max": size, "unique": True, "seeds": (3, 4), "draws": name}
    node = Node("sampler", "_SampleCandidates", attrs)
    drawn, _, expected = sample_candidates(node, torch.zeros(1, 1, dtype=torch.int64), torch.tensor(step))
    assert len(set(drawn.tolist())) == count
    assert 0 <= min(drawn) <= max(drawn) < size
    assert (expected > 0).all()


def test_what_would_take_too_many_draws_is_refused() -> None:
    attrs = {"num_sampled": 6, "range_max": 5, "unique": True, "seeds": (3, 4), "draws": "UniformCandidateSampler"}
    with pytest.raises(Unsupported, match="6 distinct classes of 5"):
        sample_candidates(Node("sampler", "", attrs), torch.zeros(1, 1, dtype=torch.int64), torch.tensor(0))
    assert enough(5, 5, False) <= 5 * 1024
    with pytest.raises(Unsupported, match="more draws"):
        enough(1 << 40, 1 << 40, True)


CLASSES = st.integers(0, 6)


@pytest.mark.tf
@settings(max_examples=examples(30, 1000))
@given(st.lists(st.tuples(CLASSES, CLASSES), min_size=1, max_size=5), st.lists(CLASSES, min_size=1, max_size=8))
def test_true_classes_among_those_that_were_drawn(true: Any, drawn: Any) -> None:
    arrays = [np.asarray(true, np.int64), np.asarray(drawn, np.int64)]
    wanted = run_tensorflow("ComputeAccidentalHits", arrays, {"num_true": 2})
    found = run_lowering("ComputeAccidentalHits", arrays, {"num_true": 2})
    node = Node("hits", "ComputeAccidentalHits", {"num_true": 2, "padded": True})
    rows, places, weights = compute_accidental_hits(node, *map(torch.from_numpy, arrays))
    assert len(rows) == len(places) == len(weights) == 2 * len(true)
    there = places >= 0
    for one, other, padded in zip(wanted, found, (rows, places, weights), strict=True):
        np.testing.assert_array_equal(to_numpy(other), one)
        np.testing.assert_array_equal(padded[there].numpy(), one)
