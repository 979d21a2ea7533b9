"""A plan does not order an edge.

Finds: With `--plan`: two nodes that depend on each other are on different streams and neither the order of the streams nor the waits of the
plan make one end before the other starts; or a wait comes before its event in the order of recording, so that it waits for nothing; or the
plan can never end, has a node on two streams or on another than its id in the model, names nodes that the graph does not have, leaves out
nodes that launch a kernel, starts a stream before the step or ends the step before a stream. The proof shares no code with what makes
plans.

Why: Such a plan gives wrong results now and then: a kernel reads what another one has not written yet.

Example: `["join", "tower_b/out"]` was deleted from `waits`.

Mend: Never edit plans by hand: write them again with `msplit assign MODEL --rules FILE --emit plan PATH`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from msplit.checks.subject import ABSENT, NODES_SHOWN, Check, Finding, Severity, Subject, about, nodes, verb
from msplit.core.dag import Dag, reached
from msplit.schedule.plan import Plan
from msplit.schedule.plan_check import check
from msplit.schedule.planfile import FIX


def find(subject: Subject) -> Iterator[Finding]:
    """Nodes that the plan names in vain, leaves out or has elsewhere than the model, and orders that it lacks, fork and join included."""
    assert subject.plan_file is not None
    source, graph_names = subject.plan_file.source, subject.flat.graph.names
    plan, unknown = subject.resolved_plan
    if unknown:
        count = len(unknown)
        yield Finding(
            f"the plan names {nodes(unknown, count)}, which {verb(count, 'is', 'are')} not in the graph",
            FIX,
            unknown[:NODES_SHOWN],
            count,
            file=source,
        )
    left_out = np.flatnonzero(subject.launches & (plan.stream < 0))
    if len(left_out):
        count = len(left_out)
        what = f"{verb(count, 'launches', 'launch')} a kernel and {verb(count, 'is', 'are')} not in the plan"
        yield subject.about(left_out, what, FIX, file=source)
    elsewhere = np.flatnonzero((plan.stream >= 0) & (subject.stated != ABSENT) & (subject.stated != plan.stream))
    if len(elsewhere):
        first = int(elsewhere[0])
        yield subject.about(
            elsewhere,
            f"{verb(len(elsewhere), 'is on another stream than its id says', 'are on other streams than their ids say')}: "
            f"'{graph_names[first]}' is on stream {plan.stream[first]}, and its id is {subject.stated[first]}",
            FIX,
            file=source,
        )
    ordered = dict(subject.plan_file.order)
    torn = list(dict.fromkeys(n for n, _, lane in subject.plan_file.kernels if n in ordered and ordered[n] != lane))
    if torn:
        what = f"{verb(len(torn), 'is', 'are')} on another stream in `kernels` than in `order`"
        yield about(torn, what, FIX, file=source)
    violations = check(plan, Dag.from_graph(subject.flat.graph)) if len(plan.order) else []
    for violation in violations:
        involved = [node for node in (violation.producer, violation.consumer) if node >= 0]
        what = f"'{graph_names[violation.consumer]}' {violation.text}"
        if violation.producer >= 0:
            what += f": '{graph_names[violation.producer]}'"
        yield Finding(what, FIX, subject.names(involved), len(involved), file=source)
    if not violations:
        for stream, end in loose_ends(plan):
            text = {
                "start": f"the first node of stream {stream} waits for nothing, not even the start of the step: it is not in `fork`",
                "end": f"the end of the step does not wait for stream {stream}: its last node is not in `join`",
            }[end]
            yield Finding(text, FIX, file=source)


def loose_ends(plan: Plan) -> Iterator[tuple[int, str]]:
    """Streams that the plan's fork does not start ("start") or its join does not end ("end"). The plan has no circle of waits."""
    lanes: dict[int, list[int]] = {}
    for node in plan.order.tolist():
        lanes.setdefault(int(plan.stream[node]), []).append(node)
    waits: dict[int, list[int]] = {}
    for waiter, event in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        waits.setdefault(waiter, []).append(event)
    forked, joined = set(plan.fork.tolist()), set(plan.join.tolist())
    for stream, members in sorted(lanes.items()):
        # Whatever waits for an event began behind whoever recorded it, and so, in the end, behind a fork or the origin stream.
        if stream != 0 and members[0] not in forked and members[0] not in waits:
            yield stream, "start"
    for previous, node in (pair for members in lanes.values() for pair in pairwise(members)):
        waits.setdefault(node, []).append(previous)
    ended = reached([*joined, *lanes.get(0, [])[-1:]], lambda node: waits.get(node, ()))
    for stream, members in sorted(lanes.items()):
        if members[-1] not in ended:
            yield stream, "end"


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find, needs=("plan",))
