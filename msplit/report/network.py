"""Cost of a cluster: bytes between its tasks, and the time of a step beside that of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msplit.report.document import Table
from msplit.report.text import count, micros, plural, size
from msplit.verify.results import VariantResult

_MOST = 8
"""Most pairs of tasks that are shown; JSON has all."""


def table(variants: Sequence[VariantResult]) -> Table | None:
    """For each variant over a cluster what a step sends; None where there is no such variant."""
    local = variants[0].host
    rows: list[tuple[str, ...]] = []
    for variant in variants:
        if "network" not in variant.facts or variant.host is None:
            continue
        facts = variant.facts
        more = "" if local is None else _difference((variant.host.median - local.median) * 1e6)
        rows.append(
            (
                variant.label,
                count(facts["network_tensors"]),
                size(facts["network_bytes"]),
                size(facts["client_bytes"]),
                more,
            )
        )
        for sent in facts["network"][:_MOST]:
            largest = f"{sent['largest']} ({size(sent['largest_bytes'])})"
            rows.append(
                (
                    f"  {sent['source']} to {sent['target']}: {largest}",
                    count(sent["tensors"]),
                    size(sent["bytes"]),
                    "",
                    "",
                )
            )
        if (left := len(facts["network"]) - _MOST) > 0:
            rows.append((f"  … and {left} more pairs", "", "", "", ""))
    if not rows:
        return None
    return Table(
        "What goes over the network in one step",
        ("", ">tensors", ">between tasks", ">this process", ">step"),
        rows,
        "between tasks: bytes that TensorFlow counted in a traced step, with the largest tensor of each pair; this process: inputs and "
        f"outputs, between it and the first worker; step: median beside that of {variants[0].label}",
    )


def _difference(us: float) -> str:
    return f"{'-' if us < 0 else '+'}{micros(abs(us))}"


def sentence(facts: Mapping[str, Any]) -> str:
    """Network traffic of one executable, in a sentence; "" where it runs in one process."""
    if "network" not in facts:
        return ""
    pairs = "; ".join(f"{one['source']} to {one['target']} {size(one['bytes'])}" for one in facts["network"][:_MOST])
    sent = f"{plural(facts['network_tensors'], 'tensor')}, {size(facts['network_bytes'])}"
    return f"A step sends {sent} between tasks of the cluster{f' ({pairs})' if pairs else ''}."
