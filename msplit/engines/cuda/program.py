"""What the cuda engine turns a graph into: first ops with their constants, then, once traced, steps ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msplit.dag import Dag
from msplit.graph import Ints

if TYPE_CHECKING:
    import torch

Key = tuple[int, int]
"""A value: (op, output port)."""


@dataclass
class Op:
    """One node on its way to the GPU. Rewrites change ops in place and drop those that are absorbed.

    Attributes:
        node: The flat node; the op's number in `Source.ops` too.
        name: For messages.
        op: TensorFlow op whose lowering runs it.
        attrs: Plain attributes.
        inputs: Data inputs by slot.
        covers: Every flat node that this op does the work of, itself first.
    """

    node: int
    name: str
    op: str
    attrs: dict[str, Any]
    inputs: list[Key]
    covers: list[int] = field(default_factory=list)


@dataclass
class Source:
    """The part of a flat graph that the engine runs, constants evaluated.

    Attributes:
        ops: By flat node, in topological order.
        constants: Values known before anything runs.
        feeds: Input name -> the value that is fed.
        fetches: Output name -> value.
    """

    ops: dict[int, Op]
    constants: dict[Key, NDArray[Any]]
    feeds: dict[str, Key]
    fetches: dict[str, Key]

    def consumers(self) -> dict[Key, list[int]]:
        """Ops that read each value, one entry per read, in op order."""
        readers: dict[Key, list[int]] = {}
        for number, op in self.ops.items():
            for key in op.inputs:
                readers.setdefault(key, []).append(number)
        return readers

    def prune(self) -> None:
        """Drops ops that no fetch needs."""
        needed: set[int] = set()
        stack = [key[0] for key in self.fetches.values()]
        while stack:
            number = stack.pop()
            if number in needed or number not in self.ops:
                continue
            needed.add(number)
            stack.extend(key[0] for key in self.ops[number].inputs if key not in self.constants)
        self.ops = {number: op for number, op in self.ops.items() if number in needed}


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a lowering, its static inputs bound.

    Attributes:
        op: What it does.
        call: Takes the tensors of `inputs`, returns a tuple of tensors.
        inputs: Values read on the device.
        outputs: How many values it makes: keys ``(op.node, 0..outputs-1)``.
        launches: Whether it launches kernels; a view of its input launches nothing.
        bytes: Device bytes it allocates for its outputs.
        bases: Per output the step in whose memory it lies (itself, or the producer that it is a view of), -1 for a constant's or
            an input's memory.
    """

    op: Op
    call: Callable[..., tuple[Any, ...]]
    inputs: tuple[Key, ...]
    outputs: int
    launches: bool
    bytes: int
    bases: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """A traced graph: all shapes known, ready to be planned for any number of streams.

    Attributes:
        steps: In topological order.
        constants: Tensors on the device, shared by every executable of this program.
        feeds: Input name -> value.
        fetches: Output name -> value on the device.
        known: Output name -> value that depends on no input and needs no run.
        dag: Dependencies between steps, in the order of `steps`.
        dynamic: Steps whose output shapes depend on values, or that read a value on the host: such a program can not be captured.
    """

    steps: tuple[Step, ...]
    constants: Mapping[Key, torch.Tensor]
    feeds: Mapping[str, Key]
    fetches: Mapping[str, Key]
    known: Mapping[str, NDArray[Any]]
    dag: Dag
    dynamic: tuple[int, ...] = ()

    def producers(self) -> dict[Key, int]:
        """Step that makes each value."""
        return {(step.op.node, port): number for number, step in enumerate(self.steps) for port in range(step.outputs)}

    def lanes(self, ids: Ints) -> tuple[Ints, int]:
        """Stream of each step from the stream ids of the flat graph, numbered without gaps; -1 for steps that launch nothing.

        A step that does the work of several nodes runs where its first node (the product or convolution) is assigned.
        """
        chosen = np.asarray([int(ids[step.op.covers[0]]) if step.launches else -1 for step in self.steps], np.int32)
        used = np.unique(chosen[chosen >= 0])
        lanes = np.where(chosen >= 0, np.searchsorted(used, chosen), -1).astype(np.int32)
        return lanes, len(used)
