"""Options that several commands share, and how their results go out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from msplit.cli import output
from msplit.cli.keys import FILE, SEED, Keys, Parameter, given, key, option

if TYPE_CHECKING:
    from msplit.flatten.flat import FlatGraph
    from msplit.report.document import Document
    from msplit.run.request import TuneSettings


class Parsed(Parameter):
    """An option whose text a function reads. What is no text, such as a default, stays as it is.

    Args:
        name: Name of its values in help.
        read: Raises ValueError with what is wrong with the text.
    """

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reads a text."""
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError as problem:
            self.fail(str(problem), param, ctx)


NAMES = Parsed("a,b,…", lambda text: tuple(part.strip() for part in text.split(",") if part.strip()))
"""A comma-separated list, without empty items."""


def numbers(each: click.IntRange) -> Parsed:
    """A comma-separated list of whole numbers, and what each of them may be."""

    def read(text: str) -> tuple[int, ...]:
        try:
            found = [int(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(f"{text!r} is not a list of numbers such as 1,2,4") from None
        return tuple(each.convert(number, None, None) for number in found)

    return Parsed("n,n,…", read)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Name and sizes of `name=1,224,224,3`."""
    name, equals, sizes = text.partition("=")
    try:
        shape = tuple(int(part) for part in sizes.replace("x", ",").split(",") if part.strip() != "")
    except ValueError:
        raise ValueError(f"{text!r}: sizes are numbers, as in input=1,224,224,3") from None
    if not equals or not name or any(size < 0 for size in shape):
        raise ValueError(f"{text!r}: write it as name=1,224,224,3")
    return name, shape


GPUS = ("h200", "h100", "a100", "l4", "t4")
"""What `msplit.cost.gpu_names` lists, here without reading the data sheets."""


class GpuName(Parameter):
    """A data sheet that comes with msplit, or a file of the user's own."""

    name = "NAME|FILE"
    choices = GPUS


PATH = FILE

STREAMS = click.IntRange(1, 1024)
"""A number of streams."""


def _suggested(names: Callable[[], Sequence[str]], *, files: bool = False) -> Callable[..., list[CompletionItem]]:
    """Completion by names, and by files where no name fits and `files` says that there may be one."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        found = [CompletionItem(f"{before}{comma}{name}") for name in names() if name.startswith(last)]
        return found or ([CompletionItem(incomplete, type="file")] if files else [])

    return complete


def _rule_sets() -> Sequence[str]:
    from msplit import rules

    return rules.available()


def _samples() -> Sequence[str]:
    from msplit import samples

    return samples.names()


def _codes() -> Sequence[str]:
    from msplit.checks.run import CHECKS

    return tuple(CHECKS)


complete_rules = _suggested(_rule_sets, files=True)
complete_rule_set = _suggested(_rule_sets)
complete_sample = _suggested(_samples)
complete_codes = _suggested(_codes)
complete_code = _suggested(lambda: (*_codes(), "all"))


TAG = "Tags of the SavedModel's graph, where it has several; tag= is the one without."
SHIPPED = f"GPU whose data sheet prices the nodes: {', '.join(GPUS)}, or a YAML file of your own"


@dataclass(frozen=True)
class GraphChoice:
    """Which graph of a file is meant, and which signature of it."""

    signature: str | None = key("--part", "Signature of the SavedModel (none: serving_default, or the only one).")
    tags: Sequence[str] | None = key("--part", TAG, NAMES, name="tag")

    def load(self, model: Path, function: str | None = None, *, record: bool = True) -> FlatGraph:
        """Reads and flattens a model, or one function of it."""
        from msplit.assignment.model import load

        flat = load(
            model,
            tags=self.tags,
            signature=self.signature,
            inputs=vars(self).get("inputs") or None,
            outputs=vars(self).get("outputs") or None,
            function=function,
            record=record,
        )
        if was_given(SEED) and any(one.name == SEED for one in flat.inputs):
            note("--input seed=N is the number that made-up inputs come from; a file called N is given as seed=./N")
        return flat


@dataclass(frozen=True)
class Choice(GraphChoice):
    """The choices that a model's file may leave open."""

    inputs: Sequence[str] | None = key("--part", "Tensors to feed instead of the model's inputs.", NAMES)
    outputs: Sequence[str] | None = key("--part", "Tensors to fetch instead of the model's outputs.", NAMES)

    def further(self) -> dict[str, Any]:
        """For `command_line`."""
        signature = None if self.signature is None else (self.signature,)
        keys = {"signature": signature, "inputs": self.inputs or None, "outputs": self.outputs or None}
        return {"--part": pairs(tag=self.tags, **keys)}  # no tags at all are a choice, too


@dataclass(frozen=True, kw_only=True)
class InputShapes:
    """Sizes of inputs, the leading one left out."""

    shapes: Sequence[tuple[str, tuple[int, ...]]] = option(
        "--shape",
        type=Parsed("name=d,d,…", _shape),
        multiple=True,
        help="Shape of an input: name=1,224,224,3. Repeatable.",
    )


@dataclass(frozen=True, kw_only=True)
class InputSizes(InputShapes):
    """Sizes of inputs."""

    batch: int | None = option(type=click.IntRange(1), help="Size of unknown leading dimensions (default: 1).")


@dataclass(frozen=True, kw_only=True)
class Work(InputSizes):
    """What sizes a model and prices its nodes by itself."""

    gpu: str | None = key("--costs", f"{SHIPPED}.", GpuName(), "h200")
    profile_path: Path | None = key(
        "--costs", "Costs that `msplit profile` measured, in place of the data sheet's.", name="profile"
    )

    def arguments(self) -> dict[str, Any]:
        """For the functions of `api`, with the profile read."""
        from msplit.cost import profile as profile_file

        profile = None if self.profile_path is None else profile_file.load(self.profile_path)
        return {"batch": self.batch, "shapes": dict(self.shapes), "gpu": self.gpu, "profile": profile}


@dataclass(frozen=True, kw_only=True)
class RecordedWork(Work):
    """Likewise, where a record with the model says what is not given."""

    gpu: str | None = key("--costs", f"{SHIPPED} (none: h200).", GpuName())
    record: bool = key("--costs", "no: do not go by what `msplit assign` has recorded with the model.", default=True)


@dataclass(frozen=True, kw_only=True)
class Batches(RecordedWork):
    """Likewise, once or for several batches."""

    batch: int | None = None
    batches: tuple[int, ...] | None = option(
        "--batch",
        type=numbers(click.IntRange(1)),
        help="Size of unknown leading dimensions (default: 1), or several, such as 1,8,32; build: they share weights and memory; "
        "bench: they are measured one after the other.",
    )

    def arguments(self) -> dict[str, Any]:
        """For the functions of the library, of the first batch."""
        return {**super().arguments(), "batch": self.batches[0] if self.batches else None}

    @property
    def several(self) -> tuple[int, ...]:
        """The batches, where there is more than one."""
        return self.batches if self.batches and len(self.batches) > 1 else ()


@dataclass(frozen=True)
class Rules:
    """Rules, and the number of streams in place of what they say."""

    ruleset: str | None = option(
        "--rules",
        shell_complete=complete_rules,
        help="Rules file or rule set that gives the ids (default: the model's own ids; for a model without any, what fits it).",
    )
    streams: int | None = option(type=STREAMS, help="Number of streams of the rules, instead of what they say.")


@dataclass(frozen=True)
class ExecutionOptions:
    """How a model is executed."""

    given: Sequence[str] = key(
        "--input",
        "File of an input; without a name, of those that the file names.",
        click.Path(),
        name="NAME",
        several=True,
    )
    seed: int = key(
        "--input",
        "Number that made-up inputs come from; train: and the order that --shuffle gives.",
        default=0,
        name=SEED,
    )
    precision: str = option(
        type=click.Choice(["tf32", "ieee", "bf16", "fp16"]),
        default="tf32",
        help="What float32 is computed in, on every engine: bf16 and fp16 where that gains, as TensorFlow's mixed precision.",
    )
    layout: str = key("--cuda", "Memory layout of convolutions.", click.Choice(["auto", "nhwc", "nchw"]), "auto")
    op_libraries: Sequence[Path] = key(
        "--tensorflow",
        "A file with custom TensorFlow ops; may be given several times.",
        name="op-library",
        several=True,
    )

    def arguments(self) -> dict[str, Any]:
        """For what asks to run a model."""
        return {
            "inputs": input_files(self.given),
            "seed": self.seed,
            "precision": self.precision,
            "layout": self.layout,
            "op_libraries": tuple(self.op_libraries),
        }


@dataclass(frozen=True)
class Verified(ExecutionOptions):
    """Likewise, with what streams come from, and what outputs are held against."""

    ruleset: str | None = option(
        "--rules",
        shell_complete=complete_rules,
        help="Rules for a graph without ids (default: auto), or in place of its ids.",
    )
    reference: Path | None = option(help="Verify against this .npz instead of TensorFlow on the CPU.")

    def arguments(self) -> dict[str, Any]:
        """For what asks to run a model."""
        return {**super().arguments(), "ruleset": self.ruleset, "reference": self.reference}


@dataclass(frozen=True)
class Kernels(Verified):
    """Likewise, with what kernels are made by."""

    effort: str = key(
        "--cuda",
        "fast times no kernel and compiles none, to be ready in seconds.",
        click.Choice(["full", "fast"]),
        "full",
    )
    capture: bool = key("--cuda", "no: launch kernel by kernel instead of one CUDA graph.", default=True)
    fuse: bool = key("--cuda", "no: do not show what one kernel per group of pointwise ops adds.", default=True)
    group: bool = key("--cuda", "no: do not show what batching alike branches adds.", default=True)

    def arguments(self) -> dict[str, Any]:
        """For what asks to run a model."""
        own = {name: getattr(self, name) for name in ("effort", "capture", "fuse", "group")}
        return {**super().arguments(), **own}


@dataclass(frozen=True)
class Backend:
    """What runs it."""

    engine: str | None = option(
        type=click.Choice(["cuda", "tensorflow"]), help="What runs it (default: cuda where it can, else tensorflow)."
    )


@dataclass(frozen=True)
class OnDevice:
    """Where it runs."""

    device: str = option(
        type=click.Choice(["cuda", "cpu"]),
        default="cuda",
        help="cpu: streams are simulated on the CPU, to try a model without a GPU.",
    )


@dataclass(frozen=True)
class Devices:
    """Where several GPUs are used."""

    devices: tuple[int, ...] = option(
        "--gpus",
        type=numbers(click.IntRange(0)),
        default=(),
        help="cuda: numbers of the GPUs to use, such as 0,1. bench: they share the rows of a step; load, serve: a process for each.",
    )


@dataclass(frozen=True)
class SharedInputs:
    """Inputs that have one row for each user of a step."""

    shared: tuple[str, ...] = option(
        multiple=True,
        metavar="PATTERN",
        help="cuda: inputs with the same row throughout a step, such as 'user_*': what depends on them alone is computed once. Repeatable.",
    )
    users: int = option(
        type=click.IntRange(1),
        default=1,
        help="Most users of a step: inputs of --shared have one row for each of them.",
    )


@dataclass(frozen=True)
class TableMemory:
    """Tables that do not fit on the GPU."""

    table_memory: str | None = option(
        metavar="GB[,rows=int8|bf16]",
        help="cuda: memory of the GPU for lookup tables; larger ones stay in the host's, beside a cache of rows that are read often. "
        "rows=: their rows of float32 are int8 with a scale, or bf16, and the error is told.",
    )


SECONDS: dict[str, Any] = {
    "default": 20.0,
    "show_default": True,
    "type": click.FloatRange(0),
    "help": "Seconds that the search may take.",
}


@dataclass(frozen=True)
class Search:
    """The search for a plan, and for what stays in float32."""

    tune_seconds: float = option("--seconds", **SECONDS)
    max_memory: float = option(
        default=1.5,
        type=click.FloatRange(1),
        metavar="RATIO",
        help="Take no plan that needs more than so many times the memory of one stream.",
    )
    max_error: float | None = option(
        type=click.FloatRange(0, min_open=True),
        metavar="ERROR",
        help="Leave ops in float32 until half precision keeps every output within this relative error.",
    )

    def settings(self, run: ExecutionOptions) -> TuneSettings:
        """For what asks for it."""
        from msplit.run.request import TuneSettings

        if self.max_error is not None and run.precision in ("tf32", "ieee"):
            raise click.UsageError("--max-error is for half precision: give --precision bf16 or fp16.")
        return TuneSettings(self.tune_seconds, self.max_memory, seed=run.seed, max_error=self.max_error)


model_argument = click.argument("model", type=PATH)


def format_of(further: str = "", about: str = "") -> Callable[..., Any]:
    """The option --format, with a further format and what it is about."""
    kinds, said = ["table", "json", "md", *([further] if further else [])], f"How to print the result.{about}"
    return click.option("--format", "style", type=click.Choice(kinds), default="table", show_default=True, help=said)


format_option = format_of()


def input_files(texts: Sequence[str]) -> dict[str, Path]:
    """The files of --input by name; "" is the name of one that names its inputs itself."""
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).is_file():
            name, path = "", text
        if not path or (equals and not name and path != text):
            raise click.BadParameter(f"{text!r}: write it as name=FILE, or FILE alone", param_hint="'--input'")
        if name in found:
            said = f"input {name!r} is given twice" if name else "two files without a name"
            raise click.BadParameter(f"{said}: {found[name]} and {path}", param_hint="'--input'")
        found[name] = Path(path)
    return found


def pairs(**keys: Sequence[Any] | None) -> tuple[tuple[str, Sequence[Any]], ...]:
    """Keys of an option and their values for `command_line`; those without one are left out."""
    return tuple((key, values) for key, values in keys.items() if values is not None)


def command_line(command: str, model: Path, further: Mapping[str, Any]) -> tuple[str, ...]:
    """A command on the same model, as it is typed in a shell, in parts that belong on one line.

    Args:
        command: Its name.
        model: What it is about.
        further: Option -> its value; a list or a tuple of pairs is an option for each, other tuples are lists. Empty ones are left out.
    """
    import shlex

    parts = [shlex.join(["msplit", command, str(model)])]
    for name, value in further.items():
        if value in (None, (), []):
            continue
        pairs = isinstance(value, tuple) and isinstance(value[0], tuple)
        for one in value if pairs or isinstance(value, list) else (value,):
            if pairs:
                one = f"{one[0]}={','.join(str(size) for size in one[1])}"
            parts.append(shlex.join([name, ",".join(one) if isinstance(one, tuple) else str(one)]))
    return tuple(parts)


_ELSEWHERE = {"timelines": "trace", "batches_in_turn": "batches"}
"""Keywords of the library -> parameters of commands that are called otherwise."""


def option_of(name: str, value: Any) -> str:
    """A keyword of the library, and its value where it is not None, as the current command has it; itself where that has none."""
    name = _ELSEWHERE.get(name, name)
    shown = "" if value is None else {True: "yes", False: "no"}.get(value, value)
    context = click.get_current_context(silent=True)
    for one in () if context is None else context.command.params:
        keys = one.type if isinstance(one.type, Keys) else Keys(())
        if key := next((key for key in keys.keys.values() if key.field == name), None):
            before = "" if key.name == keys.bare else f"{key.name}="
            return f"{one.opts[0]} {before}{shown}".rstrip()
        if one.name == name and isinstance(one, click.Option):
            return one.opts[-1] if value is None else f"{one.opts[-1]} {shown}"
    return f"msplit {context.info_name}" if context is not None and context.info_name == name else name


def was_given(name: str) -> bool:
    """Whether the command was given this parameter, as an option or as a key, which otherwise has its default."""
    context = click.get_current_context()
    return name in given(context) or context.get_parameter_source(name) not in (
        None,
        click.core.ParameterSource.DEFAULT,
    )


def is_set(option: str) -> bool:
    """Whether `quiet`, `verbose` or `debug` was asked for, before the command or behind it."""
    return bool((click.get_current_context().find_root().obj or {}).get(option))


def note(text: str) -> None:
    """Says something on stderr that is no result, unless --quiet."""
    output.clear()
    if not is_set("quiet"):
        output.tell(text)


def folded(text: str, indent: str = "") -> str:
    """A paragraph in lines as wide as the terminal. Words, such as options and names, stay whole."""
    import textwrap

    return textwrap.fill(
        text, output.console().width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def show(style: str, command: str, document: Document, payload: Callable[[], Mapping[str, Any]]) -> None:
    """Prints a result on stdout in the style asked for."""
    from msplit.report import document as jsonio
    from msplit.report import render

    output.clear()
    if style == "json":
        output.json(jsonio.dumps(command, payload()))
    elif style == "md":
        output.rendered(render.to_markdown(document))
    else:
        render.to_terminal(document, output.console())
