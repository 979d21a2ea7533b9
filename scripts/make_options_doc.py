"""Writes docs/options.md from the commands themselves:  python scripts/make_options_doc.py

A test compares the file with what this would write.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from msplit.cli.engine_options import flags as all_flags
from msplit.cli.keys import Keys
from msplit.cli.main import COMMANDS, cli

TARGET = Path(__file__).parents[1] / "docs" / "options.md"

HEAD = """\
# All options

<!-- Written by scripts/make_options_doc.py from msplit/cli. Do not edit: a test compares. -->

Every option of every command, as `msplit COMMAND --help` prints it. [usage.md](usage.md) says which command does what, and links to
a page for each task. All commands also take:

"""

_NUMBER = re.compile(r"(INTEGER|FLOAT)( RANGE)?$")
"""Click's words for a number."""

FLAGS = """\
### Flags of `tensorflow_model_server`

What `msplit serve` does with each flag of TensorFlow Serving 2.21. What is accepted changes nothing, and is told in the log. Flags that are
refused are accepted where they are off (`=false`, or nothing behind the equals sign).

| flag | | |
| --- | --- | --- |
"""

TABLE = "| option | meaning |\n| --- | --- |\n"


def rows(command: click.Command, context: click.Context) -> dict[str, str]:
    """Each option of a command, as its help names it, with its meaning, its default and its range."""
    every = [parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option)]
    options = [option for option in every if option.help or not option.hidden]
    found = {}
    for option in options:
        names, meaning = option.get_help_record(context) or (", ".join(option.opts), option.help or "")
        found[_cell(_NUMBER.sub("N", names))] = _cell(meaning)
        if isinstance(option.type, Keys):
            found |= {_cell(f"{option.opts[0]} {key.text}"): _cell(key.meaning) for key in option.type.keys.values()}
    return found


def flags(command: click.Command) -> str:
    """Rows of the flags of tensorflow_model_server: what is done with each."""
    helps = {option.name: option.help or "" for option in command.params if isinstance(option, click.Option)}
    return "".join(f"| `--{one.name}` | {one.verdict} | {_cell(one.why or helps[one.name])} |\n" for one in all_flags())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def page() -> str:
    """The whole file."""
    found = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        found[name] = (command, rows(command, click.Context(command, info_name=name)))
    everywhere = [
        row for row in found["rules"][1].items() if all(row in options.items() for _, options in found.values())
    ]
    parts = [HEAD, _table(everywhere), "\n"]
    for name, (command, options) in found.items():
        summary = " ".join((command.help or "").partition("\n\n")[0].split())
        arguments = " ".join(
            piece for parameter in command.params for piece in parameter.get_usage_pieces(click.Context(command))
        )
        parts.append(f"## {name}\n\n    msplit {name} [OPTIONS] {arguments}".rstrip() + f"\n\n{summary}\n\n")
        parts.append(_table([row for row in options.items() if row not in everywhere]) + "\n")
        if name == "serve":
            parts.append(FLAGS + flags(command) + "\n")
    return "".join(parts).rstrip("\n") + "\n"


def _table(options: list[tuple[str, str]]) -> str:
    if not options:
        return "No options of its own.\n"
    return TABLE + "".join(f"| `{names}` | {meaning} |\n" for names, meaning in options)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
