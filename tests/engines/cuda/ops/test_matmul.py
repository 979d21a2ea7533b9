import numpy as np
import pytest

from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.node import Unsupported

from .harness import FLOATS, check, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int32", "int64", "complex64"], ids=str)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul_transposes_either_side(dtype, transpose_a, transpose_b):
    a = values((5, 3) if transpose_a else (3, 5), dtype, seed=1)
    b = values((4, 5) if transpose_b else (5, 4), dtype, seed=2)
    check("MatMul", [a, b], {"transpose_a": transpose_a, "transpose_b": transpose_b})


@pytest.mark.parametrize("shapes", [((0, 3), (3, 4)), ((2, 0), (0, 4)), ((2, 3), (3, 0)), ((1, 1), (1, 1))], ids=str)
def test_matmul_of_empty_and_single_matrices(shapes):
    check("MatMul", [values(shape, seed=i) for i, shape in enumerate(shapes)])


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int32, np.int64])
def test_integers_wrap_around(dtype):
    top = np.iinfo(dtype).max
    a = np.array([[top, 3], [top // 2, 5]], dtype)
    check("MatMul", [a, a], expected=[a @ a])  # TensorFlow has no unsigned kernel on the CPU.


@pytest.mark.parametrize("op", ["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"])
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "complex64"], ids=str)
@pytest.mark.parametrize(("adj_x", "adj_y"), [(False, False), (True, False), (False, True), (True, True)])
def test_batch_matmul_takes_adjoints(op, dtype, adj_x, adj_y):
    x = values((2, 3, 5, 4) if adj_x else (2, 3, 4, 5), dtype, seed=1)
    y = values((2, 3, 6, 5) if adj_y else (2, 3, 5, 6), dtype, seed=2)
    attrs = {"adj_x": adj_x, "adj_y": adj_y}
    if op == "BatchMatMulV3":  # Its CPU kernels are fewer than its types.
        expected = run_tensorflow("BatchMatMulV2", [x, y], attrs)
        check(op, [x, y], attrs | {"Tout": x.dtype.name}, expected=expected)
    else:
        check(op, [x, y], attrs)


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 5), (5, 6)),
        ((3, 4, 5), (5, 6)),
        ((4, 5), (3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)),
        ((7, 1, 4, 5), (1, 3, 5, 6)),
        ((0, 4, 5), (1, 5, 6)),
        ((2, 4, 0), (2, 0, 6)),
    ],
    ids=str,
)
def test_batch_axes_broadcast(shapes):
    check("BatchMatMulV2", [values(shape, seed=i) for i, shape in enumerate(shapes)])


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [("int8", "int8", "int32"), ("uint8", "int8", "int32"), ("uint8", "bfloat16", "bfloat16")],
)
def test_batch_matmul_widens_its_result(left, right, result):
    x = np.abs(values((2, 3, 4), seed=1, low=-100, high=100)).astype(numpy_dtype(left))
    y = values((2, 4, 5), seed=2, low=-9, high=9).astype(numpy_dtype(right))
    check("BatchMatMulV3", [x, y], {"Tout": result})


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("ij,kj->ki", [(2, 3), (4, 3)]),
        ("abc,cd->abd", [(2, 3, 4), (4, 5)]),
        ("abc,cde->abde", [(2, 3, 4), (4, 5, 6)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("BNHT,BTNH->BTN", [(2, 3, 4, 5), (2, 5, 3, 4)]),
        ("...ij,...jk->...ik", [(5, 1, 2, 3), (4, 3, 6)]),
        ("i...j,jk->k...i", [(2, 5, 6, 3), (3, 4)]),
        ("...,...->...", [(2, 3), (3,)]),
        ("ij->ji", [(2, 3)]),
        ("ij->", [(2, 3)]),
        ("ij->j", [(2, 3)]),
        ("ii->", [(3, 3)]),
        ("ii->i", [(3, 3)]),
        ("...ii->...i", [(2, 3, 3)]),
        ("iij->ij", [(3, 3, 2)]),
        ("iij,j->i", [(3, 3, 2), (2,)]),
        ("i->ii", [(3,)]),
        ("i->iii", [(3,)]),
        ("ij->jiji", [(2, 3)]),
        ("ij,jk->iki", [(2, 3), (3, 4)]),
        ("i...->ii...", [(3, 2, 4)]),
        ("...i->i...i", [(2, 4, 3)]),
        ("i,j->ij", [(2,), (3,)]),
        (",->", [(), ()]),
        ("ij,jk->ik", [(0, 3), (3, 4)]),
        ("ij,jk->ik", [(2, 0), (0, 4)]),
        ("abi,abj->aij", [(2, 3, 4), (2, 3, 5)]),
    ],
)
def test_einsum_equations(equation, shapes):
    check("Einsum", [values(shape, seed=i) for i, shape in enumerate(shapes)], {"equation": equation})


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int32", "int64", "complex64"], ids=str)
def test_einsum_dtypes(dtype):
    check("Einsum", [values((2, 3, 4), dtype), values((4, 3, 5), dtype, seed=1)], {"equation": "abc,cbd->da"})


def test_einsum_without_arrow_is_refused():
    with pytest.raises(Unsupported, match="'->'"):
        run_lowering("Einsum", [values((2, 3))], {"equation": "ij"})
