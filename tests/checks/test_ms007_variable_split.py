from tests.checks.harness import found, read, rules_of

REF = """
    w:VariableV2[dtype=float32,shape=2x2,_stream_id=1]
    one:Placeholder[dtype=float32]
    up:AssignAdd(w,one)[T=float32,_stream_id=2]
    read:Identity(w)[T=float32,_stream_id=1]
    y:Relu(read)[T=float32,_stream_id=3]
"""
HANDLE = """
    w:VarHandleOp[dtype=float32,_stream_id=1]
    r:ReadVariableOp(w)[dtype=float32,_stream_id=2]
    y:Relu(r)[T=float32,_stream_id=3]
"""


def test_finds_a_ref_variable_split_from_its_writer(tmp_path):
    (one,) = found(read(tmp_path, REF.replace("shape=2x2,", ""), outputs=["up", "y"]), "MS007")
    assert "read and write the ref variable 'w', but are on streams 1 and 2" in one.text
    assert set(one.nodes) == {"w", "up", "read"}


def test_finds_a_handle_split_from_its_reader(tmp_path):
    (one,) = found(read(tmp_path, HANDLE), "MS007")
    assert one.text == "nodes 'w' and 'r' are a variable's handle and its users, but on streams 1 and 2"


def test_passes_whole_variables_and_handles_that_the_rules_let_part(tmp_path):
    whole = REF.replace("shape=2x2,", "").replace("_stream_id=2", "_stream_id=1")
    assert found(read(tmp_path, whole, outputs=["up", "y"]), "MS007") == []
    model = read(tmp_path, HANDLE)
    assert found(model, "MS007", rules=rules_of("manual", "colocation: {handles: false}")) == []
    assert len(found(model, "MS007", rules=rules_of("manual", "colocation"))) == 1
