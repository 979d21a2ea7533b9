"""Lookups with weights that train, on a real GPU: against the same steps on the CPU, which the other tests hold against TensorFlow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Executable, Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import KernelMode, Torture
from msplit.flatten.build import flatten
from msplit.formats import read
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


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("mode", KernelMode)
def test_a_mean_over_rows_of_a_table_in_parts_is_captured(mode: KernelMode, capture: bool) -> None:
    """Its rows are joined in every step, in memory that no trace has seen: the kernel of columns knows only tables that stay."""
    flat = flatten(read(Path(__file__).parent / "lookup_in_parts.pb", outputs=["y"]))
    table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    feeds = {"ids": np.array([0, 8, -1, 3, -1, -1, 5, 5])}
    options = replace(options_of("cuda", capture=capture, torture=Torture(poison=True)), mode=mode)
    step = CudaEngine().build(Job(flat, scattered(flat, 4), 4, feeds, precision=Precision.IEEE, options=options))
    for seed in range(4):
        ids = np.random.default_rng(seed).integers(-1, 9, 8) if seed else feeds["ids"]
        rows = [[table[one] for one in pair if one >= 0] for pair in ids.reshape(4, 2)]
        expected = np.stack([np.mean(one, axis=0) if one else np.zeros(4) for one in rows])
        np.testing.assert_allclose(step.step({"ids": ids})["y"], expected, rtol=1e-5, atol=1e-6)
    step.close()
