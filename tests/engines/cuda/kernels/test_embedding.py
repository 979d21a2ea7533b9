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
    agree(6, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))  # several can run at once
def test_the_kernel_agrees_with_the_lowering_on_a_gpu(seed):
    agree(40, seed, TRITON_INTERPRET="0")


SCRIPT = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.language import float32
from msplit.engines.cuda.kernels.code.columns import fill_columns

known = dict(BLOCK=0, VECTOR=1, WIDTH=128, SINGLE=True, ROWS2=0, IDS2=1, WIDTH2=1, SINGLE2=True, AT_ONCE2=1, STORED2=1)
known |= dict(ELEMENT=float32, BYTES=4, OUT_BYTES=4, SUM=float32, SHORT=True, CACHED=False)
known |= dict.fromkeys("LONG FLOAT DOUBLE EDGES MODULO LIMITED MEANS WEIGHTED SCALED PACKED".split(), False)
kinds = dict(shared="*i8", extra="*i8", out="*fp32", work="*i32", boundaries="*fp32", first_programs="i32", second_programs="i32")
names = fill_columns.arg_names
for at_once, rows, ids, cached, loads in ((4, 1, 32, True, 8), (1, 1, 8, True, 0), (4, 4, 8, False, 8)):
    known |= dict(ROWS=rows, IDS=ids, AT_ONCE=at_once, STORED=at_once, CACHED=cached)
    signature = {name: "constexpr" if name in known else kinds.get(name, "*i64") for name in names}
    constants = {(names.index(name),): value for name, value in known.items()}
    source = ASTSource(fill_columns, signature, constants, {(place,): [["tt.divisibility", 16]] for place in range(8)})
    found = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert found.count("ld.global.v4.b32") == loads, found
    if rows > 1:  # each warp has rows of its own
        assert found.count("st.global.v4.b32") == 1 and "shared" not in found, found
"""


@pytest.mark.needs_triton
def test_rows_at_multiples_of_16_bytes_are_loaded_by_so_many():
    """What is compiled for a GPU: eight such loads for each thread, and no word between warps where rows are many."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}, check=True
    )
