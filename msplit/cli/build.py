"""`msplit build`: compile once, keep, open in a second or two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.bench import Sweep
from msplit.progress import telling


@dataclass(frozen=True)
class Kernels(options.Search):
    """What is chosen from, and how."""

    streams: int
    ruleset: str | None
    effort: str
    no_capture: bool
    no_fuse: bool
    no_group: bool
    reference: Path | None
    plan: Path | None
    device: str


@click.command()
@options.model_options
@click.option("-o", "--output", type=options.PATH, required=True, help="The folder to make.")
@click.option("--streams", type=options.STREAMS, default=8, show_default=True, help="The largest number of streams.")
@options.rules_option
@options.run_options
@options.kernel_options
@options.reference_option
@click.option("--plan", type=options.PATH, help="Run the plan that `msplit bench --plan-out` wrote.")
@options.tune_options
@options.device_option
@click.option(
    "--batch",
    "batches",
    type=options.Numbers(click.IntRange(1)),
    help="Size of unknown leading dimensions (default: 1), or several, such as 1,8,32: they share weights and memory.",
)
@options.shape_option
@options.gpu_option(default=None)
@options.profile_option
@options.record_option
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@options.format_option
@options.together(run=options.Execution, kernels=Kernels, work=Sweep)
def command(
    model: Path,
    choice: options.Choice,
    output: Path,
    run: options.Execution,
    kernels: Kernels,
    work: Sweep,
    force: bool,
    style: str,
) -> None:
    """Compile MODEL for this GPU, verify it, and keep all that it takes to run: `msplit.open` has it running in a second or two.

    A build holds machine code, weights, streams and what it was made for. This executes the model.
    """
    from msplit.report import build as report
    from msplit.run.build import build

    if kernels.tune and (kernels.effort == "fast" or kernels.no_capture):
        raise click.UsageError("--tune measures CUDA graphs: leave --effort fast and --no-capture out.")
    if kernels.tune and kernels.plan is not None:
        raise click.UsageError("--tune finds a plan, and --plan gives one: leave one of the two out.")
    flat = choice.load(model, record=not work.no_record)
    with telling() as tell:
        made = build(
            flat,
            output,
            batches=work.several,
            force=force,
            progress=tell,
            streams=kernels.streams,
            ruleset=kernels.ruleset,
            effort=kernels.effort,
            capture=not kernels.no_capture,
            fuse=not kernels.no_fuse,
            group=not kernels.no_group,
            reference=kernels.reference,
            plan=kernels.plan,
            tune=kernels.settings(run),
            device=kernels.device,
            **work.arguments(),
            **run.arguments(),
        )
    options.show(style, "build", report.document(made), lambda: report.payload(made))
