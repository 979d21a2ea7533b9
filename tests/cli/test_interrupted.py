"""What a signal, a reader that goes away, a full disk or a closed stream leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import forked
from tests.cli.runner import ROOT, SAMPLES, heard, msplit


@pytest.mark.parametrize("command", [("analyze", "--show", "all"), ("assign", "--dry-run", "--diff"), ("rules",)])
def test_a_reader_that_goes_away_is_no_error(command: tuple[str, ...]) -> None:
    name, *extra = command
    model = [] if name == "rules" else ["sample_graphs/inception_v3_stripped.pb"]
    with forked.Popen(
        [sys.executable, "-m", "msplit", name, *model, *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(1)
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 0


@pytest.mark.tf
def test_control_c_ends_a_bench_with_130(tmp_path: Path) -> None:
    reference = tmp_path / "reference.npz"  # which is written before anything is measured
    options = ["--measure", "duration=60", "--measure", f"save-reference={reference!s}"]
    command = [sys.executable, "-m", "msplit", "bench", "sample_graphs/mmoe_small.pb", *options]
    with heard():
        started = forked.Popen(
            command, server=forked.TENSORFLOW, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    with started as running:
        end = time.monotonic() + 60
        while not reference.exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        running.send_signal(signal.SIGINT)
        try:
            out, err = running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            running.kill()
            pytest.fail("an interrupted bench went on for a minute")
    assert running.returncode == 130
    assert out == ""
    assert err.endswith(f"interrupted\nWritten before that: {reference}\n")
    assert "Traceback" not in err


SWALLOWED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from msplit import formats
from msplit.cli import main

real = formats.read

def read(*arguments, **options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs between two instructions
            pass
    except BaseException:
        pass  # as an import of a large library may do
    {then}

formats.read = read
sys.exit(main.run(["analyze", "sample_graphs/mmoe_small.pb"]))
"""


@pytest.mark.parametrize("then", ["return real(*arguments, **options)", "raise ValueError('half imported')"])
def test_control_c_that_something_swallows_counts(then: str) -> None:
    code = SWALLOWED.replace("{then}", then)
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith("interrupted\n")
    assert "Traceback" not in done.stderr


WRITING = """
import os, signal, sys
from msplit.cli import main

real = os.fsync

def fsync(descriptor):
    real(descriptor)
    os.kill(os.getpid(), {number})
    for _ in range(1000):  # the handler runs between two instructions
        pass

os.fsync = fsync
sys.exit(main.run(["assign", {model!r}, "--streams", "2", "-o", sys.argv[1]]))
"""


@pytest.mark.parametrize("model", ["mmoe_small.pb", "two_signatures"])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_in_the_middle_of_writing_leaves_nothing(
    model: str, number: int, code: int, said: str, tmp_path: Path
) -> None:
    text = WRITING.format(model=str(SAMPLES / model), number=int(number))
    with heard():
        done = forked.run(
            [sys.executable, "-c", text, str(tmp_path / "out")],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(f"{said}\n")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_handlers_that_a_host_program_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    handler = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    monkeypatch.setattr("msplit.formats.read", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM) or 1 / 0)
    try:
        assert msplit("analyze", "sample_graphs/mmoe_small.pb").code == 2
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert {number: signal.getsignal(number) for number in before} == before


def test_little_is_loaded_before_control_c_is_caught() -> None:
    """What is imported before `entry` runs is where Python's own traceback can not be kept away."""
    code = "import os; before = set(sys.modules); import msplit.__main__; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['__future__', 'msplit', 'msplit.__main__', 'msplit._version']\n", done.stderr


@pytest.mark.parametrize("library", ["click", "msplit/cli/main.py"])
def test_control_c_while_the_program_is_still_being_imported(library: str, tmp_path: Path) -> None:
    """A stand-in for what is imported presses it, in the middle."""
    press = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    path = tmp_path / (library if "/" in library else f"{library}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(press)
    for name in ("__init__.py", "__main__.py", "_version.py"):
        if "/" in library:
            shutil.copyfile(ROOT / "msplit" / name, tmp_path / "msplit" / name)
    with heard():
        done = subprocess.run(
            [sys.executable, "-m", "msplit", "--help"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
            timeout=60,
        )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_full_disk_behind_standard_output() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "msplit", "analyze", "sample_graphs/mmoe_small.pb"]
        done = forked.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == (
        "error: standard output: can not be written: No space left on device\n  fix: free some space, or write elsewhere\n"
    )


@pytest.mark.parametrize(("closed", "code"), [("stdout", 0), ("stderr", 2)])
def test_a_stream_that_is_closed_is_no_bug(closed: str, code: int) -> None:
    model = "mmoe_small.pb" if closed == "stdout" else "gone.pb"
    redirect = ">&-" if closed == "stdout" else "2>&-"
    command = f"'{sys.executable}' -m msplit analyze sample_graphs/{model} {redirect}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


CLOSED = """
import os, subprocess, sys
from msplit.cli import output
output.begin()
print(sorted(os.pipe()) > [2, 2], os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev, sys.stdin.read() == "", file=sys.stderr)
print(subprocess.run([sys.executable, "-c", "import os; print(os.fstat(0).st_rdev)"], capture_output=True).returncode, file=sys.stderr)
"""


def test_a_closed_input_is_an_empty_one() -> None:
    # Otherwise the first pipe or socket of a command is standard input, which the processes that it starts do not have, or have twice.
    command = f"exec {sys.executable} -c '{CLOSED}' <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "True True True\n0\n")


def test_a_file_that_ends_too_soon_is_no_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from msplit.assignment import model
    from msplit.cli.main import run

    def ended(*_: object, **__: object) -> None:
        raise EOFError("more than 16 bytes")

    monkeypatch.setattr(model, "load", ended)
    assert run(["analyze", str(SAMPLES / "cond_v1.pb")]) == 2
    assert "internal error in msplit: EOFError: more than 16 bytes" in capsys.readouterr().err


@pytest.mark.parametrize("first", [True, False])
def test_a_signal_that_comes_together_with_anothers_is_not_forgotten(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hears it here; that of somebody else ends nothing, not even where signals are held back."""
    from msplit.cli import output

    ended: list[int] = []
    monkeypatch.setattr(output, "end", ended.append)
    monkeypatch.setattr(output, "_TO_HEAR", {False: 0.01, True: 0.01})
    monkeypatch.setattr(output, "_heard", threading.Event())
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGTERM, output._interrupted)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        together = [signal.SIGTERM, signal.SIGUSR1] if first else [signal.SIGUSR1, signal.SIGTERM]
        for numbers, right in ((together, [signal.SIGTERM]), ([signal.SIGUSR1], [])):
            for held in (False, True):
                ended.clear()
                reads, writes = os.pipe()
                os.write(writes, bytes(numbers))
                os.close(writes)
                with output.deferred() if held else contextlib.nullcontext():
                    output._watch(reads, threading.Event())
                assert ended == right
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


FORKS = """
import os, signal, time
from msplit.cli import output as interrupt

interrupt._TO_HEAR.update({False: 0.2})
with interrupt.watched():
    if not (child := os.fork()):
        try:
            signal.raise_signal(signal.SIGTERM)
        except interrupt.Terminated:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    time.sleep(1)
    print("goes on, the child ended with", os.waitstatus_to_exitcode(status))
"""


def test_a_signal_to_a_forked_child_does_not_end_its_parent() -> None:
    with heard():
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=60,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on, the child ended with 3\n", "")


STUCK = """
import ctypes, os, signal, sys, threading, time
import msplit.__main__ as program
from msplit import formats
from msplit.cli import output as interrupt

interrupt._TO_HEAR.update({False: 1.0, True: 1.0})
interrupt._TO_END = program._LONGEST_EXIT = 1.0

def library():
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):  # nobody unlocks it, and no signal ends that
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def read(*_, **__):
    threading.Timer(0.3, os.kill, (os.getpid(), NUMBER)).start()
    WHERE

formats.read = read
sys.argv[1:] = ["analyze", "sample_graphs/mmoe_small.pb"]
program.entry()
"""

WHERE = {
    "computing": "library()",
    "ending": """
    try:
        time.sleep(60)
    finally:
        library()
""",
    "holding back": """
    with interrupt.deferred():
        library()
""",
    "exiting": """
    threading.Thread(target=library).start()
    time.sleep(60)
""",
}


@pytest.mark.parametrize(
    ("number", "where"),
    [*((signal.SIGTERM, where) for where in WHERE), (signal.SIGINT, "computing"), (signal.SIGHUP, "computing")],
)
def test_a_signal_ends_a_command_that_is_in_a_library_for_ever(number: int, where: str) -> None:
    """No Python handler runs there: whoever sent it would have to kill."""
    code = STUCK.replace("WHERE", WHERE[where]).replace("NUMBER", str(int(number)))
    with heard():
        done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    said = "interrupted" if number == signal.SIGINT else "terminated"
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", f"{said}\n")
