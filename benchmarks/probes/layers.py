import sys, statistics as st, time, traceback

sys.path.insert(0, "benchmarks")
from pathlib import Path
import models
from msplit import api, rules
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.inputs.make import make_inputs
import numpy as np

graphs = Path(sys.argv[1])
combos = [(0, 0), (0, 1), (1, 0), (1, 1)] if len(sys.argv) < 4 else eval(sys.argv[3])
for item in sys.argv[2].split(","):
    name, _, b = item.partition(":")
    batch = int(b or models.BATCHES[name][-1])
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), name, batch))
    sizes, costs = price(flat, batch=batch)
    feeds = make_inputs(flat, {}, batch=batch, seed=0)
    ref = None
    ids = {s: api.assign(flat, rules.load(models.RULES[name], streams=s), priced=(sizes, costs)).ids for s in (1, 8)}
    for fuse, group in combos:
        eng = CudaEngine()
        out = []
        t = time.time()
        try:
            for s in (1, 8):
                ex = eng.build(
                    Job(flat=flat, ids=ids[s], streams=s, feeds=feeds, costs=costs, options={"fuse": bool(fuse), "group": bool(group)})
                )
                r = ex.step(feeds)
                if ref is None:
                    ref = r
                err = max(float(np.max(np.abs(r[k].astype(np.float64) - ref[k]))) if r[k].size else 0 for k in ref)
                ex.device_times(20)
                d = st.median(ex.device_times(40)) * 1e6
                a = []
                for _ in range(40):
                    q = time.perf_counter()
                    ex.step(feeds)
                    a.append(time.perf_counter() - q)
                f = ex.facts()
                out.append(f"{s}: {d:.0f}/{st.median(a) * 1e6:.0f} k{f['kernels']} err {err:.1e} MB {f['weight_bytes'] / 1e6:.0f}")
                ex.close()
            print(name, batch, f"fuse={fuse} group={group}", " | ".join(out), f"{time.time() - t:.1f}s", flush=True)
        except Exception as e:
            print(name, batch, f"fuse={fuse} group={group} FAILED {type(e).__name__} {str(e)[:300]}")
            traceback.print_exc(file=open(sys.argv[4] if len(sys.argv) > 4 else "/tmp/err", "a"))
