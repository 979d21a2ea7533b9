"""Shapes of what is fed: from the file, `--batch` and `--shape`."""

from __future__ import annotations

from collections.abc import Mapping

from msplit.core.arguments import whole
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph, Tensor
from msplit.opset.traits import PLACEHOLDERS
from msplit.shapes.registry import MAX_SIZE, Shape, Sizes, known, merge, plain_shape, shape_text

Fed = dict[tuple[int, int], Shape]
"""Shape by (node, port)."""


def input_shapes(flat: FlatGraph, batch: int | None, shapes: Mapping[str, Sizes]) -> tuple[Fed, list[str]]:
    """The shape of every input, and what was assumed about them.

    Raises:
        MsplitError: An input that does not exist, a shape that contradicts the graph's, a batch below 1.
    """
    if batch is not None:
        batch = whole("the batch", batch)
    given = _by_input(flat, shapes)
    all_stated = stated_shapes(flat)
    fed: Fed = {}
    assumed: list[str] = []
    unknown: list[str] = []
    ones: list[str] = []
    takes_batch = False
    for tensor in flat.inputs:
        stated = all_stated[tensor.name]
        takes_batch = takes_batch or tensor.name in given or not known(stated)
        if tensor.name in given:
            fed[tensor.node, tensor.port] = _checked(tensor, stated, given[tensor.name])
            continue
        if stated is not None and None in stated:
            axis = stated.index(None)
            stated = (*stated[:axis], 1 if batch is None else batch, *stated[axis + 1 :])
            if batch is None:
                ones.append(tensor.name)
        if not known(stated):
            unknown.append(tensor.name)
        if stated is not None:
            fed[tensor.node, tensor.port] = stated
    if ones:
        assumed.append(f"the batch of {_listed(ones)} is not in the file: 1 was taken (--batch N says another)")
    if unknown:
        example = unknown[0]
        assumed.append(f"the shape of {_listed(unknown)} is not known in full (--shape {example}=1,128 says it)")
    if batch is not None and flat.inputs and not takes_batch:
        assumed.append(f"no input has an unknown dimension: the batch of {batch} changed nothing")
    return fed, assumed


def stated_shapes(flat: FlatGraph) -> dict[str, Shape]:
    """The shape of every input as the file has it, by name."""
    endpoints = {endpoint.name: endpoint.shape for endpoint in flat.model.inputs}
    return {tensor.name: merge(_attribute(flat, tensor), endpoints.get(tensor.name)) for tensor in flat.inputs}


def _by_input(flat: FlatGraph, shapes: Mapping[str, Sizes]) -> dict[str, Sizes]:
    """The given shapes by the name of the input, whichever of its names the user wrote."""
    names: dict[str, str] = {}
    for tensor in flat.inputs:
        node = flat.graph.names[tensor.node]
        for alias in (f"{node}:{tensor.port}", node, f"{tensor.name}:{tensor.port}", tensor.name):
            names[alias] = tensor.name
    result: dict[str, Sizes] = {}
    for name, shape in shapes.items():
        if name not in names:
            listed = ", ".join(tensor.name for tensor in flat.inputs) or "none"
            raise MsplitError(
                f"there is no input called {name!r}",
                where=str(flat.model.path),
                fix=f"name one of the inputs: {listed}",
            )
        sizes = shape if isinstance(shape, tuple | list) else (shape,)
        result[names[name]] = tuple(
            None if size is None else whole(f"a size of input {name!r}", size, -MAX_SIZE, MAX_SIZE) for size in sizes
        )
    return result


def _attribute(flat: FlatGraph, tensor: Tensor) -> Shape:
    if flat.graph.ops[tensor.node] not in PLACEHOLDERS:
        return None
    attrs = flat.graph.attrs[tensor.node]
    hints = attrs.get("_output_shapes")
    return merge(plain_shape(attrs.get("shape")), plain_shape(hints[0]) if isinstance(hints, tuple) and hints else None)


def _checked(tensor: Tensor, stated: Shape, given: Sizes) -> Shape:
    if any((size or 0) < 0 for size in given):
        raise MsplitError(
            f"input {tensor.name!r} is given the shape {shape_text(given)}, which has a negative size",
            fix="write sizes of at least 0",
        )
    if stated is None:
        return given
    agrees = len(stated) == len(given) and all(
        a is None or b is None or a == b for a, b in zip(stated, given, strict=False)
    )
    if not agrees:
        raise MsplitError(
            f"input {tensor.name!r} has the shape {shape_text(stated)} in the graph and is given {shape_text(given)}",
            fix=f"give {len(stated)} sizes that agree with it, where ? may be anything",
        )
    return merge(given, stated)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
