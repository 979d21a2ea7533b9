"""Profiles as JSON: `msplit profile -o` writes them, `--costs profile=` reads them. `docs/schemas/profile.json` describes them.

A file may come from anybody: it is bounded in size, and every mistake in it is an error that says where it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

from msplit.cost.profile import Profile
from msplit.errors import MsplitError
from msplit.formats.files import JsonValue, read_file

SCHEMA_VERSION = 1
KIND = "profile"
MAX_BYTES = 256 << 20
"""Longest profile: a million steps with long names."""

_LATER = ("one_us",)
"""Keys that older profiles do not have."""

_FIX = "measure it again: msplit profile MODEL -o PATH"


def dumps(profile: Profile) -> str:
    """A profile as JSON text. Keys are in a fixed order; kernels and steps take a line each."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "graph_hash": profile.graph_hash,
        "ops": dict(sorted(profile.ops.items())),
        "inputs": {name: dataclasses.asdict(one) for name, one in profile.inputs.items()},
        "device": dataclasses.asdict(profile.device),
        "precision": profile.precision,
        "layout": profile.layout,
        "made": dict(profile.made),
        "constants": _rounded(dataclasses.asdict(profile.constants)),
        "one_us": _rounded(profile.one_us),
        "unmeasured": dict(sorted(profile.unmeasured.items())),
        "kernels": [_rounded(dataclasses.asdict(kernel)) for kernel in profile.kernels],
        "steps": [vars(step) for step in profile.steps],
    }
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
    top = JsonValue.parse(text, source, what=KIND, fix=_FIX).of_version(KIND, SCHEMA_VERSION)
    profile = top.to(Profile, optional=_LATER, source=source)
    for place, step in enumerate(profile.steps):
        if step.kernel >= len(profile.kernels):
            what = f"`steps[{place}].kernel` is {step.kernel}, but there are {len(profile.kernels)} kernels"
            raise MsplitError(what, where=source, fix=_FIX)
        if not step.nodes:
            raise MsplitError(f"`steps[{place}]` has no node", where=source, fix=_FIX)
    return profile
