"""Copies that take no longer than they must: within the host's memory, while other processes want the processors, too, and to a GPU."""

from __future__ import annotations

import ctypes
import os
import platform
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.device.device import Device, check, cores, holding, runtime
from msplit.engines.environment import THREADS, THREADS_BYTES, native_threads
from msplit.progress import LOG

CAN_POLL = platform.machine() in ("x86_64", "AMD64")
"""On these processors memory changes, for all who look, in the order in which it was written: where a number is new, what it tells of is
there, whether it comes from the GPU or goes to it."""

_SENT_BYTES = 1 << 19
"""Bytes of a part that they copy before it is told of, at least."""
_SHARED_BYTES = 1 << 23
"""Without native threads, arrays from this size on are copied by several of Python's: with the bus, 4 MB take one thread 0.41 ms and two
0.46; 8 MB 0.77 and 0.60."""
_HELPER_BYTES = 1 << 24
"""Bytes for which there is one more helper. To wake one takes about 0.1 ms: 16 MB take 0.9 ms with one to three and 1.8 with eleven, 134 MB
12.4 with one, 7.2 with three and 4.6 with eleven (`benchmarks/notes/probes.md`)."""
_MOST_HELPERS = 11
_LARGEST_PIECE = 1 << 22
"""Bytes of a piece that helpers take: the first pieces of 100 MB are to be there soon."""
_FEW_PIECES = 8
"""Pieces of an array that is copied by one thread: telling of each takes it 5 µs where that issues a copy."""
_PORTABLE = 1  # cudaHostRegisterPortable: all GPUs read it
_ON_HOST = 1  # cudaMemoryTypeHost: it was allocated by CUDA, or is registered
_TO_DEVICE, _ON_DEVICE = 1, 3  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice

Tell = Callable[[int, int], object]
"""Function that is called with the first byte of a piece, and with the one behind its last."""


class AsyncCopy:
    """Copies bytes of a block, pinned or on a GPU, to the same place of a block of the same size on that GPU, without a kernel of ours.

    `Tensor.copy_` takes the host 6 µs, CUDA's own call 2. Without a GPU, as in tests, both blocks are in the host's memory.

    Args:
        stream: CUDA's handle of the stream to issue copies on; None: the caller's current one.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, stream: int | None = None) -> None:
        self._source, self._target, self._stream = source, target, stream
        self._index: int | None = target.device.index if target.device.type == "cuda" else None
        if self._index is not None:
            self._copy = runtime().cudaMemcpyAsync
            self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
            self._from, self._to = source.data_ptr(), target.data_ptr()
            self._kind = _ON_DEVICE if source.is_cuda else _TO_DEVICE

    def send(self, first: int, last: int) -> None:
        """Issues the copy of the bytes from `first` on, before `last`."""
        if self._index is None:
            self._target[first:last].copy_(self._source[first:last])
            return
        check(self._copy(self._to + first, self._from + first, last - first, self._kind, self._current()))

    def send_from(self, array: NDArray[Any], first: int) -> bool:
        """Issues the copy of an array, in memory that the GPU reads (`HostMemory`), to the bytes from `first` on. The array stays as it is
        until that is over. False where CUDA refuses: parts of it may have been registered apart."""
        if self._index is None:
            self._target[first : first + array.nbytes].copy_(torch.from_numpy(array.reshape(-1).view(np.uint8)))
            return True
        if self._copy(self._to + first, array.ctypes.data, array.nbytes, _TO_DEVICE, self._current()):
            runtime().cudaGetLastError()  # it would be the next one's error; that of a GPU that has failed stays
            return False
        return True

    def _current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index) if self._stream is None else self._stream


class _PointerAttributes(ctypes.Structure):
    """CUDA's cudaPointerAttributes. CUDA 13 has 64 bytes more than CUDA 12 behind what is read here, and writes all of them."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("on_device", ctypes.c_void_p),
        ("on_host", ctypes.c_void_p),
        ("reserved", ctypes.c_long * 32),
    )


class HostMemory:
    """Memory of the host that a GPU reads where it lies: pinned by PyTorch or another library, or registered with CUDA, here or elsewhere.

    CUDA is asked each time, which takes a µs: what was registered may not be any more. Where CUDA has another opinion when it copies,
    values are right all the same, since it reads any memory of the host. Without a GPU, as in tests, it is what was registered here.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._refused = device, False
        self._registered: dict[int, int] = {}

    def register(self, address: int, size: int) -> bool:
        """Has the GPU read memory, whole pages of it, where it lies. False where CUDA refuses, which the log says once.

        It stays so until it is `release`d.
        """
        status = 0
        if self._device.is_gpu and not self._refused:
            with self._device.entered():
                status = runtime().cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(size), _PORTABLE)
                runtime().cudaGetLastError()  # an error would be that of the next one who asks
        if status:
            self._refused = True
            LOG.warning(
                "CUDA refuses to register memory that processes share (error %d): the host copies inputs", status
            )
        if not self._refused:
            self._registered[address] = size
        return not self._refused

    def release(self, address: int) -> None:
        """Ends what `register` began, before the memory goes."""
        if self._registered.pop(address, 0) and self._device.is_gpu:
            runtime().cudaHostUnregister(ctypes.c_void_p(address))
            runtime().cudaGetLastError()

    def has(self, array: Any) -> bool:
        """True if the GPU reads an array where it lies; false for all else than an array without gaps."""
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            return False
        address = array.ctypes.data
        if not self._device.is_gpu:
            return any(
                first <= address and address + array.nbytes <= first + size for first, size in self._registered.items()
            )
        found = _PointerAttributes()
        if holding().cudaPointerGetAttributes(ctypes.byref(found), ctypes.c_void_p(address)):
            holding().cudaGetLastError()
            return False
        return bool(found.type == _ON_HOST)


class Memcpy:
    """The copies of one device's inputs and outputs, and the threads that help with large ones."""

    def __init__(self, device: Device) -> None:
        del device  # owns it
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def copy(self, source: NDArray[Any], target: NDArray[Any], tell: Tell | None = None) -> None:
        """Copies an array into a contiguous one of its shape and type; tells, in the calling thread, of each piece that is there.

        Small ones by the calling thread alone; large ones by native threads beside it, where the package has them, else by Python's.
        OpenMP's threads, which PyTorch would use from 32 KB on, wait for each other and spin: with one of them off its processor, 1 MB
        takes two slices of the scheduler's time, 8 ms. Ours take piece after piece as long as there are some, as the calling thread does
        itself: one that does not get a processor delays nothing but the piece it holds, and one that has not started by the end is not
        waited for.
        """
        size = target.nbytes
        if size >= THREADS_BYTES and source.flags.c_contiguous and (threads := native_threads()) is not None:
            step = size if tell is None else min(max(size // _FEW_PIECES, _SENT_BYTES), _LARGEST_PIECE)
            helpers, read, write = min(cores() - 1, THREADS), source.ctypes.data, target.ctypes.data
            for first in range(0, size, step):
                last = min(first + step, size)
                threads(write + first, read + first, last - first, helpers)
                if tell is not None:
                    tell(first, last)
        elif size >= _SHARED_BYTES:
            self._copy_with_helpers(source, target, tell)
        elif tell is None or not size:
            np.copyto(target, source)
        else:
            for part, place, first, last in _pieces(source, target, -(-size // _FEW_PIECES)):
                np.copyto(place, part)
                tell(first, last)

    def copy_of(self, source: NDArray[Any]) -> NDArray[Any]:
        """A contiguous array's own copy."""
        if source.nbytes < (_SHARED_BYTES if native_threads() is None else THREADS_BYTES):
            return source.copy()
        target = np.empty_like(source)
        self.copy(source, target)
        return target

    def _copy_with_helpers(self, source: NDArray[Any], target: NDArray[Any], tell: Tell | None) -> None:
        count, pool = _helpers(target.nbytes), self._pool()
        size = min(-(-target.nbytes // (4 * (count + 1))), _LARGEST_PIECE)
        pieces = iter(list(_pieces(source, target, size)))  # each is handed out once, whichever thread asks
        there: deque[tuple[int, int]] = deque()

        def work(then: Callable[[], None]) -> None:
            for part, place, first, last in pieces:
                np.copyto(place, part)  # lets go of the interpreter's lock
                there.append((first, last))
                then()

        def tell_all() -> None:
            while tell is not None and there:
                tell(*there.popleft())

        helpers = [pool.submit(work, lambda: None) for _ in range(count)]
        work(tell_all)
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        tell_all()

    def _pool(self) -> ThreadPoolExecutor:
        """The helpers. Threads do not survive a fork, so that each process makes its own."""
        process = os.getpid()
        if process not in self._pools:
            self._pools.setdefault(process, ThreadPoolExecutor(_MOST_HELPERS, thread_name_prefix="msplit-copy"))
        return self._pools[process]


def _helpers(size: int) -> int:
    """Number of helpers that copy so many bytes: each has to be woken, and 16 MB are there before eleven are."""
    return min(1 + size // _HELPER_BYTES, _MOST_HELPERS, max(cores() - 1, 1))


def _pieces(
    source: NDArray[Any], target: NDArray[Any], size: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any], int, int]]:
    """Both arrays cut into parts of so many bytes, and where in the target each begins and ends, in bytes.

    A source that is not contiguous, such as images whose channels were moved, is cut along its first axis alone.
    """
    if source.flags.c_contiguous:
        source, target = source.reshape(-1), target.reshape(-1)
    width = target.nbytes // len(target)
    step = max(size // width, 1)
    for first in range(0, len(target), step):
        place = target[first : first + step]
        yield source[first : first + step], place, first * width, first * width + place.nbytes
