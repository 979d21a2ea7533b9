"""`msplit doctor`: what this machine can do, and why not more.

What this machine can do, and why not more. Nothing is changed; TensorFlow is asked in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from msplit.cli import options
from msplit.cli.main import COMMANDS
from msplit.engines.cuda.coverage import toolchain
from msplit.engines.environment import COPY_THREADS, HOST_OPS, driver_cuda, mps, nvidia_smi, version, visible
from msplit.errors import INSTALL_JAXLIB, INSTALL_PYTORCH, INSTALL_SERVING, INSTALL_TENSORFLOW
from msplit.formats import stablehlo


@click.command()
@click.option(
    "--for",
    "wanted",
    multiple=True,
    type=click.Choice(tuple(COMMANDS)),
    metavar="COMMAND",
    help="Exit with 1 where this command can not run here. Repeatable.",
)
@click.option("--engine", type=click.Choice(["cuda", "tensorflow"]), help="Likewise, of `bench` on this engine.")
@options.format_option
def command(wanted: Sequence[str], engine: str | None, style: str) -> int:
    """Say what this machine can do: GPU, driver, PyTorch, TensorFlow, other processes on the card, and which commands run.

    The exit code is 1 where something that --for or --engine asks for is missing, else 0. For these PyTorch and TensorFlow are started;
    otherwise it says what is installed.
    """
    from msplit.report.document import Document, Table

    asked = [name for name in wanted if name != "bench" or engine is None]
    asked += [f"bench --engine {engine}"] if engine is not None else []
    found = examine(start=any(name not in _LIGHT for name in asked))
    commands = runnable(found, COMMANDS)
    missing = [one for one in commands if one.subject in asked and one.status == MISSING]
    fixes = [*(one for one in found if one.fix), *(one for one in commands if one.fix and one.subject in asked)]
    document = Document(
        title="What this machine can do",
        tables=[
            Table("", ("what", "status", "found"), [(one.subject, one.status, one.text) for one in found]),
            Table(
                "Commands", ("command", "status", "needs"), [(one.subject, one.status, one.text) for one in commands]
            ),
        ],
        warnings=[f"{one.subject} can not run here: {one.text}" for one in missing],
        notes=[f"fix ({one.subject}): {one.fix}" for one in fixes],
    )
    options.show(style, "doctor", document, lambda: {"findings": found, "commands": commands, "missing": missing})
    return int(bool(missing))


_NO_TENSORFLOW = "not installed: it runs models on the CPU, and verifies what the cuda engine gives"

OK, LIMITED, MISSING = "ok", "limited", "missing"

_SERVER = {"grpc": "grpcio", "uvicorn": "uvicorn", "starlette": "starlette", "prometheus_client": "prometheus-client"}
"""What `serve` needs beside all else: modules, and what brings them."""

_NUMBERS = "csv,noheader,nounits"

_ASK_TENSORFLOW = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
print(json.dumps({
    "version": tf.__version__,
    "gpus": len(tf.config.list_physical_devices("GPU")),
    "cuda": tf.sysconfig.get_build_info().get("cuda_version"),
}))
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status` is "ok", "limited" or "missing"; `fix` is how to get more, "" where nothing is missing."""

    subject: str
    status: str
    text: str
    fix: str = ""


_LIGHT = ("analyze", "assign", "check", "diff", "doctor", "export", "report", "rules", "show", "strip")
"""Commands that start neither PyTorch nor TensorFlow."""


def examine(*, start: bool = False) -> list[Finding]:
    """Looks at everything that msplit can use.

    Args:
        start: True to start PyTorch and TensorFlow, which takes seconds and shows whether they find a GPU.
    """
    gpus = _gpus()
    return [
        Finding("python", OK, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"),
        *gpus,
        *_processes(),
        _torch() if start else _installed_torch(any(one.subject == "gpu" and one.status == OK for one in gpus)),
        _tensorflow() if start else _installed_tensorflow(),
        *_compilers(),
        *_kernels(),
        *_native(),
        _server(),
        _jaxlib(),
    ]


def _gpus() -> list[Finding]:
    rows = nvidia_smi("gpu", "name,driver_version,memory.total,memory.free,utilization.gpu,uuid", _NUMBERS)
    if rows is None:
        fix = "install the driver, or run where there is a GPU; only `build`, `profile` and the cuda engine of `bench` need one"
        return [Finding("gpu", MISSING, "no NVIDIA driver answers", fix)]
    if not rows:
        return [Finding("gpu", MISSING, "a driver, but no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    rows = [row for row in rows if len(row) >= 6]
    seen = visible([row[5] for row in rows])
    found = [
        Finding(
            "gpu" if number in seen else "hidden gpu",
            OK,
            f"{name}, driver {driver}, {free} of {total} MiB free, {busy} % busy",
        )
        for number, (name, driver, total, free, busy) in enumerate(row[:5] for row in rows)
    ]
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is not None:
        text = f"CUDA_VISIBLE_DEVICES={setting!r} leaves {len(seen)} of {len(rows)}"
        fix = "" if seen else "unset it, or name a GPU in it"
        found.append(Finding("visible gpus" if seen else "gpu", OK if seen else MISSING, text, fix))
    shared = (
        f"several processes of a GPU wait for each other: {why}" if (why := mps()) else "runs: processes share a GPU"
    )
    return [*found, Finding("mps", OK, shared), Finding("to use a gpu more", OK, _ORDER)] if seen else found


_ORDER = (
    "fused and grouped kernels first, then more streams, then more requests in flight, and more GPUs last; the last lines of "
    "`msplit bench` say how busy a model keeps it. What is busy above says whether kernels ran just now, not how much they filled"
)


def _processes() -> list[Finding]:
    rows = nvidia_smi("compute-apps", "pid,process_name,used_memory", _NUMBERS)
    if not rows:
        return []
    shown = "; ".join(f"{row[1]} (pid {row[0]}, {row[2]} MiB)" for row in rows[:5] if len(row) >= 3)
    fix = "stop them before you measure: they take time from what is measured"
    return [Finding("other processes", LIMITED, f"{len(rows)} on the card: {shown}", fix)]


_NO_TORCH = Finding("pytorch", MISSING, "not installed: the cuda engine needs it", INSTALL_PYTORCH)
_NO_CUDA = "install a CUDA build of PyTorch"
_NO_DEVICE = (
    "check that the driver is new enough for this CUDA (nvidia-smi shows what it supports) and CUDA_VISIBLE_DEVICES"
)


def _installed_torch(gpu: bool) -> Finding:
    """PyTorch by what its package says, which takes 2 s less than to start it."""
    folder = _package("torch")
    if folder is None:
        return _NO_TORCH
    text = f"PyTorch {version('torch') or 'of an unknown version'}"
    try:
        cuda = runpy.run_path(str(folder / "version.py")).get("cuda")
        needs = int(str(cuda).partition(".")[0]) if cuda else 0
    except Exception:  # noqa: BLE001  a damaged package
        return Finding("pytorch", LIMITED, f"{text}, which does not say what CUDA it is for", INSTALL_PYTORCH)
    if not needs:
        return Finding("pytorch", LIMITED, f"{text}, a build without CUDA", _NO_CUDA)
    if not gpu:
        return Finding("pytorch", LIMITED, f"{text} for CUDA {cuda}, and there is no device", _NO_DEVICE)
    has = driver_cuda()
    if has and has < needs:
        text = f"{text} for CUDA {cuda}, and the driver is for CUDA {has}: it finds no device"
        return Finding("pytorch", LIMITED, text, _NO_DEVICE)
    return Finding("pytorch", OK, f"{text}, CUDA {cuda}{_NOT_STARTED}")


_NOT_STARTED = " (installed; `msplit doctor --for bench` starts it)"


def _installed_tensorflow() -> Finding:
    """TensorFlow by what its package says, which takes 3 s less than to start it."""
    folder = _package("tensorflow")
    if (
        folder is None or not (folder / "python").is_dir()
    ):  # without this there are the messages of a client of a server alone
        return Finding("tensorflow", MISSING, _NO_TENSORFLOW, INSTALL_TENSORFLOW)
    number = next(filter(None, map(version, ("tensorflow", "tensorflow-cpu", "tf-nightly"))), "of an unknown version")
    return Finding("tensorflow", OK, f"TensorFlow {number}: it verifies, and runs host ops{_NOT_STARTED}")


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(places[0]) if places else None


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return _NO_TORCH
    try:
        import torch
    except (ImportError, OSError) as problem:  # a library that it is linked with is not there
        text = f"PyTorch {version('torch') or ''} is installed but does not start: {problem}"
        return Finding("pytorch", MISSING, text, INSTALL_PYTORCH)
    if torch.version.cuda is None:
        return Finding("pytorch", LIMITED, f"PyTorch {torch.__version__}, a build without CUDA", _NO_CUDA)
    if not torch.cuda.is_available():
        text = f"PyTorch {torch.__version__} for CUDA {torch.version.cuda} sees no device"
        return Finding("pytorch", LIMITED, text, _NO_DEVICE)
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    text = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, sees {names} (sm {capability})"
    return Finding("pytorch", OK, text)


def _tensorflow() -> Finding:
    if importlib.util.find_spec("tensorflow") is None:
        return Finding("tensorflow", MISSING, _NO_TENSORFLOW, INSTALL_TENSORFLOW)
    try:
        done = subprocess.run([sys.executable, "-c", _ASK_TENSORFLOW], capture_output=True, text=True, timeout=120)
        known = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None
    except (OSError, subprocess.TimeoutExpired, ValueError):
        known = None
    if known is None:
        if installed := version("tensorflow"):
            text = f"TensorFlow {installed} is installed but does not start"
            return Finding("tensorflow", MISSING, text, "python -c 'import tensorflow' says why")
        return Finding("tensorflow", MISSING, _NO_TENSORFLOW, INSTALL_TENSORFLOW)
    if known["gpus"]:
        text = f"TensorFlow {known['version']} (built for CUDA {known['cuda']}) sees {known['gpus']} GPU(s)"
        return Finding("tensorflow", OK, text)
    return Finding("tensorflow", OK, f"TensorFlow {known['version']} on the CPU: it verifies, and runs host ops")


def _compilers() -> list[Finding]:
    """What compiles kernels: those of msplit itself, and those of fused groups."""
    without = "nothing is fused, and lookups, convolutions and grouped products take more kernels"
    if importlib.util.find_spec("triton") is None:
        triton = Finding("triton", LIMITED, f"not installed: {without}", "pip install triton")
    else:
        # The package that comes with some builds of PyTorch is called otherwise.
        name = " ".join(filter(None, ("Triton", version("triton"))))
        triton = Finding("triton", OK, f"{name} compiles fused kernels and msplit's own")
    found = toolchain().compiler
    if found:
        compiler = Finding("c compiler", OK, f"{found}, for Triton's launchers")
    else:
        text = f"no cc, gcc or clang, and CC is not set: Triton can not build its launchers, so {without}"
        compiler = Finding("c compiler", LIMITED, text, "install gcc or clang, or name one in CC")
    return [triton, compiler]


def _kernels() -> list[Finding]:
    """Where compiled kernels are kept; nothing is said where there is no PyTorch, and so nothing to keep."""
    if importlib.util.find_spec("torch") is None:
        return []
    tools = toolchain()
    if tools.refused:
        said, _, fix = tools.refused[0].partition(": ")
        return [Finding("compiled kernels", LIMITED, said, fix)]
    if tools.folder is None or not tools.writable:
        text = f"{tools.folder or 'the home folder'} can not be written to: fused kernels are compiled anew in each run"
        fix = "name a folder that can be written to in XDG_CACHE_HOME"
        return [Finding("compiled kernels", LIMITED, text, fix)]
    return [Finding("compiled kernels", OK, f"kept in {tools.folder}; it can be deleted at any time")]


def _native() -> list[Finding]:
    """Threads that copy large inputs, and hashes of strings, where they are not there: the package was made where no C compiler was."""
    if importlib.util.find_spec("torch") is None:
        return []
    fix, found = "install gcc or clang, and msplit once more from its source", []
    if not COPY_THREADS.is_file():
        text = "not compiled: inputs of 1 MB and more are copied by one thread, in three times the time"
        found.append(Finding("native copies", LIMITED, text, fix))
    if not HOST_OPS.is_file():
        text = "not compiled: strings are hashed and tf.Examples parsed by Python"
        found.append(Finding("native strings", LIMITED, text, fix))
    return found


def lacking_to_serve() -> list[str]:
    """What has to be installed before `serve` can run."""
    return [package for module, package in _SERVER.items() if importlib.util.find_spec(module) is None]


def _server() -> Finding:
    missing = lacking_to_serve()
    if missing:
        one = len(missing) == 1
        said = f"{', '.join(missing)} {'is' if one else 'are'} not installed: `serve` needs {'it' if one else 'them'}"
        return Finding("server", LIMITED, said, INSTALL_SERVING)
    return Finding("server", OK, f"gRPC {version('grpcio')}, uvicorn {version('uvicorn')}")


def _jaxlib() -> Finding:
    if not stablehlo.installed():
        return Finding(
            "jaxlib", LIMITED, "jaxlib is not installed: models that JAX wrote stay one node", INSTALL_JAXLIB
        )
    return Finding("jaxlib", OK, f"jaxlib {version('jaxlib')} reads models that JAX wrote")


def runnable(findings: Sequence[Finding], names: Iterable[str]) -> list[Finding]:
    """What each command needs, and whether it is here.

    Args:
        names: All commands; those that nothing else is said of need neither a GPU nor TensorFlow nor PyTorch.

    Returns:
        A finding per command; `bench` is there once by itself, which takes the engine that runs, and once for each engine.
    """
    lacking = {finding.subject: finding for finding in findings if finding.status == MISSING}
    # A PyTorch without CUDA or without a device is worth as little to the cuda engine as none.
    lacking |= {one.subject: one for one in findings if one.subject == "pytorch" and one.status != OK}
    cuda = _needing("bench --engine cuda", ("gpu", "pytorch"), lacking)
    stock = _needing("bench --engine tensorflow", ("tensorflow",), lacking)
    if cuda.status == OK and "tensorflow" in lacking:
        text = "without TensorFlow nothing verifies its outputs, and host ops do not run: give --reference FILE.npz"
        cuda = replace(cuda, status=LIMITED, text=text, fix=INSTALL_TENSORFLOW)
    if cuda.status != MISSING:
        bench = replace(cuda, subject="bench", text=f"runs on the cuda engine; {cuda.text}")
    elif stock.status != MISSING:
        text = "runs on the tensorflow engine; its times on CPU devices mean nothing for GPU streams"
        bench = Finding("bench", LIMITED, text, cuda.fix)
    else:
        bench = Finding("bench", MISSING, "no engine can run here", f"{stock.fix}; for the cuda engine: {cuda.fix}")
    heavy = {
        "bench": (bench, cuda, stock),
        "bisect": (_needing("bisect", ("tensorflow", "pytorch"), lacking),),
        "build": (_needing("build", ("gpu", "pytorch"), lacking),),
        "load": (replace(bench, subject="load"),),
        "profile": (_needing("profile", ("gpu", "pytorch"), lacking),),
        "replicate": (_replicate(lacking),),
        "sample": (_needing("sample", ("tensorflow",), lacking),),
        "serve": (_serve(bench, findings),),
        "train": (_train(bench, lacking),),
        "tune": (_needing("tune", ("gpu", "pytorch"), lacking),),
        "worker": (_needing("worker", ("tensorflow",), lacking),),
    }
    light = "needs no TensorFlow, no PyTorch and no GPU"
    return [finding for name in names for finding in heavy.get(name, (Finding(name, OK, light),))]


def _replicate(lacking: Mapping[str, Finding]) -> Finding:
    """Variables go into a checkpoint, which TensorFlow writes."""
    if "tensorflow" in lacking:
        text = "without TensorFlow of frozen models only: it writes the variables of others"
        return Finding("replicate", LIMITED, text, lacking["tensorflow"].fix)
    return Finding("replicate", OK, "needs TensorFlow where a model has variables")


def _train(bench: Finding, lacking: Mapping[str, Finding]) -> Finding:
    """What trains runs models as `bench` does, and checkpoints are TensorFlow's."""
    if "tensorflow" in lacking:
        return _needing("train", ("tensorflow",), lacking)
    return replace(bench, subject="train")


def _serve(bench: Finding, findings: Sequence[Finding]) -> Finding:
    """What serves runs models as `bench` does, and answers with more."""
    server = next((one for one in findings if one.subject == "server" and one.status != OK), None)
    if server is not None:
        return Finding("serve", MISSING, server.text, server.fix)
    return replace(bench, subject="serve")


def _needing(command: str, needs: Sequence[str], lacking: Mapping[str, Finding]) -> Finding:
    names = {"gpu": "a GPU", "pytorch": "PyTorch with CUDA", "tensorflow": "TensorFlow"}
    wanted = " and ".join(names[need] for need in needs)
    missing = [lacking[need] for need in needs if need in lacking]
    if not missing:
        return Finding(command, OK, f"needs {wanted}")
    without = " and ".join(names[finding.subject] for finding in missing)
    fix = "; ".join(finding.fix for finding in missing if finding.fix)
    return Finding(command, MISSING, f"{without} {'is' if len(missing) == 1 else 'are'} missing", fix)
