"""What is told of a whole graph."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from msplit.engines.cuda.ir.graph import Op, OpGraph


@st.composite
def graphs(draw):
    """Ops that read inputs and ops in front of them, some of which are views."""
    ops = {}
    for node in range(draw(st.integers(0, 9))):
        before = st.sampled_from(range(max(node - 2, 0), node)) if node else st.nothing()
        reads = sorted(draw(st.sets(before, max_size=2))) if node else []
        name = draw(st.sampled_from(["Conv2D", "Relu", "Reshape"]))
        ops[node] = Op(node, f"op{node}", name, {}, [(one, 0) for one in reads] or [(100, 0)], [node])
    return OpGraph(ops, {}, {"x": (100, 0)}, {})


@given(graphs())
def test_a_chain_is_what_has_no_two_ops_that_could_run_side_by_side(graph):
    reads = nx.DiGraph([(key[0], op.node) for op in graph.ops.values() for key in op.inputs])
    reads.add_nodes_from(graph.ops)
    reached = nx.transitive_closure_dag(reads)
    working = [node for node, op in graph.ops.items() if op.op != "Reshape"]
    ordered = all(reached.has_edge(one, other) for one in working for other in working if one < other)
    assert graph.is_chain() == ordered


def test_a_chain_with_a_residual_is_one_and_two_towers_are_none():
    def op(node, *reads):
        return Op(node, f"op{node}", "Relu", {}, [(one, 0) for one in reads], [node])

    residual = OpGraph({1: op(1, 0), 2: op(2, 1), 3: op(3, 2, 1)}, {}, {"x": (0, 0)}, {})
    towers = OpGraph({1: op(1, 0), 2: op(2, 0), 3: op(3, 1, 2)}, {}, {"x": (0, 0)}, {})
    assert residual.is_chain()
    assert not towers.is_chain()
