"""What a request must bring, and how several become one step and their answers again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from msplit.engines.base import USERS
from msplit.engines.user_rows import UserRows
from msplit.errors import EngineError
from msplit.serving.pool.ports import Port, Ports
from tests.campaign import examples

DTYPES = {"x": np.dtype(np.float32), "ids": np.dtype(np.int64), "k": np.dtype(np.float32)}
ENTRIES = {"x": 1, "ids": 2, "k": 0}
MADE = {"y": 1, "pairs": 2, "none": 1, "k": 0}


def shapes(batch: int) -> dict[str, tuple[int, ...]]:
    return {"x": (batch, 3), "ids": (2 * batch,), "k": (2,)}


def ports(batches: tuple[int, ...] = (1, 4, 8), **more: Any) -> Ports:
    """Two entries of `ids` belong to a row, and `k` has no rows."""
    return Ports(DTYPES, {batch: shapes(batch) for batch in batches}, (ENTRIES, MADE), **more)


def given_rows(rows: int, start: int = 0, k: float = 1.0) -> dict[str, NDArray[Any]]:
    return {
        "x": (np.arange(rows * 3, dtype=np.float32) + start).reshape(rows, 3),
        "ids": np.arange(rows * 2) + start,
        "k": np.full(2, k, np.float32),
    }


def test_what_has_rows_says_so() -> None:
    assert ports().inputs == {
        "x": Port("float32", (None, 3)),
        "ids": Port("int64", (None,)),
        "k": Port("float32", (2,)),
    }
    example = {"y": np.zeros((8, 5)), "pairs": np.zeros((16, 1), np.int32), "none": np.zeros((8, 0)), "k": np.zeros(())}
    assert ports().outputs(example) == {
        "y": Port("float64", (None, 5)),
        "pairs": Port("int32", (None, 1)),
        "none": Port("float64", (None, 0)),
        "k": Port("float64", ()),
    }


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_request_is_taken_as_it_is(rows: int) -> None:
    feeds = given_rows(rows)
    arrays, found, _ = ports().check(feeds)
    assert found == rows
    for name, value in feeds.items():
        assert arrays[name] is value


def test_what_lies_where_steps_run_stays_there_but_for_what_has_no_rows() -> None:
    torch = pytest.importorskip("torch")
    there = ports(device="cpu")  # as where tensors lie, which on a GPU are not the host's
    fed = {name: torch.from_numpy(value) for name, value in given_rows(3).items()}
    taken, rows, key = there.check(fed)
    assert rows == 3
    assert key == there.check(given_rows(3))[2] != there.check(given_rows(3, k=2))[2]
    assert taken["x"].data_ptr() == fed["x"].data_ptr()
    assert isinstance(taken["ids"], torch.Tensor)
    assert isinstance(taken["k"], np.ndarray)
    assert all(isinstance(value, np.ndarray) for value in ports(device="cuda").check(fed)[0].values())
    assert all(isinstance(value, np.ndarray) for value in ports().check(fed)[0].values())
    for wrong, said in (
        ({**fed, "x": fed["x"][:2]}, "inputs have different numbers of rows"),
        ({**fed, "x": fed["x"].double()}, "input x was prepared as float32"),
        ({**fed, "x": fed["x"][:, :2]}, "input x was prepared as float32"),
        ({"x": fed["x"], "k": fed["k"]}, "no value for input ids"),
    ):
        with pytest.raises(EngineError, match=said):
            there.check(wrong)


def strided(value: NDArray[Any]) -> NDArray[Any]:
    return np.repeat(value, 2, axis=0)[::2]


def frozen(value: NDArray[Any]) -> NDArray[Any]:
    value.flags.writeable = False
    return value


class Own(np.ndarray):  # type: ignore[type-arg]
    """An array of somebody's own class."""


class Speaks:
    """A tensor of some library, on the host."""

    def __init__(self, value: NDArray[Any]) -> None:
        self._value, self.dtype, self.shape = value, value.dtype, value.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self._value.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def torch_tensor(value: NDArray[Any]) -> Any:
    return pytest.importorskip("torch").from_numpy(value)


@pytest.mark.parametrize(
    "make", [strided, frozen, np.asfortranarray, lambda value: value.view(Own), torch_tensor, Speaks]
)
def test_values_come_in_many_forms(make: Callable[[NDArray[Any]], Any]) -> None:
    feeds = given_rows(2)
    arrays, rows, key = ports().check({name: make(value.copy()) for name, value in feeds.items()})
    assert (rows, key) == (2, ports().check(feeds)[2])
    for name, value in feeds.items():
        np.testing.assert_array_equal(np.asarray(arrays[name]), value)


def test_a_number_of_numpy_is_an_array_without_axes() -> None:
    found = Ports({"x": np.dtype("float32"), "k": np.dtype("float32")}, {1: {"x": (1,), "k": ()}}, ({"x": 1}, {}))
    arrays, rows, _ = found.check({"x": np.zeros(1, np.float32), "k": np.float32(3)})
    assert (rows, arrays["k"]) == (1, 3)


class Framed:
    """It has a type, as a column of a data frame has, and is no array."""

    dtype = np.dtype(np.float32)
    shape = (1, 3)


WRONG: dict[str, tuple[Mapping[str, Any], str]] = {
    "missing": ({"k": None}, "no value for input k"),
    "another": ({"z": np.zeros(1)}, "no input 'z'"),
    "no name": ({3: np.zeros(1)}, "no input 3"),
    "float64": ({"x": np.zeros((1, 3))}, r"input x was prepared as float32 \(1, 3\), not float64"),
    "int32": ({"ids": np.zeros(2, np.int32)}, "int64"),
    "big-endian": ({"x": np.zeros((1, 3), ">f4")}, "not >f4"),
    "big-endian ids": ({"ids": np.zeros(2, ">i8")}, "not >i8"),
    "text": ({"x": np.array([["a", "b", "c"]])}, "not <U1"),
    "objects": ({"x": np.zeros((1, 3), object)}, "not object"),
    "columns": ({"x": np.zeros((1, 4), np.float32)}, r"not float32 \(1, 4\)"),
    "an axis too many": ({"x": np.zeros((1, 3, 1), np.float32)}, r"\(1, 3, 1\)"),
    "an axis too few": ({"x": np.zeros(3, np.float32)}, "rows"),
    "no axes": ({"x": np.float32(1)}, r"not float32 \(\)"),
    "shared, another shape": ({"k": np.zeros(3, np.float32)}, r"not float32 \(3,\)"),
    "too many rows": (given_rows(2049), "a request of 2,049 rows has more than 2,048, the most that are taken"),
    "0 rows of one": ({"x": np.zeros((0, 3), np.float32)}, "different numbers of rows"),
    "0 rows of the other": ({"ids": np.zeros(0, np.int64)}, "different numbers of rows"),
    "more rows of one": ({"x": np.zeros((2, 3), np.float32)}, "different numbers of rows: x 2, ids 1"),
    "half a row": ({"ids": np.zeros(3, np.int64)}, "different numbers of rows"),
    "halves of rows": ({"ids": np.zeros(1, np.int64)}, "different numbers of rows"),
    "a list": ({"x": [[1.0, 2.0, 3.0]]}, "input x is given a list, not an array"),
    "a ragged list": ({"x": [[1.0], [2.0, 3.0]]}, "input x is given a list, not an array"),
    "a number": ({"k": 3.0}, "input k is given a float"),
    "nothing": ({"x": None}, "input x is given a NoneType"),
    "an object": ({"x": Framed()}, "input x is given a Framed"),
    "a class": ({"x": np.float32}, "input x is given a type"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("joins", [True, False])
def test_what_is_wrong_is_named(case: str, joins: bool) -> None:
    changes, said = WRONG[case]
    feeds = {name: value for name, value in {**given_rows(1), **changes}.items() if case != "missing" or name != "k"}
    found = ports() if joins else Ports(DTYPES, {0: shapes(1)}, None)
    with pytest.raises(EngineError, match=said if joins else None):
        found.check(feeds)


@pytest.mark.parametrize("feeds", [None, 3, [np.zeros(3)], np.zeros((1, 3)), "x", [("x", 1)]])
def test_what_is_no_mapping_is_refused(feeds: Any) -> None:
    with pytest.raises(EngineError, match="a mapping from names of inputs to arrays"):
        ports().check(feeds)


def test_steps_that_can_not_be_shared_have_their_own_batches() -> None:
    found = Ports(DTYPES, {batch: shapes(batch) for batch in (2, 4)}, None, "Softmax mixes rows")
    assert (found.joins, found.batches, found.inputs["x"]) == (False, (2, 4), Port("float32", (None, 3)))
    assert found.check(given_rows(4))[1:] == (4, None)
    assert found.bucket(4) == 4
    with pytest.raises(EngineError, match=r"(?s)\(2, 4\).*Softmax mixes rows"):
        found.check(given_rows(3))


def test_fixed_shapes_have_no_rows() -> None:
    found = Ports(DTYPES, {0: shapes(3)}, None)
    assert (found.joins, found.batches, found.inputs["x"]) == (False, (), Port("float32", (3, 3)))
    assert found.check(given_rows(3))[1:] == (0, None)
    with pytest.raises(EngineError, match=r"input x was prepared as float32 \(3, 3\), not float32 \(2, 3\)"):
        found.check(given_rows(2))


def test_requests_share_a_step_only_where_what_has_no_rows_is_equal() -> None:
    key = [
        ports().check(given_rows(1, start, k))[2] for start, k in ((0, 1.0), (5, 1.0), (0, 2.0), (0, 0.0), (0, -0.0))
    ]
    assert key[0] == key[1]
    assert len(set(key)) == 4  # 0 and -0 are not the same bits
    nan = given_rows(1, k=np.nan)
    assert ports().check(nan)[2] == ports().check({**nan, "k": nan["k"].copy()})[2]


def texts(rows: int = 1) -> Ports:
    return Ports(
        {"s": np.dtype(object), "t": np.dtype(object)},
        {1: {"s": (1,), "t": (1,)}, 4: {"s": (4,), "t": (1,)}},
        ({"s": 1}, {"s": 1}),
    )


def test_strings_of_all_kinds_share_a_step() -> None:
    given = [np.array([b"\xff\xfe"]), np.array(["ü"]), np.array([b"a", "b"], object), np.array([b"\xff"], object)]
    found = texts()
    shared = [np.array(["k"]), np.array([b"k"]), np.array([b"k"], object), np.array(["k"], object)]
    checked = [found.check({"s": one, "t": t}) for one, t in zip(given, shared, strict=True)]
    joined = found.join([arrays for arrays, _, _ in checked[:3]], 4)["s"]
    assert joined.dtype == object
    assert [one if isinstance(one, bytes) else one.encode() for one in joined] == [
        b"\xff\xfe",
        "ü".encode(),
        b"a",
        b"b",
    ]
    assert len({key for _, _, key in checked}) == 1  # equal, however they are written
    assert found.check({"s": given[0], "t": np.array(["j"])})[2] != checked[0][2]
    assert texts().inputs["s"] == Port("object", (None,))


def test_bytes_are_taken_as_they_are() -> None:
    given = {"s": np.array([b"\xff", b""] * 2, object)[::2], "t": np.array([b"k"], object)}
    taken, rows, key = texts().check(given)
    assert (taken is given, rows) == (True, 2)
    other = {"s": np.array(["\xff", ""]), "t": np.array(["k"])}
    assert texts().check(other)[1:] == (2, key)


@pytest.mark.parametrize("value", [3, None, np.float32(1), ["a"], np.array("a")])
def test_what_is_no_string_is_refused_before_it_harms_others(value: Any) -> None:
    wrong = np.empty(2, object)
    wrong[:] = [b"a", value]
    with pytest.raises(EngineError, match=f"input s has a {type(value).__name__} among its strings"):
        texts().check({"s": wrong, "t": np.array(["k"])})


def test_a_text_that_can_not_be_sent_is_refused() -> None:
    with pytest.raises(EngineError, match="input s has a text that UTF-8 can not have"):
        texts().check({"s": np.array(["a\ud800"]), "t": np.array(["k"])})


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[int], int]:
    batches = (1, 4, 8)
    rows = draw(st.lists(st.integers(1, 8), min_size=1, max_size=6).filter(lambda rows: sum(rows) <= batches[-1]))
    return rows, next(batch for batch in batches if batch >= sum(rows))


@settings(max_examples=examples(40, 5000))
@given(parts())
def test_join_and_cut_are_what_they_seem(drawn: tuple[list[int], int]) -> None:
    rows, bucket = drawn
    found = ports()
    assert found.bucket(sum(rows)) == bucket
    feeds = [given_rows(count, 100 * number) for number, count in enumerate(rows)]
    joined = found.join(feeds, bucket)
    for name, count in ENTRIES.items():
        if count:
            whole = np.concatenate([one[name] for one in feeds])
            filled = [whole] + [feeds[0][name][:count]] * (bucket - sum(rows))
            np.testing.assert_array_equal(joined[name], np.concatenate(filled))
            assert joined[name].shape == shapes(bucket)[name]
        else:
            np.testing.assert_array_equal(joined[name], feeds[0][name])
    outputs = {
        "y": joined["x"] * 2,
        "pairs": joined["ids"].reshape(bucket * 2, 1) + 1,
        "none": np.zeros((bucket, 0)),
        "k": np.array(joined["k"]),
    }
    answers = found.cut({name: value.copy() for name, value in outputs.items()}, rows)
    assert len(answers) == len(rows)
    start = 0
    for count, answer, one in zip(rows, answers, feeds, strict=True):
        assert list(answer) == list(outputs)
        np.testing.assert_array_equal(answer["y"], one["x"] * 2)
        np.testing.assert_array_equal(answer["pairs"], one["ids"].reshape(-1, 1) + 1)
        assert answer["none"].shape == (count, 0)
        np.testing.assert_array_equal(answer["k"], one["k"])
        start += count
    for number, answer in enumerate(answers):  # each is the caller's own
        for value in answer.values():
            value += 1 + number
    for number, (answer, one) in enumerate(zip(answers, feeds, strict=True)):
        np.testing.assert_array_equal(answer["y"], one["x"] * 2 + 1 + number)
        np.testing.assert_array_equal(answer["k"], one["k"] + 1 + number)


@settings(max_examples=examples(60, 5000))
@given(st.data())
def test_a_step_of_several_users_has_a_row_of_each_and_the_user_of_each_row(data: st.DataObject) -> None:
    found = ports().sharing(UserRows({"k": 2}, users=3, rows=8))
    of_row = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=20), "users")
    feeds = {**given_rows(len(of_row)), "k": np.repeat(np.asarray(of_row, np.float32), 2)}
    arrays, rows, key = found.check(feeds)
    assert rows == len(of_row)
    assert found.fits(arrays, rows) == (len(set(of_row)) == 1 and rows <= 8)
    requests = [(arrays, rows)] if found.fits(arrays, rows) else found.parts(arrays, rows)
    start = 0
    for one, count in requests:
        assert {name: value.shape for name, value in one.items()} == shapes(count)
        for name, value in one.items():
            again = np.tile(value, count) if name == "k" else value
            np.testing.assert_array_equal(
                again, feeds[name][start * max(ENTRIES[name], 2 * (name == "k")) :][: len(again)]
            )
        assert found.key(one) == key
        start += count
    assert start == rows
    taken, size = [], 0
    for one, count in requests:  # as the scheduler joins them
        if size + count > 8 or len({found.user(each) for each in [*taken, one]}) > 3:
            break
        taken, size = [*taken, one], size + count
    joined = found.join(taken, found.bucket(size))
    assert len(joined["k"]) // 2 == len({found.user(each) for each in taken})
    each = UserRows({"k": 2}, 3, 8).of_rows(joined, joined[USERS])
    np.testing.assert_array_equal(each["k"][: 2 * size], feeds["k"][: 2 * size])
    np.testing.assert_array_equal(each["k"][2 * size :], np.tile(feeds["k"][:2], found.bucket(size) - size))
    np.testing.assert_array_equal(joined["x"][:size], feeds["x"][:size])
    assert found.whole([{"y": one["x"]} for one, _ in requests], rows)["y"].tolist() == feeds["x"].tolist()


@pytest.mark.parametrize("rows", [[2], [1, 1], [1, 2], [4], []])
def test_strings_are_cut_as_numbers_are(rows: list[int]) -> None:
    outputs = {"s": np.array([b"a", "b", b"c", b""], object)}
    found = texts().cut(outputs, rows)
    assert [[*one["s"]] for one in found] == [
        [*outputs["s"][sum(rows[:number]) : sum(rows[:number]) + count]] for number, count in enumerate(rows)
    ]


def test_no_library_is_imported_for_arrays() -> None:
    before = set(sys.modules)
    ports().check(given_rows(1))
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ("torch", "tensorflow")}
