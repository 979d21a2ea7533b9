"""docs/architecture.md: its picture is that of the imports, and a bench takes the walk that it tells."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from types import FrameType

import pytest

import msplit
from tests.cli.runner import ROOT, SAMPLES

PAGE = ROOT / "docs" / "architecture.md"
WALK = re.findall(r"^\| \d+ \| `(.*?)` \| `(.*?)` \|", PAGE.read_text(), re.MULTILINE)


def test_the_picture_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "tools" / "architecture.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.TARGET.read_text("utf-8") == tool.svg(), "run: python tools/architecture.py"


def test_the_walk_is_short_and_names_what_is_there() -> None:
    assert 8 <= len(WALK) <= 12
    for file, name in WALK:
        names = ast.parse((ROOT / file).read_text("utf-8")).body
        for part in name.split("."):
            found = next((node for node in names if getattr(node, "name", None) == part), None)
            assert found is not None, f"{file} has no {name}"
            names = found.body


@pytest.mark.tf
def test_a_bench_takes_the_walk() -> None:
    """All of it but the command line, and the capture, which takes a GPU: a run on the CPU calls what the page names."""
    called: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        called.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    request = {
        "streams": (2,),
        "engine": "cuda",
        "device": "cpu",
        "settings": msplit.Settings(duration=0, warmup=0, min_rounds=1, builds=1),
    }
    flat = msplit.load(SAMPLES / "annotated.pb")
    before = sys.gettrace()
    sys.settrace(note)  # which hears of calls of Python's functions, and of nothing in them
    try:
        msplit.bench(flat, **request)
    finally:
        sys.settrace(before)
    left_out = [walk for walk in WALK[1:-1] if (str(ROOT / walk[0]), walk[1]) not in called]
    assert not left_out
