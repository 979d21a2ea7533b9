"""Inputs and outputs of a pool: checks requests, joins them to one step, and splits its outputs into answers."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import USERS, Arrays, Feeds, is_array, is_tensor, refuse
from msplit.engines.host.hashing import Texts, all_bytes, as_objects
from msplit.engines.host.program import HostProgram
from msplit.engines.tensors import (
    as_array,
    cut_to_length,
    joined,
    length_of,
    lies_on,
    part,
    pieces,
    pieces_of_users,
    tensor,
    to_length,
)
from msplit.engines.user_rows import UserRows, one_row
from msplit.errors import EngineError
from msplit.formats.build import LengthInputs
from msplit.formats.tensors import numpy_dtype
from msplit.serving.pool.settings import MAX_STEPS

Shape = tuple[int, ...]

_TEXT = np.dtype(object)

_MOST_EXACT = 4096
"""Sizes of requests of which it is kept what they have to be."""


@dataclass(frozen=True)
class Port:
    """Input or output of a model.

    Attributes:
        dtype: NumPy's name of its type; ``object`` for strings.
        shape: Shape. A first dimension of None stands for the rows, another one for the length of these.
        most: Most values that an input may have.
        filled: Most values that it may have where a request lists fewer, and leaves out equal ones: those of the largest step.
        once: Entries of a row, of an input that is the same in all rows, see `Ports.sharing`; else 0.
        reads_texts: True where strings may come as `Texts`.
    """

    dtype: str
    shape: tuple[int | None, ...]
    most: int = field(default=1 << 62, compare=False)
    filled: int = field(default=1 << 62, compare=False)
    once: int = field(default=0, compare=False)
    reads_texts: bool = field(default=False, compare=False)

    @property
    def said(self) -> str:
        """Type and shape for messages, as in ``float32 [-1, 4]``."""
        return f"{self.dtype} {[-1 if size is None else size for size in self.shape]}"


class Ports:
    """Inputs and outputs of one model.

    Args:
        dtypes: Types of inputs by name.
        shapes: Shapes of inputs by name, for the rows of each step that was prepared, ascending; under 0 where a model has one step of
            fixed shapes.
        rows: For inputs, and for outputs, the number of entries of the first axis that belong to one row; 0 for one without rows. None
            where rows were not shown to be independent.
        mixes: Reason why they were not.
        pads: True where steps have exactly these rows, so that a smaller one is padded. False where a step may have any number.
        device: Device ("cuda" or "cpu") whose tensors are not copied to the host; None: all are copied.
        max_rows: Most rows of a request; None: `MAX_STEPS` steps of the largest batch.
        example: Inputs of a step, which are legal.

    Attributes:
        inputs: Type and shape of every input by name.
        joins: True where several requests may share a step, and a step may be padded.
        users: Most users of a step.
        batches: Rows of the steps that were prepared, ascending; empty where shapes are fixed.
        example: Request that is legal, where one is known; else empty.
        before: Makes what steps take of each request; None: that is the request itself. See `behind`.
        lengths: Lengths of rows that were prepared, ascending; empty where shapes but the rows are fixed. See `having`.
    """

    before: HostProgram | None = None
    lengths: tuple[int, ...] = ()
    _given: Ports
    _about = LengthInputs("", (), {})

    def __init__(
        self,
        dtypes: Mapping[str, np.dtype[Any]],
        shapes: Mapping[int, Mapping[str, Shape]],
        rows: tuple[Mapping[str, int], Mapping[str, int]] | None,
        mixes: str = "",
        *,
        pads: bool = True,
        device: str | None = None,
        max_rows: int | None = None,
        example: Arrays | None = None,
    ) -> None:
        self.batches = tuple(batch for batch in shapes if batch)
        self._pads, self._device, self.example = pads, device, example or {}
        self.joins, self._mixes = rows is not None and bool(self.batches), mixes
        self._largest, self._once, self.users = max(self.batches, default=0), UserRows(), 1
        self._most = max_rows or MAX_STEPS * self._largest
        # Shapes are told as those of the largest step, in which an axis that belongs to rows has no size.
        largest = [*shapes.values()][-1]
        dtypes = {name: _kept_as(dtype) for name, dtype in dtypes.items()}
        # Where rows were not shown to be independent no input has any: each request is a step of its own.
        entries, self._made = rows if rows is not None and self.joins else ({}, {})
        self._entries = {name: entries.get(name, 0) for name in largest}
        changing = [name for name in largest if len({shape[name][:1] for shape in shapes.values()}) > 1]
        leading = set(changing) | {name for name, count in self._entries.items() if count}
        filled = {name: max(math.prod(one[name]) for one in shapes.values()) for name in largest}
        self.inputs = {
            name: Port(
                dtypes[name].name,
                (None, *shape[1:]) if name in leading else shape,
                count * self._most * math.prod(shape[1:]) if (count := self._entries[name]) else filled[name],
                filled[name],
            )
            for name, shape in largest.items()
        }
        # For `check` and `join`: what each input must be, and those that requests of one step have to agree in.
        self._wanted = [(name, dtypes[name], shape, self._entries[name]) for name, shape in largest.items()]
        self._counted = next(((name, count) for name, count in self._entries.items() if count), ("", 1))
        self._exact: dict[Any, list[tuple[str, np.dtype[Any], Shape]]] = {}  # the same by rows, or rows and length
        self._shapes = dict(shapes)
        self._shared = [name for name, count in self._entries.items() if not count and self.joins]
        self._keyed = self._shared
        self._texts = [name for name in largest if dtypes[name] == _TEXT]
        self._row = {
            name: _first_row(largest[name], dtypes[name], count, self.example.get(name))
            for name, count in self._entries.items()
            if count
        }

    def outputs(self, example: Arrays) -> dict[str, Port]:
        """Type and shape of every output of an answer by name, from the outputs of a step."""
        found = {}
        for name, value in example.items():
            open_axes = {*self._about.outputs.get(name, ()), *([0] if self._made.get(name) else ())}
            shape = [None if axis in open_axes else size for axis, size in enumerate(value.shape)]
            found[name] = Port(_kept_as(value.dtype).name, tuple(shape))
        return found

    def having(self, about: LengthInputs, lengths: Sequence[int]) -> Ports:
        """A copy whose requests have rows of any length up to the largest, all of one request of the same. Shapes that it was made of are
        those of the largest, and one more input has the length of each row, which a request does not bring."""
        found = copy.copy(self)
        found._about, found.lengths, found._exact = about, tuple(sorted(lengths)), {}
        found.example = {name: value for name, value in self.example.items() if name != about.name}
        found.inputs = {
            name: replace(port, shape=(port.shape[0], None, *port.shape[2:])) if name in about.inputs else port
            for name, port in self.inputs.items()
            if name != about.name
        }
        return found

    def sharing(self, once: UserRows) -> Ports:
        """A copy whose requests have one row of some inputs, or any number of equal ones; where steps have several users, also all rows,
        of several users: these are cut into requests of one each."""
        found = copy.copy(self)
        found._once, found.inputs, found.users = once, dict(self.inputs), once.users
        if once.users > 1:  # which share steps
            found._keyed = [name for name in self._shared if name not in once.entries]
        for name, entries in once.entries.items():
            port = self.inputs[name]
            most = entries * self._most * math.prod(size or 1 for size in port.shape[1:])
            dtype, shape = next((dtype, shape) for one, dtype, shape, _ in self._wanted if one == name)
            found._row = {**found._row, name: _first_row(shape, dtype, entries, self.example.get(name))}
            found.inputs[name] = replace(port, shape=(None, *port.shape[1:]), most=most, once=entries)
        return found

    def behind(
        self, before: HostProgram, shapes: Mapping[int, Mapping[str, Shape]], entries: Mapping[str, int]
    ) -> Ports:
        """Ports whose steps take what a program makes of a request, row by row: whoever brings it runs that, in whatever process.

        Args:
            before: The program.
            shapes: As of `Ports`, of what steps take.
            entries: Of these, the entries of a row.
        """
        own = {**self.example, **before.step(self.example)}
        types = {name: own[name].dtype for name in entries}
        found = Ports(types, shapes, (entries, self._made), self._mixes, example=own)
        found.before, found._given, found.example = before, self, self.example
        found.inputs = {name: replace(one, reads_texts=one.dtype == _TEXT.name) for name, one in self.inputs.items()}
        return found

    def on_host(self) -> Ports:
        """A copy that takes no tensor of the device as it is."""
        found = copy.copy(self)
        found._device = None
        return found

    def input_layout(self, rows: int, length: int = 0) -> dict[str, tuple[np.dtype[Any], Shape]] | None:
        """Type and shape of each input of a request of so many rows, of some length; None where there are strings."""
        if self._texts:
            return None
        return {name: (dtype, self._shape(name, rows, length)) for name, dtype, _, _ in self._wanted}

    def output_layout(
        self, outputs: Mapping[str, Port], rows: int, length: int = 0
    ) -> dict[str, tuple[np.dtype[Any], Shape]] | None:
        """Type and shape of each output of an answer to so many rows, as far as they are known; None where there are strings."""
        if any(port.dtype == _TEXT.name for port in outputs.values()):
            return None
        found = {}
        for name, port in outputs.items():
            along, axes = rows * self._made.get(name, 0), self._about.outputs.get(name, ())
            shape = [
                (length if axis in axes else along) if size is None else size for axis, size in enumerate(port.shape)
            ]
            found[name] = numpy_dtype(port.dtype), tuple(shape)
        return found

    def check(self, feeds: Feeds) -> tuple[Feeds, int, Hashable]:
        """Checks a request.

        Returns:
            Its inputs as arrays, or as tensors that stay on the device and may be read; its number of rows, 0 where a model has none; its
            key (see `Request`).

        Raises:
            EngineError: An input is missing or unknown, or has another type or shape than it must.
        """
        if self.before is None:
            return self._checked(self._with_length(feeds) if self.lengths else feeds)
        given, rows, _ = self._given._checked(feeds)
        (arrays,) = self.of_users(given if rows else {**given, **self._given._row})
        return arrays, rows, self.key(arrays)

    def _with_length(self, feeds: Feeds) -> Feeds:
        """A request with the length of each of its rows. Raises what `length_of` does."""
        if not hasattr(feeds, "items"):
            return feeds  # what is wrong with it is said later
        length, first = length_of(feeds, self._about, self.lengths[-1]), self._about.inputs[0]
        told, rows = self._about.name, feeds[first].shape[0] // (self._entries[first] or 1)
        return {**feeds, told: np.full(self._shape(told, rows), length, np.int32)}

    def positions(self, feeds: Feeds) -> int:
        """Length of the rows of a request that was checked; 0 where they have none."""
        return feeds[self._about.inputs[0]].shape[1] if self.lengths else 0

    def length(self, feeds: Feeds) -> int:
        """Length that a step of a request needs, of those that were prepared; 0 where they have none."""
        return self.lengths[bisect_left(self.lengths, self.positions(feeds))] if self.lengths else 0

    def _checked(self, feeds: Feeds) -> tuple[Feeds, int, Hashable]:
        # A short way for most requests: a dictionary of all inputs, each an array of the right type and shape.
        if self.joins and type(feeds) is dict and len(feeds) == len(self._wanted):
            first, count = self._counted
            value = feeds.get(first)
            rows = len(value) // count if isinstance(value, np.ndarray) and value.ndim else 0
            if 0 < rows <= self.batches[-1]:
                length = self.positions(feeds) if self.lengths else 0
                size = (rows, length) if length else rows
                if size not in self._exact:
                    if len(self._exact) >= _MOST_EXACT:
                        self._exact.clear()
                    shapes = [(name, dtype, self._shape(name, rows, length)) for name, dtype, _, _ in self._wanted]
                    self._exact[size] = shapes
                if all(_is_own(feeds.get(name), dtype, shape) for name, dtype, shape in self._exact[size]):
                    return feeds, rows, self.key(feeds)
        if not hasattr(feeds, "items"):
            said = f"a request is a mapping from names of inputs to arrays, not a {type(feeds).__name__}"
            raise EngineError(said, fix=f"the inputs are: {', '.join(self.inputs)}")
        arrays, rows = self._by_user({name: self._taken(name, value) for name, value in feeds.items()})
        for name in self._texts:
            arrays[name] = _as_bytes(name, arrays[name])
        return arrays, rows, self.key(arrays)

    def _by_user(self, arrays: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Inputs with one row of what is shared for each user, where a step has several users with that of each row, and how many rows the
        others have. Raises what `check` does."""
        several = np.zeros(0, np.int32)
        if self.users > 1 and (rows := self._rows(arrays)):
            known = {name: value for name, value in arrays.items() if name in self._entries}
            each, several = self._once.by_user(known, rows)
            arrays |= each
        else:
            arrays = one_row(self._once.entries, arrays)
            rows = self._rows(arrays)
            if not rows and self.joins:  # of which nothing is given out
                arrays |= {name: self._row[name] for name in self._once.entries if name in arrays}
        one = {**arrays, **self._once.first(arrays)} if several.any() else arrays
        told, length = self._about.name, self.positions(arrays)
        wanted = {name: (dtype.name, self._shape(name, rows, length)) for name, dtype, _, _ in self._wanted}
        refuse(*({name: value for name, value in each.items() if name != told} for each in (one, wanted)))
        return arrays | ({USERS: several} if several.any() else {}), rows

    def _taken(self, name: str, value: Any) -> Any:
        value = as_objects(value)
        if self._device is not None and name not in self._shared and lies_on(value, self._device):
            return tensor(name, value, settled=True)
        return as_array(name, value) if is_array(value) or is_tensor(value) else value

    def _shape(self, name: str, rows: int, length: int = 0) -> Shape:
        """Shape of an input of so many rows, of some length."""
        if rows in self._shapes:
            shape = self._shapes[rows][name]
        else:
            shape, count = self._shapes[self.batches[-1]][name], self._entries[name]
            shape = (rows * count, *shape[1:]) if count else shape
        return (shape[0], length, *shape[2:]) if length and name in self._about.inputs else shape

    def _rows(self, feeds: Feeds) -> int:
        """Number of rows of a request.

        Raises:
            EngineError: There is no step for it.
        """
        given = {name: tuple(value.shape) for name, value in feeds.items() if is_array(value) or is_tensor(value)}
        if not self.joins:
            return self._batch_of(given)
        own = [name for name, count in self._entries.items() if count and given.get(name) and name != self._about.name]
        sizes = {name: given[name][0] / self._entries[name] for name in own}
        if len(set(sizes.values())) > 1 or not all(size.is_integer() for size in sizes.values()):
            said = ", ".join(f"{name} {size:g}" for name, size in sizes.items())
            raise EngineError(f"inputs have different numbers of rows: {said}", fix="give all of them the same batch")
        rows = int(next(iter(sizes.values()), self.batches[-1]))
        if rows > self._most:
            what = f"a request of {rows:,} rows has more than {self._most:,}, the most that are taken"
            raise EngineError(what, fix="cut it, or raise max_rows (--pool max-rows=)")
        return rows

    def _batch_of(self, given: Mapping[str, Shape]) -> int:
        """The step that has exactly these shapes."""
        if given.keys() != self._entries.keys():
            return max(self._shapes)  # what is wrong with it is said later
        length = given[self._about.inputs[0]][1] if self.lengths else 0
        fitting = [
            batch for batch in self._shapes if all(given[name] == self._shape(name, batch, length) for name in given)
        ]
        first = next(iter(self._shapes))
        if (
            not fitting
            and self.batches
            and all(given[name][1:] == self._shape(name, first, length)[1:] for name in given)
        ):
            raise EngineError(
                f"inputs are of none of the batches that are ready ({', '.join(map(str, self.batches))}), "
                f"and can not be cut or filled up to one: {self._mixes}",
                fix="send one of those, or make this batch ready, too: batches (--batch)",
            )
        return fitting[0] if fitting else first

    def fits(self, feeds: Feeds, rows: int) -> bool:
        """True if a checked request of so many rows is run in one step."""
        return not self.joins or (0 < rows <= self._largest and USERS not in feeds)

    def parts(self, feeds: Feeds, rows: int) -> list[tuple[Feeds, int]]:
        """Cuts a checked request that does not fit into a step: inputs and rows of each part. No rows are one row, which is legal."""
        if not rows:
            return [(self._one_row(feeds), 1)]
        index, cuts = feeds.get(USERS), pieces(rows, self._largest)
        if index is not None:
            cuts = pieces_of_users(index, self._largest, 1)
        return [(self._part(feeds, index, start, end), end - start) for start, end in cuts]

    def _one_row(self, feeds: Feeds) -> Feeds:
        """A request without rows with a legal one, of its length."""
        length, found = self.positions(feeds), {**feeds, **self._row}
        if not length:
            return found
        starts = {name: self._row[name][:, :1] for name in self._about.inputs if name in self._row}
        lengths = np.full_like(found[self._about.name], length)
        return to_length({**found, **starts, self._about.name: lengths}, self._about, length)

    def _part(self, feeds: Feeds, index: NDArray[np.int32] | None, start: int, end: int) -> Feeds:
        """Some rows of a request, which are of one user."""
        found = {name: part(feeds[name], start, end, count) for name, count in self._entries.items()}
        if index is not None:
            user = int(index[start])
            found |= {name: part(feeds[name], user, user + 1, count) for name, count in self._once.entries.items()}
        return found

    def of_users(self, feeds: Arrays) -> list[Feeds]:
        """Legal inputs of a step as requests of one user each."""
        if self.before is not None:
            made = {**feeds, **self.before.step(feeds)}
            return [{name: made[name] for name in self._entries}]
        if self.users == 1:
            return [self._once.of(feeds)]
        arrays, rows, _ = self.check(feeds)
        return [arrays] if USERS not in arrays else [one for one, _ in self.parts(arrays, rows)]

    def whole(self, answers: Sequence[dict[str, Any]], rows: int) -> dict[str, Any]:
        """Joins the answers to the parts of a request of so many rows."""
        return joined(answers, self._made, rows)

    def key(self, feeds: Feeds) -> Hashable:
        """Key of a request: requests share a step where their inputs without rows are equal."""
        if not self.joins:
            return None
        return self._bytes(feeds, self._keyed)

    def user(self, feeds: Feeds) -> Hashable:
        """Name of the user of a request, by the bytes of what is shared; None where a step has one, which is part of the key."""
        return None if self.users == 1 or not self.joins else self._bytes(feeds, self._once.entries)

    def _bytes(self, feeds: Feeds, names: Iterable[str]) -> tuple[Hashable, ...]:
        return tuple([tuple(feeds[name].flat) if name in self._texts else feeds[name].tobytes() for name in names])

    def bucket(self, rows: int) -> int:
        """Rows of the smallest step that has room for so many."""
        index = bisect_left(self.batches, rows)
        return self.batches[index] if self._pads and index < len(self.batches) else rows

    def at_length(self, feeds: Sequence[Feeds], length: int) -> Sequence[Feeds]:
        """Inputs of requests as a step of some length takes them."""
        return [to_length(one, self._about, length) for one in feeds]

    def join(self, feeds: Sequence[Feeds], bucket: int) -> Feeds:
        """Joins the inputs of several requests to those of one step. Copies of the first row pad its end, since values that are legal in a
        row (an index in range, for example) are legal there, too."""
        if not self.joins:
            return feeds[0]
        found = {
            name: _filled([one[name] for one in feeds], bucket * count, count) if count else feeds[0][name]
            for name, count in self._entries.items()
        }
        if self.users == 1:
            return found
        name, count = self._counted
        users, index = dict[Hashable, tuple[int, Feeds]](), np.zeros(bucket, np.int32)  # padding is the first one's
        end = 0
        for one in feeds:
            start, end = end, end + len(one[name]) // count
            index[start:end] = users.setdefault(self.user(one), (len(users), one))[0]
        found |= {name: np.concatenate([one[name] for _, one in users.values()]) for name in self._once.entries}
        return {**found, USERS: index}

    def of_length(self, answer: dict[str, Any], feeds: Feeds) -> dict[str, Any]:
        """An answer without what lies beyond the length of its request."""
        return cut_to_length(answer, self._about, self.positions(feeds))

    def cut(self, outputs: dict[str, Any], rows: Sequence[int]) -> list[dict[str, Any]]:
        """Splits the outputs of a step into answers to requests of so many rows each. Outputs without rows are copied for each."""
        if not self.joins or (len(rows) == 1 and rows[0] in self.batches):
            return [outputs]
        if len(set(rows)) == 1:  # to iterate over an array takes a third of the time that slices take
            count = len(rows)
            columns = [
                [*value[: made * sum(rows)].reshape(count, made * rows[0], *value.shape[1:])]
                if (made := self._made.get(name))
                else [value, *(_copied(value) for _ in rows[1:])]
                for name, value in outputs.items()
            ]
            return [dict(zip(outputs, values, strict=True)) for values in zip(*columns, strict=True)]
        answers: list[dict[str, Any]] = []
        start = 0
        for count in rows:
            end = start + count
            answers.append({})
            for name, value in outputs.items():
                made = self._made.get(name)
                answers[-1][name] = value[start * made : end * made] if made else _copied(value) if start else value
            start = end
        return answers


def _is_own(value: Any, dtype: np.dtype[Any], shape: Shape) -> bool:
    """True if a value is an array of the right type and shape, and of strings holds no others."""
    kind, texts = type(value), dtype == _TEXT
    own = kind is np.ndarray and value.shape == shape and value.dtype == dtype and not (texts and not all_bytes(value))
    return own or (texts and kind is Texts and bool(value.shape == shape))


def _first_row(shape: Shape, dtype: np.dtype[Any], entries: int, example: NDArray[Any] | None) -> NDArray[Any]:
    """A legal row of an input; zeros where none is known."""
    empty = np.full((entries, *shape[1:]), b"" if dtype == _TEXT else 0, dtype)
    return empty if example is None else np.array(example[:entries])


def _copied(value: Any) -> Any:
    return value.copy() if is_array(value) else value.clone()


def _filled(parts: Sequence[NDArray[Any]], size: int, entries: int) -> NDArray[Any]:
    """Concatenates arrays, and pads them with copies of the first entries."""
    missing = size - sum(map(len, parts))
    if not missing and len(parts) == 1:
        return parts[0]
    return np.concatenate([*parts, *[parts[0][:entries]] * (missing // entries)])


def _kept_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Type under which an input is known: all of NumPy's types of strings are one."""
    return _TEXT if dtype.kind in "OSU" else dtype


def _as_bytes(name: str, value: NDArray[Any]) -> NDArray[Any]:
    """Converts an array of strings to one of bytes, so that requests with other kinds of strings can share a step.

    Raises:
        EngineError: There is something else in it, for which the whole step would fail.
    """
    if value.dtype.kind == "S" or (value.dtype == _TEXT and all_bytes(value)):
        return value.astype(_TEXT, copy=False)
    found = np.empty(value.shape, _TEXT)
    fix = "give bytes, or text, which is sent as UTF-8"
    for place, one in enumerate(value.flat):
        if not isinstance(one, bytes | str):
            raise EngineError(f"input {name} has a {type(one).__name__} among its strings", fix=fix)
        try:
            found.flat[place] = one if isinstance(one, bytes) else one.encode()
        except UnicodeEncodeError as problem:
            raise EngineError(f"input {name} has a text that UTF-8 can not have: {problem}", fix=fix) from None
    return found
