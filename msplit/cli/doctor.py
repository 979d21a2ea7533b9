"""`msplit doctor`: what this machine can do, and why not more."""

from __future__ import annotations

import click

from msplit.cli import options


@click.command()
@options.format_option
def command(style: str) -> None:
    """Say what this machine can do: GPU, driver, PyTorch, TensorFlow, versions that do not fit, other processes on the card."""
    from msplit.api import doctor
    from msplit.report.document import Document, Table

    found = doctor.examine()
    rows = [(finding.subject, finding.status, finding.text) for finding in found]
    document = Document(
        title="What this machine can do",
        tables=[Table("", ("what", "status", "found"), rows)],
        notes=[f"fix ({finding.subject}): {finding.fix}" for finding in found if finding.fix],
    )
    options.show(style, "doctor", document, lambda: {"findings": list(found)})
