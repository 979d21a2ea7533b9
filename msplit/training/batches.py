"""Batches: what a step is fed, checked against the model's inputs, from whatever holds them.

What comes next is made while the present is worked on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from msplit.engines.base import Feeds, is_array, is_tensor, type_name
from msplit.errors import EngineError, LoadError
from msplit.formats.tensors import fits
from msplit.inputs.sparse_ragged import InputSpec
from msplit.shapes.registry import shape_text

Specs = Mapping[str, InputSpec]


def batches_of(dataset: Any, inputs: Sequence[str], where: str = "the data") -> Iterator[Feeds]:
    """The batches of a dataset as mappings from input to value. They stay as they are while later ones are made: arrays that come from an
    iterator, which may write them over, are copied.

    Args:
        dataset: An iterable of mappings, or a `tf.data.Dataset` of them; where there is one input, of its values.
        inputs: Names of the inputs.
        where: Name of the data in messages.

    Raises:
        LoadError: It is nothing of that kind.
    """
    taken = dataset.as_numpy_iterator() if hasattr(dataset, "as_numpy_iterator") else dataset
    if not isinstance(taken, Iterable) or isinstance(taken, Mapping | str):
        raise LoadError(f"gives no batches but a {type(dataset).__name__}", where=where, fix=_WANTED)
    keeps = isinstance(dataset, Sequence) or taken is not dataset  # TensorFlow makes new ones
    for batch in taken:
        if isinstance(batch, Mapping):
            yield {str(name): _value(value, keeps=keeps) for name, value in batch.items()}
        elif len(inputs) == 1 and (is_array(batch) or is_tensor(batch)):
            yield {inputs[0]: _value(batch, keeps=keeps)}
        else:
            raise LoadError(f"a batch is a {type(batch).__name__}", where=where, fix=_WANTED)


_WANTED = "give an iterable of mappings from input to array, such as {'x': array}, or a tf.data.Dataset of them"


def _value(value: Any, *, keeps: bool) -> Any:
    if is_array(value):
        return value if keeps else np.array(value)
    return value if is_tensor(value) else np.asarray(value)


def fitting(feeds: Feeds, specs: Specs, where: str) -> None:
    """Refuses what the model can not be fed, whatever the size of the batch.

    Raises:
        EngineError: An input is missing or is none of the model's, or has a type or shape that the graph does not take.
    """
    known = f"the inputs are: {', '.join(specs) or 'none'}"
    for name in specs:
        if name not in feeds:
            raise EngineError(f"no value for input {name!r}", where=where, fix=known)
    for name, value in feeds.items():
        if name not in specs:
            raise EngineError(f"the model has no input {name!r}", where=where, fix=known)
        spec = specs[name]
        found, shape = type_name(value), tuple(value.shape)
        text = spec.dtype == "string" and is_array(value) and value.dtype.kind in "OSU"
        if found != spec.dtype and not text:
            fix = f"convert it: array.astype({spec.dtype!r})" if spec.dtype != "string" else "give strings"
            raise EngineError(f"input {name!r} is {spec.dtype}, and is given {found}", where=where, fix=fix)
        if not fits(shape, spec.shape):
            what = f"input {name!r} has shape {shape_text(spec.shape or ())}, and is given {shape_text(shape)}"
            raise EngineError(what, where=where, fix="give arrays of that shape, where ? may be anything")


def rows_of(feeds: Feeds, specs: Specs) -> int:
    """Rows of a batch: the size of the first dimension that the graph leaves open, or else that has one; 1 where there is none."""
    open_first = [name for name, spec in specs.items() if spec.shape and spec.shape[0] is None]
    with_rows = [name for name in (*open_first, *specs) if name in feeds and len(feeds[name].shape)]
    return int(feeds[with_rows[0]].shape[0]) if with_rows else 1


Item = TypeVar("Item")

DEPTH = 2
"""Most items that are ready at a time."""

_END = ("end", None)

_PATIENCE = 0.05
"""Seconds after which who waits looks whether the other is still there."""

_LAST_WORD = 5.0
"""Seconds that a thread has to end once nobody wants more: it may be waiting for a disk."""


class Prefetched(Iterator[Item]):
    """Items of an iterator in their order, made by a thread, up to `depth` of them before they are asked for.

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
