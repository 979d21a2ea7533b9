"""The kernel of all columns against the lowering that does without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def agree(tries, seed=0, **variables):
    """In a process of its own: Triton decides at import whether it interprets its kernels, on the CPU, or compiles them."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **variables, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.cuda.passes.embedding.kernel_cases", str(tries), str(seed)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == f"{tries} agree\n"


@pytest.mark.needs_triton
def test_the_kernel_agrees_with_the_lowering():
    agree(4, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))  # several can run at once
def test_the_kernel_agrees_with_the_lowering_on_a_gpu(seed):
    agree(40, seed, TRITON_INTERPRET="0")
