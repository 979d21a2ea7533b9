"""`msplit export`: a model for other servers."""

from __future__ import annotations

from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.keys import together
from msplit.cli.output import say
from msplit.cli.pool_options import Pooling


@click.command()
@click.argument("model", type=options.PATH)
@click.option(
    "--triton", type=options.PATH, required=True, help="Triton's model repository; it is made where there is none."
)
@click.option("--name", help="Of the model there (default: that of its file or folder).")
@click.option("--force", is_flag=True, help="Replace a model of this name.")
@together(pooling=Pooling, device=options.OnDevice)
def command(
    model: Path, triton: Path, name: str | None, pooling: Pooling, device: options.OnDevice, force: bool
) -> None:
    """Write MODEL, a build or a model, into a repository that Triton Inference Server serves with its Python backend.

    The folder holds a copy of MODEL, so that it can be moved. Nothing is executed.
    """
    from msplit.serving.triton import export

    made = export(model, triton, pooling.settings(), name=name, device=device.device, force=force)
    rows = f"up to {made.max_batch:,} rows" if made.max_batch else "of the model's own shapes"
    say(f"Written: {made.path}, for requests of {rows}.")
    say(f"Next: tritonserver --model-repository={triton}")
