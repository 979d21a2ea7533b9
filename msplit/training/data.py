"""Data of a training: batches by name, and the rows of each process.

Data of a training by name: arrays in an .npz, TFRecords, or a function; the same batches in the same order for the same settings.

Which rows of a batch each of several processes is fed.
"""

from __future__ import annotations

import glob
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Feeds
from msplit.engines.cuda.options import Shards
from msplit.engines.tensorflow import runtime
from msplit.errors import LoadError
from msplit.formats.files import open_regular
from msplit.formats.tensors import fits
from msplit.inputs.files import names_in
from msplit.inputs.make import calling, imported, is_function, load_input
from msplit.shapes.registry import shape_text
from msplit.training.batches import Specs, batches_of, rows_of

_SHUFFLED = 10_000
"""Records among which the next one is drawn."""

_GZIP = b"\x1f\x8b"

_PARSED = {"float32": "float32", "int64": "int64", "string": "string", "bool": "int64"}
"""Type of an input -> the one in which an Example holds it; other floating point numbers are float32, other integers int64."""

_FIX = "give an .npz with one array per input, TFRecords (*.tfrecord), or module:function"


@dataclass(frozen=True)
class BatchOptions:
    """Options of batching.

    Attributes:
        batch: Rows of a batch. What is left over at the end of an epoch is left out.
        epochs: Number of times that all data are gone through; None: without an end.
        shuffle: True for another order in every epoch, by the seed.
    """

    batch: int
    epochs: int | None = None
    shuffle: bool = False
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Data:
    """Batches that can be had from any one on.

    Attributes:
        start: Gives the batches from a number on, counted from 0 over all epochs.
        described: Facts that the order of the batches depends on: with others, a number means another batch.
    """

    start: Callable[[int], Iterator[Feeds]]
    described: Mapping[str, Any]


def constant(specs: Specs, files: Mapping[str, Path]) -> dict[str, NDArray[Any]]:
    """The values of inputs that are the same at every step, from files by input.

    Raises:
        LoadError: A file can not be read or does not fit its input.
    """
    values = {}
    for name, path in files.items():
        if name not in specs:
            fix = f"name one: {', '.join(specs) or 'none'}"
            raise LoadError(f"the model has no input {name!r}", where=str(path), fix=fix)
        values[name] = load_input(name, path, specs[name].dtype, specs[name].shape)
    return values


def open_data(
    sources: Sequence[str],
    specs: Specs,
    how: BatchOptions,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    fixed: Feeds | None = None,
) -> Data:
    """The data that a user named.

    Args:
        sources: One .npz file, TFRecord files or patterns of such, or one ``module:function``.
        specs: The inputs that it is for.
        how: Options of batching.
        shapes: Shapes by input, for sizes that the graph leaves open and records do not tell.
        fixed: Inputs with values that are the same at every step, so that the data need not have them.

    Raises:
        LoadError: It can not be read, or does not fit an input: the message names it.
    """
    given = fixed or {}
    data = _opened(sources, {name: spec for name, spec in specs.items() if name not in given}, how, shapes or {})
    return replace(data, start=lambda number: ({**batch, **given} for batch in data.start(number)))


def own_data(specs: Specs, fixed: Feeds) -> Data:
    """For a graph that reads its data itself: every step is fed the same, until the graph says that its data are over.

    Raises:
        LoadError: There are inputs that nobody gives.
    """
    missing = [name for name in specs if name not in fixed]
    if missing:
        fix = f"{_FIX}, or the same value at every step: --input"
        raise LoadError(f"nothing gives input {missing[0]!r}", where="--data", fix=fix)
    return Data(lambda _: itertools.repeat(fixed), {"data": "the graph's own"})


def _opened(sources: Sequence[str], specs: Specs, how: BatchOptions, shapes: Mapping[str, tuple[int, ...]]) -> Data:
    if len(sources) == 1 and is_function(sources[0]):
        return _function(sources[0], specs, how)
    paths = [Path(path) for source in sources for path in _paths(source)]
    zipped = [path for path in paths if _head(path).startswith(b"PK")]
    if zipped and len(paths) == 1:
        return _arrays(paths[0], specs, how)
    if zipped:
        raise LoadError("is not the only data: arrays come from one file", where=str(zipped[0]), fix=_FIX)
    return _records(paths, specs, how, shapes)


def _paths(source: str) -> list[str]:
    found = [source] if os.path.lexists(source) else sorted(glob.glob(source, recursive=True))
    if not found:
        raise LoadError("there is no such data", where=source, fix=_FIX)
    return found


def _head(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(2)
    except OSError as error:
        raise LoadError(f"the data can not be read: {error.strerror or error}", where=str(path), fix=_FIX) from error


# --- Arrays


def _arrays(path: Path, specs: Specs, how: BatchOptions) -> Data:
    """One array for each input, cut along its first dimension; one of the very shape of its input is fed whole at every step."""
    there = names_in(path)
    for name in specs:
        if name not in there and f"input/{name}" not in there:
            what = f"there is no array for input {name!r}, but {', '.join(sorted(there)[:8]) or 'nothing'}"
            fix = f"save it under that name: numpy.savez({path.name!r}, **{{{name!r}: array, …}})"
            raise LoadError(what, where=str(path), fix=fix)
    whole, cut = dict[str, NDArray[Any]](), dict[str, NDArray[Any]]()
    for name, spec in specs.items():
        shape = spec.shape and (None, *spec.shape[1:])
        value = load_input(name, path, spec.dtype, shape)
        same = spec.shape is not None and None not in spec.shape and value.shape == spec.shape
        (whole if same or not value.ndim else cut)[name] = value
        if spec.shape and not same and not fits((how.batch, *value.shape[1:]), spec.shape):
            said = f"input {name!r} has shape {shape_text(spec.shape)}, which is no batch of {how.batch}"
            raise LoadError(said, where=str(path), fix=f"--batch {spec.shape[0]}")
    rows = {len(value) for value in cut.values()}
    if len(rows) > 1:
        what = f"the arrays have different numbers of rows: {', '.join(f'{name} {len(cut[name])}' for name in cut)}"
        raise LoadError(what, where=str(path), fix="give each input as many")
    count = rows.pop() if rows else how.batch
    per_epoch = count // how.batch
    if not per_epoch:
        fix = f"--batch {max(count, 1)} or less"
        raise LoadError(f"there are {count} rows, less than a batch", where=str(path), fix=fix)

    def start(number: int) -> Iterator[Feeds]:
        order, of = np.arange(count), -1
        for at in itertools.count(number):
            epoch, place = divmod(at, per_epoch)
            if how.epochs is not None and epoch >= how.epochs:
                return
            if how.shuffle and epoch != of:
                order, of = np.random.default_rng([how.seed, epoch]).permutation(count), epoch
            rows = order[place * how.batch : (place + 1) * how.batch]
            yield {**whole, **{name: value[rows] for name, value in cut.items()}}

    return Data(start, {"data": "arrays", "rows": count, **_described(how)})


def _described(how: BatchOptions) -> dict[str, Any]:
    return {"batch": how.batch, "shuffle": how.shuffle, **({"seed": how.seed} if how.shuffle else {})}


# --- TFRecords


def _records(paths: Sequence[Path], specs: Specs, how: BatchOptions, shapes: Mapping[str, tuple[int, ...]]) -> Data:
    """Records in order. Where the model has one input and that takes strings, they are its values; otherwise they are Examples with a
    feature for each input."""
    where = str(paths[0])
    features = {name: _feature(name, specs, shapes, where) for name in specs}
    raw = len(specs) == 1 and next(iter(specs.values())).dtype == "string"
    files = [str(path) for path in paths]
    kinds = {"GZIP" if _head(path).startswith(_GZIP) else "" for path in paths}
    if len(kinds) > 1:
        raise LoadError("some files of records are compressed and some are not", where=where, fix="write them alike")
    (kind,) = kinds

    def dataset(epoch: int) -> Any:
        tf = runtime.tensorflow()
        found = tf.data.TFRecordDataset(files, kind)
        if how.shuffle:
            found = found.shuffle(_SHUFFLED, seed=how.seed * 1_000_003 + epoch, reshuffle_each_iteration=False)
        return found.batch(how.batch, drop_remainder=True)

    def parsed(batch: Any) -> dict[str, Any]:
        tf = runtime.tensorflow()
        if raw:
            return {name: tf.reshape(batch, [how.batch, *shape[1:]]) for name, (_, shape) in features.items()}
        wanted = {name: tf.io.FixedLenFeature(shape[1:], dtype) for name, (dtype, shape) in features.items()}
        values = tf.io.parse_example(batch, wanted)
        return {
            name: tf.cast(value, specs[name].dtype) if specs[name].dtype != value.dtype.name else value
            for name, value in values.items()
        }

    def start(number: int) -> Iterator[Feeds]:
        runtime.configure(1)
        epoch = 0
        if number:
            with _reading(where):
                per_epoch = int(dataset(0).reduce(np.int64(0), lambda count, _: count + 1).numpy())
            epoch, number = divmod(number, per_epoch)
        while how.epochs is None or epoch < how.epochs:
            some = False
            with _reading(where):
                for feeds in dataset(epoch).skip(number).map(parsed).as_numpy_iterator():
                    some = True
                    yield {name: np.asarray(value) for name, value in feeds.items()}
            if not some and not number:
                fix = "--batch with a smaller number"
                raise LoadError("there are fewer records than a batch", where=where, fix=fix)
            epoch, number = epoch + 1, 0

    return Data(start, {"data": "records", "files": [path.name for path in paths], **_described(how)})


@contextmanager
def _reading(where: str) -> Iterator[None]:
    tf = runtime.tensorflow()
    try:
        yield
    except tf.errors.OpError as error:
        said, fix = "do not fit the model", "each record is an Example with a feature for each input"
        if isinstance(error, tf.errors.DataLossError):
            said, fix = "are damaged or cut off", "copy or write them again"
        raise LoadError(f"the records {said}: {runtime.first_line(error)}", where=where, fix=fix) from error


def _feature(
    name: str, specs: Specs, shapes: Mapping[str, tuple[int, ...]], where: str
) -> tuple[str, tuple[int | None, ...]]:
    """The type of the feature of an input, and the shape of a batch of it."""
    spec = specs[name]
    shape = shapes.get(name) or spec.shape
    if shape is None or not shape:
        said = f"input {name!r} has {'no rows' if shape is not None else 'no shape'}, so records can not hold it"
        fix = f"give its value with --input {name}=FILE, or the data by module:function"
        raise LoadError(said, where=where, fix=fix)
    if None in shape[1:]:
        sizes = ",".join("1" if size is None else str(size) for size in shape)
        said = f"input {name!r} has shape {shape_text(shape)}, and records do not say how long a row is"
        raise LoadError(said, where=where, fix=f"say it: --shape {name}={sizes} with its sizes in place of each ?")
    floating = spec.dtype.startswith(("float", "bfloat"))
    return _PARSED.get(spec.dtype) or ("float32" if floating else "int64"), tuple(shape)


# --- A function


def _without_rest(batches: Iterator[Feeds], specs: Specs) -> Iterator[Feeds]:
    """All batches but a last one with fewer rows than the first."""
    first, rest = 0, dict[str, Any]()
    for feeds in batches:
        if rest:
            yield rest  # it was not the last: who takes it says what is wrong with it
        rows = rows_of(feeds, specs)
        first = first or rows
        rest = {**feeds} if rows < first else {}
        if not rest:
            yield feeds


def _function(source: str, specs: Specs, how: BatchOptions) -> Data:
    """The data that a function gives: an iterable of batches, which is an epoch; it is called anew for each. Of `batch`, `seed`, `epoch`
    and `start`
    (how many batches went before) it is told what it takes. Where it takes no `start`, what went before is gone through and dropped.
    A last batch with fewer rows is what is left over of an epoch."""
    make = imported(source, "that returns an iterable of batches")
    takes = inspect.signature(make).parameters

    def epoch_of(epoch: int, first: int) -> Iterator[Feeds]:
        told = {"batch": how.batch, "seed": how.seed, "epoch": epoch, "start": first}
        with calling(source):
            given = make(**{name: value for name, value in told.items() if name in takes})
            yield from _without_rest(batches_of(given, [*specs], source), specs)

    def start(number: int) -> Iterator[Feeds]:
        for epoch in itertools.count() if how.epochs is None else range(how.epochs):
            drop, some = 0 if "start" in takes else number, bool(number)
            for feeds in epoch_of(epoch, number):
                some = True
                if drop:
                    drop -= 1
                else:
                    yield feeds
            if not some:
                fix = "give an iterable that can be gone through anew at every call"
                raise LoadError("gives no batch", where=source, fix=fix)
            number = drop

    told = {"batch": how.batch, "seed": how.seed}
    return Data(start, {"data": source, **{name: value for name, value in told.items() if name in takes}})


def shards_of(specs: Specs, size: int) -> Shards | None:
    """Split of a batch of these inputs: along the first dimension, where the graph leaves it open; where it leaves none open, along
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
    """These data, of which each batch is the rows of one process: the first ones are the first process's."""
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
        what = f"batch {at} has inputs with different numbers of rows, so it can not be split: {listed}"
        raise LoadError(what, fix="train on one GPU, or feed dense inputs")
    rows = next(iter(counts.values()), 0)
    each, left = divmod(rows, shards.count)
    if left:
        what = f"batch {at} has {rows} rows, which {shards.count} processes can not share"
        raise LoadError(what, fix=f"--batch {rows + shards.count - left}")
    own = slice(each * rank, each * (rank + 1))
    return {name: value[own] if name in counts else value for name, value in batch.items()}
