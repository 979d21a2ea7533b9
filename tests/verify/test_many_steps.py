"""Full verification takes many steps: what is forgotten in one of sixteen is seen, and what the next step writes over."""

import pytest

pytest.importorskip("torch")

from msplit.engines.cuda.runtime.executables import SimulatedExecutable
from msplit.errors import EngineError
from tests.engines.cuda.cases import graph_of
from tests.verify.mutants import prepared, values

pytestmark = pytest.mark.tf


def layer(tf, v1):
    tf.nn.relu(tf.matmul(v1.placeholder(tf.float32, [None, 6], "x"), values(6, 4)), name="y")


def training(tf, v1):
    """A step that gives the weights after it, too."""
    with v1.variable_scope("", use_resource=True):
        w = v1.get_variable("w", initializer=values(6, 4))
    loss = tf.reduce_mean(tf.square(tf.matmul(v1.placeholder(tf.float32, [None, 6], "x"), w)), name="loss")
    with tf.control_dependencies([v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train_op")]):
        tf.identity(w.read_value(), name="weights")


OUTPUTS = {layer: ["y"], training: ["loss", "weights", "train_op"]}


@pytest.fixture(scope="module")
def graphs():
    return {build: graph_of(build, outputs=names) for build, names in OUTPUTS.items()}


def every_sixteenth_is_the_one_before(step):
    def stale(self, feeds):
        self.count = getattr(self, "count", 0) + 1
        made = self.before if self.count % 16 == 0 else step(self, feeds)
        self.before = made
        return made

    return stale


def weights_are_a_view(step):
    def viewed(self, feeds):
        return {**step(self, feeds), "weights": self.state.tensors["w"].numpy()}

    return viewed


@pytest.mark.parametrize("build", OUTPUTS, ids=lambda build: build.__name__)
def test_what_is_right_passes(graphs, build):
    prepared(graphs[build], "full", capture=False).close()


@pytest.mark.parametrize(
    ("build", "planted"),
    [(layer, every_sixteenth_is_the_one_before), (training, weights_are_a_view)],
    ids=["16th", "view"],
)
def test_a_step_that_is_not_made_anew_is_refused(graphs, monkeypatch, build, planted):
    monkeypatch.setattr(SimulatedExecutable, "step", planted(SimulatedExecutable.step))
    with pytest.raises(EngineError):
        prepared(graphs[build], "full", capture=False).close()
