"""Hypothesis strategies that every test may use. A new feature of graphs belongs in here too.

`graph_defs` draws valid GraphDefs, `graphs` draws plain DAGs. Both draw few and small things first, so that failures shrink well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from msplit.core.graph import CONTROL, Edges, Graph
from msplit.opset import schema

FLOAT = 1
BOOL = 10

STREAM_ID = "_stream_id"

_SCOPES = ("", "tower_a/", "tower_b/dense/", "deep/er/scope-1/", "x.y/")


@dataclass
class _Builder:
    """Adds nodes to a GraphDef or FunctionDef and knows what can be consumed."""

    draw: Any
    nodes: Any
    in_function: bool = False

    def __post_init__(self) -> None:
        self.names: list[str] = []
        self.outputs: list[str] = []

    def add(self, op: str, inputs: list[str], outputs: dict[str, int] | None = None, **attrs: Any) -> Any:
        """Adds a node with a new name. `outputs` are its output arguments and how many tensors each has."""
        name = f"{self.draw(st.sampled_from(_SCOPES))}{op.strip('_').lower()}_{len(self.names)}"
        node = self.nodes.add(name=name, op=op)
        node.input.extend(inputs)
        for key, value in attrs.items():
            setattr(node.attr[key], "type" if key in ("T", "dtype") else "i", value)
        self.names.append(name)
        port = 0
        for argument, count in (outputs or {}).items():
            for index in range(count):
                if self.in_function:
                    self.outputs.append(f"{name}:{argument}:{index}")
                else:
                    self.outputs.append(f"{name}:{port}" if port or self.draw(st.booleans()) else name)
                port += 1
        return node

    def source(self) -> str:
        return self.draw(st.sampled_from(self.outputs))

    def sources(self, least: int, most: int) -> list[str]:
        return self.draw(st.lists(st.sampled_from(self.outputs), min_size=least, max_size=most))

    def controls(self) -> list[str]:
        if not self.names or not self.draw(st.booleans()):
            return []
        return [f"^{name}" for name in self.draw(st.lists(st.sampled_from(self.names), max_size=2, unique=True))]


def _add_node(b: _Builder) -> None:
    kind = b.draw(st.sampled_from(("relu", "add", "addn", "const", "split", "noop", "custom")))
    if kind == "const" or not b.outputs:
        node = b.add("Const", b.controls(), {"output": 1}, dtype=FLOAT)
        node.attr["value"].tensor.dtype = FLOAT
        node.attr["value"].tensor.float_val.append(b.draw(st.integers(0, 3)))
    elif kind == "relu":
        b.add("Relu", [b.source(), *b.controls()], {"activations": 1}, T=FLOAT)
    elif kind == "add":
        b.add("AddV2", [b.source(), b.source(), *b.controls()], {"z": 1}, T=FLOAT)
    elif kind == "addn":
        inputs = b.sources(1, 4)
        b.add("AddN", [*inputs, *b.controls()], {"sum": 1}, T=FLOAT, N=len(inputs))
    elif kind == "split":
        count = b.draw(st.integers(1, 3))
        b.add("Split", [b.source(), b.source(), *b.controls()], {"output": count}, T=FLOAT, num_split=count)
    elif kind == "noop":
        b.add("NoOp", b.controls())
    else:
        # Two output arguments of one tensor each, and no entry in any table of ops.
        b.add("Acme>CustomOp", [*b.sources(0, 3), *b.controls()], {"first": 1, "second": 1})


def _add_loop(b: _Builder) -> None:
    """A v1 while loop: the only legal cycle."""
    frame = f"frame_{len(b.names)}"
    enter = b.add("Enter", [b.source()], T=FLOAT)
    enter.attr["frame_name"].s = frame.encode()
    merge = b.add("Merge", [enter.name], T=FLOAT, N=2)
    test = b.add("Const", [f"^{merge.name}"], dtype=BOOL)
    test.attr["value"].tensor.dtype = BOOL
    cond = b.add("LoopCond", [test.name])
    switch = b.add("Switch", [merge.name, cond.name], T=FLOAT)
    body = b.add("Relu", [f"{switch.name}:1"], T=FLOAT)
    again = b.add("NextIteration", [body.name], T=FLOAT)
    merge.input.append(again.name)
    b.add("Exit", [switch.name], {"output": 1}, T=FLOAT)


def _add_function(draw: Any, graph_def: Any, name: str, callable_names: list[str]) -> None:
    function = graph_def.library.function.add()
    function.signature.name = name
    b = _Builder(draw, function.node_def, in_function=True)
    for index in range(draw(st.integers(1, 3))):
        function.signature.input_arg.add(name=f"arg{index}", type=FLOAT)
        b.outputs.append(f"arg{index}")
    for _ in range(draw(st.integers(0, 5))):
        if callable_names and draw(st.integers(0, 3)) == 0:
            _add_call(b, graph_def, draw(st.sampled_from(callable_names)))
        else:
            _add_node(b)
    function.signature.output_arg.add(name="out", type=FLOAT)
    function.ret["out"] = b.source()


def _add_call(b: _Builder, graph_def: Any, name: str) -> None:
    signature = next(f.signature for f in graph_def.library.function if f.signature.name == name)
    inputs = [b.source() for _ in signature.input_arg]
    if b.draw(st.booleans()):
        b.add(name, [*inputs, *b.controls()], {"out": 1})
        return
    call = b.add("PartitionedCall", [*inputs, *b.controls()], {"output": 1})
    call.attr["f"].func.name = name
    call.attr["Tin"].list.type.extend([FLOAT] * len(inputs))
    call.attr["Tout"].list.type.append(FLOAT)


@st.composite
def graph_defs(
    draw: Any,
    *,
    max_nodes: int = 20,
    functions: bool = True,
    loops: bool = True,
    ids: bool = True,
    shuffled: bool = True,
) -> Any:
    """Valid GraphDefs: data and control edges, ports, colocation groups, functions that call each other, v1 loops, stream ids.

    Args:
        draw: Given by Hypothesis.
        max_nodes: About how many nodes the top-level graph has at most (a loop has eight).
        functions: Whether there may be functions.
        loops: Whether there may be v1 loops.
        ids: Whether some nodes may have a stream id already.
        shuffled: Whether the order of the file may differ from the topological one.
    """
    graph_def = schema.graph_pb2.GraphDef()
    graph_def.versions.producer = 1882
    names: list[str] = []
    for number in range(draw(st.integers(0, 3)) if functions else 0):
        _add_function(draw, graph_def, f"__inference_f_{number}", names)
        names.append(f"__inference_f_{number}")
    b = _Builder(draw, graph_def.node)
    for _ in range(draw(st.integers(1, 3))):
        b.add("Placeholder", [], {"output": 1}, dtype=FLOAT)
    for _ in range(draw(st.integers(0, max(0, max_nodes - len(b.names))))):
        kind = draw(st.integers(0, 9))
        if kind == 9 and loops:
            _add_loop(b)
        elif kind >= 7 and names:
            _add_call(b, graph_def, draw(st.sampled_from(names)))
        else:
            _add_node(b)
    _decorate(draw, graph_def, b.names, ids=ids)
    if shuffled and draw(st.booleans()):
        order = draw(st.permutations(range(len(graph_def.node))))
        nodes = [schema.node_def_pb2.NodeDef.FromString(node.SerializeToString()) for node in graph_def.node]
        del graph_def.node[:]
        graph_def.node.extend(nodes[i] for i in order)
    return graph_def


def _decorate(draw: Any, graph_def: Any, names: list[str], *, ids: bool) -> None:
    """Colocation groups, devices and stream ids on some nodes."""
    bodies = [node for function in graph_def.library.function for node in function.node_def]
    for node in [*graph_def.node, *bodies]:
        decoration = draw(st.integers(0, 7))
        if decoration == 5 and ids:
            node.attr[STREAM_ID].i = draw(st.integers(0, 3))
        elif decoration == 6:
            node.device = draw(st.sampled_from(("/device:CPU:0", "/job:worker/device:GPU:1")))
    for node in graph_def.node:
        if draw(st.integers(0, 7)) == 7:
            node.attr["_class"].list.s.append(b"loc:@" + draw(st.sampled_from(names)).encode())


@st.composite
def graphs(draw: Any, *, max_nodes: int = 30, max_degree: int = 3, control_edges: bool = True) -> Graph:
    """Plain DAGs of opaque nodes, in topological order: producers have lower numbers.

    Args:
        draw: Given by Hypothesis.
        max_nodes: The most nodes.
        max_degree: The most data inputs of a node.
        control_edges: Whether there may be control edges.
    """
    count = draw(st.integers(1, max_nodes))
    src, port, dst, slot = [], [], [], []
    for node in range(1, count):
        producers = draw(st.lists(st.integers(0, node - 1), max_size=max_degree))
        for position, producer in enumerate(producers):
            src.append(producer)
            port.append(draw(st.integers(0, 1)))
            dst.append(node)
            slot.append(position)
        if control_edges and draw(st.integers(0, 4)) == 4:
            src.append(draw(st.integers(0, node - 1)))
            port.append(CONTROL)
            dst.append(node)
            slot.append(CONTROL)
    return Graph(
        names=[f"n{node}" for node in range(count)],
        ops=["Op"] * count,
        devices=[""] * count,
        attrs=[{}] * count,
        edges=Edges.of(src, port, dst, slot),
    )
