"""What the kernels of sparse updates are to compute, against PyTorch's operators on the CPU: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import itertools

import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels import sparse_optimizers as kernel
from msplit.engines.cuda.ops.sparse_optimizers import ROW_OPTIMIZERS

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


def check_updates(device: str, repeat: int = 1, most: int = kernel.MOST_COMPARED) -> None:
    """Every optimizer on tables of several shapes, ids that come often and ids that there are no rows of, `repeat` times in a row."""
    known = {op: option for op, (option, _) in kernel.OPTIONS.items()}
    assert known.keys() == COUNTS.keys()
    cases = [(op, on, torch.float32) for op, option in known.items() for on in ((False, True) if option else (False,))]
    cases += [("SparseApplyFtrl", None, torch.float32), ("SparseApplyAdadelta", False, torch.float64)]
    for number, ((op, on, dtype), summed) in enumerate(itertools.product(cases, (False, True))):
        kernel.MOST_COMPARED = 0 if number % 4 in (1, 2) else most
        _check(op, on, dtype, summed, torch.int64 if number % 3 else torch.int32, device, repeat)
    kernel.MOST_COMPARED = most


def _check(op, on, dtype, summed, index, device, repeat) -> None:
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
        given.append((rows, torch.tensor(ids * repeat, dtype=index)))
    given[0][0][3:5] = float("nan")
    numbers = [torch.tensor(0.3 + 0.1 * place, dtype=dtype) for place in range(COUNTS[op])]
    if "Ftrl" in op:
        numbers[-1] = torch.tensor(-0.3 if on is None else -0.5, dtype=dtype)
    attrs = {kernel.OPTIONS[op][0]: bool(on), "op": op, "count": len(SHAPES), "summed": summed}
    there = [[one.clone().to(device) for one in slot] for slot in state]
    rows, ids = ([one[part].to(device) for one in given] for part in (0, 1))
    pairs = list(zip(rows, ids, strict=True))
    kernel.update_rows(op, attrs, there, [one.to(device) for one in numbers], pairs, summed=summed)
    flat = [one for slot in state for one in slot]
    table()["_ApplyRows"].function(
        Node("node", "_ApplyRows", attrs), *flat, *numbers, *itertools.chain(*zip(*given, strict=True))
    )
    narrow = 2e-6 * repeat if dtype == torch.float32 else 1e-13 * repeat
    for found, right in zip((one for slot in there for one in slot), flat, strict=True):
        torch.testing.assert_close(found.cpu(), right, rtol=narrow, atol=narrow, equal_nan=True)


def check_distinct(device: str, count: int = 11) -> None:
    """Where each id stands first."""
    for index, places in itertools.product((torch.int32, torch.int64), repeat=2):
        ids = torch.randint(-1, 5, (count,), generator=torch.Generator().manual_seed(1)).to(index)
        node = Node("node", "_UniquePadded", {"out_idx": str(places).removeprefix("torch.")})
        expected = table()["_UniquePadded"].function(node, ids)
        for found, right in zip(kernel.distinct(ids.to(device), places), expected, strict=True):
            torch.testing.assert_close(found.cpu(), right)
