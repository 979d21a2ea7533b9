"""Values of inputs in JSON, as TensorFlow Serving and saved_model_cli take it."""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.formats.tensors import numpy_dtype
from msplit.inputs.examples import encode

UNNAMED = ""
ROWS, COLUMNS = "instances", "inputs"
_EXAMPLES = "examples"
FIX = 'give NumPy\'s .npy or .npz, a TFRecord file, or JSON such as {"instances": [{"x": [1, 2]}]}'


class Infinite(float):
    """`Infinity` as it is written; a number that is too large for its type is another thing."""


def loads(text: str | bytes | bytearray) -> Any:
    """Read JSON.

    Raises:
        ValueError: It is none, or an object has a key twice, of which only one would be seen.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=Infinite)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"key {next(name for name in counts if counts[name] > 1)!r} is there twice")
    return found


def values_by_input(data: bytes, where: str) -> Mapping[str, Any]:
    """Values by input, "" for one that has no name, from rows, columns or examples."""
    try:
        message = loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"is no JSON: {error or 'nested too deeply'}", where=where, fix=FIX) from None
    if isinstance(message, dict):
        if _EXAMPLES in message and isinstance(message[_EXAMPLES], list):
            context, examples = message.get("context", {}), message[_EXAMPLES]
            if not all(isinstance(features, dict) for features in (context, *examples)):
                what = f"{_EXAMPLES!r} are no objects of features, or their 'context' is none"
                raise LoadError(what, where=where, fix='write {"examples": [{"feature": [1, 2]}]}')
            return {UNNAMED: [{**context, **example} for example in examples]}
        if COLUMNS in message and not message.keys() - {COLUMNS, "signature_name"}:
            return message[COLUMNS] if is_named(message[COLUMNS]) else {UNNAMED: message[COLUMNS]}
        if ROWS not in message or message.keys() - {ROWS, "signature_name"}:
            return message
        message = message[ROWS]
    if not isinstance(message, list):
        raise LoadError(f"{ROWS!r} is no list", where=where, fix=FIX)
    return rows_as_columns(message, where)


def is_named(value: Any) -> bool:
    """Whether it is an object of inputs, and not one that stands for bytes."""
    return isinstance(value, dict) and value.keys() != {"b64"}


def rows_as_columns(rows: list[Any], where: str | None = None) -> Mapping[str, Any]:
    """Values by input, "" for one that has no name, from a list of rows.

    Raises:
        LoadError: Rows have different inputs.
    """
    if not rows or not all(is_named(row) for row in rows):
        return {UNNAMED: rows}
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() != names:
            raise LoadError(
                f"instance {number} has other inputs than the first: {', '.join(sorted(row.keys() ^ names))}",
                where=where,
                fix="give every instance the same inputs",
            )
    return {name: [row[name] for row in rows] for name in names}


def json_array(value: Any, dtype: str, name: str, where: str | None = None, source: str = "the file") -> NDArray[Any]:
    """A value as an array of TensorFlow's type `dtype`.

    Raises:
        LoadError: It is none of that type, or has rows of different lengths.
    """
    uneven = LoadError(f"input {name!r} has rows of different lengths", where=where, fix="make them equal")
    try:
        # As objects: NumPy would make all numbers beside a string as long as the string.
        items = np.array(value, dtype=object)
    except ValueError:
        raise uneven from None
    flat = items.ravel().tolist()
    kinds = {float if kind is Infinite else kind for kind in set(map(type, flat))}
    if list in kinds:
        raise uneven
    if dtype == "string":
        strings = [_bytes_of(item, name, where, source) for item in flat]
        return np.array(strings, dtype=object).reshape(items.shape)
    kind = numpy_dtype(dtype)
    allowed = {bool} if kind.kind == "b" else {int} if kind.kind in "iu" else {int, float}
    if not kinds <= allowed:
        said = {str: "strings", bool: "true and false", float: "numbers with a fraction", int: "numbers"}
        found = next((said[one] for one in said if one in kinds - allowed), "no plain numbers")
        raise LoadError(
            f"input {name!r} is {dtype}, {source} has {found}",
            where=where,
            fix=f"write {'true or false' if kind.kind == 'b' else 'numbers'}",
        )
    larger = LoadError(f"input {name!r} is {dtype}, {source} has larger numbers", where=where, fix="mend them")
    limits = np.iinfo(kind) if kind.kind in "iu" and flat else None
    if limits is not None and (min(flat) < limits.min or max(flat) > limits.max):
        raise larger
    try:
        with np.errstate(over="ignore"):
            array: NDArray[Any] = items.astype(kind)
    except OverflowError:
        raise larger from None
    if limits is None and any(type(flat[place]) is not Infinite for place in np.flatnonzero(_is_infinite(array))):
        raise larger
    return array


def _is_infinite(values: NDArray[Any]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.isinf(values.astype(np.float32) if values.dtype.kind == "V" else values)
    return found


def _bytes_of(item: Any, name: str, where: str | None, source: str) -> bytes:
    """A string; ``{"b64": …}`` for bytes; an object of other names for the tf.Example of these features."""
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if isinstance(item, dict):
        try:
            if item.keys() == {"b64"}:
                return base64.b64decode(item["b64"], validate=True)
            return encode({key: _feature(values) for key, values in item.items()})
        except (binascii.Error, OverflowError, TypeError, ValueError) as error:
            raise LoadError(
                f"input {name!r}: {error}", where=where, fix='write {"b64": "…"} or {"feature": [1, 2]}'
            ) from None
    raise LoadError(
        f"input {name!r} is made of strings, {source} has {json.dumps(item)[:40]}",
        where=where,
        fix='write a string, {"b64": "…"} for bytes, or {"feature": [1, 2]} for a tf.Example',
    )


def _feature(values: Any) -> list[Any]:
    """The values of a feature, all of one type."""
    listed = values if isinstance(values, list) else [values]
    if all(isinstance(value, str) or (isinstance(value, dict) and value.keys() == {"b64"}) for value in listed):
        return [_bytes_of(value, "", None, "it") for value in listed]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in listed):
        raise ValueError(f"a feature is a list of strings or of numbers, not {json.dumps(values)[:40]}")
    if any(isinstance(value, float) for value in listed):
        return [float(value) for value in listed]
    if any(not -(1 << 63) <= value < 1 << 63 for value in listed):
        raise ValueError("a feature has numbers of more than 64 bits")
    return listed
