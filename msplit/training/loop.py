"""A training from its first or next step to its last: data in order, checkpoints, and an end for a reason."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import escape
from msplit.errors import EndOfData, MsplitError, WriteError
from msplit.formats.atomic import append_bytes, check_target, reported
from msplit.formats.files import open_regular
from msplit.progress import Progress, silent
from msplit.training.batches import Prefetched, rows_of
from msplit.training.checkpoint import last_of
from msplit.training.data import Data
from msplit.training.trainer import Arrays, Fetched, Trainer

NAME = "model"
"""Name of the files of checkpoints, before their steps."""

_SECONDS_TOLD = 0.5


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training.

    Attributes:
        steps: Train up to so many steps, those before a resumed checkpoint included; None: to the end of the data.
        save: Folder for checkpoints, which is made; None: none are written.
        every: Steps from one checkpoint to the next. One is written at the end, too.
        keep: Number of checkpoints that are kept.
        resume: Go on from the last checkpoint in the folder, with the data where they were; from the beginning where there is none.
        fetch_every: Steps between two whose values are kept; those of the last one are, too.
        log_csv: A CSV file to which kept values are added; see `StepLog`. It may be there only where training is resumed.
    """

    steps: int | None = None
    save: Path | None = None
    every: int = 1000
    keep: int = 5
    resume: bool = False
    fetch_every: int = 100
    log_csv: Path | None = None

    def __post_init__(self) -> None:
        for what in ("every", "keep", "fetch_every"):
            if getattr(self, what) < 1:
                raise MsplitError(f"{what} is one or more")
        if self.resume and self.save is None:
            raise MsplitError("to resume takes the folder of the checkpoints", fix="name it with --save")


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """Result of a training.

    Attributes:
        before: Steps that were run before, which a checkpoint says.
        steps: Steps that are run now, those before included.
        seconds: Time of these steps and checkpoints, without what made the model ready.
        rows: Rows of a batch.
        fetched: Values that some steps gave.
        saved: The last checkpoint; None where there is none.
        stopped: Reason why it ended early; "" where it did not.
        interrupted: True if somebody asked it to end.
    """

    before: int
    steps: int
    seconds: float
    rows: int
    fetched: tuple[Fetched, ...]
    saved: Path | None
    stopped: str = ""
    interrupted: bool = False

    @property
    def steps_per_second(self) -> float | None:
        """None where no step was run."""
        done = self.steps - self.before
        return done / self.seconds if done and self.seconds else None


def train(
    trainer: Trainer,
    data: Data,
    settings: TrainSettings,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> TrainingResult:
    """Trains. The first of the trainer's fetches is the loss: where it is no finite number any more, training ends.

    What is then in the folder was written before, of variables that were finite.

    Args:
        trainer: Trainer of the model.
        data: Batches that it is fed.
        settings: Number of steps, and the folder of checkpoints.
        stop: Asked between steps whether to end: the state is saved then.
        progress: Told how far it is.

    Raises:
        MsplitError: The data do not fit the model, or the checkpoint is not one of this training.
        WriteError: A checkpoint can not be written, or there are some that would be written over. The last whole one stays.
    """
    if settings.log_csv is not None and trainer.world.rank == 0:
        if settings.log_csv.is_dir():
            raise WriteError("is a folder", where=str(settings.log_csv), fix="give the name of a file")
        check_target(settings.log_csv, force=settings.resume)
    position, saved = _begin_alike(trainer, data, settings)
    return _Training(trainer, data, settings, progress or silent, position, saved).run(stop)


class StepLog:
    """A CSV file with a row for some steps: the step, seconds of this training, and each fetch that is one number.

    Every row is in the file when it is added. What is in the file stays: where training went on from a checkpoint, a step that was run
    again has a row for each time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begun = False

    def add(self, fetched: Fetched, seconds: float) -> None:
        """Adds a row, behind the names of the columns where the file is new.

        Raises:
            WriteError: It can not be written, or has other columns.
        """
        named = {name: np.asarray(value) for name, value in fetched.values.items()}
        values = {
            escape.line(name): value for name, value in named.items() if not value.ndim and value.dtype.kind in "biufV"
        }
        rows: list[list[Any]] = [[fetched.step, f"{seconds:.3f}", *map(str, values.values())]]
        text = io.StringIO()
        with reported(self.path):
            if not self._begun:
                self._begun = True
                if not self._goes_on(columns := ["step", "seconds", *values], text):
                    rows.insert(0, columns)
            csv.writer(text, lineterminator="\n").writerows(rows)
            append_bytes(self.path, text.getvalue().encode())

    def _goes_on(self, columns: list[str], text: io.StringIO) -> bool:
        """True if the file has rows. One that was cut off is ended in `text`."""
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        with open_regular(self.path) as file:
            there = next(csv.reader([file.readline(_LONGEST_HEAD).decode(errors="replace")]), [])
            file.seek(-1, os.SEEK_END)
            text.write("" if file.read(1) == b"\n" else "\n")
        if there != columns:
            what = f"its columns are {', '.join(there[:8])}, and what is fetched now gives {', '.join(columns[:8])}"
            raise WriteError(what, where=str(self.path), fix="fetch the same with --fetch, or choose another file")
        return True


_LONGEST_HEAD = 1 << 20


def _begin_alike(trainer: Trainer, data: Data, settings: TrainSettings) -> tuple[int, Path | None]:
    """Begin alike on all who train together. The folder is the first one's, which others need not see: its variables become theirs."""
    world = trainer.world
    position, saved = _begin(trainer, data, settings) if world.rank == 0 else (0, None)
    position, trainer.steps, last = world.share((position, trainer.steps, None if saved is None else str(saved)))
    return position, None if last is None else Path(last)


def _begin(trainer: Trainer, data: Data, settings: TrainSettings) -> tuple[int, Path | None]:
    """Makes the folder ready, and goes back to its last checkpoint if that is asked for: the number of the next batch, and it."""
    folder = settings.save
    if folder is None:
        return 0, None
    with reported(folder):
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13), str(folder))
    trainer.hold(folder)
    last = last_of(folder.absolute())
    if last is None:
        return 0, None
    if not settings.resume:
        what = f"there are checkpoints already, the last of step {last.name.rpartition('-')[2]}"
        raise WriteError(what, where=str(folder), fix="go on from it with --resume, or choose another folder")
    note = trainer.restore(last)
    if not note:
        return trainer.steps, last  # TensorFlow wrote it
    kept = json.loads(note)
    if (then := kept["data"]) != (now := dict(data.described)):
        keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        changed = [f"{key} {then.get(key)}, now {now.get(key)}" for key in keys]
        raise MsplitError(
            f"the checkpoint was written while other data came: {'; '.join(changed)}",
            where=str(last),
            fix="give the same data, or begin another training with its variables: --restore, and another --save",
        )
    return int(kept["batches"]), last


class _Training:
    """The state of a training between two steps."""

    def __init__(
        self, trainer: Trainer, data: Data, settings: TrainSettings, tell: Progress, position: int, saved: Path | None
    ) -> None:
        self.trainer, self.data, self.settings, self.tell = trainer, data, settings, tell
        self.position, self.saved = position, saved
        self.saved_at = trainer.steps if saved is not None else None
        self.before = trainer.steps
        self.rows = 1
        self.fetched: list[Fetched] = []
        self.log = StepLog(settings.log_csv) if settings.log_csv is not None and trainer.world.rank == 0 else None
        self.began = self.told = self.now = 0.0
        self.spoiled_before: frozenset[str] = frozenset()

    def run(self, stop: Callable[[], bool]) -> TrainingResult:
        """All steps."""
        trainer, settings = self.trainer, self.settings
        left = None if settings.steps is None else max(settings.steps - trainer.steps, 0)
        reason, interrupted = "", False
        with closing(Prefetched(islice(self.data.start(self.position), left))) as batches:
            for feeds in batches:
                if interrupted := trainer.world.agree(stop()):
                    break
                if trainer.runner is None:
                    self._prepare(feeds)
                try:
                    last = Fetched(trainer.steps + 1, trainer.step(feeds, then=batches.upcoming))
                except EndOfData:  # of the graph's own, which is as good an end as that of ours
                    break
                self.position += 1
                reason = _not_finite(trainer.fetches[:1], last)
                if reason or last.step % settings.fetch_every == 0:
                    self._keep(last)
                if not reason and last.step % settings.every == 0:
                    reason = self._save()
                if reason:
                    break
                self._tell(last)
        if trainer.steps > self.before and (not self.fetched or self.fetched[-1].step != trainer.steps):
            self._keep(last)
        if not reason and self.saved_at != trainer.steps and trainer.runner is not None:
            reason = self._save()
        seconds = time.perf_counter() - self.began if self.began else 0.0
        if interrupted:
            reason = reason or f"interrupted after step {trainer.steps}"
        return TrainingResult(
            self.before, trainer.steps, seconds, self.rows, tuple(self.fetched), self.saved, reason, interrupted
        )

    def _keep(self, last: Fetched) -> None:
        self.fetched.append(last)
        if self.log is not None:
            self.log.add(last, time.perf_counter() - self.began)

    def _prepare(self, feeds: Mapping[str, Any]) -> None:
        self.tell("preparing", 0.0)
        self.rows = rows_of(feeds, self.trainer.specs) * self.trainer.world.size
        self.trainer.prepare(feeds)
        if self.settings.save is not None:
            self.spoiled_before = frozenset(_spoiled(self.trainer.variables))
        self.began = self.told = time.perf_counter()

    def _save(self) -> str:
        """Writes a checkpoint, unless a variable is no number any more: then it says which."""
        if self.settings.save is None:
            return ""
        trainer = self.trainer
        state = trainer.variables
        spoiled = [name for name in _spoiled(state) if name not in self.spoiled_before]
        if spoiled:
            return f"variable {spoiled[0]!r} is not finite after step {trainer.steps}"
        note = json.dumps({"batches": self.position, "data": dict(self.data.described)}, sort_keys=True)
        # One of this step that is there was not listed any more when it was written, or is not listed now.
        if trainer.world.rank == 0:
            place, keep = self.settings.save / NAME, self.settings.keep
            self.saved = trainer.save(place, keep=keep, force=True, note=note, state=state)
        self.saved_at = trainer.steps
        return ""

    def _tell(self, last: Fetched) -> None:
        now = time.perf_counter()
        if now - self.told < _SECONDS_TOLD:
            return
        self.told = now
        rate = (last.step - self.before) / (now - self.began)
        values = (
            f"{name} {float(value):.6g}"
            for name, value in last.values.items()
            if np.ndim(value) == 0 and value.dtype.kind in "fiu"
        )
        steps = self.settings.steps
        of = f" of {steps:,}" if steps is not None else ""
        parts = (f"step {last.step:,}{of}", *values, f"{rate:,.0f} steps/s", f"{rate * self.rows:,.0f} samples/s")
        self.tell(", ".join(parts), (last.step / steps) if steps else 0.0)


def _not_finite(names: tuple[str, ...], fetched: Fetched) -> str:
    """Message about a loss that is no finite number; "" where it is one."""
    for name in names:
        value = fetched.values[name]
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            return f"{name} is {'NaN' if np.isnan(value).any() else 'infinite'} at step {fetched.step}"
    return ""


def _spoiled(state: Arrays) -> list[str]:
    """Variables that hold what is no finite number."""
    return [name for name, value in state.items() if not _finite(value)]


def _finite(value: NDArray[Any]) -> bool:
    if value.dtype.kind == "V":  # bfloat16 and its kin
        value = value.astype(np.float32)
    return value.dtype.kind not in "fc" or bool(np.isfinite(value).all())
