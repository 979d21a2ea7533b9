"""Host ops on strings beside TensorFlow's kernels."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.host.strings import LookupTable
from msplit.engines.host.table import HostNode, NotOurs, host_ops
from tests.campaign import examples
from tests.engines.host.kernels import agree, texts

pytestmark = pytest.mark.tf

ODD = texts(
    b"", b" ", b"a", b"Ab C", b" \t\n\x0b\x0c\r x \r", b"\xff\xfe\x80A", b"A\0B\0", "ÄÖß ΑΣ Σ".encode(), b"\xe2\x82",
    "İI ǅ".encode(), b"x" * 100, "\u2c2f\U00010570Σ\u2c2f".encode(), b"\xed\xa0\x80A", b"\xc0\x80A",
)  # fmt: skip
LETTERS = st.text("aB ,;\0ä\u2c2fΣ", max_size=8).map(str.encode) | st.binary(max_size=6)


def some(items):
    return texts(*items)


@pytest.mark.parametrize("op", ["StringLower", "StringUpper"])
def test_case(op):
    for encoding in ("", "utf-8"):
        agree(op, input=ODD, encoding=encoding)
    agree(op, input=ODD.reshape(2, 7), encoding="")
    agree(op, input=ODD[:0], encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["StringLower", "StringUpper"])
def test_case_of_every_character(op):
    """Python's Unicode may be newer than TensorFlow's: letters that it has in two cases and TensorFlow not stay as they are."""
    every = texts(*(chr(code).encode() for code in range(1, 0x20000) if not 0xD800 <= code < 0xE000))
    agree(op, input=every, encoding="utf-8")


def test_what_is_around_and_how_long():
    agree("StringStrip", input=ODD)
    for unit in ("BYTE", "UTF8_CHAR"):
        agree("StringLength", input=ODD, unit=unit)


@settings(max_examples=examples(25, 100), deadline=None)
@given(st.lists(LETTERS, min_size=1, max_size=4), st.sampled_from([b"", b" ", b",", b", ", b"aB"]), st.integers(-1, 3))
def test_pieces(items, separator, most):
    agree("StringSplitV2", input=some(items), sep=np.array(separator, object), maxsplit=most)


@settings(max_examples=examples(15, 60), deadline=None)
@given(st.lists(LETTERS, min_size=1, max_size=4), st.sampled_from([b"", b" ", b",; ", b"a-B]"]), st.booleans())
def test_pieces_between_any_of_some_bytes(items, delimiter, skip):
    agree("StringSplit", input=some(items), delimiter=np.array(delimiter, object), skip_empty=skip)


def test_joined():
    agree("StringJoin", inputs=[ODD, ODD[::-1].copy(), np.array(b"-", object)], separator="+")
    agree("StringJoin", inputs=[np.array(b"a", object)], separator="")
    agree("StringJoin", inputs=[ODD[:0], np.array(b"a", object)], separator="")
    with pytest.raises(ValueError, match="different shapes"):
        host_ops()["StringJoin"](HostNode("n", "StringJoin", {"separator": ""}))(ODD[:2], ODD[:1])


@settings(max_examples=examples(20, 80), deadline=None)
@given(st.lists(st.binary(max_size=5), min_size=1, max_size=3), st.integers(-6, 6), st.integers(-2, 6))
def test_a_part(items, start, size):
    agree("Substr", input=some(items), pos=np.array(start), len=np.array(size), unit="BYTE")


NUMBERS = [
    "1", " 1", "1 ", "\t1\n", "+1", "-1", "", "  ", "1_0", "0x10", "0X1F", "1e5", "1E+5", "1e", "1.", ".", ".5",
    "-.5e-3", "inf", "-inf", "INF", "Infinity", "nan", "NaN", "-nan", "nan(1)", "1f", "1,0", "٣", "1e400", "1e-400",
    "1e39", "1e-46", "00012", "- 1", "+-1", "0x1p3", "0x1.8p1", "9223372036854775807", "9223372036854775808",
    "-9223372036854775808", "4294967295", "4294967296", "18446744073709551615", "18446744073709551616", "2147483647",
    "2147483648", "-2147483649", "-0", "1.0", "\x0b1", "1 2", "infin", "1e+", "0b1", "1.5.2", "+", "-", "0x", "1e5.0",
    "3.4028236e38", "16777217.0000000001", "16777217", "16777216.9999999999", "1.00000005960464477539062500001",
    "0.1", "123456789.123456789", "0x1.000001p0", "0x1.000003p0", "0x1.ffffffp127",
    "340282356779733661637539395458142568447.9", "-340282356779733661637539395458142568448.1",
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint32", "uint64"])
def test_numbers_from_text(dtype):
    tf = importlib.import_module("tensorflow")
    known = []
    run = host_ops()["StringToNumber"](HostNode("n", "StringToNumber", {"out_type": dtype}))
    for number in NUMBERS:
        one = np.array(number.encode(), object)
        try:
            expected = tf.raw_ops.StringToNumber(string_tensor=one, out_type=dtype).numpy()
        except tf.errors.InvalidArgumentError:
            with pytest.raises(ValueError, match="could not correctly convert"):
                run(one)
            continue
        np.testing.assert_array_equal(run(one), expected, number)
        known.append(number.encode())
    agree("StringToNumber", string_tensor=texts(*known), out_type=dtype)


SPECIAL = [0.0, -0.0, 1.5, 1 / 3, 1e30, 1e-30, np.inf, -np.inf, np.nan, np.copysign(np.nan, -1), 123456.789]


@pytest.mark.parametrize("options", [{}, {"precision": 3}, {"scientific": True}, {"shortest": True}])
def test_text_of_numbers(options):
    for dtype in (np.float32, np.float64):
        agree("AsString", input=np.array(SPECIAL, dtype), **options)


def test_text_of_whole_numbers_and_truth_values():
    for dtype in (np.int8, np.int32, np.int64, np.uint8, np.uint64):
        agree("AsString", input=np.array([np.iinfo(dtype).min, 0, 7, np.iinfo(dtype).max], dtype))
    agree("AsString", input=np.array([[True], [False]]))
    with pytest.raises(NotOurs):
        host_ops()["AsString"](HostNode("n", "AsString", {"T": "int32", "precision": -1, "fill": "0", "width": 5}))


def test_buckets():
    agree("StringToHashBucketFast", input=ODD.reshape(7, 2), num_buckets=7)
    agree("StringToHashBucketStrong", input=ODD, num_buckets=7, key=[1, -2])
    agree("StringToHashBucket", string_tensor=ODD, num_buckets=1)
    agree("StringToHashBucketFast", input=ODD[:0], num_buckets=7)


def test_tables():
    keys, values = texts(b"a", b"", b"\xff"), np.array([5, 6, 7])

    def find(table, default):
        return host_ops()["LookupTableFindV2"](HostNode("n", "LookupTableFindV2", {}, (None, None, default), table))

    run = find(LookupTable(keys, values), np.array(-1))
    asked = texts(b"\xff", b"b", b"", b"a", b"a", b"\xfe").reshape(2, 3)
    assert run(None, asked, None).tolist() == [[7, -1, 6], [5, 5, -1]]
    assert run(None, asked[:0], None).shape == (0, 3)
    assert find(LookupTable(values, keys), np.array(b"?", object))(None, np.array([7, 8]), None).tolist() == [
        b"\xff",
        b"?",
    ]
    size = host_ops()["LookupTableSizeV2"](HostNode("n", "LookupTableSizeV2", {}, (), LookupTable(keys, values)))
    assert size(None) == 3
    with pytest.raises(NotOurs):
        LookupTable(np.zeros(2), values[:2])
    with pytest.raises(NotOurs):
        LookupTable(np.array([None], object), values[:1])
    for table, default in ((None, np.array(0)), (LookupTable(keys, values), None)):
        with pytest.raises(NotOurs):
            find(table, default)
