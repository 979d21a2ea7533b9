"""Rows of any length in pools and servers: requests of several lengths share steps, and each gets what TensorFlow gives at its own length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msplit
from msplit.errors import EngineError, MsplitError
from tests.campaign import examples
from tests.run.test_lengths import LONGEST, SIMULATED, TOLERANCE, D, attention, history, model, norm, places, row, run
from tests.serving.server.running import Server, start

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

LENGTHS, BATCHES = (2, 4, LONGEST), (1, 4)
SPECIAL = (np.nan, np.inf, -np.inf, 3e38, -0.0)
Feeds = dict[str, Any]


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model(tmp_path_factory.mktemp("model"), (places, attention, norm, history))


@pytest.fixture(scope="module")
def built(flat: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("build") / "encoder"
    msplit.build(flat, path, batches=BATCHES, lengths=LENGTHS, **SIMULATED)
    return path


@pytest.fixture(scope="module")
def pool(built: Path) -> Iterator[Any]:
    with msplit.pool(built, groups=2, max_rows=12) as opened:
        yield opened


def request(rows: int, length: int, seed: int) -> Feeds:
    some = [row(length, 100 * seed + number) for number in range(max(rows, 1))]
    return {name: np.concatenate([one[name] for one in some])[:rows] for name in ("x", "mask")}


def right(got: Feeds, expected: Feeds) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), name
        np.testing.assert_allclose(got[name], value, **TOLERANCE)


def answered(pool: Any, requests: Sequence[Feeds], flat: Any) -> None:
    """All of these wait together, so that they share steps, and each is right."""
    with pool._steps.paused(pool._driver.drive):
        waiting = [pool.submit(one) for one in requests]
    for future, one in zip(waiting, requests, strict=True):
        right(future.result(60), run(flat, one))


SIZES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, LONGEST)), min_size=1, max_size=8)


@given(SIZES, st.integers(0, 1000))
@settings(max_examples=examples(15, 400), deadline=None)
def test_requests_of_any_rows_and_length_share_steps(flat: Any, pool: Any, sizes: list[tuple[int, int]], seed: int) -> None:
    """Those of more rows than a step has are cut, and those of none are answered with none."""
    answered(pool, [request(rows, length, seed + number) for number, (rows, length) in enumerate(sizes)], flat)


@given(SIZES, st.sampled_from(SPECIAL), st.sampled_from(["x", "mask"]), st.data())
@settings(max_examples=examples(10, 300), deadline=None)
def test_special_values_reach_no_other_row(
    flat: Any, pool: Any, sizes: list[tuple[int, int]], value: float, name: str, data: st.DataObject
) -> None:
    """Not from the padding either, which is made of them where they come first."""
    requests = [request(rows, length, number) for number, (rows, length) in enumerate(sizes)]
    spoilt = [one for one in requests if one[name].size and data.draw(st.booleans())]
    for one in spoilt:
        one[name][:, data.draw(st.sampled_from([0, -1]))] = value
    with pool._steps.paused(pool._driver.drive):
        waiting = [pool.submit(one) for one in requests]
    for future, one in zip(waiting, requests, strict=True):
        got, alone = future.result(60), pool.step(one)
        for output in got:  # in whatever company, and padded to whatever length
            np.testing.assert_allclose(got[output], alone[output], **TOLERANCE)
        if not any(one is other for other in spoilt):
            right(got, run(flat, one))


def test_every_length_in_every_company(flat: Any, pool: Any) -> None:
    before = dict(pool.scheduler.steps_of)
    assert before.keys() == set(itertools.product(LENGTHS, BATCHES))
    for length in range(1, LONGEST + 1):
        answered(pool, [request(1, length, 7), request(2, max(length // 2, 1), 8), request(9, length, 9)], flat)
        right(pool.step(request(1, length, 7)), run(flat, request(1, length, 7)))
    assert all(count > before[size] for size, count in pool.scheduler.steps_of.items())
    assert (pool.lengths, pool.batches) == (LENGTHS, BATCHES)
    assert {name: port.shape for name, port in pool.inputs.items()} == {"x": (None, None, D), "mask": (None, None)}
    assert pool.outputs["every"].shape == (None, None, D)


def test_a_long_request_makes_no_short_one_longer(flat: Any, pool: Any) -> None:
    before = dict(pool.scheduler.steps_of)
    answered(pool, [request(1, 2, 1), request(2, 8, 2), request(1, 1, 3), request(1, 4, 4)], flat)
    made = {size: count - before[size] for size, count in pool.scheduler.steps_of.items() if count > before[size]}
    assert made == {(2, 4): 1, (8, 4): 1}, "four rows hold two of length 8, and one of 4 in place of padding"


def test_what_is_no_length(pool: Any) -> None:
    x, mask = request(2, LONGEST, 0).values()
    longer = np.concatenate([x, x], 1)
    for feeds, said in (
        ({"x": longer, "mask": np.concatenate([mask, mask], 1)}, r"rows are 16 long, and lengths up to 8.*\(--lengths\)"),
        ({"x": x[:, :0], "mask": mask[:, :0]}, "rows are 0 long"),
        ({"x": x, "mask": mask[:, :3]}, "no rows of one length"),
        ({"x": x, "mask": mask[:1]}, "different numbers of rows"),
        ({"x": x[:, :3, :2], "mask": mask[:, :3]}, r"prepared as float32 \(2, 3, 4\)"),
        ({"x": x.astype(np.float64), "mask": mask}, "float64"),
        ({"x": x, "mask": mask, "lengths": np.ones(2, np.int32)}, "not the model's"),
        ({"x": x, "mask": mask, "other": mask}, "no input 'other'"),
        ({"x": x}, "no rows of one length"),
        ({"x": x[:, :, 0], "mask": mask}, "prepared as float32"),
        (dict(zip(("x", "mask"), request(13, 2, 0).values(), strict=True)), "max_rows"),
        ([x, mask], "mapping"),
    ):
        with pytest.raises(EngineError, match=f"(?s){said}"):
            pool.submit(feeds)


def test_a_model_with_lengths(flat: Any) -> None:
    with msplit.pool(flat, lengths=[LONGEST, 3], batches=[1, 2], groups=1, **SIMULATED) as made:
        assert (made.lengths, made.polls) == ((3, LONGEST), True)
        answered(made, [request(rows, length, rows) for rows, length in ((1, 3), (5, 2), (1, 7))], flat)
        with pytest.raises(EngineError, match="takes no other values"):
            made.update(flat)
        on_device = made.submit(request(2, 5, 1), on_device=True).result()
        right({name: value.numpy() for name, value in on_device.items()}, run(flat, request(2, 5, 1)))


def test_what_lengths_do_not_go_with(flat: Any, built: Path) -> None:
    for own, said in (
        ({"model": built, "lengths": [4]}, "has the lengths that it was built with: 2, 4, 8"),
        ({"model": flat, "lengths": [0], **SIMULATED}, "length"),
        ({"model": flat, "lengths": [4], "engine": "tensorflow", "device": "cpu"}, "any length"),
        ({"model": flat, "lengths": [4], "shared": ["mask"], **SIMULATED}, "lengths excludes"),
        ({"model": "sample_graphs/mmoe_small.pb", "lengths": [4], **SIMULATED}, "leaves the length"),
    ):
        with pytest.raises(MsplitError, match=said):
            msplit.pool(**own)


def test_processes_take_rows_of_any_length(flat: Any, built: Path) -> None:
    with msplit.pool(built, workers=2, groups=1, max_rows=12) as made:
        requests = [request(rows, length, rows) for rows, length in itertools.product((0, 1, 3, 9), (1, 3, 8))]
        for future, one in [(made.submit(one), one) for one in requests]:
            right(future.result(60), run(flat, one))
        with pytest.raises(EngineError, match="rows are 9 long"):
            made.step(request(1, 9, 0))
        assert (made.lengths, made.stats().answered) == (LENGTHS, 18)  # of nine rows there are three parts
