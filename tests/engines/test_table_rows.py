"""Rows of tables as int8 with a scale and as bf16, and what asks for them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from msplit.engines import table_rows
from msplit.engines.table_rows import (
    RoundedTables,
    TableOptions,
    is_rounded,
    kept_in,
    packed,
    rounded,
    words_of,
)
from msplit.errors import MsplitError

LARGEST = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
tables = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(1, 33)),
    elements=st.one_of(
        st.floats(-4, 4, width=32),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.sampled_from([0.0, -0.0, LARGEST, -LARGEST, TINY, TINY / 2, 1e-45, 127.0]),
    ),
)


def unpacked(words: np.ndarray, width: int) -> np.ndarray:
    """By another way than `table_rows` and the kernels have: number by number."""
    data = words.tobytes()
    rows = []
    for number in range(len(words)):
        row = data[number * words.shape[1] * 4 :][: words.shape[1] * 4]
        scale = np.frombuffer(row[-4:], np.float32)[0]
        rows.append([np.float32((one - 256 if one > 127 else one) * float(scale)) for one in row[:width]])
    return np.array(rows, np.float32)


@settings(max_examples=300, deadline=None)
@given(table=tables)
def test_rows_are_near_and_are_not_changed_by_another_time(table: np.ndarray) -> None:
    found, most, mean = rounded("table", table)
    far = np.abs(found.astype(np.float64) - table)
    bound = np.abs(table).max(1, keepdims=True) / 127.0 / 2
    assert (far <= np.maximum(bound * (1 + 2**-14), 127 * TINY)).all()
    assert most == far.max()
    assert mean == pytest.approx(far.mean())
    assert is_rounded(found)
    again, most, _ = rounded("table", found)
    np.testing.assert_array_equal(again, found)
    assert most == 0


@settings(max_examples=200, deadline=None)
@given(table=tables)
def test_words_hold_what_was_rounded(table: np.ndarray) -> None:
    found, _, _ = rounded("table", table)
    words = packed(found)
    assert words.shape == (len(table), words_of(table.shape[1]))
    assert words.shape[1] % 4 == 0
    np.testing.assert_array_equal(unpacked(words, table.shape[1]), found)


def nearest_bf16(number: float) -> float:
    """By another way than `table_rows` has: of the two neighbours without lower bits the nearer one, or the even one."""
    bits = int(np.float32(number).view(np.uint32))
    low, high = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    below, above = (float(np.uint32(one).view(np.float32)) for one in (low, high))
    near, far = abs(number - below), abs(above - number)
    return below if near < far or (near == far and not low & 0x10000) else above


@settings(max_examples=200, deadline=None)
@given(table=tables)
def test_bf16_rows_are_the_nearest_and_words_hold_them(table: np.ndarray) -> None:
    table = np.where(np.abs(table) > 3.38e38, np.float32(1), table)
    found, most, mean = rounded("table", table, "bf16")
    wanted = np.array([nearest_bf16(float(one)) for one in table.reshape(-1)], np.float32).reshape(table.shape)
    np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))  # zeros keep their signs
    far = np.abs(found.astype(np.float64) - table)
    assert (most, mean) == (far.max(), pytest.approx(far.mean()))
    assert is_rounded(found, "bf16")
    assert is_rounded(table, "bf16") == np.array_equal(table, found)
    words = packed(found, "bf16")
    assert words.shape == (len(table), words_of(table.shape[1], "bf16"))
    halves = words.view(np.uint16)[:, : table.shape[1]].astype(np.uint32) << 16
    np.testing.assert_array_equal(halves, found.view(np.uint32))


def test_bf16_rows_keep_what_is_not_finite_and_refuse_what_would_become_so() -> None:
    special = np.array([[np.nan, np.inf, -np.inf, -0.0], [1e-45, 2.0**-133, 3.38e38, -1.0]], np.float32)
    special[0, 0] = np.uint32(0xFF800001).view(np.float32)  # a NaN of low bits alone: cut, it would be an infinity
    found, most, _ = rounded("users", special, "bf16")
    assert np.isnan(found[0, 0])
    np.testing.assert_array_equal(found[0, 1:], special[0, 1:])
    assert np.signbit(found[0, 3])
    assert found[1, :2].tolist() == [0, 2.0**-133]
    assert np.isfinite(most)
    assert is_rounded(found, "bf16")
    assert not is_rounded(special, "bf16")
    special[1, 2] = LARGEST
    with pytest.raises(
        MsplitError, match="row 1 of table users has numbers that are larger than its largest, which bf16"
    ):
        rounded("users", special, "bf16")


def test_large_tables_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "_AT_ONCE", 64)
    table = np.random.default_rng(0).standard_normal((1000, 3, 4)).astype(np.float32)
    found, _, _ = rounded("table", table)
    one_by_one = np.concatenate([rounded("table", table[at : at + 1])[0] for at in range(len(table))])
    np.testing.assert_array_equal(found, one_by_one)
    np.testing.assert_array_equal(unpacked(packed(found), 12), found.reshape(1000, 12))
    assert not is_rounded(table)
    found[700, 1, 1] *= 1.001  # behind what is looked at first
    assert not is_rounded(found)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_by_name(wrong: float) -> None:
    table = np.ones((5000, 4), np.float32)
    table[4321, 2] = wrong
    with pytest.raises(MsplitError, match="row 4321 of table users has numbers that are not finite"):
        rounded("users", table)
    assert not is_rounded(table)


def test_other_types_are_left_alone() -> None:
    for dtype in ("float16", "float64", "int32", "int8"):
        assert not is_rounded(np.ones((4, 4), dtype))


def test_only_the_tables_that_are_named_are_rounded() -> None:
    table = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    tables = RoundedTables(["one"])
    found = tables.of({"one": table, "two": table})
    assert found["two"] is table
    assert is_rounded(found["one"])
    assert [*tables.errors] == ["one"]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (4, (4_000_000_000, "")),
        ("0.5", (500_000_000, "")),
        ("4,rows=int8", (4_000_000_000, "int8")),
        ("4,rows=bf16", (4_000_000_000, "bf16")),
        (1e300, (sys.maxsize, "")),
    ],
)
def test_what_asks_for_them(given_: Any, expected: tuple[int, str]) -> None:
    assert TableOptions.read(given_) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "four",
        "4,rows=int4",
        "4,int8",
        "4,rows=",
        "4,rows=rows=int8",
        "4,rows=bf16,int8",
        "-1",
        0,
        "nan",
        "4,rows=int8,",
        "4,",
        ",",
        10**400,
        [4],
    ],
)
def test_what_can_not_be_asked_for(wrong: Any) -> None:
    with pytest.raises(MsplitError, match="--table-memory"):
        TableOptions.read(wrong)


def test_copies_share_the_pages_that_are_equal_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whoever writes to which of them, and none is changed by what is written to another."""
    monkeypatch.setattr(table_rows, "_LEAST_SHARED", 1)
    monkeypatch.setattr(table_rows, "_PAGES_AT_ONCE", 1 << 14)
    chance = np.random.default_rng(0)
    before = chance.standard_normal((5000, 7)).astype(np.float32)
    before[3] = np.nan
    after = before.copy()
    after[chance.integers(0, 5000, 20)] += 1
    after[4999, 6], after[0, 0] = -0.0, np.inf
    state = table_rows.shareable({"table": before, "empty": np.zeros((0, 4))})
    with table_rows.saving_beside(state):
        first, second = table_rows.saved("table", after), table_rows.saved("table", before)
        assert table_rows.saved("other", after) is not after
        assert table_rows.saved("table", after[:10]).tobytes() == after[:10].tobytes()
        assert table_rows.saved("empty", state["empty"]).shape == (0, 4)
    for found, wanted in ((state["table"], before), (first, after), (second, before)):
        assert found.tobytes() == wanted.tobytes()
    state["table"][7] = 5
    first[8] = 6
    assert second.tobytes() == before.tobytes()
    assert state["table"][8].tobytes() == before[8].tobytes()
    with table_rows.saving_beside(state):
        assert table_rows.saved("table", before).tobytes() == before.tobytes()
    known = table_rows.shareable({"table": before, "other": before})
    again = table_rows.shareable({"table": before.copy(), "other": after}, known)
    assert again["table"] is known["table"]
    assert again["other"].tobytes() == after.tobytes()
    known["table"][7] = 5  # its file has the old value
    with table_rows.saving_beside(table_rows.shareable({"table": known["table"].copy()}, known)):
        assert table_rows.saved("table", before).tobytes() == before.tobytes()
    del again, known
    files = {*table_rows._files}
    del state, found
    assert not files & {*table_rows._files}, "its file is closed with it"


def test_ways_in_which_tables_are_kept_are_told() -> None:
    assert kept_in({"mapped": 5}) == "mapped from files"
    assert kept_in({"unaligned": 5, "packed": 1}) == "copied: packed, unaligned"
    assert kept_in({"mapped": 2 * 10**9, "no file": 1}) == "2 GB mapped from files, else copied: no file"
