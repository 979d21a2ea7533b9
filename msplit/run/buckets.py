"""Batches of a model: any number of rows is run in steps of those that are ready, which are filled up, cut, and joined again.

Lengths of its rows: sequences are filled up with zeros to the next length that is ready, and cut. The model is written anew for that, with
the length of each row as one more input: where an op mixes positions, those beyond the end of a row are hidden in front of it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from msplit.analysis.rows.lengths import LARGEST, LAST, LOWEST, MEAN, Mask, Positions, positions_of, sized_shapes
from msplit.analysis.rows.walk import independent_rows
from msplit.assignment.cut import cut
from msplit.assignment.model import load
from msplit.assignment.replicas import free_name
from msplit.assignment.replicate import describe
from msplit.core.arguments import Precision, listed, whole
from msplit.engines.base import USERS, Arrays, Executable, Feeds, Following, is_tensor, refuse
from msplit.engines.cuda.options import SharedRows
from msplit.engines.tensorflow.engine import session_on_cpu
from msplit.engines.tensors import as_array, joined, part, pieces, pieces_of_users, tensor
from msplit.engines.user_rows import UserRows, taken_rows
from msplit.errors import EngineError, MsplitError, WrongShape
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import LengthInputs
from msplit.formats.model import Endpoint, Format, meta_graphs
from msplit.formats.reader import SAVED_MODEL_FILES
from msplit.formats.tensors import add_node, numpy_dtype
from msplit.inputs.make import feeds_for
from msplit.progress import phase
from msplit.run.request import RunRequest
from msplit.shapes import infer
from msplit.verify.compare import compare, computed_in
from msplit.verify.results import OutputCheck

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


class Lengths(Executable):
    """Executables of one model for several lengths of its rows. See `engines.base.Executable`; what has no inputs is of the longest.

    Args:
        lengths: By length; their inputs are the model's, and the length of each row.
    """

    def __init__(self, lengths: Mapping[int, Executable], about: LengthInputs) -> None:
        self._lengths, self._about = dict(sorted(lengths.items())), about
        self._longest = next(reversed(self._lengths.values()))

    def step(self, feeds: Feeds) -> dict[str, Any]:
        """A step of rows of any length up to the longest.

        Raises:
            EngineError: They are longer, or inputs have different lengths.
        """
        return self._step(feeds, lambda one, filled: one.step(filled))

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """See `Executable`."""
        return self._step(feeds, lambda one, filled: one.step_on_device(filled))

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """See `Executable`: nothing is sent ahead."""
        outputs = self.step_on_device(feeds) if on_device else self.step(feeds)
        then()
        return outputs

    def _step(self, feeds: Feeds, step: Callable[[Executable, Feeds], dict[str, Any]]) -> dict[str, Any]:
        length, bucket, filled = padded(feeds, self._about, self._lengths)
        return cut_to(step(self._lengths[bucket], filled), self._about, length)

    def launch(self) -> None:
        """See `Executable`."""
        self._longest.launch()

    def device_times(self, count: int) -> list[float] | None:
        """See `Executable`."""
        return self._longest.device_times(count)

    def facts(self) -> Mapping[str, Any]:
        """Those of the longest, and the lengths."""
        return {**self._longest.facts(), "lengths": tuple(self._lengths)}

    def close(self) -> None:
        """Closes all of them."""
        for executable in self._lengths.values():
            executable.close()


def padded(feeds: Feeds, about: LengthInputs, lengths: Container[int]) -> tuple[int, int, dict[str, Any]]:
    """The length of the rows of a request, the next length that is ready, and inputs with zeros up to it and the length of each row.

    Raises:
        EngineError: They are longer than any that is ready, empty, or not equally long.
    """
    ready = [*lengths] if isinstance(lengths, Mapping | Sequence) else []
    known = f"inputs {', '.join(about.inputs)} have rows of equal length, of 1 to {ready[-1]}"
    values = {
        name: as_array(name, feeds[name]) if is_tensor(feeds[name]) else feeds[name]
        for name in about.inputs
        if name in feeds
    }
    sizes = {name: value.shape[1] for name, value in values.items() if len(getattr(value, "shape", ())) > 1}
    if about.name in feeds or len(sizes) < len(about.inputs):
        missing = next((name for name in about.inputs if name not in sizes), about.name)
        raise EngineError(
            f"input {missing} is missing, is none of the model's, or has no rows of some length", fix=known
        )
    if len({*sizes.values()}) > 1:
        raise EngineError(
            f"inputs have different lengths: {', '.join(f'{name} {size}' for name, size in sizes.items())}", fix=known
        )
    length = next(iter(sizes.values()))
    bucket = next((one for one in ready if one >= length), 0)
    if not length or not bucket:
        what = (
            f"rows are {length} long, and the longest that was prepared is {ready[-1]}" if length else "rows are empty"
        )
        raise EngineError(what, fix="cut them, or prepare that length, too: lengths (--lengths)" if length else known)
    filled = dict(feeds)
    for name, value in values.items():
        filled[name] = np.zeros((len(value), bucket, *value.shape[2:]), value.dtype)
        if value.dtype.hasobject:
            filled[name][...] = b""
        filled[name][:, :length] = value
    filled[about.name] = np.full(len(values[about.inputs[0]]), length, np.int32)
    return length, bucket, filled


def cut_to(outputs: Mapping[str, Any], about: LengthInputs, length: int) -> dict[str, Any]:
    """Outputs without what lies beyond the end of rows of some length."""
    found = dict(outputs)
    for name, axes in about.outputs.items():
        rank = len(outputs[name].shape)
        found[name] = outputs[name][tuple(slice(length) if axis in axes else slice(None) for axis in range(rank))]
    return found


@dataclass(frozen=True, eq=False)
class WithLengths:
    """A model that is told the length of each row.

    Attributes:
        own: As it came.
        flat: With the lengths as an input.
        about: What has positions.
        lengths: Those to prepare, ascending.
    """

    own: FlatGraph
    flat: FlatGraph
    about: LengthInputs
    lengths: tuple[int, ...]

    @classmethod
    @contextlib.contextmanager
    def of(cls, flat: FlatGraph, lengths: Sequence[int], request: RunRequest) -> Iterator[WithLengths]:
        """Proves that sequences may be padded, and writes the model anew in a folder that is there as long as this is entered.

        Raises:
            MsplitError: They may not, or lengths make no sense.
        """
        wanted = tuple(sorted({whole("a length", one, 1) for one in listed("lengths", lengths)}))
        with phase("proving that lengths can be padded"):
            proof = positions_of(flat, wanted[-1], request.workload.shapes)
        with TemporaryDirectory(prefix="msplit-lengths-") as folder:
            made, name = _written(flat, proof, Path(folder))
            found = cls(flat, made, LengthInputs(name, proof.inputs, proof.outputs), wanted)
            rows, mixes = rows_of(made, found.sized(request, wanted[-1]))
            if rows is None:
                raise MsplitError(
                    f"rows have different lengths only where they are independent: {mixes}", fix="leave lengths out"
                )
            yield found

    def sized(self, request: RunRequest, length: int) -> RunRequest:
        """The request for rows of some length."""
        work = request.workload
        files = {name: path for name, path in work.inputs.items() if name not in self.about.inputs}
        return request.sized(
            shapes=sized_shapes(self.flat, self.about.inputs, work.shapes, work.batch or 1, length), inputs=files
        )

    def check(self, executable: Executable, request: RunRequest, length: int) -> OutputCheck:
        """Holds what runs rows of up to some length against TensorFlow, which runs the model as it came, without a padded position.

        Raises:
            EngineError: It gives other outputs.
        """
        work, before = (
            self.sized(request, length).workload,
            max((one for one in self.lengths if one < length), default=0),
        )
        tried = sorted({1, before + 1, (before + 1 + length) // 2, length})
        precision = Precision(request.precision).on(gpu=request.device != "cpu")
        door, checks = Lengths({length: executable}, self.about), []
        with contextlib.closing(session_on_cpu(self.own, op_libraries=request.op_libraries)) as session:
            for seed, one in enumerate(tried):
                shapes = sized_shapes(self.own, self.about.inputs, request.workload.shapes, work.batch or 1, one)
                feeds = feeds_for(self.own, replace(work, shapes=shapes), seed=request.seed + seed)
                checks.append(
                    compare(door.step(feeds), session.step(feeds), precision=precision, computed=computed_in(self.own))
                )
                if not checks[-1].passed:
                    raise EngineError(
                        f"rows that are {one} long give other outputs, padded to {length}, than in TensorFlow at their own length:",
                        details=checks[-1].describe().splitlines(),
                        fix="prepare it at fixed shapes (--shape), and report this: it is a defect of msplit",
                    )
        return OutputCheck(f"TensorFlow at lengths {', '.join(map(str, tried))}", precision, len(tried), checks[-1])


def _written(flat: FlatGraph, proof: Positions, folder: Path) -> tuple[FlatGraph, str]:
    """The model with the length of each row as an input, which hides positions; and that input's name."""
    path, bare = folder / flat.model.path.name, flat.model.format.binary is Format.GRAPH_DEF
    cut(flat, path, inputs=[tensor.name for tensor in flat.inputs])
    ends = {"outputs": [tensor.name for tensor in flat.outputs]} if bare else {}
    model = load(path, record=False, **ends).model
    message = copy.deepcopy(model.proto)
    meta = meta_graphs(model.format, message)[model.meta_graph]
    graph_def = message if meta is None else meta.graph_def
    nodes = {node.name: node for node in graph_def.node}
    name = free_name("lengths", {*nodes, *(tensor.name for tensor in flat.inputs)})
    _Masks(flat, proof, graph_def, name).write(nodes)
    if meta is not None:
        describe(
            meta.signature_def[str(model.signature)].inputs[name],
            Endpoint(name, name, 0, "int32", (None,)),
            f"{name}:0",
        )
    where = path / SAVED_MODEL_FILES[model.format.is_text] if model.is_saved_model else path
    where.write_bytes(message.SerializeToString(deterministic=True))
    return load(path, record=False, **ends), name


class _Masks:
    """Writes masks into a graph. What several of them need is written once."""

    def __init__(self, flat: FlatGraph, proof: Positions, graph_def: Any, name: str) -> None:
        self._flat, self._proof, self._graph_def, self._name = flat, proof, graph_def, name
        scope, names = f"{name}_of_rows", [node.name for node in graph_def.node]
        while any(one.startswith(f"{scope}/") for one in names):
            scope += "_"
        self._scope, self._made = scope, dict[tuple[Any, ...], str]()

    def write(self, nodes: Mapping[str, Any]) -> None:
        """Adds the lengths, and puts masks in front of what mixes positions."""
        flat, known = self._flat, infer(self._flat)
        add_node(self._graph_def, self._name, "Placeholder", dtype="int32", shape=(None,))
        for (node, slot), mask in self._proof.masks.items():
            source, port = flat.graph.inputs(node)[slot]
            written = nodes[flat.graph.names[node]]
            if written.op != flat.graph.ops[node]:
                raise EngineError(
                    f"{flat.graph.names[node]} is another node in the file", fix="this is a defect of msplit: report it"
                )
            dtype = known.dtype(source, port) or flat.dtype(source, port)
            written.input[slot] = self._hidden(written.input[slot], mask, dtype)

    def _add(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Adds a node where there is none like it yet. Its name."""
        key = (op, inputs, repr(attrs))
        if key not in self._made:
            self._made[key] = f"{self._scope}/{op}_{len(self._made)}"
            add_node(self._graph_def, self._made[key], op, inputs, **attrs)
        return self._made[key]

    def _constant(self, dtype: str, value: Any) -> str:
        return self._add("Const", dtype=dtype, value=(dtype, value))

    def _shaped(self, tensor: str, rank: int, axis: int) -> str:
        """A vector along one of some axes."""
        shape = self._constant("int32", [-1 if one == axis else 1 for one in range(rank)])
        return self._add("Reshape", tensor, shape, T="int32")

    def _hidden(self, tensor: str, mask: Mask, dtype: str) -> str:
        """A tensor without positions beyond the end."""
        number = self._constant
        given = next(one for one in self._flat.inputs if one.name == self._proof.inputs[0])
        first = (
            f"{self._flat.graph.names[given.node]}:{given.port}" if given.port else self._flat.graph.names[given.node]
        )
        shape = self._add("Shape", first, T=self._flat.dtype(given.node, given.port), out_type="int32")
        one, two = number("int32", [1]), number("int32", [2])
        longest = self._add("StridedSlice", shape, one, two, one, T="int32", Index="int32", shrink_axis_mask=1)
        places = self._add("Range", number("int32", 0), longest, number("int32", 1), Tidx="int32")
        lengths = self._add("Maximum", self._name, number("int32", 1), T="int32")
        if (mask.rows.outer, mask.rows.inner) != (1, 1):
            spread = self._add("Reshape", lengths, number("int32", [1, -1, 1]), T="int32")
            times = number("int32", [mask.rows.outer, 1, mask.rows.inner])
            lengths = self._add("Tile", spread, times, T="int32", Tmultiples="int32")
        places, lengths = self._shaped(places, mask.rank, mask.axis), self._shaped(lengths, mask.rank, mask.rows.axis)
        if mask.fill == LAST:
            kept = self._add("Equal", places, self._add("Sub", lengths, number("int32", 1), T="int32"), T="int32")
        else:
            kept = self._add("Less", places, lengths, T="int32")
        if mask.fill == MEAN:
            of_all, of_row = (self._add("Cast", size, SrcT="int32", DstT=dtype) for size in (longest, lengths))
            tensor = self._add("Mul", tensor, self._add("RealDiv", of_all, of_row, T=dtype), T=dtype)
        hidden = self._add("SelectV2", kept, tensor, number(dtype, _fill(mask.fill, dtype)), T=dtype)
        if mask.fill == LAST:
            hidden = self._add("Sum", hidden, number("int32", [mask.axis]), T=dtype, Tidx="int32", keep_dims=True)
        return hidden


def _fill(fill: str, dtype: str) -> Any:
    """What positions beyond the end become."""
    if fill not in (LOWEST, LARGEST):
        return 1 if fill == "1" else 0
    kind = numpy_dtype(dtype)
    if kind.kind in "iu":
        return np.iinfo(kind).min if fill == LOWEST else np.iinfo(kind).max
    return -np.inf if fill == LOWEST else np.inf
