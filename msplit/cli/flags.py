"""Flags of `tensorflow_model_server`: what `msplit serve` does with each that its users' command lines may have.

`data/flags.txt` lists them. An unknown flag is an error as on any command.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import click

_LINE = re.compile(r"^(taken|accepted|refused) --(\w+)(\[=BOOL\])?(?:: (.+))?$", re.MULTILINE)


class Flag(NamedTuple):
    """A flag of TensorFlow Serving.

    Attributes:
        verdict: ``taken``, by an option of the same name; ``accepted``, where it changes nothing; or ``refused``.
        name: Name, without dashes in front.
        switch: Not empty where its value is a truth value, which may be left out.
        why: Why it changes nothing, or what to do instead; "" where it is taken.
    """

    verdict: str
    name: str
    switch: str
    why: str


@cache
def flags() -> tuple[Flag, ...]:
    """All of them."""
    text = resources.files("msplit.cli").joinpath("data/flags.txt").read_text("utf-8")
    return tuple(Flag(*parts) for parts in _LINE.findall(text))


def with_flags(command: click.Command) -> click.Command:
    """Gives a command those flags that are no options of its own."""
    for flag in flags():
        if flag.verdict != "taken":
            how: dict[str, Any] = {"is_flag": False, "flag_value": "true", "type": click.BOOL} if flag.switch else {}
            name = f"--{flag.name.replace('_', '-')}"
            command.params.append(click.Option([name], hidden=True, expose_value=False, callback=_heed(flag), **how))
    return command


def _heed(flag: Flag) -> Callable[..., None]:
    """Callback that takes note of a flag, or refuses it."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if flag.verdict == "refused" and value not in (None, False, ""):
            raise click.UsageError(f"--{flag.name} is not done here: {flag.why}.")
        if flag.verdict == "accepted" and value is not None:
            context.meta.setdefault(__name__, []).append(f"--{flag.name} changes nothing here: {flag.why}")

    return callback


def notes(context: click.Context) -> Sequence[str]:
    """Notes on the flags that were given, and change nothing."""
    return tuple(context.meta.get(__name__, ()))
