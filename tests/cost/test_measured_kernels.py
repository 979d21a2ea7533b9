"""Static times against kernels that were timed one by one on an H200: products and convolutions of nine models, from their shapes.

The constants serve these nine and eighteen others (`benchmarks/notes/foreign.md`); fitted to these nine alone they would be nearer here.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.core.graph import Floats
from msplit.cost import estimate
from msplit.schedule.machine import Machine
from msplit.shapes.infer import infer
from tests.shapes.small import Builder

MEASURED = Path(__file__).parents[2] / "benchmarks" / "schedulers" / "costs.json.gz"
PLAIN = ("Relu", "Square", "Sigmoid", "Softmax", "AddV2", "Mul", "Sub", "BatchMatMulV2")
"""Ops whose result follows from the shapes of their inputs."""


def _node(b: Builder, kernel: dict[str, Any]) -> int | None:
    """The kernel's op over inputs of its shapes; None where these do not say what it computes."""
    op, shapes = kernel["op"].replace("_Fused", ""), [tuple(one[1]) for one in kernel["inputs"]]
    written = (kernel["bytes"] - sum(4 * math.prod(shape) for shape in shapes)) / 4
    if op == "MatMul":
        return b.add("MatMul", b.input("x", shapes[0]), b.weight(*shapes[1]), T="float32")
    if op == "Conv2D":
        for stride, padding in itertools.product((1, 2), ("SAME", "VALID")):
            window = [1 if padding == "SAME" else size for size in shapes[1][:2]]
            places = [(size - side) // stride + 1 for size, side in zip(shapes[0][1:3], window, strict=True)]
            if math.prod(places) * shapes[1][-1] == written:
                given: dict[str, Any] = {"strides": (1, stride, stride, 1), "padding": padding, "T": "float32"}
                return b.add("Conv2D", b.input("x", shapes[0]), b.weight(*shapes[1]), **given)
    if op in PLAIN and not (op == "BatchMatMulV2" and shapes[0][-1] != shapes[1][-2]):
        return b.add(op, *(b.input(str(slot), shape) for slot, shape in enumerate(shapes)), T="float32")
    return None


@dataclass(frozen=True, eq=False)
class Compared:
    """Kernels of a model, each as often as the model has it; times in µs, the measured share NaN where it was too small to tell.

    What is measured is what a kernel takes in the model: alone it finds its weights and its own code in the caches, so its time is
    scaled by that of a whole step over that of all kernels alone.
    """

    static: Floats
    measured: Floats
    share: Floats
    measured_share: Floats


def _compared(row: dict[str, Any]) -> Compared:
    kernels = row["profile"]["kernels"]
    uses = np.bincount(
        [step["kernel"] for step in row["profile"]["steps"] if step["kernel"] >= 0], minlength=len(kernels)
    )
    whole = sum(kernel["time_us"] * count for kernel, count in zip(kernels, uses.tolist(), strict=True))
    company = (row["profile"]["one_us"] - Machine.step_us) / whole
    found = []
    for kernel, count in zip(kernels, uses.tolist(), strict=True):
        b = Builder()
        node = _node(b, kernel)
        if node is not None:
            flat = b.flat()
            costs = estimate(flat, infer(flat), "h200")
            share = math.nan if kernel["share"] is None else kernel["share"]
            found += [(costs.time_us[node], kernel["time_us"] * company, costs.share[node], share)] * count
    return Compared(*np.array(found).T)


@pytest.fixture(scope="module")
def models() -> dict[str, Compared]:
    rows = json.loads(gzip.decompress(MEASURED.read_bytes()))["models"]
    return {row["model"]: _compared(row) for row in rows}


def test_the_median_kernel_of_every_model_is_near(models: dict[str, Compared]) -> None:
    medians = {name: float(np.median(of.static / of.measured)) for name, of in models.items()}
    assert len(medians) == 9
    assert {name: ratio for name, ratio in medians.items() if not 0.88 <= ratio <= 1.12} == {}


def test_most_kernels_are_within_a_quarter_and_in_the_right_order(models: dict[str, Compared]) -> None:
    static = np.concatenate([of.static for of in models.values()])
    measured = np.concatenate([of.measured for of in models.values()])
    assert len(static) > 700
    assert np.mean(np.abs(static / measured - 1) < 0.25) > 0.87
    assert np.corrcoef(np.log(static), np.log(measured))[0, 1] > 0.93


def test_a_whole_model_takes_what_its_kernels_take(models: dict[str, Compared]) -> None:
    wholes = {name: float(of.static.sum() / of.measured.sum()) for name, of in models.items()}
    assert {name: ratio for name, ratio in wholes.items() if not 0.87 <= ratio <= 1.12} == {}


def test_the_share_of_the_gpu_is_of_the_right_size(models: dict[str, Compared]) -> None:
    static = np.concatenate([of.share for of in models.values()])
    measured = np.concatenate([of.measured_share for of in models.values()])
    told = np.isfinite(measured)
    # Side by side with fifteen of its like, no kernel takes less than a sixteenth.
    ratio = np.maximum(static, 1 / 16)[told] / measured[told]
    assert told.sum() > 200
    assert 0.6 < np.median(ratio) < 1.2
    assert np.mean((ratio > 0.4) & (ratio < 2.5)) > 0.85
