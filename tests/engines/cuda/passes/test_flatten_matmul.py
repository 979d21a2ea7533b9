"""Einsums and batched products with one matrix are products of matrices."""

import pytest

from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import check, normal, placeholder

pytestmark = pytest.mark.tf


@pytest.mark.parametrize(
    ("equation", "weights", "bias"),
    [
        ("abc,cd->abd", (6, 4), (4,)),
        ("abc,cde->abde", (6, 2, 3), (2, 3)),
        ("abc,cde->abde", (6, 2, 3), (1, 1, 2, 3)),
        ("acd,cde->ae", (3, 6, 5), (5,)),
    ],
)
def test_an_einsum_with_constant_weights_is_one_product(equation, weights, bias):
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        y = tf.einsum(equation, placeholder(tf, v1, feeds["x"]), tf.constant(normal(*weights)))
        tf.nn.relu(y + normal(*bias), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def test_an_einsum_that_is_no_plain_product_stays():
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        tf.einsum("abc,cd->adb", placeholder(tf, v1, feeds["x"]), tf.constant(normal(6, 4)), name="out")

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds)
    assert "Einsum" in kernels(program_of(flat, feeds))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_batched_product_with_one_matrix_is_a_product_of_matrices(transposed):
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        weights = tf.constant(normal(4, 6) if transposed else normal(6, 4))
        y = tf.raw_ops.BatchMatMulV2(x=placeholder(tf, v1, feeds["x"]), y=weights, adj_y=transposed)
        tf.nn.gelu(y + normal(4), name="out", approximate=True)

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds)
    assert kernels(program_of(flat, feeds)) == ["_FusedMatMul"]


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_a_dense_layer_on_a_sequence_is_one_product(act):
    """Keras' Dense takes a tensor of rank three through Tensordot: reshapes around the product, the bias behind them."""
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        y = tf.tensordot(placeholder(tf, v1, feeds["x"]), tf.constant(normal(6, 4)), [[2], [0]])
        tf.identity(getattr(tf.nn, act)(tf.nn.bias_add(y, normal(4))), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])
