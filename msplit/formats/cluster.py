"""A cluster: jobs, their tasks, and the address of each, as TensorFlow's ClusterSpec has them.

As YAML or JSON, by itself or as TF_CONFIG has it, with the reader's own task beside it::

    worker:                                      {"cluster": {"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.3:2222"]},
      - 10.0.0.1:2222                             "task": {"type": "worker", "index": 0}}
      - 10.0.0.2:2222
    ps: {0: "10.0.0.3:2222"}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from msplit.errors import MsplitError, RulesError
from msplit.formats import settings
from msplit.formats.files import read_file
from msplit.formats.settings import Reading, Value

TF_CONFIG = "TF_CONFIG"
"""The environment variable in which TensorFlow keeps it, and what stands for it in place of a file's name."""

PS = "ps"
"""The job whose tasks keep variables and compute nothing else."""

CHIEFS = ("chief", "master")
"""Jobs of one task that comes before all others."""

MAX_TASKS = 4096
"""Most tasks: names of files are no clusters, and each task is asked whether it is there."""

FIX = "list addresses by job, such as: worker: [10.0.0.1:2222, 10.0.0.2:2222]"

_JOB = re.compile(r"[A-Za-z]\w*", re.ASCII)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Task:
    """One process of a cluster.

    Attributes:
        address: ``host:port``, as the others reach it.
    """

    job: str
    index: int
    address: str

    @property
    def name(self) -> str:
        """As TensorFlow writes it: ``/job:worker/task:0``."""
        return f"/job:{self.job}/task:{self.index}"

    @property
    def place(self) -> tuple[str, int]:
        """Host and port of its address."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Cluster:
    """A cluster: its processes by job.

    Attributes:
        tasks: Those of a job side by side and by index; the chief first, if there is one.
        source: Where this was read, for messages.
        own: Of TF_CONFIG, the task that its process is.
    """

    tasks: tuple[Task, ...]
    source: str = "the cluster"
    own: Task | None = None

    @property
    def workers(self) -> tuple[Task, ...]:
        """The tasks that compute: all but those of `PS`. The first is the one that a client talks to, rank 0 of others."""
        return tuple(task for task in self.tasks if task.job != PS)

    @property
    def servers(self) -> tuple[Task, ...]:
        """The tasks that keep variables."""
        return tuple(task for task in self.tasks if task.job == PS)

    def spec(self) -> dict[str, dict[int, str]]:
        """The dictionary that `tf.train.ClusterSpec` is made from."""
        jobs: dict[str, dict[int, str]] = {}
        for task in self.tasks:
            jobs.setdefault(task.job, {})[task.index] = task.address
        return jobs

    def task(self, job: str, index: int) -> Task:
        """One of its tasks.

        Raises:
            MsplitError: There is none; the message names those that there are.
        """
        for task in self.tasks:
            if (task.job, task.index) == (job, index):
                return task
        names = ", ".join(f"{task.job} {task.index}" for task in self.tasks[:8]) + (
            ", …" if len(self.tasks) > 8 else ""
        )
        raise MsplitError(f"the cluster has no task {index} of job {job!r}", where=self.source, fix=f"it has: {names}")


def read(place: str | os.PathLike[str]) -> Cluster:
    """Reads a cluster from a file or, where that is called ``TF_CONFIG``, from the environment.

    Raises:
        MsplitError: It is no cluster; the message says on which line.
    """
    if os.fspath(place) == TF_CONFIG:
        text = os.environ.get(TF_CONFIG, "")
        if not text.strip():
            raise MsplitError(
                "the environment variable TF_CONFIG is not set", fix="set it, or give a file: --cluster FILE"
            )
        return parse(text, TF_CONFIG)
    return parse(read_file(Path(place), settings.MAX_BYTES, what="cluster", fix=FIX), os.fspath(place))


def parse(text: str, source: str) -> Cluster:
    """The cluster that a text holds; `source` is its name, for messages.

    Raises:
        MsplitError: As for `read`.
    """
    try:
        return _cluster(settings.parse(text, source), Reading(source))
    except RulesError as problem:
        raise MsplitError(problem.what, where=problem.where, fix=FIX, details=problem.details) from None


def _cluster(value: Value, reading: Reading) -> Cluster:
    whole = value.data if isinstance(value.data, dict) else {}
    jobs = whole["cluster"] if isinstance(getattr(whole.get("cluster"), "data", None), dict) else value
    tasks: list[Task] = []
    taken: dict[str, Task] = {}
    for task, line in _tasks(jobs, reading):
        if task.address in taken:
            name = taken[task.address].name
            reading.problem(line, f"{task.address} is the address of {name}, too", "give each task its own")
        taken.setdefault(task.address, task)
        tasks.append(task)
    tasks.sort(key=lambda task: task.job not in CHIEFS)
    if not reading.problems and not any(task.job != PS for task in tasks):
        reading.problem(value.line, "no task computes", FIX)
    if len(tasks) > MAX_TASKS:
        reading.problem(value.line, f"there are {len(tasks)} tasks", f"have {MAX_TASKS} at most")
    reading.finish()
    cluster = Cluster(tuple(tasks), reading.source)
    return cluster if jobs is value else replace(cluster, own=_own(whole.get("task"), cluster, reading))


def _tasks(jobs: Value, reading: Reading) -> Iterator[tuple[Task, int]]:
    """The tasks, each with its line. What is wrong is noted."""
    if not isinstance(jobs.data, dict):
        reading.problem(jobs.line, f"a cluster is a mapping of jobs, not {jobs.kind}", FIX)
        return
    for job, value in jobs.data.items():
        if not isinstance(job, str) or not _JOB.fullmatch(job):
            reading.problem(
                jobs.keys[job], f"{job!r} is no name of a job", "write letters, digits and _, a letter first"
            )
            continue
        numbered = _numbered(job, value, reading)
        for index in sorted(numbered):
            address = numbered[index]
            fits = _ADDRESS.fullmatch(address.data) if isinstance(address.data, str) else None
            if fits is None or not 0 < int(fits[2]) < 1 << 16:
                shown = repr(address.data) if isinstance(address.data, str | int | float) else address.kind
                reading.problem(address.line, f"{shown} is no address", "write host:port, such as 10.0.0.1:2222")
            else:
                yield Task(job, index, address.data), address.line


def _numbered(job: str, value: Value, reading: Reading) -> dict[int, Value]:
    """The addresses of a job's tasks, a list or a mapping of numbers. What is wrong is noted."""
    listed = value.data
    if not isinstance(listed, list | dict):
        reading.problem(value.line, f"the tasks of job {job!r} are {value.kind}, not a list", FIX)
        return {}
    if not listed:
        reading.problem(value.line, f"job {job!r} has no task", "give it an address, or leave it out")
    if isinstance(listed, list):
        return dict(enumerate(listed))
    numbered = {index: each for key, each in listed.items() if (index := _index(key)) is not None}
    if len(numbered) < len(listed):
        reading.problem(value.line, f"the tasks of job {job!r} are not numbered", "number them 0, 1, 2 …")
    return numbered


def _index(key: object) -> int | None:
    """The number of a task, which is text in JSON."""
    if isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key):
        return int(key)
    return key if isinstance(key, int) and not isinstance(key, bool) and key >= 0 else None


def _own(value: Value | None, cluster: Cluster, reading: Reading) -> Task | None:
    """The task that TF_CONFIG says its process is; None where it says none."""
    if value is None:
        return None
    options = settings.Options("task", value, reading)
    job, index = options.text("type"), options.value("index")
    number = _index(index.data) if index is not None else None
    reading.finish()
    if job is None or number is None:
        raise MsplitError(
            "the task has no type or no index",
            where=f"{reading.source}:{value.line}",
            fix='write "task": {"type": "worker", "index": 0}',
        )
    return cluster.task(job, number)
