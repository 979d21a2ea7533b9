"""Runs a program on CUDA streams: launched step by step, or captured once and replayed as one CUDA graph."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Executable, Feeds, Following, Timeline
from msplit.engines.cuda.device.capture import capture as capturing
from msplit.engines.cuda.device.capture import synchronize
from msplit.engines.cuda.device.device import Device, precision
from msplit.engines.cuda.device.ranks import ProcessGroup, Ranks
from msplit.engines.cuda.ir.dtypes import own_copy, to_numpy
from msplit.engines.cuda.ir.interpret import run_step
from msplit.engines.cuda.ir.program import Program, StateMemory
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.store import Store, noting
from msplit.engines.cuda.options import EngineOptions, Torture
from msplit.engines.cuda.runtime.input_staging import InputStaging, Prefetch
from msplit.engines.cuda.runtime.output_staging import CapturedGraph, GraphExec, LookupGraph, OutputStaging
from msplit.engines.cuda.runtime.plan_binding import CaptureMemory, give_back, lease
from msplit.engines.cuda.runtime.stream_program import EventTap, StreamProgram, Tap, poison_memory, timeline
from msplit.errors import EngineError

TIMELINE_RUNS = 5
"""Runs of a step that a timeline is made of: the last is told."""

HEAD_START_CYCLES = 20_000_000
"""Cycles that the device waits, about 10 ms, while the host launches a step whose kernels are to be timed."""

_ASK = 256
"""Number of looks for the end of a step before CUDA is asked, too, which knows of faults, and takes a µs to say so. An event loop looks
once in 4 to 8 µs: where nothing but CUDA tells the end, it is asked at each look."""

_ROOTS = 2
"""With so many streams that start at once or more, a graph gets one kernel that they all follow. On an H200 every further
kernel that follows nothing costs the start of a graph about 2 µs, and one that follows another 0.2."""


_BESIDE = frozenset({CapturedGraph.DELIVER, CapturedGraph.GATHER})
"""Graphs that run before or behind `RUN`."""
_DELIVERS = frozenset({CapturedGraph.STEP, CapturedGraph.DELIVER})


@dataclass(frozen=True, eq=False)
class Shared:
    """Memory and streams shared by executables of which one runs at a time.

    Attributes:
        memory: Of their graphs; None: each has its own.
        streams: Theirs, enough for each; None: each leases its own.
    """

    memory: Any = None
    streams: Sequence[torch.cuda.Stream] | None = None


class CudaExecutable(Executable):
    """One program with one plan on one device. See `engines.base.Executable`.

    With `timing_only` there is no `step`: inputs stay what they are, outputs are not fetched, and half of the capturing is spared. Where
    nothing is to be measured, inputs and outputs are copied by the copy engine, which takes longer and needs no kernel to be compiled.
    With streams that are `shared`, steps run on the first of these and are begun by `start` alone; the other half of the capturing is
    spared.

    Attributes:
        kernels: Keys, in the device's store, of the kernels of our own that it launches.
    """

    keeps_state = True
    joins_others = True

    def __init__(
        self,
        program: Program,
        stream_program: StreamProgram,
        feeds: Mapping[str, torch.Tensor],
        device: Device,
        options: EngineOptions,
        *,
        ieee: bool,
        facts: Mapping[str, Any],
        timing_only: bool = False,
        shared: Shared | None = None,
    ) -> None:
        shared, capture, own_copies = shared or Shared(), options.capture, options.measure
        self.program, self.stream_program, self.device, self.ieee = program, stream_program, device, ieee
        self._facts: dict[str, Any] = dict(facts)
        self._torture = options.torture or Torture()
        self._chance = random.Random(self._torture.seed)
        self._lent = shared.streams is not None
        count = max(stream_program.count, 1)
        self._others: tuple[torch.device, ...] = ()  # GPUs beside the first, of a split program
        if program.gpus is not None:
            self._others = program.gpus.places[1:]
            self._streams = lease(program, stream_program)
        else:
            self._streams = [*shared.streams[:count]] if shared.streams else device.streams.lease(count)
        self._memories = [CaptureMemory(place) for place in self._others if capture]
        self._origin = self._streams[0]
        stream = self._origin.cuda_stream if self._lent else None
        self._inputs = InputStaging(feeds, device, own_kernel=own_copies, stream=stream)
        self._prefetch: Prefetch | None = None
        self._own_copies = own_copies
        self._memory = shared.memory or (device.scratch.handle if timing_only else torch.cuda.graph_pool_handle())
        self._graphs: dict[CapturedGraph, GraphExec] = {}
        self._counters: list[torch.Tensor] = []
        self._results: dict[CapturedGraph, dict[str, torch.Tensor]] = {}
        self._ranks, self._tables = device.owned(Ranks), device.owned(HostTables)
        self._group: ProcessGroup | None = None
        self._capture = capture
        self._timing_only = timing_only
        self._root = torch.zeros(1, dtype=torch.int32, device=device.place)
        self.state = StateMemory(program.state, device.place)
        with noting() as self.kernels:
            self._make_ready(feeds)
        Store.of(device.place).save(self.kernels)

    def _make_ready(self, feeds: Mapping[str, torch.Tensor]) -> None:
        with self._on_origin():
            self._inputs.fill({name: to_numpy(tensor) for name, tensor in feeds.items()})
            self._inputs.to_device()
            self._inputs.rest_to_device()  # by the graph's own kernel, which is compiled here
            alone = not (self._lent or self._timing_only)
            self._gathers = (
                alone
                and self._capture
                and self._own_copies
                and can_launch(self.device.place)
                and self._inputs.gathers()
            )
            # Eager once on these very streams: libraries make their handles and workspaces here, outside of any capture.
            with self.state.kept():
                results = self._record()
            self._tables.warm(self.program.constants.values())
            if not self._timing_only:
                self._outputs = OutputStaging(results, self.device, captured=self._capture, own_kernel=self._own_copies)
        self._synchronize()
        if self._capture:
            torch.cuda.empty_cache()  # a capture does so itself: what that frees was none of the pool's
        before = torch.cuda.memory_reserved(self.device.place)
        if self._capture:
            self._capture_graphs()
        self._facts["captured"] = bool(self._graphs)
        self._facts["pool_bytes"] = torch.cuda.memory_reserved(self.device.place) - before

    def _capture_graphs(self) -> None:
        if self.stream_program.instructions and not self._lent:  # CUDA refuses to run a graph of nothing
            self._capture_graph(CapturedGraph.RUN)
        if not self._timing_only:
            self._capture_graph(CapturedGraph.STEP)
            if not self._lent and self._outputs.has_any:
                self._capture_graph(CapturedGraph.DELIVER)
                if self._gathers and CapturedGraph.RUN in self._graphs:
                    self._capture_graph(CapturedGraph.GATHER)
            self._outputs.aim()
            self._synchronize()
            self._outputs.settle()
            self._seen, self._looks = self._outputs.seen, 0

    def join(self) -> None:
        """Joins the steps of other processes. The graph is captured anew: the first one needed nobody else."""
        self._group = self._ranks.group or ProcessGroup()
        self.state.spread(self._group.spread)
        self._synchronize()  # streams of ours do not wait for the default one, behind which values arrive
        with self._on_origin(), self.state.kept():
            self._record()  # NCCL makes its connections outside of any capture
        self._synchronize()
        if self._capture:
            self._free_graphs()
            self._memory = torch.cuda.graph_pool_handle()  # one that no graph uses any more can not be captured into
            self._capture_graphs()

    @contextlib.contextmanager
    def _on_origin(self) -> Iterator[None]:
        with (
            torch.no_grad(),
            precision(self.ieee),
            torch.cuda.device(self.device.place),
            torch.cuda.stream(self._origin),
            self._ranks.talking(self._group),
        ):
            before = [torch.cuda.current_stream(place) for place in self._others]
            try:
                yield
            finally:
                for stream in (*before, self._origin) if before else ():
                    torch.cuda.set_stream(stream)

    def _record(self, make_tap: Callable[[], Tap] | None = None) -> dict[str, torch.Tensor]:
        """Issues every instruction on its stream. The current stream is the origin."""
        tap = None if make_tap is None else make_tap()
        values = {key: self._inputs.on_device[name] for name, key in self.program.feeds.items()}
        values |= self.state.values()
        events: dict[int, torch.cuda.Event] = {}
        # First steps of other streams wait for the origin: in a capture they would not be part of the graph otherwise.
        start = None
        if self.stream_program.fork:
            start = torch.cuda.Event()
            start.record(self._origin)
        for view in self.stream_program.first_views:
            run_step(self.program, view, values)
        current = self._origin
        for instruction in self.stream_program.instructions:
            stream = self._streams[instruction.lane]
            if start is not None and instruction.step in self.stream_program.fork:
                stream.wait_event(start)
            for other in instruction.waits:
                stream.wait_event(events[other])
            if current is not stream:
                torch.cuda.set_stream(stream)
                current = stream
            # Tests put kernels at random times, so that a wait that is missing shows.
            if self._torture.delay_cycles:
                torch.cuda._sleep(self._chance.randrange(self._torture.delay_cycles))
            if tap is not None:
                tap.before(instruction)
            try:
                run_step(self.program, instruction.step, values)
            except (EngineError, RuntimeError) as problem:
                # Whatever CUDA refuses in a capture ran before it, outside of any: the op is named, and what to do about it.
                reason = problem.__cause__ if isinstance(problem, EngineError) else problem
                if not isinstance(reason, torch.AcceleratorError) or not torch.cuda.is_current_stream_capturing():
                    raise
                raise uncapturable(self.program, instruction.step, reason) from problem
            if tap is not None:
                tap.after(instruction)
            # Views launch nothing. What is let go here is free for later work of this stream alone, whose readers are all over then.
            for view in instruction.views:
                run_step(self.program, view, values)
            if instruction.records:
                events[instruction.step] = torch.cuda.Event()
                events[instruction.step].record(stream)
            for key in instruction.frees:
                if self._torture.poison and key in values and values[key].numel():
                    poison_memory(values[key])
                values.pop(key, None)
        # The origin ends last: whoever waits for it waits for all.
        torch.cuda.set_stream(self._origin)
        for last in self.stream_program.join:
            self._origin.wait_event(events[last])
        if self._torture.poison:  # what it writes comes after the last events
            for stream in self._streams[1:]:
                self._origin.wait_stream(stream)
        return self.program.results(values)

    def _capture_graph(self, kind: CapturedGraph) -> None:
        """Captures one of them. `DELIVER` comes behind those that make what it delivers.

        Raises:
            EngineError: A step can not be captured; it is named.
        """
        noted = self.device.semaphores.noted(self._counters)
        with self._on_origin(), self._capturing() as graph, noted, contextlib.ExitStack() as stack:
            for memory in self._memories:
                stack.enter_context(memory.used())
            if kind is CapturedGraph.STEP and self._inputs.rest:
                self._inputs.rest_to_device()
            elif kind not in _BESIDE and len(self.stream_program.fork) >= _ROOTS:
                self._root.add_(1)
            if kind is CapturedGraph.GATHER:
                self._inputs.gather()
            results = self._made_by_run() if kind in _BESIDE else self._record()
            if kind in _DELIVERS:
                self._outputs.to_host(results, graph=int(kind is CapturedGraph.DELIVER))
        looks_up = kind not in _BESIDE and self._tables.has(self.program.constants)
        place = self.device.place
        self._graphs[kind] = LookupGraph(graph, place, self._tables) if looks_up else GraphExec(graph, place)
        self._results[kind] = results

    def _made_by_run(self) -> dict[str, torch.Tensor]:
        """Makes results of inputs and constants, where nothing runs."""
        return self._results[CapturedGraph.RUN if CapturedGraph.RUN in self._graphs else CapturedGraph.STEP]

    def _synchronize(self) -> None:
        for place in (self.device.place, *self._others):
            synchronize(place)

    def _capturing(self) -> contextlib.AbstractContextManager[torch.cuda.CUDAGraph]:
        return capturing(self._streams, self._memory, release=not self._timing_only)

    def step(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """One step: inputs in, from the host or a device, and host outputs back."""
        sent = self._prefetch is not None and self._prefetch.feeds is feeds
        if not sent and self.begin(feeds):
            return self.end()
        return self._step(feeds)

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """Runs a step while the next inputs are copied: the graph without copies, behind one that takes over what was
        sent. Small inputs are not sent: the graph that fetches them takes less than that."""
        if not self._inputs.pays_ahead:
            if on_device:
                return self.step_on_device(feeds, then)
            if not self.begin(feeds):
                return self._step(feeds, then)
            try:
                then()
            finally:
                found = self.end()
            return found
        if self._prefetch is None:
            with self.device.entered():
                self._prefetch = Prefetch(self._inputs, self.device)
        return self.step_on_device(feeds, then) if on_device else self._step(feeds, then)

    def _step(self, feeds: Feeds, then: Following | None = None) -> dict[str, NDArray[Any]]:
        """A step on inputs from wherever they lie, whose outputs are fetched behind its graph."""
        with self._ran(feeds, then) as results:
            if self.program.dynamic:  # shapes may be others than those that the outputs' memory was made for
                return {name: to_numpy(tensor) for name, tensor in results.items()} | self.program.known_outputs()
            if CapturedGraph.DELIVER in self._graphs:
                self._graphs[CapturedGraph.DELIVER].start()
            else:
                self._outputs.copy(results)
        self._outputs.settle()
        return self.outputs()

    def begin(self, feeds: Feeds) -> bool:
        """Begins a step if it is a captured graph, fed from the host, or captured graphs, fed with small tensors on its GPU alone, on the
        current stream there."""
        if not self._capture:
            return False
        if not self.device.is_current:  # a default stream has one handle on all GPUs, which means the current one's
            with self.device.entered():
                return self.begin(feeds)
        if self._prefetch is not None:
            self._prefetch.feeds = None  # for a step before this one
        if CapturedGraph.GATHER in self._graphs and self._inputs.aim(feeds):
            self._outputs.expect()
            for kind in (CapturedGraph.GATHER, CapturedGraph.RUN, CapturedGraph.DELIVER):
                self._graphs[kind].start()
            return True
        if not self._inputs.fill(feeds, ahead=True, direct=True):
            return False
        self._outputs.expect()
        self._graphs[CapturedGraph.STEP].start()
        return True

    def end(self) -> dict[str, NDArray[Any]]:
        """Waits for the step that was begun, in the thread that began it."""
        if not self._outputs.arrived():
            self._graphs[CapturedGraph.STEP].finish()
            self._outputs.settle()
        return self.outputs()

    def start(self, parts: Sequence[Feeds], entries: Mapping[str, int]) -> None:
        """Begins a step on the rows of several requests; see `Inputs.join`. For one whose streams are shared."""
        try:
            self._inputs.join(parts, entries)
        except TypeError:
            # NumPy takes no tensors of a GPU. To look for them at every step would cost those that have none.
            with torch.cuda.stream(self._origin):
                self._inputs.join_tensors(parts, entries)
        self._outputs.expect()
        self._graphs[CapturedGraph.STEP].start_on(self._origin)
        self._looks = 0

    def wait(self) -> None:
        """Waits for the step that was begun, without the interpreter's lock. It takes some µs longer than to look whether it is `over`."""
        self._graphs[CapturedGraph.STEP].finish_on(self._origin)

    def over(self) -> bool:
        """True if the step that was begun is over. What failed on the device is raised."""
        if self._seen is not None:
            if self._seen():
                return True
            self._looks += 1
            if self._looks % _ASK:
                return False
        if not self._origin.query():
            return False
        self._outputs.settle()
        return True

    def outputs(self, into: Arrays | None = None) -> dict[str, NDArray[Any]]:
        """Outputs of the step that is over, those that fit in these arrays."""
        return {**self._outputs.read(into), **self.program.known_outputs()}

    def outputs_on_device(self) -> dict[str, Any]:
        """Outputs of the step that was begun by `start` and is over, as tensors of the caller's own on the device."""
        with torch.no_grad(), torch.cuda.stream(self._origin):
            own = {name: own_copy(tensor) for name, tensor in self._results[CapturedGraph.STEP].items()}
            known = self.program.known_tensors(self.device.place)
        self._origin.synchronize()
        return own | known

    def step_on_device(self, feeds: Feeds, then: Following | None = None) -> dict[str, Any]:
        """One step whose outputs stay on the device: see `engines.base.Executable`."""
        with self._ran(feeds, then) as results:
            own = {name: own_copy(tensor) for name, tensor in results.items()}
            known = self.program.known_tensors(self.device.place)
        return own | known

    @contextlib.contextmanager
    def _ran(self, feeds: Feeds, then: Following | None) -> Iterator[dict[str, torch.Tensor]]:
        """A step on inputs from wherever they lie, without the graph that fetches them from the host. Its results on the device are those
        of the current stream inside; all of that is over at the end. What the next step is fed is sent meanwhile."""
        place = self.device.place
        caller = torch.cuda.current_stream(place)
        if self._capture:
            with self.device.entered():
                read = self._bring(feeds, caller, then)
                self._enqueue()
                yield self._made_by_run()
        else:
            with self._on_origin():
                self._origin.wait_stream(caller)
                read = self._bring(feeds, self._origin, then)
                results = self._record()
            caller.wait_stream(self._origin)
            with torch.no_grad(), torch.cuda.device(place), torch.cuda.stream(caller):
                yield results
        try:
            if read is not None:
                read.synchronize()
            following = None if then is None else then()
            if following is not None and self._prefetch is not None:
                self._prefetch.send(following)
        finally:
            caller.synchronize()

    def _bring(self, feeds: Feeds, stream: torch.cuda.Stream, then: Following | None) -> torch.cuda.Event | None:
        """Brings inputs to the device on a stream, which is current. The event, where the step has a successor, is of the time when they
        have been read out of the caller's memory: the successor's may be written there."""
        if self._prefetch is not None and self._prefetch.take(feeds):
            return None
        if not (self._inputs.has_large and self._inputs.send_all(feeds, direct=True)):
            self._inputs.bring(feeds)
        if then is None or not self._inputs.reads_callers:
            return None
        read = torch.cuda.Event()
        read.record(stream)
        return read

    def buffers(self) -> Arrays:
        """Pinned memory of inputs. It may be written again as soon as a step is over."""
        return dict(self._inputs.block.arrays)

    def _enqueue(self) -> None:
        """Issues one step on the inputs that are on the device.

        A captured graph replays on the caller's stream: entering another one would cost as much as a small model's launch.
        """
        if not self._capture:
            with self._on_origin():
                self._record()
        elif CapturedGraph.RUN in self._graphs:
            self._graphs[CapturedGraph.RUN].start()

    def launch(self) -> None:
        """One step on the inputs that are on the device already."""
        self._enqueue()
        if not self._capture:
            self._origin.synchronize()
        elif CapturedGraph.RUN in self._graphs:
            self._graphs[CapturedGraph.RUN].finish()

    def device_times(self, count: int) -> list[float]:
        """Seconds of each of `count` back-to-back steps by the device's clock."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        stream = torch.cuda.current_stream(self.device.place) if self._capture else self._origin
        marks[0].record(stream)
        for mark in marks[1:]:
            self._enqueue()
            mark.record(stream)
        stream.synchronize()
        return [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(marks)]

    def timeline(self) -> Timeline:
        """One step with timing events around all of its parts; see `timeline`."""
        if not self.stream_program.instructions:
            return Timeline((), (), "nothing runs on the device")
        if self._others:  # the clocks of two GPUs have nothing in common
            return Timeline((), (), "steps on several GPUs are not timed in parts")
        with self.state.kept():
            plain = statistics.median(self.device_times(TIMELINE_RUNS))
        taps: list[EventTap] = []

        def tap() -> EventTap:
            taps.append(EventTap(self._streams, captured=self._capture))
            return taps[-1]

        with self._on_origin(), self.state.kept():
            if self._capture:
                with self._capturing() as graph:
                    results = self._record(tap)
            for _ in range(TIMELINE_RUNS):  # the last one counts, when everything is warm
                if self._capture:
                    with self._tables.step(self._origin):
                        graph.replay()
                else:
                    # The launches queue up behind a wait, so that the device does not wait for the host.
                    torch.cuda._sleep(HEAD_START_CYCLES)
                    results = self._record(tap)
                self._origin.synchronize()
        times = taps[-1].times_us()
        del results  # in the graph's memory
        if self._capture:
            graph.reset()
        marked = max(end for _, end in times.values()) - min(start for start, _ in times.values())
        launched = "kernels launched one by one, behind a head start"
        how = "the captured CUDA graph, replayed" if self._capture else launched
        clock = f"GPU events around each step of {how}; {marked:.1f} µs with them, {plain * 1e6:.1f} µs without"
        return timeline(self.program, self.stream_program, times, clock)

    def facts(self) -> Mapping[str, Any]:
        """Facts about the plan and its memory, and what the cache of rows has found by now."""
        return {**super().facts(), **self._tables.facts(self.program.constants.values())}

    def save_state(self) -> dict[str, NDArray[Any]]:
        """The values of variables."""
        synchronize(self.device.place)
        return self.state.save()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Gives variables other values."""
        self.state.load(state)
        synchronize(self.device.place)

    def close(self) -> None:
        """Frees graphs and memory and gives the streams back."""
        if self._streams:
            self._synchronize()
            self._free_graphs()
            for memory in self._memories:
                memory.give_back()
            if self._prefetch is not None:
                self._prefetch.close()
                self._prefetch = None
            if not self._lent:
                give_back(self._streams)
            self._streams = []
            self.state.close()

    def _free_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._results.clear()
        self.device.semaphores.give_back(self._counters)
        self._counters = []


def uncapturable(program: Program, step: int, problem: RuntimeError) -> EngineError:
    """Error for a step that failed in a capture, and had run before it."""
    op = program.steps[step].op
    return EngineError(
        f"{op.name} ({op.op}) can not be captured: {str(problem).splitlines()[0]}",
        fix="run launch by launch (--cuda capture=no; in Python capture=False), or cut it off with --part inputs= and outputs=",
    )
