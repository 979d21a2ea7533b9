"""Reductions, sums and comparisons of integers of every width: TensorFlow's types, and its numbers where they wrap around.

PyTorch sums integers in int64 unless told otherwise, and has few kernels for unsigned ones.
"""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msplit.engines.cuda.ir.node import Unsupported

from .harness import check, ints, run_lowering

pytestmark = pytest.mark.tf

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
EVERY = (*SIGNED, *UNSIGNED)


def one(op, *shapes, types=EVERY, rest=(), **attrs):
    """An op of whole tensors of one type, and what it takes behind them."""
    return pytest.param(op, shapes, tuple(rest), attrs, types, id="-".join([op, *map(str, attrs.values())]))


REDUCTIONS = [
    *(one(op, (3, 4, 5), rest=[ints(0, 2)], keep_dims=True) for op in ("Sum", "Mean", "Max", "Min", "Prod")),
    *(one(op, (3, 0, 2), rest=[ints(1)]) for op in ("Sum", "Max", "Min", "Prod")),
    one("EuclideanNorm", (3, 4), rest=[ints(1)], types=(*SIGNED, "uint8")),
    *(one("ArgMax", (3, 4), rest=[np.int32(1)], output_type=to) for to in ("int16", "uint16", "int32", "int64")),
    *(one("ArgMin", (3, 4), rest=[np.int32(0)], output_type=to) for to in ("int32", "int64")),
    *(one(op, (3, 4), rest=[np.int32(1)], reverse=True) for op in ("Cumsum", "Cumprod")),
    *(one(op, (3, 4), rest=[np.int32(0)], exclusive=True) for op in ("Cumsum", "Cumprod")),
    *(one(op, (5, 3), rest=[ints(0, 0, 2, 2, 2)]) for op in ("SegmentSum", "SegmentProd")),
    one("SegmentMean", (5, 3), rest=[ints(0, 0, 2, 2, 2)], types=(*SIGNED, "uint8")),
    *(
        one(op, (5, 3), rest=[ints(0, 0, 2, 2, 2)], types=(*SIGNED, "uint8", "uint16", "uint32"))
        for op in ("SegmentMax", "SegmentMin")
    ),
    *(
        one(op, (5, 3), rest=[ints(0, 3, 2, 2, 0), np.int32(4)])
        for op in ("UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMax", "UnsortedSegmentMin")
    ),
    *(one(op, (30,), (30,)) for op in ("AddV2", "Sub", "Mul", "Maximum", "Minimum", "Less", "Equal", "NotEqual")),
    *(one(op, (30,), (30,)) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    one("SquaredDifference", (30,), (30,), types=("int32", "int64")),
    one("AddN", (30,), (30,), (30,), N=3),
    one("Square", (30,)),
    one("Relu6", (30,), types=(*SIGNED, "uint8", "uint16", "uint32")),
    *(one(op, (30,), (30,), types=(*SIGNED, "uint8", "uint16", "uint32")) for op in ("ReluGrad", "Relu6Grad")),
    one("MatMul", (3, 4), (4, 5), types=("int32", "int64")),
    one("BatchMatMulV2", (2, 3, 4), (2, 4, 5), types=("int16", "int32", "int64")),
    *(
        one("Einsum", *shapes, equation=equation, types=("int32", "int64"))
        for equation, shapes in {
            "ij,jk->ik": [(3, 4), (4, 5)],
            "ij,k->k": [(3, 4), (5,)],
            "ij,jk->": [(3, 4), (4, 5)],
            "ij->i": [(3, 4)],
            "ij->ii": [(3, 4)],
            "iij->ji": [(3, 3, 2)],
            "ii->": [(3, 3)],
            "i,->i": [(3,), ()],
            "...ij,jk->...k": [(2, 3, 4), (4, 5)],
            "...i,...i->...": [(2, 3, 4), (3, 4)],
            "b...,b...->...b": [(2, 3, 1), (2, 4)],
        }.items()
    ),
]


def drawn(generator, shape, dtype):
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


@pytest.mark.parametrize(("op", "shapes", "rest", "attrs", "types"), REDUCTIONS)
def test_integers_keep_their_type_and_wrap_around_as_in_tensorflow(op, shapes, rest, attrs, types):
    for number, dtype in enumerate(types):
        generator = np.random.default_rng([number, len(op)])
        check(op, [*(drawn(generator, shape, dtype) for shape in shapes), *rest], attrs)


@pytest.mark.parametrize("op", ["FloorDiv", "FloorMod", "TruncateDiv"])
@pytest.mark.parametrize("dtype", ["int32", "uint16", "uint32"])
def test_divided_integers(op, dtype):
    generator = np.random.default_rng(3)
    divisor = drawn(generator, (300,), dtype)
    check(op, [drawn(generator, (300,), dtype), np.where(divisor == 0, 1, divisor).astype(dtype)])


@pytest.mark.parametrize("dtype", EVERY)
def test_integers_that_only_move(dtype):
    generator = np.random.default_rng(4)
    x, other = drawn(generator, (3, 4), dtype), drawn(generator, (3, 4), dtype)
    check("GatherV2", [x, ints(2, 0), np.int32(0)])
    check("ConcatV2", [x, other, np.int32(1)])
    check("PadV2", [x, ints(1, 0, 0, 2).reshape(2, 2), other[0, 0]])
    check("Roll", [x, np.int32(1), np.int32(0)])
    check("Transpose", [x, ints(1, 0)])
    check("SelectV2", [generator.integers(0, 2, (3, 4)).astype(bool), x, other])
    check("OneHot", [ints(1, 2), np.int32(3), x[0, 0], other[0, 0]])


class OnAGpu(TorchDispatchMode):
    """PyTorch as on a GPU, where it has no kernels that choose among unsigned integers or turn them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        chooses = func.overloadpacket.__name__ in ("where", "roll", "scatter", "scatter_", "index_select")
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if chooses and any(one.dtype in (torch.uint16, torch.uint32, torch.uint64) for one in given):
            raise NotImplementedError(f"{func} not implemented for unsigned integers")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_integers_move_where_pytorch_has_no_kernel_for_them(dtype):
    generator = np.random.default_rng(4)
    x, other = drawn(generator, (3, 4), dtype), drawn(generator, (3, 4), dtype)
    chosen = generator.integers(0, 2, (3, 4)).astype(bool)
    with OnAGpu():
        check("Roll", [x, np.int32(1), np.int32(0)])
        check("Select", [chosen, x, other])
        check("SelectV2", [chosen, x, other])
        check("OneHot", [ints(1, 2), np.int32(3), x[0, 0], other[0, 0]])


@pytest.mark.parametrize("dtype", EVERY)
def test_scattered_integers_wrap_around(dtype):
    generator = np.random.default_rng(5)
    places = ints(0, 3, 3, 1).reshape(4, 1)
    check("ScatterNd", [places, drawn(generator, (4, 2), dtype), ints(5, 2)])
    for op in ("TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin"):
        check(op, [drawn(generator, (5, 2), dtype), places, drawn(generator, (4, 2), dtype)])
    check(
        "DynamicStitch",
        [ints(0, 2), ints(1, 3), drawn(generator, (2, 2), dtype), drawn(generator, (2, 2), dtype)],
        {"N": 2},
    )
    check("Bincount", [ints(1, 2, 2), np.int32(4), np.zeros((0,), "int32")])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("binary", [False, True])
def test_counts_have_the_type_of_the_weights(dtype, binary):
    weights = drawn(np.random.default_rng(6), (4,), dtype)
    for given in (weights, weights[:0]):
        check("DenseBincount", [ints(1, 2, 2, 5), np.int32(6), given], {"binary_output": binary})
    check("Bincount", [ints(1, 2, 2, 5), np.int32(6), weights])


@pytest.mark.parametrize(("op", "rest"), [("SegmentMean", [ints(0, 0, 1)]), ("EuclideanNorm", [ints(0)])])
@pytest.mark.parametrize("dtype", ["uint16", "uint64"])
def test_what_a_wider_type_would_get_wrong_is_refused(op, rest, dtype):
    with pytest.raises(Unsupported, match=f"no kernel for {dtype}"):
        run_lowering(op, [np.full((3,), np.iinfo(dtype).max, dtype), *rest])


def test_an_op_that_pytorch_lacks_stays_unimplemented():
    from msplit.engines.cuda.ir.dtypes import run_in_signed
    from msplit.engines.cuda.ir.node import Node

    with pytest.raises(NotImplementedError, match="float32"):
        run_in_signed(lambda node, x: x, Node("n", "Sum"), (torch.ones(2),))
