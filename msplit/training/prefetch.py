"""What comes next is made while the present is worked on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

DEPTH = 2
"""How many are ready at most."""

_END = ("end", None)

_PATIENCE = 0.05
"""Seconds after which who waits looks whether the other is still there."""

_LAST_WORD = 5.0
"""Seconds that a thread has to end once nobody wants more: it may be waiting for a disk."""


class Ahead(Iterator[Item]):
    """The same items in the same order, made by a thread, up to `depth` of them before they are asked for.

    Close it to end the thread early. What the items raise is raised here, in its place among them.
    """

    def __init__(self, items: Iterator[Item], depth: int = DEPTH) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._first: tuple[str, Any] | None = None  # taken out of the queue, and not given yet
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._make, name="msplit-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        kind, what = self._ready.get() if self._first is None else self._first
        self._first = None if kind == "item" else _END
        if kind == "error":
            raise what
        if kind == "end":
            raise StopIteration
        item: Item = what
        return item

    def upcoming(self) -> Item | None:
        """The item that comes next, which stays the next; None where it is not made yet, or there is none."""
        if self._first is None:
            try:
                self._first = self._ready.get_nowait()
            except queue.Empty:
                return None
        kind, what = self._first
        return what if kind == "item" else None

    def close(self) -> None:
        """Ends the thread. There are no more items."""
        self._first = _END
        self._unwanted.set()
        self._thread.join(_LAST_WORD)

    def _hand_over(self, kind: str, what: Any = None) -> bool:
        while not self._unwanted.is_set():
            try:
                self._ready.put((kind, what), timeout=_PATIENCE)
            except queue.Full:
                continue
            return True
        return False

    def _make(self) -> None:
        try:
            for item in self._items:
                if not self._hand_over("item", item):
                    return
            self._hand_over("end")
        except BaseException as error:  # noqa: BLE001  it is raised where the item is asked for
            self._hand_over("error", error)
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
