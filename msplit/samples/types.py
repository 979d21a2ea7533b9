"""What a sample is: a frozen graph, the tensors to feed and the tensors to fetch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Input:
    """One placeholder of a sample.

    Attributes:
        name: Name of the placeholder node (without `:0`).
        dtype: NumPy name of its type, such as `float32` or `int32`.
        shape: Its shape; None stands for the batch where the batch is not fixed.
        high: For integer inputs, values are drawn from `0 <= value < high`; the size of the table they index.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    high: int | None = None


@dataclass(frozen=True)
class Sample:
    """A model built by this package.

    Attributes:
        name: The builder's name, such as `mmoe`.
        graph_def: A frozen inference graph (`tensorflow.GraphDef`), free of control flow.
        inputs: Its placeholders, in the order a user would list them.
        outputs: Names of the nodes to fetch (port 0 of each).
    """

    name: str
    graph_def: Any
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]


def make_inputs(sample: Sample, batch: int = 1, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Seeded values for every input of a sample, by placeholder name.

    Floating-point inputs are standard normal, those of rank four are images (blotches and noise); integer
    inputs are uniform over the rows of the table they index.

    Args:
        batch: Size of the batch. A sample whose batch is fixed keeps its own.
        seed: Equal seeds give equal values.

    Raises:
        ValueError: An integer input does not say how many rows its table has.
    """
    rng = np.random.default_rng(seed)
    values: dict[str, npt.NDArray[Any]] = {}
    for spec in sample.inputs:
        shape = tuple(batch if size is None else size for size in spec.shape)
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            values[spec.name] = (_images(rng, shape) if len(shape) == 4 else rng.standard_normal(shape)).astype(
                dtype, order="C"
            )
        elif spec.high is not None:
            values[spec.name] = rng.integers(0, spec.high, shape).astype(dtype)
        else:
            raise ValueError(
                f"input {spec.name!r} of sample {sample.name!r} is {dtype} but names no upper limit (high)"
            )
    return values


def _images(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Return images [n, height, width, channels] that differ from each other, as white noise does not once pooled."""
    count, height, width, channels = shape
    blotches = rng.standard_normal((count, 4, 4, channels))
    stretched = blotches[:, np.arange(height) * 4 // height][:, :, np.arange(width) * 4 // width]
    return np.asarray(0.8 * stretched + 0.6 * rng.standard_normal(shape))
