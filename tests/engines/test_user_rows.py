"""Users of rows are found in the bytes, and all rows are made of theirs again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msplit.engines.base import USERS
from msplit.engines.cuda.options import SharedRows
from msplit.engines.tensors import pieces_of_users
from msplit.engines.user_rows import UserRows, one_row
from msplit.errors import EngineError, WrongShape
from msplit.verify.results import Running
from tests.campaign import examples

VALUES = {
    "float32": st.sampled_from([0.0, -0.0, 1.0, float("nan")]),
    "int8": st.integers(-1, 1),
    "int64": st.integers(0, 1),
    "bool": st.booleans(),
    "object": st.sampled_from([b"", b"a", "a", "ä"]),
    "S2": st.sampled_from([b"", b"a", b"ab"]),
}


@st.composite
def inputs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, int], int]:
    rows, feeds, entries = draw(st.integers(1, 9)), dict[str, Any](), dict[str, int]()
    for name in "abc"[: draw(st.integers(1, 3))]:
        dtype, entries[name] = draw(st.sampled_from(sorted(VALUES))), draw(st.integers(1, 2))
        shape = (rows * entries[name], *draw(st.sampled_from([(), (1,), (0,), (3,), (2, 2)])))
        feeds[name] = draw(hnp.arrays(np.dtype(dtype), shape, elements=VALUES[dtype]))
    return feeds, entries, rows


def row_of(feeds: dict[str, Any], entries: dict[str, int], row: int) -> tuple[Any, ...]:
    cut = (value[row * entries[name] : (row + 1) * entries[name]] for name, value in feeds.items())
    return tuple(tuple(one.flat) if one.dtype.hasobject else one.tobytes() for one in cut)


def assert_same(found: dict[str, Any], feeds: dict[str, Any]) -> None:
    assert found.keys() == feeds.keys()
    for name, value in feeds.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
        assert (
            found[name].tolist() == value.tolist()
            if value.dtype.hasobject
            else found[name].tobytes() == value.tobytes()
        )


@settings(max_examples=examples(150, 20_000))
@given(inputs(), st.integers(2, 6), st.integers(1, 9))
def test_rows_are_of_the_users_whose_bytes_they_have(drawn: Any, most: int, cut: int) -> None:
    feeds, entries, rows = drawn
    shared = UserRows(entries, most, rows)
    each, index = shared.by_user(feeds, rows)
    known = [row_of(feeds, entries, row) for row in range(rows)]
    users = list(dict.fromkeys(known))
    assert index.tolist() == [users.index(one) for one in known]
    assert [row_of(each, entries, user) for user in range(len(users))] == users
    assert_same(shared.of_rows(each, index), feeds)
    assert_same(shared.of_rows(*shared.by_user({**each, USERS: index}, rows)), feeds)
    if 2 * most > rows:
        assert_same(dict(shared.of(feeds)), feeds)
    elif len(users) > most:
        with pytest.raises(WrongShape, match=f"are of {len(users)} users, and a step has room for {most}"):
            shared.of(feeds)
    else:
        read = dict(shared.of({**each, USERS: index}))
        assert_same({name: value for name, value in read.items() if name != USERS}, {
            name: np.concatenate([value, *[value[: entries[name]]] * (most - len(users))]) for name, value in each.items()
        })  # fmt: skip
        assert_same(
            shared.of_rows({name: read[name] for name in feeds}, read[USERS]) if len(users) == most else feeds, feeds
        )
    spans = list(pieces_of_users(index, cut, most))
    assert [row for span in spans for row in range(*span)] == list(range(rows))
    for start, end in spans:
        assert len(set(index[start:end])) <= most
        assert end - start <= cut
        full = end - start == cut or len({*index[start:end], *index[end : end + 1]}) > most
        assert full or end == rows


@settings(max_examples=examples(150, 20_000))
@given(inputs(), st.integers(0, 8), st.booleans())
def test_the_one_row_of_all_is_taken_where_their_bytes_are_equal(drawn: Any, other: int, strided: bool) -> None:
    feeds, entries, rows = drawn
    once = {name: np.concatenate([value[: entries[name]]] * rows) for name, value in feeds.items()}
    spread = {name: np.repeat(value, 2, -1)[..., ::2] if strided else value for name, value in once.items()}
    assert_same(one_row(entries, spread), {name: value[: entries[name]] for name, value in once.items()})
    for name, one in entries.items():  # a row of another user among them
        at = min(other, rows - 1) * one
        mixed = once[name].copy()
        mixed[at : at + one] = feeds[name][at : at + one]
        if row_of({name: mixed}, entries, at // one) == row_of({name: mixed}, entries, 0 if at else rows - 1):
            one_row({name: one}, {name: mixed})
        elif rows > 1:
            with pytest.raises(EngineError, match=f"rows of input {name} differ"):
                one_row({name: one}, {name: mixed})


def test_equal_rows_of_tensors_are_told_by_their_bytes() -> None:
    torch = pytest.importorskip("torch")
    nan = torch.tensor([[float("nan"), 0.0]]).repeat(3, 1)
    assert one_row({"x": 1}, {"x": nan})["x"].shape == (1, 2)
    assert one_row({"x": 1}, {"x": nan[:, :0]})["x"].shape == (1, 0)
    nan[2, 1] = -0.0
    with pytest.raises(EngineError, match="rows of input x differ"):
        one_row({"x": 1}, {"x": nan})


@pytest.mark.parametrize("users", [1, 2])
def test_a_step_is_timed_with_one_row_of_what_is_shared_for_each_user(users: int) -> None:
    user = np.repeat(np.arange(users), 4 // users).repeat(2)[:, None] * np.ones(3)
    feeds = {"user": user, "item": np.zeros((4, 2)), "rate": np.zeros(1)}
    shared = SharedRows(("user",), (("user", 2), ("item", 1), ("rate", 0)), users)
    job = SimpleNamespace(feeds=feeds, options=SimpleNamespace(shared=shared))
    found = dict(Running(cast(Any, SimpleNamespace(job=job)), None).feeds)
    index = found.pop(USERS, None)
    assert {name: value.shape for name, value in found.items()} == {
        "user": (2 * users, 3),
        "item": (4, 2),
        "rate": (1,),
    }
    assert index is None if users == 1 else index.tolist() == [0, 0, 1, 1]
    of_row = np.zeros(4, int) if index is None else index
    np.testing.assert_array_equal(found["user"].reshape(users, 2, 3)[of_row].reshape(8, 3), feeds["user"])


@given(data=st.data())
@settings(max_examples=examples(100, 2000), deadline=None)
def test_a_step_is_given_one_row_however_the_rows_come(data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    from msplit.engines.cuda.runtime.host import ByUser

    once = UserRows({"a": 1, "b": 2})
    row = {"a": np.array([1.5]), "b": np.arange(6.0).reshape(2, 3)}
    rest = {"c": np.ones((4, 2)), "d": np.array(3.0)}
    device = SimpleNamespace(joins_others=False, step=lambda feeds: feeds)
    given_rows = {name: np.concatenate([value] * data.draw(st.sampled_from([1, 1, 4]))) for name, value in row.items()}
    given_rows = {
        name: torch.from_numpy(value) if data.draw(st.booleans()) else value for name, value in given_rows.items()
    }
    found = ByUser(once, cast(Any, device)).step({**given_rows, **rest})
    assert found.keys() == {*row, *rest}
    for name, value in {**row, **rest}.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value)
        assert np.asarray(found[name]).shape == value.shape
