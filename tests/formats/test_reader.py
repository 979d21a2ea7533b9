"""Graphs and function libraries as they are read."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import given, settings

from msplit import formats
from msplit.core.graph import CONTROL
from msplit.errors import GraphError
from tests import strategies
from tests.formats.models import SAMPLES, graph, read

ALL_SAMPLES = sorted(p for p in SAMPLES.iterdir() if p.suffix != ".md")


def tags_of(path: Path) -> list[str] | None:
    return ["serve"] if path.name == "two_tags" else None


def test_edges_have_ports_slots_and_control(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        graph("""
            a Placeholder | attr { key: "dtype" value { type: DT_FLOAT } }
            axis Const
            s Split axis a | attr { key: "num_split" value { i: 2 } } attr { key: "T" value { type: DT_FLOAT } }
            n NoOp ^s
            add AddV2 s:1 s ^n
        """),
    )
    g = model.graph
    assert list(g.names) == ["a", "axis", "s", "n", "add"]
    assert g.inputs(4) == [(2, 1), (2, 0)]
    assert [(int(g.edges.src[e]), int(g.edges.port[e]), int(g.edges.slot[e])) for e in g.in_edges(4)] == [
        (2, 1, 0), (2, 0, 1), (3, CONTROL, CONTROL),
    ]  # fmt: skip
    assert g.attrs[2]["num_split"] == 2
    assert model.graph_def is model.proto
    assert not model.is_saved_model
    assert model.meta is None


@pytest.mark.no_cover  # samples go the same ways; traced, it takes six times as long
@settings(max_examples=100, deadline=None)
@given(strategies.graph_defs())
def test_edges_of_generated_graphs_say_what_the_file_says(
    tmp_path_factory: pytest.TempPathFactory, graph_def: Any
) -> None:
    path = tmp_path_factory.mktemp("g") / "m"
    path.write_bytes(graph_def.SerializeToString())
    model = formats.read(path)
    g = model.graph
    for number, node in enumerate(graph_def.node):
        expected = []
        for text in node.input:
            if not text.startswith("^"):
                name, _, port = text.partition(":")
                expected.append((g.index[name], int(port or 0)))
        assert g.inputs(number) == expected
        controls = [g.index[text[1:]] for text in node.input if text.startswith("^")]
        assert sorted(controls) == sorted(int(g.edges.src[e]) for e in g.in_edges(number) if g.edges.port[e] == CONTROL)
        assert set(g.attrs[number]) == set(node.attr)
    assert set(g.functions) == {f.signature.name for f in graph_def.library.function}
    for name in g.functions:
        assert not g.functions[name].body.broken_inputs


def test_function_bodies_resolve_output_arguments_to_ports(tmp_path: Path) -> None:
    graph_def = graph("""
        x Placeholder | attr { key: "dtype" value { type: DT_FLOAT } }
        call f x
    """)
    text_format.Merge(
        """
        function {
          signature {
            name: "f"
            input_arg { name: "x" type: DT_FLOAT }
            output_arg { name: "y" type: DT_FLOAT }
            output_arg { name: "same" type: DT_FLOAT }
          }
          arg_attr { key: 0 value { attr { key: "_user_specified_name" value { s: "x" } } } }
          node_def { name: "axis" op: "Const" }
          node_def {
            name: "split" op: "Split" input: "axis:output:0" input: "x"
            attr { key: "num_split" value { i: 3 } } attr { key: "T" value { type: DT_FLOAT } }
          }
          node_def { name: "norm" op: "FusedBatchNormV3" input: "x" input: "x" input: "x" input: "x" input: "x:0" }
          node_def { name: "inner" op: "g" input: "split:output:2" }
          node_def { name: "odd" op: "Acme" input: "inner:second:0" input: "norm:batch_variance:0" input: "^split" }
          node_def { name: "sum" op: "AddV2" input: "odd:b:1" input: "odd:a" }
          ret { key: "y" value: "sum:z:0" }
          ret { key: "same" value: "x" }
          control_ret { key: "c" value: "odd" }
        }
        function {
          signature {
            name: "g"
            input_arg { name: "x" type: DT_FLOAT }
            output_arg { name: "first" type: DT_FLOAT }
            output_arg { name: "second" type: DT_FLOAT }
          }
          ret { key: "first" value: "x" }
          ret { key: "second" value: "x:0" }
        }
        """,
        graph_def.library,
    )
    functions = read(tmp_path, graph_def).graph.functions
    assert len(functions) == 2
    f = functions["f"]
    assert f is functions["f"]
    body = f.body
    assert body.functions is functions
    assert list(body.names) == ["x", "axis", "split", "norm", "inner", "odd", "sum"]
    assert body.ops[0] == "_Arg"
    assert dict(body.attrs[0]) == {"index": 0, "T": "float32", "_user_specified_name": "x"}
    assert body.inputs(2) == [(1, 0), (0, 0)]
    assert body.inputs(4) == [(2, 2)]
    assert body.inputs(5) == [(4, 1), (3, 2)]
    # Nothing is known of Acme's outputs but that they differ.
    (b, a) = body.inputs(6)
    assert b[0] == a[0] == 5
    assert b[1] != a[1]
    assert [(r.name, r.node, r.port, r.dtype) for r in f.results] == [("y", 6, 0, "float32"), ("same", 0, 0, "float32")]
    assert [(p.name, p.node) for p in f.parameters] == [("x", 0)]
    assert f.control_results == (5,)
    assert [(r.node, r.port) for r in functions["g"].results] == [(0, 0), (0, 0)]


def test_library_is_not_decoded_until_somebody_asks(tmp_path: Path) -> None:
    graph_def = graph("a NoOp")
    for number in range(500):
        # Not valid, which would show.
        function = graph_def.library.function.add()
        function.signature.name = f"f{number}"
        function.node_def.add(name="n", op="Relu", input=["nowhere"])
    model = read(tmp_path, graph_def)
    assert len(model.graph.functions) == 500
    assert model.graph.functions["f3"].body.broken_inputs[0].text == "nowhere"


def test_broken_function_that_is_called_is_reported_with_every_defect(tmp_path: Path) -> None:
    graph_def = graph("call f")
    text_format.Merge(
        """
        function {
          signature { name: "f" input_arg { name: "x" type: DT_FLOAT } output_arg { name: "y" } output_arg { name: "z" } }
          node_def { name: "a" op: "Relu" input: "nowhere:z:0" }
          node_def { name: "b" op: "Relu" input: "a:0" }
          node_def { name: "c" op: "Relu" input: "a:nothing:0" }
          node_def { name: "d" op: "Relu" input: "a:activations:q" }
          node_def { name: "e" op: "Relu" input: "x:q" }
          node_def { name: "h" op: "f" input: "x" }
          node_def { name: "i" op: "Relu" input: "h:w:0" }
          node_def { name: "j" op: "Relu" input: "a" }
          ret { key: "y" value: "nowhere:z:0" }
          control_ret { key: "c" value: "nowhere" }
        }
        """,
        graph_def.library,
    )
    with pytest.raises(GraphError) as caught:
        read(tmp_path, graph_def)
    text = "\n".join(caught.value.defects)
    assert "function f, node 'a' (Relu): input 'nowhere:z:0' names no node" in text
    assert "node 'b' (Relu): input 'a:0' does not say which output" in text
    assert "node 'c' (Relu): input 'a:nothing:0' names an output that its node has not" in text
    assert "node 'd' (Relu): input 'a:activations:q' has a port that is not a number" in text
    assert "node 'e' (Relu): input 'x:q' has a port that is not a number" in text
    assert "node 'i' (Relu): input 'h:w:0' names an output that its node has not" in text
    assert "node 'j' (Relu): input 'a' does not say which output" in text
    assert "function f: 'y = nowhere:z:0' is a result that names no node" in text
    assert "function f: 'z = ' is a result that names no node" in text
    assert "function f: 'c = nowhere' is a result that names no node" in text
    assert len(caught.value.defects) == 10


def test_two_functions_of_one_name(tmp_path: Path) -> None:
    graph_def = graph("a NoOp")
    for _ in range(2):
        graph_def.library.function.add().signature.name = "f"
    with pytest.raises(GraphError, match="function 'f' is there more than once"):
        read(tmp_path, graph_def)


@pytest.mark.parametrize("path", ALL_SAMPLES, ids=lambda p: p.name)
def test_every_sample_reads_and_every_function_resolves(path: Path) -> None:
    model = formats.read(path, tags=tags_of(path))
    assert len(model.graph) == len(model.graph_def.node)
    assert model.outputs or model.targets
    assert model.versions["producer"] > 0
    for name in model.graph.functions:
        assert not model.graph.functions[name].body.broken_inputs, name


def test_reading_does_not_import_tensorflow() -> None:
    code = (
        "import sys; from msplit import formats; "
        f"m = formats.read({str(SAMPLES / 'keras_lookup')!r}); formats.variables(m); formats.graph_hash(m); "
        "assert 'tensorflow' not in sys.modules; assert 'networkx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
