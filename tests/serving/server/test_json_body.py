"""Bodies of HTTP requests: whatever JSON comes, it is read or refused; and answers are written as TensorFlow Serving writes them."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.serving.pool.ports import Port
from msplit.serving.server import json_body
from msplit.serving.server.tensors import Refusal
from tests.campaign import examples

PORTS = {
    "f": Port("float32", (None, 2)),
    "i": Port("int8", (None,)),
    "s": Port("object", (None,)),
    "b": Port("bool", (None,)),
}
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.integers(-(1 << 80), 1 << 80)
)
KEYS = st.one_of(st.sampled_from([*PORTS, "f:0", "b64", "name", "shape", "datatype", "data"]), st.text(max_size=2))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)
KINDS = st.sampled_from(["FP32", "INT8", "BYTES", "BOOL", "FP16", "X", 1])
TENSORS = st.fixed_dictionaries({"name": st.sampled_from([*PORTS]), "shape": VALUES, "datatype": KINDS, "data": VALUES})
BODIES = st.one_of(
    VALUES,
    st.fixed_dictionaries({"instances": st.one_of(st.lists(VALUES, max_size=3), VALUES)}),
    st.fixed_dictionaries({"inputs": st.dictionaries(st.sampled_from([*PORTS]), VALUES, max_size=3)}),
    st.fixed_dictionaries(
        {"inputs": st.lists(TENSORS, max_size=2), "outputs": VALUES, "parameters": VALUES, "id": VALUES}
    ),
)


@given(body=BODIES, only=st.sampled_from([*PORTS]))
@settings(max_examples=examples(50, 5000))
def test_whatever_comes_is_read_or_refused(body: Any, only: str) -> None:
    data = json.dumps(body).encode()
    for ports in (PORTS, {only: PORTS[only]}):
        with contextlib.suppress(Refusal):
            for name, array in json_body.feeds(json_body.read(data), ports).items():
                assert array.dtype.name == PORTS[name].dtype
    with contextlib.suppress(Refusal):
        json_body.read_open(data)[1](PORTS)


def test_numbers_are_written_as_short_as_they_are_told_apart() -> None:
    values = np.array([0.1, 1 / 3, 1e-45, np.nan, -np.inf], np.float32)
    found = json.loads(json_body.answer({"y": values}, rows=True))["predictions"]
    assert found[:3] == [0.1, 0.33333334, 1e-45]
    np.testing.assert_array_equal(np.array(found, np.float32), values)
    assert json_body.answer({"y": np.array([0.1])}, rows=False) == b'{"outputs": [0.1]}'


def test_text_and_bytes() -> None:
    strings = np.array([b"a", b"\xff"], object)
    assert json_body.answer({"y": strings}, rows=True) == b'{"predictions": ["a", {"b64": "/w=="}]}'
    assert json_body.answer({"y_bytes": strings}, rows=True) == b'{"predictions": [{"b64": "YQ=="}, {"b64": "/w=="}]}'


def test_rows_that_are_none_are_no_rows() -> None:
    with pytest.raises(Refusal, match="ask with 'inputs'"):
        json_body.answer({"y": np.zeros((2, 1)), "loss": np.zeros(())}, rows=True)


@pytest.mark.parametrize("shape", [(), (0, 3), (40_000,), (3, 20_000), (200, 10, 20)])
def test_what_is_written_in_parts_is_the_same(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert json.loads(json_body.answer({"y": values}, rows=False))["outputs"] == values.tolist()
    if shape:
        both = json.loads(json_body.answer({"y": values, "z": values + 1}, rows=True))["predictions"]
        assert both == [{"y": row.tolist(), "z": (row + 1).tolist()} for row in values]


def test_rows_of_strings_keep_the_zeros_at_their_ends() -> None:
    outputs = {"s": np.array([b"a\0", b"\0\0"], object), "y": np.array([1, 2])}
    rows = json.loads(json_body.answer(outputs, rows=True))["predictions"]
    assert rows == [{"s": "a\0", "y": 1}, {"s": "\0\0", "y": 2}]


def test_long_strings_are_written_in_parts() -> None:
    strings = [b"a" * 300_000, b"", *[b"b" * 1000] * 1000]
    for shape in ((-1,), (2, -1)):
        value = np.array(strings, object).reshape(shape)
        wanted = [one.decode() for one in strings]
        found = json.loads(json_body.answer({"y": value}, rows=False))["outputs"]
        assert np.array(found, object).reshape(-1).tolist() == wanted
        assert len(list(json_body._text_of("y", value))) > 3


BLANKS = b" \r\n\t" * (1 << 15)


def test_empty_lists_and_objects_may_be_padded() -> None:
    data = b'{"inputs": [%b], "parameters": {%b}}' % (BLANKS, BLANKS)
    assert json_body.read_pieces(data) == {"inputs": [], "parameters": {}}
    assert json_body.read_open(data)[0].SerializeToString() == b""
    with pytest.raises(Refusal, match="at least one"):
        json_body.read(b'{"instances": [%b]}' % BLANKS)
    nested = json_body.read(b'{"inputs": {"f": [[%b]]}}' % BLANKS)
    assert json_body.feeds(nested, {"f": Port("float32", (None, 0))})["f"].shape == (1, 0)
    for text in (b"[%b,1]", b"[1,%b]", b"[1%b2]"):
        with pytest.raises(Refusal, match="JSON Parse error"):
            json_body.feeds(
                json_body.read(b'{"inputs": {"f": ' + text % BLANKS + b"}}"), {"f": Port("float32", (None,))}
            )


WIDE = {"f": Port("float32", (None, 3)), "s": Port("object", (None,))}
LONG = 40_000
NUMBERS = (np.arange(LONG * 3).reshape(LONG, 3) / 8).tolist()
TEXTS = ['a"[,\\', "{", 'b\u00e9\\"', "]" * 70_000] * (LONG // 4)


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("rows", [True, False])
def test_what_is_read_in_pieces_is_the_same(rows: bool, ascii: bool) -> None:
    count = 400  # its texts alone are 7 MB
    columns: dict[str, Any] = {"f": NUMBERS[:count], "s": TEXTS[:count]}
    body = {"instances": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]}
    data = json.dumps(body if rows else {"inputs": columns}, ensure_ascii=ascii, indent=1).encode()
    found = json_body.feeds(json_body.read(data), WIDE)
    np.testing.assert_array_equal(found["f"], np.array(columns["f"], np.float32))
    assert found["s"].tolist() == [text.encode() for text in columns["s"]]


def test_long_lists_are_the_same() -> None:
    data = json.dumps({"inputs": NUMBERS}).encode()
    found = json_body.feeds(json_body.read(data), {"f": WIDE["f"]})
    np.testing.assert_array_equal(found["f"], np.array(NUMBERS, np.float32))
    flat = {"name": "f", "shape": [LONG, 3], "datatype": "FP32", "data": np.ravel(NUMBERS).tolist()}
    for tensor in (flat, {**flat, "data": NUMBERS}):
        _, made = json_body.read_open(json.dumps({"inputs": [tensor]}).encode())
        np.testing.assert_array_equal(made({"f": WIDE["f"]})["f"], np.array(NUMBERS, np.float32))


@pytest.mark.parametrize(
    ("long", "said"),
    [
        ("[%s,]", "JSON Parse error"),
        ("[,%s]", "JSON Parse error"),
        ("[%s,,1]", "JSON Parse error"),
        ("[%s]]", "JSON Parse error"),
        ("[[%s]", "JSON Parse error"),
        ("[%s}", "JSON Parse error"),
        ('[%s,"]', "JSON Parse error"),
        ("[%s,[1]]", "rows of different lengths"),
        ("[[%s],[1]]", "rows of different lengths"),
        ('[%s,"a"]', "the request has strings"),
        ("[%s,1e39]", "larger numbers"),
        ("[%s,{}]", "no plain numbers"),
    ],
)
def test_what_is_wrong_in_a_long_list_is_told(long: str, said: str) -> None:
    data = ('{"inputs": {"f": ' + long % ",".join(["1"] * 100_000) + "}}").encode()
    with pytest.raises(Refusal, match=said):
        json_body.feeds(json_body.read(data), {"f": Port("float32", (None,))})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"inputs": {"f": [[1, 2]], "f:0": [[3, 4]]}}', "input f is there twice, once as f:0"),
        ('{"instances": [{"f:0": [1, 2], "f": [3, 4]}]}', "input f is there twice"),
        ('{"inputs": {"f": [[1, 2]], "f": [[3, 4]]}}', "key 'f' is there twice"),
        ('{"instances": [{"f": [1, 2], "f": [1, 2]}]}', "key 'f' is there twice"),
        ('{"inputs": {"f": [[1, 2]]}, "inputs": {"f": [[1, 2]]}}', "key 'inputs' is there twice"),
        ('{"inputs": {"f": [[1e39, 2]]}}', "input 'f' is float32, the request has larger numbers"),
        ('{"inputs": {"f": [[-1e39, 2]]}}', "larger numbers"),
        ('{"inputs": {"f": [[1e999, 2]]}}', "larger numbers"),
        ('{"inputs": {"f": [[1%s, 2]]}}' % ("0" * 400), "larger numbers"),
        ('{"inputs": {"f": [[1%s, 2]]}}' % ("0" * 5000), "JSON Parse error: a number has more digits than any type"),
        ('{"inputs": {"f": ' + "[" * 20_000 + "1" + "]" * 20_000 + "}}", "JSON Parse error: nested too deeply"),
        ('{"inputs": {"f": [[1, 2]], "t": [{"b64": 5}]}}', "input 't': what is in 'b64' is no text"),
        ('{"inputs": {"f": [[true, 2]]}}', "true and false"),
        ('{"inputs": {"f": [[null, 2]]}}', "no plain numbers"),
        ('{"inputs": {"f": [[1, 2]], "i": [1.5]}}', "input 'i' is int8, the request has numbers with a fraction"),
        ('{"inputs": {"f": [[1, 2]], "i": [NaN]}}', "input 'i' is int8, the request has numbers with a fraction"),
        ('{"inputs": {"f": [[1, 2]], "i": [Infinity]}}', "input 'i' is int8, the request has numbers with a fraction"),
        ('{"inputs": {"f": [[1, 2]], "i": [128]}}', "input 'i' is int8, the request has larger numbers"),
        ('{"inputs": {"f": [[1, 2]], "b": [2]}}', "input 'b' is bool, the request has numbers"),
        ('{"inputs": {"f": [[1, 2]], "u": [-1]}}', "input 'u' is uint8, the request has larger numbers"),
        ('{"inputs": {"f": [[1, 2]], "u": [300]}}', "input 'u' is uint8, the request has larger numbers"),
        ('{"inputs": {"f": [[1, 2]], "l": [9223372036854775808]}}', "input 'l' is int64, the request has larger"),
        ('{"inputs": {"f": [[1, 2]]}}', "no value for input i; the inputs are: "),
        ('{"inputs": {"g": [[1, 2]]}}', "the model has no input 'g'; the inputs are: "),
    ],
)
def test_what_would_be_dropped_or_changed_is_refused(body: str, said: str) -> None:
    ports = {**PORTS, "u": Port("uint8", (None,)), "l": Port("int64", (None,)), "t": Port("object", (None,))}
    with pytest.raises(Refusal, match=re.escape(said)):
        json_body.feeds(json_body.read(body.encode()), ports)


@pytest.mark.parametrize("rows", [["b", {"t": "a"}], [{"t": "a"}, "b"], [{"b64": "YQ=="}, {"t": "a"}]])
def test_instances_are_objects_or_values_and_not_both(rows: Any) -> None:
    """Beside strings an object would become a serialized `tf.Example`, which only files of inputs have."""
    with pytest.raises(Refusal, match="instances are objects and values"):
        json_body.feeds(json_body.read(json.dumps({"instances": rows}).encode()), {"t": Port("object", (None,))})


def test_an_infinite_number_is_what_is_written() -> None:
    found = json_body.feeds(json_body.read(b'{"inputs": [[Infinity, -Infinity], [NaN, 1]]}'), {"f": PORTS["f"]})
    np.testing.assert_array_equal(found["f"], np.array([[np.inf, -np.inf], [np.nan, 1]], np.float32))


def one(name: str, **changes: Any) -> str:
    return json.dumps({"name": name, "datatype": "FP32", "shape": [1, 2], "data": [1, 2], **changes})


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([one("f"), one("f")], "input f is there twice"),
        ([one("f"), one("f:0")], "input f is there twice, once as f:0"),
        ([one("f", data=[1e39, 1])], "larger numbers"),
        ([one("f", shape=[1, 3])], "2 values came"),
        ([one("f", shape=[-1, -2])], "2 values came"),
        ([one("f", shape=[0, 1 << 62], data=[])], "sizes that no array has"),
        ([one("f", shape=[1 << 70, 0], data=[])], "sizes that no array has"),
        ([one("f", datatype="FP64")], "the model takes float32"),
        ([one("f")[:-1] + ', "name": "f"}'], "key 'name' is there twice"),
        ([], "no value for input f"),
    ],
)
def test_open_tensors_that_would_be_dropped_or_changed_are_refused(inputs: list[str], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        json_body.read_open(f'{{"inputs": [{",".join(inputs)}]}}'.encode())[1]({"f": PORTS["f"]})
