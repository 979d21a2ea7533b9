"""Users of rows are found in the bytes, and all rows are made of theirs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msplit.engines.base import USERS
from msplit.engines.tensors import pieces_of_users
from msplit.engines.user_rows import UserRows
from msplit.errors import WrongShape
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
