"""The package as users get it: what is in the wheel, what it imports, what it says it needs, and how fast it starts."""

import ast
import gc
import importlib.metadata
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import msplit

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("tensorflow", "keras", "torch", "networkx")


def run(code: str, *, path: Path = ROOT, cwd: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCKED = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(f"imports {{name}}")

sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize(
    "code",
    [
        "import msplit; dir(msplit)",
        "import msplit; msplit.MsplitError",
        "from msplit.cli.main import run; assert run(['--help']) == 0",
        "from msplit.cli.main import run; assert run(['--version']) == 0",
        "from msplit.cli.main import run; assert run(['analyze', '--help']) == 0",
        "from msplit.cli.main import run; assert run(['bench', '--help']) == 0",
        "from msplit.cli.main import run; assert run(['rules']) == 0",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    run(BLOCKED + code)


def test_the_blocker_of_the_test_above_blocks() -> None:
    with pytest.raises(AssertionError, match="imports networkx"):
        run(BLOCKED + "import networkx")


@pytest.mark.parametrize("model", ["mmoe_small.pb", "mmoe_small.pbtxt", "training.meta", "keras_lookup"])
def test_a_model_is_analyzed_and_assigned_without_any_framework(model: str, tmp_path: Path) -> None:
    code = f"""
import sys
from msplit.cli.main import run

assert run(["analyze", "sample_graphs/{model}"]) == 0
assert run(["assign", "sample_graphs/{model}", "--streams", "2", "-o", {str(tmp_path / "out")!r}]) == 0
loaded = [name for name in ("tensorflow.python", "keras", "torch", "networkx") if name in sys.modules]
assert not loaded, loaded
"""
    run(code)


def test_help_comes_at_once() -> None:
    """Measured is the time of processors: the wall's is the same on an idle machine, and anything on a busy one."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("from msplit.cli.main import run; run(['--help'])")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 0.4 for _ in range(5))


def test_the_public_names_are_sorted_and_there() -> None:
    assert list(msplit.__all__) == sorted(msplit.__all__)
    assert set(dir(msplit)) >= set(msplit.__all__)
    for name in msplit.__all__:
        assert getattr(msplit, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = msplit.nothing_like_it


# What the suite is made of -------------------------------------------------------------------------------------------------------


def test_tests_are_not_traced() -> None:
    """Coverage makes a search four times slower: `.ci/coverage` runs the tests that it needs."""
    assert sys.gettrace() is None


@pytest.fixture(scope="module")
def budget() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("budget", ROOT / "tools" / "budget.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    collecting = gc.isenabled()
    gc.disable()  # it would look through the million nodes of all syntax trees again and again
    yield module
    for cached in (module.tree, module.op_collections.parsed, module.op_collections.nodes):
        cached.cache_clear()
    if collecting:
        gc.enable()


def test_a_figure_above_its_limit_is_told(budget: ModuleType) -> None:
    found = {"whole": {"files": 3, "options in all": 5}, "lines": {"core": 10, "new": 1}}
    assert budget.excesses(found, {"whole": {"files": 3, "options in all": 6}, "lines": {"core": 10, "new": 1}}) == []
    assert budget.excesses(found, {"whole": {"files": 2, "options in all": 6}, "lines": {"core": 10, "old": 1}}) == [
        "[whole] files: 3, above its limit of 2",
        "[lines] new: 1, and no limit in tools/budget.toml",
        "[lines] old: a limit of nothing",
    ]


def test_the_budget_finds_what_it_counts(budget: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("radon")
    engine = tmp_path / "msplit" / "engines" / "cuda"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text("")
    (engine / "a.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from msplit.engines.cuda import b\n"
        "CHOSEN: dict[str, int] = {}\nNAMES = {'Add', 'Sub'}\n"
        "def many(a, b, c, d, e, f, g, h, i): ...\ndef eight(a, b, c, d, e, f, g, h): ...\n"
    )
    (engine / "b.py").write_text(
        "def late():\n    from msplit.engines.cuda.a import many\n    return many\n" + "\n" * 350
    )
    (engine / "c.py").write_text("from msplit.engines.cuda import d\nclass Same: ...\nclass _Own: ...\n")
    deep = "".join(f"    if a == {n}:\n        return {n}\n" for n in range(21))
    (engine / "d.py").write_text(
        f'"""Two\nlines."""\n\n# A comment.\nclass Same: ...\nclass _Own: ...\nTEXT = """a {engine.name}"""\n'
    )
    (engine / "c.py").write_text((engine / "c.py").read_text() + f"def deep(a):\n{deep}")
    for name, value in (("ROOT", tmp_path), ("PACKAGE", tmp_path / "msplit"), ("ENGINE", engine)):
        monkeypatch.setattr(budget, name, value)
    assert budget.engine_root() == ["a.py", "b.py", "c.py", "d.py"]
    assert budget.process_tables() == ["msplit.engines.cuda.a.CHOSEN"]
    names = budget.op_collections.collections_in(
        "NAMES = {'Add', *('Sub', 'Mul')}\nOTHER = ('Add', 'no op')\n"
        "HOW = {'Add': add, 'Sub': sub}\nSLOTS = {'Add': 1, 'Sub': 0}\n"
    )
    assert sorted(found.lineno for found in names) == [1, 4]
    assert budget.circles() == [["msplit.engines.cuda.a", "msplit.engines.cuda.b"]]
    assert budget.long_signatures() == ["msplit.engines.cuda.a.many"]
    assert budget.long_modules() == ["msplit.engines.cuda.b"]
    assert len(budget.longest_chain()) == 2
    assert budget.lazy_imports() == ["from msplit.engines.cuda.a import many"]
    assert budget.repeated_classes() == ["Same"]
    assert budget.small_modules() == [f"msplit.engines.cuda.{name}" for name in "acd"]
    assert [one.split()[2] for one in budget.complex_functions()] == ["deep"]
    assert budget.rooms() == {"engines/cuda": sorted(engine.glob("*.py"))}
    assert budget.code_lines(engine / "d.py") == 3
    assert (
        budget.op_collections.op_names_in(
            '"""Add."""\nTABLE = \'Add Sub: no op\'\n@lowering(\'Mul\')\ndef mul(): ...\n'
        )
        == 3
    )


def names_in(path: Path, nodes: Iterable[ast.AST]) -> set[str]:
    """Every name in a module's code; of a package its modules, too."""
    found = {part.stem for part in path.parent.iterdir()} if path.stem == "__init__" else set()
    for node in nodes:
        for field in NAMING[type(node)]:
            name = getattr(node, field)
            if isinstance(name, str):
                found.add(name.split(".")[0])
    return found


class Naming(dict[type[ast.AST], set[str]]):
    """Fields of each kind of node that hold a name."""

    def __missing__(self, kind: type[ast.AST]) -> set[str]:
        return self.setdefault(kind, {"name", "asname", "id", "attr", "arg"}.intersection(kind._fields))


NAMING = Naming()


def test_what_the_text_of_the_package_names_is_there(budget: ModuleType) -> None:
    """A `module.name` in backticks, in docstrings and comments: renaming and moving leaves none of them behind."""
    modules = budget.modules()
    nodes = budget.op_collections.nodes
    own = {name: names_in(path, nodes(path.read_text("utf-8"))) for name, path in modules.items()}
    own["msplit"] |= {*msplit.__all__}  # which come by themselves when they are asked for
    known: dict[str, set[str]] = {}
    for name in modules:
        parts = name.split(".")
        for first in range(len(parts)):
            known.setdefault(".".join(parts[first:]), set()).update(own[name])
    stale = []
    for name, path in modules.items():
        for text in re.findall(r"(?<!`)`([a-z_]+(?:\.\w+)+)`(?!`)", path.read_text()):
            head, _, last = text.rpartition(".")
            if last in ("json", "pb", "pbtxt", "py", "toml", "yaml") or head.split(".")[0] in own[name] | NOT_OURS:
                continue
            if text not in known and last not in known.get(re.sub(r"\.[A-Z]\w*$", "", head), ()):
                stale.append(f"{path.relative_to(ROOT)}: {text}")
    assert not stale


NOT_OURS = {"json", "tensorflow", "tf", "torch"}
"""What else the text names things of."""


# What is installed ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (made,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(made)


def test_the_wheel_holds_the_package_with_its_data_and_rules_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"msplit", f"msplit-{msplit.__version__}.dist-info"}
    tracked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "msplit").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    shipped = {f"msplit/rule_sets/{path.name}" for path in (ROOT / "rules").iterdir()}
    assert {name for name in names if name.startswith("msplit/")} == tracked | shipped
    assert "msplit/py.typed" in names
    assert "msplit/rule_sets/default.yaml" in names
    assert f"msplit-{msplit.__version__}.dist-info/licenses/LICENSE" in names


def test_rule_sets_and_data_are_found_in_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    model = ROOT / "sample_graphs" / "towers_small.pb"
    said = run(
        f"""
import msplit
from msplit.cli.main import run

assert msplit.__file__.startswith({str(tmp_path)!r}), msplit.__file__
assert run(["rules"]) == 0
assert run(["assign", {str(model)!r}, "--rules", "recsys", "-o", "out.pb"]) == 0
""",
        path=tmp_path / "site",
        cwd=tmp_path,
    )
    for path in (ROOT / "rules").glob("*.yaml"):
        assert path.stem in said
    assert (tmp_path / "out.pb").stat().st_size > model.stat().st_size


def test_the_command_is_declared() -> None:
    assert PROJECT["project"]["scripts"] == {"msplit": "msplit.__main__:entry"}
    from msplit.__main__ import entry

    assert callable(entry)


# What is needed ------------------------------------------------------------------------------------------------------------------


def imported(budget: ModuleType) -> set[str]:
    """Top-level packages that msplit imports, anywhere, that are neither its own nor Python's."""
    found = set()
    for path in (ROOT / "msplit").rglob("*.py"):
        for node in budget.statements(budget.tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add("google.protobuf" if node.module.startswith("google.") else node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"msplit"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> dict[str, str]:
    """Name -> lower end."""
    found = {}
    for requirement in requirements:
        match = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        assert match, f"{requirement} has no lower end"
        found[normal(match[1])] = match[2]
    return found


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines}


def version(text: str) -> tuple[int, ...]:
    parts = [int(part) for part in text.split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def test_all_that_is_imported_is_declared_and_the_other_way_round(budget: ModuleType) -> None:
    # Distributions whose packages go by another name, and what comes with another: Keras with TensorFlow, Triton with PyTorch.
    distributions = {
        "yaml": "pyyaml",
        "re2": "google-re2",
        "google_crc32c": "google-crc32c",
        "google.protobuf": "protobuf",
        "keras": "tensorflow",
        "triton": "torch",
        "grpc": "grpcio",
        "opentelemetry": "opentelemetry-api",
    }
    brought = {"triton-python-backend-utils"}  # by the server that imports us
    run = {"tf2onnx"}  # as a program
    needed = {normal(distributions.get(name, name)) for name in imported(budget)} - brought | run
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    of_extras = [one for extra in ("cuda", "serve", "onnx", "otel", "jax") for one in extras[extra]]
    assert needed == set(declared([*project["dependencies"], *of_extras]))


def test_the_exact_versions_are_in_the_ranges() -> None:
    exact = pins("constraints.txt")
    groups = PROJECT["dependency-groups"]
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"], *extras["serve"], *extras["onnx"], *extras["otel"]]
    for name, lowest in declared(
        [*needed, *groups["test"], *groups["clients"], *groups["docs"], *groups["release"]]
    ).items():
        assert version(exact[name]) >= version(lowest), name
    assert exact["torch"] == "2.13.0"
    assert exact["tensorflow"] == "2.21.0"


def test_the_lower_ends_are_what_ci_tries() -> None:
    lowest = pins("constraints-lowest.txt")
    for name, end in declared([*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["test"]]).items():
        assert version(lowest[name]) == version(end), name


def test_what_is_installed_here_is_declared_whole() -> None:
    """An exact version for everything that comes along, too."""
    exact = pins("constraints.txt")
    waiting, seen = [normal(name) for name in declared(PROJECT["project"]["dependencies"])], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        assert name in exact, name
        for requirement in importlib.metadata.requires(name) or ():
            head, _, marker = requirement.partition(";")
            if "extra" not in marker and "platform_system" not in marker and "python_version" not in marker:
                match = re.match(r"[\w.-]+", head)
                assert match
                waiting.append(normal(match[0]))
    assert len(seen) > 20


# The scripts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    sorted(
        str(path.relative_to(ROOT))
        for folder in ("scripts", ".ci")
        for path in (ROOT / folder).iterdir()
        if path.is_file() and path.suffix == "" and path.name != "environment"
    ),
)
def test_scripts_are_valid_and_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.parametrize("script", ["scripts/demo", "scripts/test", "scripts/lint"])
def test_without_a_python_that_will_do_there_is_one_clear_message(script: str, tmp_path: Path) -> None:
    shim = tmp_path / "python3.11"
    shim.write_text("#!/bin/sh\necho 'shim: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    environment = {
        **os.environ,
        "MSPLIT_PYTHON": str(shim),
        "MSPLIT_VENV": str(tmp_path / "venv"),
        "HOME": str(tmp_path),
    }
    done = subprocess.run([ROOT / script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "found no Python 3.11 to 3.13" in done.stderr
    assert "fix:" in done.stderr
    assert "shim:" not in done.stderr
    assert not (tmp_path / "venv").exists()


def test_kernels_that_are_named_are_there() -> None:
    """They are imported by name when they are compiled, which takes Triton: nothing else would notice before a GPU does."""
    kernels = ROOT / "msplit" / "engines" / "cuda" / "kernels"
    named = [
        (path.name, call.args[0].value, call.args[1].value)
        for path in kernels.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "Code"
        and len(call.args) == 2
    ]
    assert len(named) > 15
    for user, module, name in named:
        body = ast.parse((kernels / "code" / f"{module}.py").read_text("utf-8")).body
        assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in body), (user, module, name)
