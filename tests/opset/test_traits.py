"""What is known of ops: the table is whole, and says what an op's own definition says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from msplit.opset import schema, traits
from msplit.opset.traits import TABLE, TRAITS, Traits, ops_with

# Ops of DeepRec and of TensorFlow Recommenders Addons, of older TensorFlows, and of msplit's engine.
ELSEWHERE = {
    "KvResourceGather", "KvResourceGatherV1", "KvVarHandleOp", "RowPartitionFromSplits", "TFRA>CuckooHashTableOfTensors",
    "TFRA>HkvHashTableOfTensors", "TensorArrayV2FromTensor", "_FusedBatchMatMulV2", "_FusedBinary",
    "_LayerNorm",
}  # fmt: skip


def _words() -> list[str]:
    entries = [line for line in TRAITS.splitlines() if line and line[0] not in " #"]
    return [entry.partition(": ")[0].partition(" (")[0] for entry in entries]


def test_every_op_is_known_to_tensorflow_or_named_as_another() -> None:
    assert {op for op in TABLE if schema.lookup(op) is None} == ELSEWHERE


def test_every_trait_is_an_ops() -> None:
    assert [word for word in _words() if not ops_with(word)] == []


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
