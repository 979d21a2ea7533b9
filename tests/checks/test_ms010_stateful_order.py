import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.analysis.colocation import paths
from tests.checks.harness import found, read
from tests.graphs import build

RACE = """
    w:VarHandleOp[dtype=float32,_stream_id=0]
    d:Placeholder[dtype=float32]
    write:AssignAddVariableOp(w,d)[dtype=float32,_stream_id=1]
    read:ReadVariableOp(w)[dtype=float32,_stream_id=2]
    y:Relu(read)[T=float32,_stream_id=2]
"""


def model(tmp_path, text):
    return read(tmp_path, text, outputs=["y", "write"])


def test_finds_a_writer_and_a_reader_that_nothing_orders(tmp_path):
    (one,) = found(model(tmp_path, RACE), "MS010")
    assert one.text == "'write' writes 'w' and 'read' uses it, on streams 1 and 2, and no path orders them"
    assert one.nodes == ("write", "read")


def test_finds_it_through_an_identity_of_the_handle_and_through_a_shared_name(tmp_path):
    passed_on = RACE.replace("ReadVariableOp(w)", "ReadVariableOp(i)") + "i:Identity(w)[T=resource]"
    assert len(found(model(tmp_path, passed_on), "MS010")) == 1
    twin = RACE.replace("[dtype=float32,_stream_id=0]", "[dtype=float32,shared_name=v]").replace(
        "ReadVariableOp(w)", "ReadVariableOp(w2)"
    )
    (one,) = found(model(tmp_path, twin + "w2:VarHandleOp[dtype=float32,shared_name=v]"), "MS010")
    assert "writes 'v'" in one.text


def test_finds_it_on_ref_variables(tmp_path):
    graph = """
        w:VariableV2[dtype=float32]
        d:Placeholder[dtype=float32]
        write:AssignAdd(w,d)[T=float32,_stream_id=1]
        y:Relu(w)[T=float32,_stream_id=2]
    """
    (one,) = found(model(tmp_path, graph), "MS010")
    assert one.nodes == ("write", "y")


def test_finds_unknown_ops_that_take_the_handle(tmp_path):
    custom = RACE.replace("write:AssignAddVariableOp(w,d)[dtype=float32,", "write:MyUpdate(w,d)[")
    assert len(found(model(tmp_path, custom), "MS010")) == 1


@pytest.mark.parametrize(
    "change",
    [
        ("ReadVariableOp(w)", "ReadVariableOp(w,^write)"),  # ordered by the program
        ("AssignAddVariableOp(w,d)", "AssignAddVariableOp(w,d,^read)"),
        ("AssignAddVariableOp(w,d)", "AssignAddVariableOp(w,d,^y)"),  # along a path
        ("_stream_id=2", "_stream_id=1"),  # one stream
    ],
)
def test_passes_what_is_ordered(tmp_path, change):
    assert found(model(tmp_path, RACE.replace(*change)), "MS010") == []


def test_passes_readers_on_many_streams(tmp_path):
    readers = RACE.replace("write:AssignAddVariableOp(w,d)", "write:ReadVariableOp(w)")
    assert found(model(tmp_path, readers), "MS010") == []


@given(
    st.integers(2, 30).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=60))
    )
)
def test_paths_are_those_of_networkx(drawn):
    import networkx as nx

    count, pairs = drawn
    edges = sorted((a, b) for a, b in pairs if a < b)
    flat, _ = build([str(i) for i in range(count)], ["Relu"] * count, [(a, -1, b, -1) for a, b in edges], [1.0] * count)
    oracle = nx.DiGraph(edges)
    oracle.add_nodes_from(range(count))
    before = paths(flat.graph, range(count))
    for first in range(count):
        below = nx.descendants(oracle, first)
        assert {last for last in range(count) if (first in before[last])} == below


def test_paths_of_more_nodes_than_one_pass_takes():
    count = 1200
    flat, _ = build(
        [str(i) for i in range(count)], ["Relu"] * count, [(i, 0, i + 2, 0) for i in range(count - 2)], [1.0] * count
    )
    before = paths(flat.graph, range(count))
    assert 0 in before[1198]
    assert 0 not in before[1199]
    assert 1198 not in before[0]
