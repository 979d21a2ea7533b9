"""Parsing of tf.Example beside TensorFlow's kernels, compiled and by protobuf."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.host import examples as parsing
from msplit.engines.host import hashing
from msplit.engines.host.table import HostNode
from msplit.opset import schema
from tests.campaign import examples
from tests.engines.host.kernels import REFUSED, agree, in_c, texts

pytestmark = pytest.mark.tf

KEYS = ["a", "b", "c", "ü"]
LISTS = (
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)
    | st.lists(st.floats(width=32), max_size=3)
    | st.lists(st.binary(max_size=5), max_size=3)
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(KEYS), st.tuples(st.sampled_from(["bytes", "float", "int64", None]), LISTS)),
    max_size=4,
)


def example(features):
    """A serialized example. Values of another kind than the list's are left out."""
    tf = importlib.import_module("tensorflow")
    made = tf.train.Example()
    kinds = {"bytes": bytes, "float": float, "int64": int}
    for key, (kind, values) in features.items():
        feature = made.features.feature[key]
        if kind is not None:
            getattr(feature, f"{kind}_list").SetInParent()
            getattr(feature, f"{kind}_list").value.extend(value for value in values if isinstance(value, kinds[kind]))
    return made.SerializeToString()


def names(*keys):
    return texts(*(key.encode() for key in keys))


def parse(rows, *, sparse=(), dense=(), ragged=(), types, **how):
    """Parse rows: keys of features of each kind, with their types; dense ones with shape and default."""
    return agree(
        "ParseExampleV2",
        serialized=texts(*rows) if isinstance(rows, list) else rows,
        names=texts(),
        sparse_keys=names(*sparse),
        dense_keys=names(*(key for key, _, _ in dense)),
        ragged_keys=names(*ragged),
        dense_defaults=[default for _, _, default in dense],
        num_sparse=len(sparse),
        sparse_types=[types[key] for key in sparse],
        ragged_value_types=[types[key] for key in ragged],
        ragged_split_types=[np.int32 if number % 2 else np.int64 for number, _ in enumerate(ragged)],
        dense_shapes=[shape for _, shape, _ in dense],
        **how,
    )


TYPES = {"a": "string", "b": "float32", "c": "int64", "ü": "string"}


@settings(max_examples=examples(40, 200), deadline=None)
@given(ROWS)
def test_any_rows_of_all_kinds(rows):
    """Missing features, features without a list, empty ones, and ones of another type."""
    data = [example(row) for row in rows]
    parse(
        data,
        sparse=["a", "c"],
        ragged=["b", "ü"],
        dense=[("zz", (), np.array(7))],
        types={**TYPES, "zz": "int64"},
    )
    parse(data, dense=[("a", (), np.array(b"-", object)), ("b", (2,), np.array([1, 2], np.float32))], types=TYPES)
    parse(data, dense=[("c", (None,), np.array(-1)), ("ü", (None,), np.array(b"\0", object))], types=TYPES)


def test_what_is_required_and_missing_is_refused():
    needed = [("c", (1,), np.zeros(0, np.int64))]
    assert parse([example({"c": ("int64", [4])})], dense=needed, types=TYPES)[0].tolist() == [[4]]
    assert parse([example({"c": ("int64", [4])}), example({})], dense=needed, types=TYPES) == REFUSED


def test_what_is_no_example_is_refused():
    whole = example({"a": ("bytes", [b"xyz"]), "b": ("float", [1.0]), "c": ("int64", [300])})
    one = [("c", (1,), np.array([0]))]
    for end in range(1, len(whole)):
        parse(
            [b"", whole[:end]], sparse=["a"], ragged=["b"], dense=one, types=TYPES, stricter=True
        )  # TensorFlow takes some of these
    assert parse([b"\xff\xff"], sparse=["a"], types=TYPES) == REFUSED


def test_numbers_that_lie_apart_and_keys_that_come_twice():
    """Old writers do not pack numbers. Of two entries of a key the last one counts."""
    apart = (
        b"\x0a\x1e"
        + b"\x0a\x0c\x0a\x01c\x12\x07\x1a\x05\x08\x05\x08\xac\x02"
        + b"\x0a\x0e\x0a\x01b\x12\x09\x12\x07\x0d\0\0\x80?"
        + b"\x15\0"
    )
    entry = b"\x0a\x0b\x0a\x01c\x12\x06\x1a\x04\x08\x05\x08\x06"
    other = b"\x0a\x09\x0a\x01c\x12\x04\x1a\x02\x0a\x00"
    for features in (entry, other, entry + other, other + entry, apart[2:15]):
        row = b"\x0a" + bytes([len(features)]) + features
        parse([row], sparse=["c"], types=TYPES)


def test_one_example_alone():
    row = example({"a": ("bytes", [b"x", b""]), "b": ("float", [1.0, 2.0])})
    dense = [("b", (2,), np.zeros(2, np.float32))]
    parse(np.array(row, object), sparse=["a"], dense=dense, types=TYPES)
    agree(
        "ParseSingleExample",
        serialized=np.array(row, object),
        dense_defaults=[np.zeros(2, np.float32)],
        num_sparse=1,
        sparse_keys=["a"],
        dense_keys=["b"],
        sparse_types=["string"],
        dense_shapes=[(2,)],
    )
    agree(
        "ParseExample",
        serialized=texts(row, b""),
        names=texts(),
        sparse_keys=[np.array(b"a", object)],
        dense_keys=[np.array(b"b", object)],
        dense_defaults=[np.zeros(2, np.float32)],
        sparse_types=["string"],
        dense_shapes=[(2,)],
    )


def test_raw_bytes():
    for dtype in (np.uint8, np.int32, np.float64, np.uint16):
        for little in (True, False):
            agree("DecodeRaw", bytes=texts(b"12345678", b"\xff\0abcdef"), out_type=dtype, little_endian=little)
    assert agree("DecodeRaw", bytes=texts(b"123", b"12"), out_type=np.uint8) == REFUSED
    assert agree("DecodeRaw", bytes=texts(b"123"), out_type=np.int16) == REFUSED
    agree("DecodeRaw", bytes=texts(), out_type=np.int16)


@settings(max_examples=examples(150, 3000), deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_as_protobuf_reads_them_or_refused(data):
    """The compiled parser never reads beyond them."""
    if hashing.native() is None:
        return
    row = bytearray(example(data.draw(ROWS.filter(bool))[0]))
    for _ in range(data.draw(st.integers(1, 3))):
        if row:
            row[data.draw(st.integers(0, len(row) - 1))] = data.draw(st.integers(0, 255))
    rows = [bytes(row[: data.draw(st.integers(0, len(row)))]), bytes(row)]
    keys, types = [key.encode() for key in KEYS], [TYPES[key] for key in KEYS]
    known = (texts(*rows), texts(), texts(*keys), texts(), texts())
    given = {"sparse_types": types, "num_sparse": 4, "Tdense": [], "dense_shapes": []}
    attrs = schema.lookup("ParseExampleV2").filled({**given, "ragged_value_types": [], "ragged_split_types": []})
    found = in_c(HostNode("n", "ParseExampleV2", attrs, known), [*known], 12)
    assert found is not None
    try:
        expected = parsing.features(rows, keys, types)
    except ValueError:
        return
    if isinstance(found, str):
        return
    for indices, values, other in zip(found[:4], found[4:8], expected, strict=True):
        np.testing.assert_array_equal(indices, other.indices)
        assert values.dtype == other.values.dtype
        if values.dtype == object:
            assert values.tolist() == other.values.tolist()
        else:
            assert values.tobytes() == other.values.tobytes()
