"""Runs the tool on hostile input for a while: `python -m tests.fuzz --seconds 600`.

Every case goes through analyze, assign, check of what was written and analyze of that again, by the command line in a process of its own.
Only msplit's own errors may come out; limits are in `case.py`. Cases of hostile names go through every command and format, and what is
printed and written may do no harm (`names.py`). Changed plans are held against an oracle (`plans.py`), and what assign writes must pass
check (`checked.py`). Changed requests to a server are answered right or refused
(`requests.py`).
Lookups (`lookups.py`), ops on special values (`values.py`) and networks and train steps on simulated streams and GPUs (`networks.py`)
are held against TensorFlow.
`--kind names` runs cases of one kind only,
`--case structure:17` runs one case again and prints what it does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = {
    "structure": ("structure", 6),
    "damage": ("damage", 2),
    "text": ("texts", 2),
    "names": ("names", 1),
    "special": ("special", 1),
    "plans": ("plans", 1),
    "checked": ("checked", 1),
    "requests": ("requests", 6),
    "lookups": ("lookups", 1),
    "values": ("values", 1),
    "networks": ("networks", 1),
}
"""Kind -> its module, and how many of 23 cases are of it."""

WITH_TENSORFLOW = frozenset({"lookups", "values", "networks"})
"""Kinds whose cases are held against TensorFlow, the import of which takes seconds."""

HANG = 60.0
"""Seconds of wall time after which a case that answers nothing is given up."""


@dataclass
class Tally:
    """What a campaign found.

    Attributes:
        cases: Cases by kind.
        codes: Exit codes of all commands.
        problems: Case -> what was wrong.
        slowest: Processor seconds and name of the slowest case.
        largest: Megabytes and name of the one that took most memory.
        seconds: Wall time of all.
    """

    cases: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    problems: dict[str, str] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[float, str] = (0.0, "")
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.cases.items()))
        codes = ", ".join(f"{count:,} × {code}" for code, count in sorted(self.codes.items()))
        return (
            f"{self.cases.total():,} cases ({kinds}) in {self.seconds:.0f} s; exit codes {codes}; "
            f"slowest {self.slowest[0]:.2f} s ({self.slowest[1]}), most memory {self.largest[0]:.0f} MB ({self.largest[1]}); "
            f"{len(self.problems)} problems"
        )


def case_named(name: str) -> Any:
    """The case of a name such as `structure:17`."""
    kind, _, seed = name.partition(":")
    return importlib.import_module(f"tests.fuzz.{KINDS[kind][0]}").make(int(seed))


def run(case: Any, folder: Path) -> Any:
    """The result of a case. A kind whose commands are its own runs them itself."""
    from tests.fuzz.case import run as run_commands

    module = importlib.import_module(f"tests.fuzz.{KINDS[case.name.partition(':')[0]][0]}")
    return getattr(module, "run", run_commands)(case, folder)


def work() -> None:
    """Answers names of cases on standard input with results on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="msplit-fuzz-") as folder:
        for name in ("text:0", "structure:1", "damage:40", "names:1"):
            run(case_named(name), Path(folder) / "case")  # imports everything: that is not what is measured
        answers.write("ready\n")
        answers.flush()
        for line in sys.stdin:
            result = run(case_named(line.strip()), Path(folder) / "case")
            answers.write(f"{json.dumps(asdict(result))}\n")
            answers.flush()


class Worker:
    """A process that runs cases, started again when one brought it down."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def _line(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], HANG)
        return self.process.stdout.readline() if ready else ""

    def run(self, name: str) -> dict[str, Any]:
        """The result of a case."""
        if self.process is None:
            command = [sys.executable, "-m", "tests.fuzz", "--worker"]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
            )
            if self._line() != "ready\n":
                raise RuntimeError("the worker does not start")
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        answer = self._line()
        if answer:
            result: dict[str, Any] = json.loads(answer)
            return result
        code = self.process.poll()
        self.stop()
        ended = f"hung for {HANG:g} s" if code is None else f"died with {code}"
        return {"problem": f"the process {ended}", "codes": (), "seconds": 0.0, "megabytes": 0.0}

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def campaign(seconds: float, seed: int, tell: Any = None, kinds: Iterable[str] = KINDS) -> Tally:
    """Runs cases until the time is up.

    Args:
        seconds: Wall time.
        seed: Number of the first case of each kind.
        tell: Called with a text now and then.
        kinds: Of which.
    """
    tally, worker = Tally(), Worker()
    schedule = [kind for kind in kinds for _ in range(KINDS[kind][1])]
    start = told = time.monotonic()
    numbers: Counter[str] = Counter()
    try:
        while (now := time.monotonic()) - start < seconds:
            for kind in schedule:
                name = f"{kind}:{seed + numbers[kind]}"
                numbers[kind] += 1
                result = worker.run(name)
                tally.cases[kind] += 1
                tally.codes.update(result["codes"])
                tally.slowest = max(tally.slowest, (result["seconds"], name))
                tally.largest = max(tally.largest, (result["megabytes"], name))
                if result["problem"]:
                    tally.problems[name] = result["problem"]
                    if tell:
                        tell(f"{name}: {result['problem']}")
            tally.seconds = time.monotonic() - start
            if tell and now - told > 60:
                told = now
                tell(str(tally))
    finally:
        worker.stop()
    return tally


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case of each kind (default: 0)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only cases of this kind; repeatable")
    parser.add_argument("--case", help="run this case only, in this process, and keep its files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return 0
    if options.case:
        folder = Path(tempfile.mkdtemp(prefix="msplit-fuzz-")) / "case"
        run(case_named(options.case), folder)
        result = run(case_named(options.case), folder)
        sys.stdout.write(f"{folder}\n{result}\n")
        return bool(result.problem)
    tally = campaign(options.seconds, options.seed, tell=_say, kinds=options.kind or KINDS)
    _say(str(tally))
    return bool(tally.problems)


if __name__ == "__main__":
    sys.exit(main())
