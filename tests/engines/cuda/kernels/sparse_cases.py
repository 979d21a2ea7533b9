"""What the kernels of sparse updates are to compute, against PyTorch's operators on the CPU: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ir.program import State, StateMemory
from msplit.engines.cuda.kernels import optimizers as kernel
from msplit.engines.cuda.kernels.optimizer_formulas import ROW_OPTIMIZERS

IDS = [[3, 1, 3, -1, 3, 6, 1, 9], [5], [0, 0], [-1, 7]]
SHAPES = [(7, 5), (7,), (7, 2, 2), (7, 1)]
COUNTS = {
    "ScatterAdd": 0,
    "ScatterSub": 0,
    "SparseApplyAdadelta": 3,
    "SparseApplyAdagrad": 1,
    "SparseApplyAdagradV2": 2,
    "SparseApplyCenteredRMSProp": 4,
    "SparseApplyFtrl": 4,
    "SparseApplyFtrlV2": 5,
    "SparseApplyKerasMomentum": 2,
    "SparseApplyMomentum": 2,
    "SparseApplyRMSProp": 4,
}
"""How many numbers each takes."""


def check_updates(
    device: str, repeat: int = 1, most: int = kernel.MOST_COMPARED, *, hosted: frozenset[int] = frozenset()
) -> None:
    """Every optimizer on tables of several shapes, ids that come often and ids that there are no rows of, `repeat` times in a row. Tables
    of these numbers lie in the host's memory, their slots in turn."""
    known = {op: option for op, (option, _) in kernel.ROW_OPTIONS.items()}
    assert known.keys() == COUNTS.keys()
    cases = [(op, on, torch.float32) for op, option in known.items() for on in ((False, True) if option else (False,))]
    cases += [("SparseApplyFtrl", None, torch.float32), ("SparseApplyAdadelta", False, torch.float64)]
    for number, ((op, on, dtype), summed) in enumerate(itertools.product(cases, (False, True))):
        kernel.MOST_COMPARED = 0 if number % 4 in (1, 2) else most
        index = torch.int64 if number % 3 else torch.int32
        _check(
            op,
            {option_of(op): bool(on)},
            dtype,
            index,
            device,
            repeat,
            summed=summed,
            power=-0.3 if on is None else -0.5,
            hosted=hosted,
        )
    kernel.MOST_COMPARED = most
    for combiner in ("sum", "mean", "sqrtn"):
        for summed in (False, True):
            _check(
                "SparseApplyAdagrad", {"combiner": combiner}, torch.float32, torch.int64, device, repeat, summed=summed
            )


def option_of(op: str) -> str:
    """The attribute that the kernel looks at."""
    return kernel.ROW_OPTIONS[op][0]


def _check(op, options, dtype, index, device, repeat, *, summed, power=-0.5, hosted=frozenset()) -> None:
    draw = torch.Generator().manual_seed(0)
    state = [
        [torch.rand(shape, generator=draw, dtype=dtype) + (slot > 0) for shape in SHAPES]
        for slot in range(ROW_OPTIMIZERS[op].variables)
    ]
    if op == "SparseApplyCenteredRMSProp":
        state[1] = [one * 0.01 for one in state[1]]
    given = []
    for ids, shape in zip(IDS, SHAPES, strict=True):
        rows = torch.randn((len(ids) * repeat, *shape[1:]), generator=draw, dtype=dtype) * (0.1 if repeat > 1 else 1)
        segments = torch.randint(-1, len(rows) + 1, (len(rows),), generator=draw).to(index)
        each = (rows, torch.tensor(ids * repeat, dtype=index), segments)
        given.append(each if "combiner" in options else each[:2])
    given[0][0][3:5] = float("nan")
    numbers = [torch.tensor(0.3 + 0.1 * place, dtype=dtype) for place in range(COUNTS[op])]
    if "Ftrl" in op:
        numbers[-1] = torch.tensor(power, dtype=dtype)
    attrs = {**options, "op": op, "count": len(SHAPES), "summed": summed}
    arrays = {
        f"{slot} {table}": one.numpy().copy() for slot, every in enumerate(state) for table, one in enumerate(every)
    }
    keys = {name: (number, 0) for number, name in enumerate(arrays)}
    with_host = frozenset(f"{slot} {(table + slot) % len(SHAPES)}" for slot in range(len(state)) for table in hosted)
    memory = StateMemory(State(keys, keys, initial=arrays, hosted=with_host), torch.device(device))
    there = [[memory.tensors[f"{slot} {table}"] for table in range(len(SHAPES))] for slot in range(len(state))]
    sent = [tuple(one.to(device) for one in each) for each in given]
    kernel.update_rows(op, attrs, there, [one.to(device) for one in numbers], sent, summed=summed)
    flat = [one for slot in state for one in slot]
    table()["_ApplyRows"].function(
        Node("node", "_ApplyRows", attrs), *flat, *numbers, *itertools.chain(*zip(*given, strict=True))
    )
    narrow = 2e-6 * repeat if dtype == torch.float32 else 1e-13 * repeat
    assert len(memory.hosted) == len(with_host)
    saved = memory.save()
    for name, right in zip(arrays, flat, strict=True):
        torch.testing.assert_close(torch.from_numpy(saved[name]), right, rtol=narrow, atol=narrow, equal_nan=True)


def check_segments(device: str, repeat: int = 1) -> None:
    """Gradients of rows of segments."""
    draw = torch.Generator().manual_seed(0)
    for combiner, shape, index in itertools.product(("Sum", "Mean", "SqrtN"), SHAPES, (torch.int32, torch.int64)):
        places = torch.randint(0, 5, (9 * repeat,), generator=draw).to(index)
        segments = torch.randint(-1, 8, (9 * repeat,), generator=draw).to(index)
        grad, op = torch.randn(shape, generator=draw), f"SparseSegment{combiner}Grad"
        expected = table()[op].function(Node("node", op), grad, places, segments, np.int32(6))
        sent = (one.to(device) for one in (grad, places, segments))
        found = kernel.segment_gradient(*sent, 6, combiner.lower())
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    one, zero = torch.ones(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for combiner in ("sum", "mean", "sqrtn"):  # Triton makes constants of ones
        assert kernel.segment_gradient(one, zero, zero, 1, combiner).tolist() == [[1]]


def check_distinct(device: str, count: int = 11) -> None:
    """Where each id stands first."""
    for index, places in itertools.product((torch.int32, torch.int64), repeat=2):
        ids = torch.randint(-1, 5, (count,), generator=torch.Generator().manual_seed(1)).to(index)
        node = Node("node", "_UniquePadded", {"out_idx": str(places).removeprefix("torch.")})
        expected = table()["_UniquePadded"].function(node, ids)
        for found, right in zip(kernel.distinct(ids.to(device), places), expected, strict=True):
            torch.testing.assert_close(found.cpu(), right)
