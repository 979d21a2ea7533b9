"""Random ops with a state, as dropout leaves them in frozen graphs: TensorFlow's numbers, step by step."""

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.tensorflow.engine import REFERENCE as TENSORFLOW
from msplit.engines.tensorflow.engine import reference
from msplit.engines.variables import remark
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.verify.compare import compare
from tests.engines.cuda.cases import graph_of, job, run, scattered

pytestmark = pytest.mark.tf

OPS = {
    "RandomUniform": lambda v1, shape, **how: v1.random_uniform(shape, **how),
    "RandomStandardNormal": lambda v1, shape, **how: v1.random_normal(shape, **how),
    "TruncatedNormal": lambda v1, shape, **how: v1.truncated_normal(shape, **how),
    "RandomUniformInt": lambda v1, shape, **how: v1.random_uniform(shape, -3, 1000, **how),
}


def steps_of(flat, feeds, count=3, **options):
    """The outputs of some steps of both engines, side by side."""
    ids = scattered(flat, 3)
    ours = ENGINE.build(job(flat, feeds, ids, streams=3, **options))
    theirs = TENSORFLOW.build(Job(flat, np.zeros_like(ids), 1, feeds, precision=Precision.IEEE))
    for _ in range(count):
        yield ours.step(feeds), theirs.step(feeds)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", [None, 7])
def test_every_step_draws_what_tensorflow_draws(op, seed):
    dtypes = ("int32", "int64") if op.endswith("Int") else ("float32", "float16", "float64", "bfloat16")

    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 5], name="x")
        for dtype in dtypes:
            tf.identity(OPS[op](v1, tf.shape(x), dtype=dtype, seed=seed), name=dtype)

    flat = graph_of(graph, outputs=list(dtypes))
    before = None
    for got, expected in steps_of(flat, {"x": np.zeros((7, 5), np.float32)}):
        found = compare(got, expected)
        assert found.passed, found.describe()
        if op in ("RandomUniform", "RandomUniformInt"):
            assert all(np.array_equal(got[name], expected[name]) for name in got)
        assert before is None or not np.array_equal(before, got[dtypes[0]])
        before = got[dtypes[0]]


def dropout(tf, v1):
    x = v1.placeholder(tf.float32, [None, 8], name="x")
    for number in range(3):
        x = v1.nn.dropout(tf.nn.relu(tf.matmul(x, np.eye(8, dtype=np.float32) + 0.1)), rate=0.4, name=f"drop{number}")
    tf.identity(x, name="out")


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"fuse": True, "group": True}], ids=str)
def test_dropout_that_was_left_in_a_graph(options):
    flat = graph_of(dropout, outputs=["out"])
    assert not cover(flat).missing
    zeros = 0
    for got, expected in steps_of(flat, {"x": np.ones((64, 8), np.float32)}, **options):
        assert np.array_equal(got["out"] == 0, expected["out"] == 0)
        assert compare(got, expected).passed
        zeros += int((got["out"] == 0).sum())
    assert 0 < zeros < 3 * 64 * 8


def test_what_an_engine_is_built_anew_for_begins_anew():
    flat = graph_of(dropout, outputs=["out"])
    feeds = {"x": np.ones((4, 8), np.float32)}
    assert compare(run(flat, feeds, 2), reference(flat, feeds)).passed
    assert compare(run(flat, feeds, 1, steps=3), run(flat, feeds, 4, steps=3)).passed
    assert not compare(run(flat, feeds), run(flat, feeds, steps=2)).passed


def test_seeds_follow_from_the_name_within_a_function(tmp_path):
    import tensorflow as tf

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None, 4])])
        def __call__(self, x):
            return {"y": tf.nn.dropout(x, 0.5) + tf.random.normal(tf.shape(x))}

    model = Model()
    tf.saved_model.save(model, str(tmp_path / "model"), signatures=model.__call__)
    flat = flatten(read(tmp_path / "model"))
    for got, expected in steps_of(flat, {flat.inputs[0].name: np.ones((5, 4), np.float32)}):
        found = compare(got, expected)
        assert found.passed, found.describe()


def in_a_loop(tf, v1):
    x = v1.placeholder(tf.float32, [2], name="x")
    _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * v1.random_uniform([2], name="draw")), [0, x])
    tf.identity(y, name="out")


def in_a_branch(tf, v1):
    x = v1.placeholder(tf.float32, [2], name="x")
    v1.disable_control_flow_v2()
    tf.identity(v1.cond(x[0] > 0, lambda: x * v1.random_uniform([2], name="draw"), lambda: x), name="out")
    v1.enable_control_flow_v2()


@pytest.mark.parametrize(("graph", "said"), [(in_a_loop, "RandomUniform"), (in_a_branch, "RandomUniform in a branch")])
def test_where_a_step_may_draw_any_number_of_times_it_is_refused_by_name(graph, said):
    flat = graph_of(graph, outputs=["out"])
    assert said in cover(flat).missing
    with pytest.raises(EngineError, match=rf"{said}: 1 node, such as .*draw"):
        run(flat, {"x": np.ones(2, np.float32)})


def shuffled(tf, v1):
    tf.identity(v1.random_shuffle(v1.placeholder(tf.float32, [None], name="x"), name="draw"), name="out")


def sampled(tf, v1):
    tf.identity(v1.multinomial(v1.placeholder(tf.float32, [1, 2], name="x"), 3, name="draw"), name="out")


def hashed(tf, v1):
    x = v1.placeholder(tf.float32, [2], name="x")
    drawn = tf.strings.as_string(v1.random_uniform([2], name="draw"))
    tf.add(tf.cast(tf.strings.to_hash_bucket_fast(drawn, 9), tf.float32), x, name="out")


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (shuffled, "RandomShuffle on the host"),
        (sampled, "Multinomial"),
        (hashed, "RandomUniform on the host"),
    ],
)
def test_what_the_host_would_draw_is_refused_by_name(graph, said):
    flat = graph_of(graph, outputs=["out"])
    assert list(cover(flat, build=True).missing) == [said]
    with pytest.raises(EngineError, match=rf"{said}: 1 node, such as .*draw"):
        run(flat, {"x": np.ones((1, 2) if graph is sampled else 2, np.float32)})


def test_a_branch_that_is_known_before_the_run_may_draw():
    def graph(tf, v1):
        v1.disable_control_flow_v2()
        x = v1.placeholder(tf.float32, [2, 9], name="x")
        training = v1.placeholder_with_default(True, [], name="training")
        tf.identity(v1.cond(training, lambda: tf.nn.dropout(x, 0.5), lambda: x), name="out")
        v1.enable_control_flow_v2()

    flat = graph_of(graph, outputs=["out"])
    for got, expected in steps_of(flat, {"x": np.ones((2, 9), np.float32)}):
        assert compare(got, expected).passed


def test_the_user_is_told_of_seeds_that_were_made_up():
    flat = graph_of(dropout, outputs=["out"])
    said = remark(flat, range(len(flat)))
    assert said.startswith("3 random ops without a seed (such as drop0/")
    assert "dropout" in said
    assert remark(flat, []) is None
