"""What users have: commands, options, names of the library, checks, rules, formats and keys of outputs, before and after a change.

    python tools/inventory.py write FILE            lists them, a line each, of the package that is imported
    python tools/inventory.py compare OLD NEW       prints each line that is gone (-) or new (+); exit code 1 where one is gone

Each line that is gone belongs into CHANGELOG.md, with what replaces it. `write` takes another checkout's package: run it there.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def commands() -> Iterator[str]:
    """Each command with its options and arguments, their choices, and the keys of those that hold several."""
    import click

    from msplit.cli.main import COMMANDS, command_of

    for name in COMMANDS:
        yield f"command {name}"
        for one in command_of(name).params:
            hidden = " (hidden)" if getattr(one, "hidden", False) else ""
            for text in one.opts + one.secondary_opts if isinstance(one, click.Option) else [one.name]:
                yield f"option {name} {text}{hidden}"
            for choice in one.type.choices if isinstance(one.type, click.Choice) else ():
                yield f"option {name} {one.opts[-1]} {choice}"
            for key in getattr(one.type, "keys", ()):
                yield f"option {name} {one.opts[-1]} {key}="


def names() -> Iterator[str]:
    """Names of the library, parameters of its functions and classes, and their public attributes."""
    import msplit

    for name in msplit.__all__:
        yield f"name msplit.{name}"
        value = getattr(msplit, name)
        if callable(value):
            yield from (f"name msplit.{name}({parameter})" for parameter in _parameters(value))
        if inspect.isclass(value):
            yield from (f"name msplit.{name}.{one}" for one in dir(value) if not one.startswith("_"))


def _parameters(value: Any) -> Iterator[str]:
    """Parameters, and what a TypedDict says of further keywords."""
    try:
        signature = inspect.signature(value, eval_str=False)
    except ValueError:
        return
    for parameter in signature.parameters.values():
        kind = str(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD and kind.startswith("Unpack["):
            import msplit

            yield from getattr(msplit, kind[len("Unpack[") : -1]).__annotations__
        else:
            yield parameter.name


def lists() -> Iterator[str]:
    """Checks, rule sets, files that can be read, outputs of `assign --emit`, samples, engines and algorithms."""
    from msplit import rules, samples
    from msplit.assignment.assignment import EMITS
    from msplit.checks.run import CHECKS
    from msplit.formats.model import Format

    yield from (f"check {name}" for name in CHECKS)
    yield from (f"rule set {name}" for name in rules.available())
    yield from (f"format {one.name}" for one in Format)
    yield from (f"emit {name}" for name in EMITS)
    yield from (f"sample {name}" for name in samples.names())


def outputs() -> Iterator[str]:
    """Keys of each command's JSON, as their schemas have them."""
    for path in sorted((ROOT / "msplit" / "data" / "schemas").glob("*.json")):
        yield from (f"output {path.stem}{key}" for key in _keys(json.loads(path.read_text("utf-8")), ""))


def _keys(schema: Any, at: str) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            inside = key in ("properties", "$defs", "definitions") and isinstance(value, dict)
            for name, below in value.items() if inside else ():
                yield f"{at}.{name}"
                yield from _keys(below, f"{at}.{name}")
            if not inside:
                yield from _keys(value, at)
    elif isinstance(schema, list):
        for value in schema:
            yield from _keys(value, at)


def inventory() -> list[str]:
    """Everything, sorted."""
    return sorted({*commands(), *names(), *lists(), *outputs()})


def main(arguments: list[str]) -> int:
    """Write a list, or compare two. Returns the exit code."""
    if len(arguments) == 2 and arguments[0] == "write":
        Path(arguments[1]).write_text("\n".join(inventory()) + "\n", "utf-8")
        return 0
    if len(arguments) == 3 and arguments[0] == "compare":
        old, new = (set(Path(one).read_text("utf-8").splitlines()) for one in arguments[1:])
        print(*(f"- {line}" for line in sorted(old - new)), *(f"+ {line}" for line in sorted(new - old)), sep="\n")
        return int(bool(old - new))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
