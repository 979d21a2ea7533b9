"""Products of our own kernels in TF32: numbers are rounded to it, and not cut off. What Triton makes for a GPU is looked at on a CPU;
`tests/gpu/test_tf32.py` looks at the numbers."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from msplit.engines.cuda.ir.windows import to_tf32

ROUNDING = "cvt.rna.tf32.f32"
LIFTING = re.compile(r"mul\.f32\s.*0f3F800B1[67]")
"""The instructions."""

TILE = {"BM": 32, "BD": 32, "BK": 32}
CONVOLUTION = {
    "PIXELS": 32, "RESULTS": 32, "SUMMANDS": 32, "ALIGNED": 64, "IN": 16, "OUT": 16, "IN_FIRST": True, "POINT": True,
    "BIAS": True, "SIDE": False, "ACTIVATION": 1, "ROUNDED": False, "SPLIT": False, "SIBLINGS": False, "ROOM": False,
    "PROLOGUE": False,
    "SCALE": 0, "SHIFT": False, "CUT": False, "EARLY": False,
}  # fmt: skip
FEW_CHANNELS = {
    "PIXELS": 64, "COLUMNS": 8, "RESULTS": 32, "SUMMANDS": 16, "UNROLLED": 1, "KERNEL_H": 3, "KERNEL_W": 3, "CHANNELS": 3,
    "DILATION_W": 1, "STEP_W": 3, "IN": 1, "OUT": 4, "IN_FIRST": False, "PADDED": True, "BIAS": True, "SIDE": False,
    "ACTIVATION": 1, "EARLY": False, "LINES": 32,
}  # fmt: skip
KERNELS = {
    "products": (
        "products",
        {**TILE, "SECOND": False, "BIAS2": False, "ADDEND": False, "ROUNDED_DATA": False, "ROUNDED_WEIGHTS": False},
    ),
    "convolve_tile": ("convolutions", CONVOLUTION),
    "convolve_few_channels": ("convolutions", FEW_CHANNELS),
    "attention": (
        "products",
        {"BM": 32, "BN": 32, "BD": 32, "BE": 32, "CAUSAL": False, "BIAS": True, "ROUNDED": False},
    ),
}
"""Each kernel that multiplies on tensor cores: where it is, and constants to compile it with."""

FIRST_NUMBER = {"products": "M", "convolve_tile": "pixels", "convolve_few_channels": "height", "attention": "scale"}
"""The first argument that is no tensor."""


def instructions(name: str, dtype: str, precision: str, **more: object) -> str:
    """What a kernel is compiled to for compute capability 9.0, with other constants where some are given."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, constants = KERNELS[name]
    function = getattr(import_module(f"msplit.engines.cuda.kernels.code.{module}"), name)
    constants = {**constants, "PRECISION": precision, **more}
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
    found = instructions(name, "fp32", "tf32")
    assert ROUNDING in found or LIFTING.search(found)


@pytest.mark.needs_triton
@pytest.mark.parametrize("name", KERNELS)
def test_any_other_product_rounds_nothing(name):
    found = instructions(name, "fp16", "ieee")
    assert ROUNDING not in found
    assert not LIFTING.search(found)


@pytest.mark.needs_triton
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("convolve_tile", {"ROUNDED": True, "PIXELS": 64}),
        ("products", {"ROUNDED_DATA": True, "ROUNDED_WEIGHTS": True, "BM": 64}),
    ],
)
def test_data_that_are_rounded_go_to_the_tensor_cores_as_they_are(name, more):
    """Where they lie: a product of 64 rows reads them from shared memory, without a register between."""
    found = instructions(name, "fp32", "tf32", **more)
    assert not LIFTING.search(found)
    assert "wgmma" in found
    assert "ldmatrix" not in found


@pytest.mark.needs_triton
def test_weights_that_are_rounded_are_not_rounded_again():
    assert ROUNDING in instructions("products", "fp32", "tf32")
    found = instructions("products", "fp32", "tf32", ROUNDED_WEIGHTS=True)
    assert ROUNDING not in found
    assert LIFTING.search(found), "the data are"


@pytest.mark.needs_triton
@pytest.mark.parametrize("rows", [32, 64])
def test_attention_rounds_only_weights_where_the_rest_is_rounded(rows):
    """They are in registers anyhow: it is keys and values that would have to go there and back."""
    tile = {"BM": rows, "BN": 64, "BD": 64, "BE": 64}
    all_of_it, weights = (
        instructions("attention", "fp32", "tf32", **tile, ROUNDED=rounded).count(ROUNDING) for rounded in (False, True)
    )
    assert 0 < weights < all_of_it / 2


@pytest.mark.needs_triton
def test_every_kernel_that_multiplies_on_tensor_cores_is_among_these():
    import msplit.engines.cuda.kernels.code as code

    found = {path.stem for path in Path(code.__file__).parent.glob("*.py") if "tl.dot(" in path.read_text("utf-8")}
    assert found == {module for module, _ in KERNELS.values()}


@pytest.mark.needs_triton
def test_what_is_lifted_and_cut_off_is_right_on_average():
    from msplit.engines.cuda.kernels.code.products import _LIFT

    numbers = 2 ** torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    last_bit = 2.0**-10

    def cut(value):
        return (value.view(torch.int32) & -0x2000).view(torch.float32)

    errors = (cut(numbers * _LIFT.value) - numbers).double() / last_bit
    assert errors.mean().abs() < 0.002
    assert errors.abs().max() < 0.7
    assert errors.square().mean().sqrt() < 1.1 * (to_tf32(numbers) - numbers).double().square().mean().sqrt() / last_bit
    assert torch.equal(cut(cut(numbers) * _LIFT.value), cut(numbers)), "what TF32 holds stays"
    beyond = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    assert torch.equal((beyond * _LIFT.value).nan_to_num(1.0), beyond.nan_to_num(1.0))
