"""Machine code of kernels: the store that keeps it, and what loads and launches it.

Compiled kernels that are kept for a device, in memory and on the disk, so that a later process needs no compiler to run them.

They are found by what they were compiled from, in a folder for one kind of GPU and the versions of all that compiles. What is found there
is machine code: the folder has the rule of `toolchain`, none that others may write to, and a build's folder likewise.

Compiled kernels as CUDA's driver takes them: loaded and launched with neither Triton nor PyTorch's compiler nor a C compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from msplit._version import __version__
from msplit.engines.cuda.device.device import Device, check, runtime
from msplit.engines.cuda.kernels import toolchain
from msplit.errors import EngineError, MsplitError, WriteError
from msplit.formats.atomic import write_bytes_atomic
from msplit.formats.files import JsonValue, read_bytes
from msplit.progress import during

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
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

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
        start = functools.partial(
            _driver().cuLaunchKernel, self._function, *blocks, *threads, shared, stream, places, None
        )
        if self.binary.early:
            early = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")
            config = _Config((*blocks,), threads, shared, stream, ctypes.pointer(early), 1)
            start = functools.partial(_driver().cuLaunchKernelEx, ctypes.byref(config), self._function, places, None)
        status = start()
        if (
            status == _INVALID_CONTEXT
        ):  # a thread whose first call this is: the driver, unlike the runtime, gives it no context
            check(runtime().cudaSetDevice(self._index))
            status = start()
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


OFF = "MSPLIT_KEEP_CHOICES"
"""Environment variable: with ``0`` no choices and no kernels are kept, and none that were kept are used."""

LARGEST = 64 << 20
"""Bytes that a kernel's file may have."""

_ENGINE = Path(__file__).parents[1]
"""Folder of the code that says what is compiled and measured, and how."""

_NOTED: ContextVar[set[str] | None] = ContextVar("noted_kernels", default=None)


class Store:
    """The compiled kernels of one device, which owns it, and records of what launches them. A CPU that stands in for a GPU has none.

    Attributes:
        folder: Where they are kept; None where none are.
        given: Folders of builds, where they are looked for first.
    """

    def __init__(self, device: Device) -> None:
        self._place = device.place
        self.folder = kept_in(device, "kernels")
        self.given: tuple[Path, ...] = ()
        self._kernels: dict[str, LoadedKernel | None] = {}
        self._made: dict[str, Callable[[], bytes | None]] = {}

    @staticmethod
    def of(place: torch.device) -> Store:
        """The store of a device."""
        return Device.of(place).owned(Store)

    def add(self, folder: Path) -> None:
        """Looks in a build's folder from now on, too. Its files are verified already."""
        if folder not in self.given:
            self.given = (*self.given, folder)
            self._kernels = {key: kernel for key, kernel in self._kernels.items() if kernel is not None}

    def kernel(self, key: str) -> LoadedKernel | None:
        """The kernel that was compiled from this; None where none is kept, or only one that this process has compiled itself."""
        note(key)
        if key not in self._kernels:
            self._kernels[key] = None if key in self._made else self._load(key)
        return self._kernels[key]

    def _load(self, key: str) -> LoadedKernel | None:
        with contextlib.suppress(MsplitError):  # damaged: it is compiled anew
            data = self.read(key)
            return None if data is None else LoadedKernel(Binary.unpack(data, file_of(key)), self._place)
        return None

    def read(self, key: str) -> bytes | None:
        """Bytes that were kept; None where nothing was."""
        note(key)
        if key in self._made:
            return self._made[key]()
        for folder in (*self.given, *(() if self.folder is None else (self.folder,))):
            with contextlib.suppress(OSError, EOFError):
                return read_bytes(folder / file_of(key), LARGEST)
        return None

    def made(self, key: str, pack: Callable[[], bytes | None]) -> None:
        """Remembers what was compiled in this process. `pack` gives what to keep of it; None where it can not be kept."""
        self._made.setdefault(key, pack)

    def save(self, keys: Iterable[str]) -> None:
        """Keeps what this process has made on the disk. Where that is full, or may not be written to, it is not kept, and that is all."""
        if self.folder is None:
            return
        try:
            for key in keys:
                path = self.folder / file_of(key)
                data = self._made[key]() if key in self._made and not path.exists() else None
                if data is not None:
                    self.folder.mkdir(mode=0o700, exist_ok=True)
                    write_bytes_atomic(path, data, force=True)
        except (OSError, WriteError):
            self.folder = None


def note(*keys: str) -> None:
    """Tells who notes that these are launched."""
    noted = _NOTED.get()
    if noted is not None:
        noted.update(keys)


def noting() -> contextlib.AbstractContextManager[set[str]]:
    """The keys of all kernels and records that this thread asks for inside."""
    return during(_NOTED, set[str]())


def file_of(key: str) -> str:
    """Name of the file of what is kept."""
    return hashlib.sha256(key.encode()).hexdigest()[:40] + ".kernel"


def kept_in(device: Device, what: str, ending: str = "") -> Path | None:
    """Path where something is kept for a device; None where nothing is."""
    if not device.is_gpu or os.environ.get(OFF) == "0":
        return None
    folder = toolchain.folder()
    here = hashlib.sha256(repr(made_for(device)).encode()).hexdigest()[:24]
    return None if folder is None else folder / f"{what}-{here}{ending}"


def made_for(device: Device) -> dict[str, str]:
    """All that a choice or a kernel depends on beside what is chosen or compiled, in words."""
    found = {
        "msplit": __version__,
        "engine": code_of_engine()[:16],
        "pytorch": torch.__version__,
        "device": "cuda" if device.is_gpu else "cpu",
    }
    if device.is_gpu:
        gpu = torch.cuda.get_device_properties(device.place)
        driver = getattr(torch._C, "_cuda_getDriverVersion", int)()
        found |= {
            "gpu": str(gpu.name),
            "architecture": f"{gpu.major}.{gpu.minor}",
            "multiprocessors": str(gpu.multi_processor_count),
            "memory": str(gpu.total_memory),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "triton": toolchain.triton_version(),
        }
    return found


@functools.cache
def code_of_engine() -> str:
    """A hash of the engine's code."""
    hashed = hashlib.sha256()
    for file in sorted(_ENGINE.rglob("*.py")):
        hashed.update(file.relative_to(_ENGINE).as_posix().encode() + b"\0" + file.read_bytes())
    return hashed.hexdigest()
