"""Types that every check uses: the subject with its facts, findings, and settings.

A check, and the subject that it checks: facts that several checks need are worked out once and only if somebody asks.

Findings of checks, their severities, and the pieces of their sentences.

What a project wants of the checks: which, how severe, which limits. Read from msplit.yaml or pyproject.toml by `config`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import rules
from msplit.analysis.advice import Guesses, guesses
from msplit.assignment.model import Defaults
from msplit.core.arguments import MAX_STREAMS, whole
from msplit.core.graph import Graph, Ints
from msplit.cost.costs import Costs
from msplit.errors import AssignError, MsplitError
from msplit.flatten.flat import FlatGraph, among, as_written
from msplit.formats.model import STREAM_ID, Model
from msplit.rules import streamfile
from msplit.rules.auto import NOT_CHOSEN
from msplit.rules.ruleset import RuleSet, RulesResult
from msplit.schedule.choose import MUCH, WORTH
from msplit.schedule.judge import Judgement, Prediction, bounds, judge, predict
from msplit.schedule.plan import Plan
from msplit.schedule.planfile import PlanFile
from msplit.shapes import Shapes

NODES_SHOWN = 20
"""Most nodes that a finding names; it counts all of them."""


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return list(Severity).index(self)


class Skip(Exception):
    """Raised by a check that can not say anything here. The message is the reason, as half a sentence."""


@dataclass(frozen=True)
class Finding:
    """Something that a check found. Its code and severity come from the check and the settings.

    Attributes:
        text: What is wrong, one sentence.
        fix: How to mend it, one sentence.
        nodes: Nodes that it is about, the first `NODES_SHOWN` of them.
        count: How many nodes it is about.
        file: File that it is about, None for the model itself.
        line: Line in that file, from 1.
        depends: What it depends on beside the model, if that is not what all findings of its check depend on; see `Check.depends`.
    """

    text: str
    fix: str
    nodes: tuple[str, ...] = ()
    count: int = 0
    file: str | None = None
    line: int | None = None
    depends: str | None = None


def about(
    names: Sequence[str],
    what: str,
    fix: str,
    *,
    count: int | None = None,
    file: str | None = None,
    depends: str | None = None,
) -> Finding:
    """A finding whose sentence begins with its nodes: "node 'a'" or "12 nodes (such as 'a')", and then `what`.

    Where `names` are only the first of them, `count` says how many there are.
    """
    count = len(names) if count is None else count
    return Finding(f"{nodes(names, count)} {what}", fix, tuple(names[:NODES_SHOWN]), count, file, depends=depends)


def nodes(names: Sequence[str], count: int) -> str:
    """ "node 'a'", "nodes 'a' and 'b'", "12 nodes (such as 'a')": the subject of a sentence."""
    if count == 1:
        return f"node '{names[0]}'"
    if count == 2 and len(names) > 1:
        return f"nodes '{names[0]}' and '{names[1]}'"
    return f"{count:,} nodes (such as '{names[0]}')"


def verb(count: int, one: str, many: str) -> str:
    """The form of a verb that fits a number."""
    return one if count == 1 else many


def listed(numbers: Sequence[int], most: int = 8) -> str:
    """ "1", "1 and 2", "1, 2, 3 and 9 more"."""
    if len(numbers) > most:
        return f"{', '.join(map(str, numbers[:most]))} and {len(numbers) - most} more"
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


_PLACE = re.compile(r"(?P<file>.+):(?P<line>[0-9]+)", re.DOTALL)


def place(where: str | None) -> tuple[str | None, int | None]:
    """ "rules.yaml:12" as ("rules.yaml", 12); a place without a line number is no file."""
    match = _PLACE.fullmatch(where or "")
    return (match["file"], int(match["line"])) if match else (None, None)


@dataclass(frozen=True)
class Thresholds:
    """Thresholds.

    Attributes:
        min_gain: MS015: predicted speed-up over one stream, at least.
        max_imbalance: MS012: time of the busiest stream over the best that could be (an equal share, or the critical path), at most.
        max_cross_edges: MS013: tensors that cross streams, at most; None for any number.
        max_cross_bytes: MS013: bytes that cross streams, at most; None for any number.
        max_cross_share: MS013: share of the dependencies between kernels that cross streams, at most.
        max_unknown: MS016: share of the kernels with unknown shapes, at most.
    """

    min_gain: float = WORTH
    max_imbalance: float = 2.0
    max_cross_edges: int | None = None
    max_cross_bytes: int | None = None
    max_cross_share: float = 0.5
    max_unknown: float = MUCH


@dataclass(frozen=True)
class CheckSettings:
    """Everything that a configuration file can say.

    Attributes:
        select: Codes to run, or beginnings of codes; empty: all.
        ignore: Codes not to run, likewise. It wins over `select`.
        severity: Code -> severity, in place of the check's own.
        fail_on: Findings of this severity, or worse, make the exit code 1.
        streams: Ids are 0..streams-1; None: as the rules or the plan say.
        fork_streams: How many streams the fork that runs the graph is started with; None: as many as there are ids.
        hand_set: Patterns of the names of nodes whose ids come from the model's code: applying the rules again keeps these.
        rules: Rules file or name of a shipped rule set.
        batch: Size of unknown leading dimensions.
        gpu: Data sheet that prices the nodes.
        shapes: Whole shapes by input name.
        baseline: Findings that are known, a file.
        profile: Profile that prices the nodes in place of the data sheet, a file.
        source: The file that this comes from, None for the defaults.
        origin: "rules", "batch" and so on -> who says so, where that is not the file.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    severity: Mapping[str, Severity] = field(default_factory=dict)
    fail_on: Severity = Severity.ERROR
    streams: int | None = None
    fork_streams: int | None = None
    hand_set: tuple[str, ...] = ()
    rules: str | None = None
    plan: str | None = None
    batch: int | None = None
    gpu: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    baseline: str | None = None
    profile: str | None = None
    limits: Thresholds = field(default_factory=Thresholds)
    source: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, most in (("streams", MAX_STREAMS), ("fork_streams", MAX_STREAMS), ("batch", None)):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1, most)


Longs = NDArray[np.int64]
Mask = NDArray[np.bool_]

ABSENT = np.iinfo(np.int64).min
"""Stands for "has no id"."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with all that it is checked against.

    Attributes:
        ruleset: The rules that its ids should come from.
        plan_file: The plan that it should run by.
        against: The model that the ids were made for.
        shapes: Shapes of its tensors, where they are known: they say what could be done about unknown ones.
        defaults: What all this comes from, for what findings say; None where nobody knows.
    """

    flat: FlatGraph
    costs: Costs
    settings: CheckSettings = field(default_factory=CheckSettings)
    ruleset: RuleSet | None = None
    plan_file: PlanFile | None = None
    against: Model | None = None
    shapes: Shapes | None = None
    defaults: Defaults | None = None

    @cached_property
    def stated(self) -> Longs:
        """Per node the id on the graph, ABSENT where there is none or where it is not an integer."""
        return stated(self.flat.graph)

    @property
    def annotated(self) -> bool:
        """True if any node of the graph has an id."""
        return bool((self.stated != ABSENT).any())

    @cached_property
    def streams(self) -> int | None:
        """Ids are 0..streams-1; None where nobody says."""
        if self.settings.streams is not None:
            return self.settings.streams
        if self.ruleset is not None:
            return self.ruleset.streams
        return self.plan_file.streams if self.plan_file is not None else None

    @cached_property
    def resolved_plan(self) -> tuple[Plan, tuple[str, ...]]:
        """The plan on this graph, and the names in it that name no node."""
        assert self.plan_file is not None
        return self.plan_file.on(self.flat)

    @cached_property
    def ids(self) -> Longs:
        """Per node the stream that it runs on: the graph's id, or the plan's stream if the graph has no ids; 0 where there is none."""
        if not self.annotated and self.plan_file is not None:
            return np.maximum(self.resolved_plan[0].stream, 0).astype(np.int64)
        return np.where(self.stated == ABSENT, 0, self.stated)

    @cached_property
    def placed(self) -> Mask:
        """Mask of the nodes that have a stream: not host nodes and, where the ids are a plan's, not what it leaves out."""
        if not self.annotated and self.plan_file is not None:
            return np.asarray(self.resolved_plan[0].stream >= 0)
        return ~self.flat.host

    @cached_property
    def launches(self) -> Mask:
        """Mask of the nodes that launch a kernel."""
        return (self.costs.time_us > 0) & ~self.flat.host

    @cached_property
    def used(self) -> tuple[int, ...]:
        """Streams that kernels run on, ascending."""
        return tuple(np.unique(self.ids[self.launches]).tolist())

    @cached_property
    def prediction(self) -> Prediction:
        """The simulated run with these ids. Its lanes are the streams of `used`, in order.

        Raises:
            Skip: There is nothing to predict, or too much.
        """
        if len(self.used) < 2:
            raise Skip("all kernels run on one stream")
        lane = np.minimum(np.searchsorted(np.asarray(self.used), self.ids), len(self.used) - 1).astype(np.int32)
        try:
            return predict(self.flat, self.costs, lane)
        except MsplitError as error:
            raise Skip(error.what) from None

    @cached_property
    def judgement(self) -> Judgement:
        """Judgement of these ids: their simulated gain.

        Raises:
            Skip: There is nothing to predict, or too much.
        """
        found = self.prediction
        return judge(bounds(self.flat, self.costs), found.gain, len(found.lanes), worth=self.settings.limits.min_gain)

    @cached_property
    def guesses(self) -> Guesses | None:
        """Kernels of unknown shape; None where nobody said what the shapes are."""
        return None if self.shapes is None else guesses(self.flat, self.costs, self.shapes)

    @cached_property
    def outcome(self) -> RulesResult | AssignError:
        """Result of the rules on the graph without its ids, those set by hand kept; the error if they contradict each other.

        The rule `manual` would keep every id and so find nothing stale: only the nodes of `hand_set` keep theirs. An id out of range is
        MS001's.
        """
        assert self.ruleset is not None
        streams = self.settings.streams or self.ruleset.streams
        kept = self.hand_set & (self.stated >= 0) & (self.stated < streams)
        try:
            return rules.assign(self.flat, self.costs, self.ruleset, streams=self.settings.streams, by_hand=kept)
        except AssignError as error:
            return error

    @property
    def applied(self) -> RulesResult:
        """Likewise, where they do not.

        Raises:
            Skip: They do. MS003 says why.
        """
        if isinstance(self.outcome, RulesResult):
            return self.outcome
        raise Skip("the rules contradict each other on this graph (see MS003)")

    @cached_property
    def hand_set(self) -> Mask:
        """Nodes whose ids come from the model's code, as the settings and the record of the assignment say."""
        record = self.flat.model.record
        mask = np.zeros(len(self.flat), np.bool_) if record is None else among(self.flat, record.by_hand)
        if self.settings.hand_set:
            mask[streamfile.match(self.settings.hand_set, self.flat.graph.names)[1]] = True
        return np.asarray(mask & (self.stated != ABSENT))

    @property
    def kernels_not_chosen(self) -> bool:
        """True if the rules would have chosen larger kernels if they could have run the model."""
        outcome = self.outcome
        return isinstance(outcome, RulesResult) and any(remark.kind == NOT_CHOSEN for remark in outcome.remarks)

    def names(self, nodes: Sequence[int] | NDArray[np.integer]) -> tuple[str, ...]:
        """Names of the first nodes, as many as a finding holds."""
        return tuple(self.flat.graph.names[int(node)] for node in nodes[:NODES_SHOWN])

    def about(
        self,
        nodes: Sequence[int] | NDArray[np.integer],
        what: str,
        fix: str,
        *,
        file: str | None = None,
        depends: str | None = None,
    ) -> Finding:
        """A finding about nodes of this model."""
        return about(self.names(nodes), what, fix, count=len(nodes), file=file, depends=depends)


@dataclass(frozen=True)
class Check:
    """One code.

    Attributes:
        code: "MS001" and so on. A code never changes its meaning and is never used again.
        name: The same in words, such as ``"id-out-of-range"``.
        severity: Unless the settings say otherwise.
        example: A small case, as text.
        needs: What must be given for it to say anything: "rules", "plan" or "against".
        limits: Fields of `Limits` that it obeys.
        depends: What its findings depend on beside the model: "rules" (and so on what they weigh), "costs", or "".
    """

    code: str
    name: str
    severity: Severity
    title: str
    what: str
    why: str
    example: str
    mend: str
    find: Callable[[Subject], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    depends: str = ""

    @staticmethod
    def of(
        module: str,
        page: str | None,
        severity: Severity,
        find: Callable[[Subject], Iterable[Finding]],
        **more: Any,
    ) -> Check:
        """The check of a module: code and name are the module's name, title and texts its docstring, paragraph by paragraph."""
        code, _, name = module.rpartition(".")[2].partition("_")
        title, *paragraphs = (" ".join(part.split()) for part in (page or "").split("\n\n"))
        texts = {label: text for label, _, text in (part.partition(": ") for part in paragraphs)}
        what, why, example, mend = (texts.get(label, "") for label in ("Finds", "Why", "Example", "Mend"))
        title = title.removesuffix(".")
        return Check(code.upper(), name.replace("_", "-"), severity, title, what, why, example, mend, find, **more)


def stated(graph: Graph) -> Longs:
    """Per node of any graph its id, ABSENT where there is none or where it is not an integer."""
    ids = np.full(len(graph), ABSENT, np.int64)
    for node in graph.nodes_with(STREAM_ID):
        value = graph.attrs[node].get(STREAM_ID)
        if isinstance(value, int) and not isinstance(value, bool):
            ids[node] = value
    return ids


def wanted(subject: Subject) -> Longs:
    """Per node the id that applying the rules would write on it; ABSENT for host nodes and for nodes that are not in the file.

    The body of a function that is called from several places has one id per node, which all its copies in the flat graph share.

    Raises:
        Skip: The rules can not be applied, MS003 says why; or they choose kernels, for which the model would have to run; or what they
            went by is not there.
    """
    if subject.defaults is not None and subject.defaults.missing is not None:
        raise Skip(subject.defaults.missing)
    outcome = subject.applied
    if subject.kernels_not_chosen:
        raise Skip("the rules choose kernels, too (`kernels: best`), which takes running the model: give the --plan")
    flat = subject.flat
    ids = as_written(flat, np.where(flat.host, -1, outcome.ids).astype(np.int32), subject.costs.time_us)
    return np.where(ids < 0, ABSENT, ids.astype(np.int64))


def splits(subject: Subject, of: Ints) -> Iterator[tuple[int, Ints, str]]:
    """The groups with nodes on several streams. `of` is per node its group or -1; host nodes have no stream and do not count.

    Yields:
        The group, its nodes in order (first one of each stream, then the others), and the streams in words.
    """
    member = np.flatnonzero((of >= 0) & subject.placed)
    if not len(member):
        return
    low = np.full(int(of.max()) + 1, np.iinfo(np.int64).max)
    high = np.full(int(of.max()) + 1, np.iinfo(np.int64).min)
    np.minimum.at(low, of[member], subject.ids[member])
    np.maximum.at(high, of[member], subject.ids[member])
    torn = member[low[of[member]] < high[of[member]]]
    torn = torn[np.argsort(of[torn], kind="stable")]
    groups, starts = np.unique(of[torn], return_index=True)
    for group, nodes in zip(groups.tolist(), np.split(torn, starts[1:]) if len(groups) else (), strict=True):
        streams, first = np.unique(subject.ids[nodes], return_index=True)
        others = np.delete(nodes, first)
        yield group, np.concatenate([nodes[first], others]).astype(np.int32), f"streams {listed(streams.tolist())}"
