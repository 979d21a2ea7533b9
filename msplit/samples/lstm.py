"""An unrolled LSTM: every cell of every step is its own handful of nodes."""

from __future__ import annotations

from msplit.samples.layers import Builder
from msplit.samples.types import Sample


def build(seed: int, *, layers: int = 10, steps: int = 100, hidden: int = 256, batch: int = 1) -> Sample:
    """Build a stack of LSTM layers unrolled over time, unfused.

    A cell is 14 ops: two MatMul and their sum, BiasAdd, Split, three Sigmoid, two Tanh, three Mul and one AddV2. Cell
    `layer_<l>/step_<t>` needs only the cell below and the one before, so the layers run as a wavefront.

    Args:
        seed: Seed of the weights.
        layers: Number of layers, which share no weights.
        steps: Length of the input sequence.
        hidden: Width of the input, of the states and of the output.
        batch: Size of the batch (fixed: the initial states are constants).
    """
    b = Builder(seed, batch)
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
