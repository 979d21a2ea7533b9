"""Several that train together, each on some rows of a batch, and one that trains on all of them: the same losses and variables."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import training_models
from msplit.core.arguments import Precision
from msplit.engines.base import STEPS as STEPS_BEFORE
from msplit.engines.base import Job
from msplit.engines.cuda import compile
from msplit.engines.cuda.device import ranks
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ops.embedding import IN_ORDER
from msplit.engines.cuda.options import KernelMode, Shards
from msplit.engines.cuda.passes.distributed import allreduce as collectives_pass
from msplit.errors import EngineError
from msplit.opset.traits import EXCHANGES
from tests.campaign import CAMPAIGN, campaign, examples
from tests.engines.cuda.cases import flat_of, initial_values, options_of, scattered
from tests.engines.cuda.together import Thread, together
from tests.training_graphs import apart, loaded, stored

pytestmark = pytest.mark.tf

BATCH, WIDTH, IDS, STREAMS = 8, 3, 7, 3
STEPS = 100 if CAMPAIGN else 4
WITHIN = 1e-4 if CAMPAIGN else 1e-5
"""Sums in another order, over so many steps: how far a variable may be in terms of its root mean square."""

SPLIT = ("x", "label", "weight", "ids")


def job_of(flat, feeds, state, mode=KernelMode.PLAIN):
    options = options_of("cpu", fuse=mode.fuses, group=mode.groups)
    return Job(flat, scattered(flat, STREAMS), STREAMS, feeds, precision=Precision.IEEE, options=options, state=state)


def alone(flat, batches, state, mode=KernelMode.PLAIN):
    executable = ENGINE.build(job_of(flat, batches[0], state, mode))
    executable.load_state(state)
    return [executable.step(feeds) for feeds in batches], executable.save_state()


def assert_same(flat, batches, state, shards, *, mode=KernelMode.PLAIN, within=WITHIN):
    """Losses and variables are those of one, and variables the same on all to the last bit."""
    expected, after = alone(flat, batches, state, mode)
    every, variables = together(lambda feeds: job_of(flat, feeds, state, mode), batches, shards, state)
    for outputs, own in zip(every, variables, strict=True):
        np.testing.assert_allclose([one["loss"] for one in outputs], [one["loss"] for one in expected], rtol=within)
        assert {name: value.tobytes() for name, value in own.items()} == {
            name: value.tobytes() for name, value in variables[0].items()
        }
    wrong = {name: away for name, away in apart(variables[0], after).items() if away > within}
    assert not wrong
    changed = apart({name: state[name] for name in after}, after)
    assert changed["weights"] > 100 * within


def losses(v1, tf, x, label, seen):
    """A loss of a table's rows and of dense weights."""
    table = v1.get_variable("table", [IDS, WIDTH], use_resource=True)
    weights = v1.get_variable("weights", [WIDTH, 2], use_resource=True)
    bias = v1.get_variable("bias", [2], use_resource=True)
    found = (tf.nn.embedding_lookup(table, seen) + x) @ weights + bias
    return tf.math.squared_difference(tf.reduce_sum(found, 1), label)


def plain(tf, v1, rows, weight):
    return tf.reduce_mean(rows)


def weighted(tf, v1, rows, weight):
    """Divided by a number that no part of the batch knows."""
    return tf.reduce_sum(rows * weight) / tf.reduce_sum(weight)


def normalized(tf, v1, rows, weight):
    """A batch normalization that is written out: of the whole batch."""
    mean, variance = tf.nn.moments(rows, [0])
    gamma = v1.get_variable("gamma", [], initializer=v1.ones_initializer(), use_resource=True)
    moving = v1.get_variable("moving", [], initializer=v1.zeros_initializer(), trainable=False, use_resource=True)
    v1.add_to_collection("updates", moving.assign_sub((moving - mean) * 0.1))
    return tf.reduce_mean(tf.square((rows - mean) * tf.math.rsqrt(variance + 1e-3) * gamma - weight))


LOSSES = {"plain": plain, "weighted": weighted, "normalized": normalized}
OPTIMIZERS = {
    "sgd": lambda train: train.GradientDescentOptimizer(0.1),
    "momentum": lambda train: train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda train: train.AdamOptimizer(0.1),
    "adagrad": lambda train: train.AdagradOptimizer(0.1),
    "rmsprop": lambda train: train.RMSPropOptimizer(0.1, momentum=0.5),
    "ftrl": lambda train: train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}


@functools.cache
def graph(loss="plain", optimizer="sgd", clip=False, rows=None):
    """The flat graph of a train step, and values of its variables before the first one."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        v1.set_random_seed(1)
        x, label, weight = (v1.placeholder(tf.float32, shape, name) for shape, name in fed(rows))
        seen = v1.placeholder(tf.int64, [rows], "ids")
        total = tf.identity(LOSSES[loss](tf, v1, losses(v1, tf, x, label, seen), weight), "loss")
        trainer = OPTIMIZERS[optimizer](v1.train)
        gradients, variables = zip(*trainer.compute_gradients(total), strict=True)
        if clip:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        with tf.control_dependencies(v1.get_collection("updates")):
            step = trainer.apply_gradients(zip(gradients, variables, strict=True), v1.train.get_or_create_global_step())
        state = initial_values(v1)
    return flat_of(made.as_graph_def(), outputs=["loss", step.name]), state


def fed(rows):
    return (([rows, WIDTH], "x"), ([rows], "label"), ([rows], "weight"))


def batches(steps=STEPS, rows=BATCH):
    random = np.random.default_rng(0)
    return [
        {
            "x": random.normal(size=(rows, WIDTH)).astype(np.float32),
            "label": random.normal(3.0, size=rows).astype(np.float32),  # no gradient is a difference of equal sums
            "weight": random.uniform(size=rows).astype(np.float32),
            "ids": random.integers(0, IDS, rows),  # many of them come several times, on one and on both
        }
        for _ in range(steps)
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS if CAMPAIGN else ["sgd", "adam", "ftrl"])
def test_dense_and_sparse_gradients_of_every_optimizer(optimizer):
    flat, state = graph("plain", optimizer)
    assert_same(flat, batches(), state, Shards(2, SPLIT), mode=KernelMode.FUSED_AND_GROUPED)


@pytest.mark.parametrize(
    ("loss", "clip"),
    [("weighted", True), ("normalized", False), *([("plain", True), ("weighted", False)] if CAMPAIGN else [])],
)
def test_what_is_not_linear_is_that_of_the_whole_batch(loss, clip):
    flat, state = graph(loss, "momentum", clip)
    assert_same(flat, batches(), state, Shards(4, SPLIT))


def collectives(flat, feeds, state, shards):
    options = replace(options_of("cpu"), shards=shards)
    program = ENGINE.compile(replace(job_of(flat, feeds, state), options=options)).program
    return [step.op.op for step in program.steps if step.op.op in ("_AllReduce", "_AllGather")]


def test_all_dense_gradients_and_the_loss_are_one_message_and_rows_another():
    flat, state = graph("plain", "momentum")
    feeds = batches(1)[0]
    assert sorted(collectives(flat, feeds, state, Shards(2, SPLIT))) == ["_AllGather", "_AllReduce"]
    assert collectives(flat, feeds, state, None) == []
    flat, state = graph(
        "weighted", "momentum", clip=True
    )  # sums of weights, gradients; rows for the norm, clipped ones
    assert sorted(collectives(flat, feeds, state, Shards(2, SPLIT))) == [*["_AllGather"] * 3, *["_AllReduce"] * 2]


def test_large_gradients_do_not_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(collectives_pass, "BUCKET", 1)
    flat, state = graph("plain", "adam", clip=True)
    assert collectives(flat, batches(1)[0], state, Shards(2, SPLIT)).count("_AllReduce") == 3
    assert_same(flat, batches(), state, Shards(2, SPLIT), mode=KernelMode.GROUPED)


def test_what_is_exchanged_has_a_stream_of_its_own():
    flat, state = graph("plain", "adam")
    job = job_of(flat, batches(1)[0], state)
    program = ENGINE.compile(replace(job, options=replace(job.options, shards=Shards(2, SPLIT)))).program
    lanes, count = program.lanes(job.ids)
    exchanged = {lane for step, lane in zip(program.steps, lanes.tolist(), strict=True) if step.op.op in EXCHANGES}
    others = {lane for step, lane in zip(program.steps, lanes.tolist(), strict=True) if step.op.op not in EXCHANGES}
    assert len(exchanged) == 1
    assert exchanged.isdisjoint(others)
    assert (exchanged | others) - {-1} == set(range(count))
    assert ENGINE.compile(job).streams(job.ids) == count - 1


@pytest.mark.parametrize("best", ["nccl", "two-shot", "read"])
def test_a_message_has_one_memory_where_symmetric_memory_is_fastest(monkeypatch, best):
    asked, waits = [], []

    def fastest(like, size, *, by_rank):
        asked.append(size)
        own = like.new_zeros(size)
        return None if best == "nccl" else ranks.Room(own, [own + 1, own], lambda: waits.append(size), best == "read")

    symmetric = ranks.Symmetric(Device.of(torch.device("cpu")))
    monkeypatch.setattr(symmetric, "_fastest", fastest)
    monkeypatch.setattr(ranks, "_sum_and_divide", lambda flat: flat.fill_(7))
    symmetric.wait()
    like, is_faster = torch.zeros(1), best != "nccl"
    rooms = [symmetric.room(like, size, message, by_rank=True) for size, message in ((8, 0), (8, 0), (8, 1), (4, 0))]
    assert asked == [8, 8, 4]
    assert (rooms[0].data_ptr() == rooms[1].data_ptr()) is is_faster
    assert len({room.data_ptr() for room in rooms[1:]}) == 3
    every = [symmetric.read(room) for room in rooms]
    assert [found is not None for found in every] == [best == "read"] * 4
    assert all(found[1].data_ptr() == room.data_ptr() for found, room in zip(every, rooms, strict=True) if found)
    symmetric.wait()  # one for all
    assert waits == ([8, 8, 8, 4, 8] if best == "read" else [])
    assert [symmetric.average(room) for room in rooms] == [is_faster] * 4
    assert all(bool((room == 7).all()) for room in rooms if is_faster)
    assert not symmetric.average(torch.zeros(8))
    assert symmetric.read(torch.zeros(8)) is None
    monkeypatch.setattr(ranks, "is_capturing", lambda: True)  # nothing is measured there
    assert symmetric.room(like, 16, 9, by_rank=True).shape == (16,)
    assert asked == [8, 8, 4]


def bits(arrays):
    """The bytes of arrays, whatever the payload of what is no number."""
    return {name: np.where(value == value, value, np.nan).tobytes() for name, value in arrays.items()}


@pytest.mark.parametrize("can_read", [True, False])
@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.FUSED_AND_GROUPED])
@pytest.mark.parametrize(
    ("loss", "optimizer"), [("plain", "adam"), ("weighted", "ftrl"), *([("plain", "momentum")] if CAMPAIGN else [])]
)
def test_updates_that_read_the_gradients_of_both_give_what_means_give(monkeypatch, loss, optimizer, mode, can_read):
    """Also of numbers that are hardly any: huge, infinite, denormal or none."""
    fed = batches(6)
    for number, factor in enumerate((1.0, 1e-38, 0.0, -0.0, 1e37, np.inf)):
        fed[number]["x"][::2] *= np.float32(factor)
    ways, counted = [], []
    for on in ("0", "1"):
        monkeypatch.setenv(ranks.SYMMETRIC, on)
        graph.cache_clear()  # what was compiled is kept
        flat, state = graph(loss, optimizer)
        if not can_read:
            monkeypatch.setattr(Thread, "read", lambda self, flat: None)
        options = replace(options_of("cpu"), shards=Shards(2, SPLIT))
        program = ENGINE.compile(replace(job_of(flat, fed[0], state, mode), options=options)).program
        counted.append(Counter(step.op.op for step in program.steps))
        with np.errstate(all="ignore"):
            job_for = functools.partial(job_of, flat, state=state, mode=mode)
            every, variables = together(job_for, fed, Shards(2, SPLIT), state)
        ways.append([bits(one) for one in (*variables, *(step for outputs in every for step in outputs))])
    graph.cache_clear()
    assert ways[0] == ways[1]
    assert [(one["_AllWait"], one["_AllMean"]) for one in counted] == [(0, 0), (1, 1)]
    assert counted[0]["_AllReduce"] == counted[1]["_AllReduce"]


@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.GROUPED])
def test_updates_read_the_gradients_of_both_beside_means_of_other_inputs(monkeypatch, mode):
    """A rate of the batch, whose input stands behind the gradient; one gradient for two variables, and one of which an output is made; a
    variable that is read behind its update, and one that another op updates."""

    def build(tf, v1):
        x, weight = v1.placeholder(tf.float32, [None, WIDTH], "x"), v1.placeholder(tf.float32, [None], "weight")
        names = ("weights", "again", "seen", "other")
        first, again, seen, other = (v1.get_variable(name, [WIDTH, 2], use_resource=True) for name in names)
        loss = tf.reduce_mean(tf.square(x @ first + x @ again + (x @ seen) ** 2 + x @ other - 3.0))
        one, two, three = tf.gradients(loss, [first, seen, other])
        optimizer = v1.train.FtrlOptimizer(0.1 + 0.1 * tf.reduce_mean(weight), l1_regularization_strength=0.01)
        tf.identity(tf.reduce_sum(two), "fetched")
        update = optimizer.apply_gradients([(one, first), (one, again), (two, seen)])
        moving = v1.get_variable("moving", [WIDTH, 2], use_resource=True)
        with tf.control_dependencies([update]):
            followed = moving.assign_sub(0.1 * (moving - first.read_value()))
        return loss, tf.group(followed, other.assign_sub(0.1 * three), name="step")

    flat, state = small(build, "fetched")
    fed = [{name: one[name] for name in ("x", "weight")} for one in batches()]
    monkeypatch.setenv(ranks.SYMMETRIC, "1")
    assert_same(flat, fed, state, Shards(2, ("x", "weight")), mode=mode)
    options = replace(options_of("cpu"), shards=Shards(2, ("x", "weight")))
    program = ENGINE.compile(replace(job_of(flat, fed[0], state, mode), options=options)).program
    assert [step.op.attrs.get("ranks") for step in program.steps if step.op.op == "_ApplyFlat"] != []


@pytest.mark.parametrize(("clip", "count"), [(True, 2), (False, 4)])
def test_means_are_made_of_what_is_clipped_and_for_more_ranks(monkeypatch, clip, count):
    monkeypatch.setenv(ranks.SYMMETRIC, "1")
    graph.cache_clear()
    flat, state = graph("plain", "momentum", clip)
    options = replace(options_of("cpu"), shards=Shards(count, SPLIT))
    program = ENGINE.compile(replace(job_of(flat, batches(1)[0], state), options=options)).program
    graph.cache_clear()
    assert not [step.op.op for step in program.steps if step.op.op in ("_AllWait", "_AllMean", "_ApplyFlat")]


def small(build, *fetches):
    """The flat graph of a step of gradient descent on the loss that `build` makes, and values of its variables."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        v1.set_random_seed(1)
        loss, others = build(tf, v1)
        tf.identity(loss, "loss")
        step = others or v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="step")
        state = initial_values(v1)
    return flat_of(made.as_graph_def(), outputs=["loss", *fetches, step.name]), state


@pytest.mark.parametrize("clipped", ["", "by norm", "by global norm"])
def test_rows_alone(clipped):
    """The loss is a square of what gradients of rows are multiples of, and of these a norm may be taken, too."""

    def build(tf, v1):
        weights = v1.get_variable("weights", [IDS, WIDTH], use_resource=True)
        x, ids = v1.placeholder(tf.float32, [None, WIDTH], "x"), v1.placeholder(tf.int64, [None], "ids")
        loss = tf.reduce_mean(tf.square(tf.gather(weights, ids) - x))
        trainer = v1.train.GradientDescentOptimizer(0.1)
        ((gradient, variable),) = trainer.compute_gradients(loss)
        if clipped == "by norm":
            gradient = tf.clip_by_norm(gradient, 0.05)
        elif clipped:
            (gradient,), _ = tf.clip_by_global_norm([gradient], 0.05)
        return loss, trainer.apply_gradients([(gradient, variable)], name="step")

    flat, state = small(build)
    fed = [{"x": one["x"], "ids": one["ids"]} for one in batches()]
    assert_same(flat, fed, state, Shards(2, ("x", "ids")))


def rows_loss(tf, table, x, ids, kind):
    """A loss of rows of a table: looked up one by one, as distinct rows, or put together by segment."""
    unique, places = tf.unique(ids)
    if kind == "distinct":
        rows = tf.gather(tf.gather(table, unique), places)
    elif kind == "segments":
        rows = tf.sparse.segment_sum(tf.gather(table, unique), places, tf.range(tf.size(places)))
    elif kind == "lookup_sparse":
        count = tf.shape(ids, out_type=tf.int64)[0]
        sparse = tf.SparseTensor(tf.stack([tf.range(count), tf.zeros_like(ids)], 1), ids, [count, 1])
        rows = tf.compat.v1.nn.embedding_lookup_sparse(table, sparse, None, combiner="mean")
    else:
        rows = tf.gather(table, ids)
    return tf.reduce_mean(tf.square(rows - x))


def rows_step(tf, v1, kind, optimizer):
    """A step of that, its gradient as it is or summed up before, beside sums of squares, or without a number of the batch in it."""
    table = v1.get_variable("weights", [IDS, WIDTH], use_resource=True)
    x, ids = v1.placeholder(tf.float32, [None, WIDTH], "x"), v1.placeholder(tf.int64, [None], "ids")
    loss, trainer = rows_loss(tf, table, x, ids, kind), OPTIMIZERS[optimizer](v1.train)
    if kind == "constant":
        loss = tf.reduce_mean(tf.reduce_sum(tf.gather(table, ids), 1))
    ((gradient, _),) = trainer.compute_gradients(loss)
    if kind in ("summed before", "squares and sums"):
        unique, places = tf.unique(gradient.indices)
        total, squares = (
            tf.math.unsorted_segment_sum(rows, places, tf.size(unique))
            for rows in (gradient.values, tf.square(gradient.values))
        )
        gradient = tf.IndexedSlices(total, unique, gradient.dense_shape)
    if kind == "squares and sums":
        seen = v1.get_variable("seen", [IDS, WIDTH], use_resource=True, initializer=v1.ones_initializer())
        with tf.control_dependencies([seen.scatter_add(tf.IndexedSlices(squares, unique))]):
            change = tf.IndexedSlices(0.1 * total / tf.sqrt(tf.gather(seen, unique)), unique)
        return loss, tf.group(table.scatter_sub(change), name="step")
    if kind == "counts":
        unique, places = tf.unique(ids)
        counted = tf.math.unsorted_segment_sum(
            tf.ones_like(ids, tf.float32)[:, None] * tf.ones([1, WIDTH]), places, tf.size(unique)
        )
        gradient = tf.IndexedSlices(counted, unique, gradient.dense_shape)
    return loss, trainer.apply_gradients([(gradient, table)], name="step")


@pytest.mark.parametrize("mode", list(KernelMode) if CAMPAIGN else [KernelMode.FUSED_AND_GROUPED])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad"] if CAMPAIGN else ["sgd", "adagrad"])
@pytest.mark.parametrize(
    "kind", ["distinct", "segments", "lookup_sparse", "summed before", "squares and sums", "constant", "counts"]
)
def test_distinct_rows_are_those_of_all(kind, optimizer, mode):
    """However the distinct ids of a process are found, with shapes of its own on the way or a second time."""
    flat, state = small(lambda tf, v1: rows_step(tf, v1, kind, optimizer))
    fed = [{name: one[name] for name in ("x", "ids")} for one in batches()]
    assert_same(flat, fed, state, Shards(2, ("x", "ids")), mode=mode)


@settings(max_examples=examples(6, 300), deadline=None)
@given(
    ids=st.lists(st.integers(0, IDS - 1), min_size=8, max_size=8) | st.integers(0, IDS - 1).map(lambda one: [one] * 8),
    seed=st.integers(0, 1 << 16),
    ranks=st.sampled_from([2, 4]),
    optimizer=st.sampled_from(["sgd", "adagrad"]),
)
def test_rows_of_all_are_summed_up_as_one_would_to_the_bit(ids, seed, ranks, optimizer):
    """Each process sends its rows as they are, in their order in the batch, also those of an id that it has several times."""
    flat, state = rows_graph(optimizer)
    x = np.random.default_rng(seed).normal(size=(len(ids), WIDTH)).astype(np.float32)
    fed = [{"x": x, "ids": np.array(ids)}] * 2
    for mode in (KernelMode.PLAIN, KernelMode.GROUPED):
        _, expected = alone(flat, fed, state, mode)
        _, variables = together(
            lambda feeds, mode=mode: job_of(flat, feeds, state, mode), fed, Shards(ranks, ("x", "ids")), state
        )
        for own in variables:
            for name, value in expected.items():
                np.testing.assert_array_equal(own[name], value, strict=True)


@functools.cache
def rows_graph(optimizer):
    return small(lambda tf, v1: rows_step(tf, v1, "each", optimizer))


def test_counts_of_ids_are_of_all_rows():
    def build(tf, v1):
        counts = v1.get_variable("weights", [IDS], initializer=v1.zeros_initializer(), use_resource=False)
        ids = v1.placeholder(tf.int64, [None], "ids")
        counted = v1.scatter_add(counts, ids, tf.ones_like(ids, tf.float32))
        with tf.control_dependencies([counted]):
            return tf.constant(1.0), tf.no_op("step")

    flat, state = small(build)
    assert_same(flat, [{"ids": one["ids"]} for one in batches()], state, Shards(2, ("ids",)))


def test_where_all_have_the_same_rows_each_does_as_if_it_were_alone():
    """So does what is normalized by one kernel over the rows that each has."""

    def build(tf, v1):
        x = v1.placeholder(tf.float32, [None, 2, 2, WIDTH], "x")
        scale, offset = (v1.get_variable(name, [WIDTH], use_resource=True) for name in ("weights", "offset"))
        moving = v1.get_variable("moving", [WIDTH], trainable=False, use_resource=True)
        found, mean, _ = v1.nn.fused_batch_norm(x, scale, offset, is_training=True)
        with tf.control_dependencies([moving.assign_sub((moving - mean) * 0.1)]):
            return tf.reduce_mean(tf.square(found - tf.square(x))), None

    flat, state = small(build)
    once = [
        {"x": np.random.default_rng(step).normal(size=(4, 2, 2, WIDTH)).astype(np.float32)} for step in range(STEPS)
    ]
    expected, after = alone(flat, once, state)
    twice = [{"x": np.concatenate([one["x"]] * 2)} for one in once]
    every, variables = together(lambda feeds: job_of(flat, feeds, state), twice, Shards(2, ("x",)), state)
    for outputs, own in zip(every, variables, strict=True):
        np.testing.assert_allclose([one["loss"] for one in outputs], [one["loss"] for one in expected], rtol=WITHIN)
        assert not [name for name, away in apart(own, after).items() if away > WITHIN]


@pytest.mark.parametrize("found_out", [True, False])
def test_a_graph_of_a_fixed_batch(found_out, monkeypatch):
    """Where it can not be found out what has rows, what updates take is averaged."""
    if not found_out:
        monkeypatch.setattr(compile, "_resized", lambda *_: None)
    flat, state = graph("plain", "adam")
    small, _ = graph("plain", "adam", rows=BATCH // 2)
    expected, after = alone(flat, batches(), state)
    every, variables = together(
        lambda feeds: job_of(small, feeds, state), batches(), Shards(2, SPLIT, is_open=False), state
    )
    np.testing.assert_allclose([one["loss"] for one in every[1]], [one["loss"] for one in expected], rtol=WITHIN)
    assert not [name for name, away in apart(variables[1], after).items() if away > WITHIN]


def test_each_draws_random_numbers_of_its_own_for_its_rows():
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        x = v1.placeholder(tf.float32, [None, 64], "x")
        weights = v1.get_variable("weights", [64], initializer=v1.zeros_initializer(), use_resource=True)
        kept = tf.identity(tf.nn.dropout(x, rate=0.5, seed=3), "kept")
        tf.identity(tf.random.uniform([], seed=5), "alike")  # one number for all rows
        loss = tf.reduce_mean(kept * weights, name="loss")
        step = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    flat = flat_of(made.as_graph_def(), outputs=["loss", "kept", "alike", step.name])
    state, fed = {"weights": np.zeros(64, np.float32)}, [{"x": np.ones((4, 64), np.float32)}] * 2
    (first, second), variables = together(lambda feeds: job_of(flat, feeds, state), fed, Shards(2, ("x",)), state)
    assert first[0]["alike"] == second[0]["alike"] != first[1]["alike"]
    masks = [one["kept"].tobytes() for one in (*first, *second)]
    assert len(set(masks)) == len(masks)
    np.testing.assert_array_equal(variables[0]["weights"], variables[1]["weights"])


def test_a_variable_that_takes_rows_is_refused():
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        x = v1.placeholder(tf.float32, [None], "x")
        state = v1.get_variable("state", initializer=np.zeros(2, np.float32), use_resource=False, validate_shape=False)
        tf.reduce_mean(x, name="loss")
        step = v1.assign(state, x, validate_shape=False, name="carried")
    flat, values = flat_of(made.as_graph_def(), outputs=["loss", step.op.name]), {"state": np.zeros(2, np.float32)}
    with pytest.raises(EngineError, match=r"node carried: a variable takes rows of the batch"):
        collectives(flat, {"x": np.ones(2, np.float32)}, values, Shards(2, ("x",)))


def test_branches_are_grouped_as_without_an_exchange():
    """Each gradient has a place of its own in the message, by which branches that are alike seemed to differ."""
    meta, training = training_models.build("towers", "Adagrad", resource=True, batch=None, small=True)
    flat, fed = loaded(meta.SerializeToString(deterministic=True)), [training.feeds(BATCH, step) for step in range(3)]
    state, shards = training.state(), Shards(2, tuple(fed[0]))
    made = job_of(flat, fed[0], state, KernelMode.GROUPED)

    def count(shards):
        program = ENGINE.compile(replace(made, options=replace(made.options, shards=shards))).program
        found = Counter(step.op.op for step in program.steps)
        kinds = ("MatMul", "_GroupedMatMul", "BatchMatMulV2", "ReluGrad", "BiasAddGrad", "Pack", "_ApplyRows")
        return {op: found[op] for op in (*kinds, "_UniquePadded", "_StackedSegmentSum", "UnsortedSegmentSum")}

    assert count(shards) == count(None)
    expected, after = alone(flat, fed, state, KernelMode.GROUPED)
    every, variables = together(lambda feeds: job_of(flat, feeds, state, KernelMode.GROUPED), fed, shards, state)
    np.testing.assert_allclose([one["loss"] for one in every[0]], [one["loss"] for one in expected], rtol=WITHIN)
    assert not [name for name, away in apart(variables[1], after).items() if away > 10 * WITHIN]


@campaign
@pytest.mark.parametrize("mode", KernelMode)
@pytest.mark.parametrize("optimizer", training_models.OPTIMIZERS)
@pytest.mark.parametrize("name", ["mmoe", "deepfm", "towers", "columns"])
def test_models_of_the_benchmark(name, optimizer, mode):
    meta, training = training_models.build(name, optimizer, resource=True, batch=None, small=True)
    flat = loaded(meta.SerializeToString(deterministic=True))
    fed = [training.feeds(BATCH, step) for step in range(3)]
    expected, after = alone(flat, fed, training.state(), mode)
    every, variables = together(
        lambda feeds: job_of(flat, feeds, training.state(), mode), fed, Shards(2, tuple(fed[0])), training.state()
    )
    np.testing.assert_allclose([one["loss"] for one in every[0]], [one["loss"] for one in expected], rtol=WITHIN)
    assert not [name for name, away in apart(variables[1], after).items() if away > 10 * WITHIN]


def keras_step(tf, v1, kind):
    """A step as Keras writes it: squares are of the rows of a sparse gradient, not of what those of an id sum up to."""
    from keras import ops

    x, ids = v1.placeholder(tf.float32, [None, WIDTH], "x"), v1.placeholder(tf.int64, [None], "ids")
    table = v1.get_variable("table", [IDS, WIDTH], use_resource=True)
    weights = v1.get_variable("weights", [WIDTH, 2], use_resource=True)
    squares = v1.get_variable("squares", [IDS, WIDTH], use_resource=True, initializer=v1.constant_initializer(0.1))
    loss = tf.reduce_mean(tf.square((tf.nn.embedding_lookup(table, ids) + x) @ weights - 1.0))
    rows, dense = tf.gradients(loss, [table, weights])
    if kind == "adagrad":
        change = squares.scatter_add(ops.square(rows))
    else:
        change = squares.assign(0.9 * squares.read_value() + ops.multiply(0.1, ops.square(rows)))
    with tf.control_dependencies([change]):
        root = ops.sqrt(ops.add(squares.read_value(), 1e-7))
    if kind == "adam":
        update = table.assign_sub(0.1 * tf.convert_to_tensor(rows) / root)
    else:
        update = table.scatter_sub(ops.divide(ops.multiply(0.1, rows), root))
    return loss, tf.group(update, weights.assign_sub(0.1 * dense), name="step")


@pytest.mark.parametrize("kind", ["adagrad", "adam", *(["rmsprop"] if CAMPAIGN else [])])
def test_squares_of_rows_are_those_of_the_whole_batch(kind):
    flat, state = small(lambda tf, v1: keras_step(tf, v1, kind))
    fed = [{name: one[name] for name in ("x", "ids")} for one in batches()]
    assert_same(flat, fed, state, Shards(2, ("x", "ids")))


@pytest.mark.parametrize(
    ("own", "other", "counts"),
    [
        ({}, {(1, 0): np.ones((8, 1))}, False),  # the value of one size alone is known: it is a gradient like others
        ({(1, 0): np.ones((4, 1))}, {}, False),
        ({(1, 0): np.full((4, 1), 1 / 4)}, {(1, 0): np.full((8, 1), 1 / 8)}, False),
        ({(1, 0): np.ones((4, 1))}, {(1, 0): np.ones((8, 1))}, True),
    ],
    ids=["not known", "known in one size", "share of a mean", "count"],
)
def test_constant_rows_are_counts_where_they_are_those_of_another_size_too(own, other, counts):
    graph, resized = SimpleNamespace(constants=own), SimpleNamespace(constants=other)
    assert collectives_pass._Walk(graph, Shards(2, ("x",)), resized).counts((1, 0)) is counts


def test_classes_that_are_drawn_are_the_same_everywhere():
    def build(tf, v1):
        x, ids = v1.placeholder(tf.float32, [None, WIDTH], "x"), v1.placeholder(tf.int64, [None], "ids")
        weights = v1.get_variable("weights", [20, WIDTH], use_resource=True)
        biases = v1.get_variable("biases", [20], use_resource=True)
        dense = v1.get_variable("dense", [WIDTH, WIDTH], use_resource=True)
        return tf.reduce_mean(tf.nn.sampled_softmax_loss(weights, biases, ids[:, None], x @ dense, 5, 20)), None

    flat, state = small(build)
    fed = [{name: one[name] for name in ("x", "ids")} for one in batches()]
    assert_same(flat, fed, {**state, STEPS_BEFORE: np.array(0, np.int64)}, Shards(2, ("x", "ids")))


@pytest.mark.parametrize("mode", [KernelMode.PLAIN, KernelMode.GROUPED])
def test_sums_of_the_rows_of_all_are_made_in_one_order(mode):
    """On a GPU rows that are added in any order give other last bits on each process, and so would the variables be."""
    flat, training = stored("deepfm", "Adam", "resource")
    feeds = training.feeds(BATCH, 0)
    job = job_of(flat, feeds, training.state(), mode)
    shards = Shards(4, tuple(feeds), is_open=False)
    graph = ENGINE.compile(replace(job, options=replace(job.options, shards=shards))).optimized.graph
    sums = [op for op in graph.ops.values() if op.op in ("UnsortedSegmentSum", "_StackedSegmentSum")]
    assert {graph.shape(op.inputs[0])[-2] for op in sums} == {4 * BATCH}  # none of one process alone
    assert all(op.attrs.get(IN_ORDER) for op in sums)
