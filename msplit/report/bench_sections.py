"""Sections of the report of `bench`: bounds, utilization, gain of each layer, the baseline, and what tuning tried.

Bounds of a measured model, as a part of the report of `bench`.

Utilization of the GPU, as a part of the report of `bench`.

Gain of each layer, from one stream to larger kernels, as a part of the report of `bench`.

A measurement beside its baseline, as a part of the report of `bench`.

Candidates that tuning tried and took, as a part of the report of `bench`.

The placement log: where TensorFlow put each node, beside where it was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msplit.benchmark.diagnose import Limits, Utilization
from msplit.benchmark.results import BaselineComparison, Bench, Change, Timed, Traced
from msplit.core.statistics import Ratio
from msplit.engines.base import MASKED_LOOPS
from msplit.engines.cuda.coverage import masked_loops
from msplit.engines.tensorflow.session import Placement
from msplit.flatten.flat import FlatGraph
from msplit.report.document import Name, Table, count, gain, micros, more, percent, picked, plural
from msplit.run.setup import AblationStep
from msplit.run.tuning import Tuned
from msplit.schedule.choose import WORTH
from msplit.schedule.search import Found, Measurement
from msplit.schedule.simulate import Breakdown
from msplit.verify.results import MixedPrecision, VariantResult

_OVER = 1.005


def bounds_table(found: Limits, variants: Sequence[VariantResult]) -> Table:
    """Bounds, static and measured, and how much of the largest each variant reaches."""
    static, steps = found.static, found.steps
    rows: list[tuple[str, ...]] = [
        ("critical path", micros(static.critical_path_us), micros(steps.critical_path_us), ""),
        ("memory bandwidth", micros(static.bandwidth_us), micros(steps.bandwidth_us), ""),
        ("arithmetic", micros(static.flops_us), micros(steps.flops_us), ""),
        ("SM time", micros(static.sm_time_us), micros(steps.sm_time_us), ""),
        ("lower bound", micros(static.lower_bound_us), micros(steps.lower_us), ""),
        ("one after the other", micros(static.serial_us), micros(steps.serial_us), ""),
        ("with larger kernels", micros(static.fused_us), micros(steps.fused_us), ""),
    ]
    for variant in variants:
        share, larger = found.reached(variant), ""
        if share is None:
            share, larger = found.fused(variant), " of larger"
        if share is not None and variant.device is not None:
            reached = percent(share, 1.0) + larger
            rows.append((short(variant.label), "", micros(variant.device.median * 1e6), reached))
    head = found.source if found.source == "measured" else f"by {found.source}"
    over = any((found.reached(variant) or 0.0) > _OVER for variant in variants)
    return Table("Bounds", ("", ">static", f">{head}", ">reached"), rows, _note(found, over))


def short(label: str) -> str:
    """A variant's name without what msplit's variants share."""
    return label.removeprefix("msplit, ").removesuffix(", CUDA graph")


def _note(found: Limits, over: bool) -> str:
    steps = found.steps
    note = "no plan of these kernels is faster than the lower bound"
    if found.source == "measured" and steps.measured < steps.steps:
        note += f"; {steps.measured} of {steps.steps} kernels were timed, the others are estimated"
    if over:
        note += "; over 100 %: kernels were slower alone than one behind the other"
    return f"{note}; bandwidth: static of all traffic, beside it of weights, inputs and outputs once; times are the device's"


def sentence(found: Limits, variants: Sequence[VariantResult]) -> list[str]:
    """Sentence on the gain that streams could have, and have."""
    steps = found.steps
    if steps.max_gain < WORTH:
        return [f"Streams have nothing to gain: {steps.limit} alone takes as long as all kernels one after the other."]
    reached = {variant.label: share for variant in variants if (share := found.reached(variant)) is not None}
    if not reached:
        return []
    best = max(reached, key=reached.__getitem__)
    said = [
        f"Streams could gain {steps.max_gain:.2f} at most, limited by {steps.limit}; {short(best)} reaches "
        f"{percent(reached[best], 1.0)} of the bound."
    ]
    spent = found.spent.get(best)
    return said if spent is None else [*said, _where(short(best), spent)]


_WORDS = {
    "contention": "because they slow each other down",
    "company": "because they find less in the caches than alone",
    "starts and waits": "to start them and to wait",
    "bandwidth": "because they share the memory's bandwidth",
    "the step itself": "to start and end the step",
}
_TOLD = 0.01


def _where(label: str, spent: Breakdown) -> str:
    """Parts of the time, the largest first; those below a hundredth are left out."""
    parts = sorted(spent.parts.items(), key=lambda part: -part[1])
    told = [f"{micros(us)} {_WORDS[name]}" for name, us in parts if us > _TOLD * spent.makespan_us]
    return f"Of the {micros(spent.makespan_us)} that {label} should take, {', '.join([f'{micros(spent.kernels_us)} are kernels', *told])}."


def bounds_payload(found: Limits, variants: Sequence[VariantResult]) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        "source": found.source,
        "static": {key: value for key, value in vars(found.static).items() if key != "path"},
        "steps": {**asdict(found.steps), "max_gain": found.steps.max_gain},
        "reached": {variant.label: found.reached(variant) for variant in variants},
        "reached_of_larger_kernels": {variant.label: found.fused(variant) for variant in variants},
        "spent": found.spent,
    }


_PREDICTED = "pred.: predicted, by the simulator"
_FEW_SIZES = 4
"""Sizes of groups in the sentence about them."""


def layers_table(found: Bench) -> Table | None:
    """Each layer over the one before and over one stream, by the device's clock where there is one; None for less than two."""
    variants = {variant.label: variant for variant in found.result.variants}
    shown = [layer for layer in found.layers if layer.label in variants]
    if len(shown) < 2:
        return None
    clock = "device" if all(variants[layer.label].device for layer in shown) else "host"
    first = shown[0].label
    simulated = all(layer.predicted_us for layer in shown)
    # Where every layer was simulated, its prediction stands beside each gain, and the time itself gives way to it.
    rows: list[tuple[str, ...]] = []
    for layer in shown:
        variant = variants[layer.label]
        before, over = _measured(layer, first, variant, clock)
        if simulated:
            said = ["-" if gain is None else f"{gain:.2f}" for gain in _predicted(found, layer)]
            rows.append((layer.name, "wrong" if variant.failed else _gain(before), said[0], _gain(over), said[1]))
        else:
            rows.append((layer.name, _time(variant, clock), _gain(before), _gain(over)))
    columns: tuple[str, ...] = ("", f">{clock}", ">over the one before", ">over 1 stream")
    notes = ["times faster, in brackets: confidence interval"]
    if simulated:
        columns = ("", ">over the one before", ">pred.", ">over 1 stream", ">pred.")
        notes = [f"times faster by the {clock}'s clock, in brackets: confidence interval", _PREDICTED]
    # What fusion and grouping did is told of the first layer that has it.
    facts = [variants[layer.label].facts for layer in shown]
    if fused := [one for one in facts if "fused_groups" in one]:
        notes.append(_fusion(fused[0]))
    notes += masked_loops(next((one[MASKED_LOOPS] for one in facts if MASKED_LOOPS in one), {}))
    if grouped := [one for one in facts if one.get("groups")]:
        notes.append(_grouping(grouped[0], facts[0]))
    return Table("What each layer adds", columns, rows, "; ".join(notes))


def _measured(layer: AblationStep, first: str, variant: VariantResult, clock: str) -> list[Ratio | None]:
    """Gains over the layer before, and over the first; None where there is none."""
    overs = (layer.before, first)
    return [variant.ratio_over(over, clock) if over and over != layer.label else None for over in overs]


def _predicted(found: Bench, layer: AblationStep) -> tuple[float | None, float | None]:
    """Gains over the layer before, and over the first, as they were simulated; None where there is none."""
    times = {other.label: other.predicted_us for other in found.layers}
    first = found.layers[0]

    def over(label: str | None) -> float | None:
        other, own = times.get(label) if label is not None else None, layer.predicted_us
        return other / own if other and own else None

    return over(layer.before), None if layer is first else over(first.label)


def _time(variant: VariantResult, clock: str) -> str:
    summary = variant.device if clock == "device" else variant.host
    return "wrong" if variant.failed else micros(summary.median * 1e6) if summary else "-"


def _gain(ratio: Ratio | None) -> str:
    """A ratio in few characters: where it is nothing, the interval does not matter."""
    if ratio is None or ratio.significant or ratio.undecided:
        return gain(ratio)
    return f"{ratio.value:.2f} (no difference)"


def _fusion(facts: Mapping[str, Any]) -> str:
    """Sentence on the results of fusion."""
    text = f"fused: {plural(facts['fused_ops'], 'op')} in {plural(facts['fused_groups'], 'group')}"
    if "compile_seconds" in facts:
        text += f", {plural(facts['fused_kernels'], 'different kernel')}, compiled in {facts['compile_seconds']:.1f} s"
        if facts["compiled_from_cache"]:
            text += f" ({facts['compiled_from_cache']} from the disk)"
    refused = facts.get("not_fused") or {}
    if refused:
        text += f"; not fused as a whole: {', '.join(f'{count} groups ({why})' for why, count in refused.items())}"
    return text


def _grouping(facts: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Sentence on the results of grouping."""
    sizes = [f"{number} of {size}" for size, number in facts["group_sizes"].items()]
    shown = ", ".join(sizes[:_FEW_SIZES]) + (", …" if sizes[_FEW_SIZES:] else "")
    text = f"grouped: {plural(facts['grouped_ops'], 'op')} in {plural(facts['groups'], 'group')} ({shown})"
    if "kernels" in facts and "kernels" in before:
        text += f", kernels {before['kernels']} → {facts['kernels']}"
    return text


def layers_payload(found: Bench) -> list[dict[str, Any]]:
    """The layers for JSON, predicted and measured; the variants have all other figures."""
    variants = {variant.label: variant for variant in found.result.variants}
    first = found.layers[0].label
    layers = []
    for layer in found.layers:
        variant = variants.get(layer.label)
        clock = "device" if variant is not None and variant.device else "host"
        gains = _measured(layer, first, variant, clock) if variant is not None else [None, None]
        simulated = _predicted(found, layer)
        layers.append(
            {
                **picked(layer, "name variant=label before predicted_us"),
                "predicted_gain": simulated[0],
                "predicted_gain_over_one": simulated[1],
                "gain": gains[0],
                "gain_over_one": gains[1],
            }
        )
    return layers


def regression_table(found: BaselineComparison) -> Table:
    """Each variant then and now."""
    rows = [
        (
            _name(one.now),
            micros(one.then.median_us),
            micros(one.now.median_us),
            _percent(one.slower),
            f"± {100 * one.noise:.1f} %",
            _verdict(one, found.limit),
        )
        for one in found.changes
    ]
    note = "change: of the median, by the device's clock where there is one; noise: a difference below it says nothing"
    return Table(f"Beside {found.baseline.path}", ("", ">then", ">now", ">change", ">noise", ""), rows, note)


def _name(one: Timed) -> str:
    return one.label if one.batch is None else f"{one.label}, batch {one.batch}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _verdict(one: Change, limit: float | None) -> str:
    if limit is not None and one.fails(limit):
        return "slower"
    if abs(one.slower) <= one.noise:
        return "no difference"
    if one.slower <= 0:
        return "faster"
    return "slower" if limit is None else "slower, within the limit"


_MEASURE_LONGER = "measure longer, or on a machine with nothing else to do"


def warnings(found: BaselineComparison) -> list[str]:
    """Warnings about circumstances that make the comparison doubtful."""
    said = [f"{found.baseline.path} was measured with {difference}" for difference in found.differs]
    if found.missing:
        said.append(f"in the baseline only, so not compared: {'; '.join(map(_name, found.missing))}")
    if found.new:
        said.append(f"not in the baseline, so not compared: {'; '.join(map(_name, found.new))}")
    vague = [one for one in found.changes if found.limit is not None and one.noise > found.limit]
    if vague:
        vary = f"{plural(len(vague), 'variant varies', 'variants vary')} by more than the limit of {100 * (found.limit or 0):g} %"
        said.append(f"{vary}, so that much slower would not be noticed: {_MEASURE_LONGER}")
    if not found.changes:
        said.append("nothing could be compared with the baseline")
    return said


def failures(found: BaselineComparison) -> list[str]:
    """A sentence for each variant that is slower than it may be."""
    return [
        f"{_name(one.now)} is {_percent(one.slower).removeprefix('+')} slower than in {found.baseline.path}: "
        f"{micros(one.then.median_us)} then, {micros(one.now.median_us)} now (noise {100 * one.noise:.1f} %)"
        for one in found.failing
    ]


def regression_payload(found: BaselineComparison) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        "path": found.baseline.path,
        "failed": bool(found.failing),
        "limit_percent": None if found.limit is None else 100 * found.limit,
        "differs": found.differs,
        "changes": [
            {
                **picked(one, "batch=now.batch variant=now.label then_variant=then.label clock=now.clock"),
                **picked(one, "then_us=then.median_us now_us=now.median_us"),
                "slower_percent": 100 * one.slower,
                "noise_percent": 100 * one.noise,
                "failed": found.limit is not None and one.fails(found.limit),
            }
            for one in found.changes
        ],
        "missing": [_name(one) for one in found.missing],
        "new": [_name(one) for one in found.new],
    }


SHOWN = 8
"""Candidates in the table; JSON has them all."""


def tuning_table(tuned: Tuned) -> Table:
    """The best candidates, side by side."""
    measurements = tuned.found.measurements
    shown = [one for one in measurements if one.gain is not None][:SHOWN]
    first = next((one for one in measurements if one.candidate.key() == tuned.found.one.key()), None)
    if first is not None and first not in shown:
        shown[-1] = first
    rows = [_row(one) for one in shown]
    left = [one for one in measurements if one not in shown]
    measured = sum(one.gain is not None for one in left)
    reasons = Counter(
        "needs too much memory" if "memory" in one.skipped else one.skipped for one in left if one.gain is None
    )
    more = [f"{measured} more measured"] if measured else []
    more += [f"{number} not measured: {reason}" for reason, number in reasons.items()]
    note = "; ".join(filter(None, [_HEADINGS, ", ".join(more)]))
    return Table("Candidates", ("", ">streams", ">waits", ">predicted", ">measured", ">gain", ">memory"), rows, note)


_HEADINGS = "gain: over one stream, in the same rounds; memory: over one stream's"


def _row(measurement: Measurement) -> tuple[str, ...]:
    candidate = measurement.candidate
    return (
        candidate.name if candidate.mode == "plain" else f"{candidate.name}, {candidate.mode}",
        str(candidate.streams),
        str(candidate.waits),
        micros(candidate.predicted_us),
        "-" if measurement.seconds is None else micros(measurement.seconds * 1e6),
        "-" if measurement.gain is None else f"{measurement.gain:.2f}",
        f"{measurement.memory:.2f}",
    )


def notes(tuned: Tuned) -> list[str]:
    """Notes on the search, and on the candidate that was taken."""
    found = tuned.found
    tried = sum(measurement.gain is not None for measurement in found.measurements)
    lines = [
        f"Tuning took {found.seconds:.0f} s: {plural(tried, 'candidate')} and {plural(found.tried, 'change')} of the best were "
        f"measured, {len(found.gains)} of which led to the winner. It ended because {found.stopped}."
    ]
    if tuned.gain is None:
        return [*lines, f"One stream is kept: {tuned.why}."]
    beside = "one stream" if tuned.kernels == "plain" else "one stream of plain kernels"
    taken = f"Taken: {tuned.taken.name}, on {plural(tuned.streams, 'stream')} with {plural(tuned.waits, 'wait')}"
    if tuned.kernels != "plain":
        taken += f", {tuned.kernels} kernels"
    lines.append(
        f"{taken}: {_ratio(tuned.gain)} times as fast as {beside} in {tuned.gain.builds} fresh builds, {tuned.why}."
    )
    if tuned.over_one is not None and tuned.over_one is not tuned.gain:
        lines.append(f"Over one stream of the same kernels: {_ratio(tuned.over_one)}.")
    if tuned.over_candidate is not None:
        lines.append(f"Over the best candidate, {tuned.over_candidate.over}: {_ratio(tuned.over_candidate)}.")
    return lines


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


def tuning_payload(tuned: Tuned) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        **picked(tuned, "streams waits kernels name=taken.name why memory memory_ratio=memory"),
        **picked(tuned, "gain over_one over_candidate made_for"),
        "search": search_payload(tuned.found),
    }


def mixed_notes(mixed: MixedPrecision) -> list[str]:
    """Notes on the nodes that stay in float32."""
    away = f"the outputs are {mixed.error:.2g} away from IEEE float32 at most (root mean square, relative)"
    if not mixed.holds:
        return [
            f"No error as small as {mixed.most:g} can be had: with all ops in float32 {away}, so they stay there. "
            "With --precision ieee products are more exact."
        ]
    return [
        f"Of the ops that half precision is for, {mixed.in_half} of {mixed.ops} run in it and the others in float32, to keep within an "
        f"error of {mixed.most:g}: {away}, in {plural(mixed.evaluations, 'choice')} that were tried."
    ]


def mixed_payload(flat: FlatGraph, mixed: MixedPrecision) -> dict[str, Any]:
    """Nodes in float32 for JSON, by name. An error that is infinite is None."""
    return {
        **picked(mixed, "max_error=most kept=holds error errors ops ops_in_half=in_half"),
        "float32": [flat.graph.names[node] for node in sorted(mixed.wide)],
        "evaluations": mixed.evaluations,
    }


def search_payload(found: Found) -> dict[str, Any]:
    """Candidates that were tried, for JSON."""
    return {
        **picked(found, "seconds stopped changes_tried=tried"),
        "changes_kept": [picked(gain, "change ratio at at_s=at") for gain in found.gains],
        "candidates": [
            {
                **picked(one.candidate, "name kernels=mode streams waits predicted_us"),
                "measured_us": None if one.seconds is None else one.seconds * 1e6,
                **picked(one, "gain memory memory_ratio=memory skipped?"),
            }
            for one in found.measurements
        ],
    }


_SHARES = ("works", "driver", "filled")


def utilization_table(found: Sequence[Utilization]) -> Table:
    """A row per variant."""
    rows = [(short(one.label), *(_share(getattr(one, key)) for key in _SHARES)) for one in found]
    note = (
        "works: share of a user's step in which the device works; driver: share of the time in which a kernel ran (NVML), steps one behind "
        "the other; filled: share of the processors that kernels fill meanwhile, by their times alone"
    )
    return Table("How busy the GPU is", ("", *(f">{key}" for key in _SHARES)), rows, note)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def utilization_payload(found: Sequence[Utilization]) -> list[dict[str, Any]]:
    """Utilization for JSON."""
    return [
        {"label": one.label, **{f"{key}_percent": _percent_busy(getattr(one, key)) for key in _SHARES}} for one in found
    ]


def _percent_busy(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 3)


def placement_tables(placements: Mapping[str, Placement]) -> list[Table]:
    """Tables of the number of nodes on each device, and of each node, of some variants."""
    rows = []
    for label, nodes in placements.items():
        found = Counter(node.device for node in nodes)
        moved = Counter(node.device for node in nodes if _is_moved(node.asked, node.device))
        rows += [(label, device, count(found[device]), count(moved[device])) for device in sorted(found)]
    logs = []
    for label, nodes in placements.items():
        placed = [(node.name, node.op, node.asked or "-", node.device) for node in nodes]
        logs.append(Table(f"Placement: {label}", ("node", "op", "asked", "device"), placed, whole=True))
    note = "moved: nodes that were to be elsewhere: no such device, no kernel for them there, or a variable or loop binds them"
    return [Table("Devices", ("", "device", ">nodes", ">moved"), rows, note), *logs] if placements else []


def placement_notes(placements: Mapping[str, Placement]) -> list[str]:
    """Sentences on nodes that are not on the device that was asked for."""
    found = []
    for label, nodes in placements.items():
        moved = [node for node in nodes if _is_moved(node.asked, node.device)]
        if moved:
            one, verb = moved[0], "is" if len(moved) == 1 else "are"
            of = f"{plural(len(moved), 'node')} of {count(len(nodes))} {verb} elsewhere than asked"
            such = f"such as {one.name} on {one.device} instead of {one.asked}"
            refuses = "--tensorflow soft-placement=no refuses devices that are not there"
            found.append(f"{label}: {of}, {such}; {refuses}.")
    return found


def _is_moved(asked: str, device: str) -> bool:
    return bool(asked) and asked != device


def placement_payload(placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Placement for JSON: nodes by variant."""
    return {
        label: [picked(node, "node=name op asked? device") for node in nodes] for label, nodes in placements.items()
    }


_MOST_PAUSES = 5


def pauses_payload(traced: Sequence[Traced]) -> list[dict[str, Any]]:
    """Waits and gaps of the traced steps for JSON, variant by variant, the longest first."""
    return [
        {
            "variant": one.label,
            "stream": one.stream_of(pause.span),
            "kernel": one.timeline.spans[pause.span].name,
            "start_us": pause.start_us,
            "time_us": pause.time_us,
            "waits_for": None if pause.waits_for is None else one.timeline.spans[pause.waits_for].name,
            "of_stream": None if pause.waits_for is None else one.stream_of(pause.waits_for),
        }
        for one in traced
        for pause in one.timeline.pauses()
    ]


def pauses(traced: Sequence[Traced]) -> Table | None:
    """The longest waits and gaps of each traced step; None where streams were never idle."""
    rows, left = [], 0
    for one in traced:
        found = pauses_payload([one])
        left += max(0, len(found) - _MOST_PAUSES)
        for pause in found[:_MOST_PAUSES]:
            why = "nothing" if pause["waits_for"] is None else Name(pause["waits_for"])
            other = "-" if pause["of_stream"] is None else str(pause["of_stream"])
            times = (micros(pause["start_us"]), micros(pause["time_us"]))
            rows.append((short(one.label), str(pause["stream"]), *times, Name(pause["kernel"]), why, other))
    columns = ("", ">stream", ">from", ">idle", "until kernel", "waited for", ">of stream")
    title = "Longest waits and gaps of a step, as it was traced"
    return Table(title, columns, rows, more(left, "--format json")) if rows else None
