"""Counts the collections of op names that stand outside of the table of traits (`msplit/opset/data/op_traits.txt`).

    python tools/op_collections.py [--show]         --show prints each collection

A collection is a tuple, list, set or dict that names two or more ops of TensorFlow; one inside of another counts once. What says how each
op is done is none: a decorator, ``@lowering("Add", "AddV2")``, or a dict of functions, ``{"Add": torch.add, "Sub": torch.sub}``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "msplit" / "opset"
_QUOTED = re.compile(r"""["'](\w+)["']""")


@cache
def _ops() -> frozenset[str]:
    return frozenset(json.loads((TABLE / "data" / "ops.json").read_bytes())["ops"])


@cache
def parsed(source: str) -> ast.Module:
    """Syntax tree of a module's source."""
    return ast.parse(source)


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of it, outer ones first."""
    found: list[ast.AST] = [parsed(source)]
    for node in found:  # as `ast.walk`, in a third of the time
        if isinstance(node, ast.Name | ast.Constant | ast.expr_context):
            continue
        for value in node.__dict__.values():
            if isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    return tuple(found)


def _members(node: ast.AST) -> list[ast.expr]:
    """What a collection holds: its elements, or its keys."""
    match node:
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            return list(elements)
        case ast.Dict(keys=keys):
            return [key for key in keys if key is not None]
    return []


def _names(node: ast.expr) -> int:
    """How many op names a collection holds, those of collections inside of it with them."""
    found = 0
    for member in _members(node):
        inner = member.value if isinstance(member, ast.Starred) else member
        if isinstance(inner, ast.Constant):
            found += isinstance(inner.value, str) and inner.value in _ops()
        else:
            found += _names(inner)
    return found


def _registers(node: ast.expr) -> bool:
    """Whether a collection is a dict of functions, or of what is made with them."""
    return isinstance(node, ast.Dict) and all(
        isinstance(value, ast.Name | ast.Attribute | ast.Lambda | ast.Call) for value in node.values
    )


def collections_in(source: str) -> Iterator[ast.expr]:
    """The outermost collections of two op names or more in a module's source."""
    inside: set[int] = set()
    for node in nodes(source):  # those of a collection come behind it
        is_collection = isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and id(node) not in inside
        if is_collection and _names(node) > 1 and not _registers(node):
            inside.update(map(id, ast.walk(node)))
            yield node


def op_names_in(source: str) -> int:
    """Count names of ops in the strings of a module, text tables and decorators included, docstrings left out."""
    prose = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in nodes(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]
    return sum(word in _ops() for word in re.findall(r"\w+", "\n".join(texts)))


def outside() -> list[Path]:
    """Modules of the package outside of the table of traits."""
    return [path for path in sorted((ROOT / "msplit").rglob("*.py")) if not path.is_relative_to(TABLE)]


def op_name_collections() -> dict[str, int]:
    """Per file of the package that has any, outside of the table: how many."""
    found = {}
    for path in outside():
        source = path.read_text()
        if sum(word in _ops() for word in _QUOTED.findall(source)) < 2:
            continue  # which spares most files the parser
        count = sum(1 for _ in collections_in(source))
        if count:
            found[str(path.relative_to(ROOT))] = count
    return found


def main() -> None:
    """See the module."""
    counts = op_name_collections()
    for file, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        print(f"{count:4} {file}")
        if "--show" in sys.argv[1:]:
            found = sorted(collections_in((ROOT / file).read_text()), key=lambda node: node.lineno)
            for node in found:
                print(f"{node.lineno:9}  {ast.unparse(node)}")
    print(f"{sum(counts.values()):4} collections of op names in {len(counts)} files")


if __name__ == "__main__":
    main()
