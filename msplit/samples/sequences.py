"""Models of sequences: a small BERT encoder, and an LSTM that is unrolled, so that every cell of every step is its own handful of nodes."""

from __future__ import annotations

from typing import Any

from msplit.samples.layers import ModelBuilder, Sample


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
