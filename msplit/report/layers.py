"""What each layer adds, from one stream to larger kernels, as a part of the report of `bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msplit.api.benchmark import Bench
from msplit.measure.result import VariantResult
from msplit.measure.stats import Ratio
from msplit.report.document import Table
from msplit.report.text import gain, micros, plural

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
    rows = []
    for layer in shown:
        variant = variants[layer.label]
        before = variant.ratio_over(layer.before, clock) if layer.before else None
        over = variant.ratio_over(first, clock) if layer.label != first else None
        rows.append((layer.name, _time(variant, clock), _gain(before), _gain(over)))
    columns = ("", f">{clock}", ">over the one before", ">over 1 stream")
    notes = ["times faster, in brackets: confidence interval"]
    fused = [variants[layer.label].facts for layer in shown if "fused_groups" in variants[layer.label].facts]
    if fused:
        notes.append(_fusion(fused[0]))
    grouped = [variants[layer.label].facts for layer in shown if variants[layer.label].facts.get("groups")]
    if grouped:
        notes.append(_grouping(grouped[0], variants[first].facts))
    return Table("What each layer adds", columns, rows, "; ".join(notes))


def _time(variant: VariantResult, clock: str) -> str:
    summary = variant.device if clock == "device" else variant.host
    return "wrong" if variant.failed else micros(summary.median * 1e6) if summary else "-"


def _gain(ratio: Ratio | None) -> str:
    """A ratio in few characters: where it is nothing, the interval does not matter."""
    if ratio is None or ratio.significant or ratio.undecided:
        return gain(ratio)
    return f"{ratio.value:.2f} (no difference)"


def _fusion(facts: Mapping[str, Any]) -> str:
    """What fusion did, in a sentence."""
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
    """What grouping did, in a sentence."""
    sizes = [f"{number} of {size}" for size, number in facts["group_sizes"].items()]
    shown = ", ".join(sizes[:_FEW_SIZES]) + (", …" if sizes[_FEW_SIZES:] else "")
    text = f"grouped: {plural(facts['grouped_ops'], 'op')} in {plural(facts['groups'], 'group')} ({shown})"
    if "kernels" in facts and "kernels" in before:
        text += f", kernels {before['kernels']} → {facts['kernels']}"
    return text


def payload(found: Bench) -> list[dict[str, Any]]:
    """The layers for JSON: the variants have the figures."""
    return [{"name": layer.name, "variant": layer.label, "before": layer.before} for layer in found.layers]
