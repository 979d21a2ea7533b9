"""Flat graphs back as GraphDefs, so that TensorFlow can say what it thinks of their shapes."""

from __future__ import annotations

from typing import Any

from msplit.core.graph import CONTROL, Edges
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.shapes import Shape, Shapes


def graph_def(flat: FlatGraph, shapes: Shapes) -> Any:
    """The flat graph as a GraphDef whose inputs have the shapes that the inference took for them."""
    result = schema.graph_pb2.GraphDef()
    result.library.CopyFrom(flat.model.graph_def.library)
    result.versions.CopyFrom(flat.model.graph_def.versions)
    library = {function.signature.name: function.node_def for function in flat.model.graph_def.library.function}
    for node, name in enumerate(flat.graph.names):
        function, index = flat.origin(node)
        original = flat.model.graph_def.node[index] if function is None else library[function][index]
        copy = result.node.add(name=name, op=flat.graph.ops[node])
        for key, value in original.attr.items():
            if key not in ("_class", "_output_shapes"):
                copy.attr[key].CopyFrom(value)
    _connect(result, flat.graph.edges)
    _connect(result, flat.back_edges)
    for tensor in flat.inputs:
        node = result.node[tensor.node]
        if node.op in ("Placeholder", "PlaceholderWithDefault"):
            node.attr["shape"].shape.CopyFrom(shape_proto(shapes.shape(tensor.node, tensor.port)))
    return result


def _connect(graph: Any, edges: Edges) -> None:
    controls: list[tuple[int, int]] = []
    for src, port, dst, slot in zip(
        edges.src.tolist(), edges.port.tolist(), edges.dst.tolist(), edges.slot.tolist(), strict=True
    ):
        if port == CONTROL:
            controls.append((src, dst))
        else:
            inputs = graph.node[dst].input
            inputs.insert(slot, f"{graph.node[src].name}:{port}")
    for src, dst in controls:
        graph.node[dst].input.append(f"^{graph.node[src].name}")


def shape_proto(shape: Shape) -> Any:
    """A shape as TensorFlow writes it."""
    result = schema.tensor_shape_pb2.TensorShapeProto()
    if shape is None:
        result.unknown_rank = True
    else:
        for size in shape:
            result.dim.add(size=-1 if size is None else size)
    return result


def static_shapes(graph: Any) -> dict[str, list[Shape]]:
    """What TensorFlow's own inference says of every tensor, by node."""
    import tensorflow as tf

    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(graph, name="")
        return {
            operation.name: [
                None if tensor.shape.rank is None else tuple(tensor.shape.as_list()) for tensor in operation.outputs
            ]
            for operation in imported.get_operations()
        }


def differences(flat: FlatGraph, shapes: Shapes, theirs: dict[str, list[Shape]]) -> tuple[list[str], list[str]]:
    """Where the two contradict each other, and where TensorFlow knows what we do not, one line each."""
    contradictions, gaps = [], []
    for node, name in enumerate(flat.graph.names):
        for port, other in enumerate(theirs[name]):
            ours = shapes.shape(node, port)
            line = f"{flat.graph.ops[node]} {name}:{port} ours {ours} TensorFlow {other}"
            if other is None:
                continue
            if ours is None:
                gaps.append(line)
            elif len(ours) != len(other) or any(
                a is not None and b is not None and a != b for a, b in zip(ours, other, strict=True)
            ):
                contradictions.append(line)
            elif any(a is None and b is not None for a, b in zip(ours, other, strict=True)):
                gaps.append(line)
    return contradictions, gaps
