"""Order through loops of TensorFlow 1, against loops that are unrolled."""

from dataclasses import replace

import networkx as nx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msplit.analysis.colocation import paths
from msplit.core.graph import Edges, Graph
from msplit.flatten.control_flow import cut_back_edges
from tests.campaign import examples
from tests.checks.harness import found, read

LOOP = """
    size:Const[dtype=int32]
    handle:TensorArrayV3(size)[dtype=float32,_stream_id=0]
    d:Placeholder[dtype=float32]
    enter_h:Enter(handle)[T=resource,frame_name=f,is_constant=true]
    enter_d:Enter(d)[T=float32,frame_name=f,is_constant=true]
    enter_i:Enter(size)[T=int32,frame_name=f]
    enter_flow:Enter(handle:1)[T=float32,frame_name=f]
    merge_i:Merge(enter_i,next_i)[T=int32,N=2]
    merge_flow:Merge(enter_flow,next_flow)[T=float32,N=2]
    less:Less(merge_i,merge_i)[T=int32]
    go:LoopCond(less)
    switch_i:Switch(merge_i,go)[T=int32]
    switch_flow:Switch(merge_flow,go)[T=float32]
    write:TensorArrayWriteV3(enter_h,switch_i:1,enter_d,switch_flow:1)[T=float32,_stream_id=1]
    add:AddV2(switch_i:1,switch_i:1)[T=int32]
    next_i:NextIteration(add)[T=int32]
    next_flow:NextIteration(write)[T=float32]
    exit_i:Exit(switch_i)[T=int32]
    exit_flow:Exit(switch_flow)[T=float32]
    indices:Range(size,size,size)[Tidx=int32]
    y:TensorArrayGatherV3(handle,indices,exit_flow)[dtype=float32,_stream_id=2]
"""


def races(tmp_path, text, *outputs):
    return [one.nodes for one in found(read(tmp_path, text, outputs=list(outputs)), "MS010")]


def test_what_is_gathered_behind_a_loop_waits_for_what_the_loop_writes(tmp_path):
    assert races(tmp_path, LOOP, "y") == []


def test_what_waits_only_for_the_turns_to_be_counted_does_not(tmp_path):
    counted = LOOP.replace("indices,exit_flow)", "indices,enter_value)").replace(
        "y:Ten", "enter_value:Identity(handle:1,^exit_i)[T=float32]\n    y:Ten"
    )
    assert races(tmp_path, counted, "y", "exit_flow") == [("write", "y")]


def test_what_a_turn_drops_holds_nothing_up(tmp_path):
    # The flow of a turn is not made of that of the turn before: only the last turn is over.
    dropped = LOOP.replace("switch_flow:1)[T=float32,_stream_id=1]", "enter_d)[T=float32,_stream_id=1]")
    assert races(tmp_path, dropped, "y") == [("write", "y")]


def test_a_reader_in_the_loop_is_not_ordered_by_the_next_turn(tmp_path):
    inside = LOOP.replace(
        "add:AddV2(switch_i:1,switch_i:1)",
        "look:TensorArrayReadV3(enter_h,switch_i:1,enter_d)[dtype=float32,_stream_id=2]\n    add:AddV2(switch_i:1,switch_i:1,^look)",
    )
    assert races(tmp_path, inside, "y") == [("write", "look")]


def test_a_loop_may_have_no_turns(tmp_path):
    before = """
        d:Placeholder[dtype=float32]
        n:Placeholder[dtype=int32]
        w:VarHandleOp[dtype=float32]
        first:AssignVariableOp(w,d)[dtype=float32,_stream_id=1]
        enter_i:Enter(n)[T=int32,frame_name=f]
        merge_i:Merge(enter_i,next_i)[T=int32,N=2]
        less:Less(merge_i,merge_i)[T=int32]
        go:LoopCond(less)
        switch_i:Switch(merge_i,go)[T=int32]
        add:AddV2(switch_i:1,switch_i:1)[T=int32]
        late:Identity(d,^first)[T=float32]
        enter_late:Enter(late)[T=float32,frame_name=f,is_constant=true]
        sum:AddV2(switch_i:1,add,^enter_late)[T=int32]
        next_i:NextIteration(sum)[T=int32]
        exit_i:Exit(switch_i)[T=int32]
        y:ReadVariableOp(w,^exit_i)[dtype=float32,_stream_id=2]
    """
    assert races(tmp_path, before, "y") == [("first", "y")]


@st.composite
def loops(draw):
    """A loop of up to three variables around a random body, with a few nodes in front of it and behind it.

    (nodes of the front, of the body, of the part behind; edges of the body; per variable what a turn makes it of). What the body reads is
    named by kind: ("front", i), ("variable", i) or ("body", i). A node of the body to which nothing leads from the loop is not in it.
    """
    variables, front = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    body, behind = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    reads = []
    for node in range(body):
        choices = [("variable", v) for v in range(variables)] + [("body", b) for b in range(node)] + [("front", 0)]
        reads.append(draw(st.lists(st.sampled_from(choices), max_size=3, unique=True)))
    values = [
        draw(st.sampled_from([("body", b) for b in range(body)] + [("variable", v) for v in range(variables)]))
        for _ in range(variables)
    ]
    after = [draw(st.lists(st.integers(0, variables - 1), max_size=2, unique=True)) for _ in range(behind)]
    return front, reads, values, after


def cyclic(front, reads, values, after):
    """The loop as TensorFlow 1 writes it, and the numbers of its nodes by what they are."""
    names, ops, edges, frame = {}, [], [], {}

    def add(key, op, *inputs, **attrs):
        names[key] = len(ops)
        ops.append(op)
        edges.extend((source, len(ops) - 1) for source in inputs)
        frame[key] = attrs

    for node in range(front):
        add(("front", node), "Relu")
    for v in range(len(values)):
        add(("enter", v), "Enter", ("front", v % front), frame_name="f")
        add(("merge", v), "Merge", ("enter", v), ("next", v))
    add("go", "LoopCond", ("merge", 0))
    for v in range(len(values)):
        add(("variable", v), "Switch", ("merge", v), "go")
        add(("exit", v), "Exit", ("variable", v))
    add("constant", "Enter", ("front", 0), frame_name="f")
    for node, sources in enumerate(reads):
        add(("body", node), "Relu", *("constant" if kind == "front" else (kind, of) for kind, of in sources))
    for v, value in enumerate(values):
        add(("next", v), "NextIteration", value)
    for node, sources in enumerate(after):
        add(("behind", node), "Relu", *(("exit", v) for v in sources))
    src = [names[source] for source, _ in edges]
    dst = [target for _, target in edges]
    slot = [dst[:place].count(target) for place, target in enumerate(dst)]
    count = len(ops)
    all_edges = Edges.of(src, [0] * len(src), dst, slot)
    graph = Graph([str(n) for n in range(count)], ops, [""] * count, [frame[key] for key in names], all_edges)
    forward, back = cut_back_edges(graph)
    return replace(graph, edges=forward), back, names


def in_the_loop(reads):
    """The nodes of the body that run once in each turn: the others, to which nothing leads from the loop, run once, before all of it."""
    inside: set[int] = set()
    for node, inputs in enumerate(reads):
        if any(kind != "body" or of in inside for kind, of in inputs):
            inside.add(node)
    return inside


def unrolled(turns, front, reads, values, after):
    """What waits for what where the loop has so many turns: nodes are (kind, number, turn)."""
    graph = nx.DiGraph()
    inside = in_the_loop(reads)
    graph.add_nodes_from(("front", node, 0) for node in range(front))
    graph.add_nodes_from(("body", node, 0) for node in range(len(reads)) if node not in inside)

    def at(kind, of, turn):
        return (kind, of, 0 if kind == "front" or (kind == "body" and of not in inside) else turn)

    variable = {v: [("front", v % front, 0)] for v in range(len(values))}
    go: list = []
    for turn in range(turns + 1):
        graph.add_edges_from((source, ("go", 0, turn)) for source in [*variable[0], *go])
        for v, sources in variable.items():
            graph.add_edges_from((source, ("variable", v, turn)) for source in [*sources, ("go", 0, turn)])
        if turn == turns:
            break
        for node, inputs in enumerate(reads):
            graph.add_node(at("body", node, turn))
            graph.add_edges_from((at(kind, of, turn), at("body", node, turn)) for kind, of in inputs)
        variable = {v: [at(*value, turn)] for v, value in enumerate(values)}
    for node, sources in enumerate(after):
        graph.add_node(("behind", node, 0))
        graph.add_edges_from((("variable", v, turns), ("behind", node, 0)) for v in sources)
    return graph


@settings(max_examples=examples(50, 150))
@given(loops())
@example(
    (1, [[], [], [], [("variable", 0), ("body", 0)]], [("body", 3)], [[0]])
)  # a node that runs without a turn, too
@example((1, [[], [], [("variable", 0), ("body", 0)]], [("body", 2)], [[0]]))
@example((1, [[("front", 0)], [("variable", 0), ("body", 0)]], [("body", 1)], [[0]]))  # and one that does not
def test_an_order_that_is_claimed_holds_for_every_number_of_turns(drawn):
    graph, back, names = cyclic(*drawn)
    before = paths(graph, list(range(len(graph))), back)
    below = [
        {source: nx.descendants(one, source) for source in one}
        for one in (unrolled(turns, *drawn) for turns in range(4))
    ]
    for first, last in [(a, b) for a in names for b in names if a != b]:
        if (first[0], last[0]) != ("body", "behind"):
            continue
        holds = all(
            last_node in under[node]
            for under in below
            for node in under
            if node[:2] == first
            for last_node in under
            if last_node[:2] == last
        )
        claimed = names[first] in before[names[last]]
        assert not claimed or holds
        if holds and len(drawn[2]) == 1:
            assert claimed  # of one variable it finds all that is so
