import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported

from .harness import FLOATS, check, run_lowering, run_tensorflow, run_tensorflow_nchw, values

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("op", ["BiasAdd", "BiasAddV1"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int32", "int64", "uint8", "complex64"], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (1, 1), (2, 3, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)], ids=str)
def test_bias_add(op, dtype, shape):
    check(op, [values(shape, dtype), values(shape[-1:], dtype, seed=1)])


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3), (2, 4, 3, 5), (2, 4, 2, 3, 5)], ids=str)
def test_bias_add_with_channels_in_front(shape):
    check("BiasAdd", [values(shape), values((4,), seed=1)], {"data_format": "NCHW"})


def inputs(shape, dtype="float32", axis=-1):
    channels = (shape[axis],)
    return [
        values(shape, dtype),
        values(channels, seed=1, low=0.5),
        values(channels, seed=2),
        values(channels, seed=3),
        values(channels, seed=4, low=0.5),
    ]


def compared(is_training):
    """The outputs to compare: the reserves hold nothing of meaning in inference, and differ between kernels."""
    return range(5 if is_training else 3)


OPS = ["FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_training", [False, True])
def test_batch_norm(op, dtype, is_training):
    if op == "FusedBatchNorm":  # It is for float32 only.
        dtype = np.float32
    arrays = inputs((2, 3, 4, 5), dtype)
    check(op, arrays, {"is_training": is_training, "epsilon": 0.001}, outputs=compared(is_training))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("is_training", [False, True])
def test_batch_norm_with_channels_in_front(op, is_training):
    arrays = inputs((2, 5, 3, 4), axis=1)
    attrs = {"is_training": is_training, "data_format": "NCHW"}
    check(op, arrays, attrs, expected=run_tensorflow_nchw(op, arrays, attrs), outputs=compared(is_training))


@pytest.mark.parametrize("factor", [0.25, 1.0])
def test_batch_norm_mixes_the_statistics(factor):
    attrs = {"is_training": True, "exponential_avg_factor": factor}
    check("FusedBatchNormV3", inputs((2, 3, 4, 5)), attrs, outputs=range(5))


def test_batch_norm_over_five_axes():
    arrays = inputs((2, 3, 4, 2, 5))
    for is_training in (False, True):
        outputs = compared(is_training)
        check("FusedBatchNormV3", arrays, {"is_training": is_training, "data_format": "NDHWC"}, outputs=outputs)
        expected = run_tensorflow("FusedBatchNormV3", arrays, {"is_training": is_training, "data_format": "NDHWC"})
        turned = [np.moveaxis(arrays[0], -1, 1), *arrays[1:]]
        expected = (np.moveaxis(expected[0], -1, 1), *expected[1:])
        attrs = {"is_training": is_training, "data_format": "NCDHW"}
        check("FusedBatchNormV3", turned, attrs, expected=expected, outputs=outputs)


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (1, 2, 2, 1), (0, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("is_training", [False, True])
def test_batch_norm_of_little_data(shape, is_training):
    check("FusedBatchNormV3", inputs(shape), {"is_training": is_training}, outputs=range(3), atol=1e-4)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("mode", ["Identity", "Relu"])
@pytest.mark.parametrize("is_training", [False, True])
def test_batch_norm_with_side_input_and_activation(side, mode, is_training):
    arrays = inputs((2, 3, 4, 5))
    other = values((2, 3, 4, 5), seed=9)
    y, *rest = run_tensorflow("FusedBatchNormV3", arrays, {"is_training": is_training})
    y = y + other if side else y
    y = np.maximum(y, 0) if mode == "Relu" else y
    # TensorFlow has this kernel on the GPU only.
    attrs = {"is_training": is_training, "activation_mode": mode, "num_side_inputs": side}
    check("_FusedBatchNormEx", arrays + [other] * side, attrs, expected=(y, *rest), outputs=compared(is_training))


def test_unknown_activation_of_batch_norm_is_refused():
    with pytest.raises(Unsupported, match="Swish"):
        run_lowering("_FusedBatchNormEx", inputs((1, 2, 2, 3)), {"activation_mode": "Swish", "is_training": False})


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"depth_radius": 0},
        {"depth_radius": 2, "bias": 2.0, "alpha": 1e-4, "beta": 0.75},
        {"depth_radius": 9, "alpha": 0.1, "beta": -0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(2, 3, 4, 7), (1, 1, 1, 1), (0, 2, 2, 3)], ids=str)
def test_local_response_normalization(attrs, dtype, shape):
    check("LRN", [values(shape, dtype)], attrs)


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4, 5)], ids=str)
def test_l2_loss(dtype, shape):
    check("L2Loss", [values(shape, dtype)])
