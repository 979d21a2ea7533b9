"""The kernel of attention against PyTorch's. It needs a GPU, or Triton's interpreter: TRITON_INTERPRET=1."""

import os

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from msplit.engines.cuda.ir.windows import to_tf32

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def kernel():
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    pytest.importorskip("triton")
    return pytest.importorskip("msplit.engines.cuda.kernels.matmul")


def normal(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def expected(query, key, value, bias, causal):
    with sdpa_kernel(SDPBackend.MATH):
        tensors = [one.double() for one in (query, key, value)]
        added = None if bias is None else bias.double()
        return scaled_dot_product_attention(*tensors, added, is_causal=causal, scale=0.3)


@pytest.mark.parametrize(("rows", "columns", "inner", "depth"), [(1, 40, 16, 16), (70, 70, 24, 40), (130, 33, 64, 5)])
@pytest.mark.parametrize("masked", ["", "causal", "row", "table", "minus infinity"])
def test_attention(rows, columns, inner, depth, masked):
    found = kernel()
    query, key, value = (
        normal(2, size, 3, width).transpose(1, 2) for size, width in ((rows, inner), (columns, inner), (columns, depth))
    )
    if masked == "causal" and rows > columns:
        pytest.skip("a causal mask is square")
    bias = {"row": normal(2, 1, 1, columns), "table": normal(3, rows, columns)}.get(masked)
    if masked == "minus infinity":  # of the first keys, all of a block of the kernel
        bias = torch.zeros(2, 1, 1, columns, device=DEVICE)
        bias[..., : columns - 5] = -torch.inf
    wanted = expected(query, key, value, bias, masked == "causal")
    for name in found.names(rows):
        result = found.attention(
            query, key, value, bias, found.ATTENTION_TILES[name], scale=0.3, causal=masked == "causal"
        )
        assert result.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_result_for_products_is_rounded_where_it_is_stored():
    found = kernel()
    query, key, value = (to_tf32(normal(2, 2, 40, 16)) for _ in range(3))
    for name in found.names(40):
        how = {"scale": 0.3, "tf32": True}
        plain = found.attention(query, key, value, None, found.ATTENTION_TILES[name], **how)
        for rounded in (False, True):  # to round once more what is rounded changes nothing
            made = found.attention(
                query, key, value, None, found.ATTENTION_TILES[name], **how, rounded=rounded, rounds=True
            )
            torch.testing.assert_close(made, to_tf32(plain), rtol=0, atol=0)


def test_a_row_in_which_nothing_counts():
    """With what is added to it the weights are all the same."""
    found = kernel()
    query, key, value = (normal(1, 2, 20, 16) for _ in range(3))
    bias = torch.full((1, 1, 1, 20), -(2.0**100), device=DEVICE)
    result = found.attention(query, key, value, bias, next(iter(found.ATTENTION_TILES.values())), scale=1.0)
    torch.testing.assert_close(result, value.mean(2, keepdim=True).expand_as(value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    found = kernel()
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16")
    query, key, value = (normal(2, 2, 50, 32, dtype=dtype) for _ in range(3))
    bias = normal(2, 1, 1, 50, dtype=dtype)
    wanted = expected(query, key, value, bias, False)
    for name in found.names(50):
        result = found.attention(query, key, value, bias, found.ATTENTION_TILES[name], scale=0.3)
        torch.testing.assert_close(result.double(), wanted, rtol=2e-2, atol=2e-2)


def test_work_for_few_queries_is_not_cut_for_many():
    found = kernel()
    assert all(found.ATTENTION_TILES[name].rows == 16 for name in found.names(1))
    assert {found.ATTENTION_TILES[name].rows for name in found.names(128)} == {32, 64, 128}
