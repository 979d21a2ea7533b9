"""Gain of each layer, from one stream to larger kernels, as a part of the report of `bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msplit.benchmark.results import Bench
from msplit.core.statistics import Ratio
from msplit.report.document import Table
from msplit.report.jsonio import picked
from msplit.report.text import gain, micros, plural
from msplit.run.setup import AblationStep
from msplit.verify.results import VariantResult

_PREDICTED = "pred.: predicted, by the simulator"
_FEW_SIZES = 4
"""Sizes of groups in the sentence about them."""


def table(found: Bench) -> Table | None:
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


def payload(found: Bench) -> list[dict[str, Any]]:
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
