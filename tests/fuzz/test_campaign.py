"""A little of the campaign. `python -m tests.fuzz --seconds 600` runs it for longer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from msplit.checks.subject import ABSENT, Subject
from msplit.errors import LoadError
from msplit.serving.server.tensors import Refusal, StatusCode
from tests import forked
from tests.campaign import CAMPAIGN
from tests.fuzz import __main__ as fuzz
from tests.fuzz import checked, networks, plans, requests
from tests.fuzz.case import Case, import_all, run
from tests.fuzz.limits import TooSlow, limited
from tests.fuzz.special import MODEL
from tests.networks import answers, network, state_tolerances, tolerances, training

ROOT = Path(__file__).parents[2]
SECONDS = 240.0 if CAMPAIGN else 4.0


@pytest.mark.slow
def test_hostile_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "subprocess", SimpleNamespace(Popen=forked.Popen, PIPE=subprocess.PIPE))
    # As with Hypothesis, CI tries the same cases each time and everyone else others.
    seed = 0 if "CI" in os.environ else int(time.time()) % 10**8 * 100
    kinds = [kind for kind in fuzz.KINDS if CAMPAIGN or kind not in fuzz.WITH_TENSORFLOW]
    tally = fuzz.campaign(SECONDS, seed, kinds=kinds)
    assert tally.cases.total() >= SECONDS / 2, str(tally)
    assert not tally.problems, "\n".join(f"python -m tests.fuzz --case {n}: {p}" for n, p in tally.problems.items())


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_case_is_the_same_each_time(kind: str) -> None:
    name = f"{kind}:4"
    assert fuzz.case_named(name) == fuzz.case_named(name)
    assert fuzz.case_named(name) != fuzz.case_named(f"{kind}:5")


@pytest.mark.parametrize("place", ["out", "out.plan", "out.streams"])
def test_a_special_file_that_is_written_over_is_noticed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msplit.formats.atomic.refuse_target", lambda path: None)
    case = replace(fuzz.case_named("text:4"), model=MODEL.read_bytes(), files={}, check=(), special={place: "pipe"})
    assert "was replaced" in run(replace(case, assign=("--force",)), tmp_path / "case").problem
    monkeypatch.undo()
    assert run(replace(case, assign=("--force",)), tmp_path / "case").problem == ""


def test_what_special_files_do(tmp_path: Path) -> None:
    for seed in range(40):
        case = fuzz.case_named(f"special:{seed}")
        result = run(case, tmp_path / "case")
        assert result.problem == "", f"python -m tests.fuzz --case special:{seed}: {case.special}"


FIRST_CASE = """
import sys, tempfile
from contextlib import contextmanager
from pathlib import Path
from tests.fuzz import __main__ as fuzz, case

@contextmanager
def watched(*_, **__):
    before = set(sys.modules)
    with limited(1e3, 1e5) as used:
        yield used
    print(*sorted(set(sys.modules) - before))

limited, case.limited = case.limited, watched
with tempfile.TemporaryDirectory() as folder:
    case.run(fuzz.case_named("structure:1"), Path(folder) / "case")
"""


def test_the_first_case_is_not_charged_with_imports() -> None:
    ran = subprocess.run([sys.executable, "-c", FIRST_CASE], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout == "\n", ran.stdout


@pytest.mark.parametrize(
    ("fault", "told", "first"),
    [
        ("msplit.schedule.plan_check._recorded_late", "waits for what is recorded later", 4),
        ("msplit.schedule.plan_check._compare", "does not wait for", 1),
        ("msplit.checks.ms011_unordered_plan.loose_ends", "the step", 1),
    ],
)
def test_a_broken_plan_that_check_takes_is_noticed(
    fault: str, told: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault, lambda *_: [])
    problems = (plans.run(plans.make(seed), tmp_path / "case").problem for seed in (first, *range(12)))
    assert any("check takes a plan in which" in problem and told in problem for problem in problems)


def test_streams_that_are_not_the_ids_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "stated", property(lambda subject: np.full(len(subject.flat), ABSENT)))
    problems = (plans.run(plans.make(seed), tmp_path / "case").problem for seed in (16, *range(24)))
    assert any("the streams are not the ids of the model" in problem for problem in problems)


def test_a_right_plan_that_check_refuses_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msplit.checks.ms011_unordered_plan.loose_ends", lambda plan: [(0, "end")])
    assert "and nothing is wrong" in plans.run(plans.make(0), tmp_path / "case").problem


def test_changed_plans(tmp_path: Path) -> None:
    for seed in range(10):
        assert plans.run(plans.make(seed), tmp_path / "case").problem == "", f"python -m tests.fuzz --case plans:{seed}"
    used = {change for seed in range(10) for change in plans.make(seed).changes}
    assert used == set(plans.CHANGES)


def test_changed_requests(tmp_path: Path) -> None:
    cases = [requests.make(seed) for seed in range(200)]
    for case in cases:
        assert requests.run(case, tmp_path).problem == "", f"python -m tests.fuzz --case {case.name}"
    assert {case.path for case in cases if case.valid} == {requests.PREDICT, requests.INFER, requests.V1, requests.V2}


@pytest.mark.parametrize(
    ("fault", "broken", "told"),
    [
        ("msplit.serving.server.models.known_as", lambda name, ports: next(iter(ports)), "refused|is .*, and not"),
        (
            "msplit.serving.server.service.refusal",
            lambda _: Refusal(StatusCode.NOT_FOUND, "raise --max-queue"),
            "a client is told",
        ),
        ("msplit.serving.server.decode.of_tensor_proto", lambda *_: 1 / 0, "status 13|refused"),
    ],
)
def test_a_server_that_does_wrong_is_noticed(
    fault: str, broken: object, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault, broken)
    problems = (requests.run(requests.make(seed), tmp_path).problem for seed in range(300))
    assert any(re.search(told, problem) for problem in problems)


def test_a_number_that_becomes_infinite_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(one for one in map(requests.make, range(100)) if one.valid and one.path == requests.V1)
    data, count = re.subn(rb'("x": \[+)[-0-9.e]+', rb"\g<1>1e39", case.data, count=1)
    assert count
    case = replace(case, data=data, valid=False)
    assert requests.run(case, tmp_path).problem == ""
    monkeypatch.setattr("msplit.inputs.files._is_infinite", lambda values: np.zeros(values.shape, bool))
    assert "became infinite" in requests.run(case, tmp_path).problem


@pytest.mark.tf
@pytest.mark.parametrize("seed", range(12))
def test_networks_divided_over_gpus_and_train_steps(seed: int, tmp_path: Path) -> None:
    assert networks.run(networks.make(seed), tmp_path).problem == "", f"python -m tests.fuzz --case networks:{seed}"


@pytest.mark.tf
def test_networks_are_divided_and_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a plan and with a variable is noticed."""
    cases = [networks.make(seed) for seed in range(12)]
    assert {case.trains for case in cases} == {False, True}
    assert {case.gpus for case in cases} == {1, 2, 3, 4}
    divided = next(case for case in cases if not case.trains)
    trains = next(case for case in cases if case.trains)
    monkeypatch.setattr("msplit.schedule.plan_check.check", lambda *_: [])
    assert "is taken, too" in networks.run(divided, tmp_path).problem
    monkeypatch.undo()
    one = training(trains.seed)
    moved = replace(one, after={name: value + 1 for name, value in one.after.items()})
    monkeypatch.setattr("tests.networks.training", lambda seed: moved)
    assert " away (" in networks.run(trains, tmp_path).problem


@pytest.mark.tf
@pytest.mark.parametrize("seed", [10135, 10188])
def test_what_tensorflow_itself_carries_far_may_be_further_away_and_no_more(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rounding is further than usual from TensorFlow's, which is as far from float64 itself."""
    case = networks.make(seed)
    assert networks.run(case, tmp_path).problem == ""
    monkeypatch.setattr("tests.networks.MOVED", 0.0)
    assert networks.run(case, tmp_path).problem
    monkeypatch.undo()
    most = state_tolerances(training(seed)) if case.trains else tolerances(one := network(seed), answers(one))
    assert most
    assert max(most.values()) < 0.05


def test_an_error_of_check_after_assign_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(
        case for seed in range(40) if checked.run(case := checked.make(seed), tmp_path / "case").codes == (0, 0, 0)
    )

    def damaged(*_: object) -> None:
        raise LoadError("a constant can not be read")

    monkeypatch.setattr("msplit.checks.ms017_engine_coverage.cover", damaged)
    assert "check ended with 2" in checked.run(case, tmp_path / "case").problem


def spinning(*_: object, **__: object) -> None:
    while True:
        pass


def hoarding(*_: object, **__: object) -> list[bytearray]:
    return [bytearray(64 << 30)]  # more than any limit: what fits is filled, which takes seconds


def surprised(*_: object, **__: object) -> None:
    raise KeyError("surprise")


@pytest.mark.parametrize(
    ("what", "told"), [(spinning, "stopped after"), (hoarding, "out of memory"), (surprised, "internal error")]
)
def test_what_must_not_happen_is_noticed(
    what: object, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_all()  # with the loader as it is, whichever test comes first in this process
    monkeypatch.setattr("msplit.assignment.model.load", what)
    monkeypatch.setattr("tests.fuzz.case.SECONDS", 0.1)
    assert told in run(Case("x", b"\n\x0f\n\x01a\x12\x04NoOp"), tmp_path / "case").problem


def test_a_worker_that_dies_is_noticed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "subprocess", SimpleNamespace(Popen=forked.Popen, PIPE=subprocess.PIPE))
    worker = fuzz.Worker()
    try:
        assert worker.run("damage:1")["problem"] == ""
        assert worker.process is not None
        worker.process.kill()
        worker.process.wait()
        with pytest.raises(BrokenPipeError):
            worker.run("damage:1")
        worker.stop()
        assert worker.run("damage:1")["problem"] == ""
    finally:
        worker.stop()


def test_time_and_memory_are_measured_and_bounded() -> None:
    with limited(5.0, 200.0) as used:
        held = bytearray(64 << 20)
        held[::4096] = b"x" * (len(held) // 4096)
    assert 60 < used.megabytes < 100
    assert used.seconds < 2
    with pytest.raises(MemoryError), limited(5.0, 50.0):
        bytearray(1 << 30)
    with pytest.raises(TooSlow), limited(0.05, 50.0):
        spinning()
