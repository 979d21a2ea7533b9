"""The options of rules: those of any settings, and stream ids and stream files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msplit.core.arguments import MAX_STREAMS
from msplit.errors import RulesError
from msplit.formats.settings import Options, Reading, Value
from msplit.formats.text import read_text
from msplit.rules import streamfile

MAX_STREAM_FILE = 256 << 20
"""Longest stream file, bytes: the exact names of a million nodes."""


@dataclass
class RulesReading(Reading):
    """What is known while one rules file is read.

    Attributes:
        folder: Where relative paths start; None where there is no file.
        streams: Ids are 0..streams-1.
        wrap: Whether ids out of range are taken modulo `streams` later.
        files: Where not None, the stream files that there are, by the name that the rules have for them: none is read from the disk.
        read: The stream files that were read, likewise.
    """

    folder: Path | None = None
    streams: int = MAX_STREAMS
    wrap: bool = False
    files: Mapping[str, str] | None = None
    read: dict[str, str] = field(default_factory=dict)


class RuleOptions(Options):
    """The options of one rule, or the entries of a rules file. See `Options`."""

    reading: RulesReading

    def __init__(self, owner: str, value: Value, reading: RulesReading) -> None:
        super().__init__(owner, value, reading)

    def stream_id(self, key: Any) -> int:
        """A key that is a stream id."""
        line = self._lines[key]
        if not isinstance(key, int) or isinstance(key, bool) or key < 0:
            self.problem(
                f"{self.owner}: stream id {key!r} is not a whole number of 0 or more",
                at=line,
                fix="write 1: [patterns]",
            )
            return 0
        if key >= self.reading.streams and not self.reading.wrap:
            what, fix = _out_of_range(key, self.reading.streams)
            self.problem(what, at=line, fix=fix)
        return key

    def stream_file(self, name: str, file: str) -> tuple[streamfile.Entry, ...]:
        """The patterns of a stream file that an option names, relative to the rules file.

        A file that can not be read is noted as a problem of the rules file, and has no patterns.

        Raises:
            RulesError: A line of it is malformed, or its stream is out of range.
        """
        line = self._lines[name]
        folder = self.reading.folder
        path = Path(file) if folder is None else folder / file
        try:
            text = read_text(path, MAX_STREAM_FILE) if self.reading.files is None else self.reading.files[file]
        except (OSError, ValueError, EOFError, KeyError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a UTF-8 text file"
            reason = reason if not isinstance(error, EOFError) else f"it is longer than {MAX_STREAM_FILE >> 20} MiB"
            self.problem(
                f"{self.owner}: {path} can not be read: {reason}", at=line, fix="paths are relative to the rules file"
            )
            return ()
        self.reading.read[file] = text
        entries = streamfile.parse(text, str(path))
        for entry in entries:
            if entry.stream >= self.reading.streams and not self.reading.wrap:
                what, fix = _out_of_range(entry.stream, self.reading.streams)
                raise RulesError(what, where=entry.where, fix=fix)
        return entries


def _out_of_range(stream: int, streams: int) -> tuple[str, str]:
    what = f"stream id {stream} is out of range: with {streams} stream{'s' * (streams != 1)}, ids are 0..{streams - 1}"
    return what, f"set `streams: {stream + 1}` or more, pass --streams {stream + 1}, or pass --wrap"
