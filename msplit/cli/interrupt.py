"""Ctrl-C that is not lost: an import of a large library may catch the KeyboardInterrupt, so it is raised again where work goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pressed = threading.Event()


@contextmanager
def watched() -> Iterator[None]:
    """Remembers an interrupt in the block, beside raising it as Python does. Leaves handlers of others alone."""
    _pressed.clear()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(number: int, frame: FrameType | None) -> None:
    _pressed.set()
    signal.default_int_handler(number, frame)


def pressed() -> bool:
    """Whether there was an interrupt."""
    return _pressed.is_set()


def check() -> None:
    """Raises an interrupt that something has swallowed."""
    if _pressed.is_set():
        raise KeyboardInterrupt
