"""Other values for a runner: taken over whole between two steps, or refused with the old ones in their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import msplit
from msplit.engines.cuda.ir import program
from msplit.engines.cuda.stored import renewal
from msplit.errors import Closed, EngineError, LoadError, MsplitError
from msplit.run import renew
from tests.cli.runner import SAMPLES
from tests.updating import check, expected, feeds_of, saved, values_of, version_of

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

SIMULATED = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    folder = tmp_path_factory.mktemp("versions")
    return {version: saved(folder / str(version), version) for version in (1, 2, 3)}


@pytest.fixture(scope="module")
def unchanged(models: Mapping[int, Path]) -> Iterator[Any]:
    """For what is refused."""
    with msplit.prepare(models[1], **SIMULATED, batch=4) as made:
        yield made


@pytest.fixture
def runner(models: Mapping[int, Path]) -> Iterator[Any]:
    with msplit.prepare(models[1], **SIMULATED, batch=4) as made:
        yield made


def test_a_model_and_back_without_a_capture(runner: Any, models: Mapping[int, Path]) -> None:
    before = runner.executable
    for version in (2, 3, 1):
        update = runner.update(models[version])
        assert (update.captured, update.bytes > 0) == (False, True)
        assert [(one.against, one.passed) for one in update.checks] == [("TensorFlow on the CPU", True)]
        for rows in (4, 0, 9):
            check(runner.step, values_of(version), rows, seed=version)
    assert runner.executable is before
    assert runner.update(models[1]).bytes == 0


def test_folded_constants_and_outputs_that_need_no_run_are_made_again(runner: Any) -> None:
    """1 / scale is a constant on the device, 2 * scale an output that no step computes."""
    update = runner.update({"scale": np.float32(5)})
    assert update.bytes < 200
    values = values_of(1) | {"scale": np.float32(5)}
    check(runner.step, values)
    assert runner.step(feeds_of(4))["known"] == 10


def test_what_stays_as_it_is_lies_there_once(runner: Any, models: Mapping[int, Path], monkeypatch: Any) -> None:
    seen: list[tuple[Any, Any]] = []
    of = renewal.Renewal.of
    monkeypatch.setattr(program, "_LEAST", 1)
    monkeypatch.setattr(program, "_AT_ONCE", 100)
    monkeypatch.setattr(
        renewal.Renewal, "of", lambda live, new: seen.extend(zip(live, new, strict=True)) or of(live, new)
    )
    update = runner.update({"w2": values_of(2)["w2"]})
    live, new = seen.pop()
    shared = {tuple(live.constants[key].shape) for key, one in new.constants.items() if one is live.constants[key]}
    assert (50, 4) in shared
    assert (8, 2) not in shared
    assert update.bytes == 8 * 2 * 4
    check(runner.step, values_of(1) | {"w2": values_of(2)["w2"]}, 9)
    values = values_of(1) | {"b": values_of(1)["b2"], "b2": values_of(1)["b"]}  # one has the other's values
    for version, wanted in ((1, values_of(1)), (2, values_of(2)), (1, values_of(1))):
        runner.update(models[version])
        check(runner.step, wanted, 9)
    runner.update({"b": values["b"], "b2": values["b2"]})
    check(runner.step, values, 9)


def test_a_checkpoint_has_values_of_all_variables(runner: Any, models: Mapping[int, Path]) -> None:
    for name in (models[2] / "variables" / "variables", f"{models[2]}/variables/variables.index"):
        runner.update(models[1])
        assert not runner.update(name).captured
        check(runner.step, values_of(2))


def test_rows_of_a_table_on_top_of_what_is_there(runner: Any, models: Mapping[int, Path]) -> None:
    values = values_of(1)
    for number in range(3):
        ids, rows = np.array([3 + number, 7]), np.full((2, 4), number, np.float32)
        runner.update(rows={"table": (ids, rows)})
        values["table"][ids] = rows
        for seed in range(3):
            check(runner.step, values, 9, seed)
    values = values_of(2)
    values["table"][[0]] = 4.0
    runner.update(models[2], rows={"table": ([0], np.full((1, 4), 4, np.float32))})
    check(runner.step, values, 9)


def no_compiler(*arguments: Any, **named: Any) -> None:
    raise AssertionError("the model was made again")


def test_rows_that_are_only_looked_up_are_copied_alone(runner: Any, monkeypatch: Any) -> None:
    """Of a row that is given twice the later one counts; a run whose ids are these rows is held against TensorFlow."""
    monkeypatch.setattr(type(renew.CUDA), "compile", no_compiler)
    seen, right = list[Any](), renew.reference
    monkeypatch.setattr(
        renew, "reference", lambda flat, feeds, **named: (seen.append(feeds), right(flat, feeds, **named))[1]
    )
    values, rng = values_of(1), np.random.default_rng(0)
    for number in range(3):
        ids, rows = rng.integers(0, 50, 5).astype((np.int64, np.int32)[number % 2]), rng.random((5, 4), np.float32)
        update = runner.update(rows={"table": (ids, rows)})
        for place, row in zip(ids, rows, strict=True):
            values["table"][place] = row
        assert (update.bytes, update.captured) == (16 * len(set(ids.tolist())), False)
        assert [(one.against, one.passed) for one in update.checks] == [("TensorFlow on the CPU", True)]
        assert set(seen[-1]["ids"].tolist()) <= set(ids.tolist())
        check(runner.step, values, 9, number)
    assert runner.update(rows={"table": (np.zeros(0, np.int64), np.zeros((0, 4), np.float32))}).bytes == 0


def test_rows_of_what_is_more_than_looked_up_are_taken_in_the_general_way(runner: Any, tmp_path: Path) -> None:
    values, row = values_of(1), np.full((1, 8), 3, np.float32)
    runner.update(rows={"w": ([2], row)})
    values["w"][2] = row
    check(runner.step, values, 9)

    import tensorflow as tf

    class Model(tf.Module):  # type: ignore[misc]
        """A table that is looked up, and of which a constant is folded."""

        def __init__(self) -> None:
            self.table = tf.Variable(np.ones((9, 2), np.float32), name="table")

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
        def run(self, ids: Any) -> Any:
            return {"y": tf.gather(self.table, ids) + tf.reduce_max(self.table)}

    made = Model()
    tf.saved_model.save(made, str(tmp_path), signatures=made.run)
    with msplit.prepare(tmp_path, **SIMULATED, batch=4) as folded:
        folded.update(rows={"table": ([4], np.full((1, 2), 8, np.float32))})
        assert folded.step({"ids": np.array([0, 4, 8, 4])})["y"].tolist() == [[9, 9], [16, 16], [9, 9], [16, 16]]


def test_rows_that_are_wrong_are_put_back(runner: Any, monkeypatch: Any) -> None:
    values, new = values_of(1), np.full((2, 4), 7, np.float32)
    with pytest.raises(EngineError, match="rows of table have numbers that are not finite, and had none"):
        runner.update(rows={"table": ([3, 4], np.full((2, 4), np.nan, np.float32))})
    right = renew.reference
    monkeypatch.setattr(
        renew, "reference", lambda *given, **named: {k: v + 1 for k, v in right(*given, **named).items()}
    )
    with pytest.raises(EngineError, match="gives other outputs than TensorFlow on the CPU"):
        runner.update(rows={"table": ([3, 4], new)})
    feeds = feeds_of(4) | {"ids": np.array([3, 4, 3, 4])}
    np.testing.assert_allclose(runner.step(feeds)["y"], expected(values, feeds)["y"], rtol=1e-4, atol=1e-4)
    monkeypatch.undo()
    runner.update(rows={"table": ([3, 4], new)})
    values["table"][[3, 4]] = new
    np.testing.assert_allclose(runner.step(feeds)["y"], expected(values, feeds)["y"], rtol=1e-4, atol=1e-4)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "no variable": ({"nope": np.float32(1)}, None, "no variable 'nope'.*\n.*its variables are: b, b2"),
    "shape": ({"w": np.zeros((7, 9), np.float32)}, None, r"variable 'w' is \[7, 8\], there \[7, 9\]"),
    "type": ({"w": np.zeros((7, 8))}, None, "variable 'w' is float32, there float64"),
    "no rows": (None, {"table": ([50], np.zeros((1, 4), np.float32))}, "table has 50 rows, and no row 50"),
    "row of another width": (None, {"table": ([1], np.zeros((1, 5), np.float32))}, r"float32 \(1, 5\), not"),
    "rows of another type": (None, {"table": ([1], np.zeros((1, 4)))}, "rows of table are float64"),
    "rows of no variable": (None, {"nope": ([1], np.zeros((1, 4)))}, "no variable 'nope'"),
    "rows by names": (None, {"table": (["a"], np.zeros((1, 4)))}, "rows of table are given by numbers"),
    "nothing": (None, None, "there are no values"),
    "no file": ("no/such/model", None, "there is no such file"),
    "a number": (3, None, "int has no values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(unchanged: Any, name: str) -> None:
    source, rows, words = WRONG[name]
    with pytest.raises(MsplitError, match=f"(?s){words}"):
        unchanged.update(source, rows=rows)
    check(unchanged.step, values_of(1))


def test_another_model_is_refused_with_what_differs(unchanged: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"is float32 \(.*9.*\), and was float32 \(.*8"):
        unchanged.update(saved(tmp_path / "wide", 2, width=9))
    with pytest.raises(EngineError, match=r"the model has other inputs: .*, and not .*ids"):
        unchanged.update(Path(__file__).parents[2] / "sample_graphs" / "mmoe_small.pb")
    check(unchanged.step, values_of(1))


def test_wrong_outputs_are_refused_and_change_nothing(runner: Any, models: Any, monkeypatch: Any) -> None:
    right = renew.reference

    def wrong(*arguments: Any, **named: Any) -> Any:
        return {name: value + 1 for name, value in right(*arguments, **named).items()}

    monkeypatch.setattr(renew, "reference", wrong)
    with pytest.raises(EngineError, match="gives other outputs than TensorFlow on the CPU"):
        runner.update(models[2])
    check(runner.step, values_of(1))
    monkeypatch.undo()
    runner.update(models[2])
    check(runner.step, values_of(2))


def test_without_tensorflow_it_is_held_against_plain_ops(runner: Any, models: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(renew.TENSORFLOW), "unavailable", lambda self: "it is not there")
    assert [one.against for one in runner.update(models[2]).checks] == ["the same ops one by one"]
    check(runner.step, values_of(2))


def test_values_that_make_another_program_bring_it_with_them(runner: Any, models: Mapping[int, Path]) -> None:
    """Biases of zeros are left out."""
    zeros = {"b": np.zeros(8, np.float32), "b2": np.zeros(8, np.float32)}
    before = runner.executable
    assert runner.update(zeros).captured
    assert runner.executable is not before
    check(runner.step, values_of(1) | zeros, 9)
    assert runner.update(models[3]).captured
    check(runner.step, values_of(3), 9)


@pytest.mark.parametrize("more", [{"engine": "tensorflow"}, {"devices": (0, 1)}], ids=["tensorflow", "two GPUs"])
def test_what_is_no_single_program_is_taken_over_whole(models: Any, more: Any) -> None:
    with msplit.prepare(models[1], **{**SIMULATED, **more}, batch=4) as runner:
        assert runner.update(models[2]).captured
        check(runner.step, values_of(2), 9)
        runner.update(rows={"table": ([1, 2], np.ones((2, 4), np.float32))})
        values = values_of(2)
        values["table"][[1, 2]] = 1
        check(runner.step, values, 9)


def test_files_that_were_replaced_are_no_base_for_a_part(models: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "model", 1)
    with msplit.prepare(path, **SIMULATED, batch=4) as runner:
        saved(path, 2)
        with pytest.raises(EngineError, match="files are no longer those that it was made of"):
            runner.update(rows={"table": ([1], np.ones((1, 4), np.float32))})
        check(runner.step, values_of(1))
        runner.update(path)
        check(runner.step, values_of(2))


def test_a_build_takes_the_values_of_another_one(models: Mapping[int, Path], tmp_path: Path) -> None:
    for version in (1, 2):
        msplit.build(models[version], tmp_path / str(version), **SIMULATED, batches=[1, 4])
    msplit.build(models[2], tmp_path / "other", **SIMULATED, batches=[1, 8])
    with msplit.open(tmp_path / "1") as runner:
        assert (runner.update(tmp_path / "2").captured, runner.update(tmp_path / "2").bytes) == (False, 0)
        for rows in (0, 1, 3, 9):
            check(runner.step, values_of(2), rows)
        for source, rows, words in (
            (models[1], None, "is no build"),
            (tmp_path / "other", None, "other batches"),
            ({"w": np.zeros((7, 8), np.float32)}, None, "takes the values of another build"),
            (None, {"table": ([1], np.zeros((1, 4), np.float32))}, "takes the values of another build"),
        ):
            with pytest.raises((EngineError, LoadError), match=words):
                runner.update(source, rows=rows)
        check(runner.step, values_of(2))


def test_steps_beside_updates_have_one_version_each(runner: Any, models: Mapping[int, Path]) -> None:
    seen: list[float] = []
    problems: list[BaseException] = []
    stop = threading.Event()

    def client() -> None:
        try:
            number = 0
            while not stop.is_set():
                feeds = feeds_of((4, 9)[number % 2], number)
                outputs = runner.step(feeds)
                version = version_of(outputs)
                wanted = expected(values_of(int(version)), feeds)["y"]
                np.testing.assert_allclose(outputs["y"], wanted, rtol=1e-4, atol=1e-4)
                seen.append(version)
                number += 1
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in (2, 3, 1, 2):
        runner.update(models[version])
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert {1.0, 2.0, 3.0} <= set(seen)


def test_a_model_that_is_closed_or_trains_takes_none(models: Mapping[int, Path]) -> None:
    runner = msplit.prepare(models[1], **SIMULATED, batch=4)
    runner.close()
    with pytest.raises((Closed, EngineError)):
        runner.update(models[2])


def test_the_same_nodes_in_another_order_are_told_as_such(tmp_path: Path) -> None:
    """The message named no node: it had `other nodes: [], and not []`."""
    from tensorflow.core.framework import graph_pb2

    graph = graph_pb2.GraphDef.FromString((SAMPLES / "towers_small.pb").read_bytes())
    nodes = list(graph.node)
    nodes.insert(6, nodes.pop(10))  # two constants
    turned = graph_pb2.GraphDef(node=nodes, versions=graph.versions)
    (tmp_path / "turned.pb").write_bytes(turned.SerializeToString())
    one, other = msplit.load(SAMPLES / "towers_small.pb"), msplit.load(tmp_path / "turned.pb")
    with pytest.raises(EngineError, match="nodes in another order"):
        renew._refuse_other(one, other)
