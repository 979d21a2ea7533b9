"""Works out everything that the report shows."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from msplit import rules
from msplit.analysis.embeddings import columns
from msplit.analysis.guesses import guesses, suggest
from msplit.assignment.defaults import Basis
from msplit.checks import examine
from msplit.checks.finding import Finding, Severity
from msplit.checks.run import Reported
from msplit.checks.subject import Subject
from msplit.core.graph import Assignment, Ints
from msplit.core.memory import no_collection
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import STREAM_ID
from msplit.progress import phase
from msplit.report.compare import annotated_ids, by_rules
from msplit.report.html.page import Page
from msplit.report.html.runs import MOST_BARS, StepRun
from msplit.report.text import count, micros, plural
from msplit.rules.auto import Auto
from msplit.rules.base import RuleContext
from msplit.rules.ruleset import RuleSet
from msplit.schedule.algorithms import ONE
from msplit.schedule.bounds import bounds
from msplit.schedule.choose import REFINED, Proposal, best, choose
from msplit.schedule.judge import judge, predict, prediction_of
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import evaluate
from msplit.shapes import Shapes

CANDIDATE_STREAMS = 8
"""Streams that candidates may use at least, whatever the ids use."""


@no_collection()
def page(
    flat: FlatGraph,
    costs: Costs,
    *,
    ruleset: str | None = None,
    streams: int | None = None,
    candidates: bool = True,
    shapes: Shapes | None = None,
    options: str = "",
    basis: Basis | None = None,
) -> Page:
    """Gathers the content of a report.

    Args:
        flat: The graph.
        costs: Costs of its nodes.
        ruleset: Rules that give the ids. By default the model's own ids; for a model without any, the rule set that fits it.
        streams: Number of streams of the rules, instead of what they say.
        candidates: True to simulate other assignments.
        shapes: Types and shapes of the tensors, to show them, and what was taken for granted about them.
        options: Options of the command that the model and its sizes need, as typed in a shell, for the commands that the page shows.
        basis: Rules, costs and sizes that the model's own ids are judged with.

    Raises:
        RulesError: The rules file is wrong.
        AssignError: The rules contradict each other on this graph, or an id in the model is none.
    """
    annotated = bool(flat.graph.nodes_with(STREAM_ID))
    loaded: RuleSet | None = None
    assignment: Assignment | None = None
    if ruleset is not None or not annotated:
        name = ruleset or suggest(flat, costs, columns(flat, costs)).rule_set
        loaded = rules.load(name, streams=streams)
        with phase("assigning"):
            outcome = by_rules(flat, costs, loaded, streams)
        ids, assignment = outcome.ids, outcome.assignment
        origin = f"from the rules {loaded.source}"
        if not ruleset:
            origin += ", which fit this model; it has none of its own"
    else:
        ids, origin = annotated_ids(flat), "as they are in the model"
    with phase("simulating"):
        prediction = predict(flat, costs, ids)
    found, note = _findings(flat, costs, loaded, annotated, basis, own=assignment is None)
    kernel = prediction.kernel_us > 0
    kernels = int(np.count_nonzero(kernel))
    guessed, mend, warnings = int(np.count_nonzero(~costs.known & kernel)), "", list[str]()
    if shapes is not None:
        unknown = guesses(flat, costs, shapes)
        guessed, mend, warnings = len(unknown.nodes), f" {unknown.mend}", list(shapes.assumed)
    if guessed:
        of = f"{plural(guessed, 'kernel')} of {count(kernels)}"
        warnings.append(f"{of} have unknown shapes, so their cost is a guess.{mend}")
    limits = bounds(flat, costs)
    command = ""
    if loaded is not None:
        asked = {"--rules": loaded.source.removesuffix(" (shipped)"), "--streams": outcome.streams}
        command = _command(flat, options, asked)
    return Page(
        flat=flat,
        costs=costs,
        prediction=prediction,
        bounds=limits,
        origin=origin,
        assignment=assignment,
        **(_candidates(flat, costs, ids, loaded, options) if candidates else {}),
        findings=found,
        findings_note=note,
        warnings=warnings,
        judgement=judge(limits, prediction.gain, len(prediction.lanes), guessed=guessed / max(kernels, 1)).words,
        command=command,
        shapes=shapes,
    )


def _command(flat: FlatGraph, options: str, further: Mapping[str, object]) -> str:
    words = [str(word) for pair in further.items() for word in pair]
    return f"msplit assign {shlex.quote(str(flat.model.path))} {shlex.join(words)}{options and f' {options}'} -o OUT"


def _candidates(flat: FlatGraph, costs: Costs, ids: Ints, ruleset: RuleSet | None, options: str) -> dict[str, Any]:
    """Candidates, the chosen one and their timelines, as fields of a `Page`."""
    streams = max(CANDIDATE_STREAMS, len(np.unique(ids)), ruleset.streams if ruleset is not None else 0)
    context = RuleContext(flat, costs, streams)
    problem = Auto().problem(context, Assignment.empty(len(flat)))
    if not len(problem):
        return {"candidates": []}
    with phase("simulating other assignments"):
        tried = choose(problem, streams)
    room = MOST_BARS // max(len(problem.block[problem.block >= 0]), 1)
    shown = sorted((one for one in tried if one.skipped is None), key=lambda one: one.makespan_us)[:room]
    timelines = {one.name: _run(flat, costs, problem, context.order, one, streams, options) for one in shown}
    return {"candidates": tried, "chosen": best(tried), "timelines": timelines}


def _run(
    flat: FlatGraph, costs: Costs, problem: Problem, order: Ints, one: Proposal, streams: int, options: str
) -> StepRun:
    """The timeline of a candidate, and the command that makes it: a rules file of one rule, and assign by it."""
    lanes = np.unique(one.stream[~problem.joints]).astype(np.int32)
    kernel_us = np.where(flat.host, 0.0, costs.time_us)
    ids = np.maximum(problem.spread(one.stream), 0).astype(np.int32)
    compact = np.searchsorted(lanes, one.stream).astype(np.int32)
    evaluation = evaluate(problem, np.minimum(compact, max(len(lanes) - 1, 0)).astype(np.int32), one.order)
    name = one.name.removeprefix(f"{REFINED} ")
    rules_file = f"{name}.yaml"
    text = f"{{version: 1, streams: {streams}, rules: [{{auto: {{candidates: [{name}]}}}}]}}"
    command = f"echo '{text}' > {rules_file}\n{_command(flat, options, {'--rules': rules_file})}"
    about = (
        f"Candidate {one.name}, simulated: {micros(one.makespan_us)} on {plural(one.streams, 'stream')} with {plural(one.waits, 'wait')}."
        + ("" if one.name.startswith(REFINED) or name == ONE else " The command refines it where that makes it faster.")
    )
    return StepRun.of(one.name, about, command, prediction_of(ids, lanes, kernel_us, order, evaluation))


def _findings(
    flat: FlatGraph, costs: Costs, ruleset: RuleSet | None, annotated: bool, basis: Basis | None, *, own: bool
) -> tuple[list[Reported] | None, str]:
    """Findings of the checks about the ids in the file; there are none about ids that are not there yet."""
    if not annotated:
        return None, (
            "The checks look at the stream ids in a model, and this one has none yet: the ids shown here come from rules. "
            "Write them with msplit assign, and report on the result."
        )
    if ruleset is None and basis is not None:
        ruleset = basis.ruleset
    report = examine(Subject(flat, costs, ruleset=ruleset, basis=basis))
    found = [*report.findings]
    for code, number in report.omitted.items():
        more = Finding(f"{plural(number, 'more finding')} of this code", "see msplit check")
        found.append(Reported(code, Severity.INFO, more))
    skipped = "; ".join(f"{code}: {why}" for code, why in report.skipped.items())
    note = "" if own else "About the ids in the file, which the rules need not have given. "
    note += f"{plural(len(report.checks) - len(report.skipped), 'check')} run"
    note += f"; not run: {skipped}." if skipped else "."
    return found, note + (f" Judged with {report.judged_with}." if report.judged_with else "")
