"""What TensorFlow was asked before is known; what depends on more than its inputs is asked each time."""

import numpy as np
import pytest

from msplit.engines.tensorflow import engine
from msplit.engines.tensorflow.engine import reference, session_on_cpu
from msplit.errors import EngineError
from tests.engines.cuda.cases import graph_of

pytestmark = pytest.mark.tf

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def doubled(tf, v1):
    tf.identity(v1.placeholder(tf.float32, [None, 3], "x") * 2.0, "y")


@pytest.fixture
def opened(monkeypatch):
    """Sessions that were opened."""
    found, made = [], engine.SessionExecutable

    def session(*args, **named):
        found.append(made(*args, **named))
        return found[-1]

    monkeypatch.setattr(engine, "SessionExecutable", session)
    monkeypatch.setattr(engine, "_answers", {})
    return found


def test_a_session_is_opened_for_what_was_not_asked_before(opened):
    flat = graph_of(doubled, outputs=["y"])
    for _ in range(3):
        answer = reference(flat, {"x": X})
        np.testing.assert_array_equal(answer["y"], 2 * X)
        answer["y"][:] = 7  # it is the caller's own
    assert len(opened) == 1
    np.testing.assert_array_equal(reference(flat, {"x": X + 1})["y"], 2 * X + 2)
    np.testing.assert_array_equal(reference(flat, {"x": X.reshape(-1, 3)[:1]})["y"], 2 * X[:1])
    np.testing.assert_array_equal(reference(flat, {"x": X}, inlined=True)["y"], 2 * X)
    assert len(opened) == 4
    np.testing.assert_array_equal(reference(graph_of(doubled, outputs=["y"]), {"x": X})["y"], 2 * X)
    assert len(opened) == 5, "another model"


def test_no_function_is_rewritten():
    """A product with bias and ReLU in one kernel of oneDNN's, which TensorFlow makes of the three in a function, is 0 of NaN."""

    def build(tf, v1):
        layer = tf.function(lambda x: tf.nn.relu(tf.nn.bias_add(x @ tf.ones([3, 2]), tf.ones(2))))
        tf.identity(layer(v1.placeholder(tf.float32, [None, 3], "x")), "y")

    flat = graph_of(build, outputs=["y"])
    before = flat.model.graph_def.SerializeToString()
    assert np.isnan(reference(flat, {"x": np.full_like(X, np.nan)})["y"]).all()
    assert flat.model.graph_def.SerializeToString() == before


def test_what_is_refused_is_refused_again(opened):
    flat = graph_of(doubled, outputs=["y"])
    for _ in range(2):
        with pytest.raises(EngineError, match="has no value"):
            reference(flat, {})


def test_few_answers_are_kept_and_no_large_ones(opened, monkeypatch):
    monkeypatch.setattr(engine, "_MOST_ANSWERS", 4)
    monkeypatch.setattr(engine, "_LARGEST_ANSWER", X.nbytes)
    session = session_on_cpu(graph_of(doubled, outputs=["y"]))
    for number in range(9):
        session.step({"x": X + number})
    assert len(engine._answers) == 4
    monkeypatch.setattr(engine, "_MOST_BYTES", 2 * X.nbytes)
    before = list(engine._answers)
    session.step({"x": np.concatenate([X, X])})
    assert list(engine._answers) == before
    session.step({"x": X + 100})
    assert len(engine._answers) == 2, "as many as have room"
    session.close()


@pytest.mark.parametrize("kind", ["drawn", "counted", "read"])
def test_what_depends_on_more_than_its_inputs_is_asked_each_time(kind, opened):
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [None, 3], "x")
        count = v1.get_variable("count", initializer=np.float32(1), use_resource=True)
        with tf.control_dependencies([x]):
            more = {
                "drawn": lambda: tf.random.uniform([], seed=1),
                "counted": lambda: v1.assign_add(count, 1.0),
                "read": lambda: count.read_value(),
            }[kind]()
        tf.identity(x + more, "y")

    flat = graph_of(build, outputs=["y"])
    assert not engine.is_repeatable(flat)
    session = session_on_cpu(flat, state={} if kind == "drawn" else {"count": np.float32(1)})
    first, second = session.step({"x": X})["y"], session.step({"x": X})["y"]
    assert np.array_equal(first, second) == (kind == "read")
    assert not engine._answers
    session.close()


def test_a_session_that_is_opened_anew_draws_and_counts_from_the_beginning(opened):
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [None, 3], "x")
        count = v1.get_variable("count", initializer=np.float32(1), use_resource=True)
        tf.identity(x + tf.random.uniform([], seed=1) + v1.assign_add(count, 1.0), "y")

    session = session_on_cpu(graph_of(build, outputs=["y"]), state={"count": np.float32(1)})
    first = [session.step({"x": X})["y"] for _ in range(2)]
    session.launch()
    assert session.reopen()
    session.load_state({"count": np.float32(1)})
    again = [session.step({"x": X})["y"] for _ in range(2)]
    np.testing.assert_array_equal(again, first)
    session.launch()
    assert session.save_state() == {"count": 4.0}
    assert len(opened) == 1
    session.close()
