"""Stream files in NVIDIA's format, and their regular expressions.

Stream files: NVIDIA's `TF_STREAM_FROM_FILE` format, read with its holes closed, and written so that NVIDIA's reader agrees.

A line is ``<id>:<regex>[,<regex>…]``. NVIDIA's reader cuts a line at every ``:`` and ``,``, wants a full match, keeps the last line of
an id only, knows no comments, and lets the order of a hash map decide between ids. Here:

- lines that are blank or start with ``#`` are skipped, and space around ids and patterns is ignored;
- only the first ``:`` separates; a ``,`` inside brackets or behind a backslash belongs to the pattern;
- all lines count, in the order of the file, and every broken line is reported.

Regular expressions on node names that take time linear in the names, whatever the pattern.

The engine is RE2, an automaton without backtracking, so no pattern can hang the tool. Its syntax is that of ECMAScript
but for look-aheads, look-behinds and back-references, which no automaton can do; those are refused by name.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import re2

from msplit.core.graph import Ints
from msplit.errors import RulesError

_BATCH = 5_000
"""Instructions of the automaton of one pass over the names; patterns that need more are matched alone."""

_LARGEST = 10_000
"""Most instructions that a pattern may have: the time of building an automaton grows faster than they."""

_TOGETHER = 1_000_000
"""Most instructions of all patterns of a rule: some seconds on any graph."""

_MEMORY = 64 << 20
"""Bytes that one automaton may take."""

_EXACT = re.compile(r"(?:[\w/>-]|\\[^\w\s]|\\x[0-9a-fA-F]{2})*")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.))")
_LOOKAROUND = re.compile(r"\(\?<?[=!]")
_BACKREFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\[1-9]")


def problem(pattern: str) -> str | None:
    """The reason why a pattern can not be used, in words, or None if it can."""
    if _exact(pattern) is not None:
        return None
    try:
        size = _size(pattern)
    except re2.error as error:
        if _LOOKAROUND.search(pattern) or _BACKREFERENCE.search(pattern):
            return (
                "look-aheads, look-behinds and back-references can not be matched in linear time and are not supported"
            )
        detail = error.args[0] if error.args else ""
        return shorten(detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail))
    return "the pattern is too large: give counts like {1,1000} smaller numbers" if size > _LARGEST else None


def too_many(patterns: Iterable[str]) -> str | None:
    """The reason why usable patterns can not be used together, in words, or None if they can."""
    sizes = itertools.accumulate(_size(pattern) for pattern in patterns if _exact(pattern) is None)
    large = any(size > _TOGETHER for size in sizes)
    return f"the patterns together make more than {_TOGETHER:,} instructions" if large else None


def shorten(text: str) -> str:
    """A pattern, or what the engine says about it, short enough for a message."""
    return text if len(text) <= 80 else f"{text[:77]}…"


def match(patterns: Sequence[str], names: Sequence[str], *, full: bool = True) -> tuple[Ints, Ints]:
    """The nodes that each pattern matches.

    Patterns that say one name and nothing else, as an emitted stream file has them by the thousand, are looked up; the others run together
    in one pass over the names. None may have a `problem`. The whole name must match if `full`, otherwise any part of it.

    Returns:
        The matches as two arrays, sorted: position in `patterns`, position in `names`.
    """
    numbers: list[int] = []
    nodes: list[int] = []
    exact: dict[str, list[int]] = {}
    rest: list[int] = []
    for number, pattern in enumerate(patterns):
        name = _exact(pattern) if full else None
        if name is None:
            rest.append(number)
        else:
            exact.setdefault(name, []).append(number)
    if exact:
        for node, name in enumerate(names):
            for number in exact.get(name, ()):
                numbers.append(number)
                nodes.append(node)
    encoded = [name.encode("utf-8", "surrogatepass") for name in names] if rest else []
    for batch in _batches(patterns, rest):
        engine = re2.Set.FullMatchSet(_options()) if full else re2.Set.SearchSet(_options())
        for number in batch:
            engine.Add(_encoded(patterns[number]))
        engine.Compile()
        matches = engine.Match
        for node, text in enumerate(encoded):
            for local in matches(text) or ():
                numbers.append(batch[local])
                nodes.append(node)
    order = np.lexsort((nodes, numbers))
    return np.asarray(numbers, dtype=np.int32)[order], np.asarray(nodes, dtype=np.int32)[order]


def _batches(patterns: Sequence[str], numbers: Sequence[int]) -> list[list[int]]:
    """The numbers of patterns that run together, so that no automaton grows beyond `_BATCH` or has more than one pattern."""
    batches: list[list[int]] = []
    used = _BATCH
    for number in numbers:
        size = _size(patterns[number])
        if used + size > _BATCH:
            batches.append([])
            used = 0
        batches[-1].append(number)
        used += size
    return batches


def _exact(pattern: str) -> str | None:
    """The one name that a pattern without operators matches, or None if it has operators."""
    if not _EXACT.fullmatch(pattern):
        return None
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2], pattern)


@functools.lru_cache(maxsize=1 << 14)
def _size(pattern: str) -> int:
    """Instructions of a pattern's automaton, which is built to count them: each is asked for several times."""
    return int(re2.compile(_encoded(pattern), _options()).programsize)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY
    return options


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
            bad.append((number, f"the stream id {shorten(head.strip())!r} is not a number"))
            continue
        for pattern in map(str.strip, _split(rest)):
            why = problem(pattern) if pattern else "the pattern is empty"
            if why is None:
                entries.append(Entry(int(head), pattern, f"{source}:{number}"))
            else:
                bad.append((number, f"bad pattern {shorten(pattern)!r}: {why}" if pattern else why))
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
