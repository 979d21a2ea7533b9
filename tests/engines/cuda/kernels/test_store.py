"""Compiled kernels that are kept: what they are found by, what is read back, and that nothing but a whole kernel is."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from msplit.engines.cuda.device.device import Device  # noqa: E402
from msplit.engines.cuda.kernels import launch, store  # noqa: E402
from msplit.engines.cuda.kernels.launch import Code, binary_of, key_of  # noqa: E402
from msplit.engines.cuda.kernels.store import PARAMETERS, Binary, LoadedKernel, Store, file_of, noting  # noqa: E402
from msplit.errors import MsplitError  # noqa: E402

BINARY = Binary("kernel_0", 4, 1024, ("*", "i32", "i64", "*", "*"), (0, 2, 3), b"\x7fELF and so on")

binaries = st.builds(
    Binary,
    st.text(min_size=1, max_size=8),
    st.integers(1, 32),
    st.integers(0, 1 << 18),
    st.lists(st.sampled_from(PARAMETERS), min_size=3, max_size=9).map(tuple),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.binary(min_size=1, max_size=99),
    st.booleans(),
)


@given(binaries)
def test_what_is_packed_comes_back(one: Binary) -> None:
    assert Binary.unpack(one.pack(), "here") == one


@given(st.binary(max_size=300), st.integers(0, 400))
def test_what_is_no_kernel_is_refused(noise: bytes, length: int) -> None:
    head = BINARY.pack()[: min(length, len(BINARY.pack()) - len(BINARY.code))]
    with pytest.raises(MsplitError):
        Binary.unpack(noise.replace(b"\n", b""), "here")
    with pytest.raises(MsplitError):
        Binary.unpack(head.rstrip(b"\n") if len(head) < length else head, "here")


# What a kernel is found by

TILE = Code("products", "products")
numbers = st.one_of(st.sampled_from([0, 1, 2, 16, 17, 32, 2**31 - 1, 2**31, -1, 2**63]), st.integers(0, 2**40))


def as_triton(value: int, specialized: bool) -> tuple[Any, ...]:
    """What Triton looks at of a number: its width, and whether it is one or a multiple of 16."""
    width = "i32" if -(2**31) <= value < 2**31 else "u64" if value >= 2**63 else "i64"
    return (width, specialized and value == 1, specialized and value != 1 and value % 16 == 0)


@given(numbers, numbers, st.booleans())
def test_two_numbers_share_a_kernel_where_triton_lets_them(one: int, other: int, specialized: bool) -> None:
    code = Code("products", "products", specialized)
    same = key_of(code, (one,), {}) == key_of(code, (other,), {})
    assert same == (as_triton(one, specialized) == as_triton(other, specialized))


def test_types_alignment_and_constants_tell_kernels_apart() -> None:
    memory = torch.zeros(64)
    aligned = next(memory[start:] for start in range(4) if memory[start:].data_ptr() % 16 == 0)
    keys = {
        key_of(TILE, (aligned,), {"BM": 16}),
        key_of(TILE, (aligned[1:],), {"BM": 16}),
        key_of(TILE, (aligned,), {"BM": 32}),
        key_of(TILE, (aligned.to(torch.float16),), {"BM": 16}),
        key_of(TILE, (aligned,), {"BM": 16, "SUM": torch.float32}),
        key_of(TILE, (aligned,), {"BM": 16, "SUM": torch.float64}),
        key_of(Code("products", "other"), (aligned,), {"BM": 16}),
    }
    assert len(keys) == 7
    assert key_of(TILE, (aligned[4:],), {"BM": 16}) in keys


# From Triton's compiled kernel


def compiled(**other: Any) -> Any:
    """A kernel as Triton gives it."""
    about = {
        "name": "products_0d1d", "num_warps": 4, "shared": 512, "num_ctas": 1, "launch_pdl": False,
        "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    signature = {"out": "*fp32", "x": "*k", "rows": "i32", "one": "constexpr", "BM": "constexpr", "far": "u64"}
    metadata = SimpleNamespace(**{**about, **other})
    return SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature=signature), asm={"cubin": b"code"})


def test_constants_are_no_parameters_and_tritons_own_come_last() -> None:
    assert binary_of(compiled()) == Binary(
        "products_0d1d", 4, 512, ("*", "*", "i32", "u64", "*", "*"), (0, 1, 2, 5), b"code"
    )


def test_a_kernel_that_waits_for_the_one_in_front_itself_is_kept_as_such() -> None:
    found = binary_of(compiled(launch_pdl=True))
    assert found is not None
    assert found.early
    assert found != binary_of(compiled())


def test_a_kernel_of_a_build_that_says_nothing_of_it_starts_when_others_are_done() -> None:
    head, _, code = BINARY.pack().partition(b"\n")
    older = {name: value for name, value in json.loads(head).items() if name != "early"}
    assert Binary.unpack(json.dumps(older).encode() + b"\n" + code, "here") == BINARY


@pytest.mark.parametrize("other", [{"num_ctas": 2}, {"global_scratch_size": 64}, {"launch_cooperative_grid": True}])
def test_what_the_driver_alone_could_not_start_is_not_kept(other: dict[str, Any]) -> None:
    assert binary_of(compiled(**other)) is None


# Launching


class Driver:
    """Notes what it is called with, and reads parameters as a GPU would."""

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        self.code = code
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.name = name
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.shared = value
        return 0

    def cuLaunchKernel(self, function: Any, *given: Any) -> int:
        *sizes, stream, places, _ = given
        read = [kind.from_address(places[place]).value for place, kind in enumerate(self.types)]
        self.launched.append((sizes, stream.value, read))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, places: Any, extra: Any) -> int:
        """Reads the structure at the offsets of cuda.h."""
        memory = ctypes.addressof(config._obj)
        sizes = [ctypes.c_uint32.from_address(memory + 4 * place).value for place in range(7)]
        stream, attributes = (ctypes.c_uint64.from_address(memory + place).value for place in (32, 40))
        assert ctypes.c_uint32.from_address(memory + 48).value == 1
        self.attribute = tuple(ctypes.c_int32.from_address(attributes + place).value for place in (0, 8))
        return self.cuLaunchKernel(function, *sizes, ctypes.c_void_p(stream), places, extra)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(store, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda index: __import__("contextlib").nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    return found


PLACE = torch.device("cuda", 0)


def test_a_launch_hands_on_addresses_and_numbers(driver: Driver) -> None:
    kernel = LoadedKernel(BINARY, PLACE)
    driver.types = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64]
    tensor = torch.arange(4)
    kernel.launch((3, 2), [tensor, -5, 1 << 40])
    sizes = [3, 2, 1, 128, 1, 1, 1024]
    assert driver.launched == [(sizes, 77, [tensor.data_ptr(), -5, 1 << 40, 0, 0])]
    assert (driver.code, driver.name) == (BINARY.code, b"kernel_0")
    assert not hasattr(driver, "shared")


def test_an_early_kernel_is_launched_as_one(driver: Driver) -> None:
    kernel = LoadedKernel(replace(BINARY, early=True), PLACE)
    driver.types = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64]
    tensor = torch.arange(4)
    kernel.launch((3, 2), [tensor, -5, 1 << 40])
    assert driver.launched == [([3, 2, 1, 128, 1, 1, 1024], 77, [tensor.data_ptr(), -5, 1 << 40, 0, 0])]
    assert driver.attribute == (6, 1), "programmatic stream serialization, allowed"


def test_a_thread_whose_first_call_is_a_launch_gets_the_context_of_the_gpu(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver answers CUDA_ERROR_INVALID_CONTEXT there, where the runtime would make the GPU current by itself."""
    kernel, chosen, launched = LoadedKernel(BINARY, torch.device("cuda", 1)), list[int](), driver.cuLaunchKernel
    driver.types = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64]

    class Runtime:
        def cudaSetDevice(self, index: int) -> int:
            chosen.append(index)
            return 0

    monkeypatch.setattr(store, "runtime", Runtime)
    driver.cuLaunchKernel = lambda *given: launched(*given) if chosen else 201  # type: ignore[method-assign]
    kernel.launch((1,), [torch.arange(4), 1, 2])
    assert (chosen, len(driver.launched)) == ([1], 1)


def test_much_shared_memory_is_asked_for(driver: Driver) -> None:
    LoadedKernel(Binary("big", 4, 100_000, (), (), b"code"), PLACE)
    assert driver.shared == 100_000


# The store


class Gpu(Device):
    """A CPU that says it is a GPU."""

    is_gpu = True


@pytest.fixture
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(store.OFF, raising=False)
    monkeypatch.setattr(store, "made_for", lambda device: "here")
    return tmp_path


def new_store() -> Store:
    """That of a process of its own."""
    return Store(Gpu(PLACE))


def test_what_was_used_is_found_by_the_next_process(cache: Any) -> None:
    first = new_store()
    with noting() as used:
        assert first.kernel("one") is None
    first.made("one", BINARY.pack)
    first.made("never used", BINARY.pack)
    first.save(used)
    second = new_store()
    found = second.kernel("one")
    assert found is not None
    assert found.binary == BINARY
    assert second.kernel("never used") is None


def test_a_damaged_file_is_as_if_it_were_not_there(cache: Any) -> None:
    first = new_store()
    first.made("one", BINARY.pack)
    first.save(["one"])
    (path,) = cache.rglob("*.kernel")
    assert path.name == file_of("one")
    path.write_bytes(path.read_bytes()[:20])
    assert new_store().kernel("one") is None


def test_nothing_is_kept_where_that_is_off(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.OFF, "0")
    first = new_store()
    first.made("one", BINARY.pack)
    first.save(["one"])
    assert list(cache.rglob("*.kernel")) == []


def test_a_full_disk_is_no_error(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_bytes_atomic", full)
    first = new_store()
    first.made("one", BINARY.pack)
    first.save(["one"])
    assert first.folder is None


def test_a_build_brings_its_kernels(cache: Any, tmp_path: Any) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / file_of("one")).write_bytes(BINARY.pack())
    found = new_store()
    assert found.kernel("one") is None  # remembered, until there is more to look at
    found.add(tmp_path / "build")
    assert found.kernel("one") is not None


# Which way a kernel starts


def test_a_kept_kernel_starts_without_triton_and_another_one_through_it(
    cache: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    through: list[Any] = []
    found = compiled()
    del found.src.signature["far"]
    monkeypatch.setattr(Code, "function", lambda self: self.name)
    monkeypatch.setattr(launch, "can_compile", lambda: True)
    monkeypatch.setattr(
        launch, "through_triton", lambda function, grid: lambda *given, **named: through.append(grid) or found
    )
    held = new_store()
    monkeypatch.setattr(Store, "of", staticmethod(lambda place: held))
    tensor = SimpleNamespace(device=PLACE, dtype=torch.float32, data_ptr=lambda: 4096)
    monkeypatch.setattr(torch, "Tensor", SimpleNamespace)
    launch.launch(TILE, (2,))(tensor, tensor, 7, 1, BM=16)
    assert through == [(2,)]
    launch.launch(TILE, (2,))(tensor, tensor, 7, 1, BM=16)
    assert through == [(2,), (2,)]  # in this process Triton has it
    assert driver.launched == []
    held.save([key_of(TILE, (tensor, tensor, 7, 1), {"BM": 16})])
    held = new_store()  # of the next process
    driver.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64]
    launch.launch(TILE, (2,))(tensor, tensor, 9, 1, BM=16)
    assert driver.launched == [([2, 1, 1, 128, 1, 1, 512], 77, [4096, 4096, 9, 0, 0])]
    launch.launch(TILE, (2,))(tensor, tensor, 16, 1, BM=16)  # which another kernel computes
    assert (len(through), len(driver.launched)) == (3, 1)
    monkeypatch.setattr(launch, "can_compile", lambda: False)
    with pytest.raises(MsplitError, match="kernel products is not among those of the build"):
        launch.launch(TILE, (2,))(tensor, tensor, 2**40, 1, BM=16)
