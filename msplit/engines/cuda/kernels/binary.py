"""Compiled kernels as CUDA's driver takes them: loaded and launched with neither Triton nor PyTorch's compiler nor a C compiler."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from msplit.errors import EngineError, MsplitError
from msplit.formats.files import JsonValue

VERSION = 1
"""Version of the form in which a `Binary` is kept."""

POINTER = "*"

_TYPES: dict[str, Any] = {
    POINTER: ctypes.c_void_p,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
"""Types of what a kernel may take, by Triton's names. All pointers are one type."""

PARAMETERS = tuple(_TYPES)

_WARP = 32
_STATIC_SHARED = 48 << 10
"""Bytes of shared memory that a kernel may use without asking."""

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID

_MOST_CODE = 64 << 20
_MOST_PARAMETERS = 4096 // 4


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        name: Of its function.
        warps: Of a block, of 32 threads each.
        shared: Bytes of shared memory that it is given when it starts.
        parameters: Type of each of its parameters, of `PARAMETERS`. Those that nothing is given for, at the end, are Triton's own.
        takes: Which argument of a launch each of the others is.
        code: Machine code for one kind of GPU (a cubin).
        early: True if it may start before the kernel in front of it is done, for which it waits itself (programmatic dependent launch).
    """

    name: str
    warps: int
    shared: int
    parameters: tuple[str, ...]
    takes: tuple[int, ...]
    code: bytes
    early: bool = False

    def pack(self) -> bytes:
        """Bytes of a file: a line of JSON, and the code."""
        head = {
            "kind": "kernel",
            "schema_version": VERSION,
            **{name: value for name, value in asdict(self).items() if name != "code"},
        }
        return json.dumps(head).encode() + b"\n" + self.code

    @staticmethod
    def unpack(data: bytes, source: str) -> Binary:
        """Reads a kernel from the bytes of a file.

        Raises:
            MsplitError: That is no kernel.
        """
        fix = "delete it: it is compiled anew"
        head, _, code = data.partition(b"\n")
        try:
            text = head.decode()
        except ValueError:
            raise MsplitError("this is no compiled kernel", where=source, fix=fix) from None
        value = JsonValue.parse(text, source, what="compiled kernel", fix=fix).of_version("kernel", VERSION)
        keys = ("name", "warps", "shared", "parameters", "takes", "early")
        value = value.object(keys, ("early",))
        parameters = tuple(one.one_of(PARAMETERS) for one in value.at("parameters").items())
        takes = tuple(one.whole(0, _MOST_PARAMETERS) for one in value.at("takes").items())
        if not code or not len(takes) <= len(parameters) <= _MOST_PARAMETERS:
            raise MsplitError("this is no compiled kernel", where=source, fix=fix)
        warps, shared = value.at("warps").whole(1, 32), value.at("shared").whole(0, 1 << 20)
        early = "early" in value.mapping() and value.at("early").flag()
        return Binary(value.at("name").text(), warps, shared, parameters, takes, code, early)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes that begins with what is set here."""

    _fields_ = (("id", ctypes.c_int), ("gap", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("blocks", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class LoadedKernel:
    """A binary that is loaded on a GPU. It stays loaded as long as the process runs, as the kernels of the libraries do."""

    def __init__(self, binary: Binary, place: torch.device) -> None:
        self.binary = binary
        self._index = torch.cuda.current_device() if place.index is None else place.index
        self._types = tuple(_TYPES[kind] for kind in binary.parameters)
        driver = _driver()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._index):
            torch.cuda.current_stream(self._index)  # the context is there
            _check(driver.cuModuleLoadData(ctypes.byref(module), binary.code), f"loading kernel {binary.name}")
            found = driver.cuModuleGetFunction(ctypes.byref(self._function), module, binary.name.encode())
            _check(found, f"finding kernel {binary.name}")
            if binary.shared > _STATIC_SHARED:
                set_to = driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, binary.shared)
                _check(set_to, f"giving kernel {binary.name} {binary.shared} bytes of shared memory")

    def launch(self, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """Starts it on the current stream.

        Args:
            grid: Blocks along up to three axes.
            arguments: Tensors for pointers, and numbers. Those that are missing at the end are Triton's own, and are null.
        """
        values = [
            kind(one.data_ptr() if isinstance(one, torch.Tensor) else one)
            for kind, one in zip(self._types, arguments, strict=False)
        ]
        values += [kind() for kind in self._types[len(values) :]]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        blocks = [*grid, 1, 1][:3]
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._index))
        threads, shared = (self.binary.warps * _WARP, 1, 1), self.binary.shared
        if self.binary.early:
            early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
            config = _Config((*blocks,), threads, shared, stream, ctypes.pointer(early), 1)
            status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, places, None)
        else:
            status = _driver().cuLaunchKernel(self._function, *blocks, *threads, shared, stream, places, None)
        _check(status, f"launching kernel {self.binary.name}")


@functools.cache
def _driver() -> ctypes.CDLL:
    """CUDA's driver, which PyTorch has loaded already."""
    library = ctypes.CDLL("libcuda.so.1")
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuModuleLoadData.argtypes = (pointer, ctypes.c_char_p)
    library.cuModuleGetFunction.argtypes = (pointer, pointer, ctypes.c_char_p)
    library.cuFuncSetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    library.cuLaunchKernel.argtypes = (pointer, *[unsigned] * 7, pointer, pointer, pointer)
    library.cuLaunchKernelEx.argtypes = (pointer, pointer, pointer, pointer)
    return library


def _check(status: int, what: str) -> None:
    if status:
        said = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(said))
        words = (said.value or b"").decode(errors="replace")
        raise EngineError(f"{what} failed: {words or status}", fix="see `msplit doctor`")
