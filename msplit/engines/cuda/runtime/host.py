"""The host part: strings, tables and parsing, run on the CPU before the device starts, or when it is done.

What it makes before is fed to the device part like any input; what it needs behind is fetched of it like any output. It is taken out of
TensorFlow with the values of variables and what tables hold. Where `engines/host` has all of its ops, it runs without TensorFlow, once
its first results were held against TensorFlow's; else in a session. TensorFlow is imported only for a model that has such a part, and for
a build only where an op needs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import reached
from msplit.core.graph import CONTROL
from msplit.engines.base import HANDED, STEPS, USERS, Arrays, Executable, Feeds, Following, Timeline, is_array
from msplit.engines.cuda.frontend.partition import Partition
from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.graph import Key
from msplit.engines.cuda.runtime.host_stage import HostOptions, HostStage, stage_of
from msplit.engines.cuda.runtime.input_staging import taken
from msplit.engines.host.program import HostGraph
from msplit.engines.user_rows import UserRows, taken_rows
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph, Tensor


@dataclass(eq=False)
class HostPart:
    """Everything in front of the device part, and everything behind it.

    Attributes:
        feeds: Name of each value that is handed to the device -> the value.
        handed: Values that the device is to hand back.
        repeatable: True if what runs in front has no effect, and gives the same whenever it runs: it reads no data of its own.
        nodes: How many nodes of the model it runs.
        handed_on: Output -> the input that it is: a session gives nothing back that it was fed.
        made: Outputs of the model that the host makes in front.
        before: What runs in front; None where nothing does.
        behind: What runs behind.
        shared: Inputs that may come as one row for each user. What runs in front and behind gets all rows: as many as `counted`.
        counted: An input that has all rows, and its entries of a row.
        once: What runs before that, on one row of each user; None where nothing does.
        spread: Entries of a row of what that makes, and what is in front, the device or the caller takes with all rows.
        reads: Inputs of the model that what is in front reads, where something runs `once`.
        apart: Entries of a row of what the device is handed, where it can make that of any rows without the others, and makes nothing else.
    """

    feeds: Mapping[str, Key]
    handed: tuple[Tensor, ...]
    repeatable: bool
    nodes: int
    handed_on: Mapping[str, str]
    made: tuple[str, ...]
    before: HostStage | None
    behind: HostStage | None
    shared: UserRows = field(default_factory=UserRows)
    counted: tuple[str, int] = ("", 1)
    once: HostStage | None = None
    spread: Mapping[str, int] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    apart: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, flat: FlatGraph, partition: Partition, options: HostOptions, origin: Mapping[Key, Key]) -> HostPart:
        """The host part of a model.

        Args:
            partition: Which of its nodes run here.
            origin: Value -> what it is in the graph, for those that are not in it: outputs of raised loops.

        Raises:
            EngineError: TensorFlow is missing, or can not load the model.
        """
        names = flat.graph.names
        fed = {(tensor.node, tensor.port): tensor.name for tensor in flat.inputs}
        feeds = {f"{names[node]}:{port}{HANDED}": (node, port) for node, port in partition.frontier}
        made = {name: key for name, key in partition.fetched.items() if key not in fed}
        repeatable = set(partition.effects.stateful).isdisjoint(partition.host)
        handed = partition.handed_outputs()
        given = tuple(Tensor(one.name, *origin.get((one.node, one.port), (one.node, one.port))) for one in handed)
        stateless = set(partition.effects.stateful).isdisjoint(partition.post_nodes)
        after = replace(flat, inputs=(*flat.inputs, *given))
        return cls(
            feeds,
            handed,
            repeatable,
            len(partition.host) + len(partition.post_nodes),
            {name: fed[key] for name, key in partition.fetched.items() if key in fed},
            tuple(made),
            stage_of(flat, {**feeds, **made}, options, origin, freezes=repeatable),
            stage_of(after, partition.host_outputs, options, origin, freezes=stateless),
        )

    def by_user(
        self,
        flat: FlatGraph,
        options: HostOptions,
        origin: Mapping[Key, Key],
        entries: Callable[[Key], int],
        few: Set[str],
    ) -> HostPart:
        """A host part that makes what depends on shared inputs alone of one row of each user.

        Args:
            flat, options, origin: As for `of`.
            entries: Gives of such a value, whose rows are apart and lie along the first axis, the entries of a row; 0 of any other.
            few: Values of which the device reads one row for each user.
        """
        graph, back, cut = flat.graph, dict[int, list[int]](), dict[Key, str]()
        inputs = {(one.node, one.port) for one in flat.inputs}
        made = {name: origin.get(key, key) for name, key in self.feeds.items()}
        made |= {one.name: (one.node, one.port) for one in flat.outputs if one.name in self.made}
        for source, merge in zip(flat.back_edges.src.tolist(), flat.back_edges.dst.tolist(), strict=True):
            back.setdefault(merge, []).append(source)

        def before(node: int) -> list[int]:
            found = [*back.get(node, ())]
            for edge in graph.in_edges(node):
                key = int(graph.edges.src[edge]), int(graph.edges.port[edge])
                if key in inputs or key[1] == CONTROL or flat.region[key[0]] >= 0 or not entries(key):
                    found.append(key[0])
                else:
                    cut[key] = f"{graph.names[key[0]]}:{key[1]} (all rows)"
            return found

        once = {name: key for name, key in made.items() if entries(key)}
        rest = {name: key for name, key in made.items() if name not in once}
        read = reached([node for node, _ in rest.values()], before)
        once |= {name: key for key, name in cut.items()}
        if not once or not self.repeatable:
            return self
        given = [one for one in flat.inputs if one.node in read]
        others = replace(flat, inputs=(*given, *(Tensor(name, *key) for key, name in cut.items())))
        return replace(
            self,
            before=stage_of(others, rest, options, {}, freezes=True),
            once=stage_of(flat, once, options, {}, freezes=True),
            spread={name: entries(key) for name, key in once.items() if name not in few},
            reads=tuple(one.name for one in given),
        )

    def rows(self, feeds: Arrays) -> int:
        """Rows of inputs, where some are shared."""
        return len(feeds[self.counted[0]]) // self.counted[1]

    def _all_rows(self, feeds: Arrays) -> Arrays:
        """The model's inputs with all rows."""
        if not self.shared.entries:
            return feeds
        rows = self.rows(feeds)
        if self.shared.users > 1:
            return self.shared.of_rows(*self.shared.by_user(feeds, rows))
        for name, one in self.shared.entries.items():
            if len(feeds[name]) != one * rows:  # one row, or as many as there were before others were cut or filled up
                feeds = {**feeds, name: np.resize(feeds[name][:one], (one * rows, *feeds[name].shape[1:]))}
        return feeds

    def run(self, feeds: Arrays) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Runs what is in front of the device part, on the model's inputs.

        Returns:
            Inputs of the device part: the model's own and what the host made, of which something runs `once` as `UserRows.of` takes them;
            and those outputs of the model that the host made.
        """
        if self.once is not None:
            return self._run_by_user(self.once, feeds)
        feeds = self._all_rows(feeds)
        made = self.before.step(feeds) if self.before is not None else {}
        outputs = {name: made.pop(name) for name in self.made}
        outputs |= {name: np.array(feeds[given]) for name, given in self.handed_on.items()}
        return {**feeds, **made}, outputs

    def _run_by_user(self, once: HostStage, feeds: Arrays) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        rows, entries = self.rows(feeds), self.shared.entries
        each, index = {**feeds, **self.shared.first(feeds)}, np.zeros(rows, np.int32)
        if self.shared.users > 1:
            each, index = self.shared.by_user(feeds, rows)

        def wide(name: str) -> NDArray[Any]:
            return taken_rows(each[name], index, entries[name]) if name in entries else each[name]

        made = once.step(each)
        made |= {name: taken_rows(made[name], index, one) for name, one in self.spread.items()}
        read = {name: made.pop(name) for name in [*made] if name not in self.feeds and name not in self.made}
        if self.before is not None:
            made |= self.before.step({**{name: wide(name) for name in self.reads}, **read})
        outputs = {name: made.pop(name) for name in self.made}
        outputs |= {name: np.array(wide(given)) for name, given in self.handed_on.items()}
        return {**each, **made, **({USERS: index} if self.shared.users > 1 else {})}, outputs

    def finish(self, feeds: Arrays, made: Mapping[str, Any]) -> dict[str, Any]:
        """Runs what is behind the device part: gives the outputs of the model among what that made, and those that are made of the rest."""
        outputs = dict(made)
        handed = {tensor.name: _on_host(tensor.name, outputs.pop(tensor.name)) for tensor in self.handed}
        return outputs if self.behind is None else outputs | self.behind.step({**self._all_rows(feeds), **handed})

    @property
    def in_tensorflow(self) -> dict[str, list[str]]:
        """Ops because of which TensorFlow runs a part of it -> names of their nodes."""
        stages = [one for one in (self.once, self.before, self.behind) if one is not None and one.program is None]
        found: dict[str, list[str]] = {}
        for op, names in (pair for stage in stages for pair in stage.missing.items()):
            found.setdefault(op, []).extend(names)
        return found

    def packed(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """JSON data, and the files that it names.

        Raises:
            EngineError: A part of it can not be taken out of the model.
        """
        files: dict[str, bytes] = {}
        data: dict[str, Any] = {
            "feeds": {name: list(key) for name, key in self.feeds.items()},
            "handed": [[tensor.name, tensor.node, tensor.port] for tensor in self.handed],
            "repeatable": self.repeatable,
            "nodes": self.nodes,
            "handed_on": dict(self.handed_on),
            "made": list(self.made),
            "apart": dict(self.apart),
            **({"shared": self.shared.packed(), "counted": list(self.counted)} if self.shared.entries else {}),
            **({"spread": dict(self.spread), "reads": list(self.reads)} if self.once is not None else {}),
        }
        for name, stage in (("before", self.before), ("behind", self.behind), ("once", self.once)):
            if stage is None:
                data[name] = None
                continue
            if stage.graph is None:
                raise EngineError(
                    f"a build can not hold what the host runs: {stage.why}",
                    fix="prepare it with `msplit.prepare`, or cut that part off with --part inputs= and outputs=",
                )
            names, graph = stage.graph.packed()
            file = f"host-{hashlib.sha256(graph).hexdigest()[:16]}.pb"
            files[file] = graph
            data[name] = {**names, "file": file}
        return data, files

    @classmethod
    def unpacked(cls, data: Mapping[str, Any], read: Callable[[str], bytes], where: str) -> HostPart:
        """A host part as it was packed.

        Args:
            read: Gives the bytes of a file.

        Raises:
            EngineError: Some of its ops need TensorFlow, which is not installed.
            ValueError, TypeError, KeyError: That is no such data.
        """

        def stage(found: Mapping[str, Any] | None) -> HostStage | None:
            if found is None:
                return None
            return HostStage(HostGraph.unpacked(found, read(str(found["file"])), where), None, "", None, where)

        spread = {str(name): int(one) for name, one in data.get("spread", {}).items()}
        if min(spread.values(), default=1) < 1:
            raise ValueError("what is made of rows of users has no rows")
        return cls(
            {str(name): (int(node), int(port)) for name, (node, port) in data["feeds"].items()},
            tuple(Tensor(str(name), int(node), int(port)) for name, node, port in data["handed"]),
            bool(data["repeatable"]),
            int(data["nodes"]),
            {str(name): str(given) for name, given in data["handed_on"].items()},
            tuple(map(str, data["made"])),
            stage(data["before"]),
            stage(data["behind"]),
            UserRows.unpacked(data.get("shared", {})),
            (str(data.get("counted", ("", 1))[0]), int(data.get("counted", ("", 1))[1])),
            stage(data.get("once")),
            spread,
            tuple(map(str, data.get("reads", ()))),
            {str(name): int(one) for name, one in data.get("apart", {}).items()},
        )


class Wrapped(Executable):
    """All that is the device's alone. Sessions of a host part are shared by all executables of a model: closing leaves them."""

    keeps_state = True

    def __init__(self, device: Executable) -> None:
        self.device, self.joins_others = device, device.joins_others

    def launch(self) -> None:
        """Runs one step on the inputs of the last one."""
        self.device.launch()

    def device_times(self, count: int) -> list[float] | None:
        """Seconds of each step by the device's clock."""
        return self.device.device_times(count)

    def save_state(self) -> Mapping[str, NDArray[Any]]:
        """State that steps change: variables, and the count of `Counting`."""
        return self.device.save_state()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Goes on from what `save_state` of another one of the same model gave."""
        self.device.load_state(state)

    def join(self) -> None:
        """Makes steps those of all processes."""
        self.device.join()

    def buffers(self) -> Arrays:
        """Arrays of inputs that are not copied on the host."""
        return self.device.buffers()

    def timeline(self) -> Timeline | None:
        """Times the parts of one more step."""
        return self.device.timeline()

    def facts(self) -> Mapping[str, Any]:
        """Facts about the run."""
        return self.device.facts()

    def close(self) -> None:
        """Frees the device's part."""
        self.device.close()


class StepCounter:
    """Counter of steps, of all executables that draw random numbers together: an iterator, which any thread may ask."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            self.count += 1
            return self.count - 1


class Counting(Wrapped):
    """An executable that is told at every step how many there were before, as the state of TensorFlow's random ops has it."""

    def __init__(self, device: Executable, steps: StepCounter | None = None) -> None:
        super().__init__(device)
        self._steps = steps or StepCounter()
        self._prefetched: tuple[Feeds | None, Feeds] = (None, {})  # what was sent, and that with its number

    def step(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Runs one whole step."""
        return self.device.step(self._numbered(feeds))

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """Runs one whole step; outputs stay on the device."""
        return self.device.step_on_device(self._numbered(feeds))

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """Runs a step and copies the next inputs meanwhile. The next number goes with the rest, in vain where others count meanwhile."""
        given = self._numbered(feeds)

        def numbered() -> Feeds | None:
            if (following := then()) is None:
                return None
            sent = {**following, STEPS: np.asarray(given[STEPS] + 1, np.int64)}
            self._prefetched = (following, sent)
            return sent

        return self.device.step_prefetching(given, numbered, on_device=on_device)

    def _numbered(self, feeds: Feeds) -> Feeds:
        number = np.asarray(next(self._steps), np.int64)
        (own, given), self._prefetched = self._prefetched, (None, {})
        return given if own is feeds and given[STEPS] == number else {**feeds, STEPS: number}

    def save_state(self) -> Mapping[str, NDArray[Any]]:
        """Count of steps, and values of variables."""
        return {**super().save_state(), STEPS: np.asarray(self._steps.count, np.int64)}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Goes on counting from there; from the first step, where nothing is said."""
        super().load_state(state)
        self._steps.count = int(state.get(STEPS, 0))


class ByUser(Wrapped):
    """An executable that reads one row of some inputs for each user."""

    def __init__(self, once: UserRows, device: Executable) -> None:
        super().__init__(device)
        self._once = once
        self._ahead: tuple[Feeds | None, Feeds] = None, {}  # what the next step is to be fed, and what that comes to

    def _of(self, feeds: Feeds) -> Feeds:
        (own, made), self._ahead = self._ahead, (None, {})
        return made if own is feeds else self._by_user(feeds)

    def _one_row_each(self, feeds: Feeds) -> bool:
        """True if arrays have one row already, as requests give them: a loop finds that out in a tenth of the time of what follows."""
        for name, one in self._once.entries.items():
            value = feeds.get(name)
            if type(value) is not np.ndarray or not value.ndim or len(value) != one:
                return False
        return True

    def _by_user(self, feeds: Feeds) -> Feeds:
        if self._once.users == 1 and self._one_row_each(feeds):
            return feeds
        bring = taken if self._once.users == 1 else _on_host
        own = {name: feeds[name] for name in self._once.entries if name in feeds}
        return self._once.of(
            {**feeds, **{name: value if is_array(value) else bring(name, value) for name, value in own.items()}}
        )

    def step(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Runs one step."""
        return self.device.step(self._of(feeds))

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """Runs a step whose outputs stay on the device."""
        return self.device.step_on_device(self._of(feeds))

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """Runs a step while the next inputs are copied."""

        def following() -> Feeds | None:
            with contextlib.suppress(EngineError):  # its own step says what is wrong
                if (found := then()) is not None:
                    self._ahead = found, self._by_user(found)
                    return self._ahead[1]
            return None

        return self.device.step_prefetching(self._of(feeds), following, on_device=on_device)

    def buffers(self) -> Arrays:
        """Arrays of the other inputs."""
        return {name: value for name, value in self.device.buffers().items() if name not in self._once.entries}


@dataclass(frozen=True, eq=False)
class _Given:
    """Values that the host part has made of a step's inputs.

    Attributes:
        feeds: The model's inputs, on the host.
        inputs: Those of the device part, wherever they were.
        outputs: Outputs of the model that are there already.
    """

    feeds: Arrays
    inputs: Feeds
    outputs: Mapping[str, NDArray[Any]]


class WithHost(Wrapped):
    """An executable whose steps run the host part around it. `launch` and `device_times` are the device's alone."""

    def __init__(self, host: HostPart, device: Executable) -> None:
        super().__init__(device)
        self._host = host
        self._ahead: tuple[Feeds, _Given] | None = None  # what the next step is to be fed, and what was made of it

    def step(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """Runs one whole step."""
        return self._around(self._given(feeds), self.device.step)

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """Runs a step whose outputs stay on the device; those that the host makes are on the host."""
        return self._around(self._given(feeds), self.device.step_on_device)

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """Runs a step; the host's part of the next one runs while the device is busy."""

        def inputs() -> Feeds | None:
            following = then() if self._host.repeatable else None
            with contextlib.suppress(MsplitError):  # its own step says what is wrong
                if following is not None:
                    self._ahead = (following, self._run(following))
                    return self._ahead[1].inputs
            return None

        return self._around(
            self._given(feeds), lambda fed: self.device.step_prefetching(fed, inputs, on_device=on_device)
        )

    def _given(self, feeds: Feeds) -> _Given:
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] is feeds else self._run(feeds)

    def _run(self, feeds: Feeds) -> _Given:
        given = {name: _on_host(name, value) for name, value in feeds.items()}  # a session takes all of them
        by_row = self._host.shared.by_row(given)  # says whose rows differ
        if USERS not in by_row or len(by_row[USERS]) == self._host.rows(given):  # others are refused behind it
            given = dict(by_row)
        inputs, outputs = self._host.run(given)
        seen = (*self._host.shared.entries, USERS)
        return _Given(given, {**inputs, **{name: feeds[name] for name in feeds if name not in seen}}, outputs)

    def _around(self, given: _Given, step: Callable[[Feeds], dict[str, Any]]) -> dict[str, Any]:
        return {**self._host.finish(given.feeds, step(given.inputs)), **given.outputs}

    def facts(self) -> Mapping[str, Any]:
        """Facts about the run."""
        return {**self.device.facts(), "host_nodes": self._host.nodes}


def _on_host(name: str, value: Any) -> NDArray[Any]:
    return value if is_array(value) else to_numpy(taken(name, value))
