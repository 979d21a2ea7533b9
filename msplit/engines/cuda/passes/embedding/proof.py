"""What the rules of the densifier share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op


@dataclass
class Proof:
    """What an op turned out to be.

    Attributes:
        outputs: Per output port the value that takes its place, or the array that it is in every run.
        ops: New ops in topological order. They read inputs of the op, values of earlier proofs, and one another.
        stays: Whether the op stays, because not every output is proved. It does if none is.
    """

    outputs: dict[int, Key | NDArray[Any]] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    stays: bool = False


def is_grid(indices: NDArray[Any], sizes: tuple[int, ...]) -> bool:
    """Whether a matrix of coordinates names every position of a tensor of these sizes once, in row-major order."""
    if indices.ndim != 2 or indices.shape != (math.prod(sizes), len(sizes)):
        return False
    return bool(np.array_equal(indices, np.indices(sizes).reshape(len(sizes), -1).T))


def run_length(ids: NDArray[Any]) -> int:
    """k where ids are 0 k times, 1 k times, and so on; 0 where they are anything else."""
    if ids.ndim != 1 or not ids.size:
        return 0
    rows = int(ids[-1]) + 1
    if rows < 1 or ids.size % rows:
        return 0
    length = ids.size // rows
    return length if np.array_equal(ids, np.repeat(np.arange(rows), length)) else 0
