"""Full verification feeds NaN and infinite numbers to what is defined for them, and to nothing else."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from msplit.errors import EngineError  # noqa: E402
from msplit.inputs.make import make_inputs  # noqa: E402
from msplit.inputs.special import InputKind, InputKindName  # noqa: E402
from tests.engines.cuda.cases import graph_of  # noqa: E402
from tests.verify.mutants import lowered, prepared, values  # noqa: E402

pytestmark = pytest.mark.tf

OUTPUTS = ["least", "largest", "relu", "larger", "smaller", "bounded", "finite", "above", "same", "taken"]


def searched(tf, v1):
    x, y = v1.placeholder(tf.float32, [None, 5], "x"), v1.placeholder(tf.float32, [None, 5], "y")
    tf.argmin(x, 1, name="least")
    tf.argmax(x, 1, name="largest")
    tf.nn.relu(x, name="relu")
    tf.maximum(x, y, name="larger")
    tf.minimum(x, y, name="smaller")
    tf.identity(tf.clip_by_value(x, -1.0, 1.0), "bounded")
    tf.cast(tf.math.is_finite(x), tf.float32, name="finite")
    tf.cast(x >= y, tf.int32, name="above")
    tf.cast(tf.not_equal(x, x), tf.float32, name="same")
    tf.identity(tf.where(x > 0.5, x, -y), "taken")


@pytest.fixture(scope="module")
def flat():
    return graph_of(searched, outputs=OUTPUTS)


def test_what_is_right_passes(flat):
    with prepared(flat, "full") as runner:
        assert any("NaN" in note for note in runner.notes)


MUTANTS = {
    "ArgMin": lambda y, node, x, axis: x.nan_to_num(nan=-torch.inf).argmin(1),
    "ArgMax": lambda y, node, x, axis: x.nan_to_num(nan=torch.inf).argmax(1),
    "Relu": lambda y, node, x: y.nan_to_num(nan=0.0, posinf=torch.inf),
    "Maximum": lambda y, node, a, b: torch.fmax(torch.as_tensor(a), torch.as_tensor(b)),
    "Minimum": lambda y, node, a, b: torch.fmin(torch.as_tensor(a), torch.as_tensor(b)),
    "IsFinite": lambda y, node, x: ~x.isnan(),
    "GreaterEqual": lambda y, node, a, b: ~(a < b),
    "NotEqual": lambda y, node, a, b: (a != b) & ~a.isnan(),
}


@pytest.mark.parametrize("op", MUTANTS)
def test_another_answer_to_nan_is_refused(flat, monkeypatch, op):
    lowered(op, MUTANTS[op])(monkeypatch)
    with pytest.raises(EngineError):
        prepared(flat, "full").close()


def layered(tf, v1):
    x, y, z = (v1.placeholder(tf.float32, [None, 5], name) for name in "xyz")
    tf.nn.relu(tf.nn.bias_add(tf.matmul(tf.nn.relu(x), values(5, 3)), values(3)), name="product")
    tf.cast(y, tf.int32, name="whole")
    tf.reduce_sum(z, 1, name="sum")


@pytest.mark.parametrize("effort", ["full", "fast"])
def test_a_relu_that_makes_0_of_nan_behind_a_product_is_refused(monkeypatch, effort):
    """As cuBLASLt's does in TF32, in the kernel of the product."""
    flat = graph_of(layered, outputs=["product"])
    prepared(flat, effort).close()
    lowered("_FusedMatMul", lambda y, node, *_: y.nan_to_num(nan=0.0))(monkeypatch)
    with pytest.raises(EngineError, match="not nan"):
        prepared(flat, effort).close()


def test_rows_are_nan_alone_before_products_and_sums_and_what_has_no_integer_gets_none():
    flat = graph_of(layered, outputs=["product", "whole", "sum"])
    made = make_inputs(flat, {}, batch=8, kind=InputKind(InputKindName.NAN))
    for name in "xz":
        assert np.isnan(made[name][1::4]).all()
        assert np.isfinite(np.delete(made[name], np.s_[1::4], 0)).all()
    assert np.isfinite(made["y"]).all()
