"""The table of host ops: TensorFlow op -> a function that binds a node's attributes, and gives a function on NumPy arrays.

    @host_op("StringLower")
    def lower(node: HostNode) -> Run:
        ...
        return lambda texts: each(bytes.lower, texts)

What is bound runs in every step, so attributes are read once. Strings are arrays of objects that are `bytes`. A function gives its
output, or a tuple where the op has several. It never writes to an input. What TensorFlow's kernel refuses raises ValueError with the
reason; a node that the function is not made for raises `NotOurs` when it is bound, and TensorFlow runs the host part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.opset import schema

Run = Callable[..., Any]
"""A node's function: its data inputs in order -> its output, or a tuple of outputs."""

MODULES = ("arrays", "examples", "patterns", "program", "segments", "sparse", "strings")
"""Modules of this package that define ops."""


TYPES = ("bool", "int32", "int64", "float32", "float64", "string")
"""Types that the functions in C take, in the order of their numbers there."""


class NotOurs(Exception):
    """The op is in the table, but not with these attributes, types or inputs."""


@dataclass(frozen=True)
class HostNode:
    """A node as a host op sees it.

    Attributes:
        attrs: Attributes as `msplit.core.graph.Graph.attrs` has them, defaults filled in.
        known: Per data input its value, where it is a constant.
        table: The lookup table of its first input, where that is one.
        bodies: Programs (`HostProgram`) of the functions that it runs.
    """

    name: str
    op: str
    attrs: Mapping[str, Any]
    known: tuple[NDArray[Any] | None, ...] = ()
    table: Any = None
    bodies: tuple[Any, ...] = ()

    def dtype(self, name: str) -> str:
        """The type that an attribute names."""
        return str(self.attrs[name])

    @property
    def handles_strings(self) -> bool:
        """True if an input or output is a string."""
        types = (schema.input_dtypes(self.op, self.attrs), schema.output_dtypes(self.op, self.attrs))
        return any("string" in (some or ("string",)) for some in types)


@dataclass(frozen=True, eq=False)
class NativeNode:
    """A node as its function in C sees it.

    Attributes:
        attrs: Whole numbers.
        inputs: Numbers of the node's data inputs, and constants; None for all its inputs as they are.
    """

    attrs: Sequence[int]
    inputs: Sequence[int | NDArray[Any]] | None = None


NativeForm = str | Callable[[HostNode], NativeNode | None]
"""What an op's function in C has to know of a node: names of attributes, or what gives it, None where C is not made for the node."""

_TABLE: dict[str, Callable[[HostNode], Run]] = {}
_NATIVE: dict[str, NativeForm] = {}


def host_op(
    *ops: str, native: NativeForm | None = None
) -> Callable[[Callable[[HostNode], Run]], Callable[[HostNode], Run]]:
    """Registers the function that binds nodes of the named ops.

    Args:
        ops: The ops.
        native: What their function in host_steps.c has to know, where there is one.
    """

    def register(bind: Callable[[HostNode], Run]) -> Callable[[HostNode], Run]:
        for op in ops:
            if op in _TABLE:
                raise ValueError(f"{op} is in the table of host ops already")
            _TABLE[op] = bind
            if native is not None:
                _NATIVE[op] = native
        return bind

    return register


@functools.cache
def host_ops() -> Mapping[str, Callable[[HostNode], Run]]:
    """Every host op by name. Imports neither TensorFlow nor PyTorch."""
    for module in MODULES:
        import_module(f"msplit.engines.host.{module}")  # they register themselves here
    return _TABLE


def native_forms() -> Mapping[str, NativeForm]:
    """What C has to know of a node, by op."""
    host_ops()
    return _NATIVE


_MOST = 1 << 26


def check_size(*sizes: int) -> None:
    """Refuses values of a size that a few bytes of a request can ask for, such as the shape of a sparse tensor.

    Raises:
        ValueError: They would have more than 67 million elements.
    """
    check(math.prod(sizes) <= _MOST, f"{math.prod(sizes):,} elements are too many")


def as_bytes(value: str | bytes) -> bytes:
    """A string of an attribute."""
    return value.encode() if isinstance(value, str) else value


def objects(items: list[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of objects, one for each item."""
    made = np.empty(len(items), object)
    made[:] = items
    return made.reshape(shape)


def check(holds: Any, reason: str) -> None:
    """Raises ValueError with the reason where something does not hold."""
    if not holds:
        raise ValueError(reason)
