"""`msplit profile`: time every kind of kernel of a model on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.keys import option, together
from msplit.progress import telling


@dataclass(frozen=True)
class Measured(options.Execution):
    """What is measured, and for how long."""

    seconds: float = option(
        "--seconds",
        default=20.0,
        show_default=True,
        type=click.FloatRange(0),
        help="How long measuring may take. What is not reached is priced statically.",
    )
    no_grids: bool = option("--no-grids", is_flag=True, help="Do not record grids and occupancy.")


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, help="Where to write the profile.")
@click.option("--force", is_flag=True, help="Replace an existing profile.")
@options.format_option
@together(choice=options.Choice, work=options.InputSizes, measured=Measured)
def command(
    model: Path,
    choice: options.Choice,
    output: Path | None,
    work: options.InputSizes,
    measured: Measured,
    force: bool,
    style: str,
) -> None:
    """Time every kind of kernel of MODEL alone on the GPU, for --costs profile= of other commands. This executes the model."""
    if output is None:
        raise click.UsageError("-o/--output is missing: where to write the profile.")
    from msplit import api, formats
    from msplit.cost import profile_file
    from msplit.report import profile as report
    from msplit.run.profile import profile
    from msplit.run.request import RunRequest

    flat = choice.load(model)
    api.check_places(flat, [output], force=force)
    request = RunRequest.of(batch=work.batch, shapes=dict(work.shapes), **measured.arguments())
    with telling() as tell:
        found, notes = profile(flat, request, seconds=measured.seconds, grids=not measured.no_grids, progress=tell)
    formats.write_bytes_atomic(output, profile_file.dumps(found).encode(), force=force)
    _, static = api.price(flat, batch=work.batch, shapes=found.shapes)
    written = [*notes, f"Written: {output}"]
    options.show(
        style,
        "profile",
        report.document(flat, found, static, notes=written),
        lambda: report.payload(flat, found, static, notes=written),
    )
