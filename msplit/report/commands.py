"""Reports of `bisect`, `profile` and `train`.

The report of `msplit bisect`.

Results of a training, as text and JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.benchmark.bisect import Bisected, Suspect
from msplit.cost.costs import Costs
from msplit.cost.profile import Profile, roofline
from msplit.flatten.flat import FlatGraph
from msplit.report import document
from msplit.report.document import Document, Table, count, dimensions, heading, micros, percent, picked, plural
from msplit.training.loop import TrainingResult
from msplit.training.trainer import Trainer
from msplit.verify.compare import OutputComparison

_WHERE = {
    "cpu": "on the CPU, with simulated streams: what a GPU's kernels do is not seen",
    "cuda": "on the GPU, one stream, launch by launch",
}
_SHOWN = 8


def bisect_document(flat: FlatGraph, found: Bisected) -> Document:
    """Document with the node that is to blame, and the evidence."""
    facts = [
        ("ran", f"the cuda engine {_WHERE.get(found.device, found.device)}; TensorFlow on the CPU; IEEE float32"),
        ("compared", f"{plural(found.compared, 'value')} one by one, {found.differing} differ"),
    ]
    if found.variables:
        facts.append(("variables", f"{plural(found.variables, 'variable')} after a step"))
    facts += [("not compared", f"{plural(count, 'value')}: {why}") for why, count in found.left_out.items()]
    tables = []
    suspect = found.culprit or found.drift
    if suspect is not None:
        facts += _facts(found, suspect)
        if suspect.inputs:
            rows = [(one.name, one.dtype, dimensions(one.shape), _agrees(one)) for one in suspect.inputs]
            tables.append(Table("What it reads", ("value", "type", "shape", "against TensorFlow"), rows))
    return Document(
        title=heading(flat.model.source, flat.model.format), facts=facts, tables=tables, notes=[_conclusion(found)]
    )


def _facts(found: Bisected, suspect: Suspect) -> list[tuple[str, str]]:
    value = suspect.found
    facts = [
        ("node", suspect.node),
        ("op", suspect.op),
        ("value", f"{value.name}, {value.dtype}, {dimensions(value.shape)}"),
        ("error", value.describe()),
    ]
    if suspect.alone is not None:
        facts.append(("alone", f"given TensorFlow's own inputs: {_agrees(suspect.alone)}"))
    if suspect.group:
        names = ", ".join(suspect.group[:_SHOWN])
        more = f" and {len(suspect.group) - _SHOWN} more" if len(suspect.group) > _SHOWN else ""
        facts.append(("group", f"{plural(len(suspect.group), 'node')} in one kernel ({found.kernels}): {names}{more}"))
    return facts


def _agrees(one: OutputComparison) -> str:
    return one.describe().removeprefix(f"{one.name}: ")


def _conclusion(found: Bisected) -> str:
    one = found.culprit
    if one is not None:
        what = f"the group of {one.node}" if one.group else f"{one.op} {one.node}"
        if found.kernels == "plain" and not one.group:
            return f"{what} is the first node that gives another value than TensorFlow."
        return f"Every node by itself agrees; with {found.kernels} kernels {what} gives another value than TensorFlow."
    if found.drift is not None:
        return (
            f"No node is to blame: each gives TensorFlow's value for TensorFlow's inputs. Rounding grows on the way, beyond the tolerance "
            f"first at {found.drift.node}; --measure tolerance= sets another."
        )
    compared = "Every value, every output and every variable" if found.variables else "Every value and every output"
    but = " that was compared" if found.left_out else ""
    return f"{compared}{but} agrees, with all kernels, on one stream."


def bisect_payload(flat: FlatGraph, found: Bisected) -> dict[str, Any]:
    """Result as plain data."""
    return {
        "model": picked(flat.model, "path format"),
        **picked(found, "device compared differing variables left_out kernels culprit drift"),
    }


_FEW = 12


def profile_document(flat: FlatGraph, found: Profile, static: Costs, *, notes: Sequence[str] = ()) -> Document:
    """Kernels that take the time, beside what the data sheet says (`static`, at the profile's shapes), and the GPU's own constants."""
    estimates = estimated(found, flat, static)
    uses = np.bincount([step.kernel for step in found.steps if step.kernel >= 0], minlength=len(found.kernels))
    totals = np.asarray([kernel.time_us for kernel in found.kernels]) * uses
    whole = float(totals.sum())
    order = np.argsort(-totals, kind="stable")[:_FEW].tolist()

    def row(kind: int) -> tuple[str, ...]:
        kernel = found.kernels[kind]
        share = "-" if kernel.share is None else percent(kernel.share, 1.0)
        blocks = "-" if kernel.blocks is None else count(kernel.blocks)
        times = (micros(kernel.time_us), micros(estimates[kind]))
        part = percent(float(totals[kind]), whole)
        return kernel.op, _sizes(found, kind), count(int(uses[kind])), *times, share, blocks, part

    rows, reached = [*map(row, order)], roofline(found, flat, static)
    more = len(found.kernels) - len(rows)
    by_sheet = float(estimates @ uses) if len(estimates) else 0.0
    facts = [
        ("device", str(found.device)),
        ("inputs", ", ".join(f"{name} {dimensions(one.shape)}" for name, one in list(found.inputs.items())[:4])),
        ("settings", found.precision + (f", convolutions {found.layout}" if found.layout != "none" else "")),
        ("measured", f"{found.measured} of {plural(len(found.steps), 'step')}, {plural(len(found.kernels), 'kind')}"),
        ("work", f"{micros(whole)} measured, {micros(by_sheet)} by the data sheet"),
        *([("one stream", f"{micros(found.one_us)} for a step")] if found.one_us is not None else []),
        *_constants(found),
    ]
    no_gpu = "there is no GPU: these are times of the CPU, which say nothing about one"
    title = f"Kinds of steps by time{f', the first {len(rows)} of {len(found.kernels)}' if more > 0 else ''}"
    columns = ("op", "inputs", ">steps", ">alone", ">static", ">fills", ">blocks", ">of all")
    return Document(
        title=heading(flat.model.source, flat.model.format),
        facts=facts,
        tables=[Table(title, columns, rows), *([document.roofline(reached, _FEW, "--format json")] if reached else [])],
        notes=notes,
        warnings=[no_gpu] if found.device.simulated else [],
    )


def estimated(found: Profile, flat: FlatGraph, static: Costs) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Per kind its static time: that of the nodes that its first step covers."""
    index = flat.graph.index
    result = np.zeros(len(found.kernels))
    seen: set[int] = set()
    for step in found.steps:
        if step.kernel >= 0 and step.kernel not in seen:
            seen.add(step.kernel)
            result[step.kernel] = static.time_us[[index[name] for name in step.nodes]].sum()
    return result


def profile_payload(flat: FlatGraph, found: Profile, static: Costs, *, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Profile's summary for JSON; the profile itself is in its file."""
    return {
        "model": flat.model.source,
        **picked(found, "device precision layout inputs constants"),
        "steps": len(found.steps),
        **picked(found, "measured one_us unmeasured kernels"),
        "static_us": estimated(found, flat, static),
        "roofline": roofline(found, flat, static),
        "notes": notes,
    }


def _sizes(found: Profile, kind: int) -> str:
    shapes = [dimensions(shape) for _, shape, _ in found.kernels[kind].inputs]
    return ", ".join(shapes[:2]) + (", …" if len(shapes) > 2 else "")


def _constants(found: Profile) -> list[tuple[str, str]]:
    known = found.constants
    if known.node_us is None:
        return []
    named = [
        ("kernel", known.node_us),
        ("wait", known.wait_us),
        ("further join", known.join_us),
        ("further root", known.root_us),
    ]
    parts = [f"{name} {value:.2f} µs" for name, value in named if value is not None]
    if known.issue_us:
        parts.append(f"a start every {known.issue_us:.2f} µs")
    if known.copy_bytes_per_us:
        parts.append(f"copies {known.copy_bytes_per_us / 1e6:.2f} TB/s")
    facts = [("GPU", ", ".join(parts))]
    if known.concurrency:
        pairs = ", ".join(f"{pair} {ratio:.2f}" for pair, ratio in known.concurrency.items())
        facts.append(("side by side", f"{pairs} (1: as fast as alone, 2: nothing gained)"))
    return facts


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


def train_document(told: Told) -> Document:
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


def train_payload(told: Told) -> dict[str, Any]:
    """Results of a training as plain data."""
    found = told.trained
    rate = found.steps_per_second
    return {
        **picked(told, "model targets fetches runs engine processes notes"),
        **picked(found, "steps_before=before steps batch=rows time_s=seconds steps_per_s=steps_per_second"),
        "samples_per_s": None if rate is None else rate * found.rows,
        **picked(found, "fetched checkpoint=saved interrupted stopped"),
    }
