"""Report of `analyze` on isomorphic branches, and on those that nearly are."""

from __future__ import annotations

from typing import Any

from msplit.analysis.isomorphic import Isomorphic, NearlyIsomorphic
from msplit.assignment.analysis import Analysis
from msplit.report.document import Name, Table, first
from msplit.report.text import count, dimensions, micros

_LISTED = 100
"""Entries in JSON."""


def isomorphic(found: Analysis, most: int | None) -> Table:
    """Branches that can run as one."""
    names = found.flat.graph.names

    def row(one: Isomorphic) -> tuple[str, ...]:
        counts = (len(one.branches), len(one.branches[0]), one.groups)
        return Name(names[one.branches[0][0]]), *map(count, counts), micros(one.saved_us)

    title, columns = "Alike branches, which could run as one", (">branches", ">kernels each", ">groups", ">saves")
    alike = found.isomorphic_branches.isomorphic
    return first(title, ("first kernel", *columns), alike, row, most, "--show branches", "kind")


def nearly(found: Analysis, most: int | None) -> Table:
    """Branches that miss it."""
    names = found.flat.graph.names

    def row(one: NearlyIsomorphic) -> tuple[str, ...]:
        first_kernel, like = Name(names[one.branches[0][0]]), Name(names[one.like[0]])
        return first_kernel, count(len(one.branches)), like, _difference(found, one), micros(one.cost_us)

    columns = ("first kernel", ">branches", "is like", "but", ">costs")
    return first("Nearly alike branches", columns, found.isomorphic_branches.nearly, row, most, "--show branches")


def _difference(found: Analysis, one: NearlyIsomorphic) -> str:
    ops = found.flat.graph.ops
    if one.extra >= 0:
        return f"one op more: {ops[one.branches[0][one.extra]]}"
    if one.lacks >= 0:
        return f"lacks {ops[one.like[one.lacks]]}"
    mine, theirs = one.branches[0][one.differs], one.like[one.differs]
    here, there = found.shapes.shape(mine), found.shapes.shape(theirs)
    return f"{ops[mine]} {f'{dimensions(here)}, not {dimensions(there)}' if here != there else 'reads other sizes'}"


def payload(found: Analysis) -> dict[str, Any]:
    """Both for JSON."""
    names, ops = found.flat.graph.names, found.flat.graph.ops
    return {
        "alike": [
            {
                "first": [names[nodes[0]] for nodes in one.branches],
                "ops": [ops[node] for node in one.branches[0]],
                "groups": one.groups,
                "saved_us": one.saved_us,
            }
            for one in found.isomorphic_branches.isomorphic[:_LISTED]
        ],
        "nearly_alike": [
            {
                "first": [names[nodes[0]] for nodes in one.branches],
                "like": names[one.like[0]],
                "difference": _difference(found, one),
                "cost_us": one.cost_us,
            }
            for one in found.isomorphic_branches.nearly[:_LISTED]
        ],
    }
