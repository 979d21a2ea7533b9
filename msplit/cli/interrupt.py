"""Ctrl-C and SIGTERM end a command in order, so that nothing half-written stays behind.

Both are exceptions that unwind the program. An import of a large library may catch a KeyboardInterrupt, so what came is remembered,
and raised again where work goes on. No exception comes while a library computes or waits: where that takes too long, a thread ends the
process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import Any

_BY_SHELL = 128
"""What shells add to the number of a signal that ended a command."""

_watched: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""The signals with the handlers that are replaced: those that a host program or `nohup` has set stay."""

_came: list[int] = []

_TO_HEAR = {False: 10.0, True: 60.0}
"""Seconds until a handler runs; and where a first signal is held back, which work is to end in order."""

_TO_END = 30.0
"""Seconds that a command has to end in order from then on."""

_heard = Event()
"""Set by a handler."""

_wakes: set[int] = set()
"""The ends of pipes into which signals are written for the thread that watches."""

_held_back: list[None] = []
"""One for each `deferred` block that is entered."""


class Terminated(BaseException):
    """SIGTERM or SIGHUP came. A BaseException, so that nothing takes it for a failure that it could do without."""


@contextmanager
def watched() -> Iterator[None]:
    """Raises KeyboardInterrupt or `Terminated` in the block when such a signal comes, and remembers it."""
    _came.clear()
    if current_thread() is not main_thread():
        yield
        return
    ours = [number for number, usual in _watched.items() if signal.getsignal(number) is usual]
    for number in ours:
        signal.signal(number, _interrupted)
    over = Event()
    arrivals, arrived = os.pipe()
    os.set_blocking(arrived, False)
    _wakes.add(arrived)
    before = signal.set_wakeup_fd(arrived, warn_on_full_buffer=False)
    watch = Thread(target=_watch, args=(arrivals, over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        _wakes.discard(arrived)
        os.close(arrived)
        for number in ours:
            signal.signal(number, _watched[number])


def _watch(arrivals: int, over: Event) -> None:
    """Ends the process where a signal that is ours is not heard: the main thread is in a library, and may stay there for ever."""
    while numbers := os.read(arrivals, 64):
        ours = [number for number in numbers if number in _watched and _is_ours(signal.getsignal(number))]
        if not ours:
            continue  # somebody else's
        number, held = ours[0], bool(_held_back)
        in_time = _heard.wait(_TO_HEAR[held]) and (held or over.wait(_TO_END))
        _heard.clear()
        if not (in_time or over.is_set()):
            end(number)
    os.close(arrivals)


def _is_ours(handler: Any) -> bool:
    """Tell whether a handler is one of this module, or the system's, which it puts back when a signal has come."""
    return handler is signal.SIG_DFL or getattr(handler, "__module__", None) == __name__


def _leave_to_parent() -> None:
    """In a forked child: what comes to it is not to wake the parent's thread, which would end the parent."""
    before = signal.set_wakeup_fd(-1)
    if before not in _wakes:
        signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_leave_to_parent)


def end(number: int) -> None:
    """Ends the process at once, with the message and the exit code of a signal."""
    from msplit.cli import output

    output.tell("interrupted" if number == signal.SIGINT else "terminated")
    output.tell_written()
    os._exit(_BY_SHELL + number)


@contextmanager
def deferred() -> Iterator[Callable[[], bool]]:
    """For work that ends in order by itself: in the block a first signal is held back, and what is given tells whether one has come. It is
    remembered at the block's end, so that the command ends with its exit code. Who asks twice does not want to wait.
    """
    held: list[int] = []
    ours = [number for number in _watched if signal.getsignal(number) is _interrupted]

    def hold(number: int, frame: FrameType | None) -> None:
        _heard.set()
        if held:
            _interrupted(number, frame)
        held.append(number)

    for number in ours:
        signal.signal(number, hold)
    _held_back.append(None)
    try:
        yield lambda: bool(held)
    finally:
        _held_back.pop()
        for number in ours:
            if signal.getsignal(number) is hold:
                signal.signal(number, _interrupted)
        _came.extend(held)


def _interrupted(number: int, frame: FrameType | None) -> None:
    del frame
    _heard.set()
    _came.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)  # who asks twice does not want to wait
    raise Terminated


def exit_code() -> int | None:
    """What the command ends with because of a signal that came, 130 for Ctrl-C and 143 for SIGTERM; None where none did."""
    return _BY_SHELL + _came[0] if _came else None


def check() -> None:
    """Raises an interrupt that something has swallowed."""
    if _came:
        raise KeyboardInterrupt if _came[0] == signal.SIGINT else Terminated
