import sys, statistics as st, time, tempfile, functools
sys.path.insert(0, "benchmarks")
from pathlib import Path
import models, torch
from msplit import api, rules
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.autotune import tuner as contest, convolutions, in_place, sibling_contest
from msplit.inputs.make import make_inputs
graphs = Path(sys.argv[1])
write = in_place.write_in_place
new = convolutions._winner
M = contest.MARGIN
def make(first_only, load):
    def winner(op, arguments, turned, lowered):
        library = lowered(op)
        expected = library(*arguments)[0]
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        data, filter, *rest = arguments
        results = int(filter.shape[3])
        found = []
        for tiles in convolutions.candidates(data, filter, expected.numel() // max(results, 1), [results]):
            call = functools.partial(lowered(convolutions._tiled(op, tiles)), data, turned, *rest)
            if float((call()[0] - expected).abs().max()) <= convolutions.SAME * largest:
                found.append((contest.milliseconds(call), tiles, call))
        alone, loaded = (contest.milliseconds(lambda: library(*arguments), n) for n in (1, contest.LANES))
        for t, tiles, call in sorted(found, key=lambda o: o[0]):
            if t >= M * alone: break
            if contest.milliseconds(call, contest.LANES) < load * loaded: return tiles
            if first_only: break
        return None
    return winner
RULES = {"new": new, "any .97": make(False, .97), "first .97": make(True, .97), "any .8": make(False, .8)}
plans = [(r, i) for i in (True, False) for r in RULES]
for name in ("googlenet", "inception_v3"):
    flat = api.load(models.fill(graphs, Path(tempfile.gettempdir()) / "msplit-models", name, 1))
    sizes, costs = price(flat, batch=1)
    feeds = make_inputs(flat, {}, batch=1, seed=0)
    ids = {s: api.assign(flat, rules.load(models.RULES[name], streams=s), priced=(sizes, costs)).ids for s in (1, 4, 8)}
    exs, ways = {}, {}
    for rule, ip in plans:
        if name == "inception_v3" and not ip and rule != "first .97": continue
        t = time.time()
        convolutions._chosen.clear()
        convolutions._winner = RULES[rule]
        in_place.write_in_place = write if ip else (lambda program, source, device: program)
        eng = CudaEngine()
        for label, options in (("plain", {}), ("grouped", {"fuse": True, "group": True})):
            if label == "plain" and not ip: continue
            for s in (1, 4, 8):
                ex = eng.build(Job(flat, ids[s], s, feeds, options=options, costs=costs)); ex.step(feeds)
                exs[rule, ip, label, s] = ex
        tiled = sum(v is not None for v in convolutions._chosen.values())
        print(name, rule, "in place" if ip else "", f"{tiled}/{len(convolutions._chosen)} tiled, {time.time()-t:.1f} s", flush=True)
    d = {k: [] for k in exs}
    import random
    order = list(exs)
    for _ in range(6):
        random.shuffle(order)
        for k in order: d[k] += exs[k].device_times(30)[5:]
    for rule, ip in plans:
        for label in ("plain", "grouped"):
            row = [f"{s}: {st.median(d[rule, ip, label, s])*1e6:.1f}" for s in (1, 4, 8) if (rule, ip, label, s) in d]
            if row: print(name, rule, "in place" if ip else "copied", label, " | ".join(row), flush=True)
    for ex in exs.values(): ex.close()
