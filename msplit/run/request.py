"""Options of what runs a model: keywords of `prepare`, `compile`, `build`, `pool`, `bench` and `Trainer`, and the request made of them."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

from msplit.core.arguments import MAX_STREAMS, Precision, declared, listed, number, path, spelled, whole
from msplit.cost.profile import Profile, Workload
from msplit.engines.base import ClusterOptions, TensorFlowOptions
from msplit.engines.cuda.options import EngineOptions, KernelMode, Shards, SharedRows
from msplit.engines.table_rows import TableOptions
from msplit.engines.tensorflow.cluster import Function
from msplit.errors import MsplitError
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


_ONE_BATCH = "several batches are measured one after the other, and it is for one"
_ONE_LENGTH = "lengths are prepared one by one, on one GPU"
_OF_ONE_LENGTH = "reference plan tune variant state improve devices split cluster shared"

EXCLUSIONS: tuple[tuple[tuple[str, Any], tuple[str, Any], str], ...] = (
    (("tune", None), ("effort", "fast"), "to tune is to measure"),
    (("tune", None), ("capture", False), "what is tuned are CUDA graphs"),
    (("tune", None), ("plan", None), "one finds a plan, and the other gives one"),
    (("cluster", None), ("engine", "cuda"), "a cluster runs TensorFlow"),
    (("cluster", None), ("timelines", None), "a step over a cluster is not traced"),
    (("place", None), ("streams", None), "both say where nodes go"),
    (("improve", None), ("variant", None), "it chooses what runs"),
    (
        ("improve", None),
        ("capture", False),
        "to launch step by step shares settings of PyTorch with what is being prepared",
    ),
    (("shared", None), ("engine", "tensorflow"), "TensorFlow computes all rows"),
    *((("shared", None), (name, None), "one GPU computes the rows") for name in ("devices", "split", "cluster")),
    (("table_memory", None), ("engine", "tensorflow"), "TensorFlow has its tables where it puts them"),
    *(
        (("table_memory", None), (name, None), "one GPU reads them")
        for name in ("devices", "split", "cluster", "world", "gpus", "hosts")
    ),
    *((("lengths", None), (name, None), _ONE_LENGTH) for name in _OF_ONE_LENGTH.split()),
    (("lengths", None), ("engine", "tensorflow"), "TensorFlow takes rows of any length"),
    (("resume", None), ("restore", None), "one goes on from a checkpoint, and the other begins with one"),
    (("batches", None), ("reference", None), "a reference is for one batch"),
    *(
        (("batches_in_turn", None), (name, None), _ONE_BATCH)
        for name in ("tune", "plan", "timelines", "reference", "save_reference", "log_placement")
    ),
)
"""Two options, each with the value that is meant (None: any but its default), and why they exclude each other."""


def refuse_exclusions(given: Mapping[str, Any]) -> None:
    """Refuses options that exclude each other.

    Args:
        given: Options that have another value than their default.

    Raises:
        MsplitError: Two of them do.
    """
    for one, other, why in EXCLUSIONS:
        if all(name in given and (value is None or given[name] == value) for name, value in (one, other)):
            first, second = (spelled(name, value) for name, value in (one, other))
            raise MsplitError(f"{first} excludes {second}: {why}", fix="leave one of the two out")


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
    table_memory: float | str | None


class RunOptions(StepOptions, total=False):
    """Keywords of `prepare` and `pool`: also what sizes the inputs. See `RunRequest`."""

    batch: int | None
    shapes: Mapping[str, tuple[int, ...]]
    shared: Sequence[str]
    users: int


class BuildOptions(RunOptions, total=False):
    """Keywords of `build`: also the search for the fastest plan. See `RunRequest`."""

    tune: TuneSettings | None


class BenchOptions(BuildOptions, total=False):
    """Keywords of `bench`: also what is compared and kept. See `RunRequest` and `setup.Comparison`."""

    compare_tensorflow: bool
    compare_xla: bool
    save_reference: Where | None
    force: bool
    timelines: bool
    log_placement: bool
    command: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What runs, and how.

    Attributes:
        workload: What sizes and prices the model. Shapes that are not given are its profile's.
        streams: The largest number of streams; of a bench several to compare, and 1 is always measured too.
        ruleset: Rules for a graph without ids (or in place of its ids); None: its own ids, else the rule set ``auto``.
        engine: ``cuda`` or ``tensorflow``; None: ``cuda`` where it can run, else ``tensorflow``.
        seed: Seed of made-up inputs.
        precision: What float32 is computed in, on every engine: ``ieee``, ``tf32``, ``bf16`` or ``fp16``; see `Precision`.
        capture: Capture the step as one CUDA graph; otherwise it is launched kernel by kernel.
        layout: Memory layout of convolutions: ``auto`` measures.
        effort: ``full``, or ``fast`` to be ready in seconds: no kernel is timed and none is compiled of fused ops, so that libraries run
            what they can, and outputs are held against the same ops without any rewrite and against one stream, unless there is a
            `reference`. Cuda engine only.
        fuse: Whether groups of pointwise ops may be one kernel each, on the cuda engine.
        group: Whether alike branches may run as one batch, on top of that.
        device: ``cuda``, or ``cpu`` to simulate the streams of the cuda engine.
        devices: Numbers of the GPUs to use, as CUDA counts those that it sees; none: the current one. Of several, each runs a share of the
            rows of every step that is prepared (rows have to be independent), and each runs whole steps of a pool. A bench measures the
            first one alone, too. Cuda engine only.
        split: Numbers of the GPUs that the streams of one step are divided over, evenly and in order, as the rule ``device`` assigns them;
            empty: one GPU. Such a step is one CUDA graph, too. Cuda engine only.
        shared: Inputs that have the same row throughout a step, such as those of one user beside many items: names, or patterns as in
            ``user_*``. What depends on them alone is computed once. A step is given one row of each, or equal ones. Cuda engine only.
        users: Most users of a step: what is shared has the same row in all rows of a user, and is computed once for each. Shared inputs
            are given one row, or all rows.
        table_memory: GB of the GPU for lookup tables, of which the larger ones stay in the host's memory: the GPU keeps the rows that are
            read most, and reads others over the bus. ``"4,rows=int8"``: 4 GB, and rows of float32 that leave the GPU are int8 with a
            scale each (``rows=bf16``: bf16). Rows that are trained are read and written over the bus, in tables and in slots of
            optimizers. None: all are on the GPU that fit. Cuda engine only.
        reference: A file made by `save_reference`, to verify against instead of TensorFlow on the CPU. Where neither a batch nor shapes
            are given, they are the file's.
        op_libraries: Shared objects with custom TensorFlow ops.
        cluster: Processes that run it, in place of this one; TensorFlow only. Each stream is a device of theirs.
        settings: How to verify and measure.
        tune: Search for the fastest plan first, for up to the largest number of `streams`; cuda engine only.
        plan: A plan file to run, too: one that `save_plan` wrote runs in its own order; cuda engine only.
        shards: Of a graph that trains on several GPUs: what this process is fed of the batch; see `msplit.Trainer`.
        place: A function that gives each node its device, in place of streams: ``module:function``, a file that
            ``assign --emit placement`` wrote, or the function (see
            `engines.tensorflow.cluster`). TensorFlow runs it.
        tensorflow: How TensorFlow runs the model. Each of NVIDIA's switches in it is a row of its own of a bench, and of nothing else.
    """

    workload: Workload = field(default_factory=Workload)
    streams: Sequence[int] = (1, 2, 4)
    ruleset: str | None = None
    engine: str | None = None
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
    shared: Sequence[str] | SharedRows = ()
    users: int = 1
    table_memory: float | str | None = None
    reference: Path | None = None
    op_libraries: Sequence[Path] = ()
    cluster: ClusterOptions | None = None
    settings: Settings = field(default_factory=Settings)
    tune: TuneSettings | None = None
    plan: Path | None = None
    shards: Shards | None = None
    place: str | Function | None = None
    tensorflow: TensorFlowOptions = field(default_factory=TensorFlowOptions)

    @classmethod
    def of(cls, **keywords: Any) -> RunRequest:
        """The request of keywords as the library's functions have them: those of the workload stand among the others."""
        work = {one.name: keywords.pop(one.name) for one in fields(Workload) if one.name in keywords}
        return cls(workload=Workload(**work), **keywords)

    def sized(self, **changes: Any) -> RunRequest:
        """A copy with another workload: `changes` are attributes of that."""
        return replace(self, workload=replace(self.workload, **changes))

    def __post_init__(self) -> None:
        for name in ("plan", "reference"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, path(getattr(self, name)))
        for name in ("streams", "devices", "split"):
            object.__setattr__(self, name, listed(name, getattr(self, name)))
        if not isinstance(self.shared, SharedRows):
            object.__setattr__(self, "shared", listed("shared", self.shared))
        whole("the number of users", self.users)
        for streams in self.streams:
            whole("the number of streams", streams, 1, MAX_STREAMS)
        if self.workload.batch is not None:
            whole("the batch", self.workload.batch)
        if self.table_memory is not None:
            TableOptions.read(self.table_memory)
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
        return given_of(self)

    @property
    def places(self) -> tuple[str, ...]:
        """The devices as the cuda engine calls them; one at least."""
        return tuple(f"{self.device}:{number}" for number in self.devices) or (self.device,)

    @property
    def sharing(self) -> tuple[str, ...]:
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
    def options(self) -> EngineOptions:
        """What the cuda engine is told, larger kernels left out."""
        return EngineOptions(
            device=self.places[0],
            layout=self.layout,
            capture=self.capture,
            measure=not self.is_fast,
            shards=self.shards,
            shared=self.shared if isinstance(self.shared, SharedRows) else None,
            table_memory=None if self.table_memory is None else TableOptions.read(self.table_memory),
        )


def given_of(options: Any) -> dict[str, Any]:
    """Options of `EXCLUSIONS`, fields of a dataclass, that have another value than their default."""
    excluding = {name for one, other, _ in EXCLUSIONS for name, _ in (one, other)}
    own = [field for field in fields(options) if field.name in excluding]
    return {field.name: value for field in own if (value := getattr(options, field.name)) != field.default}


def request_of(function: Callable[..., Any], kind: type, options: Mapping[str, Any], /, **defaults: Any) -> RunRequest:
    """The request that the keywords of a function make; see `keywords_of`."""
    return RunRequest.of(**keywords_of(function, kind, options, **defaults))


def keywords_of(
    function: Callable[..., Any], kind: type, options: Mapping[str, Any], /, **defaults: Any
) -> dict[str, Any]:
    """The keywords of a function, checked.

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
        declared(name, options[name], known[name].__forward_arg__)
    found = {**defaults, **options}
    if isinstance(found.get("streams"), Integral):
        found["streams"] = (found["streams"],)
    return found
