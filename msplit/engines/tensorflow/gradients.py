"""The gradient of a function of a graph's library, which a `SymbolicGradient` node computes, as nodes: TensorFlow makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.errors import EngineError
from msplit.formats.functions import GRADIENT_RESULT

_GRADIENT = "gradient"

_PASSES = 4
"""Most times that TensorFlow is asked: where functions call others it inlines these first, and a gradient with the next pass."""


def expanded(function: Any, library: Any, types: Sequence[int]) -> Any:
    """The GraphDef that computes the gradient of a function, parameters first; None where TensorFlow has none or is not installed.

    It is what the runtime of TensorFlow makes of the node, which differs from `tf.gradients` (gradients of integers, for one).

    Args:
        function: Its FunctionDef, without type parameters.
        library: A FunctionDefLibrary of all that it runs, which must not run itself.
        types: Types of the gradients of its inputs, as DataType numbers.
    """
    from msplit.engines.tensorflow.runtime import quiet_stderr, tensorflow

    try:
        tf = tensorflow()
    except EngineError:
        return None
    from tensorflow.core.protobuf import config_pb2, device_properties_pb2
    from tensorflow.python.grappler import cluster, tf_optimizer

    graph_def = tf.compat.v1.GraphDef()
    graph_def.versions.producer = tf.version.GRAPH_DEF_VERSION
    graph_def.library.CopyFrom(library)
    for inner in graph_def.library.function:
        inner.attr.pop("_noinline", None)
    given = [argument.type for argument in (*function.signature.input_arg, *function.signature.output_arg)]
    arguments, results = (
        [name.format(i) for i in range(len(of))] for name, of in (("argument_{}", given), (GRADIENT_RESULT, types))
    )
    for name, dtype in zip(arguments, given, strict=True):
        graph_def.node.add(name=name, op="Placeholder").attr["dtype"].type = dtype
    gradient = graph_def.node.add(name=_GRADIENT, op="SymbolicGradient", input=arguments)
    gradient.attr["Tin"].list.type.extend(given)
    gradient.attr["Tout"].list.type.extend(types)
    gradient.attr["f"].func.name = function.signature.name
    for port, (name, dtype) in enumerate(zip(results, types, strict=True)):
        graph_def.node.add(name=name, op="Identity", input=[f"{_GRADIENT}:{port}"]).attr["T"].type = dtype
    config = config_pb2.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.optimizers.append("function")
    rewriting.min_graph_nodes, rewriting.meta_optimizer_iterations = -1, rewriting.ONE
    cpu = device_properties_pb2.NamedDevice(name="/CPU:0", properties={"type": "CPU"})  # no GPU is touched
    made = graph_def
    for _ in range(_PASSES):
        try:
            with quiet_stderr(), tf.Graph().as_default():
                tf.graph_util.import_graph_def(made, name="")
                meta = tf.compat.v1.train.export_meta_graph()
                meta.collection_def["train_op"].node_list.value.extend(results)
                made = tf_optimizer.OptimizeGraph(config, meta, cluster=cluster.Cluster(devices=[cpu]))
        except (ValueError, tf.errors.OpError):
            return None
        nodes = {node.name: node for node in made.node}
        if not any(node.op == "SymbolicGradient" for node in made.node) and nodes.keys() >= {*arguments, *results}:
            break
    else:
        return None  # some op of the function has no gradient there
    for position, name in enumerate(arguments):
        node = nodes[name]
        dtype = node.attr["dtype"].type
        node.op = "_Arg"
        node.attr.clear()
        node.attr["T"].type, node.attr["index"].i = dtype, position
    ordered = [nodes.pop(name) for name in arguments]
    result = type(graph_def)(versions=made.versions)
    result.node.extend([*ordered, *nodes.values()])
    return result
