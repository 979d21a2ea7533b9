"""Contents of a build, as text and JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from msplit.benchmark.build_bench import BuildBench
from msplit.formats.build import Rung
from msplit.report import benchmark
from msplit.report.document import Document, Table
from msplit.report.jsonio import picked
from msplit.report.text import dimensions, heading, size
from msplit.run.build import Build


def document(found: Build) -> Document:
    """Document of a build: the variant it runs and why, the machine it was made for, its speed and its size."""
    manifest = found.manifest
    facts = [
        ("model", manifest.model),
        ("runs", manifest.label),
        ("why", manifest.why),
        ("made for", ", ".join(f"{name} {value}" for name, value in manifest.made_for.items() if value)),
        ("precision", manifest.precision),
        ("size", f"{size(found.bytes)}, of which {size(found.weight_bytes)} are weights"),
        ("rows", "independent: smaller batches are filled up" if manifest.rows else manifest.mixes or "not looked at"),
        ("outputs", ", ".join(manifest.outputs)),
    ]

    def row(rung: Rung) -> list[str]:
        inputs = "; ".join(f"{name} {dimensions(shape)}" for name, shape in rung.inputs.items())
        times = ["-" if time is None else f"{time:,.1f}" for time in (rung.step_us, rung.host_us)]
        batch = "-" if rung.batch is None else str(rung.batch)
        return [batch, inputs, str(rung.streams), str(rung.kernels), *times]

    columns = ["batch", "inputs", "streams", "kernels", "device, µs", "with inputs and outputs, µs"]
    spent = sorted(manifest.preparation.items(), key=lambda one: -one[1])
    phases = [[what, f"{took:.1f}"] for what, took in spent if took >= 0.05]
    made = Table("Where building took its time", ["phase", "seconds"], phases)
    return Document(
        heading(str(found.path), "build"),
        facts,
        [Table("Batches", columns, [*map(row, manifest.rungs)]), *([made] if made.rows else [])],
        manifest.notes,
        following=[["msplit bench", str(found.path)]],
    )


def payload(found: Build) -> dict[str, Any]:
    """Contents of a build as plain data."""
    manifest = found.manifest
    return {
        **picked(found, "path size_bytes=bytes weight_bytes"),
        **picked(manifest, "model runs=label why notes made_for precision captured=capture outputs"),
        "independent_rows": manifest.rows and dict(zip(("inputs", "outputs"), manifest.rows, strict=True)),
        "mixes": manifest.mixes,
        "rungs": [picked(rung, "batch inputs streams kernels device_us=step_us host_us") for rung in manifest.rungs],
        "preparation": [{"phase": what, "time_s": took} for what, took in manifest.preparation.items()],
    }


def bench_document(path: Path, found: BuildBench) -> Document:
    """Time of a step of each batch, beside one stream of the same kernels."""
    machine, tables, warnings, checked = "", list[Table](), list[str](), list[str]()
    for batch, result in found.results:
        machine = benchmark.machine(result.environment)
        named = "" if batch is None else f", batch {batch}"
        shown = [*benchmark.times_and_gains(result)]
        tables += [replace(table, title=f"{table.title}{named}") for table in shown]
        warnings += [f"{text}{named}" for text in result.warnings]
        checked.append(f"{benchmark.verified(result.variants)}{named}")
    facts = [("runs", found.manifest.label), ("machine", machine), ("verified", "; ".join(checked))]
    return Document(heading(str(path), "build"), facts, tables, list(found.notes), warnings)


def bench_payload(path: Path, found: BuildBench) -> dict[str, Any]:
    """Times of a build as plain data, every raw time included."""
    results = [{"batch": batch, "result": result} for batch, result in found.results]
    return {"build": path, **picked(found, "runs=manifest.label notes"), "results": results}
