"""`msplit train`: steps over data, checkpoints, an end for a reason."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from msplit.cli import engine_options, options, output
from msplit.cli.engine_options import Engine
from msplit.cli.keys import key, option, together
from msplit.progress import telling

if TYPE_CHECKING:
    from msplit.run.request import RunRequest
    from msplit.training.data import Data
    from msplit.training.hosts import Hosts
    from msplit.training.loop import TrainSettings
    from msplit.training.trainer import Trainer


def _gpus(text: str) -> tuple[str, ...]:
    """Some GPUs: ``2`` is the first two; ``2,3`` are these."""
    if text.isascii() and text.isdigit() and 0 < int(text) <= _MOST_GPUS:
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
        return tuple(visible[: int(text)]) if len(visible) >= int(text) else tuple(map(str, range(int(text))))
    found = tuple(one.strip() for one in text.split(","))
    if len(found) < 2 or not all(found) or len(set(found)) < len(found):
        raise ValueError(f"{text!r} is neither a number of GPUs nor a list of some")
    return found


_MOST_GPUS = 64


@dataclass(frozen=True)
class Step:
    """What a step runs and gives."""

    target: tuple[str, ...] | None = option(
        type=options.NAMES, help="The op that a step runs, or several (default: what the file names train_op)."
    )
    fetch: tuple[str, ...] = option(
        type=options.NAMES,
        required=True,
        help="Tensors that a step gives, the loss first: where it is no number, training ends.",
    )


@dataclass(frozen=True)
class Feeding:
    """What steps are fed."""

    data: tuple[str, ...] = option(
        multiple=True,
        metavar="FILE|MODULE:FUNCTION",
        help="An .npz with an array per input, TFRecords (repeatable, or a pattern), or a function that gives batches; none for a graph "
        "that reads its data itself.",
    )
    batch: int = option(default=32, type=click.IntRange(1), help="Rows of a batch.")
    epochs: int | None = option(
        type=click.IntRange(1), help="Go through the data so often (default: 1, or what --steps need)."
    )
    shuffle: bool = option(help="Another order of the data in every epoch, by --input seed=.")


@dataclass(frozen=True)
class Length:
    """How long, and what is kept of it."""

    steps: int | None = option(
        type=click.IntRange(0), help="Train up to so many steps, those before --resume included."
    )
    save: Path | None = key("--save", "The folder, which may be given alone.", name="folder")
    every: int = key("--save", "Steps from one checkpoint to the next.", click.IntRange(1), 1000)
    keep: int = key("--save", "Checkpoints that are kept.", click.IntRange(1), 5)
    resume: bool = option(help="Go on from the last checkpoint in --save, if there is one.")
    restore: Path | None = option(metavar="PREFIX", help="Begin with the variables of this checkpoint.")
    fetch_every: int = option(default=100, type=click.IntRange(1), help="Show what every so manyth step gives.")
    log_csv: Path | None = option(
        metavar="FILE",
        help="Also add a row of step, seconds and numbers to this CSV file then; --resume goes on with it.",
    )

    def settings(self) -> TrainSettings:
        """The same for what trains."""
        from msplit.training.loop import TrainSettings

        kept = self.every, self.keep, self.resume, self.fetch_every, self.log_csv
        return TrainSettings(self.steps, self.save, *kept)


@dataclass(frozen=True)
class Source(options.Choice):
    """A model whose outputs are named otherwise."""

    outputs: None = None


@dataclass(frozen=True, kw_only=True)
class Spread(engine_options.Processes):
    """Which GPUs of which hosts train together, or which servers of TensorFlow run it."""

    container: str | None = key(
        "--tensorflow", "A name under which the cluster keeps variables, for later clients or others beside this one."
    )
    gpus: tuple[str, ...] | None = option(
        type=options.Parsed("n|a,b,…", _gpus),
        help="Train on so many GPUs of this host, or on these, each in a process of its own.",
    )
    hosts: Path | None = key("--hosts", "That file, which may be given alone.", name="file")
    task: str | None = key("--hosts", "Which of the file's hosts this is, such as worker:0.")
    nnodes: int | None = key("--hosts", "So many hosts, with as many GPUs each.", click.IntRange(1))
    node_rank: int | None = key("--hosts", "Which of them this is; 0 is the chief.", click.IntRange(0))
    master: str | None = key("--hosts", "HOST:PORT where the chief listens, the same on all hosts.")

    def of_hosts(self) -> Hosts:
        """The hosts: of a file, of options, or of TF_CONFIG."""
        from msplit.training import hosts

        by_number = self.nnodes is not None or self.node_rank is not None or self.master is not None
        if self.hosts is not None:
            if by_number:
                raise click.UsageError("--hosts FILE says what nnodes, node-rank and master do: leave these out.")
            return hosts.of_file(self.hosts, self.task)
        if self.task is not None:
            raise click.UsageError("--hosts task is one of those that a file names: give --hosts FILE, too.")
        if not by_number and os.environ.get("TF_CONFIG"):
            return hosts.of_tf_config(os.environ["TF_CONFIG"])
        return hosts.Hosts(self.nnodes or 1, self.node_rank or 0, self.master or "")

    @property
    def is_asked_for(self) -> bool:
        """Whether several processes are to train."""
        return any(one is not None for one in (self.gpus, self.nnodes, self.node_rank, self.master, self.hosts))


@click.command()
@options.model_argument
@options.format_option
@together
def command(
    model: Path,
    choice: Source,
    step: Step,
    feeding: Feeding,
    length: Length,
    spread: Spread,
    engine: Engine,
    style: str,
) -> int:
    """Train MODEL, a graph with gradients and updates, and write checkpoints as TensorFlow does.

    Ends with 1 where the loss or a variable is no finite number any more. Ctrl-C and SIGTERM end it after the step, with a checkpoint.
    This executes the model, and the function of --data.
    """
    from msplit.errors import RankLost
    from msplit.report import commands as report
    from msplit.run.request import refuse_exclusions
    from msplit.training import hosts
    from msplit.training.loop import train
    from msplit.training.rendezvous import joined
    from msplit.training.trainer import Trainer

    begin = {"resume": length.resume, "restore": length.restore}
    refuse_exclusions({name: value for name, value in begin.items() if value})
    settings = length.settings()
    rank = hosts.rank_of(os.environ)
    if rank is None and spread.is_asked_for:
        refuse_exclusions({**engine.request().given, "gpus" if spread.gpus else "hosts": True})
        return hosts.launch(hosts.own_command(), spread.of_hosts(), spread.gpus or ("0",))
    try:
        with joined(rank, on_gpu=engine.device == "cuda", tell=output.tell) as world, telling() as tell:
            flat, own = choice.load(model), {**engine.arguments(), "cluster": spread.over()}
            with Trainer(flat, step.target, step.fetch, progress=tell, world=world, **own) as trainer:
                data = _data(trainer, feeding, engine.request(), endless=length.steps is not None)
                if length.restore is not None and world.rank == 0:  # the others begin with what it has
                    trainer.restore(length.restore)
                    trainer.steps = 0
                with output.deferred() as stop:
                    found = train(trainer, data, settings, stop=stop, progress=tell)
                told = report.Told.of(trainer, found)
    except RankLost:
        if rank is not None and rank.local:  # the first one of a host tells it
            return 2
        raise
    if world.rank == 0:
        options.show(style, "train", report.train_document(told), lambda: report.train_payload(told))
    return 1 if found.stopped and not found.interrupted else 0


def _data(trainer: Trainer, feeding: Feeding, request: RunRequest, *, endless: bool) -> Data:
    """The data, for the inputs that are not given a value with --input: of each batch the rows of this process."""
    from msplit.training.data import BatchOptions, constant, open_data, own_data, part, whole

    specs = whole(trainer.specs, trainer.shards)
    fixed = constant(specs, request.workload.inputs)
    if not feeding.data:
        return part(own_data(specs, fixed), trainer.shards, trainer.world.rank)
    epochs = feeding.epochs if feeding.epochs is not None or endless else 1
    how = BatchOptions(feeding.batch, epochs, feeding.shuffle, request.seed)
    data = open_data(feeding.data, specs, how, shapes=request.workload.shapes, fixed=fixed)
    return part(data, trainer.shards, trainer.world.rank)
