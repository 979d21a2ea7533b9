"""Convolution layers of the hand-written vision models (NHWC)."""

from __future__ import annotations

from typing import Any

from msplit.samples.layers import Builder


def conv_bn_relu(b: Builder, x: Any, filters: int, size: int, scope: str, stride: int = 1) -> Any:
    """Convolution without bias, batch normalization with fixed statistics, ReLU."""
    with b.scope(scope):
        kernel = b.kernel((size, size, x.shape[-1], filters))
        y = b.tf.nn.conv2d(x, kernel, stride, "SAME", name="Conv2D")
        with b.scope("batch_norm"):
            gamma = b.weight("gamma", (filters,), 0.8, 1.2)
            beta = b.weight("beta", (filters,), -0.1, 0.1)
            mean = b.weight("moving_mean", (filters,), -0.1, 0.1)
            variance = b.weight("moving_variance", (filters,), 0.7, 1.4)
            y, *_ = b.tf.compat.v1.nn.fused_batch_norm(
                y, gamma, beta, mean, variance, epsilon=1e-3, is_training=False, name="FusedBatchNorm"
            )
        return b.tf.nn.relu(y, name="Relu")


def conv_relu(b: Builder, x: Any, filters: int, size: int, scope: str, stride: int = 1, padding: str = "SAME") -> Any:
    """Convolution, bias, ReLU."""
    with b.scope(scope):
        kernel = b.kernel((size, size, x.shape[-1], filters))
        y = b.tf.nn.conv2d(x, kernel, stride, padding, name="Conv2D")
        return b.tf.nn.relu(b.tf.nn.bias_add(y, b.bias(filters), name="BiasAdd"), name="Relu")


def max_pool(b: Builder, x: Any, size: int, stride: int, name: str, padding: str = "SAME") -> Any:
    """Max pooling, named in the current scope."""
    with b.graph.as_default():
        return b.tf.nn.max_pool2d(x, size, stride, padding, name=name)
