"""Rule sets: their files, and how they are applied.

Rules files: which rules run, in which order, with which options.

Applies a rule set to a graph, and checks every rule's work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import MAX_STREAMS, whole
from msplit.core.graph import UNASSIGNED, Assignment, Ints
from msplit.cost.costs import Costs
from msplit.errors import AssignError, MsplitError, RulesError
from msplit.flatten.flat import Conflict, FlatGraph, to_ids
from msplit.formats import settings
from msplit.formats.files import read_file
from msplit.formats.settings import Value, nearest
from msplit.progress import phase
from msplit.rules import base
from msplit.rules.auto import Auto, Propagate
from msplit.rules.branch import Branch
from msplit.rules.colocation import Colocation
from msplit.rules.device import Device
from msplit.rules.embedding import Embedding
from msplit.rules.manual import Manual
from msplit.rules.regex import Regex

RULES: dict[str, Callable[[base.RuleOptions], base.Rule]] = {
    Manual.key: Manual.from_options,
    Regex.key: Regex.from_options,
    Embedding.key: Embedding.from_options,
    Branch.key: Branch.from_options,
    Colocation.key: Colocation.from_options,
    Propagate.key: Propagate.from_options,
    Auto.key: Auto.from_options,
    Device.key: Device.from_options,
}
"""The rules by their keys in YAML. Reads a rule's options, noting mistakes with `RuleOptions.problem`."""

VERSION = 1
"""The version of the format that this code reads."""

STANDARD = "auto"
"""The shipped rule set that is used where nobody names one: simulated, it is never slower than another (benchmarks/notes/schedulers.md)."""

DEFAULT_STREAMS = 4
"""Number of streams where a rules file does not say."""

MAX_RULES = 100
"""Most rules of a file: each goes over the whole graph."""

_SUFFIX = ".yaml"


@dataclass(frozen=True)
class RuleSet:
    """A rules file: its rules and options.

    Attributes:
        streams: Ids are 0..streams-1.
        rules: In order of precedence: the first rule that claims a node wins.
        default: Id of the nodes that no rule claims.
        shared: Inputs that are shared by the rows of a user, each with its place in the file: for what runs the model.
        source: The file, or the name of a shipped rule set.
        wrap: Whether ids out of range are taken modulo `streams`.
        text: The text that it was read from, "" where there is none.
        files: The texts of the stream files that it names, by the names that it has for them.
    """

    version: int
    streams: int
    rules: tuple[base.Rule, ...]
    default: int
    source: str
    wrap: bool = False
    shared: tuple[tuple[str, str], ...] = ()
    text: str = field(default="", repr=False, compare=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def available() -> tuple[str, ...]:
    """Names of the rule sets that ship with msplit, sorted."""
    return tuple(sorted(path.stem for path in _shipped().glob(f"*{_SUFFIX}")))


def text_of(name: str) -> str:
    """The text of a shipped rule set.

    Raises:
        RulesError: There is none of this name.
    """
    if name not in available():
        raise RulesError(f"no rule set called '{name}' ships with msplit", fix=f"one of: {', '.join(available())}")
    return (_shipped() / f"{name}{_SUFFIX}").read_text("utf-8")


def load(path_or_name: str | os.PathLike[str], *, streams: int | None = None, wrap: bool = False) -> RuleSet:
    """Read a rules file.

    Args:
        path_or_name: A file, or the bare name of a shipped rule set (which wins over a file of that name without a suffix).
        streams: How many streams there are, instead of what the file says.
        wrap: Allow ids out of range: they are taken modulo `streams` later.

    Raises:
        RulesError: There is no such file, or it has mistakes; all of them are named with their lines.
    """
    name = os.fspath(path_or_name)
    path, source = Path(name), name
    if name in available():
        path = _shipped() / f"{name}{_SUFFIX}"
        source = f"{name} (shipped)"
    if not os.path.lexists(path):
        near = "" if path.suffix or len(path.parts) > 1 else nearest(name, available())
        raise RulesError(
            f"there is no rules file '{name}'{near}",
            fix=f"name a file, or one of the shipped rule sets: {', '.join(available())}",
        )
    try:
        text = read_file(path, settings.MAX_BYTES, what="rules file", fix="name a YAML file")
    except MsplitError as error:
        raise RulesError(error.what, where=name, fix=error.fix) from None
    return parse(text, source, folder=path.parent, streams=streams, wrap=wrap)


def parse(
    text: str,
    source: str,
    *,
    folder: Path | None = None,
    streams: int | None = None,
    wrap: bool = False,
    files: Mapping[str, str] | None = None,
) -> RuleSet:
    """Read the text of a rules file.

    Args:
        text: YAML.
        source: Its name, for messages.
        folder: Where relative paths in it start (default: the current folder).
        streams: How many streams there are, instead of what the text says.
        wrap: Allow ids out of range.
        files: Texts of the stream files that it may name, by the names that it has for them: nothing is read from the disk.

    Raises:
        RulesError: It has mistakes; all of them are named with their lines.
    """
    reading = base.RulesReading(source, folder=folder, wrap=wrap, files=files)
    top = base.RuleOptions("the rules file", settings.parse(text, source), reading)
    reading.finish()  # not a mapping: nothing else can be said
    version = _version(top)
    own = top.integer("streams", DEFAULT_STREAMS, 1, MAX_STREAMS)
    reading.streams = own if streams is None else whole("the number of streams", streams, 1, MAX_STREAMS)
    default = top.integer("default", 0, 0, MAX_STREAMS - 1 if wrap else reading.streams - 1)
    shared = tuple((pattern, top.location(line)) for pattern, line in top.texts("shared"))
    rules = tuple(_rules(top, reading))
    top.finish()
    reading.finish()
    return RuleSet(version, reading.streams, rules, default, source, wrap, shared, text, reading.read)


def _version(top: base.RuleOptions) -> int:
    value = top.value("version")
    if value is None:
        top.problem("the rules file has no `version`", fix=f"start it with `version: {VERSION}`")
    elif value.data != VERSION or isinstance(value.data, bool):
        newer = isinstance(value.data, int) and value.data > VERSION
        fix = "update msplit" if newer else f"write `version: {VERSION}`"
        top.problem(f"version {value.data!r} of rules files is not known", at=value.line, fix=fix)
    return VERSION


def _rules(top: base.RuleOptions, reading: base.RulesReading) -> list[base.Rule]:
    value = top.value("rules")
    if value is None or not isinstance(value.data, list):
        line = top.line if value is None else value.line
        reading.problem(
            line, "`rules` must be a list", "write rules: [manual, embedding, branch, colocation, propagate]"
        )
        return []
    if len(value.data) > MAX_RULES:
        reading.problem(
            value.line, f"there are {len(value.data):,} rules; {MAX_RULES} may be", "put patterns into one regex rule"
        )
        return []
    rules = []
    for entry in value.data:
        options = _entry(entry, reading)
        if options is not None:
            rules.append(RULES[options.owner](options))
            options.finish()
    return rules


def _entry(entry: Value, reading: base.RulesReading) -> base.RuleOptions | None:
    """A rule is a name, or a mapping from one name to its options."""
    key, value = entry.data, Value(None, entry.line)
    if isinstance(entry.data, dict) and len(entry.data) == 1:
        ((key, value),) = entry.data.items()
    if not isinstance(key, str):
        reading.problem(
            entry.line,
            "a rule must be a name, or one name with options",
            "write - branch, or - branch: {min_cost_us: 5}",
        )
        return None
    if key not in RULES:
        reading.problem(entry.line, f"unknown rule {key!r}{nearest(key, RULES)}", f"the rules are {', '.join(RULES)}")
        return None
    return base.RuleOptions(key, value, reading)


def _shipped() -> Path:
    package = Path(__file__).parents[1]
    installed = package / "rule_sets"
    return installed if installed.is_dir() else package.parent / "rules"


@dataclass(frozen=True, eq=False)
class RulesResult:
    """Result of a rule set on a graph.

    Attributes:
        remarks: What the user should know, in the order of the rules.
        streams: Ids are 0..streams-1.
        ids: Per node its stream id: the assignment's, and the default where no rule decided; 0 for host nodes without an id of their own.
            A node of a function's body has the same at all places that call the function, since the file has room for one.
        conflicts: Such nodes for which the rules wanted different ids.
    """

    assignment: Assignment
    remarks: tuple[base.Remark, ...]
    streams: int
    ids: Ints
    conflicts: tuple[Conflict, ...] = ()


def assign(
    flat: FlatGraph,
    costs: Costs,
    ruleset: RuleSet,
    *,
    streams: int | None = None,
    wrap: bool = False,
    kernels: base.ChoosesKernels | None = None,
    by_hand: NDArray[np.bool_] | None = None,
) -> RulesResult:
    """Apply the rules in order, the constraints among them once more at the end.

    Args:
        streams: Number of streams, instead of what the rule set says.
        wrap: Take ids modulo `streams`, as the forks do, instead of refusing those out of range, also where the rule set does not say so.
        kernels: Chooses larger kernels for the rule `auto`; None: it does without.
        by_hand: The nodes whose ids on the graph were set by hand and are kept by the rule `manual`; None: all that have one.

    Raises:
        AssignError: The rules contradict each other on this graph.
    """
    constraints = [rule for rule in ruleset.rules if _is_constraint(rule)]
    handles = any(getattr(rule, "handles", False) for rule in constraints)
    if streams is not None:
        streams = whole("the number of streams", streams, 1, MAX_STREAMS)
    context = base.RuleContext(
        flat,
        costs,
        ruleset.streams if streams is None else streams,
        wrap=wrap or ruleset.wrap,
        kernels=kernels,
        handles=handles,
        by_hand=by_hand,
    )
    default = base.in_range(ruleset.default, context, "the default of the rule set", ruleset.source)
    assignment = Assignment.empty(len(flat))
    remarks = [*base.shared_inputs(flat, ruleset.shared)]
    # A rule behind a constraint may break it, so constraints have the last word; and what is to choose by cost must know where they leave
    # what is placed already, or they would undo its choice.
    sequence: list[base.Rule] = []
    for rule in ruleset.rules:
        sequence += [*constraints, rule] if getattr(rule, "settles", False) else [rule]
    for rule in (*sequence, *constraints):
        before = assignment
        with phase(f"rule {rule.key}"):
            assignment, said = rule.apply(context, before)
            verify(before, assignment, rule, context)
        remarks.extend(remark for remark in said if remark not in remarks)
    ids = assignment.filled(default)
    ids[flat.host & (assignment.ids == UNASSIGNED)] = 0
    _, conflicts = to_ids(flat, np.where(flat.host, -1, ids).tolist(), costs.time_us.tolist())
    new_ids, new_reason = assignment.ids.copy(), assignment.reason.copy()
    for conflict in conflicts:
        (first, *_), *others = ([flat.graph.index[name] for name in names] for names in conflict.wanted.values())
        for per_node in (ids, new_ids, new_reason):
            per_node[[node for nodes in others for node in nodes]] = per_node[first]
    assignment = replace(assignment, ids=new_ids, reason=new_reason)
    return RulesResult(assignment, tuple(remarks), context.streams, ids, conflicts)


def verify(before: Assignment, after: Assignment, rule: base.Rule, context: base.RuleContext) -> None:
    """Checks what every rule promises: ids in range, a reason for each, claimed nodes untouched, host nodes left alone.

    A constraint may move claimed nodes.

    Raises:
        AssignError: The rule broke a promise, which is a bug in the rule.
    """
    count = len(context.flat)
    if after.ids.shape != (count,) or after.reason.shape != (count,):
        raise _broken(rule, f"it gave {len(after.ids)} ids for {count} nodes", None, context)
    claimed = after.ids != UNASSIGNED
    checks = [
        ("it gave an id out of range", claimed & ((after.ids < 0) | (after.ids >= context.streams))),
        ("it gave an id without a reason", claimed != (after.reason >= 0)),
        ("it gave a reason that is not there", after.reason >= len(after.reasons)),
    ]
    if not _is_constraint(rule):
        checks.append(("it moved a claimed node", (before.ids != UNASSIGNED) & (before.ids != after.ids)))
    if rule.key != "manual":
        checks.append(("it gave an id to a host node", context.flat.host & (before.ids != after.ids)))
    for what, wrong in checks:
        if wrong.any():
            raise _broken(rule, what, int(np.flatnonzero(wrong)[0]), context)


def _is_constraint(rule: base.Rule) -> bool:
    return bool(getattr(rule, "constraint", False))


def _broken(rule: base.Rule, what: str, node: int | None, context: base.RuleContext) -> AssignError:
    where = None if node is None else f"node '{context.flat.graph.names[node]}'"
    return AssignError(
        f"rule '{rule.key}' is wrong: {what}", where=where, fix="please report this; leave the rule out meanwhile"
    )
