"""Devices: what lives as long as the process, by GPU, and the pools that it lends from.

One object per GPU. What outlives a run is kept by it and nowhere else, so that two GPUs in one process share nothing.

Pools that a device hands out from: streams to executables, counters to launches of split-K kernels, and memory of the host to variables.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.device.capture import ScratchPool, is_capturing, synchronize
from msplit.errors import EngineError, OutOfMemory

_NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit order with the legacy default stream

SUPPLY = 1 << 22
"""Counters of a device: 16 MiB."""

_ALIGNED = 4
"""Counters in 16 bytes: a kernel is compiled anew for a pointer that is not a multiple of them."""


class StreamPool:
    """The CUDA streams of one GPU that nobody holds, lent to one executable at a time.

    Libraries key their workspaces by stream: two graphs captured on the same stream share one, and corrupt each other when they replay
    at the same time. PyTorch deals its streams out of a ring of 32, so they repeat. These do not.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.cuda.Stream]] = {}
        self._priorities: dict[int, int] = {}

    def lease(self, count: int, priority: int = 0) -> list[torch.cuda.Stream]:
        """Streams that nobody else holds, made when there are not enough.

        Args:
            priority: As CUDA has it: 0, or less than 0 for what is more urgent. More urgent than the device knows is as urgent as it knows.
        """
        with self._lock:
            free = self._free.setdefault(priority, [])
            taken = [free.pop() for _ in range(min(count, len(free)))]
        made = [new_stream(self._place, priority) for _ in range(count - len(taken))]
        self._priorities |= {stream.cuda_stream: priority for stream in made}
        return taken + made

    def give_back(self, streams: list[torch.cuda.Stream]) -> None:
        """Returns streams with no work in flight."""
        with self._lock:
            for stream in streams:
                self._free[self._priorities[stream.cuda_stream]].append(stream)


def new_stream(place: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream that PyTorch deals to nobody. It is never destroyed."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(place):
        check(runtime().cudaStreamCreateWithPriority(ctypes.byref(handle), _NON_BLOCKING, priority))
    return torch.cuda.ExternalStream(handle.value, device=place)


def priorities(place: torch.device) -> int:
    """Number of levels of priority that the streams of a device have: from 0 down to 1 less than that, negated."""
    least, most = ctypes.c_int(), ctypes.c_int()
    with torch.cuda.device(place):
        check(runtime().cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(most)))
    return least.value - most.value + 1


@functools.cache
def runtime() -> ctypes.CDLL:
    """The runtime library that PyTorch has loaded already."""
    return ctypes.CDLL(_library())


@functools.cache
def holding() -> ctypes.PyDLL:
    """Runtime library, called without letting go of the interpreter's lock."""
    return ctypes.PyDLL(_library())


def _library() -> str:
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    return f"libcudart.so.{major}"


def check(status: int) -> None:
    """Raises what a call of that library answered, unless it is that all is well."""
    if status:
        torch.cuda.check_error(status)


@functools.cache
def reads(reader: torch.device, owner: torch.device) -> bool:
    """True if kernels of a GPU read the memory of another one where it lies: the machine can, and PyTorch sees to it at its first copies
    between the two, so that a capture must not be the first to ask."""
    torch.zeros(1, device=reader).to(owner).to(reader)
    return bool(torch.cuda.can_device_access_peer(reader, owner))


class Semaphores:
    """Counters by which the blocks of a split-K kernel find out which of them is done last.

    Each launch has counters of its own, since any two of them may run at once. They begin at zero, and the last block puts them back. A
    launch in a captured graph runs again and again on the same counters: they are handed out of a supply that lasts for thousands of
    graphs. Those of a graph that is gone are given back (`noted`), those of graphs that are only timed are taken back (`lent`).

    Attributes:
        supply: All of them, made before the first capture that may need some.
        taken: How many are handed out, or were.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._noted: list[torch.Tensor] | None = None
        self.supply: torch.Tensor | None = None
        self.taken = 0

    def take(self, count: int) -> torch.Tensor | None:
        """Counters at zero for one launch on the current stream, captured or not; None where there are no more.

        Outside of captures they are made for the launch, which takes a kernel more: that is what runs step by step, to look for faults.
        """
        if not is_capturing():
            if self._place.type == "cuda" and self.supply is None:
                self.supply = torch.zeros(SUPPLY, dtype=torch.int32, device=self._place)
                synchronize(self._place)
            return torch.zeros(count, dtype=torch.int32, device=self._place)
        count += -count % _ALIGNED
        with self._lock:
            if self._free.get(count) and self._noted is not None:
                found = self._free[count].pop()
            elif self.supply is None or self.taken + count > SUPPLY:
                return None
            else:
                self.taken += count
                found = self.supply[self.taken - count : self.taken]
            if self._noted is not None:
                self._noted.append(found)
        return found

    @contextlib.contextmanager
    def noted(self, into: list[torch.Tensor]) -> Iterator[None]:
        """Notes what is taken inside, to be given back. One thread captures at a time."""
        self._noted = into
        try:
            yield
        finally:
            self._noted = None

    def give_back(self, counters: Sequence[torch.Tensor]) -> None:
        """Takes back what was noted for a graph that is gone. Nothing runs on it, so that all of it is at zero."""
        with self._lock:
            for one in counters:
                self._free.setdefault(len(one), []).append(one)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Block that gives back what was taken inside: for graphs that do not outlive this, and of which one runs at a time."""
        before = self.taken
        try:
            yield
        finally:
            self.taken = before


@functools.cache
def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, …ReadOnly


def pin(memory: NDArray[np.uint8], place: torch.device, *, read_only: bool = False) -> None:
    """Pins bytes of the host for a GPU, which then reads them under their own addresses, and writes them if they are not read-only.

    Raises:
        EngineError: CUDA does not pin them.
    """
    with torch.cuda.device(place):
        address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)
        status = runtime().cudaHostRegister(address, size, _PORTABLE | _READ_ONLY * read_only)
    if status:
        runtime().cudaGetLastError()  # it would be the next one's
        raise EngineError(
            f"CUDA refuses to pin {memory.nbytes / 1e9:.3g} GB of the host's memory (error {status})",
            fix="raise `ulimit -l`, or leave the memory for tables out (--table-memory)",
        )


class PinnedMemory:
    """Memory of the host that a GPU reads and writes under its own addresses, lent for variables.

    To pin memory takes long, so what is given back is lent again until it is freed. That may be at any time, also while a graph is
    captured, when memory can not be freed.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._free: dict[int, list[NDArray[np.uint8]]] = {}  # by size

    def lend(self, size: int) -> NDArray[np.uint8]:
        """So many bytes. The device may still be at work on them for who had them before.

        Raises:
            EngineError: There are not so many, or CUDA does not pin them.
        """
        with contextlib.suppress(KeyError, IndexError):
            return self._free[size].pop()
        try:
            memory = np.empty(size + 2 * mmap.PAGESIZE, np.uint8)
        except MemoryError:
            fix = "use a host with more memory, or more memory of the GPU for tables (--table-memory)"
            raise EngineError(f"the host has no {size / 1e9:.3g} GB for a table", fix=fix) from None
        begin = -memory.ctypes.data % mmap.PAGESIZE  # no page is shared with what somebody else pins
        memory = memory[begin : begin + size]
        if self._place.type == "cuda":
            pin(memory, self._place)
        return memory

    def give_back(self, memories: Sequence[NDArray[np.uint8]]) -> None:
        """Takes back what was lent."""
        for memory in memories:
            self._free.setdefault(memory.nbytes, []).append(memory)

    def free(self) -> None:
        """Frees what was given back."""
        for memories in [*self._free.values()]:
            while memories:
                memory = memories.pop()
                if self._place.type == "cuda":
                    synchronize(self._place)
                    runtime().cudaHostUnregister(ctypes.c_void_p(memory.ctypes.data))


T = TypeVar("T")

OWN_LLVM = (3, 7)
"""The first Triton whose library ends the process when it is loaded behind TensorFlow's (2.21) and finds the names of that one's LLVM."""


def load_triton() -> None:
    """Loads Triton, where it is one of these and TensorFlow was there first, so that it finds its own names. PyTorch imports it otherwise
    as soon as an op asks for PyTorch's compiler, also without a GPU. Where TensorFlow comes later, both find their own."""
    if "tensorflow" not in sys.modules or "triton" in sys.modules or not hasattr(os, "RTLD_DEEPBIND"):
        return
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return
    if (int(major), int(minor)) < OWN_LLVM:
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("triton._C.libtriton")
    finally:
        sys.setdlopenflags(flags)


class Device:
    """A GPU, or a CPU that stands in for one, with all that is kept for it between runs.

    Attributes:
        place: The device as PyTorch names it, with its index.
        streams: Streams that executables and the timer lease.
        scratch: Memory of graphs that are only timed.
        semaphores: Counters of split-K kernels.
        host_memory: Memory of variables that lie in the host's.
        compiled: Flat graph -> what was compiled of it, by the options that it was compiled with. Gone with the graph.
    """

    def __init__(self, place: torch.device) -> None:
        load_triton()
        self.place = place
        self.streams = StreamPool(place)
        self.scratch = ScratchPool(place)
        self.semaphores = Semaphores(place)
        self.host_memory = PinnedMemory(place)
        self.compiled: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Any]] = weakref.WeakKeyDictionary()
        self._owned: dict[Callable[..., Any], Any] = {}

    def __repr__(self) -> str:
        return f"Device({self.place})"

    @property
    def is_gpu(self) -> bool:
        """True if it is a GPU, and not a CPU that stands in for one."""
        return bool(self.place.type == "cuda")

    @property
    def is_current(self) -> bool:
        """True if this thread's calls of CUDA go to it, and always where it is no GPU."""
        return not self.is_gpu or torch._C._cuda_getDevice() == self.place.index

    def free_bytes(self) -> int | None:
        """Memory that nobody has; None where there is no GPU. What PyTorch keeps unused counts as taken."""
        return int(torch.cuda.mem_get_info(self.place)[0]) if self.place.type == "cuda" else None

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which they do: Triton's kernels start on the current GPU, wherever their tensors lie, and default streams are its."""
        return contextlib.nullcontext() if self.is_current else torch.cuda.device(self.place)

    def owned(self, kind: Callable[[Device], T]) -> T:
        """The device's one object of a class, made of the device when it is first asked for: its tuner, its compiled kernels.

        Example: ``Device.of(tensor.device).owned(Tuner)``.
        """
        if kind not in self._owned:
            self._owned.setdefault(kind, kind(self))
        made: T = self._owned[kind]
        return made

    @staticmethod
    def of(place: torch.device) -> Device:
        """The one object of a device; of ``cuda`` without an index, that of the current GPU."""
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        if place not in _DEVICES:
            _DEVICES.setdefault(place, Device(place))
        return _DEVICES[place]


_DEVICES: dict[torch.device, Device] = {}
"""The only table of the engine that belongs to the process."""


def out_of_memory(problem: torch.OutOfMemoryError, what: str = "", *, where: str | None = None) -> OutOfMemory:
    """Error with PyTorch's message on too little memory, without the statistics of its allocator.

    Args:
        what: The op that wanted some, if it was one.
        where: Its node.
    """
    said = str(problem).splitlines()[0].split(" GPU ")[0]
    fix = "use a smaller --batch or fewer --streams, --cuda fuse=no,group=no: what is compared is on the GPU at the same time"
    return OutOfMemory(f"{what}: {said}" if what else said, where=where, fix=fix)


@contextlib.contextmanager
def telling_out_of_memory() -> Iterator[None]:
    """Too little memory, for whatever inside, is an `OutOfMemory`."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        raise out_of_memory(problem) from problem


def forget(graph: object) -> None:
    """Lets every device go of what it has compiled of a flat graph. Executables keep what they run."""
    for device in _DEVICES.values():
        device.compiled.pop(graph, None)
        device.host_memory.free()


_LEFT = threading.Condition()
_inside: list[tuple[int, bool]] = []
"""The threads that are in a block of `precision`, and what each wants."""
_before: list[tuple[bool, ...]] = []
"""Settings that were there when the first of them came."""


@contextlib.contextmanager
def precision(ieee: bool) -> Iterator[None]:
    """TensorFlow's default (TF32 in products and convolutions alike), or IEEE float32 in both; restored afterwards.

    PyTorch has one setting for the whole process. Threads that want the same are inside together; one that wants the other waits until
    they have left.
    """
    _enter([(threading.get_ident(), ieee)])
    try:
        yield
    finally:
        _leave([(threading.get_ident(), ieee)])


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Leaves all blocks of `precision` that this thread is in, and comes back to them afterwards."""
    with _LEFT:
        mine = [one for one in _inside if one[0] == threading.get_ident()]
    _leave(mine)
    try:
        yield
    finally:
        _enter(mine)


def _enter(mine: list[tuple[int, bool]]) -> None:
    if not mine:
        return
    me, ieee = mine[-1]
    with _LEFT:
        _LEFT.wait_for(lambda: all(one == me or wanted == ieee for one, wanted in _inside))
        if not _inside:
            _before[:] = [product_switches()]
        _inside.extend(mine)
        set_product_switches(_of(ieee))


def _leave(mine: list[tuple[int, bool]]) -> None:
    with _LEFT:
        for one in mine:
            del _inside[len(_inside) - 1 - _inside[::-1].index(one)]
        if _inside:
            set_product_switches(_of(_inside[-1][1]))
        elif mine:
            set_product_switches(_before[0])
        _LEFT.notify_all()


def _of(ieee: bool) -> tuple[bool, ...]:
    """Switches: TF32 is allowed in products and in convolutions, and parts of products of either half precision may be added in it:
    never, sums are in float32."""
    return not ieee, not ieee, False, False


def product_switches() -> tuple[bool, ...]:
    """PyTorch's switches for products, as they are: in the order of `_of`."""
    matmul = torch.backends.cuda.matmul
    halves = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return matmul.allow_tf32, torch.backends.cudnn.allow_tf32, *halves


def set_product_switches(wanted: Sequence[bool]) -> None:
    """Sets PyTorch's switches for products, for the whole process."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = wanted[:2]
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = wanted[2:]
