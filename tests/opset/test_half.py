"""The lists of half precision are TensorFlow's own."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from msplit.opset import schema
from msplit.opset.half import HALF, MASKING, WIDENING, Half

HEADER = "include/tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h"
NAMES = {"Allow": Half.GAINS, "Infer": Half.TAKES, "Deny": Half.LOSES, "Clear": Half.CARRIES}
ONLY_ON_CPUS = {"Rsqrt", "Square", "SquaredDifference"}
SHAPES = {"Rank", "Shape", "ShapeN", "Size"}
"""What the engine knows before anything runs."""


def lists() -> dict[str, Half]:
    """What the header of the installed TensorFlow says for CUDA."""
    found = find_spec("tensorflow")
    header = Path(str(found.origin)).parent / HEADER if found is not None else Path()
    if not header.is_file():
        pytest.skip("TensorFlow's headers are not installed")
    text = header.read_text()
    text = text[text.index("class AutoMixedPrecisionListsFp16") : text.index("class AutoMixedPrecisionListsMkl")]
    parts = re.split(r"FlatSet<string> (\w+)List\(\) override", text)
    return {
        op: NAMES[name]
        for name, part in zip(parts[1::2], parts[2::2], strict=True)
        for op in re.findall(r'"(\w+)"', part)
    }


def test_every_op_that_the_engine_runs_is_in_the_list_that_tensorflow_has_it_in():
    theirs = {op: what for op, what in lists().items() if op in schema.lowered()}
    ours = {op: what for op, what in HALF.items() if op in schema.lowered() and op in theirs}
    assert ours == {op: what for op, what in theirs.items() if op not in ONLY_ON_CPUS | SHAPES}


def test_what_is_in_no_list_of_tensorflows_is_an_op_that_passes_make():
    assert all(op.startswith("_") for op in HALF.keys() - lists().keys())


def test_what_computes_in_float32_or_masks_is_in_a_list():
    assert HALF.keys() >= WIDENING
    assert {HALF[op] for op in MASKING} <= {Half.TAKES, Half.CARRIES}
