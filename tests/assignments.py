"""Streams assigned once for the same request and graph: for tests of what comes after that, and that prepare a model again and again."""

from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest

from msplit.flatten.flat import FlatGraph
from msplit.run import variants
from msplit.run.tensorflow_rows import assignments_for

_MADE: WeakKeyDictionary[FlatGraph, list] = WeakKeyDictionary()
"""Graph -> requests, and what rules and search have assigned for each."""


def _once(flat, sizes, costs, request):
    made = _MADE.setdefault(flat, [])
    found = next((assigned for other, assigned in made if other == request), None)
    if found is None:
        found = assignments_for(flat, sizes, costs, request)
        made.append((request, found))
    assignments, said = found
    return [*assignments], [*said]


assigned_once = patch.object(variants, "assignments_for", _once)
"""Decorates a function, or is the context, in which that is so."""


@pytest.fixture
def assign_once():
    """For a test, or for all of a module."""
    with patch.object(variants, "assignments_for", _once):
        yield
