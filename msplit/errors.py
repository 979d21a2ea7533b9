"""Every error that msplit raises on purpose.

    MsplitError                 what happened, where, how to mend it; exit code 2
    ├── LoadError               the model can not be read
    ├── GraphError              the graph is read but is not a valid graph: carries every defect
    ├── RulesError              a rules file or a stream file, with its line
    ├── AssignError             valid rules that contradict each other on this graph
    ├── WriteError              the output can not be written; what was there before is still there
    └── EngineError             the model can not run on the chosen engine
        ├── InvalidInput        a value that a step was fed can not be: an id outside of its table, bytes that are no image
        ├── Busy                a pool has as many requests waiting as it may have
        ├── TimedOut            a request waited, or a step took, longer than it was to
        ├── EndOfData           what a graph reads itself came to an end: no failure, but there is no step any more
        ├── Closed              a pool was closed before a request was answered, or a model is closed
        ├── ProcessLost         a process of a pool ended while it had a request
        ├── RankLost            another of the processes that train together is gone
        └── DeviceLost          the GPU failed, and does nothing more for this process

Anything else that escapes is a bug in msplit, and the command line says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msplit import escape

INSTALL_TENSORFLOW = "pip install 'tensorflow>=2.21,<3'"
INSTALL_PYTORCH = "pip install 'torch>=2.8', or in a checkout of msplit pip install '.[cuda]'"
INSTALL_JAXLIB = "pip install 'jaxlib>=0.10'"
INSTALL_SERVING = "pip install 'grpcio>=1.71' 'uvicorn>=0.34' 'starlette>=0.45' 'prometheus-client>=0.21'"
"""Commands that install the optional libraries of msplit, in the ranges of its pyproject.toml. Not by a name such as `msplit[cuda]`: msplit
is on no package index, and these work wherever it came from."""

LONGEST_LINE = 1_000
"""Most characters of a line of a message: names and values of a damaged file may be of any length."""


class MsplitError(Exception):
    """An error that a user can act on.

    Args:
        what: What happened, one sentence.
        where: File, line or node, if there is one.
        fix: How to mend it, one sentence.
        details: What there is to say besides, each on a line of its own.
    """

    def __init__(
        self, what: str, *, where: str | None = None, fix: str | None = None, details: Sequence[str] = ()
    ) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        self.details = tuple(details)
        super().__init__(str(self))

    def __str__(self) -> str:
        first = f"{self.where}: {self.what}" if self.where else self.what
        # Names in it are a stranger's: whatever they are, a line of the message is one.
        text = "\n  ".join(map(escape.line, [first, *self.details, *([f"fix: {self.fix}"] if self.fix else [])]))
        if len(text) <= LONGEST_LINE:
            return text
        return "\n".join(
            line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 100]} … {line[-90:]}"
            for line in text.split("\n")
        )


class LoadError(MsplitError):
    """The model can not be read."""


class GraphError(MsplitError):
    """The graph is not valid.

    Args:
        defects: Every defect found, as text that names its node.
        where: The file.
    """

    def __init__(self, defects: Sequence[str], *, where: str | None = None) -> None:
        self.defects = tuple(defects)
        shown = list(self.defects[:20])
        if len(self.defects) > len(shown):
            shown.append(f"… and {len(self.defects) - len(shown)} more")
        count = f"{len(self.defects)} defect" + ("s" if len(self.defects) != 1 else "")
        super().__init__(
            f"the graph is not valid: {count}",
            where=where,
            fix="export the model again, or mend the nodes named above",
            details=shown,
        )


class RulesError(MsplitError):
    """A rules file or a stream file is wrong. `where` is file:line where there is a line."""


class AssignError(MsplitError):
    """The rules contradict each other on this graph."""


class WriteError(MsplitError):
    """The output can not be written. What stood at its place before is unharmed."""


class EngineError(MsplitError):
    """The model can not run on the chosen engine."""


class OutOfMemory(EngineError):
    """The device has not enough memory left for it."""


class InvalidInput(EngineError):
    """A step was fed a value that the model can not take, such as an id outside of its table. Steps with other values go on."""


class WrongShape(EngineError):
    """An input has another type or shape than what runs was prepared for."""


class Busy(EngineError):
    """As many requests wait as may. Nothing came of this one: it can be sent again."""


class TimedOut(EngineError):
    """A request waited longer than it was to, and was not run; or a step took longer than it was to, and was given up."""


class EndOfData(EngineError):
    """The data that a graph reads itself, from a dataset or a queue, came to an end: the step was not run, and no later one can be."""


class Closed(EngineError):
    """A pool was closed before the request was run, or a model is closed."""


class ProcessLost(EngineError):
    """The process of a pool that had the request ended before it answered. Another one takes its place; the request may be sent again."""


class RankLost(EngineError):
    """Another of the processes that train together is gone, or did not come."""


class DeviceLost(EngineError):
    """The GPU failed, and does nothing more for this process: only another one can go on."""


def is_read(load: Callable[[Path], Any], path: Path) -> bool:
    """True if a function reads a file without a MsplitError: then another file of its kind may replace it."""
    try:
        load(path)
    except MsplitError:
        return False
    return True
