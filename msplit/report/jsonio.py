"""Results as JSON: dataclasses, NumPy scalars and arrays, paths; with the schema's version in front."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from msplit.escape import json_document

SCHEMA_VERSION = 1


def plain(value: Any) -> Any:
    """A value made of dicts, lists, strings, numbers, booleans and None. Infinity and NaN, which JSON lacks, become None."""
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


def dumps(command: str, payload: Mapping[str, Any]) -> str:
    """The JSON text of one command's result."""
    document = {"schema_version": SCHEMA_VERSION, "command": command, **plain(payload)}
    return json_document(json.dumps(document, indent=2, ensure_ascii=False))
