"""Memory that two processes share: what one puts in, the other one finds, whole and in order."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from msplit.errors import Busy, Closed, EngineError, InvalidInput, MsplitError
from msplit.serving.pool import ring
from msplit.serving.pool.ring import (
    DROPPED,
    ERROR,
    OUTPUTS,
    Memory,
    MemorySizes,
    Ring,
    bytes_of,
    packed_error,
    unpacked_error,
)
from tests.campaign import examples

TYPES = [np.dtype(name) for name in ("float32", "int64", "uint8", "bool", "float16", ">i4", "S3", "U2")]


def bell() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK)


@given(st.integers(1, 7), st.lists(st.sampled_from(["push", "ring", "take"]), max_size=60))
def test_numbers_come_in_order_once_they_are_told(size: int, acts: list[str]) -> None:
    memory, handle = memoryview(bytearray(4 * size)).cast("I"), bell()
    sender, receiver = Ring(memory, handle), Ring(memory, handle)
    told, untold = deque[int](), deque[int]()
    for number, act in enumerate(acts):
        if act == "push" and len(told) + len(untold) < size:  # no slot is in a ring twice
            sender.push(number)
            untold.append(number)
        elif act == "ring":
            sender.ring()
            told += untold
            untold.clear()
        elif act == "take":
            assert [*receiver.take()] == [*told]
            told.clear()
    os.close(handle)


@contextmanager
def memory(
    layout: Mapping[str, Any] | None, slots: int = 3, *, texts: bool = False, entries: int = 0
) -> Iterator[tuple[Memory, Memory, int]]:
    """Both sides, and the file."""

    def of(rows: int, length: int = 0) -> Any:
        return None if layout is None else {name: (dtype, (rows, *shape)) for name, (dtype, shape) in layout.items()}

    most = of(entries)
    size = 0 if most is None else bytes_of(most)
    sizes = MemorySizes(slots, size, size, texts)
    handle, bells = os.memfd_create("test"), (bell(), bell())
    os.ftruncate(handle, sizes.parts()[-1])
    try:
        yield Memory(handle, bells, sizes, of, of), Memory(handle, bells, sizes, of, of), handle
    finally:
        for one in (handle, *bells):
            os.close(one)


def drawn(seed: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Any bytes, as far as the type has a value for each."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "SU":
        return rng.integers(0, 999, shape).astype(dtype)
    return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)


@settings(max_examples=examples(40, 2000))
@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=2)), min_size=1
    ),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=3, max_size=3),
)
def test_all_slots_keep_what_was_put_into_them(
    layout: dict[str, tuple[np.dtype[Any], list[int]]], requests: list[tuple[int, bool]]
) -> None:
    """As laid out, and spilled: of another shape, or type, or order."""
    with memory(layout, entries=4) as (mine, its, _):
        given_ = []
        for slot, (rows, plain) in enumerate(requests):
            feeds = {name: drawn(slot, dtype, (rows, *shape)) for name, (dtype, shape) in layout.items()}
            if not plain:
                feeds = {name: value[:, None] for name, value in reversed(feeds.items())}
            given_.append(feeds)
            mine.ask(slot, feeds, rows, slot, 0.5, np.inf)
            mine.requests.push(slot)
        mine.requests.ring()
        for slot in its.requests.take():
            found, rows, level, since, deadline = its.asked(slot)
            assert (rows, level, since, deadline) == (requests[slot][0], slot, 0.5, np.inf)
            size = its.outputs.write(slot, rows, found)
            assert bool(size) != requests[slot][1] or any(value.dtype.kind == "U" for value in found.values())
            its.tell(slot, OUTPUTS, size)
            its.answers.push(slot)
        its.answers.ring()
        assert [*mine.answers.take()] == [0, 1, 2]
        for slot, (rows, _) in enumerate(requests):
            outputs = mine.told(slot, rows)
            assert isinstance(outputs, dict)
            assert outputs.keys() == given_[slot].keys()
            for name, value in given_[slot].items():
                assert (outputs[name].dtype, outputs[name].shape) == (value.dtype, value.shape)
                assert outputs[name].tobytes() == value.tobytes()


def test_what_the_caller_gets_is_its_own() -> None:
    with memory({"a": (np.dtype("float32"), ())}, entries=4) as (mine, its, _):
        its.tell(0, OUTPUTS, its.outputs.write(0, 2, {"a": np.array([1, 2], np.float32)}))
        answer = mine.told(0, 2)["a"]  # type: ignore[index]
        its.outputs.write(0, 2, {"a": np.array([3, 4], np.float32)})
        assert answer.tolist() == [1, 2]


@settings(max_examples=examples(25, 500))
@given(st.lists(st.binary(max_size=5), max_size=6), st.booleans())
def test_strings(texts: list[bytes], column: bool) -> None:
    value = np.empty(len(texts), object)
    value[:] = texts
    value = value[:, None] if column else value
    with memory(None, texts=True) as (mine, its, _):
        mine.ask(1, {"s": value, "n": np.arange(3)}, 1, 0, 0.0, 0.0)
        found = its.asked(1)[0]
        assert found["s"].shape == value.shape
        assert found["s"].tolist() == value.tolist()
        assert found["n"].tolist() == [0, 1, 2]


def test_large_strings_take_memory_only_as_long_as_they_are_there() -> None:
    with memory(None, texts=True) as (mine, its, handle):

        def taken() -> int:
            return os.fstat(handle).st_blocks * 512

        start = taken()
        for _ in range(3):
            large = np.array([bytes([letter]) * (1 << 20) for letter in b"xyz"], object)
            mine.ask(0, {"s": large}, 1, 0, 0.0, 0.0)
            assert taken() > start + (3 << 20)
            its.tell(0, OUTPUTS, its.outputs.write(0, 1, its.asked(0)[0]))
            assert mine.told(0, 1)["s"].tolist() == large.tolist()  # type: ignore[index]
            assert taken() < start + (1 << 18)
        mine.ask(0, {"s": np.array([b"small"], object)}, 1, 0, 0.0, 0.0)
        assert its.asked(0)[0]["s"].tolist() == [b"small"]


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "SPILL", 1 << 16)
    with (
        memory(None, texts=True) as (mine, _, _),
        pytest.raises(EngineError, match="do not fit into the 131,072 of a slot"),
    ):
        mine.ask(0, {"s": np.array([b"x" * (1 << 17)], object)}, 1, 0, 0.0, 0.0)


def test_flags_errors_and_how_many_were_taken() -> None:
    with memory({"a": (np.dtype("int8"), ())}, entries=1) as (mine, its, _):
        its.taken[0] += 7
        mine.flags[2] = 1
        assert (mine.taken[0], [*its.flags]) == (7, [0, 0, 1])
        its.tell(2, ERROR, its.outputs.spill(2, packed_error(Busy("words"))))
        assert isinstance(mine.told(2, 1), Busy)
        its.tell(2, DROPPED, 0)
        assert isinstance(mine.told(2, 1), Closed)


class Own(Exception):
    """Made of other arguments than it shows."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number}: {text}")


@pytest.mark.parametrize(
    "problem",
    [
        InvalidInput("an id is 7", where="ids", fix="give another", details=["of 5", "at 0"]),
        Busy("many"),
        Closed("gone", fix="open"),
        MsplitError("plain"),
        ValueError("a", 3),
        MemoryError(),
    ],
)
def test_errors_are_the_same_on_the_other_side(problem: Exception) -> None:
    found = unpacked_error(packed_error(problem))
    assert (type(found), str(found), found.args) == (type(problem), str(problem), problem.args)
    assert vars(found) == vars(problem)


def test_an_error_that_can_not_be_sent_is_told_in_words() -> None:
    local = type("Local", (ValueError,), {})
    for problem, said in ((Own(3, "x"), "Own: 3: x"), (local("y"), "Local: y")):
        found = unpacked_error(packed_error(problem))
        assert (type(found), str(found)) == (EngineError, said)


class Registered:
    """Stands for CUDA: reads memory by its address, and notes what is registered."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.released: list[bytes] = []

    def register(self, address: int, size: int) -> bool:
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        assert all(address + size <= first or address >= first + more for first, more in self.sizes.items())
        self.sizes[address] = size
        return True

    def release(self, address: int) -> None:
        self.released.append(ctypes.string_at(address, 4))  # it is still there


@pytest.mark.parametrize("large", [False, True])
def test_large_slots_are_registered_once_and_until_nobody_looks_at_them(large: bool) -> None:
    rows = 300 if large else 200
    sizes = MemorySizes(3, up(4096 * 300 + 8 * 320), 64)
    gpu, handle, bells = Registered(), os.memfd_create("test"), (bell(), bell())
    os.ftruncate(handle, sizes.parts()[-1])

    def of(rows: int, length: int = 0) -> Any:
        return {"a": (np.dtype(np.float32), (rows, 1024)), "b": (np.dtype(np.int64), (rows,))}

    mine, its = Memory(handle, bells, sizes, of, of), Memory(handle, bells, sizes, of, of, gpu)
    seen = []
    for turn in range(2):
        for slot in (2, 0):
            feeds = {"a": np.full((rows, 1024), slot + 5, np.float32), "b": np.arange(rows)}
            mine.ask(slot, feeds, rows, 0, 0.0, np.inf)
            seen.append(its.asked(slot)[0])
            assert len(gpu.sizes) == (min(len(seen), 2) if large else 0)
        assert [one["a"][0, 0] for one in seen[2 * turn :]] == [7, 5]
    ends = [(one["a"].ctypes.data, one["b"].ctypes.data + one["b"].nbytes) for one in seen]
    assert not large or all(end - first <= gpu.sizes[first] for first, end in ends)
    last = seen[0]["a"]
    del its, seen
    gc.collect()
    assert not gpu.released
    del last
    gc.collect()
    assert sorted(gpu.released) == ([np.float32(value).tobytes() for value in (5, 7)] if large else [])
    for each in (handle, *bells):
        os.close(each)


def up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
