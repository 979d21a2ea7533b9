"""Random networks and train steps on simulated streams and GPUs: every plan is proved, and outputs and variables are TensorFlow's.

A network is divided over two to four GPUs, node by node at random, which is the worst that an assignment can do; a train step has several
streams of one. The second checker takes the plan, for the graph's order and for what is written in place, and refuses it with any one
wait taken out; each GPU has a memory of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.case import Result

WAITS = 4
"""Waits that are taken out, each alone."""


@dataclass(frozen=True)
class Divided:
    """A network, or a train step, and where it runs.

    Attributes:
        name: Says how to make it again.
        seed: Of the network.
        trains: Whether it is a train step, on one GPU.
        gpus, streams: How many of each, streams for each GPU.
        fuse, group: Whether larger kernels are made.
    """

    name: str
    seed: int
    trains: bool
    gpus: int
    streams: int
    fuse: bool
    group: bool


def make(seed: int) -> Divided:
    """One of them."""
    random = Random(f"networks:{seed}")
    trains = random.random() < 0.3
    gpus = 1 if trains else random.randint(2, 4)
    streams = random.randint(2, 5) if trains else random.randint(1, 3)
    return Divided(
        f"networks:{seed}", seed, trains, gpus, streams, fuse=random.random() < 0.4, group=random.random() < 0.5
    )


def run(case: Divided, folder: Path) -> Result:
    """Compiles it, proves the plan, and runs it."""
    del folder
    start = time.process_time()
    try:
        problem = _train(case) if case.trains else _infer(case)
    except Exception as escaped:
        problem = f"{type(escaped).__name__} escaped: {escaped}"
    return Result(problem, seconds=time.process_time() - start)


def _infer(case: Divided) -> str:
    from msplit.verify.compare import compare
    from tests.networks import WITHIN, answers, network, tolerances

    one = network(case.seed)
    expected = answers(one)
    executable, feeds, problem = _built(case, one, one.outputs, {})
    if problem:
        return problem
    for _ in range(2):
        found = executable.step(feeds)
    found = {name.partition(":")[0]: value for name, value in found.items()}
    how = compare(found, expected, tolerance=WITHIN)
    if not how.passed:
        how = compare(found, expected, tolerance=WITHIN, carried=tolerances(one, expected))
    wrong = how.describe()
    return wrong and f"{wrong} ({', '.join(one.blocks)})"


def _train(case: Divided) -> str:
    from tests.networks import STEPS, WITHIN, state_tolerances, training
    from tests.training_graphs import apart

    one = training(case.seed)
    executable, feeds, problem = _built(case, one, ("loss", "train"), one.state)
    if problem:
        return problem
    for _ in range(STEPS):
        executable.step(feeds)
    saved = executable.save_state()
    wanted = {name: value for name, value in one.after.items() if name in saved}  # the others have no part in the step
    away = apart({name: saved[name] for name in wanted}, wanted)
    if max(away.values()) <= WITHIN:
        return ""
    most = state_tolerances(one)
    far = {name: value for name, value in away.items() if value > most.get(name, WITHIN)}
    worst = max(far, key=lambda name: far[name], default="")
    return f"{worst} is {far[worst]:g} away ({', '.join(one.blocks)})" if far else ""


def _built(case: Divided, one: Any, outputs: tuple[str, ...], state: dict[str, Any]) -> tuple[Any, Any, str]:
    """What runs it, what it is fed, and what is wrong with its plan."""
    from msplit.engines.cuda.engine import ENGINE
    from msplit.opset import schema
    from tests.engines.cuda.cases import flat_of, job, scattered

    flat = flat_of(schema.graph_pb2.GraphDef.FromString(one.graph), outputs=outputs)
    feeds = {tensor.name: one.feeds[tensor.name] for tensor in flat.inputs}
    count = case.gpus * case.streams
    split = tuple(range(case.gpus)) if case.gpus > 1 else ()
    ids = scattered(flat, count, case.seed)
    asked = job(flat, feeds, ids, streams=count, split=split, fuse=case.fuse, group=case.group)
    asked = replace(asked, state=state)
    compiled = ENGINE.compile(asked)
    problem = _proved(compiled.program, compiled.plan(asked), Random(case.name))
    captures = not compiled.dynamic
    return ENGINE.build(replace(asked, options=replace(asked.options, capture=captures))), feeds, problem


def _proved(program: Any, plan: Any, random: Random) -> str:
    """What the second checker says of a plan, or does not say of what it should refuse."""
    import numpy as np

    from msplit.schedule.plan_check import check

    found = [*check(plan, program.dag), *check(plan, program.conflicts())]
    if found:
        return f"the plan does not hold: {found[0]}"
    for wait in random.sample(range(len(plan.wait_node)), min(WAITS, len(plan.wait_node))):
        less = replace(plan, wait_node=np.delete(plan.wait_node, wait), wait_on=np.delete(plan.wait_on, wait))
        if not check(less, program.dag):
            return f"without its wait {wait} the plan is taken, too"
    return ""
