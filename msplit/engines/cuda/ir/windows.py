"""Attributes that kernels of convolutions and pools read: windows, memory layouts, and rounding to TF32.

Sliding windows of convolutions and pools: what TensorFlow's attributes say, and the memory layout of the kernels.

TensorFlow's padding may differ between the two ends of an axis; PyTorch's may not. `Window` holds TensorFlow's numbers per
spatial axis, so that each kernel can choose how to bring them to PyTorch.

Rounding to TF32: of numbers, and what attributes of ops say of it. See `precision.round_results`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from msplit.engines.cuda.ir.node import Node, Unsupported

TILES = "_tiles"
"""Attribute that an engine gives a convolution which runs in our own kernel: `tiles.Tiles`. Absent: the library runs it."""

SIBLINGS = "_siblings"
"""Attribute of an op that does several convolutions of the same data: how many output channels each has."""

PROLOGUE = "_prologue"
"""Attribute of a convolution that has a `Prologue`: its steps, of `PROLOGUE_STEPS` and in their order. Their operands come last."""

CAST_FROM = "_cast_from"
"""Attribute of a convolution that converts its data: their type, as in ``"uint8"``. It computes in its filter's."""

PROLOGUE_STEPS = ("scale", "shift", "relu")

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Window:
    """The windows along one spatial axis.

    Attributes:
        size: Length of the axis that the windows slide over.
        kernel: Length of a window, without dilation.
        dilation: Distance between the elements of a window.
        before: Padding at the start of the axis.
        after: Padding at its end.
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    outputs: int

    @property
    def reach(self) -> int:
        """Length of a window with its gaps."""
        return (self.kernel - 1) * self.dilation + 1


class Prologue(NamedTuple):
    """Steps that the data of a convolution go through in front of it: ``max(data * scale + shift, 0)``, without what is None or False.

    Attributes:
        scale: A factor per input channel, or per image and input channel (of a shape that broadcasts).
        shift: An addend per input channel. Both are in float32 for data in half precision.
        relu: Whether the result is cut off below zero.
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    relu: bool = False

    def of(self, data: Tensor) -> Tensor:
        """Applies the steps one by one to NHWC data."""
        wide = data if self.scale is None else data * self.scale
        wide = wide if self.shift is None else wide + self.shift
        return (wide.relu() if self.relu else wide).to(data.dtype)


NO_PROLOGUE = Prologue()


def channels_first(node: Node) -> bool:
    """Returns whether the node's logical shape has its channels in front (data_format NCHW or NCDHW).

    Raises:
        Unsupported: A format that splits its channels in vectors.
    """
    data_format = str(node.get("data_format", "NHWC"))
    if data_format not in ("NHWC", "NCHW", "NDHWC", "NCDHW"):
        raise Unsupported(f"{node.op} {node.name}: data_format {data_format} is not supported, only NHWC and NCHW")
    return data_format[1] == "C"


def spatial(node: Node, values: Sequence[int], what: str) -> tuple[int, ...]:
    """The numbers of the spatial axes out of a list that has one per axis of the data.

    Raises:
        Unsupported: The number of the batch or the channel axis is not one.
    """
    numbers = [int(value) for value in values]
    channel = 1 if channels_first(node) else len(numbers) - 1
    if numbers[0] != 1 or numbers[channel] != 1:
        raise Unsupported(f"{node.op} {node.name}: {what} {tuple(numbers)} reaches over the batch or the channels")
    return tuple(number for axis, number in enumerate(numbers) if axis not in (0, channel))


def windows(
    node: Node,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int] | None = None,
) -> tuple[Window, ...]:
    """The windows of each spatial axis by the node's `padding` and `explicit_paddings`.

    Args:
        sizes: Per spatial axis its length; the others have as many numbers.
        kernel: See `Window`.
        strides: See `Window`.
        dilations: See `Window`; all one if None.

    Raises:
        Unsupported: A window is larger than its axis with padding, or there is padding over the batch or the channels.
    """
    padding = node.get("padding", "VALID")
    explicit = [0] * (2 * len(sizes))
    if padding == "EXPLICIT":
        pairs = [int(value) for value in node.get("explicit_paddings", ())]
        begins, ends = pairs[0::2], pairs[1::2]
        channel = 1 if channels_first(node) else len(begins) - 1
        if begins[0] or ends[0] or begins[channel] or ends[channel]:
            raise Unsupported(f"{node.op} {node.name}: explicit_paddings {tuple(pairs)} pads the batch or the channels")
        axes = [axis for axis in range(len(begins)) if axis not in (0, channel)]
        explicit = [pad for axis in axes for pad in (begins[axis], ends[axis])]

    result = []
    for axis, size in enumerate(sizes):
        dilation = 1 if dilations is None else dilations[axis]
        stride = strides[axis]
        reach = (kernel[axis] - 1) * dilation + 1
        if padding == "SAME":
            outputs = -(-size // stride)
            total = max((outputs - 1) * stride + reach - size, 0)
            before, after = total // 2, total - total // 2
        else:
            before, after = explicit[2 * axis], explicit[2 * axis + 1]
            outputs = (size + before + after - reach) // stride + 1
            if outputs < 1:
                raise Unsupported(f"{node.op} {node.name}: a window of {reach} does not fit an axis of {size}")
        result.append(Window(size, kernel[axis], stride, dilation, before, after, outputs))
    return tuple(result)


def extent(tensor: Tensor) -> int:
    """Elements in memory from a tensor's first to its last, which does not count; less than 0 where it has none."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def pixel_step(data: Tensor) -> int | None:
    """Elements from each pixel of NHWC data to the next; None where they do not lie evenly, or a pixel not in one piece."""
    *sizes, channels = data.shape
    *steps, within = data.stride()
    found, expected = channels, None
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        if size == 1:
            continue
        if expected is None:
            found = step
        elif step != expected:
            return None
        expected = step * size
    return found if (within == 1 or channels == 1) and found >= channels else None


def keeps_channels_last(node: Node) -> bool:
    """Returns whether the node's kernel works on data whose channels lie last in memory: NHWC data, unless the node says `nchw`."""
    return not channels_first(node) and not node.nchw


def to_channels_first(node: Node, data: Tensor) -> Tensor:
    """The data with its channels in the axis PyTorch wants them, in the memory layout that the node asks for.

    A view where the data lies so already: NHWC data as TensorFlow has it, or what a node with `nchw` left behind.
    """
    if not channels_first(node):
        data = data.movedim(-1, 1)
    return in_layout(data, keeps_channels_last(node))


def from_channels_first(node: Node, data: Tensor) -> Tensor:
    """A kernel's result in the logical shape of the node's `data_format`: always a view."""
    return data if channels_first(node) else data.movedim(1, -1)


def in_layout(data: Tensor, channels_last: bool) -> Tensor:
    """The tensor (channels in axis 1), copied only if it lies otherwise in memory."""
    return data.contiguous(memory_format=_format(data.dim(), channels_last))


def empty_in_layout(like: Tensor, shape: Sequence[int], channels_last: bool) -> Tensor:
    """A tensor (channels in axis 1) of that shape, of the other's type and device."""
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=_format(len(shape), channels_last))


def _format(rank: int, channels_last: bool) -> torch.memory_format:
    return _CHANNELS_LAST[rank] if channels_last else torch.contiguous_format


ROUNDED = "_rounded"
"""Attribute of a convolution or product in TF32 whose data are rounded to it already, so that our kernel need not."""

ROUNDS = "_rounds"
"""Attribute of an op that stores results for products in TF32, and for nothing else: the outputs that it rounds."""

TO_TF32 = "_ToTF32"
"""Op at the end of a fused group, for results that only products in TF32 read."""

ROUNDED_WEIGHTS = "_rounded_weights"
"""Attribute of a product whose weights are constants that are rounded to TF32 where our own kernel multiplies by them on tensor cores."""


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Float32 numbers rounded to the 11 bits that TF32 keeps of them, halves away from zero, as GPUs do. They lie as before."""
    rounded = ((tensor.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(tensor.isfinite(), rounded, tensor)


def constant_in_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """A constant rounded so; the tensor itself where that changes nothing, for other programs may share it."""
    rounded = to_tf32(tensor)
    return tensor if torch.equal(rounded, tensor) else rounded


def for_products(node: Node, result: torch.Tensor) -> torch.Tensor:
    """A result of a node as it is stored: rounded where it `ROUNDS` its only one."""
    return to_tf32(result) if node.get(ROUNDS) else result
