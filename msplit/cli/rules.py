"""`msplit rules`: the shipped rule sets."""

from __future__ import annotations

import itertools

import click

from msplit.cli import options, output


@click.command()
@click.argument("name", required=False, shell_complete=options.complete_rule_set)
def command(name: str | None) -> None:
    """List the shipped rule sets, or print the one called NAME: a file to start your own from."""
    from msplit import rules

    if name is None:
        for known in rules.available():
            output.say(options.folded(f"{known:9}{_about(rules.text_of(known))}", " " * 9))
        return
    output.say(rules.text_of(name).removesuffix("\n"))


def _about(text: str) -> str:
    """The first sentence of the comment that a rules file begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in lines).partition(". ")[0].rstrip(".")
