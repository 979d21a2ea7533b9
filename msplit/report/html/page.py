"""HTML report on a model: its sections, and what is computed for them.

The report's content: what is known of a model and its streams, section by section.

Works out everything that the report shows.
"""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from msplit import rules
from msplit.analysis.advice import guesses, suggest
from msplit.analysis.embeddings import columns as embedding_columns
from msplit.assignment.analysis import by_rules
from msplit.assignment.assignment import present_ids
from msplit.assignment.model import Defaults
from msplit.checks import examine
from msplit.checks.run import Reported
from msplit.checks.subject import Finding, Severity, Subject
from msplit.core.graph import Assignment, Ints, no_collection
from msplit.cost.costs import Costs
from msplit.cost.gpus import gpu_title
from msplit.cost.profile import Reached, roofline
from msplit.escape import html as text
from msplit.escape import visible
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import STREAM_ID
from msplit.progress import phase
from msplit.report.document import Table, count, micros, percent, plural, ratio, some
from msplit.report.document import roofline as roofline_table
from msplit.report.html import document
from msplit.report.html.data import columns
from msplit.report.html.document import facts, framed, table
from msplit.report.html.runs import MOST_BARS, MeasuredSteps, StepRun
from msplit.rules.auto import Auto
from msplit.rules.base import RuleContext
from msplit.rules.ruleset import RuleSet
from msplit.schedule.algorithms import ONE
from msplit.schedule.choose import REFINED, Proposal, best, choose
from msplit.schedule.judge import Bounds, Prediction, bounds, judge, predict, prediction_of
from msplit.schedule.problem import Problem
from msplit.schedule.simulate import evaluate
from msplit.shapes import Shapes

_MOST_OPS = 12
_MOST_NODES = 4
_MOST_POINTS = 500
"""Kernels in the roofline, those that take the most time."""


@dataclass(frozen=True, eq=False)
class Page:
    """Contents of a report.

    Attributes:
        prediction: The simulated run of its ids.
        bounds: Times that no schedule can beat.
        origin: Source of the ids, half a sentence.
        assignment: Rule that decided each node, if rules did.
        candidates: Ways to assign streams that were simulated, or None if none were.
        chosen: The one of them that the rule `auto` takes.
        timelines: Runs of those that the timeline can show, by the name of the candidate.
        findings: Findings of the checks, or None if they were not run.
        findings_note: Reason why they were not run, or a list of those that could not be.
        warnings: Sentences that the reader should not miss.
        judgement: Sentence on what the ids are worth.
        command: Command that makes the ids shown; "" where they are the model's own.
        shapes: Types and shapes of the tensors, where they are known.
        measured: Measurements of `bench`.
        reached: Rates of the kernels of a profile.
    """

    flat: FlatGraph
    costs: Costs
    prediction: Prediction
    bounds: Bounds
    origin: str
    assignment: Assignment | None = None
    candidates: Sequence[Proposal] | None = None
    chosen: Proposal | None = None
    timelines: Mapping[str, StepRun] = field(default_factory=dict)
    findings: Sequence[Reported] | None = None
    findings_note: str = ""
    warnings: Sequence[str] = ()
    judgement: str = ""
    command: str = ""
    shapes: Shapes | None = None
    measured: MeasuredSteps = field(default_factory=MeasuredSteps)
    reached: Sequence[Reached] = ()

    @property
    def runs(self) -> list[StepRun]:
        """Runs that the timeline can show beside the ids: candidates, the best first, then measured ones."""
        return [*self.timelines.values(), *self.measured.runs]


@no_collection()
def render(page: Page) -> str:
    """The report as one HTML file. The same page gives the same text."""
    sections = [("candidates", "Candidates", _candidates(page)), ("findings", "Findings", _findings(page))]
    if page.measured.rows:
        sections.insert(1, ("measured", "Measured", _measured(page)))
    if page.reached:
        sections.insert(len(sections) - 1, ("roofline", "Roofline", _roofline(page)))
    names = {"summary": "Summary", "graph": "Graph", "timeline": "Timeline"} | {key: name for key, name, _ in sections}
    parts = {
        "nav": "".join(f'<a href="#{key}">{name}</a>' for key, name in names.items()),
        "summary": _summary(page),
        "timeline": _timeline(page),
        "sections": "\n".join(
            f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{name}</h2>{body}</section>'
            for key, name, body in sections
        ),
    }
    data = columns(page.flat, page.costs, page.prediction, page.assignment, page.shapes, page.bounds.path)
    about = f"One step as msplit simulates it: {micros(page.prediction.makespan_us)}."
    if page.reached:
        data["roofline"] = [{**vars(one), "op": visible(one.op)} for one in page.reached[:_MOST_POINTS]]
    return document.embedded(
        document.MEASURED if page.reached else document.REPORT,
        str(page.flat.model.source),
        parts,
        {**data, "about": about, "command": visible(page.command), "runs": [run.columns() for run in page.runs]},
    )


def _summary(page: Page) -> str:
    flat, found, limits = page.flat, page.prediction, page.bounds
    kernels, host = int(np.count_nonzero(found.kernel_us > 0)), count(int(flat.host.sum()))
    tiles = [
        (micros(found.makespan_us), "predicted step"),
        (ratio(found.gain), f"predicted gain over one stream ({micros(found.one_us)})"),
        (str(len(found.lanes)), "streams in use"),
        (count(found.plan.waits), f"waits for {plural(found.plan.edges, 'cut edge')}"),
        (micros(limits.serial_us / limits.max_gain), "no schedule of these kernels is faster"),
    ]
    about = [
        ("model", str(flat.model.source)),
        ("format", str(flat.model.format)),
        ("stream ids", page.origin),
        ("nodes", f"{count(len(flat))}, {count(kernels)} of them launch a kernel, {host} run on the host"),
        ("inputs", some([tensor.name for tensor in flat.inputs], 8)),
        ("outputs", some([tensor.name for tensor in flat.outputs], 8)),
        ("priced for", f"{gpu_title(page.costs.gpu)}, {page.costs.source}"),
        ("critical path", f"{micros(limits.critical_path_us)} of {micros(limits.serial_us)} of work"),
    ]
    warnings = "".join(f'<p class="warning">{text(line)}</p>' for line in page.warnings)
    if page.judgement:
        warnings = f'<p class="note" id="judgement">{text(page.judgement)}</p>{warnings}'
    listed = "".join(f"<li><b>{text(value)}</b><span>{text(name)}</span></li>" for value, name in tiles)
    return (
        f'<ul class="tiles">{listed}</ul>{warnings}{facts(about)}'
        f'<div class="columns"><div>{_loads(page)}</div><div>{table(_ops(page))}</div></div>'
    )


def _timeline(page: Page) -> str:
    found = page.prediction
    return text(
        f"One step as msplit simulates it on a {gpu_title(page.costs.gpu)}: {micros(found.makespan_us)}, of which "
        f"{micros(found.problem.machine.step_us)} to start and end it. Candidates and measured steps can be shown beside it. "
        "Curves are waits. Ctrl (⌘ on a Mac) and the wheel zoom, drag to move, click a kernel for its details."
    )


def _loads(page: Page) -> str:
    """Per stream what it has to do, with a bar in its colour."""
    found = page.prediction
    loads = found.load_us()
    most, total = max(loads.values(), default=0.0), sum(loads.values())
    kernels = Counter(found.ids[found.kernel_us > 0].tolist())
    rows = []
    for stream, load in loads.items():
        slot = 0 if stream <= 0 else 1 + (stream - 1) % 15
        width = 100 * load / most if most > 0 else 0
        rows.append(
            f'<tr><td class="right">{stream}</td><td class="right">{count(kernels[stream])}</td>'
            f'<td class="right">{text(micros(load))}</td><td class="right">{text(percent(load, total))}</td>'
            f'<td class="bar-cell"><span class="bar" style="width:{width:.1f}%;background:var(--s{slot})"></span></td></tr>'
        )
    if not rows:
        return '<p class="note">No node launches a kernel.</p>'
    return framed((">stream", ">kernels", ">cost", ">share", "of the busiest"), rows, "Streams")


def _ops(page: Page) -> Table:
    times, nodes = defaultdict[str, float](float), Counter[str]()
    for op, time in zip(page.flat.graph.ops, page.prediction.kernel_us.tolist(), strict=True):
        if time > 0:
            times[op] += time
            nodes[op] += 1
    total = sum(times.values())
    order = sorted(times, key=lambda op: (-times[op], op))
    rows = [(op, count(nodes[op]), micros(times[op]), percent(times[op], total)) for op in order[:_MOST_OPS]]
    left = len(order) - len(rows)
    note = f"and {plural(left, 'more op')}" if left > 0 else ""
    return Table("Ops by cost", ("op", ">kernels", ">cost", ">share"), rows, note)


def _candidates(page: Page) -> str:
    if page.candidates is None:
        return '<p class="note">No other assignments were simulated (--no-candidates).</p>'
    found = page.prediction
    one = next((candidate.makespan_us for candidate in page.candidates if candidate.streams == 1), found.one_us)

    def row(name: str, streams: int, waits: int, time: float, style: str = "") -> str:
        gain = text(ratio(one / time) if time > 0 else "-")
        return (
            f'<tr{style}><td>{name}</td><td class="right">{streams}</td><td class="right">{count(waits)}</td>'
            f'<td class="right">{text(micros(time))}</td><td class="right">{gain}</td></tr>'
        )

    rows = [row("the ids shown here", len(found.lanes), found.plan.waits, found.makespan_us)]
    tried = [candidate for candidate in page.candidates if candidate.skipped is None]
    runs = [*page.timelines]
    for candidate in sorted(tried, key=lambda c: (c.makespan_us, c is not page.chosen, c.waits)):
        name, style = text(candidate.name), " class=best" if candidate is page.chosen else ""
        if candidate.name in runs:
            name = f'<button type=button class=node data-run="{1 + runs.index(candidate.name)}">{name}</button>'
        rows.append(row(name, candidate.streams, candidate.waits, candidate.makespan_us, style))
    listed = framed(("assignment", ">streams", ">waits", ">predicted step", ">gain over one stream"), rows)
    skipped = "".join(
        f'<p class="hint">{text(one.name)} was not tried: {text(one.skipped)}.</p>'
        for one in page.candidates
        if one.skipped is not None
    )
    hint = (
        '<p class="hint">What the rule <code>auto</code> would choose from, by predicted time; its choice is bold. '
        "A click shows one on the timeline, with the command that makes it. "
        "Rules that keep nodes together bind the candidates too.</p>"
    )
    return hint + listed + skipped


def _measured(page: Page) -> str:
    found = page.measured
    one = next((device or host for _, streams, device, host in found.rows if streams == 1 and (device or host)), None)
    rows = [
        (
            name,
            str(streams),
            "-" if device is None else micros(device),
            "-" if host is None else micros(host),
            "-" if one is None or not (device or host) else ratio(one / (device or host or 1.0)),
        )
        for name, streams, device, host in found.rows
    ]
    heads = ("variant", ">streams", ">step, device", ">step, host", ">over the first on one stream")
    note = f'<p class="hint">What <code>{text(found.command or "msplit bench")}</code> measured of {text(found.model)}.</p>'
    return note + table(Table("", heads, rows))


def _roofline(page: Page) -> str:
    hint = (
        "Kernels of the profile, each alone on the GPU: what they reach over what they do per byte. Lines are ceilings of its data sheet; "
        "what fits into the L2 cache was measured in it. A larger dot takes more of a step. Axes are logarithmic."
    )
    listed = table(roofline_table(page.reached, _MOST_OPS, "msplit profile --format json has all"))
    return f'<p class="hint">{hint}</p><div id="roof" class="figure"></div>{listed}'


def _findings(page: Page) -> str:
    note = f'<p class="hint">{text(page.findings_note)}</p>' if page.findings_note else ""
    if page.findings is None:
        return note
    if not page.findings:
        return f'<p class="note">The checks found nothing.</p>{note}'
    rows = []
    for reported in page.findings:
        finding, severity = reported.finding, reported.severity
        style = {"error": "error", "warning": "warn"}.get(severity, "op")
        links = [
            f'<button type="button" class="node" data-node="{text(name)}">{text(name)}</button>'
            for name in finding.nodes
        ]
        nodes = ", ".join(links[:_MOST_NODES])
        if len(links) > _MOST_NODES:
            rest = ", ".join(links[_MOST_NODES:])
            nodes += f"<details><summary>{len(links) - _MOST_NODES} more</summary>{rest}</details>"
        fix = f'<br><span class="op">{text(finding.fix)}</span>' if finding.fix else ""
        rows.append(
            f'<tr><td class="short">{text(reported.code)}</td><td class="short {style}">{text(severity)}</td>'
            f"<td>{text(finding.text)}{fix}</td><td>{nodes}</td></tr>"
        )
    return framed(("code", "severity", "finding", "nodes"), rows) + note


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
    defaults: Defaults | None = None,
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
        defaults: Rules, costs and sizes that the model's own ids are judged with.

    Raises:
        RulesError: The rules file is wrong.
        AssignError: The rules contradict each other on this graph, or an id in the model is none.
    """
    annotated = bool(flat.graph.nodes_with(STREAM_ID))
    loaded: RuleSet | None = None
    assignment: Assignment | None = None
    if ruleset is not None or not annotated:
        name = ruleset or suggest(flat, costs, embedding_columns(flat, costs)).rule_set
        loaded = rules.load(name, streams=streams)
        with phase("assigning"):
            outcome = by_rules(flat, costs, loaded, streams)
        ids, assignment = outcome.ids, outcome.assignment
        origin = f"from the rules {loaded.source}"
        if not ruleset:
            origin += ", which fit this model; it has none of its own"
    else:
        ids, origin = present_ids(flat, least=0), "as they are in the model"
    with phase("simulating"):
        prediction = predict(flat, costs, ids)
    found, note = _found(flat, costs, loaded, annotated, defaults, own=assignment is None)
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
    profile = None if defaults is None else defaults.workload.profile
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
        **(_candidate_runs(flat, costs, ids, loaded, options) if candidates else {}),
        findings=found,
        findings_note=note,
        warnings=warnings,
        judgement=judge(limits, prediction.gain, len(prediction.lanes), guessed=guessed / max(kernels, 1)).words,
        command=command,
        shapes=shapes,
        reached=() if profile is None else roofline(profile, flat, costs),
    )


def _command(flat: FlatGraph, options: str, further: Mapping[str, object]) -> str:
    words = [str(word) for pair in further.items() for word in pair]
    return f"msplit assign {shlex.quote(str(flat.model.source))} {shlex.join(words)}{options and f' {options}'} -o OUT"


def _candidate_runs(flat: FlatGraph, costs: Costs, ids: Ints, ruleset: RuleSet | None, options: str) -> dict[str, Any]:
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


def _found(
    flat: FlatGraph, costs: Costs, ruleset: RuleSet | None, annotated: bool, defaults: Defaults | None, *, own: bool
) -> tuple[list[Reported] | None, str]:
    """Findings of the checks about the ids in the file; there are none about ids that are not there yet."""
    if not annotated:
        return None, (
            "The checks look at the stream ids in a model, and this one has none yet: the ids shown here come from rules. "
            "Write them with msplit assign, and report on the result."
        )
    if ruleset is None and defaults is not None:
        ruleset = defaults.ruleset
    report = examine(Subject(flat, costs, ruleset=ruleset, defaults=defaults))
    found = [*report.findings]
    for code, number in report.omitted.items():
        more = Finding(f"{plural(number, 'more finding')} of this code", "see msplit check")
        found.append(Reported(code, Severity.INFO, more))
    skipped = "; ".join(f"{code}: {why}" for code, why in report.skipped.items())
    note = "" if own else "About the ids in the file, which the rules need not have given. "
    note += f"{plural(len(report.checks) - len(report.skipped), 'check')} run"
    note += f"; not run: {skipped}." if skipped else "."
    return found, note + (f" Judged with {report.judged_with}." if report.judged_with else "")
