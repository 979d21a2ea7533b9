"""MetaGraphDefs and SavedModels: signatures, tags, collections."""

from pathlib import Path

import pytest
from google.protobuf import text_format

from msplit import formats
from msplit.errors import LoadError
from msplit.formats.model import Endpoint
from msplit.opset import schema
from tests.formats.models import FLOAT, PLACEHOLDER, SAMPLES, meta_graph, names, read, save, signatures


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


def test_signature_is_the_default_or_the_only_one_or_asked_for(tmp_path: Path) -> None:
    save(tmp_path, signatures("a", "serving_default"))
    assert formats.read(tmp_path).signature == "serving_default"
    assert formats.read(tmp_path, signature="a").signature == "a"
    with pytest.raises(LoadError, match=r"no signature 'b'(.|\n)*--part signature= is one of: a, serving_default"):
        formats.read(tmp_path, signature="b")
    save(tmp_path, signatures("a"))
    model = formats.read(tmp_path)
    assert (model.signature, model.signatures, model.tags, model.init_ops) == ("a", ("a",), ("serve",), ("x",))
    assert model.path == tmp_path
    assert formats.read(tmp_path / "saved_model.pb").path == tmp_path
    save(tmp_path, signatures("a", "b"))
    with pytest.raises(LoadError, match=r"several signatures: a, b(.|\n)*--part signature="):
        formats.read(tmp_path)
    # With both ends named there is nothing to choose.
    assert formats.read(tmp_path, inputs=["x"], outputs=["y"]).signature is None


def test_tags_choose_among_several_graphs(tmp_path: Path) -> None:
    save(tmp_path, signatures("a"), signatures("b", tags=("serve", "gpu")), signatures("c", tags=("train",)))
    with pytest.raises(LoadError, match=r"3 graphs: serve; serve,gpu; train(.|\n)*--part tag="):
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


def test_no_tags_are_a_choice(tmp_path: Path) -> None:
    save(tmp_path, signatures("a", tags=()), signatures("b", tags=("train",)))
    with pytest.raises(
        LoadError, match=r"2 graphs: \(no tags\); train(.|\n)*--part tag=\"\" takes the one without tags"
    ):
        formats.read(tmp_path)
    with pytest.raises(LoadError, match=r"no graph with the tags tpu(.|\n)*--part tag=\"\" takes the one without tags"):
        formats.read(tmp_path, tags=["tpu"])
    assert formats.read(tmp_path, tags=[]).signature == "a"
    assert formats.read(tmp_path, tags=["train"]).signature == "b"
    save(tmp_path, signatures("a"), signatures("b", tags=("train",)))
    with pytest.raises(LoadError, match=r"2 graphs with the tags \(none\)(.|\n)*one of: serve; train$"):
        formats.read(tmp_path, tags=[])


def test_saved_model_without_graphs_or_nodes_or_signatures(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(LoadError, match="holds no graph"):
        formats.read(tmp_path)
    save(tmp_path, schema.meta_graph_pb2.MetaGraphDef())
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
