"""Values for one input, from what the graph does with it.

Inputs that are one number: what keeps dropout, whether this is training, how fast to learn.

TensorFlow 1 programs leave their rank open. One element for each of a batch would broadcast against the wrong axis, or not at all.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.tensors import numpy_dtype
from msplit.inputs import lookups
from msplit.inputs.examples import Feature, features_of, make_examples
from msplit.inputs.sparse_ragged import InputSpec
from msplit.inputs.special import (
    COUNTS,
    LARGE_INTEGERS,
    RANDOM,
    SMALL,
    InputKind,
    InputKindName,
    ValueLimits,
    chosen,
    limits,
    nested_boxes,
    numbers,
    takes_nan,
    with_nan,
)
from msplit.opset.traits import PARSERS, ops_with, traits
from msplit.shapes.registry import plain_shape

_UNARY, _BINARY, _LOOKS = ops_with("keeps one value"), ops_with("keeps two values"), ops_with("asks for shapes")
_KEPT = re.compile(r"keep(ing)?_?(prob|rate)", re.IGNORECASE)
_DROPPED = re.compile(r"drop(out|ped)?(_?(rate|prob))?(_\d+)?$|(^|[/_])rate(_\d+)?$", re.IGNORECASE)
_LEARNS = re.compile(r"learn(ing)?_?rate|(^|[/_])lr(_\d+)?$", re.IGNORECASE)
_TRAINS = re.compile(r"train|learning_phase|(^|[/_])phase(_\d+)?$", re.IGNORECASE)
_RATE = 0.001


def scalars(flat: FlatGraph, unknown: Iterable[tuple[str, int, int]], known: Iterable[int]) -> frozenset[str]:
    """Inputs of unknown rank, each (name, node, port), that are scalars; `known` are the nodes of inputs that have dimensions."""
    unknown = list(unknown)
    if not unknown:
        return frozenset()
    none = np.zeros(len(flat), np.bool_)
    data = [node for _, node, port in unknown if _judge(flat, node, port, none) is False]
    reached = flat.graph.descendants([*known, *data])
    judged = {name: _judge(flat, node, port, reached) for name, node, port in unknown}
    return frozenset(name for name, one in judged.items() if one or (one is None and setting(name) is not None))


def setting(name: str, dtype: str = "float32") -> NDArray[Any] | None:
    """The value that inference gives a scalar of this name: keep everything, drop nothing, do not train; None for other names."""
    if dtype == "bool":
        return np.asarray(False) if _TRAINS.search(name) else None
    for pattern, value in ((_KEPT, 1.0), (_LEARNS, _RATE), (_DROPPED, 0.0)):
        if pattern.search(name):
            return np.asarray(value)
    return np.asarray(0.0) if _TRAINS.search(name) else None


def _judge(flat: FlatGraph, node: int, port: int, data: NDArray[np.bool_]) -> bool | None:
    """True for what scales, decides or bounds; False for what is worked on; None where neither can be told."""
    graph = flat.graph
    scalar: bool | None = True if graph.attrs[node].get("dtype") == "bool" else None
    seen = {node}
    waiting = [(node, port)]
    while waiting:
        source, at = waiting.pop()
        for user, slot in graph.uses(source, at):
            op = graph.ops[user]
            if slot in traits(op).scalars or (slot and "Apply" in op):
                scalar = True
                continue
            if op in _BINARY:
                if data[graph.inputs(user)[1 - slot][0]]:
                    scalar = True
                    continue
                if lookups.is_constant_array(flat, user, 1 - slot):
                    return False
            elif op not in _UNARY:
                if op in _LOOKS or op == "Switch":  # the pivots of a cond switch the predicate itself
                    continue
                return False
            if user not in seen:
                seen.add(user)
                waiting.append((user, 0))
    return scalar


_SMALL = 2
"""Integers that index nothing we know of are below this: right for masks, labels and kinds."""

_MOST_BESIDE = 2.0**14
"""Numbers that go further: see `LARGE`."""

_TOKENS = 1000
_ODD = (b"", b"no such word", b"\xff\xc3(", b"9" * 300)
"""Strings that no table has: the empty one, one of bytes that are no UTF-8, a long one."""
_WORDS = 4
"""Words of a string that is split before its words are looked up."""

_IMAGES, _INTO_LOOPS = ops_with("decodes images"), ops_with("enters loops")
_NEEDS_FILE = ops_with("needs a file")
_IMAGE_SIZE = (48, 64)
_BASE64 = "DecodeBase64"
_NAMES_FILE = "ReadFile"


def made_up(
    flat: FlatGraph, spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator, kind: InputKind = RANDOM
) -> NDArray[Any]:
    """Values of the type of an input, in a shape, of a kind (see `msplit.inputs.special`).

    Raises:
        LoadError: They can not be made up.
    """
    use = lookups.use_of(flat, spec.node, spec.port)
    if spec.dtype == "string":
        return _strings(flat, spec.name, shape, use, rng, kind)
    if spec.dtype in ("resource", "variant"):
        raise LoadError(
            f"input {spec.name!r} is a {spec.dtype}, which has no value outside of TensorFlow",
            where=str(flat.model.source),
            fix="choose inputs that are tensors with --part inputs=",
        )
    dtype = _numeric(flat, spec)
    if not shape and (value := setting(spec.name, spec.dtype)) is not None:
        return value.astype(dtype)
    found = limits(flat, spec.node, spec.port, dtype) if shape and dtype.kind in "iuf" else ValueLimits(followed=False)
    if use.rows is None and not use.unknown and not use.segments and dtype.kind in "iu":
        use = replace(use, rows=found.rows)
    drawn = _numbers(dtype, shape, use, rng)
    if kind is RANDOM or not shape:
        return drawn
    if kind.name is InputKindName.NAN:
        takes, products = takes_nan(flat, spec.node, spec.port)
        takes = takes and dtype.kind == "f" and not _as_ids(dtype, use)
        return with_nan(drawn, rng, alone=products) if takes else drawn
    if dtype.kind in "fcV" and not _as_ids(dtype, use):
        made = numbers(drawn.astype(np.complex128 if dtype.kind == "c" else np.float64), kind, spec.name).astype(dtype)
        if kind.name is not InputKindName.EDGES:
            return made
        return nested_boxes(
            _beside(made, found, kind, rng), lookups.overlap_thresholds(flat, spec.node, spec.port), kind
        )
    special, first, last = _special(flat, spec, dtype, use, found)
    pool = special.astype(dtype)
    if found.marks and kind.name is InputKindName.EDGES:  # for so many the rows that hold nothing else are too few
        drawn = np.where(rng.random(shape) < 0.5, rng.choice(pool, shape), drawn)
    made = chosen(drawn, pool, first, last, kind, spec.name)
    if use.segments:
        return np.sort(made, axis=None).reshape(shape)
    made = _last_of_each(made, use)
    if kind.name is InputKindName.EDGES and dtype == np.int64 and lookups.wraps_to_32_bits(flat, spec.node, spec.port):
        return made + (rng.random(shape) < 0.25) * np.int64(1 << 32)
    return made


def _last_of_each(made: NDArray[Any], use: lookups.Use) -> NDArray[Any]:
    """Coordinates, of which those that are the last of the shortest axis are the last of their own."""
    sizes = {one.sizes for one in use.lookups if one.sizes}
    for each in sizes if len(sizes) == 1 and len(sizes) == len({one.rows for one in use.lookups}) else ():
        if made.shape[-1] == len(each) and use.rows == min(each):
            return np.where(made == min(each) - 1, np.array(each, made.dtype) - 1, made)
    return made


def _beside(made: NDArray[Any], found: ValueLimits, kind: InputKind, rng: np.random.Generator) -> NDArray[Any]:
    """Numbers, in the place of half of which there are those at which what the graph does changes, and the next ones below and above, by
    turns; of all, where it does nothing else with them."""
    most = 0 if made.dtype.kind != "f" else np.finfo(made.dtype).max if found.followed else _MOST_BESIDE
    at = np.array([mark for mark in found.marks if abs(mark) < most], made.dtype)
    if not at.size or not made.size:
        return made
    step = np.where(at, np.spacing(np.abs(at)), at.dtype.type(SMALL[-1]))
    turn = np.arange(made.size).reshape(made.shape) + kind.first * (made.size // len(made))
    pool = np.concatenate([at, at - step, at + step])
    # Rows that are zeros but for their last stay: one value alone has to be seen.
    rows = made.reshape(len(made), -1)
    kept = (~rows[:, :-1].any(1) & (rows.shape[1] > 1)).reshape(-1, *(1,) * (made.ndim - 1))
    return np.where((found.followed | (rng.random(made.shape) < 0.5)) & ~kept, pool[turn % len(pool)], made)


def _special(
    flat: FlatGraph, spec: InputSpec, dtype: np.dtype[Any], use: lookups.Use, found: ValueLimits
) -> tuple[NDArray[Any], int, int]:
    """Special values of ids, keys, masks and other integers; the first of all, and the last."""
    if dtype == np.bool_:
        return np.array([0, 1]), 0, 1
    keys = _keys(use)
    if keys is not None and (known := _as_numbers(keys, dtype, use.rows)).size:
        return known[[-1, 0]], known[0], known[-1]
    if not use.segments and (all_of := _where_followed(dtype, use, found)):
        return all_of
    last = 0 if use.rows is None and use.unknown else min(use.rows or _SMALL, _most(dtype)) - 1
    ends = [end for one in use.lookups for end in one.ends() if end <= last]
    beyond = lookups.outside(flat, spec.node, spec.port) if dtype.kind != "u" else ()
    return np.array(list(dict.fromkeys([*beyond, last, 0, *ends]))), 0, last


def _where_followed(dtype: np.dtype[Any], use: lookups.Use, found: ValueLimits) -> tuple[NDArray[Any], int, int] | None:
    """Special values of integers, the first and the last as usual, where all is known that becomes of them; else None."""
    beside = [math.floor(mark) + step for mark in found.marks for step in (0, -1, 1)]
    least, most = max(found.least, -_most(dtype) - 1 if dtype.kind == "i" else 0), min(found.most, _most(dtype))
    some = (*(COUNTS if use.rows is None else ()), *LARGE_INTEGERS, *beside)
    pool = np.array(list(dict.fromkeys(one for one in some if least <= one <= most)))
    usual = pool[(pool >= 0) & (pool < (use.rows or math.inf))]
    return (pool, usual.min(), usual.max()) if found.followed and dtype.kind in "iu" and usual.size else None


def _numeric(flat: FlatGraph, spec: InputSpec) -> np.dtype[Any]:
    try:
        return numpy_dtype(spec.dtype)
    except (TypeError, ValueError) as error:  # a damaged file may name anything
        raise LoadError(
            f"the type of {spec.name!r} is {spec.dtype!r}, which no value has",
            where=str(flat.model.source),
            fix="export the model again, or choose other inputs with --part inputs=",
        ) from error


def _numbers(kind: np.dtype[Any], shape: tuple[int, ...], use: lookups.Use, rng: np.random.Generator) -> NDArray[Any]:
    if kind == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    keys = _keys(use)
    if keys is not None and kind.kind in "iuf":
        numbers = _as_numbers(keys, kind, use.rows)
        if numbers.size:
            return np.asarray(rng.choice(numbers, shape)).astype(kind)
    if np.issubdtype(kind, np.integer) or _as_ids(kind, use):
        high = min(use.rows or _SMALL, _most(kind))
        integers = rng.integers(0, 1 if use.rows is None and use.unknown else high, shape)
        return (np.sort(integers, axis=None).reshape(shape) if use.segments else integers).astype(kind)
    drawn: NDArray[Any] = rng.standard_normal(shape)
    if kind.kind == "c":
        drawn = drawn + 1j * rng.standard_normal(shape)
    return np.asarray(drawn).astype(kind)


def _as_ids(dtype: np.dtype[Any], use: lookups.Use) -> bool:
    """Tell whether floating-point numbers are ids or keys."""
    keys = any(lookup.keys is not None for lookup in use.lookups)
    return (use.rows is not None or use.unknown or use.segments or keys) and dtype.kind != "c"


def _most(kind: np.dtype[Any]) -> int:
    return int(np.iinfo(kind).max) if np.issubdtype(kind, np.integer) else 1 << 53


def _keys(use: lookups.Use) -> lookups.Keys | None:
    """Keys that are in every vocabulary in which the values are looked up; those of the first where no key is in all."""
    found = [
        lookup.keys - lookup.offset if lookup.offset else lookup.keys
        for lookup in use.lookups
        if lookup.keys is not None
    ]
    if not found:
        return None
    shared = found[0]
    for other in found[1:]:
        if other.dtype.kind == shared.dtype.kind and (both := np.intersect1d(shared, other)).size:
            shared = both
    return shared


def _as_numbers(keys: lookups.Keys, kind: np.dtype[Any], rows: int | None) -> NDArray[Any]:
    """Keys as numbers of a type; of those that are text, the decimal ones. None is outside of the rows that they index, too."""
    if keys.dtype.kind == "O":
        keys = np.array(
            [int(key) for key in keys.tolist() if len(key) < 19 and key.removeprefix(b"-").isdigit()], np.int64
        )
    if keys.dtype.kind in "iu":
        keys = keys[(keys <= _most(kind)) & (keys >= (np.iinfo(kind).min if kind.kind in "iu" else -_most(kind)))]
        keys = keys if rows is None else keys[(keys >= 0) & (keys < rows)]
    return keys


def _strings(
    flat: FlatGraph, name: str, shape: tuple[int, ...], use: lookups.Use, rng: np.random.Generator, kind: InputKind
) -> NDArray[Any]:
    count = int(np.prod(shape, dtype=np.int64))
    read = _read(flat, name, count, use, rng, kind)
    if read is None:
        ops = use.ops | _ops_in_functions(flat, use)
        for op in sorted(ops & (_NEEDS_FILE | {_BASE64})):
            raise _needs_file(flat, name, op)
        keys = _keys(use)
        if keys is None and "StringToNumber" in ops:
            read = [str(number).encode() for number in rng.integers(0, use.rows or _TOKENS, count).tolist()]
        else:
            known = (
                [*keys] if keys is not None and keys.dtype.kind == "O" else [b"token_%d" % n for n in range(_TOKENS)]
            )
            words, last = 1 if use.separator is None else _WORDS, len(known) - 1
            odd = [*range(len(known), len(known) + len(_ODD)), last, 0]
            picked = chosen(rng.integers(0, len(known), (count, words)), np.array(odd), 0, last, kind, name)
            known += _ODD
            read = [(use.separator or b" ").join(known[word] for word in row) for row in picked.tolist()]
    return np.array(read, dtype=object).reshape(shape)


def _needs_file(flat: FlatGraph, name: str, op: str) -> LoadError:
    return LoadError(
        f"input {name!r} is read by {op}: its strings can not be made up",
        where=str(flat.model.source),
        fix=f'give real ones: --input {name}=FILE, a TFRecord file, JSON with {{"b64": …}}, .npz or .npy',
    )


def _read(
    flat: FlatGraph, name: str, count: int, use: lookups.Use, rng: np.random.Generator, kind: InputKind
) -> list[bytes] | None:
    """Strings for the ops that parse or decode them; None where none does.

    Raises:
        LoadError: What they want is not known.
    """
    # Records of examples: made-up values for each feature that a parser asks for.
    parsers = [node for node in use.readers if flat.graph.ops[node] in PARSERS]
    if parsers:
        features: list[Feature] = []
        for node in parsers:
            found = features_of(flat, node)
            if found is None:
                raise _needs_file(flat, name, flat.graph.ops[node])
            features += found

        def values(feature: Feature, shape: tuple[int, ...]) -> NDArray[Any]:
            inner = InputSpec(f"{name}.{feature.name}", feature.dtype, feature.shape, feature.node, feature.port)
            return made_up(flat, inner, shape, np.random.default_rng([seed, zlib.crc32(inner.name.encode())]), kind)

        seed = int(rng.integers(1 << 31))
        return list(make_examples(features, count, values))
    # Ops that decode a string by themselves: the first of them decides.
    for node in use.readers:
        op = flat.graph.ops[node]
        if op in _IMAGES:
            return [_png(rng, flat.graph.attrs[node].get("channels")) for _ in range(count)]
        if op == "DecodeCSV":
            return [_csv(flat, node, rng) for _ in range(count)]
        if op == "DecodeRaw":
            size = _raw_bytes(flat, node)
            if size is None:
                raise _needs_file(flat, name, op)
            dtype = _numeric(flat, InputSpec(name, str(flat.graph.attrs[node].get("out_type")), None, node, 0))
            return [_of_raw(dtype, size, rng).tobytes() for _ in range(count)]
    # Images that are decoded in a loop or a function, perhaps from Base64.
    inside = _ops_in_functions(flat, use)
    if _NAMES_FILE in inside:
        return None
    in_text = _BASE64 in use.ops | inside
    if (in_text or use.ops & _INTO_LOOPS) and (channels := _channels(flat, every=in_text and not inside)) is not None:
        images = [_png(rng, channels) for _ in range(count)]
        return [base64.urlsafe_b64encode(image) for image in images] if in_text else images
    return None


def _ops_in_functions(flat: FlatGraph, use: lookups.Use) -> set[str]:
    """Ops that may read an input that goes into functions, such as the body of a map_fn over encoded images."""
    functions = flat.graph.functions.values() if use.ops & _INTO_LOOPS else ()
    return {op for function in functions for op in function.body.ops}


def _channels(flat: FlatGraph, *, every: bool) -> int | None:
    """Channels of the images that a function decodes, or the graph itself, too (`every`); None where none does."""
    graphs = [function.body for function in flat.graph.functions.values()]
    for graph in [*graphs, *([flat.graph] if every else [])]:
        for node, op in enumerate(graph.ops):
            if op in _IMAGES:
                return int(graph.attrs[node].get("channels") or 0)
    return None


def _of_raw(kind: np.dtype[Any], size: int, rng: np.random.Generator) -> NDArray[Any]:
    """Numbers as files have them: bytes of every value, pixels or samples."""
    if kind.kind in "iu":
        return rng.integers(0, min(256, _most(kind) + 1), size).astype(kind)
    return _numbers(kind, (size,), lookups.Use(), rng)


def _raw_bytes(flat: FlatGraph, node: int) -> int | None:
    """Count of numbers that are reshaped to what follows a DecodeRaw, where that is constant; per string where the first size is open."""
    graph = flat.graph
    for e in graph.out_edges(node).tolist():
        user = int(graph.edges.dst[e])
        while graph.ops[user] in ("Cast", "Identity") and len(graph.out_edges(user)):
            user = int(graph.edges.dst[graph.out_edges(user)[0]])
        if graph.ops[user] == "Reshape" and (wanted := lookups.constant(flat, user, 1)) is not None:
            sizes = wanted.reshape(-1).tolist()
            return int(np.prod([size for size in sizes if size >= 0], dtype=np.int64))
    hint = graph.attrs[node].get("_output_shapes")
    shape = plain_shape(hint[0]) if isinstance(hint, tuple) and hint else None
    return shape[-1] if shape else None


def _csv(flat: FlatGraph, node: int, rng: np.random.Generator) -> bytes:
    """A line of values that name the types of the columns, those that are lookup keys from their vocabularies."""
    attrs = flat.graph.attrs[node]
    kinds = attrs.get("OUT_TYPE") or ()
    cells = []
    for port, kind in enumerate(kinds):
        inner = InputSpec(f"{flat.graph.names[node]}:{port}", str(kind), (), node, port)
        value = made_up(flat, inner, (), rng)
        cells.append(value.item().decode() if kind == "string" else str(value.item()))
    return str(attrs.get("field_delim", ",")).join(cells).encode()


def _png(rng: np.random.Generator, channels: Any) -> bytes:
    """A small image of noise, without loss: the decoder of every format reads PNG, too."""
    colors = channels if channels in (1, 3, 4) else 3
    rows = rng.integers(0, 256, (_IMAGE_SIZE[0], _IMAGE_SIZE[1] * colors)).astype(np.uint8)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    kind = {1: 0, 3: 2, 4: 6}[colors]
    header = struct.pack(">IIBBBBB", _IMAGE_SIZE[1], _IMAGE_SIZE[0], 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
