"""Rows of sparse gradients that Keras divides by rows of accumulators, on a real GPU: against NumPy, zeros and NaN among the divisors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import KernelMode, Torture
from tests.engines.cuda.cases import options_of, scattered
from tests.row_division import COUNT, FILE, ROWS, WIDTH, expected, feeds_of, flat_of, state_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", KernelMode)
@pytest.mark.parametrize("streams", [1, 4])
def test_rows_are_divided_on_a_gpu(mode: KernelMode, streams: int) -> None:
    """Under delays, with freed memory poisoned."""
    flat = flat_of(FILE.read_bytes())
    torture = Torture(poison=True, delay_cycles=20_000, seed=streams)
    options = replace(options_of("cuda", torture=torture), mode=mode)
    feeds = feeds_of(range(COUNT))
    job = Job(
        flat, scattered(flat, streams), streams, feeds, precision=Precision.IEEE, options=options, state=state_of()
    )
    executable = CudaEngine().build(job)
    rng = np.random.default_rng(streams)
    for seed in range(6):
        state, feeds = state_of(seed), feeds_of(rng.integers(0, ROWS, COUNT), seed, epsilon=0.0)
        for value in (0.0, np.nan):
            state["accumulator"][rng.integers(0, ROWS, 2), rng.integers(0, WIDTH, 2)] = value
        executable.load_state(state)
        executable.step(feeds)
        found = executable.save_state()
        for name, wanted in expected(state, feeds).items():
            np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6, err_msg=f"{name}, {seed}")
    executable.close()
