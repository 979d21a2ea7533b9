"""`msplit profile`: time every kind of kernel of a model on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from msplit.cli import options, progress


@click.command()
@options.model_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the profile.")
@options.size_options
@options.run_options
@click.option(
    "--seconds",
    default=20.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long measuring may take. What is not reached is priced statically.",
)
@click.option("--no-grids", is_flag=True, help="Do not record grids and occupancy.")
@click.option("--force", is_flag=True, help="Replace an existing profile.")
@options.format_option
def command(
    model: Path,
    tags: Sequence[str] | None,
    signature: str | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    output: Path | None,
    batch: int | None,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    given: Sequence[str],
    seed: int,
    seconds: float,
    no_grids: bool,
    precision: str,
    layout: str,
    force: bool,
    op_libraries: Sequence[Path],
    style: str,
) -> None:
    """Time every kind of kernel of MODEL alone on the GPU, for --profile of other commands. This executes the model."""
    if output is None:
        raise click.UsageError("-o/--output is missing: where to write the profile.")
    from msplit import api, formats
    from msplit.cost import profile_file
    from msplit.measure.profile import ProfileRequest, profile
    from msplit.report import profile as report

    flat = options.load(model, tags, signature, inputs, outputs)
    api.check_places(flat, [output], force=force)
    request = ProfileRequest(
        batch=batch,
        shapes=dict(shapes),
        inputs=options.input_files(given),
        seed=seed,
        ieee=precision == "ieee",
        layout=layout,
        seconds=seconds,
        grids=not no_grids,
        op_libraries=tuple(op_libraries),
    )
    with progress.reporting() as tell:
        found, notes = profile(flat, request, progress=tell)
    formats.write_bytes_atomic(output, profile_file.dumps(found).encode(), force=force)
    _, static = api.price(flat, batch=batch, shapes=found.shapes)
    written = [*notes, f"Written: {output}"]
    options.show(
        style,
        "profile",
        report.document(flat, found, static, notes=written),
        lambda: report.payload(flat, found, static, notes=written),
    )
