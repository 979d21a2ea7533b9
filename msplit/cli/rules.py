"""`msplit rules`: the shipped rule sets."""

from __future__ import annotations

import click


@click.command()
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """List the shipped rule sets, or print the one called NAME: a file to start your own from."""
    from msplit import rules

    if name is None:
        for known in rules.available():
            click.echo(known)
        return
    click.echo(rules.text_of(name), nl=False)
