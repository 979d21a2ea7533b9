"""One object per GPU. What outlives a run is kept by it and nowhere else, so that two GPUs in one process share nothing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from msplit.engines.cuda.device.capture import ScratchPool
from msplit.engines.cuda.device.pools import Semaphores, StreamPool
from msplit.errors import OutOfMemory

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
        compiled: Flat graph -> what was compiled of it, by the options that it was compiled with. Gone with the graph.
    """

    def __init__(self, place: torch.device) -> None:
        load_triton()
        self.place = place
        self.streams = StreamPool(place)
        self.scratch = ScratchPool(place)
        self.semaphores = Semaphores(place)
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
