from tests.checks.harness import found, read


def test_finds_ids_on_string_ops(tmp_path):
    graph = """
        s:Placeholder[dtype=string]
        h:StringToHashBucketFast(s)[num_buckets=9,_stream_id=2]
        y:Cast(h)[SrcT=int64,DstT=float32,_stream_id=2]
    """
    (one,) = found(read(tmp_path, graph), "MS009")
    assert one.text == "node 'h' runs on the host and has a stream id, which has no effect"


def test_finds_several_in_one_finding():
    (one,) = found("a:StringJoin[_stream_id=1] host; b:StringJoin[_stream_id=2] host; c:StringJoin host", "MS009")
    assert one.text == "nodes 'a' and 'b' run on the host and have a stream id, which has no effect"


def test_passes_id_0_and_gpu_nodes():
    assert found("a:StringJoin[_stream_id=0] host; b:MatMul[_stream_id=1]; c:StringJoin host", "MS009") == []
