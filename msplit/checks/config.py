"""Reads the settings of the checks: `msplit.yaml`, or `[tool.msplit]` of `pyproject.toml`.

select: [MS0]              # codes or beginnings of codes; all without it
ignore: [MS017]
severity: {MS012: error}   # error, warning or info
fail_on: error             # the exit code is 1 from this severity on
streams: 4
fork_streams: 4            # for MS019
hand_set: ["tower_a/.*"]   # nodes whose ids the model's code sets
rules: rules.yaml          # paths are relative to the settings' file
plan: plan.json
batch: 128
gpu: h200
baseline: known.json       # findings that are known
profile: profile.json      # from `msplit profile`, in place of the data sheet
shapes: {image: [1, 224, 224, 3]}
limits: {min_gain: 1.2}    # see `Thresholds`
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msplit.checks.run import CHECKS, expand, near
from msplit.checks.subject import CheckSettings, Severity, Thresholds
from msplit.core.arguments import MAX_STREAMS
from msplit.cost.gpus import data_sheet, gpu_names, is_sheet_file
from msplit.errors import MsplitError, RulesError
from msplit.formats.files import read_file
from msplit.formats.settings import MAX_BYTES, Options, Reading, Value, nearest, parse
from msplit.rules import streamfile
from msplit.rules.ruleset import available

YAML = "msplit.yaml"
TOML = "pyproject.toml"
_TABLE = ("tool", "msplit")
_SEVERITIES = tuple(Severity)
_HUGE = 2**62
_FIX = "docs/checks.md lists all settings"


def find(folder: Path) -> Path | None:
    """The settings' file: the nearest `msplit.yaml`, or `pyproject.toml` with `[tool.msplit]`, from a folder upward.

    In one folder `msplit.yaml` comes first.

    Raises:
        MsplitError: A `pyproject.toml` on the way is no TOML.
    """
    for place in (folder.resolve(), *folder.resolve().parents):
        if (place / YAML).is_file():
            return place / YAML
        if (place / TOML).is_file() and _has_table(place / TOML):
            return place / TOML
    return None


def load(path: Path) -> CheckSettings:
    """Reads a settings' file, told apart by its suffix: `.toml`, or YAML.

    Raises:
        MsplitError: It can not be read, or has mistakes; all of them are named with their lines.
    """
    source = str(path)
    text = read_file(path, MAX_BYTES, what="file of settings", fix=_FIX)
    try:
        value = _toml(text, source) if path.suffix == ".toml" else parse(text, source)
        return _settings(value, source, path.parent)
    except RulesError as error:
        raise MsplitError(error.what, where=error.where, fix=_FIX, details=error.details) from None


def _settings(value: Value, source: str, folder: Path) -> CheckSettings:
    reading = Reading(source)
    top = Options("the settings", value, reading)
    reading.finish()  # not a mapping: nothing else can be said
    rules, plan, profile, baseline = (top.text(key) for key in ("rules", "plan", "profile", "baseline"))
    settings = CheckSettings(
        select=_codes(top, "select"),
        ignore=_codes(top, "ignore"),
        severity=_severity(top),
        fail_on=Severity(top.choice("fail_on", Severity.ERROR, _SEVERITIES)),
        streams=top.integer("streams", 0, 1, MAX_STREAMS) or None,
        fork_streams=top.integer("fork_streams", 0, 1, MAX_STREAMS) or None,
        hand_set=_patterns(top),
        rules=rules if rules is None or rules in available() else str(folder / rules),
        plan=None if plan is None else str(folder / plan),
        batch=top.integer("batch", 0, 1, _HUGE) or None,
        gpu=_gpu(top, folder),
        shapes=_shapes(top),
        baseline=None if baseline is None else str(folder / baseline),
        profile=None if profile is None else str(folder / profile),
        limits=_limits(top),
        source=source,
    )
    top.finish()
    reading.finish()
    return settings


def _codes(top: Options, key: str) -> tuple[str, ...]:
    codes = []
    for prefix, line in top.texts(key):
        try:
            expand([prefix])
        except MsplitError as error:
            top.problem(f"{key}: {error.what}", fix=error.fix or _FIX, at=line)
        codes.append(prefix)
    return tuple(codes)


def _severity(top: Options) -> dict[str, Severity]:
    table = top.mapping("severity")
    found = {}
    for code in table.names() if table else ():
        assert table is not None
        name = str(code).upper()
        word = table.choice(code, "", _SEVERITIES)
        if name not in CHECKS:
            table.problem(f"there is no check {code!r}{near(str(code))}", fix="write {MS012: error}")
        elif word:
            found[name] = Severity(word)
    return found


def _patterns(top: Options) -> tuple[str, ...]:
    found = []
    for pattern, line in top.texts("hand_set"):
        why = streamfile.problem(pattern) if pattern else "it is empty"
        if why is None:
            found.append(pattern)
        else:
            top.problem(f"hand_set: bad pattern {streamfile.shorten(pattern)!r}: {why}", fix="correct it", at=line)
    return tuple(found)


def _gpu(top: Options, folder: Path) -> str | None:
    value = top.text("gpu")
    if value is not None and is_sheet_file(value):
        value = str(folder / value)
        try:
            data_sheet(value)
        except MsplitError as error:
            top.problem(f"gpu: {error.where}: {error.what}", fix=error.fix or _FIX)
    elif value is not None and value.lower() not in gpu_names():
        top.problem(
            f"gpu: there is no data sheet of {value!r}{nearest(value, gpu_names())}", fix=", ".join(gpu_names())
        )
    return value


def _shapes(top: Options) -> dict[str, tuple[int, ...]]:
    table = top.mapping("shapes")
    shapes = {}
    for name in table.names() if table else ():
        assert table is not None
        value = table.value(name)
        sizes = value.data if value is not None and isinstance(value.data, list) else [value]
        numbers = [size.data for size in sizes if size is not None]
        if all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
            shapes[str(name)] = tuple(numbers)
        else:
            table.problem(
                f"shapes: the sizes of {name!r} are not numbers of 0 or more", fix="write {image: [1, 224, 224, 3]}"
            )
    return shapes


def _limits(top: Options) -> Thresholds:
    table = top.mapping("limits")
    if table is None:
        return Thresholds()
    found: dict[str, float | None] = {}
    for name, default in asdict(Thresholds()).items():
        if default is None:
            most = table.integer(name, -1, 0, _HUGE)
            found[name] = None if most < 0 else most
        else:
            found[name] = table.number(name, default, 1 if name == "max_imbalance" else 0)
    table.finish()
    return Thresholds(**found)  # type: ignore[arg-type]


def _has_table(path: Path) -> bool:
    text = read_file(path, MAX_BYTES, what="file of settings", fix=_FIX)
    return "msplit" in text and "msplit" in _parsed(text, str(path)).get("tool", {})


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise MsplitError(f"this is not valid TOML: {error}", where=source, fix="correct the file") from None


def _toml(text: str, source: str) -> Value:
    """The table `[tool.msplit]` with the lines on which its keys stand, as far as they can be found."""
    table = _parsed(text, source).get("tool", {}).get("msplit")
    lines = _lines(text)
    if table is None:
        raise MsplitError("there is no table [tool.msplit]", where=source, fix=_FIX)
    return _value(table, _TABLE, lines, lines.get(_TABLE, 1))


def _value(data: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int], line: int) -> Value:
    line = lines.get(path, line)
    if isinstance(data, dict):
        items = {key: _value(item, (*path, key), lines, line) for key, item in data.items()}
        return Value(items, line, {key: item.line for key, item in items.items()})
    if isinstance(data, list):
        return Value([_value(item, (), lines, line) for item in data], line)
    return Value(data if isinstance(data, str | int | float) else str(data), line)


_HEADER = re.compile(r"\[([^\[\]]+)\]")
_KEY = re.compile(r"([A-Za-z0-9_\-.\"' \t]+)=")


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Lines of headers and keys. A line inside of a text that looks like a key is found too, which a message survives."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        # Neither pattern can backtrack: a line may be long.
        if header := _HEADER.fullmatch(line.partition("#")[0].rstrip()):
            table = _dotted(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_dotted(key[1])), number)
    return found


def _dotted(text: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in text.split("."))
