"""Options of stock TensorFlow: where it puts nodes, and how long a step of it may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from msplit.cli import options

if TYPE_CHECKING:
    from msplit.engines.base import TensorFlowOptions


@dataclass(frozen=True)
class Stock:
    """How TensorFlow runs a model."""

    place: str | None
    no_soft_placement: bool
    log_placement: bool
    timeout: float | None

    def tensorflow(self) -> TensorFlowOptions:
        """The same for its sessions."""
        from msplit.engines.base import TensorFlowOptions

        return TensorFlowOptions(soft=not self.no_soft_placement, timeout=self.timeout)


stock_options = options.together(
    click.option(
        "--place",
        metavar="MODULE:FUNCTION",
        help="tensorflow: put each node on the device that a function of yours gives it, in place of streams.",
    ),
    click.option(
        "--no-soft-placement",
        is_flag=True,
        help="tensorflow: refuse devices that are not there or have no kernel, in place of moving nodes.",
    ),
    click.option("--log-placement", is_flag=True, help="tensorflow: show which device each node was put on."),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="tensorflow: give a step up that takes longer (default: none; 60 where it reads a queue).",
    ),
)
