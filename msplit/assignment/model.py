"""Models as the commands take them: loading, saving, prices, how results are displayed, and the defaults that a model is judged with.

Load, price and save a model.

How results show themselves: one line for a prompt, a small table for a notebook. All of it is in reports and in `--format json`.

Batch, GPU and profile that a model is judged with: given, else recorded with its assignment, else defaults; and which is which.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from msplit import cost, formats
from msplit._version import __version__
from msplit.core import arguments
from msplit.core.graph import Ints, no_collection
from msplit.cost import profile as profile_file
from msplit.cost import profile as profiles
from msplit.cost.costs import Costs
from msplit.cost.gpus import DEFAULT_GPU, data_sheet
from msplit.cost.profile import Profile, Workload
from msplit.engines.tensorflow.placed import expanded
from msplit.errors import LoadError, MsplitError, RulesError
from msplit.escape import html, line
from msplit.flatten.build import body, flatten
from msplit.flatten.flat import Conflict, FlatGraph, among, to_ids, with_ids
from msplit.formats.functions import Library
from msplit.formats.model import AssignmentRecord, RecordedProfile, RecordedRules
from msplit.formats.tensors import fits
from msplit.formats.writer import WriteReport
from msplit.progress import phase
from msplit.rules.ruleset import RuleSet, parse
from msplit.shapes import Shapes


def load(
    path: str | os.PathLike[str],
    *,
    tags: Sequence[str] | None = None,
    signature: str | None = None,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    function: str | None = None,
    record: bool = True,
) -> FlatGraph:
    """Reads a model, without TensorFlow, and makes the flat graph that everything works on.

    One thing is TensorFlow's, where it is installed: the nodes of the gradient of a function, which a graph names (`SymbolicGradient`).

    Args:
        path: A GraphDef (`.pb`, `.pbtxt`), a MetaGraphDef (`.meta`) or a SavedModel's folder; told apart by content.
        tags: Tags of the SavedModel's graph, where it has several.
        signature: Signature of the SavedModel; by default `serving_default`, or the only one.
        inputs: Tensors to feed instead of the model's own inputs.
        outputs: Tensors to fetch instead of the model's own outputs.
        function: Look inside this function of the library, such as the body of a `While`, instead of at the model.
        record: Whether to go by the record that `msplit assign` has left with the model, if it has.

    Raises:
        LoadError: It can not be read, or leaves a choice open that must be made.
        GraphError: It is not a valid graph; every defect is listed.
    """
    for name, names in (("tags", tags), ("inputs", inputs), ("outputs", outputs)):
        if names is not None:
            arguments.listed(name, names)
    for name, text in (("signature", signature), ("function", function)):
        if text is not None:
            arguments.declared(name, text, "str")
    with phase("reading"), no_collection():
        model = formats.read(
            arguments.path(path),
            tags=tags,
            signature=signature,
            inputs=inputs,
            outputs=outputs,
            record=record,
            gradients=expanded,
        )
    if function is None:
        try:
            with phase("flattening"), no_collection():
                return flatten(model)
        except LoadError as problem:  # a function or a module is read where it is called, which does not know the file
            raise LoadError(
                problem.what, where=problem.where or str(path), fix=problem.fix, details=problem.details
            ) from None
    library = model.graph.functions
    if function not in library and isinstance(library, Library):
        library.read_modules(model.graph)
    if function not in library:
        raise LoadError(
            f"the model has no function {function!r}",
            where=str(path),
            fix=_others(function, list(library)),
        )
    return body(model, function)


def _others(function: str, known: list[str]) -> str:
    """Advice in place of a function that is not there."""
    near = difflib.get_close_matches(function, known, 3)
    if near:
        return f"did you mean {', '.join(near)}?"
    if not known:
        return "look at the model itself: it has no functions"
    left = len(known) - _LISTED
    return f"it has {', '.join(sorted(known)[:_LISTED])}{f' and {left} more' if left > 0 else ''}"


_LISTED = 6


def opened(model: FlatGraph | str | os.PathLike[str]) -> FlatGraph:
    """The graph of a model that may be named by where it is; with choices to make, call `load` and give its result.

    Raises:
        LoadError: It can not be read.
        MsplitError: It is neither.
    """
    if isinstance(model, FlatGraph):
        return model
    if isinstance(model, str | os.PathLike):
        return load(Path(model))
    raise MsplitError(
        f"{type(model).__name__} is no model",
        fix="give what `msplit.load` returns, or the path of a model's file or folder",
    )


def price(flat: FlatGraph, workload: Workload) -> tuple[Shapes, Costs]:
    """Shapes of all tensors and cost of all nodes, on a GPU's data sheet or as measured; see `api.price`."""
    profile, gpu, shapes = workload.profile, workload.gpu or DEFAULT_GPU, workload.shapes
    if profile is not None:
        profiles.check(profile, flat)
        gpu = profile.device.sheet() or gpu
        if workload.batch is None:
            shapes = {**profile.shapes, **shapes}
    with phase("shapes and costs"), no_collection():
        found = cost.infer(flat, batch=workload.batch, shapes=shapes)
        costs = cost.estimate(flat, found, gpu)
    if profile is not None:
        fed = {tensor.name: found.shape(tensor.node, tensor.port) for tensor in flat.inputs}
        profiles.check_shapes(profile, fed)
        costs = profiles.apply(profile, flat, costs)
    return found, costs


def save(
    flat: FlatGraph | str | os.PathLike[str],
    ids: Ints,
    out: str | os.PathLike[str],
    *,
    costs: Costs | None = None,
    force: bool = False,
    record: AssignmentRecord | None = None,
) -> tuple[WriteReport, tuple[Conflict, ...]]:
    """Writes the model with ids on its nodes; see `api.save`."""
    flat = opened(flat)
    present = with_ids(flat.model)
    kept = present if record is None else record.by_hand
    wanted = np.where(flat.host & ~among(flat, kept), -1, ids).astype(np.int32)
    with phase("writing"):
        named, conflicts = to_ids(flat, wanted.tolist(), costs.time_us.tolist() if costs is not None else None)
        stay = {function: frozenset(names) for function, names in kept.items()}
        gone = {
            (function or None, name): None
            for function, names in present.items()
            for name in names
            if name not in stay.get(function, ())
        }
        return formats.write(flat.model, {**gone, **named}, Path(out), force=force, record=record), conflicts


def strip(flat: FlatGraph | str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False) -> WriteReport:
    """Writes the model without any stream id, in the format it came in, and without the record of an assignment.

    Args:
        flat: The graph: from `load`, or where the model is. Ids are taken off the whole file, nodes that no output needs included.
        out: File or folder to write; appears at once and whole, or not at all.
        force: Replace what is there.

    Raises:
        WriteError: It can not be written. What was there before is unharmed.
    """
    flat = opened(flat)
    ids = {(function or None, name): None for function, names in with_ids(flat.model).items() for name in names}
    with phase("writing"):
        return formats.write(flat.model, ids, Path(out), force=force)


Facts = Sequence[tuple[str, str]]


class DisplayMixin:
    """Gives a result a short `repr` and a notebook's view, made of its `_facts`."""

    def _facts(self) -> Facts:
        """Facts that are worth a line: (what, value). The first one names the thing."""
        raise NotImplementedError

    def __repr__(self) -> str:
        told = ", ".join(f"{what}: {line(value)}" for what, value in self._facts())
        return f"<{type(self).__name__} {told}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{html(what)}</th><td style="text-align:left">{html(value)}</td></tr>'
            for what, value in self._facts()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def gain(judgement: Any) -> str:
    """A judgement in a word."""
    return f"{judgement.gain:.2f}x on {judgement.streams} streams"


GIVEN = "given"
RECORDED = "recorded with the model"
DEFAULT = "default"

ON_COSTS = ("batch", "shapes", "gpu", "profile")
ON_RULES = ("rules", "streams", *ON_COSTS)


@dataclass(frozen=True)
class Defaults:
    """Batch, GPU and profile that a model is judged with.

    Attributes:
        workload: What sizes it and prices its nodes.
        ruleset: The rules that its ids should come from; None where nobody says.
        said: "rules", "streams", "batch", "shapes", "gpu" and "profile", as far as they play a part -> in words.
        origin: The same -> `GIVEN`, `RECORDED`, `DEFAULT`, or who else says it.
        missing: What the record says and can not be had, such as a profile that is not there any more, half a sentence.
    """

    workload: Workload
    ruleset: RuleSet | None = None
    said: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)
    missing: str | None = None

    def words(self, keys: tuple[str, ...] = ON_RULES) -> str:
        """Some of it in words: "rules default (shipped), 4 streams, batch 128 (recorded with the model); gpu h200 (default)".

        What is missing is always said.
        """
        groups: dict[str, list[str]] = {}
        for key in keys:
            if key in self.said:
                groups.setdefault(self.origin[key], []).append(self.said[key])
        said = [f"{', '.join(parts)} ({origin})" for origin, parts in groups.items()]
        return "; ".join(said if self.missing is None else [*said, self.missing])

    def of_both(self, other: FlatGraph) -> Defaults:
        """Defaults for two models that are compared: what is recorded of one and does not fit the other is left out for both."""
        workload, declared = self.workload, {end.name: end.shape for end in other.model.inputs}
        if self.origin.get("shapes") == RECORDED:
            fitting = {n: s for n, s in workload.shapes.items() if n in declared and fits(s, declared[n])}
            workload = replace(workload, shapes=fitting)
        if workload.profile is not None and self.origin.get("profile") == RECORDED:
            try:
                profiles.check(workload.profile, other)
            except MsplitError:
                workload = replace(workload, profile=None)
        return replace(self, workload=workload, said=_said(self.ruleset, workload))


@dataclass(frozen=True)
class Given:
    """Values that the user gives, by options or in settings; None or empty where nothing was said.

    `origin` gives, for "rules" and so on, who said so where that is not `GIVEN`.
    """

    rules: RuleSet | None = None
    streams: int | None = None
    batch: int | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    gpu: str | None = None
    profile: Profile | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


def resolve(flat: FlatGraph, given: Given | None = None) -> Defaults:
    """Finds the batch, GPU and profile that a model is judged with.

    Shapes that are recorded are those of the recorded batch, so a batch that is given sets them aside; so does a GPU that is given a
    recorded profile. The recorded number of streams goes with the recorded rules.
    """
    given = given or Given()
    record = flat.model.record
    origin = {key: given.origin.get(key, GIVEN) for key in ON_RULES}
    # Rules: those given, or the recorded ones, whose number of streams comes with them.
    ruleset, broken = given.rules, None
    found = None if record is None else record.rules
    if record is not None and found is not None and (ruleset is None or _same(ruleset, found)):
        streams = given.streams or record.streams
        try:  # nothing but the record is read
            again = parse(found.text, found.source, streams=streams, wrap=record.wrap, files=found.files)
        except RulesError as error:
            broken = f"the recorded rules can not be read by this version: {error.what}"
        else:
            if ruleset is None:
                origin["rules"] = RECORDED
            ruleset = again
            if given.streams is None:
                origin["streams"] = RECORDED
    elif given.streams is None:
        origin["streams"] = "as these rules say"
    # The profile: the recorded one where neither a profile nor a GPU is given.
    profile, lost = given.profile, None
    if record is not None and record.profile is not None and profile is None and given.gpu is None:
        profile, lost = recorded_profile(record.profile, flat.model.path)
        origin["profile"] = RECORDED
    # Batch and shapes: recorded together, shapes only where they fit the model's inputs.
    batch, shapes, gpu = given.batch, dict(given.shapes), given.gpu
    if record is not None and batch is None:
        if not shapes and record.shapes:
            origin["shapes"] = RECORDED
        declared = {end.name: end.shape for end in flat.model.inputs}
        if all(name in declared and fits(shape, declared[name]) for name, shape in record.shapes.items()):
            shapes = {**record.shapes, **shapes}
        else:
            broken = broken or "the recorded shapes do not fit the model"
        batch = record.batch
        origin["batch"] = RECORDED
    elif batch is None:
        origin["batch"] = DEFAULT
    # The GPU: the recorded data sheet, if this version has it.
    if gpu is None:
        gpu, origin["gpu"] = DEFAULT_GPU, DEFAULT
        if record is not None:
            try:
                data_sheet(record.gpu)
                gpu, origin["gpu"] = record.gpu, RECORDED
            except MsplitError:
                broken = broken or f"assign took the data sheet '{record.gpu}', which is not there: give --costs gpu="
    workload = Workload(batch, shapes, gpu=gpu, profile=profile)
    return Defaults(workload, ruleset, _said(ruleset, workload), origin, broken or lost)


def _same(ruleset: RuleSet, recorded: RecordedRules) -> bool:
    return ruleset.text == recorded.text and dict(ruleset.files) == dict(recorded.files)


def recorded_profile(recorded: RecordedProfile, model: Path) -> tuple[Profile | None, str | None]:
    """The profile that a record names: where it was then, or beside the model. Otherwise why there is none."""
    name = recorded.path
    why = "is not there"
    for path in (Path(name), Path(os.path.realpath(model)).parent / Path(name).name):
        try:
            if not path.is_file():
                continue
            profile = profile_file.load(path)
        except (MsplitError, OSError, ValueError):
            why = "can not be read"
            continue
        if profile_file.hash_of(profile) == recorded.hash:
            return profile, None
        why = "has changed since"
    return None, f"assign took the profile '{name}', which {why}: give --costs profile="


def _said(ruleset: RuleSet | None, workload: Workload) -> dict[str, str]:
    said = {}
    if ruleset is not None:
        said["rules"] = f"rules {ruleset.source}"
        said["streams"] = f"{ruleset.streams} stream{'s' * (ruleset.streams != 1)}"
    profile = workload.profile
    if workload.batch is not None or not (workload.shapes or profile):
        said["batch"] = f"batch {workload.batch or 1}"
    if workload.shapes:
        said["shapes"] = "shapes " + ", ".join(f"{name}={_sizes(shape)}" for name, shape in workload.shapes.items())
    if profile is not None:
        said["profile"] = f"profile {profile.source}"
    else:
        said["gpu"] = f"gpu {workload.gpu or DEFAULT_GPU}"
    return said


def _sizes(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape)) or "()"


def measured_record(flat: FlatGraph, workload: Workload, streams: int) -> AssignmentRecord:
    """The record of ids that measuring found, and no rules: all of them are msplit's."""
    profile = workload.profile
    return AssignmentRecord(
        msplit=__version__,
        rules=None,
        streams=streams,
        batch=workload.batch,
        shapes=workload.shapes,
        gpu=workload.gpu or DEFAULT_GPU,
        profile=None if profile is None else RecordedProfile(profile.source, profile_file.hash_of(profile)),
        loaded=flat.model.choice,
    )


def anew(ruleset: RuleSet, flat: FlatGraph) -> RuleSet:
    """Rules in place of the ids on a model: where nothing tells which of those were set by hand, they do without the rule `manual`."""
    if flat.model.record is not None:
        return ruleset
    return replace(ruleset, rules=tuple(rule for rule in ruleset.rules if rule.key != "manual"))
