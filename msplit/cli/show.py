"""`msplit show`: what is in a model's file."""

from __future__ import annotations

from pathlib import Path

import click

from msplit.cli import options


@click.command()
@click.argument("model", type=options.PATH)
@click.option("--all", "everything", is_flag=True, help="List every function, not only the largest.")
@options.format_option
def command(model: Path, everything: bool, style: str) -> None:
    """Show what is in MODEL's file: tag sets, signatures, inputs, outputs, functions. The model is not executed.

    It says what --tag, --signature, --inputs, --outputs, --shape and --function of other commands can name.
    """
    from msplit import formats
    from msplit.report import contents

    found = formats.contents(model)
    options.show(style, "show", contents.document(found, everything=everything), lambda: contents.payload(found))
