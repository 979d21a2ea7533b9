"""`msplit train`: steps over data, checkpoints, an end for a reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msplit.cli import interrupt, options
from msplit.cli.pooling import Engine, engine_options
from msplit.progress import telling

if TYPE_CHECKING:
    from msplit.training.data import Data
    from msplit.training.loop import TrainSettings
    from msplit.training.trainer import Trainer


@dataclass(frozen=True)
class Step:
    """What a step runs and gives."""

    target: tuple[str, ...] | None
    fetch: tuple[str, ...]


@dataclass(frozen=True)
class Feeding:
    """What steps are fed."""

    data: tuple[str, ...]
    batch: int
    epochs: int | None
    shuffle: bool


@dataclass(frozen=True)
class Length:
    """How long, and what is kept of it."""

    steps: int | None
    save: Path | None
    every: int
    keep: int
    resume: bool
    restore: Path | None
    fetch_every: int

    def settings(self) -> TrainSettings:
        """The same for what trains."""
        from msplit.training.loop import TrainSettings

        return TrainSettings(self.steps, self.save, self.every, self.keep, self.resume, self.fetch_every)


@click.command()
@options.graph_options
@click.option(
    "--target",
    type=options.Names(),
    help="The op that a step runs, or several (default: what the file names train_op).",
)
@click.option(
    "--fetch",
    type=options.Names(),
    required=True,
    help="Tensors that a step gives, the loss first: where it is no number, training ends.",
)
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="FILE|MODULE:FUNCTION",
    help="An .npz with an array per input, TFRecords (repeatable, or a pattern), or a function that gives batches.",
)
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Rows of a batch.")
@click.option("--steps", type=click.IntRange(0), help="Train up to so many steps, those before --resume included.")
@click.option(
    "--epochs", type=click.IntRange(1), help="Go through the data so often (default: 1, or what --steps need)."
)
@click.option("--shuffle", is_flag=True, help="Another order of the data in every epoch, by --seed.")
@click.option("--save", type=options.PATH, metavar="DIR", help="Folder for checkpoints.")
@click.option(
    "--every", default=1000, show_default=True, type=click.IntRange(1), help="Steps from one checkpoint to the next."
)
@click.option("--keep", default=5, show_default=True, type=click.IntRange(1), help="Checkpoints that are kept.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --save, if there is one.")
@click.option("--restore", type=options.PATH, metavar="PREFIX", help="Begin with the variables of this checkpoint.")
@click.option(
    "--fetch-every",
    default=100,
    show_default=True,
    type=click.IntRange(1),
    help="Show what every so manyth step gives.",
)
@engine_options
@options.format_option
@options.together(step=Step, feeding=Feeding, length=Length)
def command(
    model: Path, choice: options.Choice, step: Step, feeding: Feeding, length: Length, engine: Engine, style: str
) -> int:
    """Train MODEL, a graph with gradients and updates, and write checkpoints as TensorFlow does.

    Ends with 1 where the loss or a variable is no finite number any more. Ctrl-C and SIGTERM end it after the step, with a checkpoint.
    This executes the model, and the function of --data.
    """
    from msplit.report import train as report
    from msplit.training.loop import train
    from msplit.training.trainer import Trainer

    if length.resume and length.restore is not None:
        raise click.UsageError(
            "--resume goes on from a checkpoint, --restore begins with one: leave one of the two out."
        )
    settings = length.settings()
    flat = choice.load(model)
    with telling() as tell, Trainer(flat, step.target, step.fetch, engine.request(), progress=tell) as trainer:
        data = _data(trainer, feeding, engine, endless=length.steps is not None)
        if length.restore is not None:
            trainer.restore(length.restore)
            trainer.steps = 0
        with interrupt.deferred() as stop:
            found = train(trainer, data, settings, stop=stop, progress=tell)
        told = report.Told.of(trainer, found)
    options.show(style, "train", report.document(told), lambda: report.payload(told))
    return 1 if found.stopped and not found.interrupted else 0


def _data(trainer: Trainer, feeding: Feeding, engine: Engine, *, endless: bool) -> Data:
    """The data, for the inputs that are not given a value with --input."""
    from msplit.training.data import Batching, constant, open_data

    request = engine.request()
    fixed = constant(trainer.specs, request.inputs)
    epochs = feeding.epochs if feeding.epochs is not None or endless else 1
    how = Batching(feeding.batch, epochs, feeding.shuffle, request.seed)
    return open_data(feeding.data, trainer.specs, how, shapes=request.shapes, fixed=fixed)
