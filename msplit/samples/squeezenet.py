"""SqueezeNet 1.1: little to run in parallel, a check that splitting does no harm."""

from __future__ import annotations

from typing import Any

from msplit.samples.layers import Builder
from msplit.samples.types import Sample
from msplit.samples.vision import conv_relu, max_pool

# Fire module -> (squeeze filters, filters of each expansion); a pool follows modules 3 and 5.
_FIRES = {2: (16, 64), 3: (16, 64), 4: (32, 128), 5: (32, 128), 6: (48, 192), 7: (48, 192), 8: (64, 256), 9: (64, 256)}


def build(seed: int, *, image: int = 224, classes: int = 1000, batch: int | None = None) -> Sample:
    """Build SqueezeNet 1.1 (Iandola et al., arXiv 1602.07360); fire modules are the scopes `fire2` … `fire9`.

    Args:
        seed: Seed of the weights.
        image: Height and width of the input, at least 32.
        classes: Number of classes.
        batch: Size of the batch, None for unknown.
    """
    b = Builder(seed, batch)
    x = b.input("image", (image, image, 3))
    x = max_pool(b, conv_relu(b, x, 64, 3, "conv1", stride=2, padding="VALID"), 3, 2, "pool1", "VALID")
    for number, (squeeze, expand) in _FIRES.items():
        x = _fire(b, x, squeeze, expand, f"fire{number}")
        if number in (3, 5):
            x = max_pool(b, x, 3, 2, f"pool{number}", "VALID")
    x = conv_relu(b, x, classes, 1, "conv10")
    with b.scope("head"):
        output = b.tf.reduce_mean(x, axis=(1, 2), name="global_pool")
    return b.finish("squeezenet", [output])


def _fire(b: Builder, x: Any, squeeze: int, expand: int, scope: str) -> Any:
    with b.scope(scope):
        narrow = conv_relu(b, x, squeeze, 1, "squeeze")
        parts = [conv_relu(b, narrow, expand, 1, "expand_1x1"), conv_relu(b, narrow, expand, 3, "expand_3x3")]
        return b.tf.concat(parts, axis=3, name="concat")
