"""Calls lowerings: one op on given values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.lowering import Lowering, table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.errors import EngineError

LARGEST_FOLDED = 1 << 28
"""Bytes: a constant expression that would grow beyond this (a Fill, a Tile) is computed in the run instead."""


def evaluate(op: Op, inputs: list[NDArray[Any]]) -> list[NDArray[Any]] | None:
    """Runs one op on the CPU, on values that are known; None if its results are too large to keep on the host."""
    lowering = table()[op.op]
    static = positions(lowering, len(inputs))
    arguments = [
        value if slot in static else to_torch(np.asarray(value), torch.device("cpu"))
        for slot, value in enumerate(inputs)
    ]
    with torch.no_grad():
        results = as_tuple(call(lowering, op, arguments))
    size = sum(result.numel() * result.element_size() for result in results)
    if size > LARGEST_FOLDED > sum(value.nbytes for value in inputs):
        return None
    # A copy of what is broadcast: a view of stride zero is no array that can be laid side by side with others.
    return [to_numpy(result.contiguous()) for result in results]


def call(lowering: Lowering, op: Op, arguments: list[Any], *, nchw: bool = False) -> Any:
    """Calls a lowering and turns what it refuses into an error that names the node."""
    try:
        return lowering.function(Node(op.name, op.op, op.attrs, nchw), *arguments)
    except Unsupported as problem:
        raise EngineError(
            f"{op.op}: {problem}", where=f"node {op.name}", fix="use --engine tensorflow for this model"
        ) from problem
    except KeyError as problem:
        raise EngineError(
            f"{op.op}: the attribute {problem} is missing", where=f"node {op.name}", fix="export the model again"
        ) from problem
    except torch.OutOfMemoryError as problem:
        raise EngineError(
            f"{op.op}: {str(problem).splitlines()[0].split(' GPU ')[0]}",
            where=f"node {op.name}",
            fix="use a smaller --batch or fewer --streams, --no-fuse and --no-group: what is compared is on the GPU at the same time",
        ) from problem
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as problem:
        raise EngineError(
            f"{op.op} failed: {next(iter(str(problem).splitlines()), type(problem).__name__)}",
            where=f"node {op.name}",
            fix="check the shapes of the inputs (--shape, --batch); if TensorFlow runs it with the same inputs, report a bug in msplit",
        ) from problem


def positions(lowering: Lowering, count: int) -> set[int]:
    """The static positions of a lowering, negative ones resolved."""
    return {slot % count for slot in lowering.static if -count <= slot < count}


def as_tuple(result: Any) -> tuple[Any, ...]:
    """A lowering's result as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)
