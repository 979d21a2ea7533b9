"""The report of `msplit bisect`."""

from __future__ import annotations

from typing import Any

from msplit.benchmark.bisect import Bisected, Suspect
from msplit.flatten.flat import FlatGraph
from msplit.report.document import Document, Table, dimensions, heading, picked, plural
from msplit.verify.compare import OutputComparison

_WHERE = {
    "cpu": "on the CPU, with simulated streams: what a GPU's kernels do is not seen",
    "cuda": "on the GPU, one stream, launch by launch",
}
_SHOWN = 8


def document(flat: FlatGraph, found: Bisected) -> Document:
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
        title=heading(flat.model.path, flat.model.format), facts=facts, tables=tables, notes=[_conclusion(found)]
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


def payload(flat: FlatGraph, found: Bisected) -> dict[str, Any]:
    """Result as plain data."""
    return {
        "model": picked(flat.model, "path format"),
        **picked(found, "device compared differing variables left_out kernels culprit drift"),
    }
