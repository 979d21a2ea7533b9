"""YAML that a stranger may have written: plain data with line numbers, bounded in size and depth, without aliases or tags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """A YAML value with the line it stands on.

    Attributes:
        data: A scalar (str, int, float, bool or None), a list of Value, or a dict from scalar keys to Value.
        line: From 1.
        keys: For a dict, the line of each key.
    """

    data: Any
    line: int
    keys: dict[Any, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        if self.data is None:
            return "nothing"
        if isinstance(self.data, bool):
            return "true/false"
        kinds = {dict: "a mapping", list: "a list", str: "text", int: "a whole number", float: "a number"}
        return kinds[type(self.data)]


def parse(text: str, source: str) -> Value:
    """Read one YAML document.

    Args:
        text: The document.
        source: Its name, for messages.

    Raises:
        RulesError: It is not YAML, or more than plain data: an alias, a tag, a key that is there twice, too deep, or too long.
    """
    if len(text) > MAX_BYTES:
        raise too_long(source)
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


def too_long(source: str) -> RulesError:
    """What to say of a file of more than `MAX_BYTES`."""
    return RulesError(
        f"the file is longer than {MAX_BYTES >> 20} MiB",
        where=source,
        fix="keep patterns in a stream file: regex: {file: …}",
    )


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
