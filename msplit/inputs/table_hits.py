"""What share of the ids and strings that a model is fed is in the tables in which it looks them up.

A model whose every lookup misses reads one row over and over: outputs that agree then verify that row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import NDArray

from msplit.flatten.flat import FlatGraph
from msplit.inputs.examples import decode, features_of
from msplit.inputs.lookups import Lookup, Use, use_of
from msplit.opset.traits import PARSERS


@dataclass(frozen=True)
class Hits:
    """One input and one table.

    Attributes:
        input: The input; of a serialized example ``input.feature``.
        table: Name of the node that is or makes the table.
        kind: "keys" of a vocabulary, or "rows" of a table that is indexed.
        size: How many there are.
        values: How many values the input has.
        hits: How many of them are in the table.
        distinct: How many different entries they meet.
    """

    input: str
    table: str
    kind: str
    size: int
    values: int
    hits: int
    distinct: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def hits(flat: FlatGraph, feeds: Mapping[str, NDArray[Any]]) -> tuple[Hits, ...]:
    """How what a model is fed meets its tables, as far as its way there can be followed."""
    found: dict[tuple[str, str, str], Hits] = {}
    for tensor in flat.inputs:
        if tensor.name in feeds:
            use = use_of(flat, tensor.node, tensor.port)
            for name, values, its_use in _values(flat, tensor.name, feeds[tensor.name].reshape(-1).tolist(), use):
                for lookup in its_use.lookups:
                    one = _met(name, values, its_use, lookup)
                    found.setdefault((one.input, one.table, one.kind), one)
    return tuple(found.values())


def _values(flat: FlatGraph, name: str, values: list[Any], use: Use) -> Iterator[tuple[str, list[Any], Use]]:
    """An input, and the features in it where it is serialized examples."""
    yield name, values, use
    features = [
        feature for node in use.readers if flat.graph.ops[node] in PARSERS for feature in features_of(flat, node) or ()
    ]
    if not features:
        return
    try:
        parsed = [decode(bytes(value)) for value in values]
    except (ValueError, TypeError):
        return  # TensorFlow says what is wrong with them
    for feature in features:
        inside = [item for one in parsed for item in one.get(feature.name, ())]
        yield f"{name}.{feature.name}", inside, use_of(flat, feature.node, feature.port)


def _met(name: str, values: list[Any], use: Use, lookup: Lookup) -> Hits:
    if values and isinstance(values[0], str | bytes):
        values = [item for value in values for item in _words(value, use)]
    if lookup.keys is None:
        size, kind = lookup.rows or 0, "rows"
        numbers = [number + lookup.offset for number in map(_number, values) if number is not None]
        inside: list[Any] = [number for number in numbers if 0 <= number < size]
    else:
        size, kind = len(lookup.keys), "keys"
        text = lookup.keys.dtype.kind == "O"
        known = set(lookup.keys.tolist())
        shifted = [_text(value) if text else _shifted(value, lookup.offset) for value in values]
        inside = [value for value in shifted if value in known]
    return Hits(name, lookup.table, kind, size, len(values), len(inside), len(set(inside)))


def _words(value: str | bytes, use: Use) -> list[bytes]:
    data = value.encode() if isinstance(value, str) else value
    for op, change in (("StringLower", bytes.lower), ("StringUpper", bytes.upper), ("StringStrip", bytes.strip)):
        data = change(data) if op in use.ops else data
    return [data] if use.separator is None else data.split(use.separator or None)


def _number(value: Any) -> int | None:
    try:
        return int(float(value))
    except (ValueError, OverflowError, TypeError):
        return None


def _shifted(value: Any, offset: int) -> int | None:
    number = _number(value)
    return None if number is None else number + offset


def _text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
