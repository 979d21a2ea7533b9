import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import lies_nchw

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "int32", "int64", "uint8", "complex64"]
CASES = [
    ((3,), ((1, 2),)),
    ((3, 4), ((0, 0), (0, 0))),
    ((3, 4), ((1, 0), (2, 3))),
    ((2, 3, 4), ((0, 0), (1, 1), (0, 2))),
]
CASES += [((2, 4, 5, 3), ((0, 0), (1, 2), (2, 1), (0, 0))), ((2, 4, 5, 3), ((1, 0), (0, 0), (0, 0), (0, 1)))]
EDGES = [((0, 2), ((1, 1), (0, 0))), ((0,), ((0, 0),)), ((1, 1), ((2, 2), (0, 1)))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_pad(dtype, index):
    for shape, paddings in [*CASES, *EDGES]:
        array, widths = values(shape, dtype), np.array(paddings, index)
        check("Pad", [array, widths])
        check("PadV2", [array, widths, np.array(7, array.dtype)])


def test_pad_of_a_scalar():
    check("Pad", [values(()), np.zeros((0, 2), np.int32)])


def test_wrong_paddings_are_refused():
    for paddings in ([[1, 1]], [[-1, 0], [0, 0]]):
        with pytest.raises(Unsupported, match="paddings"):
            run_lowering("Pad", [values((3, 4)), np.array(paddings, np.int32)])


@pytest.mark.parametrize("mode", ["REFLECT", "SYMMETRIC"])
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "uint8"], ids=str)
def test_mirror_pad(mode, dtype):
    for shape, paddings in CASES[:-1]:
        check("MirrorPad", [values(shape, dtype), np.array(paddings, np.int32)], {"mode": mode}, exact=True)
    most = 2 if mode == "REFLECT" else 3
    check("MirrorPad", [values((3,), dtype), np.array([[most, most]], np.int64)], {"mode": mode})
    with pytest.raises(Unsupported, match="wider"):
        run_lowering("MirrorPad", [values((3,), dtype), np.array([[most + 1, 0]])], {"mode": mode})


@pytest.mark.parametrize("op", ["Pad", "PadV2"])
def test_images_that_lie_as_nchw_keep_their_layout(op):
    array = values((2, 3, 4, 5))
    image = torch.from_numpy(array).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    paddings = np.array([[0, 0], [1, 2], [2, 1], [0, 3]])
    constant = [torch.tensor(0.5)] if op == "PadV2" else []
    result = table()[op].function(Node("n", op), image, paddings, *constant)
    assert lies_nchw(result)
    np.testing.assert_array_equal(result.numpy(), np.pad(array, paddings, constant_values=0.5 if constant else 0))
