"""Lookups in several tables as one."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.interpret import call
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.passes.horizontal_fusion import batch_branches
from msplit.errors import EngineError


def lookups(lengths, width=3):
    """A source of one lookup per table, their results stacked."""
    rng = np.random.default_rng(0)
    graph = OpGraph({}, {}, {}, {}, numbers=0)
    axis = graph.constant(np.asarray(0, np.int32))
    rows = []
    attrs = {"Tparams": "float32", "Tindices": "int32", "Taxis": "int32", "batch_dims": 0}
    tables = [rng.standard_normal((length, width)).astype(np.float32) for length in lengths]
    for number, values in enumerate(tables):
        ids = (graph.fresh(), 0)
        graph.feeds[f"ids{number}"] = ids
        graph.shapes[ids] = (4,)
        op = graph.fresh()
        graph.ops[op] = Op(op, f"lookup{number}", "GatherV2", dict(attrs), [graph.constant(values), ids, axis], [op])
        graph.shapes[op, 0] = (4, width)
        rows.append((op, 0))
    join = graph.fresh()
    graph.ops[join] = Op(join, "join", "Pack", {"T": "float32", "N": len(rows), "axis": 1}, rows, [join])
    graph.shapes[join, 0] = (4, len(rows), width)
    graph.fetches["out"] = (join, 0)
    return graph, tables


def run(graph, ids):
    """The output, op by op."""
    values = {key: torch.from_numpy(np.array(ids[int(name[3:])], np.int32)) for name, key in graph.feeds.items()}
    constants = {key: torch.from_numpy(np.array(value)) for key, value in graph.constants.items()}
    for op in graph.ops.values():
        lowering = table()[op.op]
        static = {slot % len(op.inputs) for slot in lowering.static}
        arguments = [
            graph.constants[key] if slot in static else values.get(key, constants.get(key))
            for slot, key in enumerate(op.inputs)
        ]
        values[op.node, 0] = call(lowering, op, arguments)
    return values[graph.fetches["out"]].numpy()


def test_tables_of_unequal_length_are_one_table():
    graph, tables = lookups([5, 2, 9, 1, 3])
    ids = [[0, 4, 1, 3], [1, 0, 0, 1], [8, 0, 7, 2], [0, 0, 0, 0], [2, 1, 0, 2]]
    assert batch_branches(graph)
    groups = graph.merges
    assert [(group.op, group.members) for group in groups] == [("GatherV2", 5)]
    assert sorted(op.op for op in graph.ops.values()) == ["Pack", "Transpose", "_GroupedLookup"]
    expected = np.stack([values[rows] for values, rows in zip(tables, ids, strict=True)], 1)
    assert np.array_equal(run(graph, ids), expected)
    floats = sum(value.nbytes for value in graph.constants.values() if value.dtype == np.float32)
    assert floats == sum(values.nbytes for values in tables)


@pytest.mark.parametrize("wrong", [-1, 2, 4])
def test_an_id_outside_of_its_own_table_is_an_error_on_the_cpu(wrong):
    graph, _ = lookups([5, 2, 9, 1, 3])
    batch_branches(graph)
    with pytest.raises(EngineError, match="out of range"):
        run(graph, [[0, 4, 1, 3], [1, wrong, 0, 1], [8, 0, 7, 2], [0, 0, 0, 0], [2, 1, 0, 2]])


def test_few_lookups_are_not_worth_the_copy_of_their_ids():
    graph, _ = lookups([5, 2])
    assert not batch_branches(graph)


def test_no_graph_can_hold_the_engines_own_ops():
    with pytest.raises(Exception, match="no graph can hold"):
        table()["_GroupedLookup"].function(Node("a", "_GroupedLookup", {}), *[torch.zeros(1)] * 4)
