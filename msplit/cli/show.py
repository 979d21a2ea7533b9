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

    It says what --part and --shape of other commands can name. Of a build it shows what it runs, what for, and how fast that was.
    """
    from msplit import formats
    from msplit.formats import build
    from msplit.report import contents

    if build.is_build(model):
        from msplit.report import build as report
        from msplit.run.build import Build

        made = Build(model, build.read(model))
        options.show(style, "build", report.document(made), lambda: report.payload(made))
        return
    found = formats.contents(model)
    options.show(style, "show", contents.document(found, everything=everything), lambda: contents.payload(found))
