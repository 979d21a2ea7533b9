"""Many models at once: those below folders, looked at by several processes. One that fails is told, and the others go on."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from msplit.cli import options, output
from msplit.cli.main import command_of
from msplit.core.arguments import spelling
from msplit.engines.process import Process, serve
from msplit.errors import EngineError, MsplitError
from msplit.progress import telling

Look = Callable[[Path], Any]
"""What is done with a model. It and its result are sent from process to process."""
Looked = tuple[Any, str]
"""Result for a model, and a message where there is none."""

_HERE = 4
"""Most models that are looked at in this process where nobody says how many shall: to start one takes as long as a few small models."""

_ENDINGS = (".pb", ".pbtxt", ".meta")

jobs_option = click.option(
    "--jobs",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Processes that look at several models (default: one for each processor).",
)


def models_in(paths: Sequence[Path]) -> tuple[Path, ...]:
    """These models; in place of a folder that is none, all models below it, in the order of their names."""
    return tuple(model for path in paths for model in (_below(path) or [path]))


def _below(path: Path) -> list[Path]:
    from msplit.formats import build, reader

    def is_saved_model(folder: Path) -> bool:
        return any(os.path.exists(folder / name) for name in reader.SAVED_MODEL_FILES)

    if not path.is_dir() or is_saved_model(path) or build.is_build(path):
        return []
    unread: list[Path] = []  # a folder that can not be read is told as a model is
    found: list[Path] = []
    for place, folders, files in os.walk(path, onerror=lambda error: unread.append(Path(error.filename))):
        here = {name: Path(place, name) for name in (*folders, *files) if not name.startswith(".")}
        inside = [name for name in folders if name in here and is_saved_model(here[name])]
        folders[:] = [
            name for name in folders if name in here and name not in inside and not build.is_build(here[name])
        ]
        found += [here[name] for name in inside]
        found += [
            here[name] for name in files if name in here and name.endswith(_ENDINGS) and name != reader.FINGERPRINT
        ]
    return sorted([*found, *unread])


def of_folders(command: Callable[..., int]) -> Callable[..., int]:
    """Lets a command that compares OLD and NEW compare two folders: each model of both with the one of its name there.

    The command has parameters `old`, `model`, `style` and `told`, of which `exit_code` and `html` are read here, and prints one document
    of JSON.
    """

    @functools.wraps(command)
    def wrapped(*, jobs: int | None, **given: Any) -> int:
        sides = [
            {path.relative_to(side): path for path in models_in([side])} for side in (given["old"], given["model"])
        ]
        folders = [paths.keys() != {Path()} for paths in sides]
        if not any(folders):
            return command(**given)
        if not all(folders):
            raise click.UsageError("one of the two is a folder of models: give two models, or two such folders.")
        if given["told"].html is not None:
            raise click.UsageError("--html shows two models: leave it out, or give two models.")
        both = sorted(sides[0].keys() & sides[1].keys())
        name = click.get_current_context().info_name or ""
        looked = each(name, functools.partial(_compared, name, given), both, jobs)
        return _tell_folders(
            name, given, both, looked, [sorted(one.keys() - other.keys()) for one, other in (sides, sides[::-1])]
        )

    return wrapped


def _compared(name: str, given: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """What the command prints of a model of both folders, as data, with whether nothing changed."""
    pair = {"old": given["old"] / model, "model": given["model"] / model}
    with redirect_stdout(io.StringIO()) as text:
        code = inspect.unwrap(command_of(name).callback)(
            **{**given, **pair, "style": "json", "told": replace(given["told"], exit_code=True)}
        )
    return {"model": str(model), "same": not code, "diff": json.loads(text.getvalue())}


def _tell_folders(
    name: str, given: Mapping[str, Any], both: Sequence[Path], looked: Sequence[Looked], alone: Sequence[Sequence[Path]]
) -> int:
    """Prints what two folders have in common and what not. The exit code."""
    from msplit.report.document import Document, Table, plural

    found = [one for one, _ in looked if one is not None]
    errors = {str(model): why for model, (_, why) in zip(both, looked, strict=True) if why}
    changed = [one["model"] for one in found if not one["same"]]
    rows = [(one["model"], "same" if one["same"] else "changed") for one in found]
    rows += [
        (str(model), f"only in {side}") for side, paths in zip(("OLD", "NEW"), alone, strict=True) for model in paths
    ]
    count = f"{plural(len(found), 'model')} compared: {len(changed):,} changed, {len(found) - len(changed):,} the same."
    notes = [count, f"{len(alone[0]):,} only in OLD, {len(alone[1]):,} only in NEW."]
    if errors:
        notes.append(f"{plural(len(errors), 'model')} could not be compared.")
    document = Document(
        f"{given['old']} → {given['model']}", tables=[Table("", ("model", "what"), sorted(rows))], notes=notes
    )
    payload = {
        "models": found,
        **{f"only_in_{side}": list(map(str, paths)) for side, paths in zip(("old", "new"), alone, strict=True)},
        "errors": [{"model": model, "error": why} for model, why in errors.items()],
    }
    options.show(given["style"], name, document, lambda: payload)
    for why in errors.values():
        output.tell(f"error: {why}")
    return 2 if errors else int(given["told"].exit_code and bool(changed or alone[0] or alone[1]))


def each(command: str, look: Look, models: Sequence[Path], jobs: int | None) -> list[Looked]:
    """Result of each model in their order, by so many processes.

    Args:
        command: Name of the command, by whose options errors are told.
        look: Looks at one.
        models: Where they are.
        jobs: Number of processes; None: as many as there are processors, and this one alone for few models.
    """
    count = min(jobs or (1 if len(models) <= _HERE else len(os.sched_getaffinity(0))), len(models))
    found: list[Looked] = [(None, "")] * len(models)
    with telling() as tell:
        if count == 1:
            for at, model in enumerate(models):
                tell(f"{at + 1:,} of {len(models):,} models", at / len(models))
                found[at] = _looked(look, model)
            return found
        with _processes(command, look, count) as ask, ThreadPoolExecutor(count) as threads:
            waiting = {threads.submit(ask, model): at for at, model in enumerate(models)}
            try:
                for number, done in enumerate(as_completed(waiting), 1):
                    found[waiting[done]] = done.result()
                    tell(f"{number:,} of {len(models):,} models", number / len(models))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                ask(None)
                raise
    return found


@contextmanager
def _processes(command: str, look: Look, count: int) -> Iterator[Callable[[Path | None], Looked]]:
    """Asks one of several processes about a model; another takes the place of one that was lost. None ends them all."""
    running: SimpleQueue[Process | None] = SimpleQueue()
    every: list[Process] = []
    over = False
    for _ in range(count):
        running.put(None)

    def ask(model: Path | None) -> Looked:
        nonlocal over
        if model is None:
            over = True
            for one in every:
                one.kill()
            return None, ""
        process = running.get()
        try:
            if process is None:
                process = Process(__name__, "this model")
                every.append(process)
            if over:  # it was started when the others were ended
                process.kill()
            process.send((command, look, model))
            answer: Looked = process.receive()
        except EngineError as lost:
            process, answer = None, (None, str(MsplitError(lost.what, where=str(model), fix=lost.fix)))
        finally:
            running.put(process)
        return answer

    try:
        yield ask
    finally:
        for one in every:
            one.hang_up()
        for one in every:
            one.close()


def _looked(look: Look, model: Path) -> Looked:
    try:
        return look(model), ""
    except MsplitError as problem:
        return None, str(problem)
    except MemoryError:
        fix = "look at it by itself, on a machine with more memory, or with a smaller --jobs"
        return None, str(MsplitError("out of memory", where=str(model), fix=fix))
    except Exception as problem:  # noqa: BLE001  a mistake of msplit's own about one model is told as such
        fix = "this is a bug in msplit; look at this model alone with --debug, and report what it prints"
        return None, str(MsplitError(f"internal error: {type(problem).__name__}: {problem}", where=str(model), fix=fix))


def _answer(message: tuple[str, Look, Path]) -> Looked:
    command, look, model = message
    with click.Context(command_of(command), info_name=command), spelling(options.option_of):
        return _looked(look, model)


if __name__ == "__main__":
    serve(sys.argv[1:], _answer)
