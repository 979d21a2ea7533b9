"""What the tests try by default, and what `MSPLIT_CAMPAIGN=1 scripts/test` tries: every case, and as many examples as fit in a night.

A sample holds for each behaviour; the campaign looks for the case that nobody thought of.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")

CAMPAIGN = os.environ.get("MSPLIT_CAMPAIGN", "0") != "0"
"""Whether this is a campaign."""

campaign = pytest.mark.skipif(not CAMPAIGN, reason="a campaign: MSPLIT_CAMPAIGN=1")
"""Marks a test at length, beside a short one of the same."""


def examples(usually: int, at_length: int) -> int:
    """How many examples Hypothesis draws."""
    return at_length if CAMPAIGN else usually


def some(cases: Iterable[Case], count: int) -> list[Case]:
    """All cases in a campaign; otherwise `count` of them, drawn once and for all, in their order.

    Neighbours in a product share most of their values, and an even stride would meet the same ones again and again. Hence by lot:
    >>> len(some(range(100), 10))
    10
    """
    found = list(cases)
    if CAMPAIGN or len(found) <= count:
        return found
    chosen = random.Random(len(found)).sample(range(len(found)), count)
    return [found[at] for at in sorted(chosen)]
