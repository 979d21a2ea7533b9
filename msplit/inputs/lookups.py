"""Uses of an input's values: the tables that they index, vocabularies, and ops that parse them.

Keys of the lookup tables that a model carries: from initializers, from vocabulary files in its assets, from its checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.core.graph import TensorValue, memoize
from msplit.errors import MsplitError
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats.endpoints import behind, split_tensor
from msplit.formats.files import open_regular
from msplit.formats.model import Model
from msplit.opset.traits import ADD, GATHERS, PARSERS, PLACEHOLDERS, SELECT, ops_with, traits
from msplit.shapes import Shapes, infer
from msplit.shapes.registry import plain_shape

MAX_FILE_BYTES = 1 << 28
"""A vocabulary file may be so large; of a larger one nothing is read."""

MAX_KEYS = 1 << 24
"""A constant may have so many keys: a damaged file may claim more than it holds."""

_LITERAL = ops_with("fills a table from constants")
_FILE = ops_with("fills a table from a file")
_KEYS_PASS = ops_with("hands on tables")
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
    growing = [name for name, op in zip(graph.names, graph.ops, strict=True) if op in ops_with("rows by key")]
    found = _restored(model, growing) if growing else {}
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


def _restored(model: Model, names: list[str]) -> dict[str, Keys]:
    """Keys of tables that the checkpoint has, the first so many; of tables of rows, where a default stands for any other key, one more."""
    try:
        tables = formats.tables(model, names)
    except MsplitError:
        return {}  # who reads the checkpoint says so
    found, graph = {name: keys.reshape(-1)[:MAX_KEYS] for name, (keys, _) in tables.items() if keys.size}, model.graph
    for name, keys in found.items():
        if keys.dtype.kind == "i" and graph.attrs[graph.index[name]].get("value_shape"):
            unused, last = formats.unused_keys(graph, graph.index[name]), int(tables[name][0].max())
            others = [key for key in range(last + 1, last + 4) if key <= np.iinfo(keys.dtype).max and key not in unused]
            found[name] = np.append(keys, np.array(others[:1], keys.dtype))
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


def source_of(flat: FlatGraph, node: int, slot: int, passing: Container[str] = _KEYS_PASS) -> int | None:
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


_PASSING, _ANY_SLOT, _ALL_PORTS = ops_with("passes values"), ops_with("any slot"), ops_with("all ports")
_SCATTERED = 2
"""Slot of the values of a TensorArrayScatter."""

_MOST_VISITS = 64
"""Most visits to a node, each with more added on the way than before: a hostile graph has a way for each subset of its constants."""

_FINDS, _SPLITS = ops_with("finds"), ops_with("splits strings")
_RECORDS = PARSERS | ops_with("decodes")
_TO_TABLE = ops_with("hands on weights")
_TAKES_LENGTHS = ops_with("takes lengths")
_BY_COORDINATES = ops_with("gather nd")
_SCATTERS = ops_with("scatter nd")
_SUPPRESS = (ops_with("suppresses boxes") - {"NonMaxSuppressionWithOverlaps"}) | {"CombinedNonMaxSuppression"}
_ROWS_OF_TENSORS = GATHERS - ops_with("reads by handle")

DIVIDES = ops_with("integer division")
MAKES = ops_with("makes")
CALCULATES = (ops_with("arithmetic") & ops_with("wraps")) | ADD | ops_with("limit") | ops_with("linear")
MOVES = ops_with("identity") | ops_with("forwards") | ops_with("reshape") | ops_with("view") | ops_with("repeat")
PARTS = ops_with("parts") | SELECT


@dataclass(frozen=True, eq=False)
class InputLookup:
    """A table in which values of an input are looked up.

    Attributes:
        table: Name of the node that is or makes the table.
        offset: What is added to the values on the way.
        rows: How many rows they index; None for a vocabulary.
        keys: Keys of the vocabulary; None for rows.
        parts: Rows of each part of a table that lies in parts, by "div" or "mod".
        sizes: Sizes of the axes that coordinates are of, of which `rows` is the least.
        op: Op that looks up.
    """

    table: str
    offset: int
    rows: int | None = None
    keys: Keys | None = None
    parts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    op: str = ""

    def ends(self) -> list[int]:
        """Values that index the first and the last rows of parts, divided either way, and others beside them."""
        count, rows = len(self.parts), self.rows or 0
        sums = [sum(self.parts[:number]) for number in range(1, count)]
        found = [end for at in sums for end in (at, at - 1)] + [*range(1, count), *range(rows - count, rows - 1)]
        return [end - self.offset for end in found if end - self.offset >= 0]


@dataclass(frozen=True, eq=False)
class Use:
    """Uses of an input's values.

    Attributes:
        rows: Rows of the smallest table that they index, less the largest constant added on the way; None where they index none.
        unknown: Whether they index something whose size is not known.
        segments: Whether they are segment ids, which must not decrease.
        ops: Ops that they reach, strings too.
        lookups: Every table of known size, every vocabulary of known keys.
        separator: What separates words where strings are split into words before they are looked up; None where they are not.
        readers: Nodes that parse or decode strings.
    """

    rows: int | None = None
    unknown: bool = False
    segments: bool = False
    ops: frozenset[str] = frozenset()
    lookups: tuple[InputLookup, ...] = ()
    separator: bytes | None = None
    readers: tuple[int, ...] = ()


def use_of(flat: FlatGraph, node: int, port: int, *, pruned: bool = True) -> Use:
    """Follows a tensor, an output of a node, forward through ops that hand its values on; through those that pick some of them by a
    condition, as safe lookups do, only where `pruned` says so."""
    return memoize(flat, f"use of {node}:{port}", (pruned,), lambda: _use_of(flat, node, port, pruned))


def _use_of(flat: FlatGraph, node: int, port: int, pruned: bool) -> Use:
    graph = flat.graph
    lookups: list[InputLookup] = []
    readers: dict[int, None] = {}
    unknown = segments = False
    separator: bytes | None = None
    ops: set[str] = set()
    seen: dict[int, int] = {node: 0}
    visits: Counter[int] = Counter()
    waiting = [(node, port, 0)]
    while waiting:
        source, at, offset = waiting.pop()
        # Each reader says what it does with the values: look rows up, number segments, parse, split or store them.
        for user, slot in graph.uses(source, at):
            op = graph.ops[user]
            ops.add(op)
            found = looked_up(flat, user, slot, offset)
            if found is not None:
                lookups.append(found)
            elif traits(op).ids == slot and op not in _SCATTERS:
                unknown = True
            if traits(op).segments == slot:
                segments = True
            if slot == 0 and op in _RECORDS:
                readers[user] = None
            if op in _SPLITS:
                given = constant(flat, user, 1)
                separator = bytes(given.reshape(-1)[0]) if given is not None and given.size else b""
            if op.startswith("TensorArrayScatter") and slot == _SCATTERED:
                waiting += [(reader, 0, offset) for reader in _reads_of_array(flat, user) if reader not in seen]
            # Where it hands the values on, its outputs are followed: once for each larger offset, within a limit.
            further = handed_on(flat, user, slot, offset)
            if not pruned and op in _ROWS_OF_TENSORS and _picks(flat, user):
                continue
            if further is None or seen.get(user, -1) >= further or visits[user] == _MOST_VISITS:
                continue
            seen[user] = further
            visits[user] += 1
            waiting += [(user, p, further) for p in ports(flat, user)]
    rows = [found.rows - found.offset for found in lookups if found.rows is not None]
    least = max(1, min(rows)) if rows else None
    return Use(least, unknown, segments, frozenset(ops), tuple(lookups), separator, tuple(readers))


def _reads_of_array(flat: FlatGraph, scatter: int) -> list[int]:
    """Nodes that read the elements of the tensor array that a node fills, as map_fn of TensorFlow 1 does in its loop."""
    array = _source(flat, scatter, 0)
    if array is None:
        return []
    graph = flat.graph
    found, waiting, seen = [], [array], {array}
    while waiting:
        for e in graph.out_edges(waiting.pop()).tolist():
            user, slot = int(graph.edges.dst[e]), int(graph.edges.slot[e])
            if graph.ops[user].startswith("TensorArrayRead") and slot == 0:
                found.append(user)
            elif graph.ops[user] in ("Enter", "Identity") and user not in seen:
                seen.add(user)
                waiting.append(user)
    return found


def outside(flat: FlatGraph, node: int, port: int) -> tuple[int, ...]:
    """Values outside of every table that a tensor's values may have all the same: safe lookups prune -1, segments drop it, and of a
    one-hot nothing is hot."""
    use = use_of(flat, node, port)
    ops = {one.op for one in use.lookups}
    if ops and use.rows is not None and not use.unknown and all(traits(op).bound is not None for op in ops):
        return (-1, use.rows, use.rows + 2) if ops <= MAKES else (-1,)
    before = use_of(flat, node, port, pruned=False)
    safe = "GreaterEqual" in before.ops and not (before.lookups or before.unknown or before.segments)
    return (-1,) if safe and use.rows is not None else ()


def _read_by(flat: FlatGraph, node: int, port: int, passing: Container[str]) -> list[tuple[int, int]]:
    """Who reads a tensor at which slot, behind ops that move it and these, which hand on all that they are given. An output counts as
    a reader that is the node itself."""
    waiting, seen, found = [(node, port)], {(node, port)}, list[tuple[int, int]]()
    while waiting:
        for user, slot in flat.graph.uses(*waiting.pop()):
            op = flat.graph.ops[user]
            if op in passing or (op in MOVES and slot == traits(op).values_in):
                further = {(user, out) for out in ports(flat, user)} - seen
                seen |= further
                waiting += further
            else:
                found.append((user, slot))
    return found + [(end.node, -1) for end in flat.outputs if (end.node, end.port) in seen]


def wraps_to_32_bits(flat: FlatGraph, node: int, port: int) -> bool:
    """Tell whether nothing is done with integers of 64 bits but to move them, and to add to them, before they are cast to int32."""
    readers = _read_by(flat, node, port, ADD)
    graph = flat.graph
    return bool(readers) and all(
        graph.ops[user] == "Cast" and graph.attrs[user].get("DstT") == "int32" and slot == 0 for user, slot in readers
    )


def overlap_thresholds(flat: FlatGraph, node: int, port: int) -> tuple[float, ...]:
    """Constant thresholds of how far boxes may overlap, where a tensor is the boxes of a non-maximum suppression."""
    found: dict[float, None] = {}
    for user in [
        user for user, slot in _read_by(flat, node, port, ()) if flat.graph.ops[user] in _SUPPRESS and not slot
    ]:
        inputs = len(flat.graph.inputs(user))
        given = constant(flat, user, 4 if flat.graph.ops[user].startswith("Combined") else 3) if inputs > 3 else None
        least = flat.graph.attrs[user].get("iou_threshold", 0.5) if inputs == 3 else given
        found |= {} if least is None else dict.fromkeys(np.ravel(least).astype(float).tolist())
    return tuple(found)


def _picks(flat: FlatGraph, gather: int) -> bool:
    """Tell whether a gather takes the rows for which a condition holds."""
    node: int | None = gather
    for slot in (1, 0):
        node = None if node is None else _source(flat, node, slot)
        if node is not None and flat.graph.ops[node] == "Where":
            return True
    return False


def _partitioned(flat: FlatGraph, node: int, offset: int) -> InputLookup | None:
    """The table whose parts are read by what a division of ids leads to, where their sizes are known."""
    graph = flat.graph
    waiting, seen = [node], {node}
    while waiting and len(seen) < _MOST_VISITS:
        for user in graph.successors(waiting.pop()).tolist():
            if graph.ops[user] == "DynamicPartition" and graph.inputs(user)[0][0] in seen:
                read = ([looked_up(flat, *one, 0) for one in graph.uses(user, port)] for port in ports(flat, user))
                found = [next(filter(None, tables), None) for tables in read]
                parts = tuple(one.rows for one in found if one is not None and one.rows is not None)
                if found and found[0] is not None and len(parts) == len(found):
                    return InputLookup(found[0].table, offset, sum(parts), parts=parts, op="DynamicPartition")
            elif user not in seen and graph.ops[user] in CALCULATES | DIVIDES | PARTS:
                seen.add(user)
                waiting.append(user)
    return None


def looked_up(flat: FlatGraph, node: int, slot: int, offset: int) -> InputLookup | None:
    """The table that a node looks up in what comes in at a slot, where it does and as much is known."""
    op = flat.graph.ops[node]
    row = traits(op)
    if row.ids == slot and op in _SCATTERS | _BY_COORDINATES:
        sizes = _axes(flat, node, slot)
        held = node if row.table is None else _source(flat, node, row.table)
        if held is None or not sizes:
            return None
        return InputLookup(flat.graph.names[held], offset, min(sizes), sizes=sizes, op=op)
    if row.ids == slot and row.table is not None:
        size, table = _rows(flat, node, row.table), _source(flat, node, row.table)
        return None if size is None or table is None else InputLookup(flat.graph.names[table], offset, rows=size, op=op)
    if op in DIVIDES and slot == 0:
        return _partitioned(flat, node, offset)
    if row.ids == slot and row.bound is not None:
        bound = constant(flat, node, row.bound)
        return (
            None
            if bound is None
            else InputLookup(flat.graph.names[node], offset, rows=int(bound.max(initial=1)), op=op)
        )
    if op in _FINDS and slot == 1:
        name = table_of(flat, node)
        keys = vocabularies(flat.model).get(name or "")
        return None if name is None or keys is None else InputLookup(name, offset, keys=keys)
    if op == "Equal" and flat.graph.attrs[node].get("T") == "string":
        words = constant(flat, node, 1 - slot)  # one alone is what padding is told by, or a missing value
        return (
            InputLookup(flat.graph.names[node], 0, keys=words.reshape(-1))
            if words is not None and words.size > 1
            else None
        )
    return None


def handed_on(flat: FlatGraph, node: int, slot: int, offset: int) -> int | None:
    """The largest constant added so far if the node hands its input on, else None."""
    op = flat.graph.ops[node]
    if op in ADD:
        added = constant(flat, node, 1 - slot)
        return None if added is None or added.dtype.kind not in "iu" else offset + max(0, int(added.max(initial=0)))
    if op in _ROWS_OF_TENSORS:
        return offset if slot == 0 else None
    if op not in _PASSING:
        return None
    if op in _ANY_SLOT:
        return offset
    if op in SELECT:
        return offset if slot else None
    return offset if slot == traits(op).values_in else None


def ports(flat: FlatGraph, node: int) -> range:
    """Outputs that hold the values that a node hands on."""
    op = flat.graph.ops[node]
    if op in _ALL_PORTS:
        used = flat.graph.edges.port[flat.graph.out_edges(node)]
        return range(int(used.max(initial=0)) + 1)
    first = traits(op).values_out
    return range(first, first + 1)


def _source(flat: FlatGraph, node: int, slot: int) -> int | None:
    """The node behind an input, through ops that only hand a tensor or a handle on."""
    return source_of(flat, node, slot, _TO_TABLE)


def _rows(flat: FlatGraph, gather: int, slot: int) -> int | None:
    """Size of the axis that a gather indexes, None where the table's shape is not known."""
    table = _source(flat, gather, slot)
    if table is None:
        return None
    if flat.graph.ops[gather] in _TAKES_LENGTHS:
        axes = dict(enumerate(_inferred(flat)[0].shape(*flat.graph.inputs(gather)[slot]) or ()))
        longest = axes.get(int(flat.graph.attrs[gather].get("seq_dim", 0)))
        return None if longest is None else longest + 1
    shape = known_shape(flat, *flat.graph.inputs(gather)[slot])
    if not shape:
        return None
    axis = constant(flat, gather, 2) if flat.graph.ops[gather] == "GatherV2" else None
    place = int(axis.reshape(-1)[0]) if axis is not None and axis.size == 1 else 0
    return shape[place] if -len(shape) <= place < len(shape) else None


def _depth(flat: FlatGraph, node: int, slot: int) -> int | None:
    """How many axes coordinates are of; None where that is not known."""
    shape = _inferred(flat)[0].shape(*flat.graph.inputs(node)[slot])
    if shape is None:
        return None
    if flat.graph.ops[node] == "SparseToDense" and len(shape) < 2:  # of a vector, or one number
        return 1
    return shape[-1] if shape and shape[-1] else None


def _axes(flat: FlatGraph, node: int, slot: int) -> tuple[int, ...]:
    """Sizes of the axes that coordinates are of; nothing where they are not known."""
    # What a scatter gives has the shape that it scatters into, unless it is a variable.
    given = _inferred(flat)[0].shape(node, 0) if flat.graph.ops[node] in _SCATTERS else None
    sizes = (given or known_shape(flat, *flat.graph.inputs(node)[0]) or ())[: _depth(flat, node, slot)]
    known = tuple(size for size in sizes if size)
    return known if len(known) == len(sizes) else ()


def known_shape(flat: FlatGraph, node: int, port: int) -> tuple[int | None, ...] | None:
    """The shape of a constant, a variable, or of what is computed of these; None where it is not known or inputs have a say in it."""
    graph = flat.graph
    source, _ = behind(graph, (node, port), _TO_TABLE)
    attrs = graph.attrs[source]
    value = attrs.get("value")
    shape = value.shape if isinstance(value, TensorValue) else plain_shape(attrs.get("shape"))
    if shape is not None and graph.ops[source] not in PLACEHOLDERS:
        return shape
    shapes, fed = _inferred(flat)
    return None if fed[node] else shapes.shape(node, port)


def _inferred(flat: FlatGraph) -> tuple[Shapes, Any]:
    """Shapes of all tensors, and which nodes inputs have a say in."""
    return memoize(flat, "shapes", (), lambda: (infer(flat), flat.graph.descendants(end.node for end in flat.inputs)))


def constant(flat: FlatGraph, node: int, slot: int) -> NDArray[Any] | None:
    """The value of an input of a node that is a constant of at most `MAX_KEYS` elements, else None."""
    return loaded(flat, _source(flat, node, slot))


def is_constant_array(flat: FlatGraph, node: int, slot: int) -> bool:
    """True if an input of a node is a constant that has dimensions."""
    value = constant_of(flat, _source(flat, node, slot))
    return value is not None and value.shape != ()
