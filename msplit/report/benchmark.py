"""The report of `bench`."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from msplit.benchmark.diagnose import advice
from msplit.benchmark.diagnose import busy as measured_busy
from msplit.benchmark.results import Bench
from msplit.core.arguments import Precision
from msplit.flatten.flat import FlatGraph
from msplit.inputs.examples import Hits
from msplit.report import bench_sections
from msplit.report.document import Document, Table, count, gain, heading, micros, percent, picked, plural, size
from msplit.verify.compare import OutputComparison
from msplit.verify.results import BenchResult, VariantResult

_MOST_TABLES = 12
_MOST_OUTPUTS = 8


def document(flat: FlatGraph, found: Bench, written: Sequence[str] = ()) -> Document:
    """Times, gains, verification and diagnosis; what tuning found and what was written of it."""
    result = found.result
    facts = [
        ("engine", f"{found.engine}: {found.why}"),
        ("machine", machine(result.environment)),
        ("verified", verified(result.variants)),
    ]
    loads = measured_busy(result.variants, found.limits)
    hidden = {layer.before for layer in found.layers} - {result.baseline, *(layer.label for layer in found.layers[:1])}
    tables = [
        _times(result.variants),
        *_gains(result.variants, hidden),
        _errors(result.variants),
        bench_sections.layers_table(found),
        _memory(result.variants),
        bench_sections.utilization_table(loads) if loads else None,
        _lookups(found.lookups) if found.lookups else None,
        bench_sections.bounds_table(found.limits, result.variants) if found.limits is not None else None,
        bench_sections.tuning_table(found.tuned) if found.tuned is not None else None,
        *bench_sections.placement_tables(found.placements),
        bench_sections.pauses(found.traced),
    ]
    skipped = [f"{variant.label}: skipped: {variant.skipped}" for variant in result.variants if variant.skipped]
    return Document(
        title=heading(flat.model.source, flat.model.format),
        facts=facts,
        tables=[table for table in tables if table is not None],
        warnings=[*_grouped(result.warnings, [variant.label for variant in result.variants]), *skipped],
        notes=[
            *(text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".") for text in found.notes),
            *_on_the_host(result.variants),
            *result.diagnosis,
            *(bench_sections.sentence(found.limits, result.variants) if found.limits is not None else ()),
            *advice(loads, result.variants),
            *(bench_sections.notes(found.tuned) if found.tuned is not None else ()),
            *(bench_sections.mixed_notes(found.mixed) if found.mixed is not None else ()),
            *bench_sections.placement_notes(found.placements),
            *written,
        ],
    )


def machine(environment: Mapping[str, Any]) -> str:
    """GPUs and processor."""
    cpu = environment.get("cpu") or {}
    cores = cpu.get("usable_cores")
    processor = (cpu.get("model") or "unknown CPU") + (f", {plural(cores, 'core')}" if cores else "")
    return ", ".join([*(str(gpu.get("name")) for gpu in environment.get("gpus") or ()), processor])


def _on_the_host(variants: Sequence[VariantResult]) -> list[str]:
    """Note about the clocks where TensorFlow has a part in the step."""
    nodes = max((variant.facts.get("host_nodes", 0) for variant in variants), default=0)
    if not nodes:
        return []
    where = "in TensorFlow on the CPU, before the GPU starts or when it is done"
    return [
        f"{plural(nodes, 'node')} of the model {'runs' if nodes == 1 else 'run'} {where}: only the host's clock has them."
    ]


def times_and_gains(result: BenchResult) -> list[Table]:
    """Time of a step, and its speedup."""
    return [_times(result.variants), *_gains(result.variants, ())]


def _grouped(warnings: Sequence[str], labels: Sequence[str]) -> list[str]:
    """One line for what is said of several variants, with the figures of the first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for line in warnings:
        label = next((label for label in labels if line.startswith(f"{label}: ")), "")
        text = line.removeprefix(f"{label}: ") if label else line
        groups.setdefault(re.sub(r"[0-9.]+", "#", text), []).append((label, text))
    lines = []
    for members in groups.values():
        label, text = members[0]
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        lines.append(f"{label}{more}: {text}" if label else text)
    return lines


def verified(variants: Sequence[VariantResult]) -> str:
    """Names, in a sentence, the reference that outputs were held against."""
    checks = [check for variant in variants for check in variant.checks]
    wrong = [variant.label for variant in variants if variant.failed]
    if wrong or not checks:
        return f"NO: outputs of {', '.join(wrong)} are wrong" if wrong else "nothing to compare"
    against = dict.fromkeys(check.against for check in checks)
    precisions = dict.fromkeys(check.precision for check in checks)
    return f"outputs are equal in {plural(len(checks), 'comparison')}, against {'; '.join(against)} ({', '.join(precisions)})"


def _errors(variants: Sequence[VariantResult]) -> Table | None:
    """Distance of outputs in half precision from what they are first held against, the reference if there is one; the furthest first."""
    rows = []
    for variant in variants:
        check = next((check for check in variant.checks if check.precision != Precision.IEEE), None)
        outputs = [one for one in check.comparison.outputs if one.as_a_whole] if check is not None else []
        rows += [(bench_sections.short(variant.label), check, one) for one in outputs if check is not None]
    shown = sorted(rows, key=lambda row: -row[2].distance)[:_MOST_OUTPUTS]
    if not shown:
        return None
    left = f"; {len(rows) - len(shown)} more are no further away" if len(rows) > len(shown) else ""
    note = f"distance: root mean square of what elements differ by, over that of what is expected{left}"
    cells = [
        (label, one.name, check.against, check.precision, f"{one.distance:.2g}", f"{one.tolerance:g}", _worst(one))
        for label, check, one in shown
    ]
    columns = ("", "output", "against", "in", ">distance", ">allowed", "worst element")
    return Table("What half precision costs", columns, cells, note)


def _worst(one: OutputComparison) -> str:
    return "" if one.worst is None else f"{one.got:.4g}, not {one.expected:.4g}"


def _times(variants: Sequence[VariantResult]) -> Table:
    rows = []
    device = any(variant.device for variant in variants)
    for variant in variants:
        if variant.host is None:
            rows.append((variant.label, "wrong outputs" if variant.failed else "skipped", *[""] * (3 + 2 * device)))
            continue
        row = [variant.label, _micros(variant.host.median), _micros(variant.host.p90), _micros(variant.host.p99)]
        if device:
            row += [_micros(clock.median) if clock else "-" for clock in (variant.launch, variant.device)]
        rows.append((*row, f"{100 * variant.host.cv:.1f} %"))
    columns = ["", ">median", ">p90", ">p99", *([">launch", ">device"] if device else []), ">spread"]
    note = "median, p90, p99: a user's step by the host's clock, copies of inputs and outputs included"
    if device:
        note += "; launch: the same on inputs that are on the GPU already; device: back-to-back steps by the GPU's own clock"
    return Table("One step", columns, rows, note)


def _micros(seconds: float) -> str:
    return micros(seconds * 1e6)


def _gains(variants: Sequence[VariantResult], hidden: Container[str | None]) -> list[Table]:
    """For each variant that others are compared with, how many times faster those are, by every clock there is.

    What another table tells is `hidden`.
    """
    tables = []
    for over in dict.fromkeys(ratio.over for variant in variants for ratio in variant.ratios):
        if over in hidden:
            continue
        compared = [variant for variant in variants if any(ratio.over == over for ratio in variant.ratios)]
        clocks = list(dict.fromkeys(r.clock for variant in compared for r in variant.ratios if r.over == over))
        rows = [(variant.label, *(gain(variant.ratio_over(over, clock)) for clock in clocks)) for variant in compared]
        columns, note = ("", *(f">{clock}" for clock in clocks)), "in brackets: confidence interval; above 1 is faster"
        tables.append(Table(f"Times faster than {over}", columns, rows, note))
    return tables


def _memory(variants: Sequence[VariantResult]) -> Table | None:
    shown = [variant for variant in variants if "peak_bytes" in variant.facts]
    if not shown:
        return None
    layout = any(variant.facts.get("layout", "none") != "none" for variant in shown)
    rows = []
    for variant in shown:
        facts, peak = variant.facts, float(variant.facts["peak_bytes"])
        waits = f"{facts.get('waits', 0)} of {facts.get('waits_before_reduction', 0)}"
        memory = (size(peak), size(float(facts.get("peak_bytes_one_stream", peak))))
        ran = (str(facts.get("streams", "-")), count(int(facts.get("kernels", 0))), waits, *memory)
        rows.append((bench_sections.short(variant.label), *ran, *([str(facts.get("layout", "-"))] if layout else [])))
    return Table(
        "What ran",
        ("", ">used", ">kernels", ">waits", ">memory", ">1 stream", *(["layout"] if layout else [])),
        rows,
        "used: streams that do something; waits: after reduction, of dependencies between streams; memory: of values at its highest, "
        "weights not counted; 1 stream: what the same kernels need on one" + _host_tables(shown),
    )


def _host_tables(shown: Sequence[VariantResult]) -> str:
    """Part of a note on tables that are not on the GPU; "" where all are."""
    trained = next(
        (variant.facts["host_state_bytes"] for variant in shown if "host_state_bytes" in variant.facts), None
    )
    if trained is not None:
        return f"; tables that are trained, and slots, of {size(float(trained))} stay in the host's memory"
    facts = next((variant.facts for variant in shown if variant.facts.get("table_hit_rate") is not None), None)
    if facts is None:
        return ""
    cache, tables = size(float(facts["table_cache_bytes"])), size(float(facts["host_table_bytes"]))
    found = percent(float(facts["table_hit_rate"]), 1.0)
    bus, rows = size(float(facts["table_bus_bytes"])), count(facts["table_rows_looked_up"])
    return (
        f"; tables of {tables} stay in the host's memory ({facts['host_tables']}): of {rows} rows that were looked up, "
        f"{found} were in a cache of {cache}, and {bus} came over the bus"
    )


def _lookups(found: Sequence[Hits]) -> Table:
    """Share of the inputs found in each of the model's tables; the smallest first."""
    rows = sorted(found, key=lambda one: (one.hits / max(one.values, 1), one.distinct / max(one.size, 1)))
    left = len(rows) - _MOST_TABLES
    note = "in it: of the values that are looked up; different: rows or keys that they meet"
    if left > 0:
        note += f"; {left} more tables are met as well as these or better"
    return Table(
        "What the inputs look up",
        ("input", "table", ">entries", ">values", ">in it", ">different"),
        [
            (
                one.input,
                one.table,
                f"{count(one.size)} {one.kind}",
                count(one.values),
                percent(one.hits, one.values),
                count(one.distinct),
            )
            for one in rows[:_MOST_TABLES]
        ],
        note,
    )


def payload(flat: FlatGraph, found: Bench, written: Sequence[str] = ()) -> dict[str, Any]:
    """The measurement for JSON: every raw time, versions, machine, command."""
    return {
        "model": flat.model.source,
        **picked(found, "engine why batch"),
        "inputs": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in found.inputs.items()},
        **picked(found, "notes result preparation_s=preparation.seconds"),
        "preparation": [picked(one, "phase time_s=seconds times") for one in found.preparation.phases],
        "lookups": found.lookups,
        **({"layers": bench_sections.layers_payload(found)} if found.layers else {}),
        "busy": bench_sections.utilization_payload(measured_busy(found.result.variants, found.limits)),
        "bounds": None if found.limits is None else bench_sections.bounds_payload(found.limits, found.result.variants),
        **({"placement": bench_sections.placement_payload(found.placements)} if found.placements else {}),
        **({} if found.tuned is None else {"tuned": bench_sections.tuning_payload(found.tuned)}),
        **({} if found.mixed is None else {"mixed_precision": bench_sections.mixed_payload(flat, found.mixed)}),
        **({"pauses": bench_sections.pauses_payload(found.traced)} if found.traced else {}),
        **({"written": written} if written or found.tuned is not None else {}),
    }
