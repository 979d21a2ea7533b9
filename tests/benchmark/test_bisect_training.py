"""`msplit bisect` of steps that train looks at gradients and updates, too."""

import json
import sys

import numpy as np
import pytest

from msplit.benchmark.bisect import bisect
from msplit.engines.tensorflow.engine import reference
from msplit.report import commands as report
from msplit.report import document
from msplit.run.request import RunRequest
from msplit.verify.op_by_op import AMBIGUOUS, FLOWS, IN_LOOPS, REFERENCES, fetchable
from tests import training_graphs
from tests.benchmark.test_bisect import plant, text
from tests.engines.cuda.cases import graph_of
from tests.engines.cuda.test_loop_training import recurrent_net, trained
from tests.report.test_schemas import validate
from tests.verify.test_learning import FETCHES, small_net

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_a_wrong_gradient_is_named(monkeypatch, resource):
    plant(monkeypatch, "AvgPoolGrad", lambda node, y: y * 1.001)
    flat = small_net("RMSProp", resource=resource)
    found = bisect(flat, RunRequest.of(batch=3))
    assert (found.culprit.op, found.kernels, found.culprit.alone.passed) == ("AvgPoolGrad", "plain", False)
    assert all(one.passed for one in found.culprit.inputs)
    validate("bisect", json.loads(document.dumps("bisect", report.bisect_payload(flat, found))))


@pytest.mark.parametrize("optimizer", ["GradientDescent", "Momentum", "Adam", "RMSProp"])
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_gradients_and_variables_are_compared_where_nothing_is_wrong(optimizer, resource):
    flat = small_net(optimizer, resource=resource)
    found = bisect(flat, RunRequest.of(batch=3))
    forward = fetchable(small_net(optimizer, resource=resource, outputs=["loss"]))
    assert (found.culprit, found.drift, found.differing) == (None, None, 0)
    assert found.compared > len(forward.keys) + 10
    slots = {"GradientDescent": 0, "Momentum": 1, "Adam": 2, "RMSProp": 2}[optimizer]
    assert found.variables == 2 * (1 + slots) + 1 + 2 * (optimizer == "Adam")
    assert (REFERENCES in found.left_out) == (not resource)
    assert "every variable" in text(flat, found)
    assert not forward.writers
    assert not forward.after.any()


@pytest.mark.parametrize(
    ("optimizer", "op", "variable"), [("Momentum", "ApplyMomentum", "Momentum"), ("Adam", "ApplyAdam", "Adam")]
)
@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_a_wrong_update_is_named_with_the_variable(monkeypatch, optimizer, op, variable, resource):
    """A hundredth more in every slot: far less than what changes the variable itself beyond its tolerance."""

    def wrong(node, outputs):
        outputs[1].mul_(1.01)
        return outputs

    plant(monkeypatch, op, wrong)
    flat = small_net(optimizer, resource=resource)
    found = bisect(flat, RunRequest.of(batch=3))
    assert (found.differing, found.kernels) == (0, "plain")
    assert found.culprit.op == ("Resource" if resource else "") + op
    assert found.culprit.found.name.startswith("change of ")
    assert variable in found.culprit.found.name
    assert found.culprit.inputs, "what it reads is told"
    assert all(one.passed for one in found.culprit.inputs)
    validate("bisect", json.loads(document.dumps("bisect", report.bisect_payload(flat, found))))


def test_an_update_that_only_goes_wrong_with_larger_kernels_is_named(monkeypatch):
    """Updates of several variables by one kernel, which nothing but a whole step has."""

    def wrong(node, outputs):
        outputs[0].add_(0.5)
        return outputs

    plant(monkeypatch, "_ApplyFlat", wrong)
    flat = small_net("GradientDescent")
    found = bisect(flat, RunRequest.of(batch=3))
    assert (found.differing, found.kernels, found.culprit.op) == (0, "grouped", "ResourceApplyGradientDescent")
    assert len(found.culprit.group) == 2
    assert "Every node by itself agrees; with grouped kernels the group of" in text(flat, found)


def test_tensorflow_is_asked_for_the_same_values_once(monkeypatch):
    """Outputs are compared for each kernel mode."""
    asked = []

    def counted(cut, *rest, **options):
        asked.append(tuple(output.name for output in cut.outputs))
        return reference(cut, *rest, **options)

    monkeypatch.setattr(sys.modules["msplit.benchmark.bisect"], "reference", counted)
    assert bisect(small_net("GradientDescent"), RunRequest.of(batch=3)).culprit is None
    assert len(asked) == len(set(asked)) > 2


@pytest.mark.parametrize("v2", [True, False], ids=["functions", "frames"])
def test_a_loop_and_its_gradient(monkeypatch, v2):
    flat, _ = trained(recurrent_net("dynamic", "adam"), FETCHES, resource=True, v2=v2)
    found = bisect(flat, RunRequest.of(batch=2))
    assert (found.culprit, found.drift, found.differing) == (None, None, 0)
    assert (IN_LOOPS in found.left_out, FLOWS in found.left_out) == (not v2, not v2)
    plant(monkeypatch, "TanhGrad", lambda node, y: y * 1.01)
    found = bisect(flat, RunRequest.of(batch=2))
    assert found.culprit.op in ("StatelessWhile", "While", "Exit")
    assert found.culprit.node.startswith("gradients/")
    assert found.culprit.inputs
    assert all(one.passed for one in found.culprit.inputs)
    assert not found.culprit.alone.passed


@pytest.mark.parametrize("kind", training_graphs.KINDS)
def test_sparse_updates(monkeypatch, kind):
    flat, _ = training_graphs.graph("deepfm", "Adagrad", kind)
    found = bisect(flat, RunRequest.of(batch=4))
    assert (found.culprit, found.drift, found.differing) == (None, None, 0)
    assert found.variables > 20


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_an_update_that_reads_what_another_has_written(monkeypatch, resource):
    """Gradients that are added up before they are taken: who is given that sum needs no addition any more."""

    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        with v1.variable_scope("", use_resource=resource):
            w = v1.get_variable("w", initializer=np.ones((6, 2), np.float32))
            total = v1.get_variable("total", initializer=np.zeros((6, 2), np.float32), trainable=False)
        loss = tf.reduce_mean(tf.square(x @ w), name="loss")
        added = v1.assign_add(total, tf.gradients(loss, w)[0])
        with tf.control_dependencies([added]):
            tf.group(v1.assign_sub(w, 0.1 * total.read_value()), name="train_op")

    flat = graph_of(graph, outputs=FETCHES)
    found = bisect(flat, RunRequest.of(batch=3))
    assert (found.culprit, found.drift, found.differing, found.variables) == (None, None, 0, 2)
    plant(monkeypatch, "AssignAdd", lambda node, outputs: outputs.mul_(1.01))
    found = bisect(flat, RunRequest.of(batch=3))
    assert found.culprit.op.startswith("AssignAdd")


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_a_gradient_that_is_nothing_but_rounding_is_nobodys_fault(resource):
    """A bias in front of a normalization has none, and its moving average is of what rounding made of it."""

    def graph(tf, v1):
        rng = np.random.default_rng(0)
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        with v1.variable_scope("", use_resource=resource):
            w = v1.get_variable("w", initializer=rng.standard_normal((6, 5)).astype(np.float32))
            bias = v1.get_variable("bias", initializer=np.zeros(5, np.float32))
        hidden = (tf.matmul(x, w) + bias)[:, None, None]
        hidden = v1.nn.fused_batch_norm(hidden, np.ones(5, np.float32), np.zeros(5, np.float32), is_training=True)[0]
        loss = tf.reduce_mean(tf.square(hidden[:, 0, 0] @ np.ones((5, 1), np.float32) - 1.0), name="loss")
        with tf.control_dependencies([v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)]):
            tf.group(v1.train.ExponentialMovingAverage(0.9).apply([w, bias]), name="train_op")

    found = bisect(graph_of(graph, outputs=FETCHES), RunRequest.of(batch=3))
    assert found.culprit is None


def test_what_no_order_settles_is_not_compared_and_told():
    """Whether the read comes before or after the assignment is up to TensorFlow."""

    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        count = v1.get_variable("count", initializer=np.ones((), np.float32), use_resource=True)
        other = v1.get_variable("other", initializer=np.ones((), np.float32), use_resource=True)
        free = tf.identity(count.read_value() * 2.0, name="free")
        up = count.assign_add(tf.reduce_sum(x), read_value=False)
        with tf.control_dependencies([up]):
            tf.add(count.read_value(), 1.0, name="behind")
            tf.add(free, 1.0, name="both")
            written = other.assign(free, read_value=False)
        tf.group(up, written, name="train_op")

    flat = graph_of(graph, outputs=["behind", "both", "train_op"])
    found = bisect(flat, RunRequest.of(batch=2))
    assert (found.culprit, found.differing) == (None, 0)
    assert found.left_out[AMBIGUOUS] == 2, "`both` and the variable `other`"
    assert found.variables == 1
    said = text(flat, found)
    assert "2 values: " in said
    assert "that was compared" in said
