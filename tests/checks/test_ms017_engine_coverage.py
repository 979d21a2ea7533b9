import json
import sys
from pathlib import Path

import pytest

from msplit.checks import check
from msplit.checks.subject import CheckSettings
from tests import forked
from tests.checks.harness import found, read

ROOT = Path(__file__).parents[2]
ALL_SAMPLES = """
import contextlib, io, json, sys
from pathlib import Path
from msplit.cli import main

told = {}
for model in sorted(path for path in Path("sample_graphs").iterdir() if path.name != "README.md"):
    choice = ["--part", "tag=serve"] if model.name == "two_tags" else []
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main.run(["check", str(model), *choice, "--exit-zero", "--format", "json"])
    told[model.name] = [code, json.loads(out.getvalue())["skipped"].get("MS017"), "torch" in sys.modules]
print(json.dumps(told))
"""

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


def test_loads_no_pytorch_for_any_sample_and_says_what_that_leaves_open():
    done = forked.run([sys.executable, "-c", ALL_SAMPLES], capture_output=True, text=True, cwd=ROOT, check=True)
    told = json.loads(done.stdout)
    assert {code for code, _, _ in told.values()} == {0}
    assert [name for name, (_, _, torch) in told.items() if torch] == []
    left_open = {name: skipped for name, (_, skipped, _) in told.items() if skipped}
    assert set(left_open) == {"cond_v1.pb", "control_flow_v2", "gru_while", "while_v1.pb"}
    assert all("only a build tells" in why and "--select MS017" in why for why in left_open.values())


def test_builds_where_it_is_selected_by_name(monkeypatch):
    pytest.importorskip("torch")
    model = ROOT / "sample_graphs" / "while_v1.pb"
    asked = CheckSettings(select=("MS017",))
    assert check(model, asked).skipped == {}
    (one,) = check(ROOT / "sample_graphs" / "control_flow_v2", asked).findings
    assert "refuses" in one.finding.text
    monkeypatch.setattr("msplit.engines.cuda.coverage.importlib.util.find_spec", lambda name: None)
    assert check(model, asked).skipped["MS017"].endswith("only a build tells, and PyTorch is not installed")
