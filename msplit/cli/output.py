"""Where the command line's words go out: the only place that writes to stdout and stderr, so that nothing passes by unescaped.

Whatever the encoding of the streams, nothing is lost for it: what it lacks is replaced (`escape.HANDLER`), in JSON and XML by escapes
of their own.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

from msplit import escape

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
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def give_up(stream: TextIO) -> None:
    """Lets what is left in the buffer of a stream go nowhere, so that flushing it at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _unicode() -> bool:
    encoding = getattr(sys.stdout, "encoding", None)
    return encoding is None or codecs.lookup(encoding).name.startswith("utf")
