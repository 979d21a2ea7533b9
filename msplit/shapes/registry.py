"""Table of shape functions, and the types of a graph's tensors.

The table of shape functions: TensorFlow op -> a function from input shapes to output shapes.

A shape function is one small function in one file of this package. It takes the node and returns one shape per output:

    @shape_function("MatMul")
    def matmul(node: Node) -> Outputs:
        ...

A shape is a tuple of sizes with None for an unknown size; None alone is an unknown rank. A function asks for what it needs
(`node.shape(0)`, `node.value(1)`, `node.attr("axis", 0)`) and says None for what it can not know. It may raise ValueError, IndexError or
TypeError on a node that contradicts itself or tells too little (`node.ranked(0)`): all outputs that something reads then count as unknown.
Most ops for which one expression says it are in `simple`, with a lambda.

Sizes and names of element types, and the types of a graph's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from msplit.opset import schema
from msplit.opset.traits import ops_with

Sizes = tuple[int | None, ...]
Shape = Sizes | None
Outputs = tuple[Shape, ...]
Value = NDArray[Any]
"""A small static tensor: int64 or float64, with `UNKNOWN` (or NaN) for elements that are not known."""

UNKNOWN = int(np.iinfo(np.int64).min)
"""Stands for an unknown element of an integer value."""

MAX_OUTPUTS = 1_000_000
"""Most outputs of a node that are believed: a damaged file must not fill the memory."""

MAX_RANK = 254
"""Most axes that TensorFlow allows: what asks for more is no statement, and must not fill the memory."""

MAX_SIZE = 2**63 - 1
"""Longest axis that TensorFlow can count; a chain of repetitions could go on for ever."""

UNKNOWN_OUTPUT: Outputs = (None,)


class Handle:
    """Data behind a resource or variant tensor: the variable, list or array that it refers to.

    Attributes:
        shape: Shape of the variable, or of one element of a tensor list or tensor array.
        length: Number of elements of a tensor list or tensor array, where it is known.
    """

    __slots__ = ("length", "shape")

    def __init__(self, shape: Shape, length: int | None = None) -> None:
        self.shape = plain_shape(shape)
        self.length = length


@dataclass(slots=True, eq=False)
class Node:
    """A node as a shape function sees it.

    Attributes:
        op, attrs: Of the graph.
        inputs: Shapes of its data inputs.
        given: Static values of its data inputs, None where not known, or what finds them; see `values`.
        handles: What its data inputs refer to, None where they are plain tensors.
        outputs: Number of outputs that something in the graph reads, at least.
        room: Most outputs that it is believed to have, see `msplit.shapes.walk`.
    """

    op: str
    attrs: Mapping[str, Any]
    inputs: list[Shape]
    given: list[Value | None] | Callable[[], list[Value | None]]
    handles: list[Handle | None]
    outputs: int = 1
    room: int = MAX_OUTPUTS

    @property
    def values(self) -> list[Value | None]:
        """Static values of the data inputs. Most shape functions never ask: it is only then that constants are decoded."""
        if callable(self.given):
            self.given = self.given()
        return self.given

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default where the file leaves it out."""
        return self.attrs.get(name, default)

    def count(self, name: str, default: int = 0) -> int:
        """An attribute that says how many outputs there are.

        Raises:
            ValueError: It is negative, or more than any graph has.
        """
        number = int(self.attrs.get(name, default))
        if not 0 <= number <= self.room:
            raise ValueError(f"{name} is {number}")
        return number

    def shape(self, index: int = 0) -> Shape:
        """Shape of an input; unknown rank where the node has no such input."""
        return self.inputs[index] if -len(self.inputs) <= index < len(self.inputs) else None

    def ranked(self, index: int = 0) -> Sizes:
        """Shape of an input whose rank is known.

        Raises:
            ValueError: It is not. Then nothing is known of any output.
            IndexError: There is no such input.
        """
        return sure(self.inputs[index])

    def value(self, index: int) -> Value | None:
        """Static value of an input, or None."""
        return self.values[index] if -len(self.values) <= index < len(self.values) else None

    def ints(self, index: int) -> list[int | None] | None:
        """Static integer value of an input as a flat list, None for unknown elements; None where nothing is known."""
        value = self.value(index)
        return None if value is None else as_ints(value)

    def whole(self, index: int) -> list[int]:
        """Static integer value of an input of which every element is known.

        Raises:
            ValueError: One is not.
        """
        return [sure(number) for number in sure(self.ints(index))]

    def scalar(self, index: int) -> int | None:
        """Static integer value of a scalar input, or None."""
        flat = self.ints(index)
        return flat[0] if flat else None

    def sizes(self, index: int) -> Shape:
        """The shape that the value of an input gives; where the value is not known, its length still gives the rank."""
        sizes = self.ints(index)
        if sizes is not None:
            return shape_from(sizes)
        vector = self.shape(index)
        return unsized(vector[0]) if vector and (vector[0] or 0) <= MAX_RANK else None

    def handle(self, index: int = 0) -> Handle | None:
        """The data behind an input that is a handle, or None."""
        return self.handles[index] if index < len(self.handles) else None

    def element(self) -> Shape:
        """Shape of the variable, or of an element of the list or array, that the first input refers to."""
        handle = self.handle()
        return None if handle is None else handle.shape

    def length(self) -> int | None:
        """Number of elements of the list or array that the first input refers to, where it is known."""
        handle = self.handle()
        return None if handle is None else handle.length


_Found = TypeVar("_Found")


def sure(found: _Found | None) -> _Found:
    """Gives what a function can not do without.

    Raises:
        ValueError: It is None. Then nothing is known of what the function was asked for.
    """
    if found is None:
        raise ValueError("unknown")
    return found


def require(holds: Any) -> None:
    """Ends a function that can tell nothing unless a condition holds.

    Raises:
        ValueError: It does not.
    """
    if not holds:
        raise ValueError("unknown")


def shape_text(shape: Sequence[int | None]) -> str:
    """A shape in a message: "[?, 224, 224, 3]"."""
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


OpFunction = TypeVar("OpFunction")
ShapeFunction = Callable[[Node], Outputs]

HandleFunction = Callable[[Node], "Sequence[Handle | None]"]
"""By op, the function that gives the handles of its outputs."""

SHAPE_FUNCTIONS: dict[str, ShapeFunction] = {}
HANDLE_FUNCTIONS: dict[str, HandleFunction] = {}
SAME_SHAPE = ops_with("same shape")
"""Ops whose only output has the shape of their first input: the fast path of the inference. They have no function."""


def registering(
    table: dict[str, OpFunction], *others: Container[str]
) -> Callable[..., Callable[[OpFunction], OpFunction]]:
    """Makes the decorator ``@decorator("Op", ...)`` that enters functions in a table by op. An op that is in one of them is an error."""

    def decorator(*ops: str) -> Callable[[OpFunction], OpFunction]:
        def register(function: OpFunction) -> OpFunction:
            for op in ops:
                if any(op in known for known in (table, *others)):
                    raise ValueError(f"{op} has a function already")
                table[op] = function
            return function

        return register

    return decorator


shape_function = registering(SHAPE_FUNCTIONS, SAME_SHAPE)
handle_function = registering(HANDLE_FUNCTIONS)
"""For the function that says what the outputs of ops refer to: only of resources, lists and arrays."""


def as_ints(value: Value) -> list[int | None]:
    """A value's elements as Python ints, None for unknown ones."""
    if value.dtype.kind == "f":
        return [None if item != item else int(item) for item in value.ravel().tolist()]
    return [None if item == UNKNOWN else int(item) for item in value.ravel().tolist()]


def shape_from(sizes: Iterable[int | None] | None) -> Shape:
    """A shape given as a vector of sizes, where negative means unknown."""
    return None if sizes is None else tuple(None if size is None or size < 0 else size for size in sizes)


def plain_shape(shape: Any) -> Shape:
    """An attribute as a shape. Attributes of a damaged file may hold anything: what is not a shape is no statement."""
    if not isinstance(shape, tuple) or len(shape) > MAX_RANK:
        return None
    return tuple(int(size) if isinstance(size, int) and 0 <= size <= MAX_SIZE else None for size in shape)


def rank(shape: Shape) -> int | None:
    """Number of axes."""
    return None if shape is None else len(shape)


def unsized(rank: int | None) -> Shape:
    """A shape of which only the rank is known, if that."""
    return None if rank is None else (None,) * rank


def known(shape: Shape) -> TypeGuard[tuple[int, ...]]:
    """True if the rank and all sizes are known."""
    return shape is not None and None not in shape


def product(sizes: Iterable[int | None]) -> int | None:
    """Product of sizes; unknown as soon as one is, unless another is 0."""
    result: int | None = 1
    for size in sizes:
        if size == 0:
            return 0
        result = None if result is None or size is None else result * size
    return result


def total(sizes: Iterable[int | None]) -> int | None:
    """Sum of sizes; unknown as soon as one is."""
    result = 0
    for size in sizes:
        if size is None:
            return None
        result += size
    return result


def least(first: int | None, second: int | None) -> int | None:
    """The smaller of two sizes; unknown where one is."""
    return None if first is None or second is None else min(first, second)


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        ValueError: It is out of range.
    """
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} is out of range for rank {rank}")
    return axis % rank if rank else 0


def merge_dim(first: int | None, second: int | None) -> int | None:
    """Merge two statements about one size."""
    return second if first is None else first


def merge(first: Shape, second: Shape) -> Shape:
    """Merge two statements about one shape; the first wins where they contradict each other."""
    if first is None:
        return second
    if second is None or len(first) != len(second) or None not in first:
        return first
    return tuple(merge_dim(a, b) for a, b in zip(first, second, strict=True))


def join(first: Shape, second: Shape) -> Shape:
    """Join the shapes of a tensor that has either one or the other."""
    if first == second:
        return first
    if first is None or second is None or len(first) != len(second):
        return None
    return tuple(a if a == b else None for a, b in zip(first, second, strict=True))


def broadcast(first: Shape, second: Shape) -> Shape:
    """NumPy's broadcasting on shapes with unknown sizes. Sizes that contradict each other give an unknown size."""
    if first is None or second is None:
        return None
    if first == second:
        return first
    short, long = (first, second) if len(first) <= len(second) else (second, first)
    if not short:
        return long
    lead = len(long) - len(short)
    return long[:lead] + tuple(_broadcast_dim(a, b) for a, b in zip(short, long[lead:], strict=True))


def _broadcast_dim(first: int | None, second: int | None) -> int | None:
    if first == second or second == 1:
        return first
    if first == 1:
        return second
    if first is None or second is None:
        return merge_dim(first, second)
    return None


def is_float(dtype: str) -> bool:
    """True if arithmetic on it is floating-point."""
    return dtype.startswith(("float", "bfloat", "complex"))


@cache
def _rule(op: str) -> tuple[str, str, str] | None:
    """(fixed type, attribute, default) of an op that has exactly one output; None for the others."""
    info = schema.lookup(op)
    if info is None or len(info.outputs) != 1:
        return None
    output = info.outputs[0]
    if output.number_attr or output.type_list_attr:
        return None
    return output.dtype, output.type_attr, str(info.defaults.get(output.type_attr, ""))


def output_dtypes(op: str, attrs: Mapping[str, Any], most: int = schema.MAX_TENSORS) -> tuple[str, ...]:
    """Types of a node's outputs, of the first `most` at least; references count as what they refer to.

    One that neither the op table nor an attribute says is "".
    """
    rule = _rule(op)
    if rule is not None:
        fixed, attribute, default = rule
        given = fixed or attrs.get(attribute)
        return (given if isinstance(given, str) else default,)
    try:
        known = schema.output_dtypes(op, attrs, most)
    except TypeError:
        # An attribute that is not what the op says it is.
        known = None
    if known is not None:
        return tuple(dtype.removesuffix("_ref") if isinstance(dtype, str) else "" for dtype in known)
    for name in ("Tout", "output_types", "out_type", "dtype", "T", "Tparams"):
        given = attrs.get(name)
        if isinstance(given, str) and given:
            return (given,)
        if isinstance(given, tuple) and given and all(isinstance(item, str) for item in given):
            return given
    return ()
