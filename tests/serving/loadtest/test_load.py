"""`msplit load`, from the command line to the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from msplit.errors import EngineError, MsplitError
from msplit.report import document
from msplit.report import load as report
from msplit.run.request import RunRequest
from msplit.serving.loadtest.run import LoadSettings, SessionTask, load
from msplit.serving.pool import sources
from msplit.serving.pool.settings import PoolSettings
from tests import forked
from tests.cli.runner import ROOT, SAMPLES, fine, heard, msplit
from tests.report.test_html_page import Reader, data_of
from tests.report.test_schemas import validate
from tests.serving.loadtest.fakes import ANSWERS, DISTINCT, FakeModel, instead
from tests.serving.loadtest.test_generator import _runs

MMOE = SAMPLES / "mmoe_small.pb"
QUICK = ("--measure", "seconds=0.05,warmup=0.01", "--measure", "repeat=1", "--measure", f"distinct={DISTINCT}")


def test_levels_of_a_pool_and_of_its_echo(tmp_path: Path) -> None:
    pool, html = FakeModel(seconds=0.001), tmp_path / "load.html"
    # Enough requests for both priorities, on a busy machine, too.
    mix = ("--measure", "seconds=0.3,requests=60", "--measure", "mix=0:1,1:3")
    levels = ("--clients", "1,3", "--rate", "500,50%", *mix, "--html", str(html))
    with instead(pool):
        done = fine("load", MMOE, *QUICK, *levels, "--format", "json")
    validate("load", done.json)
    assert done.json["wrong"] == 0
    targets = {target["label"]: target for target in done.json["arms"]}
    assert list(targets) == ["pool", "echo"]
    assert (targets["pool"]["echo"], targets["echo"]["echo"]) == ("echo", None)
    one, three, rate, share = targets["pool"]["points"]
    assert [point["clients"] for point in (one, three, rate, share)] == [1, 3, None, None]
    assert rate["rate_per_s"] == 500
    assert share["name"] == "50 %"
    most = max(run["throughput_per_s"] for point in (one, three) for run in point["runs"])
    assert share["rate_per_s"] == pytest.approx(most / 2)
    assert one["runs"][0]["most_in_flight"] == 1
    assert three["runs"][0]["most_in_flight"] == 3
    assert one["p50_us"] >= 1000
    assert {entry["priority"] for entry in three["runs"][0]["by_priority"]} == {0, 1}
    assert done.json["distinct"] == {"requests": DISTINCT, "told_apart": DISTINCT}
    assert pool.closed
    assert len(data_of(html.read_text())["plots"]) == 4


def test_gpus_are_those_that_the_pool_is_asked_for() -> None:
    with instead(FakeModel()), mock.patch("msplit.serving.loadtest.run.make_pool", return_value=FakeModel()) as made:
        more = ("--clients", "1", "--device", "cpu", "--gpus", "0,2", "--groups", "3", "--format", "json")
        done = fine("load", MMOE, *QUICK, *more)
    assert made.call_args.args[1].devices == (0, 2)
    assert "on each of 2 GPUs" in next(target["about"] for target in done.json["arms"] if target["label"] == "pool")


def test_each_arm_is_sent_the_same() -> None:
    sent: dict[int, list[Any]] = {}

    def measure(bench: Any, label: str, key: str, level: Any, seed: int) -> None:
        sent.setdefault(seed, []).append((key, label))

    with instead(FakeModel()), mock.patch("msplit.serving.loadtest.run._Bench.measure", measure):
        fine("load", MMOE, *QUICK[:2], "--measure", "repeat=2", "--measure", "distinct=4", "--rate", "10,20", "--quiet")
    levels = [("10/s", "20/s")] * 2
    assert [tuple(dict.fromkeys(key for key, _ in sent[repeat])) for repeat in range(2)] == levels
    assert [label for _, label in sent[0]] == ["pool", "echo"] * 2
    assert [label for _, label in sent[1]] == ["echo", "pool"] * 2


def test_a_wrong_answer_is_told_first_and_is_exit_code_1() -> None:
    def answer(number: int, count: int) -> Any:
        return ANSWERS[(number + (count == 7)) % DISTINCT]

    with instead(FakeModel(answer)):
        done = msplit("load", MMOE, *QUICK, "--clients", "2")
    assert done.code == 1
    first = done.out.splitlines()[1:4]
    assert "WRONG ANSWERS" in first[0]
    assert "pool, 2 clients: 1 of" in first[0]
    assert re.search(r"of the prepared ones (\d+), has the answer of (\d+)", " ".join(" ".join(first).split()))


def test_requests_that_fail_are_exit_code_1_and_say_why() -> None:
    def answer(number: int, count: int) -> Any:
        return EngineError("the\x1b[31m device is lost") if count == 5 else ANSWERS[number]

    with instead(FakeModel(answer)):
        done = msplit("load", MMOE, *QUICK, "--clients", "2")
    assert done.code == 1
    assert "1 request failed: the\\x1b[31m device is lost" in done.out


def test_a_pool_whose_plain_steps_are_wrong_is_not_loaded() -> None:
    pool = FakeModel()
    with instead(pool), mock.patch.object(pool, "step", return_value=ANSWERS[3]):
        done = msplit("load", MMOE, *QUICK)
    assert done.code == 2
    assert "plain steps give other outputs than TensorFlow on the CPU" in done.err
    assert pool.closed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--clients", "0"), "0 is not in the range"),
        (("--rate", "fast"), "'fast' is not a list of rates"),
        (("--rate", "-5"), "'-5' is not a list of rates"),
        (("--measure", "mix=0:1:2"), "'0:1:2' is not a share for each priority"),
        (("--measure", "mix=0:0"), "are no shares"),
        (("--groups", "many"), "'many' is neither a number of one or more nor auto"),
        (("--tensorflow", "beside=onnx"), "there is no 'onnx' to measure"),
        (("2", "x"), "'2' is too much"),
        (("--multistream",), "the number of inputs is missing"),
        (("--rate", "50%", "--html", "/nowhere/x.html"), "/nowhere"),
        (("--measure", "timeout=nan"), "timeout"),
        (("--rate", "50%", "--clients", "x"), "'x' is not a list of numbers"),
    ],
)
def test_mistakes_are_told(options: tuple[str, ...], said: str) -> None:
    with instead(FakeModel()):
        done = msplit("load", MMOE, *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert "Traceback" not in done.err


def test_the_command_and_the_variable_of_nvidia() -> None:
    """1,000 iterations of 4 threads are 4,000 requests of 16 rows each."""
    seen: dict[str, Any] = {}

    def run(model: Any, request: Any, *, settings: Any, pool: Any, **rest: Any) -> Any:
        seen.update(settings=settings, pool=pool)
        raise MsplitError("enough")

    command = ("load", "--multistream", MMOE, "1", "x", "1", "y", "16", "1000", "4", "config_proto")
    with (
        mock.patch(
            "msplit.cli.options.Choice.load", lambda choice, model: mock.Mock(inputs=[mock.Mock()], asked=choice)
        ),
        mock.patch("msplit.serving.loadtest.run.load", run),
    ):
        msplit(*command, TF_GPU_STREAM_GROUP_COUNT="3,2")
    settings = seen["settings"]
    assert (settings.clients, settings.rows, settings.most, settings.threads) == ((4,), 16, 4000, 4)
    assert settings.config == Path("config_proto")
    assert seen["pool"].groups == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clients": ()}, "there is no load"),
        ({"clients": (), "rates": (5.0,), "shares": (0.5,)}, "shares are of the most that clients find"),
        ({"clients": (0,)}, "clients is 0"),
        ({"rates": (float("inf"),)}, "rates, shares and seconds are above 0"),
        ({"seconds": 0.0}, "rates, shares and seconds are above 0"),
        ({"mix": {0: -1.0, 1: 2.0}}, "are no shares"),
        ({"beside": ("pytorch",)}, "there is no 'pytorch' to measure"),
    ],
)
def test_settings_that_make_no_sense(settings: Any, said: str) -> None:
    with pytest.raises(MsplitError, match=said):
        LoadSettings(**settings)


INTERRUPTED = """
import os, sys
from msplit.cli import main
from tests.serving.loadtest.fakes import FakeModel, instead
with instead(FakeModel(seconds=0.001)):
    code = main.run(["load", "sample_graphs/mmoe_small.pb", "--measure", "seconds=60"])
sys.exit(code)
"""


def test_control_c_ends_both_processes_and_leaves_nothing_behind() -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()

    command = [sys.executable, "-c", INTERRUPTED]
    with heard():
        started = forked.Popen(command, server=forked.TENSORFLOW, stderr=subprocess.PIPE, cwd=ROOT, text=True)
    with started as running:
        children: list[int] = []
        end = time.monotonic() + 60
        while not children and time.monotonic() < end:
            time.sleep(0.05)
            children = [pid for pid in senders() if _parent(pid) == running.pid]
        assert children
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    assert running.returncode == 130, said
    end = time.monotonic() + 10
    while any(map(_runs, children)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_runs, children))
    assert not before or set(os.listdir("/dev/shm")) <= before


def senders() -> list[int]:
    """Generators that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"msplit.serving.loadtest.generator" in command:
                found.append(int(entry.name))
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


SETTINGS = LoadSettings(clients=(1, 3), seconds=2.0, warmup=0.02, repeat=1, distinct=8, beside=(), threads=2, most=100)


@pytest.mark.tf
@pytest.mark.parametrize("engine", ["cuda", "tensorflow"])
def test_a_model(engine: str) -> None:
    """On simulated streams and in sessions: rows of several requests share steps, and everybody gets the own answer."""
    if engine == "cuda":
        pytest.importorskip("torch")
    request = {"engine": engine, "device": "cpu" if engine == "cuda" else "cuda", "effort": "fast", "streams": (2,)}
    found = load(MMOE, RunRequest.of(**request), settings=SETTINGS, pool=PoolSettings(groups=2, max_batch=4))
    assert (found.wrong, found.broken) == (0, 0)
    assert found.distinct[1] > 4
    one, three = (point for point in found.points if point.target == "pool")
    assert min(one.total("answered"), three.total("answered")) > 0
    assert three.runs[0].most_in_flight <= 3
    assert found.targets[0].facts["requests"] >= one.total("checked") + three.total("checked")
    validate("load", json.loads(document.dumps("load", report.payload(found))))


@pytest.mark.tf
def test_requests_of_more_rows_than_a_step_has() -> None:
    pytest.importorskip("torch")
    request = RunRequest.of(engine="cuda", device="cpu", effort="fast", streams=(2,))
    asked = LoadSettings(clients=(2,), seconds=1.0, warmup=0.02, repeat=1, distinct=4, beside=(), rows=11)
    found = load(MMOE, request, settings=asked, pool=PoolSettings(groups=2, max_batch=4))
    assert (found.wrong, found.broken, found.rows) == (0, 0, 11)
    assert sum(point.total("answered") for point in found.points if point.target == "pool") > 0


@pytest.mark.tf
def test_an_answer_of_a_real_pool_that_goes_to_somebody_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = sources.pool

    def mixing(*arguments: Any, **named: Any) -> Any:
        pool = make(*arguments, **named)
        cut, count = pool.ports.cut, iter(range(10**9))

        def mixed(outputs: Any, rows: Any) -> Any:
            answers = cut(outputs, rows)
            return answers[::-1] if len(answers) > 1 and next(count) == 3 else answers

        pool.ports.cut = mixed
        return pool

    monkeypatch.setattr("msplit.serving.loadtest.run.make_pool", mixing)
    settings = LoadSettings(clients=(8,), seconds=5.0, warmup=0.0, repeat=1, distinct=32, beside=(), most=200)
    found = load(MMOE, RunRequest.of(engine="tensorflow"), settings=settings, pool=PoolSettings(groups=1, max_batch=4))
    assert 1 <= found.wrong <= 4
    assert "has the answer of" in next(run.says for point in found.points for run in point.runs if run.wrong)


@pytest.mark.tf
def test_tensorflow_beside_it_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("inter_op_parallelism_threads: 1")
    settings = LoadSettings(
        clients=(2,),
        seconds=0.1,
        warmup=0.0,
        most=50,
        repeat=2,
        distinct=8,
        beside=("merge",),
        threads=2,
        config=tmp_path / "config",
    )
    found = load(MMOE, RunRequest.of(engine="tensorflow"), settings=settings, pool=PoolSettings(groups=2))
    labels = [arm.label for arm in found.targets]
    assert labels == ["pool", "TensorFlow, merged streams", "echo", "echo, threads"]
    assert (found.wrong, found.broken) == (0, 0)
    assert [len(point.runs) for point in found.points] == [2] * 4
    merged = found.targets[1]
    assert merged.echo == "echo, threads"
    assert "one session, 2 threads, with stream_merge_options" in merged.about


def test_a_process_that_can_not_run_the_model_is_left_out_and_says_why() -> None:
    problem = EngineError("TensorFlow can not run this model: no kernel")
    fails = mock.Mock(label="TensorFlow", about="", echo="echo, threads", ready=mock.Mock(side_effect=problem))
    with instead(FakeModel()), mock.patch.object(SessionTask, "start", return_value=fails):
        done = fine("load", MMOE, *QUICK, "--clients", "1", "--tensorflow", "beside=sessions")
    assert "TensorFlow: not measured: TensorFlow can not run this model: no kernel" in " ".join(done.out.split())


def test_the_curves_of_the_page_leave_out_what_the_benchmark_itself_costs() -> None:
    from tests.serving.loadtest.test_report import RESULT, TENSORFLOW

    text = report.page(RESULT)
    plots = data_of(text)["plots"]
    titles = [f"{quantity} over throughput, {loop} loop" for loop in ("closed", "open") for quantity in ("p50", "p99")]
    assert [plot["title"] for plot in plots] == titles
    for plot in plots:
        assert plot["names"] == ["pool", TENSORFLOW]
        assert (plot["x"], plot["y"]) == ("answers per second", f"{plot['title'][:3]} latency, µs")
    assert plots[0]["points"][0] == {"line": "pool", "x": 12_250.0, "y": 79.5, "low": 79.0, "high": 80.0}
    assert plots[3]["points"] == [
        {"line": "pool", "x": 99_000.0, "y": 475.0, "low": 475.0, "high": 475.0},
        {"line": TENSORFLOW, "x": 99_000 / 91, "y": 475.0 * 91, "low": 475.0 * 91, "high": 475.0 * 91},
    ]
    reader = Reader(text)
    assert "echo, closed loop" in reader.text
    assert "<b>model.pb" in reader.text
    assert not {"b", "img", "iframe", "link", "object"} & {tag for tag, _ in reader.tags}
