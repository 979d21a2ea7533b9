"""The gradient of a function of a graph's library, which a `SymbolicGradient` node computes, as nodes: TensorFlow makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.errors import EngineError
from msplit.formats.functions import GRADIENT

_PASSES = 4
"""Most times that TensorFlow is asked: where functions call others it inlines these first, and a gradient with the next pass."""


def expanded(function: Any, library: Any, types: Sequence[int]) -> Any:
    """The GraphDef that computes the gradient of a function, of `argument_0` and so on; None where TensorFlow has none or is not installed.

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

    made = tf.compat.v1.GraphDef(library=library, versions={"producer": tf.version.GRAPH_DEF_VERSION})
    for inner in made.library.function:
        inner.attr.pop("_noinline", None)
    given = [argument.type for argument in (*function.signature.input_arg, *function.signature.output_arg)]
    arguments = [f"argument_{number}" for number in range(len(given))]
    for name, dtype in zip(arguments, given, strict=True):
        made.node.add(name=name, op="Placeholder").attr["dtype"].type = dtype
    gradient = made.node.add(name="gradient", op="SymbolicGradient", input=arguments)
    gradient.attr["Tin"].list.type.extend(given)
    gradient.attr["Tout"].list.type.extend(types)
    gradient.attr["f"].func.name = function.signature.name
    results = made.node.add(name=GRADIENT, op="IdentityN", input=[f"gradient:{port}" for port in range(len(types))])
    results.attr["T"].list.type.extend(types)
    rewriting = {"optimizers": ["function"], "min_graph_nodes": -1, "meta_optimizer_iterations": 1}
    config = config_pb2.ConfigProto(graph_options={"rewrite_options": rewriting})
    cpu = device_properties_pb2.NamedDevice(name="/CPU:0", properties={"type": "CPU"})  # no GPU is touched
    for _ in range(_PASSES):
        try:
            with quiet_stderr(), tf.Graph().as_default():
                tf.graph_util.import_graph_def(made, name="")
                meta = tf.compat.v1.train.export_meta_graph()
                meta.collection_def["train_op"].node_list.value.append(GRADIENT)
                made = tf_optimizer.OptimizeGraph(config, meta, cluster=cluster.Cluster(devices=[cpu]))
        except (ValueError, tf.errors.OpError):
            return None
        if all(node.op != "SymbolicGradient" for node in made.node):
            return made if {node.name for node in made.node}.issuperset(arguments) else None
    return None  # some op of the function has no gradient there
