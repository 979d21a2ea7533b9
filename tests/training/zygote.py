"""A process that has loaded TensorFlow and PyTorch, and is a command a moment after it is asked to be one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.cli.runner import ROOT

SOURCE = """
import json, os, sys
import tensorflow, torch
from msplit.cli import main
children = {}
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(asked["says"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(asked["environment"])
        sys.argv = ["msplit", *asked["arguments"]]
        os._exit(main.run(asked["arguments"]))
    print(child, flush=True)
"""


class Zygote:
    """Starts commands, and waits for them."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        out: IO[str] = self.process.stdout  # type: ignore[assignment]
        return out.readline().strip()

    def _ask(self, **asked: object) -> int:
        given: IO[str] = self.process.stdin  # type: ignore[assignment]
        given.write(json.dumps(asked) + "\n")
        given.flush()
        return int(self.line())

    def start(
        self, arguments: tuple[object, ...], environment: Mapping[str, str] | None = None, says: Path | None = None
    ) -> int:
        """Starts a command, and gives the number of its process. What it says goes to a file."""
        return self._ask(
            arguments=[*map(str, arguments)], environment=dict(environment or {}), says=str(says or os.devnull)
        )

    def wait(self, child: int) -> int:
        """The exit code of a command that was started; that of a signal is negative."""
        return self._ask(wait=child)

    def run(self, arguments: tuple[object, ...]) -> int:
        """Runs a command, and gives its exit code."""
        return self.wait(self.start(arguments))
