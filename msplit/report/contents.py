"""Reports on files: of a model (`show`), and of a build.

Contents of a model file, for `msplit show`.

Contents of a build, as text and JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msplit.benchmark.benchmark import BuildBench
from msplit.formats.build import Bucket
from msplit.formats.model import Endpoint
from msplit.formats.summary import Contents, FunctionHead, GraphContents, SignatureSummary
from msplit.report import benchmark
from msplit.report.document import Document, Table, count, dimensions, heading, picked, plural, size
from msplit.run.build import Build

_FEW_FUNCTIONS = 20


def document(found: Contents, *, everything: bool = False) -> Document:
    """Tables of signatures and functions of each graph: all functions where `everything` is asked for, else the largest."""
    tables = [table for graph in found.graphs for table in _tables(found, graph, everything=everything)]
    facts = [("graph", _about(graph)) for graph in found.graphs]
    warnings = [] if found.graphs else ["the SavedModel holds no graph"]
    unknown = [graph for graph in found.graphs if graph.why_not]
    warnings += [f"{_named(found, graph)}inputs and outputs are not known: {graph.why_not}" for graph in unknown]
    return Document(heading(found.path, found.format), facts, tables, _hints(found), warnings)


def _about(graph: GraphContents) -> str:
    parts = [
        f"tags {', '.join(graph.tags)}" if graph.tags else "",
        plural(graph.nodes, "node"),
        plural(len(graph.signatures), "signature") if graph.signatures else "no signature",
        plural(len(graph.functions), "function") if graph.functions else "no functions",
        f"TensorFlow {graph.tensorflow}" if graph.tensorflow else "",
    ]
    return "; ".join(part for part in parts if part)


def _named(found: Contents, graph: GraphContents) -> str:
    """Title that tells a graph from the file's others."""
    return f"{','.join(graph.tags) or 'no tags'}: " if len(found.graphs) > 1 else ""


def _tables(found: Contents, graph: GraphContents, *, everything: bool) -> list[Table]:
    name = _named(found, graph)
    tables = [
        _ends(f"{name}signature {one.name}{f' ({one.method})' if one.method else ''}", one.inputs, one.outputs)
        for one in graph.signatures
    ]
    if not graph.signatures and not graph.why_not:
        tables.append(_ends(f"{name}no signature: guessed from the graph", graph.inputs, graph.outputs))
    if graph.functions:
        tables.append(_functions(name, graph.functions, everything=everything))
    return tables


def _ends(title: str, inputs: Sequence[Endpoint], outputs: Sequence[Endpoint]) -> Table:
    rows = [
        (kind, end.name, end.tensor, end.dtype or "?", "any" if end.shape is None else dimensions(end.shape))
        for kind, ends in (("input", inputs), ("output", outputs))
        for end in ends
    ]
    note = "any: of any number of axes" if any(row[-1] == "any" for row in rows) else ""
    return Table(title, ("", "name", "tensor", "dtype", "shape"), rows, note, whole=True)


def _functions(name: str, functions: Sequence[FunctionHead], *, everything: bool) -> Table:
    largest = sorted(functions, key=lambda function: -function.nodes)
    shown = largest if everything else largest[:_FEW_FUNCTIONS]
    rows = [(one.name, count(one.nodes), _types(one.inputs), _types(one.outputs)) for one in shown]
    left = len(functions) - len(shown)
    note = f"and {plural(left, 'smaller function')} (--all)" if left else ""
    return Table(f"{name}functions, by nodes", ("name", ">nodes", "takes", "gives"), rows, note, whole=True)


def _types(arguments: Sequence[tuple[str, str]]) -> str:
    """Counts of arguments by type: a body may have hundreds."""
    counts = Counter(dtype for _, dtype in arguments)
    return ", ".join(f"{number} {dtype}" if number > 1 else dtype for dtype, number in counts.items()) or "-"


def _hints(found: Contents) -> list[str]:
    """Choices to make before other commands can read it."""
    said = []
    if len(found.graphs) > 1:
        tags = ",".join(found.graphs[0].tags) or '""'
        said.append(f"Other commands need --part tag=, such as --part tag={tags}.")
    if any(len(graph.signatures) > 1 for graph in found.graphs):
        said.append("Other commands take the signature serving_default unless --part signature= names another.")
    return said


def payload(found: Contents) -> dict[str, Any]:
    """Everything for JSON."""
    return {"model": found.path, "format": found.format, "graphs": [_graph(graph) for graph in found.graphs]}


def _graph(graph: GraphContents) -> dict[str, Any]:
    guessed = not graph.signatures and not graph.why_not
    return {
        **picked(graph, "tags tensorflow? nodes"),
        "signatures": [{**picked(one, "name method?"), **_endpoints(one)} for one in graph.signatures],
        "guessed": _endpoints(graph) if guessed else None,
        "why_not": graph.why_not or None,
        "functions": [
            {"name": one.name, "nodes": one.nodes, "inputs": _pairs(one.inputs), "outputs": _pairs(one.outputs)}
            for one in graph.functions
        ],
    }


def _endpoints(found: GraphContents | SignatureSummary) -> dict[str, Any]:
    sides = {"inputs": found.inputs, "outputs": found.outputs}
    return {key: [picked(end, "name tensor dtype? shape") for end in ends] for key, ends in sides.items()}


def _pairs(arguments: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "dtype": dtype} for name, dtype in arguments]


def build_document(found: Build) -> Document:
    """Document of a build: the variant it runs and why, the machine it was made for, its speed and its size."""
    manifest = found.manifest
    facts = [
        ("model", manifest.model),
        ("runs", manifest.label),
        ("why", manifest.why),
        ("made for", ", ".join(f"{name} {value}" for name, value in manifest.made_for.items() if value)),
        ("precision", manifest.precision),
        ("size", f"{size(found.bytes)}, of which {size(found.weight_bytes)} are weights"),
        ("rows", "independent: any number is cut or padded" if manifest.rows else manifest.mixes or "not looked at"),
        ("outputs", ", ".join(manifest.outputs)),
    ]

    def row(bucket: Bucket) -> list[str]:
        inputs = "; ".join(f"{name} {dimensions(shape)}" for name, shape in bucket.inputs.items())
        times = ["-" if time is None else f"{time:,.1f}" for time in (bucket.step_us, bucket.host_us)]
        batch = "-" if bucket.batch is None else str(bucket.batch)
        return [batch, inputs, str(bucket.streams), str(bucket.kernels), *times]

    columns = ["batch", "inputs", "streams", "kernels", "device, µs", "with inputs and outputs, µs"]
    spent = sorted(manifest.preparation.items(), key=lambda one: -one[1])
    phases = [[what, f"{took:.1f}"] for what, took in spent if took >= 0.05]
    made = Table("Where building took its time", ["phase", "seconds"], phases)
    return Document(
        heading(str(found.path), "build"),
        facts,
        [Table("Batches", columns, [*map(row, manifest.rungs)]), *([made] if made.rows else [])],
        manifest.notes,
        following=[[one, str(found.path)] for one in ("msplit bench", "msplit serve")],
    )


def build_payload(found: Build) -> dict[str, Any]:
    """Contents of a build as plain data."""
    manifest = found.manifest
    return {
        **picked(found, "path size_bytes=bytes weight_bytes"),
        **picked(manifest, "model runs=label why notes made_for precision captured=capture outputs"),
        "independent_rows": manifest.rows and dict(zip(("inputs", "outputs"), manifest.rows, strict=True)),
        "mixes": manifest.mixes,
        "rungs": [picked(one, "batch inputs streams kernels device_us=step_us host_us") for one in manifest.rungs],
        "preparation": [{"phase": what, "time_s": took} for what, took in manifest.preparation.items()],
    }


def bench_document(path: Path, found: BuildBench) -> Document:
    """Time of a step of each batch, beside one stream of the same kernels."""
    machine, tables, warnings, checked = "", list[Table](), list[str](), list[str]()
    for batch, result in found.results:
        machine = benchmark.machine(result.environment)
        named = "" if batch is None else f", batch {batch}"
        shown = [*benchmark.times_and_gains(result)]
        tables += [replace(table, title=f"{table.title}{named}") for table in shown]
        warnings += [f"{text}{named}" for text in result.warnings]
        checked.append(f"{benchmark.verified(result.variants)}{named}")
    facts = [("runs", found.manifest.label), ("machine", machine), ("verified", "; ".join(checked))]
    return Document(heading(str(path), "build"), facts, tables, list(found.notes), warnings)


def bench_payload(path: Path, found: BuildBench) -> dict[str, Any]:
    """Times of a build as plain data, every raw time included."""
    results = [{"batch": batch, "result": result} for batch, result in found.results]
    return {"build": path, **picked(found, "runs=manifest.label notes"), "results": results}
