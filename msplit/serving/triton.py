"""A model repository for Triton Inference Server: its Python backend opens a build, or a model, with `msplit.pool`.

Triton runs each instance of a Python model in a process of its own, which has weights and a CUDA context of its own, and without MPS
processes take turns on a GPU. So there is one instance per GPU, and what is in flight at once is up to its pool: `triton_model` hands each
request to the pool, returns, and sends the answer when it is there. What waits is joined in one place, by the pool, which knows what is in
flight; Triton's own batcher hands over at once whatever has arrived (its delay is 0), which takes one message for several requests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_encoding

from msplit._version import __version__
from msplit.assignment.model import opened
from msplit.engines.user_rows import UserRows
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import build as builds
from msplit.formats import writer
from msplit.formats.atomic import check_target, write_folder_atomic, write_pieces
from msplit.inputs.reference import load_reference
from msplit.run.buckets import rows_of
from msplit.run.build import whole_reference
from msplit.run.request import RunRequest
from msplit.serving.pool.ports import Port, Ports, Shape
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.sources import batches_of, ports_of
from msplit.shapes import infer

TYPES = {
    "bool": "TYPE_BOOL",
    **{f"{sign}int{bits}": f"TYPE_{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    "object": "TYPE_STRING",
    "string": "TYPE_STRING",
}
"""Type in NumPy, or in TensorFlow -> in Triton, as far as its Python backend has them."""

PARAMETER = "msplit"
"""Key of the configuration's parameter that holds `TritonSettings`, as JSON."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

MODEL = f'''"""Made by msplit {__version__}."""

from msplit.serving.triton_model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class TritonSettings:
    """Settings that the model's process reads.

    Attributes:
        source: Build or model, in the folder of the version.
        device: ``cuda``, or ``cpu`` to simulate streams.
        pool: `PoolSettings` as a mapping.
    """

    source: str
    device: str
    pool: Mapping[str, Any]


@dataclass(frozen=True)
class TritonExport:
    """Result of an export.

    Attributes:
        path: The model's folder in the repository.
        name: Name of the model.
        max_batch: Most rows of a request, 0 where inputs or outputs have no axis of rows.
    """

    path: Path
    name: str
    max_batch: int


def export(
    model: str | os.PathLike[str],
    repository: str | os.PathLike[str],
    settings: PoolSettings | None = None,
    *,
    name: str | None = None,
    device: str = "cuda",
    force: bool = False,
) -> TritonExport:
    """Writes a build, or a model, into a repository that `tritonserver --model-repository` serves. Nothing is executed.

    The folder is written whole or not at all. It holds a copy of the build or the model, and can be moved.

    Args:
        model: Path of the build or the model.
        repository: A folder, which is made where there is none. Other models in it stay.
        settings: Settings of the pool.
        name: Name of the model there; None: that of its file or folder, without the part after a dot.
        device: ``cpu`` simulates streams, to try a model without a GPU. A build knows it.
        force: Replace a model of this name.

    Raises:
        MsplitError: An input or output has a type that Triton does not have, or a shape that nobody knows; or the name can be none.
        WriteError: It can not be written.
    """
    source, settings = Path(model), settings or PoolSettings()
    name = source.resolve().name.partition(".")[0] if name is None else name
    if not _NAME.fullmatch(name):
        fix = "give one of letters and digits: --name NAME"
        raise MsplitError(f"{name!r} can be no name of a model in Triton", fix=fix)
    top = Path(repository)
    target = top / name
    check_target(target if top.exists() else top, force=force)
    if source.resolve() in (top / name).resolve().parents:
        raise MsplitError("the repository lies in the folder of the model", where=str(top), fix="choose another place")
    if builds.is_build(source):
        ports, outputs, device = _of_build(source)
    else:
        ports, outputs = _of_model(opened(source), settings)
    batched = ports.joins and all(port.shape[:1] == (None,) for port in (*ports.inputs.values(), *outputs.values()))
    max_batch = ports.batches[-1] if batched else 0
    inside = "build" if builds.is_build(source) else source.resolve().name
    served = TritonSettings(
        inside, device, {key: value for key, value in asdict(settings).items() if value is not None}
    )
    text = config(name, ports, outputs, served, max_batch)

    def fill(folder: Path) -> None:
        version = folder / "1"
        version.mkdir()
        write_pieces(folder / "config.pbtxt", [text.encode()], None)
        write_pieces(version / "model.py", [MODEL.encode()], None)
        if source.is_dir():
            (version / inside).mkdir(0o755)
            writer.copy(writer.listed(source, ()), version / inside)
        else:
            writer.copy([writer.Item(os.fspath(source), inside, os.stat(source))], version)

    def fill_repository(folder: Path) -> None:
        (folder / name).mkdir()
        fill(folder / name)

    if top.exists():
        write_folder_atomic(target, fill, force=force)
    else:
        write_folder_atomic(top, fill_repository)
    return TritonExport(target, name, max_batch)


def _of_build(source: Path) -> tuple[Ports, Mapping[str, Port], str]:
    manifest = builds.read(source)
    builds.verify(source, manifest)
    largest = manifest.rungs[-1]
    known = whole_reference(load_reference(source / largest.reference), largest, manifest.computed)
    ports = ports_of(manifest, {name: value.dtype for name, value in known.feeds.items()}, once=UserRows())
    return ports, ports.outputs(known.outputs), "cpu" if manifest.made_for.get("device") == "cpu" else "cuda"


def _of_model(flat: FlatGraph, settings: PoolSettings) -> tuple[Ports, Mapping[str, Port]]:
    import numpy as np

    if settings.lengths:
        fix = "build it (msplit build --lengths), and export the build"
        raise MsplitError("what is exported to Triton has the lengths of a build", fix=fix)
    request = RunRequest()
    rows, mixes = rows_of(flat, request)
    batches = batches_of(flat, request, settings, rows, mixes)
    shapes: dict[int, dict[str, Shape]] = {}
    for batch in batches or (0,):
        found = infer(flat, batch=batch or None)
        shapes[batch] = {one.name: _known(one.name, found.shape(one.node, one.port)) for one in flat.inputs}
    types = {one.name: found.dtype(one.node, one.port) for one in (*flat.inputs, *flat.outputs)}
    named = {name: np.dtype(object if kind == "string" else _plain(name, kind)) for name, kind in types.items()}
    ports = Ports(named, shapes, rows if batches else None, mixes)
    made = rows[1] if rows is not None and batches else {}
    outputs = {}
    for one in flat.outputs:
        shape = found.shape(one.node, one.port)
        if shape is None:
            raise _unknown(f"output {one.name}")
        outputs[one.name] = Port(named[one.name].name, (None, *shape[1:]) if made.get(one.name) else tuple(shape))
    return ports, outputs


def _plain(name: str, kind: str) -> str:
    """A type that NumPy has, too.

    Raises:
        MsplitError: Triton's Python backend has none for it.
    """
    if kind not in TYPES:
        raise MsplitError(
            f"{name} is {kind or 'of no known type'}, which Triton's Python backend has no type for",
            fix="serve it with `msplit serve`, or cast it in the model",
        )
    return kind


def _known(name: str, shape: tuple[int | None, ...] | None) -> Shape:
    if shape is None or None in shape:
        raise _unknown(f"input {name}")
    return tuple(size for size in shape if size is not None)


def _unknown(what: str) -> MsplitError:
    fix = "build the model with --shape NAME=…, and export the build"
    return MsplitError(f"the shape of {what} is not known", fix=fix)


def config(name: str, ports: Ports, outputs: Mapping[str, Port], served: TritonSettings, max_batch: int) -> str:
    """The text of ``config.pbtxt``."""
    lines = [
        f"# Made by msplit {__version__}.",
        f"name: {_text(name)}",
        'backend: "python"',
        f"max_batch_size: {max_batch}",
    ]
    for kind, some in (("input", ports.inputs), ("output", outputs)):
        for port_name, port in some.items():
            shape = port.shape[1:] if max_batch else port.shape
            sizes = ", ".join("-1" if size is None else str(size) for size in shape)
            # Triton knows nothing without an axis.
            dims = f"dims: [{sizes}]" if shape else "dims: [1]  reshape { shape: [] }"
            lines += [f"{kind} {{", f"  name: {_text(port_name)}"]
            lines += [f"  data_type: {TYPES[_plain(port_name, port.dtype)]}", f"  {dims}", "}"]
    kind = "KIND_CPU" if served.device == "cpu" else "KIND_GPU"
    about = "a process per GPU: what is in flight at once is up to the pool"
    lines.append(f"instance_group {{ count: 1 kind: {kind} }}  # {about}")
    if max_batch:
        sizes = ", ".join(map(str, ports.batches))
        lines += [
            "dynamic_batching {  # hands over what has arrived: the pool joins what waits, and delays it where it is told to",
            f"  preferred_batch_size: [{sizes}]",
            "  max_queue_delay_microseconds: 0",
            "}",
        ]
    value = _text(json.dumps(asdict(served)))
    lines.append(f"parameters {{ key: {_text(PARAMETER)} value {{ string_value: {value} }} }}")
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    return f'"{text_encoding.CEscape(value, as_utf8=True)}"'
