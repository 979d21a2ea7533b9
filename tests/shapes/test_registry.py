"""The tables of ops: nothing that the engine runs lacks a shape, no name is made up."""

from __future__ import annotations

from msplit.cost.formulas import FORMULAS
from msplit.engines.cuda.ir import lowering as lowerings
from msplit.opset import schema
from msplit.opset.traits import ops_with
from msplit.shapes import registry
from msplit.shapes.result import FUNCTIONAL
from msplit.shapes.values import TABLE

# DeepRec's tables and those of TensorFlow Recommenders Addons are not in TensorFlow; ops with an underscore are made by TensorFlow's
# own optimizer.
ELSEWHERE = ("Kv", "TFRA>", "_")


def _shapes() -> set[str]:
    return {*registry.SHAPE_FUNCTIONS, *registry.SAME_SHAPE, *FUNCTIONAL} - {"call"}


def test_every_op_with_a_lowering_has_a_shape_function() -> None:
    own = {op for op, lowering in lowerings.table().items() if lowering.own}
    # Writes are lowered under their names for references, which TensorFlow does not have for all of them.
    known = {op for op in lowerings.table() if (info := schema.lookup(op)) is not None and info.outputs}
    assert sorted(known - own - _shapes()) == []
    assert not own & _shapes()


def test_every_name_is_an_op_of_tensorflow() -> None:
    names = {*_shapes(), *TABLE, *FORMULAS}
    assert sorted(op for op in names if schema.lookup(op) is None and not op.startswith(ELSEWHERE)) == []


def test_an_op_is_of_one_kind_only() -> None:
    kinds = [ops_with(kind) for kind in ("free", "moves", "cuts", "makes", "reduces")]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))
    assert not ops_with("free") & set(FORMULAS)


def test_what_runs_on_tensor_cores_has_a_formula() -> None:
    assert ops_with("tensor cores") <= set(FORMULAS)
