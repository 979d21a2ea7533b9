"""Host ops on sparse and ragged tensors beside TensorFlow's kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.host.table import HostNode, host_ops
from msplit.opset import schema
from tests.campaign import examples
from tests.engines.host.kernels import REFUSED, agree, graph_of, in_c, tensorflows, texts

pytestmark = pytest.mark.tf

WORDS = [b"", b"a", b"bb", b"\xff", b"ccc", b"a"]


@st.composite
def sparse(draw, rows, strings):
    """A sparse tensor of some rows."""
    counts = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    indices = [(row, column) for row, count in enumerate(counts) for column in range(count)]
    numbers = draw(st.lists(st.integers(-5, 5), min_size=len(indices), max_size=len(indices)))
    values = texts(*(WORDS[number] for number in numbers)) if strings else np.array(numbers, np.int64)
    shape = np.array([rows, max([*counts, draw(st.integers(0, 2))])])
    return np.array(indices, np.int64).reshape(-1, 2), values, shape


@settings(max_examples=examples(20, 80), deadline=None)
@given(st.data(), st.integers(0, 4), st.booleans())
def test_dense_and_filled(data, rows, strings):
    indices, values, shape = data.draw(sparse(rows, strings))
    default = np.array(b"none\0", object) if strings else np.array(-1)
    agree("SparseToDense", sparse_indices=indices, output_shape=shape, sparse_values=values, default_value=default)
    order = np.argsort(data.draw(st.permutations(range(len(values)))) or [0])[: len(values)]
    mixed = indices[order], values[order]
    for i, v in ((indices, values), mixed):
        agree("SparseFillEmptyRows", indices=i, values=v, dense_shape=shape, default_value=default)


def test_indices_that_are_out_of_bounds_or_repeated_are_refused():
    values, default = np.array([1, 2]), np.array(0)
    for indices in ([[0, 1], [0, 1]], [[1, 0], [0, 0]], [[0, 0], [2, 0]], [[-1, 0], [0, 0]]):
        given = {"sparse_indices": np.array(indices), "output_shape": np.array([2, 2]), "sparse_values": values}
        assert agree("SparseToDense", **given, default_value=default) == REFUSED
    once = {"sparse_indices": np.array([3, 1]), "output_shape": np.array([4]), "sparse_values": np.array(9)}
    agree("SparseToDense", **once, default_value=default, validate_indices=False)


@settings(max_examples=examples(15, 60), deadline=None)
@given(st.data(), st.sampled_from([[2, 6], [-1, 3], [3, -1, 2], [12], [5, -1], [4, 3], [0, -1]]))
def test_other_shapes(data, wanted):
    indices, _, _ = data.draw(sparse(4, False))
    shape = np.array([4, 3])
    agree("SparseReshape", input_indices=indices, input_shape=shape, new_shape=np.array(wanted))


@settings(max_examples=examples(20, 80), deadline=None)
@given(
    st.data(), st.integers(0, 4), st.integers(0, 2), st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=2)
)
def test_crosses(data, rows, count, dense):
    if not count and not dense:
        return
    columns = [data.draw(sparse(rows, data.draw(st.booleans()))) for _ in range(count)]
    wide = [
        texts(*(WORDS * 3)[: rows * width]).reshape(rows, width)
        if strings
        else np.arange(rows * width).reshape(rows, width) - 3
        for strings, width in dense
    ]
    agree(
        "SparseCross",
        indices=[one[0] for one in columns],
        values=[one[1] for one in columns],
        shapes=[one[2] for one in columns],
        dense_inputs=wide,
        hashed_output=True,
        num_buckets=data.draw(st.sampled_from([0, 1, 50])),
        hash_key=data.draw(st.sampled_from([956888297470, -1])),
        out_type=np.int64,
        internal_type=np.int64,
    )


@settings(max_examples=examples(20, 80), deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from([[-1, -1], [-1, 2], [3, -1], [2, 6]]),
    st.booleans(),
)
def test_ragged_rows(counts, strings, shape, by_rows):
    total = sum(counts)
    values = texts(*(WORDS * 3)[:total]) if strings else np.arange(total)
    splits = np.array([0, *np.cumsum(counts)])
    rows = [np.array(len(counts)), np.repeat(np.arange(len(counts)), counts)]
    agree(
        "RaggedTensorToTensor",
        shape=np.array(shape),
        values=values,
        default_value=np.array(b"-\0", object) if strings else np.array(-1),
        row_partition_tensors=rows if by_rows else [splits],
        row_partition_types=["FIRST_DIM_SIZE", "VALUE_ROWIDS"] if by_rows else ["ROW_SPLITS"],
    )


def test_two_ragged_axes_and_inner_ones():
    given = {"default_value": np.array(-1.0, np.float32), "row_partition_types": ["ROW_SPLITS", "ROW_SPLITS"]}
    parts = [np.array([0, 2, 2, 3]), np.array([0, 1, 4, 4])]
    agree(
        "RaggedTensorToTensor",
        shape=np.array([-1, -1, -1]),
        values=np.arange(4, dtype=np.float32),
        row_partition_tensors=parts,
        **given,
    )
    agree(
        "RaggedTensorToTensor",
        shape=np.array([2, 1, 2]),
        values=np.arange(4, dtype=np.float32),
        row_partition_tensors=parts,
        **given,
    )
    pairs = np.arange(8, dtype=np.float32).reshape(4, 2)
    agree("RaggedTensorToTensor", shape=np.array([-1, -1, -1, 2]), values=pairs, row_partition_tensors=parts, **given)


def test_places_and_distinct_values():
    agree("Where", condition=np.array([[True, False], [True, True]]))
    agree("Unique", x=texts(b"b", b"a", b"b", b"", b"a"), out_idx=np.int32)
    agree("Unique", x=np.array([3, 1, 3, -1]), out_idx=np.int64)
    agree("Unique", x=np.array([], np.int64), out_idx=np.int32)


@settings(max_examples=examples(20, 80), deadline=None)
@given(st.lists(st.integers(0, 4), max_size=5), st.booleans(), st.data())
def test_ragged_rows_as_others_have_them(counts, strings, data):
    splits = np.cumsum([0, *counts])
    total = int(splits[-1])
    values = texts(*(WORDS * 4)[:total]) if strings else np.arange(total)
    agree("RaggedTensorToSparse", rt_nested_splits=[splits], rt_dense_values=values)
    agree(
        "StringNGrams",
        data=texts(*(WORDS * 4)[:total]),
        data_splits=splits,
        separator=data.draw(st.sampled_from([" ", ""])),
        ngram_widths=data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)),
        left_pad="<",
        right_pad=">>",
        pad_width=data.draw(st.integers(-1, 3)),
        preserve_short_sequences=data.draw(st.booleans()),
    )


def test_splits_that_are_none_are_refused():
    for splits in ([0, 3, 2], [1, 2], [0, 1], [0, 4], [0, -1, 2]):
        given = {"rt_nested_splits": [np.array(splits)], "rt_dense_values": np.array([1, 2])}
        assert agree("RaggedTensorToSparse", **given) == REFUSED
        words = {"data": texts(b"a", b"b"), "data_splits": np.array(splits), "separator": " ", "ngram_widths": [2]}
        pads = {"left_pad": "", "right_pad": "", "pad_width": 0, "preserve_short_sequences": False}
        assert agree("StringNGrams", **words, **pads) == REFUSED


@pytest.mark.parametrize("op", ["SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"])
def test_rows_of_a_table_by_segment(op):
    """Whole numbers, of which no order of adding rounds; segments of one to twenty rows, some without."""
    sizes = [1, 0, 2, 3, 0, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16, 17, 18, 20]
    ids = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    table = np.random.default_rng(0).integers(-99, 99, (7, 3)).astype(np.float32)
    for indices in (np.arange(len(ids)) % 7, np.zeros(len(ids), np.int32)):
        agree(op, data=table, indices=indices, segment_ids=ids)
    agree(op, data=table[:, 0].astype(np.float64), indices=np.array([2, 6]), segment_ids=np.array([0, 0]))
    agree(op, data=table, indices=np.zeros(0, np.int64), segment_ids=np.zeros(0, np.int32))
    for indices, ids in (([7], [0]), ([-1], [0]), ([0, 1], [1, 0]), ([0], [-1])):
        assert agree(op, data=table, indices=np.array(indices), segment_ids=np.array(ids, np.int32)) == REFUSED


@pytest.mark.parametrize("op", ["SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"])
def test_compiled_segments_are_added_in_tensorflows_order(op):
    ids = np.repeat(np.arange(24), np.arange(24)).astype(np.int32)
    table = np.random.default_rng(1).standard_normal((50, 4)).astype(np.float32)
    inputs = [("data", table), ("indices", np.arange(len(ids)) % 50), ("segment_ids", ids)]
    graph, outputs = graph_of(op, inputs, {})
    attrs = {"T": "float32", "Tidx": "int64", "Tsegmentids": "int32"}
    found = in_c(HostNode("n", op, attrs, ()), [value for _, value in inputs], 1)
    assert found is None or (found[0] == tensorflows(graph, outputs)[0]).all()


@pytest.mark.parametrize("row", [2**63 - 1, -(2**63), -1, 3])
def test_numbers_of_rows_that_are_out_of_bounds_reach_no_bincount(row):
    """NumPy's writes to memory that is not its own for the largest number. A client may feed the indices of a sparse tensor."""
    index, shape, values = np.array([[0, 0], [row, 1]]), np.array([3, 2]), np.array([1, 2])
    cross = {
        "N": 1,
        "hashed_output": True,
        "num_buckets": 9,
        "hash_key": 1,
        "sparse_types": ["int64"],
        "dense_types": [],
    }
    types = {"out_type": "int64", "internal_type": "int64"}
    ragged = {"T": "int64", "Tindex": "int64", "Tshape": "int64", "num_row_partition_tensors": 2}
    kinds = {"row_partition_types": ["FIRST_DIM_SIZE", "VALUE_ROWIDS"]}
    for op, attrs, inputs in (
        ("SparseCross", cross | types, [index, values, shape]),
        ("SparseFillEmptyRows", {"T": "int64"}, [index, values, shape, np.array(0)]),
        ("RaggedTensorToTensor", ragged | kinds, [np.array([-1, -1]), values, np.array(0), np.array(3), index[:, 0]]),
    ):
        with pytest.raises(ValueError, match="out of bounds"):
            host_ops()[op](HostNode("n", op, attrs))(*inputs)


LARGE, SMALL = 2**63 - 1, -(2**63)


def run(op, attrs, *inputs):
    return host_ops()[op](HostNode("n", op, attrs))(*inputs)


def test_sizes_that_wrap_around_are_refused():
    """NumPy's `repeat` would write past its memory, and splits, multiples and counts may be a client's."""
    for splits in ([0, 1, SMALL, -1, 3], [0, LARGE, 3], [0, 3, LARGE], [1, 3], [0, 2]):
        given, values = np.array(splits), np.arange(3)
        kinds = {"row_partition_types": ["ROW_SPLITS"]}
        with pytest.raises(ValueError, match=r"splits|values for"):
            run("RaggedTensorToTensor", kinds, np.array([2, 2]), values, np.array(0), given)
        with pytest.raises(ValueError, match="splits"):
            run("RaggedTensorToSparse", {"RAGGED_RANK": 1}, given, values)
    for times in ([1, 2**62], [1, 2**62 + 1], [1, -1], [2**27, 1]):
        with pytest.raises(ValueError, match=r"too many|negative"):
            run("Tile", {}, np.zeros((4, 1)), np.array(times))
    sizes = [256] * 6 + [128] * 2
    columns = [np.array([(row, n) for row in range(4) for n in range(size)]) for size in sizes]
    attrs = {"N": 8, "dense_types": [], "num_buckets": 9, "hash_key": 1, "hashed_output": True}
    values = [np.arange(len(column)) for column in columns]
    with pytest.raises(ValueError, match="too many combinations"):
        run("SparseCross", attrs, *columns, *values, *[np.array([4, 256])] * 8)
    with pytest.raises(ValueError, match="can not become"):
        run("SparseReshape", {}, np.zeros((0, 2), np.int64), np.array([2, 3]), np.array([-2, -3]))


def test_a_few_bytes_do_not_ask_for_gigabytes():
    one, none = np.array([[0, 0]]), np.array(0)
    vast = np.array([2**26 + 1, 1])
    for op, attrs, inputs in (
        ("SparseFillEmptyRows", {"T": "int64"}, [one, np.array([1]), vast, none]),
        ("SparseToDense", {"validate_indices": True}, [one, vast, np.array([1]), none]),
        ("Fill", {}, [vast, none]),
        ("SparseSegmentSum", {"T": "float32"}, [np.ones((1, 1), np.float32), np.array([0]), vast[:1]]),
        ("SegmentSum", {"T": "float32"}, [np.ones((1, 0), np.float32), vast[:1]]),
        ("UnsortedSegmentSum", {"T": "float32"}, [np.ones((1, 1), np.float32), np.array([0]), vast[0]]),
        ("DenseBincount", {"T": "int64", "Tidx": "int64"}, [np.array([0]), vast[0], np.zeros(0, np.int64)]),
        ("Range", {"Tidx": "int64"}, [none, vast[0], np.array(1)]),
        ("RaggedRange", {"T": "int64", "Tsplits": "int64"}, [none, vast[0], np.array(1)]),
        ("BroadcastTo", {"T": "int64"}, [none, vast]),
    ):
        inputs = [np.asarray(value) for value in inputs]
        with pytest.raises(ValueError, match="elements are too many"):
            run(op, attrs, *inputs)
        info = schema.lookup(op)
        node = HostNode("n", op, {"T": "int64", **info.filled({"Tindices": "int64", "Tnumsegments": "int64", **attrs})})
        assert in_c(node, inputs, schema.output_count(op, node.attrs)) in (None, REFUSED), op
