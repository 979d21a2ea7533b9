"""Requests in protobuf, taken apart before anything is converted: a Python object per value would be fifty times what came.

A message is walked field by field. What holds values (packed numbers, strings, raw content) is left where it is, in the bytes that came;
the rest, which is small, is parsed by protobuf. Type, shape and number of values of an input are then known, and are compared with each
other and with the model; only what fits becomes an array.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from msplit.engines.host.hashing import VIEW, Texts, strings_in, values_of
from msplit.errors import LoadError
from msplit.formats import tensors as protos
from msplit.formats import wire
from msplit.serving.pool.ports import Port
from msplit.serving.server import messages, tensors
from msplit.serving.server.models import place_for, refuse_missing
from msplit.serving.server.tensors import Refusal, invalid

MOST_FIELDS = 1 << 16
"""Fields of a message, values left out. No model has as many inputs and outputs."""
_APART = 1 << 12
"""Places that are kept apart, which is faster, before those that follow each other become one."""
_MOST_REST = 1 << 20
"""Bytes of names, shapes and parameters."""

Span = tuple[int, int, int, int]
"""Number of a field, its wire type, and where its value begins and ends; or, of several fields of that number one behind the other, minus
how many there are, and where the first begins and the last ends."""


@dataclass(frozen=True)
class Input:
    """An input as a client describes it.

    Attributes:
        count: Number of values that came.
        load: Makes an array of them.
        fills: True if the last value stands for all that are left out, as in a TensorProto.
        span: Where its values begin and end, if these bytes are those of the array, whatever they are; of strings any place, if they are
            listed and nothing else is.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    count: int
    load: Callable[[], NDArray[Any]]
    fills: bool = False
    span: tuple[int, int] | None = None

    def _misfit(self, why: str) -> Refusal:
        return invalid(f"input {self.name} is said to be {self.dtype.name} {list(self.shape)}{why}")

    def array(self, port: Port | None = None) -> NDArray[Any]:
        """Its values.

        Args:
            port: The model's input, where it is known.

        Raises:
            Refusal: They are none of its type, or another number than its shape has; or the model takes no such input.
        """
        wanted = math.prod(self.shape)
        if self.count > wanted or (self.count < wanted and not self.fills):
            raise self._misfit(f", and {self.count:,} values came")
        if port is not None:
            if tensors.name_of(self.dtype) != port.dtype or len(self.shape) != len(port.shape):
                raise self._misfit(f"; the model takes {port.said}")
            most = port.most if self.count == wanted else port.filled
            alike = all(size in (None, own) for size, own in zip(port.shape[1:], self.shape[1:], strict=True))
            if wanted > most and alike:
                raise self._misfit(f"; a batch of {self.shape[0]} is larger than any that is taken")
            if wanted > most:
                raise self._misfit(f"; the model takes {port.said}")
        try:
            return protos.filled(self.load(), self.shape)
        except LoadError as problem:
            raise invalid(f"input {self.name}: {problem.what.replace('a constant', 'the tensor')}") from None


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Fields of a message: number, wire type, where each begins, and where its value begins and ends.

    Raises:
        NotWireFormat: It is damaged.
        IndexError, KeyError: So it is.
    """
    while position < end:
        begin, tag, position = position, data[position], position + 1
        if tag > 0x7F:
            tag, position = protos.varint(data, begin, end)
        number, kept_as = tag >> 3, tag & 7
        start = position
        if kept_as == wire.LENGTH:
            length, start = data[position], position + 1
            if length > 0x7F:
                length, start = protos.varint(data, position, end)
            position = start + length
        elif kept_as == wire.VARINT:
            _, position = protos.varint(data, position, end)
        else:
            position += _FIXED[kept_as]
        if position > end or not number:
            raise protos.NotWireFormat
        yield number, kept_as, begin, start, position


def apart(
    data: bytes, span: Span | None, values: Collection[int], kind: str, most: int = MOST_FIELDS, *, joined: bool = False
) -> tuple[bytes, list[Span]]:
    """Takes a message apart without going into its fields.

    Args:
        data: The request.
        span: Place of the message in it; None: it is the whole.
        values: Numbers of the fields that are to stay where they are.
        kind: Name of it in messages.
        most: Most fields that it may have.
        joined: Have one place for fields of a number that follow each other: values that are not packed are millions of fields.

    Returns:
        All other fields, as a message; and where those that stay are.

    Raises:
        Refusal: It is damaged, or has more fields, or more bytes beside values, than any request needs.
    """
    position, end = (0, len(data)) if span is None else span[2:]
    rest, found, left, first = list[bytes](), list[Span](), most, 0
    try:
        if span is not None and span[1] != wire.LENGTH:
            raise protos.NotWireFormat
        for number, kept_as, begin, start, stop in _fields(data, position, end):
            if number not in values:
                rest.append(data[begin:stop])
            elif joined and len(found) >= _APART and found[-1][0] == number and found[-1][3] == begin:
                found[-1] = (number, min(found[-1][1], -1) - 1, first, stop)
            else:
                found.append((number, kept_as, start, stop))
                first = begin
            left -= 1
            if left < 0:
                raise invalid(f"what came has more than {most:,} fields in its {kind}")
    except (IndexError, KeyError, protos.NotWireFormat):
        raise invalid(f"what came is no {kind}") from None
    if sum(map(len, rest)) > _MOST_REST:
        raise invalid(f"what came has more than {_MOST_REST:,} bytes beside values in its {kind}")
    return b"".join(rest), found


def _each(data: bytes, spans: Sequence[Span]) -> Iterable[tuple[int, int, int]]:
    """Wire type of each value, and where it begins and ends."""
    if min(map(itemgetter(1), spans), default=0) >= 0:
        return [span[1:] for span in spans]
    return _each_of_many(data, spans)


def _each_of_many(data: bytes, spans: Iterable[Span]) -> Iterator[tuple[int, int, int]]:
    for _, kept_as, begin, end in spans:
        if kept_as >= 0:
            yield kept_as, begin, end
        else:
            yield from ((kind, start, stop) for _, kind, _, start, stop in _fields(data, begin, end))


_FIXED = {wire.FIXED64: 8, wire.FIXED32: 4}


@dataclass(frozen=True)
class Parts:
    """A request with its inputs apart.

    Attributes:
        request: The message without them.
        feeds: Makes arrays of them, by the names of a model's inputs.
    """

    request: Any
    feeds: Callable[[Mapping[str, Port]], Mapping[str, NDArray[Any]]]


Inputs = Callable[[Mapping[str, Port]], dict[str, Input]]
"""Describes the inputs of a request, by the names of a model's inputs."""


def predict_request(data: bytes) -> tuple[Any, Inputs]:
    """A PredictRequest of TensorFlow Serving's: the message without its inputs, and these.

    Raises:
        Refusal: It is none.
    """
    rest, entries = apart(data, None, (2,), "PredictRequest")

    def inputs(ports: Mapping[str, Port]) -> dict[str, Input]:
        found: dict[str, Input] = {}
        for entry in entries:
            key, values = apart(data, entry, (2,), "InputsEntry")
            name = tensors.parsed(messages.PredictRequest.InputsEntry, key).key
            place = place_for(name, ports, found)
            if len(values) > 1:
                raise invalid(f"input {name} has two values")
            found[place] = of_tensor_proto(data, values[0] if values else _all(b""), name, ports[place].most)
        return found

    return tensors.parsed(messages.PredictRequest, rest), inputs


def infer_request(data: bytes) -> tuple[Any, Inputs]:
    """A ModelInferRequest of the Open Inference Protocol's: the message without its inputs, and these.

    Raises:
        Refusal: It is none.
    """
    rest, spans = apart(data, None, (5, 7), "ModelInferRequest")
    listed, raw = ([span for span in spans if span[0] == number] for number in (5, 7))

    def inputs(ports: Mapping[str, Port]) -> dict[str, Input]:
        if raw and len(raw) != len(listed):
            raise invalid(f"there are {len(listed)} inputs, and {len(raw)} in raw_input_contents")
        found: dict[str, Input] = {}
        for number, span in enumerate(listed):
            head, contents = apart(data, span, (5,), "InferInputTensor")
            tensor = tensors.parsed(messages.ModelInferRequest.InferInputTensor, head)
            place = place_for(tensor.name, ports, found)
            found[place] = of_infer(data, tensor, contents, raw[number] if raw else None, ports[place].most)
        return found

    return tensors.parsed(messages.ModelInferRequest, rest), inputs


# --- Requests like those before

_MOST_LAYOUTS, _MOST_KEPT, _GROWS = 1024, 1 << 23, 64
"""Requests of which layouts are kept, the most bytes of them beside values, and how often those of the message without inputs count: as an
object, an empty field takes so many times what came."""
_VIEWED = 1 << 16
"""Bytes from which on an input is a view of its request. To copy fewer takes less than all else, and aligns them."""


class _Layout(NamedTuple):
    """Request that was read, apart from its values.

    Attributes:
        request: The message without its inputs.
        ports: Inputs of the model that it was read for.
        places: Name, shape and type of each input, and the number of the first of its values among all.
    """

    request: Any
    ports: Mapping[str, Port]
    places: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...]


class Reader:
    """Reads requests of one kind, and remembers them: clients send the same bytes again and again, but for the values. What was found out
    about the others holds for the next request that has them, which is read in a tenth of the time.

    Args:
        read: `predict_request` or `infer_request`.
    """

    def __init__(self, read: Callable[[bytes], tuple[Any, Inputs]]) -> None:
        self._read, self._infers, self._known, self._kept = read, read is infer_request, dict[bytes, _Layout](), 0

    def parts(self, data: bytes) -> Parts:
        """A request.

        Raises:
            Refusal: It is none of its kind.
        """
        rest, values = values_of(data, infers=self._infers) or (b"", memoryview(b""))
        layout = self._known.get(rest)
        request, inputs = self._read(data) if layout is None else (layout.request, None)
        placed = None if layout is None else _placed(data, values, layout)

        def feeds(ports: Mapping[str, Port]) -> Mapping[str, NDArray[Any]]:
            if placed is not None and layout is not None and layout.ports is ports:
                return placed
            found = (inputs or self._read(data)[1])(ports)
            refuse_missing(found, ports)
            arrays = {name: one.array(ports[name]) for name, one in found.items()}
            self._learn(rest, request, ports, found)
            return arrays

        return Parts(request, feeds)

    def _learn(self, rest: bytes, request: Any, ports: Mapping[str, Port], found: Mapping[str, Input]) -> None:
        """Keeps the layout of a request whose inputs are right whatever their values are."""
        counts = [one.count if one.dtype.hasobject else 1 for one in found.values()]
        plain = all(one.span and (ports[name].reads_texts or not one.dtype.hasobject) for name, one in found.items())
        if plain and rest and sum(counts) == int.from_bytes(rest[:8], sys.byteorder):  # no input has others
            firsts = itertools.accumulate(counts, initial=0)
            places = [
                (name, one.shape, one.dtype, first) for (name, one), first in zip(found.items(), firsts, strict=False)
            ]
            self._kept += len(rest) + _GROWS * request.ByteSize()
            if len(self._known) >= _MOST_LAYOUTS or self._kept > _MOST_KEPT:
                self._known.clear()
                self._kept = len(rest) + _GROWS * request.ByteSize()
            self._known[rest] = _Layout(request, ports, tuple(places))


def _placed(data: bytes, values: memoryview, layout: _Layout) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, shape, dtype, first in layout.places:
        if dtype.hasobject:
            own = values[2 * first : 2 * (first + math.prod(shape))].tobytes()
            arrays[name] = texts = Texts(shape, VIEW, own)
            texts.held = data
        else:
            array: NDArray[Any] = np.ndarray(shape, dtype, data, values[2 * first])
            arrays[name] = array if array.nbytes >= _VIEWED else array.copy()
    return arrays


# --- TensorProto

_CONTENT = 4
_VALUES = {
    "float32": 5, "float64": 6, "int32": 7, "uint8": 7, "int16": 7, "int8": 7, "uint16": 7, "int4": 7, "uint4": 7, "int2": 7, "uint2": 7,
    "object": 8, "complex64": 9, "int64": 10, "bool": 11, "complex128": 12, "float16": 13, "bfloat16": 13, "uint32": 16, "uint64": 17,
}  # fmt: skip
"""Fields of a TensorProto that list values, by type; 8-bit and 4-bit floats are in `_FLOAT8`."""
_FLOAT8 = 18
_MOST_TEXT = 1 << 20
"""Bytes of an input of strings that protobuf reads whole: objects take up to fifty times as many."""
_DT_STRING = b"\x08\x07"
"""Beginning of a TensorProto of strings."""
_ALL_VALUES = frozenset({_CONTENT, *range(5, 19)})


def of_tensor_proto(data: bytes, span: Span, name: str, most: int = MOST_FIELDS) -> Input:
    """An input as a TensorProto describes it, of so many values at most.

    Raises:
        Refusal: It has no type that arrays have, or does not say its shape, or its values are where none of its type belong.
    """
    if (found_texts := _texts(data, span, name, most)) is not None:
        return found_texts
    rest, found = apart(data, span, _ALL_VALUES, f"TensorProto of input {name}", most + _SPARE, joined=True)
    proto = tensors.parsed(messages.TensorProto, rest)
    dtype = tensors.dtype_of(proto.dtype)
    if dtype is None:
        raise invalid(f"input {name} is of type {protos.dtype_name(proto.dtype)}, which has no values that can be read")
    if proto.tensor_shape.unknown_rank:
        raise invalid(f"input {name} does not say its shape")
    shape = tensors.checked_shape([dim.size for dim in proto.tensor_shape.dim], name)
    used = _used(data, found)
    own = _VALUES.get(tensors.name_of(dtype), _FLOAT8)
    if len(used) > 1 or not {own, _CONTENT}.issuperset(used):
        fields = ", ".join([messages.TensorProto.DESCRIPTOR.fields_by_number[number].name for number in used])
        raise invalid(f"input {name} is {dtype.name}, and its values are in {fields}")
    if used == [_CONTENT]:
        return _content(data, _last(data, found, _CONTENT), name, dtype, shape)
    listed = [span for span in found if span[0] == own]
    if own == _FLOAT8 and listed:
        listed = [_last(data, listed, own)]
    return _listed(data, listed, name, dtype, shape, fills=True)


def _used(data: bytes, spans: list[Span]) -> list[int]:
    """Numbers of the fields of values that have any. Strings may be empty; of contents the last counts."""
    text, contents = _VALUES["object"], [one for one in spans if one[0] == _CONTENT]
    looked_at = [
        *(one for one in spans if one[0] != _CONTENT),
        *([_last(data, contents, _CONTENT)] if contents else []),
    ]
    return sorted(
        {one[0] for one in looked_at if one[0] == text or any(end > start for _, start, end in _each(data, [one]))}
    )


def _texts(data: bytes, span: Span, name: str, most: int) -> Input | None:
    """An input of listed strings; None where it is another one, or see `_all_texts`."""
    proto = _whole(messages.TensorProto, data, span) if data[span[2] : span[2] + 2] == _DT_STRING else None
    if proto is None or proto.dtype != _DT_STRING[1] or proto.tensor_shape.unknown_rank:
        return None
    dims = [dim.size for dim in proto.tensor_shape.dim]
    return _all_texts(proto, proto.string_val, {1, 2, 3, 8}, name, dims, most)


def _whole(kind: Any, data: bytes, span: Span) -> Any:
    """A message that protobuf reads whole, in a tenth of the time; None where it may be wrong, or so large that objects of all that may be
    in it would take much memory."""
    _, kept_as, start, end = span
    if kept_as != wire.LENGTH or end - start > _MOST_TEXT:
        return None
    try:
        return kind.FromString(data[start:end])
    except DecodeError:
        return None


def _all_texts(
    message: Any, texts: Sequence[bytes], own: set[int], name: str, dims: Sequence[int], most: int
) -> Input | None:
    """An input of the strings of a message that may have these fields; None where there is anything else that has to be looked at."""
    count = len(texts)
    if not 0 < count <= most or min(dims, default=0) < 0 or {field.number for field, _ in message.ListFields()} - own:
        return None
    shape = tensors.checked_shape(dims, name)
    if count != math.prod(shape):
        return None
    return Input(name, np.dtype(object), shape, count, lambda: np.fromiter(texts[:], object, count), span=(0, 0))


def _last(data: bytes, spans: Iterable[Span], number: int) -> Span:
    """The last of the fields of a number, which is the one that protobuf keeps of bytes."""
    ((kept_as, start, end),) = deque(_each(data, [span for span in spans if span[0] == number]), 1)
    return number, kept_as, start, end


def array_of(proto: Any, name: str) -> NDArray[Any]:
    """The array in a TensorProto of an answer.

    Raises:
        Refusal: Sizes, type and content do not fit each other.
    """
    data = proto.SerializeToString()
    return of_tensor_proto(data, _all(data), name, len(data)).array()


def array_of_infer(tensor: Any, raw: bytes | None) -> NDArray[Any]:
    """The array in an InferOutputTensor, or its like, with its raw content, where the message has that.

    Raises:
        Refusal: Sizes, type and content do not fit each other.
    """
    data = tensor.contents.SerializeToString() if raw is None else raw
    contents, content = ((_all(data),), None) if raw is None else ((), _all(data))
    return of_infer(data, tensor, contents, content, len(data)).array()


def _all(data: bytes) -> Span:
    return 0, wire.LENGTH, 0, len(data)


_SPARE = 64
"""Fields of a tensor that may come beside its values."""


# --- InferInputTensor

_CONTENTS = {
    "BOOL": 1, "INT8": 2, "INT16": 2, "INT32": 2, "INT64": 3, "UINT8": 4, "UINT16": 4, "UINT32": 4, "UINT64": 5, "FP32": 6, "FP64": 7,
    "BYTES": 8,
}  # fmt: skip
"""Fields of InferTensorContents, by the protocol's names of types."""


def of_infer(data: bytes, tensor: Any, contents: Sequence[Span], raw: Span | None, most: int = MOST_FIELDS) -> Input:
    """An input as an InferInputTensor describes it.

    Args:
        data: The request.
        tensor: The message without its contents.
        contents: Places of these.
        raw: Place of its raw content, if the request has that.
        most: Most values that it may have.

    Raises:
        Refusal: Type, shape and content do not fit each other.
    """
    name = tensor.name
    dtype, shape = tensors.open_dtype(tensor.datatype, name), tensors.checked_shape(tensor.shape, name)
    if raw is not None:
        if contents:
            raise invalid(f"input {name} has contents beside raw_input_contents")
        return (
            _raw_strings(data, raw, name, shape, most) if dtype.hasobject else _content(data, raw, name, dtype, shape)
        )
    if dtype.hasobject and len(contents) == 1 and contents[0][1] == wire.LENGTH:
        whole = _whole(messages.InferTensorContents, data, contents[0])
        found_texts = None if whole is None else _all_texts(whole, whole.bytes_contents, {8}, name, shape, most)
        if found_texts is not None:
            return found_texts
    own = _CONTENTS.get(tensor.datatype)
    if own is None:
        raise invalid(f"input {name} is {tensor.datatype}, which goes into raw_input_contents only")
    kind = f"InferTensorContents of input {name}"
    found = [span for part in contents for span in apart(data, part, range(1, 9), kind, most + _SPARE, joined=True)[1]]
    if any(span[0] != own for span in found):
        raise invalid(f"input {name} is {tensor.datatype}, and has contents of another type")
    return _listed(data, found, name, dtype, shape)


def _raw_strings(data: bytes, raw: Span, name: str, shape: tuple[int, ...], most: int) -> Input:
    """Strings, each behind its length in four bytes. None are kept where the shape has more than may come, which is refused later."""
    wanted, (_, _, position, end) = math.prod(shape), raw
    if wanted <= most and (found := strings_in(data, position, end, wanted)) is not None:
        return Input(name, np.dtype(object), shape, *found)
    texts, count, size = list[bytes](), 0, int.from_bytes
    while position < end and count <= wanted:
        start = position + 4
        position = start + size(data[position:start], "little")
        if position > end:
            raise invalid(f"input {name} has strings whose lengths do not fit the {end - raw[2]:,} bytes that came")
        count += 1
        if wanted <= most:
            texts.append(data[start:position])
    if count > wanted:
        raise invalid(f"input {name} is said to be BYTES {list(shape)}, and more strings came")
    return Input(name, np.dtype(object), shape, count, lambda: np.fromiter(texts, object, count))


# --- Values


def _content(data: bytes, span: Span, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Input:
    """Bytes that are an array's own; of strings, their lengths and then all of them."""
    _, kind, start, end = span
    count = math.prod(shape)
    if kind != wire.LENGTH or (count * dtype.itemsize != end - start and not dtype.hasobject):
        raise invalid(f"input {name} is said to be {dtype.name} {list(shape)}, and {end - start:,} bytes came")
    if dtype.hasobject:
        return Input(name, dtype, shape, count, lambda: protos.string_array(data[start:end], count))
    of_any = None if dtype.kind == "b" else (start, end)
    return Input(
        name,
        dtype,
        shape,
        count,
        lambda: _of_bytes(np.frombuffer(data, np.uint8, end - start, start).copy(), dtype, name),
        span=of_any,
    )


def _of_bytes(values: NDArray[np.uint8], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    found = values.view(dtype)
    # What counts them would write past what it has made room for.
    if dtype.kind == "b" and found.view(np.uint8).max(initial=0) > 1:
        raise invalid(f"input {name} is bool, and has bytes that are neither 0 nor 1")
    return found


def _listed(
    data: bytes, spans: Sequence[Span], name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, fills: bool = False
) -> Input:
    """Values that are listed one by one, packed or not."""
    own = wire.LENGTH if dtype.hasobject else _WIRE_TYPES.get(tensors.name_of(dtype), wire.VARINT)
    places = _each(data, spans)
    if dtype.hasobject:
        count = sum(
            1 for kind, _, _ in places if kind == own
        )  # protobuf does not know the others, and passes over them

        def texts() -> NDArray[Any]:
            found = places if isinstance(places, list) else _each(data, spans)
            return np.fromiter([data[start:end] for kind, start, end in found if kind == own], object, count)

        return Input(name, dtype, shape, count, texts, fills)
    unit, varints = _FIXED.get(own, 1), own == wire.VARINT
    several, one_part = bytearray(), len(spans) == 1 and spans[0][1] >= 0
    for kept_as, start, end in places:
        if kept_as not in (own, wire.LENGTH):
            raise invalid(f"input {name} has values that are no {dtype.name}")
        if end > start and (data[end - 1] > 0x7F if varints else (end - start) % unit):
            raise invalid(f"input {name} has a part of a {dtype.name} among its values")
        if not one_part:
            several += data[start:end]
    _, _, start, end = spans[0] if one_part else (0, 0, 0, len(several))
    numbers = np.frombuffer(data if one_part else several, np.uint8, end - start, start)
    if not varints:
        count, over = divmod(end - start, dtype.itemsize)
        if over:
            raise invalid(f"input {name} has a part of a {dtype.name} among its values")
        whole = (start, end) if one_part and count == math.prod(shape) else None
        return Input(
            name, dtype, shape, count, lambda: (numbers.copy() if one_part else numbers).view(dtype), fills, whole
        )
    pieces = range(0, len(numbers), tensors.AT_ONCE)
    count = sum(int(np.count_nonzero(numbers[place : place + tensors.AT_ONCE] < 0x80)) for place in pieces)
    return Input(name, dtype, shape, count, lambda: tensors.varints(numbers, count, name, dtype), fills)


_WIRE_TYPES = {
    "float32": wire.FIXED32, "complex64": wire.FIXED32, "float64": wire.FIXED64, "complex128": wire.FIXED64,
    "float8_e5m2": wire.LENGTH, "float8_e4m3fn": wire.LENGTH, "float8_e4m3fnuz": wire.LENGTH, "float8_e4m3b11fnuz": wire.LENGTH,
    "float8_e5m2fnuz": wire.LENGTH, "float4_e2m1fn": wire.LENGTH,
}  # fmt: skip
"""Wire type of listed values, for types that are not varints."""
