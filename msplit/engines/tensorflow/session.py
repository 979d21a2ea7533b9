"""Sessions of TensorFlow: a graph that runs, and when its nodes ran.

Runs a graph in a TensorFlow session: variables restored, tables and assets initialized, one callable per step.

When each node of a step ran, as TensorFlow's own step statistics tell: only of CPU devices.

The runtime runs the nodes of a CPU device on a pool of threads that all CPU devices share, so several nodes of one stream may run at a
time: each takes the first track of its stream that is free.
"""

from __future__ import annotations

import copy
import functools
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Executable, Span, Timeline
from msplit.engines.tensorflow import variables
from msplit.engines.tensorflow.cluster import here, short
from msplit.engines.tensorflow.placed import PlacedGraph
from msplit.engines.tensorflow.runtime import errors_of, keep_nan, set_precision, silent_deprecations, tensorflow
from msplit.engines.tensorflow.variables import WAITS, Filling, awaited, callable_of, filling, reached, waits_inside
from msplit.errors import EngineError, TimedOut
from msplit.formats.bundle import verify
from msplit.formats.functions import holds_modules
from msplit.formats.model import Format, Model
from msplit.opset.traits import ops_with

_SILENT = ops_with("silent")

CLOCK = (
    "TensorFlow's step statistics (RunMetadata, FULL_TRACE) on CPU devices: these times say nothing about GPU streams"
)


def from_metadata(metadata: Any) -> Timeline:
    """The timeline that a traced step's RunMetadata holds.

    Args:
        metadata: Of a run with ``trace_level=FULL_TRACE`` and ``output_partition_graphs=True``.

    Raises:
        EngineError: A node ran on something else than a CPU device.
    """
    ran: list[tuple[int, str, str, int, int]] = []  # stream, name, op, start and end in ns
    for device in metadata.step_stats.dev_stats:
        kind, _, number = device.device.rpartition("/")[2].removeprefix("device:").partition(":")
        if kind != "CPU":
            raise EngineError(
                f"TensorFlow tells no times of single kernels on {device.device}",
                fix="trace the cuda engine (--engine cuda), or run on the CPU",
            )
        for node in device.node_stats:
            op = node.timeline_label.partition(" = ")[2].partition("(")[0] or node.node_name
            if op not in _SILENT and node.node_name != "_SOURCE":
                start = node.all_start_nanos + node.op_start_rel_nanos
                ran.append((int(number), node.node_name, op, start, node.all_start_nanos + node.op_end_rel_nanos))
    ran.sort(key=lambda one: (one[3], one[0], one[1]))
    begin = ran[0][3] if ran else 0
    rows = _rows(ran)
    spans = tuple(
        Span(name, (), stream, (start - begin) / 1e3, (max(start, end) - begin) / 1e3, (op,), row)
        for (stream, name, op, start, end), row in zip(ran, rows, strict=True)
    )
    return Timeline(spans, tuple(_waits(spans, metadata.partition_graphs)), CLOCK)


def _rows(ran: Iterable[tuple[int, str, str, int, int]]) -> list[int]:
    """The first track of its stream that is free when it starts, for each in the order of their starts."""
    busy: dict[int, list[int]] = {}
    rows = []
    for stream, _, _, start, end in ran:
        tracks = busy.setdefault(stream, [])
        row = next((number for number, until in enumerate(tracks) if until <= start), len(tracks))
        tracks[row : row + 1] = [end]
        rows.append(row)
    return rows


def _waits(spans: Iterable[Span], graphs: Iterable[Any]) -> list[tuple[int, int]]:
    """From what made a tensor that goes to another device, to the first node there that reads it."""
    place = {(span.stream, span.name): number for number, span in enumerate(spans)}
    sent: dict[tuple[bytes, bytes], tuple[int, str]] = {}
    received: list[tuple[tuple[bytes, bytes], int, str]] = []
    readers: dict[tuple[int, str], list[str]] = {}
    for graph in graphs:
        for node in graph.node:
            stream = int(node.device.rpartition(":")[2] or 0) if node.device else 0
            sources = [name.lstrip("^").partition(":")[0] for name in node.input]
            for source in sources:
                readers.setdefault((stream, source), []).append(node.name)
            key = _key(node.attr)
            if node.op == "_Send":
                sent[key] = (stream, sources[0])
            elif node.op == "_Recv":
                received.append((key, stream, node.name))
    start = [span.start_us for span in spans]
    waits = []
    for key, stream, name in received:
        before = place.get(sent.get(key, (-1, "")))
        after = [place[stream, reader] for reader in readers.get((stream, name), ()) if (stream, reader) in place]
        if before is not None and after:
            waits.append((before, min(after, key=start.__getitem__)))
    return waits


def _key(attributes: Mapping[str, Any]) -> tuple[bytes, bytes]:
    return (attributes["tensor_name"].s, attributes["recv_device"].s) if "tensor_name" in attributes else (b"", b"")


_TRACED_RUNS = 3
"""Steps of a traced callable; the last one is told, when everything is warm."""

LONGEST_WAIT = 60.0
"""Seconds that a step may take which waits for others, as for a queue, where nobody says how long: nothing may ever fill it."""

_WAITS_ON = ops_with("waits on")


class PlacedNode(NamedTuple):
    """A node, the device that it was to have ("" for any), and the one that it has: as in ``/device:GPU:1``."""

    name: str
    op: str
    asked: str
    device: str


Placement = tuple[PlacedNode, ...]
"""Nodes by name. Where TensorFlow has no kernel for a node on the device asked for, it has another one."""


class SessionExecutable(Executable):
    """A graph in a session of its own.

    Args:
        model: Where the graph comes from: its variables, assets and initializers.
        ieee: IEEE float32 instead of TF32.
        timeout: Seconds that a step may take. Where it reads a queue or waits for others in another way, a minute if none is given.

    Raises:
        EngineError: TensorFlow can not load or initialize it.
    """

    keeps_state = True

    def __init__(
        self,
        model: Model,
        placed: PlacedGraph,
        config: Any,
        *,
        ieee: bool,
        facts: Mapping[str, Any],
        timeout: float | None = None,
    ) -> None:
        v1 = tensorflow().compat.v1
        if holds_modules(model.graph.functions):
            keep_nan()
        self._ieee = ieee
        self._timeout = timeout
        self._filling: Filling | None = None
        self._waits: list[Any] = []
        self._stuck = False
        self._facts = dict(facts)
        self._model = str(model.path)
        self._made = (model, config, placed.variables)
        self._graph = v1.Graph()
        self._session = v1.Session(graph=self._graph, config=config)
        self._last: list[NDArray[Any]] | None = None
        self._held: dict[Any, NDArray[Any]] = {}  # constants of the graph that have other values
        try:
            with errors_of(self._model), self._graph.as_default(), silent_deprecations():
                set_precision(ieee)
                _load(self._session, model, placed)
                self._prepare(placed)
                self._fill(model)
        except BaseException:
            self.close()
            raise

    def _prepare(self, placed: PlacedGraph) -> None:
        graph = self._graph
        self._inputs = {name: graph.get_tensor_by_name(tensor) for name, tensor in placed.feeds.items()}
        fetched, targets = variables.fetched(graph, placed.fetches, placed.targets)
        self._outputs = tuple(fetched)
        self._parts = (list(self._inputs.values()), list(fetched.values()), targets)

    def _fill(self, model: Model) -> None:
        """Has the queues that a step reads filled, as the model's file says."""
        _, fetches, targets = self._parts
        inside = waits_inside(model)
        if WAITS.isdisjoint(model.graph.ops) and not inside:  # to look at 98,000 operations takes seconds
            self._step = callable_of(self._session, *self._parts, timeout=self._timeout)
            return
        reads = reached([*(tensor.op for tensor in fetches), *targets], self._fed)
        self._waits = [
            operation for operation in self._graph.get_operations() if operation in reads and operation.type in WAITS
        ]
        if self._timeout is None and (self._waits or inside):
            self._timeout = LONGEST_WAIT
        self._step = callable_of(self._session, *self._parts, timeout=self._timeout)
        self._filling = filling(model, self._session, reads)

    @functools.cached_property
    def _variables(self) -> dict[str, variables.VariableOps]:
        """Ops for the values of variables, four for each: most sessions do without, and get their graph ready sooner."""
        with self._graph.as_default():
            return {name: variables.variable_ops(self._graph, name) for name in self._made[2]}

    @property
    def _fed(self) -> set[Any]:
        return {tensor.op for tensor in self._inputs.values()}

    @functools.cached_property
    def _launch(self) -> Any:
        """The step without its outputs. TensorFlow optimizes the whole graph for it once more, and few ask for it."""
        feeds, fetches, targets = self._parts
        return callable_of(self._session, feeds, [], targets + [tensor.op for tensor in fetches], timeout=self._timeout)

    def reopen(self) -> bool:
        """Opens another session on the same graph. See `Executable`."""
        model, config, _ = self._made
        if model.is_saved_model or self._filling is not None or self._waits:
            return False
        self.close()
        self._session = tensorflow().compat.v1.Session(graph=self._graph, config=config)
        set_precision(self._ieee)
        with errors_of(self._model), self._graph.as_default():
            _initialize(self._session, model)
            self._step = callable_of(self._session, *self._parts, timeout=self._timeout)
        self.__dict__.pop("_launch", None)
        return True

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Runs one step. See `Executable`."""
        arrays = self._last = self._arrays(feeds)  # another thread may set the attribute in between
        set_precision(self._ieee)
        with errors_of(self._model), self._told():
            values = self._run(self._step, arrays)
        return dict(zip(self._outputs, map(np.asarray, values), strict=True))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A queue that its own threads could not fill fails with what they say, and not with the end of its data. A step that waited for
        others without end names them."""
        try:
            yield
        except tensorflow().errors.OpError as error:
            if self._filling is not None:
                self._filling.check()
            if "iterator has not been initialized" in str(error):
                raise self._not_begun() from error
            if self._timeout and isinstance(error, tensorflow().errors.DeadlineExceededError):
                raise self._too_long() from error
            raise

    def _not_begun(self) -> EngineError:
        """Error for an iterator whose data a program would have to give."""
        made = [one for one in self._graph.get_operations() if one.type.startswith("IteratorGetNext")]
        names = [tensor.name for one in made for tensor in one.outputs if tensor.consumers()]
        return EngineError(
            "the model takes its data from an iterator, and nothing in the file says what it goes over: a program initializes it",
            where=self._model,
            fix=f"feed what it gives: --part inputs={','.join(names)}"
            if names
            else "export the model with a placeholder in its place",
        )

    def _run(self, call: Any, arrays: list[NDArray[Any]]) -> Any:
        """Calls a step. What waits and can not be cancelled does so in a thread of its own, which stays behind where it takes too long."""
        if _WAITS_ON.isdisjoint(operation.type for operation in self._waits):
            return call(*arrays)
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call(*arrays))
            except BaseException as error:  # noqa: BLE001  it is raised where the step was asked for
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        try:
            return done.result(self._timeout)
        except TimeoutError:
            self._stuck = True
            raise self._too_long() from None

    def _too_long(self) -> TimedOut:
        """Error for a step that took longer than it may."""
        after = f"TensorFlow gave a step up: it took longer than {self._timeout:g} s (DeadlineExceeded)"
        if not self._waits:
            return TimedOut(after, where=self._model, fix="give it more time with --tensorflow timeout=")
        _, fetches, _ = self._parts
        waits, fed = set(self._waits), self._fed
        free = [
            name for name, one in zip(self._outputs, fetches, strict=True) if waits.isdisjoint(reached([one.op], fed))
        ]
        names, fix = awaited(self._waits, free)
        return TimedOut(f"{after}, and waits for {names}, which nothing may ever fill", where=self._model, fix=fix)

    def launch(self) -> None:
        """Runs one step on the last inputs and copies no output. A session has no inputs on the device: they are copied."""
        if self._last is None:
            raise EngineError("launch was called before the first step", fix="call step once")
        set_precision(self._ieee)
        with errors_of(self._model), self._told():
            self._run(self._launch, self._last)

    def timeline(self) -> Timeline:
        """One step as TensorFlow's step statistics tell it. See `Executable`."""
        if self._last is None:
            raise EngineError("timeline was called before the first step", fix="call step once")
        v1 = tensorflow().compat.v1
        set_precision(self._ieee)
        run = callable_of(self._session, *self._parts, timeout=self._timeout, trace=True)
        with errors_of(self._model):
            for _ in range(_TRACED_RUNS):
                metadata = v1.RunMetadata()
                run(*self._last, run_metadata=metadata)
        return from_metadata(metadata)

    def placement(self, feeds: Arrays, graph_def: Any, asked: Mapping[str, str]) -> Placement:
        """Devices on which TensorFlow puts the nodes of a step, by running one. Nodes that are fed have none.

        Args:
            graph_def: What the session was given.
            asked: Node -> the device that it was to have, where that is not the one in the graph: what touches a variable is with it.
        """
        metadata = tensorflow().compat.v1.RunMetadata()
        run = callable_of(self._session, *self._parts, timeout=self._timeout, trace=True)
        set_precision(self._ieee)
        with errors_of(self._model), self._told():
            run(*self._arrays(feeds), run_metadata=metadata)
        given = {node.name: node for node in graph_def.node}  # what the runtime adds, such as sends, is not there
        found = {node.name: node.device for graph in metadata.partition_graphs for node in graph.node}
        return tuple(
            PlacedNode(name, given[name].op, short(asked.get(name, given[name].device)), short(device))
            for name, device in sorted(found.items())
            if name in given
        )

    def dtype(self, tensor: str) -> str:
        """The type of a tensor of the graph."""
        return str(self._graph.get_tensor_by_name(tensor).dtype.name)

    def values(self, tensors: Sequence[str]) -> list[NDArray[Any]]:
        """Values of tensors that depend on no input; of a variable in place of its handle."""
        v1 = tensorflow().compat.v1
        with errors_of(self._model), self._graph.as_default():
            found = [self._graph.get_tensor_by_name(name) for name in tensors]
            read = [
                v1.raw_ops.ReadVariableOp(resource=one, dtype=one.op.get_attr("dtype"))
                if one.dtype == "resource"
                else one
                for one in found
            ]
            return [np.asarray(value) for value in self._session.run(read)]

    def table(self, handle: str, keys: str, values: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of a lookup table, whose types these are, in the order of the keys."""
        v1 = tensorflow().compat.v1
        with errors_of(self._model), self._graph.as_default():
            of_table = self._graph.get_tensor_by_name(handle)
            exported = v1.raw_ops.LookupTableExportV2(table_handle=of_table, Tkeys=keys, Tvalues=values)
            found, values_of = map(np.asarray, self._session.run(list(exported)))
        order = np.argsort(found) if found.ndim == 1 else slice(None)
        return found[order], values_of[order]

    def close(self) -> None:
        """Ends the session, and the threads that fill its queues."""
        if self._filling is not None:
            self._filling.stop()
        if not self._stuck:  # that would wait for the step
            self._session.close()

    def save_state(self) -> dict[str, NDArray[Any]]:
        """The values of the variables that the graph uses, by node name."""
        with errors_of(self._model):
            return variables.save(self._session, self._variables)

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Gives variables the values that `save_state` of this or of another executable of the same model returned."""
        with errors_of(self._model):
            variables.load(self._session, self._variables if state else {}, state)
            held = dict[Any, NDArray[Any]]()
            for name in sorted(state.keys() - {*self._made[2]}):
                with suppress(KeyError, ValueError):  # it is not of this graph
                    held[self._graph.get_tensor_by_name(f"{name}:0")] = state[name]
            if held:
                self._held, self._parts = held, ([*self._inputs.values(), *held], *self._parts[1:])
                self._step = callable_of(self._session, *self._parts, timeout=self._timeout)

    def _arrays(self, feeds: Arrays) -> list[NDArray[Any]]:
        missing = [name for name in self._inputs if name not in feeds]
        unknown = [name for name in feeds if name not in self._inputs]
        if missing or unknown:
            said = f"input {missing[0]!r} has no value" if missing else f"the model has no input {unknown[0]!r}"
            raise EngineError(said, where=self._model, fix=f"its inputs are: {', '.join(self._inputs) or 'none'}")
        given = [self._array(name, np.asarray(feeds[name]), tensor.dtype) for name, tensor in self._inputs.items()]
        return [*given, *self._held.values()]

    def _array(self, name: str, value: NDArray[Any], wanted: Any) -> NDArray[Any]:
        """A value as TensorFlow takes it. What a conversion would change is refused: 1.7 is no id, and text no number."""
        text = value.dtype.kind in "OSU"
        if text != (wanted.name == "string") or not (text or np.can_cast(value.dtype, wanted.as_numpy_dtype)):
            raise EngineError(
                f"input {name} is {wanted.name}, not {'text' if text else value.dtype.name}",
                where=self._model,
                fix="convert it to that type",
            )
        return value.astype(wanted.as_numpy_dtype, copy=False)


def _here(placed: PlacedGraph) -> PlacedGraph:
    """Leave out jobs and tasks of a cluster, which a session of this process does not have."""
    graph_def = placed.graph_def
    if all(here(device) == device for device in {node.device for node in _nodes(graph_def)}):
        return placed
    made = copy.deepcopy(graph_def)
    for node in _nodes(made):
        node.device = here(node.device)
    return replace(placed, graph_def=made, changed=True)


def _nodes(graph_def: Any) -> Iterator[Any]:
    return chain(graph_def.node, *(body.node_def for body in graph_def.library.function))


def _load(session: Any, model: Model, placed: PlacedGraph) -> None:
    try:
        placed = _here(placed)
        if model.is_saved_model:
            _load_saved_model(session, model, placed)
        else:
            tensorflow().graph_util.import_graph_def(placed.graph_def, name="")
            _initialize(session, model)
    except tensorflow().errors.DataLossError:
        verify(model)  # of a checkpoint TensorFlow names neither the tensor nor what to do
        raise


def _initialize(session: Any, model: Model) -> None:
    """Gives the variables of a graph their values, and fills its tables."""
    graph = session.graph
    saver = getattr(model.proto, "saver_def", None) if model.format.binary is Format.META_GRAPH else None
    checkpoint = model.path.with_suffix("")
    operations = {operation.name for operation in graph.get_operations()}
    if saver is not None and saver.restore_op_name and Path(f"{checkpoint}.index").is_file():
        _run_initializers(session, [name for name in model.init_ops if variables.fills_tables(graph, name)])
        session.run(saver.restore_op_name, {saver.filename_tensor_name: str(checkpoint)})
    else:
        _run_initializers(session, [name for name in model.init_ops if name in operations])


def _run_initializers(session: Any, names: list[str]) -> None:
    """Runs them in this order, those of single variables that follow one another at once: TensorFlow gets ready for every run anew,
    which is half a minute where each of 400 variables has one."""
    together: dict[str, Any] = {}
    for name in names:
        operation = session.graph.get_operation_by_name(name)
        touched = variables.touched(operation)
        if len(touched) != 1 or not together.keys().isdisjoint(touched):
            _run_at_once(session, together)
        if len(touched) == 1:
            together[touched.pop()] = operation
        else:
            session.run(operation)
    _run_at_once(session, together)


def _run_at_once(session: Any, together: dict[str, Any]) -> None:
    if together:
        session.run([*together.values()])
        together.clear()


def _load_saved_model(session: Any, model: Model, placed: PlacedGraph) -> None:
    """Through TensorFlow's own loader, which knows savers, assets and initializers of every age.

    A changed graph is written to a temporary SavedModel whose variables and assets are links to the user's.
    """
    loader = tensorflow().compat.v1.saved_model.loader
    if not placed.changed:
        loader.load(session, list(model.tags), str(model.path.resolve()))
        return
    with tempfile.TemporaryDirectory(prefix="msplit-") as folder:
        saved = copy.deepcopy(model.proto)
        saved.meta_graphs[model.meta_graph].graph_def.CopyFrom(placed.graph_def)
        (Path(folder) / "saved_model.pb").write_bytes(saved.SerializeToString())
        for entry in sorted(model.path.resolve().iterdir()):
            if entry.is_dir():
                (Path(folder) / entry.name).symlink_to(entry, target_is_directory=True)
        loader.load(session, list(model.tags), folder)
