"""Memory that several processes share: of a device, where the weights of a build lie once, and of the host, where tables do that are files.

Who comes first makes the memory of a device and fills it, and the others map it: a descriptor of it waits as a message in a socket that
all of them have, and that is looked at and stays. The memory lives as long as the message, or a process that maps it, so that none depends
on another.

On a GPU the driver's functions for virtual memory make it, since PyTorch's own memory ends with its maker. A simulated device has memory of
the host. Source: CUDA's programming guide, "Virtual Memory Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import socket
import struct
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.process import WEIGHTS
from msplit.engines.table_rows import MEMORY, REFUSED, UNALIGNED
from msplit.errors import EngineError

_PATIENCE = 60.0
"""Seconds for which another process may fill the memory."""
_PAGE = 2 << 20
"""The driver gives memory in multiples of that."""
_PINNED, _DESCRIPTOR, _ON_DEVICE, _WRITES = 1, 1, 1, 3
"""Of the driver: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, and
CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""

_FAILED = 2 * sys.maxsize + 1
_MAY_MOVE, _FIXED = 1, 2
"""What `mmap` gives where it fails, and flags of `mremap`."""
_VECTOR = 16
"""Bytes that kernels of lookups read at a time."""


def held_once(data: NDArray[np.uint8], place: torch.device, name: str) -> tuple[torch.Tensor, str]:
    """Bytes on a device: shared ones, where this process was given a socket for them (`WEIGHTS`), which counts for the first call alone.
    And why they are not shared, where they were to be; empty where all is well. A hash of all of a build's weights is their name: the
    files may be others by now."""
    ends = WEIGHTS.get()
    WEIGHTS.set(None)  # values that come later are other ones
    if ends is None:
        return torch.from_numpy(data).to(place), ""
    try:
        with ends[0], ends[1], _descriptor(ends, place, len(data), name) as (handle, is_new):
            found = _mapped(place, handle, len(data))
            if is_new:
                found.copy_(torch.from_numpy(data))
                if place.type == "cuda":
                    torch.cuda.synchronize(place)
    except (OSError, EngineError) as problem:
        return torch.from_numpy(data).to(place), str(problem)
    return found, ""


@contextmanager
def _descriptor(
    ends: tuple[socket.socket, socket.socket], place: torch.device, size: int, name: str
) -> Iterator[tuple[int, bool]]:
    """A descriptor of the memory, and True where it is new: the others wait until the block has filled it.

    The message is name and size, with the descriptor; "0" alone where there is no memory yet.
    """
    reads, writes = ends
    reads.settimeout(_PATIENCE)
    message, handles = _received(reads, socket.MSG_PEEK)
    if not handles:  # it is taken out, so that one process makes the memory
        message, handles = _received(reads)
        if handles:  # another one was quicker
            socket.send_fds(writes, [message], handles)
    is_new = not handles
    try:
        if is_new:
            handles = [_made(place, size)]
        elif message.decode() != f"{name} {size}":
            raise EngineError("the build was replaced since the others opened it")
        yield handles[0], is_new
    except BaseException:
        if is_new:
            writes.send(b"0")
        raise
    else:
        if is_new:
            socket.send_fds(writes, [f"{name} {size}".encode()], handles)
    finally:
        for handle in handles:
            os.close(handle)


def _received(reads: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """A message and its descriptors. Python's own `recv_fds` looks at no flags."""
    message, extra, _, _ = reads.recvmsg(256, socket.CMSG_SPACE(4), flags | socket.MSG_CMSG_CLOEXEC)
    return message, [number for *_, data in extra for (number,) in struct.iter_unpack("i", data)]


def _made(place: torch.device, size: int) -> int:
    """A descriptor of new memory."""
    if place.type == "cpu":
        handle = os.memfd_create("msplit-weights")
        os.ftruncate(handle, size)
        return handle
    memory, made = ctypes.c_uint64(), ctypes.c_int()
    wanted = _Properties(_PINNED, _DESCRIPTOR, _ON_DEVICE, place.index, None, 0)
    _call("cuMemCreate", ctypes.byref(memory), _pages(size), ctypes.byref(wanted), _NONE)
    try:
        _call("cuMemExportToShareableHandle", ctypes.byref(made), memory, _DESCRIPTOR, _NONE)
    finally:
        _call("cuMemRelease", memory)  # the descriptor keeps it
    return made.value


def _mapped(place: torch.device, handle: int, size: int) -> torch.Tensor:
    """The memory behind a descriptor, as bytes."""
    if place.type == "cpu":
        return torch.from_numpy(np.frombuffer(mmap.mmap(handle, size), np.uint8))
    memory, start = ctypes.c_uint64(), ctypes.c_uint64()
    _call("cuMemImportFromShareableHandle", ctypes.byref(memory), ctypes.c_void_p(handle), _DESCRIPTOR)
    try:
        _call("cuMemAddressReserve", ctypes.byref(start), _pages(size), _NONE, _NONE, _NONE)
        _call("cuMemMap", start, _pages(size), _NONE, memory, _NONE)
    finally:
        _call("cuMemRelease", memory)  # what is mapped stays
    access = _Access(_ON_DEVICE, place.index, _WRITES)
    _call("cuMemSetAccess", start, _pages(size), ctypes.byref(access), ctypes.c_size_t(1))
    return torch.as_tensor(_Mapping(start.value, size, place), device=place)


class _Mapping:
    """Mapped memory as PyTorch takes it. It is given back when no tensor lies there any more."""

    def __init__(self, start: int, size: int, place: torch.device) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (start, False), "version": 3}
        weakref.finalize(self, _give_back, start, size, place).atexit = False


def _give_back(start: int, size: int, place: torch.device) -> None:
    torch.cuda.synchronize(place)
    for name in ("cuMemUnmap", "cuMemAddressFree"):
        _call(name, ctypes.c_uint64(start), _pages(size))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("where", ctypes.c_int),
        ("device", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("where", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


_NONE = ctypes.c_uint64()


def _pages(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size + -size % _PAGE)


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver.

    Raises:
        EngineError: It answered with an error.
    """
    if status := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise EngineError(f"the driver's {name} failed with error {status}")


def _called(name: str, *arguments: int) -> int | None:
    """Address that a function of the C library gives; None where it fails, or is not there."""
    call = getattr(ctypes.CDLL(None), name, None)
    if call is None:
        return None
    call.restype = ctypes.c_void_p
    found = call(*map(ctypes.c_size_t, arguments))
    return None if found == _FAILED else found or 0


def _unmap(address: int, size: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


def _memory(address: int, size: int) -> NDArray[np.uint8]:
    held: Any = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(held, np.uint8)


def _lies_in_file(array: NDArray[Any]) -> bool:
    """True if all of an array is in one mapping of a file that is shared and read-only. (Linux tells its own.)"""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for place, rights, _, _, inode, *_ in map(str.split, lines):
            begin, end = (int(number, 16) for number in place.split("-"))
            if begin <= first < end:
                return rights == "r--s" and inode != "0" and last <= end
    return False


class FileTable:
    """A table as it lies in a file, mapped from the page in which it begins: no other one shares pages with it, which CUDA pins once.

    It is made of an array of another mapping, and so of the same file, whatever has its name by now. A mapping of one's own (`MAP_PRIVATE`)
    is never taken: CUDA did not come back from pinning one.

    Attributes:
        pages: Its bytes, and what is before it in its first page.
        rows: The table. It is not to be written to before `take`.
    """

    def __init__(self, array: NDArray[Any], address: int, before: int) -> None:
        size = before + array.nbytes
        self.pages = _memory(address, size)
        weakref.finalize(self.pages, _unmap, address, size).atexit = False
        self.rows: NDArray[Any] = self.pages[before:].view(array.dtype).reshape(array.shape)

    @classmethod
    def of(cls, array: NDArray[Any]) -> FileTable | str:
        """The table that an array is, or why it is none."""
        if not (array.nbytes and array.flags.c_contiguous and _lies_in_file(array)):
            return MEMORY
        # Rows of fewer bytes are read by elements anyway.
        if array.ctypes.data % max(math.gcd(_VECTOR, array[:1].nbytes), array.itemsize):
            return UNALIGNED
        before = array.ctypes.data % mmap.PAGESIZE
        # Of a size of 0 a second mapping of the same pages is made.
        address = _called("mremap", array.ctypes.data - before, 0, before + array.nbytes, _MAY_MOVE, 0)
        return REFUSED if address is None else cls(array, address, before)

    def memory(self) -> NDArray[np.uint8]:
        """Memory for a copy of the pages, for `take`.

        Raises:
            EngineError: There is no memory for it.
        """
        rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _called("mmap", 0, len(self.pages), rights, flags, _FAILED, 0)
        if address is None:
            said = f"the host has no {len(self.pages) / 1e9:.3g} GB for a table"
            raise EngineError(said, fix="open the new model anew")
        return _memory(address, len(self.pages))

    def drop(self, copy: NDArray[np.uint8]) -> None:
        """Gives back memory for a copy that is not taken; nobody reads it."""
        _unmap(copy.ctypes.data, len(copy))

    def take(self, copy: NDArray[np.uint8]) -> None:
        """Puts a copy where the mapping is: under the same addresses there is memory now that may be written to.

        Raises:
            EngineError: The system does not.
        """
        place, size = self.pages.ctypes.data, len(copy)
        if _called("mremap", copy.ctypes.data, size, size, _MAY_MOVE | _FIXED, place) != place:
            self.drop(copy)
            raise EngineError("the system does not move memory to where a table is", fix="open the new model anew")
