"""Ops that change variables: whole, by rows or slices, and states of generators.

Assignments to variables, in place. Updates by an optimizer are in `optimizers`.

Rows and slices of a variable changed in place, and the states of random number generators.

An index out of range, -1 among them, changes nothing, as in TensorFlow's GPU kernels; its CPU kernels refuse it. The pass `pad_unique` pads
with -1.

Indices that come several times: sums, products, least and largest take all of them, on a GPU in any order. What divides does so in order
on the CPU, and by the product of all divisors on a GPU. What replaces goes in order on the CPU, so that the last one stays, as in
TensorFlow's kernels there; on a GPU any one of them stays, for each element of a row, as in its GPU kernels.

Nothing is as large as the variable: what has no row repeats a harmless change of another row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import as_words, dtype_name, in_signed
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.optimizers import rows_fit, update_rows
from msplit.engines.cuda.ops.array import replace_slice
from msplit.engines.cuda.ops.gather import linear_index
from msplit.engines.cuda.ops.reduce import unique_padded
from msplit.engines.cuda.ops.shape import integer, without_nan

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


_SKIPPED_PER_NUMBER = 256
"""Results of its generator that TensorFlow sets aside for every number that is drawn."""

_MULTIPLY, _LEAST, _LARGEST = "prod", "amin", "amax"


def nowhere_unless(*given: Tensor) -> Tensor:
    """Indices, the last one given; where what may stand before them is false, indices of nothing."""
    *guard, indices = given
    return torch.where(guard[0], indices, -1) if guard else indices


def all_nowhere_unless(finite: Tensor, indices: Sequence[Tensor]) -> list[Tensor]:
    """`nowhere_unless` for many, in two kernels for each type. Optimizers of dozens of tables have the same indices several times."""
    found: dict[Tensor, Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in indices):
        distinct = [one for one in dict.fromkeys(indices) if one.dtype == dtype]
        joined = nowhere_unless(finite, torch.cat([one.reshape(-1) for one in distinct]))
        parts = joined.split([one.numel() for one in distinct])
        found |= {one: part.view(one.shape) for one, part in zip(distinct, parts, strict=True)}
    return [found[one] for one in indices]


@lowering("ScatterAdd", "ScatterSub", mutates=(0,))
def scatter_add(node: Node, variable: Tensor, indices: Tensor, updates: Tensor, *guard: Tensor) -> Tensor:
    """Adds rows (or one number) to rows of a variable, or subtracts them, in place. On a GPU row by row in order."""
    indices = nowhere_unless(*guard, indices)
    places, rows = indices.reshape(-1), _rows_of(updates, indices, variable)
    (rows,) = apart([rows], [variable])
    if rows_fit(node.op, [[variable]], [], [(rows, places)]):
        update_rows(node.op, {}, [[variable]], [], [(rows, places)], summed=False)
        return variable
    return _changed(node, variable, variable, places, rows)


@lowering("ScatterMul", "ScatterMin", "ScatterMax", "ScatterDiv", "ScatterUpdate", mutates=(0,))
def scatter(node: Node, variable: Tensor, indices: Tensor, updates: Tensor, *guard: Tensor) -> Tensor:
    """Multiplies or divides rows of a variable by rows (or one number), takes the lesser or larger of both, or puts them in their place."""
    indices = nowhere_unless(*guard, indices)
    return _changed(node, variable, variable, indices.reshape(-1), _rows_of(updates, indices, variable))


@lowering("ScatterNdAdd", "ScatterNdSub", "ScatterNdMin", "ScatterNdMax", "ScatterNdUpdate", mutates=(0,))
def scatter_nd(node: Node, variable: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Adds to slices of a variable at coordinates (the last axis of indices), subtracts, takes the lesser or larger, or puts there."""
    return _changed(node, variable, *_at_coordinates(variable, indices, updates))


@lowering("StridedSliceAssign", static=(1, 2, 3), mutates=(0,))
def strided_slice_assign(
    node: Node, variable: Tensor, begin: np.ndarray, end: np.ndarray, strides: np.ndarray, value: Tensor
) -> Tensor:
    """Puts a value in the place of a slice of a variable, addressed as for StridedSlice."""
    return replace_slice(node, variable, begin, end, strides, apart([value], [variable])[0])


@lowering("RngReadAndSkip", static=(1,), mutates=(0,))
def rng_read_and_skip(node: Node, state: Tensor, algorithm: np.ndarray, count: Tensor) -> tuple[Tensor, Tensor]:
    """Sets numbers of a generator aside, and gives the state in front of them, three words long."""
    before = torch.cat([state, state.new_zeros(max(3 - state.shape[0], 0))])[:3]
    return rng_skip(node, state, algorithm, count), before


@lowering("RngSkip", static=(1,), mutates=(0,))
def rng_skip(node: Node, state: Tensor, algorithm: np.ndarray, count: Tensor) -> Tensor:
    """Sets numbers of a Philox generator aside: its state is a counter of two words, the lower first, and a key."""
    if integer(algorithm) != 1:
        raise Unsupported(f"random number algorithm {integer(algorithm)} is not supported, only Philox (1)")
    step = count.view(torch.int64) * _SKIPPED_PER_NUMBER
    low = state[0] + step
    sign = torch.iinfo(torch.int64).min  # compared as unsigned words
    state[1] += ((low ^ sign) < (step ^ sign)).to(torch.int64)
    state[0] = low
    return state


def change_rows(
    variables: Sequence[Tensor],
    indices: Tensor,
    updates: Tensor,
    change: Callable[[list[Tensor], Tensor], Sequence[Tensor]],
) -> None:
    """Gives rows of variables new values in place, one index after the other on the CPU, all at once on a GPU.

    Args:
        variables: Of the same number of rows.
        indices: A vector of rows; those that there are none of change nothing.
        updates: A row for each.
        change: Gives new rows for rows of the variables and of the updates.

    Raises:
        Unsupported: The updates are not of such a shape.
    """
    shape = variables[0].shape
    if updates.shape != (indices.numel(), *shape[1:]) or any(one.shape != shape for one in variables):
        shapes = ", ".join(str(tuple(one.shape)) for one in variables)
        raise Unsupported(
            f"{indices.numel()} rows of shape {tuple(updates.shape[1:])} do not go into variables of shape {shapes}"
        )
    (updates,) = apart([updates], variables)
    for places, source, found in _turns(indices, variables[0].shape[0]):
        old = [variable.index_select(0, places) for variable in variables]
        new = change(old, updates.index_select(0, source))
        for variable, before, after in zip(variables, old, new, strict=True):
            variable.index_copy_(0, places, torch.where(found, after.to(variable.dtype), before))


_Turn = tuple[Tensor, Tensor, Tensor]
"""Rows to change side by side, no row twice with different results: row of the variable for each; number of the update that it gets; and
true if there is a row at all, for the first ones are to stay as they are otherwise."""


def _turns(indices: Tensor, size: int) -> Iterator[_Turn]:
    if not indices.numel() or not size:
        return
    inside = (indices >= 0) & (indices < size)
    if indices.device.type != "cpu":
        yield _turn(indices, inside)
        return
    for chosen in _in_order(indices):
        yield _turn(indices, inside & chosen)


def _turn(indices: Tensor, chosen: Tensor) -> _Turn:
    """Does for what is not chosen once more what one of the chosen does."""
    one = chosen.to(torch.uint8).argmax()
    own = torch.arange(indices.shape[0], device=indices.device)
    source = torch.where(chosen, own, one)
    found = chosen.index_select(0, one.reshape(1))
    return torch.where(found, indices.index_select(0, source), 0).to(torch.int64), source, found.reshape(())


def _in_order(indices: Tensor) -> Iterator[Tensor]:
    """The first of each index, then the second, and so on. Reads values: on the CPU only."""
    ordered, order = torch.sort(indices, stable=True)
    places = torch.arange(indices.shape[0])
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    turn = torch.empty_like(places)
    turn[order] = places - torch.where(begins, places, 0).cummax(0).values
    for number in range(int(turn.max()) + 1):
        yield turn == number


def _rows_of(updates: Tensor, indices: Tensor, variable: Tensor) -> Tensor:
    """A row of updates per index; one number is for all of them."""
    inner = variable.shape[1:]
    if updates.dim() and updates.shape != (*indices.shape, *inner):
        raise Unsupported(
            f"updates of shape {tuple(updates.shape)} with indices of shape {tuple(indices.shape)} and rows of shape "
            f"{tuple(inner)}"
        )
    return updates.expand(*indices.shape, *inner).reshape(indices.numel(), *inner)


def _at_coordinates(variable: Tensor, indices: Tensor, updates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The variable as a table of what coordinates name (the same memory), the row of each, and the updates as rows."""
    depth = indices.shape[-1]
    sizes, inner = tuple(variable.shape[:depth]), variable.shape[depth:]
    table = variable if depth == 1 else variable.view(math.prod(sizes), *inner)
    rows = indices.reshape(-1) if depth == 1 else linear_index(indices, sizes, outside=-1).reshape(-1)
    if updates.shape != (*indices.shape[:-1], *inner):
        raise Unsupported(f"updates of shape {tuple(updates.shape)} for indices of shape {tuple(indices.shape)}")
    return table, rows, updates.reshape(rows.numel(), *inner)


def _changed(node: Node, variable: Tensor, table: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """The variable, after rows of it, seen as a table, were changed in place as the op's name ends."""
    _CHANGES[node.op.removeprefix("Scatter").removeprefix("Nd")](node, table, indices, updates)
    return variable


def _add(node: Node, table: Tensor, indices: Tensor, updates: Tensor, *, subtract: bool = False) -> None:
    table, updates = in_signed(table), in_signed(updates)
    # Neither +0 taken away nor -0 added changes the sign of a zero.
    neutral = 0 if not _is_real_or_complex(table) else 0.0 if subtract else -0.0
    places, values = _harmless(table, indices, updates, neutral)
    if places is not None:
        table.index_add_(0, places, values, alpha=-1 if subtract else 1)


def _reduce(node: Node, table: Tensor, indices: Tensor, updates: Tensor, *, how: str) -> None:
    if how == _MULTIPLY:
        table, updates = in_signed(table), in_signed(updates)
    else:
        updates = without_nan(updates, how)
    places, values = _harmless(table, indices, updates, _neutral(how, table.dtype))
    if places is not None:
        index = places.reshape(-1, *(1 for _ in values.shape[1:])).expand(values.shape)
        table.scatter_reduce_(0, index, values, how)


def _divide(node: Node, table: Tensor, indices: Tensor, updates: Tensor) -> None:
    rounding = None if _is_real_or_complex(table) else "trunc"
    if table.device.type != "cpu" and indices.numel():
        indices, updates = _divisors(node, table, indices, updates)
    change_rows([table], indices, updates, lambda old, rows: [torch.div(old[0], rows, rounding_mode=rounding)])


def _put(node: Node, table: Tensor, indices: Tensor, updates: Tensor) -> None:
    change_rows([in_signed(table)], indices, in_signed(updates), lambda _, rows: [rows])


_CHANGES: dict[str, Callable[[Node, Tensor, Tensor, Tensor], None]] = {
    "Add": _add,
    "Sub": functools.partial(_add, subtract=True),
    "Mul": functools.partial(_reduce, how=_MULTIPLY),
    "Min": functools.partial(_reduce, how=_LEAST),
    "Max": functools.partial(_reduce, how=_LARGEST),
    "Div": _divide,
    "Update": _put,
}
"""Changes of rows by the end of the op's name."""


def _divisors(node: Node, table: Tensor, indices: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
    """Each index where it comes first, -1 elsewhere, and there the product of all its updates, in float64.

    A product of more than 53 bits is a rounded one, by which integers of 32 bits are divided right.

    Raises:
        Unsupported: float64 does not hold the variable's numbers.
    """
    if table.is_complex() or table.dtype in (torch.int64, torch.uint64):
        raise Unsupported(
            f"{node.name}: rows of {dtype_name(table.dtype)} are not divided on a GPU, where ids may come twice"
        )
    first, places = unique_padded(node, indices)
    rows = updates.to(torch.float64)
    index = places.to(torch.int64).reshape(-1, *(1 for _ in rows.shape[1:])).expand(rows.shape)
    return first, torch.ones_like(rows).scatter_reduce_(0, index, rows, _MULTIPLY)


def _harmless(table: Tensor, indices: Tensor, updates: Tensor, neutral: float) -> tuple[Tensor | None, Tensor]:
    """Rows to change, and with what: in the place of those that there are none of the first one, with what changes nothing."""
    size = table.shape[0]
    if not indices.numel() or not size:
        return None, updates
    inside = (indices >= 0) & (indices < size)
    aligned = inside.reshape(-1, *(1 for _ in updates.shape[1:]))
    return torch.where(inside, indices, 0).to(torch.int64), torch.where(aligned, updates, neutral)


def _neutral(how: str, dtype: torch.dtype) -> float:
    if how == _MULTIPLY:
        return 1
    if dtype.is_floating_point:
        return math.inf if how == _LEAST else -math.inf
    return int(torch.iinfo(dtype).max if how == _LEAST else torch.iinfo(dtype).min)


def _is_real_or_complex(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())
