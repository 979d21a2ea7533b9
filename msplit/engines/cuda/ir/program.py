"""A compiled model: the calls of lowerings in order, their static inputs bound, ready to be planned for any number of streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.core.dag import Dag
from msplit.core.graph import Ints
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.ir.gpus import PEER_COPY, Gpus
from msplit.engines.cuda.ir.graph import Key, Op
from msplit.engines.cuda.ir.state import State


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of a lowering, its static inputs bound.

    Attributes:
        call: Takes the tensors of `inputs`, returns a tuple of tensors.
        inputs: Values read on the device.
        outputs: How many values it makes: keys ``(op.node, 0..outputs-1)``.
        launches: Whether it launches kernels; a view of its input launches nothing.
        bytes: Device bytes it allocates for its outputs.
        bases: Per output the step in whose memory it lies (itself, or the producer that it is a view of), -1 for a constant's or
            an input's memory.
        varying: Whether the shapes of its outputs differ from run to run, so that what the trace saw of its memory need not hold.
        bound: Input slot -> value, of the inputs that `call` has bound already.
        traffic: Bytes of its inputs, each once, and of its outputs; 0 where nobody looked.
        scattered: How many of its inputs do not lie in one piece in row-major order.
        reads: Variables in whose memory it reads, by address, and parts of buffers.
        writes: Those that it changes in place, and those that it makes.
    """

    op: Op
    call: Callable[..., tuple[Any, ...]]
    inputs: tuple[Key, ...]
    outputs: int
    launches: bool
    bytes: int
    bases: tuple[int, ...]
    varying: bool = False
    bound: Mapping[int, NDArray[Any]] = field(default_factory=dict)
    traffic: int = 0
    scattered: int = 0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


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
        fed: Input name -> shape and dtype name that the program was traced with.
        unrolled, streamless: See `OpGraph`.
        state: Variables, of a training graph.
        gpus: Where everything is, of a program for several GPUs.
    """

    steps: tuple[KernelCall, ...]
    constants: Mapping[Key, torch.Tensor]
    feeds: Mapping[str, Key]
    fetches: Mapping[str, Key]
    known: Mapping[str, NDArray[Any]]
    dag: Dag
    dynamic: tuple[int, ...] = ()
    fed: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    unrolled: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    streamless: frozenset[int] = frozenset()
    state: State = field(default_factory=State)
    gpus: Gpus | None = None

    def conflicts(self) -> Dag:
        """Steps that must not run at the same time since one writes memory of a variable, or a part of a buffer, that the other reads or
        writes, in the order of `steps`. It is known by addresses, not from the graph: `dag` has to have each of these edges, or a path."""
        readers: dict[str, list[int]] = {}
        writer: dict[str, int] = {}
        edges: list[tuple[int, int]] = []
        for number, step in enumerate(self.steps):
            if not step.launches:
                continue
            for name in step.writes:
                edges += [(reader, number) for reader in readers.pop(name, ())]
            for name in {*step.reads, *step.writes}:
                if name in writer:
                    edges.append((writer[name], number))
            for name in step.reads:
                if name not in step.writes:
                    readers.setdefault(name, []).append(number)
            writer |= dict.fromkeys(step.writes, number)
        return Dag.of(len(self.steps), [first for first, _ in edges], [second for _, second in edges])

    def producers(self) -> dict[Key, int]:
        """Step that makes each value."""
        return {(step.op.node, port): number for number, step in enumerate(self.steps) for port in range(step.outputs)}

    def results(self, values: Mapping[Key, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs that a run made, or that are constants."""
        return {name: values[key] if key in values else self.constants[key] for name, key in self.fetches.items()}

    def known_outputs(self) -> dict[str, NDArray[Any]]:
        """The outputs that are known, as arrays that the caller may change."""
        return {name: value.copy() for name, value in self.known.items()}

    def known_tensors(self, device: torch.device) -> dict[str, Any]:
        """The known outputs on a device; strings, which have no place there, as arrays."""
        known = self.known_outputs()
        return {name: value if value.dtype.kind in "OSU" else to_torch(value, device) for name, value in known.items()}

    def lanes(self, ids: Ints) -> tuple[Ints, int]:
        """Stream of each step from the stream ids of the flat graph, numbered without gaps; -1 for steps that launch nothing.

        A step that does the work of several nodes runs where the first of them that has a stream (the product or convolution) is
        assigned; one whose nodes have none where the first step that needs it does, otherwise behind one that it needs.
        """
        chosen = self._chosen(ids)
        launches = np.asarray([step.launches for step in self.steps], np.bool_)
        used, numbered = np.unique(np.maximum(chosen[launches], 0), return_inverse=True)
        lanes = np.full(len(self.steps), -1, np.int32)
        lanes[launches] = numbered
        return lanes, len(used)

    def lanes_on_gpus(self, ids: Ints, streams: int) -> Ints:
        """Stream of each step of a program for several GPUs, of which each has so many of the ids.

        Where one copies to another, the other has a stream for that. Stream 0 is on the first GPU, whether it does something or not."""
        assert self.gpus is not None
        gpu = np.asarray(self.gpus.steps, np.int32)
        chosen = np.maximum(self._chosen(ids), 0)
        lanes = np.where(chosen // streams == gpu, chosen, gpu * streams)
        came = {key: self.gpus.steps[number] for key, number in self.producers().items()}
        count = len(self.gpus.places)
        for number, step in enumerate(self.steps):
            if step.op.op == PEER_COPY:
                lanes[number] = count * streams + gpu[number] * count + came.get(step.inputs[0], 0)
        lanes[[not step.launches for step in self.steps]] = -1
        used = np.unique(np.append(lanes[lanes >= 0], 0))
        return np.where(lanes < 0, -1, np.searchsorted(used, lanes)).astype(np.int32)

    def _chosen(self, ids: Ints) -> Ints:
        """Stream of each step, or that of its neighbours."""
        chosen = np.asarray([self._stream_of(step, ids) for step in self.steps], np.int32)
        for after, (start, near) in ((True, self.dag.consumers()), (False, (self.dag.start, self.dag.src))):
            starts, others = start.tolist(), near.tolist()
            follow = np.flatnonzero(chosen == _FOLLOWS).tolist()
            for number in reversed(follow) if after else follow:
                found = (int(chosen[one]) for one in others[starts[number] : starts[number + 1]])
                chosen[number] = next((stream for stream in found if stream != _FOLLOWS), _FOLLOWS)
        return chosen

    def _stream_of(self, step: KernelCall, ids: Ints) -> int:
        if not step.launches:
            return _FOLLOWS
        return next((int(ids[node]) for node in step.op.source_nodes if node not in self.streamless), _FOLLOWS)


_FOLLOWS = -2
"""The stream of a step that has none of its own, until its neighbours' are known."""
