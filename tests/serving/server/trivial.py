"""A server of a model that takes no time, unless it is asked to: `python -m tests.serving.server.trivial PORT REST [KEY=VALUE …]`.

Doubles numbers. A row that begins with 1000 takes 0.3 s; one that begins with 2000 fails as nothing in msplit does; at one that begins
with 3000 the GPU fails, and at one that begins with 4000 it takes 0.3 s to do so: from then on every step fails, as it is with CUDA. A row
that begins with 5000 is one that the model can not take.

Keys: ``until``, a file whose model is opened when it is there; ``lame_duck``, ``access`` and ``fronts`` as of `run.Listening`, the last
with steps in a process of their own; ``log``, text or json; ``tokens`` and ``tls``, files of `access.Tokens` and `access.Certificates`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from msplit.errors import DeviceLost, EngineError, InvalidInput
from msplit.progress import Progress, silent
from msplit.serving.pool import making
from msplit.serving.pool.pool import About, Pool
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.slots import SimulatedSlot, StepSlot
from msplit.serving.server import access, logs, run
from msplit.serving.server.models import Models, Status, Version, VersionState, signature_of
from tests import forked

BATCHES = (1, 4)
WIDTH = 8
SLOW, BROKEN, LOST, LOST_SLOWLY, WRONG = 1000.0, 2000.0, 3000.0, 4000.0, 5000.0
MOST = 6
"""Requests that may wait."""


FAULTS: list[Exception] = []


def step(feeds: Any) -> Any:
    x = feeds["x"]
    if (x[:, 0] == LOST_SLOWLY).any():
        time.sleep(0.3)
    if FAULTS or (x[:, 0] == LOST).any() or (x[:, 0] == LOST_SLOWLY).any():
        import torch

        FAULTS.append(
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors")
        )
        # As a step says it that is launched op by op.
        raise EngineError("MatMul failed", fix="report a bug in msplit") from FAULTS[0]
    if (x[:, 0] == WRONG).any():
        raise InvalidInput("GatherV2 failed: index out of range in self", fix="check the inputs (--shape)")
    if (x[:, 0] == BROKEN).any():
        raise RuntimeError("the key is under /home/mat")
    if (x[:, 0] == SLOW).any():
        time.sleep(0.3)
    return {"y": 2 * x, "first": x[:, 0]}


def pool() -> Pool:
    dtypes = {"x": np.dtype(np.float32)}
    ports = Ports(dtypes, {rows: {"x": (rows, WIDTH)} for rows in BATCHES}, ({"x": 1}, {"y": 1, "first": 1}))
    slot = SimulatedSlot(StepSlot(dict.fromkeys(BATCHES, step), ports))
    outputs = {"y": Port("float32", (None, WIDTH)), "first": Port("float32", (None,))}
    return Pool(ports, [(0, slot)], PoolSettings(groups=1, max_queue=MOST), About("double", outputs, (), (), {}))


def pool_there(tell: Progress) -> Pool:
    del tell
    return pool()


def pool_of_a_process() -> Pool:
    from tests.serving.server import trivial  # that process knows no `__main__` of this one

    settings = PoolSettings(groups=1, max_queue=MOST)
    return making.make_processes(lambda *_: trivial.pool_there, ["cpu:0"], settings, silent, together=True)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    port, rest = map(int, sys.argv[1:3])
    told = dict(text.split("=", 1) for text in sys.argv[3:])
    numbers = {name: float(told[name]) for name in ("lame_duck", "access") if name in told}
    proofs = {
        "tokens": access.Tokens(Path(told["tokens"])) if "tokens" in told else None,
        "certificates": access.Certificates(Path(told["tls"])) if "tls" in told else None,
    }
    where = run.Listening(port=port, rest_port=rest, grace=5.0, fronts=int(told.get("fronts", 1)), **numbers, **proofs)
    logging = logs.logging_to(say, as_json=told["log"] == "json") if "log" in told else contextlib.nullcontext()
    make = pool if where.fronts == 1 else pool_of_a_process
    with forked.instead(forked.TENSORFLOW), logging, make() as made, run.held(where) as ports:
        models, only = (
            Models({}, opening=["double"], statuses={"double": {1: Status(VersionState.LOADING)}}),
            signature_of(made, None),
        )
        try:
            with run.answering(models, where, ports) as server:
                say("listening:")
                while "until" in told and not os.path.exists(told["until"]):
                    time.sleep(0.01)
                models.versions, models.opening = {"double": {1: Version("double", 1, {only.name: only})}}, ()
                server.wait(lambda: say("ready:"))
        except DeviceLost as problem:
            say(str(problem))
            sys.exit(2)


if __name__ == "__main__":
    main()
