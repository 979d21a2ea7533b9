"""Whether a saved reference fits the model and the batch that it is to verify; where no batch is asked for, the file's is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msplit.assignment.defaults import agree
from msplit.errors import LoadError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.tensors import numpy_dtype
from msplit.inputs.make import composite_inputs, input_specs, make_inputs
from msplit.inputs.reference import Reference
from msplit.shapes.registry import shape_text

_TRIED = 4
"""Batches that are tried before the file's shapes are taken one by one."""

Shapes = Mapping[str, tuple[int, ...]]


def fit(
    flat: FlatGraph, reference: Reference, path: Path, *, batch: int | None, shapes: Shapes
) -> tuple[int | None, Shapes]:
    """The batch and the shapes to run with: those that were asked for or, where none were, those of the reference, read from `path`.

    Raises:
        LoadError: The file is of another model, or of another batch than was asked for.
    """
    _of_this_model(flat, reference, path)
    if batch is None and not shapes:
        return _of_file(flat, reference)
    specs, shaped = input_specs(flat, batch or 1, shapes)
    loose = composite_inputs(flat, specs, batch or 1)
    for spec in specs:
        has = reference.feeds[spec.name].shape
        wanted = shaped.get((spec.node, spec.port))
        if wanted is None or spec.name in loose or agree(has, wanted):
            continue
        option = "--shape" if batch is None or spec.name in shapes else f"--batch {batch}"
        raise LoadError(
            f"the reference has input {spec.name!r} of shape {shape_text(has)}, {option} asks for {shape_text(wanted)}",
            where=str(path),
            fix=f"leave {option.split()[0]} out, then the file says it; or make a reference of these shapes: "
            f"msplit bench MODEL {option if ' ' in option else '--shape …'} --measure save-reference=FILE.npz",
        )
    return batch, shapes


def _of_this_model(flat: FlatGraph, reference: Reference, path: Path) -> None:
    fix = "make one of this model: msplit bench MODEL --measure save-reference=FILE.npz"
    has, wants = set(reference.feeds), {tensor.name for tensor in flat.inputs}
    if has != wants:
        what = f"its inputs are {_listed(has)}, those of the model {_listed(wants)}"
        raise LoadError(f"the reference is of another model: {what}", where=str(path), fix=fix)
    try:
        specs, _ = input_specs(flat, 1, {name: value.shape for name, value in reference.feeds.items()})
    except MsplitError as error:
        raise LoadError(f"the reference is of another model: {error.what}", where=str(path), fix=fix) from error
    for spec in specs:
        there = reference.feeds[spec.name].dtype
        fits = there.kind == "O" if spec.dtype == "string" else there == numpy_dtype(spec.dtype)
        if not fits:
            name = "string" if there.kind == "O" else there.name
            what = f"its input {spec.name!r} is {name}, that of the model {spec.dtype}"
            raise LoadError(f"the reference is of another model: {what}", where=str(path), fix=fix)


def _of_file(flat: FlatGraph, reference: Reference) -> tuple[int | None, Shapes]:
    """A batch that gives the shapes of the file; else those shapes."""
    found = {name: value.shape for name, value in reference.feeds.items()}
    leading = Counter(shape[0] for shape in found.values() if shape and shape[0] > 0)
    # Rows of sparse and ragged inputs: in the dense shape, and one less than row splits.
    largest = max(leading, default=0)
    for value in reference.feeds.values():
        if value.ndim == 1 and value.dtype.kind == "i" and len(value):
            leading.update(size for size in (int(value[0]), len(value) - 1) if 0 < size <= largest)
    for size, _ in leading.most_common(_TRIED):
        try:
            made = make_inputs(flat, {}, batch=size)
        except MsplitError:  # values that can not be made up come with --input
            break
        if all(made[name].shape == shape for name, shape in found.items()):
            return (None, {}) if size == 1 else (size, {})
    return None, found


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "") or "none"
