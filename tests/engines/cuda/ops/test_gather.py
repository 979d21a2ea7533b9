"""Reading and writing rows at given indices, and sparse tensors, which are three dense ones."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.gather import _masked

from .harness import DEVICE, FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "int32", "int64", "bool", "uint8", "complex64"]
INDICES = [(), (5,), (2, 3), (0,), (1, 1)]


def _indices(shape, size, dtype="int32", seed=7):
    return np.random.default_rng(seed).integers(0, size, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_rows(dtype, index):
    for table_shape in [(6,), (6, 3), (6, 2, 3), (6, 0)]:
        for shape in INDICES:
            inputs = [values(table_shape, dtype), _indices(shape, 6, index)]
            check("Gather", inputs, exact=True)
            check("GatherV2", [*inputs, np.int32(0)], exact=True)


@pytest.mark.parametrize("index", ["int16", "int32", "int64"])
def test_any_axis(index):
    for axis in range(-3, 3):
        for shape in INDICES:
            array = values((4, 5, 6))
            check("GatherV2", [array, _indices(shape, array.shape[axis], index), np.int64(axis)], exact=True)


def test_batches():
    params = values((2, 3, 4, 5))
    for batch_dims, axis, shape in [
        (1, 1, (2, 7)),
        (1, 2, (2,)),
        (2, 2, (2, 3, 2, 2)),
        (2, 3, (2, 3, 4)),
        (1, 3, (2, 0)),
        (1, -1, (2, 6)),
        (2, 2, (2, 3)),
    ]:
        inputs = [params, _indices(shape, params.shape[axis]), np.int32(axis)]
        check("GatherV2", inputs, {"batch_dims": batch_dims}, exact=True)
    check("GatherV2", [params, _indices((2, 3), 4), np.int32(2)], {"batch_dims": -1}, exact=True)
    with pytest.raises(Unsupported, match="batch_dims"):
        run_lowering("GatherV2", [params, _indices((3, 2), 3), np.int32(1)], {"batch_dims": 1})


def test_variables():
    array, indices = values((6, 3)), _indices((4, 2), 6)
    expected = [array[indices]]  # the real input is a handle
    node = Node("n", "ResourceGather", {})
    result = table()["ResourceGather"].function(node, torch.from_numpy(array), torch.from_numpy(indices))
    np.testing.assert_array_equal(result.numpy(), expected[0])
    batched = table()["ResourceGather"].function(
        Node("n", "ResourceGather", {"batch_dims": 1}), torch.from_numpy(array), torch.from_numpy(_indices((6, 2), 3))
    )
    np.testing.assert_array_equal(batched.numpy(), np.take_along_axis(array, _indices((6, 2), 3), 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_coordinates(dtype, index):
    params = values((3, 4, 5), dtype)
    for depth in (0, 1, 2, 3):
        for shape in [(), (4,), (2, 3), (0,)]:
            parts = [_indices(shape, params.shape[axis], index, seed=axis) for axis in range(depth)]
            indices = np.stack(parts, -1) if parts else np.zeros((*shape, 0), index)
            check("GatherNd", [params, indices], exact=True)


def test_wrong_coordinates_may_be_ignored():
    indices = np.array([[0, 0], [2, 4], [-1, 0], [1, 3], [3, 0]], np.int32)
    check("GatherNd", [values((3, 4)), indices], {"bad_indices_policy": "IGNORE"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wrong_coordinates_keep_the_type(dtype):
    """A condition and a number make an integer of a bool."""
    indices = np.array([[0], [3], [-1], [1]], np.int32)
    check("GatherNd", [values((3, 4), dtype), indices], {"bad_indices_policy": "IGNORE"}, exact=True)


@pytest.mark.parametrize("index", [-1, 6, 100])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_index_out_of_range_is_an_error_on_the_cpu_and_gives_zeros_on_a_gpu(index, transposed):
    for op, inputs in [
        ("GatherV2", [values((6, 3)), np.array([0, index]), np.int32(0)]),
        ("GatherNd", [values((6, 3)), np.array([[0, 0], [index, 0]])]),
        ("ResourceGather", [values((6, 3), bool), np.array([0, index])]),
    ]:
        if DEVICE == "cpu":
            with pytest.raises(IndexError):
                run_lowering(op, inputs, transposed=transposed)
            continue
        found = to_numpy(run_lowering(op, inputs, transposed=transposed)[0])
        first = inputs[0][0, 0] if op == "GatherNd" else inputs[0][0]
        np.testing.assert_array_equal(found, np.stack([first, np.zeros_like(first)]), strict=True)


def test_without_triton_a_wrong_index_gives_zeros():
    array = torch.from_numpy(values((4, 3)))
    result = _masked(array, torch.tensor([0, -1, 3, 4, 2]), 0)
    assert result[[1, 3]].eq(0).all()
    torch.testing.assert_close(result[[0, 2, 4]], array[[0, 3, 2]])
    assert _masked(torch.empty(2, 0), torch.tensor([0, 1]), 1).eq(0).all()


DTYPES_SCATTER = [*FLOATS, "int32", "int64", "uint8", "complex64"]


def _coordinates(count, sizes, dtype="int32", *, distinct=False):
    """Coordinates in a tensor of the sizes, with repetitions unless they are to be distinct."""
    generator = np.random.default_rng(5)
    total = int(np.prod(sizes))
    flat = generator.permutation(total)[:count] if distinct else generator.integers(0, total, count)
    return np.stack(np.unravel_index(flat, sizes), -1).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES_SCATTER, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_scatter_adds_what_meets(dtype, index):
    for count, depth, shape in [
        (9, 1, (6,)),
        (9, 1, (6, 3)),
        (9, 2, (4, 5)),
        (9, 2, (4, 5, 3)),
        (0, 1, (6, 3)),
        (1, 1, (1,)),
    ]:
        updates = values((count, *shape[depth:]), dtype, low=-9, high=9)
        check("ScatterNd", [_coordinates(count, shape[:depth], index), updates, np.array(shape, index)])


def test_scatter_of_flags():
    check("ScatterNd", [np.array([[1], [3]], np.int32), np.array([True, False]), np.array([5], np.int32)])


@pytest.mark.parametrize("op", ["TensorScatterAdd", "TensorScatterSub", "ScatterNdNonAliasingAdd"])
@pytest.mark.parametrize("dtype", DTYPES_SCATTER, ids=str)
def test_additions(op, dtype):
    for count, depth, shape in [(9, 1, (6,)), (9, 1, (6, 3)), (9, 2, (4, 5, 3)), (0, 1, (6, 3))]:
        updates = values((count, *shape[depth:]), dtype, seed=1)
        check(op, [values(shape, dtype), _coordinates(count, shape[:depth]), updates])


@pytest.mark.parametrize("op", ["TensorScatterMax", "TensorScatterMin"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64"])
def test_extremes(op, dtype):
    for count, depth, shape in [(9, 1, (6,)), (9, 1, (6, 3)), (9, 2, (4, 5, 3))]:
        updates = values((count, *shape[depth:]), dtype, seed=1, low=-9, high=9)
        check(op, [values(shape, dtype, low=-9, high=9), _coordinates(count, shape[:depth]), updates])


@pytest.mark.parametrize("dtype", [*DTYPES_SCATTER, "bool"], ids=str)
def test_updates(dtype):
    for count, depth, shape in [(4, 1, (6,)), (4, 1, (6, 3)), (9, 2, (4, 5, 3)), (0, 1, (6, 3))]:
        updates = values((count, *shape[depth:]), dtype, seed=1)
        check("TensorScatterUpdate", [values(shape, dtype), _coordinates(count, shape[:depth], distinct=True), updates])


def test_wrong_coordinates_are_passed_over():
    indices = np.array([[0, 0], [1, 3], [-1, 0], [1, 4], [2, 0]], np.int32)
    updates = values((5,), seed=1)
    inside = indices[:2]
    array = values((2, 4))
    for op, inputs in [
        ("ScatterNd", lambda rows, new: [rows, new, np.array([2, 4], np.int32)]),
        ("TensorScatterUpdate", lambda rows, new: [array, rows, new]),
        ("TensorScatterAdd", lambda rows, new: [array, rows, new]),
        ("TensorScatterMax", lambda rows, new: [array, rows, new]),
    ]:
        (result,) = run_lowering(op, inputs(indices, updates))
        check(op, inputs(inside, updates[:2]), expected=[to_numpy(result)])


def _i(numbers, dtype="int64"):
    return np.array(numbers, dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "bool"], ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_dense_from_sparse(dtype, index):
    default = values((), dtype, seed=3, low=2, high=4)
    check("SparseToDense", [_i([[0, 1], [1, 3], [2, 0]], index), _i([3, 4], index), values((3,), dtype), default])
    check("SparseToDense", [_i([[0, 1], [1, 3]], index), _i([3, 4], index), values((), dtype), default])
    check("SparseToDense", [_i([1, 3], index), _i([5], index), values((2,), dtype), default])
    check("SparseToDense", [_i(3, index), _i([5], index), values((), dtype), default])
    check("SparseToDense", [np.zeros((0, 2), index), _i([2, 3], index), values((0,), dtype), default])


@pytest.mark.parametrize(
    ("shape", "new"),
    [((4, 6), (3, 8)), ((4, 6), (-1,)), ((4, 6), (2, -1, 3)), ((24,), (4, -1)), ((2, 3, 4), (6, 4)), ((4, 6), (24, 1))],
)
def test_reshape(shape, new):
    flat = np.array([0, 5, 9, 17, 23])
    indices = np.stack(np.unravel_index(flat, shape), -1).astype(np.int64)
    check("SparseReshape", [indices, _i(shape), _i(new)])
    check("SparseReshape", [indices[:0], _i(shape), _i(new)])


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_empty_rows_are_filled(dtype):
    default = values((), dtype, seed=3)
    for indices, shape in [
        ([[0, 1], [2, 0], [2, 3]], [5, 4]),
        ([[0, 0], [1, 0]], [2, 1]),
        ([[3, 2], [1, 0], [3, 0]], [4, 4]),
        ([[4, 1]], [5, 4]),
    ]:
        rows = len(indices)
        check("SparseFillEmptyRows", [_i(indices), values((rows,), dtype), _i(shape), default])
    check("SparseFillEmptyRows", [np.zeros((0, 2), np.int64), values((0,), dtype), _i([3, 4]), default])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_the_gradient_of_filled_rows(dtype):
    for places, size in [([0, 2, 3], 5), ([1], 2), ([0, 1, 2], 3), ([], 4)]:
        check("SparseFillEmptyRowsGrad", [np.array(places, np.int64), values((size,), dtype)])


@pytest.mark.parametrize("place", [-1, 3])
def test_places_outside_of_the_gradient_are_refused_on_the_cpu_and_give_zeros_on_a_gpu(place):
    grad = values((3,))
    if DEVICE == "cpu":
        with pytest.raises(IndexError):
            run_lowering("SparseFillEmptyRowsGrad", [_i([0, place]), grad])
        return
    given, default = map(to_numpy, run_lowering("SparseFillEmptyRowsGrad", [_i([0, place]), grad]))
    np.testing.assert_array_equal(given, [grad[0], 0])
    np.testing.assert_allclose(default, grad[1:].sum(), rtol=1e-6)


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_outside_of_the_shape_are_refused(row):
    with pytest.raises(IndexError, match="outside of the 3 rows"):
        run_lowering("SparseFillEmptyRows", [_i([[row, 0]]), values((1,)), _i([3, 4]), np.float32(0)])


@pytest.mark.parametrize("adjoint_a", [False, True])
@pytest.mark.parametrize("adjoint_b", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_product_with_a_dense_matrix(adjoint_a, adjoint_b, dtype):
    indices = _i([[0, 1], [0, 3], [2, 0], [2, 1], [2, 1]])
    inner = 3 if adjoint_a else 4
    dense = values((5, inner) if adjoint_b else (inner, 5), dtype, seed=1)
    attrs = {"adjoint_a": adjoint_a, "adjoint_b": adjoint_b}
    check("SparseTensorDenseMatMul", [indices, values((5,), dtype), _i([3, 4]), dense], attrs)
    check("SparseTensorDenseMatMul", [indices[:0], values((0,), dtype), _i([3, 4]), dense], attrs)


def test_indices_outside_are_passed_over():
    indices = _i([[0, 1], [1, 9], [-1, 0]])
    (result,) = run_lowering("SparseToDense", [indices, _i([2, 3]), values((3,)), np.float32(0)])
    assert result.count_nonzero() == 1


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("op", ["TensorScatterMax", "TensorScatterMin"])
def test_a_scattered_extreme_passes_over_nan(op, dtype):
    tensor = np.array([[1.0], [np.nan], [3.0], [-np.inf], [np.inf]], dtype).repeat(9, 1)
    updates = np.array([[np.nan], [2.0], [5.0], [np.nan], [np.nan], [np.inf], [-np.inf]], dtype).repeat(9, 1)
    (result,) = check(op, [tensor, np.array([[0], [1], [2], [2], [3], [4], [4]], np.int32), updates])
    assert result[:, 0].isnan().tolist() == [False, True, False, False, False]
