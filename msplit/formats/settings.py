"""YAML that people write: plain data with line numbers, and typed access to it that collects mistakes, so that a user sees all at once.

What a stranger may have written is bounded in size and depth, without aliases or tags.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import yaml

from msplit.errors import RulesError

MAX_BYTES = 4 << 20
"""Longest rules file. Long lists of patterns belong in a stream file."""

MAX_DEPTH = 32
"""Deepest nesting."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FIX = "see the shipped rule set 'example' for every option with its meaning"


@dataclass(frozen=True)
class Value:
    """A YAML value with the line it stands on, from 1.

    Attributes:
        data: A scalar (str, int, float, bool or None), a list of Value, or a dict from scalar keys to Value.
        keys: For a dict, the line of each key.
    """

    data: Any
    line: int
    keys: dict[Any, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of the value, for messages."""
        if self.data is None:
            return "nothing"
        if isinstance(self.data, bool):
            return "true/false"
        kinds = {dict: "a mapping", list: "a list", str: "text", int: "a whole number", float: "a number"}
        return kinds[type(self.data)]


def parse(text: str, source: str) -> Value:
    """Read one YAML document; `source` is its name, for messages.

    Raises:
        RulesError: It is not YAML, or more than plain data: an alias, a tag, a key that is there twice, too deep, or too long.
    """
    if len(text) > MAX_BYTES:
        raise RulesError(
            f"the file is longer than {MAX_BYTES >> 20} MiB",
            where=source,
            fix="keep patterns in a stream file: regex: {file: …}",
        )
    try:
        _check(text, source)
        node = yaml.compose(text, Loader=_LOADER)
        if node is None:
            raise RulesError("the file is empty", where=source, fix=_FIX)
        return _value(node, source, _LOADER(""))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise RulesError(f"this is not valid YAML: {error.problem or error.context}", where=where, fix=_FIX) from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RulesError(f"this is not valid YAML: {reason}", where=source, fix=_FIX) from None


def _check(text: str, source: str) -> None:
    """Refuse what would make composing recurse deeply or grow: nesting and aliases, seen in the flat stream of events."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=_LOADER):
        where = f"{source}:{event.start_mark.line + 1}" if event.start_mark else source
        if isinstance(event, yaml.AliasEvent):
            raise RulesError("aliases (*name) are not supported", where=where, fix="write the value out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise RulesError(f"values are nested deeper than {MAX_DEPTH}", where=where, fix=_FIX)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise RulesError(
                    "there is more than one document", where=where, fix="remove what follows the '---' line"
                )


def _value(node: yaml.Node, source: str, loader: Any) -> Value:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        items: dict[Any, Value] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node, source, loader)
            key_line = key_node.start_mark.line + 1
            if key in items:
                raise RulesError(
                    f"key {key!r} is there twice (first on line {lines[key]})",
                    where=f"{source}:{key_line}",
                    fix="remove one of them",
                )
            items[key], lines[key] = _value(value_node, source, loader), key_line
        return Value(items, line, lines)
    if isinstance(node, yaml.SequenceNode):
        return Value([_value(item, source, loader) for item in node.value], line)
    return Value(_scalar(node, source, loader), line)


def _scalar(node: yaml.Node, source: str, loader: Any) -> Any:
    where = f"{source}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.ScalarNode):
        raise RulesError("a key must be a word or a number", where=where, fix=_FIX)
    try:
        data = loader.construct_object(node)
    except ValueError as error:
        raise RulesError(
            f"this value can not be read: {error}", where=where, fix="put it in quotes if it is text"
        ) from None
    if data is None or isinstance(data, (str, int, float)):
        return data
    raise RulesError(
        f"{node.value!r} is read as a {type(data).__name__}, which no option takes", where=where, fix="put it in quotes"
    )


@dataclass
class Reading:
    """State while one file is read.

    Attributes:
        source: The file, for messages.
        problems: (line, what, how to mend it) of each mistake found so far.
    """

    source: str
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
    """Entries of a mapping, read by type: the settings of a file, or the options of a rule.

    Every method that reads an option returns its default after noting a problem, so that reading goes on. Messages name the `owner`.
    A value that is nothing stands for no options.
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
        wanted = f"a whole number from {low} to {high}"
        found = self._checked(name, wanted, lambda data: _is_number(data, int) and low <= data <= high)
        return default if found is None else int(found)

    def number(self, name: str, default: float, low: float) -> float:
        """A finite number that is not below a bound."""
        wanted = f"a number of {low:g} or more"
        found = self._checked(name, wanted, lambda data: _is_number(data, int, float) and low <= data < 1e12)
        return default if found is None else float(found)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        found = self._checked(name, "true or false", lambda data: isinstance(data, bool))
        return default if found is None else bool(found)

    def text(self, name: str) -> str | None:
        """Text that is not empty."""
        found: str | None = self._checked(name, "text", lambda data: isinstance(data, str) and data != "")
        return found

    def mapping(self, name: str) -> Self | None:
        """Options inside an option."""
        found = self._checked(name, "a mapping", lambda data: isinstance(data, dict))
        return None if found is None else type(self)(f"{self.owner}.{name}", self._items[name], self.reading)

    def _checked(self, name: str, wanted: str, fits: Callable[[Any], bool]) -> Any:
        """The data of a value; None where it is not given, or does not fit, which is noted."""
        value = self.value(name)
        if value is None:
            return None
        if fits(value.data):
            return value.data
        self._wrong(name, value, wanted)
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


def _is_number(data: Any, *kinds: type) -> bool:
    return isinstance(data, kinds) and not isinstance(data, bool)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is most like an unknown one, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
