"""Values for the inputs of a model: from files, or made from type and shape."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import optable
from msplit.cost.shapes.inputs import Fed, input_shapes
from msplit.cost.shapes.registry import shape_text
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.decode import numpy_dtype
from msplit.measure.composite import Spec, structure
from msplit.measure.ids import Use, use_of

_SMALL = 2
"""Integers that index nothing we know of are below this: right for masks, labels and kinds."""

_TOKENS = 1000
_PARSERS = ("ParseExample", "ParseExampleV2", "ParseSingleExample", "ParseSequenceExample", "ParseSequenceExampleV2")
_NEEDS_FILE = (
    *_PARSERS,
    "DecodeJpeg",
    "DecodePng",
    "DecodeImage",
    "DecodeBmp",
    "DecodeGif",
    "DecodeProtoV2",
    "DecodeCSV",
)


def make_inputs(
    flat: FlatGraph,
    shapes: Mapping[str, tuple[int | None, ...]],
    *,
    batch: int = 1,
    seed: int = 0,
    given: Mapping[str, Path] | None = None,
) -> dict[str, NDArray[Any]]:
    """Gives every input of a model a value.

    Floating-point inputs are standard normal, unless they are used as ids; ids are uniform over the rows of the smallest table that
    they index, segment ids do not decrease, other integers are 0 or 1, strings are short tokens, and the parts of sparse and ragged
    inputs fit together. An input's values depend on the seed
    and its name alone.

    Args:
        flat: The graph.
        shapes: Shape by input name, full or not. What neither it nor the model says: the first open dimension is the batch, any other
            is 1. An input of unknown rank has the batch as its only dimension.
        batch: Size of the batch.
        seed: Equal seeds give equal values.
        given: Files in NumPy's .npy format by input name.

    Raises:
        LoadError: A file can not be read or does not fit its input; or an input's values can not be made up.
    """
    given = given or {}
    names = [tensor.name for tensor in flat.inputs]
    for name in given:
        if name not in names:
            fix = _with_default(flat, name, names) or _nearest(name, names)
            raise LoadError(f"the model has no input {name!r}", where=str(flat.model.path), fix=fix)
    specs, shaped = input_specs(flat, batch, shapes)
    composite = structure(flat, specs, batch, frozenset(given))
    feeds: dict[str, NDArray[Any]] = {}
    for spec in specs:
        shape = shaped.get((spec.node, spec.port))
        if spec.name in given:
            wanted = shape if spec.name in shapes else spec.shape
            feeds[spec.name] = load_input(spec.name, given[spec.name], spec.dtype, wanted, batch=batch)
            continue
        if spec.name in composite.fixed:
            feeds[spec.name] = composite.fixed[spec.name]
            continue
        full = (batch,) if shape is None else tuple(1 if size is None else size for size in shape)
        if spec.name in composite.lengths:
            full = (composite.lengths[spec.name], *full[1:])
        rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
        use = use_of(flat, spec.node, spec.port)
        feeds[spec.name] = _values(spec.name, spec.dtype, full, use, rng, str(flat.model.path))
    return feeds


def input_specs(flat: FlatGraph, batch: int, shapes: Mapping[str, tuple[int | None, ...]]) -> tuple[list[Spec], Fed]:
    """What is known of every input, and the shape of each, by node and port, for a batch and some given shapes.

    Raises:
        MsplitError: A shape contradicts the graph's.
    """
    endpoints = {endpoint.name: endpoint for endpoint in flat.model.inputs}
    shaped, _ = input_shapes(flat, batch, shapes)
    declared, _ = input_shapes(flat, None, {})
    specs = []
    for tensor in flat.inputs:
        endpoint = endpoints.get(tensor.name)
        dtype = (endpoint.dtype if endpoint else "") or _dtype(flat, tensor.node, tensor.port)
        open_shape = endpoint.shape if endpoint else declared.get((tensor.node, tensor.port))
        specs.append(Spec(tensor.name, dtype, open_shape, tensor.node, tensor.port))
    return specs, shaped


def composite_inputs(flat: FlatGraph, specs: Sequence[Spec], batch: int) -> frozenset[str]:
    """Inputs that are parts of sparse and ragged ones: how long they are is not for the batch alone to say."""
    found = structure(flat, specs, batch, frozenset())
    return frozenset({*found.fixed, *found.lengths})


def load_input(
    name: str, path: Path, dtype: str, shape: Sequence[int | None] | None, *, batch: int | None = None
) -> NDArray[Any]:
    """Reads an input from a .npy file.

    Args:
        name: The input.
        path: The file.
        dtype: Type that the model wants.
        shape: Shape that the model wants, None for what it leaves open.
        batch: Size that an open first dimension must have, None for any.

    Raises:
        LoadError: The file can not be read, or its type or shape is another.
    """
    where = str(path)
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise LoadError(
            f"the value of input {name!r} can not be read: {error.strerror or error}", where=where, fix="check the path"
        ) from error
    except (ValueError, EOFError) as error:
        raise LoadError(
            f"the value of input {name!r} is not an array in NumPy's .npy format",
            where=where,
            fix="write it with numpy.save; strings as a 'U' or 'S' array",
        ) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise LoadError(f"this file holds several arrays, input {name!r} needs one", where=where, fix="use numpy.save")
    wanted = numpy_dtype(dtype)
    if dtype == "string":
        if array.dtype.kind not in "US":
            raise LoadError(
                f"input {name!r} is made of strings, the file of {array.dtype}",
                where=where,
                fix="save it as a 'U' or 'S' array",
            )
    elif array.dtype.kind == "V" and array.dtype.itemsize == wanted.itemsize and wanted.kind == "V":
        array = array.view(wanted)  # NumPy's format does not know bfloat16 and its kin
    elif array.dtype != wanted:
        raise LoadError(
            f"input {name!r} is {dtype}, the file {array.dtype}", where=where, fix=f"save it as array.astype({dtype!r})"
        )
    if shape is not None:
        fits = len(shape) == array.ndim and all(w is None or w == h for w, h in zip(shape, array.shape, strict=True))
        if not fits:
            raise LoadError(
                f"input {name!r} has shape {shape_text(shape)}, the file {shape_text(array.shape)}",
                where=where,
                fix="save an array of that shape, where ? may be anything",
            )
        if batch is not None and shape and shape[0] is None and array.shape[0] != batch:
            raise LoadError(
                f"input {name!r} has a batch of {array.shape[0]} in this file, the run has {batch}",
                where=where,
                fix=f"run with --batch {array.shape[0]}",
            )
    return np.ascontiguousarray(array) if array.ndim else array


def _values(
    name: str, dtype: str, shape: tuple[int, ...], use: Use, rng: np.random.Generator, where: str
) -> NDArray[Any]:
    if dtype == "string":
        return _strings(name, shape, use, rng, where)
    if dtype in ("resource", "variant"):
        raise LoadError(
            f"input {name!r} is a {dtype}, which has no value outside of TensorFlow",
            where=where,
            fix="choose inputs that are tensors with --inputs",
        )
    kind = numpy_dtype(dtype)
    if kind == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    ids = use.rows is not None or use.unknown or use.segments
    if np.issubdtype(kind, np.integer) or (ids and kind.kind != "c"):
        high = min(use.rows or _SMALL, _most(kind))
        integers = rng.integers(0, 1 if use.rows is None and use.unknown else high, shape)
        return (np.sort(integers, axis=None).reshape(shape) if use.segments else integers).astype(kind)
    drawn: NDArray[Any] = rng.standard_normal(shape)
    if kind.kind == "c":
        drawn = drawn + 1j * rng.standard_normal(shape)
    return np.asarray(drawn).astype(kind)


def _most(kind: np.dtype[Any]) -> int:
    return int(np.iinfo(kind).max) if np.issubdtype(kind, np.integer) else 1 << 53


def _strings(name: str, shape: tuple[int, ...], use: Use, rng: np.random.Generator, where: str) -> NDArray[Any]:
    for op in _NEEDS_FILE:
        if op in use.ops:
            raise LoadError(
                f"input {name!r} is read by {op}: its strings can not be made up",
                where=where,
                fix=f"give real ones: --input {name}=file.npy",
            )
    form = "{}" if "StringToNumber" in use.ops else "token_{}"
    drawn = rng.integers(0, _TOKENS, shape)
    result = np.empty(drawn.size, dtype=object)
    result[:] = [form.format(number).encode() for number in np.ravel(drawn).tolist()]
    return result.reshape(shape)


def _dtype(flat: FlatGraph, node: int, port: int) -> str:
    attrs = flat.graph.attrs[node]
    found = optable.output_dtype(flat.graph.ops[node], attrs, port) or attrs.get("dtype")
    if not isinstance(found, str):
        raise LoadError(
            f"the type of input {flat.graph.names[node]!r} is not known",
            where=str(flat.model.path),
            fix="name other inputs with --inputs",
        )
    return found.removesuffix("_ref")


def _with_default(flat: FlatGraph, name: str, known: Sequence[str]) -> str:
    """How to feed a scalar that keeps its default, where the name is that of one."""
    node = flat.graph.index.get(name)
    if node is None or flat.graph.ops[node] != "PlaceholderWithDefault":
        return ""
    return f"it keeps its default; to feed it, name it among the inputs: --inputs {','.join([*known, name])}"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"its inputs are: {', '.join(known) or 'none'}"
