"""Sample models of sequences and images.

Models of sequences: a small BERT encoder, and an LSTM that is unrolled, so that every cell of every step is its own handful of nodes.

Vision models written by hand (NHWC), and the convolution layers that they share.

Architectures that Keras ships, frozen with seeded weights.
"""

from __future__ import annotations

import math
from typing import Any

from msplit.engines.tensorflow.runtime import tensorflow
from msplit.samples.layers import ATTRIBUTE, RELU_GAIN, ModelBuilder, Sample, SampleInput, WeightRecipe, fill, kernel


def bert(
    seed: int | ModelBuilder,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    sequence: int = 128,
    vocabulary: int = 8192,
    batch: int | None = None,
) -> Sample:
    """Build the encoder of Devlin et al. (NAACL 2019), post-norm with the exact (erf) GELU.

    Inputs are `input_ids` and `input_mask` (1 for a token, 0 for padding), both `[batch, sequence]`; outputs are the
    pooled first token `[batch, hidden]` and the sequence `[batch, sequence, hidden]`.

    Args:
        layers: Number of layers, in the scopes `layer_<i>`.
        hidden: Width, a multiple of `heads`; the feed-forward part is four times as wide.
        heads: Attention heads.
        sequence: Length of the sequences.
        vocabulary: Rows of the token table.

    Raises:
        ValueError: The heads do not divide the width.
    """
    if hidden % heads:
        raise ValueError(f"{heads} heads do not divide a hidden size of {hidden}")
    b = ModelBuilder.of(seed, batch)
    tf = b.tf
    ids = b.input("input_ids", (sequence,), "int32", vocabulary)
    mask = b.input("input_mask", (sequence,), "int32", 2)
    with b.scope("embeddings"):
        tokens = b.embedding(ids, vocabulary, hidden, "token")
        positions = b.weight("position/table", (sequence, hidden), -0.5, 0.5)
        x = _layer_norm(b, tf.add(tokens, positions, name="Add"))
    with b.scope("mask"):
        open_to = tf.cast(mask, tf.float32, name="Cast")
        penalty = tf.multiply(tf.subtract(1.0, open_to, name="Sub"), -10000.0, name="Mul")
        penalty = tf.reshape(penalty, (-1, 1, 1, sequence), name="Reshape")
        # Dense layers are two-dimensional products, as BERT's own code has them.
        x = tf.reshape(x, (-1, hidden), name="flatten")
    for layer in range(layers):
        with b.scope(f"layer_{layer}"):
            x = _layer(b, x, penalty, hidden, heads, sequence)
    with b.scope("pooler"):
        encoded = tf.reshape(x, (-1, sequence, hidden), name="sequence")
        pooled = b.dense(encoded[:, 0], hidden, "dense", activation="tanh")
    return b.finish("bert", [pooled, encoded])


def _layer(b: ModelBuilder, x: Any, penalty: Any, hidden: int, heads: int, sequence: int) -> Any:
    tf = b.tf
    with b.scope("attention"):
        query, key, value = (_heads(b, x, hidden, heads, sequence, name) for name in ("query", "key", "value"))
        scores = tf.multiply(
            tf.matmul(query, key, transpose_b=True, name="scores"), (hidden // heads) ** -0.5, name="Mul"
        )
        weights = tf.nn.softmax(tf.add(scores, penalty, name="Add"), name="Softmax")
        mixed = tf.transpose(tf.matmul(weights, value, name="context"), (0, 2, 1, 3), name="transpose")
        mixed = b.dense(tf.reshape(mixed, (-1, hidden), name="merge"), hidden, "output", activation=None)
        x = _layer_norm(b, tf.add(x, mixed, name="residual"))
    with b.scope("feed_forward"):
        wide = b.dense(x, 4 * hidden, "intermediate", activation=None)
        with b.scope("gelu"):
            cumulative = tf.multiply(0.5, tf.add(1.0, tf.math.erf(tf.multiply(wide, 0.5**0.5))))
            wide = tf.multiply(wide, cumulative)
        narrow = b.dense(wide, hidden, "output", activation=None)
        return _layer_norm(b, tf.add(x, narrow, name="residual"))


def _heads(b: ModelBuilder, x: Any, hidden: int, heads: int, sequence: int, scope: str) -> Any:
    projected = b.dense(x, hidden, scope, activation=None)
    with b.scope(scope):
        split = b.tf.reshape(projected, (-1, sequence, heads, hidden // heads), name="split_heads")
        return b.tf.transpose(split, (0, 2, 1, 3), name="transpose")


def _layer_norm(b: ModelBuilder, x: Any) -> Any:
    tf = b.tf
    with b.scope("layer_norm"):
        gamma = b.weight("gamma", (x.shape[-1],), 0.8, 1.2)
        beta = b.bias(x.shape[-1], "beta")
        mean = tf.reduce_mean(x, axis=-1, keepdims=True, name="mean")
        centred = tf.subtract(x, mean, name="Sub")
        variance = tf.reduce_mean(tf.square(centred, name="Square"), axis=-1, keepdims=True, name="variance")
        scale = tf.math.rsqrt(tf.add(variance, 1e-6, name="Add"), name="Rsqrt")
        return tf.add(tf.multiply(tf.multiply(centred, scale, name="Mul"), gamma, name="scaled"), beta, name="shifted")


def lstm(seed: int | ModelBuilder, *, layers: int = 10, steps: int = 100, hidden: int = 256, batch: int = 1) -> Sample:
    """Build a stack of LSTM layers unrolled over time, unfused.

    A cell is 14 ops: two MatMul and their sum, BiasAdd, Split, three Sigmoid, two Tanh, three Mul and one AddV2. Cell
    `layer_<l>/step_<t>` needs only the cell below and the one before, so the layers run as a wavefront.

    Args:
        layers: Number of layers, which share no weights.
        steps: Length of the input sequence.
        hidden: Width of the input, of the states and of the output.
        batch: Size of the batch (fixed: the initial states are constants).
    """
    b = ModelBuilder.of(seed, batch)
    tf = b.tf
    x = b.input("x", (steps, hidden))
    weights = []
    for layer in range(layers):
        with b.scope(f"layer_{layer}"):
            kernel = b.kernel((hidden, 4 * hidden), "kernel", gain=1.0)
            recurrent = b.kernel((hidden, 4 * hidden), "recurrent_kernel", gain=1.0)
            # The forget gate's bias of one that keeps long sequences alive is part of the bias, as in Keras.
            weights.append((kernel, recurrent, b.bias(4 * hidden)))
    with b.graph.as_default():
        zeros = tf.zeros((batch, hidden), name="initial_state")
        axis = tf.constant(1, name="split_axis")
        sequence = tf.unstack(x, axis=1, name="unstack")
    ops = tf.raw_ops
    for layer, (kernel, recurrent, bias) in enumerate(weights):
        h = c = zeros
        following = []
        for step, value in enumerate(sequence):
            with b.scope(f"layer_{layer}/step_{step}/"):
                from_below = ops.MatMul(a=value, b=kernel, name="MatMul_x")
                from_before = ops.MatMul(a=h, b=recurrent, name="MatMul_h")
                gates = ops.BiasAdd(value=ops.AddV2(x=from_below, y=from_before, name="Add"), bias=bias, name="BiasAdd")
                i, f, g, o = ops.Split(axis=axis, value=gates, num_split=4, name="Split")
                kept = ops.Mul(x=ops.Sigmoid(x=f, name="Sigmoid_f"), y=c, name="Mul_f")
                added = ops.Mul(x=ops.Sigmoid(x=i, name="Sigmoid_i"), y=ops.Tanh(x=g, name="Tanh_g"), name="Mul_i")
                c = ops.AddV2(x=kept, y=added, name="Add_c")
                h = ops.Mul(x=ops.Sigmoid(x=o, name="Sigmoid_o"), y=ops.Tanh(x=c, name="Tanh_c"), name="Mul_h")
            following.append(h)
        sequence = following
    with b.graph.as_default():
        output = tf.identity(sequence[-1], name="output")
    return b.finish("lstm", [output])


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


def googlenet(seed: int | ModelBuilder, *, image: int = 224, classes: int = 1000, batch: int | None = None) -> Sample:
    """Build GoogLeNet as torchvision has it: batch normalization, and a 3x3 where the paper has a 5x5.

    The modules are the scopes `mixed3a` … `mixed5b`, each with `branch_1x1`, `branch_3x3`, `branch_double` and
    `branch_pool`; the output is the logits.

    `image` is the height and width of the input.
    """
    b = ModelBuilder.of(seed, batch)
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


def _module(b: ModelBuilder, x: Any, filters: tuple[int, int, int, int, int, int], scope: str) -> Any:
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


# Fire module -> (squeeze filters, filters of each expansion); a pool follows modules 3 and 5.
_FIRES = {2: (16, 64), 3: (16, 64), 4: (32, 128), 5: (32, 128), 6: (48, 192), 7: (48, 192), 8: (64, 256), 9: (64, 256)}


def squeezenet(seed: int | ModelBuilder, *, image: int = 224, classes: int = 1000, batch: int | None = None) -> Sample:
    """Build SqueezeNet 1.1 (Iandola et al., arXiv 1602.07360); fire modules are the scopes `fire2` … `fire9`.

    `image` is the height and width of the input, at least 32.
    """
    b = ModelBuilder.of(seed, batch)
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


def _fire(b: ModelBuilder, x: Any, squeeze: int, expand: int, scope: str) -> Any:
    with b.scope(scope):
        narrow = conv_relu(b, x, squeeze, 1, "squeeze")
        parts = [conv_relu(b, narrow, expand, 1, "expand_1x1"), conv_relu(b, narrow, expand, 3, "expand_3x3")]
        return b.tf.concat(parts, axis=3, name="concat")


def conv_bn_relu(b: ModelBuilder, x: Any, filters: int, size: int, scope: str, stride: int = 1) -> Any:
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


def conv_relu(
    b: ModelBuilder, x: Any, filters: int, size: int, scope: str, stride: int = 1, padding: str = "SAME"
) -> Any:
    """Convolution, bias, ReLU."""
    with b.scope(scope):
        kernel = b.kernel((size, size, x.shape[-1], filters))
        y = b.tf.nn.conv2d(x, kernel, stride, padding, name="Conv2D")
        return b.tf.nn.relu(b.tf.nn.bias_add(y, b.bias(filters), name="BiasAdd"), name="Relu")


def max_pool(b: ModelBuilder, x: Any, size: int, stride: int, name: str, padding: str = "SAME") -> Any:
    """Max pooling, named in the current scope."""
    with b.graph.as_default():
        return b.tf.nn.max_pool2d(x, size, stride, padding, name=name)


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
    graph_def, output = _freeze(model, (batch, image, image, 3), seed, gain)
    return Sample(name, graph_def, (SampleInput("image", "float32", (batch, image, image, 3)),), (output,))


def _freeze(model: Any, shape: tuple[int | None, ...], seed: int, gain: float) -> tuple[Any, str]:
    import numpy as np

    tf = tensorflow()
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    weights = model.weights  # Keras gathers them from all layers anew whenever it is asked
    for index, variable in enumerate(weights):
        variable.assign(np.full(tuple(variable.shape), _MARK + index, np.float32))

    @tf.function  # type: ignore[untyped-decorator]
    def forward(x: Any) -> Any:
        return model(x, training=False)

    concrete = forward.get_concrete_function(tf.TensorSpec(shape, tf.float32, name="image"))
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


def recipe_for(key: str, seed: int, path: str, shape: tuple[int, ...], gain: float = RELU_GAIN) -> WeightRecipe:
    """Return the recipe of a Keras variable, chosen by its role, which is the last part of its path.

    Args:
        key: Key of the recipe (see `WeightRecipe`).
        seed: Seed of the recipe.
        path: Keras's path of the variable, such as `conv2d_3/kernel`.
        shape: Shape of the variable.
        gain: Gain of kernels (see `layers.kernel`).

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
        return WeightRecipe(key, seed, low, high)
    if role == "depthwise_kernel":
        # One filter per channel, and no ReLU between it and the pointwise half.
        limit = math.sqrt(3.0 / (shape[0] * shape[1]))
        return WeightRecipe(key, seed, -limit, limit)
    if role in ("kernel", "pointwise_kernel", "recurrent_kernel"):
        return kernel(key, seed, shape, gain)
    raise ValueError(f"no recipe for a variable named {path!r}")
