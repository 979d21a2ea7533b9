"""Small models as files, and what the tests of reading share."""

from pathlib import Path
from typing import Any

from google.protobuf import text_format

from msplit import formats
from msplit.formats.model import Endpoint, Model
from msplit.opset import schema

SAMPLES = Path(__file__).parents[2] / "sample_graphs"

FLOAT = 'attr { key: "T" value { type: DT_FLOAT } }'
PLACEHOLDER = 'attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "shape" value { shape { dim { size: -1 } dim { size: 4 } } } }'


def graph(text: str) -> Any:
    """A GraphDef from lines ``name Op input input …``; a line may end in text format for the rest of the node."""
    graph_def = schema.graph_pb2.GraphDef()
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


def meta_graph(text: str) -> Any:
    meta = schema.meta_graph_pb2.MetaGraphDef()
    meta.graph_def.CopyFrom(graph(text))
    meta.meta_info_def.tensorflow_version = "2.21.0"
    return meta


def save(folder: Path, *metas: Any) -> Path:
    saved = schema.saved_model_pb2.SavedModel(saved_model_schema_version=1)
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
