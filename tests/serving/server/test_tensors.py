"""Arrays survive the way through each protocol, and TensorFlow reads ours."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msplit.serving.server import decode, messages, tensors
from msplit.serving.server.tensors import LONGEST, Refusal, StatusCode, refusal
from tests.campaign import examples

NUMBERS = [
    *(
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    ),
    "complex64",
    "complex128",
]
TYPES = st.sampled_from([np.dtype(name) for name in NUMBERS])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
NUMERIC = TYPES.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
SMALL = hnp.arrays(np.float32, SHAPES, elements=st.floats(-8, 8, width=16)).map(lambda a: a.astype(ml_dtypes.bfloat16))
STRINGS = hnp.arrays(object, SHAPES, elements=st.binary(max_size=5))
ARRAYS = st.one_of(NUMERIC, SMALL, STRINGS)


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if wanted.dtype == object:
        assert found.tolist() == wanted.tolist()
    else:
        assert found.tobytes() == wanted.tobytes()


@given(array=ARRAYS, as_content=st.booleans())
@settings(max_examples=examples(40, 1000))
def test_tensor_protos_are_read_as_they_are_written(array: np.ndarray, as_content: bool) -> None:
    proto = messages.TensorProto()
    tensors.to_tensor_proto(array, proto, as_content=as_content)
    same(decode.array_of(messages.TensorProto.FromString(proto.SerializeToString()), "x"), array)


@pytest.mark.tf
@given(array=ARRAYS, as_content=st.booleans())
@settings(max_examples=examples(40, 1000))
def test_tensorflow_reads_ours_and_we_read_its(array: np.ndarray, as_content: bool) -> None:
    import tensorflow as tf

    proto = messages.TensorProto()
    tensors.to_tensor_proto(array, proto, as_content=as_content)
    theirs = type(tf.make_tensor_proto(0)).FromString(proto.SerializeToString())
    if array.size:  # TensorFlow's own reader takes an empty typed field for zeros, which needs no values either way
        same(tf.make_ndarray(theirs), array)
    made = tf.make_tensor_proto(array, shape=array.shape)
    same(decode.array_of(messages.TensorProto.FromString(made.SerializeToString()), "x"), array)


@pytest.mark.tf
@pytest.mark.parametrize("name", [*NUMBERS, "bfloat16", "float8_e4m3fn", "int4", "object"])
def test_types_have_tensorflows_numbers(name: str) -> None:
    import tensorflow as tf

    assert tf.as_dtype(tensors.dtype_number(name)).name == ("string" if name == "object" else name)


OPEN = [name for name in NUMBERS if not name.startswith("complex")]


@given(array=st.one_of(st.sampled_from(OPEN).flatmap(lambda name: hnp.arrays(np.dtype(name), SHAPES)), SMALL, STRINGS))
@settings(max_examples=examples(40, 1000))
def test_open_tensors_are_read_as_they_are_written(array: np.ndarray) -> None:
    name = tensors.open_name(array.dtype.name)
    tensor = messages.ModelInferRequest.InferInputTensor(name="x", datatype=name, shape=array.shape)
    same(decode.array_of_infer(tensor, b"".join(tensors.raw_content(array))), array)
    fields = {"uint8": "uint", "uint16": "uint", "int8": "int", "int16": "int", "int32": "int", "uint32": "uint"}
    fields |= {"float32": "fp32", "float64": "fp64", "object": "bytes"}
    if array.dtype.itemsize == 2 and array.dtype.kind in "fV":
        with pytest.raises(Refusal, match="raw_input_contents only"):
            decode.array_of_infer(tensor, None)
        return
    getattr(tensor.contents, f"{fields.get(array.dtype.name, array.dtype.name)}_contents").extend(
        array.ravel().tolist()
    )
    same(decode.array_of_infer(tensor, None), array)


@given(data=st.binary(max_size=64))
@example(data=b"\x08\x7c")  # a reference to an 8-bit float
@settings(max_examples=examples(60, 5000))
def test_no_bytes_do_harm(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        proto: Any = messages.TensorProto.FromString(data)
    except DecodeError:
        return
    with contextlib.suppress(Refusal):
        assert decode.array_of(proto, "x").ndim <= tensors.MOST_DIMS


def test_a_bool_is_a_bool() -> None:
    proto = messages.TensorProto(dtype=10, tensor_content=b"\x00\x01\x02\xff")
    proto.tensor_shape.dim.add().size = 4
    with pytest.raises(Refusal, match="input x is bool, and has bytes that are neither 0 nor 1"):
        decode.array_of(proto, "x")


def test_a_refusal_is_one_line_and_not_long() -> None:
    said = Refusal(StatusCode.INTERNAL, "a\nb\x1b" + "c" * 5000).said
    assert said.startswith("a\\nb\\x1bcc")
    assert len(said) == LONGEST


def test_what_went_wrong_inside_is_nobodys_business() -> None:
    assert refusal(RuntimeError("/home/me/secret")).said == "internal error; the server's log has more"
    assert refusal(RuntimeError("x")).code is StatusCode.INTERNAL


def test_of_a_field_that_comes_twice_protobuf_keeps_the_last() -> None:
    first, last = (messages.TensorProto(float8_val=values).SerializeToString() for values in (b"\x38", b"\x3c\x40"))
    head = messages.TensorProto(dtype=tensors.dtype_number("float8_e4m3fn"))
    head.tensor_shape.dim.add().size = 2
    data = head.SerializeToString() + first + last
    assert messages.TensorProto.FromString(data).float8_val == b"\x3c\x40"
    same(
        decode.of_tensor_proto(data, (0, 2, 0, len(data)), "x").array(),
        np.frombuffer(b"\x3c\x40", ml_dtypes.float8_e4m3fn),
    )


@pytest.mark.parametrize("name", ["float16", "int64", "uint8", "bool", "float32", "object"])
@pytest.mark.parametrize("as_content", [False, True])
def test_many_values_are_written_in_parts(name: str, as_content: bool) -> None:
    count = 2 * tensors.PIECE + 5
    numbers = np.arange(count).reshape(1, count)[:, ::-1]
    if name == "object":
        array = np.empty((1, count), object)
        array[0, :] = [b"%d" % number for number in numbers[0]]
    else:
        array = (numbers % 2 if name == "bool" else numbers % 200).astype(name)
    parts = tensors.tensor_proto(array, as_content=as_content)
    proto = messages.TensorProto.FromString(b"".join(parts))
    same(decode.array_of(proto, "x"), array)
    assert max(map(len, parts)) < 1 << 20
