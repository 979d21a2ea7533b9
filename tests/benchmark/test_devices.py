"""`devices` of a request: what `prepare` and `bench` make of it on simulated GPUs, and what they refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.assignment.model import price
from msplit.benchmark.benchmark import bench_for
from msplit.benchmark.diagnose import sharing_loses
from msplit.cli.output import tell
from msplit.cost.profile import Workload
from msplit.errors import MsplitError
from msplit.inputs.make import feeds_for
from msplit.run.request import RunRequest
from msplit.run.setup import BenchRequest

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
    told: list[str] = []
    found = msplit.bench(
        SAMPLE,
        progress=lambda what, _: told.append(what),
        **dict(TWO, settings=msplit.Settings(duration=0.02, warmup=0, builds=1, min_rounds=2, verify_inputs=1)),
    )
    (loses,) = (note for note in found.notes if note.startswith("2 GPUs can hardly share a step"))
    assert told[0] == loses, "it is told before anything is compiled or measured"
    *others, last = found.result.variants
    assert last.label.endswith("2 simulated GPUs")
    one = last.label.removesuffix(", 2 simulated GPUs")
    assert one in {variant.label for variant in others}
    assert {check.against for check in last.checks} == {one, "the graph op by op"}
    assert {ratio.over for ratio in last.ratios} == {found.result.baseline, one}
    assert not found.result.failed
    assert last.facts["devices"] == ["cpu:0", "cpu:1"]


def test_a_command_warns_before_it_compiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Compiles(Exception):
        """Ends the command."""

    def compiled(*_: Any) -> None:
        raise Compiles

    monkeypatch.setattr("msplit.benchmark.benchmark.compiled", compiled)
    with pytest.raises(Compiles):
        bench_for(SAMPLE, BenchRequest.of(**TWO), warn=tell)
    assert capsys.readouterr().err.startswith("2 GPUs can hardly share a step and gain: by the cost model it takes ")


def test_what_sharing_costs_is_held_against_what_it_saves() -> None:
    """By the cost model: the shortest that a step may take on one GPU, the start on each further one, and the copies."""
    flat = msplit.load(SAMPLE)

    def said(batch: int, gpus: int) -> str:
        return sharing_loses(flat, price(flat, Workload(batch))[1], gpus)

    found = re.search(
        r"takes ([\d,]+) µs on one GPU at best, .* saves ([\d,]+) µs; .* takes 84 µs, and copies 54 µs", said(5, 4)
    )
    assert found is not None
    one, saved = map(float, found.groups())
    assert saved == pytest.approx(one * 3 / 4, abs=1)
    assert said(1 << 22, 2) == ""


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
