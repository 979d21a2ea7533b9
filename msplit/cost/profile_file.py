"""Profiles as JSON: `msplit profile -o` writes them, `--costs profile=` reads them. `docs/schemas/profile.json` describes them.

A file may come from anybody: it is bounded in size, and every mistake in it is an error that says where it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

from msplit.core.arguments import Precision
from msplit.cost.costs import Constants
from msplit.cost.profile import InputShape, Profile, ProfiledDevice, ProfiledKernel, ProfiledStep
from msplit.errors import MsplitError
from msplit.formats.files import JsonValue, read_file

SCHEMA_VERSION = 1
KIND = "profile"
MAX_BYTES = 256 << 20
"""Longest profile: a million steps with long names."""

_KEYS = (
    "schema_version", "kind", "graph_hash", "ops", "inputs", "device", "precision", "layout", "made", "constants", "one_us",
    "unmeasured", "kernels", "steps",
)  # fmt: skip
_LATER = ("one_us",)
"""Keys that older profiles do not have."""

_FIX = "measure it again: msplit profile MODEL -o PATH"
_PRECISIONS = tuple(str(one) for one in Precision)
_LAYOUTS = ("nhwc", "nchw", "none")


def dumps(profile: Profile) -> str:
    """A profile as JSON text. Keys are in a fixed order; kernels and steps take a line each."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "graph_hash": profile.graph_hash,
        "ops": dict(sorted(profile.ops.items())),
        "inputs": {name: {"dtype": one.dtype, "shape": list(one.shape)} for name, one in profile.inputs.items()},
        "device": dataclasses.asdict(profile.device),
        "precision": profile.precision,
        "layout": profile.layout,
        "made": dict(profile.made),
        "constants": _rounded(dataclasses.asdict(profile.constants)),
        "one_us": _rounded(profile.one_us),
        "unmeasured": dict(sorted(profile.unmeasured.items())),
        "kernels": [_rounded(dataclasses.asdict(kernel)) for kernel in profile.kernels],
        "steps": [{"nodes": list(step.nodes), "kernel": step.kernel} for step in profile.steps],
    }
    assert tuple(data) == _KEYS
    lines = [f"  {json.dumps(key)}: {_value(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def hash_of(profile: Profile) -> str:
    """SHA-256 of a profile as `dumps` writes it, hexadecimal."""
    return hashlib.sha256(dumps(profile).encode()).hexdigest()


def _value(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n    " + ",\n    ".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n  ]"
    return json.dumps(value, ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Times to a tenth of a nanosecond: more digits say nothing and make files hard to compare."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    return value


def load(path: str | os.PathLike[str]) -> Profile:
    """Reads a profile.

    Raises:
        MsplitError: It can not be read, or is no profile.
    """
    return parse(read_file(path, MAX_BYTES, what=KIND, fix=_FIX), os.fspath(path))


def parse(text: str, source: str) -> Profile:
    """Reads the text of a profile.

    Args:
        text: JSON.
        source: Its name, for messages.

    Raises:
        MsplitError: It is no profile; the message says what is wrong with it, and where.
    """
    top = JsonValue.parse(text, source, what=KIND, fix=_FIX)
    data = top.object(_KEYS, optional=_LATER).mapping()
    if data.get("kind") != KIND or data.get("schema_version") != SCHEMA_VERSION:
        raise MsplitError(f"this is not a profile of version {SCHEMA_VERSION}", where=source, fix=_FIX)
    kernels = tuple(_kernel(item) for item in top.at("kernels").items())
    return Profile(
        graph_hash=top.at("graph_hash").sha256(),
        ops={op: number.whole() for op, number in top.at("ops").entries()},
        inputs={name: _input(one) for name, one in top.at("inputs").entries()},
        device=_device(top.at("device")),
        precision=top.at("precision").one_of(_PRECISIONS),
        layout=top.at("layout").one_of(_LAYOUTS),
        constants=_constants(top.at("constants")),
        kernels=kernels,
        steps=_steps(top.at("steps"), len(kernels)),
        one_us=top.at("one_us").or_none(JsonValue.number) if "one_us" in data else None,
        unmeasured={why: number.whole() for why, number in top.at("unmeasured").entries()},
        made=dict(top.at("made").mapping()),
        source=source,
    )


def _kernel(item: JsonValue) -> ProfiledKernel:
    item.object(tuple(field.name for field in dataclasses.fields(ProfiledKernel)))
    counts = ("launches", "blocks", "threads", "registers", "shared_bytes", "resident")
    return ProfiledKernel(
        op=item.at("op").text(),
        inputs=tuple(_tensor(one) for one in item.at("inputs").items()),
        time_us=item.at("time_us").number(),
        share=item.at("share").or_none(lambda value: value.number(0.0, 1.0)),
        bytes=item.at("bytes").number(high=1e15),
        kernel=item.at("kernel").or_none(JsonValue.text),
        occupancy=item.at("occupancy").or_none(JsonValue.number),
        **{name: item.at(name).or_none(JsonValue.whole) for name in counts},
    )


def _tensor(item: JsonValue) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    parts = item.items()
    if len(parts) != 3:
        raise item.wrong("is not [type, shape, strides]")
    shape, strides = (tuple(size.whole() for size in part.items()) for part in parts[1:])
    return parts[0].text(), shape, strides


def _input(item: JsonValue) -> InputShape:
    item.object(("dtype", "shape"))
    return InputShape(item.at("dtype").text(), tuple(size.whole() for size in item.at("shape").items()))


def _device(item: JsonValue) -> ProfiledDevice:
    item.object(tuple(field.name for field in dataclasses.fields(ProfiledDevice)))
    texts = {name: item.at(name).text() for name in ("name", "driver", "cuda", "pytorch")}
    return ProfiledDevice(sms=item.at("sms").whole(), **texts)


def _constants(item: JsonValue) -> Constants:
    fields = dataclasses.fields(Constants)
    item.object(tuple(field.name for field in fields))
    # A difference of two measurements may come out below nothing.
    read: dict[str, Any] = {}
    for field in fields:
        value = item.at(field.name)
        if field.name == "concurrency":
            read[field.name] = {key: one.number(-1e9) for key, one in value.entries()}
        elif field.default is dataclasses.MISSING:
            read[field.name] = {_width(key, one): one.number(-1e9) for key, one in value.entries()}
        else:
            read[field.name] = value.or_none(lambda one: one.number(-1e9))
    return Constants(**read)


def _width(key: str, item: JsonValue) -> int:
    if not key.isdecimal() or len(key) > 6:
        raise item.wrong("is not named by a number of streams")
    return int(key)


def _steps(item: JsonValue, kernels: int) -> tuple[ProfiledStep, ...]:
    steps = []
    for one in item.items():
        one.object(("nodes", "kernel"))
        kernel = one.at("kernel").whole(-1)
        if kernel >= kernels:
            raise one.at("kernel").wrong(f"is {kernel}, but there are {kernels} kernels")
        nodes = tuple(node.text() for node in one.at("nodes").items())
        if not nodes:
            raise one.wrong("has no node")
        steps.append(ProfiledStep(nodes, kernel))
    return tuple(steps)
