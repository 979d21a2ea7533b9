"""The kernels of merged products and lookups against PyTorch's. They need a GPU, or Triton's interpreter: TRITON_INTERPRET=1."""

import os

import pytest
import torch

from msplit.engines.cuda.ops.activation import activate

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def normal(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def kernel():
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return pytest.importorskip("msplit.engines.cuda.batched_kernel")


def expected(x, weights, bias, activation=""):
    result = torch.matmul(x.double(), weights.double())
    if bias is not None:
        result = result + bias.double().unsqueeze(1)
    return (activate(activation)(result) if activation else result).to(x.dtype)


@pytest.mark.parametrize("rows", [1, 3, 16, 20, 70])
@pytest.mark.parametrize(("members", "inner", "columns"), [(1, 16, 8), (3, 37, 50), (10, 256, 130)])
@pytest.mark.parametrize("activation", ["", "Relu", "Relu6", "Sigmoid", "Tanh"])
def test_products_with_bias_and_activation(rows, members, inner, columns, activation):
    found = kernel()
    if INTERPRETED and activation == "Tanh":
        pytest.skip("the interpreter has no tanh")
    x, weights, bias = normal(members, rows, inner), normal(members, inner, columns), normal(members, columns)
    for tile in found.tiles(rows)[:2]:
        result = found.products(found.Part(x, weights, bias), tile, activation=activation)
        torch.testing.assert_close(result, expected(x, weights, bias, activation), rtol=1e-4, atol=1e-4)
        turned = found.products(found.Part(x, weights, bias), tile, activation=activation, rows_first=True)
        assert turned.permute(1, 0, 2).is_contiguous()
        torch.testing.assert_close(turned, result, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_shared_rows_wide_weights_turned_weights_and_a_shared_bias(rows):
    found = kernel()
    x = normal(rows, 24).expand(4, -1, -1)
    tile = found.tiles(rows)[0]
    wide = normal(24, 4, 40).permute(1, 0, 2)
    torch.testing.assert_close(found.products(found.Part(x, wide), tile), expected(x, wide, None), rtol=1e-4, atol=1e-4)
    turned, bias = normal(4, 40, 24).mT, normal(1, 40)
    result = found.products(found.Part(x, turned, bias), tile, activation="Relu")
    torch.testing.assert_close(result, expected(x, turned, bias, "Relu"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_second_product_is_added_for_the_members_from_one_on(rows, first):
    found = kernel()
    members, columns = 5, 48
    x, weights = normal(members, rows, 32), normal(members, 32, columns)
    rest = members - first
    x2, weights2, bias2 = normal(rest, rows, 20), normal(rest, 20, columns), normal(rest, columns)
    before = normal(first, rows, columns) if first else None
    result = found.products(
        found.Part(x, weights), found.tiles(rows)[0], second=found.Part(x2, weights2, bias2), first=first, addend=before
    )
    second = expected(x2, weights2, bias2)
    wanted = expected(x, weights, None) + (second if before is None else torch.cat([before, second]))
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["", "Relu", "Relu6", "Sigmoid"])
@pytest.mark.parametrize("rows", [1, 4])
def test_nan_and_infinity(activation, rows):
    found = kernel()
    x, weights, bias = normal(2, rows, 16), normal(2, 16, 32), normal(2, 32)
    x[0, 0, 3], bias[1, 5], bias[1, 6] = torch.nan, torch.inf, -torch.inf
    result = found.products(found.Part(x, weights, bias), found.tiles(rows)[0], activation=activation)
    torch.testing.assert_close(result, expected(x, weights, bias, activation), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert result[0, 0].isnan().all()


def test_tf32_only_where_it_is_allowed():
    found = kernel()
    x, weights = normal(2, 64, 512), normal(2, 512, 64)
    tile = found.tiles(64)[0]
    exact = torch.matmul(x.double(), weights.double())
    ieee = (found.products(found.Part(x, weights), tile).double() - exact).abs().max()
    tf32 = (found.products(found.Part(x, weights), tile, tf32=True).double() - exact).abs().max()
    assert ieee < 1e-3
    assert INTERPRETED or tf32 > 4 * ieee


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_lookups_in_tables_of_unequal_length_give_zeros_outside_of_their_own_table(dtype, index):
    kernel()
    from msplit.engines.cuda.tables_kernel import lookup

    lengths = [3, 1, 40]
    tables = [(normal(length, 5) * 10).to(dtype) for length in lengths]
    starts = torch.tensor([0, 3, 4], device=DEVICE)
    sizes = torch.tensor(lengths, device=DEVICE)
    ids = torch.tensor([[0, 2, 3, -1], [0, 1, 0, 5], [39, 40, 7, -40]], dtype=index, device=DEVICE)
    result = lookup(torch.cat(tables), ids, starts, sizes)
    for member, table in enumerate(tables):
        for place, row in enumerate(ids[member].tolist()):
            wanted = table[row] if 0 <= row < len(table) else torch.zeros_like(table[0])
            assert torch.equal(result[member, place], wanted)
