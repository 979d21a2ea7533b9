"""Other values for processes of a pool: sent once, made ready and verified in each; then all pause, and all take them over, or none does.

What the process that opened the pool (the owner) says, and a process answers, on the pipe between them. Each message begins with a number
of the update, so that what was given up is told from what goes on:

| owner | process | which then |
| --- | --- | --- |
| where the values lie | nothing, when they are verified | goes on with the old ones |
| number of the values | nothing, when no step runs | has requests wait |
| number of the values | what has changed | goes on with the new ones |

A process that can not take them answers with its error, in place of the first two. The others are then told 0, and keep what they have. One
that ends is no hindrance, as long as there is another: what takes its place is given these values before it answers a request.
"""

from __future__ import annotations

import glob
import mmap
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from msplit.engines.process import Process
from msplit.errors import Closed, EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.serving.pool.ring import packed_error, unpacked_error
from msplit.verify.results import NewRows, NewValues, ValueUpdate

_LINE = 64
_UPDATES = count(1)

Message = tuple[int, Any]
"""Number of the update, or 0 to have a process answer requests; and what is said."""
Over = Callable[[], bool]
"""True when nobody needs the pool any more."""
Place = tuple[str, Sequence[tuple[int, int]]]
"""Name of a file of values, and for each of its parts where it begins and its bytes; the first part is a pickle, the others are arrays."""
Values = tuple[NewValues | None, NewRows | None]
"""Source and rows; see `Pool.update`."""


class Asked(Protocol):
    """A process of a pool, as its owner asks it."""

    process: Process

    def answer(self, over: Over) -> Any:
        """Next message of the process; waits for it. Raises `EngineError` where it has ended, `Closed` where nobody needs it."""


@contextmanager
def shared(values: Values) -> Iterator[Place]:
    """Puts values into memory without a name, which other processes may map during the block: however large, they are there once."""
    buffers, places = list[pickle.PickleBuffer](), list[tuple[int, int]]()
    data = memoryview(pickle.dumps(values, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append))
    with open(os.memfd_create("msplit-values"), "wb") as file:
        for part in (data, *(buffer.raw() for buffer in buffers)):
            file.write(bytes(-file.tell() % _LINE))
            places.append((file.tell(), part.nbytes))
            file.write(part)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}", places


def mapped(place: Place) -> Values:
    """Values that a process has shared. Their arrays can not be written to."""
    with open(place[0], "rb") as file:
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    data, *arrays = [memory[start : start + size] for start, size in place[1]]
    found: Values = pickle.loads(data, buffers=arrays)
    return found


class GivenValues:
    """Values that the processes of a pool were given since they were opened, as far as they count for another one.

    Attributes:
        begun: True since they were to be given any.
    """

    def __init__(self) -> None:
        self._number, self.begun = 0, False
        self._path, self._stamp = "", _stamp("")
        self._arrays: dict[str, Any] = {}
        self._rows: dict[str, tuple[Any, Any]] = {}

    def give(self, values: Values, processes: Sequence[Asked], over: Over) -> ValueUpdate:
        """Gives processes other values.

        Args:
            values: The values.
            processes: All that answer requests.
            over: When to give up.

        Raises:
            EngineError: One of them can not take them, and none has; or all have ended.
            Closed: The pool is being closed.
        """
        source, rows = values
        if isinstance(source, FlatGraph):
            source = source.model.path
        if isinstance(source, Mapping):
            source = {name: np.array(value) for name, value in source.items()}
        elif isinstance(source, str | os.PathLike):
            source = os.path.abspath(source)
        elif source is not None:
            raise MsplitError(f"{type(source).__name__} has no values", fix="give a model, a checkpoint, or arrays")
        stamp = _stamp(source) if isinstance(source, str) else self._stamp
        rows = {name: (np.array(ids), np.array(values)) for name, (ids, values) in (rows or {}).items()}
        self.begun = True
        with shared((source, rows)) as place:
            found = _agreed(processes, place, self._number + 1, over)
        self._number += 1
        if isinstance(source, Mapping):
            self._arrays |= source
            self._rows = {name: given for name, given in self._rows.items() if name not in source}
        elif source is not None:
            self._path, self._stamp, self._arrays, self._rows = source, stamp, {}, {}
        for name, (ids, new) in rows.items():
            given = ids.astype(np.int64), new
            both = [np.concatenate(each)[::-1] for each in zip(self._rows.get(name, given), given, strict=True)]
            _, last = np.unique(both[0], return_index=True)  # of a row that is there twice the later one
            self._rows[name] = both[0][last], both[1][last]
        return found

    def bring(self, process: Asked, over: Over) -> None:
        """Gives a process that has started what the others have, and has it answer requests. Raises what `give` does."""
        if _stamp(self._path) != self._stamp:
            what = "the files that the pool was given values of are no longer those"
            raise EngineError(what, where=self._path, fix="give it values again")
        for source, rows in ((self._path or None, None), (self._arrays or None, self._rows)):
            if source or rows:
                with shared((source, rows)) as place:
                    _agreed([process], place, self._number, over)
        process.process.send((0, self._number))


def _stamp(path: str) -> set[tuple[str, int, int, int]]:
    """Sizes, times and numbers of the files of a model or a checkpoint: others where somebody has replaced them."""
    start = glob.escape(path)
    names = [*glob.glob(start), *glob.glob(f"{start}/**" if os.path.isdir(path) else f"{start}.*", recursive=True)]
    found = [(name, os.stat(name)) for name in names if path]
    return {(name, info.st_size, info.st_mtime_ns, info.st_ino) for name, info in found}


def _agreed(processes: Sequence[Asked], place: Place, number: int, over: Over) -> ValueUpdate:
    """Has processes take values over, all of them or none. Raises what `GivenValues.give` does."""
    update, word = next(_UPDATES), 0
    try:
        ready = _asked(processes, (update, place), over)
        paused = _asked([*ready], (update, number), over)
        word = number  # from now on each takes them over, or ends
        each = [*_asked([*paused], (update, number), over).values()]
    finally:
        for process in processes:
            with suppress(EngineError):
                process.process.send((update, word))
    return ValueUpdate(sum(one.bytes for one in each), False, tuple(check for one in each for check in one.checks))


def _asked(processes: Sequence[Asked], message: Message, over: Over) -> dict[Asked, Any]:
    """Answers of the processes that have not ended. Raises what `GivenValues.give` does."""
    found, problems, lost = dict[Asked, Any](), list[Exception](), list[EngineError]()
    for process in processes:
        with suppress(EngineError):  # it has ended, as is found below
            process.process.send(message)
    for process in processes:
        try:
            while (said := process.answer(over))[0] != message[0]:
                pass
        except Closed:
            raise
        except EngineError as problem:
            if over():
                raise Closed("the pool is closed", fix="open another one") from problem
            lost.append(problem)
        else:
            if isinstance(said[1], bytes):
                problems.append(unpacked_error(said[1]))
            else:
                found[process] = said[1]
    if problems or not found:
        raise [*problems, *lost][0]
    return found


class _GivenUp(Exception):
    """Other values are not taken over."""


def take_values(
    take: Callable[..., ValueUpdate], pipe: Connection, said: SimpleQueue[Message], numbered: Callable[[int], object]
) -> None:
    """Takes other values whenever the owner says so, in a process.

    Args:
        take: `Pool.take_values` of its pool.
        pipe: The pipe, to be written to.
        said: Messages of the owner.
        numbered: Called with the number of the values that requests are answered with from now on.
    """
    while True:
        update, what = said.get()
        if isinstance(what, int):
            if not update:
                numbered(what)
            continue  # else it was given up here
        words = list[int]()

        def agree(update: int = update, words: list[int] = words) -> None:
            pipe.send((update, None))
            while (word := said.get())[0] != update:
                pass
            if not word[1]:
                raise _GivenUp
            words.append(word[1])
            if len(words) > 1:
                numbered(word[1])

        try:
            pipe.send((update, take(*mapped(what), agree)))
        except _GivenUp:
            pass
        except Exception as problem:  # noqa: BLE001  the owner raises it
            if len(words) > 1:
                os._exit(1)  # some are taken over and others not; the process in its place has all
            pipe.send((update, packed_error(problem)))
