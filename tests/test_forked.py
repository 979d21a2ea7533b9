"""Forked processes do what new ones do."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.campaign import CAMPAIGN
from tests.cli.runner import heard

COMMANDS = {
    "module": ("-m", "msplit", "rules"),
    "error": ("-m", "msplit", "analyze", "sample_graphs/two_tags"),
    "text": ("-c", "import os, sys; print(sys.argv, __name__, os.getcwd(), sys.stdin.read()); sys.exit(3)", "a ä"),
    "killed": ("-c", "import os; print('half', flush=True); os.kill(os.getpid(), 9)"),
    "environment": ("-c", "import os; print(sorted(os.environ))"),
    "exit": ("-c", "import atexit, sys; atexit.register(print, 'over', file=sys.stderr); print('ä')"),
    "streams": ("-c", "import sys; print([(one.encoding, one.errors, one.line_buffering) for one in (sys.stdout, sys.stderr)])"),
}  # fmt: skip


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_forked_process_is_as_a_new_one(command: str, quick: bool) -> None:
    def ended(run: Any) -> tuple[int, bytes, bytes]:
        done = run(
            [sys.executable, *COMMANDS[command]],
            cwd=forked.ROOT,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ),  # without COLUMNS, which a library sets behind Python's back
            capture_output=True,
        )
        return done.returncode, done.stdout, done.stderr

    assert ended(functools.partial(forked.run, quick=quick)) == ended(subprocess.run)


def test_a_script_is_run_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("NUMBER = 7")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside; print(beside.NUMBER, sys.argv[1:]); 1 / 0")
    done = forked.run([sys.executable, str(script), "x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "7 ['x']\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_one_that_runs_is_waited_for_and_hears_signals() -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with heard(), forked.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        assert one.stdout.readline() == b"ready\n"
        assert one.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(timeout=0.05)
        one.send_signal(signal.SIGINT)
        assert one.wait(timeout=30) == -signal.SIGINT
        assert one.poll() == -signal.SIGINT


def test_many_one_after_the_other_and_side_by_side() -> None:
    code = [sys.executable, "-c", "import sys; print(sys.argv[1])"]
    for turn in range(500 if CAMPAIGN else 10):
        several = [forked.Popen([*code, f"{turn} {number}"], stdout=subprocess.PIPE, text=True) for number in range(4)]
        for number, one in reversed([*enumerate(several)]):
            assert one.communicate(timeout=30)[0] == f"{turn} {number}\n"
            assert one.returncode == 0


def test_what_is_forked_beside_another_has_one_beside_itself() -> None:
    """A server with front ends, which a worker of pytest has forked: it imports nothing anew."""
    code = """
import sys
from tests import forked
print(forked.BESIDE is not None, flush=True)
forked._server = lambda _: forked.BESIDE[:2]
if len(sys.argv) > 1:
    forked.run([sys.executable, "-c", *sys.argv[1:]], beside=True, check=True)
"""
    command = [sys.executable, "-c", code, code, code]
    done = forked.run(command, beside=True, cwd=forked.ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (3 * "True\n", "")


@pytest.mark.tf
def test_tensorflow_and_pytorch_run_in_it() -> None:
    """Nothing of them was started before the fork: `_SERVER` asserts that it has one thread."""
    code = (
        "import tensorflow as tf, torch\n"
        "a = tf.random.normal((64, 64))\n"
        "with tf.compat.v1.Session(graph=tf.Graph()) as session:\n"
        "    with session.graph.as_default(): b = session.run(tf.ones((3, 3)) @ tf.ones((3, 3)))\n"
        "print((a @ a).shape, b.sum(), (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item())"
    )
    for _ in range(50 if CAMPAIGN else 2):
        done = forked.run(
            [sys.executable, "-c", code], server=forked.TENSORFLOW, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "(64, 64) 27.0 512.0\n"), done.stderr
