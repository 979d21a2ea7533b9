"""Frozen graphs: small sizes of the benchmark models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msplit import samples


def write_binary(path: Path, message: Any) -> None:
    """Write a protobuf message, equal messages as equal bytes."""
    path.write_bytes(message.SerializeToString(deterministic=True))


def mmoe_small(path: Path) -> None:
    """Write a mixture of 4 experts."""
    sample = samples.build("mmoe", experts=4, features=64, units=(64, 48, 32), tower_units=(16,))
    write_binary(path, sample.graph_def)


def towers_small(path: Path) -> None:
    """Write six embedding towers."""
    sample = samples.build("towers", towers=6, rows=500, width=16, units=(32, 8))
    write_binary(path, sample.graph_def)


def lstm_small(path: Path) -> None:
    """Write an LSTM of 3 layers and 8 steps."""
    write_binary(path, samples.build("lstm", layers=3, steps=8, hidden=32).graph_def)


def mmoe_small_text(path: Path) -> None:
    """Write a still smaller mixture in text format."""
    from google.protobuf import text_format

    sample = samples.build("mmoe", experts=4, features=16, units=(16, 16, 8), tower_units=(8,))
    path.write_text(text_format.MessageToString(sample.graph_def), encoding="utf-8")


def inception_v3_stripped(path: Path) -> None:
    """Write Inception-v3 in full size without the values of its weights."""
    write_binary(path, samples.strip(samples.build("inception_v3").graph_def, threshold=256))


def annotated(path: Path) -> None:
    """Write six towers on streams 0, 1 and 2.

    Stream 0 is written for a tower, as DeepRec does, and left out for the head, as NVIDIA does.
    """
    graph_def = samples.build("towers", towers=6, rows=200, width=8, units=(16, 8)).graph_def
    for node in graph_def.node:
        tower, _, _ = node.name.partition("/")
        if tower.startswith("tower_"):
            node.attr["_stream_id"].i = int(tower.removeprefix("tower_")) % 3
    write_binary(path, graph_def)


def custom_op(path: Path) -> None:
    """Write a graph of ops that stock TensorFlow does not have.

    Two columns are looked up in hash-table variables (`KvVarHandleOp`, `KvResourceGather`), and the towers above are
    joined by a vendor's fused layer. No TensorFlow can be asked for such nodes, so they are written as they are.
    """
    import tensorflow as tf

    graph_def = samples.build("towers", towers=2, rows=16, width=16, units=(32, 8)).graph_def
    types = tf.dtypes
    kept = [node for node in graph_def.node if "/embedding/" not in node.name and node.name != "head/concat"]
    del graph_def.node[:]
    for node in kept:
        if node.name in ("id_0", "id_1"):
            node.attr["dtype"].type = types.int64.as_datatype_enum
        graph_def.node.add().CopyFrom(node)
    for column in range(2):
        scope = f"tower_{column}/embedding"
        handle = graph_def.node.add(name=f"{scope}/table", op="KvVarHandleOp")
        handle.attr["dtype"].type = types.float32.as_datatype_enum
        handle.attr["Tkeys"].type = types.int64.as_datatype_enum
        handle.attr["shape"].shape.dim.add().size = 16
        handle.attr["shared_name"].s = f"{scope}/table".encode()
        default = graph_def.node.add(name=f"{scope}/default", op="Const")
        default.attr["dtype"].type = types.float32.as_datatype_enum
        default.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0.0, shape=(16,)))
        lookup = graph_def.node.add(name=f"{scope}/lookup", op="KvResourceGather")
        lookup.input.extend([handle.name, f"id_{column}", default.name])
        lookup.attr["dtype"].type = types.float32.as_datatype_enum
        lookup.attr["Tkeys"].type = types.int64.as_datatype_enum
        lookup.attr["validate_indices"].b = True
        lookup.attr["_class"].list.s.append(f"loc:@{handle.name}".encode())
    fused = graph_def.node.add(name="head/concat", op="Vendor>FusedCross")
    fused.input.extend(["tower_0/dense_1/Relu", "tower_1/dense_1/Relu"])
    fused.attr["T"].type = types.float32.as_datatype_enum
    fused.attr["N"].i = 2
    write_binary(path, graph_def)
