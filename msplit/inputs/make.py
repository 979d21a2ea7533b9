"""Values for the inputs of a model: from files, or made from type and shape.

Functions of a user's own, named as ``module:function``: they are imported and run, as any program of theirs is.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.cost.profile import Workload
from msplit.errors import LoadError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.tensors import fits, numpy_dtype
from msplit.inputs.files import names_in, read_value
from msplit.inputs.sparse_ragged import InputSpec, structure
from msplit.inputs.special import RANDOM, InputKind
from msplit.inputs.values import made_up, scalars
from msplit.shapes.infer import Fed, input_shapes
from msplit.shapes.registry import shape_text

_MOST = 1 << 44
"""Elements of an input: more than any host has bytes."""


def feeds_for(
    flat: FlatGraph, workload: Workload, *, seed: int = 0, kind: InputKind = RANDOM
) -> dict[str, NDArray[Any]]:
    """A value for every input of a model, as a workload says; see `make_inputs`."""
    return make_inputs(flat, workload.shapes, batch=workload.batch or 1, seed=seed, given=workload.inputs, kind=kind)


def make_inputs(
    flat: FlatGraph,
    shapes: Mapping[str, tuple[int | None, ...]],
    *,
    batch: int = 1,
    seed: int = 0,
    given: Mapping[str, Path] | None = None,
    kind: InputKind = RANDOM,
) -> dict[str, NDArray[Any]]:
    """Gives every input of a model a value.

    Floating-point inputs are standard normal, unless they are used as ids; ids are uniform over the rows of the smallest table that
    they index, or over the keys of the table in which they are looked up, as strings are; segment ids do not decrease, other integers
    are 0 or 1, other strings are short tokens, serialized examples and images are what reads them wants, and the parts of sparse and
    ragged inputs fit together. Scalars that switch training or dropout are as in inference. An input's values depend on the seed
    and its name alone.

    Args:
        shapes: Shape by input name, full or not. What neither it nor the model says: the first open dimension is the batch, any other
            is 1. An input of unknown rank has the batch as its only dimension, unless the graph uses it as a scalar.
        batch: Size of the batch.
        seed: Equal seeds give equal values.
        given: Files by input name, and under "" one that names its inputs itself; see `msplit.inputs.files`. What they hold is used as it
            is, whatever the kind. Under "" there may be a ``module:function``, as for a training: its first batch for this seed.
        kind: Special values, or rows with special values among the others, see `msplit.inputs.special`. Shapes are those of random values,
            and scalars stay as they are.

    Raises:
        LoadError: A file can not be read or does not fit its input; or an input's values can not be made up.
    """
    names = [tensor.name for tensor in flat.inputs]
    source, batches = str((given or {}).get("", "")), dict[str, Any]()
    if is_function(source):
        batches = _first_batch(source, tuple(names), batch, seed)
        given = {**dict.fromkeys(batches, Path(source)), **{name: path for name, path in (given or {}).items() if name}}
    given = _by_name(given or {}, names)
    for name in given:
        if name not in names:
            fix = _with_default(flat, name, names) or _nearest(name, names)
            raise LoadError(f"the model has no input {name!r}", where=str(flat.model.source), fix=fix)
    specs, shaped = input_specs(flat, batch, shapes)
    composite = structure(flat, specs, batch, frozenset(given), seed, kind)
    unknown = [(spec.name, spec.node, spec.port) for spec in specs if shaped.get((spec.node, spec.port)) is None]
    single = scalars(flat, unknown, [spec.node for spec in specs if shaped.get((spec.node, spec.port))])
    feeds: dict[str, NDArray[Any]] = {}
    for spec in specs:
        shape = shaped.get((spec.node, spec.port))
        if spec.name in given:
            wanted, path = shape if spec.name in shapes else spec.shape, given[spec.name]
            if spec.name in batches and str(path) == source:
                feeds[spec.name] = _fitting(spec.name, batches[spec.name].copy(), spec.dtype, wanted, source, batch)
            else:
                feeds[spec.name] = load_input(spec.name, path, spec.dtype, wanted, batch=batch)
            continue
        if spec.name in composite.fixed:
            feeds[spec.name] = composite.fixed[spec.name]
            continue
        if shape is None:
            shape = () if spec.name in single else (batch,)
        full = tuple(1 if size is None else size for size in shape)
        if spec.name in composite.lengths:
            full = (composite.lengths[spec.name], *full[1:])
        if math.prod(full) > _MOST:
            what = f"input {spec.name!r} of shape {shape_text(full)} does not fit into any memory"
            raise LoadError(what, where=str(flat.model.source), fix="use a smaller --batch, or give its --shape")
        rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
        feeds[spec.name] = made_up(flat, spec, full, rng, kind)
    return feeds


def _by_name(given: Mapping[str, Path], names: Sequence[str]) -> dict[str, Path]:
    """Files by input: what a file that was given without a name has is named by the file, or is the model's only input."""
    found: dict[str, Path] = {}
    whole = given.get("")
    if whole is not None:
        found |= {name or (names[0] if len(names) == 1 else ""): whole for name in names_in(whole)}
        if "" in found:
            raise LoadError(
                f"this file holds one value without a name, and the model has {len(names)} inputs",
                where=str(whole),
                fix=f"say which: --input {names[0] if names else 'NAME'}={whole}",
            )
    return {**found, **{name: path for name, path in given.items() if name}}


def input_specs(
    flat: FlatGraph, batch: int, shapes: Mapping[str, tuple[int | None, ...]]
) -> tuple[list[InputSpec], Fed]:
    """Specification and shape of every input, by node and port, for a batch and some given shapes.

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
        stated = endpoint.shape if endpoint else None  # a sparse tensor's parts have none in a signature
        open_shape = declared.get((tensor.node, tensor.port)) if stated is None else stated
        specs.append(InputSpec(tensor.name, dtype, open_shape, tensor.node, tensor.port))
    return specs, shaped


def composite_inputs(flat: FlatGraph, specs: Sequence[InputSpec], batch: int) -> frozenset[str]:
    """Inputs that are parts of sparse and ragged ones: how long they are is not for the batch alone to say."""
    found = structure(flat, specs, batch, frozenset())
    return frozenset({*found.fixed, *found.lengths})


def load_input(
    name: str, path: Path, dtype: str, shape: Sequence[int | None] | None, *, batch: int | None = None
) -> NDArray[Any]:
    """Reads an input from a file; see `msplit.inputs.files`.

    Args:
        name: The input.
        path: Where its value is.
        dtype: Type that the model wants.
        shape: Shape that the model wants, None for what it leaves open.
        batch: Size that an open first dimension must have, None for any.

    Raises:
        LoadError: The file can not be read, or its type or shape is another.
    """
    most = batch if not shape or shape[0] is None else shape[0]
    array = read_value(name, path, dtype, 1 if shape is not None and not len(shape) else most)
    return _fitting(name, array, dtype, shape, str(path), batch)


def _fitting(
    name: str, array: NDArray[Any], dtype: str, shape: Sequence[int | None] | None, where: str, batch: int | None
) -> NDArray[Any]:
    """An array as the value of an input; see `load_input`."""
    source, save = ("function", "give") if is_function(where) else ("file", "save")
    if shape is not None and not len(shape) and array.shape == (1,):
        array = array.reshape(())  # the only record of a file, for an input that is one string
    # The type: strings of any kind, types that NumPy stores as bytes, and otherwise the same.
    wanted = numpy_dtype(dtype)
    if dtype == "string":
        if array.dtype.kind == "V" and array.dtype.names is None:
            array = _bytes_of(array)  # of fixed length, with the zeros at their end
        if array.dtype.kind not in "USO":
            raise LoadError(
                f"input {name!r} is made of strings, the {source} of {array.dtype}",
                where=where,
                fix=f"{save} it as a 'U' or 'S' array",
            )
    elif array.dtype.kind == "V" and array.dtype.itemsize == wanted.itemsize and wanted.kind == "V":
        array = array.view(wanted)  # NumPy's format does not know bfloat16 and its kin
    elif array.dtype != wanted:
        raise LoadError(
            f"input {name!r} is {dtype}, the {source} {array.dtype}",
            where=where,
            fix=f"{save} it as array.astype({dtype!r})",
        )
    if shape is not None:
        # The shape, and the batch where the model leaves it open.
        if not fits(array.shape, shape):
            raise LoadError(
                f"input {name!r} has shape {shape_text(shape)}, the {source} {shape_text(array.shape)}",
                where=where,
                fix=f"{save} an array of that shape, where ? may be anything",
            )
        if batch is not None and shape and shape[0] is None and array.shape[0] != batch:
            raise LoadError(
                f"input {name!r} has a batch of {array.shape[0]} in this {source}, the run has {batch}",
                where=where,
                fix=f"run with --batch {array.shape[0]}",
            )
    return np.ascontiguousarray(array) if array.ndim else array


def _bytes_of(array: NDArray[Any]) -> NDArray[Any]:
    return np.array([item.tobytes() for item in array.reshape(-1)], dtype=object).reshape(array.shape)


def _dtype(flat: FlatGraph, node: int, port: int) -> str:
    found = flat.dtype(node, port)
    if not found:
        raise LoadError(
            f"the type of input {flat.graph.names[node]!r} is not known",
            where=str(flat.model.source),
            fix="name other inputs with --part inputs=",
        )
    return found.removesuffix("_ref")


def _with_default(flat: FlatGraph, name: str, known: Sequence[str]) -> str:
    """Advice on feeding a scalar that keeps its default, where the name is that of one."""
    node = flat.graph.index.get(name)
    if node is None or flat.graph.ops[node] != "PlaceholderWithDefault":
        return ""
    return f"it keeps its default; to feed it, name it among the inputs: --part inputs={','.join([*known, name])}"


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"its inputs are: {', '.join(known) or 'none'}"


@lru_cache(maxsize=1)
def _first_batch(source: str, names: tuple[str, ...], batch: int, seed: int) -> dict[str, NDArray[Any]]:
    """The first batch that a user's function gives, by input; it is called once for each batch size and seed."""
    make = imported(source, "that returns an iterable of batches")
    takes = inspect.signature(make).parameters
    told = {"batch": batch, "seed": seed, "epoch": 0, "start": 0}
    with calling(source):
        made = make(**{name: value for name, value in told.items() if name in takes})
        found = next(iter(made.as_numpy_iterator() if hasattr(made, "as_numpy_iterator") else made), None)
        if found is not None and not isinstance(found, Mapping) and len(names) == 1:
            found = {names[0]: found}
        if isinstance(found, Mapping) and found:
            return {str(name): np.array(value) for name, value in found.items()}
    what = "gives no batch" if found is None else f"its first batch is a {type(found).__name__}"
    fix = "give an iterable of mappings from input to array, such as {'x': array}, or a tf.data.Dataset of them"
    raise LoadError(what, where=source, fix=fix)


def is_function(source: str) -> bool:
    """True if a text names a function; a file of that name comes first."""
    module, colon, name = source.partition(":")
    return (
        bool(colon)
        and not os.path.lexists(source)
        and name.isidentifier()
        and all(map(str.isidentifier, module.split(".")))
    )


def imported(source: str, what: str) -> Callable[..., Any]:
    """The function of a ``module:function``; modules of the present folder are found as by `python -m`.

    Args:
        what: What it must be, to be said where it is not there: "that returns …".

    Raises:
        LoadError: There is no such module or function, or the module raised something.
    """
    module, _, name = source.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    with calling(source):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            raise LoadError(
                f"there is no module {module!r}", where=source, fix="run where it is, or set PYTHONPATH"
            ) from None
    if not callable(found):
        raise LoadError(f"module {module!r} has no function {name!r}", where=source, fix=f"give a function {what}")
    made: Callable[..., Any] = found
    return made


@contextmanager
def calling(source: str) -> Iterator[None]:
    """Turn what a user's code raises into an error of theirs, not of msplit."""
    try:
        yield
    except (MsplitError, GeneratorExit):
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(f"raised {type(error).__name__}: {error}", where=source, fix="--debug shows where") from error
