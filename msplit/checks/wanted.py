"""The ids that the rules would write, as the file can hold them."""

from __future__ import annotations

import numpy as np

from msplit.checks.base import Skip
from msplit.checks.subject import ABSENT, Longs, Subject
from msplit.flatten.origin import OriginalNode, to_ids
from msplit.rules import Outcome
from msplit.rules.auto import NOT_CHOSEN


def wanted(subject: Subject) -> Longs:
    """Per node the id that applying the rules would write on it; ABSENT for host nodes and for nodes that are not in the file.

    The body of a function that is called from several places has one id per node, which all its copies in the flat graph share.

    Raises:
        Skip: The rules can not be applied, MS003 says why; or they choose kernels, for which the model would have to run.
    """
    outcome = subject.outcome
    if not isinstance(outcome, Outcome):
        raise Skip("the rules contradict each other on this graph (see MS003)")
    if any(subject.remarks(NOT_CHOSEN)):
        raise Skip("the rules choose kernels, too (`kernels: best`), which takes running the model: give the --plan")
    flat = subject.flat
    ids = np.where(flat.host, ABSENT, outcome.ids.astype(np.int64))
    if not flat.function_names:
        return ids
    asked = np.where(flat.host, -1, outcome.ids).astype(np.int32)
    written, _ = to_ids(flat, asked.tolist(), subject.costs.time_us.tolist())
    for node in range(len(flat)):
        key = _original(subject, node)
        ids[node] = ABSENT if key is None or flat.host[node] else written.get(key, ABSENT)
    return ids


def _original(subject: Subject, node: int) -> OriginalNode | None:
    """The node of the file that a flat node is, None for one that inlining has added."""
    flat = subject.flat
    function, number = flat.origin(node)
    if number < 0:
        return None
    graph = flat.model.graph
    if function is not None:
        number += len(graph.functions[function].parameters)
        graph = graph.functions[function].body
    return (function, graph.names[number]) if graph.ops[number] == flat.graph.ops[node] else None
