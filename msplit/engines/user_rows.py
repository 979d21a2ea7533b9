"""Rows of inputs that are the same for all rows of a user: what a step is given of them, and whose row each row is."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import USERS, Arrays, Feeds, is_array
from msplit.engines.cuda.options import SharedRows, rows_of_users
from msplit.errors import EngineError, WrongShape


def one_row(once: Mapping[str, int], feeds: Feeds) -> dict[str, Any]:
    """Of inputs that are the same in all rows, the one row.

    Args:
        once: Their names, and entries of a row.
        feeds: One row of each, or any number of equal ones: arrays, or PyTorch tensors.

    Raises:
        EngineError: They are not equal.
    """
    return {name: _row(name, value, once[name]) if name in once else value for name, value in feeds.items()}


def _row(name: str, value: Any, entries: int) -> Any:
    if not hasattr(value, "shape") or not len(value.shape) or value.shape[0] <= entries or value.shape[0] % entries:
        return value  # what is wrong with it is said by what takes it
    # By their bytes: NaN is equal to itself, and the two zeros are not.
    row, rows = value[:entries], len(value) // entries
    if is_array(value) and not value.dtype.hasobject:
        # To compare bytes takes an eighth of the time that NumPy takes to compare a small array.
        equal = value.tobytes() == row.tobytes() * rows
    else:
        whole = value.reshape((rows, *row.shape))
        whole = whole if is_array(value) else whole.contiguous().view(sys.modules["torch"].uint8)
        equal = bool((whole == whole[:1]).all())
    if not equal:
        raise EngineError(f"the rows of input {name} differ, and it is shared", fix="give it one row, or equal ones")
    return row


@dataclass(frozen=True)
class UserRows:
    """Inputs of which a step reads one row for each user, in place of one for each of its rows.

    They come in one of three forms: one row of each input, for a step of one user; all rows, of which those of a user are equal to the
    byte; or one row for each user, with the user of each row under `USERS`.

    Attributes:
        entries: Their names, each with the entries of a row.
        users: Most users of a step. Of one, a step reads the one row, and no index.
        rows: Rows of a step that has several users; see `rows_of_users` for what it reads.
    """

    entries: Mapping[str, int] = field(default_factory=dict)
    users: int = 1
    rows: int = 0

    @classmethod
    def of_step(cls, shared: SharedRows | None, rows: int = 0) -> UserRows:
        """What a step of so many rows shares; nothing if `shared` is None."""
        if shared is None:
            return cls()
        entries = dict(shared.entries)
        return cls({name: entries[name] for name in shared.inputs}, shared.users, rows)

    def packed(self) -> dict[str, Any]:
        """JSON data."""
        return {**self.entries, **({USERS: [self.users, self.rows]} if self.users > 1 else {})}

    @classmethod
    def unpacked(cls, data: Mapping[str, Any]) -> UserRows:
        """What was packed.

        Raises:
            ValueError, TypeError: That is no such data.
        """
        users, rows = data.get(USERS, (1, 0))
        found = cls({str(name): int(one) for name, one in data.items() if name != USERS}, int(users), int(rows))
        if min(found.users, *found.entries.values(), 1) < 1 or (found.users > 1 and rows < 1):
            raise ValueError("what is shared has no rows")
        return found

    def hold_to(self, feeds: Arrays) -> None:
        """Holds what was read against inputs with all rows, or with the user of each.

        Raises:
            ValueError, TypeError, KeyError: They have others.
        """
        index = feeds.get(USERS)
        count = self.rows if index is None else int(index.max()) + 1
        if index is not None and self.entries and len(index) != self.rows:
            raise ValueError("there are users of other rows")
        for name, one in self.entries.items():
            rows, rest = divmod(len(feeds[name]), one)
            if rest or (self.users > 1 and rows != count):
                raise ValueError("what is shared has other rows")

    def of(self, feeds: Feeds) -> Feeds:
        """What a step reads of inputs in any of the three forms: where it has fewer users, the first one's rows stand for the others.

        Raises what `by_row` does.
        """
        found = {**self.by_row(feeds)}
        if (index := found.get(USERS)) is not None:
            count = int(index.max()) + 1
            for name, one in self.entries.items():
                if count < self.users and _has(found, name, count * one):
                    found[name] = np.concatenate([found[name], *[found[name][:one]] * (self.users - count)])
        return found

    def by_row(self, feeds: Feeds) -> Feeds:
        """What a step reads of inputs in any of the three forms, of as many users as there are.

        Raises:
            WrongShape: There are more users than a step has room for.
            EngineError: A step has one user, and rows differ.
        """
        if self.users == 1 or not self.entries:
            return one_row(self.entries, feeds)
        each, index = self.by_user(feeds, self.rows)
        if rows_of_users(self.users, self.rows) == self.rows:
            return self.of_rows(each, index)
        count = int(index.max()) + 1
        if count > self.users:
            raise WrongShape(
                f"the rows of {', '.join(self.entries)} are of {count} users, and a step has room for {self.users}",
                fix="give it fewer users at once, or make more room: --users (users in Python)",
            )
        return {**each, USERS: index}

    def by_user(self, feeds: Feeds, rows: int) -> tuple[dict[str, Any], NDArray[np.int32]]:
        """Inputs of so many rows, one at least, with one row for each user, in the order in which users come, and the user of each row.

        Rows are compared by their bytes: NaN is equal to itself, and the two zeros are not.

        Raises:
            WrongShape: An input has another number of rows.
            EngineError: An input has one row, so that all are of one user, and the rows of another one differ.
        """
        given = dict(feeds)
        if (index := given.pop(USERS, None)) is not None:
            return given, index
        if not all(_has(given, name, rows * one) for name, one in self.entries.items()):
            return self._of_one_user(given, rows), np.zeros(rows, np.int32)
        values = [given[name].reshape(rows, given[name].size // rows) for name in self.entries]
        texts = [one for one in values if one.dtype.hasobject]
        plain = [np.ascontiguousarray(one).view(np.uint8) for one in values if not one.dtype.hasobject]
        plain.append(np.zeros((rows, -sum(one.shape[1] for one in plain) % 8), np.uint8))
        words = np.concatenate(plain, 1).view(np.uint64)  # which are compared eight times as fast as bytes
        # Rows of a user mostly stand side by side, so that few have to be looked up.
        begins = np.ones(rows, bool)
        begins[1:] = np.any([(one[1:] != one[:-1]).any(1) for one in (words, *texts)], 0)
        starts, known_as = np.flatnonzero(begins), dict[tuple[Any, ...], int]()
        users = [
            known_as.setdefault((words[start].tobytes(), *[_name(one[start]) for one in texts]), len(known_as))
            for start in starts
        ]
        leading = starts[np.unique(users, return_index=True)[1]]
        found = {name: taken_rows(given[name], leading, one) for name, one in self.entries.items()}
        return {**given, **found}, np.repeat(np.asarray(users, np.int32), np.diff(starts, append=rows))

    def first(self, feeds: Feeds) -> dict[str, Any]:
        """The first row of each input that is shared."""
        arrays = {name: feeds[name] for name in self.entries if is_array(feeds.get(name)) and feeds[name].ndim}
        return {name: value[: self.entries[name]] for name, value in arrays.items()}

    def _of_one_user(self, feeds: Feeds, rows: int) -> dict[str, Any]:
        """Inputs of which one has one row, with one row of each."""
        first = self.first(feeds)
        if len(first) < len(self.entries):  # what takes them says what is wrong with the others
            return {**feeds, **first}
        for name, one in self.entries.items():
            if not (_has(feeds, name, one) or _has(feeds, name, rows * one)):
                raise WrongShape(
                    f"input {name} has the shape {feeds[name].shape}",
                    fix=f"it is shared: give it one row ({one} long), or all {rows} ({one * rows} long)",
                )
        return one_row(self.entries, feeds)

    def of_rows(self, each: Feeds, index: NDArray[np.int32]) -> dict[str, Any]:
        """Inputs with all rows, of those that `by_user` gives."""
        count = int(index.max()) + 1
        several = {name: one for name, one in self.entries.items() if _has(each, name, count * one)}
        return {**each, **{name: taken_rows(each[name], index, one) for name, one in several.items()}}


def _name(row: NDArray[Any]) -> Hashable:
    """Equal for rows of equal bytes, or strings; what is no string is refused where it is looked at."""
    return (
        tuple(one if isinstance(one, bytes | str) else repr(one) for one in row)
        if row.dtype.hasobject
        else row.tobytes()
    )


def _has(feeds: Feeds, name: str, size: int) -> bool:
    return tuple(getattr(feeds.get(name), "shape", ())[:1]) == (size,)


def taken_rows(value: NDArray[Any], rows: NDArray[Any], entries: int) -> NDArray[Any]:
    """Rows of an array by their numbers, each of so many entries."""
    found: NDArray[Any] = value.reshape(len(value) // entries, entries, *value.shape[1:])[rows]
    return found.reshape(len(rows) * entries, *value.shape[1:])
