"""Activation functions, their gradients, softmax with its losses, bias and normalization."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.node import Unsupported
from msplit.engines.cuda.kernels.activations import activate

from .harness import FLOATS, check, check_both_formats, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

SHAPES = [(), (0,), (1,), (3, 4), (2, 3, 4)]
UNARY = ["Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Softplus", "Softsign"]
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 6.0, 7.0, 30.0, -30.0, 1e-6, -1e-6])


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_activations(op, dtype):
    for shape in SHAPES:
        check(op, [values(shape, dtype, low=-9, high=9)])


@pytest.mark.parametrize("op", UNARY)
def test_activations_of_special_values(op):
    special = SPECIAL.astype(np.float32)
    if op == "Softsign":  # inf / inf
        special = special[~np.isinf(special)]
    check(op, [special])


@pytest.mark.parametrize("op", ["Relu", "Relu6"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_relu_integers(op, dtype):
    check(op, [values((3, 4), dtype, low=-9, high=9)])


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_relu_of_unsigned_words_changes_nothing(dtype):
    check("Relu", [values((3, 4), dtype, high=99)])
    try:
        check("Relu6", [values((3, 4), dtype, high=99)])
    except Unsupported as refused:  # by PyTorch before 2.15
        assert dtype == "uint64" and dtype in str(refused)  # noqa: PT017, PT018


@pytest.mark.parametrize("alpha", [0.0, 0.01, 1.0, 1.5])
def test_leaky_relu_slope(alpha):
    check("LeakyRelu", [values((3, 4))], {"alpha": alpha})
    check("LeakyReluGrad", [values((3, 4)), values((3, 4), seed=1)], {"alpha": alpha})


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 7), (0, 4), (1, 1)], ids=str)
def test_softmax(op, dtype, shape):
    check(op, [values(shape, dtype, low=-9, high=9)])


def test_softmax_of_large_logits_does_not_overflow():
    check("Softmax", [np.array([[1e4, 0, -1e4], [-np.inf, 0, 1]], np.float32)])


@pytest.mark.parametrize(
    "op",
    [
        "ReluGrad",
        "Relu6Grad",
        "LeakyReluGrad",
        "EluGrad",
        "SeluGrad",
        "SoftplusGrad",
        "SoftsignGrad",
    ],
)
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
def test_gradients(op, dtype):
    for shape in SHAPES:
        # Wide for Relu6 and Softplus, but half's square of the result must not cancel.
        wide = 9 if op in ("Relu6Grad", "SoftplusGrad") else 0.9
        check(op, [values(shape, dtype, low=-wide, high=wide), values(shape, dtype, seed=1, low=-wide, high=wide)])


@pytest.mark.parametrize("op", ["ReluGrad", "Relu6Grad"])
def test_gradients_at_the_corners(op):
    check(op, [np.full(4, 3, np.float32), np.array([0, 6, -0.0, 5], np.float32)])


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"], ids=str)
@pytest.mark.parametrize("shapes", [((3, 5), (3, 5)), ((1, 5), (3, 5)), ((3, 5), (1, 5)), ((0, 5), (0, 5))], ids=str)
def test_softmax_cross_entropy(dtype, shapes):
    labels = run_tensorflow("Softmax", [values(shapes[1], dtype, seed=1)])[0]
    check("SoftmaxCrossEntropyWithLogits", [values(shapes[0], dtype), labels])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("labels", ["int32", "int64"])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_sparse_softmax_cross_entropy(dtype, labels, rows):
    check("SparseSoftmaxCrossEntropyWithLogits", [values((rows, 5), dtype), values((rows,), labels, low=0, high=5)])


def test_a_label_that_is_no_class_gives_nan_as_on_a_gpu():
    loss, gradient = run_lowering("SparseSoftmaxCrossEntropyWithLogits", [values((3, 5)), np.array([-1, 5, 2])])
    assert loss.isnan().tolist() == [True, True, False]
    assert gradient.isnan().all(-1).tolist() == [True, True, False]


@pytest.mark.parametrize("name", ["Relu", "Relu6", "Elu", "Tanh", "Sigmoid", "LeakyRelu"])
def test_activations_by_name_are_the_ops(name):
    x = values((3, 4), low=-9, high=9)
    (expected,) = run_tensorflow(name, [x], {"alpha": 0.3} if name == "LeakyRelu" else {})
    np.testing.assert_allclose(activate(name, 0.3)(torch.from_numpy(x)).numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "approximate"), [("GeluApproximate", True), ("GeluExact", False)])
def test_gelu_by_name(name, approximate):
    import tensorflow as tf

    x = values((3, 4), low=-4, high=4)
    expected = tf.nn.gelu(x, approximate=approximate).numpy()
    np.testing.assert_allclose(activate(name)(torch.from_numpy(x)).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_swish_by_name():
    import tensorflow as tf

    x = values((3, 4), low=-90, high=90)
    np.testing.assert_allclose(activate("Swish")(torch.from_numpy(x)).numpy(), tf.nn.silu(x).numpy(), rtol=1e-5)


@pytest.mark.parametrize("op", ["BiasAdd", "BiasAddV1"])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "int32", "int64", "uint8", "complex64"], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (1, 1), (2, 3, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)], ids=str)
def test_bias_add(op, dtype, shape):
    check(op, [values(shape, dtype), values(shape[-1:], dtype, seed=1)])


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3), (2, 4, 3, 5), (2, 4, 2, 3, 5)], ids=str)
def test_bias_add_with_channels_in_front(shape):
    check("BiasAdd", [values(shape), values((4,), seed=1)], {"data_format": "NCHW"})


def inputs(shape, dtype="float32"):
    channels = shape[-1:]
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
    check_both_formats(op, arrays, {"is_training": is_training, "epsilon": 0.001}, outputs=compared(is_training))


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


@pytest.mark.parametrize("scaled", [True, False])
def test_batch_normalization_of_old_graphs(scaled):
    """TensorFlow runs the op in graphs of its first months only: in one of those, through the engine."""
    import tensorflow as tf

    from tests.engines.cuda.cases import assert_equals_tensorflow, flat_of

    given = [values((2, 3, 3, 4)), *(values((4,), low=low, seed=seed) for seed, low in enumerate((-1, 0.1, -1, -1)))]
    with tf.Graph().as_default() as graph:
        places = [tf.compat.v1.placeholder(one.dtype, one.shape, name=f"x{at}") for at, one in enumerate(given)]
        tf.identity(places[0], name="y")
    definition = graph.as_graph_def()
    definition.versions.producer = 8
    node = definition.node.add(name="old", op="BatchNormWithGlobalNormalization", input=[f"x{at}" for at in range(5)])
    node.attr["T"].type = tf.float32.as_datatype_enum
    node.attr["variance_epsilon"].f = 1e-3
    node.attr["scale_after_normalization"].b = scaled
    flat = flat_of(definition, outputs=["old"])
    assert_equals_tensorflow(flat, {f"x{at}": one for at, one in enumerate(given)})
