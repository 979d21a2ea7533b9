"""Results of a training, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.report.document import Document, Table, heading, picked
from msplit.training.loop import TrainingResult
from msplit.training.trainer import Trainer

_ROWS = 20
"""Most rows of the table of what was fetched; JSON has all."""


@dataclass(frozen=True, eq=False)
class Told:
    """A training, with what ran it."""

    model: str
    targets: Sequence[str]
    fetches: Sequence[str]
    runs: str
    engine: str
    notes: Sequence[str]
    trained: TrainingResult
    processes: int = 1

    @staticmethod
    def of(trainer: Trainer, trained: TrainingResult) -> Told:
        """Takes the results of a trainer that is not closed yet."""
        runner, model = trainer.runner, trainer.flat.model
        ran = ("", "", ()) if runner is None else (runner.label, runner.engine, runner.notes)
        return Told(str(model.path), model.targets, trainer.fetches, *ran, trained, trainer.world.size)


def document(told: Told) -> Document:
    """Document of a training: its steps, its speed and its loss."""
    found = told.trained
    done, rate = found.steps - found.before, found.steps_per_second
    facts = [
        ("model", told.model),
        *([("target", ", ".join(told.targets))] if told.targets else []),
        *([("runs", told.runs)] if told.runs else []),
        *([("processes", f"{told.processes}, each with its rows of a batch")] if told.processes > 1 else []),
        ("steps", f"{done:,}" + (f", {found.before:,} before" if found.before else "")),
    ]
    if rate is not None:
        speed = f"{rate:,.0f} steps/s, {rate * found.rows:,.0f} samples/s, {found.seconds:,.1f} s in all"
        facts.append(("speed", speed))
    if found.saved is not None:
        facts.append(("checkpoint", str(found.saved)))
    shown = list(found.fetched)
    if len(shown) > _ROWS:
        shown = [shown[number] for number in np.linspace(0, len(shown) - 1, _ROWS).round().astype(int).tolist()]
    rows = [[f"{one.step:,}", *(_text(one.values[name]) for name in told.fetches)] for one in shown]
    warnings = [f"Training ended: {found.stopped}."] if found.stopped else []
    if found.stopped and found.saved is not None and not found.interrupted:
        warnings.append(f"The last checkpoint was written before that: {found.saved}.")
    table = Table("Steps", [">step", *(f">{name}" for name in told.fetches)], rows)
    return Document(heading(told.model, "train"), facts, [table] if rows else [], told.notes, warnings)


def _text(value: Any) -> str:
    if np.ndim(value):
        return f"{value.dtype} [{', '.join(map(str, value.shape))}]"
    return f"{float(value):.6g}" if value.dtype.kind in "fiub" else str(value)


def payload(told: Told) -> dict[str, Any]:
    """Results of a training as plain data."""
    found = told.trained
    rate = found.steps_per_second
    return {
        **picked(told, "model targets fetches runs engine processes notes"),
        **picked(found, "steps_before=before steps batch=rows time_s=seconds steps_per_s=steps_per_second"),
        "samples_per_s": None if rate is None else rate * found.rows,
        **picked(found, "fetched checkpoint=saved interrupted stopped"),
    }
