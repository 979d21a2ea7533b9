import torch, numpy as np, time, statistics as st, triton, triton.language as tl

dev = torch.device("cuda")
torch.cuda.init()


def med(f, n=300, w=50):
    for _ in range(w):
        f()
    t = []
    for _ in range(n):
        a = time.perf_counter()
        f()
        t.append(time.perf_counter() - a)
    return st.median(t) * 1e6


class View:
    def __init__(s, ptr, n):
        s.__cuda_array_interface__ = {"data": (ptr, False), "shape": (n,), "typestr": "<i4", "version": 3}


def mapped(host):
    return torch.as_tensor(View(host.data_ptr(), host.numel() // 4), device=dev)


@triton.jit
def cp(src, dst, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(dst + i, tl.load(src + i, mask=m), mask=m)


def kcopy(s, d, B=1024):
    cp[(triton.cdiv(s.numel(), B),)](s, d, s.numel(), B=B, num_warps=4)


def cap(body):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        body()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s, capture_error_mode="relaxed"):
        body()
    return g


small = torch.zeros(1024, device=dev)


def run(g):
    cs = torch.cuda.current_stream()

    def f():
        g.replay()
        cs.synchronize()

    return med(f)


base = cap(lambda: small.add_(1))
print("1 kernel", run(base))
print("2 kernels", run(cap(lambda: (small.add_(1), small.add_(1)))))
for kb in (1, 16, 40, 64, 256, 1024, 4096):
    n = kb * 1024 // 4
    h = torch.zeros(n * 4, dtype=torch.uint8).pin_memory()
    d = torch.zeros(n * 4, dtype=torch.uint8, device=dev)
    hi = mapped(h)
    di = d.view(torch.int32)
    a = run(cap(lambda: (d.copy_(h, non_blocking=True), small.add_(1))))
    b = run(cap(lambda: (kcopy(hi, di), small.add_(1))))
    b2 = run(cap(lambda: (kcopy(hi, di, 256), small.add_(1))))
    b3 = run(cap(lambda: (kcopy(hi, di, 4096), small.add_(1))))
    c = run(cap(lambda: (small.add_(1), h.copy_(d, non_blocking=True))))
    e = run(cap(lambda: (small.add_(1), kcopy(di, hi))))
    src = np.random.bytes(n * 4)
    src = np.frombuffer(bytearray(src), np.uint8)
    hn = h.numpy()
    m1 = med(lambda: np.copyto(hn, src))
    th = torch.from_numpy(src)
    m2 = med(lambda: h.copy_(th))
    i64 = src.view(np.int64)
    hn64 = hn.view(np.int64)
    m3 = med(lambda: np.copyto(hn64, i64))
    rd = med(lambda: hn.copy())
    rd2 = med(lambda: hn64.copy())
    print(
        f"{kb} KB: H2D memcpy {a:.1f} kernel {b:.1f}/{b2:.1f}/{b3:.1f} | D2H memcpy {c:.1f} kernel {e:.1f} | fill np {m1:.1f} i64 {m3:.1f} torch {m2:.1f} | read {rd:.1f} {rd2:.1f}"
    )
h = [torch.zeros(512, dtype=torch.uint8).pin_memory() for _ in range(4)]
d = [torch.zeros(512, dtype=torch.uint8, device=dev) for _ in range(4)]
for k in (1, 2, 4):
    print("D2H nodes", k, run(cap(lambda: (small.add_(1), [h[i].copy_(d[i], non_blocking=True) for i in range(k)]))))
# flag polling
flag = torch.zeros(64, dtype=torch.uint8).pin_memory()
fm = mapped(flag)
fn = flag.numpy().view(np.int32)


@triton.jit
def fl(dst, cnt):
    c = tl.load(cnt) + 1
    tl.store(cnt, c)
    tl.atomic_xchg(dst, c, sem="release", scope="sys")


cnt = torch.zeros(1, dtype=torch.int32, device=dev)
g = cap(lambda: (small.add_(1), fl[(1,)](fm, cnt)))


def poll():
    was = int(fn[0])
    g.replay()
    while fn[0] == was:
        pass


torch.cuda.synchronize()
print("poll flag", med(poll))
cs = torch.cuda.current_stream()
print("same graph, sync", run(g))
print("replay alone", med(lambda: g.replay(), 200))
torch.cuda.synchronize()
# python pack of 40 inputs
src = [np.random.randint(0, 9, (128, 1)) for _ in range(40)]
out = np.zeros(40 * 128, np.int64)
o2 = out.reshape(-1, 1)
print("concat ravel", med(lambda: np.concatenate([s.ravel() for s in src], out=out)), "direct", med(lambda: np.concatenate(src, out=o2)))
print(
    "shapes",
    med(lambda: [s.shape for s in src] == [s.shape for s in src]),
    "dtype any",
    med(lambda: any(s.dtype != out.dtype for s in src)),
    "dtype list",
    med(lambda: [s.dtype for s in src] == [s.dtype for s in src]),
)
