"""Options of what runs a model: the keywords of `prepare`, `compile`, `build`, `pool`, `bench`, `Trainer`, and the request made of them."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

from msplit.core.arguments import MAX_STREAMS, Precision, listed, number, path, whole
from msplit.cost.gpus import DEFAULT_GPU
from msplit.cost.profile import Profile, Workload
from msplit.engines.base import ClusterOptions, TensorFlowOptions
from msplit.engines.cuda.options import KernelMode, Shards
from msplit.engines.tensorflow.devices import Function
from msplit.errors import MsplitError
from msplit.run.exclusions import EXCLUSIONS, refuse_exclusions
from msplit.verify.results import Settings

FULL, FAST = "full", "fast"
EFFORTS = (FULL, FAST)
"""Values of `RunRequest.effort`."""


Where = str | os.PathLike[str]
"""A path, as callers may give it."""


@dataclass(frozen=True)
class TuneSettings:
    """How to search.

    Attributes:
        seconds: Time for the search; building and the confirmation take a little more.
        max_memory: Plans that need more than so many times the memory of one stream are not taken. What is too small to matter is free.
        kernels: Which kernels are tried, names of `KernelMode`. Those that change nothing cost nothing.
        seed: Of what is drawn.
        max_error: In half precision, the largest error that an output may have; ops that do too much harm stay in float32. See
            `mixed_precision`. None: all ops that half precision is for are in it.
    """

    seconds: float = 20.0
    max_memory: float = 1.5
    kernels: Sequence[str] = tuple(KernelMode)
    seed: int = 0
    max_error: float | None = None

    def __post_init__(self) -> None:
        number("seconds", self.seconds)
        number("max_memory", self.max_memory, above=True)
        whole("the seed", self.seed, 0)
        if self.max_error is not None:
            number("the largest error", self.max_error, above=True)


class StepOptions(TypedDict, total=False):
    """Keywords of everything that runs a model; `Trainer` and `compile` take no others, since calls say the shapes. See `RunRequest`."""

    streams: int | Sequence[int]
    ruleset: str | None
    engine: str | None
    inputs: Mapping[str, Path]
    gpu: str | None
    profile: Profile | None
    seed: int
    precision: str
    capture: bool
    layout: str
    effort: str
    fuse: bool
    group: bool
    device: str
    devices: Sequence[int]
    split: Sequence[int]
    reference: Where | None
    op_libraries: Sequence[Path]
    cluster: ClusterOptions | None
    settings: Settings
    plan: Where | None
    place: str | Function | None
    tensorflow: TensorFlowOptions


class RunOptions(StepOptions, total=False):
    """Keywords of `prepare` and `pool`: also what sizes the inputs. See `RunRequest`."""

    batch: int | None
    shapes: Mapping[str, tuple[int, ...]]


class BuildOptions(RunOptions, total=False):
    """Keywords of `build`: also the search for the fastest plan. See `RunRequest`."""

    tune: TuneSettings | None


class BenchOptions(BuildOptions, total=False):
    """Keywords of `bench`: also what is compared and kept. See `RunRequest`."""

    compare_tensorflow: bool
    compare_xla: bool
    save_reference: Where | None
    force: bool
    timelines: bool
    log_placement: bool
    command: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A model's workload, how it is run, and what `bench` compares.

    Attributes:
        streams: The largest number of streams; of a bench several to compare, and 1 is always measured too.
        ruleset: Rules for a graph without ids (or in place of its ids); None: its own ids, else the rule set ``auto``.
        engine: ``cuda`` or ``tensorflow``; None: ``cuda`` where it can run, else ``tensorflow``.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        inputs: Files by input name, and under "" one that names its inputs itself: .npy, .npz, TFRecord or JSON.
        gpu: Data sheet that prices the nodes; None: the default.
        profile: What was measured on this graph, in place of the data sheet. Shapes that are not given are the profile's.
        seed: Of made-up inputs.
        precision: What float32 is computed in, on every engine: ``ieee``, ``tf32``, ``bf16`` or ``fp16``; see `Precision`.
        capture: Capture the step as one CUDA graph; otherwise it is launched kernel by kernel.
        layout: Memory layout of convolutions: ``auto`` measures.
        effort: ``full``, or ``fast`` to be ready in seconds: no kernel is timed and none is compiled of fused ops, so that libraries run
            what they can, and outputs are held against the same ops without any rewrite and against one stream, unless there is a
            `reference`. Cuda engine only.
        fuse: Whether to show, on the cuda engine, what one kernel for each group of pointwise ops adds.
        group: Whether to show what batching alike branches adds to that.
        device: ``cuda``, or ``cpu`` to simulate the streams of the cuda engine.
        devices: Numbers of the GPUs to use, as CUDA counts those that it sees; none: the current one. Of several, each runs a share of the
            rows of every step that is prepared (rows have to be independent), and each runs whole steps of a pool. A bench measures the
            first one alone, too. Cuda engine only.
        split: Numbers of the GPUs that the streams of one step are divided over, evenly and in order, as the rule ``device`` assigns them;
            empty: one GPU. Such a step is not captured, whatever `capture` says: it is launched kernel by kernel. Cuda engine only.
        compare_tensorflow: Measure TensorFlow beside the cuda engine, where it sees the GPU, and ONNX Runtime, where it and tf2onnx are
            installed.
        compare_xla: And with XLA, which compiles for seconds to minutes.
        reference: A file made by `save_reference`, to verify against instead of TensorFlow on the CPU. Where neither a batch nor shapes
            are given, they are the file's.
        save_reference: Where to save inputs and reference outputs.
        force: Whether that may replace what is there.
        op_libraries: Shared objects with custom TensorFlow ops.
        cluster: Processes that run it, in place of this one; TensorFlow only. Each stream is a device of theirs.
        settings: How to measure.
        tune: Search for the fastest plan first, for up to the largest number of `streams`; cuda engine only.
        plan: A plan file to run, too: one that `save_plan` wrote runs in its own order; cuda engine only.
        shards: Of a graph that trains on several GPUs: what this process is fed of the batch; see `msplit.Trainer`.
        timelines: Also time the parts of one step of every variant.
        place: A function that gives each node its device, in place of streams: ``module:function``, a file that
            ``assign --emit placement`` wrote, or the function (see
            `engines.tensorflow.devices`). TensorFlow runs it.
        log_placement: Also ask where TensorFlow put each node.
        tensorflow: How TensorFlow runs the model. Each of NVIDIA's switches in it is a row of its own of a bench, and of nothing else.
        command: The command line, for the record.
    """

    streams: Sequence[int] = (1, 2, 4)
    ruleset: str | None = None
    engine: str | None = None
    batch: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Path] = field(default_factory=dict)
    gpu: str | None = None
    profile: Profile | None = None
    seed: int = 0
    precision: str = "tf32"
    capture: bool = True
    layout: str = "auto"
    effort: str = FULL
    fuse: bool = True
    group: bool = True
    device: str = "cuda"
    devices: Sequence[int] = ()
    split: Sequence[int] = ()
    compare_tensorflow: bool = True
    compare_xla: bool = True
    reference: Path | None = None
    save_reference: Path | None = None
    force: bool = False
    op_libraries: Sequence[Path] = ()
    cluster: ClusterOptions | None = None
    settings: Settings = field(default_factory=Settings)
    tune: TuneSettings | None = None
    plan: Path | None = None
    shards: Shards | None = None
    timelines: bool = False
    place: str | Function | None = None
    log_placement: bool = False
    tensorflow: TensorFlowOptions = field(default_factory=TensorFlowOptions)
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("plan", "reference", "save_reference"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, path(getattr(self, name)))
        for name in ("streams", "devices", "split"):
            object.__setattr__(self, name, listed(name, getattr(self, name)))
        for streams in self.streams:
            whole("the number of streams", streams, 1, MAX_STREAMS)
        if self.batch is not None:
            whole("the batch", self.batch)
        whole("the seed", self.seed, 0)
        Precision.read(self.precision)
        for index in self.devices:
            whole("the number of a GPU", index, 0)
        given = [whole("the number of a GPU", index, -1) for index in self.split]
        if len(set(self.devices)) < len(self.devices):
            raise MsplitError(f"GPUs are {list(self.devices)}", fix="name each once")
        if self.effort not in EFFORTS:
            raise MsplitError(f"there is no effort {self.effort!r}", fix=f"one of: {', '.join(EFFORTS)}")
        if len(set(given)) != len(given) or -1 in given or len(given) == 1:
            raise MsplitError(
                f"a step can not be split over the GPUs {', '.join(map(str, self.split))}",
                fix="name two GPUs or more, each once, such as 0,1",
            )
        if self.tune is not None and not hasattr(self.tune, "max_error"):
            raise MsplitError(f"tune is a {type(self.tune).__name__}", fix="give TuneSettings")
        if self.tune is not None and self.tune.max_error is not None and not Precision(self.precision).half:
            raise MsplitError(
                f"a largest error is given, and nothing is in half precision: it is {self.precision}",
                fix="give the precision bf16 or fp16, or no largest error",
            )
        refuse_exclusions(self.given)

    @property
    def given(self) -> dict[str, Any]:
        """Options of `EXCLUSIONS` that have another value than their default."""
        excluding = {name for one, other, _ in EXCLUSIONS for name, _ in (one, other)}
        own = [field for field in fields(self) if field.name in excluding]
        return {field.name: value for field in own if (value := getattr(self, field.name)) != field.default}

    @property
    def places(self) -> tuple[str, ...]:
        """The devices as the cuda engine calls them; one at least."""
        return tuple(f"{self.device}:{number}" for number in self.devices) or (self.device,)

    @property
    def shared(self) -> tuple[str, ...]:
        """Likewise those that share the rows of a step; none where there is one."""
        return self.places if len(self.places) > 1 else ()

    @property
    def is_fast(self) -> bool:
        """Whether nothing is timed or compiled before it runs."""
        return self.effort == FAST

    @property
    def fuses(self) -> bool:
        """Whether groups of pointwise ops may become kernels, which are compiled."""
        return self.fuse and not self.is_fast

    @property
    def workload(self) -> Workload:
        """What the model is run with."""
        return Workload(self.batch, self.shapes, self.inputs, self.gpu or DEFAULT_GPU, self.profile)


def request_of(function: Callable[..., Any], kind: type, options: Mapping[str, Any], /, **defaults: Any) -> RunRequest:
    """The request that the keywords of a function make.

    Args:
        function: A function of the library, or a class.
        kind: The TypedDict of its further keywords.
        options: Those that it was given.
        defaults: Values of others, and of those that it was not given.

    Raises:
        MsplitError: There is no such keyword; the message names the nearest one.
    """
    known = kind.__annotations__
    for name in options:
        if name not in known:
            own = [one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
            near = difflib.get_close_matches(name, [*known, *own], 1, cutoff=0.5)
            fix = f"did you mean {near[0]}?" if near else f"it has: {', '.join([*own, *known])}"
            if name in BenchOptions.__annotations__:
                others = {"prepare": RunOptions, "build": BuildOptions, "bench": BenchOptions}
                fix = (
                    f"{next(one for one, kind in others.items() if name in kind.__annotations__)} has it: leave it out"
                )
            raise MsplitError(f"msplit.{function.__name__} has no keyword {name!r}", fix=fix)
    found = {**defaults, **options}
    if isinstance(found.get("streams"), Integral):
        found["streams"] = (found["streams"],)
    return RunRequest(**found)
