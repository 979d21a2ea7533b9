"""Strings and tables in front of the device part."""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.frontend.partition import partition_graph
from msplit.engines.tensorflow.engine import reference
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from msplit.verify.compare import compare
from tests import forked
from tests.campaign import examples
from tests.engines.cuda.cases import (
    SAMPLES,
    assert_equals_tensorflow,
    flat_of,
    graph_of,
    job,
    kernels,
    program_of,
    scattered,
    step_then,
)

pytestmark = pytest.mark.tf


def load(name):
    return flatten(read(SAMPLES / name))


def test_a_string_lookup_runs_before_and_the_rest_is_captured():
    flat = load("keras_lookup")
    feeds = make_inputs(flat, {}, batch=3)
    assert_equals_tensorflow(flat, feeds, streams=(1, 3))
    executable = ENGINE.build(job(flat, feeds))
    assert executable.facts()["host_nodes"] > 0
    program = program_of(flat, feeds)
    assert "city" not in program.feeds
    assert "_FusedMatMul" in kernels(program)


def test_the_table_is_looked_up_at_every_step():
    flat = load("keras_lookup")
    cities = np.array([b"city_1", b"city_2", b"nowhere", b"elsewhere"], object)
    feeds = {"city": cities, "amount": np.ones((4, 4), np.float32)}
    executable = ENGINE.build(job(flat, feeds, scattered(flat, 3), streams=3))
    (scores,) = executable.step(feeds).values()
    assert scores[0] != scores[1]
    assert scores[2] == scores[3]
    (turned,) = executable.step({**feeds, "city": cities[::-1].copy()}).values()
    assert turned[::-1].tolist() == scores.tolist()
    executable.launch()
    executable.close()


def test_columns_of_words_are_captured_whatever_the_words_are():
    flat = load("feature_columns")
    feeds = make_inputs(flat, {}, batch=3)
    assert_equals_tensorflow(flat, feeds, streams=(1, 4))
    executable = ENGINE.build(job(flat, feeds))
    none = {name: np.full_like(value, b"") if value.dtype == object else value for name, value in feeds.items()}
    for other in (make_inputs(flat, {}, batch=3, seed=1), none):
        assert compare(executable.step(other), reference(flat, other)).passed


def text(tf, v1):
    city = v1.placeholder(tf.string, [None], name="city")
    count = v1.placeholder(tf.int32, [], name="count")
    x = v1.placeholder(tf.float32, [None, 4], name="x")
    upper = tf.strings.upper(city, name="upper")
    joined = tf.strings.join([upper, tf.strings.as_string(count)])
    ids = tf.strings.to_hash_bucket_fast(joined, 10, name="ids")
    y = tf.gather(tf.constant(np.random.default_rng(0).standard_normal((10, 4)).astype(np.float32)), ids)
    tf.add(tf.tanh(x), y, name="out")
    tf.identity(ids, name="bucket")
    tf.constant("fixed", name="fixed")


def feeds_of(*cities, count=3):
    return {
        "city": np.array([city.encode() for city in cities], object),
        "count": np.array(count, np.int32),
        "x": np.ones((len(cities), 4), np.float32),
    }


def test_outputs_of_the_host_come_with_those_of_the_device():
    flat = graph_of(text, outputs=["upper", "out", "bucket", "fixed", "city"])
    feeds = feeds_of("oslo", "rom")
    executable = ENGINE.build(job(flat, feeds))
    found = executable.step(feeds)
    assert found["upper"].tolist() == [b"OSLO", b"ROM"]
    assert found["fixed"] == b"fixed"
    assert found["city"].tolist() == [b"oslo", b"rom"]
    feeds["city"][0] = b"wien"
    assert found["city"].tolist() == [b"oslo", b"rom"], "an input that is an output is copied"
    feeds["city"][0] = b"oslo"
    expected = reference(graph_of(text, outputs=["upper", "out", "bucket", "fixed"]), feeds)
    assert compare({name: found[name] for name in expected}, expected).passed


def labels(tf, v1):
    """A classifier as services have it: a string in front, names of classes and a decoder's strings behind, numbers beside them."""
    rng = np.random.default_rng(0)
    city = v1.placeholder(tf.string, [None], name="city")
    x = v1.placeholder(tf.float32, [None, 4], name="x")
    ids = tf.strings.to_hash_bucket_fast(city, 10)
    table = tf.constant(rng.standard_normal((10, 3)).astype(np.float32))
    logits = tf.matmul(x, rng.standard_normal((4, 3)).astype(np.float32)) + tf.gather(table, ids)
    scores = tf.nn.softmax(logits, name="scores")
    best = tf.argmax(scores, 1, name="best")
    names = tf.gather(tf.constant(["cat", "dog", "bird"]), best, name="names")
    tf.strings.join([names, city, tf.strings.as_string(tf.reduce_max(scores, 1), precision=3)], ":", name="said")
    tf.add(tf.strings.length(names), 1, name="lengths")


def test_what_is_made_of_the_devices_results_runs_behind_it():
    flat = graph_of(labels, outputs=["scores", "best", "names", "said", "lengths"])
    feeds = {"city": np.array([b"oslo", b"rom", b"wien"], object), "x": np.ones((3, 4), np.float32)}
    assert_equals_tensorflow(flat, feeds, streams=(1, 3))
    partition = partition_graph(flat)
    assert sorted(partition.host_outputs) == ["lengths", "names", "said"]
    assert {flat.graph.ops[node] for node, _ in partition.handed} == {"ArgMax", "Max"}
    assert not partition.unplaceable
    executable = ENGINE.build(job(flat, feeds))
    first = executable.step(feeds)
    assert first["said"][1].startswith(first["names"][1] + b":rom:0.")
    turned = executable.step({name: value[::-1].copy() for name, value in feeds.items()})
    assert turned["said"].tolist() == first["said"].tolist()[::-1], "a second step is another one"
    assert executable.facts()["host_nodes"] > 5
    assert first.keys() == {"scores", "best", "names", "said", "lengths"}


def test_a_model_that_gives_strings_only_runs_too():
    flat = graph_of(labels, outputs=["said"])
    feeds = {"city": np.array([b"oslo", b"rom"], object), "x": np.ones((2, 4), np.float32)}
    assert_equals_tensorflow(flat, feeds, streams=(1, 2))


def speech(tf, v1):
    sound = v1.placeholder(tf.float32, [2, 50, 8], name="sound")
    rng = np.random.default_rng(1)
    logits = tf.einsum("btf,fc->tbc", sound, rng.standard_normal((8, 5)).astype(np.float32))
    logits = tf.identity(logits, name="logits")
    lengths = tf.fill([2], tf.shape(logits)[0])
    (found,), score = tf.nn.ctc_greedy_decoder(logits, lengths)
    tf.sparse.to_dense(found, default_value=-1, name="text")
    tf.identity(score, name="score")


def test_a_decoder_on_the_host_runs_behind_the_device():
    flat = graph_of(speech, outputs=["text", "score", "logits"])
    feeds = {"sound": np.random.default_rng(2).standard_normal((2, 50, 8)).astype(np.float32)}
    assert_equals_tensorflow(flat, feeds, streams=(1, 2))
    other = {"sound": feeds["sound"][::-1].copy()}  # the shape of the text depends on values
    executable = ENGINE.build(job(flat, feeds))
    assert compare(executable.step(other), reference(flat, other)).passed


def test_inputs_that_only_the_host_reads_are_no_inputs_of_the_device():
    flat = graph_of(text, outputs=["out"])
    program = program_of(flat, feeds_of("oslo", "rom"))
    assert sorted(program.feeds) == ["ids:0 (host)", "x"]


def test_what_the_host_hands_over_may_not_change_its_shape():
    flat = graph_of(text, outputs=["out"])
    executable = ENGINE.build(job(flat, feeds_of("oslo", "rom")))
    with pytest.raises(EngineError, match="was prepared as"):
        executable.step(feeds_of("oslo", "rom", "prag"))


@pytest.mark.parametrize("distinct", [False, True])
def test_words_are_divided_among_the_parts_of_a_table_where_their_rows_are_trained(distinct):
    """As many words in each step, of which each part of the table gets another number."""
    tf = importlib.import_module("tensorflow")
    v1 = tf.compat.v1
    texts = [np.array(words, object) for words in ([b"a b c", b"d"], [b"a g", b"w h"], [b"b", b"c c i"])]
    with tf.Graph().as_default() as graph:
        words = tf.strings.split(v1.placeholder(tf.string, [2], name="text"))
        parts = [v1.get_variable(f"part{n}", initializer=tf.fill([10, 4], n + 1.0)) for n in range(2)]
        ids = tf.strings.to_hash_bucket_fast(words.values, 20)
        ids, places = tf.unique(ids) if distinct else (ids, tf.range(4))
        loss = tf.reduce_sum(tf.sin(tf.gather(v1.nn.embedding_lookup(parts, ids), places)), name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            state = {one.op.name: session.run(one) for one in parts}
            expected = [session.run(["loss:0", "train"], {"text:0": text})[0] for text in texts]
            after = {one.op.name: session.run(one) for one in parts}
    flat = flat_of(graph.as_graph_def(), outputs=["loss", "train"])
    executable = ENGINE.build(replace(job(flat, {"text": texts[0]}, capture=False), state=state))
    np.testing.assert_allclose([executable.step({"text": text})["loss"] for text in texts], expected, rtol=1e-5)
    found = executable.save_state()
    for name, value in after.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


def test_a_graph_of_strings_alone_runs_too():
    flat = graph_of(text, outputs=["upper"])
    feeds = feeds_of("oslo")
    assert ENGINE.build(job(flat, feeds)).step(feeds)["upper"].tolist() == [b"OSLO"]


def test_importing_the_host_part_imports_no_tensorflow():
    code = "import sys, msplit.engines.cuda.runtime.host, msplit.engines.cuda.compile\nassert 'tensorflow' not in sys.modules"
    done = forked.run([sys.executable, "-c", code], server=forked.ENGINE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@st.composite
def mixed_graphs(draw):
    """Small graphs of the host's ops and of the device's, in any order. Whole numbers all the way, so that text of them is exact."""
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(["add", "relu", "product", "text", "hash", "length"]), st.integers(0, 99)),
            min_size=2,
            max_size=9,
        )
    )
    fetched = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))

    def build(tf, v1):
        def words(value):
            return tf.strings.as_string(tf.cast(value, tf.int32))

        values = [v1.placeholder(tf.float32, [2, 2], name="x")]
        for number, (kind, index) in enumerate(steps):
            a, b = values[-1 - index % min(2, len(values))], values[index % len(values)]
            with tf.name_scope(f"step_{number}"):
                if kind == "add":
                    made = tf.math.floormod(a + b, 10.0)
                elif kind == "relu":
                    made = tf.nn.relu(a - 3.0)
                elif kind == "product":
                    made = tf.math.floormod(tf.matmul(a, np.array([[1, 2], [3, 1]], np.float32)), 10.0)
                elif kind == "text":
                    made = tf.strings.to_number(words(a))
                elif kind == "hash":
                    made = tf.cast(tf.strings.to_hash_bucket_fast(words(a), 10), tf.float32)
                else:
                    made = tf.cast(tf.strings.length(tf.strings.join([words(a), "."])), tf.float32)
            values.append(made)
        for number, index in enumerate(fetched):
            tf.identity(values[-1 - index % min(4, len(values))], name=f"out{number}")

    return build, [f"out{number}" for number in range(len(fetched))]


@settings(max_examples=examples(12, 40), deadline=None)
@given(mixed_graphs())
def test_any_mixture_gives_tensorflows_outputs_or_is_refused_by_name(case):
    flat = graph_of(case[0], outputs=case[1])
    feeds = {"x": np.array([[1, 5], [9, 2]], np.float32)}
    partition = partition_graph(flat)
    event(
        "refused"
        if partition.unplaceable
        else f"before: {bool(partition.host)}, behind: {bool(partition.host_outputs)}"
    )
    if partition.unplaceable:
        heavy = {node for node, op in enumerate(flat.graph.ops) if op == "MatMul"}
        assert all(heavy & downstream(flat, node) for node in partition.unplaceable), "others could run behind"
        with pytest.raises(EngineError, match="neither before it nor behind it"):
            ENGINE.build(job(flat, feeds))
        return
    assert_equals_tensorflow(flat, feeds, streams=(1, 2))


def downstream(flat, node):
    """All nodes that depend on one."""
    found, waiting = set(), [node]
    while waiting:
        for reader in flat.graph.successors(waiting.pop()).tolist():
            if reader not in found:
                found.add(reader)
                waiting.append(reader)
    return found


def test_the_next_inputs_are_looked_up_while_the_device_is_busy(monkeypatch):
    flat = load("keras_lookup")
    feeds = [make_inputs(flat, {}, batch=3, seed=seed) for seed in range(4)]
    executable = ENGINE.build(job(flat, feeds[0]))
    wanted = [executable.step(one) for one in feeds]
    log = []
    for who, what in ((executable._host, "run"), (executable._host, "finish"), (executable.device, "_run")):
        do = getattr(who, what)
        monkeypatch.setattr(who, what, lambda *given, do=do, what=what: log.append(what) or do(*given))
    found = [step_then(executable, one, then) for one, then in zip(feeds, [*feeds[1:], None], strict=True)]
    for outputs, expected in zip(found, wanted, strict=True):
        assert outputs.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(outputs[name], value)
    # The simulated device is over before it is asked what comes next; on a GPU that is while its graph runs.
    assert log == ["run", *["_run", "run", "finish"] * 3, "_run", "finish"]
    other = {name: value[::-1].copy() for name, value in feeds[1].items()}
    step_then(executable, feeds[0], {**feeds[1], "city": np.zeros(3)})  # its own step says what is wrong
    expected = executable.step(other)
    step_then(executable, feeds[0], feeds[1])
    for name, value in executable.step(other).items():
        np.testing.assert_array_equal(value, expected[name])


def test_what_reads_data_itself_is_not_run_before_its_step():
    def numbers(tf, v1):
        x = v1.placeholder(tf.float32, [2], name="x")
        read = v1.data.make_one_shot_iterator(tf.data.Dataset.range(100)).get_next()
        tf.add(x, tf.cast(read, tf.float32), name="y")

    feeds = {"x": np.zeros(2, np.float32)}
    executable = ENGINE.build(job(graph_of(numbers, outputs=["y"]), feeds))
    first = executable.step(feeds)["y"][0]
    then = {"x": np.zeros(2, np.float32)}
    assert [step_then(executable, feeds, then)["y"][0], executable.step(feeds)["y"][0]] == [first + 1, first + 2]


def test_what_was_made_of_announced_inputs_serves_one_step_alone():
    flat = load("keras_lookup")
    cities = np.array([b"city_1", b"city_2", b"nowhere", b"city_1"], object)
    first = {"city": cities, "amount": np.ones((4, 4), np.float32)}
    announced = {"city": cities[::-1].copy(), "amount": np.ones((4, 4), np.float32)}
    executable = ENGINE.build(job(flat, first))
    (scores,) = executable.step(first).values()
    step_then(executable, first, announced)
    (turned,) = executable.step(announced).values()
    assert turned.tolist() == scores[::-1].tolist()
    announced["city"][...] = cities
    (again,) = executable.step(announced).values()
    assert again.tolist() == scores.tolist()
    step_then(executable, first, announced)
    executable.close()  # with a step that was announced, and does not come
    (other,) = ENGINE.build(job(flat, first)).step(announced).values()
    assert other.tolist() == scores.tolist()
