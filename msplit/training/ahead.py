"""What comes next is made while the present is worked on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

Item = TypeVar("Item")

DEPTH = 2
"""How many are ready at most."""

_PATIENCE = 0.05
"""Seconds after which who waits looks whether the other is still there."""

_LAST_WORD = 5.0
"""Seconds that a thread has to end once nobody wants more: it may be waiting for a disk."""


def ahead(items: Iterator[Item], depth: int = DEPTH) -> Generator[Item, None, None]:
    """The same items in the same order, made by a thread, up to `depth` of them before they are asked for.

    Close it to end the thread early. What the items raise is raised here, in its place among them.
    """
    ready: queue.Queue[tuple[str, Item | BaseException | None]] = queue.Queue(depth)
    unwanted = threading.Event()

    def hand_over(kind: str, what: Item | BaseException | None) -> bool:
        while not unwanted.is_set():
            try:
                ready.put((kind, what), timeout=_PATIENCE)
            except queue.Full:
                continue
            return True
        return False

    def make() -> None:
        try:
            for item in items:
                if not hand_over("item", item):
                    return
            hand_over("end", None)
        except BaseException as error:  # noqa: BLE001  it is raised where the item is asked for
            hand_over("error", error)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    thread = threading.Thread(target=make, name="msplit-ahead", daemon=True)
    thread.start()
    try:
        while True:
            kind, what = ready.get()
            if kind == "end":
                return
            if isinstance(what, BaseException):
                raise what
            yield what  # type: ignore[misc]
    finally:
        unwanted.set()
        thread.join(_LAST_WORD)
