"""`msplit build`: compile once, keep, open in a second or two.

`msplit profile`: time every kind of kernel of a model on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from msplit.cli import options
from msplit.cli.keys import option, together
from msplit.progress import telling


@dataclass(frozen=True)
class Run(options.SharedInputs, options.TableMemory, options.OnDevice, options.Kernels):
    """What is compiled, and where."""

    streams: int = option(type=options.STREAMS, default=8, help="The largest number of streams.")
    plan: Path | None = option(help="Run the plan that `msplit tune --plan-out` wrote.")
    lengths: tuple[int, ...] | None = option(
        type=options.numbers(click.IntRange(1)),
        help="Sizes of an unknown second dimension, such as 32,64,128: rows of any length up to the largest are filled up to the next one.",
    )

    def arguments(self) -> dict[str, Any]:
        """For the functions of the library."""
        return {
            **super().arguments(),
            "streams": self.streams,
            "plan": self.plan,
            "lengths": self.lengths or (),
            "device": self.device,
            "shared": self.shared,
            "users": self.users,
            "table_memory": self.table_memory,
        }


@dataclass(frozen=True)
class Search(options.Search):
    """Likewise, where a plan is to be searched."""

    tune: bool = option(help="Search for the fastest plan first, by measuring, as `msplit tune` does.")
    tune_seconds: float = option(**options.SECONDS)


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="The folder to make.")
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@options.format_option
@together
def command(
    model: Path,
    choice: options.Choice,
    output: Path,
    run: Run,
    search: Search,
    work: options.Batches,
    force: bool,
    style: str,
) -> None:
    """Compile MODEL for this GPU, verify it, and keep all that it takes to run: `msplit.open` has it running in a second or two.

    A build holds machine code, weights, streams and what it was made for. This executes the model.
    """
    from msplit.report import contents as report
    from msplit.run.build import build

    if not search.tune and search.max_error is not None:
        raise click.UsageError("--max-error is what --tune keeps within: give --tune, too.")
    flat = choice.load(model, record=work.record)
    with telling() as tell:
        made = build(
            flat,
            output,
            batches=work.several,
            force=force,
            progress=tell,
            tune=search.settings(run) if search.tune else None,
            **work.arguments(),
            **run.arguments(),
        )
    options.show(style, "build", report.build_document(made), lambda: report.build_payload(made))


@dataclass(frozen=True)
class Measured(options.ExecutionOptions):
    """What is measured, and for how long."""

    seconds: float = option(
        default=20.0,
        type=click.FloatRange(0),
        help="How long measuring may take. What is not reached is priced statically.",
    )
    no_grids: bool = option(help="Do not record grids and occupancy.")


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, help="Where to write the profile.")
@click.option("--force", is_flag=True, help="Replace an existing profile.")
@options.format_option
@together
def profile_command(
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
    from msplit.cost import profile as profile_file
    from msplit.report import commands as report
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
        report.profile_document(flat, found, static, notes=written),
        lambda: report.profile_payload(flat, found, static, notes=written),
    )
