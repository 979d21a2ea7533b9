"""Keys of the lookup tables that a model carries: from initializers, from vocabulary files in its assets, from its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import TensorValue
from msplit.core.memory import memoize
from msplit.errors import MsplitError
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats.endpoints import behind, split_tensor
from msplit.formats.files import open_regular
from msplit.formats.model import Model
from msplit.opset.traits import ops_with

MAX_FILE_BYTES = 1 << 28
"""A vocabulary file may be so large; of a larger one nothing is read."""

MAX_KEYS = 1 << 24
"""A constant may have so many keys: a damaged file may claim more than it holds."""

_LITERAL = ops_with("fills a table from constants")
_FILE = ops_with("fills a table from a file")
_PASSING = ops_with("hands on tables")
_WHOLE_LINE, _LINE_NUMBER = -2, -1

Keys = NDArray[Any]


def vocabularies(model: Model) -> Mapping[str, Keys]:
    """Keys by the name of the node that makes a table: integers, or bytes as objects. Tables whose keys are not known are left out."""
    return memoize(model, "vocabularies", (), lambda: _found(model))


def table_of(flat: FlatGraph, lookup: int) -> str | None:
    """Name of the node that makes the table of a lookup (or of an initializer), through ops that hand its handle on."""
    source = source_of(flat, lookup, 0)
    return None if source is None else flat.graph.names[source]


def _found(model: Model) -> dict[str, Keys]:
    graph = model.graph
    own = [graph.names[node] for node, op in enumerate(graph.ops) if op in (*_LITERAL, *_FILE)]
    targets = tuple(dict.fromkeys([*(name for name in model.init_ops if name in graph.index), *own]))
    found: dict[str, Keys] = {}
    if not targets:
        return found
    try:
        flat = flatten(replace(model, inputs=(), outputs=(), targets=targets, left_out=None))
    except MsplitError:
        return found  # a damaged initializer; TensorFlow will say so
    files = _assets(model)
    for node, op in enumerate(flat.graph.ops):
        if op not in (*_LITERAL, *_FILE):
            continue
        table = table_of(flat, node)
        keys = loaded(flat, source_of(flat, node, 1)) if op in _LITERAL else _of_file(flat, node, files)
        if table is not None and keys is not None and keys.size:
            found.setdefault(table, _typed(flat, table, keys.reshape(-1)))
    return found


def _typed(flat: FlatGraph, table: str, keys: Keys) -> Keys:
    """Keys of a file as numbers, where the table's are: without those that are no integers of 64 bits, which TensorFlow refuses."""
    kind = flat.graph.attrs[flat.graph.index[table]].get("key_dtype")
    if kind not in ("int32", "int64") or keys.dtype.kind != "O":
        return keys
    decimal = (int(key) for key in keys.tolist() if len(key) < 100 and key.strip().removeprefix(b"-").isdigit())
    return np.array([number for number in decimal if -(1 << 63) <= number < 1 << 63], np.int64)


def loaded(flat: FlatGraph, node: int | None) -> NDArray[Any] | None:
    """The value of a node that is a constant of at most `MAX_KEYS` elements, else None."""
    value = constant_of(flat, node)
    return None if value is None or math.prod(value.shape) > MAX_KEYS else np.asarray(value.load())


def constant_of(flat: FlatGraph, node: int | None) -> TensorValue | None:
    """The value of a node that is a constant, else None."""
    value = None if node is None or flat.graph.ops[node] != "Const" else flat.graph.attrs[node].get("value")
    return value if isinstance(value, TensorValue) else None


def source_of(flat: FlatGraph, node: int, slot: int, passing: Container[str] = _PASSING) -> int | None:
    """The node behind an input, through ops that hand a table's handle on, or what else they pass; None where there is no such input."""
    inputs = flat.graph.inputs(node)
    return behind(flat.graph, inputs[slot], passing)[0] if slot < len(inputs) else None


def _assets(model: Model) -> dict[str, Path]:
    """Files in the model's folder by the tensor that holds their name."""
    meta = model.meta
    if meta is None or not model.is_saved_model:
        return {}
    folder = model.path / "assets"
    return {
        split_tensor(asset.tensor_info.name)[0]: folder / asset.filename
        for asset in meta.asset_file_def
        if asset.filename and Path(asset.filename).name == asset.filename
    }


def _file_name(flat: FlatGraph, node: int) -> int | None:
    """The node that holds the name of the file: TensorFlow 2 keeps it in a variable, which the same run assigns."""
    graph = flat.graph
    source = source_of(flat, node, 1)
    if source is None or graph.ops[source] != "ReadVariableOp":
        return source
    variable = source_of(flat, source, 0)
    users = [] if variable is None else graph.successors(variable).tolist()
    return next((source_of(flat, user, 1) for user in users if graph.ops[user] == "AssignVariableOp"), None)


def _of_file(flat: FlatGraph, node: int, files: Mapping[str, Path]) -> Keys | None:
    """Keys of a vocabulary file: whole lines, a column of them, or their numbers."""
    source = _file_name(flat, node)
    if source is None:
        return None
    # The file: one of the model's assets, or the name that a constant holds.
    path = files.get(flat.graph.names[source])
    name = loaded(flat, source)
    if path is None and name is not None and name.size == 1 and name.dtype.kind == "O":
        path = Path(bytes(name.reshape(-1)[0]).decode(errors="surrogateescape"))
    if path is None:
        return None
    attrs = flat.graph.attrs[node]
    try:
        with open_regular(path) as file:
            lines = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError):
        return None
    if len(lines) > MAX_FILE_BYTES:
        return None
    # Its keys, by the attributes of the table's initializer.
    rows = lines.splitlines()
    size, offset = attrs.get("vocab_size", -1), attrs.get("offset", 0)
    if isinstance(size, int) and size > 0:
        rows = rows[:size]
    column = attrs.get("key_index", _WHOLE_LINE)
    if column == _LINE_NUMBER:
        return np.arange(len(rows)) + (offset if isinstance(offset, int) else 0)
    if isinstance(column, int) and column >= 0:
        delimiter = attrs.get("delimiter", "\t")
        if not isinstance(delimiter, str) or not delimiter:
            return None  # TensorFlow says so
        split = (row.split(delimiter.encode()) for row in rows)
        rows = [parts[column] for parts in split if column < len(parts)]
    return np.array(rows, dtype=object)
