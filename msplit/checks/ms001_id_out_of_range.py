"""A stream id does not exist.

Finds: A node's `_stream_id` is negative, not an integer, or not below the number of streams. That number is `streams` of the settings, else
of the rules, else of the plan; where nobody says, it is 1024. The whole file is looked at, functions and nodes that no output needs
included.

Why: Both forks take ids modulo the number of streams without a word, so such a node runs on a stream that nobody meant; a negative id is
undefined behaviour there. msplit refuses to run the graph.

Example: `streams: 4` in rules.yaml, and a node whose `_stream_id` is 6.

Mend: Run `msplit assign` again with the rules, or raise `streams`.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.subject import Check, Finding, Severity, Subject, about, verb
from msplit.core.arguments import MAX_STREAMS
from msplit.formats.model import STREAM_ID


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per id. The whole file counts, functions and nodes that no output needs included."""
    streams = subject.streams or MAX_STREAMS
    wrong: dict[int | None, list[str]] = {}
    model = subject.flat.model.graph
    for prefix, graph in [("", model), *((f"{name}/", f.body) for name, f in model.functions.items())]:
        for node in graph.nodes_with(STREAM_ID):
            value = graph.attrs[node].get(STREAM_ID)
            stream = value if isinstance(value, int) and not isinstance(value, bool) else None
            if stream is None or not 0 <= stream < streams:
                wrong.setdefault(stream, []).append(prefix + graph.names[node])
    for stream in sorted(wrong, key=lambda stream: (stream is None, stream or 0)):
        have = verb(len(wrong[stream]), "has", "have")
        if stream is None:
            what = f"{have} a `{STREAM_ID}` that is not an integer"
            fix = f"set `{STREAM_ID}` with type `i`, or remove it"
        else:
            ids = f"0..{streams - 1}" if streams > 1 else "0 only"
            what = f"{have} stream id {stream}, but ids are {ids}"
            fix = "assign the streams again, or allow more of them (`streams:` in the rules or in msplit.yaml)"
        yield about(wrong[stream], what, fix)


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find)
