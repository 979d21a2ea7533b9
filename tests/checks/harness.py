"""One check on one small graph."""

import numpy as np

from msplit.checks import examine
from msplit.checks.subject import CheckSettings, Subject, Thresholds
from msplit.core.dag import Dag
from msplit.cost import estimate
from msplit.flatten.build import flatten
from msplit.rules import parse as parse_rules
from msplit.schedule import planfile
from msplit.schedule.plan import make_plan, record_order
from msplit.shapes.infer import infer
from tests.flatten import graphdefs
from tests.graphs import parse


def report(graph, code="MS", *, rules=None, plan=None, against=None, streams=None, folder=None, **settings):
    """The report of the checks of a code on a graph: text as in tests/graphs.py, or (flat graph, costs).

    `rules` is the text of a rules file, `against` another graph, `settings` are fields of `CheckSettings` and of `Thresholds`.
    """
    flat, costs = parse(graph) if isinstance(graph, str) else graph
    limits = {key: settings.pop(key) for key in list(settings) if key in Thresholds.__dataclass_fields__}
    chosen = CheckSettings(**{"select": (code,), **settings}, streams=streams, limits=Thresholds(**limits))
    ruleset = None if rules is None else parse_rules(rules, "rules.yaml", folder=folder, streams=streams)
    if against is not None:
        against = (parse(against)[0] if isinstance(against, str) else against).model
    return examine(Subject(flat, costs, chosen, ruleset, plan, against))


def found(graph, code, **options):
    """The findings of one check."""
    return [one.finding for one in report(graph, code, **options).findings]


def skipped(graph, code, **options):
    """Why a check said nothing."""
    return report(graph, code, **options).skipped.get(code)


def read(tmp_path, body, *functions, **options):
    """A real GraphDef (text as in tests/flatten/graphdefs.py), written, read, flattened and priced."""
    flat = flatten(graphdefs.model(tmp_path, body, *functions, **options))
    return flat, estimate(flat, infer(flat))


def rules_of(*lines, streams=4):
    """A rules file with these entries."""
    return "\n".join(["version: 1", f"streams: {streams}", "rules:", *(f"  - {line}" for line in lines)]) + "\n"


def plan_of(graph, ids):
    """The plan of some ids, as `msplit assign --emit plan` would write it."""
    flat, costs = parse(graph) if isinstance(graph, str) else graph
    return planfile.parse(dumps(flat, costs, ids), "plan.json")


def dumps(flat, costs, ids):
    import json

    dag = Dag.from_graph(flat.graph)
    on = (costs.time_us > 0) & ~flat.host
    made = make_plan(dag, np.where(on, ids, -1).astype(np.int32), record_order(dag, costs.time_us))
    return json.dumps(planfile.dump(made, flat))
