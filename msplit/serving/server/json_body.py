"""Bodies of HTTP requests and answers in JSON.

JSON of any length, read piece by piece: all of it at once would be twenty times as large, and would keep every other thread waiting.

A list whose text is long stays text until somebody asks for its pieces, and only as many become numbers as the model takes.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays
from msplit.errors import LoadError
from msplit.inputs.files import COLUMNS, ROWS, UNNAMED, is_named, json_array, loads, rows_as_columns
from msplit.serving.pool.ports import Port
from msplit.serving.server import messages, tensors
from msplit.serving.server.decode import MOST_FIELDS, array_of_infer
from msplit.serving.server.models import place_for, refuse_missing
from msplit.serving.server.tensors import Refusal, invalid

PIECE = 1 << 16
"""Bytes that are read at once, which takes some ms."""
_DEEPEST = 64
"""Lists and objects within each other, in a text that is longer than a piece."""
_KEY = re.compile(rb'\s*("(?:[^"\\]|\\.){0,4096}")\s*:')
_BLANK = b" \t\r\n"
_NET = np.zeros(256, np.int8)
_NET[[*b"[{"]], _NET[[*b"]}"]] = 1, -1
"""Change of the nesting depth by each byte."""


def malformed(said: object = "") -> Refusal:
    """The text is no JSON."""
    return invalid(f"JSON Parse error: {said or 'it is damaged'}")


@dataclass(frozen=True)
class Long:
    """A list that is too long to be read at once: its text between the brackets."""

    data: bytes | bytearray
    start: int
    end: int

    def pieces(self) -> Iterator[list[Any]]:
        """Elements, some at a time; one that is long itself comes alone.

        Raises:
            Refusal: It is no JSON.
        """
        start = self.start
        for commas in _commas(self.data, self.start, self.end):
            if not len(commas):
                continue
            first, last = int(commas[0]), int(commas[-1])
            if last - start > 2 * PIECE:
                yield [read_pieces(self.data, start, first)]
                start = first + 1
            if last > first or start <= first:
                yield _elements(self.data[start:last])
            start = last + 1
        long = self.end - start > 2 * PIECE
        yield [read_pieces(self.data, start, self.end)] if long else _elements(self.data[start : self.end])


def read_pieces(data: bytes | bytearray, start: int = 0, end: int | None = None) -> Any:
    """Read JSON text, with `Long` in place of lists that are long.

    Raises:
        Refusal: It is no JSON, or an object has a key twice.
    """
    end = len(data) if end is None else end
    if end - start <= PIECE:
        return _loaded(data[start:end])
    while start < end and data[start] in _BLANK:
        start += 1
    while start < end and data[end - 1] in _BLANK:
        end -= 1
    ends = data[start : start + 1] + data[end - 1 : end]
    if ends in (b"[]", b"{}") and not any(
        data[at : min(at + PIECE, end - 1)].strip(_BLANK) for at in range(start + 1, end - 1, PIECE)
    ):
        return _loaded(ends)
    if ends == b"[]":
        return Long(data, start + 1, end - 1)
    if ends == b"{}":
        return _members(data, start + 1, end - 1)
    if ends != b'""' or data.find(b"\\", start, end) >= 0 or data.find(b'"', start + 1, end - 1) >= 0:
        if end - start > PIECE and ends != b'""':
            raise malformed()
        return _loaded(data[start:end])
    if (np.frombuffer(data, np.uint8, end - start, start) < ord(" ")).any():
        raise malformed("a control character in a text")
    try:
        return data[start + 1 : end - 1].decode()
    except UnicodeDecodeError as problem:
        raise malformed(problem) from None


def _members(data: bytes | bytearray, start: int, end: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for last in chain((int(comma) for commas in _commas(data, start, end) for comma in commas), (end,)):
        key = _KEY.match(data, start, last)
        if key is None:
            raise malformed("an object has no key, or none that is short")
        name = _loaded(key[1])
        if name in found or len(found) == MOST_FIELDS:
            raise malformed(f"key {name!r} is there twice" if name in found else "an object has too many keys")
        found[name] = read_pieces(data, key.end(), last)
        start = last + 1
    return found


def _elements(text: bytes | bytearray) -> list[Any]:
    if not text.strip(_BLANK):
        raise malformed("a list has an element too few")
    found: list[Any] = _loaded(b"[" + text + b"]")
    return found


def _loaded(text: bytes | bytearray) -> Any:
    try:
        return loads(text)
    except ValueError as problem:
        raise malformed(problem) from None


def _commas(data: bytes | bytearray, start: int, end: int) -> Iterator[NDArray[np.int64]]:
    """Ends of the elements of a list, or of an object, but for the last one: for each piece of its text those that are in it."""
    depth = quoted = escaped = 0
    for begin in range(start, end, PIECE):
        text = data[begin : min(begin + PIECE, end)]
        if escaped or b"\\" in text:
            text = b"_" * escaped + text[escaped:].replace(rb"\\", b"__").replace(rb"\"", b"__")
            escaped = int(text.endswith(b"\\"))
        signs = np.frombuffer(text, np.uint8)
        commas, net = signs == ord(","), _NET[signs]
        if quoted or b'"' in text:
            within = (np.cumsum(signs == ord('"'), dtype=np.int32) + quoted) & 1
            quoted = int(within[-1])
            commas &= within == 0
            net *= within == 0
        depths = np.cumsum(net, dtype=np.int32) + depth
        if depths.min() < 0 or depths.max() > _DEEPEST:
            raise malformed("brackets do not match, or are nested too deeply")
        depth = int(depths[-1])
        yield np.flatnonzero(commas & (depths == 0)) + begin
    if depth or quoted:
        raise malformed("brackets do not match")


class Gathered:
    """Values of an input, which come in pieces of a list.

    Args:
        name: Name of the input.
        port: Type and shape that the model takes.
        room: Most values that there can be in the request.
    """

    def __init__(self, name: str, port: Port, room: int) -> None:
        self._name, self._port, self._most = name, port, max(port.most, 1)
        self._dtype = "string" if port.dtype == "object" else port.dtype
        self._room, self._used = min(room // 2 + 1, port.most), 0  # of two bytes in text each, at least
        self._values: NDArray[Any] | None = None
        self._shape: tuple[int, ...] | None = None

    def add(self, piece: list[Any]) -> None:
        """Takes further elements of the list.

        Raises:
            Refusal: They are none that the model takes, or too many.
        """
        self._shape = self._joined(self._shape, piece)

    def array(self) -> NDArray[Any]:
        """All of them."""
        assert self._values is not None
        assert self._shape is not None
        self._values.resize(self._used, refcheck=False)
        return self._values[: self._used].reshape(self._shape)

    def _joined(self, shape: tuple[int, ...] | None, piece: list[Any]) -> tuple[int, ...]:
        """The shape of a list with so many more elements."""
        if len(piece) == 1 and isinstance(piece[0], Long):
            inner: tuple[int, ...] | None = None
            for one in piece[0].pieces():
                inner = self._joined(inner, one)
            assert inner is not None
            added = (1, *inner)
        else:
            added = self._put(one_array(piece, self._name, self._dtype))
        if shape is not None and shape[1:] != added[1:]:
            raise invalid(f"input {self._name!r} has rows of different lengths")
        whole = (added[0] + (0 if shape is None else shape[0]), *added[1:])
        if max(whole[0], math.prod(whole)) > self._most:
            raise invalid(f"input {self._name!r} has more values than the largest request of {self._port.said} has")
        return whole

    def _put(self, array: NDArray[Any]) -> tuple[int, ...]:
        if self._values is None:
            self._values = np.empty(self._room, array.dtype)  # memory is taken when it is written
        end = self._used + array.size
        if end <= len(self._values):
            self._values[self._used : end] = array.ravel()
            self._used = end
        elif array.size:
            raise invalid(f"input {self._name!r} has more values than the largest request has")
        return array.shape


def one_array(value: Any, name: str, dtype: str) -> NDArray[Any]:
    """Values that were read at once, as an array.

    Raises:
        Refusal: They are none of that type, or have rows of different lengths.
    """
    try:
        return json_array(value, dtype, name, source="the request")
    except LoadError as problem:
        raise invalid(problem.what) from None


def array(value: Any, name: str, port: Port) -> NDArray[Any]:
    """Values of an input, whether they were read at once or not.

    Raises:
        Refusal: They are none that the model takes.
    """
    if not isinstance(value, Long):
        return one_array(value, name, "string" if port.dtype == "object" else port.dtype)
    gathered = Gathered(name, port, value.end - value.start)
    for piece in value.pieces():
        gathered.add(piece)
    return gathered.array()


Ports = Mapping[str, Port]


@dataclass(frozen=True)
class PredictBody:
    """Body of a request for predictions.

    Attributes:
        signature: Name of the signature, "" for the default.
        rows: True if it has rows, and is to be answered in rows.
        values: Rows, or values by input, or those of the only one.
    """

    signature: str
    rows: bool
    values: Any


def read(data: bytes | bytearray) -> PredictBody:
    """A request of TensorFlow Serving's.

    Raises:
        Refusal: It is none.
    """
    signature, found = signed(data)
    rows = ROWS in found
    if rows == (COLUMNS in found):
        both = "Request has both 'instances' and 'inputs' keys"
        raise invalid(both if rows else "Missing 'inputs' or 'instances' key")
    values = found[ROWS if rows else COLUMNS]
    if rows and not (isinstance(values, Long) or (isinstance(values, list) and values)):
        raise invalid("'instances' must be a list of at least one")
    return PredictBody(signature, rows, values)


def signed(data: bytes | bytearray) -> tuple[str, dict[str, Any]]:
    """Name of the signature of a request of TensorFlow Serving's, and the whole request."""
    found = _object(data)
    signature = found.get("signature_name", "")
    if not isinstance(signature, str):
        raise invalid("'signature_name' key must be a string value.")
    return signature, found


def _object(data: bytes | bytearray) -> dict[str, Any]:
    found = read_pieces(data)
    if not isinstance(found, dict):
        raise invalid("the request is no JSON object")
    return found


def feeds(body: PredictBody, ports: Ports) -> Arrays:
    """A request's values as arrays of the types that the inputs have.

    Raises:
        Refusal: The model takes no such values.
    """
    found: dict[str, Any] = {}
    if body.rows and isinstance(body.values, Long):
        found = {place: one.array() for place, one in _gathered(body.values, ports).items()}
    else:
        named = body.values if is_named(body.values) else {UNNAMED: body.values}
        for name, value in (_columns(body.values) if body.rows else named).items():
            place = _place(name, ports, found)
            found[place] = array(value, place, ports[place])
    refuse_missing(found, ports)
    return found


def _gathered(rows: Long, ports: Ports) -> Mapping[str, Gathered]:
    """The inputs of many rows, which are read some at a time."""
    names: dict[str, str] = {}
    found: dict[str, Gathered] = {}
    for piece in rows.pieces():
        columns = _columns(piece)
        if not names:
            for name in columns:
                names[name] = place = _place(name, ports, found)
                found[place] = Gathered(place, ports[place], rows.end - rows.start)
            refuse_missing(found, ports)
        if columns.keys() != names.keys():
            raise invalid("instances have other inputs than the first")
        for name, column in columns.items():
            found[names[name]].add(column)
    return found


def _columns(rows: list[Any]) -> Mapping[str, Any]:
    try:
        found = rows_as_columns(rows)
    except LoadError as problem:
        raise invalid(problem.what) from None
    if UNNAMED in found and any(map(is_named, rows)):
        raise invalid("instances are objects and values: give all of them as objects, or none")
    return found


def _place(name: str, ports: Ports, found: Mapping[str, Any]) -> str:
    if name == UNNAMED and len(ports) != 1:
        raise invalid(f"the model has {len(ports)} inputs ({', '.join(ports)}): name them")
    return place_for(next(iter(ports)) if name == UNNAMED else name, ports, found)


def answer(outputs: Arrays, *, rows: bool) -> bytes:
    """Outputs in JSON, as TensorFlow Serving writes them; what a single one is called is not said.

    Raises:
        Refusal: Rows were asked for, and outputs have different numbers of them.
    """
    only = next(iter(outputs)) if len(outputs) == 1 else None
    if not rows:
        return b"".join([b'{"outputs": ', *(_texts(outputs) if only is None else _text_of(only, outputs[only])), b"}"])
    sizes = {name: np.shape(value)[:1] for name, value in outputs.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        said = ", ".join(f"{name} {size[0] if size else 'none'}" for name, size in sizes.items())
        raise invalid(
            f"outputs have no rows, or different numbers of them ({said}); ask with 'inputs' in place of 'instances'"
        )
    if only is not None:
        return b"".join([b'{"predictions": ', *_text_of(only, outputs[only]), b"}"])
    ((count,),) = set(sizes.values())
    # A row that is one string stays an array: NumPy would take the zeros off its end.
    rows_of = ({name: value[row, ...] for name, value in outputs.items()} for row in range(count))
    return b"".join([b'{"predictions": [', b", ".join([b"".join(_texts(row)) for row in rows_of]), b"]}"])


def results(values: NDArray[Any], scores: NDArray[Any] | None = None) -> bytes:
    """Values of a regression in JSON; or labels with scores, a list of both for each class."""
    found = _plain("", values)
    if scores is not None:
        found = [[*zip(*row, strict=True)] for row in zip(found, _plain("", scores), strict=True)]
    return _dumped({"results": found})


def _texts(outputs: Arrays) -> Iterator[bytes]:
    yield b"{"
    for place, (name, value) in enumerate(outputs.items()):
        yield (b", " if place else b"") + _dumped(name) + b": "
        yield from _text_of(name, value)
    yield b"}"


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


_WRITTEN = 1 << 14
"""Values that are written at once: a list of all of them, and its text, would be twenty times as large."""


def _text_of(name: str, array: NDArray[Any]) -> Iterator[bytes]:
    """An output in JSON, in parts."""
    array = np.asarray(array)
    size = array.size + sum(map(tensors.text_bytes, tensors.pieces(array))) // 16
    if size <= _WRITTEN or not array.ndim:
        yield _dumped(_plain(name, array))
        return
    rows = _WRITTEN * len(array) // size
    for first in range(0, len(array), rows or 1):
        yield b", " if first else b"["
        if rows or array.ndim == 1:
            yield _dumped(_plain(name, array[first : first + (rows or 1)]))[1:-1]
        else:
            yield from _text_of(name, array[first])
    yield b"]"


def _plain(name: str, array: NDArray[Any]) -> Any:
    """An array as lists of what JSON has."""
    array = np.asarray(array)
    if array.dtype.kind in "OSU":
        as_is = name.endswith("_bytes")  # TensorFlow Serving's way to tell bytes from text
        flat = [_text(tensors.as_bytes(value), as_is) for value in array.ravel().tolist()]
        shaped = np.empty(len(flat), object)
        shaped[:] = flat
        return shaped.reshape(array.shape).tolist()
    if array.dtype.kind in "iub" or array.dtype == np.float64:
        return array.tolist()
    if array.dtype.kind == "c":
        raise invalid(f"output {name} is {array.dtype.name}, which JSON has no numbers for")
    # By way of the shortest decimals that are told apart: as a float64, the float32 of 0.1 is 0.10000000149011612.
    return array.astype(np.float32).astype("U32").astype(np.float64).tolist()


def _text(data: bytes, as_is: bool) -> Any:
    if not as_is:
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass
    return {"b64": base64.b64encode(data).decode()}


# --- Open Inference Protocol


def read_open(data: bytes | bytearray, head: int | None = None) -> tuple[Any, Callable[[Ports], Arrays]]:
    """A request of the Open Inference Protocol: as a ModelInferRequest without inputs, and what makes its inputs.

    Args:
        data: The body.
        head: Number of its bytes that are JSON; behind them are the values of inputs that have a `binary_data_size`. None: all.

    Raises:
        Refusal: It is none.
    """
    found = _object(data if head is None else data[:head])
    request = messages.ModelInferRequest()
    identifier, inputs, parameters = found.get("id", ""), found.get("inputs"), found.get("parameters", {})
    if not isinstance(identifier, str) or not isinstance(inputs, list | Long):
        raise invalid("'inputs' must be a list, and 'id' a string")
    request.id = _encodable(identifier)
    for output in _objects(found.get("outputs", []), "outputs"):
        added = request.outputs.add(name=_encodable(_string(output, "name")))
        _take_parameters(output.get("parameters", {}), added.parameters)
    _take_parameters(parameters, request.parameters)

    def made(ports: Ports) -> Arrays:
        arrays: dict[str, NDArray[Any]] = {}
        position = len(data) if head is None else head
        for piece in inputs.pieces() if isinstance(inputs, Long) else [inputs]:
            for tensor in _objects(piece, "inputs"):
                place = place_for(_string(tensor, "name"), ports, arrays)
                size = _binary_size(tensor)
                raw = None if size is None else bytes(memoryview(data)[position : position + size])
                arrays[place] = _open_array(tensor, ports[place], raw)
                position += size or 0
        if position != len(data):
            raise invalid(
                f"inputs have {position - (head or 0):,} bytes of binary data; {len(data) - (head or 0):,} came"
            )
        refuse_missing(arrays, ports)
        return arrays

    return request, made


def _take_parameters(given: Any, parameters: Any) -> None:
    """Writes an object of parameters into a message's map. What no message has is left out."""
    if not isinstance(given, dict):
        raise invalid("'parameters' must be an object")
    for name, value in given.items():
        parameter = parameters[_encodable(name)]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            parameter.int64_param = value
        elif isinstance(value, str):
            parameter.string_param = _encodable(value)


def _binary_size(tensor: dict[str, Any]) -> int | None:
    """Bytes of an input behind the JSON; None where its values are in it."""
    parameters = tensor.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid("'parameters' must be an object")
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0 or "data" in tensor):
        raise invalid(f"input {_string(tensor, 'name')} has a binary_data_size that is none, or data beside it")
    return size


def _open_array(tensor: dict[str, Any], port: Port, raw: bytes | None) -> NDArray[Any]:
    name, shape = _string(tensor, "name"), tensor.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise invalid(f"input {name} has no shape")
    dtype = tensors.open_dtype(_string(tensor, "datatype"), name)
    if dtype.name != port.dtype:
        said = f"{dtype.name} {shape[: tensors.MOST_DIMS]}"
        raise invalid(f"input {name} is said to be {said}; the model takes {port.dtype}")
    if raw is not None:
        if not all(abs(size) < 1 << 62 for size in shape):
            raise invalid(f"input {name} has sizes that no array has")
        message = messages.ModelInferRequest().inputs.add(
            name=_encodable(name), datatype=tensor["datatype"], shape=shape
        )
        return array_of_infer(message, raw)
    return tensors.reshaped(array(tensor.get("data"), name, port), shape, name)


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise invalid(f"{name!r} must be a list of objects")
    return value


def _string(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str):
        raise invalid(f"{key!r} must be a string")
    return value


def _encodable(text: str) -> str:
    """A string as a message may have it: half of a surrogate pair has no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def open_outputs(outputs: Arrays, raw: Mapping[str, Sequence[bytes]]) -> Iterator[bytes]:
    """Outputs as the Open Inference Protocol writes them: a list in JSON, in parts.

    Args:
        outputs: Arrays by name.
        raw: Values of those that go behind the JSON, by name.
    """
    yield b"["
    for place, (name, value) in enumerate(outputs.items()):
        datatype = tensors.open_name(tensors.name_of(value.dtype))
        said: dict[str, Any] = {"name": name, "shape": list(value.shape), "datatype": datatype}
        if name in raw:
            said["parameters"] = {"binary_data_size": sum(map(len, raw[name]))}
            yield (b", " if place else b"") + _dumped(said)
            continue
        head = _dumped(said)
        yield (b", " if place else b"") + head[:-1] + b', "data": '
        yield from _text_of(name, value.reshape(-1))
        yield b"}"
    yield b"]"
