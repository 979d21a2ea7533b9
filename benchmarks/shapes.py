"""Graphs of the shapes that ask most of what looks at a graph, in any size: wide, deep, tied, called, long names.

None is a model, but each is part of one: a training step ends in a NoOp that waits for everything, a feature store fans out, an exported
Keras model is all functions, TensorFlow 1 ties each gradient to its variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FLOAT, INT, RESOURCE = 1, 3, 20


class Nodes:
    """Adds nodes to a GraphDef, or to one of its functions."""

    def __init__(self) -> None:
        from msplit.opset import schema

        self.graph_def = schema.graph_pb2.GraphDef()
        self.graph_def.versions.producer = 1882

    def __len__(self) -> int:
        return len(self.graph_def.node)

    def add(self, name: str, op: str, *inputs: str, **types: int) -> Any:
        node = self.graph_def.node.add(name=name, op=op, input=inputs)
        for key, value in types.items():
            node.attr[key].type = value
        return node

    def const(self, name: str, shape: tuple[int, ...], value: float = 0.01) -> str:
        """A float constant whose elements are all equal."""
        node = self.add(name, "Const", dtype=FLOAT)
        tensor = node.attr["value"].tensor
        tensor.dtype = FLOAT
        for size in shape:
            tensor.tensor_shape.dim.add(size=size)
        tensor.float_val.append(value)
        return name

    def number(self, name: str, value: int) -> str:
        node = self.add(name, "Const", dtype=INT)
        node.attr["value"].tensor.dtype = INT
        node.attr["value"].tensor.tensor_shape.SetInParent()
        node.attr["value"].tensor.int_val.append(value)
        return name

    def placeholder(self, name: str, dtype: int, *shape: int) -> str:
        node = self.add(name, "Placeholder", dtype=dtype)
        node.attr["shape"].shape.SetInParent()
        for size in shape:
            node.attr["shape"].shape.dim.add(size=size)
        return name

    def dense(self, name: str, source: str, width: int, units: int) -> str:
        weights = self.const(f"{name}/kernel", (width, units))
        product = self.add(f"{name}/MatMul", "MatMul", source, weights, T=FLOAT).name
        bias = self.const(f"{name}/bias", (units,))
        self.add(f"{name}/BiasAdd", "BiasAdd", product, bias, T=FLOAT)
        self.add(f"{name}/Relu", "Relu", f"{name}/BiasAdd", T=FLOAT)
        return f"{name}/Relu"

    def concat(self, name: str, parts: list[str], axis: int) -> str:
        place = self.number(f"{name}/axis", axis)
        node = self.add(name, "ConcatV2", *parts, place, T=FLOAT, Tidx=INT)
        node.attr["N"].i = len(parts)
        return name

    def sum(self, name: str, parts: list[str]) -> str:
        node = self.add(name, "AddN", *parts, T=FLOAT)
        node.attr["N"].i = len(parts)
        return name

    def input(self) -> str:
        return self.placeholder("x", FLOAT, 32, 64)


def barrier(count: int) -> Any:
    """Many kernels, a NoOp that waits for all, and many kernels that wait for it."""
    nodes = Nodes()
    x = nodes.input()
    half = count // 2
    before = [nodes.add(f"before_{number}", "Relu", x, T=FLOAT).name for number in range(half)]
    nodes.add("barrier", "NoOp", *[f"^{name}" for name in before])
    for number in range(half):
        nodes.add(f"after_{number}", "Tanh", before[number], "^barrier", T=FLOAT)
    return nodes.graph_def


def wall(count: int) -> Any:
    """As `barrier`, with nothing but the NoOp between the two halves."""
    nodes = Nodes()
    x = nodes.input()
    half = count // 2
    before = [nodes.add(f"before_{number}", "Relu", x, T=FLOAT).name for number in range(half)]
    nodes.add("wall", "NoOp", *[f"^{name}" for name in before])
    for number in range(half):
        nodes.add(f"after_{number}", "Tanh", x, "^wall", T=FLOAT)
    return nodes.graph_def


def barriers(count: int) -> Any:
    """Layers of a thousand kernels, a NoOp between every two, and a second NoOp behind half of each."""
    nodes = Nodes()
    last = [nodes.input()] * 1000
    layer = 0
    while len(nodes) < count:
        waits = [f"^all_{layer - 1}", f"^half_{layer - 1}"] if layer else []
        last = [nodes.add(f"layer_{layer}/{n}", "Relu", last[n], *waits, T=FLOAT).name for n in range(1000)]
        nodes.add(f"half_{layer}", "NoOp", *[f"^{name}" for name in last[::2]])
        nodes.add(f"all_{layer}", "NoOp", f"^half_{layer}", *[f"^{name}" for name in last])
        layer += 1
    return nodes.graph_def


def fan(count: int) -> Any:
    """One producer with a consumer per node, and one node that reads all of them."""
    nodes = Nodes()
    x = nodes.input()
    parts = [nodes.add(f"part_{number}", "Relu", x, T=FLOAT).name for number in range(count - 2)]
    nodes.sum("sum", parts)
    return nodes.graph_def


def bundle(count: int) -> Any:
    """As `fan`, through an IdentityN: a node that launches nothing, with as many inputs as outputs."""
    nodes = Nodes()
    x = nodes.input()
    half = count // 2
    parts = [nodes.add(f"part_{number}", "Relu", x, T=FLOAT).name for number in range(half)]
    node = nodes.add("bundle", "IdentityN", *parts)
    node.attr["T"].list.type.extend([FLOAT] * half)
    for number in range(half):
        nodes.add(f"out_{number}", "Tanh", f"bundle:{number}" if number else "bundle", T=FLOAT)
    return nodes.graph_def


def chain(count: int) -> Any:
    """Every node reads the one before."""
    nodes = Nodes()
    last = nodes.input()
    for number in range(count - 1):
        last = nodes.add(f"step_{number}", ("Relu", "Identity", "Tanh")[number % 3], last, T=FLOAT).name
    return nodes.graph_def


def pairs(count: int) -> Any:
    """Colocation classes of two nodes each, far from each other."""
    nodes = Nodes()
    x = nodes.input()
    half = count // 2
    firsts = [nodes.add(f"first_{number}", "Relu", x, T=FLOAT).name for number in range(half)]
    for number in range(half):
        node = nodes.add(f"second_{number}", "Tanh", firsts[number - half // 2], T=FLOAT)
        node.attr["_class"].list.s.append(f"loc:@first_{number}".encode())
    return nodes.graph_def


def crowd(count: int) -> Any:
    """One colocation class that half of all nodes are in."""
    nodes = Nodes()
    x = nodes.input()
    for number in range(count // 2):
        node = nodes.add(f"tied_{number}", "Relu", x, T=FLOAT)
        node.attr["_class"].list.s.append(b"loc:@tied_0")
        nodes.add(f"free_{number}", "Tanh", f"tied_{number}", T=FLOAT)
    return nodes.graph_def


def functions(count: int, deep: int = 1) -> Any:
    """A function of three nodes for every four, each called once."""
    nodes = Nodes()
    x = nodes.input()
    outs = []
    for number in range(count // 4):
        inner = f"function_{number - 1}" if number % deep else None
        _function(nodes.graph_def, f"function_{number}", inner)
        if number % deep == deep - 1 or number == count // 4 - 1:
            outs.append(_call(nodes, f"call_{number}", f"function_{number}", x))
    nodes.sum("sum", outs)
    return nodes.graph_def


def nested(count: int) -> Any:
    """Functions that call each other, forty deep, over and over."""
    return functions(count, 40)


def variables(count: int) -> Any:
    """A variable, its read and a product for every four nodes; the last eighth of the products reads the first variable's handle, too."""
    nodes = Nodes()
    x = nodes.input()
    outs = []
    for number in range(count // 4):
        handle = nodes.add(f"variable_{number}", "VarHandleOp", dtype=FLOAT)
        for size in (64, 64):
            handle.attr["shape"].shape.dim.add(size=size)
        handle.attr["shared_name"].s = f"variable_{number}".encode()
        shared = handle.name if number < count // 4 * 7 // 8 else "variable_0"
        nodes.add(f"read_{number}", "ReadVariableOp", shared, dtype=FLOAT)
        product = nodes.add(f"product_{number}", "MatMul", x, f"read_{number}", T=FLOAT)
        outs.append(nodes.add(f"relu_{number}", "Relu", product.name, T=FLOAT).name)
    nodes.sum("sum", outs)
    return nodes.graph_def


def controls(count: int) -> Any:
    """Every node waits for the sixteen before it, by control edges."""
    nodes = Nodes()
    x = nodes.input()
    for number in range(count - 1):
        waits = [f"^step_{before}" for before in range(max(0, number - 16), number)]
        nodes.add(f"step_{number}", ("Relu", "NoOp")[number % 2], *([x] if number % 2 == 0 else []), *waits).attr[
            "T"
        ].type = FLOAT
        if number % 2:
            del nodes.graph_def.node[-1].attr["T"]
    return nodes.graph_def


def names(count: int) -> Any:
    """Towers whose names are long and begin alike."""
    nodes = Nodes()
    scope = "/".join(f"a_scope_with_a_long_name_{number}" for number in range(30))
    x = nodes.input()
    outs = []
    while len(nodes) < count - 6:
        outs.append(nodes.dense(f"{scope}/tower_{len(outs)}", x, 64, 64))
    nodes.sum("sum", outs)
    return nodes.graph_def


def branches(count: int) -> Any:
    """As many branches of ten nodes as there are, all the same, from one fork to one join."""
    nodes = Nodes()
    x = nodes.input()
    outs = []
    while len(nodes) < count - 10:
        name = f"branch_{len(outs)}"
        outs.append(nodes.dense(f"{name}/b", nodes.dense(f"{name}/a", x, 64, 64), 64, 64))
    nodes.sum("sum", outs)
    return nodes.graph_def


def _function(graph_def: Any, name: str, inner: str | None) -> None:
    """A function of one argument: a ReLU, and a Tanh of it or of what another function makes of it."""
    function = graph_def.library.function.add()
    function.signature.name = name
    function.signature.input_arg.add(name="a", type=FLOAT)
    function.signature.output_arg.add(name="out", type=FLOAT)
    first = function.node_def.add(name="first", op="Relu", input=["a"])
    first.attr["T"].type = FLOAT
    source = "first:activations:0"
    if inner is not None:
        _as_call(function.node_def.add(name="inner", op="PartitionedCall", input=[source]), inner)
        source = "inner:output:0"
    function.node_def.add(name="last", op="Tanh", input=[source]).attr["T"].type = FLOAT
    function.ret["out"] = "last:y:0"


def _as_call(node: Any, function: str) -> None:
    node.attr["f"].func.name = function
    node.attr["Tin"].list.type.append(FLOAT)
    node.attr["Tout"].list.type.append(FLOAT)


def _call(nodes: Nodes, name: str, function: str, source: str) -> str:
    _as_call(nodes.add(name, "PartitionedCall", source), function)
    return name


SHAPES: dict[str, Callable[[int], Any]] = {
    make.__name__: make
    for make in (
        *(barrier, wall, barriers, fan, bundle, chain, pairs, crowd),
        *(functions, nested, variables, controls, names, branches),
    )
}
"""Name -> a GraphDef of about so many nodes."""
