import dataclasses

from tests.checks.harness import found, read
from tests.graphs import parse

GRAPH = "x:Placeholder[dtype=float32]; a:Relu(x)[T=float32]; b:Tanh(a)[T=float32]"


def test_finds_a_graph_whose_input_has_no_shape(tmp_path):
    (one,) = found(read(tmp_path, GRAPH), "MS016")
    assert one.text.startswith(
        "the shapes of 2 of 2 kernels are not known (limit: 25%), most of them Relu (1), Tanh (1)"
    )
    assert one.nodes == ("a", "b")


def test_passes_known_shapes_and_few_unknown_ones():
    flat, costs = parse("x:Placeholder; a:MatMul(x); b:MatMul(x); c:MatMul(x); d:MatMul(x)")
    assert found((flat, costs), "MS016") == []
    known = costs.known.copy()
    known[1] = False
    assert found((flat, dataclasses.replace(costs, known=known)), "MS016") == []
    assert len(found((flat, dataclasses.replace(costs, known=known)), "MS016", max_unknown=0.2)) == 1
