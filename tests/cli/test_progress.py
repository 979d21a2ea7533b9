"""What commands tell on standard error while they work, and that it never gets into results or pipes."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from msplit import api
from msplit import progress as phases
from msplit.cli import output as progress
from msplit.cli.main import COMMANDS
from msplit.errors import MsplitError
from tests.cli.runner import ROOT, SAMPLES, fine, msplit, on_terminal

MODEL = SAMPLES / "mmoe_small.pb"


def test_verbose_tells_each_phase_with_its_time_and_changes_no_result() -> None:
    command = ("assign", MODEL, "--rules", "default", "--dry-run")
    plain = fine(*command)
    for arguments in (("-v", *command), (*command, "--verbose")):
        told = msplit(*arguments)
        assert (told.code, told.out) == (0, plain.out)
        said = re.findall(r"^ +\d+\.\d\d s  (.*)$", told.err, re.MULTILINE)
        assert len(said) == len(told.err.splitlines())
        assert said[:3] == ["reading", "flattening", "shapes and costs"]
        assert "rule branch" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_knows_the_three(command: str) -> None:
    done = fine(command, "--help", columns=100)
    for option in ("-q, --quiet", "-v, --verbose", "--debug"):
        assert re.search(rf"^  {option} ", done.out, re.MULTILINE)


def test_debug_behind_the_command_shows_where_an_error_comes_from() -> None:
    done = msplit("analyze", "gone.pb", "--debug")
    assert done.code == 2
    assert "Traceback" in done.err
    assert "Traceback" not in msplit("analyze", "gone.pb").err


def test_quiet_leaves_notes_out_but_no_result(tmp_path: Path) -> None:
    loud = msplit("report", MODEL, "-o", tmp_path / "loud.html", "--no-candidates")
    quiet = msplit("report", MODEL, "-o", tmp_path / "quiet.html", "--no-candidates", "--quiet")
    assert "nodes" in loud.err
    assert (quiet.code, quiet.err) == (0, "")
    assert (tmp_path / "loud.html").read_bytes() == (tmp_path / "quiet.html").read_bytes()
    assert fine("analyze", MODEL, "-q").out == fine("analyze", MODEL).out


def told(*arguments: str) -> str:
    """Standard error of a command whose standard error is a terminal and whose standard output is a pipe."""
    code = "from msplit import __main__; from msplit.cli import output; output.Bar.__init__.__defaults__ = (0.0,); __main__.entry()"
    text, output = on_terminal([sys.executable, "-c", code, *arguments], os.environ, subprocess.PIPE)
    assert b"\x1b" not in output
    return text


def test_long_work_shows_a_bar_on_a_terminal_and_takes_it_away() -> None:
    arguments = ("assign", "sample_graphs/mmoe_small.pb", "--rules", "auto", "--dry-run")
    shown = told(*arguments)
    assert "rule auto" in shown
    assert "━" in shown
    assert shown.endswith("\x1b[2K")  # the line is cleared
    assert told(*arguments, "--quiet") == ""


def test_auto_tells_what_it_tries_and_how_much_of_it_is_done() -> None:
    heard: list[object] = []

    class Ear:
        def begin(self, what: str) -> None:
            heard.append(what)

        def share(self, done: float) -> None:
            heard.append(done)

        def end(self) -> None:
            pass

    flat = api.load(MODEL)
    with phases.listening(Ear()):
        api.assign(flat, "auto", streams=4)
    tried = heard[heard.index("rule auto") + 1 :]
    shares = [one for one in tried if isinstance(one, float)]
    assert "list-4" in tried
    assert any(str(one).startswith("refining ") for one in tried)
    assert shares == sorted(shares)
    assert 0.9 < shares[-1] < 1


@pytest.mark.tf
def test_sample_shows_a_bar_while_tensorflow_starts_with_standard_error_turned_away(tmp_path: Path) -> None:
    shown = told("sample", "mmoe", "-o", str(tmp_path / "m.pb"))
    assert "starting TensorFlow" in shown
    assert "building mmoe" in shown


def test_work_that_tells_its_share_itself_is_phases_too() -> None:
    heard: list[str] = []

    class Ear:
        def begin(self, what: str) -> None:
            heard.append(f"begin {what}")

        def share(self, done: float) -> None:
            heard.append(f"{done}")

        def end(self) -> None:
            heard.append("end")

    with phases.listening(Ear()), phases.telling() as tell:
        tell("building", 0.0)
        tell("building", 0.5)
        tell("measuring", 0.1)
    assert heard == ["begin building", "0.0", "0.5", "end", "begin measuring", "0.1", "end"]
    with phases.telling() as tell:
        tell("nobody listens", 0.0)
    assert len(heard) == 7


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


class Names:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self, what: str) -> None:
        self.heard.append(what)

    def share(self, done: float) -> None:
        self.heard.append(str(done))

    def end(self) -> None:
        self.heard.append("end")


def test_sums_count_own_time_once_and_the_longest_comes_first() -> None:
    clock = Clock()
    with phases.timing(clock) as found:
        clock.time += 1  # in no phase
        for _ in range(2):
            with phases.phase("compiling"):
                clock.time += 2
                with phases.phase("planning"):
                    clock.time += 5
                    with phases.phase("list-4", detail=True):
                        clock.time += 3
                clock.time += 0.5
        with phases.phase("compiling"), phases.phase("compiling"):
            clock.time += 1
    clock.time += 100
    with phases.phase("planning"):
        clock.time += 100
    assert found.stop() == phases.Sums(
        23.0, (phases.PhaseSum("planning", 16.0, 2), phases.PhaseSum("compiling", 6.0, 4))
    )


def test_sums_end_where_preparation_does_even_in_the_middle_of_a_phase() -> None:
    clock = Clock()
    with phases.timing(clock) as around, phases.timing(clock) as found, phases.phase("building"):
        clock.time += 2
        phases.prepared()
        clock.time += 4
        with phases.phase("measuring"):
            clock.time += 8
    assert found.stop() == phases.Sums(2.0, (phases.PhaseSum("building", 2.0, 1),))
    assert {one.phase: one.seconds for one in around.stop().phases} == {"measuring": 8.0, "building": 6.0}
    phases.prepared()  # nobody sums up


def test_what_is_summed_up_is_told_as_before() -> None:
    def work() -> None:
        with phases.phase("outer"), phases.phase("inner"):
            phases.done(0.5)
        with pytest.raises(ValueError, match="no"), phases.phase("failing"):
            raise ValueError("no")

    ear, other = Names(), Names()
    with phases.listening(ear):
        work()
    with phases.listening(other), phases.timing() as found:
        work()
        phases.prepared()  # this listener does not want to know
    assert ear.heard == other.heard == ["outer", "inner", "0.5", "end", "end", "failing", "end"]
    assert {one.phase for one in found.stop().phases} == {"outer", "inner", "failing"}


def test_sums_stand_where_a_listener_ends_the_work() -> None:
    class Ends(Names):
        def begin(self, what: str) -> None:
            if what == "inner":
                raise KeyboardInterrupt
            super().begin(what)

    clock, ear = Clock(), Ends()
    with phases.listening(ear), phases.timing(clock) as found, phases.phase("outer"):
        clock.time += 1
        with pytest.raises(KeyboardInterrupt), phases.phase("inner"):
            pytest.fail("it has been ended")
    assert ear.heard == ["outer", "end"]
    assert found.stop().phases == (phases.PhaseSum("outer", 1.0, 1),)


def test_a_phase_ends_what_was_told_inside_of_it_and_nothing_else() -> None:
    ear = Names()
    with phases.listening(ear), phases.timing() as found, phases.telling() as tell:
        tell("building", 0.0)
        with phases.phase("tuning"):
            tell("searching", 0.25)
            with phases.phase("planning"):
                pass
            tell("searching", 0.75)
        tell("building", 0.5)
    told = ["building", "0.0", "tuning", "searching", "0.25", "planning", "end", "0.75", "end", "end"]
    again = ["end", "building", "0.5", "end"]
    assert ear.heard == [*told, *again]
    assert {one.phase for one in found.stop().phases} == {"tuning", "planning"}


def test_importing_is_a_phase_once() -> None:
    ear = Names()
    with phases.listening(ear):
        with phases.importing("sys", "Python"):
            pass
        with phases.importing("no_such_module", "Nothing"):
            pass
    assert ear.heard == ["starting Nothing", "end"]


@pytest.mark.tf
def test_bench_tells_where_its_preparation_went() -> None:
    pytest.importorskip("torch")
    start = time.perf_counter()
    command = (
        "bench",
        MODEL,
        "--engine",
        "tensorflow",
        "--streams",
        "1",
        "--measure",
        "duration=0",
        "--measure",
        "warmup=0",
    )
    told = msplit("-v", *command, "--measure", "builds=1", "--format", "json")
    wall = time.perf_counter() - start
    assert told.code == 0
    sums, total = told.json["preparation"], told.json["preparation_s"]
    names = [one["phase"] for one in sums]
    assert {"opening a session", "shapes and costs", "making inputs"} <= set(names)
    assert len(set(names)) == len(names)
    assert sum(one["time_s"] for one in sums) <= total <= wall
    assert all(one["times"] >= 1 for one in sums)
    lines = re.findall(r"^ +(\d+\.\d\d) s  preparation(?:: (.*?))?(?:, \d+ times)?$", told.err, re.MULTILINE)
    assert lines == [(f"{one['time_s']:.2f}", one["phase"]) for one in sums] + [(f"{total:.2f}", "")]


def test_a_bar_that_is_closed_before_it_was_drawn_never_is(capfd: pytest.CaptureFixture[str]) -> None:
    bar = progress.Bar(patience=0.01)
    bar.begin("reading")
    bar.close()
    time.sleep(0.05)
    bar.end()
    assert capfd.readouterr() == ("", "")


def test_what_is_done_is_logged_for_programs_that_ask(caplog: Any) -> None:
    assert [type(one) for one in phases.LOG.handlers] == [logging.NullHandler]
    assert phases.LOG.name == "msplit"

    def work() -> None:
        with phases.timing(), phases.phase("plan\nning"):
            with phases.phase("a candidate", detail=True):
                pass
            phases.prepared("ranker\x1b")

    work()
    assert caplog.text == ""  # warnings alone, unless somebody asks for more
    phases.LOG.setLevel(logging.INFO)
    try:
        work()
        (line,) = caplog.text.splitlines()
        assert re.fullmatch(r"ranker\\x1b is prepared after 0\.\d\d s: plan\\nning 0\.\d\d s", line)
        phases.LOG.setLevel(logging.DEBUG)
        work()
    finally:
        phases.LOG.setLevel(logging.NOTSET)
    begin, ready, end = caplog.text.splitlines()[1:]
    assert (begin, ready.partition(" is ")[0]) == ("plan\\nning", "ranker\\x1b")
    assert re.fullmatch(r"plan\\nning: 0\.\d\d\d s", end)


def test_all_of_msplit_logs_by_one_logger() -> None:
    found = [path for path in (ROOT / "msplit").rglob("*.py") if "getLogger(" in path.read_text("utf-8")]
    # A server has its handler at the logger and at uvicorn's; what a caller's own callback raises is logged where Python's futures log it.
    named = sorted(str(path.relative_to(ROOT / "msplit")) for path in found)
    assert named == ["progress.py", "serving/pool/steps.py", "serving/server/logs.py"]


def test_a_warning_of_the_library_is_told_by_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*_: Any, **__: Any) -> None:
        phases.LOG.warning("%s goes\non", "it")
        phases.LOG.info("nothing")
        raise MsplitError("the end")

    monkeypatch.setattr("msplit.formats.contents", warns)
    assert msplit("show", SAMPLES / "mmoe_small.pb").err == "warning: it goes\\non\nerror: the end\n"
    assert [type(one) for one in phases.LOG.handlers] == [logging.NullHandler]
