"""Reports of long work: its current phase, and the share of it that is done. Silent unless somebody listens.

`timing` sums up the seconds of the phases beside that, whoever listens:

    with timing() as phases:
        with phase("planning"):
            ...
    phases.stop().phases  # PhaseSum(phase="planning", seconds=0.3, times=1), ...
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from msplit import escape

LOG = logging.getLogger("msplit")
"""The logger of all of msplit, without a handler: nobody sees it unless a program asks. Phases of preparing are DEBUG, what a program that
serves wants to see of each preparation is INFO, and WARNING is what costs time or is not as it was asked for."""
LOG.addHandler(logging.NullHandler())

Value = TypeVar("Value")

Progress = Callable[[str, float], None]
"""Is called with what is being done, and the share of it that is done."""


def silent(what: str, share: float) -> None:
    """Tells nobody."""


class Listener(Protocol):
    """A receiver of the reports, for example a progress bar."""

    def begin(self, what: str) -> None:
        """A phase begins, perhaps inside of another."""

    def share(self, done: float) -> None:
        """The innermost phase has come to a share of its work, 0 to 1."""

    def end(self) -> None:
        """The innermost phase is over."""

    def wrote(self, path: Path) -> None:
        """A file or folder that the user named is in its place."""


@dataclass(frozen=True)
class PhaseSum:
    """Time of all phases of one name together.

    Attributes:
        seconds: Their own time: that of phases inside of them is not in it.
        times: How often there was one.
    """

    phase: str
    seconds: float
    times: int


@dataclass(frozen=True)
class Sums:
    """Time that the phases took, and all of it.

    Attributes:
        seconds: All of it, also what was in no phase.
        phases: The longest first.
    """

    seconds: float
    phases: tuple[PhaseSum, ...]


@runtime_checkable
class HearsSums(Protocol):
    """A listener that wants to know what phases sum up to, too."""

    def summed(self, sums: Sums) -> None:
        """Preparation is over, and this is where its time went."""


class _Told:
    """A listener, and who began each phase that it was told of: what ends a phase ends what was begun inside of it."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.open: list[object] = []

    def begin(self, what: str, who: object = None) -> None:
        self.listener.begin(what)
        self.open.append(who)

    def end(self, depth: int) -> None:
        """Ends all phases but the outermost `depth`."""
        while len(self.open) > depth:
            self.open.pop()
            self.listener.end()


class Phases:
    """Sums up the phases of a block; see `timing`. What `telling` tells is not among them: its names are for people, and say of what.

    Args:
        now: Clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = self._last = now()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._times: dict[str, int] = {}
        self._sums: Sums | None = None

    def stop(self) -> Sums:
        """Ends the sum, and gives it: what comes later does not count."""
        if self._sums is None:
            self._charge()
            found = (PhaseSum(what, seconds, self._times[what]) for what, seconds in self._seconds.items())
            self._sums = Sums(self._last - self._start, tuple(sorted(found, key=lambda one: -one.seconds)))
        return self._sums

    def _charge(self) -> None:
        """Adds the time since the last change of phases to the innermost phase."""
        now = self._now()
        if self._open and self._sums is None:
            self._seconds[self._open[-1]] += now - self._last
        self._last = now

    def _begin(self, what: str) -> None:
        self._charge()
        self._open.append(what)
        if self._sums is None:
            self._seconds.setdefault(what, 0.0)
            self._times[what] = self._times.get(what, 0) + 1

    def _end(self) -> None:
        self._charge()
        self._open.pop()


_told: ContextVar[_Told | None] = ContextVar("msplit_progress", default=None)
_timed: ContextVar[tuple[Phases, ...]] = ContextVar("msplit_phases", default=())


@contextmanager
def during(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Sets a variable of the context for a block, which is given the value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def listening(listener: Listener) -> AbstractContextManager[object]:
    """Tells a listener of everything that happens inside of the block."""
    return during(_told, _Told(listener))


@contextmanager
def timing(now: Callable[[], float] = time.perf_counter) -> Iterator[Phases]:
    """Sums up the phases of the block, up to its end, to `Phases.stop` or to `prepared`. Who listens goes on listening."""
    phases = Phases(now)
    token = _timed.set((*_timed.get(), phases))
    try:
        yield phases
    finally:
        _timed.reset(token)
        phases.stop()


@contextmanager
def phase(what: str, *, detail: bool = False) -> Iterator[None]:
    """Says that the block is one phase.

    Args:
        what: What it does, in a few words such as "shapes and costs". Sums go by it.
        detail: Whether it is for who listens only, such as one of many candidates: in sums, the phase around it has its time.
    """
    told, timed = _told.get(), () if detail else _timed.get()
    logged = not detail and LOG.isEnabledFor(logging.DEBUG)
    if told is None and not timed and not logged:
        yield
        return
    start = time.perf_counter()
    if logged:
        LOG.debug("%s", escape.line(what))
    depth = 0 if told is None else len(told.open)
    if told is not None:
        told.begin(what)
    for one in timed:
        one._begin(what)
    try:
        yield
    finally:
        for one in timed:
            one._end()
        if told is not None:
            told.end(depth)
        if logged:
            LOG.debug("%s: %.3f s", escape.line(what), time.perf_counter() - start)


def prepared(what: object = "") -> None:
    """Says that all is ready: the innermost `timing`, if there is one, sums up no more, and a listener that is a `HearsSums` is told.

    Args:
        what: Name of what is ready, for the log.
    """
    told = _told.get()
    for phases in _timed.get()[-1:]:
        sums = phases.stop()
        if LOG.isEnabledFor(logging.INFO):
            longest = ", ".join(f"{one.phase} {one.seconds:.2f} s" for one in sums.phases[:_LONGEST])
            LOG.info("%s", escape.line(f"{what or 'a model'} is prepared after {sums.seconds:.2f} s: {longest}"))
        if told is not None and isinstance(told.listener, HearsSums):
            told.listener.summed(sums)


_LONGEST = 4
"""Phases that the log names."""


def importing(module: str, what: str) -> AbstractContextManager[None]:
    """A phase for the import of a module that takes long to load; none where it is loaded already."""
    return nullcontext() if module in sys.modules else phase(f"starting {what}")


def done(share: float) -> None:
    """Says how much of the present phase is done, 0 to 1."""
    told = _told.get()
    if told is not None:
        told.listener.share(share)


def wrote(path: Path) -> None:
    """Says that a file or folder that the user named is in its place."""
    told = _told.get()
    if told is not None:
        told.listener.wrote(path)


@contextmanager
def telling() -> Iterator[Progress]:
    """For work that says itself what it does and how much of it is done: what it says is a phase until it says something else, or
    until a phase ends that it has begun in.
    """
    told = _told.get()
    if told is None:
        yield silent
        return
    depth, me, said = len(told.open), object(), list[str]()

    def tell(what: str, share: float) -> None:
        inside = told.open[-1:] == [me]
        if not inside or said != [what]:
            if inside:
                told.end(len(told.open) - 1)
            said[:] = [what]
            told.begin(what, me)
        told.listener.share(share)

    try:
        yield tell
    finally:
        told.end(depth)
