"""`msplit export`: a model for other servers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.output import say


@dataclass(frozen=True)
class Pooling:
    """Settings of the pool, as in `serving.settings.PoolSettings`."""

    groups: int
    max_batch: int | None
    batches: tuple[int, ...] | None
    max_delay_us: float
    priorities: int
    max_queue: int


@click.command()
@click.argument("model", type=options.PATH)
@click.option(
    "--triton", type=options.PATH, required=True, help="Triton's model repository; it is made where there is none."
)
@click.option("--name", help="Of the model there (default: that of its file or folder).")
@click.option("--groups", default=4, show_default=True, type=click.IntRange(1), help="Steps in flight at once.")
@click.option("--max-batch", type=click.IntRange(1), help="Most rows of a step that requests share (default: 64).")
@click.option(
    "--batch",
    "batches",
    type=options.Numbers(click.IntRange(1)),
    help="Rows of the steps to have ready, such as 1,8,32.",
)
@click.option(
    "--max-delay-us",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0),
    help="How long a step that is not full waits for more rows.",
)
@click.option("--priorities", default=1, show_default=True, type=click.IntRange(1), help="Levels of priority.")
@click.option(
    "--max-queue", default=0, show_default=True, type=click.IntRange(0), help="Most requests that wait; 0: any number."
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="cpu: streams are simulated on the CPU, to try a model without a GPU.",
)
@click.option("--force", is_flag=True, help="Replace a model of this name.")
@options.together(pooling=Pooling)
def command(model: Path, triton: Path, name: str | None, pooling: Pooling, device: str, force: bool) -> None:
    """Write MODEL, a build or a model, into a repository that Triton Inference Server serves with its Python backend.

    The folder holds a copy of MODEL, so that it can be moved. Nothing is executed.
    """
    from msplit.serving.settings import PoolSettings
    from msplit.serving.triton import export

    made = export(model, triton, PoolSettings(**asdict(pooling)), name=name, device=device, force=force)
    rows = f"up to {made.max_batch:,} rows" if made.max_batch else "of the model's own shapes"
    say(f"Written: {made.path}, for requests of {rows}.")
    say(f"Next: tritonserver --model-repository={triton}")
