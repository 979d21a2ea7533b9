"""`msplit sample`: builds one of the sample models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from msplit import progress
from msplit.cli import options
from msplit.cli.output import say
from msplit.errors import MsplitError


@click.command()
@click.argument("name", required=False, shell_complete=options.complete_sample)
@click.option("-o", "--output", type=options.PATH, help="Where to write the frozen GraphDef.")
@click.option(
    "--size", "sizes", multiple=True, metavar="KEY=N", help="A size of the model, such as experts=4. Repeatable."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option("--strip", is_flag=True, help="Leave the weights out; msplit.samples.fill brings them back.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def command(name: str | None, output: Path | None, sizes: tuple[str, ...], seed: int, strip: bool, force: bool) -> None:
    """Build one of the sample models (needs TensorFlow). Without NAME, lists them with their sizes."""
    from msplit import formats, samples
    from msplit.engines.tensorflow.runtime import quiet_stderr, tensorflow
    from msplit.formats.atomic import check_target

    if name is None:
        for known in samples.names():
            say(f"{known:17}{_listed(samples.sizes(known))}")
        return
    if name not in samples.names():
        raise MsplitError(f"no sample named {name!r}", fix=f"one of: {', '.join(samples.names())}")
    if output is None:
        raise click.UsageError("-o/--output is missing: where to write the model.")
    check_target(output, force=force)
    chosen = dict(_size(text, name, samples.sizes(name)) for text in sizes)
    tensorflow()
    try:
        with progress.phase(f"building {name}"), quiet_stderr():
            sample = samples.build(name, seed=seed, **chosen)
    except (TypeError, ValueError, IndexError) as problem:
        raise MsplitError(
            f"TensorFlow builds no {name} of this size: {problem}", fix=f"sizes are {_listed(samples.sizes(name))}"
        ) from problem
    graph_def = samples.strip(sample.graph_def) if strip else sample.graph_def
    with progress.phase("writing"):
        formats.write_bytes_atomic(output, graph_def.SerializeToString(deterministic=True), force=force)
    options.note(f"{output}: {len(graph_def.node):,} nodes")


def _listed(sizes: Mapping[str, Any]) -> str:
    """Sizes that the command line can set, which are whole numbers."""
    return ", ".join(f"{key}={'any' if value is None else value}" for key, value in _numbers(sizes).items())


def _numbers(sizes: Mapping[str, Any]) -> dict[str, int | None]:
    return {key: value for key, value in sizes.items() if value is None or type(value) is int}


def _size(text: str, name: str, known: Mapping[str, Any]) -> tuple[str, int]:
    key, _, number = text.partition("=")
    if not number.isdecimal() or int(number) < 1:
        raise click.BadParameter(f"{text!r}: write it as KEY=N, with N of 1 or more", param_hint="'--size'")
    if key not in _numbers(known):
        raise MsplitError(f"{name} has no size {key!r}", fix=f"its sizes are {_listed(known)}")
    return key, int(number)
