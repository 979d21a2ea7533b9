"""Updates of variables by optimizers, or only of the rows that a gradient names, in place, by `kernels.optimizer_formulas`.

On a GPU variables of float32 and float64 are updated by our own kernels (`kernels.optimizers`), which compute
the same.

Of rows, nothing is as large as the variable. Indices are as in `ops.variables`: those out of range change nothing. An index that comes
several times makes its steps one after the other, as in TensorFlow's kernels on the CPU, on a GPU by our own kernel. Where that can not be,
one of them is made, as TensorFlow's GPU kernels leave it open: its optimizers sum the rows of an index up before.

Loss scaling on the device: gradients are unscaled, and the scale follows what they were. See `frontend.importer`.

Also the exchange between processes that train together: see `distributed.allreduce`, which puts these ops in front of updates.

Each op is one collective on one flat buffer, and hands a token to the next one: all processes have to say the same in the same order,
whatever the order is in which each has what it says.

Copies from one GPU to another, which only `distributed.split` puts in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.device.device import Device, check, reads, runtime
from msplit.engines.cuda.device.ranks import ProcessGroup, Ranks
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels import optimizers as sparse
from msplit.engines.cuda.kernels import optimizers as whole
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.memory import copy
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS, ROW_OPTIMIZERS, SPARSE_OPTIMIZERS, Optimizer
from msplit.engines.cuda.kernels.optimizers import Given, compares, convert
from msplit.engines.cuda.ops.embedding import rows_of_segments, sum_rows
from msplit.engines.cuda.ops.reduce import unique_padded
from msplit.engines.cuda.ops.variables import all_nowhere_unless, apart, change_rows, fit

GROWTH_STEPS = 2000
"""Steps with finite gradients after which the scale is doubled: what Keras and TensorFlow 1 have."""


@lowering("_Unscale", own=True)
def unscale(node: Node, scale: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Gradients divided by the scale, a power of two, and behind them whether all of them are finite."""
    by = scale.reciprocal()
    # PyTorch multiplies up to a hundred that have no gaps by one kernel. Those with gaps, as gradients of what is joined have, are joined
    # by shape before, and then are parts again, since a block has a part to itself.
    gaps: dict[Any, list[int]] = {}
    for place, one in enumerate(gradients):
        if not one.is_contiguous():
            gaps.setdefault((one.shape, one.dtype), []).append(place)
    dense = dict(enumerate(gradients))
    for places in gaps.values():
        dense.update(zip(places, torch.stack([gradients[place] for place in places]).unbind(), strict=True))
    found = torch._foreach_mul([*dense.values()] or [by], by)[: len(dense)]
    infinite = torch.zeros_like(by)
    if scale.device.type != "meta":
        torch._amp_foreach_non_finite_check_and_unscale_(found, infinite, torch.ones_like(by))
    return *found, infinite == 0


@lowering("_AllTrue", own=True)
def all_true(node: Node, *flags: Tensor) -> Tensor:
    """Returns whether all of several are true."""
    return torch.stack(flags).all()


@lowering("_UpdateLossScale", own=True)
def update_loss_scale(node: Node, scale: Tensor, steps: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Halves the scale, to 1 at least, where gradients were not finite, and doubles it after so many steps with finite ones."""
    if scale.device.type != "meta":
        counted = steps.clamp(max=GROWTH_STEPS - 1).to(torch.int32)
        torch._amp_update_scale_(scale, counted, (~finite).to(torch.float32), 2.0, 0.5, GROWTH_STEPS)
        scale.clamp_(min=1)
        steps.copy_(counted)
    return scale, steps


def keep(finite: Tensor, variables: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Gives variables the values that they had before, where gradients were not finite."""
    for variable, value in zip(variables, before, strict=True):
        variable.copy_(torch.where(finite, variable, value))


def _register(op: str, optimizer: Optimizer) -> None:
    """Makes a formula the lowering of an op."""
    of_rows = optimizer.indices >= 0

    def lowered(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        state, numbers, *given = optimizer.parts(inputs)
        slots = [[one] for one in state]
        if of_rows:
            _update_rows(node, op, slots, numbers, [tuple(given)])
        else:
            _update_whole(node, op, slots, numbers, [given])
        return tuple(state)

    lowered.__doc__ = f"A step on rows. {optimizer.formula.__doc__}" if of_rows else optimizer.formula.__doc__
    lowering(op, mutates=tuple(range(optimizer.variables)))(lowered)


for _op, _row in (OPTIMIZERS | SPARSE_OPTIMIZERS).items():
    _register(_op, _row)


@lowering("_ApplyFlat", own=True)
def apply_flat(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Updates many variables as the op that the attribute `op` names does one of them, as if they were one flat tensor.

    Inputs are the `count` trained variables, then as many of each slot, the numbers that all share, and the gradients. With the attribute
    `ranks` these are of so many ranks, one's behind the other's, and their mean is taken.
    """
    op, count = node.attrs["op"], node.attrs["count"]
    last, own = OPTIMIZERS[op].variables * count, count * node.get("ranks", 1)
    state = [inputs[start : start + count] for start in range(0, last, count)]
    gradients = [inputs[-start : count - start or None] for start in range(own, 0, -count)]
    _update_whole(node, op, state, inputs[last:-own], gradients)
    return tuple(inputs[:last])


def _update_whole(
    node: Node,
    op: str,
    state: Sequence[Sequence[Tensor]],
    numbers: Sequence[Tensor],
    every: Sequence[Sequence[Tensor]],
) -> None:
    """Updates variables, given slot by slot, by the mean of the gradients of each rank, in one kernel or one after the other. With the
    attribute `guarded` the last number is whether anything is to be changed."""
    for same in zip(*state, *every, strict=True):
        fit(node, *same)
    finite = None
    if node.get("guarded", False):
        *numbers, finite = numbers
    written = [one for slot in state for one in slot]
    numbers, every = apart(numbers, written), [apart(each, written) for each in _distinct(every)]
    if whole.fits(op, written, numbers):
        whole.update(op, node.attrs, state, numbers, every, finite)
        return
    gradients = _mean(every)
    before = [] if finite is None else [one.clone() for one in written]
    for variables, gradient in zip(zip(*state, strict=True), gradients, strict=True):
        for old, new in zip(variables, OPTIMIZERS[op].step(node.attrs, variables, numbers, gradient), strict=True):
            if new is not old:
                old.copy_(new)
    if finite is not None:
        keep(finite, written, before)


@lowering("_ApplyRows", own=True)
def apply_rows(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Updates rows of many variables as the op that the attribute `op` names does of one.

    Inputs are the `count` trained variables, then as many of each slot, the numbers that all share, the gradients, and the indices. With
    the attribute `summed` rows of one index are summed up before. With `combiner`, which is how rows of a segment were put together, the
    segments of the indices follow, and the gradients are those of segments.
    """
    op, count = node.attrs["op"], node.attrs["count"]
    last = ROW_OPTIMIZERS[op].variables * count
    state = [inputs[start : start + count] for start in range(0, last, count)]
    own = (3 if node.get("combiner") else 2) * count
    given = list(zip(*(inputs[-start : count - start or None] for start in range(own, 0, -count)), strict=True))
    _update_rows(node, op, state, inputs[last:-own], given, summed=bool(node.attrs["summed"]))
    return tuple(inputs[:last])


def _update_rows(
    node: Node,
    op: str,
    state: Sequence[Sequence[Tensor]],
    numbers: Sequence[Tensor],
    given: Sequence[Given],
    *,
    summed: bool = False,
) -> None:
    """Updates rows of variables, given slot by slot, each by its gradient's rows at its indices. With the attribute `guarded` the last
    number is whether any is to be changed."""
    if node.get("guarded", False):
        *numbers, finite = numbers
        places = all_nowhere_unless(finite, [indices for _, indices, *_ in given])
        given = [(rows, there, *more) for (rows, _, *more), there in zip(given, places, strict=True)]
    written = [one for slot in state for one in slot]
    numbers = apart(numbers, written)
    gradients = apart([rows for rows, *_ in given], written)
    given = [(rows, *more) for rows, (_, *more) in zip(gradients, given, strict=True)]
    combiner = str(node.get("combiner", ""))
    if combiner and not (sparse.rows_fit(op, state, numbers, given) and compares(given)):
        given = [(rows_of_segments(rows, segments, combiner), indices) for rows, indices, segments in given]
    if sparse.rows_fit(op, state, numbers, given):
        sparse.update_rows(op, node.attrs, state, numbers, given, summed=summed)
        return
    optimizer = ROW_OPTIMIZERS[op]
    for variables, (rows, indices, *_) in zip(zip(*state, strict=True), given, strict=True):
        if summed:
            indices, places = unique_padded(node, indices)
            rows = sum_rows(rows, places, indices.shape[0])
        change_rows(variables, indices, rows, lambda old, new: optimizer.step(node.attrs, old, numbers, new))


_ALIGNED = 16
"""Bytes: every value begins at a multiple of it in a flat buffer, since kernels read 16 bytes at a time."""


@lowering("_AllReduce", own=True)
def all_reduce(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The mean over all ranks of each of `count` values, which lie side by side. Behind them comes the token of the op before, if any.

    With the attribute `ranks` the values of each rank instead, where they lie, one rank's behind the other's; or their means so many times,
    where these are faster to make. Both stay until the next `_AllWait`.
    """
    values, ranks = inputs[: node.attrs["count"]], node.get("ranks", 1)
    step = _ALIGNED // values[0].element_size()
    sizes = [-(-max(value.numel(), 1) // step) * step for value in values]
    group = _group(values[0])
    if group is None:
        flat = values[0].new_empty(sum(sizes))
    else:
        flat = group.room(values[0], sum(sizes), node.attrs["message"], by_rank=ranks > 1)

    def parts(flat: Tensor) -> list[Tensor]:
        every = zip(torch.split(flat, sizes), values, strict=True)
        return [part[: value.numel()].view(value.shape) for part, value in every]

    _pack(values, parts(flat))
    every = None if group is None or ranks == 1 else group.read(flat)
    if group is not None and every is None:
        group.average(flat)
    return *(part for one in every or [flat] * ranks for part in parts(one)), _token(flat)


def _pack(values: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copies values to where they lie side by side. Of whole vectors without gaps one kernel does it on a GPU: see `convert`."""
    own = can_launch(parts[0].device)
    whole = [
        own and one.is_contiguous() and not one.nbytes % _ALIGNED and not one.data_ptr() % _ALIGNED for one in values
    ]
    others = [number for number, alone in enumerate(whole) if not alone]
    if others:
        torch._foreach_copy_([parts[one] for one in others], [values[one] for one in others])
    convert([*compress(values, whole)], [*compress(parts, whole)])


@lowering("_AllWait", own=True)
def all_wait(node: Node, like: Tensor) -> Tensor:
    """Waits until all ranks are in this step, and so none reads what a message of the last one brought. A token, for the first message."""
    group = _group(like)
    if group is not None:
        group.wait(like.device)
    return like.new_empty(1, dtype=torch.uint8)


@lowering("_AllMean", own=True)
def all_mean(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The means over all ranks of values that `_AllReduce` gave of each: `count` of the first rank, as many of the next one."""
    count = node.attrs["count"]
    every = _distinct([inputs[start : start + count] for start in range(0, len(inputs), count)])
    return tuple(_mean(every) if len(every) > 1 else [one.clone() for one in every[0]])


def _distinct(every: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Values by rank; those of the first alone where all have the same memory, and so are their own mean."""
    same = all(one.data_ptr() == first.data_ptr() for each in every for one, first in zip(each, every[0], strict=True))
    return every[:1] if same else every


def _mean(every: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Means of values by rank, summed up in that order."""
    found, *others = every
    for each in others:
        found = torch._foreach_add(found, each)
    return torch._foreach_div(found, len(every)) if others else found


@lowering("_AllGather", own=True)
def all_gather(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The rows of all ranks of each of `count` values, one rank's behind the other's. Behind the values comes the token of the op before.

    Those that `scaled` says are divided by the number of ranks: rows of a gradient of a mean over fewer rows.
    """
    ranks, values = node.attrs["ranks"], list(inputs[: node.attrs["count"]])
    rows = [number for number, scaled in enumerate(node.attrs["scaled"]) if scaled]
    for number, scaled in zip(
        rows, torch._foreach_div([values[one] for one in rows], ranks) if rows else (), strict=True
    ):
        values[number] = scaled
    own = [value.contiguous() for value in values]
    group = _group(own[0])
    if group is None:
        every = [one.repeat(ranks, *[1] * (one.dim() - 1)) for one in own]
    else:
        every = [one.new_empty((ranks * one.shape[0], *one.shape[1:])) for one in own]
        group.gather(every, own)
    return *every, _token(own[0])


@lowering("_OwnSteps", own=True)
def own_steps(node: Node, steps: Tensor) -> Tensor:
    """A number of a step that no other rank has, so that each draws other random numbers for its rows."""
    group = _group(steps)
    return steps * node.attrs["ranks"] + (0 if group is None else group.rank)


def _group(tensor: Tensor) -> ProcessGroup | None:
    """The processes that take part; none where only shapes are wanted."""
    return None if tensor.is_meta else Device.of(tensor.device).owned(Ranks).group


def _token(like: Tensor) -> Tensor:
    """Says nothing but what comes behind what."""
    return like.new_empty(0, dtype=torch.uint8)


_BY_ADDRESS = 4  # cudaMemcpyDefault


@lowering("_PeerCopy", own=True)
def peer_copy(node: Node, tensor: Tensor) -> Tensor:
    """The tensor on the GPU whose number is the attribute `device`, copied on the current stream, which is that GPU's.

    A kernel reads it where it lies: in a captured graph that takes a sixth of what a copy by CUDA does, which is for GPUs that do not read
    each other. PyTorch's own copy makes the current streams of both GPUs wait for each other, where the plan orders them, and can not be
    captured, as ``cudaMemcpyPeerAsync`` can not. On the CPU, where devices are simulated, it is a copy.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    place = torch.device("cuda", int(node.get("device")))
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
    if tensor.numel():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        source, target = tensor.as_strided((span,), (1,)), made.as_strided((span,), (1,))
        if can_launch(place) and reads(place, tensor.device):
            copy(source, target)
        else:
            call, pointer = runtime().cudaMemcpyAsync, ctypes.c_void_p
            call.argtypes = (pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer)
            stream = torch.cuda.current_stream(place).cuda_stream
            check(call(target.data_ptr(), source.data_ptr(), source.nbytes, _BY_ADDRESS, stream))
    return made
