"""`msplit sample`: builds one of the sample models."""

from __future__ import annotations

from pathlib import Path

import click

from msplit.errors import MsplitError


@click.command()
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the frozen GraphDef.")
@click.option(
    "--size", "sizes", multiple=True, metavar="KEY=N", help="A size of the model, such as experts=4. Repeatable."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the weights.")
@click.option(
    "--strip", is_flag=True, help="Leave the weights out; they are made again when the file is loaded with --fill."
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
def command(name: str | None, output: Path | None, sizes: tuple[str, ...], seed: int, strip: bool, force: bool) -> None:
    """Build one of the sample models (needs TensorFlow). Without NAME, lists them."""
    from msplit import samples

    if name is None:
        for known in samples.names():
            click.echo(known)
        return
    if name not in samples.names():
        raise MsplitError(f"no sample named {name!r}", fix=f"one of: {', '.join(samples.names())}")
    if output is None:
        raise click.UsageError("-o/--output is missing: where to write the model.")
    from msplit import formats

    chosen = dict(_size(text) for text in sizes)
    try:
        sample = samples.build(name, seed=seed, **chosen)
    except TypeError as problem:
        raise MsplitError(
            f"{name} has no such size: {problem}", fix="see the builder's parameters in docs/samples.md"
        ) from problem
    graph_def = samples.strip(sample.graph_def) if strip else sample.graph_def
    formats.write_bytes_atomic(output, graph_def.SerializeToString(deterministic=True), force=force)
    click.echo(f"{output}: {len(graph_def.node)} nodes", err=True)


def _size(text: str) -> tuple[str, int]:
    key, _, number = text.partition("=")
    try:
        return key, int(number)
    except ValueError as problem:
        raise MsplitError(f"--size {text!r}: write it as name=number") from problem
