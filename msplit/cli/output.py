"""Output, progress and interruption of a command.

Where the command line's words go out: the only place that writes to stdout and stderr, so that nothing passes by unescaped.

Whatever the encoding of the streams, nothing is lost for it: what it lacks is replaced (`escape.HANDLER`), in JSON and XML by escapes
of their own.

How a command tells what it is doing: a bar on a terminal, lines with times for --verbose, nothing in a pipe. All on stderr.

Ctrl-C and SIGTERM end a command in order, so that nothing half-written stays behind.

Both are exceptions that unwind the program. An import of a large library may catch a KeyboardInterrupt, so what came is remembered,
and raised again where work goes on. No exception comes while a library computes or waits: where that takes too long, a thread ends the
process.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from types import FrameType
from typing import IO, TYPE_CHECKING, Any, TextIO

from msplit import escape, progress

if TYPE_CHECKING:
    from rich.console import Console


_written: list[Path] = []
"""Files that the present command has written."""

_MOST_WRITTEN = 8
"""Files of one folder that are named one by one: no more are asked for at once."""


def begin() -> None:
    """Prepares the streams for a command."""
    _written.clear()
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:  # closed by the caller (`>&-`): the next pipe or socket would be taken for it, by processes that are started, too
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=escape.HANDLER)


def say(text: str) -> None:
    """Writes a text and a line break to stdout. Its line breaks are msplit's own; names in it are escaped."""
    _put(escape.lines(text) + "\n")


def rendered(text: str) -> None:
    """Writes what a renderer made of escaped texts to stdout: a table, perhaps with colours, or Markdown."""
    _put(escape.guarded(text))


def json(text: str) -> None:
    """Writes a document of JSON and a line break to stdout."""
    _put(escape.json_document(text, ascii_only=not _unicode()) + "\n")


def xml(text: str) -> None:
    """Writes a document of XML to stdout."""
    _put(escape.xml_document(text, ascii_only=not _unicode()))


def commands(text: str) -> None:
    """Writes workflow commands to stdout: lines that are meant to command."""
    _put(text)


def tell(text: str) -> None:
    """Writes a text and a line break to stderr, like `say`. Where nobody can read it, it is lost."""
    try:
        sys.stderr.write(escape.lines(text) + "\n")
        sys.stderr.flush()
    except OSError:
        give_up(sys.stderr)


def wrote(path: Path) -> None:
    """Remembers that the command has written a file."""
    _written.append(path)


def tell_written() -> None:
    """Says which files are there although the command did not end well: those of one folder, such as kept kernels, in a line where they
    are many."""
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(_written):
        if os.path.lexists(path):
            folders.setdefault(path.parent, []).append(path)
    for folder, paths in folders.items():
        many = [f"{len(paths):,} files in {folder}"] if len(paths) > _MOST_WRITTEN else map(str, paths)
        for what in many:
            tell(f"Written before that: {escape.line(what)}")


def console(file: IO[str] | None = None) -> Console:
    """Standard output or another file: as wide as the terminal, 100 columns in a pipe, no colour where NO_COLOR says so."""
    import shutil

    from rich.console import Console

    stream = file or sys.stdout
    width = None
    if not stream.isatty() and "COLUMNS" not in os.environ:
        width = max(100, shutil.get_terminal_size((100, 24)).columns)
    plain = False if isinstance(stream, _File) else None  # FORCE_COLOR is about what is shown
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, force_terminal=plain)


class _File(io.StringIO):
    """Standard output whose text becomes a file."""


@contextmanager
def into(path: Path | None, *, force: bool) -> Iterator[None]:
    """Writes what the block says on stdout to a file, whole or not at all; to stdout where no file is named.

    Raises:
        WriteError: It can not be written. What was there before is unharmed.
    """
    if path is None:
        yield
        return
    from msplit.formats.atomic import write_bytes_atomic

    with redirect_stdout(_File()) as text:
        yield
    write_bytes_atomic(path, text.getvalue().encode("utf-8", escape.HANDLER), force=force)


def give_up(stream: TextIO) -> None:
    """Lets what is left in the buffer of a stream go nowhere, so that flushing it at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _unicode() -> bool:
    encoding = getattr(sys.stdout, "encoding", None)
    return encoding is None or codecs.lookup(encoding).name.startswith("utf")


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

    tell("interrupted" if number == signal.SIGINT else "terminated")
    tell_written()
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


PATIENCE = 0.7
"""Seconds after which a command that is still at work shows a bar."""

_display: list[Silent] = []
"""What listens now: nothing, or one."""


class Silent:
    """A `progress.Listener` that says nothing."""

    def begin(self, what: str) -> None:
        """See `progress.Listener`."""
        check()

    def share(self, done: float) -> None:
        """See `progress.Listener`."""
        check()

    def end(self) -> None:
        """See `progress.Listener`."""

    def wrote(self, path: Path) -> None:
        """See `progress.Listener`."""
        wrote(path)

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
            self._drawn = Progress(*columns, console=console(self._terminal or sys.stderr), transient=True)
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
            tell(f"{one.seconds:8.2f} s  preparation: {escape.line(one.phase)}{times}")
        tell(f"{sums.seconds:8.2f} s  preparation")

    def end(self) -> None:
        """See `progress.Listener`."""
        names = ": ".join(what for what, _ in self._phases)
        _, start = self._phases.pop()
        tell(f"{time.perf_counter() - start:8.2f} s  {escape.line(names)}")


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
    warnings = _Warnings(logging.WARNING)
    progress.LOG.addHandler(warnings)
    try:
        with progress.listening(display):
            yield
    finally:
        progress.LOG.removeHandler(warnings)
        clear()


class _Warnings(logging.Handler):
    """Tells what the library warns of."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line to stderr."""
        tell(f"{record.levelname.lower()}: {escape.line(record.getMessage())}")


def clear() -> None:
    """Takes a bar off the terminal, because results come now."""
    while _display:
        _display.pop().close()
