import sys, statistics as st, time, collections

sys.path[:0] = ["benchmarks", "../probe"]
from pathlib import Path
import torch, models, numpy as np
from convolution_kernel import conv, CONFIGS
from msplit import api
from msplit.decide.model import price
from msplit.engines.base import Job
from msplit.engines.cuda.runtime.executable import precision
from msplit.engines.cuda.ir.lowering import Node
from msplit.engines.cuda.ir.windows import spatial, windows
from msplit.inputs.make import make_inputs


def gtime(body, reps=20, lanes=1):
    o = torch.cuda.Stream()
    ss = [o] + [torch.cuda.Stream() for _ in range(lanes - 1)]
    for s in ss:
        with torch.cuda.stream(s):
            body()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(g, stream=o, capture_error_mode="relaxed"):
        for s in ss[1:]:
            s.wait_stream(o)
        for s in ss:
            with torch.cuda.stream(s):
                for _ in range(reps):
                    kept.append(body())
        for s in ss[1:]:
            o.wait_stream(s)
    ts = []
    for _ in range(7):
        a = torch.cuda.Event(enable_timing=True)
        b = torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        b.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / reps)
    g.reset()
    return st.median(ts)


graphs = Path(sys.argv[1])
dev = torch.device("cuda")
wins = collections.Counter()
t0 = time.time()
for name in sys.argv[2].split(","):
    flat = api.load(models.fill(graphs, Path("/tmp/msplit-models"), name, 1))
    sizes, costs = price(flat, batch=1)
    feeds = make_inputs(flat, {}, batch=1, seed=0)
    job = Job(flat=flat, ids=np.zeros(len(flat), np.int32), streams=1, feeds=feeds, costs=costs)
    with torch.no_grad(), precision(False):
        from msplit.engines.cuda.compile import lower
        from msplit.engines.cuda.passes.specialize import trace

        low = lower(flat, feeds, dev)
        seen = {}
        vals = {}
        prog = trace(low.source, low.feeds, dev, nchw=False)
        shapes = low.source.shapes
        groups = collections.OrderedDict()
        for s in prog.steps:
            if s.op.op in ("_FusedConv2D", "Conv2D"):
                key = (
                    shapes.get(s.op.inputs[0]),
                    tuple(prog.constants[s.op.inputs[1]].shape),
                    str(s.op.attrs.get("strides")),
                    str(s.op.attrs.get("padding")),
                    str(s.op.attrs.get("fused_ops")),
                )
                groups.setdefault(key, []).append(s)
        tot_lib = tot_best = 0
        rows = []
        for key, steps in groups.items():
            s = steps[0]
            xs, ws = key[0], key[1]
            x = torch.randn(xs, device=dev)
            w = prog.constants[s.op.inputs[1]]
            rest = [prog.constants[k] if k in prog.constants else torch.randn(shapes[k], device=dev) for k in s.inputs[2:]]
            lib = gtime(lambda: s.call(x, w, *rest))
            ref = s.call(x, w, *rest)[0]
            fo = s.op.attrs.get("fused_ops") or ()
            if "Add" in fo:
                continue
            relu = "Relu" in fo
            bias = rest[0] if "BiasAdd" in fo else None
            node = Node(s.op.name, s.op.op, s.op.attrs)
            ones = (1, 1, 1, 1)
            fr = windows(
                node,
                xs[1:3],
                ws[:2],
                spatial(node, node.get("strides", ones), "strides"),
                spatial(node, node.get("dilations", ones), "dilations"),
            )
            wc = w.contiguous()
            res = {}
            for cfg in CONFIGS:
                if cfg[0] * 2 > max(32, ref.shape[1] * ref.shape[2] * 2):
                    continue
                try:
                    f = lambda: conv(x, wc, bias, (fr[0].stride, fr[1].stride), (fr[0].before, fr[1].before), ref.shape[1:3], relu, cfg)
                    err = (f() - ref).abs().max().item() / ref.abs().max().item()
                    if err > 5e-3:
                        rows.append(f"WRONG {key} {cfg} {err}")
                        continue
                    res[cfg] = gtime(f)
                except Exception as e:
                    rows.append(f"ERR {cfg} {str(e)[:80]}")
            if ws[0] == ws[1] == 1 and fr[0].stride == 1 and bias is not None and relu:
                w2 = wc.view(ws[2], ws[3])
                w2t = w2.t().contiguous().t()
                x2 = x.view(-1, ws[2])
                res["mm"] = gtime(lambda: torch._addmm_activation(bias, x2, w2))
                res["mmT"] = gtime(lambda: torch._addmm_activation(bias, x2, w2t))
            best = min(res, key=res.get)
            tot_lib += lib * len(steps)
            tot_best += min(lib, res[best]) * len(steps)
            wins[best if res[best] < lib * 0.97 else "lib"] += len(steps)
            l8 = gtime(lambda: s.call(x, w, *rest), 10, 8)
            if isinstance(best, tuple):
                b8 = gtime(
                    lambda: conv(x, wc, bias, (fr[0].stride, fr[1].stride), (fr[0].before, fr[1].before), ref.shape[1:3], relu, best), 10, 8
                )
            else:
                b8 = 0
            rows.append(
                f"{len(steps)}x {xs[1:]} {ws} s{fr[0].stride} lib {lib:.1f}/{l8:.1f} best {best} {res[best]:.1f}/{b8:.1f} 2nd {sorted(res.items(), key=lambda i: i[1])[1:3]}"
            )
        print(name, f"lib {tot_lib:.0f} best {tot_best:.0f} ({time.time() - t0:.0f}s)", flush=True)
        open(sys.argv[3] + "/convs_" + name + ".txt", "w").write("\n".join(rows))
print(wins)
