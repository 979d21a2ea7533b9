import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit import formats, proto
from msplit.errors import GraphError, LoadError, MsplitError
from msplit.formats import Endpoint, Model
from msplit.graph import CONTROL
from tests import strategies

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
ALL_SAMPLES = sorted(p for p in SAMPLES.iterdir() if p.suffix != ".md")


def tags_of(path: Path) -> list[str] | None:
    return ["serve"] if path.name == "two_tags" else None


def graph(text: str) -> Any:
    """A GraphDef from lines ``name Op input input …``; a line may end in text format for the rest of the node."""
    graph_def = proto.graph_pb2.GraphDef()
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, rest = line.partition("|")
        name, op, *inputs = head.split()
        node = graph_def.node.add(name=name, op=op, input=inputs)
        text_format.Merge(rest, node)
    return graph_def


def read(tmp_path: Path, message: Any, **options: Any) -> Model:
    path = tmp_path / "model.pb"
    path.write_bytes(message.SerializeToString())
    return formats.read(path, **options)


def names(ends: tuple[Endpoint, ...]) -> list[str]:
    return [end.name for end in ends]


# ---- graphs -------------------------------------------------------------------------------------------------------------


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


# ---- functions ----------------------------------------------------------------------------------------------------------


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


# ---- endpoints ----------------------------------------------------------------------------------------------------------

FLOAT = 'attr { key: "T" value { type: DT_FLOAT } }'
PLACEHOLDER = 'attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "shape" value { shape { dim { size: -1 } dim { size: 4 } } } }'


def test_inputs_are_placeholders_and_outputs_sinks(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        graph(f"""
            x Placeholder | {PLACEHOLDER}
            unused Const
            a Relu x | {FLOAT}
            b Relu a | {FLOAT}
            check NoOp ^b
            c Tanh a | {FLOAT} attr {{ key: "_output_shapes" value {{ list {{ shape {{ dim {{ size: 3 }} }} }} }} }}
        """),
    )
    assert model.inputs == (Endpoint("x", "x", 0, "float32", (None, 4)),)
    assert model.outputs == (Endpoint("c", "c", 0, "float32", (3,)),)
    assert model.targets == ("check",)
    assert model.outputs[0].tensor == "c:0"
    assert model.signatures == ()


def test_graph_without_inputs_has_all_its_sinks(tmp_path: Path) -> None:
    model = read(tmp_path, graph(f"a Const\nb Relu a | {FLOAT}\nc Const\ninit NoOp"))
    assert names(model.outputs) == ["b", "c"]
    assert model.targets == ()


def test_iterators_are_the_origin_where_there_is_no_placeholder(tmp_path: Path) -> None:
    types = 'attr { key: "output_types" value { list { type: DT_FLOAT } } }'
    model = read(tmp_path, graph(f"it IteratorV2\nnext IteratorGetNext it | {types}\na Relu next | {FLOAT}\nc Const"))
    assert names(model.inputs) == []
    assert names(model.outputs) == ["a"]


def test_every_tensor_of_a_sink_is_an_output_but_those_for_gradients(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        graph(f"""
            x Placeholder | {PLACEHOLDER}
            axis Const
            s Split axis x | {FLOAT} attr {{ key: "num_split" value {{ i: 2 }} }}
            n FusedBatchNormV3 x x x x x | {FLOAT}
            odd Acme x
        """),
    )
    assert names(model.outputs) == ["s", "s:1", "n", "odd"]


def test_only_noise_is_better_than_nothing(tmp_path: Path) -> None:
    model = read(tmp_path, graph("a NoOp\nb NoOp ^a"))
    assert model.outputs == ()
    assert model.targets == ("b",)
    model = read(
        tmp_path, graph(f"x Placeholder | {PLACEHOLDER}\np Placeholder | {PLACEHOLDER}\ns Switch x p | {FLOAT}")
    )
    assert names(model.outputs) == ["s", "s:1"]


def test_op_without_outputs_is_a_target(tmp_path: Path) -> None:
    model = read(tmp_path, graph(f"v VarHandleOp\nx Placeholder | {PLACEHOLDER}\ns ResourceApplyGradientDescent v x x"))
    assert model.targets == ("s",)
    assert model.outputs == ()


def test_placeholder_of_a_saver_is_no_input(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        graph(f"""
            x Placeholder | {PLACEHOLDER}
            y Relu x | {FLOAT}
            save/filename/input Const
            save/filename PlaceholderWithDefault save/filename/input | attr {{ key: "dtype" value {{ type: DT_STRING }} }}
            save/Const PlaceholderWithDefault save/filename | attr {{ key: "dtype" value {{ type: DT_STRING }} }}
            names Const
            save/RestoreV2 RestoreV2 save/Const names names | attr {{ key: "dtypes" value {{ list {{ type: DT_FLOAT }} }} }}
            word Placeholder | attr {{ key: "dtype" value {{ type: DT_STRING }} }}
            upper StringUpper word
        """),
    )
    assert names(model.inputs) == ["x", "word"]
    assert names(model.outputs) == ["y", "upper"]


def test_inputs_and_outputs_can_be_named(tmp_path: Path) -> None:
    graph_def = graph(f"""
        x Placeholder | {PLACEHOLDER}
        axis Const
        s Split axis x | {FLOAT} attr {{ key: "num_split" value {{ i: 2 }} }}
        a Relu s:1 | {FLOAT}
        step NoOp ^a
    """)
    model = read(tmp_path, graph_def, inputs=["axis"], outputs=["s:1", "a", "step"])
    assert names(model.inputs) == ["axis"]
    assert [(e.name, e.node, e.port, e.dtype) for e in model.outputs] == [
        ("s:1", "s", 1, "float32"),
        ("a", "a", 0, "float32"),
    ]
    assert model.targets == ("step",)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"outputs": ["nothing_like_it"]}, "--outputs names 'nothing_like_it'"),
        ({"outputs": ["dense/Rel"]}, r"did you mean dense/Relu\?"),
        ({"outputs": ["dense/Relu:1"]}, r"has 1 output$"),
        ({"inputs": ["y"]}, "--inputs names 'y'"),
        ({"tags": ["serve"]}, "only a SavedModel has tags"),
        ({"signature": "serving_default"}, "no signature 'serving_default'"),
    ],
)
def test_wrong_choices_say_what_there_is(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(LoadError, match=what):
        read(tmp_path, graph(f"x Placeholder | {PLACEHOLDER}\ndense/Relu Relu x | {FLOAT}"), **options)


# ---- MetaGraphDef and SavedModel ----------------------------------------------------------------------------------------


def meta_graph(text: str) -> Any:
    meta = proto.meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph(text))
    meta.meta_info_def.tensorflow_version = "2.21.0"
    return meta


def test_training_graph_gives_losses_train_step_and_initializers() -> None:
    model = formats.read(SAMPLES / "training.meta")
    assert names(model.inputs) == ["label", "id_0", "id_1"]
    assert names(model.outputs) == ["score", "loss/value", "train"]
    assert model.init_ops[:2] == ("tower_0/embedding/Assign", "tower_0/dense/kernel/Assign")
    assert model.targets == ()


def test_train_op_without_outputs_is_a_target() -> None:
    model = formats.read(SAMPLES / "training_resource.meta")
    assert names(model.outputs) == ["score", "loss/value"]
    assert model.targets == ("train",)


def test_meta_graph_with_a_signature_uses_it(tmp_path: Path) -> None:
    meta = meta_graph(f"x Placeholder | {PLACEHOLDER}\ny Relu x | {FLOAT}\nz Relu y | {FLOAT}")
    text_format.Merge(
        'inputs { key: "in" value { name: "x:0" dtype: DT_FLOAT } } outputs { key: "out" value { name: "y:0" dtype: DT_FLOAT } }',
        meta.signature_def["only"],
    )
    model = read(tmp_path, meta)
    assert model.signature == "only"
    assert model.inputs == (Endpoint("in", "x", 0, "float32", ()),)
    assert names(model.outputs) == ["out"]
    # Names of the signature and of nodes may be mixed.
    model = read(tmp_path, meta, outputs=["out", "z"])
    assert [end.node for end in model.outputs] == ["y", "z"]


def test_sparse_ragged_and_empty_tensors_of_a_signature(tmp_path: Path) -> None:
    meta = meta_graph("i Placeholder\nv Placeholder\ns Placeholder\ny Acme i v s")
    text_format.Merge(
        """
        inputs {
          key: "sparse"
          value {
            dtype: DT_STRING
            coo_sparse { values_tensor_name: "v:0" indices_tensor_name: "i:0" dense_shape_tensor_name: "s:0" }
          }
        }
        inputs {
          key: "ragged"
          value { composite_tensor { components { name: "v:0" dtype: DT_FLOAT } components { name: "i:0" dtype: DT_INT64 } } }
        }
        inputs { key: "none" value { } }
        outputs { key: "y" value { name: "y:1" tensor_shape { unknown_rank: true } } }
        """,
        meta.signature_def["serving_default"],
    )
    model = read(tmp_path, meta)
    assert [(e.name, e.tensor, e.dtype) for e in model.inputs] == [
        ("ragged/0", "v:0", "float32"),
        ("ragged/1", "i:0", "int64"),
        ("sparse/indices", "i:0", "int64"),
        ("sparse/values", "v:0", "string"),
        ("sparse/dense_shape", "s:0", "int64"),
    ]
    assert (model.outputs[0].tensor, model.outputs[0].shape) == ("y:1", None)


def test_signature_that_names_what_is_not_there(tmp_path: Path) -> None:
    meta = meta_graph("x Placeholder")
    meta.signature_def["serving_default"].outputs["y"].name = "gone:0"
    with pytest.raises(LoadError, match=r"does not have: y \(gone:0\)"):
        read(tmp_path, meta)


def test_damaged_variable_collection(tmp_path: Path) -> None:
    meta = meta_graph("x Placeholder")
    meta.collection_def["variables"].bytes_list.value.append(b"\xff\xff")
    with pytest.raises(LoadError, match="collection 'variables' holds a damaged variable"):
        read(tmp_path, meta)


def test_collections_of_names_give_init_ops(tmp_path: Path) -> None:
    meta = meta_graph("x Placeholder\na NoOp\nb NoOp")
    meta.collection_def["table_initializer"].node_list.value.extend(["a", "gone"])
    meta.collection_def["saved_model_main_op"].bytes_list.value.append(b"b")
    assert read(tmp_path, meta).init_ops == ("b", "a")


def save(folder: Path, *metas: Any) -> Path:
    saved = proto.saved_model_pb2.SavedModel(saved_model_schema_version=1)
    for meta in metas:
        saved.meta_graphs.add().CopyFrom(meta)
    (folder / "saved_model.pb").write_bytes(saved.SerializeToString())
    return folder


def signatures(*names: str, tags: tuple[str, ...] = ("serve",)) -> Any:
    meta = meta_graph("x Placeholder\ny Relu x")
    meta.meta_info_def.tags.extend(tags)
    for name in names:
        meta.signature_def[name].outputs["y"].name = "y:0"
    meta.signature_def["__saved_model_init_op"].outputs["__saved_model_init_op"].name = "x"
    return meta


def test_signature_is_the_default_or_the_only_one_or_asked_for(tmp_path: Path) -> None:
    save(tmp_path, signatures("a", "serving_default"))
    assert formats.read(tmp_path).signature == "serving_default"
    assert formats.read(tmp_path, signature="a").signature == "a"
    with pytest.raises(LoadError, match=r"no signature 'b'(.|\n)*--signature one of: a, serving_default"):
        formats.read(tmp_path, signature="b")
    save(tmp_path, signatures("a"))
    model = formats.read(tmp_path)
    assert (model.signature, model.signatures, model.tags, model.init_ops) == ("a", ("a",), ("serve",), ("x",))
    assert model.path == tmp_path
    assert formats.read(tmp_path / "saved_model.pb").path == tmp_path
    save(tmp_path, signatures("a", "b"))
    with pytest.raises(LoadError, match=r"several signatures: a, b(.|\n)*--signature"):
        formats.read(tmp_path)
    # With both ends named there is nothing to choose.
    assert formats.read(tmp_path, inputs=["x"], outputs=["y"]).signature is None


def test_tags_choose_among_several_graphs(tmp_path: Path) -> None:
    save(tmp_path, signatures("a"), signatures("b", tags=("serve", "gpu")), signatures("c", tags=("train",)))
    with pytest.raises(LoadError, match=r"3 graphs: serve; serve,gpu; train(.|\n)*--tag"):
        formats.read(tmp_path)
    assert formats.read(tmp_path, tags=["serve"]).signature == "a"
    model = formats.read(tmp_path, tags=["gpu"])
    assert (model.signature, model.meta_graph) == ("b", 1)
    assert model.meta is model.proto.meta_graphs[1]
    assert formats.read(tmp_path, tags=["gpu", "serve"]).signature == "b"
    with pytest.raises(LoadError, match=r"no graph with the tags tpu(.|\n)*one of: serve; serve,gpu; train"):
        formats.read(tmp_path, tags=["tpu"])
    save(tmp_path, signatures("a", tags=("x", "y")), signatures("b", tags=("x", "z")))
    with pytest.raises(LoadError, match="2 graphs with the tags x"):
        formats.read(tmp_path, tags=["x"])


def test_saved_model_without_graphs_or_nodes_or_signatures(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(LoadError, match="holds no graph"):
        formats.read(tmp_path)
    save(tmp_path, proto.meta_graph_pb2.MetaGraphDef())
    with pytest.raises(LoadError, match="has no nodes"):
        formats.read(tmp_path)
    # TensorFlow 1: sinks. TensorFlow 2: the top graph holds only a saver.
    meta = meta_graph(f"x Placeholder | {PLACEHOLDER}\ny Relu x | {FLOAT}")
    save(tmp_path, meta)
    assert names(formats.read(tmp_path).outputs) == ["y"]
    meta.object_graph_def.nodes.add()
    save(tmp_path, meta)
    with pytest.raises(LoadError, match=r"no signatures(.|\n)*signatures="):
        formats.read(tmp_path)
    assert names(formats.read(tmp_path, outputs=["y"]).outputs) == ["y"]


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


# ---- bad files ----------------------------------------------------------------------------------------------------------


def test_cut_off_file_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    whole = graph("first NoOp\nsecond NoOp ^first").SerializeToString()
    path = tmp_path / "m.pb"
    path.write_bytes(whole[:-3])
    with pytest.raises(
        LoadError, match=f"cut off: it has {len(whole) - 3} bytes and says that it has at least {len(whole)}"
    ):
        formats.read(path)


def test_damaged_file_is_a_load_error(tmp_path: Path) -> None:
    path = tmp_path / "m.pb"
    # A whole field whose inside is cut off, and a name that is not UTF-8.
    for data in (b"\x0a\x08\x0a\x01a\x12\x01b\x1a\x05" + b"\x0a\x00", b"\x0a\x08\x0a\x02\xff\xfe\x12\x02Op"):
        path.write_bytes(data)
        with pytest.raises(LoadError, match="damaged"):
            formats.read(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('node {\n  name: "a"\n  oops: 1\n}', r":3: the text is not valid(.|\n)*oops"),
        ('node { name: "a" op: "NoOp"', "cut off"),
        ('node { name: "a" op: "NoOp" }\nnode { name: "b" op: "No', "cut off|not valid"),
        ("versions { producer: 21 }", "no nodes"),
        (
            "node { attr { key: 'x' value { " + "func { attr { key: 'x' value { " * 2000,
            "nested too deeply|not valid|cut off",
        ),
    ],
)
def test_bad_text_says_the_line(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "m.pbtxt"
    path.write_text(text)
    with pytest.raises(LoadError, match=what):
        formats.read(path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b'node { name: "\xff" }')
    with pytest.raises(LoadError, match="not UTF-8 at byte 14"):
        formats.read(tmp_path / "m")


def test_text_with_inf_and_nan(tmp_path: Path) -> None:
    (tmp_path / "m").write_text(
        'node { name: "a" op: "Op" attr { key: "x" value { list { f: inf f: -inf f: nan } } } }'
    )
    value = formats.read(tmp_path / "m").graph.attrs[0]["x"]
    np.testing.assert_array_equal(value, [np.inf, -np.inf, np.nan])


def test_large_text_warns_that_it_is_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msplit.formats.source._SLOW_TEXT_BYTES", 10)
    (tmp_path / "m").write_text('node { name: "a" op: "NoOp" }')
    formats.read(tmp_path / "m")
    assert "takes a while" in caplog.text


def test_graph_without_nodes_is_an_error(tmp_path: Path) -> None:
    graph_def = proto.graph_pb2.GraphDef()
    graph_def.versions.producer = 21
    with pytest.raises(LoadError, match="no nodes"):
        read(tmp_path, graph_def)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a Relu b\nb Relu a", "cycle"),
        ("a Relu gone", "'gone' names no node"),
        ("a NoOp\na NoOp", "2 nodes have this name"),
    ],
)
def test_invalid_graph_names_the_file_and_the_defect(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(GraphError, match=what) as caught:
        read(tmp_path, graph(text))
    assert caught.value.where == str(tmp_path / "model.pb")


SEEDS = [p.read_bytes() for p in (SAMPLES / "cond_v1.pb", SAMPLES / "two_signatures" / "saved_model.pb")]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_bytes_raise_anything_but_our_own_errors(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    if data.draw(st.booleans()):
        content = data.draw(st.binary(max_size=200))
    else:
        changed = bytearray(data.draw(st.sampled_from(SEEDS)))
        for _ in range(data.draw(st.integers(1, 5))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
        content = bytes(changed[: data.draw(st.integers(1, len(changed)))])
    path = tmp_path_factory.getbasetemp() / "saved_model.pb"
    path.write_bytes(content)
    with contextlib.suppress(MsplitError):
        model = formats.read(path)
        for attrs in model.graph.attrs:
            for value in attrs.values():
                if hasattr(value, "load"):
                    value.load()
        for name in model.graph.functions:
            assert len(model.graph.functions[name].body)
        formats.graph_hash(model)
