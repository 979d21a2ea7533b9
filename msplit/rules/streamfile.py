"""Stream files: NVIDIA's `TF_STREAM_FROM_FILE` format, read with its holes closed, and written so that NVIDIA's reader agrees.

A line is ``<id>:<regex>[,<regex>…]``. NVIDIA's reader cuts a line at every ``:`` and ``,``, wants a full match, keeps the last line of
an id only, knows no comments, and lets the order of a hash map decide between ids. Here:

- lines that are blank or start with ``#`` are skipped, and space around ids and patterns is ignored;
- only the first ``:`` separates; a ``,`` inside brackets or behind a backslash belongs to the pattern;
- all lines count, in the order of the file, and every broken line is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msplit.errors import RulesError
from msplit.rules import patterns

_SYNTAX = frozenset("^$\\.*+?()[]{}|")
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_/>-")
_MAX_SHOWN = 20
_DEEPEST = 50_000
"""Characters of a name that C++'s `std::regex` matched with 8 MiB of stack: it calls itself for each, and 70,000 ended the process."""


@dataclass(frozen=True)
class Entry:
    """A pattern, the stream id that it gives, and ``file:line``."""

    stream: int
    pattern: str
    where: str


@dataclass(frozen=True)
class Trap:
    """A line, from 1, that NVIDIA's reader takes differently, and what it does with it."""

    line: int
    text: str


def parse(text: str, source: str) -> tuple[Entry, ...]:
    """Reads the patterns of a stream file, in its order. `source` is its name, for messages.

    Raises:
        RulesError: With every broken line.
    """
    entries: list[Entry] = []
    bad: list[tuple[int, str]] = []
    for number, line in _lines(text):
        head, colon, rest = line.partition(":")
        if not colon:
            bad.append((number, "there is no ':' between the stream id and the patterns"))
            continue
        if not re.fullmatch(r"[0-9]{1,9}", head.strip()):
            bad.append((number, f"the stream id {patterns.shorten(head.strip())!r} is not a number"))
            continue
        for pattern in map(str.strip, _split(rest)):
            why = patterns.problem(pattern) if pattern else "the pattern is empty"
            if why is None:
                entries.append(Entry(int(head), pattern, f"{source}:{number}"))
            else:
                bad.append((number, f"bad pattern {patterns.shorten(pattern)!r}: {why}" if pattern else why))
    if bad:
        raise _broken(bad, source)
    return tuple(entries)


def traps(text: str) -> tuple[Trap, ...]:
    """The lines that NVIDIA's reader takes differently than this one, though this one reads them without an error."""
    found: list[Trap] = []
    last: dict[str, int] = {}
    ends = text.count("\n")
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            if number <= ends or line:
                kind = "a comment" if line else "a blank line"
                found.append(Trap(number, f"{kind}: its reader knows none and may crash"))
            continue
        head, _, rest = line.partition(":")
        # Its atoi skips space before an id, but nothing skips it in a pattern: neither space at the end nor a carriage return.
        if any(part != part.strip() for part in raw.partition(":")[2].split(",")):
            found.append(
                Trap(number, "space around a pattern (or a Windows line end): to its reader it is part of the pattern")
            )
        if ":" in rest:
            found.append(Trap(number, "a ':' inside a pattern: its reader cuts the line there"))
        if len(_split(rest)) != len(rest.split(",")):
            found.append(Trap(number, "a ',' inside a pattern: its reader cuts the pattern there"))
        if any(len(part) > _DEEPEST for part in _split(rest)):
            found.append(
                Trap(number, f"a pattern of more than {_DEEPEST:,} characters: its reader may run out of stack")
            )
        key = head.strip()
        if key in last:
            found.append(Trap(number, f"id {key} has a line already (line {last[key]}): its reader forgets that one"))
        last[key] = number
    return tuple(found)


def emit(names: Sequence[str], ids: Iterable[int]) -> str:
    """Writes exact node names as a stream file, lines ascending by id. Nodes with a negative id are left out.

    One line per id, since NVIDIA's reader keeps only the last line of an id, with every name escaped so that a full match by an ECMAScript
    engine, or by this module, accepts this name only.
    """
    lines: dict[int, list[str]] = {}
    for name, stream in zip(names, ids, strict=True):
        if stream >= 0:
            lines.setdefault(int(stream), []).append(escape(name))
    return "".join(f"{stream}:{','.join(lines[stream])}\n" for stream in sorted(lines))


def escape(name: str) -> str:
    """A pattern that fully matches one name only, without ``:`` and ``,``."""
    return name if _PLAIN.issuperset(name) else "".join(map(_escape, name))


def _escape(char: str) -> str:
    if char in _PLAIN or ord(char) > 0x7F:
        return char
    return f"\\{char}" if char in _SYNTAX else f"\\x{ord(char):02x}"


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if line and not line.startswith("#"):
            yield number, line


def _split(text: str) -> list[str]:
    """Cut at the commas that stand outside brackets and are not escaped."""
    if not any(char in text for char in "([{\\"):
        return text.split(",")
    parts, start, depth, in_class, escaped = [], 0, 0, False, False
    for place, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(depth - 1, 0)
        elif char == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _broken(bad: list[tuple[int, str]], source: str) -> RulesError:
    fix = "write lines like 1:tower_a/.*,tower_b/.* (stream id, colon, patterns that match whole node names)"
    if len(bad) == 1:
        return RulesError(bad[0][1], where=f"{source}:{bad[0][0]}", fix=fix)
    shown = [f"line {number}: {why}" for number, why in bad[:_MAX_SHOWN]]
    if len(bad) > _MAX_SHOWN:
        shown.append(f"… and {len(bad) - _MAX_SHOWN} more")
    return RulesError(f"{len(bad)} broken lines", where=source, fix=fix, details=shown)
