"""Assignments to variables, in place. Updates by an optimizer are in `optimizers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import as_words
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported

KEEPS_SHAPE = "a variable keeps its shape"
"""Message where one does not."""

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that PyTorch does not add; signed ones of the same width have the same sums."""


@lowering("Assign", mutates=(0,))
def assign(node: Node, variable: Tensor, value: Tensor) -> Tensor:
    """Gives the variable a value of its own shape."""
    return variable.copy_(_operand(node, variable, value))


@lowering("AssignAdd", "AssignSub", mutates=(0,))
def assign_add(node: Node, variable: Tensor, value: Tensor) -> Tensor:
    """Adds to the variable, or subtracts from it."""
    change = torch.Tensor.sub_ if TOGETHER[node.op] is torch._foreach_sub_ else torch.Tensor.add_
    change(_numbers(variable), _numbers(_operand(node, variable, value)))
    return variable


TOGETHER: dict[str, Callable[[list[Tensor], list[Tensor]], object]] = {
    "Assign": torch._foreach_copy_,
    "AssignAdd": torch._foreach_add_,
    "AssignSub": torch._foreach_sub_,
}
"""PyTorch's functions that do an op with many variables: a kernel for dozens of them."""


@lowering("_AssignAll", own=True)
def assign_all(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Does with many variables what the op that the attribute `op` names does with one: first `count` variables, then as many values."""
    count = node.attrs["count"]
    variables, values = inputs[:count], inputs[count:]
    for pair in zip(variables, values, strict=True):
        fit(node, *pair)
    TOGETHER[node.attrs["op"]](list(variables), apart(values, variables))
    return variables


@lowering("CountUpTo", mutates=(0,))
def count_up_to(node: Node, variable: Tensor) -> tuple[Tensor, Tensor]:
    """Counts on by one, and gives the number before. At the limit, where TensorFlow ends with an error, the number stays."""
    before = variable.clone()
    return variable.add_(before < node.attrs["limit"]), before


def fit(node: Node, variable: Tensor, *others: Tensor) -> None:
    """Looks whether a variable's shape is that of what goes into it.

    Raises:
        Unsupported: It is not, and a variable lies where it lies.
    """
    for other in others:
        if other.shape != variable.shape:
            shapes = f"{tuple(variable.shape)} and is given {tuple(other.shape)}"
            raise Unsupported(f"{node.name}: {KEEPS_SHAPE} while the graph runs, and this one has {shapes}")


def apart(values: Sequence[Tensor], variables: Sequence[Tensor]) -> list[Tensor]:
    """The values, those copied that lie in the memory of variables that are going to be written."""
    written = [_span(one) for one in variables]
    found = []
    for value in values:
        start, end = _span(value)
        found.append(value.clone() if any(start < last and first < end for first, last in written) else value)
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and behind its last one."""
    if tensor.device.type == "meta" or not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _operand(node: Node, variable: Tensor, value: Tensor) -> Tensor:
    fit(node, variable, value)
    return apart([value], [variable])[0]


def _numbers(tensor: Tensor) -> Tensor:
    return as_words(tensor) if tensor.dtype in _UNSIGNED else tensor
