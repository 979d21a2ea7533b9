"""Every answer is looked at, and one that is wrong on purpose is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import msplit
from msplit.core.arguments import Precision
from msplit.errors import MsplitError
from msplit.run.request import RunRequest
from msplit.serving.loadtest.corpus import Checker, Prepared, from_model, of_ports
from msplit.serving.loadtest.generator import SENT, Layout, RequestState, RequestTable, digest
from msplit.serving.pool.ports import Port
from msplit.verify.compare import compare
from tests.cli.runner import SAMPLES
from tests.serving.loadtest.fakes import ANSWERS, FEEDS, PREPARED, table


def answered(prepared: Prepared, count: int, checker: Checker) -> RequestTable:
    """A table with right answers."""
    del checker
    made = RequestTable(Layout(count, prepared.kept))
    made.request[:] = np.arange(count) % len(prepared.answers)
    made.status[:] = RequestState.DONE
    made.counters[SENT] = count
    for name, kept in prepared.kept.items():
        for row in range(count):
            value = prepared.answers[made.request[row]][name]
            made.outputs[name][row] = digest(value) if kept.dtype == "object" else value
    return made


def test_right_answers_are_right() -> None:
    checker = Checker(PREPARED, ANSWERS)
    verdict = checker.check(answered(PREPARED, 1000, checker))
    assert (verdict.checked, verdict.wrong, verdict.says) == (1000, 0, "")
    assert checker.told_apart() == len(ANSWERS)
    assert checker.wrong == ""


@pytest.mark.parametrize("row", [0, 17, 999])
def test_one_answer_of_another_request_is_found_among_all(row: int) -> None:
    checker = Checker(PREPARED, ANSWERS)
    made = answered(PREPARED, 1000, checker)
    asked = int(made.request[row])
    other = (asked + 5) % len(ANSWERS)
    for name in made.outputs:
        made.outputs[name][row] = ANSWERS[other][name]
    verdict = checker.check(made)
    assert verdict.wrong == 1
    assert verdict.says == f"request {row}, of the prepared ones {asked}, has the answer of {other}"


def test_one_wrong_number_is_found_and_named() -> None:
    checker = Checker(PREPARED, ANSWERS)
    made = answered(PREPARED, 100, checker)
    made.outputs["score"][42, 1] += 0.1
    made.outputs["id"][43] += 1
    made.outputs["score"][44] = np.nan
    verdict = checker.check(made)
    assert verdict.wrong == 3
    assert verdict.says.startswith("request 42: score: 1 of 2 elements differ; score[1] is ")


def test_what_has_no_answer_is_none() -> None:
    checker = Checker(PREPARED, ANSWERS)
    made = answered(PREPARED, 10, checker)
    made.status[3] = RequestState.FAILED
    made.outputs["id"][3] = 99
    verdict = checker.check(made)
    assert (verdict.checked, verdict.wrong) == (9, 0)


def test_many_answers_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msplit.serving.loadtest.corpus._CHUNK", 160)
    checker = Checker(PREPARED, ANSWERS)
    made = answered(PREPARED, 1003, checker)
    made.outputs["id"][[0, 500, 1002]] += 1
    verdict = checker.check(made)
    assert (verdict.checked, verdict.wrong) == (1003, 3)


numbers = st.floats(-1e3, 1e3, width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0])


@given(
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=4),
    st.lists(numbers, min_size=3, max_size=3),
    st.floats(-1e-3, 1e-3),
    st.integers(0, 3),
)
def test_it_says_what_verification_says(values: list[list[float]], other: list[float], off: float, which: int) -> None:
    """Of every single answer, with the tolerance that is told."""
    answers = [{"y": np.array(value, np.float32)} for value in values]
    prepared = Prepared([{}] * len(answers), answers, "by hand", precision=Precision.IEEE, computed={})
    checker = Checker(prepared, answers)
    made = answered(prepared, len(answers), checker)
    which %= len(answers)
    got = np.array(other, np.float32) if off < 0 else answers[which]["y"] * np.float32(1 + off)
    made.outputs["y"][which] = got
    found = compare({"y": got}, answers[which], tolerance=checker.tolerances["y"])
    limit = checker.tolerances["y"]
    needed = found.needed
    if abs(needed - limit) > 1e-6:  # at the limit itself float32 and float64 may round apart
        assert checker.check(made).wrong == (0 if found.passed else 1)


def test_tf32_has_no_more_room_than_plain_steps_show() -> None:
    """Its tolerance in verification, a fifth, would let the answers of all requests pass for each other's."""
    rng = np.random.default_rng(0)
    answers = [{"y": rng.uniform(0.4, 0.6, 64).astype(np.float32)} for _ in range(32)]
    prepared = Prepared([{}] * 32, answers, "by hand", precision=Precision.TF32, computed={})
    plain = [{"y": one["y"] * np.float32(1.0005)} for one in answers]
    checker = Checker(prepared, plain)
    assert checker.tolerances["y"] == pytest.approx(0.02)
    assert checker.told_apart() == 32
    rough = [{"y": one["y"] * np.float32(1.05)} for one in answers]
    assert checker.tolerances["y"] < Checker(prepared, rough).tolerances["y"] <= 0.2
    wrong = [{"y": one["y"] * np.float32(2)} for one in answers]
    assert "elements differ" in Checker(prepared, wrong).wrong


def test_half_precision_has_no_more_room_than_plain_steps_show() -> None:
    rng = np.random.default_rng(0)
    answers = [{"y": rng.uniform(0.4, 0.6, 64).astype(np.float32)} for _ in range(32)]
    prepared = Prepared([{}] * 32, answers, "by hand", precision=Precision.BF16, computed={})
    plain = [{"y": one["y"].astype(ml_dtypes.bfloat16).astype(np.float32)} for one in answers]
    checker = Checker(prepared, plain)
    assert 0.01 < checker.tolerances["y"] <= 0.03
    assert checker.told_apart() == 32
    assert "away (root mean square, relative)" in Checker(prepared, [{"y": 2 * one["y"]} for one in answers]).wrong


def test_answers_that_are_alike_are_not_told_apart() -> None:
    answers = [ANSWERS[0], ANSWERS[1], ANSWERS[0]]
    prepared = Prepared(FEEDS[:3], answers, "by hand", precision=Precision.IEEE, computed={})
    assert Checker(prepared, answers).told_apart() == 1


@pytest.mark.parametrize(
    "dtype", ["bool", "int32", "uint8", "float16", "float32", "float64", "complex64", "bfloat16", "object"]
)
def test_every_type_is_kept_and_checked(dtype: str) -> None:
    import ml_dtypes

    def value(number: int) -> Any:
        if dtype == "object":
            return np.array([f"word {number}".encode(), b"\x00" * number], object)
        if dtype == "bool":
            return np.array([number % 2 == 0, True])
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return np.array([number + 1, 3 * number + 1]).astype(kind)

    answers = [{"y": value(number)} for number in range(2)]
    prepared = Prepared([{}, {}], answers, "by hand", precision=Precision.IEEE, computed={})
    checker = Checker(prepared, answers)
    made = answered(prepared, 20, checker)
    assert checker.check(made).wrong == 0
    made.outputs["y"][7] = made.outputs["y"][6]
    verdict = checker.check(made)
    assert verdict.wrong == 1
    assert verdict.says == "request 7, of the prepared ones 1, has the answer of 0"


def test_outputs_whose_shape_depends_on_values_are_refused() -> None:
    answers = [{"y": np.zeros(1)}, {"y": np.zeros(2)}]
    with pytest.raises(MsplitError, match="another shape"):
        _ = Prepared([{}, {}], answers, "by hand", precision=Precision.IEEE, computed={}).kept


def test_rows_are_drawn_from_legal_ones_and_stay_together() -> None:
    base = {
        "id": np.array([3, 5, 9]),
        "word": np.array([b"three", b"five", b"nine"], object),
        "x": np.ones((3, 2), np.float32),
        "splits": np.array([0, 1, 1, 2]),
        "flag": np.array(True),
    }
    ports = {
        "id": Port("int64", (None,)),
        "word": Port("object", (None,)),
        "x": Port("float32", (None, 2)),
        "splits": Port("int64", (4,)),
        "flag": Port("bool", ()),
    }
    made = of_ports(base, ports, 7, 20, seed=1)
    words = {3: b"three", 5: b"five", 9: b"nine"}
    assert all(one["id"].shape == (7,) and set(one["id"]) <= {3, 5, 9} for one in made)
    assert all([words[number] for number in one["id"]] == one["word"].tolist() for one in made)
    assert all(one["x"].shape == (7, 2) and one["x"].dtype == np.float32 for one in made)
    assert len({one["x"].tobytes() for one in made}) == 20
    assert all(one["splits"].tolist() == [0, 1, 1, 2] and one["flag"].shape == () and one["flag"] for one in made)


def test_a_model_has_other_inputs_for_each_request_also_where_a_file_gives_some(tmp_path: Path) -> None:
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    (name,) = [tensor.name for tensor in flat.inputs]
    made = from_model(flat, RunRequest.of(batch=3), 5)
    assert len({one[name].tobytes() for one in made}) == 5
    np.save(tmp_path / "x.npy", made[0][name])
    varied = from_model(flat, RunRequest.of(batch=3, inputs={name: tmp_path / "x.npy"}), 5)
    assert len({one[name].tobytes() for one in varied}) == 5
    assert all((np.abs(one[name]) <= np.abs(made[0][name]).max()).all() for one in varied)


def test_a_hundred_thousand_answers_take_less_than_a_second() -> None:
    import time

    checker = Checker(PREPARED, ANSWERS)
    made = table(100_000)
    made.request[:] = np.arange(100_000) % len(ANSWERS)
    made.status[:], made.counters[SENT] = RequestState.DONE, 100_000
    for name in made.outputs:
        made.outputs[name][:] = np.stack([one[name] for one in ANSWERS])[made.request]
    start = time.process_time()
    assert checker.check(made).wrong == 0
    assert time.process_time() - start < 1.0
