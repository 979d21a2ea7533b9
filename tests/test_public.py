"""What `import msplit` promises."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import msplit
from msplit import errors
from tests import forked

ROOT = Path(__file__).parents[1]


def test_all_is_sorted_and_whole() -> None:
    assert sorted(msplit.__all__) == msplit.__all__
    assert dir(msplit) == msplit.__all__
    for name in msplit.__all__:
        assert getattr(msplit, name) is not None


def test_these_names_are_public_and_no_others() -> None:
    assert set(msplit.__all__) == {
        *(
            "load",
            "analyze",
            "assign",
            "save",
            "emit",
            "bench",
            "prepare",
            "build",
            "open",
            "pool",
            "compile",
            "cut",
            "diff",
            "check",
            "stream",
            "stream_group",
            "__version__",
        ),
        *(
            "Analysis",
            "Assigned",
            "Bench",
            "BenchOptions",
            "BuildOptions",
            "RunOptions",
            "StepOptions",
            "TuneSettings",
            "Build",
            "Pool",
            "PoolSettings",
            "CompiledFunction",
            "Cut",
            "ModelDifference",
            "Runner",
            "Settings",
            "Trainer",
            "CheckSettings",
        ),
        *(
            name
            for name, value in vars(errors).items()
            if isinstance(value, type) and issubclass(value, errors.MsplitError)
        ),
    }


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'msplit' has no attribute 'nothing'"):
        msplit.nothing  # noqa: B018


@pytest.mark.parametrize("name", [name for name in msplit.__all__ if name != "__version__"])
def test_everything_public_is_documented_and_typed(name: str) -> None:
    found = getattr(msplit, name)
    assert inspect.getdoc(found)
    if name.endswith("Options"):
        assert found.__annotations__
        return
    signature = inspect.signature(found)
    if inspect.isfunction(found):
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                assert re.search(rf"\b{parameter.name}\b", inspect.getdoc(found) or ""), parameter.name


def test_the_package_is_marked_as_typed() -> None:
    assert (Path(msplit.__file__).parent / "py.typed").exists()


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, msplit; print(sorted({'numpy', 'tensorflow', 'torch', 'networkx', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.tf
def test_functions_stay_functions_when_every_module_is_imported() -> None:
    code = """
import importlib, pkgutil, sys
import msplit
for module in pkgutil.walk_packages(msplit.__path__, "msplit."):
    if "__main__" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        # Kernels of our own need triton, which comes with builds of PyTorch for GPUs only.
        assert missing.name == "triton", (module.name, missing)
for name in ("load", "analyze", "assign", "save", "emit", "bench", "check", "stream"):
    found = getattr(msplit, name)
    assert callable(found) and type(found).__name__ in ("function", "type"), (name, found)
"""
    command = [sys.executable, "-c", code]
    done = forked.run(command, server=forked.TENSORFLOW, quick=True, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
