import sys

from tests.checks.harness import found, read

GRAPH = "x:Placeholder[dtype=float32]; a:MyOp(x); b:MyOp(a); y:Relu(b)[T=float32]"


def test_finds_ops_without_a_kernel(tmp_path):
    (one,) = found(read(tmp_path, GRAPH, outputs=["y"]), "MS017")
    assert one.text == "the cuda engine has no kernel for MyOp: nodes 'a' and 'b'"


def test_finds_host_ops_between_work_for_the_gpu(tmp_path):
    graph = """
        x:Placeholder[dtype=float32]
        a:MatMul(x,x)[T=float32]
        s:AsString(a)[T=float32]
        y:StringToHashBucketFast(s)[num_buckets=9]
        z:Cast(y)[SrcT=int64,DstT=float32]
        b:MatMul(z,x)[T=float32]
    """
    assert found(read(tmp_path, graph, outputs=["y"]), "MS017") == [], "behind the GPU they can run"
    findings = found(read(tmp_path, graph, outputs=["b"]), "MS017")
    assert {one.nodes for one in findings} == {("s",), ("y",)}
    assert all("needs results of the GPU" in one.text for one in findings)


def test_passes_ops_that_it_has(tmp_path):
    assert (
        found(
            read(
                tmp_path,
                GRAPH.replace("MyOp(x)", "Tanh(x)[T=float32]").replace("MyOp(a)", "Tanh(a)[T=float32]"),
                outputs=["y"],
            ),
            "MS017",
        )
        == []
    )


def test_needs_no_pytorch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("msplit.engines.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    (one,) = found(read(tmp_path, GRAPH, outputs=["y"]), "MS017")
    assert "no kernel for MyOp" in one.text


def test_takes_no_op_of_the_engines_own_for_one_of_the_models(tmp_path):
    (one,) = found(read(tmp_path, "x:Placeholder[dtype=float32]; y:_FusedPointwise(x)", outputs=["y"]), "MS017")
    assert "no kernel for _FusedPointwise" in one.text
