import sys, statistics as st, time

sys.path.insert(0, "benchmarks")
from pathlib import Path
import models
from msplit import api, rules
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.autotune import tuner as contest, convolutions
from msplit.inputs.make import make_inputs

graphs = Path(sys.argv[1])
ms = contest.milliseconds


def both(n, m=0.97):
    return lambda a, b: all(ms(a, l) < m * ms(b, l) for l in (1, n))


def geo(n, m=0.95):
    return lambda a, b: (ms(a, 1) / ms(b, 1)) * (ms(a, n) / ms(b, n)) < m * m


P = convolutions.PARTS
rules_ = {
    "none": (P, lambda a, b: False),
    "nosplit both8": ((), both(8)),
    "both8": (P, both(8)),
    "both4": (P, both(4)),
    "both2": (P, both(2)),
    "geo4": (P, geo(4)),
    "geo8": (P, geo(8)),
    "alone": (P, both(1)),
}
import collections

for name in sys.argv[2].split(","):
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), name, 1))
    sizes, costs = price(flat, batch=1)
    feeds = make_inputs(flat, {}, batch=1, seed=0)
    ids = {s: api.assign(flat, rules.load(models.RULES[name], streams=s), priced=(sizes, costs)).ids for s in (1, 4, 8)}
    for label, (parts, rule) in rules_.items():
        convolutions._chosen.clear()
        t = time.time()
        convolutions.PARTS = parts
        contest.beats = rule
        eng = CudaEngine()
        exs = {}
        for s in (1, 4, 8):
            exs[s] = eng.build(Job(flat=flat, ids=ids[s], streams=s, feeds=feeds, costs=costs))
            exs[s].step(feeds)
        tt = time.time() - t
        d = {s: [] for s in exs}
        for _ in range(3):
            for s, ex in exs.items():
                d[s] += ex.device_times(25)[5:]
        c = collections.Counter(v[-1] for v in convolutions._chosen.values() if v)
        print(
            name,
            label,
            exs[1].facts()["layout"],
            f"{dict(c)}/{len(convolutions._chosen)}",
            " | ".join(f"{s}: {st.median(v) * 1e6:.0f}" for s, v in d.items()),
            f"{tt:.1f}s",
            flush=True,
        )
        for ex in exs.values():
            ex.close()
