"""What the tests try by default, and what `MSPLIT_CAMPAIGN=1 scripts/test` tries: every case, and as many examples as fit in a night.

A sample holds for each behaviour; the campaign looks for the case that nobody thought of.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterable
from typing import Any

import pytest

CAMPAIGN = os.environ.get("MSPLIT_CAMPAIGN", "0") != "0"
"""Whether this is a campaign."""

campaign = pytest.mark.skipif(not CAMPAIGN, reason="a campaign: MSPLIT_CAMPAIGN=1")
"""Marks a test at length, beside a short one of the same."""


def examples(usually: int, at_length: int) -> int:
    """How many examples Hypothesis draws."""
    return at_length if CAMPAIGN else usually


def sample(count: int, *axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases of a product: all of them in a campaign, otherwise about `count`, always the same ones, with every value of every axis.

    >>> sample(3, "abc", "xy")
    [("b", "x"), ("a", "y"), ("c", "x")]
    """
    values = [list(axis) for axis in axes]
    if CAMPAIGN or math.prod(map(len, values)) <= count:
        return list(itertools.product(*values))
    lot = random.Random(count)
    columns = []
    for axis in values:
        column: list[int] = []
        while len(column) < max(count, *map(len, values)):
            column += lot.sample(range(len(axis)), len(axis))
        columns.append(column)
    rows = dict.fromkeys(itertools.islice(zip(*columns, strict=False), max(count, *map(len, values))))
    return [tuple(axis[at] for axis, at in zip(values, row, strict=True)) for row in rows]


def sampled(count: int, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with a `sample` of the product of its arguments' values."""
    return pytest.mark.parametrize(tuple(axes), sample(count, *axes.values()), ids=_named)


def _named(value: Any) -> str:
    return getattr(value, "__name__", str(value))
