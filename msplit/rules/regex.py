"""The rule `regex`: streams by patterns on node names."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from msplit.core.graph import Assignment, Ints
from msplit.rules import streamfile
from msplit.rules.base import Remark, RuleContext, RuleOptions, in_range
from msplit.rules.streamfile import Entry, shorten

_MAX_OVERLAPS = 20
_MAX_REASONS = 1000


@dataclass(frozen=True)
class Regex:
    """Gives each node the id of the first pattern that matches its name.

    Attributes:
        entries: The patterns in order of precedence. YAML: ``patterns: {1: ["tower_a/.*"]}``, or ``file: streams.txt`` with a file in
            NVIDIA's format (see `streamfile`), relative to the rules file.
        match: Whether a pattern must match the whole name ("full", as NVIDIA's does) or any part of it ("search").
        file: The stream file that entries come from, None where they stand in the rules file or its text was kept elsewhere.
    """

    key: ClassVar[str] = "regex"
    entries: tuple[Entry, ...] = ()
    match: Literal["full", "search"] = "full"
    file: str | None = None

    @classmethod
    def from_options(cls, options: RuleOptions) -> Regex:
        """Read the options of the rule from YAML."""
        match = options.choice("match", cls.match, ("full", "search"))
        file = options.text("file")
        table = options.mapping("patterns")
        if (file is None) == (table is None):
            options.problem(
                "regex needs either `patterns` or `file`",
                fix='write regex: {patterns: {1: ["tower_a/.*"]}} or regex: {file: streams.txt}',
            )
        entries: list[Entry] = []
        if table is not None:
            for key in table.names():
                for pattern, where in table.texts(key):
                    why = streamfile.problem(pattern) if pattern else "it is empty"
                    if why is not None:
                        table.problem(f"bad pattern {shorten(pattern)!r}: {why}", at=where)
                    entries.append(Entry(table.stream_id(key), pattern, table.location(where)))
        if file is not None:
            entries.extend(options.stream_file("file", file))
        why = None if options.reading.problems else streamfile.too_many(entry.pattern for entry in entries)
        if why is not None:
            options.problem(why, fix="write exact names, or fewer and simpler patterns")
        folder = options.reading.folder
        path = file if file is None or folder is None else str(folder / file)
        if options.reading.files is not None:
            path = None  # it need not be there any more
        return cls(tuple(entries), "search" if match == "search" else "full", path)

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim the nodes whose names match.

        Raises:
            AssignError: An id is out of range.
        """
        remarks: list[Remark] = []
        streams = [
            in_range(entry.stream, context, f"pattern {shorten(entry.pattern)!r}", entry.where)
            for entry in self.entries
        ]
        wrapped = [entry for entry, stream in zip(self.entries, streams, strict=True) if entry.stream != stream]
        if wrapped:
            ids = ", ".join(map(str, sorted({entry.stream for entry in wrapped})))
            text = f"stream ids {ids} of patterns were taken modulo {context.streams}"
            remarks.append(Remark(self.key, "wrapped", text, wrapped[0].where))
        number, node = streamfile.match(
            [entry.pattern for entry in self.entries], context.flat.graph.names, full=self.match == "full"
        )
        matches = np.bincount(number, minlength=len(self.entries))
        keep = ~context.flat.host[node]
        number, node = number[keep], node[keep]
        for idle in np.flatnonzero(np.bincount(number, minlength=len(self.entries)) == 0).tolist():
            remarks.append(_no_match(self.entries[idle], int(matches[idle])))
        # Pairs are sorted by pattern, so the first pair of a node is the one that wins.
        named, first = np.unique(node, return_index=True)
        owner = np.full(len(context.flat), -1, np.int32)
        owner[named] = number[first]
        remarks.extend(self._overlaps(owner[node], number, node, np.asarray(streams, np.int32), context))
        return assignment.claim_many(self._claims(owner, streams), self.key), tuple(remarks)

    def _claims(self, owner: Ints, streams: list[int]) -> list[tuple[Ints, int, str]]:
        nodes = np.flatnonzero(owner >= 0)
        nodes = nodes[np.argsort(owner[nodes], kind="stable")].astype(np.int32)
        reason = [f"name matches {shorten(entry.pattern)!r} ({entry.where})" for entry in self.entries]
        if len(self.entries) > _MAX_REASONS:
            # A file of exact names has a pattern per node; the line is reason enough.
            reason = [f"name is listed at {entry.where}" for entry in self.entries]
        runs = itertools.groupby(nodes.tolist(), key=lambda node: (streams[owner[node]], reason[owner[node]]))
        return [(np.asarray(list(run), np.int32), stream, why) for (stream, why), run in runs]

    def _overlaps(self, winner: Ints, number: Ints, node: Ints, streams: Ints, context: RuleContext) -> list[Remark]:
        clash = np.flatnonzero(streams[winner] != streams[number])
        pairs, first, counts = np.unique(
            np.stack([winner[clash], number[clash]]), axis=1, return_index=True, return_counts=True
        )
        remarks = []
        told = slice(_MAX_OVERLAPS)
        for pair, at, count in zip(pairs.T[told].tolist(), first[told].tolist(), counts[told].tolist(), strict=True):
            one, other = (self.entries[number] for number in pair)
            text = (
                f"patterns {shorten(one.pattern)!r} (stream {one.stream}) and {shorten(other.pattern)!r} (stream {other.stream}) "
                f"both match {count} node{'s' * (count != 1)}, such as '{context.flat.graph.names[node[clash[at]]]}': the first one wins"
            )
            remarks.append(Remark(self.key, "overlap", text, other.where))
        if (more := pairs.shape[1] - _MAX_OVERLAPS) > 0:
            remarks.append(Remark(self.key, "overlap", f"{more} more pairs of patterns overlap"))
        return remarks


def _no_match(entry: Entry, hosts: int) -> Remark:
    text = f"pattern {shorten(entry.pattern)!r} matches no node"
    if hosts:
        text = f"pattern {shorten(entry.pattern)!r} matches only host nodes ({hosts}), which have no stream"
    return Remark(Regex.key, "no-match", text, entry.where)
