import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core import validate as module
from msplit.core.graph import BrokenInput, Edges, Function, FunctionRef, Graph
from msplit.core.validate import Defect, verify
from msplit.formats.decode import to_graph
from msplit.formats.functions import Library
from msplit.opset import schema
from tests import strategies
from tests.campaign import examples


def graph_of(graph_def: Any) -> Graph:
    return to_graph(graph_def, Library(graph_def.library))


def graph(text: str, library: str = "") -> Graph:
    """A graph from lines ``name Op input input … | rest of the node in text format``."""
    graph_def = schema.graph_pb2.GraphDef()
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, rest = line.partition("|")
        name, op, *inputs = head.split()
        node = graph_def.node.add(name=name, op=op.strip("-"), input=inputs)
        text_format.Merge(rest, node)
    text_format.Merge(library, graph_def.library)
    return graph_of(graph_def)


def kinds(defects: list[Defect]) -> list[tuple[str, str]]:
    return [(defect.kind, defect.node) for defect in defects]


@settings(max_examples=examples(60, 200), deadline=None)
@given(strategies.graph_defs())
def test_generated_graphs_are_valid(graph_def: Any) -> None:
    assert verify(graph_of(graph_def)) == []


@pytest.mark.parametrize(
    ("text", "expected", "words"),
    [
        ("a Acme gone", [("input", "a")], "input 'gone' names no node"),
        ("a Acme gone:1", [("input", "a")], "input 'gone:1' names no node"),
        ("a Acme ^gone", [("input", "a")], "input '^gone' names no node"),
        ("b Acme\na Acme b:x", [("input", "a")], "has a port that is not a number"),
        ("b Acme\na Acme b:-1", [("input", "a")], "has a port that is not a number"),
        ("b Acme\na Acme b:99999999999", [("input", "a")], "has a port that is not a number"),
        ("b Acme\na Acme ^", [("input", "a")], "input '^' names no node"),
        ("b Acme\na Acme ^b b", [("order", "a")], "input 'b' stands after a control input"),
        (
            "b Acme\na Acme ^b b:1 gone",
            [("order", "a"), ("order", "a"), ("input", "a")],
            "stands after a control input",
        ),
        ("a Acme\na Acme\na Acme", [("duplicate", "a")], "3 nodes have this name"),
        ("a:b Acme", [("name", "a:b")], "not one that TensorFlow accepts"),
        ("_a Acme", [("name", "_a")], "not one that TensorFlow accepts"),
        ("a/b.c-d_e>f/ Acme\n.x Acme\n0 Acme", [], ""),
        ("é Acme", [("name", "é")], "not one that TensorFlow accepts"),
        ("a -", [("op", "a")], "(no op): has no op"),
        ("x Placeholder\na Acme x:1", [("port", "a")], "'x:1' names a port out of range: Placeholder has 1 output"),
        ("x NoOp\na Acme x", [("port", "a")], "NoOp has 0 outputs"),
        ("x Acme\na Acme x:99", [], ""),
        ("x Acme\na Relu", [("arity", "a")], "has 0 and its op takes 1 input"),
        ("x Acme\na Const x", [("arity", "a")], "has 1 and its op takes no input"),
        ("x Acme\na AddV2 x x x", [("arity", "a")], "has 3 and its op takes 2 inputs"),
        ('x Acme\na AddN x x | attr { key: "N" value { i: 3 } }', [("arity", "a")], "has 2 and its op takes 3 inputs"),
        ("x Acme\na AddN x x", [], ""),
        (
            'i Acme\ns Split i i | attr { key: "num_split" value { i: 2 } }\na Acme s:1 s:2',
            [("port", "a")],
            "Split has 2",
        ),
        ('a Acme | attr { key: "_class" value { list { s: "loc:@b" } } }', [("colocation", "a")], "colocated with 'b'"),
        ('a Acme | attr { key: "_class" value { s: "loc:@b" } }', [("colocation", "a")], "colocated with 'b'"),
        ('a Acme | attr { key: "_class" value { list { s: "loc:@a" s: "other" s: "\\377" } } }', [], ""),
        ('a Acme | attr { key: "f" value { func { name: "f" } } }', [("function", "a")], "calls function 'f'"),
        ('a Acme | attr { key: "f" value { func { name: "" } } }', [], ""),
        (
            'a Acme | attr { key: "f" value { list { func { name: "f" } func { name: "g" } } } }',
            [("function", "a"), ("function", "a")],
            "calls function 'g'",
        ),
        ("b Acme a\na Acme", [], ""),
    ],
)
def test_each_defect_names_its_node(text: str, expected: list[tuple[str, str]], words: str) -> None:
    defects = verify(graph(text))
    assert kinds(defects) == expected
    assert not words or words in defects[-1].text or words in defects[0].text


def test_all_defects_are_collected() -> None:
    defects = verify(
        graph("""
            a Acme gone ^nowhere
            a Acme
            b:c Acme
            d Relu e
            e Relu d
            f Const a
            g Acme f:7
        """)
    )
    assert kinds(defects) == [
        ("input", "a"),
        ("input", "a"),
        ("name", "b:c"),
        ("duplicate", "a"),
        ("port", "g"),
        ("arity", "f"),
        ("cycle", "d"),
    ]


def test_where_is_in_the_text() -> None:
    assert (
        verify(graph("a Acme gone"), where="function f")[0].text
        == "function f, node 'a' (Acme): input 'gone' names no node"
    )


# ---- cycles -------------------------------------------------------------------------------------------------------------

LOOP = """
    x Acme
    enter Enter x
    merge Merge enter next | attr { key: "N" value { i: 2 } }
    test Acme merge
    cond LoopCond test
    switch Switch merge cond
    body Relu switch:1
    next NextIteration body
    exit Exit switch
"""


def test_v1_loop_is_no_defect() -> None:
    assert verify(graph(LOOP)) == []


def test_cycle_inside_a_loop_body_and_behind_it_is_found() -> None:
    defects = verify(graph(LOOP.replace("body Relu switch:1", "body AddV2 switch:1 twist\ntwist Relu body")))
    assert kinds(defects) == [("cycle", "body")]
    assert "body -> twist -> body" in defects[0].text


def test_next_iteration_closes_a_loop_only_at_a_merge() -> None:
    assert kinds(verify(graph("a Relu n\nn NextIteration a"))) == [("cycle", "a")]


def test_each_knot_of_cycles_is_reported_once_with_its_shortest_cycle() -> None:
    defects = verify(graph("a Acme b c\nb Acme a\nc Acme b a\nd Acme c\ne Acme f d\nf Acme e\ng Relu g\nh Acme ^h"))
    assert [defect.text.partition(": ")[2] for defect in defects] == [
        "is on a cycle that no loop closes: a -> b -> a",
        "is on a cycle that no loop closes: e -> f -> e",
        "is on a cycle that no loop closes: g -> g",
        "is on a cycle that no loop closes: h -> h",
    ]


def test_long_cycle_is_shortened() -> None:
    count = examples(20_000, 100_000)
    lines = [f"n{i} Relu n{(i - 1) % count}" for i in range(count)]
    (defect,) = verify(graph("\n".join(lines)))
    assert f"n0 -> n1 -> n2 -> n3 -> n4 -> n5 -> … {count - 6} more … -> n0" in defect.text


def test_many_small_cycles_take_linear_time() -> None:
    pairs = examples(8_000, 30_000)
    # A chain of two-node cycles: each knot is found while all before it wait.
    lines = []
    for i in range(pairs):
        lines += [f"a{i} Acme b{i} {f'b{i - 1}' if i else ''}", f"b{i} Acme a{i}"]
    start = time.process_time()
    assert len(verify(graph("\n".join(lines)))) == pairs
    assert time.process_time() - start < pairs / 3_000


@settings(max_examples=examples(80, 300), deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
    )
)
def test_knots_agree_with_reachability(case: tuple[int, set[tuple[int, int]]]) -> None:
    count, pairs = case
    src, dst = zip(*sorted(pairs), strict=True) if pairs else ((), ())
    zeros = [0] * len(src)
    names = [f"n{i}" for i in range(count)]
    g = Graph(names, ["Acme"] * count, [""] * count, [{}] * count, Edges.of(src, zeros, dst, zeros))
    reach = np.zeros((count, count), dtype=bool)
    for s, d in pairs:
        reach[s, d] = True
    for k in range(count):
        reach |= np.outer(reach[:, k], reach[k])
    knots = {frozenset(j for j in range(count) if reach[i, j] and reach[j, i]) for i in range(count) if reach[i, i]}
    assert [defect.node for defect in verify(g)] == [f"n{min(knot)}" for knot in sorted(knots, key=min)]
    for defect in verify(g):
        cycle = [
            int(name[1:]) for name in defect.text.rpartition(": ")[2].replace(" ", "").split("->") if name[0] == "n"
        ]
        if "…" not in defect.text:
            assert all((a, b) in pairs for a, b in pairwise(cycle))


# ---- functions ----------------------------------------------------------------------------------------------------------


def library(**bodies: str) -> str:
    functions = []
    for name, nodes in bodies.items():
        functions.append(
            f'function {{ signature {{ name: "{name}" input_arg {{ name: "x" type: DT_FLOAT }} '
            f'output_arg {{ name: "y" type: DT_FLOAT }} }} {nodes} ret {{ key: "y" value: "x" }} }}'
        )
    return " ".join(functions)


def test_bodies_are_verified_where_they_are_reached() -> None:
    bad = 'node_def { name: "bad" op: "Relu" }'
    call_g = 'node_def { name: "call" op: "g" input: "x" }'
    g = graph("x Acme\nc f x", library(f=call_g, g=bad, unused=bad))
    assert [d.text for d in verify(g)] == ["function g, node 'bad' (Relu): has 0 and its op takes 1 input"]


def test_bodies_may_carry_foreign_colocation_and_names() -> None:
    body = (
        'node_def { name: "_odd name" op: "Relu" input: "x" attr { key: "_class" value { list { s: "loc:@out" } } } }'
    )
    assert kinds(verify(graph("x Acme\nc f x", library(f=body)))) == [("name", "_odd name")]
    assert verify(graph("x Acme\nc f x", library(f=body.replace("_odd name", "_odd")))) == []


def test_mutual_recursion_and_self_calls_end() -> None:
    g = graph(
        "x Acme\nc f x",
        library(f='node_def { name: "a" op: "g" input: "x" }', g='node_def { name: "b" op: "f" input: "x" }'),
    )
    assert verify(g) == []
    assert verify(graph("x Acme\nc f x", library(f='node_def { name: "a" op: "f" input: "x" }'))) == []


def test_call_of_a_missing_function_inside_a_body() -> None:
    body = 'node_def { name: "a" op: "PartitionedCall" attr { key: "f" value { func { name: "gone" } } } }'
    (defect,) = verify(graph("x Acme\nc f x", library(f=body)))
    assert (
        defect.text == "function f, node 'a' (PartitionedCall): calls function 'gone', which the library does not have"
    )


def test_ports_of_a_call_follow_the_signature() -> None:
    assert kinds(verify(graph("x Acme\nc f x\nd Acme c:1", library(f="")))) == [("port", "d")]


def test_part_of_a_list_parameter_is_no_defect() -> None:
    body = 'node_def { name: "a" op: "Acme" input: "x:1" }'
    assert verify(graph("x Acme\nc f x", library(f=body))) == []


def test_graph_of_plain_values_is_verified_too() -> None:
    empty = Edges.of([], [], [], [])
    body = Graph(
        ["x"], ["_Arg"], [""], [{}], empty, broken_inputs=(BrokenInput(-1, "y = z", "is a result that names no node"),)
    )
    attrs = [{"branches": (FunctionRef("f"), FunctionRef("gone")), "_class": ("loc:@gone",)}, {}]
    g = Graph(["a", "b"], ["Case", "Acme"], ["", ""], attrs, empty, {"f": Function("f", body, (), ())})
    assert [d.text for d in verify(g)] == [
        "node 'a' (Case): is colocated with 'gone', which is no node",
        "node 'a' (Case): calls function 'gone', which the library does not have",
        "function f: 'y = z' is a result that names no node",
    ]


def test_a_defect_of_one_function_among_many_is_told_as_if_it_were_alone() -> None:
    sound = 'node_def { name: "a" op: "Relu" input: "x" }'
    bad = (
        'node_def { name: "b" op: "Relu" input: "x" input: "x" } node_def { name: "c" op: "Relu" input: "b:activations:0" } '
        'node_def { name: "d" op: "AddV2" input: "e:z:0" input: "x" } node_def { name: "e" op: "AddV2" input: "d:z:0" input: "x" }'
    )
    lone = 'node_def { name: "f" op: "Relu" input: "gone" }'
    calls = "\n".join(f"c{n} {name} x" for n, name in enumerate(("p", "bad", "q", "lone", "r")))
    found = verify(graph(f"x Acme\n{calls}", library(p=sound, bad=bad, q=sound, lone=lone, r=sound)))
    assert [(defect.kind, defect.text) for defect in found] == [
        ("arity", "function bad, node 'b' (Relu): has 2 and its op takes 1 input"),
        ("cycle", "function bad, node 'd' (AddV2): is on a cycle that no loop closes: d -> e -> d"),
        ("input", "function lone, node 'f' (Relu): input 'gone' names no node"),
    ]


def test_an_input_that_names_nothing_hides_no_other_function() -> None:
    """What is known of a broken input is by number, and each function has its own numbers."""
    lone = 'node_def { name: "f" op: "Relu" input: "gone" }'
    bad = 'node_def { name: "g" op: "Relu" }'
    found = verify(graph("x Acme\nc lone x\nd bad x", library(lone=lone, bad=bad)))
    assert kinds(found) == [("input", "f"), ("arity", "g")]
    found = verify(graph("x Acme\nc bad x\nd lone x", library(lone=lone, bad=bad)))
    assert kinds(found) == [("arity", "g"), ("input", "f")]


@pytest.mark.parametrize("count", [5, 50])
def test_functions_are_looked_at_together(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Array calls on a few nodes each, once per function: 7 s for 25,000 functions of three nodes."""
    seen = []
    of_edges = module._of_edges
    monkeypatch.setattr(module, "_of_edges", lambda body, where: seen.append(len(body)) or of_edges(body, where))
    body = 'node_def { name: "a" op: "Relu" input: "x" }'
    calls = "\n".join(f"c{number} f{number} x" for number in range(count))
    assert verify(graph(f"x Acme\n{calls}", library(**{f"f{number}": body for number in range(count)}))) == []
    assert sorted(seen) == [count + 1, 2 * count]


# ---- size ---------------------------------------------------------------------------------------------------------------


def timed(make: Callable[[int], str], count: int) -> float:
    g = graph(make(count))
    start = time.process_time()
    assert verify(g) == []
    return time.process_time() - start


def test_a_long_chain_is_no_problem() -> None:
    count = examples(20_000, 100_000)
    assert timed(lambda n: "n0 Acme\n" + "\n".join(f"n{i} Relu n{i - 1}" for i in range(1, n)), count) < count / 10_000


def test_functions_that_call_each_other_thousands_deep() -> None:
    graph_def = schema.graph_pb2.GraphDef()
    graph_def.node.add(name="x", op="Acme")
    graph_def.node.add(name="c", op="f0", input=["x"])
    for number in range(5000):
        function = graph_def.library.function.add()
        function.signature.name = f"f{number}"
        function.signature.input_arg.add(name="x", type=1)
        function.node_def.add(name="c", op=f"f{number + 1}", input=["x"])
    assert verify(graph_of(graph_def)) == []
