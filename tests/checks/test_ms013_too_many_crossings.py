from msplit.checks.ms013_too_many_crossings import crossings
from tests.checks.harness import found, report
from tests.graphs import parse

CHAIN = "x:Placeholder; a:MatMul(x)[_stream_id=0]; b:Relu(a)[_stream_id=1]; c:Relu(b)[_stream_id=0]; d:Relu(c)[_stream_id=0]"
"""Two of three dependencies cross."""


def test_finds_a_share_above_the_limit():
    (one,) = found(CHAIN, "MS013")
    assert one.text == "67% of the dependencies between kernels cross streams (limit: 50%)"


def test_finds_numbers_above_their_limits():
    findings = found(CHAIN, "MS013", max_cross_edges=1, max_cross_bytes=999, max_cross_share=1.0)
    assert [one.text for one in findings] == [
        "2 tensors cross streams (limit: 1)",
        "1,000 bytes cross streams (limit: 999)",
    ]


def test_passes_what_is_within_the_limits():
    assert found(CHAIN, "MS013", max_cross_edges=2, max_cross_bytes=1000, max_cross_share=0.7) == []
    assert found(CHAIN.replace("_stream_id=1", "_stream_id=0"), "MS013") == []


def test_a_tensor_counts_once_per_reading_stream_and_passes_through_views():
    graph = """
        x:Placeholder; w:Const
        a:MatMul(x,w)@4us[_stream_id=1]
        v:Reshape(a)[_stream_id=2]
        b:Relu(v)[_stream_id=2]
        c:Relu(v,^b)[_stream_id=2]
        d:Relu(a)[_stream_id=3]
        e:Relu(a)[_stream_id=1]
        f:NoOp(^a)
        g:Relu(x,^f)[_stream_id=2]
    """
    flat, costs = parse(graph)
    subject_ids = [0, 0, 1, 2, 2, 2, 3, 1, 0, 2]
    import numpy as np

    edges, moved, share = crossings(flat, costs, costs.time_us > 0, np.asarray(subject_ids, np.int64))
    assert edges == 2  # to stream 2 and to stream 3
    assert moved == 2 * 2000
    assert share == 3 / 4  # b, c and d of b, c, d and e; control edges move nothing


def test_is_skipped_on_one_stream():
    assert report("x:Placeholder; a:MatMul(x)", "MS013").skipped["MS013"] == "all kernels run on one stream"
