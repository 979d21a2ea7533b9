"""GoogLeNet with batch normalization and without auxiliary heads."""

from __future__ import annotations

from typing import Any

from msplit.samples.layers import Builder
from msplit.samples.types import Sample
from msplit.samples.vision import conv_bn_relu, max_pool

# Module -> filters of (1x1, 3x3 reduction, 3x3, second 3x3's reduction, second 3x3, pool projection);
# table 1 of Szegedy et al., CVPR 2015.
_MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def build(seed: int, *, image: int = 224, classes: int = 1000, batch: int | None = None) -> Sample:
    """Build GoogLeNet as torchvision has it: batch normalization, and a 3x3 where the paper has a 5x5.

    The modules are the scopes `mixed3a` … `mixed5b`, each with `branch_1x1`, `branch_3x3`, `branch_double` and
    `branch_pool`; the output is the logits.

    Args:
        seed: Seed of the weights.
        image: Height and width of the input.
        classes: Number of classes.
        batch: Size of the batch, None for unknown.
    """
    b = Builder(seed, batch)
    x = b.input("image", (image, image, 3))
    with b.scope("stem"):
        x = max_pool(b, conv_bn_relu(b, x, 64, 7, "conv1", stride=2), 3, 2, "pool1")
        x = conv_bn_relu(b, conv_bn_relu(b, x, 64, 1, "conv2"), 192, 3, "conv3")
        x = max_pool(b, x, 3, 2, "pool2")
    for name, filters in _MODULES.items():
        x = _module(b, x, filters, f"mixed{name}")
        if name == "3b":
            x = max_pool(b, x, 3, 2, "pool3")
        elif name == "4e":
            x = max_pool(b, x, 2, 2, "pool4")
    with b.scope("head"):
        pooled = b.tf.reduce_mean(x, axis=(1, 2), name="global_pool")
        logits = b.dense(pooled, classes, "logits", activation=None)
    return b.finish("googlenet", [logits])


def _module(b: Builder, x: Any, filters: tuple[int, int, int, int, int, int], scope: str) -> Any:
    one, reduce_three, three, reduce_double, double, pool = filters
    with b.scope(scope):
        with b.scope("branch_1x1"):
            first = conv_bn_relu(b, x, one, 1, "conv")
        with b.scope("branch_3x3"):
            second = conv_bn_relu(b, conv_bn_relu(b, x, reduce_three, 1, "reduce"), three, 3, "conv")
        with b.scope("branch_double"):
            third = conv_bn_relu(b, conv_bn_relu(b, x, reduce_double, 1, "reduce"), double, 3, "conv")
        with b.scope("branch_pool"):
            fourth = conv_bn_relu(b, max_pool(b, x, 3, 1, "pool"), pool, 1, "project")
        return b.tf.concat([first, second, third, fourth], axis=3, name="concat")
