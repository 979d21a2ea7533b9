"""What the functions of the library take, and how their results show themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.api import TuneSettings, compare
from msplit.engines.base import refuse
from msplit.errors import EngineError
from msplit.run.request import RunRequest
from tests.cli.runner import SAMPLES

MODEL = SAMPLES / "towers_small.pb"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: msplit.assign(MODEL, streams=-2), "the number of streams is -2"),
        (lambda: msplit.assign(MODEL, streams=0), "the number of streams is 0"),
        (lambda: msplit.assign(MODEL, streams=4096), "the number of streams is 4096"),
        (lambda: msplit.assign(MODEL, streams=2.5), "2.5, which is no integer"),  # type: ignore[arg-type]
        (lambda: msplit.assign(MODEL, msplit_rules(), streams=-2), "the number of streams is -2"),
        (lambda: msplit.analyze(MODEL, batch=0), "the batch is 0"),
        (lambda: msplit.analyze(MODEL, batch="8"), "'8', which is no integer"),  # type: ignore[arg-type]
        (lambda: msplit.analyze(MODEL, shapes={"id_0": (-1,)}), "negative size"),
        (lambda: msplit.check(MODEL, batch=-1), "batch is -1"),
        (lambda: msplit.check(MODEL, streams=0), "streams is 0"),
        (lambda: compare(MODEL, streams=-1), "the number of streams is -1"),
        (lambda: RunRequest.of(streams=(1, -2)), "the number of streams is -2"),
        (lambda: RunRequest.of(batch=0), "the batch is 0"),
        (lambda: RunRequest.of(seed=-1), "the seed is -1"),
        (lambda: msplit.Settings(builds=0), "builds is 0"),
        (lambda: msplit.Settings(duration=float("nan")), "duration is nan"),
        (lambda: msplit.Settings(tolerance=-1.0), "tolerance is -1.0"),
        (lambda: msplit.CheckSettings(fork_streams=-3), "fork_streams is -3"),
        (lambda: TuneSettings(max_memory=0), "max_memory is 0"),
        (lambda: RunRequest.of(batch=-1), "the batch is -1"),
    ],
)
def test_numbers_out_of_range_are_told_before_any_work(call: Any, words: str) -> None:
    with pytest.raises(msplit.MsplitError) as caught:
        call()
    assert words in caught.value.what
    assert "0 to -" not in str(caught.value)
    assert caught.value.fix


def msplit_rules() -> Any:
    from msplit import rules

    return rules.load("default")


def test_numpy_integers_are_integers() -> None:
    assert msplit.assign(MODEL, streams=np.int64(2), batch=np.int32(8)).outcome.streams == 2  # type: ignore[arg-type]


def test_a_path_is_a_model(tmp_path: Path) -> None:
    assert msplit.analyze(str(MODEL)).kernels == msplit.analyze(msplit.load(MODEL)).kernels
    assigned = msplit.assign(MODEL, "recsys", streams=2)
    msplit.save(MODEL, assigned.ids, tmp_path / "out.pb")
    assert not msplit.check(tmp_path / "out.pb", ruleset="recsys", streams=2).failed
    assert compare(str(MODEL), measure=False).rows
    with pytest.raises(msplit.MsplitError, match="int is no model"):
        msplit.analyze(3)  # type: ignore[arg-type]
    with pytest.raises(msplit.MsplitError, match="no such"):
        msplit.check(tmp_path / "gone.pb")


def test_check_takes_what_settings_say() -> None:
    flat = msplit.load(SAMPLES / "annotated.pb")
    settings = msplit.CheckSettings(select=("MS001",), streams=64)
    assert msplit.check(flat, settings).findings == ()
    assert msplit.check(flat, settings, streams=2).failed
    assert msplit.check(flat, batch=7, gpu="a100").assumed != msplit.check(flat).assumed


def test_results_show_themselves_in_short_and_escaped(tmp_path: Path) -> None:
    place = tmp_path / "<img src=x>\x1b[31m.pb"
    try:
        place.write_bytes(MODEL.read_bytes())
    except OSError:
        pytest.skip("such a name is not allowed here")
    flat = msplit.load(place)
    for result in (flat, msplit.analyze(flat), msplit.assign(flat), msplit.check(flat)):
        text, page = repr(result), result._repr_html_()
        assert len(text) < 600
        assert type(result).__name__ in text
        assert "\n" not in text
        assert "\x1b" not in text + page
        assert "<img" not in page
    found = msplit.analyze(flat)
    assert "predicted" not in repr(found)
    assert found.judgement.helps
    assert f"{found.judgement.gain:.2f}x on {found.judgement.streams} streams" in repr(found)


def test_one_contract_for_what_is_fed() -> None:
    inputs = {"x": ("float32", (2, 3)), "text": ("object", (1,))}
    x, text = np.zeros((2, 3), np.float32), np.asarray(["a"])
    refuse({"x": x, "text": text}, inputs)
    refuse({"x": x, "text": text.astype(object)}, inputs)
    for feeds, words in (
        ({"x": x}, "no value for input text"),
        ({"x": x, "text": text, "y": x}, "no input 'y'"),
        ({"x": x[:1], "text": text}, "was prepared as float32"),
        ({"x": x.astype(np.float64), "text": text}, "was prepared as float32"),
        ({"x": [[0.0] * 3] * 2, "text": text}, "a list, not an array"),
        ({"x": x, "text": x}, "input text was prepared as object"),
    ):
        with pytest.raises(EngineError, match=words):
            refuse(feeds, inputs)
