"""While a step runs, the next one's batch is on its way to the device; nothing else changes by it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.engines.base import Feeds
from msplit.errors import EngineError, LoadError
from msplit.training.batches import Prefetched
from msplit.training.trainer import Trainer
from tests.training.models import batches, regression

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """With dropout: numbers that count steps are inputs, too."""
    model = regression(tmp_path_factory.mktemp("model") / "model.meta", dropout=0.5)
    request = {"engine": "cuda", "device": "cpu", "streams": (2,), "precision": "ieee", "effort": "fast"}
    with msplit.Trainer(model, "train_op", ["loss"], **request) as found:
        found.prepare(batches(1)[0])
        yield found


@pytest.fixture
def begin(trainer: Trainer, tmp_path: Path) -> Any:
    """Goes back to where the test began, dropout included."""
    path = trainer.save(tmp_path / "model")

    def again() -> Trainer:
        trainer.restore(path)
        return trainer

    return again


def losses_and_state(trainer: Trainer, losses: list[Any]) -> tuple[list[float], dict[str, bytes]]:
    return [float(loss) for loss in losses], {name: value.tobytes() for name, value in trainer.variables.items()}


def one_by_one(trainer: Trainer, feeds: list[Feeds]) -> Any:
    return losses_and_state(trainer, [trainer.step(one)["loss"] for one in feeds])


def test_steps_are_the_same_to_the_bit(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    feeds, sent = batches(8), []
    expected = one_by_one(begin(), feeds)
    assert len(set(expected[0])) == 8
    trainer = begin()
    assert trainer.runner is not None
    step = trainer.runner.step
    monkeypatch.setattr(
        trainer.runner, "step", lambda feeds, **named: sent.append(named["then"]) or step(feeds, **named)
    )
    losses = []
    for one in trainer.each(iter(feeds)):
        losses.append(one.values["loss"])
        time.sleep(0.01)  # in which the next is made
    assert losses_and_state(trainer, losses) == expected
    assert [one for one in sent if one is not None]
    monkeypatch.undo()
    trainer = begin()
    following = [*feeds[1:], None]
    losses = [trainer.step(one, then=then)["loss"] for one, then in zip(feeds, following, strict=True)]
    assert losses_and_state(trainer, losses) == expected
    trainer = begin()
    on_device = [
        trainer.step(one, then=then, on_device=True)["loss"].numpy() for one, then in zip(feeds, following, strict=True)
    ]
    assert losses_and_state(trainer, on_device) == expected


def test_what_is_done_between_two_steps_counts_for_the_second(begin: Any) -> None:
    """Other variables, another batch in between, a checkpoint that is restored: the next batch is on the device already."""
    one, two, three = batches(3)
    trainer = begin()
    trainer.step(one)
    trainer.load({"bias": np.array(3, np.float32)})
    expected = one_by_one(trainer, [three, two])
    trainer = begin()
    trainer.step(one, then=two)
    trainer.load({"bias": np.array(3, np.float32)})
    assert losses_and_state(trainer, [trainer.step(three)["loss"], trainer.step(two)["loss"]]) == expected
    expected = one_by_one(begin(), [two])
    trainer.step(one, then=two)
    assert one_by_one(begin(), [two]) == expected


def test_a_generator_may_write_its_arrays_over(begin: Any) -> None:
    feeds = batches(6)
    expected = one_by_one(begin(), feeds)
    kept = {name: np.empty_like(value) for name, value in feeds[0].items()}

    def written_over() -> Iterator[Feeds]:
        for one in feeds:
            for name, value in one.items():
                kept[name][...] = value
            yield kept

    trainer = begin()
    found = [fetched.values["loss"] for fetched in trainer.each(written_over())]
    assert losses_and_state(trainer, found) == expected


@pytest.mark.parametrize("wrong", ["raised", "another shape", "another type", "missing"])
def test_what_is_wrong_with_the_data_is_said_at_its_own_step(begin: Any, wrong: str) -> None:
    good = batches(4)
    expected = one_by_one(begin(), good[:3])

    def data() -> Iterator[Feeds]:
        yield from good[:3]
        if wrong == "raised":
            raise LoadError("the disk is gone")
        x = good[3]["x"]
        yield {
            "another shape": {**good[3], "x": x[:4]},
            "another type": {**good[3], "x": x.astype(np.float64)},
            "missing": {"x": x},
        }[wrong]

    trainer, losses = begin(), list[Any]()
    first = trainer.steps
    with pytest.raises((LoadError, EngineError), match=r"the disk is gone|input x was prepared as|no value for input"):
        losses.extend(one.values["loss"] for one in trainer.each(data()))
    assert trainer.steps == first + 3
    assert losses_and_state(trainer, losses) == expected
    assert np.isfinite(float(trainer.step(good[3])["loss"]))


def test_the_next_batch_is_looked_at_and_stays_the_next() -> None:
    found = Prefetched(iter([{"x": 1}, {"x": 2}]))
    first = None
    while first is None:  # not waited for
        first = found.upcoming()
    assert found.upcoming() is first
    assert next(found) is first == {"x": 1}
    assert next(found) == {"x": 2}
    assert found.upcoming() is None
    assert list(found) == []
    assert found.upcoming() is None
    found.close()
