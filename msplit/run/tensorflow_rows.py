"""The rows of stock TensorFlow: on one stream, on logical devices, on devices that somebody names, and with NVIDIA's switches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from msplit.core.arguments import Precision
from msplit.engines.base import ClusterOptions, Job
from msplit.engines.tensorflow.devices import Function, places
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError, MsplitError
from msplit.formats.files import JsonValue
from msplit.inputs.make import calling, imported, is_function
from msplit.run.request import RunRequest
from msplit.run.setup import StreamIds, plural
from msplit.verify.results import Variant
from msplit.verify.tensorflow_process import OWN_PROCESS

_MOST_BYTES = 256 << 20
"""Of a file of devices: a million nodes with long names."""

_FIX = "give module:function, or what `msplit assign --emit placement` writes"


def tensorflow_variants(job: Job, assignments: Sequence[StreamIds], request: RunRequest) -> list[Variant]:
    """What TensorFlow runs for a request, the model as it is first.

    Raises:
        EngineError: A switch says something of logical devices that no row has.
        MsplitError: Where nodes are to go is not told.
    """
    variants = [Variant(f"TensorFlow, 1 stream{job.precision.suffix}", TENSORFLOW, job)]
    if request.cluster is not None:
        return [*variants, *_over(job, assignments, request.cluster)]
    for streams, ids, _ in assignments:
        label = f"TensorFlow, {plural(streams, 'logical device')}{job.precision.suffix}"
        asked = (plural(streams, "stream"),)
        variants.append(Variant(label, TENSORFLOW, replace(job, ids=ids, streams=streams), asked=asked))
    if request.place is not None:
        variants.append(_placed(job, request.place))
    return [*variants, *switched(variants, request)]


def _over(job: Job, assignments: Sequence[StreamIds], cluster: ClusterOptions) -> list[Variant]:
    """A cluster on one of its devices and on several."""
    # What is measured leaves others' variables alone.
    own = replace(job.tensorflow, cluster=replace(cluster, container=None))
    variants = []
    for streams, ids in [(1, job.ids), *((streams, ids) for streams, ids, _ in assignments)]:
        if streams > len(cluster.devices):
            continue  # a graph's own ids, on a cluster of one device
        on = plural(streams, "stream")
        over = replace(job, ids=ids, streams=streams, tensorflow=own)
        variants.append(
            Variant(
                f"TensorFlow on the cluster, {on}",
                TENSORFLOW,
                over,
                f"TensorFlow, 1 stream{job.precision.suffix}",
                asked=(on,),
            )
        )
    return variants


def switched(variants: Sequence[Variant], request: RunRequest) -> list[Variant]:
    """A row for each of NVIDIA's switches that is on: of the most logical devices, or of as many as it says something of.

    Raises:
        EngineError: There is no row with as many.
    """
    found = []
    for name, options in request.tensorflow.switches.items():
        wanted = len(options.priorities or options.limits)
        of = next((one for one in reversed(variants) if wanted in (0, one.job.streams)), None)
        if of is None:
            raise EngineError(
                f"{name}: that is {plural(wanted, 'logical device')}, and no row has as many",
                fix=f"ask for them: --engine tensorflow --streams {wanted}",
            )
        job = replace(of.job, tensorflow=replace(options, devices=of.job.tensorflow.devices))
        found.append(Variant(f"{of.label}, {name}", OWN_PROCESS, job, of.label, optional=True))
    return found


def mixed(plain: Variant) -> list[Variant]:
    """TensorFlow's row with its own mixed precision, which is float16 on a GPU."""
    job = replace(plain.job, precision=Precision.FP16)
    return [Variant(f"{plain.label}, mixed precision", TENSORFLOW, job, plain.label, optional=True)]


def _placed(job: Job, place: str | Function) -> Variant:
    """The model with each node on the device that a function or a file gives it."""
    if isinstance(place, str):
        name, function = place, _named(place)
    else:
        name, function = getattr(place, "__qualname__", "a function"), place
    with calling(name):
        found = places(job.flat, function, name)
    own = replace(job.tensorflow, devices=found.devices)
    placed = replace(job, ids=found.ids, streams=len(found.devices), tensorflow=own)
    return Variant(f"TensorFlow, placed by {name}", TENSORFLOW, placed)


def _named(place: str) -> Function:
    """The function of a ``module:function``, or one that looks nodes up in a file."""
    if os.path.lexists(place):
        devices = _devices(place)
        return lambda node: devices.get(node.name)
    if not is_function(place):
        raise MsplitError(f"{place!r} is no file and names no function", where="--place", fix=_FIX)
    return imported(place, "that gives a node its device")


def _devices(path: str) -> dict[str, str]:
    """Node -> device, as the file says."""
    data = JsonValue.read(path, _MOST_BYTES, what="placement", fix=_FIX).object(("schema_version", "devices"))
    return {name: device.text() for name, device in data.at("devices").entries()}
