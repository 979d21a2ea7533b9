"""What is known of ops: the table is whole, and says what an op's own definition says.

The lists of half precision are TensorFlow's own.

The table of ops that are linear: gradients are made of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from msplit.opset import schema, traits
from msplit.opset.traits import HALF, LINEAR_IN_ONE, LINEAR_TOGETHER, MASKING, TABLE, WIDENING, Half, Traits, ops_with

DATA = Path(traits.__file__).with_name("data")

# Ops of DeepRec and of TensorFlow Recommenders Addons, of older TensorFlows, and of msplit's engine.
ELSEWHERE = {
    "KvResourceGather", "KvResourceGatherV1", "KvVarHandleOp", "RowPartitionFromSplits", "TFRA>CuckooHashTableOfTensors",
    "TFRA>HkvHashTableOfTensors", "TensorArrayV2FromTensor",
    "_AllGather", "_AllReduce", "_AllWait", "_FusedBatchMatMulV2", "_FusedBinary", "_GroupedLookup", "_GroupedMatMul",
    "_LayerNorm", "_PeerCopy",
}  # fmt: skip


def _heads(file: str) -> list[str]:
    """What stands before the colon in each entry of one of the table's files."""
    lines = (DATA / file).read_text().replace("\n  ", " ").splitlines()
    return [line.partition(": ")[0] for line in lines if line and line[0] != "#"]


def test_every_op_is_known_to_tensorflow_or_named_as_another() -> None:
    assert {op for op in TABLE if schema.lookup(op) is None} == ELSEWHERE


def test_every_op_of_the_file_is_in_the_table_once() -> None:
    ops = " ".join(_heads("op_traits.txt")).split()
    assert len(ops) > 600
    assert sorted(ops) == sorted(TABLE)


def test_every_trait_is_an_ops_and_has_one_meaning() -> None:
    words = [head.partition(" (")[0] for head in _heads("traits.txt")]
    assert len(words) == len(set(words))
    assert [word for word in words if not ops_with(word)] == []


def test_a_trait_brings_those_that_go_with_it() -> None:
    assert {"curve", "unary", "same shape", "stacks", "activation"} <= traits.traits("Sigmoid").words
    assert ops_with("comparison") <= ops_with("binary") <= ops_with("broadcasts")


def test_traits_together_are_those_of_ops_that_have_all() -> None:
    assert ops_with("exact", "unary", "makes") == {"OnesLike", "ZerosLike"}


def test_an_op_without_a_row_has_the_defaults() -> None:
    assert traits.traits("MyCustomOp") == Traits()
    assert traits.traits("SparseSegmentMean").segments == 2
    assert traits.traits("Range").scalars == (0, 1, 2)


def test_an_unknown_trait_is_an_error() -> None:
    with pytest.raises(KeyError):
        ops_with("comparision")


def test_slots_and_ports_are_those_of_the_op() -> None:
    def inputs(op: str) -> int:
        info = schema.lookup(op)
        return len(info.inputs) if info else 9

    for op, row in TABLE.items():
        slots = [row.table, row.ids, row.bound, row.segments, row.weights, row.values_in, *row.scalars]
        assert max((slot for slot in slots if slot), default=0) < max(inputs(op), 1), op


def test_the_table_needs_no_framework() -> None:
    code = "import sys, msplit.opset.traits; print([m for m in ('torch', 'tensorflow', 'numpy') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


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


BROADCAST = {
    "Add": lambda a, b: a + b, "AddV2": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b,
    "RealDiv": lambda a, b: a / b, "MatMul": lambda a, b: a @ b, "TanhGrad": lambda y, dy: dy * (1 - y * y),
    "SigmoidGrad": lambda y, dy: dy * y * (1 - y), "RsqrtGrad": lambda y, dy: -0.5 * dy * y**3, "SqrtGrad": lambda y, dy: dy * 0.5 / y,
    "ReluGrad": lambda dy, x: dy * (x > 0), "EluGrad": lambda dy, y: np.where(y < 0, dy * (y + 1), dy),
    "SoftplusGrad": lambda dy, x: dy / (np.exp(-x) + 1), "InvGrad": lambda y, dy: -dy * y * y,
}  # fmt: skip
"""What some of them compute, of float64."""


def test_ops_are_those_of_tensorflow_in_one_of_the_two_lists():
    assert not LINEAR_IN_ONE.keys() & LINEAR_TOGETHER.keys()
    for op, slots in (LINEAR_IN_ONE | LINEAR_TOGETHER).items():
        count = len(schema.input_dtypes(op, {"N": 4}) or ())
        assert not count or max(slots, default=0) < count, op


@pytest.mark.parametrize("op", BROADCAST)
def test_what_is_scaled_in_the_inputs_that_are_told_scales_the_result(op):
    inputs = np.random.default_rng(0).uniform(0.5, 2, (2, 4, 4))
    for slots in [(slot,) for slot in LINEAR_IN_ONE[op]] if op in LINEAR_IN_ONE else [LINEAR_TOGETHER[op]]:
        scaled = [value * 2.0**15 if slot in slots else value for slot, value in enumerate(inputs)]
        np.testing.assert_array_equal(BROADCAST[op](*scaled), BROADCAST[op](*inputs) * 2.0**15)
    others = {0, 1} - set(LINEAR_IN_ONE.get(op, (0, 1)))
    for slot in others:  # and in the others it does not
        scaled = [value * 4.0 if slot == number else value for number, value in enumerate(inputs)]
        assert not np.allclose(BROADCAST[op](*scaled), BROADCAST[op](*inputs) * 4.0)
