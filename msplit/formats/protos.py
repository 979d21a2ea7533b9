"""Makes nodes of a GraphDef from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from msplit.formats.tensors import dtype_number, numpy_dtype


def add_node(graph_def: Any, name: str, op: str, inputs: Sequence[str] = (), **attrs: Any) -> None:
    """Adds a node.

    Args:
        graph_def: Where to.
        name: Its name.
        op: Its op.
        inputs: ``node``, ``node:port`` or ``^node``.
        **attrs: A number, a truth value, the name of a type (``"float32"``) or a list of these, a shape as a tuple, or for a constant a
            pair of its type and its value.
    """
    node = graph_def.node.add(name=name, op=op, input=inputs)
    for key, value in attrs.items():
        attr = node.attr[key]
        if key == "shape":
            attr.shape.SetInParent()
            for size in value:
                attr.shape.dim.add().size = -1 if size is None else size
        elif isinstance(value, bool):
            attr.b = value
        elif isinstance(value, int):
            attr.i = value
        elif isinstance(value, str):
            attr.type = dtype_number(value)
        elif isinstance(value, list):
            attr.list.type.extend(map(dtype_number, value))
        else:
            _fill(attr.tensor, *value)


def _fill(tensor: Any, dtype: str, value: Any) -> None:
    tensor.dtype = dtype_number(dtype)
    array = np.asarray(value, numpy_dtype(dtype))
    tensor.tensor_shape.SetInParent()
    for size in array.shape:
        tensor.tensor_shape.dim.add().size = size
    if dtype == "string":
        tensor.string_val.extend(item.encode() if isinstance(item, str) else item for item in array.ravel().tolist())
    else:
        tensor.tensor_content = array.tobytes()
