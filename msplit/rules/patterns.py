"""Regular expressions on node names that take time linear in the names, whatever the pattern.

The engine is RE2, an automaton without backtracking, so no pattern can hang the tool. Its syntax is that of ECMAScript
but for look-aheads, look-behinds and back-references, which no automaton can do; those are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import re2

from msplit.core.graph import Ints

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
    """Why a pattern can not be used, in words, or None if it can."""
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
    """Why usable patterns can not be used together, in words, or None if they can."""
    left = _TOGETHER
    for pattern in patterns:
        if _exact(pattern) is None:
            left -= _size(pattern)
            if left < 0:
                return f"the patterns together make more than {_TOGETHER:,} instructions"
    return None


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


def _size(pattern: str) -> int:
    """Instructions of a pattern's automaton."""
    return int(re2.compile(_encoded(pattern), _options()).programsize)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MEMORY
    return options
