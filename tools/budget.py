"""Sizes and tangles of the package, held below the limits of `tools/budget.toml`.

    python tools/budget.py            prints each figure beside its limit; exit code 1 where one is above

`scripts/lint` runs it. A limit is raised in the commit that needs it, with the reason in its message; the sum of lines with code is
capped by the project's issues. A figure that falls takes its limit down with it.
"""

from __future__ import annotations

import ast
import functools
import gc
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import op_collections

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "msplit"
ENGINE = PACKAGE / "engines" / "cuda"

TABLES = {
    "dict",
    "defaultdict",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "set",
    "list",
    "deque",
    "Counter",
}
"""What makes an empty collection that something is meant to be put into."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(folder: Path | None = None) -> dict[str, Path]:
    """Python files below a folder, by default of the package, by the name that they are imported by."""
    found = {}
    for path in sorted((folder or PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return op_collections.parsed(path.read_text("utf-8"))


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Those in it, however deep, outer ones first. There are a tenth as many as nodes."""
    waiting = [node]
    while waiting:
        outer = waiting.pop()
        for field in ("finalbody", "orelse", "handlers", "cases", "body"):
            inner = getattr(outer, field, None)
            if isinstance(inner, list):
                waiting += reversed(inner)
        if isinstance(outer, ast.stmt) and outer is not node:
            yield outer


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


@functools.cache
def code_lines(path: Path) -> int:
    """Lines with code of a file: without docstrings, comments and blanks."""
    source = path.read_text("utf-8")
    nodes = op_collections.nodes(source)
    prose: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    rows = source.split("\n")
    found = {number for number, row in enumerate(rows, 1) if row.lstrip()[:1] not in ("", "#")}
    inside = {number for node in nodes if _is_text(node) for number in range(node.lineno, node.end_lineno + 1)}
    if inside - found - prose:  # a blank line in a text, or a comment between two that are one: a matter of tokens
        found = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in _NO_CODE:
                found.update(range(token.start[0], token.end[0] + 1))
    return len(found - prose)


def lines(*paths: Path) -> int:
    """Lines of files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def functions(path: Path) -> Iterator[Function]:
    """All functions and methods of a file."""
    return (node for node in statements(tree(path)) if isinstance(node, Function))


def parameters(function: Function) -> list[str]:
    """A function's parameters, without `self` and `cls`."""
    own = function.args
    named = [argument.arg for argument in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    return [name for name in named if name not in ("self", "cls")]


def long_signatures() -> list[str]:
    """Functions with more than eight parameters; kernels of Triton are left out, whose parameters are what they read and write."""
    found = [(name, function) for name, path in modules().items() for function in functions(path)]
    found = [
        (name, function) for name, function in found if "jit" not in "".join(map(ast.unparse, function.decorator_list))
    ]
    return [f"{name}.{function.name}" for name, function in found if len(parameters(function)) > 8]


def long_modules() -> list[str]:
    """Modules of more than 350 lines."""
    return [name for name, path in modules().items() if lines(path) > 350]


def engine_root() -> list[str]:
    """Files in the root of the cuda engine, its `__init__` left out."""
    return [path.name for path in sorted(ENGINE.glob("*.py")) if path.stem != "__init__"]


def bench_parameters() -> list[str]:
    """What the function of the command `bench` takes."""
    (command,) = (function for function in functions(PACKAGE / "cli" / "bench.py") if function.name == "command")
    return parameters(command)


def process_tables() -> list[str]:
    """What the cuda engine keeps for the whole process: empty collections of modules, and names that functions set anew."""
    found = []
    for name, path in modules(ENGINE).items():
        parsed = tree(path)
        for node in parsed.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if targets and _is_empty(node.value):
                found += [f"{name}.{target.id}" for target in targets if isinstance(target, ast.Name)]
        found += [
            f"{name}.{held}" for node in statements(parsed) if isinstance(node, ast.Global) for held in node.names
        ]
    return sorted(set(found))


def _is_empty(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in TABLES and not any(not isinstance(one, ast.Name | ast.Attribute) for one in value.args)
    return False


@functools.cache
def imports() -> dict[str, set[str]]:
    """Modules of the package that each module imports, in functions and for type checkers, too."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in statements(tree(path)):
            if isinstance(node, ast.Import):
                named = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{one.name}" for one in node.names]
                named = [one if one in known else node.module for one in full]
            else:
                continue
            found[name].update(one for one in named if one in known and one != name)
    return found


def circles() -> list[list[str]]:
    """Modules of one package that import each other in a circle; imports in functions and for type checkers count."""
    reached = {name: _reached(imports(), name) for name in imports()}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in reached
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(found)]


def longest_chain() -> list[str]:
    """The longest chain of modules, each of which imports the next. A circle, where there is one, is followed once."""
    best: dict[str, list[str]] = {}

    def chain(name: str) -> list[str]:
        if name not in best:
            best[name] = []
            best[name] = [name, *max(map(chain, sorted(imports()[name])), key=len, default=[])]
        return best[name]

    return max(map(chain, sorted(imports())), key=len)


def lazy_imports() -> list[str]:
    """Imports of the package's own modules inside of functions."""
    found: dict[ast.stmt, str] = {}
    for path in modules().values():
        for function in functions(path):
            for node in statements(function):
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
                    found[node] = ast.unparse(node)
    return list(found.values())


def repeated_classes() -> list[str]:
    """Public class names that several modules define."""
    names = Counter(
        node.name for path in modules().values() for node in tree(path).body if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1 and not name.startswith("_"))


def small_modules() -> list[str]:
    """Modules of fewer than 60 lines, packages' own files left out."""
    return [name for name, path in modules().items() if path.stem != "__init__" and lines(path) < 60]


def complex_functions() -> list[str]:
    """Functions, methods and classes of cyclomatic complexity D or worse (above 20), as radon counts."""
    from radon.complexity import cc_visit_ast

    return [str(block) for path in modules().values() for block in cc_visit_ast(tree(path)) if block.complexity > 20]


def options() -> dict[str, int]:
    """Options of each command, aliases of TensorFlow Serving's flags (hidden) left out."""

    import click

    from msplit.cli.main import COMMANDS, command_of

    commands = {name: command_of(name) for name in COMMANDS}
    return {
        name: sum(isinstance(one, click.Option) and not one.hidden for one in command.params)
        for name, command in commands.items()
    }


def op_names() -> int:
    """Names of TensorFlow's ops in strings outside of `opset`: tables, decorators and comparisons; docstrings left out."""
    return sum(op_collections.op_names_in(path.read_text("utf-8")) for path in op_collections.outside())


def words() -> int:
    """Words of the documents under `docs/`, without lists that scripts write."""
    generated = ("ops.md", "checks.md", "reference.md", "options.md")
    return sum(
        len(path.read_text("utf-8").split()) for path in (ROOT / "docs").rglob("*.md") if path.name not in generated
    )


def _reached(imports: dict[str, set[str]], name: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += imports[other]
    return seen


def rooms() -> dict[str, list[Path]]:
    """Files of each room: a folder right below the package, or of the cuda engine, or the package's own root."""
    found: dict[str, list[Path]] = {}
    for path in modules().values():
        parts = path.relative_to(PACKAGE).parts[:-1]
        deep = 3 if parts[:2] == ("engines", "cuda") else 2 if parts[:1] == ("engines",) else 1
        found.setdefault("/".join(parts[:deep]) or ".", []).append(path)
    return found


def figures() -> dict[str, dict[str, int]]:
    """Everything that has a limit, in the tables of `tools/budget.toml`."""
    by_room = rooms()
    commands = options()
    return {
        "whole": {
            "lines with code": sum(map(code_lines, modules().values())),
            "files": len(modules()),
            "longest import chain": len(longest_chain()),
            "import circles": len(circles()),
            "imports of our own modules inside of functions": len(lazy_imports()),
            "public class names twice or more": len(repeated_classes()),
            "modules of fewer than 60 lines": len(small_modules()),
            "modules of more than 350 lines": len(long_modules()),
            "functions of complexity D or worse": len(complex_functions()),
            "functions with more than 8 parameters": len(long_signatures()),
            "process-wide tables in the cuda engine": len(process_tables()),
            "files in the root of engines/cuda": len(engine_root()),
            "options in all": sum(commands.values()),
            "options on one command": max(commands.values()),
            "collections of op names outside of opset": sum(op_collections.op_name_collections().values()),
            "op names outside of opset": op_names(),
            "words in docs without generated lists": words(),
            "lines of README.md": lines(ROOT / "README.md"),
            "lines of CONTRIBUTING.md": lines(ROOT / "CONTRIBUTING.md"),
        },
        "lines": {room: sum(map(code_lines, paths)) for room, paths in by_room.items()},
        "files": {room: len(paths) for room, paths in by_room.items()},
    }


def limits() -> dict[str, dict[str, int]]:
    """The limits, as committed."""
    return tomllib.loads((ROOT / "tools" / "budget.toml").read_text("utf-8"))


def excesses(found: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> list[str]:
    """A line for each figure above its limit, or without one, and for each limit of something that is no longer there."""
    told = []
    for table, rows in found.items():
        limits_of = allowed.get(table, {})
        for name, figure in rows.items():
            if name not in limits_of:
                told.append(f"[{table}] {name}: {figure}, and no limit in tools/budget.toml")
            elif figure > limits_of[name]:
                told.append(f"[{table}] {name}: {figure}, above its limit of {limits_of[name]}")
        told += [f"[{table}] {name}: a limit of nothing" for name in limits_of if name not in rows]
    return told


def main() -> int:
    """Print all figures beside their limits. Returns the exit code."""
    gc.disable()  # a million nodes that stay to the end
    found, allowed = figures(), limits()
    for table, rows in found.items():
        print(f"[{table}]")
        for name, figure in rows.items():
            print(f"  {name:<50} {figure:>7,}   limit {allowed.get(table, {}).get(name, 0):>7,}")
    told = excesses(found, allowed)
    print(*told, sep="\n", end="\n" if told else "")
    if told:
        table = ROOT / "tools" / "budget.toml"
        print(f"Make something smaller, or raise the limit in {table} in this commit, with the reason in its message.")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
