"""Options as data: fields of dataclasses describe them. What one part of msplit alone reads is an option of keys, which `--help` lists."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    Parameter = click.ParamType[Any]
else:
    Parameter = click.ParamType  # generic from click 8.2 on only

_GIVEN = "msplit.cli.keys"
FILE = click.Path(path_type=Path)
_UNSHOWN: Sequence[Any] = (None, (), ((), ()))  # defaults that say nothing


@dataclass(frozen=True)
class Key:
    """A key, described once: for the command line, `--help` and the documents.

    Attributes:
        name: What is typed before the equals sign.
        help: Its meaning, one sentence.
        type: What its value is; a `bool` may be left out, which is yes.
        default: Its value where it is not given.
        several: It may be given several times; its value is a tuple.
        field: The parameter of the command.
    """

    name: str
    help: str
    type: Any = str
    default: Any = None
    several: bool = False
    field: str = ""

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
        """Keys, each with its values where it has names for them, and files for other values."""
        keys = (key for key in self.keys.values() if key.name != self.bare)
        every = (f"{key.name}={value}" for key in keys for value in key.values or ("",))
        found = [CompletionItem(text) for text in every if text.startswith(incomplete) and text != incomplete]
        return found or [CompletionItem(incomplete, type="file")]

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
        if kind is FILE and not text:  # which a path takes for the folder
            self.fail(f"{name}: the name of the file is empty", param, ctx)
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


class InputValue(Single):
    """`[NAME=]FILE` or `seed=N`: what an input called seed is given is no number, such as `seed=./5` for a file called 5."""

    def pair(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Key, Any]:
        """The seed where it is one, else the text."""
        name, equals, text = value.partition("=")
        file = (self.keys[self.bare], value)
        if name != SEED or not equals or Path(value).is_file():
            return file
        try:
            return self.keys[SEED], int(text)
        except ValueError:
            if not Path(text).exists():
                self.fail(f"{value!r}: {text!r} is neither a whole number nor a file", param, ctx)
            return file


SEED = "seed"


@dataclass(frozen=True)
class Keyed:
    """An option of keys, on whatever command.

    Attributes:
        help: What it is about.
        bare: See `Keys`.
        metavar: What its value looks like.
        kind: How its value is read.
    """

    help: str
    bare: str = ""
    metavar: str = "KEY=VALUE"
    kind: type[Keys] = Keys

    def of(self, option: str, keys: Sequence[Key]) -> Callable[..., Any]:
        """The option with these keys, which become parameters of the command."""

        def gather(ctx: click.Context, param: click.Parameter, parts: Sequence[Sequence[tuple[Key, Any]]]) -> Fields:
            found = Fields((key.field, () if key.several else key.default) for key in keys)
            pairs = [pair for part in parts for pair in part]
            for key, value in pairs:
                found[key.field] = (*found[key.field], value) if key.several else value
            ctx.meta.setdefault(_GIVEN, {}).update((key.field, None) for key, _ in pairs)
            return found

        kind, help_text = self.kind(keys, self.bare), f"{self.help} Repeatable."
        return click.option(option, type=kind, multiple=True, metavar=self.metavar, callback=gather, help=help_text)


KEYED = {
    "--part": Keyed("Which part of the model, a key each time; keys below.", kind=Single),
    "--input": Keyed(
        "Values of an input: .npy, .npz, TFRecord or JSON, or the first batch of a function; what has none is made up. Keys below.",
        "NAME",
        "[NAME=]FILE|MODULE:FUNCTION|seed=N",
        InputValue,
    ),
    "--cuda": Keyed("What only the cuda engine reads; keys below."),
    "--tensorflow": Keyed("What only TensorFlow's runtime reads; keys below."),
    "--costs": Keyed("Source of costs and facts; keys below."),
    "--measure": Keyed("How it is measured and compared; keys below."),
    "--pool": Keyed("How requests share steps and memory; keys below."),
    "--sweep": Keyed("Values to try, in every combination, below `--pool latency-us=`. Keys below.", "", "KEY=N,N,…"),
    "--server": Keyed(
        "HOST:PORT of a server to send to, in place of a pool here; MODEL is what it serves. Further keys below.",
        "address",
        "HOST:PORT|KEY=VALUE",
    ),
    "--log": Keyed("How it logs, on stderr; keys below.", "format", "json|text|KEY=VALUE"),
    "--save": Keyed("Folder for checkpoints. Further keys below.", "folder", "DIR|KEY=VALUE"),
    "--hosts": Keyed(
        "The hosts that train together: a ClusterSpec as JSON, or keys below; where nothing names any, what TF_CONFIG holds.",
        "file",
        "FILE|KEY=VALUE",
    ),
}


def option(*names: str, **how: Any) -> Any:
    """A field that is an option (see `together`), named as the field is, a flag if it is a `bool`; `click.option` has `how`."""
    return dataclasses.field(metadata={"option": (names, how)})


def key(option: str, help: str, type: Any = None, default: Any = None, *, name: str = "", several: bool = False) -> Any:
    """A field that is a key of an option of `KEYED`; see `Key`. Without a name or type, it has those of the field."""
    return dataclasses.field(metadata={"key": (option, Key(name, help, type, default, several=several))})


def _type_of(field: dataclasses.Field[Any]) -> Any:
    """What a value of the field is read as, by its annotation."""
    annotation = str(field.type)
    return FILE if "Path" in annotation else {"bool": bool, "int": int, "float": float}.get(annotation, str)


def together(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options that are described as fields of dataclasses: of those that it has as parameters.

    A field that is no option is an argument of the command, or keeps its default.
    """
    hints = get_type_hints(command)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    fields = {name: dataclasses.fields(group) for name, group in groups.items()}
    keys: dict[str, list[Key]] = {}
    options: dict[str, Callable[..., Any]] = {}
    for field in itertools.chain.from_iterable(fields.values()):
        kind, named = _type_of(field), field.name.replace("_", "-")
        if "option" in field.metadata:
            names, how = field.metadata["option"]
            known = {"is_flag": True} if kind is bool else {"type": FILE} if kind is FILE else {}
            known["show_default"] = how.get("default", ()) not in _UNSHOWN
            options[field.name] = click.option(*(names or [f"--{named}"]), field.name, **{**known, **how})
        elif "key" in field.metadata:
            name, one = field.metadata["key"]
            one = dataclasses.replace(one, name=one.name or named, type=one.type or kind, field=field.name)
            keys.setdefault(name, []).append(one)
            options[name] = KEYED[name].of(name, keys[name])

    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> Any:
        for name in [name for name, value in kwargs.items() if isinstance(value, Fields)]:
            kwargs |= kwargs.pop(name)
        for name, group in groups.items():
            own = [field.name for field in fields[name] if field.name in kwargs]
            kwargs[name] = group(**{field: kwargs.pop(field) for field in own})
        return command(**kwargs)

    for one in reversed(options.values()):
        wrapped = one(wrapped)
    return wrapped


def given(ctx: click.Context) -> Sequence[str]:
    """Parameters that came from keys which were given, in the order of the options."""
    return tuple(ctx.meta.get(_GIVEN, ()))


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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes them."""
        sections = {"Options": self.first, **SECTIONS, _ALIASES: (), _FURTHER: ()} if self.first else {"Options": ()}
        shown: dict[str, list[tuple[int, tuple[str, str]]]] = {title: [] for title in sections}
        options = [
            one for one in self.get_params(ctx) if isinstance(one, click.Option) and not (one.hidden and not one.help)
        ]
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
