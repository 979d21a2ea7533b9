"""Loops whose number of turns depends on values, unrolled up to a bound, against TensorFlow."""

import numpy as np
import pytest

import msplit
from msplit.engines.base import MASKED_LOOPS
from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.frontend import unroll
from msplit.errors import EngineError
from tests.engines.cuda.cases import assert_equals_tensorflow, job, outputs_of_tensorflow, run, saved_keras
from tests.engines.cuda.control_flow import Lstm, frames_of, graph_of_function, spec

pytestmark = pytest.mark.tf

T, UNITS, VOCABULARY = 5, 4, 7


def hold(flat, fed, most, **options):
    """Holds a graph against TensorFlow on several inputs, and its bounds against those that are expected."""
    covered = cover(flat)
    assert not covered.reasons
    for feeds in fed:
        assert_equals_tensorflow(flat, feeds, streams=(1, 3), **options)
    facts = CudaEngine().compile(job(flat, fed[0])).facts
    assert sorted(turns for turns, _ in facts[MASKED_LOOPS].values()) == most
    return covered


def sequences():
    """Lengths that end a loop at once, early and never."""
    rng = np.random.default_rng(0)
    for lengths in ([0, 0, 0], [1, 0, 2], [2, 3, 1], [T, 1, 0], [T, T, T]):
        yield {
            "rows": rng.standard_normal((3, T, UNITS)).astype(np.float32),
            "lengths": np.asarray(lengths, np.int32),
        }


@pytest.mark.parametrize("v2", [False, True])
def test_dynamic_rnn_with_lengths(v2):
    import tensorflow as tf

    v1 = tf.compat.v1
    gates = np.random.default_rng(1).standard_normal((2 * UNITS, 4 * UNITS)).astype(np.float32)

    def function(x, lengths):
        outputs, (c, h) = v1.nn.dynamic_rnn(Lstm(tf.constant(gates)), x, sequence_length=lengths, dtype=tf.float32)
        return outputs, c, h

    if v2:
        flat = graph_of_function(function, spec([None, T, UNITS], name="rows"), spec([None], "int32", "lengths"))
    else:
        flat = frames_of(lambda tf, *_: function(*placeholders()))
    hold(flat, list(sequences()), [T])


def placeholders():
    import tensorflow as tf

    v1 = tf.compat.v1
    return v1.placeholder(tf.float32, [None, T, UNITS], "rows"), v1.placeholder(tf.int32, [None], "lengths")


def decoder(turns, stop):
    """Greedy decoding: a cell, the best word, and its row of a table, until every row has had the word that ends it."""
    import tensorflow as tf

    rng = np.random.default_rng(3)
    weights = rng.standard_normal((UNITS, UNITS)).astype(np.float32)
    table = rng.standard_normal((VOCABULARY, UNITS)).astype(np.float32)

    def step(h, word, done):
        h = tf.tanh(h @ weights + tf.gather(table, word))
        word = tf.where(done, 0, tf.argmax(h @ tf.transpose(table), -1, output_type=tf.int32))
        return h, word, done | (word == 2)

    def function(x):
        rows = tf.shape(x)[0]
        words = tf.TensorArray(tf.int32, turns, element_shape=[None])
        begin = tf.zeros([rows], tf.int32), x[:, 0] > 3.0
        count, h, word, done, words = stop(turns, step, x, *begin, words)
        return count, h, word, done, words.stack()

    return function


def by_and(turns, step, h, word, done, words):
    """A condition of two parts that are both computed."""
    import tensorflow as tf

    def body(i, h, word, done, words):
        h, word, done = step(h, word, done)
        return i + 1, h, word, done, words.write(i, word)

    def cond(i, h, word, done, words):
        return tf.logical_and(tf.logical_not(tf.reduce_all(done)), i < turns)

    return tf.while_loop(cond, body, (0, h, word, done, words))


def by_most(turns, step, h, word, done, words):
    """A bound beside the condition, and a counter that goes down by three."""
    import tensorflow as tf

    def body(i, h, word, done, words):
        h, word, done = step(h, word, done)
        return i - 3, h, word, done, words.write(tf.cast(i // -3, tf.int32), word)

    variables = (tf.zeros([], tf.int64), h, word, done, words)
    return tf.while_loop(lambda *now: ~tf.reduce_all(now[3]), body, variables, maximum_iterations=turns)


def by_python(turns, step, h, word, done, words):
    """AutoGraph's `while`, whose parts are conds."""
    import tensorflow as tf

    i = 0
    while not tf.reduce_all(done) and i < turns:
        h, word, done = step(h, word, done)
        words = words.write(i, word)
        i += 1
    return i, h, word, done, words


def by_break(turns, step, h, word, done, words):
    """AutoGraph's `for` that is left."""
    import tensorflow as tf

    ended = 0
    for i in tf.range(turns):
        if tf.reduce_all(done):
            break
        h, word, done = step(h, word, done)
        words = words.write(i, word)
        ended = i + 1
    return ended, h, word, done, words


def rows_of_decoder():
    """Rows that end at once, after some turns, and never."""
    rng = np.random.default_rng(5)
    fed = [{"x": rng.standard_normal((2, UNITS)).astype(np.float32)} for _ in range(14)]
    fed[0]["x"][:, 0] = 9
    return [*fed, {"x": np.full((2, UNITS), np.nan, np.float32)}]


@pytest.mark.parametrize("stop", [by_and, by_most, by_python, by_break], ids=lambda one: one.__name__)
def test_a_decoder_that_ends_where_all_rows_have(stop):
    flat, fed = graph_of_function(decoder(6, stop), spec([2, UNITS])), rows_of_decoder()
    turns = {int(outputs_of_tensorflow(flat, feeds)["out0"]) for feeds in fed}
    assert len(turns) > 2
    covered = hold(flat, fed, [6])
    for more in ({"group": True, "fuse": True}, {"simplify": False}):
        assert_equals_tensorflow(flat, fed[1], **more)
    assert "up to" in " ".join(covered.ways)


def longest_of(x, lengths):
    """A loop that ends with the longest row."""
    import tensorflow as tf

    bound = tf.minimum(tf.reduce_max(lengths), 12)
    return tf.while_loop(lambda i, _: i < bound, lambda i, a: (i + 1, tf.sin(a) + 1.0), (0, x))[1]


@pytest.mark.parametrize("fault", ["later", "never"])
@pytest.mark.parametrize(
    ("function", "specs"),
    [
        (decoder(6, by_and), [spec([2, UNITS])]),
        (longest_of, [spec([3, UNITS]), spec([None], "int32", "lengths")]),
    ],
    ids=["decoder", "lengths"],
)
def test_verification_sees_a_wrong_mask(monkeypatch, function, specs, fault):
    """Faults that are planted: a mask that is a turn late, or none."""
    results = unroll.Unroller._results

    def wrong(self, op, loop, before, after):
        mine, last = loop.active, getattr(loop, "last", loop.active)
        loop.last, loop.active = mine, last if fault == "later" else self.graph.constant(np.asarray(True))
        found = yield from results(self, op, loop, before, after)
        loop.active = mine
        return found

    monkeypatch.setattr(unroll.Unroller, "_results", wrong)
    flat = graph_of_function(function, *specs)
    with pytest.raises(EngineError, match="gives other outputs than TensorFlow"):
        msplit.prepare(flat, engine="cuda", device="cpu", batch=3, fuse=False, group=False)


def test_a_beam_search():
    import tensorflow as tf

    beams, turns = 3, 5
    rng = np.random.default_rng(6)
    table = rng.standard_normal((VOCABULARY, UNITS)).astype(np.float32)

    def function(x):
        rows = tf.shape(x)[0]

        def body(i, h, words, scores, done):
            logits = tf.nn.log_softmax(tf.einsum("bku,vu->bkv", h, table))
            ended = tf.one_hot(0, VOCABULARY, on_value=0.0, off_value=-1e9)
            logits = tf.where(done[:, :, None], ended, logits)
            flat = tf.reshape(scores[:, :, None] + logits, [rows, beams * VOCABULARY])
            scores, at = tf.math.top_k(flat, beams)
            parents, word = at // VOCABULARY, at % VOCABULARY
            h = tf.gather(h, parents, batch_dims=1)
            words = tf.tensor_scatter_nd_update(
                tf.transpose(tf.gather(words, parents, batch_dims=1), [2, 0, 1]), [[i]], word[None]
            )
            done = tf.gather(done, parents, batch_dims=1) | (word == 0)
            h = tf.tanh(h + tf.gather(table, word))
            return i + 1, h, tf.transpose(words, [1, 2, 0]), scores, done

        return tf.while_loop(
            lambda i, h, words, scores, done: (i < turns) & ~tf.reduce_all(done),
            body,
            (
                0,
                tf.tile(x[:, None], [1, beams, 1]),
                tf.zeros([rows, beams, turns], tf.int32),
                tf.tile([[0.0, -1e9, -1e9]], [rows, 1]),
                tf.tile(x[:, :1] > 2.0, [1, beams]),
            ),
        )

    fed = [{"x": 3 * rng.standard_normal((2, UNITS)).astype(np.float32)} for _ in range(8)]
    fed[0]["x"][:, 0] = 9
    hold(graph_of_function(function, spec([2, UNITS])), fed, [turns])


def test_turns_that_the_loop_does_not_have_may_do_anything():
    """They divide by zero, read behind tables, give NaN and overflow; and the loop beside them is another one."""
    import tensorflow as tf

    def function(x, n):
        table = tf.range(4.0)

        def body(i, total, at, power):
            inner = tf.while_loop(lambda j, _: j < tf.minimum(i, n), lambda j, t: (j + 1, t + 1.0), (0, total))[1]
            quotient = tf.cast(12 // (n - i) + 7 % (n - i), tf.float32) + tf.math.log(tf.cast(n - i, tf.float32))
            return i + 1, inner + quotient + tf.gather(table, at) + tf.gather_nd(table, [at]), at + 1, power * 1e30

        return tf.while_loop(lambda i, *_: i < tf.minimum(n, 9), body, (0, x, 0, x))

    fed = [{"x": np.float32(2), "n": np.int32(n)} for n in (-5, 0, 1, 2, 4)]
    hold(graph_of_function(function, spec([]), spec([], "int32", "n")), fed, [8, 9])


def test_a_condition_that_is_a_number_and_a_loop_whose_results_are_unread():
    import tensorflow as tf

    def cond_of(i, x):
        return tf.cast((i <= 3) & (tf.reduce_sum(x) < 5.0), tf.int32)

    def graph(x):
        signature = tf.TensorSpec([], tf.int32), x
        cond = tf.function(cond_of).get_concrete_function(*signature)
        body = tf.function(lambda i, x: (i + 1, x * 1.5)).get_concrete_function(*signature)
        return tf.raw_ops.While(input=[tf.constant(0), x], cond=cond, body=body)[1]

    flat = graph_of_function(graph, spec([2]))
    hold(flat, [{"x": np.asarray(x, np.float32)} for x in ([1, 1], [9, 9], [0, 0], [np.nan, 1])], [4])


def test_keras_layers_with_masks(tmp_path):
    import keras

    keras.utils.set_random_seed(3)
    x = keras.Input((T, UNITS))
    y = keras.layers.LSTM(UNITS, return_sequences=True)(keras.layers.Masking()(x))
    model = keras.Model(x, [y, keras.layers.GRU(3, go_backwards=True)(y)])
    flat = saved_keras(model, tmp_path)
    for feeds in sequences():
        rows, steps = feeds["rows"], np.arange(T)[:, None]
        rows[steps[:, 0][None] >= feeds["lengths"][:, None]] = 0
        assert_equals_tensorflow(flat, {flat.inputs[0].name: rows})


def refused(function, *specs, feeds, match):
    flat = graph_of_function(function, *specs)
    assert cover(flat).reasons
    with pytest.raises(EngineError, match=match):
        run(flat, feeds)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("shapes", "a turn changes the shape"),
        ("list", r"how long a list becomes.*size="),
        ("start", "no part of its condition compares a counter"),
        ("step", "no part of its condition compares a counter"),
        ("unbounded", "no part of its condition compares a counter"),
        ("cost", r"up to 70,000 turns of \d+ ops, as .*Less"),
        ("gradient", "while"),
    ],
)
def test_what_has_no_bound_or_no_size_is_refused(kind, match):
    import tensorflow as tf

    def function(x, n):
        bound = tf.minimum(n, 70_000 if kind == "cost" else 5)
        if kind == "shapes":
            body = lambda i, a: (i + 1, tf.concat([a, x], 0))  # noqa: E731
            shapes = tf.TensorShape([]), tf.TensorShape([None])
            return tf.while_loop(lambda i, _: i < bound, body, (0, x), shape_invariants=shapes)[1]
        if kind == "list":
            array = tf.TensorArray(tf.float32, 0, dynamic_size=True, element_shape=[2])
            return tf.while_loop(lambda i, _: i < bound, lambda i, a: (i + 1, a.write(i, x)), (0, array))[1].stack()
        begin, end = {"start": (n, 5), "unbounded": (0, n)}.get(kind, (0, bound))
        step = n if kind == "step" else 1
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda i, _: i < end, lambda i, a: (i + step, tf.sin(a)), (begin, x))[1]
        return tape.gradient(y, x) if kind == "gradient" else y

    feeds = {"x": np.ones(2, np.float32), "n": np.int32(3)}
    refused(function, spec([2]), spec([], "int32", "n"), feeds=feeds, match=rf"(?s){match}")


@pytest.mark.parametrize("kind", ["If", "Case"])
def test_branches_that_are_not_taken_may_do_anything(kind):
    """Both run: one divides by zero, reads behind a table and gives NaN where the other is taken."""
    import tensorflow as tf

    def function(x, n):
        def risky():
            return x / x * tf.cast(12 // n, tf.float32) + tf.gather(tf.range(4.0), n - 1) + tf.math.log(x)

        if kind == "Case":
            return tf.switch_case(tf.cast(n > 0, tf.int32), [lambda: -x, risky])
        return tf.cond(n > 0, risky, lambda: -x)

    flat = graph_of_function(function, spec([2]), spec([], "int32", "n"))
    for number in (-3, 0, 1, 4):
        feeds = {"x": np.full(2, max(number, 0), np.float32), "n": np.int32(number)}
        assert_equals_tensorflow(flat, feeds)
        assert_equals_tensorflow(flat, feeds, simplify=False)


def test_elements_of_two_shapes_are_not_chosen_between():
    """They would be spread to the larger shape, without a word."""
    import tensorflow as tf

    def function(x, n):
        array = tf.TensorArray(tf.float32, 1, infer_shape=False, element_shape=None)
        return tf.cond(n > 0, lambda: array.write(0, x).flow, lambda: array.write(0, x[:1]).flow)

    def read(x, n):
        flow = function(x, n)
        return tf.TensorArray(tf.float32, flow=flow, infer_shape=False).read(0)

    feeds = {"x": np.ones(2, np.float32), "n": np.int32(0)}
    refused(read, spec([2]), spec([], "int32", "n"), feeds=feeds, match="which element a list has")
