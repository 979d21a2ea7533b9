"""`msplit replicate`: an ensemble, several copies of a model in one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.keys import option, together
from msplit.cli.output import say
from msplit.report.text import plural


@dataclass(frozen=True)
class Copies:
    """What to make."""

    times: int | None = option(
        "--times", type=click.IntRange(1, 1024), metavar="N", help="Replicas (default: as many as --weights)."
    )
    weights: Sequence[Path] = option(
        "--weights",
        type=options.PATH,
        multiple=True,
        metavar="PATH",
        help="Weights of a replica, the first one's first: a checkpoint, a SavedModel, or a frozen model like MODEL. Repeatable.",
    )
    combine: str = option(
        "--combine",
        type=click.Choice(["mean", "stack"]),
        default="mean",
        show_default=True,
        help="What becomes of the replicas' outputs.",
    )
    streams: int | None = option(
        "--streams", type=options.STREAMS, help="Replica k goes on stream k modulo N (default: one stream each)."
    )
    devices: Sequence[str] = option(
        "--devices",
        type=options.Names(),
        default=(),
        help="Replica k goes on the k-th of these, and again: /gpu:0,/gpu:1",
    )


@click.command()
@options.model_argument
@click.option("-o", "--output", type=options.PATH, required=True, help="Where to write the ensemble.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@together(choice=options.Choice, copies=Copies)
def command(model: Path, choice: options.Choice, copies: Copies, output: Path, force: bool) -> None:
    """Write an ensemble: N copies of MODEL in one graph, with the same inputs, their outputs averaged or stacked.

    A GraphDef becomes a GraphDef, anything else a SavedModel (TensorFlow writes its variables). The model is not executed.
    """
    from msplit import api

    times = len(copies.weights) if copies.times is None else copies.times
    if not times:
        raise click.UsageError("--times or --weights is missing: how many copies to make.")
    replication = api.Replication(times, copies.weights, copies.combine, copies.streams, copies.devices)
    made = api.replicate(choice.load(model), replication, output, force=force)
    say(
        f"Written: {made.path}, {plural(times, 'replica')} of {plural(made.copied, 'node')}, {made.shared:,} shared; "
        f"{copies.combine} of {', '.join(made.outputs)}."
    )
    for note in made.notes:
        say(note)
