"""Products of our own kernels in TF32: numbers are rounded to it, and not cut off. What Triton makes for a GPU is looked at on a CPU;
`tests/gpu/test_tf32.py` looks at the numbers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROUNDING = "cvt.rna.tf32.f32"
"""The instruction."""

TILE = {"BM": 32, "BD": 32, "BK": 32}
CONVOLUTION = {
    "PIXELS": 32, "RESULTS": 32, "SUMMANDS": 32, "ALIGNED": 64, "IN": 16, "OUT": 16, "IN_FIRST": True, "POINT": True,
    "BIAS": True, "SIDE": False, "ACTIVATION": 1, "SPLIT": False, "SIBLINGS": False, "ROOM": False, "PROLOGUE": False,
    "SCALE": 0, "SHIFT": False, "CUT": False, "EARLY": False,
}  # fmt: skip
FEW_CHANNELS = {
    "PIXELS": 64, "COLUMNS": 8, "RESULTS": 32, "SUMMANDS": 16, "UNROLLED": 1, "KERNEL_H": 3, "KERNEL_W": 3, "CHANNELS": 3,
    "DILATION_W": 1, "STEP_W": 3, "IN": 1, "OUT": 4, "IN_FIRST": False, "PADDED": True, "BIAS": True, "SIDE": False,
    "ACTIVATION": 1, "EARLY": False, "LINES": 32,
}  # fmt: skip
KERNELS = {
    "products": ("products", {**TILE, "SECOND": False, "BIAS2": False, "ADDEND": False}),
    "convolve_tile": ("convolutions", CONVOLUTION),
    "convolve_few_channels": ("few_channels", FEW_CHANNELS),
    "attention": ("attention", {"BM": 32, "BN": 32, "BD": 32, "BE": 32, "CAUSAL": False, "BIAS": True}),
}
"""Each kernel that multiplies on tensor cores: where it is, and constants to compile it with."""

FIRST_NUMBER = {"products": "M", "convolve_tile": "pixels", "convolve_few_channels": "height", "attention": "scale"}
"""The first argument that is no tensor."""


def instructions(name: str, dtype: str, precision: str) -> str:
    """What a kernel is compiled to for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, constants = KERNELS[name]
    function = getattr(import_module(f"msplit.engines.cuda.kernels.code.{module}"), name)
    constants = {**constants, "PRECISION": precision}
    signature, attrs = {}, {}
    body = function.arg_names
    tensors = body[: body.index(FIRST_NUMBER[name])]
    for number, argument in enumerate(body):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in tensors:
            signature[argument] = (
                "*i32" if argument == "counters" else "*fp32" if argument == "partial" else f"*{dtype}"
            )
            attrs[number,] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if argument == "scale" else "i32"
    known = {(body.index(key),): value for key, value in constants.items()}
    options = {"num_warps": 4, "num_stages": 3}
    made = triton.compile(
        ASTSource(function, signature, known, attrs), target=GPUTarget("cuda", 90, 32), options=options
    )
    return str(made.asm["ptx"])


@pytest.mark.needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_a_product_in_tf32_rounds_what_it_multiplies(name):
    assert ROUNDING in instructions(name, "fp32", "tf32")


@pytest.mark.needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_any_other_product_rounds_nothing(name):
    assert ROUNDING not in instructions(name, "fp16", "ieee")


@pytest.mark.needs_triton
def test_every_kernel_that_multiplies_on_tensor_cores_is_among_these():
    import msplit.engines.cuda.kernels.code as code

    found = {path.stem for path in Path(code.__file__).parent.glob("*.py") if "tl.dot(" in path.read_text("utf-8")}
    assert found == {module for module, _ in KERNELS.values()}
