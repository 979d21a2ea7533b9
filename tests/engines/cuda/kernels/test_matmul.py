"""The kernels of merged products and lookups against PyTorch's. They need a GPU, or Triton's interpreter: TRITON_INTERPRET=1."""

import os

import pytest
import torch

from msplit.engines.cuda.ir.windows import to_tf32
from msplit.engines.cuda.kernels.activations import activate

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def normal(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def kernel():
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return pytest.importorskip("msplit.engines.cuda.kernels.matmul")


def products(layer, tile, *, tf32=False, **work):
    found = kernel()
    return found.products(found.Gemm(layer, **work), tile, tf32=tf32)


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
    if INTERPRETED:  # which takes four seconds for seven more
        members = min(members, 3)
    x, weights, bias = normal(members, rows, inner), normal(members, inner, columns), normal(members, columns)
    for tile in found.tiles(rows)[:2]:
        result = products(found.Layer(x, weights, bias), tile, activation=activation)
        torch.testing.assert_close(result, expected(x, weights, bias, activation), rtol=1e-4, atol=1e-4)
        turned = products(found.Layer(x, weights, bias), tile, activation=activation, rows_first=True)
        assert turned.permute(1, 0, 2).is_contiguous()
        torch.testing.assert_close(turned, result, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_shared_rows_wide_weights_turned_weights_and_a_shared_bias(rows):
    found = kernel()
    x = normal(rows, 24).expand(4, -1, -1)
    tile = found.tiles(rows)[0]
    wide = normal(24, 4, 40).permute(1, 0, 2)
    torch.testing.assert_close(products(found.Layer(x, wide), tile), expected(x, wide, None), rtol=1e-4, atol=1e-4)
    turned, bias = normal(4, 40, 24).mT, normal(1, 40)
    result = products(found.Layer(x, turned, bias), tile, activation="Relu")
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
    result = products(
        found.Layer(x, weights),
        found.tiles(rows)[0],
        second=found.Layer(x2, weights2, bias2),
        first=first,
        addend=before,
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
    result = products(found.Layer(x, weights, bias), found.tiles(rows)[0], activation=activation)
    torch.testing.assert_close(result, expected(x, weights, bias, activation), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert result[0, 0].isnan().all()


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("columns", [4, 40])
def test_results_that_are_rounded_where_they_are_stored(rows, columns):
    """In all kinds of tiles, what is no number too; half precision is nothing to round."""
    found = kernel()
    x, weights, bias = normal(2, rows, 16), normal(2, 16, columns), normal(2, columns)
    bias[1, 2], bias[1, 3] = torch.inf, torch.nan
    tile = next(found.candidates(2, rows, 16, columns))
    for dtype in (torch.float32, torch.float16):
        part = found.Layer(*(value.to(dtype) for value in (x, weights, bias)))
        plain, rounded = (products(part, tile, rounds=rounds) for rounds in (False, True))
        wanted = to_tf32(plain) if dtype == torch.float32 else plain
        torch.testing.assert_close(rounded, wanted, rtol=0, atol=0, equal_nan=True)
        assert dtype != torch.float32 or not torch.equal(plain.nan_to_num(), rounded.nan_to_num())


SPLIT = [(1, 32, 64, 4), (16, 32, 64, 2), (32, 32, 64, 4), (64, 32, 64, 4)]


@pytest.mark.parametrize("tile", SPLIT)
@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("turned", [False, True])
def test_blocks_that_share_a_tile_s_summands(tile, parts, turned):
    found = kernel()
    rows = 1 if tile[0] == 1 else 70
    x, bias = normal(2, rows, 450), normal(2, 50)
    weights = normal(2, 50, 450).mT if turned else normal(2, 450, 50)
    tile = found.Tile(*tile, parts=parts)
    wanted = expected(x, weights, bias, "Relu")
    once = products(found.Layer(x, weights, bias), tile, activation="Relu")
    torch.testing.assert_close(once, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(products(found.Layer(x, weights, bias), tile, activation="Relu"), once)


@pytest.mark.parametrize("columns", [1, 2, 7, 8])
@pytest.mark.parametrize(("members", "rows", "inner"), [(1, 1, 5), (1, 128, 640), (3, 37, 33), (1, 900, 1500)])
@pytest.mark.parametrize("activation", ["", "Sigmoid"])
def test_few_columns_in_float32(columns, members, rows, inner, activation):
    found = kernel()
    (tile,) = found.candidates(members, rows, inner, columns, split=False)
    assert tile.exact
    rows = min(rows, 19) if INTERPRETED else rows  # the interpreter takes 20 ms a block
    x, weights, bias = normal(members, rows, inner), normal(members, inner, columns), normal(members, columns)
    result = products(found.Layer(x, weights, bias), tile, activation=activation, tf32=True)
    torch.testing.assert_close(result, expected(x, weights, bias, activation), rtol=1e-5, atol=1e-4)
    across = products(found.Layer(x.mT.contiguous().mT, weights), tile)
    torch.testing.assert_close(across, expected(x, weights, None), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 40])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(rows, columns, dtype):
    found = kernel()
    if INTERPRETED and dtype == torch.bfloat16 and rows > 1 and columns > 1:
        pytest.skip("the interpreter has no products of bfloat16")
    x, weights, bias = (
        normal(1, rows, 300, dtype=dtype),
        normal(1, 300, columns, dtype=dtype),
        normal(1, columns, dtype=dtype),
    )
    for tile in list(found.candidates(1, rows, 300, columns))[:3]:
        result = products(found.Layer(x, weights, bias), tile, activation="Relu")
        torch.testing.assert_close(result, expected(x, weights, bias, "Relu"), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", ["GeluApproximate", "GeluExact", "Swish"])
def test_gelu_and_swish(activation):
    found = kernel()
    x = torch.cat([torch.linspace(-12, 12, 511), torch.tensor([torch.nan])]).reshape(1, 1, -1).mT.to(DEVICE)
    one = torch.ones(1, 1, 1, device=DEVICE)
    tile = found.Tile(16, 1, 32, 1)
    result = products(found.Layer(x, one), tile, activation=activation)
    torch.testing.assert_close(result, activate(activation)(x), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("steps", [(), ("Relu",), ("BiasAdd",), ("BiasAdd", "Sigmoid")])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_op_with_a_tile_is_the_op_without(rows, steps, transposed):
    from msplit.engines.cuda.autotune.batched_matmul import TILE
    from msplit.engines.cuda.ir.lowering import table
    from msplit.engines.cuda.ir.node import Node

    found = kernel()
    a = normal(120, rows) if transposed else normal(rows, 120)
    b = normal(40, 120) if transposed else normal(120, 40)
    rest = [normal(40)] if "BiasAdd" in steps else []
    attrs = {"transpose_a": transposed, "transpose_b": transposed, "fused_ops": steps}
    op = table()["_FusedMatMul" if steps else "MatMul"]
    wanted = op.function(Node("n", op.op, attrs), a, b, *rest)
    for tile in list(found.candidates(1, rows, 120, 40))[:2]:
        result = op.function(Node("n", op.op, {**attrs, TILE: tile}), a, b, *rest)
        assert result.shape == wanted.shape
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 128, 1024])
@pytest.mark.parametrize(("members", "inner", "columns"), [(1, 512, 512), (8, 512, 64), (1, 40, 9), (1, 4096, 100)])
def test_few_candidates_that_fill_the_gpu(rows, members, inner, columns):
    found = kernel()
    made = list(found.candidates(members, rows, inner, columns))
    assert 1 <= len({(tile.rows, tile.columns, tile.inner) for tile in made}) <= 5
    for tile in made:
        blocks = members * -(-rows // tile.rows) * -(-columns // tile.columns)
        assert tile.parts == 1 or blocks * tile.parts <= found.MOST_BLOCKS
        assert inner >= tile.parts * tile.inner or tile.parts == 1
    assert all(tile.parts == 1 for tile in found.candidates(members, rows, inner, columns, split=False))


def test_tf32_only_where_it_is_allowed():
    found = kernel()
    x, weights = normal(2, 64, 512), normal(2, 512, 64)
    tile = found.tiles(64)[0]
    exact = torch.matmul(x.double(), weights.double())
    ieee = (products(found.Layer(x, weights), tile).double() - exact).abs().max()
    tf32 = (products(found.Layer(x, weights), tile, tf32=True).double() - exact).abs().max()
    assert ieee < 1e-3
    assert INTERPRETED or tf32 > 4 * ieee


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_lookups_in_tables_of_unequal_length_give_zeros_outside_of_their_own_table(dtype, index):
    kernel()
    from msplit.engines.cuda.kernels.memory import grouped_gather

    lengths = [3, 1, 40]
    tables = [(normal(length, 5) * 10).to(dtype) for length in lengths]
    starts = torch.tensor([0, 3, 4], device=DEVICE)
    sizes = torch.tensor(lengths, device=DEVICE)
    ids = torch.tensor([[0, 2, 3, -1], [0, 1, 0, 5], [39, 40, 7, -40]], dtype=index, device=DEVICE)
    result = grouped_gather(torch.cat(tables), ids, starts, sizes)
    for member, table in enumerate(tables):
        for place, row in enumerate(ids[member].tolist()):
            wanted = table[row] if 0 <= row < len(table) else torch.zeros_like(table[0])
            assert torch.equal(result[member, place], wanted)
