"""The flat view: what is kept, how calls are inlined, where nodes come from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msplit.core.graph import CONTROL
from msplit.errors import GraphError, LoadError
from msplit.flatten import calls as calls_module
from msplit.flatten.build import body, flatten
from msplit.flatten.flat import to_ids
from msplit.formats import read
from msplit.opset import schema
from tests.campaign import examples
from tests.flatten.graphdefs import function, model

F = "T=float32"
SQUARE = function("square", "a:float32", "r:float32=y:z:0", f"y:Mul(a,a)[{F}]")


def edges_of(view):
    """Edges by name: "producer:port -> consumer.slot", control edges with "^"."""
    graph, edges = view.graph, view.graph.edges
    return {
        f"^{graph.names[s]} -> {graph.names[d]}" if p == CONTROL else f"{graph.names[s]}:{p} -> {graph.names[d]}.{k}"
        for s, p, d, k in zip(edges.src, edges.port, edges.dst, edges.slot, strict=True)
    }


def before(view, first, second):
    """Whether one node has to run before another."""
    graph = view.graph
    seen, stack = set(), [graph.index[second]]
    while stack:
        for source in graph.predecessors(stack.pop()).tolist():
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return graph.index[first] in seen


def test_graph_without_calls_shares_its_arrays(tmp_path):
    loaded = model(tmp_path, f"x:Placeholder[dtype=float32]\ny:Relu(x)[{F}]")
    view = flatten(loaded)
    assert view.graph is loaded.graph
    assert view.origin(1) == (None, 1)
    assert [(t.name, t.node, t.port) for t in (*view.inputs, *view.outputs)] == [("x", 0, 0), ("y", 1, 0)]


def test_only_what_outputs_need_is_kept_and_inputs_stay(tmp_path):
    text = (
        "unused:Placeholder[dtype=float32]\n"
        f"other:Relu(x)[{F}]\n"
        "x:Placeholder[dtype=float32]\n"
        f"y:Tanh(x,^gate)[{F}]\n"
        "gate:NoOp(^k)\n"
        "k:NoOp"
    )
    view = flatten(model(tmp_path, text, inputs=["x", "unused"], outputs=["y"]))
    assert view.graph.names == ["unused", "x", "y", "gate", "k"]
    assert [view.origin(node)[1] for node in range(5)] == [0, 2, 3, 4, 5]
    assert edges_of(view) == {"x:0 -> y.0", "^gate -> y", "^k -> gate"}
    assert view.graph.attrs[2]["T"] == "float32"
    assert [t.node for t in view.inputs] == [1, 0]


def test_nothing_in_front_of_a_fed_tensor_is_kept(tmp_path):
    text = f"x:Placeholder[dtype=float32]\nmiddle:Relu(x)[{F}]\ny:Tanh(middle)[{F}]"
    view = flatten(model(tmp_path, text, inputs=["middle"], outputs=["y"]))
    assert view.graph.names == ["middle", "y"]
    assert view.inputs[0].node == 0


def test_a_node_with_an_output_that_is_not_fed_still_runs(tmp_path):
    text = (
        "x:Placeholder[dtype=float32]\n"
        "s:Split(axis,x)[T=float32,num_split=2]\n"
        "axis:Const[dtype=int32]\n"
        "a:Tanh(s:0)[T=float32]\n"
        "b:Tanh(s:1)[T=float32]"
    )
    view = flatten(model(tmp_path, text, inputs=["s:0"], outputs=["a", "b"]))
    assert "x" in view.graph.names
    alone = flatten(model(tmp_path, text, inputs=["s:0"], outputs=["a"]))
    assert alone.graph.names == ["s", "a"]


@pytest.mark.parametrize(
    "call", ["PartitionedCall(x)[f=@square]", "StatefulPartitionedCall(x)[f=@square]", "square(x)"]
)
def test_calls_are_inlined_and_bound_straight_to_the_callers_tensors(tmp_path, call):
    view = flatten(model(tmp_path, f"x:Placeholder[dtype=float32]\nc:{call}\ny:Relu(c)[{F}]", SQUARE))
    assert sorted(view.graph.names) == ["c/y", "x", "y"]
    assert edges_of(view) == {"x:0 -> c/y.0", "x:0 -> c/y.1", "c/y:0 -> y.0"}
    assert view.origin(view.graph.index["c/y"]) == ("square", 0)


def test_an_output_of_a_call_is_the_tensor_inside(tmp_path):
    view = flatten(
        model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@square]", SQUARE, outputs=["c"])
    )
    assert view.graph.names[view.outputs[0].node] == "c/y"
    assert view.outputs[0].name == "c"


def test_calls_inside_calls_and_several_results(tmp_path):
    outer = function(
        "outer",
        "a:float32, b:float32",
        "p:float32=q:output:0, q:float32=k:y:0",
        f"q:PartitionedCall(b)[f=@square,Tout=float32]\nk:Neg(q:output:0)[{F}]\nunused:Abs(a)[{F}]",
    )
    text = (
        "x:Placeholder[dtype=float32]\n"
        "w:Placeholder[dtype=float32]\n"
        "c:PartitionedCall(w,x)[f=@outer]\n"
        f"y:Sub(c:1,c)[{F}]"
    )
    view = flatten(model(tmp_path, text, SQUARE, outer))
    assert edges_of(view) == {
        "x:0 -> c/q/y.0",
        "x:0 -> c/q/y.1",
        "c/q/y:0 -> c/k.0",
        "c/k:0 -> y.0",
        "c/q/y:0 -> y.1",
    }
    assert view.origin(view.graph.index["c/k"]) == ("outer", 1)


def test_a_parameter_given_back_passes_through_an_identity_after_the_calls_control_inputs(tmp_path):
    same = function("same", "a:float32", "r:float32=a")
    text = f"x:Placeholder[dtype=float32]\ngate:NoOp\nc:PartitionedCall(x,^gate)[f=@same]\ny:Relu(c)[{F}]"
    view = flatten(model(tmp_path, text, same))
    through = next(name for name in view.graph.names if name.startswith("c/"))
    assert view.graph.ops[view.graph.index[through]] == "Identity"
    assert edges_of(view) == {f"x:0 -> {through}.0", f"^gate -> {through}", f"{through}:0 -> y.0"}
    ids, _ = to_ids(view, [1] * len(view))
    assert (None, "c") not in ids, "the call itself gets no id"
    assert set(ids) == {(None, "x"), (None, "gate"), (None, "y")}


def test_control_inputs_of_a_call_come_before_its_whole_body(tmp_path):
    inner = function("inner", "a:float32", "r:float32=s:z:0", f"k:Const[dtype=float32]\ns:Add(a,k:output:0)[{F}]")
    outer = function("outer", "a:float32", "r:float32=c:output:0", "c:PartitionedCall(a)[f=@inner,Tout=float32]")
    text = f"x:Placeholder[dtype=float32]\ng:NoOp\nh:NoOp\nc:PartitionedCall(x,^g,^h)[f=@outer]\ny:Relu(c)[{F}]"
    view = flatten(model(tmp_path, text, inner, outer))
    assert before(view, "g", "c/c/k")
    assert before(view, "h", "c/c/k")
    assert before(view, "g", "c/c/s")
    assert not before(view, "g", "x")


def test_what_waits_for_a_call_waits_for_its_effects_and_results(tmp_path):
    write = function(
        "write",
        "v:resource, a:float32",
        "r:float32=t:y:0",
        f"set:AssignVariableOp(v,a)[dtype=float32]\nprint:Print(a,a)[{F},U=float32]\nt:Tanh(a)[{F}]\ngroup:NoOp(^set)",
        control="group",
        stateful=True,
    )
    text = (
        "v:VarHandleOp[dtype=float32]\nx:Placeholder[dtype=float32]\nc:StatefulPartitionedCall(v,x)[f=@write]\n"
        "r:ReadVariableOp(v,^c)[dtype=float32]\nlast:NoOp(^c)"
    )
    view = flatten(model(tmp_path, text, write, outputs=["r", "last"]))
    for node in ("c/set", "c/t", "c/group"):
        assert before(view, node, "r"), node
        assert before(view, node, "last"), node


def test_effects_inside_a_call_that_nothing_waits_for_become_targets(tmp_path):
    write = function(
        "write",
        "v:resource, a:float32",
        "r:float32=t:y:0",
        f"set:AssignVariableOp(v,a)[dtype=float32]\nt:Tanh(a)[{F}]\nread:ReadVariableOp(v)[dtype=float32]",
        control="set, read",
    )
    text = "v:VarHandleOp[dtype=float32]\nx:Placeholder[dtype=float32]\nc:StatefulPartitionedCall(v,x)[f=@write]"
    view = flatten(model(tmp_path, text, write, outputs=["c"]))
    assert [view.graph.names[target] for target in view.targets] == ["c/set"]
    assert "c/read" not in view.graph.names, "nobody misses a read that nobody uses"


def test_effects_count_through_calls_that_say_they_are_stateless(tmp_path):
    prints = function("prints", "a:float32", "r:float32=a", f"p:Print(a,a)[{F},U=float32]")
    outer = function("outer", "a:float32", "r:float32=a", "c:PartitionedCall(a)[f=@prints]")
    text = f"x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@outer]\ny:Tanh(x,^c)[{F}]"
    view = flatten(model(tmp_path, text, prints, outer, outputs=["y"]))
    assert before(view, "c/c/p", "y")


def test_results_that_nobody_uses_are_not_kept(tmp_path):
    two = function("two", "a:float32", "p:float32=u:y:0, q:float32=w:activations:0", f"u:Tanh(a)[{F}]\nw:Relu(a)[{F}]")
    view = flatten(model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@two]", two, outputs=["c:1"]))
    assert sorted(view.graph.names) == ["c/w", "x"]


@pytest.mark.parametrize("op", ["While", "If", "SymbolicGradient", "RemoteCall"])
def test_other_calls_stay_one_node(tmp_path, op):
    view = flatten(model(tmp_path, f"x:Placeholder[dtype=float32]\nc:{op}(x)[f=@square]", SQUARE, outputs=["c"]))
    assert view.graph.names == ["x", "c"]
    assert "square" in view.graph.functions


def test_calls_that_xla_compiles_stay_one_node(tmp_path):
    text = (
        "x:Placeholder[dtype=float32]\n"
        "c:PartitionedCall(x)[f=@square,_XlaMustCompile=true]\n"
        "d:PartitionedCall(c)[f=@square,_XlaMustCompile=false]"
    )
    view = flatten(model(tmp_path, text, SQUARE, outputs=["d"]))
    assert sorted(view.graph.names) == ["c", "d/y", "x"]


def test_body_nodes_take_the_device_of_their_call(tmp_path):
    pinned = function(
        "pinned", "a:float32", "r:float32=s:z:0", f"k:Const@/cpu:0[dtype=float32]\ns:Add(a,k:output:0)[{F}]"
    )
    view = flatten(
        model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)@/gpu:0[f=@pinned]", pinned, outputs=["c"])
    )
    device = dict(zip(view.graph.names, view.graph.devices, strict=True))
    assert device == {"x": "", "c/k": "/cpu:0", "c/s": "/gpu:0"}


def test_attributes_that_name_nodes_are_translated(tmp_path):
    inner = function(
        "inner",
        "a:float32",
        "r:float32=s:activations:0",
        f"k:Tanh(a)[{F}]\ns:Relu(k:y:0)[{F},_class=loc:@k|loc:@elsewhere]",
    )
    view = flatten(
        model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@inner]", inner, outputs=["c"])
    )
    attrs = view.graph.attrs[view.graph.index["c/s"]]
    assert attrs["_class"] == ("loc:@c/k", "loc:@elsewhere")
    assert attrs.get("T") == "float32"
    assert attrs.get("nothing", 7) == 7
    assert dict(attrs)["_class"] == attrs["_class"]


def test_type_parameters_are_filled_in(tmp_path):
    generic = function("generic", "a:float32", "r:float32=s:activations:0", "s:Relu(a)")
    generic.node_def[0].attr["T"].placeholder = "Kind"
    generic.signature.attr.add(name="Kind", type="type")
    view = flatten(model(tmp_path, "x:Placeholder[dtype=float32]\nc:generic(x)[Kind=float32]", generic, outputs=["c"]))
    assert view.graph.attrs[view.graph.index["c/s"]]["T"] == "float32"


def test_names_that_are_taken_get_a_number(tmp_path):
    text = f"c/y:Placeholder[dtype=float32]\nc:PartitionedCall(c/y)[f=@square]\nz:Relu(c)[{F}]"
    view = flatten(model(tmp_path, text, SQUARE))
    assert sorted(view.graph.names) == ["c/y", "c/y_1", "z"]


def test_a_missing_argument_is_an_error_that_names_the_call(tmp_path):
    two = function("two", "a:float32, b:float32", "r:float32=s:z:0", f"s:Add(a,b)[{F}]")
    with pytest.raises(GraphError, match=r"(?s)\bc\b.*two"):
        flatten(model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@two]", two, outputs=["c"]))


@pytest.mark.parametrize("through", ["itself", "another"])
def test_functions_that_call_themselves_are_an_error_that_names_the_chain(tmp_path, through):
    ping = function(
        "ping",
        "a:float32",
        "r:float32=c:output:0",
        f"c:PartitionedCall(a)[f=@{'ping' if through == 'itself' else 'pong'},Tout=float32]",
    )
    pong = function("pong", "a:float32", "r:float32=c:output:0", "c:PartitionedCall(a)[f=@ping,Tout=float32]")
    chain = "ping -> ping" if through == "itself" else "ping -> pong -> ping"
    with pytest.raises(LoadError, match=chain):
        flatten(
            model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@ping]", ping, pong, outputs=["c"])
        )


def test_calls_that_grow_exponentially_are_an_error_and_not_a_full_memory(tmp_path):
    def level(number, callee):
        inside = (
            f"a0:PartitionedCall(a)[f=@{callee},Tout=float32]\n"
            f"a1:PartitionedCall(a0:output:0)[f=@{callee},Tout=float32]"
        )
        return function(f"f{number}", "a:float32", "r:float32=a1:output:0", inside)

    functions = [SQUARE, *(level(k, f"f{k - 1}" if k else "square") for k in range(60))]
    loaded = model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@f59]", *functions, outputs=["c"])
    with pytest.raises(LoadError, match="inlining the function f2"):
        flatten(loaded)


def test_calls_that_grow_far_beyond_the_file_are_an_error(tmp_path):
    def level(number, callee):
        inside = (
            f"a0:PartitionedCall(a)[f=@{callee},Tout=float32]\n"
            f"a1:PartitionedCall(a0:output:0)[f=@{callee},Tout=float32]"
        )
        return function(f"f{number}", "a:float32", "r:float32=a1:output:0", inside)

    def doubled(levels):
        functions = [SQUARE, *(level(k, f"f{k - 1}" if k else "square") for k in range(levels))]
        text = f"x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@f{levels - 1}]"
        return model(tmp_path, text, *functions, outputs=["c"])

    assert len(flatten(doubled(10))) == 1025
    with pytest.raises(LoadError, match="msplit takes 20,000"):
        flatten(doubled(15))


def test_names_that_grow_with_every_call_are_an_error_and_not_a_full_memory(tmp_path):
    long = "n" * 1000
    links = [
        function(
            f"f{k}", "a:float32", f"r:float32={long}:output:0", f"{long}:PartitionedCall(a)[f=@f{k - 1},Tout=float32]"
        )
        for k in range(1, 400)
    ]
    first = function(
        "f0", "a:float32", "r:float32=y:y:0", "\n".join(["y:Tanh(a)", *(f"y{k}:Print(a)" for k in range(100))])
    )
    loaded = model(
        tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@f399]", first, *links, outputs=["c"]
    )
    with pytest.raises(LoadError, match="characters"):
        flatten(loaded)


def test_a_long_ring_of_calls_is_told_shortly(tmp_path):
    ring = [
        function(
            f"f{k}", "a:float32", "r:float32=c:output:0", f"c:PartitionedCall(a)[f=@f{(k + 1) % 500},Tout=float32]"
        )
        for k in range(500)
    ]
    with pytest.raises(LoadError, match=r"f0 -> f1 -> f2 -> f3 -> … 493 more … -> f497 -> f498 -> f499 -> f0"):
        flatten(model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@f0]", *ring, outputs=["c"]))


def test_deep_calls_need_no_recursion_and_have_a_limit(tmp_path):
    def chain(depth):
        links = [
            function(f"f{k}", "a:float32", "r:float32=c:output:0", f"c:PartitionedCall(a)[f=@f{k - 1},Tout=float32]")
            for k in range(1, depth)
        ]
        first = function("f0", "a:float32", "r:float32=y:y:0", f"y:Tanh(a)[{F}]")
        text = f"x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@f{depth - 1}]"
        return model(tmp_path, text, first, *links, outputs=["c"])

    view = flatten(chain(800))
    assert len(view) == 2
    with pytest.raises(LoadError, match="deep"):
        flatten(chain(calls_module.MAX_DEPTH + 2))


def test_a_long_chain_of_nodes_needs_no_recursion(tmp_path):
    count = examples(20_000, 100_000)
    text = "n0:Placeholder[dtype=float32]\n" + "\n".join(f"n{k}:Relu(n{k - 1})[{F}]" for k in range(1, count))
    assert len(flatten(model(tmp_path, text))) == count


def test_body_of_a_while_is_flattened_on_request(tmp_path):
    step = function(
        "step",
        "i:int32, v:float32, t:resource",
        "i2:int32=n:z:0, v2:float32=c:output:0, t2:resource=t",
        "one:Const[dtype=int32]\n"
        "n:Add(i,one:output:0)[T=int32]\n"
        "c:PartitionedCall(v)[f=@square,Tout=float32]\n"
        "set:AssignVariableOp(t,v)[dtype=float32]",
    )
    text = (
        "i:Placeholder[dtype=int32]\n"
        "x:Placeholder[dtype=float32]\n"
        "t:VarHandleOp[dtype=float32]\n"
        "w:While(i,x,t)[body=@step,cond=@step,T=int32|float32|resource]"
    )
    loaded = model(tmp_path, text, step, SQUARE, outputs=["w:1"])
    assert "w" in flatten(loaded).graph.names
    view = body(loaded, "step")
    assert [(t.name, view.graph.names[t.node]) for t in view.inputs] == [("i", "i"), ("v", "v"), ("t", "t")]
    assert [(t.name, view.graph.names[t.node]) for t in view.outputs] == [("i2", "n"), ("v2", "c/y"), ("t2", "t")]
    assert [view.graph.names[t] for t in view.targets] == ["set"]
    assert view.origin(view.graph.index["i"]) == ("step", -1)
    assert view.origin(view.graph.index["n"]) == ("step", 1)
    assert view.origin(view.graph.index["c/y"]) == ("square", 0)
    assert to_ids(view, [1] * len(view))[0] == {
        ("step", "one"): 1,
        ("step", "n"): 1,
        ("step", "set"): 1,
        ("square", "y"): 1,
    }
    with pytest.raises(LoadError, match="no function nothing"):
        body(loaded, "nothing")


def test_one_body_called_from_two_places_gets_one_id_per_node(tmp_path):
    text = (
        "x:Placeholder[dtype=float32]\n"
        "a:PartitionedCall(x)[f=@square]\n"
        "b:PartitionedCall(x)[f=@square]\n"
        "c:PartitionedCall(x)[f=@square]\n"
        f"y:AddN(a,b,c)[{F},N=3]"
    )
    view = flatten(model(tmp_path, text, SQUARE))
    streams = {"x": 0, "a/y": 1, "b/y": 2, "c/y": 2, "y": 0}
    ids = [streams[name] for name in view.graph.names]
    chosen, conflicts = to_ids(view, ids)
    assert chosen == {(None, "x"): 0, (None, "y"): 0, ("square", "y"): 2}
    assert len(conflicts) == 1
    assert conflicts[0].wanted == {2: ("b/y", "c/y"), 1: ("a/y",)}
    assert str(conflicts[0]).startswith("square: y gets stream 2")
    costs = [9.0 if name == "a/y" else 1.0 for name in view.graph.names]
    assert to_ids(view, ids, costs)[0]["square", "y"] == 1
    equal, none = to_ids(view, np.ones(len(view), np.int32))
    assert set(equal.values()) == {1}
    assert none == ()


def test_ids_below_zero_are_left_out(tmp_path):
    view = flatten(model(tmp_path, f"x:Placeholder[dtype=float32]\ny:Relu(x)[{F}]"))
    assert to_ids(view, [-1, 3]) == ({(None, "y"): 3}, ())


def test_stateful_nodes_are_known(tmp_path):
    text = "s:Const[dtype=int32]\nr:RandomUniform(s)[dtype=float32,T=int32]\ny:Relu(r)[T=float32]"
    assert flatten(model(tmp_path, text)).stateful.tolist() == [False, True, False]


SAMPLES = sorted(
    path
    for path in (Path(__file__).parent.parent.parent / "sample_graphs").iterdir()
    if path.suffix != ".md" and path.name != "two_tags"
)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_sample_is_a_dag_whose_nodes_come_from_the_file(path):
    loaded = read(path)
    view = flatten(loaded)
    graph = view.graph
    assert len(graph.topological) == len(view) > 0
    assert len(set(graph.names)) == len(view)
    assert len(view.outputs) == len(loaded.outputs)
    assert len(view.inputs) == len(loaded.inputs)
    for node in range(len(view)):
        function_name, number = view.origin(node)
        source = loaded.graph if function_name is None else loaded.graph.functions[function_name].body
        offset = 0 if function_name is None else len(loaded.graph.functions[function_name].parameters)
        assert source.ops[number + offset] == graph.ops[node] or graph.ops[node] in ("NoOp", "Identity")
        assert graph.names[node].endswith(source.names[number + offset]) or graph.ops[node] in ("NoOp", "Identity")
    for edge in range(len(graph.edges)):
        count = schema.output_count(graph.ops[graph.edges.src[edge]], graph.attrs[graph.edges.src[edge]])
        assert count is None or graph.edges.port[edge] < count
    to_ids(view, [0] * len(view))


def test_waiting_for_a_call_in_which_nothing_runs_is_waiting_for_what_it_waits_for(tmp_path):
    empty = function("empty", "a:float32", "", "unused:Const[dtype=float32]")
    text = f"x:Placeholder[dtype=float32]\ng:NoOp\nc:PartitionedCall(x,^g)[f=@empty]\ny:Relu(k,^c)[{F}]\nk:Const[dtype=float32]"
    view = flatten(model(tmp_path, text, empty, outputs=["y"]))
    assert before(view, "g", "y")
    assert before(view, "x", "y")
    assert "c/unused" not in view.graph.names


def test_a_call_can_be_a_target(tmp_path):
    write = function("write", "v:resource, a:float32", "", "set:AssignVariableOp(v,a)[dtype=float32]", control="set")
    text = (
        "v:VarHandleOp[dtype=float32]\nx:Placeholder[dtype=float32]\n"
        "c:StatefulPartitionedCall(v,x)[f=@write]\nd:StatefulPartitionedCall(v,x,^c)[f=@write]"
    )
    view = flatten(model(tmp_path, text, write, outputs=["d"]))
    assert view.graph.names[view.targets[0]] == "d/set"
    assert before(view, "c/set", "d/set")


def test_feeding_a_call_and_fetching_what_it_does_not_give_are_errors(tmp_path):
    loaded = model(tmp_path, "x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@square]", SQUARE, outputs=["c"])
    fed = replace(loaded, inputs=(replace(loaded.inputs[0], node="c"),))
    with pytest.raises(LoadError, match="c is a function call"):
        flatten(fed)
    fetched = replace(loaded, outputs=(replace(loaded.outputs[0], port=1),))
    with pytest.raises(GraphError, match="the output c:1 does not exist: square has fewer results"):
        flatten(fetched)


def test_a_model_without_outputs_keeps_all_its_nodes(tmp_path):
    loaded = model(tmp_path, f"x:Placeholder[dtype=float32]\ny:Relu(x)[{F}]\nc:PartitionedCall(x)[f=@square]", SQUARE)
    view = flatten(replace(loaded, outputs=(), targets=()))
    assert sorted(view.graph.names) == ["c/y", "x", "y"]
    plain = model(tmp_path, f"x:Placeholder[dtype=float32]\ny:Relu(x)[{F}]")
    assert flatten(replace(plain, outputs=(), targets=())).graph.names == ["x", "y"]


def test_attributes_are_a_sequence_of_mappings(tmp_path):
    text = f"x:Placeholder[dtype=float32]\nc:PartitionedCall(x)[f=@square]\ny:Relu(c)[{F}]"
    attrs = flatten(model(tmp_path, text, SQUARE)).graph.attrs
    assert len(attrs) == 3
    assert [dict(a) for a in attrs[1:]] == [dict(a) for a in list(attrs)[1:]] == [{"T": "float32"}] * 2
    assert len(attrs[2]) == 1
    assert repr(attrs[2]) == "{'T': 'float32'}"
