"""`msplit doctor`: what this machine can do, and why not more."""

from __future__ import annotations

from collections.abc import Sequence

import click

from msplit.cli import options
from msplit.cli.main import COMMANDS


@click.command()
@click.option(
    "--for",
    "wanted",
    multiple=True,
    type=click.Choice(tuple(COMMANDS)),
    metavar="COMMAND",
    help="Exit with 1 where this command can not run here. Repeatable.",
)
@click.option("--engine", type=click.Choice(["cuda", "tensorflow"]), help="Likewise, of `bench` on this engine.")
@options.format_option
def command(wanted: Sequence[str], engine: str | None, style: str) -> int:
    """Say what this machine can do: GPU, driver, PyTorch, TensorFlow, other processes on the card, and which commands run.

    The exit code is 1 where something that --for or --engine asks for is missing, else 0.
    """
    from msplit.cli import machine
    from msplit.report.document import Document, Table

    found = machine.examine()
    commands = machine.commands(found, COMMANDS)
    asked = [name for name in wanted if name != "bench" or engine is None]
    asked += [f"bench --engine {engine}"] if engine is not None else []
    missing = [one for one in commands if one.subject in asked and one.status == machine.MISSING]
    fixes = [*(one for one in found if one.fix), *(one for one in commands if one.fix and one.subject in asked)]
    document = Document(
        title="What this machine can do",
        tables=[
            Table("", ("what", "status", "found"), [(one.subject, one.status, one.text) for one in found]),
            Table(
                "Commands", ("command", "status", "needs"), [(one.subject, one.status, one.text) for one in commands]
            ),
        ],
        warnings=[f"{one.subject} can not run here: {one.text}" for one in missing],
        notes=[f"fix ({one.subject}): {one.fix}" for one in fixes],
    )
    options.show(style, "doctor", document, lambda: {"findings": found, "commands": commands, "missing": missing})
    return int(bool(missing))
