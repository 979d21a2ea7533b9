"""Graphs that read their data themselves: queues are filled, data end, and nothing waits without end."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.api import load, pool
from msplit.benchmark import timing
from msplit.benchmark.benchmark import bench
from msplit.engines.base import Job, TensorFlowOptions
from msplit.engines.tensorflow import session
from msplit.engines.tensorflow.engine import ENGINE
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import EndOfData, EngineError, MsplitError, TimedOut
from msplit.opset import schema
from msplit.opset.traits import ops_with
from msplit.verify.results import Settings
from tests import forked
from tests.cli.runner import ROOT, msplit
from tests.leftovers import Leftovers

pytestmark = pytest.mark.tf


def written(build: Any, folder: Path) -> Any:
    """A meta graph with its collections, loaded; its output is y."""
    tf = tensorflow()
    v1 = tf.compat.v1
    with v1.Graph().as_default():
        build(tf, v1)
        v1.train.export_meta_graph(str(folder / "model.meta"))
    return load(folder / "model.meta", outputs=["y"])


def two_queues(tf: Any, v1: Any, *, epochs: int | None = 2, rows: int = 4) -> None:
    """Numbers from one queue go into a second one, in rows."""
    number = v1.train.range_input_producer(10, num_epochs=epochs, shuffle=False, name="numbers").dequeue()
    batch = v1.train.batch([tf.cast(number, tf.float32)], rows, name="rows")
    tf.multiply(batch, 2.0, name="y")
    v1.local_variables_initializer()


def opened(flat: Any, streams: int = 1, **options: Any) -> Any:
    ids = np.arange(len(flat), dtype=np.int32) % streams
    return ENGINE.build(Job(flat, ids, streams, {}, tensorflow=TensorFlowOptions(**options)))


@pytest.mark.parametrize("streams", [1, 2])
def test_queues_are_filled_in_order_to_the_end_of_their_data(streams: int, tmp_path: Path) -> None:
    flat = written(two_queues, tmp_path)
    leftovers = Leftovers()
    executable = opened(flat, streams)
    assert leftovers.threads()
    seen = [executable.step({})["y"] for _ in range(5)]
    np.testing.assert_array_equal(np.concatenate(seen), [2.0 * number for _ in range(2) for number in range(10)])
    for _ in range(2):
        with pytest.raises(EndOfData, match="came to an end") as told:
            executable.step({})
        assert "--part inputs=" in told.value.fix
    executable.close()
    assert leftovers.threads() == []


def test_a_session_is_closed_in_the_middle_of_its_data(tmp_path: Path) -> None:
    flat, leftovers = written(lambda tf, v1: two_queues(tf, v1, epochs=None), tmp_path), Leftovers()
    executable = opened(flat)
    assert leftovers.threads()
    executable.step({})
    start = time.perf_counter()
    executable.close()
    assert time.perf_counter() - start < 4
    assert leftovers.threads() == []


def empty(tf: Any, v1: Any) -> None:
    """A queue that nothing fills."""
    queue = v1.FIFOQueue(4, [tf.float32], [[2]], name="empty")
    tf.multiply(queue.dequeue(), 2.0, name="y")


@pytest.mark.parametrize("limit", ["given", "usual"])
def test_a_queue_that_nothing_fills_is_not_waited_for_without_end(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LONGEST_WAIT", 0.2)
    executable = opened(written(empty, tmp_path), **({"timeout": 0.1} if limit == "given" else {}))
    start = time.perf_counter()
    with pytest.raises(TimedOut, match="DeadlineExceeded") as told:
        executable.step({})
    assert time.perf_counter() - start < 10
    assert "timeout=" in told.value.fix
    executable.close()


def accumulator(kind: str) -> Any:
    def take(tf: Any, v1: Any) -> Any:
        if kind == "sparse":
            held = v1.SparseConditionalAccumulator(tf.float32, [4, 2], shared_name="held", name="held")
            return held.take_grad(1)[1]
        held = v1.ConditionalAccumulator(tf.float32, [2], shared_name="held", name="held")
        if kind == "resource":
            made = tf.raw_ops.ResourceConditionalAccumulator(dtype=tf.float32, shape=[2], name="own")
            return tf.raw_ops.ResourceAccumulatorTakeGradient(handle=made, num_required=1, dtype=tf.float32)
        return held.take_grad(1)

    return take


def full_queue(tf: Any, v1: Any) -> Any:
    queue = v1.FIFOQueue(1, [tf.float32], [[]], name="held")
    with tf.control_dependencies([queue.enqueue(1.0)]), tf.control_dependencies([queue.enqueue(2.0)]):
        return tf.ones([2])


def in_a_function(tf: Any, v1: Any) -> Any:
    queue = v1.FIFOQueue(4, [tf.float32], [[2]], name="held")
    return tf.function(lambda: queue.dequeue(), autograph=False)()


def barrier(tf: Any, v1: Any) -> Any:
    held = tf.raw_ops.Barrier(component_types=[tf.float32], shapes=[[2]], name="held")
    return tf.raw_ops.BarrierTakeMany(handle=held, num_elements=1, component_types=[tf.float32]).values[0]


def reader(tf: Any, v1: Any) -> Any:
    return tf.cast(
        tf.strings.length(v1.TextLineReader().read(v1.FIFOQueue(4, [tf.string], [[]], name="held"))[1]), tf.float32
    )


def staged(op: str) -> Any:
    def take(tf: Any, v1: Any) -> Any:
        own: dict[str, Any] = {"indices": [0]} if op not in ("Unstage", "StagePeek") else {}
        own |= (
            {"key": tf.constant(1, tf.int64)}
            if op in ("MapUnstage", "OrderedMapUnstage", "MapPeek", "OrderedMapPeek")
            else {}
        )
        own |= {"index": 0} if op == "StagePeek" else {}
        put = (
            "Stage" if op in ("Unstage", "StagePeek") else "OrderedMapStage" if op.startswith("Ordered") else "MapStage"
        )
        more = {} if put == "Stage" else {"key": tf.constant(1, tf.int64), "indices": [0], "dtypes": [tf.float32]}
        getattr(tf.raw_ops, put)(values=[tf.ones([2])], shared_name=f"{op} of a test", name="put", **more)
        found = getattr(tf.raw_ops, op)(dtypes=[tf.float32], shared_name=f"{op} of a test", name="held", **own)
        return tf.reshape((found.values if hasattr(found, "values") else found)[0], [2])

    return take


STAGED = ("Unstage", "StagePeek", "MapUnstage", "MapUnstageNoKey", "MapPeek", "OrderedMapUnstage", "OrderedMapPeek")
WAIT = {
    "take many": lambda tf, v1: v1.FIFOQueue(4, [tf.float32], [[]], name="held").dequeue_many(2),
    "take up to": lambda tf, v1: v1.RandomShuffleQueue(4, 0, [tf.float32], [[]], name="held").dequeue_up_to(2),
    **{kind: accumulator(kind) for kind in ("dense", "resource", "sparse")},
    **{op: staged(op) for op in STAGED},
    "full": full_queue,
    "a function's": in_a_function,
    "barrier": barrier,
    "reader": reader,
}


@pytest.mark.parametrize("kind", WAIT)
def test_whatever_waits_for_others_is_given_up_and_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LONGEST_WAIT", 0.3)

    def build(tf: Any, v1: Any) -> None:
        x = v1.placeholder(tf.float32, [2], "x")
        tf.multiply(x, WAIT[kind](tf, v1), name="y")
        tf.tanh(x, name="z")

    flat = written(build, tmp_path)
    flat = load(flat.model.path, outputs=["y", "z"])
    config = tmp_path / "own threads"  # what can not be cancelled keeps one busy
    config.write_text("use_per_session_threads: true inter_op_parallelism_threads: 2")
    executable = opened(flat, config=config)
    start = time.perf_counter()
    with pytest.raises(TimedOut, match="DeadlineExceeded") as told:
        executable.step({"x": np.ones(2, np.float32)})
    assert time.perf_counter() - start < 10
    assert "timeout=" in told.value.fix
    if kind != "a function's":
        assert {"resource": "own (", "sparse": "held ("}.get(kind, "held") in told.value.what
        assert "(--part outputs=z)" in told.value.fix
    executable.close()
    if kind in STAGED:
        executable._session.run("put")  # lets its thread end


STAGE = """
import sys
from msplit.cli import main
from msplit.engines.tensorflow import session

session.LONGEST_WAIT = 1
sys.exit(main.run(["bench", sys.argv[1], "--engine", "tensorflow", "--measure", "duration=0", "--streams", "1", "--part", "outputs=y"]))
"""


def test_a_command_ends_though_what_waits_can_not_be_cancelled(tmp_path: Path) -> None:
    written(lambda tf, v1: tf.identity(staged("Unstage")(tf, v1), name="y"), tmp_path)
    command = [sys.executable, "-c", STAGE, str(tmp_path / "model.meta")]
    done = forked.run(command, server=forked.TENSORFLOW, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 2
    assert "waits for held (Unstage)" in done.stderr
    assert "--part inputs=held" in done.stderr


def test_traits_name_every_op_that_waits() -> None:
    """As far as TensorFlow's names say it; the few others are there because their kernels were read."""
    words = (
        r"Queue(De|En)queue|(Ordered)?(Map)?(Un)?[Ss]tage|(OrderedMap|Map|Stage)Peek|ReaderRead|\w+Take(Many|Gradient)"
    )
    waits = re.compile(f"(?!.*(Clear|Size|Incomplete))({words})")
    found = {op for op in schema._table()["ops"] if waits.match(op)} - {"TakeManySparseFromTensorsMap"}
    assert len(found) > 20
    assert found <= ops_with("waits")


def test_what_keeps_a_queue_from_being_filled_is_told(tmp_path: Path) -> None:
    def missing(tf: Any, v1: Any) -> None:
        files = v1.train.string_input_producer([str(tmp_path / "no such file")], num_epochs=1, name="files")
        _, line = v1.TextLineReader().read(files)
        tf.strings.length(v1.train.batch([line], 2, name="rows"), name="y")
        v1.local_variables_initializer()

    executable = opened(written(missing, tmp_path), timeout=30)
    with pytest.raises(EngineError, match=r"could not be filled(.|\n)*no such file"):
        executable.step({})
    executable.close()


def test_a_thread_that_fails_when_all_are_to_end_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was joined raises what it is told in the thread that tells it."""
    flat = written(two_queues, tmp_path)
    executable = opened(flat)
    coordinator = executable._filling.coordinator
    executable.close()
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    thread = threading.Thread(target=lambda: coordinator.request_stop(ValueError("gone")))
    thread.start()
    thread.join()
    assert raised == []


def finite(times: int) -> Any:
    def build(tf: Any, v1: Any) -> None:
        data = tf.data.Dataset.range(32).map(lambda x: tf.cast(x, tf.float32)).batch(4).repeat(times)
        tf.tanh(v1.data.make_one_shot_iterator(data).get_next() / 100.0, name="y")

    return build


QUICK = Settings(duration=0, warmup=0, min_rounds=12, builds=1, max_burst=2)


@pytest.mark.parametrize("build", [finite(1), lambda tf, v1: two_queues(tf, v1, rows=2)], ids=["dataset", "queues"])
def test_a_bench_goes_on_where_the_data_end(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = written(build, tmp_path)
    monkeypatch.setattr(timing, "_SLOW", 1000)  # a run ends before its fewest rounds where a busy machine is slow
    found = bench(flat, streams=(1, 2), engine="tensorflow", settings=QUICK)
    assert not found.result.failed  # both rows have the same batch at the same step, also behind the end
    warned = [line for line in found.result.warnings if "came to their end" in line]
    assert len(warned) == len(found.result.variants)
    assert all(len(one.host_times) >= 12 for one in found.result.variants)


def test_data_for_a_few_steps_are_told_as_too_few(tmp_path: Path) -> None:
    written(lambda tf, v1: two_queues(tf, v1, rows=7), tmp_path)
    with pytest.raises(EndOfData, match="came to an end") as told:
        bench(tmp_path / "model.meta", streams=(1,), engine="tensorflow", settings=QUICK)
    assert "5 steps or more" in told.value.fix
    short = (
        "--measure",
        "duration=0",
        "--measure",
        "warmup=0",
        "--measure",
        "builds=1",
        "--streams",
        "1",
        "--engine",
        "tensorflow",
    )
    done = msplit("bench", tmp_path / "model.meta", "--part", "outputs=y", *short)
    assert (done.code, done.out) == (2, "")
    assert "came to an end" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1"])
def test_a_timeout_is_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(MsplitError, match="the timeout is"):
        TensorFlowOptions(timeout=seconds)


def test_a_damaged_collection_is_told(tmp_path: Path) -> None:
    flat = written(two_queues, tmp_path)
    flat.model.meta.collection_def["queue_runners"].bytes_list.value[0] = b"\xff\xff"
    with pytest.raises(EngineError, match="'queue_runners' is damaged"):
        opened(flat)


def test_a_pool_of_the_cuda_engine_tells_the_end_of_data_and_what_takes_too_long(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def ones(tf: Any, v1: Any) -> None:  # always the same: a pool is held against itself
        one = v1.train.input_producer(tf.ones([60]), num_epochs=1, shuffle=False, name="ones").dequeue()
        tf.multiply(one, 2.0, name="y")
        v1.local_variables_initializer()

    own = TensorFlowOptions(timeout=0.3)
    request = {"engine": "cuda", "device": "cpu", "streams": (1,), "effort": "fast", "tensorflow": own}
    with pool(written(ones, tmp_path), **request, groups=1) as running:
        futures = [running.submit({}) for _ in range(61)]
        problems = [future.exception(30) for future in futures]
    answered = problems.count(None)
    assert answered > 10  # some were read to make it ready
    assert {float(future.result()["y"]) for future in futures[:answered]} == {2.0}
    assert all(isinstance(problem, EndOfData) for problem in problems[answered:])
    with pytest.raises(TimedOut, match="DeadlineExceeded"):
        pool(written(empty, tmp_path), **request, groups=1)
