"""Writes deploy/slim.txt: the packages that `msplit serve` of a build needs beside PyTorch, and no TensorFlow.

    python scripts/make_slim.py

These are msplit's dependencies and those of its extra `serve` without TensorFlow, and what they depend on, in the versions of
constraints.txt. A test compares the file with what this would write, and `.ci/container` starts a server where nothing else is installed.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "deploy" / "slim.txt"
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0"}
"""Python of the container, for markers."""
ALSO = ("nvidia-ml-py==13.615.71",)
"""Packages that no extra has: the gauges of a GPU in `/metrics`."""

HEAD = """# All that `msplit serve` of a build imports beside PyTorch. For `pip install --no-deps`: TensorFlow is a dependency of msplit.
# Written by scripts/make_slim.py.
"""


def needed() -> set[str]:
    """Names of the packages, as pip compares them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(one) for one in (*project["dependencies"], *project["optional-dependencies"]["serve"])]
    found: set[str] = set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name == "tensorflow" or name in found or (one.marker and not one.marker.evaluate({**PYTHON, "extra": ""})):
            continue
        found.add(name)
        waiting += map(Requirement, distribution(name).requires or ())
    return found


def page() -> str:
    """Text of the file."""
    names = needed()
    pinned = (ROOT / "constraints.txt").read_text().split("\n")
    lines = [line for line in pinned if canonicalize_name(re.split("==", line)[0]) in names]
    assert len(lines) == len(names), f"constraints.txt lacks some of {sorted(names)}"
    return HEAD + "\n".join(sorted([*lines, *ALSO], key=str.lower)) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), "utf-8")
