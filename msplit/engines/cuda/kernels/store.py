"""Compiled kernels that are kept for a device, in memory and on the disk, so that a later process needs no compiler to run them.

They are found by what they were compiled from, in a folder for one kind of GPU and the versions of all that compiles. What is found there
is machine code: the folder has the rule of `toolchain`, none that others may write to, and a build's folder likewise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

import torch

from msplit._version import __version__
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels import toolchain
from msplit.engines.cuda.kernels.binary import Binary, LoadedKernel
from msplit.errors import MsplitError, WriteError
from msplit.formats.atomic import write_bytes_atomic
from msplit.formats.files import read_bytes

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


@contextlib.contextmanager
def noting() -> Iterator[set[str]]:
    """The keys of all kernels and records that this thread asks for inside."""
    noted: set[str] = set()
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


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
