"""A build: a folder with a model that is compiled for one GPU, and a manifest that says what is in it.

    manifest.json   what it was made of and for, how fast it was, and the hash of every other file
    weights.bin     all constants, each block of memory once
    1.json          what runs at one batch: ops, kernels, streams; a file per batch
    1.npz           inputs and outputs of one step of it, to verify it with
    1.host.json     what the host runs around it, where it does; it names graphs
    host-*.pb       a graph of the host's, with its constants and what its tables hold
    kernels/        machine code

It is a program: what opens it runs the machine code. So nothing of it is read where somebody else could write to it, and everything is
held against its hash before it is looked at. It holds no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from msplit._version import __version__
from msplit.core.arguments import Precision
from msplit.errors import LoadError, MsplitError, WriteError
from msplit.formats.atomic import check_target, write_folder_atomic, write_pieces
from msplit.formats.files import JsonValue, Sha256, open_regular, writers

VERSION = 2
MANIFEST, WEIGHTS, KERNELS = "manifest.json", "weights.bin", "kernels"

_LARGEST_MANIFEST = 64 << 20
_REMAKE = "build it anew: msplit build MODEL -o DIR --force"
_NAME = re.compile(r"(kernels/)?[0-9A-Za-z_.-]+")
_LARGEST = 1 << 50
Entries = Annotated[int, 0, 1 << 40]
"""Entries of a leading dimension that belong to a row."""

_PIECE, _THREADS = 1 << 24, 8
"""Bytes of a file that a thread reads and hashes at once, and threads."""


@dataclass(frozen=True)
class Bucket:
    """A batch size that a build has, and its files.

    Attributes:
        batch: Rows of a step; None where the model's inputs have shapes of their own.
        inputs: Shape of each input.
        program: File with what runs.
        reference: File with inputs and outputs of one step.
        streams: How many do something.
        kernels: Of a step.
        step_us: Median of a step by the device's clock; None where there is no such clock.
        host_us: Of a step with its inputs and outputs.
    """

    batch: Annotated[int, 1] | None
    inputs: Mapping[str, tuple[int, ...]]
    program: str
    reference: str
    streams: Annotated[int, 0, 1 << 20]
    kernels: int
    step_us: float | None
    host_us: float | None


@dataclass(frozen=True)
class LengthInputs:
    """Sequences of a model whose rows are filled up to a length that was prepared.

    Attributes:
        name: Input of what runs, which is none of the model's: the length of each row.
        inputs: Those of which rows are filled up, along the second axis.
        outputs: Axes along which outputs are cut.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a build.

    Attributes:
        made_for: Versions, GPU and driver, by name.
        model: What it was built from.
        digest: SHA-256 of that model's graph.
        label: What runs, as a bench calls it.
        why: Why that was chosen.
        notes: What is worth knowing of it.
        precision: The name of a `Precision`: what float32 is computed in.
        capture: Whether a step is one CUDA graph.
        measured: Whether kernels were chosen by timing them; otherwise nothing was compiled.
        outputs: Names of the outputs, in order.
        computed: Output -> the coarser type that it was computed in, as `compare.computed_in` has it.
        rows: Of inputs and of outputs, how many entries of the leading dimension belong to a row (0: it has no rows), where rows are
            independent; None where that was not shown.
        mixes: Why it was not.
        rungs: Buckets by ascending batch, under the name that the file has for them.
        preparation: Seconds that building took, by what was done.
        files: Name -> bytes and SHA-256; of what is larger than 16 MiB that of the hashes of all pieces of so many bytes, one behind the
            other.
        method: Method of TensorFlow Serving that the model's signature was exported for, "" where that is not known.
        tables: Bytes at the end of the weights that stay in the host's memory: tables of which the GPU keeps some rows.
        lengths: What has rows of any length, where several lengths were built; None where all shapes but the batch are fixed.
    """

    made_for: Mapping[str, str]
    model: str
    digest: str
    label: str
    why: str
    notes: tuple[str, ...]
    precision: Annotated[str, tuple(Precision)]
    capture: bool
    measured: bool
    outputs: tuple[str, ...]
    computed: Mapping[str, str]
    rows: tuple[Mapping[str, Entries], Mapping[str, Entries]] | None
    mixes: str
    rungs: tuple[Bucket, ...]
    preparation: Mapping[str, float]
    files: Mapping[str, tuple[Annotated[int, 0, _LARGEST], Sha256]]
    method: str = ""
    tables: Annotated[int, 0, _LARGEST] = 0
    lengths: LengthInputs | None = None


def write(
    path: str | os.PathLike[str],
    manifest: Manifest,
    files: Mapping[str, bytes],
    weights: Iterable[memoryview],
    *,
    force: bool = False,
) -> Manifest:
    """Writes a build, whole or not at all. Only `force` replaces what is there. What the manifest says of files is filled in.

    Raises:
        WriteError: It can not be written; what stood there before is unharmed.
    """
    check_place(path, force=force)
    written: list[Manifest] = []

    def fill(folder: Path) -> None:
        (folder / KERNELS).mkdir()
        for name, data in files.items():
            write_pieces(folder / name, [data], None, 0o644)
        write_pieces(folder / WEIGHTS, weights, None, 0o644)
        for place in (folder, folder / KERNELS):  # others may read it, and nobody else may write to it
            os.chmod(place, stat.S_IMODE(place.stat().st_mode) & ~0o022)
        listed = {name: _hash(folder / name) for name in sorted([*files, WEIGHTS])}
        said = {"kind": "build", "schema_version": VERSION, **asdict(manifest), "files": listed}
        text = json.dumps(said, indent=1, sort_keys=True)
        write_pieces(folder / MANIFEST, [text.encode() + b"\n"], None, 0o644)
        written.append(_manifest(JsonValue.parse(text, str(path), what="build", fix=_REMAKE)))

    write_folder_atomic(Path(path), fill, force=force)
    return written[0]


def check_place(path: str | os.PathLike[str], *, force: bool) -> None:
    """Refuses a place that a build can not be written to, before any work is done for it.

    Raises:
        WriteError: Something is there that is no build, or a build that must stay, or there is no folder that can be written to.
    """
    check_target(Path(path), force=force)
    if os.path.lexists(path) and not is_build(path):
        raise WriteError(
            "is there, and is no build", where=str(path), fix="give the name of a folder that is not there yet"
        )


def is_build(path: str | os.PathLike[str]) -> bool:
    """True if a path is a folder with a manifest."""
    return os.path.isfile(os.path.join(path, MANIFEST))


def read(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a build. Nothing of it is verified: see `verify`.

    Raises:
        LoadError: It can not be read, or is none.
    """
    where = str(path)
    if os.path.lexists(path) and not any(os.path.lexists(Path(path) / name) for name in (MANIFEST, WEIGHTS)):
        fix = "`msplit.prepare` runs a model; `msplit build MODEL -o DIR` makes a build of it, which opens in a second"
        raise LoadError("is no build: a build is a folder that `msplit build` made", where=where, fix=fix)
    try:
        value = JsonValue.read(Path(path) / MANIFEST, _LARGEST_MANIFEST, what="build", fix=_REMAKE)
        return _manifest(value)
    except LoadError:
        raise
    except MsplitError as problem:
        raise LoadError(problem.what, where=problem.where or where, fix=problem.fix or _REMAKE) from None


def verify(path: str | os.PathLike[str], manifest: Manifest) -> NDArray[np.uint8] | None:
    """Refuses a build that somebody else could have changed, or whose files are not those that its manifest names.

    Returns:
        The bytes of its weights that were held against their hash; None where tables are among them, which are mapped.

    Raises:
        LoadError: That.
    """
    folder, weights = Path(path), list[NDArray[np.uint8]]()

    def refused(what: str) -> LoadError:
        fix = "take their right to write away (chmod -R go-w), copy it to a folder of your own, or run as its owner"
        return LoadError(what, where=str(path), fix=fix)

    for place in (folder, folder / KERNELS):
        try:
            why = writers(place)
        except (OSError, RuntimeError) as problem:
            why = str(problem)
        if why:
            raise refused(f"the build is not opened, for it is a program and {why}")
    for name, expected in {MANIFEST: None, **manifest.files}.items():
        try:
            info = (folder / name).lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o022 or info.st_uid not in (0, os.getuid()):
                why = "for it is part of a program and somebody else may write to it, or it is no regular file"
                raise refused(f"{name} is not opened, {why}")
            kept = weights if name == WEIGHTS and not manifest.tables else None
            found = None if name == MANIFEST else _hash(folder / name, kept)
        except OSError as error:
            raise LoadError(f"{name} can not be read: {error.strerror}", where=str(path), fix=_REMAKE) from None
        if found != expected:
            raise LoadError(
                f"{name} is not what was built: it was changed, or is damaged", where=str(path), fix=_REMAKE
            )
    return weights[0] if weights else None


def _hash(path: Path, kept: list[NDArray[np.uint8]] | None = None) -> tuple[int, str]:
    """Size and hash of a file (see `Manifest.files`). Its bytes are added to a list, if there is one."""
    with open_regular(path) as file, ThreadPoolExecutor(_THREADS) as threads:
        size = os.fstat(file.fileno()).st_size
        whole = None if kept is None else np.empty(size, np.uint8)

        def hashed(start: int) -> bytes:
            piece = np.empty(min(_PIECE, size - start), np.uint8) if whole is None else whole[start : start + _PIECE]
            read = os.preadv(file.fileno(), [piece.data], start)
            return hashlib.sha256(piece.data[:read]).digest()

        if kept is not None and whole is not None:
            kept.append(whole)
        pieces = [*threads.map(hashed, range(0, size, _PIECE))] or [hashlib.sha256().digest()]
    return size, (pieces[0] if len(pieces) == 1 else hashlib.sha256(b"".join(pieces)).digest()).hex()


def _manifest(value: JsonValue) -> Manifest:
    top = value.mapping()
    made_with, said = top.get("made_for"), top.get("schema_version")
    if top.get("kind") == "build" and isinstance(said, int) and said < VERSION and isinstance(made_with, Mapping):
        by = f"msplit {str(made_with.get('msplit', 'of another version'))[:40]}"
        raise value.wrong(f"was made by {by}, and msplit {__version__} can not open it")
    found = value.of_version("build", VERSION).to(Manifest, optional=("method",))
    names, rungs = found.files, found.rungs
    wanted = {WEIGHTS, *(name for bucket in rungs for name in (bucket.program, bucket.reference))}
    if not rungs or not wanted <= set(names) or not all(_NAME.fullmatch(name) and ".." not in name for name in names):
        raise value.wrong("does not name the files of a build")
    return found
