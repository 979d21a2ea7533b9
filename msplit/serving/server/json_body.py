"""Bodies of HTTP requests and answers in JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.inputs.files import COLUMNS, ROWS, UNNAMED, is_named, rows_as_columns
from msplit.serving.pool.ports import Port
from msplit.serving.server import json_pieces, messages, tensors
from msplit.serving.server.json_pieces import Gathered, Long
from msplit.serving.server.models import place_for, refuse_missing
from msplit.serving.server.predict import Arrays
from msplit.serving.server.refusal import invalid

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
    found = _object(data)
    signature = found.get("signature_name", "")
    if not isinstance(signature, str):
        raise invalid("'signature_name' key must be a string value.")
    rows = ROWS in found
    if rows == (COLUMNS in found):
        both = "Request has both 'instances' and 'inputs' keys"
        raise invalid(both if rows else "Missing 'inputs' or 'instances' key")
    values = found[ROWS if rows else COLUMNS]
    if rows and not (isinstance(values, Long) or (isinstance(values, list) and values)):
        raise invalid("'instances' must be a list of at least one")
    return PredictBody(signature, rows, values)


def _object(data: bytes | bytearray) -> dict[str, Any]:
    found = json_pieces.read(data)
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
            found[place] = json_pieces.array(value, place, ports[place])
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
        return rows_as_columns(rows)
    except LoadError as problem:
        raise invalid(problem.what) from None


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


def read_open(data: bytes | bytearray) -> tuple[Any, Callable[[Ports], Arrays]]:
    """A request of the Open Inference Protocol: as a ModelInferRequest without inputs, and what makes its inputs.

    Raises:
        Refusal: It is none.
    """
    found = _object(data)
    request = messages.ModelInferRequest()
    identifier, inputs, parameters = found.get("id", ""), found.get("inputs"), found.get("parameters", {})
    if not isinstance(identifier, str) or not isinstance(inputs, list | Long):
        raise invalid("'inputs' must be a list, and 'id' a string")
    request.id = _encodable(identifier)
    for output in _objects(found.get("outputs", []), "outputs"):
        request.outputs.add(name=_encodable(_string(output, "name")))
    if not isinstance(parameters, dict):
        raise invalid("'parameters' must be an object")
    for name, value in parameters.items():
        parameter = request.parameters[_encodable(name)]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            parameter.int64_param = value
        elif isinstance(value, str):
            parameter.string_param = _encodable(value)

    def made(ports: Ports) -> Arrays:
        arrays: dict[str, NDArray[Any]] = {}
        for piece in inputs.pieces() if isinstance(inputs, Long) else [inputs]:
            for tensor in _objects(piece, "inputs"):
                place = place_for(_string(tensor, "name"), ports, arrays)
                arrays[place] = _open_array(tensor, ports[place])
        refuse_missing(arrays, ports)
        return arrays

    return request, made


def _open_array(tensor: dict[str, Any], port: Port) -> NDArray[Any]:
    name, shape = _string(tensor, "name"), tensor.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise invalid(f"input {name} has no shape")
    dtype = tensors.open_dtype(_string(tensor, "datatype"), name)
    if dtype.name != port.dtype:
        said = f"{dtype.name} {shape[: tensors.MOST_DIMS]}"
        raise invalid(f"input {name} is said to be {said}; the model takes {port.dtype}")
    return tensors.reshaped(json_pieces.array(tensor.get("data"), name, port), shape, name)


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


def open_outputs(outputs: Arrays) -> Iterator[bytes]:
    """Outputs as the Open Inference Protocol writes them: a list in JSON, in parts."""
    yield b"["
    for place, (name, value) in enumerate(outputs.items()):
        datatype = tensors.open_name(tensors.name_of(value.dtype))
        head = _dumped({"name": name, "shape": list(value.shape), "datatype": datatype})
        yield (b", " if place else b"") + head[:-1] + b', "data": '
        yield from _text_of(name, value.reshape(-1))
        yield b"}"
    yield b"]"
