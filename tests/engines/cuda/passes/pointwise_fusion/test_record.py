"""Inductor's code for a group as a record: what it launches is told whole, or it is not recorded. Kernels are functions of memory here."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from msplit.engines.cuda.kernels.store import Binary  # noqa: E402
from msplit.engines.cuda.passes.pointwise_fusion import record as records  # noqa: E402
from msplit.engines.cuda.passes.pointwise_fusion.record import Record, known, record  # noqa: E402
from msplit.errors import MsplitError  # noqa: E402


def floats(place: int, count: int) -> Any:
    """Numbers at an address."""
    return (ctypes.c_float * count).from_address(place)


def add(x: int, y: int, out: int, count: int) -> None:
    for number, (one, other) in enumerate(zip(floats(x, count), floats(y, count), strict=True)):
        floats(out, count)[number] = one + other


def double(x: int, out: int, count: int) -> None:
    for number, one in enumerate(floats(x, count)):
        floats(out, count)[number] = 2 * one


CODE = {b"add": add, b"double": double}


class Inductors:
    """A kernel as Inductor holds it."""

    msplit_code: ClassVar[dict[Any, bytes]] = {}

    def __init__(self, code: bytes, letters: str) -> None:
        self.name, self.arg_tys, self.num_warps, self.shared = code.decode(), letters, 4, 0
        self.has_global_scratch = True
        self.msplit_code[self] = code

    def run(self, *grid_and_stream_and: Any) -> None:
        x, y, z, _, *arguments = grid_and_stream_and
        calls = records._CALLS.get()
        if calls is not None:
            calls.append(records._Call(self, (x, y, z), tuple(arguments)))
        CODE[self.msplit_code[self]](*[one.data_ptr() if hasattr(one, "data_ptr") else one for one in arguments])


class Loaded:
    """A kernel as msplit launches it."""

    def __init__(self, binary: Binary, place: Any) -> None:
        self.binary = binary

    def launch(self, grid: Any, arguments: Any) -> None:
        assert self.binary.parameters[-1] == "*"  # Triton's own
        CODE[self.binary.code](*arguments)


class Shelf:
    """A store without a device."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def made(self, key: str, pack: Any) -> None:
        self.entries[key] = pack()

    def save(self, keys: Any) -> None:
        pass

    def read(self, key: str) -> bytes | None:
        return self.entries.get(key)

    def kernel(self, key: str) -> Loaded | None:
        return Loaded(Binary.unpack(self.entries[key], key), None) if key in self.entries else None


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(records, "LoadedKernel", Loaded)
    return Shelf()


ADD, DOUBLE = Inductors(b"add", "OOOi"), Inductors(b"double", "OOl")


def group(x: Any, y: Any) -> list[Any]:
    """2 (x + y), and a part of the sum: a scratch block, an output in its own and one in another's memory."""
    total, out = torch.empty(3, 4), torch.empty(3, 4)
    ADD.run(1, 1, 1, 0, x, y, total, 12)
    DOUBLE.run(2, 1, 1, 0, total, out, 12)
    return [out, total[1:, :2]]


def inputs() -> list[Any]:
    return [torch.empty(3, 4), torch.empty(3, 4)]


def test_a_record_does_what_was_recorded_in_this_process_and_in_the_next(shelf: Any) -> None:
    made = record("key", shelf, group, inputs())
    assert made is not None
    loaded = known("key", shelf, torch.device("cpu"))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for one in (made, loaded):
        out, part = one(x, y, poison=True)
        torch.testing.assert_close(out, 2 * (x + y), rtol=0, atol=0)
        torch.testing.assert_close(part, (x + y)[1:, :2], rtol=0, atol=0)
        assert part.stride() == (4, 1)
    assert [launch.grid for launch in made.record.launches] == [(1, 1, 1), (2, 1, 1)]
    assert len(made.record.buffers) == 2


def test_the_first_call_may_try_kernels_and_is_no_part_of_it(shelf: Any) -> None:
    calls = []

    def tries(x: Any, y: Any) -> list[Any]:
        if not calls:
            for _ in range(5):
                group(x, y)
        calls.append(1)
        return group(x, y)

    made = record("key", shelf, tries, inputs())
    assert made is not None
    assert len(made.record.launches) == 2


def test_an_input_that_was_broadcast_is_recorded(shelf: Any) -> None:
    """A learning rate, say, that a model stretches to the shape of a variable: many elements, one number."""
    rows = torch.empty_strided((3, 4), (1, 0))

    def doubled(x: Any, y: Any) -> list[Any]:
        del x
        out = torch.empty(3, 4)
        DOUBLE.run(1, 1, 1, 0, y, out, 12)
        return [out]

    made = record("key", shelf, doubled, [rows, torch.empty(3, 4)])
    assert made is not None
    y = torch.randn(3, 4)
    torch.testing.assert_close(made(rows, y)[0], 2 * y, rtol=0, atol=0)


def constant(x: Any, y: Any) -> list[Any]:
    """Reads memory that is neither an input nor made in the call."""
    out = torch.empty(3, 4)
    ADD.run(1, 1, 1, 0, x, HIDDEN, out, 12)
    return [out]


def beside(x: Any, y: Any) -> list[Any]:
    """Something that is no launch."""
    out = group(x, y)[0]
    return [out + 1]


def no_tensor(x: Any, y: Any) -> list[Any]:
    return [group(x, y)[0], 3]


def unknown_code(x: Any, y: Any) -> list[Any]:
    out = torch.empty(3, 4)
    kernel = Inductors(b"double", "OOl")
    del Inductors.msplit_code[kernel]
    records._CALLS.get() is not None and records._CALLS.get().append(records._Call(kernel, (1, 1, 1), (x, out, 12)))
    double(x.data_ptr(), out.data_ptr(), 12)
    return [out]


HIDDEN = torch.randn(3, 4)


@pytest.mark.parametrize("run", [constant, beside, no_tensor, unknown_code])
def test_what_a_record_can_not_say_is_not_recorded(run: Any, shelf: Any) -> None:
    assert record("key", shelf, run, inputs()) is None
    assert shelf.entries == {}


def test_a_view_of_an_input_is_one_again(shelf: Any) -> None:
    made = record("key", shelf, lambda x, y: [x[1:], *group(x, y)], inputs())
    assert made is not None
    whole = torch.randn(5, 4)
    view, *_ = made(whole[2:], torch.randn(3, 4))
    torch.testing.assert_close(view, whole[3:])
    assert view.data_ptr() == whole[3:].data_ptr()


def test_that_a_group_has_no_kernel_is_remembered(shelf: Any) -> None:
    records.keep_refusal("key", shelf, "they would be 3 kernels")
    assert known("key", shelf, torch.device("cpu")) == "they would be 3 kernels"
    assert known("another", shelf, torch.device("cpu")) is None


def test_without_its_kernels_a_record_is_nothing(shelf: Any) -> None:
    record("key", shelf, group, inputs())
    shelf.entries = {key: data for key, data in shelf.entries.items() if key == "key"}
    assert known("key", shelf, torch.device("cpu")) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"kind": "kernel record", "schema_version": 2}'])
def test_damage_is_told(data: bytes, shelf: Any) -> None:
    with pytest.raises(MsplitError):
        Record.unpack(data, "here")


def test_inductors_launcher_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class StaticallyLaunchedCudaKernel:
        function = None
        cubin_path = __file__

        def run(self, *given: Any) -> None:
            log.append(given)

        def load_kernel(self, device: int) -> None:
            self.function = 1

    module = SimpleNamespace(StaticallyLaunchedCudaKernel=StaticallyLaunchedCudaKernel)
    monkeypatch.setitem(records.sys.modules, "torch._inductor.runtime.static_cuda_launcher", module)
    records.watch()
    records.watch()
    kernel: Any = StaticallyLaunchedCudaKernel()
    kernel.load_kernel(0)
    kernel.run(1, 2, 3, 0, "x")
    calls: list[Any] = []
    token = records._CALLS.set(calls)
    kernel.run(4, 5, 6, 0, "y")
    records._CALLS.reset(token)
    assert log == [(1, 2, 3, 0, "x"), (4, 5, 6, 0, "y")]
    assert [(call.grid, call.arguments) for call in calls] == [((4, 5, 6), ("y",))]
    assert kernel.msplit_code[kernel].startswith(b'"""Inductor')


def test_inductor_times_by_the_device_while_a_kernel_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And by its own means before and afterwards, whatever happens meanwhile; a call that a GPU refuses raises what Inductor knows."""
    from torch._inductor.runtime import triton_heuristics

    own = triton_heuristics.benchmarker
    asked: list[Any] = []

    class Timer:
        stream = SimpleNamespace(wait_stream=lambda other: None)

        def graph_us(self, lanes: Any) -> float:
            asked.extend(call() for lane in lanes for call in lane)
            return 5.0 * len(asked)

    class Owner:
        def owned(self, kind: Any) -> Any:
            return Timer()

    monkeypatch.setattr(records.Device, "of", lambda device: Owner())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with records._timed_by_the_device(torch.device("cuda", 0)):
        assert triton_heuristics.benchmarker.benchmark(fn=lambda: "called", device="cuda", rep=40) == 5e-3
    assert set(asked) == {"called"}
    assert triton_heuristics.benchmarker is own
    with pytest.raises(KeyError), records._timed_by_the_device(torch.device("cuda", 0)):
        raise KeyError
    assert triton_heuristics.benchmarker is own
    with records._timed_by_the_device(torch.device("cpu")):
        assert triton_heuristics.benchmarker is own
