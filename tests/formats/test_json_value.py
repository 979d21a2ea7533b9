"""Values of JSON files: each is read as its type, or told with its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from msplit.errors import MsplitError
from msplit.formats.files import JsonValue


def value(text: str) -> JsonValue:
    return JsonValue.parse(text, "file.json", what="profile", fix="make it anew")


def test_values_are_read_as_their_types() -> None:
    found = value('{"a": [1, 2.5], "b": {"c": "text", "d": true, "e": null}}').object(("a", "b", "f"), ("f",))
    one, two = found.at("a").items(2)
    assert (one.whole(), two.number()) == (1, 2.5)
    inner = dict(found.at("b").entries())
    assert (inner["c"].text(), inner["d"].flag()) == ("text", True)
    assert inner["c"].one_of(("word", "text")) == "text"
    assert inner["e"].or_none(JsonValue.whole) is None
    assert list(found.without("a").mapping()) == ["b"]


@pytest.mark.parametrize(
    ("text", "read", "message"),
    [
        ("{", JsonValue.mapping, "the profile is not valid JSON"),
        ("[" * 100_000, JsonValue.mapping, "the profile is nested too deep"),
        ("[]", JsonValue.mapping, "the profile is not an object"),
        ("{}", lambda found: found.at("a"), "the profile lacks the key 'a'"),
        ("{}", lambda found: found.object(("a",)), "the profile lacks the key 'a'"),
        ('{"names": 1}', lambda found: found.object(("name",)), r"has no key 'names' \(did you mean name\?\)"),
        ("{}", JsonValue.items, "is not a list"),
        ("[1]", lambda found: found.items(2), "is not a list of 2"),
        ("1", JsonValue.text, "is not text"),
        ("1", JsonValue.flag, "is neither true nor false"),
        ('"a"', lambda found: found.one_of(("b", "c")), "is 'a', not one of b, c"),
        ("true", JsonValue.number, "is not a number"),
        ("NaN", JsonValue.number, "is not a number"),
        ("-1", JsonValue.number, "is -1, not between 0 and 1e"),
        ("1" + "0" * 400, JsonValue.number, "is not between 0 and 1e"),
        ("1.5", JsonValue.whole, "is not a whole number of 0 or more"),
        ("9", lambda found: found.whole(0, 8), "is not a whole number of 0 or more and at most 8"),
    ],
)
def test_what_does_not_fit_is_told(text: str, read: Callable[[JsonValue], Any], message: str) -> None:
    with pytest.raises(MsplitError, match=message) as told:
        read(value(text))
    assert str(told.value.where).startswith("file.json")
    assert told.value.fix == "make it anew"


def test_a_value_of_an_unknown_key_is_told_by_its_place() -> None:
    with pytest.raises(MsplitError, match=r"`a\[1\]` is not text"):
        value('{"a": ["b", 1]}').at("a").items()[1].text()
