"""Lookups with weights that train, on a real GPU: against the same steps on the CPU, which the other tests hold against TensorFlow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msplit.core.precision import Precision
from msplit.engines.base import Executable, Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import KernelMode, Torture
from tests.engines.cuda.cases import options_of, scattered
from tests.weighted_lookup import FILE, feeds_of, flat_of, state_of

pytestmark = pytest.mark.gpu


def built(device: str, streams: int, mode: KernelMode, torture: Torture | None = None) -> Executable:
    flat = flat_of(FILE.read_bytes())
    options = replace(options_of(device, torture=torture), mode=mode)
    ids = scattered(flat, streams)
    job = Job(flat, ids, streams, feeds_of(0), precision=Precision.IEEE, options=options, state=state_of())
    executable = CudaEngine().build(job)
    executable.load_state(state_of())
    return executable


@pytest.mark.parametrize("mode", KernelMode)
@pytest.mark.parametrize("streams", [1, 4])
def test_lookups_with_weights_train_on_a_gpu(mode: KernelMode, streams: int) -> None:
    """Under delays, with freed memory poisoned."""
    torture = Torture(poison=True, delay_cycles=20_000, seed=streams)
    plain, executable = built("cpu", 1, KernelMode.PLAIN), built("cuda", streams, mode, torture)
    for seed in range(4):
        found, expected = executable.step(feeds_of(seed)), plain.step(feeds_of(seed))
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)
    found, expected = executable.save_state(), plain.save_state()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    executable.close()
    plain.close()
