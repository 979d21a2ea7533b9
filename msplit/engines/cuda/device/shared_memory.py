"""Memory of a device that several processes share: the weights of a build lie there once, however many processes of a pool read them.

Who comes first makes the memory and fills it, and the others map it: a descriptor of it waits as a message in a socket that all of them
have, and that is looked at and stays. The memory lives as long as the message, or a process that maps it, so that none depends on another.

On a GPU the driver's functions for virtual memory make it, since PyTorch's own memory ends with its maker. A simulated device has memory of
the host. Source: CUDA's programming guide, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.process import WEIGHTS
from msplit.errors import EngineError

_PATIENCE = 60.0
"""Seconds for which another process may fill the memory."""
_PAGE = 2 << 20
"""The driver gives memory in multiples of that."""
_PINNED, _DESCRIPTOR, _ON_DEVICE, _WRITES = 1, 1, 1, 3
"""Of the driver: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, and
CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


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
