import msplit.formats
from msplit.cost import estimate
from msplit.flatten.build import flatten
from msplit.shapes.infer import infer
from tests.checks.harness import found, read

COND = """
    p:Placeholder[dtype=bool]
    x:Placeholder[dtype=float32]
    s:Switch(x,p)[T=float32,_stream_id=1]
    t:Relu(s:1)[T=float32,_stream_id=2]
    f:Tanh(s)[T=float32,_stream_id=1]
    m:Merge(f,t)[T=float32,N=2,_stream_id=1]
"""


def test_finds_a_cond_on_two_streams(tmp_path):
    (one,) = found(read(tmp_path, COND), "MS008")
    assert "are in the cond 'p', but on streams 1 and 2" in one.text
    assert {"s", "t"} <= set(one.nodes)


def test_finds_a_loop_on_two_streams():
    (one,) = found("a:Relu[_stream_id=1] region=r; b:Relu(a)[_stream_id=2] region=r; c:Relu(b)[_stream_id=3]", "MS008")
    assert one.text == "nodes 'a' and 'b' are in the loop 'r', but on streams 1 and 2"


def test_passes_a_cond_on_one_stream_and_a_real_loop_without_ids(tmp_path):
    assert found(read(tmp_path, COND.replace("_stream_id=2", "_stream_id=1")), "MS008") == []
    flat = flatten(msplit.formats.read("sample_graphs/while_v1.pb"))
    assert any(region.kind == "loop" for region in flat.regions)
    assert found((flat, estimate(flat, infer(flat))), "MS008") == []
