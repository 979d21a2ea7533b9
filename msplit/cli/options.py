"""Options that several commands share, and how their results go out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from msplit.errors import MsplitError

if TYPE_CHECKING:
    from rich.console import Console

    from msplit.cost.profile import Profile
    from msplit.flatten.flat import FlatGraph
    from msplit.report.document import Document

Decorated = Callable[..., Any]

if TYPE_CHECKING:
    Parameter = click.ParamType[Any]
else:
    Parameter = click.ParamType  # generic from click 8.2 on only


class Names(Parameter):
    """A comma-separated list."""

    name = "a,b,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Splits, dropping empty items."""
        del param, ctx
        return value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(",") if part.strip())


class Numbers(Parameter):
    """A comma-separated list of positive integers."""

    name = "n,n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parses, refusing what is not a positive integer."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,4", param, ctx)
        if min(numbers) < 1:
            self.fail("the number of streams is at least 1", param, ctx)
        return numbers


class Shape(Parameter):
    """`name=1,224,224,3`."""

    name = "name=d,d,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Splits into the name and its sizes."""
        if isinstance(value, tuple):
            return value
        name, equals, sizes = value.partition("=")
        try:
            shape = tuple(int(part) for part in sizes.replace("x", ",").split(",") if part.strip() != "")
        except ValueError:
            self.fail(f"{value!r}: sizes are numbers, as in input=1,224,224,3", param, ctx)
        if not equals or not name or any(size < 0 for size in shape):
            self.fail(f"{value!r}: write it as name=1,224,224,3", param, ctx)
        return name, shape


def _together(*several: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Several options as one decorator; --help lists them in this order."""

    def decorate(command: Decorated) -> Decorated:
        for one in reversed(several):
            command = one(command)
        return command

    return decorate


model_options = _together(
    click.argument("model", type=click.Path(path_type=Path)),
    click.option("--tag", "tags", type=Names(), help="Tags of the SavedModel's graph, where it has several."),
    click.option("--signature", help="Signature of the SavedModel (default: serving_default, or the only one)."),
    click.option("--inputs", type=Names(), help="Tensors to feed instead of the model's inputs."),
    click.option("--outputs", type=Names(), help="Tensors to fetch instead of the model's outputs."),
)
"""MODEL and the choices that its file may leave open."""

size_options = _together(
    click.option("--batch", type=click.IntRange(1), help="Size of unknown leading dimensions (default: 1)."),
    click.option(
        "--shape", "shapes", type=Shape(), multiple=True, help="Shape of an input: name=1,224,224,3. Repeatable."
    ),
)
"""What sizes the graph."""

cost_options = _together(
    size_options,
    click.option("--gpu", default="h200", show_default=True, help="GPU whose data sheet prices the nodes."),
)
"""What sizes and prices the graph."""

run_options = _together(
    click.option("--input", "given", multiple=True, metavar="NAME=FILE.npy", help="Values of an input. Repeatable."),
    click.option("--seed", default=0, show_default=True, help="Of made-up inputs."),
    click.option(
        "--precision",
        type=click.Choice(["tf32", "ieee"]),
        default="tf32",
        show_default=True,
        help="Of products, on every engine.",
    ),
    click.option(
        "--layout",
        type=click.Choice(["auto", "nhwc", "nchw"]),
        default="auto",
        show_default=True,
        help="cuda: of convolutions.",
    ),
    click.option(
        "--op-library",
        "op_libraries",
        multiple=True,
        type=click.Path(path_type=Path),
        help="Custom TensorFlow ops. Repeatable.",
    ),
)
"""How a model is executed, for commands that do."""

profile_option = click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="Costs that `msplit profile` measured, in place of the data sheet's.",
)

format_option = click.option(
    "--format",
    "style",
    type=click.Choice(["table", "json", "md"]),
    default="table",
    show_default=True,
    help="How to print the result.",
)


def profile(path: Path | None) -> Profile | None:
    """The profile that --profile names, if it does."""
    from msplit.cost import profile_file

    return None if path is None else profile_file.load(path)


def input_file(text: str) -> tuple[str, Path]:
    """The name and the file of --input."""
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise click.BadParameter(f"{text!r}: write it as name=file.npy", param_hint="'--input'")
    return name, Path(path)


def load(
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    function: str | None = None,
) -> FlatGraph:
    """Reads and flattens the model that the shared options name, or one function of it."""
    from msplit import api

    return api.load(
        model,
        tags=tags or None,
        signature=signature,
        inputs=inputs or None,
        outputs=outputs or None,
        function=function,
    )


def is_set(option: str) -> bool:
    """Whether `quiet`, `verbose` or `debug` was asked for, before the command or behind it."""
    return bool((click.get_current_context().find_root().obj or {}).get(option))


def note(text: str) -> None:
    """Says something on stderr that is no result, unless --quiet."""
    from msplit.cli import progress

    progress.clear()
    if not is_set("quiet"):
        click.echo(text, err=True)


def console(*, err: bool = False) -> Console:
    """A terminal, or a pipe: as wide as the terminal, 100 columns in a pipe, no colour where NO_COLOR says so."""
    import os
    import shutil

    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None
    if not stream.isatty() and "COLUMNS" not in os.environ:
        width = max(100, shutil.get_terminal_size((100, 24)).columns)
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def folded(text: str, indent: str = "") -> str:
    """A paragraph in lines as wide as the terminal. Words, such as options and names, stay whole."""
    import textwrap

    return textwrap.fill(
        text, console().width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def show(style: str, command: str, document: Document, payload: Callable[[], Mapping[str, Any]]) -> None:
    """Prints a result on stdout in the style asked for."""
    from msplit.cli import progress
    from msplit.report import jsonio, render

    progress.clear()
    if style == "json":
        click.echo(jsonio.dumps(command, payload()))
    elif style == "md":
        click.echo(render.to_markdown(document), nl=False)
    else:
        render.to_terminal(document, console())


@contextlib.contextmanager
def needs_torch() -> Iterator[None]:
    """Turns a missing PyTorch into a message."""
    try:
        yield
    except ModuleNotFoundError as problem:
        raise MsplitError(
            "the cuda engine's kernel library, PyTorch, is not installed", fix="pip install 'msplit[cuda]'"
        ) from problem
