"""Runs a graph over a cluster of TensorFlow servers: its parts are where their streams are, its variables on the parameter servers."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Ints
from msplit.engines.base import Arrays, ClusterOptions, Executable, Job
from msplit.engines.tensorflow import cluster as clusters
from msplit.engines.tensorflow import variables
from msplit.engines.tensorflow.placed import PlacedGraph, binding_edges, place, with_their_state
from msplit.engines.tensorflow.runtime import errors_of, load_op_libraries, tensorflow
from msplit.engines.variables import storage
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import Model
from msplit.formats.tensors import itemsize
from msplit.opset.traits import VARIABLES
from msplit.progress import phase


def build(job: Job, options: ClusterOptions) -> ClusterExecutable:
    """Makes a session over a cluster for a job, stream k on its k-th device.

    Raises:
        EngineError: A task can not be reached, there are fewer devices than streams, or TensorFlow can not run the graph so.
    """
    load_op_libraries(job.op_libraries)
    devices = [*(options.devices or clusters.connect(options.cluster))]
    if job.streams > len(devices):
        raise EngineError(
            f"the cluster has {len(devices)} devices to compute on, and {job.streams} streams are to have one each",
            where=options.cluster.source,
            fix="ask for fewer --streams, list more tasks, or start each with more: msplit worker --devices N",
        )
    servers = options.cluster.servers
    where = "GPU" if any("GPU" in name for name in devices) else "CPU"
    facts: dict[str, Any] = {"engine": "tensorflow", "streams": job.streams, "device": where}
    facts |= {"devices": job.streams, "ps_tasks": len(servers)}
    pinned = None
    if servers:
        kept = kept_by(job.flat, len(servers), options.ps_strategy, job.state)
        pinned = np.where(kept >= 0, kept + len(devices), -1).astype(np.int32)
    host = clusters.cpu(options.cluster.workers[0])
    placed = place(job.flat, job.ids, [*devices, *map(clusters.cpu, servers)], host, pinned=pinned)
    facts |= {"cross_stream_tensors": placed.copies, "cloned_constants": placed.clones, "moved_nodes": placed.moved}
    with phase("opening a session over the cluster"):
        return ClusterExecutable(job, placed, options, facts)


class ClusterExecutable(Executable):
    """A graph in a session over a cluster."""

    keeps_state = True

    def __init__(self, job: Job, placed: PlacedGraph, options: ClusterOptions, facts: Mapping[str, Any]) -> None:
        v1 = tensorflow().compat.v1
        self._facts = dict(facts)
        self._cluster, self._limit_s = options.cluster, options.limit_s
        self._model = str(job.flat.model.path)
        self._own = options.container is None
        self._lost = False
        self._variables: dict[str, variables.VariableOps] = {}
        self._last: Arrays | None = None
        self._graph = v1.Graph()
        self._session = v1.Session(
            clusters.target(options.cluster.workers[0]), graph=self._graph, config=clusters.config()
        )
        try:
            with self._graph.as_default():
                _keep_in(placed.graph_def, options.container or f"msplit-{uuid.uuid4().hex}")
                with errors_of(self._model):
                    tensorflow().graph_util.import_graph_def(placed.graph_def, name="")
                self._variables = {name: variables.variable_ops(self._graph, name) for name in placed.variables}
            self._prepare(placed)
            self._kept = frozenset(self._call(lambda: variables.initialized(self._session, self._variables)))
            missing = [name for name in self._variables if name not in self._kept | job.state.keys()]
            if missing:
                raise EngineError(
                    f"variable {missing[0]!r} has no value to begin with",
                    where=self._model,
                    fix="put a checkpoint beside the model, or give the values",
                )
            self._call(lambda: _fill_tables(self._session, job.flat.model))
            self.load_state({name: value for name, value in job.state.items() if name not in self._kept})
        except BaseException:
            self.close()
            raise

    def _prepare(self, placed: PlacedGraph) -> None:
        graph = self._graph
        self._inputs = {name: graph.get_tensor_by_name(tensor) for name, tensor in placed.feeds.items()}
        self._fetched, self._targets = variables.fetched(graph, placed.fetches, placed.targets)

    def _call(self, call: Callable[[], clusters.Result]) -> clusters.Result:
        """Result of a call of the session, its errors in plain words."""
        try:
            with clusters.errors_of(self._cluster, self._model, self._limit_s):
                return clusters.watched(self._cluster, call)
        except EngineError as error:
            self._lost = self._lost or (error.__cause__ is not None and clusters.is_lost(error.__cause__))
            raise

    def _run(self, fetches: list[Any], feeds: Arrays) -> list[Any]:
        """One run. Not by a callable: over gRPC that takes no limit, and a lost task makes it send a request twice, which is refused."""
        v1 = tensorflow().compat.v1
        options = v1.RunOptions(timeout_in_ms=max(1, round(self._limit_s * 1000)))
        given = {self._inputs[name]: value for name, value in feeds.items()}
        return self._call(lambda: list(self._session.run([*fetches, *self._targets], given, options)))

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Runs one step. See `Executable`."""
        arrays = self._last = self._arrays(feeds)
        values = self._run([*self._fetched.values()], arrays)
        return dict(zip(self._fetched, map(np.asarray, values), strict=False))

    def launch(self) -> None:
        """Runs one step on the last inputs and copies no output."""
        if self._last is None:
            raise EngineError("launch was called before the first step", fix="call step once")
        self._run([tensor.op for tensor in self._fetched.values()], self._last)

    @property
    def kept(self) -> frozenset[str]:
        """Variables that had a value in the container before, and have it still: an earlier client's, or another one's."""
        return self._kept

    def close(self) -> None:
        """Ends the session, and gives up the variables that nobody else has a name for."""
        if self._lost:
            # The first worker asks the task that is gone, and waits for it: nobody is to wait for that, nor the session's own end.
            Thread(target=_end, args=(self._session,), daemon=True).start()
            return
        if self._own:
            with suppress(tensorflow().errors.OpError):
                self._give_up()
        _end(self._session)

    def _give_up(self) -> None:
        """Frees the memory of the variables. A server has no other way to forget them but to end all of its sessions."""
        tf = tensorflow()
        with self._graph.as_default():
            ends = [
                tf.raw_ops.DestroyResourceOp(resource=one.handle)
                if one.handle.dtype == tf.resource
                else tf.raw_ops.Assign(ref=one.handle, value=tf.zeros((0,), one.read.dtype), validate_shape=False)
                for one in self._variables.values()
            ]
        self._session.run(ends)

    def save_state(self) -> dict[str, NDArray[Any]]:
        """The values of the variables that the graph uses, by node name."""
        return self._call(lambda: variables.save(self._session, self._variables))

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Gives variables values, in the container that they are kept in: for all who use it."""
        self._call(lambda: variables.load(self._session, self._variables, state))

    def _arrays(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        return {
            name: np.asarray(feeds[name]).astype(tensor.dtype.as_numpy_dtype, copy=False)
            for name, tensor in self._inputs.items()
        }


def _end(session: Any) -> None:
    with suppress(tensorflow().errors.OpError):
        session.close()


def _keep_in(graph_def: Any, container: str) -> None:
    """Puts what keeps state, and says no container, into one."""
    from tensorflow.python.framework import op_def_registry

    ops: dict[str, bool] = {}
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            if node.op not in ops:
                known = op_def_registry.get(node.op)
                ops[node.op] = known is not None and any(attr.name == "container" for attr in known.attr)
            if ops[node.op] and not node.attr["container"].s:
                node.attr["container"].s = container.encode()


def _fill_tables(session: Any, model: Model) -> None:
    """Runs the initializers of lookup tables; of a SavedModel all that there are, for none of them is of a variable.

    Files that they read are where the model is, on the machine of the first worker, too.
    """
    graph = session.graph
    there = {operation.name for operation in graph.get_operations()}
    assets = {}
    if model.is_saved_model:
        for one in model.proto.meta_graphs[model.meta_graph].asset_file_def:
            if one.tensor_info.name.partition(":")[0] in there:
                assets[one.tensor_info.name] = str(model.path.resolve() / "assets" / one.filename)
    for name in model.init_ops:
        if name in there and (model.is_saved_model or variables.fills_tables(graph, name)):
            session.run(graph.get_operation_by_name(name), assets)


BYTES, ROUND_ROBIN = "bytes", "round-robin"
STRATEGIES = (BYTES, ROUND_ROBIN)
"""Ways to share out variables: so that servers keep alike many bytes, the largest first; or one after the other in the graph's order."""


def kept_by(flat: FlatGraph, servers: int, strategy: str, state: Mapping[str, NDArray[Any]]) -> Ints:
    """The server, from 0, that keeps each variable, per node that refers to it or reads or changes it; -1 for all other nodes.

    An optimizer's slots are with the variable that they belong to, for one op changes them together. A variable that a loop or a cond
    reads inside is kept where that runs.

    Args:
        state: Values by variable, which say what it takes where the graph does not.
    """
    found = np.full(len(flat), -1, np.int32)
    bound = binding_edges(flat)
    handles = [v for v, op in enumerate(flat.graph.ops) if op in VARIABLES]
    together, first = with_their_state(flat, bound, handles)
    members: dict[int, list[int]] = {}
    for v in sorted({*handles, *(v for edge in bound for v in edge)}):
        members.setdefault(together.find(v), []).append(v)
    groups: dict[int, int] = {}  # the bytes of each, in the order of their first variables
    for v in handles:
        group = together.find(v)
        if not any(_in_flow(flat, one) for one in members[group]):
            own = first.get(storage(flat.graph.ops[v], flat.graph.names[v], flat.graph.attrs[v]), v) == v
            groups[group] = groups.get(group, 0) + own * _bytes(flat, v, state)
    for group, server in zip(groups, shared_out([*groups.values()], servers, strategy), strict=True):
        found[members[group]] = server
    return found


def _in_flow(flat: FlatGraph, node: int) -> bool:
    """True if a node is inside of a loop or a cond of TensorFlow 1, which run in one place."""
    region = int(flat.region[node])
    return region >= 0 and flat.regions[region].kind != "variable"


def shared_out(sizes: Sequence[int], servers: int, strategy: str) -> list[int]:
    """The server of each. By bytes: longest processing time first (Graham 1969), at most a third above the best that could be."""
    if strategy == ROUND_ROBIN:
        return [number % servers for number in range(len(sizes))]
    loads = [(0, 0)] * servers
    found = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        server = min(range(servers), key=loads.__getitem__)
        kept, count = loads[server]
        loads[server] = (kept + sizes[number], count + 1)
        found[number] = server
    return found


def _bytes(flat: FlatGraph, node: int, state: Mapping[str, NDArray[Any]]) -> int:
    """Bytes of a variable, as far as they are known."""
    value = state.get(flat.graph.names[node])
    if value is not None:
        return value.nbytes
    attrs = flat.graph.attrs[node]
    shape = attrs.get("shape")
    if not isinstance(shape, tuple) or None in shape:
        return 0
    return math.prod(shape) * itemsize(str(attrs.get("dtype")))
