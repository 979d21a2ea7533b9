"""Which rows of a batch each of several processes is fed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from msplit.engines.base import Feeds
from msplit.engines.cuda.options import Shards
from msplit.errors import LoadError
from msplit.training.batches import Specs
from msplit.training.data import Data


def shards_of(specs: Specs, size: int) -> Shards | None:
    """How a batch of these inputs is split: along the first dimension, where the graph leaves it open; where it leaves none open, along
    that of the first input and of all that are as long. None where there is one process.

    Raises:
        LoadError: No input has rows.
    """
    if size == 1:
        return None
    first = {name: spec.shape[0] if spec.shape else None for name, spec in specs.items() if spec.shape != ()}
    opened = tuple(name for name, rows in first.items() if rows is None)
    rows = next(iter(first.values()), None)
    named = opened or tuple(name for name, count in first.items() if count == rows)
    if not named:
        raise LoadError("the model has no input with rows, so a batch can not be split", fix="train on one GPU")
    return Shards(size, named, is_open=bool(opened))


def whole(specs: Specs, shards: Shards | None) -> Specs:
    """The inputs of the whole batch: of one that has a fixed number of rows, so many times as many."""
    if shards is None or shards.is_open:
        return specs
    found = {}
    for name, spec in specs.items():
        split = name in shards.inputs and spec.shape
        found[name] = replace(spec, shape=(spec.shape[0] * shards.count, *spec.shape[1:])) if split else spec  # type: ignore[index,operator]
    return found


def part(data: Data, shards: Shards | None, rank: int) -> Data:
    """The same data, of which each batch is the rows of one process: the first ones are the first process's."""
    if shards is None:
        return data

    def start(number: int) -> Iterator[Feeds]:
        for at, batch in enumerate(data.start(number), number):
            yield _rows(batch, shards, rank, at)

    return replace(data, start=start)


def _rows(batch: Feeds, shards: Shards, rank: int, at: int) -> Feeds:
    split = [name for name in shards.inputs if name in batch]
    counts = {name: len(batch[name]) for name in split}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise LoadError(
            f"batch {at} has inputs with different numbers of rows, so it can not be split: {listed}",
            fix="train on one GPU, or feed dense inputs",
        )
    rows = next(iter(counts.values()), 0)
    if rows % shards.count:
        raise LoadError(
            f"batch {at} has {rows} rows, which {shards.count} processes can not share",
            fix=f"--batch {rows + -rows % shards.count}",
        )
    own = slice(rows // shards.count * rank, rows // shards.count * (rank + 1))
    return {name: value[own] if name in counts else value for name, value in batch.items()}
