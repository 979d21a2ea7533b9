"""Typed access to the options of a rule in YAML. Mistakes are collected, so that a user sees all of them at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msplit.errors import RulesError
from msplit.formats.text import read_text
from msplit.rules import streamfile
from msplit.rules.document import Value

MAX_STREAM_FILE = 256 << 20
"""Longest stream file, bytes: the exact names of a million nodes."""

MAX_STREAMS = 1024
"""Most streams. A GPU runs at most 128 kernels at once."""


@dataclass
class Reading:
    """What is known while one rules file is read.

    Attributes:
        source: Name of the file, for messages.
        folder: Where relative paths start; None where there is no file.
        streams: Ids are 0..streams-1.
        wrap: Whether ids out of range are taken modulo `streams` later.
        files: Where not None, the stream files that there are, by the name that the rules have for them: none is read from the disk.
        read: The stream files that were read, likewise.
        problems: (line, what, how to mend it) of each mistake found so far.
    """

    source: str
    folder: Path | None
    streams: int = MAX_STREAMS
    wrap: bool = False
    files: Mapping[str, str] | None = None
    read: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[int, str, str]] = field(default_factory=list)

    def problem(self, line: int, what: str, fix: str) -> None:
        """Note a mistake."""
        self.problems.append((line, what, fix))

    def finish(self) -> None:
        """Raise what was found.

        Raises:
            RulesError: There are problems.
        """
        found = sorted(set(self.problems), key=lambda problem: problem[0])
        if len(found) == 1:
            line, what, fix = found[0]
            raise RulesError(what, where=f"{self.source}:{line}", fix=fix)
        if found:
            shown = [f"line {line}: {what} ({fix})" for line, what, fix in found[:20]]
            if len(found) > len(shown):
                shown.append(f"… and {len(found) - len(shown)} more")
            raise RulesError(f"{len(found)} mistakes", where=self.source, details=shown)


class Options:
    """The options of one rule, or the entries of a rules file.

    Every method that reads an option returns its default after noting a problem, so that reading goes on.

    Args:
        owner: What the options belong to, for messages.
        value: The mapping; nothing stands for no options.
        reading: Collects problems.
    """

    def __init__(self, owner: str, value: Value, reading: Reading) -> None:
        self.owner = owner
        self.line = value.line
        self.reading = reading
        self._read: list[str] = []
        self._items: dict[Any, Value] = {}
        self._lines: dict[Any, int] = {}
        if isinstance(value.data, dict):
            self._items, self._lines = value.data, value.keys
        elif value.data is not None:
            reading.problem(
                value.line, f"{owner} needs options in a mapping, not {value.kind}", "write {option: value}"
            )

    def problem(self, what: str, *, fix: str = "see the shipped rule set 'example'", at: int | None = None) -> None:
        """Note a mistake at a line (default: that of the owner)."""
        self.reading.problem(self.line if at is None else at, what, fix)

    def location(self, line: int) -> str:
        """``file:line``."""
        return f"{self.reading.source}:{line}"

    def names(self) -> list[Any]:
        """The keys in the order of the file."""
        return list(self._items)

    def value(self, name: str) -> Value | None:
        """A value as it is, or None where it is not given."""
        self._read.append(name)
        return self._items.get(name)

    def choice(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """One of some words."""
        value = self.value(name)
        if value is None:
            return default
        if value.data in allowed:
            return str(value.data)
        self._wrong(name, value, f"one of {', '.join(allowed)}{nearest(str(value.data), allowed)}")
        return default

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number between two bounds."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value.data, int) and not isinstance(value.data, bool) and low <= value.data <= high:
            return value.data
        self._wrong(name, value, f"a whole number from {low} to {high}")
        return default

    def number(self, name: str, default: float, low: float) -> float:
        """A finite number that is not below a bound."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value.data, (int, float)) and not isinstance(value.data, bool) and low <= value.data < 1e12:
            return float(value.data)
        self._wrong(name, value, f"a number of {low:g} or more")
        return default

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value.data, bool):
            return value.data
        self._wrong(name, value, "true or false")
        return default

    def text(self, name: str) -> str | None:
        """Text that is not empty."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value.data, str) and value.data:
            return value.data
        self._wrong(name, value, "text")
        return None

    def mapping(self, name: str) -> Options | None:
        """Options inside an option."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value.data, dict):
            return Options(f"{self.owner}.{name}", value, self.reading)
        self._wrong(name, value, "a mapping")
        return None

    def texts(self, name: Any) -> list[tuple[str, int]]:
        """Texts with their lines: a list, or a single one."""
        value = self.value(name)
        if value is None:
            return []
        items = value.data if isinstance(value.data, list) else [value]
        texts = []
        for item in items:
            if isinstance(item.data, str):
                texts.append((item.data, item.line))
            else:
                self._wrong(str(name), item, "text, or a list of texts")
        return texts

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

    def finish(self) -> None:
        """Note every key that nobody has read."""
        for key in self._items:
            if key not in self._read:
                near = nearest(str(key), self._read)
                known = (
                    f"{self.owner} takes {', '.join(self._read)}" if self._read else f"{self.owner} takes no options"
                )
                self.problem(f"unknown key {key!r} in {self.owner}{near}", at=self._lines[key], fix=known)

    def _wrong(self, name: str, value: Value, wanted: str) -> None:
        shown = f" {value.data!r}" if isinstance(value.data, (str, int, float)) else ""
        self.problem(f"{self.owner}.{name} is {value.kind}{shown}", at=value.line, fix=f"it takes {wanted}")


def _out_of_range(stream: int, streams: int) -> tuple[str, str]:
    what = f"stream id {stream} is out of range: with {streams} stream{'s' * (streams != 1)}, ids are 0..{streams - 1}"
    return what, f"set `streams: {stream + 1}` or more, pass --streams {stream + 1}, or pass --wrap"


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is most like an unknown one, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
