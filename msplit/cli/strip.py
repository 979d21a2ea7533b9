"""`msplit strip`: the model without stream ids."""

from __future__ import annotations

from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.keys import together
from msplit.cli.output import say
from msplit.report.text import plural


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="Where to write the model.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@together(choice=options.Choice)
def command(model: Path, choice: options.Choice, output: Path, force: bool) -> None:
    """Write MODEL without any stream id and without the record of its assignment. Nothing else changes.

    The ids of the whole file go, those that were set by hand included. The model is not executed.
    """
    from msplit import api

    report = api.strip(choice.load(model), output, force=force)
    say(f"Written: {report.path}, {plural(report.removed, 'stream id')} removed.")
    for note in (*report.notes, *report.warnings):
        options.note(note)
