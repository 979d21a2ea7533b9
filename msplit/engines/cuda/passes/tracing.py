"""Runs a graph once on the device to learn what can not be known otherwise: shapes, which steps launch kernels, who shares memory.

It is partial evaluation: what depends only on constants and shapes is evaluated on the CPU and never again. The run
doubles as the warm-up that a capture needs (library handles, algorithm choice).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.core.dag import Dag
from msplit.engines.cuda.autotune import conv, matmul
from msplit.engines.cuda.device.capture import synchronize
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir import program
from msplit.engines.cuda.ir.dtypes import LARGE, dtype_name, to_numpy, to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import PEER_COPY, Key, Op, OpGraph, apart, gpus_of, mutated
from msplit.engines.cuda.ir.interpret import LoweringCall, as_tuple, call, depends_on_values, evaluate, static_slots
from msplit.engines.cuda.ir.lowering import Lowering, table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ir.windows import TILES, constant_in_tf32, keeps_channels_last
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.kernels.optimizer_formulas import ROW_OPTIMIZERS
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.ops.conv import FILTERS, prepare_filter
from msplit.engines.cuda.passes.pattern import takes_rows
from msplit.engines.cuda.passes.precision.round_results import Rounding, takes_tf32
from msplit.errors import EngineError
from msplit.opset.traits import CONV2D, GATHERS, SPARSE_SEGMENTS, on_values, ops_with
from msplit.progress import done, phase
from msplit.shapes.registry import MAX_RANK, SHAPE_FUNCTIONS, Shape
from msplit.shapes.registry import Node as ShapeNode
from msplit.shapes.result import CONTRADICTION


class Tracer:
    """The state of one trace: what runs each op, and what it has learned."""

    def __init__(self, graph: OpGraph, device: torch.device, nchw: bool) -> None:
        self.graph, self.device, self.nchw = graph, device, nchw
        self.measures = device.type == "cuda"  # whether layouts of weights are measured
        self.only_shapes = False  # whether something stands for large tables, which are not read nor copied then
        self.most_unrolled: int | None = None  # ops that loops may become; as many as ever where it is None
        self.values: dict[Key, torch.Tensor] = {}
        self.static: dict[Key, NDArray[Any]] = dict(graph.constants)
        self.constants: dict[Key, torch.Tensor] = {}
        self.varying: set[Key] = set()  # values whose shape changes from run to run
        self.shapes: dict[Key, tuple[int, ...]] = {}  # of all others
        self.base: dict[Key, int] = {}  # step in whose memory a value lies, or -1; constants and inputs have none
        self.steps: list[program.KernelCall] = []
        self.made_by: dict[Key, int] = {}
        self.dynamic: list[int] = []
        self.let_go: set[int] = set()  # ops that do not run here, of a trace that computes no values
        self.filters: dict[Key, Op] = {}  # constant filters, each with the first convolution that reads it
        self.shared: set[Key] = set()  # filters that several convolutions read
        self.coverage = program.BufferCoverage()
        self.rounding = Rounding(graph)
        self.state: program.StateMemory | None = None  # variables, which this run may change
        self._written: Counter[str] = Counter()  # how often a variable was
        # Of values in the memory of variables: how often these had been written when the value was made.
        self._stamps: dict[Key, dict[str, int]] = {}
        self.places: tuple[torch.device, ...] = ()  # of a split graph
        self.gpus: dict[int, int] = {}  # op -> where it runs
        self.constant_gpus: dict[Key, int] = {}
        others = set[Key]()
        for op in graph.ops.values():
            if op.op in FILTERS and self.filters.setdefault(op.inputs[1], op) is not op:
                self.shared.add(op.inputs[1])
            as_filter = op.inputs[1:2] if FILTERS.get(op.op) is prepare_filter else []
            others.update(op.inputs[:1] + op.inputs[2:] if as_filter else op.inputs)
        self.read_otherwise = others & self.filters.keys()  # filters that are read as anything else, too
        kept = graph.kept()
        self._last_uses = {key: op.node for op in graph.ops.values() for key in op.inputs if key not in kept}

    def split(self, gpus: tuple[int, ...]) -> None:
        """The graph is one for several GPUs, with these numbers."""
        self.gpus = gpus_of(self.graph)
        wrong = apart(self.graph, self.gpus)
        if wrong is not None:
            raise EngineError(f"internal error: {wrong}", fix="please report this; run on one GPU meanwhile")
        self.places = tuple(torch.device(self.device.type, gpu) for gpu in gpus)

    def place(self, gpu: int) -> torch.device:
        """Device of a GPU of a split graph."""
        return self.places[gpu] if self.places else self.device

    def feed(self, feeds: Mapping[str, NDArray[Any]]) -> None:
        """Puts the inputs on the device."""
        for name, key in self.graph.feeds.items():
            if name not in feeds:
                raise EngineError(f"no value for input {name}", fix="give one with --input, or let msplit make it")
            self.values[key] = to_torch(np.array(feeds[name]), self.place(0))
            self.shapes[key] = feeds[name].shape
        if self.graph.state:
            self.state = program.StateMemory(variables_of(self.graph), self.device)
            for key, tensor in self.state.values().items():
                self.values[key], self.shapes[key] = tensor, tuple(tensor.shape)
                self._stamp(key, tensor)

    def _stamp(self, key: Key, tensor: torch.Tensor) -> None:
        if self.state is not None and (names := self.state.lies_in(tensor)):
            self._stamps[key] = {name: self._written[name] for name in names}

    def overwritten(self, key: Key) -> bool:
        """Returns whether a value lies in a variable that has been given another one since."""
        return any(self._written[name] != count for name, count in self._stamps.get(key, {}).items())

    def _touched(
        self, op: Op, keys: tuple[Key, ...], arguments: list[torch.Tensor]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The variables that an op is about to read and to write, by address."""
        if self.state is None:
            return (), ()
        for key in keys:
            if self.overwritten(key):
                raise EngineError(
                    f"internal error: {op.name} reads a variable that was overwritten", fix=program.REPORT
                )
        lies = [self.state.lies_in(tensor) for tensor in arguments]
        places = dict(zip(keys, lies, strict=True))
        writes = dict.fromkeys(name for slot in mutated(op) for name in places.get(op.inputs[slot], ()))
        self._written.update(writes.keys())
        return tuple(dict.fromkeys(name for names in lies for name in names)), tuple(writes)

    def skips(self, op: Op) -> bool:
        """Returns whether an op, with all that it becomes, is to be left out. None is."""
        return False

    def forgives(self, op: Op, problem: EngineError) -> bool:
        """Returns whether to go on behind an op that the engine refuses. It is not."""
        return False

    def forget(self, op: Op, kept_alive: Set[Key] = frozenset()) -> None:
        """Frees what nothing reads after an op."""
        for key in op.inputs:
            if self._last_uses.get(key) == op.node and key not in kept_alive:
                self.values.pop(key, None)

    def hold(self, constants: Mapping[Key, torch.Tensor]) -> None:
        """Shares constants that are on the device; filters only a convolution itself lays out."""
        shared = self.static.keys() - self.filters.keys()
        self.constants |= {key: tensor for key, tensor in constants.items() if key in shared}

    def constant(self, key: Key) -> torch.Tensor:
        """A known value on the device; filters of convolutions laid out as the convolution wants them."""
        tensor = self.constants.get(key)
        if tensor is None and key in self._hosted:
            self.constants[key] = tensor = self._hosted[key]
        if tensor is None:
            if key not in self.static:
                raise EngineError("a node reads an output that no node has", fix="export the model again")
            op, place = self.filters.get(key), self.place(self.constant_gpus.get(key, 0))
            if op is None:
                array = self.static[key]
                tensor = program.same_there(key, array, place)
                tensor = Device.of(place).owned(program.Placed).of(array) if tensor is None else tensor
            else:
                tensor = to_torch(self.static[key], place)
                channels_last = keeps_channels_last(Node(op.name, op.op, op.attrs, self.nchw))
                turned = TILES in op.attrs and Tiles(*op.attrs[TILES]).turned  # its kernel wants it as it is
                tensor = tensor if turned else FILTERS[op.op](tensor, channels_last)
            # Simulated GPUs share no memory either.
            self.constants[key] = tensor = tensor.clone() if self.places and place.type == "cpu" else tensor
        return tensor

    @functools.cached_property
    def _hosted(self) -> dict[Key, torch.Tensor]:
        """Tables that lie in the host's memory, where the graph has less memory for them than they take; or what stands for large ones."""
        memory, arrays = self.graph.table_memory, self.graph.constants
        if self.only_shapes:
            large = [key for key in lookup_tables(self.graph) if arrays[key].nbytes >= LARGE]
            zero = {key: to_torch(np.zeros((), arrays[key].dtype), self.device) for key in large}
            return {key: one.expand(arrays[key].shape) for key, one in zero.items()}
        if memory is None or self.device.type == "meta":
            return {}
        keys = lookup_tables(self.graph)
        others = {key for op in self.graph.ops.values() if op.op != "_Columns" for key in op.inputs}
        alone = [number for number, key in enumerate(keys) if key not in others]
        found = Device.of(self.device).owned(HostTables).place([arrays[key] for key in keys], memory, alone)
        return {key: tensor for key, tensor in zip(keys, found, strict=True) if tensor is not None}

    def run(self, op: Op) -> bool:
        """Evaluates an op now if it can be known, otherwise runs it and keeps a step. Whether there is a step."""
        lowering = table()[op.op]
        varying = any(key in self.varying for key in op.inputs)
        if lowering.shape_only and not varying:
            shapes = [self.values[key] if key in self.values else self.static[key] for key in op.inputs]
            tensors = [torch.empty(value.shape, dtype=torch.bool, device="meta") for value in shapes]
            for port, size in enumerate(as_tuple(call(lowering, op, tensors))):
                self.know((op.node, port), to_numpy(size))
            return False
        if all(key in self.static for key in op.inputs):
            results = evaluate(op, [self.static[key] for key in op.inputs])
            if results is not None:
                for port, result in enumerate(results):
                    self.know((op.node, port), result)
                return False
        place = self.place(self.gpus.get(op.node, 0))
        if not self.places or place.type != "cuda":
            self._step(lowering, op, varying)
            return True
        with torch.cuda.device(place):
            if op.op == PEER_COPY:  # no events order what is on two GPUs here
                synchronize(self.place(self.gpus.get(op.inputs[0][0], 0)))
            self._step(lowering, op, varying)
            if op.op == PEER_COPY:
                synchronize(place)
        return True

    def know(self, key: Key, value: NDArray[Any]) -> None:
        """A value that is the same in every run."""
        self.static[key] = value
        self.shapes[key] = value.shape

    def _step(self, lowering: Lowering, op: Op, varying: bool) -> None:
        """Runs an op and keeps what is learned of it as a step."""
        # Inputs that its lowering wants on the host are bound now; those that only the run knows are read back in each.
        static = static_slots(op)
        unknown = tuple(slot for slot in sorted(static) if op.inputs[slot] not in self.static)
        dynamic = depends_on_values(op, self.static)
        bound = {slot: self.static[op.inputs[slot]] for slot in static if slot not in unknown}
        keys = tuple(key for slot, key in enumerate(op.inputs) if slot not in bound)

        def lowered(op: Op) -> Callable[..., tuple[torch.Tensor, ...]]:
            return LoweringCall(lowering, op, bound, unknown, self.nchw, mixed)

        # Inputs on the device, and the kernel that is fastest for them.
        fresh = len(op.inputs) > 1 and (self.rounding.lists or op.inputs[1] not in self.constants)
        for key in keys if self.places else ():  # a constant is where it is read; one that was computed here, too
            if key not in self.values:
                self.constant_gpus.setdefault(key, self.gpus.get(op.node, 0))
        arguments = self.arguments(keys)
        slots = (slot for slot in range(len(op.inputs)) if slot not in bound)
        mixed = len({one.device for slot, one in zip(slots, arguments, strict=True) if slot not in unknown}) > 1
        op = self.rounding.of_data(op)
        # Behind an input that the op is built with, such as sizes, the second of its arguments is not its second input.
        if self.measures and not unknown and not {0, 1} & bound.keys():
            if self.rounding.lists and (other := self.rounding.otherwise(op)) is not None:
                self._choose(other, list(arguments), lowered, fresh=fresh, varying=varying)
            op = self._choose(op, arguments, lowered, fresh=fresh, varying=varying)
        op = self.rounding.of_results(op)
        # The run, and in whose memory its results lie: where shapes differ from run to run, what is seen here need not hold.
        function = lowered(op)
        reads, writes = self._touched(op, keys, arguments)
        results = function(*arguments)
        number = len(self.steps)
        if dynamic:
            self.dynamic.append(number)
        varying = varying or dynamic
        fixed = self.fixed_shapes(op) if varying else ()
        bases, size = self._memory(keys, arguments, results, number)
        if varying:
            bases = [number] * len(results)
        # A step that takes no memory and writes nothing is a view.
        launches = (size > 0 and op.op != program.BUFFER) or varying or bool(writes) or bool(program.parts_of(op))
        read_parts, written_parts = self.coverage.of_step(op, len(results), launches=launches)
        read = dict(zip(keys, arguments, strict=True)).values()
        traffic = sum(map(_extent, (*read, *results)))
        if op.op == "_Columns":  # of a table the rows that are looked up
            rows = op.attrs["columns"].rows_of_tables
            traffic -= sum(_extent(arguments[at]) * max(1 - rows[at] / len(arguments[at]), 0) for at in rows)
        scattered = sum(not tensor.is_contiguous() for tensor in read)
        self.steps.append(
            program.KernelCall(
                op,
                function,
                keys,
                len(results),
                launches,
                size,
                tuple(bases),
                varying,
                bound,
                round(traffic),
                scattered,
                reads + read_parts,
                writes + written_parts,
            )
        )
        for port, (result, base) in enumerate(zip(results, bases, strict=True)):
            key = (op.node, port)
            self.values[key], self.base[key], self.made_by[key] = result, base, number
            self._stamp(key, result)
            if varying and tuple(result.shape) not in fixed[port : port + 1]:
                self.varying.add(key)
            else:
                self.shapes[key] = tuple(result.shape)
        self.rounding.has_run(op, keys, len(results))

    def fixed_shapes(self, op: Op) -> Sequence[Shape]:
        """Shapes of an op's results as far as they do not follow from those of inputs that have another one in each run: a Reshape to a
        known shape gives that, whatever it is given."""
        function = SHAPE_FUNCTIONS.get(op.op)
        if function is None:
            return ()
        shapes, whole = list[Shape | None](), list[NDArray[np.int64] | None]()
        for key in op.inputs:
            value = self.static.get(key)
            shapes.append(self.shapes.get(key) if value is None else value.shape)
            known = value is not None and value.dtype.kind in "iu" and value.size <= MAX_RANK
            whole.append(value.astype(np.int64) if known and value is not None else None)
        try:
            return function(ShapeNode(op.op, op.attrs, shapes, whole, [None] * len(whole)))
        except CONTRADICTION:
            return ()

    def _choose(
        self,
        op: Op,
        arguments: list[torch.Tensor],
        lowered: Callable[[Op], Callable[..., tuple[torch.Tensor, ...]]],
        *,
        fresh: bool,
        varying: bool,
    ) -> Op:
        """The op with the kernel that measures fastest, its constant weights or filter laid out for it.

        Args:
            op: What is to run.
            arguments: Its inputs; changed.
            lowered: What runs an op.
            fresh: Nothing has read its second input before, so that it may come to lie in another way.
            varying: The shapes of its inputs change from run to run.
        """
        if len(op.inputs) < 2:
            return op
        if program.parts_of(op):  # which kernel is best does not depend on where it writes
            buffer = arguments.pop()
            chosen = self._choose(program.without_place(op), arguments, lowered, fresh=fresh, varying=varying)
            arguments.append(buffer)
            return replace(op, attrs={**chosen.attrs, program.INTO: op.attrs[program.INTO]})
        weights = op.inputs[1]
        constant = weights in self.constants
        if op.op in matmul.ANY_WEIGHTS or (op.op in matmul.WITH_WEIGHTS and constant):
            if varying:
                return op
            op = self.rounding.of_weights(op, arguments, self.constants)
            movable = fresh and constant
            if movable and not self.rounding.lists and (heaviest := self._heaviest.get(weights, op)).node != op.node:
                arguments[1], movable = self._laid_for(heaviest), False
            op, arguments[1] = matmul.choose(op, arguments, lowered, movable=movable)
            for slot in self.rounding.to_round(op):
                self.constants[op.inputs[slot]] = arguments[slot] = constant_in_tf32(arguments[slot])
        elif constant and self._is_nhwc_convolution(op):
            keep = weights in self.shared
            op, arguments[1] = conv.choose(op, arguments, lowered, keep_filter=keep)
        if constant:
            if _takes_tf32(op, arguments[1]) and weights not in self.read_otherwise:
                arguments[1] = constant_in_tf32(arguments[1])
            self.constants[weights] = arguments[1]
        return op

    @functools.cached_property
    def _heaviest(self) -> dict[Key, Op]:
        return matmul.heaviest(self.graph)

    def _laid_for(self, op: Op) -> torch.Tensor:
        """Constant weights as a product that comes later wants them: it is tried with random data of the shape that they will have."""
        place = self.constant(op.inputs[1]).device  # of several GPUs, the one that multiplies by them
        draw = torch.Generator(place).manual_seed(0)

        def like(key: Key) -> torch.Tensor:
            if key in self.static:
                return self.constant(key)
            dtype = torch_dtype(self.graph.dtypes.get(key, "float32"))
            return torch.rand(self.graph.shapes[key], device=place, generator=draw).to(dtype)

        arguments = [like(key) for key in op.inputs]
        op = self.rounding.of_weights(op, arguments, self.constants)
        return matmul.choose(op, arguments, lambda op: LoweringCall(table()[op.op], op, {}), movable=True)[1]

    def _is_nhwc_convolution(self, op: Op) -> bool:
        convolves = op.op in CONV2D or conv.is_depthwise(op)
        return not self.nchw and convolves and str(op.attrs.get("data_format", "NHWC")) == "NHWC"

    def arguments(self, keys: tuple[Key, ...]) -> list[torch.Tensor]:
        """The values of a step's inputs."""
        return [self.values[key] if key in self.values else self.constant(key) for key in keys]

    def _memory(
        self, keys: tuple[Key, ...], arguments: list[torch.Tensor], results: tuple[torch.Tensor, ...], number: int
    ) -> tuple[list[int], int]:
        """In whose memory each result lies, and how many bytes are new."""
        pairs = zip(arguments, keys, strict=True)
        memory = {argument.untyped_storage().data_ptr(): self.base.get(key, -1) for argument, key in pairs}
        fresh: dict[int, int] = {}
        bases = []
        for result in results:
            storage = result.untyped_storage()
            if result.device.type != self.device.type or result.numel() == 0:
                bases.append(-1)
            elif storage.data_ptr() in memory:
                bases.append(memory[storage.data_ptr()])
            else:
                fresh[storage.data_ptr()] = storage.nbytes()
                bases.append(number)
        return bases, sum(fresh.values())


def _takes_tf32(op: Op, filter: torch.Tensor) -> bool:
    """Returns whether an op is done by our kernel of convolutions, in TF32. It rounds its data itself, and finds its filter rounded."""
    own = TILES in op.attrs and FILTERS.get(op.op) is prepare_filter
    return own and filter.dtype == torch.float32 and torch.backends.cudnn.allow_tf32


def lookup_tables(graph: OpGraph) -> list[Key]:
    """Constants of which rows are looked up and nothing else is read, each array once."""
    tables, others = dict[Key, None](), set(graph.fetches.values())
    for op in graph.ops.values():
        if op.op == "_Columns":
            terms = [term for segment in op.attrs["columns"].segments for term in segment.terms]
            slots = {term.table for term in terms if not term.weighted} - {term.source for term in terms}
            slots -= {term.table for term in terms if term.weighted}
        else:
            slots = {0} if op.op in GATHERS and takes_rows(op, graph.constants.get) else set()
        for slot, key in enumerate(op.inputs):
            if key in graph.constants and slot in slots and graph.constants[key].size:
                tables[key] = None
            else:
                others.add(key)
    once = {id(graph.constants[key]): key for key in sorted(tables) if key not in others}
    return sorted(once.values())


def row_variables(graph: OpGraph) -> dict[str, str]:
    """Variables of which rows are looked up or changed, and for each why it has to lie on the device; "" where it need not."""
    names = {key: name for name, key in graph.state.items()}
    found, wrong = dict[str, None](), dict[str, str]()
    for op in graph.ops.values():
        rows = _slots_of_rows(graph, op)
        for slot, key in enumerate(op.inputs):
            if (name := names.get(key)) is not None and slot in rows:
                found[name] = None
            elif name is not None and not (op.op in table() and table()[op.op].shape_only):
                said = f"{op.name} ({op.op})" if op.op != "_Copy" else "what wants its old values"
                wrong.setdefault(name, f"{said} takes all of it in each step")
        changed = [names.get(op.inputs[slot]) for slot in mutated(op)]
        names |= {(op.node, port): name for port, name in enumerate(changed) if name is not None}
    wrong |= {names[key]: "it is an output" for key in graph.fetches.values() if key in names}
    arrays = {name: graph.initial[name] for name in found if graph.initial[name].size}
    wrong |= {name: f"it is {array.dtype}" for name, array in arrays.items() if array.dtype.name not in _HOSTED}
    return {name: wrong.get(name, "") for name in arrays}


def _slots_of_rows(graph: OpGraph, op: Op) -> tuple[int, ...]:
    """Inputs of which an op takes rows, or changes them."""
    if op.op in _CHANGES_ROWS:
        return mutated(op)
    takes = op.op in _SUMS_ROWS or (op.op in GATHERS and takes_rows(op, graph.constants.get))
    return (0,) if takes else ()


_CHANGES_ROWS = ROW_OPTIMIZERS.keys() | set(map(on_values, ops_with("changes rows")))
_SUMS_ROWS = {f"{op}{ending}" for op in SPARSE_SEGMENTS for ending in ("", "WithNumSegments")}
_HOSTED = ("float32", "float64")
"""Types of variables whose rows the optimizers' kernel changes, without atomic operations."""


def variables_of(graph: OpGraph) -> program.State:
    """Facts that a graph gives about its variables."""
    return program.State(graph.state, graph.final, graph.stacks, tuple(graph.contiguous), graph.initial, graph.hosted)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes of memory that a tensor's elements lie in: what is broadcast counts once."""
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def trace(
    graph: OpGraph,
    feeds: Mapping[str, NDArray[Any]],
    device: torch.device,
    *,
    nchw: bool = False,
    measure: bool = True,
    observe: Callable[[program.KernelCall, list[torch.Tensor]], None] | None = None,
    held: Mapping[Key, torch.Tensor] | None = None,
    gpus: tuple[int, ...] = (),
) -> program.Program:
    """Runs the graph once on example inputs, which fix every shape. The graph is not changed.

    With `measure`, kernels are chosen by timing them on a GPU. `observe` is called with each step and its inputs right after it ran.
    Constants that another program has on the device are shared where they are `held`. `gpus` are those that the graph is split for.

    Raises:
        EngineError: An op failed on these shapes; the message names the node.
    """
    tracer = Tracer(graph, device, nchw)
    tracer.measures = tracer.measures and measure
    if gpus:
        tracer.split(gpus)
    tracer.rounding = Rounding(graph, results=measure and takes_tf32(device), nchw=nchw)
    tracer.hold(held or {})
    tracer.feed(feeds)
    given = {name: tracer.values[key] for name, key in graph.feeds.items()}
    fed = {name: (tuple(value.shape), dtype_name(value.dtype)) for name, value in given.items()}
    with phase("tracing and choosing kernels"), torch.no_grad():
        for number, op in enumerate(graph.ops.values()):
            done(number / len(graph.ops))
            if tracer.run(op) and observe:
                step = tracer.steps[-1]
                observe(step, tracer.arguments(step.inputs))
            tracer.forget(op)
    return _finish(tracer, fed)


def list_choices(
    graph: OpGraph, feeds: Mapping[str, NDArray[Any]], device: torch.device, *, nchw: bool = False
) -> dict[Key, torch.Tensor]:
    """Runs the graph once on the libraries' kernels, so that the tuner, in `Tuner.listing`, hears of every choice that `trace` makes,
    whoever's kernels win, and with fused groups or without.

    Args:
        graph: It has been through `expect_rounded` if what `trace` gets has.
        feeds: See `trace`.
        device: Where to run.
        nchw: See `Node`.

    Returns:
        Constants that it has put on the device and that no kernel may want to lie in another way, for `trace`.
    """
    tracer = Tracer(graph, device, nchw)
    tracer.rounding = Rounding(graph, lists=True, results=not nchw and takes_tf32(device))
    tracer.feed(feeds)
    with torch.no_grad():
        for op in graph.ops.values():
            tracer.run(op)
            tracer.forget(op)
    weights = {op.inputs[1] for op in graph.ops.values() if len(op.inputs) > 1}
    return {key: tensor for key, tensor in tracer.constants.items() if key not in weights}


def _finish(tracer: Tracer, fed: Mapping[str, tuple[tuple[int, ...], str]]) -> program.Program:
    read = ((key, number) for number, step in enumerate(tracer.steps) for key in step.inputs)
    reads = [(tracer.made_by[key], number) for key, number in read if key in tracer.made_by]
    step_of = {step.op.node: number for number, step in enumerate(tracer.steps)}
    for writer, readers in tracer.graph.hazards().items():
        reads += [(step_of[reader], step_of[writer]) for reader in readers if reader in step_of]
    fetches = {name: key for name, key in tracer.graph.fetches.items() if key not in tracer.static}
    known = {name: tracer.static[key] for name, key in tracer.graph.fetches.items() if key in tracer.static}
    for name, key in fetches.items():
        if tracer.overwritten(key):
            raise EngineError(
                f"internal error: output {name} lies in a variable that was overwritten", fix=program.REPORT
            )
    gpus = tuple(tracer.gpus.get(step.op.node, 0) for step in tracer.steps)
    return program.Program(
        tuple(tracer.steps),
        tracer.constants,
        tracer.graph.feeds,
        fetches,
        known,
        Dag.of(len(tracer.steps), [first for first, _ in reads], [second for _, second in reads]),
        tuple(tracer.dynamic),
        fed,
        tracer.graph.unrolled,
        tracer.graph.streamless,
        variables_of(tracer.graph),
        program.Gpus(tracer.places, gpus, tracer.constant_gpus) if tracer.places else None,
    )
