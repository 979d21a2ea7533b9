"""What rewrites share: who reads what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph


class Readers:
    """Who reads each value of a source, as it was when this was made.

    A rewrite that works on one pattern after the other may keep it, as long as what it removes is removed with all its readers.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.fetched = frozenset(graph.fetches.values())
        self.of = graph.consumers()

    def only(self, key: Key) -> Op | None:
        """The op that reads a value, if it is the only one, reads it once, and the value is no output of the model."""
        users = self.of.get(key, [])
        return self.graph.ops.get(users[0]) if len(users) == 1 and key not in self.fetched else None

    def unread(self, key: Key) -> bool:
        """Whether nobody wants a value."""
        return key not in self.of and key not in self.fetched


def channels_last(op: Op) -> bool:
    """Whether the op's channels are in its last axis."""
    return str(op.attrs.get("data_format", "NHWC"))[1] != "C"


def inserted_axis(shape: Sequence[int], wider: Sequence[int], kernel: Sequence[int]) -> int | None:
    """Which spatial axis of size one a reshape adds, so that a convolution of images can take a sequence; None if it adds none.

    Args:
        shape: Of the sequences: batch, length, channels.
        wider: Of the images, channels last.
        kernel: Shape of the convolution's filter: of two axes of size one, the added one is that which nothing is summed along.
    """
    axes = [one for one in (1, 2) if (*shape[:one], 1, *shape[one:]) == tuple(wider) and kernel[one - 1] == 1]
    return axes[0] if len(shape) == 3 and axes else None


def trailing(shape: Sequence[int], size: int) -> tuple[int, ...] | None:
    """The last axes of a shape whose sizes multiply to `size`, as few as possible; None where none do."""
    for axis in range(len(shape) - 1, -1, -1):
        product = math.prod(shape[axis:])
        if product == size:
            return tuple(shape[axis:])
        if product > size or not product:
            return None
    return None


def per_channel(value: NDArray[Any], shape: Sequence[int], axes: Sequence[int]) -> NDArray[np.float64] | None:
    """A constant operand as one number per channel, or None where it is not the same everywhere else.

    Args:
        value: The constant. It broadcasts against a tensor of `shape`.
        shape: Shape of the tensor.
        axes: The tensor's adjacent axes that the channels lie along, flattened in row-major order.
    """
    if value.ndim > len(shape):
        return None
    full = (1,) * (len(shape) - value.ndim) + value.shape
    if any(size not in (1, shape[axis]) or (size != 1 and axis not in axes) for axis, size in enumerate(full)):
        return None
    wanted = [shape[axis] for axis in axes]
    return np.broadcast_to(value.reshape([full[axis] for axis in axes]), wanted).astype(np.float64).reshape(-1)


def other_input(op: Op, key: Key) -> Key | None:
    """The other operand of a binary op that reads `key` once."""
    if len(op.inputs) != 2 or (op.inputs[0] == key) == (op.inputs[1] == key):
        return None
    return op.inputs[1] if op.inputs[0] == key else op.inputs[0]
