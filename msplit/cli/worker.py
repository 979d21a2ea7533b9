"""`msplit worker`: a process of a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from msplit import escape
from msplit.cli import options, output
from msplit.cli.tensorflow_options import PLACE, WHAT


@click.command()
@click.option("--cluster", metavar=PLACE, help=WHAT)
@click.option("--job", help="Which job's task this is (default: TF_CONFIG's, or worker).")
@click.option("--task", type=click.IntRange(0), help="Which task of it, from 0 (default: TF_CONFIG's, or 0).")
@click.option(
    "--devices",
    default=1,
    show_default=True,
    type=options.STREAMS,
    help="CPU devices to offer, one for each stream. GPUs are offered as they are (CUDA_VISIBLE_DEVICES).",
)
@click.option(
    "--op-library", "op_libraries", multiple=True, type=options.PATH, help="Custom TensorFlow ops. Repeatable."
)
def command(cluster: str | None, job: str | None, task: int | None, devices: int, op_libraries: Sequence[Path]) -> None:
    """Be one process of a cluster, which `bench` and `train` with --tensorflow cluster= run graphs on, until SIGTERM.

    Whoever reaches its port can run anything here: have it on a network of your own. Without --cluster, TF_CONFIG says all.
    """
    from msplit.engines.tensorflow.cluster import serve
    from msplit.formats.cluster import TF_CONFIG, read

    if cluster is None and not os.environ.get(TF_CONFIG):
        raise click.UsageError("Which cluster? Give --cluster FILE, or set TF_CONFIG.")
    found = read(cluster or TF_CONFIG)
    if found.own is not None and job is None and task is None:
        own = found.own
    else:
        own = found.task(job or "worker", task or 0)

    def ready(names: Sequence[str]) -> None:
        output.say(f"ready: {own.name} on port {own.place[1]}, {', '.join(map(escape.visible, names))}")

    serve(found, own, devices=devices, op_libraries=op_libraries, ready=ready)
