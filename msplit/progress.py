"""What long work tells of itself: which phase it is in, and how much of it is done. Silent unless somebody listens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


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


_listener: ContextVar[Listener | None] = ContextVar("msplit_progress", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells a listener of everything that happens inside of the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def present() -> Listener | None:
    """Who listens."""
    return _listener.get()


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
