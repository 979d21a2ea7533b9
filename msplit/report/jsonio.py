"""Results as JSON: dataclasses, NumPy scalars and arrays, paths; with the schema's version in front."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from msplit.escape import json_document

SCHEMA_VERSION = 1

ENDPOINT = "name tensor dtype shape"
"""Keys of an input or output of a model."""


def plain(value: Any) -> Any:
    """A value made of dicts, lists, strings, numbers, booleans and None. Infinity and NaN, which JSON lacks, become None."""
    if hasattr(value, "to_dict"):  # a result that JSON has other keys of than its fields
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value


def picked(value: object, *keys: str) -> dict[str, Any]:
    """Attributes of a result by the keys that they have in JSON; `plain` makes the rest of it.

    Args:
        value: The result.
        keys: Words, in the order of the JSON: the key of an attribute of that name; ``key=name`` for one of another name, in which a dot
            leads to an attribute of the attribute. A "?" behind either writes null for what is empty.
    """
    found = {}
    for word in " ".join(keys).split():
        key, _, name = word.removesuffix("?").partition("=")
        item = attrgetter(name or key)(value)
        found[key] = item or None if word.endswith("?") else item
    return found


def dumps(command: str, payload: Mapping[str, Any]) -> str:
    """The JSON text of one command's result."""
    document = {"schema_version": SCHEMA_VERSION, "command": command, **plain(payload)}
    return json_document(json.dumps(document, indent=2, ensure_ascii=False))
