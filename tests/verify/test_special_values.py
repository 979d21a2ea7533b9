"""Full verification runs small ops by themselves on special values: what stands in front of them in a model hides these."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from msplit.engines.base import Job  # noqa: E402
from msplit.engines.cuda.engine import ENGINE  # noqa: E402
from msplit.engines.cuda.options import EngineOptions  # noqa: E402
from msplit.errors import EngineError  # noqa: E402
from msplit.verify import special_values  # noqa: E402
from msplit.verify.special_values import compare_special  # noqa: E402
from tests.engines.cuda.cases import graph_of  # noqa: E402
from tests.verify.mutants import lowered, prepared, values  # noqa: E402

pytestmark = pytest.mark.tf

OUTPUTS = ["least", "largest", "first", "last", "lower", "upper", "same", "log1p", "expm1", "above", "whole", "floor"]
OUTPUTS += ["bounded", "taken", "rounded", "any", "near"]


def behind_products(tf, v1):
    """Ops that read sums, in which nothing is NaN, infinite, tiny or on a boundary."""
    x = v1.placeholder(tf.float32, [None, 6], "x")
    a, b = tf.matmul(x, values(6, 5)), tf.matmul(x, values(6, 5, seed=1))
    tf.reduce_min(a, 1, name="least")
    tf.reduce_max(a, 1, name="largest")
    tf.argmin(a, 1, name="first")
    tf.argmax(a, 1, name="last")
    tf.minimum(a, b, name="lower")
    tf.maximum(a, b, name="upper")
    tf.cast(tf.equal(a, b), tf.float32, name="same")
    tf.math.log1p(tf.abs(a), name="log1p")
    tf.math.expm1(a, name="expm1")
    tf.cast((a - 2.0) * 0.37 > 0.1, tf.float32, name="above")
    tf.cast(a, tf.int32, name="whole")
    tf.floor(a, name="floor")
    tf.identity(tf.clip_by_value(a, -0.5, 0.5), "bounded")
    tf.identity(tf.where(a >= b, a, -b), "taken")
    tf.round(a, name="rounded")
    tf.reduce_any(a > 3.0, 1, name="any")
    tf.raw_ops.ApproximateEqual(x=a, y=b, tolerance=0.1, name="near")


@pytest.fixture(scope="module")
def flat():
    return graph_of(behind_products, outputs=OUTPUTS)


def found(flat):
    ENGINE.forget(flat)
    job = Job(flat, np.zeros(len(flat), np.int32), 1, {"x": values(5, 6)}, options=EngineOptions("cpu", capture=False))
    try:
        return compare_special(ENGINE.compile(job), job)
    finally:
        ENGINE.forget(flat)


def test_what_is_right_passes_once(flat, monkeypatch):
    monkeypatch.setattr(special_values, "_PASSED", set())
    assert found(flat).passed
    assert len(special_values._PASSED) >= len(OUTPUTS)
    monkeypatch.setattr(special_values, "_in_tensorflow", lambda *_: pytest.fail("asked again"))
    assert found(flat).passed


def on(value, other):
    """Gives another answer where an operand has a value."""

    def wrong(y, node, x, *rest):
        hit = x.isnan() if np.isnan(value) else x == value
        return torch.where(hit, torch.as_tensor(other, dtype=y.dtype), y)

    return wrong


MUTANTS = {
    "Min": lambda y, node, x, *axes: x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amin(1),
    "Max": lambda y, node, x, *axes: x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(1),
    "ArgMin": lambda y, node, x, axis: x.argmin(1),
    "ArgMax": lambda y, node, x, axis: x.argmax(1),
    "Minimum": lambda y, node, a, b: torch.fmin(a, b),
    "Maximum": lambda y, node, a, b: torch.fmax(a, b),
    "Equal": lambda y, node, a, b: (a - b).abs() == 0,
    "ApproximateEqual": lambda y, node, a, b: (a - b).abs() < node.get("tolerance"),
    "Log1p": lambda y, node, x: (1 + x).log(),
    "Expm1": lambda y, node, x: x.exp() - 1,
    "Greater": lambda y, node, a, b: a >= b,
    "GreaterEqual": lambda y, node, a, b: a > b,
    "Floor": lambda y, node, x: (x - 1e-6).floor() + 1 - (x == x.floor()).to(x.dtype),
    "Round": lambda y, node, x: (x + 0.5).floor(),
    "Abs": on(-0.0, 1.0),
}


@pytest.mark.parametrize("op", MUTANTS)
def test_another_answer_behind_a_product_is_refused(flat, monkeypatch, op):
    lowered(op, MUTANTS[op])(monkeypatch)
    assert not found(flat).passed


def test_full_verification_asks(flat, monkeypatch):
    lowered("Max", MUTANTS["Max"])(monkeypatch)
    with pytest.raises(EngineError, match="special values"):
        prepared(flat, "full", capture=False).close()
