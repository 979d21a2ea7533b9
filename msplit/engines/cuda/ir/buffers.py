"""Buffers: memory that several ops write disjoint parts of, so that what joins the parts copies nothing.

A `_Buffer` takes the memory, and launches nothing. Every op with the attribute `INTO` has it as its last input and writes parts of it; its
outputs are these parts. A `_Joined` is a view of some parts, one next to the other; it has them as inputs, beside the buffer. So who
reads it comes behind the ops that wrote those parts, and need not wait for the writers of others.

That this holds is looked at in another way, too: `BufferCoverage` tells by their places which parts each step reads and writes, and
a plan has to order those steps (`Program.conflicts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from msplit.engines.cuda.ir.graph import Key, Op
from msplit.errors import EngineError

BUFFER, JOINED = "_Buffer", "_Joined"

INTO = "_into"
"""Attribute of an op that writes outputs into a buffer, its last input: a `Part` for each of them."""

PART = "_part"
"""Attribute of a `_Joined`: the part of the buffer that it is."""


class Part(NamedTuple):
    """Place of an op's output in a buffer.

    Attributes:
        port: The output.
        axis: Axis of the buffer along which it is a part.
        start: Its first place there.
        size: Its places.
    """

    port: int
    axis: int
    start: int
    size: int

    def of(self, buffer: Tensor) -> Tensor:
        """The part of a buffer."""
        return buffer.narrow(self.axis, self.start, self.size)


def parts_of(op: Op) -> tuple[Part, ...]:
    """Parts that an op writes into a buffer. A model's node can have an attribute of this name, but no parts."""
    parts = op.attrs.get(INTO, ())
    return parts if isinstance(parts, tuple) and all(isinstance(one, Part) for one in parts) else ()


def without_place(op: Op) -> Op:
    """An op as it would be if it wrote into no buffer."""
    if not parts_of(op):
        return op
    return replace(op, attrs={name: value for name, value in op.attrs.items() if name != INTO}, inputs=op.inputs[:-1])


class BufferCoverage:
    """Parts of buffers that values are made of, step by step. A part is named by its buffer and its place."""

    def __init__(self) -> None:
        self._written: dict[Key, dict[Part, str]] = {}  # of each buffer
        self._covers: dict[Key, tuple[str, ...]] = {}

    def of_step(self, op: Op, outputs: int, *, launches: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The parts that a step reads and those that it writes.

        Raises:
            EngineError: It reads a part that no step before it writes.
        """
        parts = parts_of(op)
        if op.op == BUFFER:
            self._written[op.node, 0] = {}
        for part in parts:
            buffer = op.inputs[-1]
            name = f"buffer {buffer[0]}, {part.start} to {part.start + part.size}"
            self._written[buffer][part._replace(port=0)] = name
            self._covers[op.node, part.port] = (name,)
        reads = self._joined(op) if op.op == JOINED else self._read(op.inputs)
        if reads and not launches:
            self._covers |= {(op.node, port): reads for port in range(outputs)}
        return reads, tuple(self._covers[op.node, part.port][0] for part in parts)

    def _read(self, keys: Sequence[Key]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for key in keys for name in self._covers.get(key, ())))

    def _joined(self, op: Op) -> tuple[str, ...]:
        whole: Part = op.attrs[PART]
        end = whole.start + whole.size
        inside = {one: name for one, name in self._written[op.inputs[0]].items() if whole.start <= one.start < end}
        if sum(one.size for one in inside) != whole.size:
            raise EngineError(f"internal error: {op.name} joins what is not written yet", fix="please report this")
        return tuple(inside.values())
