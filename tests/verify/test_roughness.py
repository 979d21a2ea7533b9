"""TensorFlow's functions are rough, and it makes zeros of what is below the least normal number: where that decides, nobody is wrong."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from msplit.engines.cuda.runtime.executables import RoughFunctions  # noqa: E402
from msplit.errors import EngineError  # noqa: E402
from tests.engines.cuda.cases import graph_of  # noqa: E402
from tests.verify.mutants import PLANTED, lowered, prepared, values  # noqa: E402

pytestmark = pytest.mark.tf


def saturated(tf, v1):
    """Two layers of tanh, whose gradients are nearly 1 - 1 where they are saturated, and an optimizer that takes steps of one size."""
    h = v1.placeholder(tf.float32, [None, 6], "x")
    with v1.variable_scope("", use_resource=True):
        for number, factor in enumerate((1.0, 3.0)):
            w = v1.get_variable(f"w{number}", initializer=values(h.shape[1], 8, seed=7))
            b = v1.get_variable(f"b{number}", initializer=np.zeros(8, np.float32))
            h = tf.tanh(tf.matmul(h, w) * factor + b)
        last = v1.get_variable("last", initializer=values(8, 4))
        loss = tf.reduce_mean(tf.square(tf.matmul(h, last)[:, 0] - 1), name="loss")
        v1.train.AdamOptimizer(0.001).minimize(loss, name="train_op")


def logs(tf, v1):
    """Logarithms of probabilities, of which TensorFlow makes zeros below 1.2e-38."""
    p = tf.nn.softmax(v1.placeholder(tf.float32, [None, 6], "x"))
    tf.math.log(p, name="logs")
    tf.negative(tf.reduce_sum(p * tf.math.log(p), 1), name="entropy")


def kink(tf, v1):
    """Gradient of a Selu of numbers that are so small that TensorFlow's is 0 below 0, too: a kink of its gradient."""
    x = v1.placeholder(tf.float32, [None, 6], "x")
    tf.identity(tf.gradients(tf.nn.selu(x * 1e-3), x)[0], "y")


def spectrum(tf, v1):
    """Log-mel spectrum as speech models have it. All frequencies but one of a constant sound are zero but for rounding."""
    sound = v1.placeholder(tf.float32, [None, 61], "x")
    frames = tf.abs(tf.signal.stft(sound, 16, 8, 16))
    tf.math.log(tf.matmul(frames, tf.signal.linear_to_mel_weight_matrix(5, 9, 8000)) + 1e-6, name="mel")


@pytest.fixture(scope="module")
def graphs():
    outputs = {
        saturated: ["loss", "train_op"],
        logs: ["logs", "entropy"],
        kink: ["y"],
        spectrum: ["mel"],
    }
    return {build: graph_of(build, outputs=names) for build, names in outputs.items()}


@pytest.mark.parametrize("build", [saturated, logs, kink, spectrum], ids=lambda build: build.__name__)
def test_what_roughness_decides_is_nobodys_fault(graphs, build):
    prepared(graphs[build], "full", 4 if build is saturated else 9, capture=False).close()


@pytest.mark.parametrize(
    ("scores", "least", "most"),
    [(lambda x: x, 0, 1e-6), (lambda x: x - 1e4, 1e-5, 2e-3), (lambda x: x * 0 - 1e9, 0, 0), (lambda x: x * 0 - torch.inf, 0, 0)],
    ids=["usual", "under a mask without a position", "equal", "infinite"],
)  # fmt: skip
def test_scores_are_rounded_once_more_as_kernels_of_attention_do(scores, least, most):
    """PyTorch's has them times log2(e): a model with such a mask was refused on a GPU."""
    x = scores(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)))
    with RoughFunctions(0):
        rough = torch.softmax(x, -1)
    away = float(((rough - torch.softmax(x, -1)) / torch.softmax(x, -1)).abs().nan_to_num().max())
    assert least <= away <= most
    assert rough.dtype == torch.float32
    assert torch.equal(rough.isnan(), x.isinf())


MUTANTS = {
    "logs that are never infinite": (logs, "Log", lambda y, node, x: x.clamp_min(1e-38).log()),
    "logs of small numbers are": (logs, "Log", lambda y, node, x: torch.where(x < 1e-20, -torch.inf, y)),
    "a gradient as above 0": (kink, "SeluGrad", lambda z, node, dy, y: dy * 1.0507),
    "a frequency that is 1e-4 too loud": (
        spectrum,
        "RFFT",
        lambda y, node, x, length: y * torch.linspace(1, 1.0001, y.shape[-1]),
    ),
    "a wrong gradient": (saturated, "TanhGrad", lambda z, node, y, dy: dy * (1 - y.abs())),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_beside_it_a_bug_is_refused(graphs, monkeypatch, name):
    build, op, wrong = MUTANTS[name]
    lowered(op, wrong)(monkeypatch)
    PLANTED.clear()
    with pytest.raises(EngineError):
        prepared(graphs[build], "full", 4 if build is saturated else 9, capture=False).close()
    assert PLANTED
