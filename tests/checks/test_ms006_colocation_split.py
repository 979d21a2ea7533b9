from tests.checks.harness import found, read

SPLIT = """
    w:VariableV2[dtype=float32,_class=loc:@w,_stream_id=1]
    a:Relu(w)[T=float32,_class=loc:@w,_stream_id=2]
    b:Tanh(w)[T=float32,_stream_id=2]
"""


def test_finds_a_class_on_two_streams(tmp_path):
    (one,) = found(read(tmp_path, SPLIT), "MS006")
    assert one.text == "nodes 'w' and 'a' are one colocation group (`_class`), but on streams 1 and 2"
    assert one.nodes == ("w", "a")


def test_finds_a_member_without_an_id():
    (one,) = found(
        "a:Relu[_class=loc:@g,_stream_id=1]; b:Relu(a)[_class=loc:@g]; c:Relu(b)[_class=loc:@g,_stream_id=1]", "MS006"
    )
    assert "on streams 0 and 1" in one.text
    assert one.nodes == ("b", "a", "c")


def test_passes_whole_groups_host_members_and_other_ties(tmp_path):
    assert found(read(tmp_path, SPLIT.replace("_stream_id=2", "_stream_id=1")), "MS006") == []
    assert found("a:Relu[_class=loc:@g,_stream_id=1]; s:StringJoin[_class=loc:@g] host", "MS006") == []
    assert found("a:Relu[_stream_id=1] region=r; b:Relu(a)[_stream_id=2] region=r", "MS006") == []
