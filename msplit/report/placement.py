"""The placement log: where TensorFlow put each node, beside where it was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from msplit.engines.tensorflow.session import Placement
from msplit.report.document import Table, count, picked, plural


def tables(placements: Mapping[str, Placement]) -> list[Table]:
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


def notes(placements: Mapping[str, Placement]) -> list[str]:
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


def payload(placements: Mapping[str, Placement]) -> dict[str, Any]:
    """Placement for JSON: nodes by variant."""
    return {
        label: [picked(node, "node=name op asked? device") for node in nodes] for label, nodes in placements.items()
    }
