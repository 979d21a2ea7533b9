"""What the engine would refuse is known without a device and without running anything: by its own build."""

import json
import sys

import numpy as np
import pytest

from msplit.engines.cuda import coverage
from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from msplit.run.request import RunRequest
from msplit.run.variants import choose_engine
from msplit.shapes import infer
from tests.cli.runner import msplit
from tests.engines.cuda.cases import SAMPLES, graph_of, run

pytestmark = pytest.mark.tf


def x_of(tf, v1, *shape):
    return v1.placeholder(tf.float32, shape or [None, 4], name="x")


def switch_case(tf, v1):
    x = x_of(tf, v1)
    tf.identity(
        tf.switch_case(tf.cast(x[0, 0], tf.int32), [lambda: x, lambda: tf.concat([x, x], 0)], name="choose"), name="out"
    )


def branches_of_two_shapes(tf, v1):
    x = x_of(tf, v1)
    chosen = tf.cond(tf.reduce_sum(x) > 0, lambda: x[:1], lambda: tf.concat([x, x], 0), name="choose")
    tf.reduce_sum(chosen, name="out")


def endless(tf, v1):
    x = x_of(tf, v1)
    turns = tf.while_loop(lambda i, y: tf.reduce_sum(y) < 9.0, lambda i, y: (i + 1, y * y + 1), [0, x], name="turns")
    tf.identity(turns[1], name="out")


def over_what_is_found(tf, v1):
    found = tf.where(x_of(tf, v1)[:, 0] > 0)[:, 0]
    tf.map_fn(lambda k: tf.cast(k, tf.float32) * 2, found, fn_output_signature=tf.float32, name="found")
    tf.identity(tf.map_fn(lambda k: k + 1, found, name="found_too"), name="out")


def of_integers(tf, v1):
    x = tf.cast(x_of(tf, v1, 1, 5, 5, 1), tf.int32)
    tf.identity(tf.nn.conv2d(x, tf.ones([2, 2, 1, 1], tf.int32), 1, "SAME", name="conv"), name="out")


def two_at_once(tf, v1):
    x = x_of(tf, v1)
    a = tf.cond(tf.reduce_sum(x) > 0, lambda: x[:1], lambda: tf.concat([x, x], 0), name="shapes")
    b = tf.switch_case(tf.cast(x[0, 0], tf.int32), [lambda: x, lambda: tf.concat([x, x], 0)], name="cases")
    tf.add(tf.reduce_sum(a), tf.reduce_sum(b), name="out")


REFUSED = [
    (switch_case, "which branch is taken depends on values", ["choose"]),
    (
        branches_of_two_shapes,
        "which branch is taken depends on values that only the run knows, and so do shapes",
        ["choose"],
    ),
    (endless, "how many turns the loop takes", ["turns"]),
    (over_what_is_found, "the length of the list depends on values", ["found_too"]),
    (of_integers, "convolutions of int32 are not supported", ["conv"]),
    (two_at_once, "which branch is taken", ["shapes", "cases"]),
]


@pytest.mark.parametrize(("graph", "why", "places"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
def test_what_the_engine_refuses_is_told_before_with_all_its_places(graph, why, places):
    flat = graph_of(graph, outputs=["out"])
    told = "; ".join(cover(flat, build=True).reasons)
    assert why in told
    for place in places:
        assert place in told
    with pytest.raises(EngineError) as caught:
        run(flat, make_inputs(flat, {}, batch=2))
    assert why in str(caught.value)


def fine_branches(tf, v1):
    x = x_of(tf, v1)
    tf.identity(tf.cond(tf.reduce_sum(x) > 0, lambda: x + 1, lambda: x * 2), name="out")


def fine_turns(tf, v1):
    x = x_of(tf, v1)
    weights = v1.get_variable("w", [4, 4], use_resource=True)
    found = tf.while_loop(lambda i, y: i < tf.shape(x)[1], lambda i, y: (i + 1, tf.matmul(y, weights)), [0, x])
    tf.identity(found[1], name="out")


def behind_the_host(tf, v1):
    words = tf.strings.split(v1.placeholder(tf.string, [None], name="s")).values
    ids = tf.strings.to_hash_bucket_fast(words, 10)
    tf.identity(tf.map_fn(lambda k: tf.cast(k, tf.float32), ids, fn_output_signature=tf.float32), name="out")


@pytest.mark.parametrize("graph", [fine_branches, fine_turns, behind_the_host])
def test_what_it_runs_is_not_refused_before(graph):
    assert cover(graph_of(graph, outputs=["out"]), build=True).reasons == []


@pytest.mark.parametrize(
    "name",
    ["gru_while", "while_v1.pb", "cond_v1.pb", "lstm_small.pb", "ragged_sparse", "feature_columns", "keras_lookup"],
)
def test_a_sample_that_the_engine_runs_is_not_refused(name):
    flat = flatten(read(SAMPLES / name))
    found = cover(flat, infer(flat, batch=3), build=True)
    assert (found.reasons, found.unbuilt) == ([], "")


def test_nothing_large_is_read_and_nothing_is_computed(monkeypatch):
    from msplit.engines.cuda.frontend import importer

    def graph(tf, v1):
        x = x_of(tf, v1, 4, 300)
        table = tf.constant(np.ones((300, 300), np.float32))
        turns = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.matmul(y, table + 1.0)), [0, x])
        tf.identity(turns[1], name="out")

    evaluated = []
    real = importer.evaluate
    monkeypatch.setattr(
        "msplit.engines.cuda.passes.tracing.evaluate",
        lambda op, inputs: evaluated.append(inputs) or real(op, inputs),
    )
    assert cover(graph_of(graph, outputs=["out"])).reasons == []
    assert evaluated
    assert max(value.nbytes for inputs in evaluated for value in inputs) <= 8


def test_bench_takes_an_engine_that_can_run_the_model(monkeypatch):
    monkeypatch.setattr(type(CUDA), "unavailable", lambda self: None)
    engine, why = choose_engine(RunRequest(), graph_of(branches_of_two_shapes, outputs=["out"]))
    assert engine.name == "tensorflow"
    assert why.startswith("the cuda engine can not run this model: ")
    assert "choose" in why
    assert choose_engine(RunRequest(), graph_of(fine_branches, outputs=["out"]))[0].name == "cuda"
    asked = {"engine": "cuda"}
    assert choose_engine(RunRequest.of(**asked), graph_of(branches_of_two_shapes, outputs=["out"]))[0].name == "cuda"


def test_check_and_analyze_tell_by_name(tmp_path):
    graph = graph_of(two_at_once, outputs=["out"]).model.graph_def
    path = tmp_path / "model.pb"
    path.write_bytes(graph.SerializeToString())
    for command, *options in (("check", "--select", "MS017"), ("analyze", "--engine", "cuda")):
        text = json.dumps(msplit(command, path, *options, "--format", "json").json)
        assert "which branch is taken depends on values" in text
        for place in ("shapes", "cases"):
            assert place in text


def test_without_pytorch_or_the_memory_for_it_that_is_said(monkeypatch):
    flat = graph_of(branches_of_two_shapes, outputs=["out"])
    monkeypatch.setattr(coverage.importlib.util, "find_spec", lambda name: None)
    assert cover(flat).unbuilt == "PyTorch is not installed"
    monkeypatch.undo()
    monkeypatch.setattr(coverage, "_address_space", lambda: 1 << 31)
    monkeypatch.delitem(sys.modules, "torch")
    assert "2,048 MB of address space" in cover(flat).unbuilt


def long_turns(tf, v1):
    x = x_of(tf, v1)
    long = tf.while_loop(lambda i, y: i < 1200, lambda i, y: (i + 1, y + 1), [0, x], name="long")[1]
    tf.add(
        tf.reduce_sum(long),
        tf.cond(tf.reduce_sum(x) > 0, lambda: x[:1], lambda: tf.concat([x, x], 0), name="choose")[0, 0],
        name="out",
    )


def test_what_nobody_asked_for_takes_little_time(monkeypatch):
    flat = graph_of(long_turns, outputs=["out"])
    by_the_way = cover(flat)
    assert "more than 3,000 ops" in by_the_way.unbuilt
    asked_for = cover(flat, build=True)
    assert asked_for.unbuilt == ""
    assert "choose" in "; ".join(asked_for.reasons)
    monkeypatch.setattr(coverage, "MOST_BUILT", 3)
    assert "nodes are too many" in cover(flat).unbuilt
