"""Sparse and ragged inputs: several tensors that only make sense together.

A signature flattens them. A sparse tensor is indices, values and a dense shape; a ragged one is values and row splits. They are
recognized by what reads them (an op that takes indices, values and a shape, each straight from an input), by their names (``x``,
``x_1``, ``x_2`` as tf.function names them, ``x/indices`` … or ``x/0`` … as signatures do), by
their types and shapes, and, where that could also be something else, by what the graph does with them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import TensorValue
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.inputs.lookups import constant, known_shape, use_of
from msplit.inputs.special import RANDOM, InputKind, lengths
from msplit.opset import schema
from msplit.opset.traits import ops_with

_PER_ROW = 2
_INTEGERS = ("int64", "int32")
_RAGGED = ops_with("ragged")
_SAME = ops_with("hands on parameters")
_MOST_RANK = 254  # that TensorFlow knows
_MOST_CELLS = 1 << 22
"""A row of a sparse tensor is looked upon as having so many cells at most: its entries are drawn among them."""


@dataclass(frozen=True)
class InputSpec:
    """Specification of an input: name, type and shape.

    Attributes:
        shape: None for what is open; None for unknown rank.
        node: Node that gives it.
        port: Output port of that node.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    node: int
    port: int


@dataclass(frozen=True, eq=False)
class Structure:
    """Shapes and values that composite inputs (sparse, ragged) fix.

    Attributes:
        fixed: Whole values: indices, dense shapes, row splits.
        lengths: First dimension of the values that belong to them.
    """

    fixed: Mapping[str, NDArray[np.int64]]
    lengths: Mapping[str, int]


@dataclass(frozen=True)
class _Sparse:
    """The inputs that are one sparse tensor, None for what is no input; and what is known of its dense shape, None for no known rank."""

    indices: InputSpec
    values: InputSpec | None
    shape: InputSpec | None
    known: tuple[int | None, ...] | None

    def names(self) -> set[str]:
        return {spec.name for spec in (self.indices, self.values, self.shape) if spec is not None}


def structure(
    flat: FlatGraph,
    specs: Sequence[InputSpec],
    batch: int,
    given: frozenset[str],
    seed: int = 0,
    kind: InputKind = RANDOM,
) -> Structure:
    """Finds composite inputs and gives them `batch` rows, of two entries each where they are random, else of two on average.

    Args:
        flat: The graph.
        specs: All its inputs.
        batch: How many rows.
        given: Inputs whose values come from elsewhere; a composite input with one of them is left alone.
        seed: Decides where the entries are in their rows.
        kind: Decides how many entries a row has.

    Raises:
        LoadError: Some parts of a sparse tensor are given, and others are not.
    """
    by_name = {spec.name: spec for spec in specs}
    fixed: dict[str, NDArray[np.int64]] = {}
    sizes: dict[str, int] = {}
    named = {sparse.indices.name: sparse for sparse in _sparse_by_name(flat, specs)}
    for found in (*_sparse_by_role(flat, specs), *named.values()):
        # Some ops look at indices and shape alone.
        same = named.get(found.indices.name)
        sparse = replace(found, values=same.values) if found.values is None and same is not None else found
        names = sparse.names()
        if names & {*fixed, *sizes, *given}:
            _refuse_part(flat, found, names, given)
            continue
        indices, dense = _sparse_of(sparse, batch, seed, kind)
        fixed[sparse.indices.name] = indices
        if sparse.shape is not None:
            fixed[sparse.shape.name] = dense.astype(sparse.shape.dtype)
        if sparse.values is not None:
            sizes[sparse.values.name] = len(indices)
    for spec in specs:
        if spec.name in fixed or spec.name in sizes:
            continue
        if spec.name.endswith("/values") and _is_weight(flat, spec, by_name):
            sizes[spec.name] = batch * _PER_ROW
        for values, splits in _ragged_names(spec.name):
            there = values in by_name and splits in by_name and not given.intersection((values, splits))
            if there and _is_ragged(flat, by_name[values], by_name[splits]):
                of_rows = lengths(batch, _PER_ROW, batch * _PER_ROW, kind)
                fixed[splits] = np.cumsum([0, *of_rows], dtype=by_name[splits].dtype)
                sizes[values] = batch * _PER_ROW
                break
    return Structure(fixed, sizes)


def _refuse_part(flat: FlatGraph, sparse: _Sparse, names: Set[str], given: Set[str]) -> None:
    """Raises where some parts of a sparse tensor are given and others are not: nothing made up fits what is given."""
    there, missing = sorted(names & given), sorted(names - given)
    if there and missing and sparse.values is not None:
        raise LoadError(
            f"{', '.join(there)} and {', '.join(missing)} are parts of one sparse tensor, and not all of them are given",
            where=str(flat.model.source),
            fix=" ".join(f"--input {name}=FILE" for name in missing) + f" as well, or leave {', '.join(there)} out",
        )


def _sparse_by_role(flat: FlatGraph, specs: Sequence[InputSpec]) -> Iterator[_Sparse]:
    """Sparse tensors whose parts an op reads as such, straight from inputs."""
    fed = {(spec.node, spec.port): spec for spec in specs}
    for node, op in enumerate(flat.graph.ops):
        for places in _sparse_slots(op):
            inputs = flat.graph.inputs(node)
            if max(slot or 0 for slot in places) >= len(inputs):
                continue
            indices, values, shape = (None if slot is None else _input(flat, fed, inputs[slot]) for slot in places)
            if indices is None or indices.dtype != "int64" or (indices.shape is not None and len(indices.shape) != 2):
                continue
            known = _known_shape(flat, node, places[2], shape)
            if shape is not None and shape.dtype not in _INTEGERS:
                continue
            if shape is None and (known is None or None in known):
                continue  # it is computed: nobody knows what fits
            yield _Sparse(indices, values, shape, _columns(flat, node, known))


@functools.cache
def _sparse_slots(op: str) -> tuple[tuple[int, int | None, int | None], ...]:
    """Slots of indices, values and dense shape of the sparse tensors that an op takes one of each of."""
    info = schema.lookup(op) if "Sparse" in op else None
    if info is None:
        return ()
    if any(argument.number_attr or argument.type_list_attr for argument in info.inputs):
        return ()
    slots = {argument.name: slot for slot, argument in enumerate(info.inputs)}
    found = []
    for name, slot in slots.items():
        if name.endswith("indices"):
            stem = name.removesuffix("indices")
            shape = next((slots[s] for s in (f"{stem}shape", f"{stem}dense_shape", "output_shape") if s in slots), None)
            if shape is not None:
                found.append((slot, slots.get(f"{stem}values"), shape))
    return tuple(found)


def _input(flat: FlatGraph, fed: Mapping[tuple[int, int], InputSpec], key: tuple[int, int]) -> InputSpec | None:
    """The input that a tensor is, through ops that hand it on."""
    for _ in range(16):
        if key in fed:
            return fed[key]
        inputs = flat.graph.inputs(key[0])
        if flat.graph.ops[key[0]] not in _SAME or not inputs:
            return None
        key = inputs[0]
    return None


def _known_shape(
    flat: FlatGraph, node: int, slot: int | None, shape: InputSpec | None
) -> tuple[int | None, ...] | None:
    """The dense shape as far as a constant or a default says it."""
    if shape is not None:
        value = _default(flat, flat.graph.names[shape.node])
    else:
        value = None if slot is None else constant(flat, node, slot)
    if value is None or value.ndim != 1 or value.size > _MOST_RANK:
        return None
    return tuple(size if size >= 0 else None for size in value.tolist())


def _default(flat: FlatGraph, name: str) -> NDArray[np.int64] | None:
    """The default of an input; the flat graph has nothing in front of what is fed."""
    graph = flat.model.graph
    node = graph.index.get(name)
    if node is None or graph.ops[node] != "PlaceholderWithDefault" or not (sources := graph.inputs(node)):
        return None
    value = graph.attrs[sources[0][0]].get("value")
    return np.asarray(value.load()) if isinstance(value, TensorValue) and value.dtype == "int64" else None


def _columns(flat: FlatGraph, node: int, known: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
    """A known shape with the columns that a product with a dense matrix of known size asks for."""
    graph = flat.graph
    if graph.ops[node] != "SparseTensorDenseMatMul" or (known is not None and len(known) != 2):
        return known
    dense = known_shape(flat, *graph.inputs(node)[3])
    if dense is None or len(dense) != 2:
        return known
    size = dense[1 if graph.attrs[node].get("adjoint_b") else 0]
    axis = 0 if graph.attrs[node].get("adjoint_a") else 1
    found = list(known or (None, None))
    found[axis] = size if found[axis] is None else found[axis]
    return tuple(found)


def _sparse_by_name(flat: FlatGraph, specs: Sequence[InputSpec]) -> Iterator[_Sparse]:
    """Sparse tensors whose parts are named as such, and have their types and ranks."""
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        for names in _sparse_names(spec.name):
            indices, values, dense = (by_name.get(name) for name in names)
            if indices is not None and values is not None and dense is not None and _is_sparse(indices, values, dense):
                yield _Sparse(indices, values, dense, _known_shape(flat, dense.node, None, dense))
                break
        else:  # what only looks rows up does not read the shape
            values = by_name.get(f"{spec.name.removesuffix('indices')}values")
            if spec.name.endswith("/indices") and values is not None and _is_sparse(spec, values, None):
                yield _Sparse(spec, values, None, None)


def _sparse_names(name: str) -> list[tuple[str, str, str]]:
    found = [(name, f"{name}_1", f"{name}_2")]
    if name.endswith("indices"):
        stem = name.removesuffix("indices")
        found += [(name, f"{stem}values", f"{stem}{shape}") for shape in ("shape", "dense_shape")]
    if name.endswith("/0"):
        stem = name.removesuffix("/0")
        found.append((name, f"{stem}/1", f"{stem}/2"))
    return found


def _is_sparse(indices: InputSpec, values: InputSpec, dense: InputSpec | None) -> bool:
    """True if three inputs have the types and ranks of the parts of a sparse tensor."""
    if indices.dtype != "int64" or indices.shape is None or len(indices.shape) != 2:
        return False
    if values.shape is None or len(values.shape) != 1:
        return False
    if dense is None:
        return True
    if dense.dtype != "int64" or dense.shape is None or len(dense.shape) != 1:
        return False
    rank = indices.shape[1] if indices.shape[1] is not None else dense.shape[0]
    return indices.shape[1] in (None, rank) and dense.shape[0] in (None, rank)


def _sparse_of(sparse: _Sparse, batch: int, seed: int, kind: InputKind) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices, sorted and each once, and the dense shape around them. What is not known of that is as small as it can be, with room for
    longer rows unless they are random."""
    ranks = [len(sparse.known) if sparse.known is not None else None]
    ranks += [spec.shape[-1] for spec in (sparse.indices, sparse.shape) if spec is not None and spec.shape]
    rank = next((size for size in ranks if size is not None), 2)
    known = sparse.known if sparse.known is not None and len(sparse.known) == rank else (None,) * rank
    shape = [
        size if size is not None else (batch, _PER_ROW if kind is RANDOM else 2 * _PER_ROW)[axis] if axis < 2 else 1
        for axis, size in enumerate(known)
    ]
    # A whole row at a time: its cells are numbered, and some of them are taken.
    cells = int(np.prod([min(size, _MOST_CELLS) for size in shape[1:]], dtype=np.float64).clip(0, _MOST_CELLS))
    rng = np.random.default_rng([seed, zlib.crc32(sparse.indices.name.encode())])
    rows = min(shape[0], max(batch, 1)) if rank else 0
    taken = lengths(rows, min(_PER_ROW, cells), cells, kind)
    made = np.zeros((sum(taken), rank), dtype=np.int64)
    if len(made):
        made[:, 0] = np.repeat(np.arange(rows), taken)
        rest = np.concatenate([np.sort(rng.choice(cells, count, replace=False)) for count in taken])
        for axis in range(rank - 1, 0, -1):
            made[:, axis] = rest % shape[axis]
            rest = rest // shape[axis]
    return made, np.asarray(shape, np.int64)


def _is_weight(flat: FlatGraph, values: InputSpec, fed: Mapping[str, InputSpec]) -> bool:
    """True if these are the values of a sparse tensor whose indices nothing reads: weights, at the indices of the ids."""
    indices = f"{values.name.removesuffix('values')}indices"
    return indices not in fed and indices in flat.model.graph.index and values.shape == (None,)


def _ragged_names(name: str) -> list[tuple[str, str]]:
    found = [(name, f"{name}_1")]
    if name.endswith("/0"):
        found.append((name, f"{name.removesuffix('/0')}/1"))
    if name.endswith("/flat_values"):
        found.append((name, f"{name.removesuffix('/flat_values')}/row_splits"))
    return found


def _is_ragged(flat: FlatGraph, values: InputSpec, splits: InputSpec) -> bool:
    if splits.dtype not in _INTEGERS or splits.shape is None or len(splits.shape) != 1:
        return False
    if not values.shape or values.shape[0] is not None or splits.shape[0] is not None:
        return False
    use = use_of(flat, splits.node, splits.port)
    if use.rows is not None or use.unknown:
        return False
    # Row lengths and row numbers are made of neighbouring splits; nothing is looked up by a split.
    return any(op.startswith("Ragged") for op in use.ops) or bool(use.ops & _RAGGED and "StridedSlice" in use.ops)
