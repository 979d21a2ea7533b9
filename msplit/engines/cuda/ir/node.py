"""A node as a lowering sees it, and how a lowering refuses one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Unsupported(Exception):
    """A lowering exists, but not for these attributes, dtypes or shapes. The message says which."""


MAY_NOT_RUN = "_may_not_run"
"""Attribute that the engine gives an op of a turn that a loop may not have, or of a branch that may not be taken: then its inputs may be
any values, and nothing takes its result."""


@dataclass(frozen=True)
class Node:
    """One node as a lowering sees it.

    Attributes:
        attrs: Attributes as plain values: ints, floats, bools, str for strings, dtype names such as ``"float32"`` for types,
            tuples for lists, and for shapes a tuple of ints with None for an unknown size (None alone: unknown rank).
            An attribute may be absent where the file left out its default: use `get`.
        nchw: Layout of the convolution kernels: False keeps TensorFlow's NHWC data as it lies (PyTorch's channels last),
            True makes 4-D convolution and pooling outputs lie as NCHW in memory. The tensor's logical shape is the same.
        room: Output port -> memory that the output is to lie in. A lowering that can makes it there and returns that very tensor; what it
            makes elsewhere is copied.
    """

    name: str
    op: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    nchw: bool = False
    room: Mapping[int, Tensor] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """The attribute, or the default where the file left it out."""
        return self.attrs.get(name, default)
