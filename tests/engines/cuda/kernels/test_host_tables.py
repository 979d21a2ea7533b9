"""Tables in the host's memory with a cache, against the same tables in memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.device.capture import no_capture
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.kernels import host_tables
from msplit.engines.cuda.kernels.embedding import Columns, Segment, Term, fill
from msplit.engines.cuda.kernels.host_tables import HostTables, RowCache, divided
from msplit.engines.cuda.ops.embedding import empty_outputs
from msplit.engines.table_rows import ROWS
from msplit.errors import EngineError
from tests.campaign import examples

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def few_notes() -> Iterator[None]:
    """A CPU takes long for as many as a GPU has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_tables, "_NOTES_OF_CPU", 1 << 11)
        yield


def tables_of(*arrays: np.ndarray, capacity: int) -> tuple[HostTables, list[torch.Tensor], RowCache]:
    """Tables of a device of their own, and their cache."""
    tables = HostTables(Device(CPU))
    tensors = tables.cached(list(arrays), capacity)
    return tables, tensors, tables.caches[0]


def lookup(tables: HostTables, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows as the lowering takes them."""
    place = tables.find(table)
    assert place is not None
    return place.taken(ids, table[ids])


def check(cache: RowCache, arrays: list[np.ndarray]) -> None:
    """Places and rows name each other, and rows in the cache are those of the tables."""
    rows = np.concatenate(arrays)
    slots, owners = cache.slot_of.numpy(), cache._row_of.numpy()
    assert slots[-1] == owners[-1] == -1
    there = np.flatnonzero(slots[:-1] >= 0)
    np.testing.assert_array_equal(owners[slots[there]], there)
    assert (owners >= 0).sum() == len(there) <= cache.capacity
    np.testing.assert_array_equal(cache.rows.numpy()[slots[there]], rows[there])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_lookup_gives_the_tables_rows_whatever_the_cache_has(data: st.DataObject) -> None:
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    width = data.draw(st.integers(1, 5))
    arrays = [chance.standard_normal((data.draw(st.integers(1, 30)), width)).astype(np.float32) for _ in range(3)]
    arrays[0][0] = np.nan
    tables, tensors, cache = tables_of(*arrays, capacity=data.draw(st.sampled_from([1, 2, 7, 40, 200])))
    for _ in range(data.draw(st.integers(1, 12))):
        number = int(chance.integers(3))
        with tables.step():
            ids = torch.from_numpy(chance.integers(0, len(arrays[number]), (3, 4)))
            np.testing.assert_array_equal(lookup(tables, tensors[number], ids).numpy(), arrays[number][ids])
        if chance.random() < 0.3:  # rows get other values
            changed = torch.from_numpy(chance.integers(0, len(arrays[number]), 2))
            arrays[number][changed] = chance.standard_normal((2, width))
            tensors[number][changed] = torch.from_numpy(arrays[number][changed])
            tables.forget(tensors[number], changed if chance.random() < 0.7 else None)
        check(cache, arrays)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_rows_of_other_types(dtype: str) -> None:
    array = np.arange(60).reshape(20, 3).astype(dtype)
    tables, (table,), cache = tables_of(array, capacity=16)
    for _ in range(4):
        with tables.step():
            ids = torch.arange(20)
            np.testing.assert_array_equal(lookup(tables, table, ids).numpy(), array)
    assert int(cache.counts[0])


def test_rows_that_are_read_often_stay_in_the_cache() -> None:
    rows, capacity = 20_000, 2_000
    tables, (table,), cache = tables_of(np.ones((rows, 2), np.float32), capacity=capacity)
    chance = np.random.default_rng(0)
    weights = 1 / np.arange(1, rows + 1) ** 1.05
    draw = chance.permutation(rows)[chance.choice(rows, (400, 512), p=weights / weights.sum())]
    for step, ids in enumerate(draw):
        if step == 300:
            cache.counts.zero_()
        with tables.step():
            lookup(tables, table, torch.from_numpy(ids))
    hits, misses, *_ = cache.counts.tolist()
    best = np.sort(weights)[::-1][:capacity].sum() / weights.sum()
    assert hits / (hits + misses) > 0.9 * best, (hits / (hits + misses), best)


def test_rows_of_all_lookups_come_in_and_into_free_places_first() -> None:
    """Where there are many more places for notes than lookups, too, as on a GPU; and the more often a row is read, the sooner."""
    rows, capacity, often, seldom = 4_000, 1_600, 256, 16
    tables, (first, last), cache = tables_of(*(np.ones((rows, 2), np.float32),) * 2, capacity=capacity)
    chance, free = np.random.default_rng(0), capacity
    for _ in range(8):
        with tables.step():
            cache._next = 0  # a kernel has its places for good
            lookup(tables, first, torch.from_numpy(chance.permutation(rows)[:often]))
            lookup(tables, last, torch.from_numpy(chance.permutation(rows)[:seldom]))
        there = cache._row_of[:-1]
        assert int((there < 0).sum()) == free - int(cache.counts[2]), "a row went while there were free places"
    owners = there[there >= 0].numpy()
    assert len(owners) > 0.7 * 8 * cache.admits  # others were noted twice, or had come in before
    assert seldom / often / 2 < (owners >= rows).sum() / (owners < rows).sum() < seldom / often * 2


def test_a_new_cache_is_filled_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "_ADMITTED", 4)
    tables, (table,), cache = tables_of(np.ones((1000, 2), np.float32), capacity=100)
    for begin in range(0, 200, 4):
        with tables.step():
            lookup(tables, table, torch.arange(begin, begin + 4))
    assert int((cache._row_of >= 0).sum()) == 100


def test_small_tables_stay_on_the_device() -> None:
    assert divided([10, 20, 30], 60) == ([], 0)
    assert divided([100, 10, 20, 300], 60) == ([0, 3], 30)
    assert divided([100, 31], 60) == ([0, 1], 60)


def test_a_memory_that_is_too_small_is_refused_with_one_that_is_enough() -> None:
    tables, array = HostTables(Device(CPU)), np.zeros((1_000_000, 8), np.float32)
    with pytest.raises(EngineError, match="numbers of their rows alone") as problem:
        tables.place([array], 1_000_000)
    enough = float(str(problem.value.fix).split("at least ")[1].split(" GB")[0]) * 1e9
    with pytest.raises(EngineError):
        tables.place([array], int(enough * 0.98))
    (found,) = tables.place([array], int(enough * 1.02))
    assert found is not None


def test_the_same_arrays_have_one_cache_as_long_as_somebody_holds_it() -> None:
    tables, array = HostTables(Device(CPU)), np.ones((50, 2), np.float32)
    (one,), (other,) = tables.cached([array], 8), tables.cached([array], 8)
    assert one is other
    cache: weakref.ref[Any] = weakref.ref(tables.caches[0])
    address = one.data_ptr()
    del one, other
    assert cache() is None
    assert tables.caches == []
    assert address not in tables._places


def test_caches_come_and_go_beside_steps() -> None:
    arrays = [np.random.default_rng(number).standard_normal((200, 3)).astype(np.float32) for number in range(4)]
    tables, (kept,), _ = tables_of(arrays[0], capacity=16)
    over, failures = Event(), list[BaseException]()

    def come_and_go() -> None:
        try:
            while not over.is_set():
                made = tables.cached([array.copy() for array in arrays[1:]], 16)
                with tables.step():
                    ids = torch.arange(0, 200, 7)
                    np.testing.assert_array_equal(lookup(tables, made[1], ids).numpy(), arrays[2][ids])
                del made
        except BaseException as problem:
            failures.append(problem)

    threads = [Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(300):
        with tables.step():
            ids = torch.arange(number % 5, 200, 3)
            np.testing.assert_array_equal(lookup(tables, kept, ids).numpy(), arrays[0][ids])
    over.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(tables.caches) == 1


def test_each_lookup_notes_in_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tables, "_NOTES_OF_CPU", 100)
    _, _, cache = tables_of(np.ones((50, 2), np.float32), capacity=8)
    places = [(0, 40), (40, 60), (0, 30), (0, 100), (0, 80)]
    assert [cache.region(count, 1) for count in (40, 60, 30, 101, 80)] == places
    # Of several lookups of a step each has its share, however many rows another one reads.
    assert [cache.region(count, 3) for count in (7, 1000, 5)] == [(80, 7), (0, 33), (33, 5)]


def test_a_refresh_is_put_off_where_it_could_not_copy_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are noted only, and beside a capture in another thread."""
    tables, (table,), cache = tables_of(np.arange(40, dtype=np.float32).reshape(20, 2), capacity=16)
    ids = torch.arange(5)
    monkeypatch.setattr(host_tables, "is_precompiling", lambda: True)
    with tables.step():
        lookup(tables, table, ids)
    assert int(cache.counts[2]) == 0
    monkeypatch.setattr(host_tables, "is_precompiling", lambda: False)
    begun, over = Event(), Event()

    def captures() -> None:
        with no_capture(wait=True):  # holds what a capture holds
            begun.set()
            over.wait()

    other = Thread(target=captures)
    other.start()
    begun.wait()
    with tables.step():
        lookup(tables, table, ids)
    assert int(cache.counts[2]) == 0
    over.set()
    other.join()
    with tables.step():
        lookup(tables, table, ids)
    assert int(cache.counts[2]) > 0
    check(cache, [np.arange(40, dtype=np.float32).reshape(20, 2)])


def looked_up(
    chance: np.random.Generator,
    device: torch.device,
    columns: list[tuple[int, int, str]],
    rows: int,
    cached: float,
    sizes: tuple[int, ...] = (1, 7, 300),
) -> None:
    """Lookups by the kernel, in tables of whole numbers, whose sums are the same in whatever order: equal to the bit, and counted.

    Args:
        chance: Source of all that is random.
        device: See above.
        columns: Elements of a row, ids of a row of the batch and type of each; the types int8 and bf16 are those of packed rows.
        rows: Of the batch.
        cached: Share of the rows of tables that their caches have.
        sizes: How many rows tables have.
    """
    dtype = next((kind for _, _, kind in columns if kind not in ROWS), "float32")
    element, tables = getattr(torch, dtype), Device.of(device).owned(HostTables)
    inputs, segments, wanted, left = list[torch.Tensor](), list[Segment](), list[torch.Tensor](), 0
    found, total = dict[int, int](), dict[int, int]()
    width_of_all, caches = sum(width for width, _, _ in columns), dict[int, RowCache]()
    for width, count, kind in columns:
        size, packs = int(chance.choice(sizes)), kind if kind in ROWS and dtype == "float32" else ""
        table = torch.from_numpy(chance.integers(-8, 8, (size, width))).to(element)
        table[:, 0] = 127 if packs == "int8" else table[:, 0]  # the scale is 1
        (hosted,) = tables.cached([to_numpy(table)], size, packs)
        place = tables.find(hosted)
        assert place is not None
        assert place.packed == packs
        ids = torch.from_numpy(chance.integers(-2, size + 2, (rows, count)))
        there = torch.from_numpy(np.flatnonzero(chance.random(size) < cached)).to(device)
        put(place.cache, there)
        inside = (ids >= 0) & (ids < size)
        rows_of = torch.where(inside.unsqueeze(-1), table.float()[ids.clamp(0, size - 1)], 0)
        wanted.append(rows_of.sum(1).to(element))
        hits = int((inside & torch.isin(ids, there.cpu())).sum())
        found[id(place.cache)], total[id(place.cache)] = hits, int(inside.sum())
        caches[id(place.cache)] = place.cache
        inputs += [ids.to(chance.choice([torch.int32, torch.int64])).to(device), hosted]
        term = Term(len(inputs) - 2, len(inputs) - 1, step=count, count=count)
        segments.append(Segment(0, left, width_of_all, rows, width, (term,)))
        left += width
    spec = Columns(tuple(segments), ((rows, width_of_all),), dtype)
    for _ in range(2):
        (output,) = empty_outputs(spec, device, dtype)
        assert fill(spec, tuple(inputs), (output,))
        np.testing.assert_array_equal(output.cpu().float().numpy(), torch.cat(wanted, 1).float().numpy())
    for number, cache in caches.items():
        tally = cache.tally.cpu()
        hits, misses = int((tally & 0xFFFFFFFF).sum()), int((tally >> 32).sum())
        assert (hits, misses) == (2 * found[number], 2 * (total[number] - found[number]))


def put(cache: RowCache, rows: torch.Tensor) -> None:
    """Has a cache that is empty hold some rows."""
    slots = torch.arange(len(rows), device=rows.device)
    cache.slot_of[rows] = slots.int()
    cache._row_of[slots] = rows.int()
    cache._copy(rows, slots)


@pytest.mark.gpu
@pytest.mark.interpretable
@settings(max_examples=examples(12, 200), deadline=None)
@given(data=st.data())
def test_the_kernel_gives_rows_to_the_bit_whatever_the_cache_has(data: st.DataObject) -> None:
    """Duplicates, ids that no table has, no rows at all, one id a row and bags, of each type, with all found, none, and some."""
    dtype = data.draw(st.sampled_from(["float32", "float32", "float16", "bfloat16", "float64"]))
    kinds = st.sampled_from([dtype, data.draw(st.sampled_from([*ROWS]))] if dtype == "float32" else [dtype])
    widths = st.sampled_from([1, 4, 8, 12, 33, 128, 132])
    columns = data.draw(st.lists(st.tuples(widths, st.sampled_from([1, 1, 2, 5, 40]), kinds), min_size=1, max_size=4))
    device = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    looked_up(
        chance, device, columns, data.draw(st.sampled_from([0, 1, 3, 9])), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    )
