"""Training with tables, and slots of optimizers, in the host's memory: to the bit what it is with all of them on the device."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.errors import EngineError, InvalidInput
from tests.campaign import CAMPAIGN, examples, sampled
from tests.engines.cuda.cases import flat_of, initial_values, options_of, scattered
from tests.engines.cuda.test_sparse_training import BATCH, FEW, ROWS, check, feeds_of, graph, job_of, keras_graph
from tests.training_graphs import STORED, kept
from tests.training_graphs import run as run_stored

torch = pytest.importorskip("torch")
from msplit.engines.cuda.device.device import Device  # noqa: E402
from msplit.engines.cuda.ir.program import State, StateMemory  # noqa: E402
from msplit.engines.cuda.kernels import host_tables  # noqa: E402
from msplit.engines.table_rows import TableOptions  # noqa: E402

CPU = torch.device("cpu")
BY_ROWS = ["sgd", "momentum", "nesterov", "adagrad", "adadelta", "rmsprop", "centered", "ftrl", "proximal"]
"""Optimizers of TensorFlow 1 whose updates by rows change these rows alone."""
DEEPFM = [case for case in STORED if case[0] == "deepfm" and case[1] != "Adam"]


def hosting(job: Job, memory: int | None = 1) -> Job:
    """A job with so many bytes on the device for tables."""
    given = None if memory is None else TableOptions(memory)
    return dataclasses.replace(job, options=dataclasses.replace(job.options, table_memory=given))


def trained(job: Job, state: Mapping[str, np.ndarray], fed: list[dict[str, np.ndarray]]) -> tuple[Any, ...]:
    """What each step gives, the variables afterwards, and which of them lie in the host's memory."""
    executable = ENGINE.build(job)
    executable.load_state(state)
    outputs = [_step(executable, feeds) for feeds in fed]
    memory = executable.state  # type: ignore[attr-defined]
    for name, array in memory.hosted.items():  # what the device writes is what the host has
        assert memory.tensors[name].data_ptr() == array.ctypes.data
    hosted = set(memory.hosted)
    found = executable.save_state()
    executable.close()
    return outputs, found, hosted


def _step(executable: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a step gives; nothing where it refuses an id, which leaves some variables as they are."""
    try:
        found: dict[str, np.ndarray] = executable.step(feeds)
    except InvalidInput:
        return {}
    return found


def assert_same(flat: Any, state: Any, fed: list[dict[str, np.ndarray]], **options: Any) -> set[str]:
    """Trains with all on the device, and with as much as can be in the host's memory. Names of what is there."""
    job = dataclasses.replace(job_of(flat, state, **options), feeds=fed[0])
    (wanted, expected, none), (given, found, hosted) = trained(job, state, fed), trained(hosting(job), state, fed)
    assert not none
    for one, other in zip(given, wanted, strict=True):
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes(), name
        assert found[name].flags.writeable
    assert any((expected[name] != state[name]).any() for name in hosted), "nothing was trained"
    return hosted


@sampled(
    12, lookup=["gather", "lookup", "twice", "tables", "column", "safe"], optimizer=BY_ROWS, resource=[False, True]
)
def test_variables_are_those_of_the_device_to_the_bit(lookup: str, optimizer: str, resource: bool) -> None:
    flat, state = graph(lookup, optimizer, resource)
    how = {"group": optimizer in FEW, "fuse": optimizer == "ftrl"}
    hosted = assert_same(flat, state, [feeds_of(flat, seed) for seed in range(4)], **how)
    tables = {name for name in state if name.split("/")[0] in ("table", "other0", "other1", "other2")}
    assert hosted == tables


@sampled(
    3,
    lookup=["weighted mean", "learned mean 0", "learned sum 1"],
    optimizer=["adagrad", "ftrl"],
    resource=[False, True],
)
def test_weighted_lookups_train_likewise(lookup: str, optimizer: str, resource: bool) -> None:
    flat, state = graph(lookup, optimizer, resource)
    assert "table" in assert_same(flat, state, [feeds_of(flat, seed) for seed in range(3)], group=True)


@pytest.mark.parametrize("parts", [2, 3])
def test_tables_of_parts_train_likewise(parts: int) -> None:
    flat, state = graph("lookup", "adagrad", True, parts=parts)
    assert len(assert_same(flat, state, [feeds_of(flat, seed) for seed in range(3)], group=True)) == 2 * parts


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_tables_stay_in_float32_and_by_rows_where_it_is_computed_in_half(precision: Precision) -> None:
    flat, state = graph("tables", "adagrad", True)
    job = dataclasses.replace(job_of(flat, state, group=True), precision=precision)
    program = CudaEngine().compile(hosting(job)).program
    keys = {program.state.keys[name] for name in program.state.hosted}
    assert len(keys) == 8
    assert {step.op.op for step in program.steps if keys & {*step.inputs}} == {"_Columns", "_ApplyRows"}


@sampled(3, case=DEEPFM, streams=[1, 4])
def test_a_model_of_the_benchmark_trains_likewise(case: tuple[str, str, str], streams: int) -> None:
    flat, training = kept(*case)
    job = Job(
        flat,
        scattered(flat, streams, streams),
        streams,
        training.feeds(8),
        precision=Precision.IEEE,
        options=options_of(group=True),
        state=training.state(),
    )
    found = []
    for one in (job, hosting(job)):
        executable = ENGINE.build(one)
        found.append((run_stored(executable, training, range(3)), executable.save_state()))
        assert ("host_state_bytes" in executable.facts()) == (one is not job)
        executable.close()
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert all(value.tobytes() == found[1][1][name].tobytes() for name, value in found[0][1].items())


@sampled(4 if CAMPAIGN else 2, lookup=["lookup", "tables"], optimizer=["adagrad", "rmsprop", "ftrl", "momentum"])
def test_variables_are_those_of_tensorflow(lookup: str, optimizer: str) -> None:
    program = check(*graph(lookup, optimizer, True), table_memory=TableOptions(1), group=True)
    assert program.state.hosted


# --- Ids and gradients as they come


@functools.cache
def scaled(optimizer: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A step whose gradient of row i is a factor that is fed, for each place of a batch of any size."""
    import tensorflow as tf

    from tests.engines.cuda.test_sparse_training import OPTIMIZERS

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        table = v1.get_variable(
            "table", [ROWS, 2], initializer=v1.random_uniform_initializer(seed=1), use_resource=True
        )
        ids = v1.placeholder(tf.int64, [None], name="ids")
        factor = v1.placeholder(tf.float32, [None, 2], name="factor")
        loss = tf.reduce_sum(tf.gather(table, ids) * factor, name="loss")
        step = OPTIMIZERS[optimizer](v1.train).minimize(loss)
        state = initial_values(v1)
    return flat_of(made.as_graph_def(), outputs=["loss", step.name]), state


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -3.5, 1e-42, 1e30, np.inf, -np.inf, np.nan])


@settings(max_examples=examples(25, 400), deadline=None)
@given(data=st.data())
def test_ids_that_come_twice_or_are_no_rows_and_gradients_of_any_kind(data: st.DataObject) -> None:
    flat, state = scaled(data.draw(st.sampled_from(BY_ROWS)))
    rows = data.draw(st.sampled_from([0, 1, 5]))
    fed = []
    for _ in range(3):
        ids = data.draw(st.lists(st.integers(0, ROWS - 1) | st.integers(-2, ROWS + 1), min_size=rows, max_size=rows))
        factor = data.draw(st.lists(SPECIAL, min_size=2 * rows, max_size=2 * rows))
        fed.append({"ids": np.array(ids, np.int64), "factor": np.array(factor, np.float32).reshape(rows, 2)})
    begun = {name: value.copy() for name, value in state.items()}
    if data.draw(st.booleans()):
        begun["table"][data.draw(st.integers(0, ROWS - 1))] = np.nan
    first = {**fed[0], "ids": np.zeros(rows, np.int64)}
    job = Job(
        flat, np.zeros(len(flat), np.int32), 1, first, precision=Precision.IEEE, options=options_of(), state=begun
    )
    (wanted, expected, _), (given, found, hosted) = trained(job, begun, fed), trained(hosting(job), begun, fed)
    assert "table" in hosted
    for one, other in zip(given, wanted, strict=True):
        assert {name: value.tobytes() for name, value in one.items()} == {
            name: value.tobytes() for name, value in other.items()
        }
    assert all(value.tobytes() == found[name].tobytes() for name, value in expected.items())


@functools.cache
def lazy() -> tuple[Any, dict[str, np.ndarray]]:
    """Adam of the rows of a step alone, as libraries write it: slots are looked up, and rows of them replaced."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        table, mean, square = (
            v1.get_variable(name, [ROWS, 2], initializer=v1.random_uniform_initializer(seed=1), use_resource=True)
            for name in ("table", "mean", "square")
        )
        ids = v1.placeholder(tf.int64, [BATCH], name="ids")
        unique, places = tf.unique(ids)
        loss = tf.reduce_sum(tf.square(tf.gather(table, ids) - 1.0), name="loss")
        (slices,) = tf.gradients(loss, [table])
        gradient = tf.math.unsorted_segment_sum(slices.values, places, tf.size(unique))
        m = 0.9 * tf.gather(mean, unique) + 0.1 * gradient
        s = 0.99 * tf.gather(square, unique) + 0.01 * tf.square(gradient)
        changes = [mean.scatter_update(tf.IndexedSlices(m, unique)), square.scatter_update(tf.IndexedSlices(s, unique))]
        changes += [table.scatter_sub(tf.IndexedSlices(0.1 * m / (tf.sqrt(s) + 1e-7), unique))]
        step = tf.group(*changes, name="step")
        state = initial_values(v1)
    return flat_of(made.as_graph_def(), outputs=["loss", step.name]), state


def test_adam_of_the_rows_of_a_step_keeps_its_moments_with_the_host() -> None:
    flat, state = lazy()
    fed = [feeds_of(flat, seed) for seed in range(4)]
    assert assert_same(flat, state, fed, group=True) == {"table", "mean", "square"}
    check(flat, state, table_memory=TableOptions(1))


# --- What can not be, and what is placed where


def test_an_optimizer_that_changes_all_rows_is_refused_by_name() -> None:
    flat, state = graph("gather", "adam", True)
    with pytest.raises(EngineError, match=r"the table table .*AssignSub.* takes all of it in each step"):
        ENGINE.build(hosting(job_of(flat, state)))
    ENGINE.build(hosting(job_of(flat, state), 10**6)).close()  # where there is room, nothing has to move


def test_adam_of_keras_is_refused(tmp_path: Any) -> None:
    with pytest.raises(EngineError, match=r"embeddings .* takes all of it in each step"):
        ENGINE.build(hosting(job_of(keras_graph("Adam", tmp_path / "adam"), None)))


def test_a_table_that_is_an_output_or_of_another_type_is_refused() -> None:
    import tensorflow as tf

    def step(dtype: Any, fetched: bool) -> Any:
        v1 = tf.compat.v1
        with tf.Graph().as_default() as made:
            table = v1.get_variable("table", [ROWS, 2], dtype, use_resource=True, initializer=v1.ones_initializer())
            ids = v1.placeholder(tf.int64, [BATCH], name="ids")
            loss = tf.reduce_sum(tf.square(tf.gather(table, ids)), name="loss")
            train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            whole = tf.identity(table.read_value(), name="whole")
        return flat_of(made.as_graph_def(), outputs=["loss", train.name, *([whole.op.name] if fetched else [])])

    for dtype, fetched, said in (
        (tf.float32, True, "what wants its old values takes all"),
        (tf.float16, False, "it is float16"),
    ):
        flat = step(dtype, fetched)
        with pytest.raises(EngineError, match=said):
            ENGINE.build(hosting(job_of(flat, {"table": np.ones((ROWS, 2), dtype.as_numpy_dtype)})))


def test_the_smallest_stay_on_the_device() -> None:
    flat, state = graph("tables", "adagrad", True)
    sizes = {
        name: value.nbytes
        for name, value in state.items()
        if name.split("/")[0] in ("table", "other0", "other1", "other2")
    }
    room = sum(sorted(sizes.values())[:4])
    program = CudaEngine().compile(hosting(job_of(flat, state), room)).program
    assert sum(sizes[name] for name in program.state.hosted) == sum(sizes.values()) - room
    assert CudaEngine().compile(hosting(job_of(flat, state), sum(sizes.values()))).program.state.hosted == frozenset()


def test_tables_that_do_not_fit_stay_with_the_host_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for what both of two ways to run the model have, which are held against each other."""
    flat, state = graph("column", "adagrad", True)
    size = 2 * state["table"].nbytes
    monkeypatch.setattr(Device, "free_bytes", lambda _: int(2 * size / 0.8) + 8)
    job = dataclasses.replace(job_of(flat, state), options=options_of(table_memory=None))
    assert CudaEngine().compile(job).program.state.hosted == frozenset()
    ENGINE.forget(flat)
    monkeypatch.setattr(Device, "free_bytes", lambda _: int(2 * size / 0.8) - 8)
    assert len(CudaEngine().compile(job).program.state.hosted) == 1
    monkeypatch.setattr(Device, "free_bytes", lambda _: 10)
    ENGINE.forget(flat)
    assert len(CudaEngine().compile(job).program.state.hosted) == 2
    ENGINE.forget(flat)
    adam, state = graph("gather", "adam", True)  # nobody asked for it, so nothing is refused
    assert CudaEngine().compile(job_of(adam, state)).program.state.hosted == frozenset()
    ENGINE.forget(adam)


def test_tables_that_are_not_trained_have_a_cache_beside_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    monkeypatch.setattr(host_tables, "_NOTES_OF_CPU", 1 << 8)
    v1, large = tf.compat.v1, 4000
    with tf.Graph().as_default() as made:
        fixed = tf.constant(np.random.default_rng(0).standard_normal((large, 8)).astype(np.float32))
        table = v1.get_variable(
            "table", [large, 8], initializer=v1.random_normal_initializer(seed=1), use_resource=True
        )
        small = v1.get_variable("small", [9, 8], initializer=v1.random_normal_initializer(seed=1), use_resource=True)
        ids = v1.placeholder(tf.int64, [BATCH], name="ids")
        rows = tf.gather(table, ids) * tf.gather(fixed, ids) + tf.gather(small, ids % 9)
        loss = tf.reduce_sum(tf.square(rows), name="loss")
        step = v1.train.AdagradOptimizer(0.1).minimize(loss)
        state = initial_values(v1)
    flat = flat_of(made.as_graph_def(), outputs=["loss", step.name])
    fed = [{"ids": np.random.default_rng(seed).integers(0, 40, BATCH)} for seed in range(20)]
    job = job_of(flat, state, group=True)
    compiled = CudaEngine().compile(hosting(job, 100_000))
    assert compiled.program.state.hosted == {"table", "table/Adagrad"}
    assert compiled.optimized.graph.table_memory == TableOptions(100_000 - 2 * 9 * 8 * 4)
    found = []
    for one in (job, hosting(job, 100_000)):
        executable = ENGINE.build(one)
        executable.load_state(state)
        losses = [executable.step(feeds)["loss"] for feeds in fed]
        found.append((losses, executable.save_state()))
        facts = executable.facts()
        executable.close()
    assert facts["host_table_bytes"] == large * 8 * 4
    assert facts["host_state_bytes"] == 2 * large * 8 * 4
    assert facts["table_hit_rate"] > 0.2
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    for name, value in found[0][1].items():
        np.testing.assert_allclose(found[1][1][name], value, rtol=1e-5, atol=1e-7)


# --- The host's memory


def state_of(*arrays: np.ndarray) -> State:
    keys = {f"v{number}": (number, 0) for number in range(len(arrays))}
    return State(keys, keys, initial=dict(zip(keys, arrays, strict=True)), hosted=frozenset([*keys][1:]))


def test_memory_is_lent_again_and_freed_when_nobody_has_it() -> None:
    gc.collect()
    memory, state = (
        Device.of(CPU).host_memory,
        state_of(np.ones(3, np.float32), np.arange(8.0), np.arange(4, dtype=np.float32)),
    )
    memory.free()
    first = StateMemory(state, CPU)
    assert {*first.hosted} == {"v1", "v2"}
    addresses = {name: array.ctypes.data for name, array in first.hosted.items()}
    assert all(address % 16 == 0 for address in addresses.values())
    other = StateMemory(state, CPU)
    assert not {array.ctypes.data for array in other.hosted.values()} & {*addresses.values()}, "it has its own"
    first.tensors["v1"].zero_()
    np.testing.assert_array_equal(other.save()["v1"], np.arange(8.0))
    del first
    again = StateMemory(state, CPU)
    assert {name: array.ctypes.data for name, array in again.hosted.items()} == addresses
    np.testing.assert_array_equal(again.save()["v1"], np.arange(8.0))
    again.close()
    assert {*again.save()} == {"v0"}
    assert not any(memory._free.values())
    held = weakref.ref(other)
    del other
    assert held() is None
    memory.free()
    assert not any(memory._free.values())


def test_a_table_that_the_host_has_no_memory_for_is_told() -> None:
    with pytest.raises(EngineError, match="the host has no"):
        Device.of(CPU).host_memory.lend(1 << 60)


def test_what_warms_up_does_not_train() -> None:
    memory = StateMemory(state_of(np.ones(3, np.float32), np.arange(8.0)), CPU)
    with memory.kept():
        memory.tensors["v0"].zero_()
        memory.tensors["v1"].zero_()
    assert memory.save()["v0"].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(memory.save()["v1"], np.arange(8.0))
    assert memory.lies_in(memory.tensors["v1"][2:4]) == ("v1",)
    with pytest.raises(EngineError, match="is float64"):
        memory.load({"v1": np.arange(8)})


def test_a_trace_gives_its_memory_back() -> None:
    flat, state = graph("lookup", "adagrad", True)
    ENGINE.forget(flat)
    gc.collect()
    gc.disable()
    try:
        CudaEngine().compile(hosting(job_of(flat, state)))
        assert sum(map(len, Device.of(CPU).host_memory._free.values())) == 2, "one table and its slot, for all traces"
        ENGINE.forget(flat)
        assert not any(Device.of(CPU).host_memory._free.values())
    finally:
        gc.enable()
