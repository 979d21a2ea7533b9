"""`msplit bisect`: a lowering, a rewrite or a kernel that is wrong is found by name."""

import json
from dataclasses import replace

import numpy as np
import pytest

from msplit.benchmark.bisect import bisect
from msplit.cli.main import run
from msplit.engines.cuda.ir import lowering as registry
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.report import commands as report
from msplit.report import document as jsonio
from msplit.run.request import RunRequest
from tests.engines.cuda.cases import SAMPLES, graph_of
from tests.report.test_schemas import validate

pytestmark = pytest.mark.tf


def plant(monkeypatch, op, wrong):
    """Lets an op give something else: `wrong` makes it of the right result."""
    lowering = registry.table()[op]

    def planted(node, *inputs):
        return wrong(node, lowering.function(node, *inputs))

    monkeypatch.setitem(registry._TABLE, op, replace(lowering, function=planted))


def tower(tf, v1):
    x = v1.placeholder(tf.float32, [None, 6], name="x")
    rng = np.random.default_rng(0)
    for number in range(4):
        w = (rng.standard_normal((6, 6)) / 2).astype(np.float32)
        x = tf.tanh(tf.matmul(x, w, name=f"product{number}") + 0.1, name=f"tanh{number}")
    tf.identity(x + tf.nn.sigmoid(x, name="gate"), name="out")


def text(flat, found):
    document = report.bisect_document(flat, found)
    return "\n".join([*(f"{name}: {value}" for name, value in document.facts), *document.notes])


def test_nothing_is_found_where_nothing_is_wrong():
    flat = graph_of(tower, outputs=["out"])
    found = bisect(flat, RunRequest.of(batch=3))
    assert (found.culprit, found.drift, found.differing, found.kernels) == (None, None, 0, "")
    assert found.compared == 4 * 3 + 2 + 1
    assert "Every value and every output agrees" in text(flat, found)


def test_a_wrong_lowering_is_named_with_what_it_read(monkeypatch):
    plant(monkeypatch, "Tanh", lambda node, y: y * 1.01 if node.name == "tanh2" else y)
    flat = graph_of(tower, outputs=["out"])
    found = bisect(flat, RunRequest.of(batch=3))
    culprit = found.culprit
    assert (culprit.node, culprit.op, found.kernels) == ("tanh2", "Tanh", "plain")
    assert culprit.found.shape == (3, 6)
    assert culprit.found.needed > culprit.found.tolerance
    assert [one.passed for one in culprit.inputs] == [True]
    assert not culprit.alone.passed
    assert found.differing > 3, "what follows differs, too"
    said = text(flat, found)
    for part in (
        "node: tanh2",
        "op: Tanh",
        "float32, 3×6",
        "tolerance 0.0002",
        "is the first node that gives another value",
    ):
        assert part in said


def test_a_node_that_only_hands_an_error_on_is_not_blamed(monkeypatch):
    """The last bits of one op, which the next makes large, are nobody's mistake."""

    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        y = tf.exp(x, name="small")
        tf.multiply(y - tf.exp(x + 1e-6, name="near"), 1e6, name="out")

    plant(monkeypatch, "Exp", lambda node, y: y * (1 + 1e-6) if node.name == "small" else y)
    flat = graph_of(graph, outputs=["out"])
    found = bisect(flat, RunRequest.of(batch=3))
    assert found.culprit is None
    assert found.drift is not None
    assert found.drift.alone.passed
    validate("bisect", json.loads(jsonio.dumps("bisect", report.bisect_payload(flat, found))))


def test_a_kernel_of_a_group_is_found_though_every_plain_node_agrees(monkeypatch):
    plant(monkeypatch, "_FusedPointwise", lambda node, ys: tuple(y + 0.5 for y in ys))
    flat = graph_of(tower, outputs=["out"])
    found = bisect(flat, RunRequest.of(batch=3))
    assert (found.differing, found.kernels) == (0, "fused")
    assert len(found.culprit.group) > 1
    assert found.culprit.node in found.culprit.group
    validate("bisect", json.loads(jsonio.dumps("bisect", report.bisect_payload(flat, found))))
    said = text(flat, found)
    assert "in one kernel (fused)" in said
    assert "Every node by itself agrees; with fused kernels the group of" in said


def test_a_batched_branch_is_found_though_every_plain_node_agrees(monkeypatch):
    flat = flatten(read(SAMPLES / "towers_small.pb"))
    plant(monkeypatch, "_GroupedMatMul", lambda node, y: y * 2)
    found = bisect(flat, RunRequest.of(batch=3))
    assert (found.differing, found.kernels) == (0, "grouped")
    assert len(found.culprit.group) > 1
    validate("bisect", json.loads(jsonio.dumps("bisect", report.bisect_payload(flat, found))))


def test_a_rewrite_is_found(monkeypatch):
    plant(monkeypatch, "_FusedMatMul", lambda node, y: y + 0.5)
    flat = flatten(read(SAMPLES / "mmoe_small.pb"))
    found = bisect(flat, RunRequest.of(batch=3))
    assert found.culprit is not None
    assert found.kernels == "plain"
    assert len(found.culprit.group) > 1


@pytest.mark.parametrize("name", ["cond_v1.pb", "while_v1.pb", "keras_lookup", "ragged_sparse"])
def test_samples_of_every_kind_agree(name):
    found = bisect(flatten(read(SAMPLES / name)), RunRequest.of(batch=2))
    assert (found.culprit, found.differing) == (None, 0)


def test_the_command_says_it_and_ends_with_1(monkeypatch, capsys, tmp_path):
    graph = graph_of(tower, outputs=["out"]).model.graph_def
    path = tmp_path / "model.pb"
    path.write_bytes(graph.SerializeToString())
    assert run(["bisect", str(path), "--batch", "2"]) == 0
    assert "Every value and every output agrees" in " ".join(capsys.readouterr().out.split())
    assert run(["bisect", str(path), "--batch", "2", "--format", "json"]) == 0
    validate("bisect", json.loads(capsys.readouterr().out))
    plant(monkeypatch, "Sigmoid", lambda node, y: y + 1)
    assert run(["bisect", str(path), "--batch", "2", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    validate("bisect", found)
    assert found["culprit"]["node"] == "gate"
    assert found["culprit"]["found"]["mismatches"] == 12


@pytest.mark.parametrize("options", [["--tune"], ["--engine", "tensorflow"], ["--trace", "t.json"], ["--batch", "1,2"]])
def test_options_that_do_not_go_with_it_are_refused(options, capsys):
    assert run(["bisect", str(SAMPLES / "mmoe_small.pb"), *options]) == 2
    assert options[0] in capsys.readouterr().err
