"""Checkpoints as TensorFlow's own: written by its SaveV2 under the names of the model's saver, listed in a file ``checkpoint``.

A checkpoint is there whole or not at all. Its files are written under other names in the same folder, forced to disk and renamed, the index
last, and only then does the file ``checkpoint`` name it; older ones go after that. Killed at any moment, or out of space, the process
leaves what that file named before.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_encoding
from numpy.typing import NDArray

from msplit import formats
from msplit.engines.base import GOOD_STEPS, LOSS_SCALE
from msplit.engines.tensorflow.variables import save_bundle
from msplit.errors import LoadError
from msplit.formats.atomic import leftovers, write_bytes_atomic, write_group_atomic
from msplit.formats.bundle import Checkpoint
from msplit.formats.files import read_bytes
from msplit.formats.model import Model

STATE = "checkpoint"
"""Name of the file that lists a folder's checkpoints, as `tf.train.latest_checkpoint` reads it."""

OBJECTS = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Key of what TensorFlow 2 restores objects by: that of the model's own checkpoint goes along."""

STEPS, NOTE = "msplit/steps", "msplit/note"
"""Keys of what only msplit reads: how many steps were run, and what goes with them."""

SCALE = {LOSS_SCALE: "msplit/loss_scale", GOOD_STEPS: "msplit/loss_scale_steps"}
"""Keys of what the engine keeps beside variables where it scales losses, by its name there."""

_ENDINGS = (".data-00000-of-00001", ".index")
_MOST_STATE = 1 << 20
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class CheckpointContents:
    """Content of a checkpoint.

    Attributes:
        state: Values by variable, as `initial_state` names them; without those that only a checkpoint of msplit's has.
        steps: Steps that were run before it; None where it does not say.
        note: Text that is kept with it.
        scale: The values of `SCALE`, where losses are scaled.
    """

    state: Mapping[str, NDArray[Any]]
    steps: int | None = None
    note: str = ""
    scale: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def write(model: Model, saved: CheckpointContents, path: Path, *, force: bool = False) -> None:
    """Writes a checkpoint; `path` is the beginning of its files' names. Only `force` replaces one that is there.

    Raises:
        WriteError: It can not be written. What was there before is unharmed.
    """
    tensors: dict[tuple[str, str], Any] = {
        (place.key, place.part): saved.state[name] for name, place in formats.saved_as(model, saved.state).items()
    }
    objects = _objects(model)
    if objects is not None:
        tensors[OBJECTS, ""] = objects
    if saved.steps is not None:
        tensors[STEPS, ""] = np.array(saved.steps, np.int64)
    tensors |= {(SCALE[name], ""): np.asarray(value) for name, value in saved.scale.items()}
    if saved.note:
        tensors[NOTE, ""] = np.array(saved.note.encode(), object)
    write_group_atomic(path, _ENDINGS, lambda prefix: save_bundle(prefix, tensors), force=force)


def _objects(model: Model) -> Any:
    """Objects that the model's own checkpoint lists; None where it says nothing."""
    if not model.is_saved_model:
        return None
    try:
        own = Checkpoint(model.path / "variables" / "variables")
    except LoadError:
        return None
    return own.tensor(OBJECTS) if OBJECTS in own else None


def read(model: Model, variables: Sequence[str], needed: Collection[str], path: Path) -> CheckpointContents:
    """Reads a checkpoint of a model, whoever wrote it: TensorFlow, or `write`.

    Args:
        model: Whose checkpoint it is to be.
        variables: Those to read, as far as they are there.
        needed: Those of them that must be there where the model has no saver, which otherwise says what must.
        path: The beginning of its files' names.

    Raises:
        LoadError: There is none, it is damaged, or it is one of another model: the message says which names or shapes differ.
    """
    checkpoint = Checkpoint(path)
    state = formats.variables(model, checkpoint=path)
    places = formats.saved_as(model, variables)
    found = {name: np.array(state[name]) for name in variables if name in state}
    has_saver = any(place.by_saver for place in places.values())
    must = {name for name in variables if (places[name].by_saver if has_saver else name in needed)}
    wrong = [said for name, value in found.items() if (said := formats.differs(model, name, value))]
    wrong += [f"no {places[name].key!r} for variable {name!r}" for name in variables if name in must - found.keys()]
    if wrong:
        more = len(wrong) - _SHOWN
        raise LoadError(
            f"is a checkpoint of another model than {model.path}",
            where=str(path),
            details=[*wrong[:_SHOWN], *([f"… and {more} more"] if more > 0 else [])],
            fix="give one that was written of this graph: by its saver, or by `msplit train`",
        )
    steps = int(checkpoint.tensor(STEPS)) if STEPS in checkpoint else global_step(model, found)
    note = bytes(checkpoint.tensor(NOTE)[()]).decode() if NOTE in checkpoint else ""
    scale = {name: np.array(checkpoint.tensor(key)) for name, key in SCALE.items() if key in checkpoint}
    return CheckpointContents(found, steps, note, scale)


def global_step(model: Model, state: Mapping[str, NDArray[Any]]) -> int | None:
    """Value of the global step of a graph of TensorFlow 1, if it has one of that name."""
    value = state.get("global_step")
    return int(value) if value is not None and value.shape == () and value.dtype.kind in "iu" else None


@dataclass(frozen=True)
class CheckpointState:
    """Content of the file ``checkpoint`` of a folder.

    Attributes:
        latest: The last checkpoint that is there: the beginning of its files' names. None where there is none.
        all: Those that are kept, the oldest first.
        named: The one that is named as the last, whether it is there or not.
    """

    latest: Path | None = None
    all: tuple[Path, ...] = ()
    named: tuple[Path, ...] = ()


def listed(folder: Path) -> CheckpointState:
    """The checkpoints of a folder, as far as their files are there.

    Raises:
        LoadError: The file that lists them can not be read.
    """
    place = folder / STATE
    try:
        text = read_bytes(place, _MOST_STATE).decode()
    except (FileNotFoundError, NotADirectoryError):
        return CheckpointState()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise LoadError(f"the list of checkpoints can not be read: {error}", where=str(place)) from None
    found: dict[str, list[Path]] = {"model_checkpoint_path": [], "all_model_checkpoint_paths": []}
    for key, value in re.findall(r'^\s*(\w+)\s*:\s*"((?:[^"\\]|\\.)*)"\s*$', text, re.MULTILINE):
        if key in found:
            found[key].append(folder / os.fsdecode(text_encoding.CUnescape(value)))  # an absolute one stays what it is
    last, every = (found[key] for key in ("model_checkpoint_path", "all_model_checkpoint_paths"))
    there = tuple(filter(_is_there, every))
    return CheckpointState(next(filter(_is_there, [*last, *reversed(there)]), None), there, tuple(last))


def last_of(folder: Path) -> Path | None:
    """The last checkpoint of a folder; None where none was written.

    Raises:
        LoadError: The file that lists them can not be read, or none that it names is there.
    """
    found = listed(folder)
    if found.latest is None and found.named:
        fix = "bring that checkpoint back, or remove this file to begin anew"
        raise LoadError(f"names {found.named[0].name}, which is not there", where=str(folder / STATE), fix=fix)
    return found.latest


def _is_there(path: Path) -> bool:
    return Path(f"{path}.index").is_file()


def latest(path: Path) -> Path:
    """The checkpoint that a path means: the last one of a folder, or the one whose files' names begin so.

    Raises:
        LoadError: There is none.
    """
    if not path.is_dir():
        return Path(str(path).removesuffix(".index"))
    found = last_of(path)
    if found is None:
        fix = f"give the folder of a file named {STATE!r}, or the beginning of a checkpoint's file names"
        raise LoadError("there is no checkpoint in this folder", where=str(path), fix=fix)
    return found


def add(path: Path, keep: int | None) -> None:
    """Lists a checkpoint that has been written as the last one of its folder, and removes the oldest beyond `keep`; None keeps all.

    Raises:
        WriteError: The list can not be written. It stays what it was.
    """
    folder = path.parent
    every = [*(one for one in listed(folder).all if one != path), path]
    kept = every if keep is None else every[-keep:]
    old = [one for one in every if one not in kept and one.parent == folder]  # others are not ours
    # What is to go is listed until it is gone: killed meanwhile, the next one removes it.
    write_bytes_atomic(folder / STATE, _state(path, [*old, *kept]), force=True)
    for one in old:
        _remove(one)
    if old:
        write_bytes_atomic(folder / STATE, _state(path, kept), force=True)
    for left in _left(folder, path.name.rpartition("-")[0]):
        left.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """The index first: without it, there is no checkpoint."""
    shards = sorted(path.parent.glob(f"{glob.escape(path.name)}.data-*-of-*"))
    for place in (Path(f"{path}.index"), *shards):
        place.unlink(missing_ok=True)


def _left(folder: Path, name: str) -> list[Path]:
    """Leftovers of killed processes: files of checkpoints of this name with temporary names, and data without an index."""
    data = re.compile(rf"({re.escape(name)}-\d+)\.data-\d{{5}}-of-\d{{5}}")
    found = [(path, data.fullmatch(path.name)) for path in sorted(folder.iterdir())]
    without = [path for path, match in found if match and not _is_there(folder / match[1])]
    return [*leftovers(folder, (f"{name}-", STATE)), *without]


def _state(path: Path, kept: Sequence[Path]) -> bytes:
    folder = path.parent

    def line(key: str, one: Path) -> str:
        name = one.name if one.parent == folder else str(one)
        return f'{key}: "{text_encoding.CEscape(os.fsencode(name), as_utf8=False)}"\n'

    lines = [line("model_checkpoint_path", path), *(line("all_model_checkpoint_paths", one) for one in kept)]
    return "".join(lines).encode()
