"""A model made ready to run on a real GPU gives what the simulated streams give, step after step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit.inputs.make import make_inputs

pytestmark = pytest.mark.gpu

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("sample", ["mmoe_small.pb", "towers_small.pb"])
def test_steps_give_what_simulated_ones_give(sample, capture):
    flat = msplit.load(SAMPLES / sample)
    request = {"streams": (4,), "engine": "cuda", "batch": 16, "precision": "ieee", "capture": capture}
    with msplit.prepare(flat, **request) as ours, msplit.prepare(flat, **dict(request, device="cpu")) as simulated:
        assert ours.inputs == simulated.inputs
        for seed in range(10):
            feeds = make_inputs(flat, {}, batch=16, seed=seed)
            found, wanted = ours.step(feeds), simulated.step(feeds)
            for name, value in wanted.items():
                np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-5, err_msg=name)
            for name, value in feeds.items():
                ours.buffers[name][...] = value
            for name, value in ours.step(ours.buffers).items():
                np.testing.assert_array_equal(value, found[name], err_msg=name)
