"""The report of `bench`."""

from __future__ import annotations

from typing import Any

from msplit.api.benchmark import Bench
from msplit.flatten.flat import FlatGraph
from msplit.measure.result import VariantResult
from msplit.measure.stats import Ratio, Summary
from msplit.report.document import Document, Table
from msplit.report.text import count, micros, size


def document(flat: FlatGraph, found: Bench) -> Document:
    """Times, gains, verification and diagnosis."""
    result = found.result
    machine = result.environment
    gpus = machine.get("gpus") or []
    facts = [
        ("engine", f"{found.engine}: {found.why}"),
        (
            "machine",
            ", ".join(str(gpu.get("name", gpu)) for gpu in gpus) if gpus else str(machine.get("cpu") or "unknown CPU"),
        ),
        ("precision", _precision(result.variants)),
        ("verified", _verified(result.variants)),
    ]
    tables = [_times(result.variants, result.baseline)]
    memory = _memory(result.variants)
    if memory is not None:
        tables.append(memory)
    return Document(
        title=f"{flat.model.path} ({flat.model.format})",
        facts=facts,
        tables=tables,
        warnings=[*result.warnings, *(f"{v.label}: skipped: {v.skipped}" for v in result.variants if v.skipped)],
        notes=[*found.notes, *result.diagnosis],
    )


def _machine(gpus: Any, cpu: Any) -> str:
    processor = f"{cpu.get('model') or 'unknown CPU'}, {cpu.get('usable_cores')} cores"
    return ", ".join([*(str(gpu.get("name")) for gpu in gpus), processor])


def _precision(variants: tuple[VariantResult, ...]) -> str:
    kinds = {check.precision for variant in variants for check in variant.checks}
    return " and ".join(sorted(kinds)) + " (see verified)" if kinds else "float32"


def _verified(variants: tuple[VariantResult, ...]) -> str:
    checks = [check for variant in variants for check in variant.checks]
    wrong = [variant.label for variant in variants if variant.failed]
    if wrong:
        return f"NO: outputs of {', '.join(wrong)} are wrong"
    if not checks:
        return "nothing to compare"
    against = dict.fromkeys(check.against for check in checks)
    return f"{count(len(checks))} comparisons passed, against {'; '.join(against)}"


def _times(variants: tuple[VariantResult, ...], baseline: str) -> Table:
    rows = []
    device = any(variant.device for variant in variants)
    for variant in variants:
        if variant.host is None:
            rows.append((variant.label, "wrong outputs" if variant.failed else "skipped", *[""] * (4 + 2 * device)))
            continue
        row = [variant.label, _micros(variant.host.median), _micros(variant.host.p90), _micros(variant.host.p99)]
        if device:
            row += [_micros(clock.median) if clock else "-" for clock in (variant.launch, variant.device)]
        row += [_spread(variant.host), _gains(variant, baseline)]
        rows.append(tuple(row))
    columns = ["", ">median", ">p90", ">p99", *([">launch", ">device"] if device else []), ">spread", "times faster"]
    note = "median, p90, p99: a user's step by the host's clock, copies of inputs and outputs included"
    if device:
        note += "; launch: the same on inputs that are on the GPU already; device: back-to-back steps by the GPU's own clock"
    return Table("One step", columns, rows, note + "; ranges are confidence intervals")


def _micros(seconds: float) -> str:
    return micros(seconds * 1e6)


def _spread(summary: Summary) -> str:
    return f"{100 * summary.cv:.1f} %"


def _gains(variant: VariantResult, baseline: str) -> str:
    shown = dict.fromkeys(ratio.over for ratio in variant.ratios)
    lines = []
    for over in shown:
        # Streams change what the device does; the host's clock is what a user waits for. Where both are known, both are told.
        clocks = [ratio for ratio in variant.ratios if ratio.over == over]
        lines.append(f"{'; '.join(_ratio(ratio) for ratio in clocks)} over {over}")
    return "\n".join(lines) if lines else ("baseline" if variant.label == baseline else "-")


def _ratio(ratio: Ratio) -> str:
    interval = f"{ratio.low:.2f}–{ratio.high:.2f}" if ratio.low > 0 else "too few rounds"
    verdict = "" if ratio.significant else ", no difference"
    return f"{ratio.value:.2f} {ratio.clock} ({interval}{verdict})"


def _memory(variants: tuple[VariantResult, ...]) -> Table | None:
    rows = []
    for variant in variants:
        facts = variant.facts
        if "peak_bytes" not in facts:
            continue
        rows.append(
            (
                variant.label,
                str(facts.get("streams", "-")),
                count(int(facts.get("kernels", 0))),
                f"{facts.get('waits', 0)} of {facts.get('waits_before_reduction', 0)}",
                size(float(facts["peak_bytes"])),
                size(float(facts.get("peak_bytes_one_stream", facts["peak_bytes"]))),
                str(facts.get("layout", "-")),
            )
        )
    if not rows:
        return None
    return Table(
        "What ran",
        ("", ">streams", ">kernels", ">waits", ">peak memory", ">on one stream", "layout"),
        rows,
        "waits: after reduction, of dependencies between streams; memory of values, weights not counted",
    )


def payload(flat: FlatGraph, found: Bench) -> dict[str, Any]:
    """The measurement for JSON: every raw time, versions, machine, command."""
    return {
        "model": str(flat.model.path),
        "engine": found.engine,
        "why": found.why,
        "notes": list(found.notes),
        "result": found.result.to_dict(),
    }
