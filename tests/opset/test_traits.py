"""What is known of ops: the table is whole, and says what an op's own definition says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from msplit.opset import schema, traits
from msplit.opset.traits import TABLE, Traits, ops_with

DATA = Path(traits.__file__).with_name("data")

# Ops of DeepRec and of TensorFlow Recommenders Addons, of older TensorFlows, and of msplit's engine.
ELSEWHERE = {
    "KvResourceGather", "KvResourceGatherV1", "KvVarHandleOp", "RowPartitionFromSplits", "TFRA>CuckooHashTableOfTensors",
    "TFRA>HkvHashTableOfTensors", "TensorArrayV2FromTensor", "_FusedBatchMatMulV2", "_FusedBinary",
    "_LayerNorm",
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
