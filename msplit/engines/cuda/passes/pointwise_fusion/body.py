"""Bodies of groups: the lowerings of their ops, one after the other, as one function of the values they read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import attrs_key
from msplit.engines.cuda.ir.interpret import as_tuple
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels.codec import decode, encode
from msplit.engines.cuda.passes.pattern import value_key

FUSED = "_FusedPointwise"
"""Op of a group that is one kernel."""

Reference = tuple[int, int]
"""A value inside a body: (call, output port), or (-1, number) for a value that the group reads."""


@dataclass(frozen=True, eq=False)
class Call:
    """One op of a group.

    Attributes:
        op: TensorFlow op.
        attrs: Its attributes.
        arguments: By slot: a value, or the array of a static input.
    """

    op: str
    attrs: Mapping[str, Any]
    arguments: tuple[Reference | NDArray[Any], ...]

    def key(self) -> tuple[Any, ...]:
        """Equal for calls that do the same, whatever their nodes are called."""
        arguments = tuple(value_key(value) if isinstance(value, np.ndarray) else value for value in self.arguments)
        return self.op, attrs_key(self.attrs), arguments


@dataclass(frozen=True, eq=False)
class Body:
    """A group without its place in a graph. Two groups with equal keys share a kernel.

    Attributes:
        calls: In an order in which every value is made before it is read.
        inputs: How many values it reads.
        outputs: The values that are wanted outside.
        key: What it computes.
    """

    calls: tuple[Call, ...]
    inputs: int
    outputs: tuple[Reference, ...]
    key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (tuple(call.key() for call in self.calls), self.inputs, self.outputs))

    def __repr__(self) -> str:
        """Short, and the same for bodies that compute the same."""
        return f"Body({hashlib.sha256(repr(self.key).encode()).hexdigest()[:16]})"

    def __call__(self, *tensors: Any) -> list[Any]:
        """Runs it op by op: what a kernel of the group must give."""
        made: list[Sequence[Any]] = []
        lowerings = table()

        def value(reference: Reference | NDArray[Any]) -> Any:
            if isinstance(reference, np.ndarray):
                return reference
            call, port = reference
            return tensors[port] if call < 0 else made[call][port]

        for call in self.calls:
            arguments = [value(argument) for argument in call.arguments]
            made.append(as_tuple(lowerings[call.op].function(Node(call.op, call.op, call.attrs), *arguments)))
        return [made[call][port] for call, port in self.outputs]

    def packed(self) -> Any:
        """All of it as plain data for JSON.

        Raises:
            TypeError: Something in it has no such form.
        """
        calls = [[call.op, encode(dict(call.attrs)), encode(call.arguments)] for call in self.calls]
        return [calls, self.inputs, encode(self.outputs)]

    @staticmethod
    def unpacked(data: Any) -> Body:
        """Restores a body from `packed` data: it has the same key."""
        calls, inputs, outputs = data
        made = (Call(op, decode(attrs), decode(arguments)) for op, attrs, arguments in calls)
        return Body(tuple(made), inputs, decode(outputs))
