"""Requests in protobuf: what would be dropped or changed without a word is refused, and what is right is read as protobuf reads it."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("prometheus_client")

from msplit.engines.host import hashing
from msplit.serving.pool.ports import Port
from msplit.serving.server import decode, messages, tensors
from msplit.serving.server.tensors import LONGEST, Refusal
from tests.campaign import examples
from tests.serving.server.test_large import field, infer, predict, proto, varint

PREDICTS, INFERS = decode.Reader(decode.predict_request).parts, decode.Reader(decode.infer_request).parts
PORTS = {"x": Port("float32", (None, 2), 16)}
INTS = {"u": Port("uint8", (None,), 8)}
TWO = proto(1, [1, 2], field(5, np.array([1, 2], "<f4").tobytes()))


def packed(number: int, *values: int) -> bytes:
    return field(number, b"".join(varint(value) for value in values))


@pytest.mark.parametrize(
    ("data", "ports", "said"),
    [
        (predict(x=TWO) + predict(x=TWO)[8:], PORTS, "input x is there twice"),
        (predict(**{"x": TWO, "x:0": TWO}), PORTS, "input x is there twice, once as x:0"),
        (predict(**{"x:0": TWO, "x": TWO}), PORTS, "input x is there twice"),
        (predict(y=TWO), PORTS, "the model has no input 'y'; the inputs are: x"),
        (predict(), PORTS, "no value for input x; the inputs are: x"),
        (field(2, field(1, b"x") + field(2, TWO) + field(2, TWO)), PORTS, "input x has two values"),
        (predict(x=proto(1, [1, 2], field(6, bytes(16)))), PORTS, "its values are in double_val"),
        (predict(x=TWO + field(4, bytes(8))), PORTS, "its values are in tensor_content, float_val"),
        (predict(x=proto(1, [1, 2], field(5, bytes(7)))), PORTS, "input x has a part of a float32"),
        (predict(x=proto(1, [-1, 2], field(5, bytes(8)))), PORTS, "negative size"),
        (predict(x=proto(1, [9, 2], field(5, bytes(72)))), PORTS, "a batch of 9 is larger"),
        (predict(x=proto(1, [2, 9], field(5, bytes(72)))), PORTS, r"the model takes float32 \[-1, 2\]"),
        (predict(x=proto(2, [1, 2], field(6, bytes(16)))), PORTS, "is said to be float64 .*; the model takes float32"),
        (predict(u=proto(4, [1], packed(7, 300))), INTS, "input u has numbers that are no uint8, which are 0 to 255"),
        (predict(u=proto(4, [1], packed(7, -1))), INTS, "input u has numbers that are no uint8"),
        (predict(u=proto(4, [1], field(7, b"\xff" * 10 + b"\1"))), INTS, "more than 64 bits"),
        (predict(u=proto(4, [1], field(7, b"\xff" * 9 + b"\2"))), INTS, "more than 64 bits"),
        (predict(u=proto(4, [1], field(7, b"\x80"))), INTS, "input u has a part of a uint8"),
        (predict(u=proto(6, [1], packed(7, 128))), {"u": Port("int8", (None,))}, "no int8, which are -128 to 127"),
        (predict(u=proto(3, [1], packed(7, 1 << 31))), {"u": Port("int32", (None,))}, "no int32"),
        (predict(u=proto(22, [1], packed(16, 1 << 32))), {"u": Port("uint32", (None,))}, "no uint32"),
        (predict(u=proto(10, [1], packed(11, 2))), {"u": Port("bool", (None,))}, "no bool, which are 0 to 1"),
        (predict(u=proto(10, [1], field(4, b"\2"))), {"u": Port("bool", (None,))}, "neither 0 nor 1"),
        (predict(u=proto(19, [1], packed(13, 1 << 16))), {"u": Port("float16", (None,))}, "no float16"),
        (predict(u=proto(4, [2], field(7, b"\1\x80") + field(7, b"\1"))), INTS, "input u has a part of a uint8"),
        (
            predict(x=proto(1, [1, 2], field(5, bytes(2)) + field(5, bytes(6)))),
            PORTS,
            "input x has a part of a float32",
        ),
        (predict(x=proto(1, [0, 1 << 62], b"")), PORTS, "sizes that no array has"),
        (predict(x=proto(1, [1 << 62, 0], field(4, b""))), PORTS, "sizes that no array has"),
    ],
)
def test_what_would_be_dropped_or_changed_is_refused(data: bytes, ports: Any, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        PREDICTS(data).feeds(ports)


FLOATS = field(5, field(6, np.array([1, 2], "<f4").tobytes()))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (infer(b"x", b"FP32", [1, 2], FLOATS) + infer(b"x", b"FP32", [1, 2], FLOATS)[6:], "input x is there twice"),
        (infer(b"x", b"FP32", [1, 2], FLOATS) + infer(b"x:0", b"FP32", [1, 2], FLOATS)[6:], "once as x:0"),
        (infer(b"x", b"FP32", [1, 2], FLOATS, bytes(8)), "contents beside raw_input_contents"),
        (infer(b"x", b"FP32", [1, 2], field(5, field(7, bytes(16)))), "contents of another type"),
        (infer(b"x", b"FP32", [1, 2], FLOATS + field(5, packed(2, 1))), "contents of another type"),
        (infer(b"x", b"FP32", [1, 3], FLOATS), "2 values came"),
        (infer(b"x", b"FP32", [(1 << 64) - 1, 2], FLOATS), "negative size"),
        (infer(b"x", b"FP32", [1 << 62, 1 << 62], raw=bytes(8)), "8 bytes came"),
        (infer(b"x", b"FP32", [0, 1 << 62], raw=b""), "sizes that no array has"),
        (infer(b"x", b"FP32", [1, 2], field(5, field(6, bytes(6)) + field(6, bytes(2)))), "part of a float32"),
        (infer(b"x", b"FP16", [1, 2], FLOATS), "raw_input_contents only"),
        (infer(b"x", b"FP32", [1, 2], raw=bytes(8)) + field(7, b""), "there are 1 inputs, and 2 in"),
        (b"\x2b" + infer(b"x", b"FP32", [1, 2], FLOATS), "no ModelInferRequest"),
        (infer(b"x", b"FP32", [1, 2], FLOATS)[:-1], "no ModelInferRequest"),
    ],
)
def test_open_inputs_that_would_be_dropped_or_changed_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        INFERS(data).feeds(PORTS)


def test_parts_of_contents_are_one_and_need_not_be_packed() -> None:
    one, two = np.array([1], "<f4").tobytes(), np.array([2], "<f4").tobytes()
    for contents in (field(5, field(6, one)) + field(5, field(6, two)), field(5, b"\x35" + one + b"\x35" + two)):
        found = INFERS(infer(b"x", b"FP32", [1, 2], contents)).feeds(PORTS)
        assert found["x"].tolist() == [[1, 2]]
    unpacked = b"".join(varint(7 << 3) + varint(value) for value in (1, 200))
    assert PREDICTS(predict(u=proto(4, [2], unpacked))).feeds(INTS)["u"].tolist() == [1, 200]


ONE, OTHER = (np.array(value, "<f4").tobytes() for value in (1, 2))
SCALARS = {"a": Port("float32", (1,), 1), "b": Port("float32", (1,), 1)}


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (
            decode.predict_request,
            predict(a=proto(1, [1], b"\x2d" + ONE), b=proto(1, [1], field(4, b"") + field(5, OTHER))),
        ),
        (
            decode.predict_request,
            predict(a=proto(1, [1], b"\x2d" + ONE), b=proto(1, [1], field(20, b"") + field(5, OTHER))),
        ),
        (
            decode.infer_request,
            infer(b"a", b"FP32", [1], field(5, b"\x35" + ONE))
            + infer(b"b", b"FP32", [1], field(5, field(20, b"") + field(6, OTHER)))[6:],
        ),
    ],
)
def test_a_number_that_is_not_packed_beside_a_field_without_any_is_read_alike_the_second_time(
    kind: Any, data: bytes
) -> None:
    read = decode.Reader(kind)
    for _ in range(3):
        assert {name: value.tolist() for name, value in read.parts(data).feeds(SCALARS).items()} == {"a": [1], "b": [2]}


def test_requests_that_are_kept_are_few_and_take_little_memory() -> None:
    read = decode.Reader(decode.predict_request)
    sizes = [30_000 * (number % 2) for number in range(12)] + [0] * 1100
    for number, size in enumerate(sizes):
        read.parts(predict(x=TWO) + field(3, b"%d" % number) + field(3, b"") * size).feeds(PORTS)
        asked = sum(layout.request.ByteSize() for layout in read._known.values())
        assert 1 <= len(read._known) <= decode._MOST_LAYOUTS
        assert sum(map(len, read._known)) + asked * decode._GROWS <= decode._MOST_KEPT
    assert len(read._known) > 300  # those that are small


COUNT = 30_000
FLOATS = np.arange(COUNT, dtype="<f4")
TEXT = b"\x2e" + b"a" * 46
UNPACKED = {
    "float_val": (
        PREDICTS,
        predict(x=proto(1, [COUNT], b"".join(b"\x2d" + one.tobytes() for one in FLOATS))),
        "float32",
    ),
    "chunks": (
        PREDICTS,
        predict(x=proto(1, [COUNT], b"".join(b"\x2a\4" + one.tobytes() for one in FLOATS))),
        "float32",
    ),
    "uint32_val": (PREDICTS, predict(x=proto(22, [COUNT], b"\x80\1\7" * COUNT)), "uint32"),
    "string_val": (PREDICTS, predict(x=proto(7, [COUNT], (b"\x42" + TEXT) * COUNT)), "object"),
    "no tensor_content": (
        PREDICTS,
        predict(x=proto(1, [COUNT], b"\x22\0" * COUNT + field(5, FLOATS.tobytes()))),
        "float32",
    ),
    "fp32_contents": (
        INFERS,
        infer(b"x", b"FP32", [COUNT], field(5, b"".join(b"\x35" + one.tobytes() for one in FLOATS))),
        "float32",
    ),
    "bytes_contents": (INFERS, infer(b"x", b"BYTES", [COUNT], field(5, (b"\x42" + TEXT) * COUNT)), "object"),
    "raw": (INFERS, infer(b"x", b"BYTES", [COUNT], raw=(TEXT[:1] + bytes(3) + TEXT[1:]) * COUNT), "object"),
}


@pytest.mark.parametrize("way", UNPACKED)
def test_a_value_takes_no_more_memory_for_being_a_field_of_its_own(way: str) -> None:
    read, data, dtype = UNPACKED[way]
    tracemalloc.start()
    try:
        found = read(data).feeds({"x": Port(dtype, (None,), most=COUNT)})["x"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    wanted = {"object": np.full(COUNT, TEXT[1:], object), "uint32": np.full(COUNT, 7, np.uint32)}.get(dtype, FLOATS)
    np.testing.assert_array_equal(found, wanted)
    assert peak < 2 * len(data) + (1 << 21)  # beside the request itself; that of a piece of numbers, which has one size


@settings(max_examples=examples(60, 1000), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1 << 40), max_size=3)), max_size=8), st.integers(1, 4))
def test_packed_values_and_others_are_read_as_protobuf_reads_them(
    parts: list[tuple[bool, list[int]]], kept_apart: int
) -> None:
    for number, kind, own in ((10, 9, "int64_val"), (17, 23, "uint64_val")):
        values = b"".join(
            field(number, b"".join(map(varint, part))) if packs else b"".join(field(number, one) for one in part)
            for packs, part in parts
        )
        wanted = getattr(messages.TensorProto.FromString(values), own)
        data = predict(x=proto(kind, [len(wanted)], values))
        ports = {"x": Port(own.removesuffix("_val"), (None,))}
        with patch.object(decode, "_APART", kept_apart):
            assert PREDICTS(data).feeds(ports)["x"].tolist() == list(wanted)


STRINGS = [
    field(8, b"a"),
    field(8, b"\xff\xfe"),
    field(8, b""),
    field(8, 1),  # a number where a string belongs
    field(5, b"\0\0\x80?"),
    field(4, b""),
    field(4, b"\1a"),
    field(1, 7),
    field(1, 1),
    field(3, 1),
    field(2, field(2, field(1, 2))),
    field(2, field(2, field(1, -1))),
    field(2, field(3, 1)),  # of unknown rank
    field(99, b"unknown"),
    b"\x42\x05a",  # longer than what follows
]


@settings(max_examples=examples(150, 5000), deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=2),
    st.lists(st.one_of(st.sampled_from(STRINGS[:3]), st.sampled_from(STRINGS)), max_size=5),
    st.integers(1, 4),
)
@example([], [field(8, b"a"), field(4, b"x"), field(4, b"")], 1)
@example([], [field(8, b"a"), field(8, 1), field(2, field(2, field(1, 2)))], 2)
def test_strings_are_read_alike_at_once_and_field_by_field(dims: list[int], fields: list[bytes], most: int) -> None:
    data = predict(x=proto(7, dims, b"".join(fields)))
    found = []
    for at_once in (decode._MOST_TEXT, 0):
        ports = {"x": Port("object", (None,) * len(dims), most)}
        with patch.object(decode, "_MOST_TEXT", at_once):
            try:
                array = decode.Reader(decode.predict_request).parts(data).feeds(ports)["x"]
            except Refusal as problem:
                found.append((problem.code, problem.said))
            else:
                assert {*map(type, array.flat)} <= {bytes}
                found.append((array.shape, array.tolist()))
    assert found[0] == found[1]


@settings(max_examples=examples(100, 5000), deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=2),
    st.lists(st.sampled_from([b"a", b"\xff\xfe", b"", b"longer"]), max_size=5),
    st.sampled_from([b"", field(8, 1), field(3, 1), field(99, b"unknown"), b"\x42\x05a"]),
    st.integers(1, 4),
)
def test_listed_bytes_are_read_alike_at_once_and_field_by_field(
    dims: list[int], texts: list[bytes], more: bytes, most: int
) -> None:
    data = infer(b"x", b"BYTES", dims, field(5, b"".join(field(8, one) for one in texts) + more))
    found = []
    for at_once in (decode._MOST_TEXT, 0):
        with patch.object(decode, "_MOST_TEXT", at_once):
            try:
                array = INFERS(data).feeds({"x": Port("object", (None,) * len(dims), most)})["x"]
            except Refusal as problem:
                found.append((problem.code, problem.said))
            else:
                found.append((array.shape, array.tolist()))
    if more == field(8, 1) and isinstance(found[0][0], tuple):
        return  # which protobuf takes for an unknown field
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("raw", "count", "said"),
    [
        (b"\1\0\0\0a" * 3, 3, None),
        (b"\0\0\0\0" * 3, 3, None),
        (b"\1\0\0\0a" * 3, 2, "more strings came"),
        (b"\1\0\0\0a" * 2, 3, "2 values came"),
        (b"\1\0\0\0a" * 2, 100, "2 values came"),
        (b"\1\0\0\0a" * 100, 100, "larger than any"),
        (b"\1\0\0\0a\1\0\0", 2, "do not fit the 8 bytes"),
        (b"\2\0\0\0a", 1, "do not fit the 5 bytes"),
        (b"\xff\xff\xff\xffa", 1, "do not fit"),
    ],
)
def test_raw_strings(raw: bytes, count: int, said: str | None) -> None:
    data, ports = infer(b"x", b"BYTES", [count], raw=raw), {"x": Port("object", (None,), 8)}
    if said is None:
        assert INFERS(data).feeds(ports)["x"].tolist() == [raw[4:5] if raw[0] else b""] * count
    else:
        with pytest.raises(Refusal, match=said):
            INFERS(data).feeds(ports)


@given(
    texts=st.lists(st.binary(max_size=300), max_size=20),
    spoils=st.sampled_from([0, 0, 1, -1, 4]),
    place=st.integers(0, 60),
)
@settings(max_examples=examples(60, 5000))
def test_raw_strings_are_read_in_c_as_in_python(texts: list[bytes], spoils: int, place: int) -> None:
    block = bytearray(b"".join(len(text).to_bytes(4, "little") + text for text in texts))
    if spoils and place < len(block):
        block[place] = (block[place] + spoils) % 256
    data, ports = infer(b"x", b"BYTES", [len(texts)], raw=bytes(block)), {"x": Port("object", (None,), 20)}
    found: list[Any] = []
    for compiled in (decode.strings_in, lambda *where: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "strings_in", compiled)
            try:
                found.append(INFERS(data).feeds(ports)["x"].tolist())
            except Refusal as problem:
                found.append(problem.said)
    assert found[0] == found[1]
    if not spoils:
        assert found[0] == texts


def test_a_long_name_is_cut_before_it_is_looked_at() -> None:
    with pytest.raises(Refusal) as caught:
        PREDICTS(predict(**{"\n" * 100_000: TWO})).feeds(PORTS)
    assert len(caught.value.said) == LONGEST


@given(values=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40), at_once=st.sampled_from([16, 1 << 18]))
@settings(max_examples=examples(40, 2000))
def test_numbers_of_changing_length_are_read_as_protobuf_reads_them(values: list[int], at_once: int) -> None:
    tensor = messages.TensorProto(dtype=9, int64_val=values)
    tensor.tensor_shape.dim.add().size = len(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "AT_ONCE", at_once)
        assert decode.array_of(tensor, "x").tolist() == values


MANY = {"x": Port("float32", (None, 2), 64), "k": Port("int64", (None,), 64), "b": Port("bool", (None,), 64)}


def drawn(random: np.random.Generator, names: str, rows: int, way: str) -> bytes:
    """A request for some of these inputs, of values that are drawn anew."""
    values = {
        "x": random.standard_normal((rows, 2)).astype("<f4"),
        "k": random.integers(-9, 9, rows).astype("<i8"),
        "b": random.integers(0, 2, rows).astype(bool),
    }
    if way == "raw":
        types = {"x": b"FP32", "k": b"INT64", "b": b"BOOL"}
        heads = [infer(name.encode(), types[name], [*values[name].shape])[6:] for name in names]
        return field(1, b"wide") + b"".join([*heads, *[field(7, values[name].tobytes()) for name in names]])
    inputs = {}
    for name in names:
        value = values[name]
        own = field({"x": 5, "b": 11}[name], value.tobytes()) if name != "k" else packed(10, *value.tolist())
        content = own if way == "listed" else field(4, value.tobytes())
        inputs[name] = proto({"x": 1, "k": 9, "b": 10}[name], [*value.shape], content)
    return predict(**inputs)


def is_known(kept: decode.Reader, data: bytes) -> bool:
    """True if a request differs from one before in values only. Without what the wheel compiles none is kept."""
    if hashing.native() is None:
        pytest.skip("nothing is compiled")
    found = hashing.values_of(data, infers=kept._infers)
    return found is not None and found[0] in kept._known


@pytest.mark.parametrize("way", ["listed", "content", "raw"])
@pytest.mark.parametrize("names", ["x", "xk", "xkb"])
def test_a_request_like_one_before_is_read_as_if_it_were_the_first(way: str, names: str) -> None:
    read = decode.infer_request if way == "raw" else decode.predict_request
    ports = {name: MANY[name] for name in names}
    random, kept, known = np.random.default_rng(0), decode.Reader(read), 0
    for turn in range(24):
        data = drawn(random, names, 1 + turn % 3, way)
        known += is_known(kept, data)
        found, wanted = kept.parts(data).feeds(ports), decode.Reader(read).parts(data).feeds(ports)
        assert found.keys() == wanted.keys() == ports.keys()
        for name, value in wanted.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(found[name], value)
    fixed = names == "x" or (names == "xk" and way != "listed")
    assert known == (21 if fixed else 0)  # a bool is looked at, and a number may take more bytes the next time


def test_a_large_input_is_a_view_and_a_small_one_is_aligned() -> None:
    ports = {"x": Port("float32", (None, 2), 1 << 20)}
    for rows, viewed in ((1, False), (1 << 14, True)):
        x, kept = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2), decode.Reader(decode.predict_request)
        data = predict(x=proto(1, [rows, 2], field(4, x.tobytes())))
        for known in (False, True):
            assert is_known(kept, data) == known
            found = kept.parts(data).feeds(ports)["x"]
            np.testing.assert_array_equal(found, x)
            assert (found.base is data) == (known and viewed)
            assert found.flags.aligned or viewed


def test_a_request_like_one_before_is_read_anew_for_another_model() -> None:
    kept, data = decode.Reader(decode.predict_request), predict(x=TWO)
    assert kept.parts(data).feeds(PORTS)["x"].tolist() == [[1, 2]]
    assert is_known(kept, data)
    with pytest.raises(Refusal, match="the model has no input 'x'"):
        kept.parts(data).feeds(INTS)


@given(data=st.binary(max_size=12), place=st.integers(0, 60))
@settings(max_examples=examples(60, 2000))
def test_what_is_changed_in_a_request_is_seen(data: bytes, place: int) -> None:
    kept, whole = decode.Reader(decode.predict_request), predict(x=TWO)
    kept.parts(whole).feeds(PORTS)
    changed = (whole[:place] + data + whole[place + len(data) :])[: len(whole)]

    def read(reader: decode.Reader) -> Any:
        try:
            return {name: value.tobytes() for name, value in reader.parts(changed).feeds(PORTS).items()}
        except Refusal as problem:
            return problem.said

    assert read(kept) == read(decode.Reader(decode.predict_request))


def test_layouts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_MOST_LAYOUTS", 4)
    kept = decode.Reader(decode.predict_request)
    for size in range(12):
        for name in ("a", "b", "c", "d", "e", "f"):
            data = field(1, field(1, name.encode() * (size + 1))) + field(2, field(1, b"x") + field(2, TWO))
            assert kept.parts(data).feeds(PORTS)["x"].tolist() == [[1, 2]]
    assert is_known(kept, data)
    assert len(kept._known) <= 4


@given(data=st.binary(max_size=60), read=st.sampled_from([PREDICTS, INFERS]))
@settings(max_examples=examples(100, 5000))
def test_no_bytes_do_harm(data: bytes, read: Callable[[bytes], decode.Parts]) -> None:
    with contextlib.suppress(Refusal):
        read(data).feeds(PORTS)
