"""From what is to be served to models that are ready: a pool per signature, warmed up with the requests that a model brings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from msplit.assignment.model import load
from msplit.errors import LoadError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import tensors, wire
from msplit.formats.build import is_build, read
from msplit.formats.endpoints import fitting
from msplit.formats.files import open_regular
from msplit.formats.summary import contents
from msplit.inputs.files import records
from msplit.progress import Progress, phase, silent
from msplit.run.request import RunRequest
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.sources import pool
from msplit.serving.server import decode
from msplit.serving.server.config import ModelConfig
from msplit.serving.server.models import Models, Signature, Version, signature_of
from msplit.serving.server.tensors import Refusal
from msplit.serving.server.versions import Polling, Versions

ALL = ("all",)
"""All signatures of a model."""

_WARMUP = Path("assets.extra") / "tf_serving_warmup_requests"
_PREDICT_LOG = 6
_MOST_WARMUPS = 1000


@contextlib.contextmanager
def ready(
    configs: Sequence[ModelConfig],
    request: RunRequest,
    settings: PoolSettings,
    *,
    tags: Sequence[str] | None = None,
    signatures: Sequence[str] = (),
    polling: Polling | None = None,
    progress: Progress | None = None,
) -> Iterator[Models]:
    """Makes models ready, for as long as the block lasts.

    Args:
        configs: Models to serve.
        request: Engine and workload.
        settings: Settings of their pools.
        tags: Tags of the graph, where a SavedModel has several.
        signatures: Names of those to serve; none: ``serving_default`` or the only one; `ALL`. Each has a pool, and weights, of its own.
        polling: When to look for new versions; None: never.
        progress: Told what is being done.

    Raises:
        MsplitError: One of them can not be served.
    """
    with contextlib.closing(opener(request, settings, tags=tags, signatures=signatures, polling=polling)) as versions:
        versions.start(configs, progress or silent)
        yield versions.models


def opener(
    request: RunRequest,
    settings: PoolSettings,
    *,
    tags: Sequence[str] | None = None,
    signatures: Sequence[str] = (),
    polling: Polling | None = None,
) -> Versions:
    """Versions of models that are opened when it is started; see `ready`."""
    return Versions(partial(_version, request, settings, tags, signatures), polling or Polling())


def _version(
    request: RunRequest,
    settings: PoolSettings,
    tags: Sequence[str] | None,
    signatures: Sequence[str],
    name: str,
    number: int,
    path: Path,
    progress: Progress,
) -> Version:
    """Opens a version: a pool for each of its signatures."""
    with ExitStack() as stack:

        def signature(model: FlatGraph | Path) -> Signature:
            flat = model if isinstance(model, FlatGraph) else None
            try:
                made = pool(model, request, settings, progress=progress)
            except MsplitError as problem:
                of = f", signature {flat.model.signature}" if flat is not None and flat.model.signature else ""
                problem.where = f"{name}{of}" + (f": {problem.where}" if problem.where else "")
                if flat is not None and of and len(flat.model.signatures) > 1:
                    problem.fix = f"{problem.fix or 'leave it out'}; or serve others: --part signature="
                raise
            stack.callback(made.close, finish=False)
            return signature_of(made, flat, "" if flat is not None else read(path).method)

        if is_build(path):
            only = signature(path)
            stack.pop_all()
            return Version(name, number, {only.name: only})
        wanted = _all_signatures(path, tags) if signatures == ALL else signatures
        flats = [load(path, tags=tags, signature=one) for one in wanted or (None,)]
        found = {one.name: one for one in map(signature, flats)}
        others = tuple(one for one in flats[0].model.signatures if one not in found)
        opened = Version(name, number, found, others)
        if path.is_dir() and (path / _WARMUP).is_file():
            with phase("warming up"):
                _warm_up(opened, path / _WARMUP)
        stack.pop_all()
        return opened


def _all_signatures(path: Path, tags: Sequence[str] | None) -> tuple[str, ...]:
    graphs = contents(path).graphs
    which = fitting([graph.tags for graph in graphs], tags)
    return tuple(signature.name for i in which[:1] for signature in graphs[i].signatures)


def _warm_up(version: Version, path: Path) -> None:
    """Runs the requests that a SavedModel brings for that, as TensorFlow Serving does.

    Raises:
        LoadError: One of them fails.
    """
    with open_regular(path) as file:
        logs = records(file, str(path), _MOST_WARMUPS)
    for count, log in enumerate(logs):
        try:
            for data in _predictions(log):
                parts = decode.Reader(decode.predict_request).parts(data)
                signature = version.signature(parts.request.model_spec.signature_name)
                signature.pool.step(parts.feeds(signature.pool.inputs))
        except (IndexError, tensors.NotWireFormat, Refusal, MsplitError) as problem:
            said = getattr(problem, "what", None) or str(problem) or type(problem).__name__
            raise LoadError(
                f"warm-up request {count} fails: {said}", where=str(path), fix="take the file out, or write it again"
            ) from problem


def _predictions(log: bytes) -> Iterator[bytes]:
    """The PredictRequests of a PredictionLog; other requests are left out."""
    for entry in wire.fields(log):
        if entry.number == _PREDICT_LOG and entry.kind == wire.LENGTH:
            for part in wire.fields(log, entry.start, entry.end):
                if part.number == 1 and part.kind == wire.LENGTH:
                    yield log[part.start : part.end]
