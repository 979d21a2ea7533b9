"""Regions: loops, conds and ref variables of TensorFlow 1."""

import pytest

from msplit.errors import GraphError
from msplit.flatten.build import find_regions, flatten
from tests.flatten.graphdefs import function, model
from tests.graphs import flat

LOOP = """
x:Placeholder[dtype=float32]
outside:Tanh(x)[T=float32]
enter:Enter(x)[T=float32,frame_name=loop]
limit:Enter(outside)[T=float32,frame_name=loop,is_constant=true]
merge:Merge(enter,next)[T=float32,N=2]
less:Less(merge,limit)[T=float32]
cond:LoopCond(less)
switch:Switch(merge,cond)[T=float32]
body:Relu(switch:1)[T=float32]
one:Const(^body)[dtype=float32]
next:NextIteration(body)[T=float32]
exit:Exit(switch:0)[T=float32]
after:Tanh(exit)[T=float32]
"""


def regions_of(graph):
    """Names of the nodes of each region, by its kind and name; regions of one kind and name are listed."""
    region, regions = find_regions(graph)
    return [
        (found.kind, found.name, {graph.names[node] for node in range(len(graph)) if region[node] == number})
        for number, found in enumerate(regions)
    ]


def test_a_loop_is_cut_and_is_one_region_from_enter_to_exit(tmp_path):
    view = flatten(model(tmp_path, LOOP, outputs=["after", "one"]))
    names = view.graph.names
    assert [(names[s], names[d]) for s, d in zip(view.back_edges.src, view.back_edges.dst, strict=True)] == [
        ("next", "merge")
    ]
    assert len(view.graph.topological) == len(view)
    inside = {"enter", "limit", "merge", "less", "cond", "switch", "body", "one", "next", "exit"}
    assert regions_of(view.graph) == [("loop", "loop", inside)]


def test_nested_frames_are_part_of_the_outermost_and_loops_side_by_side_are_not_joined():
    text = """
    x:Placeholder
    a:Enter(x)[frame_name=a]
    b:Enter(a)[frame_name=b]
    inner:Relu(b)
    c:Exit(inner)
    still:Relu(c)
    d:Exit(still)
    between:Tanh(d)
    e:Enter(between)[frame_name=e]
    f:Exit(e)
    g:Enter(x)[frame_name=g]
    h:Exit(g)
    i:Enter(x)[frame_name=i]
    j:Exit(i)
    """
    expected = [
        ("loop", "a", {"a", "b", "inner", "c", "still", "d"}),
        ("loop", "e", {"e", "f"}),
        ("loop", "g", {"g", "h"}),
        ("loop", "i", {"i", "j"}),
    ]
    assert regions_of(flat(text).graph) == expected


def test_a_function_with_a_loop_has_a_frame_for_every_call(tmp_path):
    inside = "\n".join(
        line for line in LOOP.splitlines() if line and not line.startswith(("x:", "outside", "after", "limit", "one"))
    )
    inside = inside.replace("limit", "x")
    for name, output in {"enter": "output", "merge": "output", "next": "output", "less": "z", "cond": "output"}.items():
        for end in (",", ")"):
            inside = inside.replace(f"({name}{end}", f"({name}:{output}:0{end}").replace(
                f",{name}{end}", f",{name}:{output}:0{end}"
            )
    inside = inside.replace("switch:1", "switch:output_true:0").replace("switch:0", "switch:output_false:0")
    inside = inside.replace("(body)", "(body:activations:0)")
    loop = function("looping", "x:float32", "r:float32=exit:output:0", inside)
    text = "x:Placeholder[dtype=float32]\na:PartitionedCall(x)[f=@looping]\nb:PartitionedCall(x)[f=@looping]"
    view = flatten(model(tmp_path, text, loop, outputs=["a", "b"]))
    assert [(region.kind, region.name) for region in view.regions] == [("loop", "a/loop"), ("loop", "b/loop")]
    assert len(view.back_edges) == 2


COND = """
x:Placeholder
p:Placeholder
{0}id:Identity(p)
{0}pivot:Switch(p,p)
{0}t:Identity({0}pivot:1)
{0}s:Switch({1},{0}id)
{0}k:Const(^{0}t)
{0}a:Add({0}s:1,{0}k)
{0}b:Relu({0}s)
{0}m:Merge({0}b,{0}a)
"""


def test_a_cond_reaches_from_its_switches_to_its_merge():
    text = COND.format("", "x") + "after:Tanh(m)\nbeside:Tanh(x)"
    assert regions_of(flat(text).graph) == [("cond", "p", {"pivot", "t", "s", "k", "a", "b", "m"})]


def test_conds_of_one_predicate_are_one_only_where_edges_inside_join_them():
    second = "\n".join(COND.format("z_", "between").strip().splitlines()[2:])
    text = COND.format("", "x") + "between:Tanh(m)\n" + second
    found = regions_of(flat(text).graph)
    assert [(kind, name) for kind, name, _ in found] == [("cond", "p"), ("cond", "p")]
    assert found[1][2] == {"z_pivot", "z_t", "z_s", "z_k", "z_a", "z_b", "z_m"}
    joined = text.replace("z_a:Add(z_s:1,z_k)", "z_a:AddN(z_s:1,z_k,a)")
    assert len(regions_of(flat(joined).graph)) == 1


def test_a_cond_in_a_cond_is_part_of_the_outer_one():
    text = """
    x:Placeholder
    p:Placeholder
    s:Switch(x,p)
    q:Greater(s:1)
    s2:Switch(s:1,q)
    a:Relu(s2:0)
    b:Tanh(s2:1)
    m2:Merge(a,b)
    c:Neg(m2)
    d:Relu(s:0)
    m:Merge(d,c)
    after:Tanh(m)
    """
    assert regions_of(flat(text).graph) == [("cond", "p", {"s", "q", "s2", "a", "b", "m2", "c", "d", "m"})]


def test_a_loop_in_a_cond_and_a_cond_in_a_loop_are_one_region():
    in_cond = """
    x:Placeholder
    p:Placeholder
    s:Switch(x,p)
    e:Enter(s:1)[frame_name=w]
    lm:Merge(e)
    lc:LoopCond(lm)
    ls:Switch(lm,lc)
    lx:Exit(ls:0)
    n:NextIteration(ls:1)
    r:Relu(s:0)
    m:Merge(r,lx)
    """
    assert regions_of(flat(in_cond).graph) == [("cond", "p", {"s", "e", "lm", "lc", "ls", "lx", "n", "r", "m"})]
    in_loop = """
    x:Placeholder
    e:Enter(x)[frame_name=w]
    p:Greater(e)
    s:Switch(e,p)
    a:Relu(s:0)
    b:Tanh(s:1)
    m:Merge(a,b)
    lx:Exit(m)
    after:Relu(lx)
    """
    assert regions_of(flat(in_loop).graph) == [("loop", "w", {"e", "p", "s", "a", "b", "m", "lx"})]


def test_readers_and_writers_of_a_ref_variable_stay_together():
    text = """
    v:VariableV2[dtype=float32]
    w:VariableV2[dtype=float32]
    lonely:VariableV2[dtype=float32]
    x:Placeholder[dtype=float32]
    read:Identity(v)[T=float32]
    y:MatMul(x,read)[T=float32]
    set:Assign(v,x)[T=float32]
    again:AssignAdd(set,x)[T=float32]
    value:Relu(again)[T=float32]
    other:Identity(w)[T=float32]
    late:NoOp(^v)
    """
    assert regions_of(flat(text).graph) == [
        ("variable", "v", {"v", "read", "set", "again", "value"}),
        ("variable", "w", {"w", "other"}),
    ]


def test_regions_that_share_a_node_are_one():
    text = """
    v:VariableV2[dtype=float32]
    x:Placeholder[dtype=float32]
    e:RefEnter(v)[T=float32,frame_name=w]
    in:Relu(e)[T=float32]
    out:Exit(in)[T=float32]
    read:Identity(v)[T=float32]
    """
    assert regions_of(flat(text).graph) == [("loop", "w", {"v", "e", "in", "out", "read"})]


def test_a_cycle_that_is_no_loop_is_an_error_that_names_it():
    from msplit.flatten.control_flow import check_acyclic

    view = flat("x:Placeholder; a:Add(x,c); b:Relu(a); c:Tanh(b); d:Neg(c)")
    with pytest.raises(GraphError, match=r"a cycle of 3 nodes.*a -> b -> c -> a|b -> c -> a -> b|c -> a -> b -> c"):
        check_acyclic(view.graph, "model.pb")
