"""Works out everything that the report shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msplit import rules
from msplit.analysis.branches import find
from msplit.analysis.columns import columns
from msplit.analysis.contract import Blocks, Kernels
from msplit.analysis.suggest import suggest
from msplit.assignment import Assignment
from msplit.checks import Subject, examine
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.formats import STREAM_ID
from msplit.graph import Ints
from msplit.progress import phase
from msplit.report.compare import annotated_ids
from msplit.report.html.page import Candidate, Finding, Page
from msplit.report.text import count, plural
from msplit.rules import Context, RuleSet
from msplit.rules.auto import Auto
from msplit.schedule.bounds import bounds
from msplit.schedule.choose import best, choose
from msplit.schedule.predict import predict

CANDIDATE_STREAMS = 8
"""Streams that candidates may use at least, whatever the ids use."""


def page(
    flat: FlatGraph,
    costs: Costs,
    *,
    ruleset: str | None = None,
    streams: int | None = None,
    candidates: bool = True,
    warnings: Sequence[str] = (),
) -> Page:
    """Gathers the content of a report.

    Args:
        flat: The graph.
        costs: Cost of each node.
        ruleset: Rules that give the ids. By default the model's own ids; for a model without any, the rule set that fits it.
        streams: Number of streams of the rules, instead of what they say.
        candidates: Whether to simulate other assignments.
        warnings: What to show at the top, such as what was taken for granted about shapes.

    Raises:
        RulesError: The rules file is wrong.
        AssignError: The rules contradict each other on this graph, or an id in the model is none.
    """
    annotated = bool(flat.graph.nodes_with(STREAM_ID))
    loaded: RuleSet | None = None
    assignment: Assignment | None = None
    if ruleset is not None or not annotated:
        name = ruleset or _fitting(flat, costs)
        loaded = rules.load(name, streams=streams)
        with phase("assigning"):
            outcome = rules.assign(flat, costs, loaded, streams=streams)
        ids, assignment = outcome.ids, outcome.assignment
        origin = f"from the rules {loaded.source}" + (
            "" if ruleset else ", which fit this model; it has none of its own"
        )
    else:
        ids, origin = annotated_ids(flat), "as they are in the model"
    with phase("simulating"):
        prediction = predict(flat, costs, ids)
    found, note = _findings(flat, costs, loaded, annotated, own=assignment is None)
    guessed = int(np.count_nonzero(~costs.known & (prediction.kernel_us > 0)))
    if guessed:
        kernels = count(int(np.count_nonzero(prediction.kernel_us > 0)))
        warnings = (
            *warnings,
            f"{plural(guessed, 'kernel')} of {kernels} have unknown shapes, so their cost is a guess. Give --batch and --shape.",
        )
    return Page(
        flat=flat,
        costs=costs,
        prediction=prediction,
        bounds=bounds(flat, costs),
        origin=origin,
        assignment=assignment,
        candidates=_candidates(flat, costs, ids, loaded) if candidates else None,
        findings=found,
        findings_note=note,
        warnings=tuple(warnings),
    )


def _fitting(flat: FlatGraph, costs: Costs) -> str:
    branches = find(Blocks.from_kernels(Kernels.of(flat, costs)))
    return suggest(flat, costs, branches, columns(flat, costs)).rule_set


def _candidates(flat: FlatGraph, costs: Costs, ids: Ints, ruleset: RuleSet | None) -> list[Candidate]:
    streams = max(CANDIDATE_STREAMS, len(np.unique(ids)), ruleset.streams if ruleset is not None else 0)
    context = Context(flat, costs, streams)
    problem = Auto().problem(context, Assignment.empty(len(flat)))
    if not len(problem):
        return []
    with phase("simulating other assignments"):
        tried = choose(problem, streams)
    winner = best(tried)
    return [Candidate(one.name, one.streams, one.waits, one.makespan_us, one is winner, one.skipped) for one in tried]


def _findings(
    flat: FlatGraph, costs: Costs, ruleset: RuleSet | None, annotated: bool, *, own: bool
) -> tuple[list[Finding] | None, str]:
    """What the checks say of the ids in the file. They can say nothing of ids that are not there yet."""
    if not annotated:
        return None, (
            "The checks look at the stream ids in a model, and this one has none yet: the ids shown here come from rules. "
            "Write them with msplit assign, and report on the result."
        )
    report = examine(Subject(flat, costs, ruleset=ruleset))
    found = [
        Finding(one.code, str(one.severity), one.finding.text, one.finding.fix, one.finding.nodes)
        for one in report.findings
    ]
    for code, number in report.omitted.items():
        found.append(Finding(code, "info", f"{plural(number, 'more finding')} of this code", "see msplit check"))
    note = f"{plural(len(report.checks) - len(report.skipped), 'check')} run"
    skipped = "; ".join(f"{code}: {why}" for code, why in report.skipped.items())
    note += f"; not run: {skipped}." if skipped else "."
    if not own:
        note = "About the ids in the file, which the rules need not have given. " + note
    return found, note
