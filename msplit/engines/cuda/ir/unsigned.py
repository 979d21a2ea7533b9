"""Lowerings on the unsigned integers that PyTorch hardly computes with, by way of signed ones of twice the width.

PyTorch stores uint16, uint32 and uint64, and has kernels for few ops of them. Those that only add, multiply and move give the low bits
right in a wider signed type, since sums wrap around here and there alike; comparing and dividing a number that has not wrapped is right
there, too. Of uint64 there is no wider type: the first kind runs on the same bits as int64, and where the order counts, it is shifted by
half of the range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.opset import schema
from msplit.opset.traits import ops_with

_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}

_SAME_BITS, _ORDERED, _EXACT = ops_with("wraps"), ops_with("ordered"), ops_with("exact when widened")


def in_signed(function: Callable[..., Any], node: Node, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Runs a lowering that PyTorch has no kernels for, as the lowering itself would.

    Raises:
        NotImplementedError: The inputs are of other types.
        Unsupported: The op can not be computed so.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    wide = any(tensor.dtype == torch.uint64 for tensor in tensors)
    if not wide and not any(tensor.dtype in _WIDER for tensor in tensors):
        raise NotImplementedError(f"there is no kernel for {', '.join(sorted({str(one.dtype) for one in tensors}))}")
    ordered = node.op in _ORDERED
    if not (ordered or node.op in _SAME_BITS or (node.op in _EXACT and not wide)):
        types = sorted({dtype_name(one.dtype) for one in tensors if one.dtype in (*_WIDER, torch.uint64)})
        raise Unsupported(f"there is no kernel for {' and '.join(types)}")
    expected = _result_types(node, inputs)
    results = function(node, *(_signed(value, ordered) if isinstance(value, Tensor) else value for value in inputs))
    found = results if isinstance(results, tuple | list) else (results,)
    return tuple(_unsigned(one, dtype, ordered) for one, dtype in zip(found, expected, strict=False))


def _signed(value: Tensor, ordered: bool) -> Tensor:
    if value.dtype == torch.uint64:
        bits = value.view(torch.int64)
        return bits ^ torch.iinfo(torch.int64).min if ordered else bits
    return value.to(_WIDER[value.dtype]) if value.dtype in _WIDER else value


def _unsigned(value: Tensor, dtype: torch.dtype | None, ordered: bool) -> Tensor:
    if dtype == torch.uint64 and value.dtype == torch.int64:
        return (value ^ torch.iinfo(torch.int64).min if ordered else value).view(torch.uint64)
    return value.to(dtype) if dtype in _WIDER and value.dtype == _WIDER[dtype] else value


def _result_types(node: Node, inputs: tuple[Any, ...]) -> list[torch.dtype | None]:
    """Types of the results as TensorFlow has them, by the node's attributes or, where those are left out, by the inputs."""
    info = schema.lookup(node.op)
    attrs = dict(node.attrs)
    for arg, value in zip(info.inputs if info else (), inputs, strict=False):
        if arg.number_attr or arg.type_list_attr:
            break
        if arg.type_attr and isinstance(value, Tensor):
            attrs.setdefault(arg.type_attr, dtype_name(value.dtype))
    if info and info.inputs and info.inputs[0].type_attr and isinstance(inputs[0], Tensor):
        attrs.setdefault(info.inputs[0].type_attr, dtype_name(inputs[0].dtype))
    names = schema.output_dtypes(node.op, attrs) or ()
    return [None if name is None else torch_dtype(name) for name in names]
