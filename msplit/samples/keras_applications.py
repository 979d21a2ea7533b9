"""Architectures that Keras ships, frozen with seeded weights."""

from __future__ import annotations

import math
from typing import Any

from msplit.samples.types import Input, Sample
from msplit.samples.weights import ATTRIBUTE, RELU_GAIN, Recipe, fill, kernel

# Variable `index` holds the number `_MARK + index` in every element while the model is frozen, which tells afterwards
# which constant was which variable, whatever freezing called it. Exact in float32.
_MARK = 1_000_000


def inception_v3(seed: int, *, image: int = 299, classes: int = 1000, batch: int | None = None) -> Sample:
    """Build Keras's Inception-v3. `image` is the height and width of the input, at least 75."""
    return _application("inception_v3", "InceptionV3", seed, image, classes, batch)


def nasnet_mobile(seed: int, *, image: int = 224, classes: int = 1000, batch: int | None = None) -> Sample:
    """Build Keras's NASNet-A (mobile). `image` is the height and width of the input, at least 32."""
    # Each of its cells sums pairs of branches; the lower gain keeps the sums from growing.
    return _application("nasnet_mobile", "NASNetMobile", seed, image, classes, batch, gain=0.75 * RELU_GAIN)


def _application(
    name: str,
    function: str,
    seed: int,
    image: int,
    classes: int,
    batch: int | None,
    gain: float = RELU_GAIN,
) -> Sample:
    import keras

    # Keras numbers layers through the life of the process; equal calls must give equal names.
    keras.backend.clear_session()
    model = getattr(keras.applications, function)(weights=None, input_shape=(image, image, 3), classes=classes)
    graph_def, output = _freeze(model, "image", (batch, image, image, 3), seed, gain)
    return Sample(name, graph_def, (Input("image", "float32", (batch, image, image, 3)),), (output,))


def _freeze(model: Any, input_name: str, shape: tuple[int | None, ...], seed: int, gain: float) -> tuple[Any, str]:
    import numpy as np

    from msplit.engines.tensorflow.runtime import tensorflow

    tf = tensorflow()
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    weights = model.weights  # Keras gathers them from all layers anew whenever it is asked
    for index, variable in enumerate(weights):
        variable.assign(np.full(tuple(variable.shape), _MARK + index, np.float32))

    @tf.function  # type: ignore[untyped-decorator]
    def forward(x: Any) -> Any:
        return model(x, training=False)

    concrete = forward.get_concrete_function(tf.TensorSpec(shape, tf.float32, name=input_name))
    frozen = convert_variables_to_constants_v2(concrete)
    graph_def = frozen.graph.as_graph_def()
    for node in graph_def.node:
        if node.op == "Const" and node.attr["dtype"].type == tf.float32.as_datatype_enum:
            values = tf.make_ndarray(node.attr["value"].tensor)
            index = int(values.flat[0]) - _MARK if values.size else -1
            if 0 <= index < len(weights):
                recipe = recipe_for(node.name, seed, weights[index].path, values.shape, gain)
                node.attr[ATTRIBUTE].s = recipe.encode()
    return fill(graph_def), frozen.outputs[0].op.name


def recipe_for(key: str, seed: int, path: str, shape: tuple[int, ...], gain: float = RELU_GAIN) -> Recipe:
    """Return the recipe of a Keras variable, chosen by its role, which is the last part of its path.

    Args:
        key: See `Recipe`.
        seed: Likewise.
        path: Keras's path of the variable, such as `conv2d_3/kernel`.
        shape: Of the variable.
        gain: Of kernels (see `weights.kernel`).

    Raises:
        ValueError: The role is not known.
    """
    role = path.rsplit("/", 1)[-1]
    ranges = {
        "gamma": (0.8, 1.2),
        "beta": (-0.1, 0.1),
        "embeddings": (-1.0, 1.0),
        "bias": (-0.1, 0.1),
        "moving_mean": (-0.1, 0.1),
        "moving_variance": (0.7, 1.4),
    }
    if role in ranges:
        low, high = ranges[role]
        return Recipe(key, seed, low, high)
    if role == "depthwise_kernel":
        # One filter per channel, and no ReLU between it and the pointwise half.
        limit = math.sqrt(3.0 / (shape[0] * shape[1]))
        return Recipe(key, seed, -limit, limit)
    if role in ("kernel", "pointwise_kernel", "recurrent_kernel"):
        return kernel(key, seed, shape, gain)
    raise ValueError(f"no recipe for a variable named {path!r}")
