"""Counts how large and how tangled the package is, beside what is wanted.

    python tools/counts.py

`.ci/run` prints it. What is met is held by `tests/test_project.py`.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
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
    return ast.parse(path.read_text("utf-8"))


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Those in it, however deep. There are a tenth as many as nodes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(child)


def lines(*paths: Path) -> int:
    """Lines of files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def functions(path: Path) -> Iterator[Function]:
    """All functions and methods of a file."""
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


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
        found += [f"{name}.{held}" for node in ast.walk(parsed) if isinstance(node, ast.Global) for held in node.names]
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


def circles() -> list[list[str]]:
    """Modules of one package that import each other in a circle; imports in functions and for type checkers count."""
    known = modules()
    imports: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in statements(tree(path)):
            if isinstance(node, ast.Import):
                named = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{one.name}" for one in node.names]
                named = [one if one in known else node.module for one in full]
            else:
                continue
            imports[name].update(one for one in named if one in known and one != name)
    reached = {name: _reached(imports, name) for name in known}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in known
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(found)]


def _reached(imports: dict[str, set[str]], name: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += imports[other]
    return seen


COUNTS: dict[str, tuple[Callable[[], int], str]] = {
    "product lines": (lambda: lines(*modules().values()), "at most 53,000"),
    "Python files": (lambda: len(modules()), "about 330"),
    "files in the root of engines/cuda": (lambda: len(engine_root()), "at most 5"),
    "collections of op names": (lambda: sum(op_collections.op_name_collections().values()), "at most 15"),
    "parameters of bench's command": (lambda: len(bench_parameters()), "options objects"),
    "process-wide tables in the cuda engine": (lambda: len(process_tables()), "0"),
    "import circles": (lambda: len(circles()), "0"),
    "functions with more than 8 parameters": (lambda: len(long_signatures()), "0"),
    "modules over 350 lines": (lambda: len(long_modules()), "few"),
    "lines of README.md": (lambda: lines(ROOT / "README.md"), "at most 160"),
    "lines of CONTRIBUTING.md": (lambda: lines(ROOT / "CONTRIBUTING.md"), "at most 120"),
}
"""What is counted, and what is wanted of it."""


def main() -> None:
    """Prints all counts."""
    for what, (count, wanted) in COUNTS.items():
        print(f"{what:<40} {count():>7,}   wanted: {wanted}")


if __name__ == "__main__":
    main()
