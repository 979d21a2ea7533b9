"""Full verification holds each op against TensorFlow by itself: behind layers a wrong formula moves outputs by less than rounding may."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import msplit  # noqa: E402
from msplit.engines.base import Job  # noqa: E402
from msplit.engines.cuda.engine import ENGINE  # noqa: E402
from msplit.engines.cuda.ir import lowering as registry  # noqa: E402
from msplit.engines.cuda.options import EngineOptions  # noqa: E402
from msplit.errors import EngineError  # noqa: E402
from msplit.verify import op_by_op  # noqa: E402
from msplit.verify.op_by_op import TensorFlowValues, compare_ops  # noqa: E402
from tests.engines.cuda.cases import graph_of  # noqa: E402

pytestmark = pytest.mark.tf


def values(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def deep(tf, v1):
    """Layers with GELU, each beside what it adds to, as in a transformer: the last is mostly what the first ones gave."""
    x = v1.placeholder(tf.float32, [None, 16], "x")
    h = 20 * x
    for number in range(3):
        inner = tf.nn.gelu(
            tf.matmul(x + 0.01 * h, values(16, 32, seed=number) * 0.3, name=f"up_{number}"), name=f"gelu_{number}"
        )
        h = h + 0.02 * tf.matmul(inner, values(32, 16, seed=number) * 0.2)
    tf.identity(h, name="y")


@pytest.fixture(scope="module")
def flat():
    return graph_of(deep, outputs=["y"])


def plant(monkeypatch, op, wrong):
    right = registry.table()[op]
    planted = replace(right, function=lambda node, *inputs: wrong(right.function(node, *inputs), *inputs))
    monkeypatch.setitem(registry._TABLE, op, planted)


def prepare(flat, effort="full"):
    ENGINE.forget(flat)
    try:
        return msplit.prepare(flat, engine="cuda", device="cpu", batch=5, fuse=False, group=False, effort=effort)
    finally:
        ENGINE.forget(flat)


def nearly_erfc(right, x):
    """GELU's other formula, in place of erfc: at most 5e-4 away."""
    return 1 - torch.tanh(np.sqrt(4 / np.pi) * (x + 0.08943 * x**3))


def test_a_wrong_formula_behind_layers_is_refused(flat, monkeypatch):
    plant(monkeypatch, "Erfc", nearly_erfc)
    with pytest.raises(EngineError, match="op by op") as refused:
        prepare(flat)
    assert "gelu_0" in str(refused.value)


def test_what_is_right_passes(flat):
    prepare(flat).close()


def job_of(flat, feeds):
    return Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=EngineOptions("cpu", capture=False))


def compared(compiled, job):
    with TensorFlowValues(job) as tensorflow:
        return compare_ops(compiled, job, job.feeds, tensorflow)


def test_values_that_do_not_fit_into_memory_are_compared_in_parts(flat, monkeypatch):
    job = job_of(flat, {"x": values(5, 16)})
    compiled = ENGINE.compile(job)
    program = op_by_op._Program(compiled, job, job.feeds)
    ((whole, _),) = program.parts(set())
    monkeypatch.setattr(op_by_op, "MOST_BYTES", 1000)
    parts = [judged for judged, _ in program.parts(set())]
    assert len(parts) > 3
    assert set().union(*parts) == whole
    assert compared(compiled, job).passed
    plant(monkeypatch, "Erfc", nearly_erfc)
    ENGINE.forget(flat)
    assert not compared(ENGINE.compile(job), job).passed
    ENGINE.forget(flat)


def test_where_nothing_can_be_compared_nothing_is_asked():
    flat = graph_of(lambda tf, v1: tf.identity(v1.placeholder(tf.float32, [None], "x"), "y"), outputs=["y"])
    job = job_of(flat, {"x": values(5)})
    assert compared(ENGINE.compile(job), job).passed
