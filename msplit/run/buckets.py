"""Batches of a model: any number of rows is run in steps of those that are ready, which are filled up, cut, and joined again.

Lengths of its rows: sequences are filled up to the next length that is ready, with copies of their first position, and cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.analysis.rows.walk import independent_rows
from msplit.engines.base import USERS, Arrays, Executable, Feeds, Following, is_tensor
from msplit.engines.cuda.options import SharedRows
from msplit.engines.tensors import (
    as_array,
    cut_to_length,
    joined,
    length_of,
    part,
    pieces,
    pieces_of_users,
    tensor,
    to_length,
)
from msplit.engines.user_rows import UserRows, taken_rows
from msplit.errors import EngineError, MsplitError, WrongShape
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import LengthInputs
from msplit.run.request import RunRequest

Counts = tuple[Mapping[str, int], Mapping[str, int]]
"""Of inputs and of outputs, how many entries of the leading dimension belong to a row; 0: it has no rows."""


@dataclass(frozen=True, eq=False)
class RowProof:
    """Rows of a model, and whether they are independent.

    Attributes:
        counts: Where they are; None where that was not shown.
        mixes: Why it was not.
        row: A legal row of each input that has rows, where rows are independent.
        batch: Rows of the step that it was taken from.
        shared: Inputs of which a step reads one row for each user.
    """

    counts: Counts | None
    mixes: str
    row: Arrays
    batch: int
    shared: UserRows

    @classmethod
    def of(cls, counts: Counts | None, mixes: str, feeds: Arrays, shared: UserRows) -> RowProof:
        """Makes it of what `rows_of` gives and inputs of a step, which are legal."""
        entries = {name: count for name, count in (counts[0] if counts is not None else {}).items() if count}
        row = {name: feeds[name][:count].copy() for name, count in {**entries, **shared.entries}.items()}
        return cls(counts, mixes, row, _batch(feeds, counts, ()), shared)


def rows_of(flat: FlatGraph, request: RunRequest) -> tuple[Counts | None, str]:
    """Entries per row of inputs and outputs, as `Manifest.rows` has them; or None, and why rows are not independent."""
    try:
        found = independent_rows(flat, shapes=request.workload.shapes)
        found.check()
    except MsplitError as problem:
        return None, "; ".join([problem.what, *problem.details])
    shared = request.shared.inputs if isinstance(request.shared, SharedRows) else ()  # which have no rows to be cut
    return ({**found.inputs, **dict.fromkeys(shared, 0)}, found.outputs), ""


class Buckets(Executable):
    """Executables of one model for several batches. See `engines.base.Executable`; what has no inputs is of the largest.

    Args:
        buckets: By batch.
    """

    def __init__(self, buckets: Mapping[int, Executable], proof: RowProof) -> None:
        self._buckets, self._proof = dict(sorted(buckets.items())), proof
        self._most, self._largest = next(reversed(self._buckets.items()))

    def step(self, feeds: Feeds) -> dict[str, Any]:
        """A step of any batch that there is a bucket of; where rows are independent of any other, too, in several steps if need be.

        Raises:
            EngineError: Rows are not independent, and no bucket has so many.
        """
        return self._step(feeds, lambda bucket, filled: bucket.step(filled))

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """See `Executable`."""
        return self._step(feeds, lambda bucket, filled: bucket.step_on_device(filled))

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """See `Executable`: where the next step is one of the same batch, and that is a bucket. Others are not sent ahead."""
        batch = self.batch(feeds)
        if batch not in self._buckets:
            outputs = self.step_on_device(feeds) if on_device else self.step(feeds)
            then()
            return outputs

        def following() -> Feeds | None:
            found = then()
            with contextlib.suppress(EngineError):  # its own step says so
                return found if found is not None and self.batch(found) == batch else None
            return None

        return self._step(feeds, lambda bucket, filled: bucket.step_prefetching(filled, following, on_device=on_device))

    def _step(self, feeds: Feeds, step: Callable[[Executable, Feeds], dict[str, Any]]) -> dict[str, Any]:
        with_rows = [name for name, count in (self._proof.counts or ({}, {}))[0].items() if count]
        if not isinstance(feeds, Mapping) or not all(getattr(feeds.get(name), "shape", ()) for name in with_rows):
            return step(self._largest, feeds)  # which says what is no input of the model, or none of these
        batch, shared, problem = self.batch(feeds), self._proof.shared, None
        if batch in self._buckets:
            try:
                return step(self._buckets[batch], feeds)
            except WrongShape as wrong:
                if shared.users == 1:
                    raise
                problem = wrong  # it may be that there are too many users
        if self._proof.counts is None:
            raise EngineError(
                f"a batch of {batch} is none of those that were built ({', '.join(map(str, self._buckets))}), "
                f"and it can not be cut or filled up to them: {self._proof.mixes}",
                fix="build that batch, too",
            )
        entries, made = self._proof.counts

        def one(given: Feeds, start: int, end: int) -> dict[str, Any]:
            """Runs a step on some rows, filled up to the next larger bucket."""
            bucket = next(size for size in self._buckets if size >= end - start)
            filled = {name: part(value, start, end, entries.get(name, 0)) for name, value in given.items()}
            if bucket > end - start:
                filled = {
                    name: _filled(value, end - start, bucket, entries[name]) if entries.get(name) else value
                    for name, value in filled.items()
                }
            if index is not None:
                users, of_row = np.unique(index[start:end], return_inverse=True)
                filled |= {name: taken_rows(given[name], users, shared.entries[name]) for name in shared.first(given)}
                filled[USERS] = np.append(of_row, [of_row[0]] * (bucket - end + start)).astype(np.int32)
            outputs = step(self._buckets[bucket], filled)
            return {name: part(value, 0, end - start, made.get(name, 0)) for name, value in outputs.items()}

        on_host = shared.entries if shared.users > 1 else ()
        given = {
            name: (as_array if name in on_host else tensor)(name, value) if is_tensor(value) else value
            for name, value in feeds.items()
        }
        index = None
        if not batch:  # a legal row, of which nothing is given out
            return joined([one({**given, **self._proof.row}, 0, 1)], made, 0)
        cuts = [*pieces(batch, self._most)]
        if shared.users > 1:
            given, index = shared.by_user(given, batch)
            cuts = [*pieces_of_users(index, self._most, shared.users)]
            if problem is not None and len(cuts) == 1:
                raise problem
        return joined([one(given, start, end) for start, end in cuts], made, batch)

    def batch(self, feeds: Feeds) -> int:
        """Rows of the inputs of a step; without knowing which have rows, by what the first one has.

        Raises:
            EngineError: Inputs have different numbers of rows.
        """
        return _batch(feeds, self._proof.counts, self._buckets)

    def launch(self) -> None:
        """See `Executable`."""
        self._largest.launch()

    def device_times(self, count: int) -> list[float] | None:
        """See `Executable`."""
        return self._largest.device_times(count)

    def facts(self) -> Mapping[str, Any]:
        """Those of the largest, and the batches."""
        return {**self._largest.facts(), "batches": tuple(self._buckets)}

    def close(self) -> None:
        """Closes all of them."""
        for executable in self._buckets.values():
            executable.close()


def _batch(feeds: Feeds, counts: Counts | None, known: Container[int]) -> int:
    entries = counts[0] if counts is not None else dict.fromkeys(feeds, 1)
    sizes = {
        name: feeds[name].shape[0] / count
        for name, count in entries.items()
        if count and name in feeds and len(getattr(feeds[name], "shape", []))
    }
    if counts is None:
        return int(next((size for size in sizes.values() if size in known), next(iter(sizes.values()), 0)))
    if len(set(sizes.values())) > 1 or not all(size.is_integer() for size in sizes.values()):
        said = ", ".join(f"{name} {size:g}" for name, size in sizes.items())
        raise EngineError(f"inputs have different numbers of rows: {said}", fix="give all of them the same batch")
    return int(next(iter(sizes.values()), 0))


def _filled(value: Any, batch: int, bucket: int, entries: int) -> Any:
    """An input with its first row repeated at the end: what is a legal row, an index in range for example, is one there, too."""
    first = list(range(entries))
    return value[[*range(batch * entries), *first * (bucket - batch)]]


class Lengths(Buckets):
    """Executables of one model for several lengths of its rows. See `engines.base.Executable`; what has no inputs is of the longest.

    Args:
        lengths: By length; their inputs are the model's, and the length of each row.
        about: What has positions.
    """

    def __init__(self, lengths: Mapping[int, Executable], about: LengthInputs) -> None:
        self._buckets, self._about = dict(sorted(lengths.items())), about
        self._most, self._largest = next(reversed(self._buckets.items()))

    step_prefetching = Executable.step_prefetching

    def _step(self, feeds: Feeds, step: Callable[[Executable, Feeds], dict[str, Any]]) -> dict[str, Any]:
        """A step of rows of any length up to the longest.

        Raises:
            EngineError: They are longer or empty, or inputs have different lengths.
        """
        about = self._about
        length = length_of(feeds, about, self._most)
        bucket = next(size for size in self._buckets if size >= length)
        lengths = np.full(feeds[about.inputs[0]].shape[0], length, np.int32)
        outputs = step(self._buckets[bucket], {**to_length(feeds, about, bucket), about.name: lengths})
        return cut_to_length(outputs, about, length)

    def facts(self) -> Mapping[str, Any]:
        """Those of the longest, and the lengths."""
        return {**self._largest.facts(), "lengths": tuple(self._buckets)}
