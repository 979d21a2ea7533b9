"""The whole GPU suite in one visit to a machine with NVIDIA GPUs, tables last.

    python benchmarks/models.py GRAPHS              # where TensorFlow is (the machine with the GPU may lack it)
    python benchmarks/visit.py GRAPHS OUT [STEP …]  # on the machine with the GPU

Steps, all but `short` by default: `suite` (every model at every batch: TensorFlow, XLA, streams, larger kernels), `short` (some of it in
a quarter of an hour: the README's models, and others at batch 1), `schedulers` (every way to choose streams, and tuning), `auto` (kernels
and streams by the simulator), `costs` (static against measured costs, simulated against measured time), `precision` (half precision
beside float32), `foreign` and `foreign_costs` (both for models that no constant was fitted to), `requests` (what pools answer),
`training` (training steps), `curves` (of their losses), `gpus` (models on 1, 2, 4 … GPUs, and the tests that need several), `tests`
(marked gpu: races, our own kernels), `quiet` (some models again, one job at a time, when all else is done), `inputs` (what inputs cost a
step, likewise). Each GPU runs one job at a time, on processor cores of its own; what is compared is always measured by one job. About
four hours of one GPU; `suite` alone 95 minutes, 24 of four, 13 of eight.
What was cut off goes on with `--missing`, for as long as the machine keeps GRAPHS and OUT.
Writes OUT/STEP.json.gz with every raw time, OUT/tables.md, and what jobs printed under OUT/jobs.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SUITE = ("gpu_suite.py", "--duration", "0.5", "--builds", "2")
SCHEDULERS = ("schedulers.py", "--seconds", "8")
AUTO = "mmoe:128,towers:128,deepfm:128,deepfm:1024,dlrm:128,bert:1,googlenet:1,inception_v3:1"
"""Models for which `auto` chooses among kernels, too."""

TESTS = ("-m", "pytest", "-v", "-n", "10", "-m", "gpu and not alone", "--durations", "5", "-rfE")
"""Tests marked gpu, several at once, named as they end: a run that is cut off says what failed. The races have 200 random graphs. Those
that measure what others would disturb are marked alone, too, and are a job of their own."""

ONCE = ("--builds", "1")
"""For long steps, or many kernels, and for what the README does not show: built once for each precision."""

FEW = (*ONCE, "--streams", "1,8")
"""The same, of fewer variants."""

THOUSAND = ("--no-xla", "columns_1000")
"""XLA does not get ready with a graph of 98,000 nodes in any time that a visit has."""

RESULTS = {
    "suite": ("suite.json", "runs"),
    "short": ("suite.json", "runs"),
    "quiet": ("suite.json", "runs"),
    "auto": ("suite.json", "runs"),
    "schedulers": ("schedulers.json", "rows"),
    "costs": ("cost_model.json", "models"),
    "foreign": ("suite.json", "runs"),
    "precision": ("suite.json", "runs"),
    "foreign_costs": ("cost_model.json", "models"),
    "requests": ("requests.json", "rows"),
    "training": ("training.json", "rows"),
    "gpus": ("gpus.json", "rows"),
    "inputs": ("inputs.json", "rows"),
}
"""What a job of a step leaves, and which part of it is joined with other jobs' parts."""


@dataclass(frozen=True)
class Job:
    """One process on one GPU.

    Attributes:
        step: What it belongs to.
        name: Its own, within the step.
        seconds: What it takes, about. After three times that and a minute it is ended.
        command: Without the interpreter, the folders of graphs and results left out.
        gets_all: Whether it has all GPUs and processor cores, with no other job on the host.
    """

    step: str
    name: str
    seconds: int
    command: tuple[str, ...]
    gets_all: bool = False


def suite(name: str, seconds: int, *options: str) -> Job:
    """Models beside TensorFlow; the name is the list of them."""
    return Job("suite", name, seconds, (*SUITE, "--models", name, *options))


def short(name: str, seconds: int, *options: str) -> Job:
    """The same in less time, for a visit of a quarter of an hour: the README's models, and others at batch 1."""
    return Job(
        "short", name, seconds, ("gpu_suite.py", "--duration", "0.5", "--streams", "1,8,16", "--models", name, *options)
    )


def precision(name: str, half: str, seconds: int) -> Job:
    """The same in half precision, with float32 and TensorFlow's own mixed precision beside it."""
    options = ("--models", name, "--precision", half, "--no-xla", name.partition(":")[0], *FEW)
    return Job("precision", f"{name},{half}", seconds, (*SUITE, *options))


def half_training(name: str, half: str, seconds: int) -> Job:
    """The same of training steps."""
    job = precision(name, half, seconds)
    return Job("precision", f"{name},training,{half}", seconds, (*job.command, "--training"))


def quiet(name: str, seconds: int, *options: str) -> Job:
    """The same with no other job on the host, which is what the host's clock needs."""
    return Job("quiet", name, seconds, (*SUITE, "--models", name, *options))


def schedulers(name: str, seconds: int) -> Job:
    """Ways to choose streams, for models; the name is the list of them."""
    return Job("schedulers", name, seconds, (*SCHEDULERS, "--models", name))


def requests(name: str, seconds: int, *options: str) -> Job:
    """Requests that pools answer; the name is the list of models."""
    return Job("requests", name, seconds, ("pools.py", "--models", name, *options))


def foreign(name: str, seconds: int) -> Job:
    """Models of `foreign`, as `bench --rules auto` has them, without XLA, which takes minutes for some; the name is the list of them."""
    return Job("foreign", name, seconds, (*SUITE, "--models", name, "--streams", "1,4,16", "--no-xla", name))


def training(name: str, seconds: int, *options: str) -> Job:
    """Training steps; the name is the list of models."""
    return Job("training", name, seconds, ("training.py", "--models", name, *options))


def costs(name: str, seconds: int) -> Job:
    """Static against measured costs; the name is the list of models."""
    return Job("costs", name, seconds, ("cost_model.py", "--seconds", "2", "--models", name))


def foreign_costs(name: str, seconds: int) -> Job:
    """Their costs, and assignments of them."""
    return Job("foreign_costs", name, seconds, ("cost_model.py", "--seconds", "2", "--models", name))


JOBS = (
    short("densenet121:1,efficientnet_b0:1", 170, "--no-xla", "densenet121,efficientnet_b0"),
    short("mmoe:128,towers:128,deepfm:1024", 120),
    short("inception_v3:1,googlenet:1", 200),
    short("columns_50:256,bert:1,squeezenet:16", 170),
    suite("lstm:1", 375, *ONCE),
    suite("inception_v3:1024", 375, *FEW, "--no-xla", "inception_v3"),
    suite("nasnet_mobile:1", 300, *ONCE),
    suite("nasnet_mobile:1024", 275, *FEW, "--no-xla", "nasnet_mobile"),
    suite("lstm:1024", 245, *FEW, "--no-xla", "lstm"),
    suite("nasnet_mobile:16", 195, *ONCE, "--no-xla", "nasnet_mobile"),
    suite("lstm:128", 210, *FEW, "--no-xla", "lstm"),
    suite("lstm:16", 190, *FEW, "--no-xla", "lstm"),
    suite("nasnet_mobile:128", 120, *FEW, "--no-xla", "nasnet_mobile"),
    suite("columns_1000:1", 250, *FEW, *THOUSAND),
    suite("columns_1000:128", 215, *FEW, *THOUSAND),
    suite("columns_1000:256", 220, *FEW, *THOUSAND),
    suite("columns_1000:1024", 220, *FEW, *THOUSAND),
    suite("googlenet:1024", 270, *FEW),
    requests("ple,mmoe", 200, "--every", "1000000"),
    requests("inception_v3", 120, "--groups", "1,4,8", "--opens", "1000"),
    training("mmoe", 190),
    training("inception_v3", 420),
    training("lstm", 400, "--streams", "16"),
    training("columns", 150),
    training("towers", 175),
    training("deepfm", 225),
    Job("curves", "mmoe,deepfm", 60, ("training_curves.py",)),
    training("mmoe:1024,towers:1024,deepfm:1024", 555, "--without", "torch,inference"),
    Job("tests", "gpu", 600, (*TESTS, "tests/gpu")),
    Job("tests", "alone", 180, ("-m", "pytest", "-v", "-m", "gpu and alone", "-rfE", "tests/gpu")),
    Job("tests", "kernels", 320, (*TESTS, "tests/engines")),
    Job("tests", "ops", 180, ("-m", "pytest", "-q", "-n", "10", "tests/engines/cuda/ops")),
    suite("inception_v3:1", 125),
    suite("googlenet:1,squeezenet:1", 125),
    suite("mmoe:128,towers:128", 110),
    suite("columns_50:256", 80),
    suite("deepfm:1024", 60),
    suite("deepfm:1,deepfm:128,dlrm:1,dlrm:128,dlrm:1024", 150, *ONCE),
    suite("mmoe:1,mmoe:1024,towers:1,towers:1024", 155, *ONCE),
    suite("bert:1,bert:16", 110),
    suite("inception_v3:128", 150, *ONCE),
    suite("googlenet:128,squeezenet:128", 140, *ONCE),
    suite("inception_v3:16,googlenet:16,squeezenet:16", 170, *ONCE),
    suite("columns_50:1,columns_50:128,columns_50:1024", 155, *ONCE),
    suite("columns_100:1,columns_100:128", 150, *ONCE),
    suite("columns_100:256,columns_100:1024", 180, *ONCE),
    suite("squeezenet:1024", 130, *FEW),
    suite("bert:1024", 90, *ONCE),
    suite("bert:128", 75),
    precision("bert:128", "bf16", 55),
    precision("bert:1024", "bf16", 55),
    precision("inception_v3:16", "fp16", 75),
    precision("inception_v3:128", "fp16", 200),
    precision("squeezenet:128", "fp16", 55),
    precision("googlenet:128", "fp16", 80),
    precision("nasnet_mobile:128", "fp16", 240),
    precision("mmoe:128", "bf16", 50),
    precision("towers:128", "bf16", 50),
    precision("deepfm:1024", "bf16", 60),
    half_training("mmoe:128", "bf16", 110),
    half_training("deepfm:128", "fp16", 110),
    half_training("inception_v3:32", "bf16", 400),  # not done after 200
    quiet("inception_v3:1", 100),
    quiet("densenet121:1,efficientnet_b0:1", 120, "--no-xla", "densenet121,efficientnet_b0", "--streams", "1,8"),
    quiet("mmoe:128,towers:128", 60),
    schedulers("lstm:1", 250),
    schedulers("mmoe:1,mmoe:128,towers:1,towers:128", 110),
    schedulers("googlenet:1,squeezenet:1", 60),
    schedulers("inception_v3:1", 60),
    schedulers("googlenet:16,squeezenet:16", 70),
    schedulers("inception_v3:16", 60),
    schedulers("nasnet_mobile:1,nasnet_mobile:16", 150),
    schedulers("deepfm:1,deepfm:128,dlrm:1,dlrm:128", 110),
    schedulers("bert:1,bert:16", 70),
    Job("auto", "all", 90, (*SUITE, "--models", AUTO, "--streams", "1,8", "--rules", "auto", "--no-tensorflow")),
    costs("mmoe:1,towers:1,deepfm:1,dlrm:1,bert:1", 70),
    costs("inception_v3:1,squeezenet:1", 60),
    costs("nasnet_mobile:1,googlenet:1", 80),
    schedulers("lstm:16", 250),
    foreign_costs("bilstm6", 150),
    foreign_costs("gru_speech", 100),
    foreign_costs("densenet121,wavenet,graph_net", 130),
    foreign_costs("efficientnet_b0,unet,din", 130),
    foreign_costs("bert_towers,vit,decoder,dcn", 130),
    foreign_costs("mobilenet_v2,resnet50,autoint", 110),
    foreign_costs("ple,bucket_columns,text_cnn", 100),
    foreign("bilstm6", 200),
    foreign("gru_speech", 120),
    foreign("densenet121", 120),
    foreign("efficientnet_b0", 120),
    foreign("bert_towers,decoder", 120),
    foreign("vit,resnet50", 120),
    foreign("mobilenet_v2,unet", 120),
    foreign("wavenet,graph_net,text_cnn", 120),
    foreign("ple,bucket_columns", 100),
    foreign("din,autoint,dcn", 100),
    Job("inputs", "all", 150, ("inputs.py",)),
    Job("gpus", "all", 300, ("gpus.py",), gets_all=True),
    Job(
        "gpus",
        "tests",
        150,
        ("-m", "pytest", "-q", "-m", "needs_gpus", "tests/gpu", "tests/engines/cuda/device"),
        gets_all=True,
    ),
)
"""In the order in which they begin: long ones first, so that all GPUs are done at about the same time. Quiet ones come last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", nargs="*", help="which; all by default")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="how many to use")
    parser.add_argument(
        "--only",
        action="append",
        help="only these jobs: suite/lstm:16, or a pattern, */*:1024*; again for more, in that order",
    )
    parser.add_argument("--missing", action="store_true", help="only jobs of which nothing is in OUT yet")
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin no job that would end later than this, and end then what still runs",
    )
    arguments = parser.parse_args()
    steps = arguments.steps or [*(step for step in RESULTS if step != "short"), "curves", "tests"]
    jobs = [job for job in wanted(arguments.only or ["*"]) if job.step in steps]
    if arguments.missing:
        jobs = [job for job in jobs if not has_results(folder_of(job, arguments.out), job.step)]
    alone = [job for job in jobs if job.step in ("quiet", "inputs") or job.gets_all]
    stop = time.monotonic() + arguments.seconds
    cores = shares(sorted(os.sched_getaffinity(0)), arguments.gpus)
    graphs, out = arguments.graphs.resolve(), arguments.out.resolve()
    several = [job for job in jobs if job not in alone]
    work_on(several, graphs, out, cores, stop - sum(job.seconds for job in alone))
    work_on([job for job in alone if not job.gets_all], graphs, out, cores[:1], stop)
    work_on([job for job in alone if job.gets_all], graphs, out, [set().union(*cores)], stop)
    text = "\n".join(collect(arguments.out, step) for step in steps)
    (arguments.out / "tables.md").write_text(text)
    print(text)


def wanted(patterns: list[str]) -> list[Job]:
    """The jobs that the patterns name, each once, pattern by pattern."""
    found = (job for pattern in patterns for job in JOBS if fnmatch.fnmatchcase(f"{job.step}/{job.name}", pattern))
    return list(dict.fromkeys(found))


def shares(cores: list[int], count: int) -> list[set[int]]:
    """Processor cores for each GPU: jobs that disturb each other's host side would measure that."""
    size = max(len(cores) // max(count, 1), 1)
    return [set(cores[number * size :][:size] or cores) for number in range(count)]


def work_on(jobs: list[Job], graphs: Path, out: Path, cores: list[set[int]], stop: float) -> None:
    """Runs jobs on as many GPUs as there are sets of processor cores."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    workers = [
        threading.Thread(target=work, args=(waiting, graphs, out, gpu, own, stop)) for gpu, own in enumerate(cores)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def work(waiting: queue.SimpleQueue[Job], graphs: Path, out: Path, gpu: int, cores: set[int], stop: float) -> None:
    """Runs jobs on one GPU until none is left that would end in time."""
    os.sched_setaffinity(0, cores)  # of this thread, and of the processes that it starts
    while True:
        try:
            job = waiting.get_nowait()
        except queue.Empty:
            return
        began = time.time()
        if time.monotonic() + job.seconds > stop:
            print(f"{job.step} {job.name}: left out, no time", flush=True)
            continue
        code = run(job, graphs, out, None if job.gets_all else gpu, stop)
        print(f"{job.step} {job.name}: exit {code}, {time.time() - began:.0f} s on GPU {gpu}", flush=True)


def run(job: Job, graphs: Path, out: Path, gpu: int | None, stop: float) -> int | None:
    """Runs one job, on one GPU or on all; its exit code, None if it was ended."""
    folder = folder_of(job, out)
    folder.mkdir(parents=True, exist_ok=True)
    script, *options = job.command
    command = (
        [script, *options] if script == "-m" else [str(HERE / script), str(graphs), "--out", str(folder), *options]
    )
    environment = {
        **with_package(),
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MSPLIT_RACE_GRAPHS": "200",
        "MSPLIT_TELL_FAILURES": "1",
        "MSPLIT_TEST_DEVICE": "cuda",  # lowerings against TensorFlow's kernels
    }
    with (folder / "printed.txt").open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=HERE.parent, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(min(3 * job.seconds + 60, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def folder_of(job: Job, out: Path) -> Path:
    """Where a job leaves what it measures and what it prints."""
    return out / "jobs" / job.step / job.name.replace(":", "_").replace(",", "-")


def has_results(folder: Path, step: str) -> bool:
    """Whether a job left some: one that was cut off, or failed for all of its models, has none."""
    if step not in RESULTS:
        return (folder / "printed.txt").exists() and " passed" in last_line(folder)
    name, part = RESULTS[step]
    return (folder / name).exists() and bool(json.loads((folder / name).read_text())[part])


def with_package() -> dict[str, str]:
    """This process's environment, with this checkout's msplit in front."""
    paths = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths}


def collect(out: Path, step: str) -> str:
    """Joins what the jobs of a step left, and makes the step's table."""
    folders = sorted(folder for folder in (out / "jobs" / step).glob("*") if folder.is_dir())
    if step not in RESULTS:
        return "\n".join(f"{folder.name}: {last_line(folder)}" for folder in folders)
    name, part = RESULTS[step]
    contents = [json.loads((folder / name).read_text()) for folder in folders if has_results(folder, step)]
    if not contents:
        return f"{step}: nothing came"
    joined = {**contents[0], part: join([content[part] for content in contents])}
    target = out / f"{step}.json.gz"
    target.write_bytes(gzip.compress(json.dumps(joined).encode()))
    return table(step, target, folders)


def join(parts: list[Any]) -> Any:
    """Lists one after the other, or one dictionary of all."""
    if isinstance(parts[0], list):
        return [entry for part in parts for entry in part]
    return {key: value for part in parts for key, value in part.items()}


def last_line(folder: Path) -> str:
    return next(iter((folder / "printed.txt").read_text().strip().splitlines()[::-1]), "")


def table(step: str, results: Path, folders: list[Path]) -> str:
    """The tables of a step."""
    both = [["table.py", kind, str(results)] for kind in ("streams", "kernels")]
    commands = {
        "suite": both,
        "short": both,
        "quiet": both,
        "auto": [["table.py", "auto", str(results)]],
        "schedulers": [["table.py", "schedulers", str(results)]],
        "foreign": both,
        "precision": [["table.py", "precision", str(results)]],
        "training": [["training.py", "--table", str(results)]],
        "costs": [["cost_model.py", "--table", str(results)]],
        "foreign_costs": [["cost_model.py", "--table", str(results)]],
    }.get(step)
    if commands is None:
        return "\n".join((folder / "printed.txt").read_text() for folder in folders)
    printed = [
        subprocess.run(
            [sys.executable, str(HERE / script), *options],
            capture_output=True,
            text=True,
            cwd=HERE.parent,
            env=with_package(),
        )
        for script, *options in commands
    ]
    return "\n".join(done.stdout if done.returncode == 0 else done.stderr for done in printed)


if __name__ == "__main__":
    main()
