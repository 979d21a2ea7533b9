from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msplit.core.graph import FunctionRef, TensorValue
from msplit.errors import LoadError
from msplit.formats import decode
from msplit.formats.tensors import tensor_value
from msplit.opset import schema


def tensor(dtype: int, shape: list[int], **fields: Any) -> TensorValue:
    message = schema.tensor_pb2.TensorProto(dtype=dtype, **fields)
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    return tensor_value(message)


def attr(fill: Callable[[Any], Any]) -> Any:
    node = schema.node_def_pb2.NodeDef()
    fill(node.attr["x"])
    return decode.NodeAttrs(node.attr)["x"]


@pytest.mark.parametrize(
    ("fill", "value"),
    [
        (lambda a: setattr(a, "i", -7), -7),
        (lambda a: setattr(a, "f", 0.5), 0.5),
        (lambda a: setattr(a, "b", True), True),
        (lambda a: setattr(a, "s", b"NHWC"), "NHWC"),
        (lambda a: setattr(a, "s", b"\xff\x00"), b"\xff\x00"),
        (lambda a: setattr(a, "type", 1), "float32"),
        (lambda a: setattr(a, "type", 101), "float32_ref"),
        (lambda a: setattr(a, "type", 99), "dtype_99"),
        (lambda a: setattr(a, "type", 199), "dtype_99_ref"),
        (lambda a: setattr(a, "type", 2**31 - 1), "dtype_2147483647"),
        (lambda a: setattr(a, "placeholder", "T"), "T"),
        (lambda a: None, None),
        (lambda a: setattr(a.shape, "unknown_rank", True), None),
        (lambda a: (a.shape.dim.add(size=-1), a.shape.dim.add(size=3)), (None, 3)),
        (lambda a: a.shape.SetInParent(), ()),
        (lambda a: a.list.SetInParent(), ()),
        (lambda a: a.list.i.extend([1, 2]), (1, 2)),
        (lambda a: a.list.s.extend([b"a", b"\xff"]), ("a", b"\xff")),
        (lambda a: a.list.f.extend([0.5]), (0.5,)),
        (lambda a: a.list.b.extend([True, False]), (True, False)),
        (lambda a: a.list.type.extend([1, 3]), ("float32", "int32")),
        (lambda a: a.list.shape.add().dim.add(size=2), ((2,),)),
    ],
)
def test_attributes_become_plain_values(fill: Callable[[Any], Any], value: Any) -> None:
    decoded = attr(fill)
    assert decoded == value
    assert type(decoded) is type(value)


def test_functions_and_tensors_in_attributes() -> None:
    def call(a: Any) -> None:
        a.func.name = "f"
        a.func.attr["T"].type = 1

    ref = attr(call)
    assert isinstance(ref, FunctionRef)
    assert (ref.name, dict(ref.attrs)) == ("f", {"T": "float32"})
    branches = attr(lambda a: (a.list.func.add(name="g"), a.list.func.add(name="h")))
    assert [branch.name for branch in branches] == ["g", "h"]
    (listed,) = attr(lambda a: a.list.tensor.add(dtype=1))
    assert listed.dtype == "float32"


def test_asking_for_an_attribute_does_not_add_it_to_the_message() -> None:
    node = schema.node_def_pb2.NodeDef()
    node.attr["b"].i = 1
    node.attr["a"].i = 2
    attrs = decode.NodeAttrs(node.attr)
    before = node.SerializeToString(deterministic=True)
    assert "missing" not in attrs
    assert attrs.get("missing") is None
    assert attrs.get("missing", 3) == 3
    assert attrs.get("a") == 2
    with pytest.raises(KeyError, match="missing"):
        attrs["missing"]
    assert list(attrs) == ["a", "b"]
    assert len(attrs) == 2
    assert repr(attrs) == "{'a': 2, 'b': 1}"
    assert node.SerializeToString(deterministic=True) == before


def test_attribute_table_is_a_sequence() -> None:
    graph = schema.graph_pb2.GraphDef()
    for number in range(3):
        graph.node.add(name=str(number), op="Op").attr["n"].i = number
    graph.node[1].attr["mark"].b = True
    table = decode.AttrTable(graph.node, [{"n": -1, "mark": True}])
    assert [attrs["n"] for attrs in table] == [-1, 0, 1, 2]
    assert (len(table), table[-1]["n"], table[0]["n"]) == (4, 2, -1)
    assert [attrs["n"] for attrs in table[1:3]] == [0, 1]
    assert table.nodes_with("mark") == [0, 2]
    for index in (4, -5):
        with pytest.raises(IndexError):
            table[index]


ATTRIBUTES = st.sampled_from(
    [
        ("T", "type", 1),
        ("T", "type", 3),
        ("T", "i", 1),
        ("N", "i", 1),
        ("N", "b", True),
        ("N", "f", 1.0),
        ("N", "f", 0.0),
        ("N", "f", -0.0),
        ("N", "s", b"1"),
        ("f", "func", "one"),
        ("f", "func", "two"),
        ("value", "tensor", 1),
        ("value", "tensor", 2),
    ]
)


def test_the_order_in_which_attributes_were_set_makes_no_kind() -> None:
    graph = schema.graph_pb2.GraphDef()
    keys = [f"key_{number}" for number in range(40)]
    for order in (keys, keys[::-1], keys[20:] + keys[:20]):
        node = graph.node.add(op="A")
        for key in order:
            node.attr[key].i = 1
    assert decode.AttrTable(graph.node).kinds() == [0, 0, 0]


@given(st.lists(st.tuples(st.sampled_from(["A", "B"]), st.lists(ATTRIBUTES, max_size=3)), max_size=12))
def test_nodes_of_a_kind_are_equal_but_for_constants(nodes: list[tuple[str, list[tuple[str, str, Any]]]]) -> None:
    graph = schema.graph_pb2.GraphDef()
    for op, attributes in nodes:
        node = graph.node.add(op=op)
        for key, kind, value in attributes:
            if kind == "tensor":
                node.attr[key].tensor.dtype = value
            elif kind == "func":
                node.attr[key].func.name = value
            else:
                setattr(node.attr[key], kind, value)
    table = decode.AttrTable(graph.node, [{"n": 1}])
    alone = [decode.NodeAttrs(node.attr) for node in graph.node]
    # The value of every attribute is its own node's, kind or not.
    assert [repr(attrs) for attrs in table][1:] == [repr(attrs) for attrs in alone]
    seen: dict[int, str] = {}
    for number, node, attrs in zip(table.kinds()[1:], graph.node, alone, strict=True):
        text = repr((node.op, {key: "" if isinstance(attrs[key], TensorValue) else attrs[key] for key in attrs}))
        assert seen.setdefault(number, text) == text
    assert table.kinds()[0] not in seen
    assert len(set(seen.values())) == len(seen)
    for key in ("T", "N", "f", "value", "n"):
        assert table.nodes_with(key) == [place for place, attrs in enumerate(table) if key in attrs]
    named = [(place, attrs["f"].name) for place, attrs in enumerate(table) if "f" in attrs]
    assert table.function_names() == named


NUMBERS = {
    1: np.float32, 2: np.float64, 3: np.int32, 4: np.uint8, 5: np.int16, 6: np.int8, 8: np.complex64, 9: np.int64, 10: np.bool_,
    14: ml_dtypes.bfloat16, 17: np.uint16, 18: np.complex128, 19: np.float16, 22: np.uint32, 23: np.uint64,
    24: ml_dtypes.float8_e5m2, 25: ml_dtypes.float8_e4m3fn, 29: ml_dtypes.int4,
}  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_packed_values_keep_their_bits(number: int) -> None:
    values = np.array([0, 1, 3, 1, 0, 2]).astype(NUMBERS[number]).reshape(2, 3)
    decoded = tensor(number, [2, 3], tensor_content=values.tobytes()).load()
    assert decoded.dtype == values.dtype
    np.testing.assert_array_equal(decoded, values)


@pytest.mark.parametrize(
    ("number", "fields", "expected"),
    [
        (1, {"float_val": [1, 2]}, np.array([1, 2], np.float32)),
        (2, {"double_val": [1, 2]}, np.array([1, 2], np.float64)),
        (3, {"int_val": [-1, 2]}, np.array([-1, 2], np.int32)),
        (4, {"int_val": [255, 2]}, np.array([255, 2], np.uint8)),
        (6, {"int_val": [-128, 2]}, np.array([-128, 2], np.int8)),
        (8, {"scomplex_val": [1, 2, 3, 4]}, np.array([1 + 2j, 3 + 4j], np.complex64)),
        (9, {"int64_val": [-(2**62), 2]}, np.array([-(2**62), 2], np.int64)),
        (10, {"bool_val": [True, False]}, np.array([True, False])),
        (11, {"int_val": [-1, 2]}, np.array([-1, 2], np.int8)),
        (13, {"int_val": [-1, 2]}, np.array([-1, 2], np.int32)),
        (14, {"half_val": [0x3F80, 0x4000]}, np.array([1, 2], ml_dtypes.bfloat16)),
        (18, {"dcomplex_val": [1, 2, 3, 4]}, np.array([1 + 2j, 3 + 4j], np.complex128)),
        (19, {"half_val": [0x3C00, 0xC000]}, np.array([1, -2], np.float16)),
        (22, {"uint32_val": [2**32 - 1, 2]}, np.array([2**32 - 1, 2], np.uint32)),
        (23, {"uint64_val": [2**64 - 1, 2]}, np.array([2**64 - 1, 2], np.uint64)),
        (24, {"float8_val": b"\x3c\x40"}, np.array([1, 2], ml_dtypes.float8_e5m2)),
        (29, {"int_val": [-8, 7]}, np.array([-8, 7], ml_dtypes.int4)),
    ],
)
def test_listed_values_keep_their_bits(number: int, fields: dict[str, Any], expected: np.ndarray) -> None:
    decoded = tensor(number, [2], **fields).load()
    assert decoded.dtype == expected.dtype
    np.testing.assert_array_equal(decoded, expected)


def test_missing_values_repeat_the_last_one() -> None:
    np.testing.assert_array_equal(tensor(1, [2, 2], float_val=[1, 2]).load(), [[1, 2], [2, 2]])
    np.testing.assert_array_equal(tensor(1, [3], float_val=[5]).load(), [5, 5, 5])
    np.testing.assert_array_equal(tensor(3, [3]).load(), [0, 0, 0])
    np.testing.assert_array_equal(tensor(7, [2]).load(), [b"", b""])
    np.testing.assert_array_equal(tensor(7, [3], string_val=[b"a", b"\xff"]).load(), [b"a", b"\xff", b"\xff"])
    assert tensor(1, [], float_val=[2]).load() == 2
    assert tensor(1, [0]).load().shape == (0,)


def test_scalar_string_and_packed_strings() -> None:
    assert tensor(7, [], string_val=[b"abc"]).load()[()] == b"abc"
    long = b"x" * 300
    np.testing.assert_array_equal(
        tensor(7, [3], tensor_content=b"\x01\x00\xac\x02" + b"a" + long).load(),
        np.array([b"a", b"", long], dtype=object),
    )


@pytest.mark.parametrize("content", [b"\x05abc", b"\xff\xff", b"\x01abc", b"\xff" * 12])
def test_packed_strings_that_lie_about_their_lengths(content: bytes) -> None:
    with pytest.raises(LoadError, match="strings"):
        tensor(7, [1], tensor_content=content).load()
    with pytest.raises(LoadError, match="strings"):
        tensor(7, [10**12], tensor_content=content).load()


@pytest.mark.parametrize(
    ("dtype", "shape", "fields"),
    [
        (1, [10**9, 10**9], {"tensor_content": b"\0" * 4}),
        (1, [3], {"tensor_content": b"\0" * 11}),
        (1, [1], {"float_val": [1, 2]}),
        (1, [0], {"float_val": [1]}),
        (1, [10**12], {"float_val": [1, 2]}),
        (8, [1], {"scomplex_val": [1]}),
        (20, [], {}),
        (21, [], {}),
        (0, [], {}),
        (99, [], {}),
        (101, [], {}),
        (1, [-1], {}),
    ],
)
def test_lying_sizes_and_odd_types_are_refused(dtype: int, shape: list[int], fields: dict[str, Any]) -> None:
    with pytest.raises(LoadError):
        tensor(dtype, shape, **fields).load()


def test_huge_constant_of_one_value_takes_no_memory() -> None:
    value = tensor(1, [10**6, 10**6], float_val=[3]).load()
    assert value.shape == (10**6, 10**6)
    assert value[999_999, 5] == 3


def test_unknown_rank_is_refused_on_load() -> None:
    message = schema.tensor_pb2.TensorProto(dtype=1)
    message.tensor_shape.unknown_rank = True
    with pytest.raises(LoadError, match="shape"):
        tensor_value(message).load()


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_, np.complex64, np.float16]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_any_array_packed_or_listed_comes_back(array: np.ndarray) -> None:
    number = next(n for n, dtype in NUMBERS.items() if np.dtype(dtype) == array.dtype)
    field = {
        1: "float_val", 2: "double_val", 3: "int_val", 4: "int_val", 8: "scomplex_val", 9: "int64_val", 10: "bool_val",
        19: "half_val",
    }[number]  # fmt: skip
    flat = array.ravel()
    if number == 8:
        flat = flat.view(np.float32)
    elif number == 19:
        flat = flat.view(np.uint16)
    shape = list(array.shape)
    np.testing.assert_array_equal(tensor(number, shape, **{field: flat.tolist()}).load(), array)
    np.testing.assert_array_equal(tensor(number, shape, tensor_content=array.tobytes()).load(), array)
