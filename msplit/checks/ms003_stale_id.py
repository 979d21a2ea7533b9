"""Stream ids do not fit the graph any more.

Finds: Three things can show it. With `--rules`: the rules, applied again to the graph without its ids, give a node another stream than it
has. With `--against OLD`: a node has changed its op or its inputs and kept its id, nodes have lost theirs, nodes that have no id came in
beside such that have one, or nodes with ids are gone. With `--plan`: the plan was made for another graph, or has nodes on other streams.
What `msplit assign` was given, it records with the model, and goes for the check unless something else is given: rules, streams, --batch,
--shape, --costs gpu= and profile=, on which rules that weigh costs depend, and which ids the model's code had set
(`msplit.stream`, `tf.stream`).
Where there is no record, name the nodes of the latter in `hand_set`, as patterns, and they are kept.

Why: Streams were chosen for the costs and dependencies of a graph that is no more. The graph still runs right, but slower than it could,
and nobody notices.

Example: Tower B got two more layers after the streams were assigned; the rules now put half of tower A elsewhere.

Mend: Run `msplit assign MODEL --rules FILE` again and commit what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import ABSENT, Check, Finding, Severity, Skip, Subject, about, stated, verb, wanted
from msplit.core.graph import CONTROL, Graph
from msplit.errors import AssignError
from msplit.flatten.flat import host_nodes
from msplit.formats.summary import graph_hash
from msplit.schedule import planfile

_FIX = "run `msplit assign` with the rules again and commit what it writes"


def find(subject: Subject) -> Iterator[Finding]:
    """Whatever there is to hold the ids against: the rules, the plan, the model they were made for."""
    if subject.ruleset is None and subject.plan_file is None and subject.against is None:
        raise Skip("it needs --rules, --plan or --against")
    others = subject.plan_file is not None or subject.against is not None
    lost = subject.defaults is not None and subject.defaults.missing is not None
    if subject.ruleset is not None and not (others and (lost or subject.kernels_not_chosen)):
        yield from _by_rules(subject)
    if subject.plan_file is not None:
        yield from _by_plan(subject)
    if subject.against is not None:
        yield from _by_model(subject)


def _by_rules(subject: Subject) -> Iterator[Finding]:
    outcome = subject.outcome
    if isinstance(outcome, AssignError):
        yield Finding(f"the rules can not be applied to this graph: {outcome.what}", outcome.fix or _FIX)
        return
    ids = wanted(subject)
    differ = (subject.stated != ABSENT) & (ids != ABSENT) & (subject.stated != ids) & ~subject.hand_set
    pairs = np.unique(np.stack([subject.stated[differ], ids[differ]]), axis=1)
    for has, wants in pairs.T.tolist():
        which = np.flatnonzero(differ & (subject.stated == has) & (ids == wants))
        rule, why = outcome.assignment.why(int(which[0])) or ("default", "no rule claims it")
        yield subject.about(
            which,
            f"{verb(len(which), 'is', 'are')} on stream {has}, but the rules say stream {wants} ({rule}: {why})",
            f"{_FIX}; ids that the model's code sets by hand belong in `hand_set`",
        )


def _by_plan(subject: Subject) -> Iterator[Finding]:
    plan_file = subject.plan_file
    assert plan_file is not None
    model, fix = subject.flat.model, planfile.FIX
    if plan_file.graph_hash and model.graph_def is not None and plan_file.graph_hash != graph_hash(model):
        yield Finding(
            "the plan was made for another graph: its graph hash differs", fix, file=plan_file.source, depends=""
        )
    if not subject.annotated:
        return
    plan, _ = subject.resolved_plan
    streams = plan.stream.copy()
    index = subject.flat.graph.index
    for name, _, lane in plan_file.kernels:  # the engine runs by these
        if name in index and lane != subject.ids[index[name]]:
            streams[index[name]] = lane
    which = np.flatnonzero((streams >= 0) & subject.placed & (streams != subject.ids))
    if len(which):
        first, are = int(which[0]), verb(len(which), "is", "are")
        what = f"{are} on another stream in the plan ({streams[first]}) than on the graph ({subject.ids[first]})"
        yield subject.about(which, what, fix, file=plan_file.source, depends="")


def _by_model(subject: Subject) -> Iterator[Finding]:
    """Against the model that the ids were made for: what changed and kept its id, what lost it, what got none, what is gone."""
    old = subject.against
    assert old is not None
    new, before = subject.flat.model.graph, old.graph
    changed: list[str] = []
    lost: list[str] = []
    added: list[str] = []
    gone: list[str] = []
    for prefix, one, other in _pairs(new, before):
        now, then = stated(one), stated(other)
        host = host_nodes(one)
        for node, name in enumerate(one.names):
            place = other.index.get(name)
            if place is None:
                if now[node] == ABSENT and not host[node] and _beside_ids(one, node, now):
                    added.append(prefix + name)
            elif now[node] == ABSENT:
                if then[place] != ABSENT and not host[node]:
                    lost.append(prefix + name)
            elif now[node] == then[place] and _signature(one, node) != _signature(other, place):
                changed.append(prefix + name)
        gone += [
            prefix + other.names[place]
            for place in np.flatnonzero(then != ABSENT).tolist()
            if other.names[place] not in one.index
        ]
    where, are, them = old.path, verb(len(gone), "is", "are"), verb(len(gone), "it", "them")
    for names, what in (
        (changed, f"changed since {where} (op or inputs) and kept the stream id of then"),
        (lost, f"had a stream id in {where} and {verb(len(lost), 'has', 'have')} none now"),
        (added, f"came since {where}, beside nodes with stream ids, and got none"),
        (gone, f"had a stream id in {where} and {are} gone: the other streams were chosen with {them}"),
    ):
        if names:
            yield about(names, what, _FIX, depends="")


def _pairs(new: Graph, old: Graph) -> Iterator[tuple[str, Graph, Graph]]:
    yield "", new, old
    for name, function in new.functions.items():
        if name in old.functions:
            yield f"{name}/", function.body, old.functions[name].body


def _signature(graph: Graph, node: int) -> tuple[str, tuple[tuple[str, int], ...], frozenset[str]]:
    edges = graph.edges
    data, control = [], []
    for edge in graph.in_edges(node):
        name = graph.names[int(edges.src[edge])]
        if edges.port[edge] == CONTROL:
            control.append(name)
        else:
            data.append((name, int(edges.port[edge])))
    return graph.ops[node], tuple(data), frozenset(control)


def _beside_ids(graph: Graph, node: int, ids: np.ndarray) -> bool:
    near = [*graph.predecessors(node).tolist(), *graph.successors(node).tolist()]
    return bool((ids[near] != ABSENT).any())


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find, depends="rules")
