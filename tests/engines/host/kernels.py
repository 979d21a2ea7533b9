"""Host ops beside TensorFlow's own kernels, in NumPy and in C."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import TensorValue
from msplit.engines.host.native import HostStep, parts_of
from msplit.engines.host.table import HostNode, host_ops
from msplit.errors import MsplitError
from msplit.formats.decode import NodeAttrs
from msplit.opset import schema

REFUSED = "refused"


def texts(*items: bytes) -> NDArray[Any]:
    """A vector of strings."""
    made = np.empty(len(items), object)
    made[:] = items
    return made


def graph_of(op: str, inputs: list[NDArray[Any]], attrs: dict[str, Any]) -> tuple[Any, list[Any]]:
    """A node of an op as TensorFlow writes it down, and its outputs there; values of lists are lists of inputs."""
    tf = importlib.import_module("tensorflow")
    graph = tf.Graph()
    with graph.as_default():
        made = getattr(tf.raw_ops, op)(**{name: constant(tf, value) for name, value in inputs}, **attrs)
    outputs = (
        [made] if tf.is_tensor(made) else [one for part in made for one in (part if isinstance(part, list) else [part])]
    )
    return graph, outputs


def constant(tf: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [constant(tf, one) for one in value]
    return tf.constant(value.tolist(), tf.string, value.shape) if value.dtype == object else tf.constant(value)


def tensorflows(graph: Any, outputs: list[Any]) -> Any:
    """What TensorFlow's kernels give, or REFUSED."""
    tf = importlib.import_module("tensorflow")
    with tf.compat.v1.Session(graph=graph, config=options(tf)) as session:
        try:
            found = session.run(outputs)
        except (tf.errors.OpError, UnicodeDecodeError):  # an error whose text is no UTF-8
            return REFUSED
    return [np.asarray(value, object if isinstance(value, bytes) else None) for value in found]


def options(tf: Any) -> Any:
    """One thread, and the graph as it is: nothing is folded before it runs."""
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = -1
    return config


def ours(graph: Any, node: Any) -> Any:
    """What the host op gives for the node, or REFUSED."""
    values = {}
    for one in graph.as_graph_def().node:
        if one.op == "Const":
            value = NodeAttrs(one.attr)["value"]
            assert isinstance(value, TensorValue)
            values[one.name] = np.array(value.load())
    info = schema.lookup(node.type)
    assert info is not None
    inputs = [values[tensor.op.name] for tensor in node.inputs]
    attrs = info.filled(NodeAttrs(node.node_def.attr))
    host_node = HostNode(node.name, node.type, attrs, tuple(inputs))
    try:
        bound = host_ops()[node.type](host_node)
        with np.errstate(all="ignore"):
            made = bound(*inputs)
    except (ValueError, IndexError, TypeError, MsplitError):
        made = None
    else:
        made = list(made) if isinstance(made, tuple) else [made]
    compiled = in_c(host_node, inputs, len(node.outputs))
    if compiled is not None:
        same(compiled, REFUSED if made is None else made, node.type)
    return REFUSED if made is None else made


def in_c(node: HostNode, inputs: list[NDArray[Any]], outputs: int) -> Any:
    """What the function in C gives for a node, or REFUSED; None where it is not made for the node, or nothing is compiled."""
    places = range(len(inputs)), range(len(inputs), len(inputs) + outputs)
    step = HostStep(lambda: None, tuple(places[0]), tuple(places[1]), node)
    (part,) = parts_of([step], [None] * (len(inputs) + outputs), {*places[1]})
    if part.native is None:
        return None
    values = [*inputs, *[None] * outputs]
    return values[len(inputs) :] if part.native(values) else REFUSED


def same(found: Any, expected: Any, said: Any) -> None:
    """Holds values with types and shapes against others, or that both were refused."""
    assert isinstance(found, str) == isinstance(expected, str), (said, found, expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, str):
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape), said
        if other.dtype == object:
            assert one.tolist() == other.tolist(), said
        else:
            np.testing.assert_array_equal(one, other, str(said))


def agree(op: str, *, stricter: bool = False, **given: Any) -> Any:
    """Holds a host op against TensorFlow's kernel, on inputs (arrays, or lists of them) and attributes by the kernel's own names.

    Args:
        op: The op.
        stricter: Whether the host op may refuse what TensorFlow takes.
        given: Inputs and attributes.
    """
    inputs = [(name, value) for name, value in given.items() if is_input(value)]
    attrs = {name: value for name, value in given.items() if not is_input(value)}
    graph, outputs = graph_of(op, inputs, attrs)
    expected, found = tensorflows(graph, outputs), ours(graph, outputs[0].op)
    if isinstance(expected, str) or isinstance(found, str):
        assert type(found) is type(expected) or (stricter and found == REFUSED), (op, given, expected, found)
        return found
    same(found, expected, (op, given))
    return found


def refuses(op: str, *inputs: NDArray[Any], **attrs: Any) -> bool:
    """True if a host op refuses inputs for which TensorFlow does not even make a node."""
    info = schema.lookup(op)
    assert info is not None
    try:
        host_ops()[op](HostNode("n", op, info.filled(attrs), inputs))(*inputs)
    except (ValueError, IndexError):
        return True
    return False


def is_input(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], np.ndarray)
    )
