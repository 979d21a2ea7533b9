"""Records of what Inductor's code for a group launches, as plain data: kernels, grids, arguments, memory.

Inductor's code is Python that needs all of PyTorch's compiler to be loaded, which takes two seconds in every process. All shapes are
fixed, so it does the same at every call. One call is recorded, and held against a second one on memory that was overwritten; from then on,
and in every later process, the record runs in its place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from msplit.engines.cuda.autotune.timer import CudaTimer
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.kernels.store import POINTER, Binary, LoadedKernel, Store, note
from msplit.formats.files import JsonValue
from msplit.progress import during

VERSION = 1
"""Version of the form in which a record is kept."""

INPUT, BUFFER, NUMBER = "input", "buffer", "number"

CALLS = 20
"""Calls of a kernel that are timed together."""

_LARGEST = 1 << 50
_MOST = 1 << 16

Value = tuple[str, int, int]
"""An argument: `INPUT` or `BUFFER`, which one, and how many bytes from its start; or `NUMBER`, the number, and 0."""


@dataclass(frozen=True)
class Launch:
    """A kernel that a group launches.

    Attributes:
        kernel: Its key in the store.
        grid: Programs along three axes.
        arguments: What it is given.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Value, ...]


@dataclass(frozen=True)
class Output:
    """A tensor that a group gives.

    Attributes:
        source: `INPUT` or `BUFFER`: in whose memory it lies.
        number: Which one.
        offset: Elements from the start of that tensor, or of the buffer.
        shape: In elements.
        stride: Likewise.
        dtype: As in ``"float32"``.
    """

    source: str
    number: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Record:
    """Launches and memory of a group at every call.

    Attributes:
        buffers: Bytes of each block of memory that it takes.
        launches: In order.
        outputs: Views of the buffers or of the group's inputs.
        refused: Why the group has no kernel of its own; nothing else is filled in then.
    """

    buffers: tuple[int, ...] = ()
    launches: tuple[Launch, ...] = ()
    outputs: tuple[Output, ...] = ()
    refused: str = ""

    def pack(self) -> bytes:
        """The record as JSON."""
        return json.dumps({"kind": "kernel record", "schema_version": VERSION, **asdict(self)}).encode()

    @staticmethod
    def unpack(data: bytes, source: str) -> Record:
        """Reads a record from JSON.

        Raises:
            MsplitError: That is no record.
        """
        value = JsonValue.parse(data.decode(errors="replace"), source, what="record of a kernel", fix="delete it")
        value = value.of_version("kernel record", VERSION)
        value = value.object(("buffers", "launches", "outputs", "refused"))
        return Record(
            tuple(size.whole(0, _LARGEST) for size in value.at("buffers").items()),
            tuple(_launch_of(one) for one in value.at("launches").items()),
            tuple(_output_of(one) for one in value.at("outputs").items()),
            value.at("refused").text(),
        )


def _launch_of(value: JsonValue) -> Launch:
    value = value.object(("kernel", "grid", "arguments"))
    arguments = []
    for one in value.at("arguments").items():
        source, number, offset = one.items(3)
        arguments.append((source.one_of((INPUT, BUFFER, NUMBER)), number.whole(-_LARGEST), offset.whole(0, _LARGEST)))
    grid = tuple(size.whole(0, (1 << 31) - 1) for size in value.at("grid").items())
    return Launch(value.at("kernel").text(), grid, tuple(arguments))


def _output_of(value: JsonValue) -> Output:
    value = value.object(("source", "number", "offset", "shape", "stride", "dtype"))
    shape, stride = (tuple(one.whole(0, _LARGEST) for one in value.at(name).items()) for name in ("shape", "stride"))
    source, dtype = value.at("source").one_of((INPUT, BUFFER)), value.at("dtype").text()
    number, offset = value.at("number").whole(0, _MOST), value.at("offset").whole(0, _LARGEST)
    return Output(source, number, offset, shape, stride, dtype)


class Recorded:
    """A record that runs, with its key in the store."""

    def __init__(self, key: str, record: Record, kernels: Sequence[LoadedKernel], device: torch.device) -> None:
        self.record, self._device = record, device
        self._keys = (key, *(launch.kernel for launch in record.launches))
        self._kernels = tuple(kernels)
        self._dtypes = tuple(torch_dtype(output.dtype) for output in record.outputs)

    def __call__(self, *tensors: Tensor, poison: bool = False) -> list[Tensor]:
        """The group's outputs. With `poison`, its memory is overwritten first."""
        note(*self._keys)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self.record.buffers]
        if poison:
            for buffer in buffers:
                buffer.fill_(0xA5)
        places = {(INPUT, number): tensor.data_ptr() for number, tensor in enumerate(tensors)}
        places |= {(BUFFER, number): buffer.data_ptr() for number, buffer in enumerate(buffers)}

        def argument(value: Value) -> int:
            source, number, offset = value
            return number if source == NUMBER else places[source, number] + offset

        for launch, kernel in zip(self.record.launches, self._kernels, strict=True):
            kernel.launch(launch.grid, [*map(argument, launch.arguments)])
        found = []
        for output, dtype in zip(self.record.outputs, self._dtypes, strict=True):
            lies_in = (buffers if output.source == BUFFER else tensors)[output.number]
            empty, start = torch.empty(0, dtype=dtype, device=self._device), lies_in.storage_offset() + output.offset
            found.append(empty.set_(lies_in.untyped_storage(), start, output.shape, output.stride))
        return found


def known(key: str, store: Store, device: torch.device) -> Recorded | str | None:
    """The record of a group, ready to run; why it has no kernel; None where nothing is kept of it.

    Raises:
        MsplitError: What is kept is damaged.
    """
    data = store.read(key)
    if data is None:
        return None
    record = Record.unpack(data, key)
    if record.refused:
        return record.refused
    kernels = [store.kernel(launch.kernel) for launch in record.launches]
    found = [kernel for kernel in kernels if kernel is not None]
    return Recorded(key, record, found, device) if len(found) == len(kernels) else None


def keep_refusal(key: str, store: Store, why: str) -> None:
    """Remembers that a group has no kernel, so that nobody compiles it again to learn that."""
    store.made(key, Record(refused=why).pack)
    store.save([key])


def record(key: str, store: Store, run: Callable[..., Any], examples: Sequence[Tensor]) -> Recorded | None:
    """Records a call; None where it does anything that a record does not say.

    Args:
        run: Inductor's code for a group. `watch` was called before it was made.
        examples: Tensors for it, on a GPU. They are filled with random numbers.
    """
    for example in examples:
        _randomize(example)
    with _timed_by_the_device(examples[0].device):
        run(*examples)  # the first call may time several kernels against each other
    calls: list[_Call] = []
    with during(_CALLS, calls):
        results = run(*examples)
    described = _describe(key, calls, examples, results)
    if described is None:
        return None
    made, binaries = described
    device = examples[0].device
    recorded = Recorded(key, made, [LoadedKernel(binaries[launch.kernel], device) for launch in made.launches], device)
    again = recorded(*examples, poison=True)
    if len(again) != len(results) or not all(_same(*pair) for pair in zip(again, results, strict=True)):
        return None
    store.made(key, made.pack)
    for name, binary in binaries.items():
        store.made(name, binary.pack)
    return recorded


@dataclass(frozen=True, eq=False)
class _Call:
    """One launch as it was watched: Inductor's object for the kernel, the grid, and the arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


_CALLS: ContextVar[list[_Call] | None] = ContextVar("watched_launches", default=None)

_LETTERS = {"O": POINTER, "b": "i8", "h": "i16", "i": "i32", "l": "i64", "B": "u8", "H": "u16", "I": "u32", "K": "u64"}
"""Types of a kernel's parameters, by Inductor's letters for them."""


@contextlib.contextmanager
def _timed_by_the_device(device: torch.device) -> Iterator[None]:
    """Lets Inductor choose by what its kernels take on the device.

    It times a call between two events, with a copy of what the call writes over. The host takes longer to issue both than a kernel of 2 µs
    takes, so that the choice was anybody's: one softmax took 2, 4 or 14 µs, from process to process.
    """
    module: Any = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    own = getattr(module, "benchmarker", None)
    if device.type != "cuda" or own is None:
        yield
        return
    timer = Device.of(device).owned(CudaTimer)
    module.benchmarker = copy.copy(own)
    module.benchmarker.benchmark_gpu = lambda call, *rest, **options: timer.graph_us([[call] * CALLS]) / CALLS / 1e3
    try:
        timer.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(timer.stream):
            yield
            torch.cuda.current_stream().synchronize()
    finally:
        module.benchmarker = own


def watch() -> None:
    """Lets Inductor's own launcher of compiled kernels tell what it loads and launches. Where there is none, nothing can be recorded."""
    for name in ("static_triton_launcher", "static_cuda_launcher"):
        module = sys.modules.get(f"torch._inductor.runtime.{name}")
        kind = getattr(module, "StaticallyLaunchedCudaKernel", None)
        if kind is not None and not hasattr(kind, "msplit_code"):
            kind.msplit_code = WeakKeyDictionary()
            kind.run, kind.load_kernel = _watched_run(kind.run), _watched_load(kind.load_kernel)


def _watched_run(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def watched(self: Any, x: int, y: int, z: int, stream: int, *arguments: Any) -> Any:
        calls = _CALLS.get()
        if calls is not None:
            calls.append(_Call(self, (x, y, z), arguments))
        return run(self, x, y, z, stream, *arguments)

    return watched


def _watched_load(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def watched(self: Any, device: int) -> Any:
        if self.function is None and self.cubin_path:
            self.msplit_code[self] = Path(self.cubin_path).read_bytes()
        return load(self, device)

    return watched


def _describe(
    key: str, calls: Sequence[_Call], inputs: Sequence[Tensor], results: Any
) -> tuple[Record, dict[str, Binary]] | None:
    memory = {tensor.untyped_storage().data_ptr(): (INPUT, number) for number, tensor in enumerate(inputs)}
    buffers: list[int] = []
    binaries: dict[str, Binary] = {}
    launches = []

    def place(tensor: Tensor) -> tuple[str, int, int]:
        """In which input or buffer a tensor lies, and how many bytes from its start."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memory:
            memory[storage.data_ptr()] = BUFFER, len(buffers)
            buffers.append(storage.nbytes())
        source, number = memory[storage.data_ptr()]
        start = inputs[number].data_ptr() if source == INPUT else storage.data_ptr()
        return source, number, tensor.data_ptr() - start

    for call in calls:
        binary = _binary(call.kernel)
        if binary is None or len(call.arguments) != len(binary.takes):
            return None
        name = f"{binary.name} {hashlib.sha256(binary.code).hexdigest()}"
        binaries[name] = binary
        given = tuple(place(one) if isinstance(one, Tensor) else (NUMBER, int(one), 0) for one in call.arguments)
        launches.append(Launch(name, call.grid, given))
    outputs = []
    for result in results:
        if not isinstance(result, Tensor):
            return None
        source, number, offset = place(result)
        size = result.element_size()
        if offset < 0 or offset % size:
            return None
        shape, dtype = tuple(result.shape), dtype_name(result.dtype)
        outputs.append(Output(source, number, offset // size, shape, result.stride(), dtype))
    return Record(tuple(buffers), tuple(launches), tuple(outputs)), binaries


def _binary(kernel: Any) -> Binary | None:
    code = kernel.msplit_code.get(kernel)
    kinds = [_LETTERS.get(letter) for letter in kernel.arg_tys]
    if code is None or None in kinds:
        return None
    scratch = [POINTER for which in ("global", "profile") if getattr(kernel, f"has_{which}_scratch", False)]
    parameters = (*(kind for kind in kinds if kind is not None), *scratch)
    return Binary(kernel.name, kernel.num_warps, kernel.shared, parameters, tuple(range(len(kinds))), code)


def _randomize(tensor: Tensor) -> None:
    # As it lies: in a value that was broadcast, many elements are one number, which can not be written through all of them.
    tensor = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    if tensor.is_floating_point():
        tensor.normal_()
    elif tensor.is_complex():
        torch.view_as_real(tensor).normal_()
    else:
        tensor.random_(0, 2)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    return bool(torch.all((one == other) | ((one != one) & (other != other))))
