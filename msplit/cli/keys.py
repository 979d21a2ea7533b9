"""Options of the form KEY=VALUE: what only one part of msplit reads is one option, whose keys `--help` lists."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    Parameter = click.ParamType[Any]
else:
    Parameter = click.ParamType  # generic from click 8.2 on only

_GIVEN = "msplit.cli.keys"


@dataclass(frozen=True)
class Key:
    """A key, described once: for the command line, `--help` and the documents.

    Attributes:
        name: What is typed before the equals sign.
        help: Its meaning, one sentence.
        type: What its value is; a `bool` may be left out, which is yes.
        default: Its value where it is not given.
        field: The parameter of the command; by default the name with underscores.
        several: It may be given several times; its value is a tuple.
    """

    name: str
    help: str
    type: Any = str
    default: Any = None
    field: str = ""
    several: bool = False

    @property
    def parameter(self) -> str:
        """The parameter of the command."""
        return self.field or self.name.replace("-", "_")

    @property
    def values(self) -> Sequence[str]:
        """Its values, where they have names."""
        kind = click.types.convert_type(self.type)
        return ("yes", "no") if kind is click.BOOL else tuple(getattr(kind, "choices", ()))

    @property
    def text(self) -> str:
        """The key as `--help` shows it."""
        kind = click.types.convert_type(self.type)
        closed = isinstance(kind, click.Choice) or kind is click.BOOL
        name = kind.name.replace(" range", "")
        return f"{self.name}={'|'.join(self.values) if closed else name.upper()}"

    @property
    def meaning(self) -> str:
        """Its help, with the default where there is one."""
        if self.default is None or self.default == ():
            return self.help
        default = {True: "yes", False: "no"}[self.default] if isinstance(self.default, bool) else self.default
        default = ",".join(default) if isinstance(default, tuple) else default
        return f"{self.help}  [default: {default}]"


class Fields(dict[str, Any]):
    """Parameters of a command by name, from one option."""


class Keys(Parameter):
    """One value of an option: `key=value`, or several with commas between them, of a table of keys.

    Args:
        keys: The table.
        bare: The key of a value that is given alone; "": there is none.
    """

    name = "key=value"

    def __init__(self, keys: Sequence[Key], bare: str = "") -> None:
        self.keys = {key.name: key for key in keys}
        self.bare = bare
        self._between = f",(?=(?:{'|'.join(map(re.escape, self.keys))})=)"  # values may have commas, too

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Each key, and its value as its type has it."""
        if isinstance(value, tuple):
            return value
        return tuple(self.pair(text, param, ctx) for text in self.split(value))

    def split(self, text: str) -> Sequence[str]:
        """Parts of what is given at once, a key each."""
        return re.split(self._between, text)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Keys, each with its values where it has names for them."""
        del ctx, param
        keys = (key for key in self.keys.values() if key.name != self.bare)
        every = (f"{key.name}={value}" for key in keys for value in key.values or ("",))
        found = [CompletionItem(text) for text in every if text.startswith(incomplete)]
        return found or ([CompletionItem(incomplete, type="file")] if self.bare else [])

    def pair(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Key, Any]:
        """A key, and its value as its type has it."""
        name, equals, text = value.partition("=")
        if self.bare and name not in self.keys and (not equals or "/" in name):
            name, equals, text = self.bare, "=", value
        key = self.keys.get(name)
        if key is None:
            near = difflib.get_close_matches(name, self.keys, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            self.fail(f"there is no key {name!r}.{hint} Keys are: {', '.join(self.keys)}.", param, ctx)
        kind = click.types.convert_type(key.type)
        if not equals:
            if kind is not click.BOOL:
                self.fail(f"{name!r} has no value: write it as {key.text}", param, ctx)
            return key, True
        try:
            return key, kind.convert(text, param, ctx)
        except click.BadParameter as problem:
            said = f"{text!r} is neither yes nor no" if kind is click.BOOL else problem.message
            self.fail(f"{name}: {said}", param, ctx)


class Single(Keys):
    """One value of an option: one `key=value`, whose value may hold anything, such as `,key=` in a name."""

    def split(self, text: str) -> Sequence[str]:
        """The whole."""
        return (text,)


def keyed(
    option: str, what: str, *keys: Key, bare: str = "", metavar: str = "KEY=VALUE", kind: type[Keys] = Keys
) -> Callable[..., Any]:
    """An option whose keys become parameters of the command; see `options.together`.

    Args:
        option: Its name.
        what: What it is about, for `--help`, which lists the keys.
        bare: See `Keys`.
        metavar: What its value looks like.
        kind: How its value is read.
    """

    def gather(ctx: click.Context, param: click.Parameter, parts: Sequence[Sequence[tuple[Key, Any]]]) -> Fields:
        del param
        found = Fields((key.parameter, () if key.several else key.default) for key in keys)
        pairs = [pair for part in parts for pair in part]
        for key, value in pairs:
            found[key.parameter] = (*found[key.parameter], value) if key.several else value
        ctx.meta.setdefault(_GIVEN, {}).update((key.parameter, None) for key, _ in pairs)
        return found

    help_text = f"{what} Repeatable."
    return click.option(option, type=kind(keys, bare), multiple=True, metavar=metavar, callback=gather, help=help_text)


_ELSEWHERE = {"timelines": "trace", "batches_in_turn": "batches"}
"""Keywords of the library -> parameters of commands that are called otherwise."""


def option_of(name: str, value: Any) -> str:
    """A keyword of the library, and its value where it is not None, as the current command has it; itself where that has none."""
    name = _ELSEWHERE.get(name, name)
    shown = "" if value is None else {True: "yes", False: "no"}.get(value, value)
    context = click.get_current_context(silent=True)
    for one in () if context is None else context.command.params:
        keys = one.type if isinstance(one.type, Keys) else Keys(())
        if key := next((key for key in keys.keys.values() if key.parameter == name), None):
            before = "" if key.name == keys.bare else f"{key.name}="
            return f"{one.opts[0]} {before}{shown}".rstrip()
        if one.name == name and isinstance(one, click.Option):
            return one.opts[-1] if value is None else f"{one.opts[-1]} {shown}"
    return f"msplit {context.info_name}" if context is not None and context.info_name == name else name


def given(ctx: click.Context) -> Sequence[str]:
    """Parameters that came from keys which were given, in the order of the options."""
    return tuple(ctx.meta.get(_GIVEN, ()))


_MOVED = {"--tune": "msplit tune", "--bisect": "msplit bisect", "--model-name": "--server name=TEXT"}
"""Options of earlier versions whose names are not those of keys -> what to write."""


def written_now(option: str, command: click.Command) -> str | None:
    """What to write in place of an option of an earlier version: the command's key of that name; None where there is none."""
    negated = option.startswith("--no-")
    name = option.removeprefix("--no-" if negated else "--")
    for one in command.params:
        key = one.type.keys.get(name) if isinstance(one.type, Keys) else None
        if key is not None and not (negated and key.type is not bool):
            return f"{one.opts[0]} {name}=no" if negated else f"{one.opts[0]} {key.text}"
    return _MOVED.get(option)


SECTIONS = {
    "Model": ("--part",),
    "Inputs and sizes": ("--input", "--batch", "--shape"),
    "Streams": ("--streams", "--rules", "--plan", "--place", "--wrap", "--keep-ids"),
    "Engine": (
        "--engine",
        "--device",
        "--gpus",
        "--precision",
        "--cuda",
        "--tensorflow",
        "--pool",
        "--groups",
        "--max-batch",
    ),
    "Costs": ("--costs",),
    "Comparison": ("--measure", "--reference", "--baseline", "--fail-if-slower", "--against", "--bench"),
    "Results": (
        "--output",
        "--plan-out",
        "--force",
        "--format",
        "--trace",
        "--plot",
        "--html",
        "--emit",
        "--diff",
        "--explain",
    ),
}
"""Options by what they are about, as `--help` shows them; those of one command alone are at the end."""


class Sectioned(click.Command):
    """A command whose `--help` shows first what one needs first, then its other options by sections, and then the keys of options.

    Attributes:
        first: Options to show first; where there are none, all are in one list.
    """

    first: Sequence[str] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads them; of an option of an earlier version it says what to write now."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as problem:
            if now := written_now(problem.option_name, self):
                raise click.UsageError(f"{problem.option_name} is written as {now} now.", ctx) from problem
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes them."""
        sections = {"Options": self.first, **SECTIONS, _ALIASES: (), _FURTHER: ()} if self.first else {"Options": ()}
        shown: dict[str, list[tuple[int, tuple[str, str]]]] = {title: [] for title in sections}
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for one in options:
            title, place = _ALIASES, 0
            if (record := one.get_help_record(ctx)) is not None:
                title, place = _section(one, sections)
            shown[title].append((place, record or (one.opts[0], one.help or "")))
        lists = {title: [record for _, record in sorted(rows, key=lambda row: row[0])] for title, rows in shown.items()}
        keys = {f"Keys of {one.opts[0]}": one.type.keys.values() for one in options if isinstance(one.type, Keys)}
        lists |= {title: [(key.text, key.meaning) for key in own] for title, own in keys.items()}
        for title in filter(lists.get, lists):
            with formatter.section(title):
                formatter.write_dl(lists[title])


_ALIASES, _FURTHER = "Flags of TensorFlow Serving that are taken, too", "Further options"


def _section(option: click.Option, sections: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    """The first section that names an option, else the last one, and its place there."""
    for title, names in sections.items():
        for name in option.opts:
            if name in names:
                return title, names.index(name)
    return [*sections][-1], 0


FILE = click.Path(path_type=Path)
"""A path, as the value of a key."""
