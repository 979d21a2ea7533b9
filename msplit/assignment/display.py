"""How results show themselves: one line for a prompt, a small table for a notebook. All of it is in reports and in `--format json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.escape import html, line

Facts = Sequence[tuple[str, str]]


class Shown:
    """Gives a result a short `repr` and a notebook's view, made of its `_facts`."""

    def _facts(self) -> Facts:
        """What is worth a line: (what, value). The first one names the thing."""
        raise NotImplementedError

    def __repr__(self) -> str:
        told = ", ".join(f"{what}: {line(value)}" for what, value in self._facts())
        return f"<{type(self).__name__} {told}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{html(what)}</th><td style="text-align:left">{html(value)}</td></tr>'
            for what, value in self._facts()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def gain(judgement: Any) -> str:
    """A judgement in a word."""
    return f"{judgement.gain:.2f}x on {judgement.streams} streams"
