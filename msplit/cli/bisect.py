"""`msplit bisect`: find the first node whose value is not TensorFlow's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from msplit.cli import measuring, options
from msplit.cli.keys import together
from msplit.progress import telling


@dataclass(frozen=True)
class Compared(measuring.Closeness, options.Verified):
    """What is compared, and how closely."""


@click.command()
@options.model_argument
@options.format_option
@together(choice=options.Choice, compared=Compared, work=options.RecordedWork)
def command(model: Path, choice: options.Choice, compared: Compared, work: options.RecordedWork, style: str) -> int:
    """Find the first node of MODEL whose value on the cuda engine is not TensorFlow's on the CPU, value by value, in float32. Nothing is
    measured. This executes the model.
    """
    from msplit.benchmark import bisect
    from msplit.report import bisect as report
    from msplit.run.request import RunRequest
    from msplit.verify.results import Settings

    flat = choice.load(model, record=work.record)
    request = RunRequest.of(
        settings=Settings(seed=compared.seed, tolerance=compared.tolerance),
        **work.arguments(),
        **compared.arguments(),
    )
    with telling() as tell:
        found = bisect.bisect(flat, request, progress=tell)
    options.show(style, "bisect", report.document(flat, found), lambda: report.payload(flat, found))
    return int(found.culprit is not None or found.drift is not None)
