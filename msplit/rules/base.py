"""Base of all rules, and the types of their options.

Base of all rules: a frozen dataclass whose fields are its YAML options, and one pure function.

The options of rules: those of any settings, and stream ids and stream files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.colocation import groups
from msplit.analysis.isomorphic import copies, with_copies
from msplit.analysis.order import canonical
from msplit.analysis.shared import called
from msplit.core.arguments import MAX_STREAMS
from msplit.core.graph import UNASSIGNED, Assignment, Ints
from msplit.cost.costs import Costs
from msplit.errors import AssignError, RulesError
from msplit.flatten.flat import FlatGraph
from msplit.formats.files import read_text
from msplit.formats.model import STREAM_ID
from msplit.formats.settings import Options, Reading
from msplit.rules import streamfile


@dataclass(frozen=True, eq=False)
class KernelStreams:
    """Per node the stream of the kernel that does its work, perhaps with that of others; -1 for nodes that launch nothing. And why."""

    ids: Ints
    why: str


class ChoosesKernels(Protocol):
    """Chooses kernels and their streams together. It lies above the rules: it lowers the graph, which runs it once."""

    def __call__(
        self,
        streams: int,
        *,
        tied: Ints,
        candidates: Sequence[str] | None = None,
        wait_us: float | None = None,
    ) -> KernelStreams | Remark:
        """The best kernels on their best streams; a remark where plain kernels are the best, or it can not be told.

        `tied` is per node a group that must share a stream, or -1; `candidates` and `wait_us` are as in the rule `auto`.
        """


@dataclass(frozen=True, eq=False)
class RuleContext:
    """The model and options that a rule may look at.

    Attributes:
        streams: Ids are 0..streams-1.
        wrap: Take ids modulo `streams`, as the forks do, instead of refusing those out of range.
        kernels: Chooses larger kernels for a rule that wants that; None where the graph is not to be run.
        handles: Whether a variable's handle and its users must share a stream; see `Colocation`.
        by_hand: The nodes whose ids on the graph were set by hand, for the rule `manual`; None: all that have one.
    """

    flat: FlatGraph
    costs: Costs
    streams: int
    wrap: bool = False
    kernels: ChoosesKernels | None = None
    handles: bool = True
    by_hand: NDArray[np.bool_] | None = None

    @cached_property
    def tied(self) -> Ints:
        """Per node a group that must share a stream, or -1: whatever places nodes keeps to it, so that nothing has to be moved later."""
        return self.together(self.handles)

    def together(self, handles: bool) -> Ints:
        """Per node a group that must share a stream, or -1: what belongs together, and what TensorFlow's optimizer makes one node of.

        `handles` says whether a variable's handle and its users must; see `Colocation`.
        """
        return with_copies(self.flat, groups(self.flat, handles=handles, state=handles), self.same, self._fixed).of

    @cached_property
    def same(self) -> Ints:
        """Per node the number of those that TensorFlow's optimizer makes one node of, or -1."""
        return copies(self.flat, self.costs.time_us, self._fixed)

    @cached_property
    def _fixed(self) -> NDArray[np.bool_] | None:
        """Nodes that have an id and keep it; None where no node does."""
        if self.by_hand is not None:
            return self.by_hand if self.by_hand.any() else None
        mask = np.zeros(len(self.flat), np.bool_)
        mask[self.flat.graph.nodes_with(STREAM_ID)] = True
        return mask if mask.any() else None

    @cached_property
    def order(self) -> Ints:
        """All nodes in an order that depends neither on names nor on the file; decides between equals."""
        return canonical(self.flat, self.costs.time_us, self.costs.share, self.costs.bytes)

    def order_after(self, assignment: Assignment) -> Ints:
        """Likewise, and of copies those that an assignment treats alike: it tells apart what is alike otherwise."""
        if not (assignment.ids != UNASSIGNED).any():
            return self.order
        return canonical(self.flat, self.costs.time_us, self.costs.share, self.costs.bytes, assignment.ids)


@dataclass(frozen=True)
class Remark:
    """Something the user should know about a rule's work, such as a pattern that matched nothing.

    Attributes:
        rule: Key of the rule.
        kind: Stable word for programs: "no-match", "overlap", "wrapped", "call-sites-differ", "moved" …
        where: File and line, or node, where there is one.
    """

    rule: str
    kind: str
    text: str
    where: str | None = None


NO_MATCH = "no-match"
"""Kind of a remark on what matched nothing."""


def shared_inputs(flat: FlatGraph, shared: Sequence[tuple[str, str]]) -> Iterator[Remark]:
    """Remarks on inputs that a rules file names as shared, each with its place."""
    lost = [(pattern, where) for pattern, where in shared if not called(flat, [pattern])]
    for pattern, where in lost:
        yield Remark("shared", NO_MATCH, f"no input is called {pattern!r}", where)
    if shared and not lost:
        text = "rows are shared by msplit's own engine alone: an annotated graph stays as it is, and TensorFlow gains nothing"
        yield Remark("shared", "kept", text, shared[0][1])


class Rule(Protocol):
    """One entry of `rules:` in a rules file."""

    key: ClassVar[str]
    """Its name in YAML."""

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claims nodes that no earlier rule has claimed. Pure: the same arguments give the same result.

        Raises:
            AssignError: The rule and the graph contradict each other.
        """


def in_range(stream: int, context: RuleContext, what: str, where: str | None = None) -> int:
    """A stream id that exists: `stream`, or, with `RuleContext.wrap`, what the forks make of it.

    The message says that `what` has the id, and `where` it stands.

    Raises:
        AssignError: The id does not exist and may not be wrapped.
    """
    if 0 <= stream < context.streams:
        return stream
    if context.wrap:
        return stream % context.streams
    fix = "use an id of 0 or more, or pass --wrap to take ids modulo the number of streams, as the forks do"
    if stream > 0:
        fix = f"pass --streams {stream + 1} or more, or --wrap to take ids modulo {context.streams}, as the forks do"
    ids = f"0..{context.streams - 1}" if context.streams > 1 else "0 only"
    raise AssignError(f"{what} has stream id {stream}, but ids are {ids}", where=where, fix=fix)


MAX_STREAM_FILE = 256 << 20
"""Longest stream file, bytes: the exact names of a million nodes."""


@dataclass
class RulesReading(Reading):
    """State while one rules file is read.

    Attributes:
        folder: Where relative paths start; None where there is no file.
        streams: Ids are 0..streams-1.
        wrap: Whether ids out of range are taken modulo `streams` later.
        files: Where not None, the stream files that there are, by the name that the rules have for them: none is read from the disk.
        read: The stream files that were read, likewise.
    """

    folder: Path | None = None
    streams: int = MAX_STREAMS
    wrap: bool = False
    files: Mapping[str, str] | None = None
    read: dict[str, str] = field(default_factory=dict)


class RuleOptions(Options):
    """The options of one rule, or the entries of a rules file. See `Options`."""

    reading: RulesReading

    def stream_id(self, key: Any) -> int:
        """A key that is a stream id."""
        line = self._lines[key]
        if not isinstance(key, int) or isinstance(key, bool) or key < 0:
            self.problem(
                f"{self.owner}: stream id {key!r} is not a whole number of 0 or more",
                at=line,
                fix="write 1: [patterns]",
            )
            return 0
        if key >= self.reading.streams and not self.reading.wrap:
            what, fix = _out_of_range(key, self.reading.streams)
            self.problem(what, at=line, fix=fix)
        return key

    def stream_file(self, name: str, file: str) -> tuple[streamfile.Entry, ...]:
        """The patterns of a stream file that an option names, relative to the rules file.

        A file that can not be read is noted as a problem of the rules file, and has no patterns.

        Raises:
            RulesError: A line of it is malformed, or its stream is out of range.
        """
        line = self._lines[name]
        folder = self.reading.folder
        path = Path(file) if folder is None else folder / file
        try:
            text = read_text(path, MAX_STREAM_FILE) if self.reading.files is None else self.reading.files[file]
        except (OSError, ValueError, EOFError, KeyError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not a UTF-8 text file"
            reason = reason if not isinstance(error, EOFError) else f"it is longer than {MAX_STREAM_FILE >> 20} MiB"
            self.problem(
                f"{self.owner}: {path} can not be read: {reason}", at=line, fix="paths are relative to the rules file"
            )
            return ()
        self.reading.read[file] = text
        entries = streamfile.parse(text, str(path))
        for entry in entries:
            if entry.stream >= self.reading.streams and not self.reading.wrap:
                what, fix = _out_of_range(entry.stream, self.reading.streams)
                raise RulesError(what, where=entry.where, fix=fix)
        return entries


def _out_of_range(stream: int, streams: int) -> tuple[str, str]:
    what = f"stream id {stream} is out of range: with {streams} stream{'s' * (streams != 1)}, ids are 0..{streams - 1}"
    return what, f"set `streams: {stream + 1}` or more, pass --streams {stream + 1}, or pass --wrap"
