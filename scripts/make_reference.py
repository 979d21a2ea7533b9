"""Writes docs/reference.md from the docstrings of what `import msplit` offers.

    python scripts/make_reference.py

The page has the first paragraph of each docstring; `tools/pages.py` puts the whole docstring there in the site. A test compares the page
with what this would write.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import msplit

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "reference.md"

HEAD = """# Python interface

All that `import msplit` offers, written by a script from the docstrings. `help(msplit.prepare)` prints all arguments, and so does the site
that `.ci/docs` builds from this page. [library.md](library.md) has examples.
"""


def kind(value: Any) -> str:
    """The section of the page that a public name is in."""
    if not inspect.isclass(value):
        return "Functions"
    if issubclass(value, BaseException):
        return "Exceptions"
    return "Scopes" if hasattr(value, "__enter__") and not members(value) else "Classes"


def members(found: type) -> list[str]:
    """Public fields, properties and methods of a class, in the order of its source."""
    fields = [field.name for field in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else []
    own = [name for name, value in vars(found).items() if callable(value) or hasattr(value, "__get__")]
    return [name for name in dict.fromkeys([*fields, *own]) if not name.startswith("_")]


def call(name: str, value: Any) -> str:
    """How a function is called: the names of its arguments, those that have a default in brackets."""
    parameters = [each for each in inspect.signature(value).parameters.values() if not each.name.startswith("_")]
    shown = [each.name if each.default is each.empty else f"{each.name}=" for each in parameters]
    return f"msplit.{name}({', '.join(shown)})"


def entry(name: str) -> str:
    """The part of the page about a public name."""
    value = getattr(msplit, name)
    summary = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    source = inspect.getsourcefile(value)
    assert source is not None
    link = f"[Source](../{Path(source).relative_to(ROOT).as_posix()})"
    parts = [f"### `msplit.{name}`", f"{summary} {link}"]
    if kind(value) in ("Functions", "Scopes"):
        parts.insert(1, f"    {call(name, value)}")
    elif has := members(value):
        parts.append(f"It has {', '.join(f'`{member}`' for member in has)}.")
    return "\n\n".join(parts)


def page() -> str:
    """The whole file."""
    names = [name for name in msplit.__all__ if not name.startswith("_")]
    parts = [HEAD.rstrip()]
    for section in ("Functions", "Scopes", "Classes", "Exceptions"):
        parts.append(f"## {section}")
        parts += [entry(name) for name in names if kind(getattr(msplit, name)) == section]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(), "utf-8")
