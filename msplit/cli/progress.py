"""How a command tells what it is doing: a bar on a terminal, lines with times for --verbose, nothing in a pipe. All on stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from msplit import escape, progress
from msplit.cli import interrupt, output

PATIENCE = 0.7
"""Seconds after which a command that is still at work shows a bar."""

_display: list[Silent] = []
"""What listens now: nothing, or one."""


class Silent:
    """A `progress.Listener` that says nothing."""

    def begin(self, what: str) -> None:
        """See `progress.Listener`."""
        del what
        interrupt.check()

    def share(self, done: float) -> None:
        """See `progress.Listener`."""
        del done
        interrupt.check()

    def end(self) -> None:
        """See `progress.Listener`."""

    def wrote(self, path: Path) -> None:
        """See `progress.Listener`."""
        output.wrote(path)

    def close(self) -> None:
        """Nothing to take away."""


class Bar(Silent):
    """A `progress.Listener` that draws a bar, from `PATIENCE` seconds on."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._phases: list[tuple[str, float | None]] = []
        self._lock = threading.Lock()  # a timer draws first, so that one long first phase shows, too
        self._closed = False
        self._terminal = _terminal()
        self._drawn: Any = None
        self._task: Any = None
        self._timer = threading.Timer(patience, self._draw)
        self._timer.daemon = True
        self._timer.start()

    def begin(self, what: str) -> None:
        """See `progress.Listener`."""
        super().begin(what)
        with self._lock:
            self._phases.append((what, None))
            self._show()
            if self._drawn is not None:
                self._drawn.refresh()  # now: what begins may keep the interpreter to itself, as an import does

    def share(self, done: float) -> None:
        """See `progress.Listener`."""
        super().share(done)
        with self._lock:
            if self._phases:
                self._phases[-1] = (self._phases[-1][0], done)
                self._show()

    def end(self) -> None:
        """See `progress.Listener`."""
        with self._lock:
            if self._phases:
                self._phases.pop()
                self._show()

    def close(self) -> None:
        """Takes the bar off the terminal."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._drawn is not None:
                self._drawn.stop()
                self._drawn = None
            if self._terminal is not None:
                self._terminal.close()
                self._terminal = None

    def _draw(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._closed:
                return
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn())
            self._drawn = Progress(*columns, console=output.console(self._terminal or sys.stderr), transient=True)
            self._task = self._drawn.add_task("starting", total=None)
            self._show()
            self._drawn.start()

    def _show(self) -> None:
        if self._drawn is None or not self._phases:
            return
        (what, share), outer = self._phases[-1], self._phases[0][0]
        text = what if len(self._phases) == 1 else f"{outer}: {what}"
        self._drawn.update(
            self._task,
            description=escape.line(text),
            total=None if share is None else 1.0,
            completed=0.0 if share is None else share,
        )


def _terminal() -> IO[str] | None:
    """Standard error as it is now: TensorFlow starts with it turned away, and that takes long enough to be told."""
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding, errors="replace")
    except (OSError, ValueError, AttributeError):  # no file of the system's
        return None


class Lines(Silent):
    """A `progress.Listener` that writes a line per phase when it is over, with the time it took."""

    def __init__(self) -> None:
        self._phases: list[tuple[str, float]] = []

    def begin(self, what: str) -> None:
        """See `progress.Listener`."""
        super().begin(what)
        self._phases.append((what, time.perf_counter()))

    def summed(self, sums: progress.Sums) -> None:
        """See `progress.HearsSums`."""
        for one in sums.phases:
            times = f", {one.times} times" if one.times > 1 else ""
            output.tell(f"{one.seconds:8.2f} s  preparation: {escape.line(one.phase)}{times}")
        output.tell(f"{sums.seconds:8.2f} s  preparation")

    def end(self) -> None:
        """See `progress.Listener`."""
        names = ": ".join(what for what, _ in self._phases)
        _, start = self._phases.pop()
        output.tell(f"{time.perf_counter() - start:8.2f} s  {escape.line(names)}")


@contextmanager
def shown(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Shows the phases of everything in the block: as lines if `verbose`, as a bar where stderr is a terminal, else not at all."""
    if verbose:
        display: Silent = Lines()
    elif not quiet and sys.stderr.isatty():
        display = Bar()
    else:
        display = Silent()
    _display.append(display)
    try:
        with progress.listening(display):
            yield
    finally:
        clear()


def clear() -> None:
    """Takes a bar off the terminal, because results come now."""
    while _display:
        _display.pop().close()
