"""The report of `profile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from msplit.cost.costs import Costs
from msplit.cost.profile import Profile
from msplit.flatten.flat import FlatGraph
from msplit.report.document import Document, Table, count, dimensions, heading, micros, percent, picked, plural

_FEW = 12


def document(flat: FlatGraph, found: Profile, static: Costs, *, notes: Sequence[str] = ()) -> Document:
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

    rows = [*map(row, order)]
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
        title=heading(flat.model.path, flat.model.format),
        facts=facts,
        tables=[Table(title, columns, rows)],
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


def payload(flat: FlatGraph, found: Profile, static: Costs, *, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Profile's summary for JSON; the profile itself is in its file."""
    return {
        "model": flat.model.path,
        **picked(found, "device precision layout inputs constants"),
        "steps": len(found.steps),
        **picked(found, "measured one_us unmeasured kernels"),
        "static_us": estimated(found, flat, static),
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
