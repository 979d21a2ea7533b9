"""Bodies of HTTP requests and answers in JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.inputs.json_values import COLUMNS, ROWS, UNNAMED, is_named, json_array, rows_as_columns
from msplit.serving.ports import Port
from msplit.serving.server import messages, tensors
from msplit.serving.server.models import known_as
from msplit.serving.server.predict import Arrays
from msplit.serving.server.refusal import invalid

_SOURCE = "the request"


@dataclass(frozen=True)
class Body:
    """What a request for predictions brings.

    Attributes:
        signature: Name of the signature, "" for the default.
        rows: Whether it brings rows, and is to be answered in rows.
        values: What it brings by input, "" for the only one.
    """

    signature: str
    rows: bool
    values: Mapping[str, Any]


def _loaded(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise invalid(f"JSON Parse error: {problem or 'nested too deeply'}") from None
    if not isinstance(found, dict):
        raise invalid("the request is no JSON object")
    return found


def read(data: bytes) -> Body:
    """A request of TensorFlow Serving's.

    Raises:
        Refusal: It is none.
    """
    found = _loaded(data)
    signature = found.get("signature_name", "")
    if not isinstance(signature, str):
        raise invalid("'signature_name' key must be a string value.")
    if (ROWS in found) == (COLUMNS in found):
        both = (
            "Request has both 'instances' and 'inputs' keys" if ROWS in found else "Missing 'inputs' or 'instances' key"
        )
        raise invalid(both)
    if COLUMNS in found:
        columns = found[COLUMNS]
        return Body(signature, False, columns if is_named(columns) else {UNNAMED: columns})
    rows = found[ROWS]
    if not isinstance(rows, list) or not rows:
        raise invalid("'instances' must be a list of at least one")
    try:
        return Body(signature, True, rows_as_columns(rows))
    except LoadError as problem:
        raise invalid(problem.what) from None


def feeds(body: Body, ports: Mapping[str, Port]) -> Arrays:
    """A request's values as arrays of the types that the inputs have."""
    if UNNAMED in body.values and len(ports) != 1:
        raise invalid(f"the model has {len(ports)} inputs ({', '.join(ports)}): name them")
    found = {}
    for name, value in body.values.items():
        key = next(iter(ports)) if name == UNNAMED else known_as(name, ports)
        if key is None:
            raise invalid(f"the model has no input {name!r}; the inputs are: {', '.join(ports)}")
        dtype = ports[key].dtype
        try:
            found[key] = json_array(value, "string" if dtype == "object" else dtype, key, source=_SOURCE)
        except LoadError as problem:
            raise invalid(problem.what) from None
    return found


def answer(outputs: Arrays, *, rows: bool) -> dict[str, Any]:
    """Outputs as TensorFlow Serving writes them; what a single one is called is not said.

    Raises:
        Refusal: Rows were asked for, and outputs have different numbers of them.
    """
    values = {name: _plain(name, value) for name, value in outputs.items()}
    only = next(iter(values.values())) if len(values) == 1 else None
    if not rows:
        return {"outputs": values if only is None else only}
    sizes = {name: np.shape(value)[:1] for name, value in outputs.items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        said = ", ".join(f"{name} {size[0] if size else 'none'}" for name, size in sizes.items())
        raise invalid(
            f"outputs have no rows, or different numbers of them ({said}); ask with 'inputs' in place of 'instances'"
        )
    if only is not None:
        return {"predictions": only}
    return {"predictions": [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]}


def _plain(name: str, array: NDArray[Any]) -> Any:
    """An array as lists of what JSON has."""
    array = np.asarray(array)
    if array.dtype.kind in "OSU":
        as_is = name.endswith("_bytes")  # TensorFlow Serving's way to tell bytes from text
        flat = [_text(tensors.as_bytes(value), as_is) for value in array.ravel().tolist()]
        shaped = np.empty(len(flat), object)
        shaped[:] = flat
        return shaped.reshape(array.shape).tolist()
    if array.dtype.kind in "iub":
        return array.tolist()
    if array.dtype == np.float64:
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


def read_open(data: bytes) -> tuple[Any, Arrays]:
    """A request of the Open Inference Protocol: as a ModelInferRequest without inputs, and its inputs.

    Raises:
        Refusal: It is none.
    """
    found = _loaded(data)
    request = messages.ModelInferRequest()
    identifier, inputs = found.get("id", ""), found.get("inputs")
    if not isinstance(identifier, str) or not isinstance(inputs, list):
        raise invalid("'inputs' must be a list, and 'id' a string")
    request.id = _encodable(identifier)
    for output in _objects(found.get("outputs", []), "outputs"):
        request.outputs.add(name=_encodable(_string(output, "name")))
    parameters = found.get("parameters", {})
    for name, value in parameters.items() if isinstance(parameters, dict) else ():
        parameter = request.parameters[_encodable(name)]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            parameter.int64_param = value
        elif isinstance(value, str):
            parameter.string_param = _encodable(value)
    return request, {_string(one, "name"): _open_array(one) for one in _objects(inputs, "inputs")}


def _open_array(tensor: dict[str, Any]) -> NDArray[Any]:
    name, shape = _string(tensor, "name"), tensor.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise invalid(f"input {name} has no shape")
    dtype = tensors.open_dtype(_string(tensor, "datatype"), name).name
    try:
        array = json_array(tensor.get("data"), "string" if dtype == "object" else dtype, name, source=_SOURCE)
    except LoadError as problem:
        raise invalid(problem.what) from None
    return tensors.reshaped(array, shape, name)


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


def open_outputs(outputs: Arrays) -> list[dict[str, Any]]:
    """Outputs as the Open Inference Protocol writes them."""
    return [
        {
            "name": name,
            "shape": list(value.shape),
            "datatype": tensors.open_name("object" if value.dtype.kind in "OSU" else value.dtype.name),
            "data": _plain(name, value.reshape(-1)),
        }
        for name, value in outputs.items()
    ]
