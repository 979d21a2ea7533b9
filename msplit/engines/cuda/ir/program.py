"""Programs: compiled models as calls in order, with the memory that stays and the buffers that calls share.

A compiled model: the calls of lowerings in order, their static inputs bound, ready to be planned for any number of streams.

Memory that stays on a device between steps: the variables of a training graph, what a program says of them, and constants.

Buffers: memory that several ops write disjoint parts of, so that what joins the parts copies nothing.

A `_Buffer` takes the memory, and launches nothing. Every op with the attribute `INTO` has it as its last input and writes parts of it; its
outputs are these parts. A `_Joined` is a view of some parts, one next to the other; it has them as inputs, beside the buffer. So who
reads it comes behind the ops that wrote those parts, and need not wait for the writers of others.

That this holds is looked at in another way, too: `BufferCoverage` tells by their places which parts each step reads and writes, and
a plan has to order those steps (`Program.conflicts`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msplit.core.dag import Dag
from msplit.core.graph import Ints
from msplit.engines.cuda.device.capture import synchronize
from msplit.engines.cuda.device.device import Device, cores
from msplit.engines.cuda.ir.dtypes import as_words, dtype_name, to_numpy, to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import PEER_COPY, Key, Op
from msplit.engines.table_rows import saved
from msplit.errors import EngineError
from msplit.opset.traits import EXCHANGES
from msplit.progress import during

REPORT = "please report this: it is a bug in msplit; run the model with another engine meanwhile (--engine tensorflow)"
"""Remedy for faults of the engine itself."""

ALIGNED = 16
"""Bytes: every variable begins at a multiple of it, since kernels of products and pointwise ops read 16 bytes at a time."""


@dataclass(frozen=True)
class Gpus:
    """Places of everything in a split program. GPUs are numbered as in `places`.

    Attributes:
        places: The GPUs, the one that takes inputs and gives outputs first.
        steps: Per step of the program where it runs; a copy where it goes.
        constants: Where each constant is.
    """

    places: tuple[torch.device, ...]
    steps: tuple[int, ...]
    constants: Mapping[Key, int]


@dataclass(frozen=True, eq=False)
class State:
    """Variables of a program: where their values are, and in which memory.

    Attributes:
        keys: Variable -> its value when a step begins.
        final: Variable -> its value when the step is over, for those that are written.
        stacks: Values that are several variables of one shape side by side.
        contiguous: Variables of one type that lie one behind the other in memory.
        initial: Variable -> its value before the first step.
        hosted: Variables that lie in the host's memory.
    """

    keys: Mapping[str, Key] = field(default_factory=dict)
    final: Mapping[str, Key] = field(default_factory=dict)
    stacks: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    contiguous: Sequence[tuple[str, ...]] = ()
    initial: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    hosted: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """Size of all variables on the device."""
        return sum(self.initial[name].nbytes for name in self.keys if name not in self.hosted)

    @property
    def host_bytes(self) -> int:
        """Size of all variables in the host's memory."""
        return sum(self.initial[name].nbytes for name in self.keys if name in self.hosted)


_WORDS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}
"""The bits move, whatever they mean."""


class _Pinned:
    """Pinned host memory as an array that a GPU can use (CUDA's addresses are the same on both sides)."""

    def __init__(self, host: Tensor) -> None:
        word = min(host.element_size(), 8)  # a complex128 is two words
        self.memory = host
        self.__cuda_array_interface__ = {
            "data": (host.data_ptr(), False),
            "shape": (host.numel() * host.element_size() // word,),
            "typestr": _WORDS[word],
            "version": 3,
        }


def seen_by(device: torch.device, host: Tensor) -> Tensor:
    """A contiguous pinned tensor as a flat tensor of words on the GPU. It must not outlive `host`."""
    if device.type == "cpu":  # for Triton's interpreter
        return as_words(host.reshape(-1))
    return torch.as_tensor(_Pinned(host), device=device)


_PIECE = 1 << 26
"""Bytes that a thread copies at a time."""


def copy_array(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Copies an array into another of its shape, by several threads: one that is a file's is read by all of them."""
    rows = max(_PIECE // max(source[:1].nbytes, 1), 1)
    with ThreadPoolExecutor(cores()) as threads:
        parts = [slice(begin, begin + rows) for begin in range(0, len(source), rows)]
        list(threads.map(lambda part: np.copyto(target[part], source[part]), parts))


class StateMemory:
    """The variables of a program on a device, where they stay: kernels and captured graphs know their addresses.

    Attributes:
        tensors: By variable.
        hosted: Those in the host's memory, as the host sees them. It does so when the device has nothing to do.
    """

    def __init__(self, state: State, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.hosted: dict[str, NDArray[Any]] = {}
        self._device = device
        self._state = state
        # By storage: first byte's address, one behind the last, variable.
        self._memory: dict[int, list[tuple[int, int, str]]] = {}
        placed = {name for names in state.contiguous for name in names}
        hosted = [name for name in state.keys if name in state.hosted and device.type != "meta"]
        if hosted:
            placed.update(hosted)
            self._host(hosted)
        for names in (*state.contiguous, *((name,) for name in state.keys if name not in placed)):
            self._allocate([name for name in names if name in state.keys], device)
        self.load(state.initial)

    def _host(self, names: Sequence[str]) -> None:
        memories, lent = Device.of(self._device).host_memory, list[NDArray[np.uint8]]()
        self._let_go = weakref.finalize(self, memories.give_back, lent)
        self._let_go.atexit = False
        for name in names:
            value = self._state.initial[name]
            lent.append(memories.lend(value.nbytes))
            self.hosted[name] = lent[-1].view(value.dtype).reshape(value.shape)
            tensor = seen_by(self._device, torch.from_numpy(lent[-1]))
            self.tensors[name] = tensor.view(torch_dtype(value.dtype.name)).view(value.shape)
            begin = tensor.data_ptr()
            self._memory[tensor.untyped_storage().data_ptr()] = [(begin, begin + value.nbytes, name)]

    def close(self) -> None:
        """Frees what is in the host's memory. The device is done with it, and nobody reads it."""
        if self.hosted:
            self._let_go()
            self.tensors = {name: tensor for name, tensor in self.tensors.items() if name not in self.hosted}
            self.hosted = {}
            Device.of(self._device).host_memory.free()

    def settle(self) -> None:
        """Waits until the device is done with what the host is about to read or to write."""
        if self.hosted and self._device.type == "cuda":
            synchronize(self._device)

    def _allocate(self, names: Sequence[str], device: torch.device) -> None:
        if not names:
            return
        values = [self._state.initial[name] for name in names]
        sizes = [-(-value.nbytes // ALIGNED) * ALIGNED for value in values]
        # Zeros between variables, and behind the last one, stay harmless where an update runs over all of them.
        memory = torch.zeros(max(sum(sizes), ALIGNED), dtype=torch.uint8, device=device)
        found = self._memory.setdefault(memory.untyped_storage().data_ptr(), [])
        start = 0
        for name, value, size in zip(names, values, sizes, strict=True):
            end = start + value.nbytes
            self.tensors[name] = memory[start:end].view(torch_dtype(value.dtype.name)).view(value.shape)
            found.append((memory.data_ptr() + start, memory.data_ptr() + end, name))
            start += size

    def values(self) -> dict[Key, torch.Tensor]:
        """Values that a step reads: each variable, and stacks of them."""
        found = {key: self.tensors[name] for name, key in self._state.keys.items()}
        return found | {key: self._stack(names) for key, names in self._state.stacks.items()}

    def _stack(self, names: Sequence[str]) -> torch.Tensor:
        first = self.tensors[names[0]]
        step = (self.tensors[names[1]].data_ptr() - first.data_ptr()) // first.element_size() if len(names) > 1 else 0
        for place, name in enumerate(names):
            if self.tensors[name].data_ptr() != first.data_ptr() + place * step * first.element_size():
                raise EngineError(f"internal error: the variable {name} does not lie in its stack", fix=REPORT)
        return torch.as_strided(first, (len(names), *first.shape), (step, *first.stride()))

    def lies_in(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The variables in whose memory a tensor's elements lie, by address."""
        found = self._memory.get(tensor.untyped_storage().data_ptr())
        if not found or not tensor.numel():
            return ()
        extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        first, last = tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()
        return tuple(name for begin, end, name in found if begin < last and first < end)

    def load(self, values: Mapping[str, Any]) -> None:
        """Gives variables other values. What is none of the program's is passed over.

        Raises:
            EngineError: A value has another shape or type.
        """
        known = {name: value for name, value in values.items() if name in self.tensors}
        for name, value in known.items():
            tensor, array = self.tensors[name], np.asarray(value)
            if tuple(array.shape) != tuple(tensor.shape) or array.dtype.name != dtype_name(tensor.dtype):
                raise EngineError(
                    f"variable {name} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, not {array.dtype} {array.shape}",
                    fix="give values of the same model",
                )
        self.settle()
        with torch.no_grad():
            for name, value in known.items():
                if name in self.hosted:
                    copy_array(np.asarray(value), self.hosted[name])
                else:
                    self.tensors[name].copy_(to_torch(np.asarray(value)))

    def save(self) -> dict[str, NDArray[Any]]:
        """The values, in memory of their own."""
        self.settle()
        return {name: self._saved(name) for name in self.tensors}

    def _saved(self, name: str) -> NDArray[Any]:
        if name not in self.hosted:
            tensor = self.tensors[name].detach()
            return saved(
                name, to_numpy(tensor.cpu() if tensor.is_cuda else tensor), np.asarray if tensor.is_cuda else np.array
            )
        return saved(name, self.hosted[name], _copied)

    def spread(self, from_first: Callable[[torch.Tensor], None]) -> None:
        """Gives variables the values that the first of several processes has, by what does so with a tensor of bytes."""
        for tensor in self.tensors.values():
            from_first(tensor.view(-1).view(torch.uint8))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block after which variables are what they were before: what is run to warm up, to tune or to time does not train."""
        self.settle()
        hosted = {name: self._saved(name) for name in self._state.final if name in self.hosted}
        written = [self.tensors[name] for name in self._state.final if name not in hosted]
        with torch.no_grad():
            saved = [tensor.clone() if _fits(tensor) else tensor.cpu() for tensor in written]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(written, saved, strict=True):
                    tensor.copy_(value)
            if written and written[0].is_cuda:
                torch.cuda.synchronize(written[0].device)
            self.load(hosted)


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    found = np.empty_like(array)
    copy_array(array, found)
    return found


def _fits(tensor: torch.Tensor) -> bool:
    """Checks that a copy on the device leaves room there; otherwise it is put aside on the host."""
    return not tensor.is_cuda or tensor.nbytes < torch.cuda.mem_get_info(tensor.device)[0] // 4


def place_of(array: NDArray[Any]) -> tuple[Any, ...]:
    """Where an array lies, and how: arrays of which this is equal are the same memory, as parts of one file are that were read twice."""
    return array.ctypes.data, array.shape, array.strides, array.dtype


class Placed:
    """Constants that lie on a device, which owns this, by the arrays that they were made of: programs of one graph share them."""

    def __init__(self, device: Device) -> None:
        self._place = device.place
        self._made: dict[Any, tuple[weakref.ref[NDArray[Any]], weakref.ref[torch.Tensor]]] = {}

    def of(self, array: NDArray[Any]) -> torch.Tensor:
        """The array on the device: what lies there as long as somebody holds it, or else a new one."""
        number = place_of(array)
        _, made = self._made.get(number, (None, None))
        tensor = None if made is None else made()
        if tensor is None:
            tensor = to_torch(array, self._place)
            gone = weakref.ref(array, lambda _: self._made.pop(number, None))  # another array may get its number
            self._made[number] = gone, weakref.ref(tensor)
        return tensor


_LEAST = 1 << 20
"""Bytes of constants that are worth to be compared with what is there."""

_AT_ONCE = 1 << 26
"""Bytes that are compared at once."""

_there: ContextVar[Mapping[Key, torch.Tensor]] = ContextVar("msplit_constants", default=MappingProxyType({}))


def sharing(constants: Mapping[Key, torch.Tensor]) -> contextlib.AbstractContextManager[object]:
    """A block in which programs share large constants with another program where these have the same values: no second copy is made."""
    return during(_there, constants)


def same_there(key: Key, array: NDArray[Any], place: torch.device) -> torch.Tensor | None:
    """The constant of `sharing` that is equal to an array to the bit; None where there is none on the device."""
    found = _there.get().get(key)
    if found is None or array.nbytes < _LEAST or not found.is_contiguous() or tuple(found.shape) != array.shape:
        return None
    if found.device != Device.of(place).place or dtype_name(found.dtype) != array.dtype.name:
        return None
    held, own = found.view(-1).view(torch.uint8), np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    pieces = range(0, own.size, _AT_ONCE)
    equal = (torch.equal(held[at : at + _AT_ONCE], to_torch(own[at : at + _AT_ONCE], place)) for at in pieces)
    return found if all(equal) else None


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
            raise EngineError(f"internal error: {op.name} joins what is not written yet", fix=REPORT)
        return tuple(inside.values())


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
        return {name: self.value(key, values, f"output {name}") for name, key in self.fetches.items()}

    def value(self, key: Key, values: Mapping[Key, torch.Tensor], reader: str) -> torch.Tensor:
        """A value of a run, or a constant.

        Raises:
            EngineError: It is neither: nothing has made it yet, or its memory was let go.
        """
        found = values.get(key, self.constants.get(key))
        if found is None:
            step = self.producers().get(key)
            name = f"value {key[1]} of op {key[0]}" if step is None else f"what {self.steps[step].op.name} makes"
            raise EngineError(
                f"internal error: {reader} needs {name}, which is not there: a wait is missing, or its memory was let go too early",
                where=reader,
                fix=REPORT,
            )
        return found

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
        assigned; one whose nodes have none where the first step that needs it does, otherwise behind one that it needs. What processes
        exchange has a stream of its own: nothing but what needs it waits for the others.
        """
        chosen = self._chosen(ids)
        chosen[[step.op.op in EXCHANGES for step in self.steps]] = max(int(ids.max(initial=0)), 0) + 1
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
