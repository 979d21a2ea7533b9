"""What NVIDIA's TensorFlow makes of a stream file, step by step, for round trips."""

from __future__ import annotations

import re


def atoi(text: str) -> int:
    """C's atoi: leading space, a sign, digits; 0 where there are none."""
    match = re.match(r"\s*([+-]?\d+)", text)
    return int(match[1]) if match else 0


def read(text: str) -> dict[int, list[re.Pattern[str]]]:
    """The map that it builds: only the fields around the first colon count, and a later line of an id replaces an earlier one."""
    rules: dict[int, list[re.Pattern[str]]] = {}
    for line in text.split("\n")[: text.count("\n")]:  # getline
        fields = line.split(":")
        rules[atoi(fields[0])] = [re.compile(pattern) for pattern in fields[1].split(",")]
    return rules


def stream_of(name: str, rules: dict[int, list[re.Pattern[str]]], *, groups: int) -> int:
    """The stream group of a node. A hash map decides between ids, so that a file that depends on it is refused."""
    ids = [stream for stream, found in rules.items() if any(pattern.fullmatch(name) for pattern in found)]
    assert len(ids) <= 1, f"{name} matches the patterns of several ids: {ids}"
    return (ids[0] if ids else 0) % groups
