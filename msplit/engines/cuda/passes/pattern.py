"""Helpers of passes: readers of values, ops and constants that are alike, and shapes along channels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape, proved
from msplit.opset.traits import RESHAPES

_Given = TypeVar("_Given")
_Match = TypeVar("_Match")

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


class Readers:
    """Readers of each value of a graph, as it was when this was made.

    A pass that works on one pattern after the other may keep it, as long as what it removes is removed with all its readers.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.fetched = frozenset(graph.kept())
        self.of = graph.consumers()

    def maker(self, key: Key) -> Op | None:
        """The op that makes a value, if only one op reads the value, and once."""
        return None if self.only(key) is None else self.graph.ops.get(key[0])

    def only(self, key: Key) -> Op | None:
        """The op that reads a value, if it is the only one, reads it once, and nobody wants the value when the step is over."""
        users = self.of.get(key, [])
        return self.graph.ops.get(users[0]) if len(users) == 1 and key not in self.fetched else None

    @functools.cached_property
    def ports(self) -> dict[int, list[int]]:
        """Per op the outputs that anything wants, in order."""
        ports: dict[int, list[int]] = {}
        for number, port in sorted(self.of.keys() | self.fetched):
            ports.setdefault(number, []).append(port)
        return ports

    def unread(self, key: Key) -> bool:
        """Returns whether nobody wants a value."""
        return key not in self.of and key not in self.fetched


class Dominators:
    """The ops that every way from what is fed or constant to an op goes through.

    An op's next dominator is where the ways to all that it reads meet last, in the tree of dominators (Cooper, Harvey, Kennedy, "A Simple,
    Fast Dominance Algorithm", 2001; in a graph without cycles one pass is enough). Ancestors in that tree are found by jumps over many
    (Myers, "An applicative random-access stack", 1983), so that all of it takes O(reads × log ops).
    """

    def __init__(self, graph: OpGraph) -> None:
        self._up: dict[int, int] = {_ROOT: _ROOT}
        self._jump: dict[int, int] = {_ROOT: _ROOT}
        self._depth: dict[int, int] = {_ROOT: 0}
        for number, op in graph.ops.items():
            read = [key[0] if key[0] in self._up else _ROOT for key in op.inputs if key not in graph.constants]
            up = functools.reduce(self._meet, read) if read else _ROOT
            jump = self._jump[up]
            far = self._depth[up] - self._depth[jump] == self._depth[jump] - self._depth[self._jump[jump]]
            self._up[number], self._jump[number] = up, self._jump[jump] if far else up
            self._depth[number] = self._depth[up] + 1

    def of(self, *numbers: int) -> int | None:
        """The last op that every way to any of some ops goes through, other than these; None where there is none."""
        found = functools.reduce(self._meet, (self._up[number] for number in numbers))
        return None if found == _ROOT else found

    def dominates(self, one: int, other: int) -> bool:
        """Returns whether every way to the other op goes through the one."""
        return one in self._up and other in self._up and self._meet(one, other) == one

    def _meet(self, one: int, other: int) -> int:
        if self._depth[one] < self._depth[other]:
            one, other = other, one
        while self._depth[one] > self._depth[other]:
            one = self._jump[one] if self._depth[self._jump[one]] >= self._depth[other] else self._up[one]
        while one != other:
            together = self._jump[one] == self._jump[other]
            one, other = (self._up[one], self._up[other]) if together else (self._jump[one], self._jump[other])
        return one


_ROOT = -1
"""Stands for what is fed and for constants."""


def heights(graph: OpGraph, readers: Readers, counts: Callable[[Op], bool]) -> dict[int, int]:
    """Per op how many of the ops that count are on the longest way from it to an output, itself included."""
    found: dict[int, int] = {}
    for number, op in reversed(graph.ops.items()):
        users = (user for port in readers.ports.get(number, ()) for user in readers.of.get((number, port), ()))
        found[number] = max((found[user] for user in users), default=0) + counts(op)
    return found


def offered(graph: OpGraph, change: Callable[[Op], bool]) -> bool:
    """Offers each op that is in a graph now to a rule that may change it; returns whether one did."""
    return max([bool(proved(change, op)) for op in list(graph.ops.values())], default=False)


def matches(
    rule: Callable[[OpGraph, Readers, _Given], _Match], graph: OpGraph, readers: Readers, given: Iterable[_Given]
) -> list[_Match]:
    """All that a rule finds for what it is given one by one."""
    found = (proved(rule, graph, readers, one) for one in given)
    return [one for one in found if one is not None]


def value_key(value: NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    """Equal for arrays of the same type, shape and bits."""
    return value.dtype.str, value.shape, value.tobytes()


def takes_rows(op: Op, constant: Callable[[Key], NDArray[Any] | None]) -> bool:
    """Returns whether a gather takes whole rows along the first axis of its table. `constant` gives the value of an input that is known."""
    axis = constant(op.inputs[2]) if op.op == "GatherV2" else 0
    return axis is not None and int(axis) == 0 and not op.attrs.get("batch_dims", 0)


def become_reshape(graph: OpGraph, op: Op, key: Key) -> None:
    """Lets an op reshape another value to the shape that its own has, and do the work of no node but its first."""
    op.op, op.attrs, op.inputs = "Reshape", {}, [key, graph.sizes(graph.shapes[op.out])]
    op.source_nodes = op.source_nodes[:1]


def channels_last(op: Op) -> bool:
    """Returns whether the op's channels are in its last axis."""
    return str(op.attrs.get("data_format", "NHWC"))[1] != "C"


def channel_axis(op: Op, rank: int) -> int:
    """The axis of the data of a convolution, or of a product, that its channels are along."""
    return rank - 1 if op.op == "MatMul" or channels_last(op) else 1


def bias_and_activation(op: Op) -> tuple[bool, str]:
    """Steps that ride on a product or convolution: whether a bias does, and what follows it; "" for nothing."""
    steps = tuple(map(str, op.attrs.get("fused_ops", ())))
    biased = steps[:1] == ("BiasAdd",)
    return biased, "".join(steps[biased:])


def viewed(graph: OpGraph, key: Key) -> Key:
    """The value that reshapes, of which a value is one, show."""
    while (op := graph.ops.get(key[0])) is not None and op.op in RESHAPES and op.inputs[0] in graph.shapes:
        key = op.inputs[0]
    return key


def with_axis(shape: Shape, axis: int | None) -> Shape:
    """A shape with an axis of size one more; itself where there is none to add."""
    return shape if axis is None else (*shape[:axis], 1, *shape[axis:])


def inserted_axis(shape: Sequence[int], wider: Sequence[int], kernel: Sequence[int]) -> int | None:
    """Spatial axis of size one that a reshape adds, so that a convolution of images can take a sequence; None if it adds none.

    Args:
        shape: Of the sequences: batch, length, channels.
        wider: Of the images, channels last.
        kernel: Shape of the convolution's filter: of two axes of size one, the added one is that which nothing is summed along.
    """
    axes = [one for one in (1, 2) if with_axis(tuple(shape), one) == tuple(wider) and kernel[one - 1] == 1]
    return axes[0] if len(shape) == 3 and axes else None


def trailing(shape: Sequence[int], size: int) -> tuple[int, ...] | None:
    """The last axes of a shape whose sizes multiply to `size`, as few as possible; None where none do."""
    parts = (tuple(shape[axis:]) for axis in range(len(shape) - 1, -1, -1))
    return next((part for part in parts if math.prod(part) == size), None)


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


def constant_slot(graph: OpGraph, op: Op) -> int | None:
    """The first input of an op that is a constant."""
    return next((slot for slot, key in enumerate(op.inputs) if key in graph.constants), None)


def other_input(op: Op, key: Key) -> Key | None:
    """The other operand of a binary op that reads `key` once."""
    if len(op.inputs) != 2 or (op.inputs[0] == key) == (op.inputs[1] == key):
        return None
    return op.inputs[1] if op.inputs[0] == key else op.inputs[0]
