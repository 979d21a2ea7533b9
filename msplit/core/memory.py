"""Memory: results about a graph are kept with it, and no garbage is collected while millions of objects are made.

Analysis, rules and planning ask for the same things about the same graph (its canonical order, its branches, its embedding columns),
often in one process. What they find is kept as long as the graph lives.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

Found = TypeVar("Found")

_KEPT = 3
"""Results of one question that are kept for one object: more than one only where costs or options differ."""

_MANY = 100_000
"""Objects: the collector looks at fewer young ones in a few milliseconds."""

_results: WeakKeyDictionary[Any, dict[str, list[tuple[tuple[Any, ...], Any]]]] = WeakKeyDictionary()


def memoize(owner: object, question: str, details: tuple[Any, ...], find: Callable[[], Found]) -> Found:
    """Call `find` once for an object and keep its result.

    Args:
        owner: What it is about; nobody may change it. The result is dropped with it, and must not hold it.
        question: What is asked.
        details: What else the answer hangs on. Arrays, and objects without an equality of their own, count as equal only to themselves.
        find: Finds it.
    """
    kept = _results.setdefault(owner, {}).setdefault(question, [])
    for known, result in kept:
        if len(known) == len(details) and all(map(_same, known, details)):
            answer: Found = result
            return answer
    found = find()
    kept.append((details, found))
    del kept[:-_KEPT]
    return found


def _same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, np.ndarray) and bool(one == other))


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's collector of reference cycles away from the block: nothing here makes cycles, and it looks at every object again.

    What the block made counts as old afterwards, or the collector would look at all of it at once when it is let in again.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # What somebody else has frozen would thaw; but counting that takes a walk through it, which has to be worth it.
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
