"""Inlining against an interpreter that runs calls as calls: same values, same order of effects, right origins."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.flatten.build import flatten
from msplit.flatten.flat import to_ids
from tests.campaign import examples
from tests.flatten.graphdefs import function, model

BINARY = {"Add": lambda a, b: a + b, "Sub": lambda a, b: a - b, "Mul": lambda a, b: a * b}
MODULUS = 1_000_003
OUTPUT = {"Add": "z", "Sub": "z", "Mul": "z", "PartitionedCall": "output", "Const": "output", "Print": "output"}


@st.composite
def programs(draw):
    """Functions that call earlier ones, and a main graph: per graph a list of (name, op, callee, data inputs, controls)."""
    functions = []
    depth = draw(st.integers(1, 4))
    for level in range(depth + 1):
        parameters = draw(st.integers(1, 2)) if level < depth else 1
        nodes = []
        tensors = [("arg", k) for k in range(parameters)]
        for number in range(draw(st.integers(1, 6))):
            callee = draw(st.integers(-1, len(functions) - 1)) if functions else -1
            pick = st.sampled_from(tensors)
            controls = draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True)) if number else []
            if callee >= 0:
                inputs = [draw(pick) for _ in range(functions[callee]["parameters"])]
                nodes.append(("PartitionedCall", callee, inputs, controls))
                tensors += [("node", number, k) for k in range(len(functions[callee]["results"]))]
            else:
                op = draw(st.sampled_from([*BINARY, "Const", "Print"]))
                inputs = [] if op == "Const" else [draw(pick) for _ in range(2)]
                nodes.append((op, -1, inputs, controls))
                tensors.append(("node", number, 0))
        results = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3))
        functions.append({"parameters": parameters, "nodes": nodes, "results": results})
    return functions


def tensor_text(where, tensor, top):
    if tensor[0] == "arg":
        return f"p{tensor[1]}"
    node, port = tensor[1:]
    if top:
        return f"n{node}:{port}"
    return f"n{node}:{OUTPUT[where['nodes'][node][0]]}:{port}"


def body_text(functions, number, top):
    where = functions[number]
    lines = []
    for place, (op, callee, inputs, controls) in enumerate(where["nodes"]):
        texts = [tensor_text(where, tensor, top) for tensor in inputs] + [f"^n{control}" for control in controls]
        if op == "PartitionedCall":
            types = "|".join(["float32"] * len(functions[callee]["results"]))
            tout = f",Tout={types}" if "|" in types else ""
            attrs = f"f=@f{callee}{tout}"
        else:
            attrs = {"Const": "dtype=float32", "Print": "T=float32,U=float32"}.get(op, "T=float32")
        lines.append(f"n{place}:{op}({','.join(texts)})[{attrs}]")
    return "\n".join(lines)


def load(folder, functions):
    definitions = []
    for number, where in enumerate(functions[:-1]):
        results = ", ".join(
            f"r{k}:float32={tensor_text(where, tensor, False)}" for k, tensor in enumerate(where["results"])
        )
        args = ", ".join(f"p{k}:float32" for k in range(where["parameters"]))
        made = function(f"f{number}", args, results, body_text(functions, number, False))
        for node in made.node_def:
            if node.op == "PartitionedCall":
                callee = int(node.attr["f"].func.name[1:])
                node.attr["Tout"].ClearField("value")
                node.attr["Tout"].list.type.extend([1] * len(functions[callee]["results"]))
        definitions.append(made)
    text = "p0:Placeholder[dtype=float32]\n" + body_text(functions, len(functions) - 1, True)
    outputs = [tensor_text(functions[-1], tensor, True) for tensor in functions[-1]["results"]]
    last = [f"n{place}:0" for place, node in enumerate(functions[-1]["nodes"]) if node[0] == "Print"]
    return model(folder, text, *definitions, inputs=["p0"], outputs=list(dict.fromkeys([*outputs, *last])))


def value_of(op, name, inputs):
    if op == "Const":
        return hash_of(name)
    if op == "Print":
        return inputs[0]
    return BINARY[op](*inputs) % MODULUS


def hash_of(name):
    return sum(ord(letter) * (k + 1) for k, letter in enumerate(name)) % MODULUS


def run(functions, number, arguments):
    """Results of a function, and the values of its tensors. Constants are told apart by their place in their body alone."""
    where = functions[number]
    values = {}

    def get(tensor):
        return arguments[tensor[1]] if tensor[0] == "arg" else values[tensor[1:]]

    for place, (op, callee, inputs, _) in enumerate(where["nodes"]):
        given_values = [get(tensor) for tensor in inputs]
        if op == "PartitionedCall":
            results = run(functions, callee, given_values)[0]
            values.update({(place, port): value for port, value in enumerate(results)})
        else:
            values[place, 0] = value_of(op, f"f{number}/{place}", given_values)
    return [get(tensor) for tensor in where["results"]], values


def run_flat(view, functions, fed):
    graph = view.graph
    values = {}
    for node in graph.topological.tolist():
        inputs = [values[source] for source in graph.inputs(node)]
        op = graph.ops[node]
        if op in ("NoOp", "Placeholder"):
            values[node, 0] = fed
        elif op == "Identity":
            values[node, 0] = inputs[0]
        else:
            function_name, number = view.origin(node)
            owner = len(functions) - 1 if function_name is None else int(function_name[1:])
            place = number - 1 if function_name is None else number
            values[node, 0] = value_of(op, f"f{owner}/{place}", inputs)
    return values


@settings(max_examples=examples(40, 120), deadline=None)
@given(programs())
def test_inlined_graph_computes_what_calls_compute(functions):
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(Path(folder), functions)
    view = flatten(loaded)
    assert "PartitionedCall" not in view.graph.ops
    assert len(set(view.graph.names)) == len(view)
    _, expected = run(functions, len(functions) - 1, [17])
    values = run_flat(view, functions, 17)
    for output in view.outputs:
        name, _, port = output.name.partition(":")
        wanted = 17 if name == "p0" else expected[int(name[1:]), int(port or 0)]
        assert values[output.node, output.port] == wanted, output


@settings(max_examples=examples(40, 120), deadline=None)
@given(programs())
def test_control_edges_hold_for_all_that_is_inside_of_calls(functions):
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(Path(folder), functions)
    view = flatten(loaded)
    graph = view.graph
    above = [set() for _ in range(len(graph))]
    for node in graph.topological.tolist():
        for source in graph.predecessors(node).tolist():
            above[node] |= above[source] | {source}

    def inside(prefix):
        return [n for n, name in enumerate(graph.names) if name == prefix or name.startswith(prefix + "/")]

    def check(number, prefix):
        for place, (_, callee, _, controls) in enumerate(functions[number]["nodes"]):
            name = f"{prefix}n{place}"
            for control in controls:
                for effect in inside(f"{prefix}n{control}"):
                    if graph.ops[effect] == "Print":
                        assert all(effect in above[node] for node in inside(name)), (graph.names[effect], name)
            if callee >= 0:
                check(callee, f"{name}/")

    check(len(functions) - 1, "")


@settings(max_examples=examples(30, 60), deadline=None)
@given(programs(), st.data())
def test_every_flat_node_gives_its_id_to_its_origin(functions, data):
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(Path(folder), functions)
    view = flatten(loaded)
    ids = data.draw(st.lists(st.integers(-1, 3), min_size=len(view), max_size=len(view)))
    chosen, conflicts = to_ids(view, ids)
    disputed = {(conflict.function, conflict.node): conflict for conflict in conflicts}
    wanted = {}
    for node, stream in enumerate(ids):
        function_name, number = view.origin(node)
        names = loaded.graph.names if function_name is None else loaded.graph.functions[function_name].body.names
        ops = loaded.graph.ops if function_name is None else loaded.graph.functions[function_name].body.ops
        offset = 0 if function_name is None else len(loaded.graph.functions[function_name].parameters)
        if ops[number + offset] == "PartitionedCall":
            assert view.graph.ops[node] in ("NoOp", "Identity")
            continue
        assert view.graph.names[node].endswith(names[number + offset])
        if stream >= 0:
            wanted.setdefault((function_name, names[number + offset]), []).append(stream)
    assert set(chosen) == set(wanted)
    for key, streams in wanted.items():
        assert chosen[key] in streams
        assert (len(set(streams)) > 1) == (key in disputed)
        assert streams.count(chosen[key]) == max(map(streams.count, streams))


@settings(deadline=None, max_examples=50)
@given(programs())
def test_nodes_of_a_kind_are_equal_wherever_they_are_called(functions):
    """But for the values of constants."""
    with tempfile.TemporaryDirectory() as folder:
        graph = flatten(load(Path(folder), functions)).graph
    first, of = graph.per_kind()
    for node, kind in enumerate(of.tolist()):
        like = int(first[kind])
        assert like <= node
        assert graph.ops[node] == graph.ops[like]
        one, other = (
            {key: value for key, value in dict(graph.attrs[at]).items() if key != "value"} for at in (node, like)
        )
        assert repr(one) == repr(other)
