"""Convolution, pooling, normalization, losses, images, and recurrent cells and layers that are one op."""

from __future__ import annotations

from collections.abc import Sequence

from msplit.opset.traits import ops_with
from msplit.shapes.registry import (
    Node,
    Outputs,
    Shape,
    least,
    merge,
    merge_dim,
    product,
    shape_from,
    shape_function,
    total,
    unsized,
)


def layout(node: Node, rank: int) -> tuple[int, tuple[int, ...]]:
    """(channel axis, spatial axes) of the data format."""
    if str(node.attr("data_format", "NHWC")).startswith("NC"):
        return 1, tuple(range(2, rank))
    return rank - 1, tuple(range(1, rank - 1))


def windowed(node: Node, axis: int, size: int | None, window: int | None, stride: int, dilation: int = 1) -> int | None:
    """Number of positions of a window over an axis, by the node's padding.

    Args:
        node: Holds `padding`: "SAME", "VALID" or "EXPLICIT".
        axis: The axis, for explicit padding.
        size: Length of the axis.
        window: Length of the window.
        stride: Step.
        dilation: Distance of the window's elements.
    """
    if size is None:
        return None
    if str(node.attr("padding", "VALID")) == "SAME":
        return -(-size // stride)
    if window is None:
        return None
    pads = node.attr("explicit_paddings", ()) or node.attr("padding_list", ()) or ()
    pad = int(pads[2 * axis] + pads[2 * axis + 1]) if len(pads) > 2 * axis + 1 else 0
    return max(0, (size + pad - (window - 1) * dilation - 1) // stride + 1)


def _convolved(node: Node, data: Shape, window: Sequence[int | None], channels: int | None, rank: int) -> Shape:
    """Shape of a convolution or pooling: `window` holds its spatial sizes."""
    data = (None,) * rank if data is None else data
    channel, spatial = layout(node, rank)
    strides = node.attr("strides", ()) or node.attr("ksize", (1,) * rank)
    dilations = node.attr("dilations", ()) or (1,) * rank
    result = list(data)
    result[channel] = channels
    for axis, size in zip(spatial, window, strict=True):
        result[axis] = windowed(node, axis, data[axis], size, strides[axis], dilations[axis])
    return tuple(result)


@shape_function("Conv2D", "Conv3D", "_FusedConv2D", "_FusedConv3D", "Conv")
def convolution(node: Node) -> Outputs:
    """Convolution with a filter [spatial..., in, out]."""
    rank = 5 if "3D" in node.op else 4
    data, weights = node.shape(0), node.shape(1)
    if node.op == "Conv" and data is not None:
        rank = len(data)
    if weights is None:
        weights = (None,) * rank
    return (_convolved(node, data, weights[:-2], weights[-1], rank),)


@shape_function("DepthwiseConv2dNative", "_FusedDepthwiseConv2dNative")
def depthwise(node: Node) -> Outputs:
    """Depthwise convolution with a filter [height, width, in, multiplier]."""
    weights = node.shape(1) or (None,) * 4
    return (_convolved(node, node.shape(0), weights[:2], product(weights[2:]), 4),)


@shape_function(*ops_with("convolution gradient"))
def convolution_gradient(node: Node) -> Outputs:
    """The shape is an input: the first for the gradient of the data, the second for that of the filter."""
    rank = 5 if "3D" in node.op else 4
    sizes = node.ints(1 if "Filter" in node.op else 0)
    if sizes is None:
        return ((None,) * rank,)
    if "Filter" not in node.op and len(sizes) == 2:
        # Only the spatial sizes are given: batch from the gradient, channels from the filter.
        channel, spatial = layout(node, rank)
        result: list[int | None] = [None] * rank
        result[0] = (node.shape(2) or (None,))[0]
        result[channel] = (node.shape(1) or (None,) * rank)[-2]
        for axis, size in zip(spatial, sizes, strict=True):
            result[axis] = size
        return (tuple(result),)
    return (shape_from(sizes),)


@shape_function("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "MaxPoolV2", "QuantizedMaxPool", "QuantizedAvgPool")
def pooling(node: Node) -> Outputs:
    """Pooling; the V2 form takes window and strides as inputs."""
    rank = 5 if "3D" in node.op else 4
    data = node.shape(0) or (None,) * rank
    if node.op == "MaxPoolV2":
        window, strides = node.ints(1), node.ints(2)
        if window is None or strides is None:
            return ((None,) * rank,)
    else:
        window, strides = list(node.attr("ksize")), list(node.attr("strides"))
    result = tuple(windowed(node, axis, data[axis], window[axis], strides[axis] or 1) for axis in range(rank))
    return (result,) + ((), ()) * node.op.startswith("Quantized")


# And the index of each maximum:
shape_function("MaxPoolWithArgmax")(lambda node: pooling(node) * 2)


@shape_function("MaxPoolGrad", "MaxPoolGradGrad", "AvgPoolGrad", "MaxPoolGradV2", "AvgPool3DGrad", "MaxPool3DGrad")
def pooling_gradient(node: Node) -> Outputs:
    """The shape of the pooled data: a value for average pooling, the first input otherwise."""
    return (shape_from(node.ints(0)) if node.op.startswith("Avg") else node.shape(0),)


@shape_function(*ops_with("normalizes channels"))
def batch_norm(node: Node) -> Outputs:
    """Data keeps its shape; the other outputs are vectors of the channels."""
    data = node.shape(0)
    vector = node.shape(1)
    if data is not None:
        channel, _ = layout(node, len(data))
        size = merge_dim(data[channel], vector[0] if vector else None)
        vector = (size,)
        data = (*data[:channel], size, *data[channel + 1 :])
    if node.op == "BatchNormWithGlobalNormalization":
        return (data,)
    if node.op in ops_with("old batch norm"):
        return (data, vector, vector, vector, vector)
    # TensorFlow's kernel for the CPU gives an empty sixth output, the one for the GPU a scratch vector.
    return (data, vector, vector, vector, vector, None)


# Gradients of data, scale and offset, and two empty outputs:
shape_function("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")(
    lambda node: (merge(node.shape(0), node.shape(1)), node.shape(2), node.shape(2), (0,), (0,))
)


@shape_function("BiasAddGrad")
def bias_gradient(node: Node) -> Outputs:
    """One value per channel."""
    shape = node.shape(0)
    return ((None,),) if shape is None else ((shape[layout(node, len(shape))[0]],),)


@shape_function("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(node: Node) -> Outputs:
    """One loss per row, and the gradient."""
    logits = node.shape(0)
    if node.op.startswith("Softmax"):
        logits = merge(logits, node.shape(1))
    return (None if logits is None else logits[:1], logits)


@shape_function("TopK", "TopKV2")
def top_k(node: Node) -> Outputs:
    """The k largest of the last axis, and their positions."""
    shape = node.shape(0)
    count = node.attr("k") if node.op == "TopK" else node.scalar(1)
    result = None if shape is None else (*shape[:-1], count)
    return (result, result)


@shape_function(*ops_with("resizes images"))
def resize(node: Node) -> Outputs:
    """[batch, height, width, channels] with a new height and width, which are a value."""
    shape = node.shape(0) or (None,) * 4
    height, width = node.ints(1) or (None, None)
    return ((shape[0], height, width, shape[3]),)


@shape_function("CropAndResize")
def crop_and_resize(node: Node) -> Outputs:
    """One image per box."""
    shape = node.shape(0) or (None,) * 4
    boxes = node.shape(1) or (None,)
    height, width = node.ints(3) or (None, None)
    return ((boxes[0], height, width, shape[3]),)


@shape_function("NonMaxSuppressionV4", "NonMaxSuppressionV5")
def padded_non_max_suppression(node: Node) -> Outputs:
    """As many boxes as survive or, padded, as may survive; and how many that are."""
    found = (node.scalar(2) if node.attr("pad_to_max_output_size") else None,)
    return (found, ()) if node.op == "NonMaxSuppressionV4" else (found, found, ())


@shape_function("CombinedNonMaxSuppression")
def combined_non_max_suppression(node: Node) -> Outputs:
    """As many boxes of each image as may survive, padded, with scores and classes; and how many did."""
    shape = node.shape(1) or (None,) * 3
    most, length = node.scalar(2), node.scalar(3)
    if node.attr("pad_per_class"):
        classes = shape[2]
        length = None if most is None or classes is None else least(length, most * classes)
    return ((shape[0], length, 4), (shape[0], length), (shape[0], length), (shape[0],))


@shape_function("DepthToSpace", "SpaceToDepth")
def depth_to_space(node: Node) -> Outputs:
    """Blocks of channels become space, or the other way round."""
    shape = node.shape(0)
    if shape is None:
        return (unsized(4),)
    size = int(node.attr("block_size"))
    channel, spatial = layout(node, len(shape))
    grow = node.op == "DepthToSpace"
    result = list(shape)
    for axis in spatial:
        result[axis] = _scaled(shape[axis], size, grow)
    result[channel] = _scaled(shape[channel], size ** len(spatial), not grow)
    return (tuple(result),)


def _scaled(size: int | None, factor: int | None, grow: bool) -> int | None:
    if size is None or factor is None:
        return None
    return size * factor if grow else size // factor


@shape_function("SpaceToBatchND", "BatchToSpaceND", "SpaceToBatch", "BatchToSpace")
def space_to_batch(node: Node) -> Outputs:
    """Moves blocks of space to the batch axis, or back; the last input pads or crops. The old forms have one size for height and width."""
    forward, square = node.op.startswith("Space"), not node.op.endswith("ND")
    shape = node.shape(0) or (None,) * 4 if square else node.ranked(0)
    block = [int(node.attr("block_size"))] * 2 if square else node.ints(1)
    if block is None:
        return (unsized(len(shape)),)
    edges = node.ints(1 if square else 2) or [None] * (2 * len(block))
    result = list(shape)
    result[0] = _scaled(shape[0], product(block), forward)
    for axis, (size, *around) in enumerate(zip(block, edges[::2], edges[1::2], strict=True), 1):
        if forward:
            result[axis] = _scaled(total((shape[axis], *around)), size, False)
        else:
            result[axis] = total((_scaled(shape[axis], size, True), product((-1, total(around)))))
    return (tuple(result),)


@shape_function("RFFT", "RFFT2D", "RFFT3D", "IRFFT", "IRFFT2D", "IRFFT3D")
def real_fourier(node: Node) -> Outputs:
    """The transformed axes get the lengths of the second input; of a forward transform's last axis only half is kept."""
    shape, lengths = node.ranked(0), node.ints(1)
    rank = int(node.op[-2]) if node.op.endswith("D") else 1
    new = lengths if lengths is not None else [None] * rank
    if not node.op.startswith("I") and new[-1] is not None:
        new[-1] = new[-1] // 2 + 1 if new[-1] else 0
    return ((*shape[:-rank], *new),)


@shape_function("ExtractImagePatches")
def image_patches(node: Node) -> Outputs:
    """Every window as one row of channels."""
    shape = node.shape(0) or (None,) * 4
    window, strides, rates = node.attr("ksizes"), node.attr("strides"), node.attr("rates")
    spatial = [windowed(node, axis, shape[axis], window[axis], strides[axis], rates[axis]) for axis in (1, 2)]
    return ((shape[0], *spatial, product((shape[3], window[1], window[2]))),)


# The integers, and the range that these stand for.
shape_function("QuantizeV2")(lambda node: (node.shape(0), node.shape(1), node.shape(2)))


@shape_function("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def projective_transform(node: Node) -> Outputs:
    """Images of the size that is asked for."""
    shape, sizes = node.shape(0) or (None,) * 4, node.sizes(2) or (None, None)
    return ((shape[0], *sizes, shape[3]),)


@shape_function("CTCLoss")
def ctc_loss(node: Node) -> Outputs:
    """One loss per row of the batch, and the gradient; inputs are time-major."""
    shape = node.shape(0)
    return (None if shape is None else (shape[1],), shape)


@shape_function("Dilation2D")
def dilation(node: Node) -> Outputs:
    """Morphological dilation with a filter [height, width, channels]."""
    shape, weights = node.shape(0) or (None,) * 4, node.shape(1) or (None,) * 3
    strides, rates = node.attr("strides"), node.attr("rates")
    spatial = [windowed(node, axis, shape[axis], weights[axis - 1], strides[axis], rates[axis]) for axis in (1, 2)]
    return ((shape[0], *spatial, shape[3]),)


@shape_function("LSTMBlockCell", "GRUBlockCell")
def cell(node: Node) -> Outputs:
    """Inputs x [batch, in] and state [batch, cells]; seven outputs like the state, of a GRU four."""
    return (_state(node.shape(0), node.shape(1)),) * (4 if node.op == "GRUBlockCell" else 7)


@shape_function("LSTMBlockCellGrad")
def lstm_cell_gradient(node: Node) -> Outputs:
    """Gradients of the state, the four gates, and the three peephole vectors."""
    batch, cells = _state(node.shape(0), node.shape(1)) or (None, None)
    return ((batch, cells), (batch, product((4, cells))), (cells,), (cells,), (cells,))


@shape_function("BlockLSTM", "BlockLSTMV2")
def lstm(node: Node) -> Outputs:
    """Inputs x [time, batch, in] and state [batch, cells]; seven outputs [time, batch, cells]."""
    x = node.shape(1) or (None,) * 3
    state = _state(x[1:], node.shape(2)) or (None, None)
    return ((x[0], *state),) * 7


@shape_function("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3")
def cudnn(node: Node) -> Outputs:
    """Inputs x [time, batch, in] and state [layers * directions, batch, units]; scratch outputs have unknown sizes."""
    x, hidden = node.shape(0) or (None,) * 3, node.shape(1) or (None,) * 3
    width = product((hidden[2], 2 if node.attr("direction", "unidirectional") == "bidirectional" else 1))
    cells: Shape = hidden if node.attr("rnn_mode", "lstm") == "lstm" else (None,)
    scratch: Outputs = ((None,),) if node.op == "CudnnRNN" else ((None,), (None,))
    return ((x[0], x[1], width), hidden, cells, *scratch)


def _state(x: Shape, state: Shape) -> Shape:
    if state is None:
        return None if x is None else (x[0], None)
    return (merge_dim(state[0], x[0] if x else None), state[1])
