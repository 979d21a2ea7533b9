from __future__ import annotations

import builtins
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import msplit as library
from msplit import samples
from msplit.cli import doctor
from msplit.cli.main import COMMANDS
from msplit.engines.tensorflow import runtime
from msplit.errors import INSTALL_PYTORCH, INSTALL_TENSORFLOW, EngineError
from tests.cli.runner import ROOT, fine, msplit, unchanged


def answers(monkeypatch: pytest.MonkeyPatch, replies: dict[str, str | int | Exception]) -> None:
    """What programs that doctor asks say: text, an exit code, or an error of starting them."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        reply = next((reply for part, reply in replies.items() if any(part in word for word in command)), 127)
        if isinstance(reply, Exception):
            raise reply
        return SimpleNamespace(
            returncode=reply if isinstance(reply, int) else 0, stdout="" if isinstance(reply, int) else reply
        )

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    real: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in modules else real(name, *rest))


def found(*, start: bool = True) -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine(start=start)}


def runs(*, start: bool = True) -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.runnable(doctor.examine(start=start), COMMANDS)}


GPU = "NVIDIA H200, 570.1, 143771, 143000, 3, GPU-a1\n"
TENSORFLOW = {"version": "2.21.0", "gpus": 1, "cuda": "12.5"}


def test_doctor_says_that_nothing_helps_to_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    answers(monkeypatch, {})
    monkeypatch.setattr(doctor, "COPY_THREADS", tmp_path / "none")
    assert found()["native copies"].fix.startswith("install gcc")
    (tmp_path / "none").touch()
    assert "native copies" not in found()


def test_doctor_prints_a_line_per_subject_and_how_to_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"--query-gpu": 9, "import tensorflow": json.dumps({**TENSORFLOW, "gpus": 0})})
    done = fine("doctor", columns=100)
    assert "What this machine can do" in done.out
    assert "no NVIDIA driver answers" in done.out
    assert "fix (gpu): install the driver" in done.out
    shown = fine("doctor", "--format", "json").json
    assert (shown["schema_version"], shown["command"]) == (1, "doctor")
    assert {finding["status"] for finding in shown["findings"]} <= {"ok", "limited", "missing"}


def test_a_gpu_and_who_else_is_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(
        monkeypatch,
        {
            "--query-gpu": GPU,
            "--query-compute-apps": "17, python, 500\n18, other, 20\n",
            "import tensorflow": "noise\n" + json.dumps(TENSORFLOW) + "\n",
        },
    )
    seen = found()
    assert seen["gpu"].text == "NVIDIA H200, driver 570.1, 143000 of 143771 MiB free, 3 % busy"
    assert seen["other processes"].text == "2 on the card: python (pid 17, 500 MiB); other (pid 18, 20 MiB)"
    assert seen["tensorflow"].status == doctor.OK


@pytest.mark.parametrize("reply", [OSError("gone"), subprocess.TimeoutExpired("nvidia-smi", 20), 9])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, reply: int | Exception) -> None:
    answers(monkeypatch, {"--query": reply, "import tensorflow": json.dumps({**TENSORFLOW, "gpus": 0, "cuda": None})})
    seen = found()
    assert seen["gpu"].status == doctor.MISSING
    assert "other processes" not in seen
    assert (seen["tensorflow"].status, seen["tensorflow"].fix) == (doctor.OK, "")


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"--query": "", "import tensorflow": 1})
    seen = found()
    assert seen["gpu"].text == "a driver, but no GPU"
    assert "is installed but does not start" in seen["tensorflow"].text


def test_no_driver_program_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"import tensorflow": json.dumps({**TENSORFLOW, "gpus": 0})})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert found()["gpu"].text == "no NVIDIA driver answers"


def test_without_pytorch_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"--query": GPU, "import tensorflow": json.dumps(TENSORFLOW)})
    without(monkeypatch, "torch", "triton")
    seen = found()
    assert seen["pytorch"].fix == INSTALL_PYTORCH
    assert seen["triton"].status == doctor.LIMITED
    assert "nothing is fused" in seen["triton"].text
    assert "compiled kernels" not in seen
    assert runs()["bench"].text.startswith("runs on the tensorflow engine")
    assert INSTALL_PYTORCH in runs()["bench"].fix


def test_what_compiles_kernels_and_where_they_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    answers(monkeypatch, {"--query": GPU, "import tensorflow": json.dumps(TENSORFLOW)})
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "triton" or real(name, *rest))
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: {"triton": "3.6.0", "tensorflow": "2.21.0"}.get(name, "1.0")
    )
    for name in ("CC", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    seen = found()
    assert seen["triton"].text == "Triton 3.6.0 compiles fused kernels and msplit's own"
    assert (seen["c compiler"].status, seen["c compiler"].text) == (doctor.OK, "/bin/cc, for Triton's launchers")
    kept = seen["compiled kernels"]
    assert (kept.status, kept.text.partition(";")[0]) == (doctor.OK, f"kept in {tmp_path}/caches/msplit/kernels")
    assert list(tmp_path.iterdir()) == []  # it only looks

    monkeypatch.setenv("CC", "/opt/bin/mycc")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    seen = found()
    assert seen["c compiler"].text.startswith("/opt/bin/mycc")
    assert f"kept in {tmp_path}/mine;" in seen["compiled kernels"].text

    monkeypatch.delenv("CC")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    seen = found()
    assert (seen["c compiler"].status, seen["c compiler"].fix) == (
        doctor.LIMITED,
        "install gcc or clang, or name one in CC",
    )
    assert seen["compiled kernels"].status == doctor.LIMITED
    assert seen["compiled kernels"].fix == "name a folder that can be written to in XDG_CACHE_HOME"
    assert "compiled anew in each run" in seen["compiled kernels"].text


def test_a_triton_that_no_package_of_this_name_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some builds of PyTorch come with one in a package of another name."""
    answers(monkeypatch, {"--query": GPU, "import tensorflow": json.dumps(TENSORFLOW)})
    real_spec, real_version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "triton" or real_spec(name, *rest))

    def version(name: str) -> str:
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError
        return real_version(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert found()["triton"].text == "Triton compiles fused kernels and msplit's own"


@pytest.mark.parametrize("protos", [True, False])
def test_without_tensorflow(monkeypatch: pytest.MonkeyPatch, protos: bool) -> None:
    answers(monkeypatch, {"--query": 9, "import tensorflow": 1})

    def version(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", version)
    without(monkeypatch, "triton", "torch", *([] if protos else ["tensorflow"]))
    seen = found()
    assert (seen["tensorflow"].status, seen["tensorflow"].fix) == (doctor.MISSING, INSTALL_TENSORFLOW)
    assert runs()["bench"].status == runs()["sample"].status == doctor.MISSING
    assert INSTALL_TENSORFLOW in runs()["bench"].fix
    assert {runs()[name].status for name in ("analyze", "assign", "check", "diff", "report", "rules")} == {doctor.OK}


def test_every_command_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {})
    engines = {"bench --engine cuda", "bench --engine tensorflow"}
    assert set(runs()) == {*COMMANDS, *engines}


WITH_TENSORFLOW = {"--query": 9, "import tensorflow": json.dumps({**TENSORFLOW, "gpus": 0})}
NOTHING: dict[str, str | int | Exception] = {"--query": 9, "import tensorflow": 1}


@pytest.mark.parametrize(
    ("replies", "options", "code"),
    [
        (NOTHING, (), 0),
        (NOTHING, ("--for", "check", "--for", "report"), 0),
        (NOTHING, ("--for", "check", "--for", "bench"), 1),
        (NOTHING, ("--for", "sample"), 1),
        (WITH_TENSORFLOW, ("--for", "bench", "--for", "sample"), 0),
        (WITH_TENSORFLOW, ("--engine", "tensorflow"), 0),
        (WITH_TENSORFLOW, ("--engine", "cuda"), 1),
        (WITH_TENSORFLOW, ("--for", "bench", "--engine", "cuda"), 1),
        (WITH_TENSORFLOW, ("--for", "profile"), 1),
        (WITH_TENSORFLOW, ("--for", "build"), 1),
        (WITH_TENSORFLOW, ("--for", "banch"), 2),
    ],
)
def test_what_is_asked_for_and_missing_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, replies: dict[str, Any], options: tuple[str, ...], code: int
) -> None:
    answers(monkeypatch, replies)
    without(monkeypatch, "torch")
    done = msplit("doctor", *options)
    assert done.code == code, done.out + done.err
    assert ("can not run here: " in done.out) == (code == 1)
    if code < 2:
        shown = msplit("doctor", *options, "--format", "json")
        assert shown.code == code
        assert bool(shown.json["missing"]) == bool(code)
        assert all(one["fix"] for one in shown.json["missing"])


def test_the_cuda_engine_without_tensorflow_needs_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"--query-gpu": GPU, "import tensorflow": 1})
    monkeypatch.setattr(doctor, "_torch", lambda: doctor.Finding("pytorch", doctor.OK, "PyTorch"))
    bench = runs()["bench"]
    assert (bench.status, bench.fix) == (doctor.LIMITED, INSTALL_TENSORFLOW)
    assert "--reference" in bench.text
    assert fine("doctor", "--for", "bench", "--engine", "cuda").out


def test_advice_names_what_pip_finds() -> None:
    """msplit is on no index: only what its extra and its dependencies name can be installed by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = project["optional-dependencies"]["cuda"]
    tensorflow = next(one for one in project["dependencies"] if one.startswith("tensorflow"))
    assert f"pip install '{torch}', or in a checkout of msplit pip install '.[cuda]'" == INSTALL_PYTORCH
    assert f"pip install '{tensorflow}'" == INSTALL_TENSORFLOW
    places = [*(ROOT / "msplit").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "rules"]
    for path in places:
        if path.is_file() and path.name not in ("CHANGELOG.md", "errors.py"):
            assert not re.search(r"install [^\n]*\bmsplit(\[|'|\"|`|$)", path.read_text("utf-8"), re.M), path


def test_pytorch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    answers(monkeypatch, {"--query": GPU, "import tensorflow": json.dumps(TENSORFLOW)})
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no device" in found()["pytorch"].text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    seen = found()
    assert "sees NVIDIA H200 (sm 9.0)" in seen["pytorch"].text
    assert seen["pytorch"].status == doctor.OK
    assert (runs()["bench"].status, runs()["profile"].status) == (doctor.OK, doctor.OK)
    assert runs()["bench"].text.startswith("runs on the cuda engine")


def package(folder: Path, name: str, text: str) -> Path:
    """A package that can not be imported, with a file that says what it is."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / name / "version.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("said", "gpu", "driver", "status", "text"),
    [
        ("cuda = None", GPU, 12, "limited", "PyTorch 2.13.0, a build without CUDA"),
        ("cuda: str = '12.8'", GPU, 12, "ok", "PyTorch 2.13.0, CUDA 12.8"),
        ("cuda = '12.8'", GPU, 0, "ok", "PyTorch 2.13.0, CUDA 12.8"),
        ("cuda = '13.0'", GPU, 12, "limited", "for CUDA 13.0, and the driver is for CUDA 12: it finds no device"),
        ("cuda = '13.0'", "", 13, "limited", "for CUDA 13.0, and there is no device"),
        ("cuda = (", GPU, 12, "limited", "does not say what CUDA it is for"),
        ("cuda = 'a version'", GPU, 12, "limited", "does not say what CUDA it is for"),
    ],
)
def test_what_is_installed_is_told_without_starting_it(
    said: str, gpu: str, driver: int, status: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, {"--query-gpu": gpu})
    folder = package(tmp_path, "torch", said)
    package(tmp_path, "tensorflow", "")
    (tmp_path / "tensorflow" / "python").mkdir()
    real = doctor._package
    monkeypatch.setattr(
        doctor, "_package", lambda name: folder / name if name in ("torch", "tensorflow") else real(name)
    )
    monkeypatch.setattr(doctor, "version", {"torch": "2.13.0", "tensorflow-cpu": "2.21.0"}.get)
    monkeypatch.setattr(doctor, "driver_cuda", lambda: driver)
    seen = found(start=False)
    assert (seen["pytorch"].status, seen["tensorflow"].status) == (status, "ok")
    assert text in seen["pytorch"].text
    assert bool(seen["pytorch"].fix) == (status != "ok")
    assert seen["tensorflow"].text.startswith("TensorFlow 2.21.0: it verifies")
    (
        tmp_path / "tensorflow" / "python"
    ).rmdir()  # the messages of a client of TensorFlow Serving, which are no TensorFlow
    assert (found(start=False)["tensorflow"].status, found(start=False)["tensorflow"].fix) == (
        "missing",
        INSTALL_TENSORFLOW,
    )


def test_doctor_starts_nothing_unless_it_is_asked_what_runs() -> None:
    """The time of processors: the wall's is anything on a busy machine."""
    code = """
import resource, sys
from msplit.cli.main import run
for arguments in ((), ("--for", "check", "--for", "rules"), ("--format", "json")):
    assert run(["doctor", *arguments]) == 0
loaded = [name for name in ("torch", "tensorflow", "keras", "triton") if name in sys.modules]
assert not loaded, loaded
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
assert sum(one.ru_utime + one.ru_stime for one in used) < 3 * 3, used
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 0, done.stderr


def test_a_pytorch_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    answers(monkeypatch, {})
    real = builtins.__import__

    def imports(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError("libcudart.so.13: cannot open shared object file")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", imports)
    seen = found()["pytorch"]
    assert (seen.status, seen.fix) == (doctor.MISSING, INSTALL_PYTORCH)
    assert "is installed but does not start: " in seen.text


def test_sample_lists_models_with_their_sizes() -> None:
    lines = fine("sample").out.splitlines()
    assert [line.split()[0] for line in lines] == samples.names()
    assert "mmoe             experts=16, tasks=2, batch=any, features=512" in lines


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("nope",), "no sample named 'nope'", "one of: bert, deepfm"),
        (("mmoe",), "-o/--output is missing", "where to write the model"),
        (("mmoe", "-o", "new.pb", "--size", "layers=2"), "mmoe has no size 'layers'", "its sizes are experts=16"),
        (("mmoe", "-o", "new.pb", "--size", "experts"), "'experts'", "write it as KEY=N"),
        (("mmoe", "-o", "new.pb", "--size", "experts=0"), "'experts=0'", "write it as KEY=N"),
        (("mmoe", "-o", "old.pb"), "old.pb: is there already", "replace it with --force"),
    ],
)
def test_samples_that_can_not_be_built(
    arguments: tuple[str, ...], what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.pb").write_bytes(b"old")
    with unchanged(tmp_path):
        done = msplit("sample", *arguments)
    assert (done.code, done.out) == (2, "")
    assert what in done.err
    assert fix in done.err


def test_starting_tensorflow_is_a_phase_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(module: str) -> None:
        raise EngineError("it does not start")

    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(runtime, "tensorflow", runtime.tensorflow.__wrapped__)  # not the one that is started already
    monkeypatch.setattr(runtime, "importlib", SimpleNamespace(import_module=start))
    done = msplit("sample", "mmoe", "-o", tmp_path / "m.pb", "--verbose")
    assert done.code == 2
    assert re.fullmatch(r" +\d+\.\d\d s  starting TensorFlow\nerror: it does not start\n", done.err)


@pytest.mark.tf
def test_a_sample_is_built_in_the_size_asked_for(tmp_path: Path) -> None:
    size = ("--size", "experts=3", "--size", "features=8")
    done = msplit("sample", "mmoe", "-o", tmp_path / "mmoe.pb", *size)
    assert (done.code, done.out) == (0, "")
    flat = library.load(tmp_path / "mmoe.pb")
    assert done.err == f"{tmp_path / 'mmoe.pb'}: {len(flat.model.graph_def.node):,} nodes\n"
    assert {name.split("/")[0] for name in flat.graph.names if name.startswith("expert_")} == {
        "expert_0",
        "expert_1",
        "expert_2",
    }
    again = msplit("sample", "mmoe", "-o", tmp_path / "again.pb", *size)
    assert again.code == 0
    assert (tmp_path / "again.pb").read_bytes() == (tmp_path / "mmoe.pb").read_bytes()
    stripped = msplit("sample", "mmoe", "-o", tmp_path / "mmoe.pb", *size, "--strip", "--force")
    assert stripped.code == 0
    assert (tmp_path / "mmoe.pb").stat().st_size < (tmp_path / "again.pb").stat().st_size / 4


@pytest.mark.tf
def test_sizes_that_tensorflow_refuses(tmp_path: Path) -> None:
    done = msplit("sample", "inception_v3", "-o", tmp_path / "new.pb", "--size", "image=10")
    assert (done.code, done.out) == (2, "")
    assert "TensorFlow builds no inception_v3 of this size: " in done.err
    assert "fix: sizes are image=299, classes=1000, batch=any" in done.err
    assert list(tmp_path.iterdir()) == []
    done = msplit("sample", "bert", "-o", tmp_path / "b.pb", "--size", "heads=3")
    assert (done.code, done.out) == (2, "")
    assert "3 heads do not divide a hidden size of 256" in done.err
    assert not any(tmp_path.iterdir())
