"""Report of `analyze`, with the section on isomorphic branches.

Report of `analyze` on isomorphic branches, and on those that nearly are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from msplit.analysis.inventory import BranchSize, RegionSize, TableUse
from msplit.analysis.isomorphic import Isomorphic, NearlyIsomorphic
from msplit.analysis.rows.lengths import about_lengths
from msplit.analysis.shared import SharedWork
from msplit.assignment.analysis import Analysis
from msplit.cost.gpus import gpu_title
from msplit.errors import MsplitError
from msplit.formats.guess import left_out_text
from msplit.formats.model import Endpoint
from msplit.inputs.make import composite_inputs, input_specs
from msplit.report.document import (
    ENDPOINT,
    Document,
    Name,
    Table,
    count,
    dimensions,
    first,
    heading,
    micros,
    operations,
    percent,
    picked,
    plural,
    ratio,
    size,
    some,
)
from msplit.schedule.split import SplitJudgement

if TYPE_CHECKING:
    from msplit.engines.cuda.coverage import Coverage


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


def isomorphic_payload(found: Analysis) -> dict[str, Any]:
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


_FEW = 5
"""Rows of a table in the summary, so that the verdict below it stays on the screen."""

_FEW_OPS = 8


def document(
    found: Analysis,
    views: Sequence[str],
    coverage: Coverage | None = None,
    commands: Sequence[Sequence[str]] = (),
    split: SplitJudgement | None = None,
    once: Sequence[SharedWork | None] = (),
    loose: Collection[str] = (),
) -> Document:
    """Document of the views that the user asked for: `views` are of ``summary``, ``branches``, ``embeddings``, ``regions``, ``nodes`` and
    ``all``; `split` is what several GPUs are worth, where that was asked for, and `once` what inputs have to themselves, and rows that are
    repeated; `loose` is what `loose_inputs` found."""
    everything, summary = "all" in views, "summary" in views
    most = {view: None if everything or view in views else _FEW for view in ("branches", "embeddings", "regions")}
    tables: list[Table] = []
    # The summary has the beginning of each table that the model has something for; a view that was asked for has all of its own.
    if everything or summary:
        tables.append(_ops(found, None if everything else _FEW_OPS))
    if summary or most["branches"] is None:
        several = (isomorphic(found, most["branches"]), nearly(found, most["branches"]))
        tables += [_branches(found, most["branches"]), *(table for table in several if table.rows)]
    if (summary and found.tables) or most["embeddings"] is None:
        tables.append(_embeddings(found, most["embeddings"]))
    if (summary and found.regions) or most["regions"] is None:
        tables.append(_regions(found, most["regions"]))
    if everything or "nodes" in views:
        tables.append(_nodes(found))
    if coverage is not None:
        tables.append(_coverage(coverage))
    return Document(
        title=heading(found.flat.model.source, found.flat.model.format),
        facts=_facts(found) if everything or summary else (),
        tables=tables,
        notes=[*_notes(found, coverage, loose), *(one.words for one in (split, *once) if one is not None)],
        warnings=_warnings(found),
        following=commands,
    )


def _facts(found: Analysis) -> list[tuple[str, str]]:
    flat, model, costs, limits, level = found.flat, found.flat.model, found.costs, found.bounds, found.level_width
    host = int(np.count_nonzero(flat.host))
    facts = {"signature": model.signature} if model.signature else {}
    facts["inputs"] = _endpoints(model.inputs)
    facts["outputs"] = _endpoints(model.outputs)
    if model.left_out is not None:
        facts["outputs"] += " (guessed: --part outputs= names others)"
    facts["nodes"] = f"{count(len(flat))}: {count(len(flat) - host)} for the GPU, {count(host)} for the host"
    facts["kernels"] = f"launched by {plural(found.kernels, 'node')}"
    weights = sum(parameter.bytes for parameter in found.parameters)
    facts["parameters"] = f"{plural(len(found.parameters), 'tensor')}, {size(weights)}"
    if found.functions:
        facts["functions"] = plural(len(found.functions), "function") + " in the library; calls are inlined"
    if found.group_sizes:
        largest = plural(max(found.group_sizes), "node")
        facts["colocation"] = f"{plural(len(found.group_sizes), 'group')}, the largest of {largest}"
    if costs.source != "static":
        facts["costs"] = costs.source
    moved = size(float(costs.bytes.sum()))
    facts["work"] = f"{micros(limits.serial_us)} of kernels, {operations(float(costs.flops.sum()))}, {moved} moved"
    facts["critical path"] = f"{micros(limits.critical_path_us)}, {plural(len(limits.path), 'node')}"
    facts["work / path"] = ratio(limits.serial_us / limits.critical_path_us) if limits.critical_path_us else "-"
    facts["level width"] = f"{plural(level.width, 'kernel')} on level {level.level} of {level.levels}"
    antichain, skipped = found.antichain.size, found.antichain.skipped
    facts["max antichain"] = skipped if antichain is None else plural(antichain, "mutually independent kernel")
    facts["gain at most"] = _gains(found)
    facts["bounds"] = _bounds(found)
    return list(facts.items())


def _endpoints(endpoints: Sequence[Endpoint]) -> str:
    return some([f"{one.name} {one.dtype} {dimensions(one.shape)}".strip() for one in endpoints], 6, "; ")


def _gains(found: Analysis) -> str:
    """The estimate for each number of streams, up to the first that reaches what no number exceeds."""
    limits = found.bounds
    most = ratio(limits.max_gain)
    parts = []
    for streams, gain in found.gains.items():
        if ratio(gain) == most:
            parts.append(f"{most} on {streams} or more streams")
            break
        parts.append(f"{ratio(gain)} on {streams}")
    else:
        parts.append(f"{most} on any number of streams")
    static = found.costs.source == "static"
    source = f"on a {gpu_title(found.costs.gpu)}, from its data sheet" if static else "by measured costs"
    return f"{', '.join(parts)} ({source})"


def _bounds(found: Analysis) -> str:
    limits = found.bounds
    whole = f", kept whole {micros(limits.whole_us)}" if limits.whole_us > 1.001 * limits.critical_path_us else ""
    return (
        f"critical path {micros(limits.critical_path_us)}{whole}, SM time {micros(limits.sm_time_us)}, "
        f"bytes {micros(limits.bandwidth_us)}, FLOPs {micros(limits.flops_us)}; with fused kernels {micros(limits.fused_us)}"
    )


def _ops(found: Analysis, most: int | None) -> Table:
    ops = sorted(found.ops, key=lambda op: (-op.time_us, -(op.gpu + op.host), op.op))
    serial_us = found.bounds.serial_us
    rows = [
        (op.op, *map(count, (op.gpu, op.host, op.kernels)), micros(op.time_us), percent(op.time_us, serial_us))
        for op in ops[:most]
    ]
    left = ops[len(rows) :]
    nodes = plural(sum(op.gpu + op.host for op in left), "node")
    note = f"and {plural(len(left), 'more op')} with {nodes} (--show all)" if left else ""
    return Table("Ops by cost", ("op", ">GPU", ">host", ">kernels", ">time", ">share"), rows, note)


def _branches(found: Analysis, most: int | None) -> Table:
    names = found.flat.graph.names

    def row(branch: BranchSize) -> tuple[str, ...]:
        fork = Name(names[branch.fork]) if branch.fork is not None else "(inputs)"
        return Name(names[int(branch.nodes[0])]), count(len(branch.nodes)), micros(branch.time_us), fork

    columns = ("first kernel", ">kernels", ">time", "forks at")
    return first("Branches that matter, largest first", columns, found.branches, row, most, "--show branches")


def _embeddings(found: Analysis, most: int | None) -> Table:
    def row(use: TableUse) -> tuple[str, ...]:
        sizes = f"{count(use.table.rows)} × {use.table.columns}"
        return Name(use.table.name), sizes, size(use.table.bytes), count(use.lookups), micros(use.time_us)

    columns = ("table", ">rows × width", ">size", ">lookups", ">time")
    uses = sorted(found.tables, key=lambda use: (-use.table.bytes, use.table.name))
    return first("Embedding tables", columns, uses, row, most, "--show embeddings")


def _regions(found: Analysis, most: int | None) -> Table:
    def row(one: RegionSize) -> tuple[str, ...]:
        return one.region.kind, Name(one.region.name), count(len(one.nodes)), micros(one.time_us)

    regions = sorted(found.regions, key=lambda region: -region.time_us)
    columns = ("kind", "name", ">nodes", ">time")
    return first("Regions that stay on one stream", columns, regions, row, most, "--show regions")


def _nodes(found: Analysis) -> Table:
    flat, costs = found.flat, found.costs
    columns = (flat.graph.names, flat.graph.ops, flat.host.tolist(), costs.time_us.tolist(), costs.known.tolist())
    rows = [
        (name, op, "host" if host else "GPU", micros(time) + ("" if known or time == 0 else " ?"))
        for name, op, host, time, known in zip(*columns, strict=True)
    ]
    note = "? marks a time guessed because a shape is unknown"
    return Table("Nodes", ("name", "op", "side", ">time"), rows, note, whole=True)


def _coverage(coverage: Coverage) -> Table:
    left = coverage.dynamic if coverage.uncaptured is None else coverage.uncaptured
    told = "dynamic: launch by launch" + (", unless proved dense" if coverage.uncaptured is None else "")
    rows = [(op, count(number), told if op in left else "yes") for op, number in sorted(coverage.covered.items())]
    rows += [(op, count(len(names)), f"no (such as {names[0]})") for op, names in sorted(coverage.missing.items())]
    for where, by_op in (("before", coverage.host), ("behind", coverage.behind)):
        for op, names in sorted(by_op.items()):
            theirs = ", in TensorFlow" if op in coverage.in_tensorflow else ""
            rows.append((op, count(len(names)), f"on the host, {where}{theirs}"))
    rows += [
        (op, count(len(names)), f"no: host, in the middle (such as {names[0]})")
        for op, names in sorted(coverage.stuck.items())
    ]
    for why, places in coverage.refused.items():
        op, _, said = why.partition(": ")
        rows.append((op, count(len(places)), f"no: {said or why}"))
    return Table("Ops that the cuda engine can run", ("op", ">nodes", "covered"), rows)


def _warnings(found: Analysis) -> list[str]:
    unknown, number = found.guesses, len(found.guesses.nodes)
    if not number:
        return [*found.shapes.assumed]
    ops = ", ".join(f"{op} ({number})" for op, number in list(unknown.ops.items())[:5])
    of = f"{count(number)} of {plural(found.kernels, 'kernel')} {'has' if number == 1 else 'have'}"
    return [*found.shapes.assumed, f"{of} unknown shapes, so that the cost is a guess: {ops}. {unknown.mend}"]


_IDS = (
    "msplit's engine assigns streams by itself; what `msplit assign` writes is for DeepRec and NVIDIA's fork of TensorFlow, "
    "which read it."
)


def loose_inputs(found: Analysis) -> Collection[str]:
    """Inputs that are parts of sparse and ragged tensors; none of a model with an input of an unknown type, which nothing runs."""
    try:
        return composite_inputs(found.flat, input_specs(found.flat, 1, {})[0], 1)
    except MsplitError:
        return ()


_LOOSE = (
    "are parts of sparse or ragged tensors: a build or a server takes as many entries of each as it was prepared with, and refuses "
    "others. Make such tensors inside of the model, from text, tf.Example records or padded rows: then rows may have any number."
)


def _notes(found: Analysis, coverage: Coverage | None, loose: Collection[str]) -> list[str]:
    launched = loose or (coverage is not None and coverage.uncaptured)
    lines = [*filter(None, [] if launched else [found.engine_words]), found.judgement.words]
    if found.judgement.helps:
        lines.append(_IDS)
    if found.judgement.helps and found.suggestion.rule_set != "default":
        lines.append(f"Rule set for this kind of model: {found.suggestion.rule_set}. {found.suggestion.why}")
    if coverage is not None:
        lines += filter(None, [_coverage_note(coverage), about_lengths(found.flat)])
    if loose:
        lines.append(f"{some(sorted(loose), 5)} {_LOOSE}")
    if text := left_out_text(found.flat.model):
        lines.append(f"{text[:1].upper()}{text[1:]}.")
    return lines


def _coverage_note(coverage: Coverage) -> str:
    if coverage.reasons:
        fix = "Use --engine tensorflow, or cut it with --part inputs= and outputs=."
        return f"The cuda engine can not run this model: {'; '.join(coverage.reasons)}. {fix}"
    can = "The cuda engine can run every op of this model."
    if coverage.unbuilt:
        can = (
            "The cuda engine has every op of this model. Whether it can run its loops and branches, and capture its steps, was not tried, "
            f"for {coverage.unbuilt}."
        )
    return " ".join([can, *coverage.ways])


def payload(
    found: Analysis,
    views: Sequence[str],
    coverage: Coverage | None = None,
    commands: Sequence[Sequence[str]] = (),
    split: SplitJudgement | None = None,
    once: Sequence[SharedWork | None] = (),
) -> dict[str, Any]:
    """The analysis for JSON. The arguments are those of `document`."""
    flat, model, costs, names = found.flat, found.flat.model, found.costs, found.flat.graph.names
    result: dict[str, Any] = {
        "model": {
            **picked(model, "path=source format tags signature signatures versions"),
            "inputs": [picked(endpoint, ENDPOINT) for endpoint in model.inputs],
            "outputs": [picked(endpoint, ENDPOINT) for endpoint in model.outputs],
            "outputs_guessed": model.left_out is not None,
            "outputs_left_out": model.left_out or (),
        },
        **picked(costs, "gpu costs=source"),
        "nodes": {"total": len(flat), "host": int(np.count_nonzero(flat.host)), "kernels": found.kernels},
        **picked(found, "ops functions"),
        "parameters": {"tensors": len(found.parameters), "bytes": sum(p.bytes for p in found.parameters)},
        **picked(found, "colocation_groups=group_sizes level_width=level_width.width max_antichain=antichain.size"),
        "flops": float(costs.flops.sum()),
        "bytes": float(costs.bytes.sum()),
        "bounds_us": picked(
            found.bounds,
            "serial=serial_us critical_path=critical_path_us bandwidth=bandwidth_us flops=flops_us sm_time=sm_time_us",
            "lower_bound=lower_bound_us fused=fused_us kept_whole=whole_us",
        ),
        "gain_at_most": {**found.gains, "any": found.bounds.max_gain},
        "suggestion": picked(found, "rule_set=suggestion.rule_set helps=judgement.helps why=suggestion.why"),
        "judgement": found.judgement,
        "next": " ".join(commands[0]) if commands else None,
        "commands": [" ".join(command) for command in commands],
        "unknown_shapes": len(found.guesses.nodes),
        **picked(found, "proved_dense=guesses.dense assumed=shapes.assumed"),
        "branches": [
            {
                "first": names[int(b.nodes[0])],
                "kernels": len(b.nodes),
                "time_us": b.time_us,
                "fork": names[b.fork] if b.fork is not None else None,
                "join": names[b.join] if b.join is not None else None,
            }
            for b in found.branches
        ],
        **isomorphic_payload(found),
        "embeddings": [
            picked(use, "table=table.name rows=table.rows width=table.columns bytes=table.bytes lookups time_us")
            for use in found.tables
        ],
        "regions": [
            {**picked(one, "kind=region.kind name=region.name"), "nodes": len(one.nodes), "time_us": one.time_us}
            for one in found.regions
        ],
    }
    if "nodes" in views or "all" in views:
        columns = {
            "name": names,
            "op": flat.graph.ops,
            "host": flat.host.tolist(),
            "time_us": costs.time_us.tolist(),
            "known": costs.known.tolist(),
        }
        result["node_list"] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if coverage is not None:
        result["coverage"] = coverage
    result |= dict(map(_shared, filter(None, once)))
    if split is not None:
        best = "way=name makespan_us copies copied_bytes=copied weight_bytes=weights tables"
        result["split"] = {
            **picked(split, "gpus kind helps words one_us gain"),
            "best": split.best and picked(split.best, best),
        }
    return result


def _shared(work: SharedWork) -> tuple[str, dict[str, Any]]:
    key, more = ("repeated", " rows mixed") if work.rows else ("shared", " named")
    return key, picked(work, "inputs nodes time_us share flops bytes words" + more)


_VERDICTS = {"nothing": "no kernels", "never": "streams never help", "little": "streams gain little"}
"""Kind of a judgement -> words; of one that helps, its gain is told."""


def overview(found: Sequence[Mapping[str, Any]], errors: Mapping[str, str]) -> Document:
    """Several analyses, as `payload` gives them, in a row each, and how many models could not be read."""
    rows = [
        (
            str(one["model"]["path"]),
            count(one["nodes"]["total"]),
            count(one["nodes"]["kernels"]),
            micros(one["bounds_us"]["serial"]),
            ratio(one["gain_at_most"]["any"] or 1.0),
            _VERDICTS.get(judged["kind"]) or f"{ratio(judged['gain'])} on {plural(judged['streams'], 'stream')}",
        )
        for one in found
        for judged in [one["judgement"]]
    ]
    helped = sum(one["suggestion"]["helps"] for one in found)
    notes = [f"{plural(len(found), 'model')}: streams help {helped:,}."]
    if errors:
        notes.append(f"{plural(len(errors), 'model')} could not be analyzed.")
    columns = ("model", ">nodes", ">kernels", ">work", ">gain at most", "verdict")
    return Document("Several models", tables=[Table("", columns, rows)] if rows else [], notes=notes)


def overview_payload(found: Sequence[Mapping[str, Any]], errors: Mapping[str, str]) -> dict[str, Any]:
    """Several analyses for JSON, each as it would be printed alone."""
    helped = sum(one["suggestion"]["helps"] for one in found)
    return {
        "models": list(found),
        "errors": [{"model": model, "error": why} for model, why in errors.items()],
        "summary": {"count": len(found), "failed": len(errors), "helps": helped},
    }
