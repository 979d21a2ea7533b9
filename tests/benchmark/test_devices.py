"""`devices` of a request: what `prepare` and `bench` make of it on simulated GPUs, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.cost.profile import Workload
from msplit.errors import MsplitError
from msplit.inputs.make import feeds_for
from msplit.run.request import RunRequest

pytest.importorskip("torch")
pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

SAMPLE = Path(__file__).parents[2] / "sample_graphs" / "towers_small.pb"
LOOKUP = SAMPLE.parent / "keras_lookup"
ONE = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast", "batch": 5}
TWO = dict(ONE, devices=(0, 1))


@pytest.mark.parametrize("sample", [SAMPLE, LOOKUP], ids=lambda path: path.stem)
def test_a_prepared_model_shares_its_rows(sample: Path) -> None:
    """Also one of which the host runs a part."""
    flat = msplit.load(sample)
    feeds = feeds_for(flat, Workload(ONE["batch"]), seed=3)
    with msplit.prepare(flat, **ONE) as one, msplit.prepare(flat, **TWO) as two:
        assert two.label == f"{one.label}, 2 simulated GPUs"
        assert (two.facts["devices"], two.facts["step_rows"]) == (["cpu:0", "cpu:1"], 3)
        assert two.checks, "it is held against one stream of one GPU"
        assert all(check.passed for check in two.checks)
        assert two.inputs == one.inputs
        for name, value in one.step(feeds).items():
            np.testing.assert_allclose(two.step(feeds)[name], value, rtol=1e-5, atol=1e-6)
    with msplit.prepare(flat, **TWO, variant=two.label) as again:
        assert again.label == two.label


def test_a_single_one_is_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with msplit.prepare(SAMPLE, **dict(ONE, devices=(3,))) as runner:
        assert "devices" not in runner.facts
        assert "simulated GPUs" not in runner.label


def test_a_bench_has_a_row_of_all_gpus_beside_the_same_on_one() -> None:
    found = msplit.bench(
        SAMPLE, **dict(TWO, settings=msplit.Settings(duration=0.02, warmup=0, builds=1, min_rounds=2, verify_inputs=1))
    )
    *others, last = found.result.variants
    assert last.label.endswith("2 simulated GPUs")
    one = last.label.removesuffix(", 2 simulated GPUs")
    assert one in {variant.label for variant in others}
    assert {check.against for check in last.checks} == {one, "the graph op by op"}
    assert {ratio.over for ratio in last.ratios} == {found.result.baseline, one}
    assert not found.result.failed
    assert last.facts["devices"] == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"devices": (0, 1), "batch": 1}, "2 devices can not share a batch of 1"),
        ({"devices": (0, 1), "engine": "tensorflow"}, "devices is for the cuda engine; asked for"),
    ],
)
def test_what_can_not_be_is_told_before_anything_is_compiled(
    asked: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msplit.run.prepare.compiled", None)
    with pytest.raises(MsplitError, match=said):
        msplit.prepare(SAMPLE, **dict(ONE, **asked))


@pytest.mark.parametrize("devices", [(-1,), (0, 0), (0.5,)])
def test_numbers_that_are_none(devices: Any) -> None:
    with pytest.raises(MsplitError):
        RunRequest.of(**dict(ONE, devices=devices))
