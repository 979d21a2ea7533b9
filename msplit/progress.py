"""What long work tells of itself: which phase it is in, and how much of it is done. Silent unless somebody listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

Progress = Callable[[str, float], None]
"""Is called with what is being done, and the share of it that is done."""


def silent(what: str, share: float) -> None:
    """Tells nobody."""


class Listener(Protocol):
    """Who wants to know."""

    def begin(self, what: str) -> None:
        """A phase begins, perhaps inside of another."""
        ...

    def share(self, done: float) -> None:
        """How much of the innermost phase is done, 0 to 1."""
        ...

    def end(self) -> None:
        """The innermost phase is over."""
        ...

    def wrote(self, path: Path) -> None:
        """A file or folder that the user named is in its place."""
        ...


_listener: ContextVar[Listener | None] = ContextVar("msplit_progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells a listener of everything that happens inside of the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Says that the block is one phase.

    Args:
        what: What it does, in a few words such as "shapes and costs".
    """
    listener = _listener.get()
    if listener is None:
        yield
        return
    listener.begin(what)
    try:
        yield
    finally:
        listener.end()


def done(share: float) -> None:
    """Says how much of the present phase is done, 0 to 1."""
    listener = _listener.get()
    if listener is not None:
        listener.share(share)


def wrote(path: Path) -> None:
    """Says that a file or folder that the user named is in its place."""
    listener = _listener.get()
    if listener is not None:
        listener.wrote(path)


@contextmanager
def telling() -> Iterator[Progress]:
    """For work that says itself what it does and how much of it is done: what it says is a phase until it says something else."""
    listener = _listener.get()
    now: list[str] = []

    def tell(what: str, share: float) -> None:
        if listener is None:
            return
        if now != [what]:
            if now:
                listener.end()
            now[:] = [what]
            listener.begin(what)
        listener.share(share)

    try:
        yield tell
    finally:
        if now and listener is not None:
            listener.end()
