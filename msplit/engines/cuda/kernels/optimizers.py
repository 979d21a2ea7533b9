"""Updates of variables by an optimizer, all that it updates alike in one kernel, and their conversion to half precision. On a GPU.

Updates are bound by how often they are launched: with PyTorch's operators Adam takes twelve kernels per variable, and a model has hundreds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.device.capture import is_capturing, keep
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.launch import Code, can_launch, launch
from msplit.engines.cuda.kernels.optimizer_formulas import ROWS

_UPDATE, _CONVERT = Code("optimizers", "update"), Code("optimizers", "convert")

OPTIONS = {f"Apply{row.name}": row.flag for row in ROWS if row.kernel}
"""The optimizers that the kernel knows: the attribute that it looks at, and what that is where the file left it out."""

DTYPES = (torch.float32, torch.float64)
"""Types that it computes in. TensorFlow rounds narrower ones after each operation, which operators of PyTorch do as well."""

_BLOCK = 1024

_NUMBERS = 6
"""Arguments of the kernel for numbers."""

_PROGRAMS = 4096
"""Programs that one launch has about at most, however many elements there are: a table has a row for each."""


def fits(op: str, variables: Sequence[Tensor], numbers: Sequence[Tensor]) -> bool:
    """True if the kernel can update these variables with these numbers."""
    dtype, place = variables[0].dtype, variables[0].device
    return (
        op in OPTIONS
        and dtype in DTYPES
        and all(one.is_contiguous() for one in variables)
        and all(one.dtype == dtype and one.device == place for one in (*variables, *numbers))
        and can_launch(place)
    )


def update(
    op: str,
    attrs: Mapping[str, Any],
    state: Sequence[Sequence[Tensor]],
    numbers: Sequence[Tensor],
    gradients: Sequence[Tensor],
    finite: Tensor | None = None,
) -> None:
    """Updates variables in place.

    Args:
        op: One of `OPTIONS`.
        attrs: The op's.
        state: The trained variables, and as many of each slot. Contiguous, on one GPU, of one of `DTYPES`.
        numbers: The op's inputs of one element of that type, in their order.
        gradients: One for each trained variable, of its shape.
        finite: True if anything is to be changed, on the GPU; None: it is.
    """
    gradients = [one.contiguous() for one in gradients]
    rows, steps, vector = _rows([*zip(*state, gradients, strict=True)])
    if not rows:
        return
    first = state[0][0]
    name, default = OPTIONS[op]
    launch(_UPDATE, (len(rows),))(
        on_device(rows, first.device),
        *numbers,
        *[numbers[0]] * (_NUMBERS - len(numbers)),
        numbers[0] if finite is None else finite.view(torch.uint8),
        OP=op.removeprefix("Apply"),
        OPTION=bool(attrs.get(name, default)),
        SLOTS=len(state),
        GUARDED=finite is not None,
        VECTOR=vector,
        T=first.dtype,
        BLOCK=_BLOCK,
        STEPS=steps,
        enable_fp_fusion=False,
    )


def convert(values: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Writes values, contiguous and of one type, to contiguous tensors of another. PyTorch gives 65,536 elements to a block, which takes
    17 µs for them.
    """
    rows, steps, vector = _rows([*zip(values, results, strict=True)])
    if rows:
        launch(_CONVERT, (len(rows),))(
            on_device(rows, values[0].device),
            VECTOR=vector,
            FROM=values[0].dtype,
            TO=results[0].dtype,
            BLOCK=_BLOCK,
            STEPS=steps,
        )


def _rows(alike: Sequence[Sequence[Tensor]]) -> tuple[list[list[int]], int, int]:
    """Rows of a table that say what each program works on, of tensors in rows of one size: addresses of its parts of them, and how many
    elements these have. Then how often it takes a block, and how many elements may come at once.
    """
    total = sum(row[0].numel() for row in alike)
    steps = 1 << (total // (_PROGRAMS * _BLOCK)).bit_length()
    share = steps * _BLOCK
    rows = [
        [*(one.data_ptr() + start * one.element_size() for one in row), min(share, row[0].numel() - start)]
        for row in alike
        for start in range(0, row[0].numel(), share)
    ]
    vector = 16 // min((one.element_size() for row in alike for one in row), default=16)
    aligned = all(not count % vector and not any(one % 16 for one in addresses) for *addresses, count in rows)
    return rows, steps, vector if aligned else 1


def on_device(rows: Sequence[Sequence[int]], place: torch.device) -> Tensor:
    """Rows on the device. Those of a graph that is being captured are there before it runs, and as long as it is."""
    if not is_capturing():
        return torch.tensor(rows, dtype=torch.int64, device=place)
    streams = Device.of(place).streams
    aside = streams.lease(1)
    with torch.cuda.stream(aside[0]):
        table = keep(torch.tensor(rows, dtype=torch.int64, device=place))
        aside[0].synchronize()
    streams.give_back(aside)
    return table
