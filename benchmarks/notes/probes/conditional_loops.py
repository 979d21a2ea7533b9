"""Times a loop of a small LSTM cell that stops by a value on the device: masked turns up to the bound, beside conditional nodes.

Everything is captured by the driver's API through ctypes. Results are held against a loop of the host. A table comes last.
"""

import ctypes as C
import glob
import os
import sys

import torch

UNITS, TURNS, STOPS, REPLAYS = 256, 100, (0, 10, 50, 100), 60
CHUNK = 10

SOURCE = r"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

__device__ inline float sig(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline void lstm(const float* g, float c, int n, int at, float* cn, float* hn) {
    float i = sig(g[at]), j = tanhf(g[n + at]), f = sig(g[2 * n + at] + 1.0f), o = sig(g[3 * n + at]);
    *cn = c * f + i * j;
    *hn = tanhf(*cn) * o;
}
// One turn, in place.
extern "C" __global__ void cell(const float* g, float* c, float* h, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) { float a, b; lstm(g, c[at], n, at, &a, &b); c[at] = a; h[at] = b; }
}
// One turn that goes on from the turn before, and chooses what the loop gives beside that.
extern "C" __global__ void masked(const float* g, float* c, float* h, float* rc, float* rh, const int* stop, int turn, int n) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) {
        float a, b; lstm(g, c[at], n, at, &a, &b); c[at] = a; h[at] = b;
        bool active = turn < *stop;
        rc[at] = active ? a : rc[at]; rh[at] = active ? b : rh[at];
    }
}
extern "C" __global__ void begin(unsigned long long handle, int* count, const int* stop) {
    *count = 0; cudaGraphSetConditional(handle, 0 < *stop);
}
extern "C" __global__ void next(unsigned long long handle, int* count, const int* stop, int by) {
    *count += by; cudaGraphSetConditional(handle, *count < *stop);
}
extern "C" __global__ void decide(unsigned long long handle, const int* flag) { cudaGraphSetConditional(handle, *flag != 0); }
"""

cuda = C.CDLL("libcuda.so.1")
VOID, U64 = C.c_void_p, C.c_uint64


def ok(result, what):
    if result:
        text = C.c_char_p()
        cuda.cuGetErrorString(result, C.byref(text))
        raise RuntimeError(f"{what}: {result} {text.value}")


def pick(*names):
    """The first of some functions of the driver that is there."""
    for name in names:
        if hasattr(cuda, name):
            return getattr(cuda, name)
    raise RuntimeError(f"the driver has none of {names}")


def library(pattern):
    """A library in PyTorch's environment, or the system's."""
    roots = [p for p in sys.path if os.path.isdir(p)]
    found = [f for root in roots for f in glob.glob(f"{root}/nvidia/**/{pattern}", recursive=True)]
    found += glob.glob(f"/usr/local/cuda*/**/{pattern}", recursive=True)
    return found


def ptx():
    """The kernels as PTX; NVRTC may declare cudaGraphSetConditional itself."""
    try:
        return compiled(SOURCE)
    except RuntimeError as problem:
        print(f"with an own declaration: {problem}")
        return compiled(SOURCE.replace(SOURCE.splitlines()[1], ""))


def compiled(source):
    names = [*(f for f in library("libnvrtc.so*") if "builtins" not in f), "libnvrtc.so.13", "libnvrtc.so"]
    nvrtc = None
    for name in names:
        try:
            nvrtc = C.CDLL(name)
            break
        except OSError:
            continue
    if nvrtc is None:
        raise RuntimeError("no NVRTC")
    program = VOID()
    if nvrtc.nvrtcCreateProgram(C.byref(program), source.encode(), b"cond.cu", 0, None, None):
        raise RuntimeError("nvrtcCreateProgram")
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=compute_{major}{minor}".encode(), b"--relocatable-device-code=true"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (C.c_char_p * len(options))(*options))
    size = C.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, C.byref(size))
        log = C.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.value.decode())
    nvrtc.nvrtcGetPTXSize(program, C.byref(size))
    text = C.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    return text


def load(text):
    """The module, without cudadevrt where the driver knows the function, else linked with it."""
    module = VOID()
    result = cuda.cuModuleLoadData(C.byref(module), text)
    if not result:
        print("the driver loads cudaGraphSetConditional without cudadevrt")
        return module
    print(f"without cudadevrt: error {result}; linking with it")
    archive = library("libcudadevrt.a")
    if not archive:
        raise RuntimeError("no libcudadevrt.a")
    state, image, size = VOID(), VOID(), C.c_size_t()
    ok(pick("cuLinkCreate_v2", "cuLinkCreate")(0, None, None, C.byref(state)), "cuLinkCreate")
    ok(pick("cuLinkAddData_v2")(state, 1, text, C.c_size_t(len(text)), b"cond.ptx", 0, None, None), "cuLinkAddData")
    ok(pick("cuLinkAddFile_v2")(state, 4, archive[0].encode(), 0, None, None), "cuLinkAddFile")
    ok(cuda.cuLinkComplete(state, C.byref(image), C.byref(size)), "cuLinkComplete")
    ok(cuda.cuModuleLoadData(C.byref(module), image), "cuModuleLoadData")
    return module


class Conditional(C.Structure):
    _fields_ = [("handle", U64), ("type", C.c_int), ("size", C.c_uint), ("graphs", C.POINTER(VOID)), ("context", VOID)]


class Params(C.Structure):
    _fields_ = [
        ("type", C.c_int),
        ("r0", C.c_int * 3),
        ("conditional", Conditional),
        ("rest", C.c_char * (232 - 32)),
        ("r2", C.c_longlong),
    ]


assert C.sizeof(Conditional) == 32
assert C.sizeof(Params) == 256
IF, WHILE, RELAXED = 0, 1, 2


class Capture:
    """A graph that is recorded from a stream, and the nodes inside of it."""

    def __init__(self, stream):
        self.stream = stream
        ok(pick("cuStreamBeginCapture_v2")(VOID(stream.cuda_stream), RELAXED), "cuStreamBeginCapture")

    def info(self):
        status, number, graph, deps, edges, count = C.c_int(), U64(), VOID(), C.POINTER(VOID)(), VOID(), C.c_size_t()
        ok(
            pick("cuStreamGetCaptureInfo_v3")(
                VOID(self.stream.cuda_stream),
                C.byref(status),
                C.byref(number),
                C.byref(graph),
                C.byref(deps),
                C.byref(edges),
                C.byref(count),
            ),
            "cuStreamGetCaptureInfo",
        )
        return graph, deps, edges, count

    def handle(self, context):
        graph, *_ = self.info()
        found = U64()
        ok(cuda.cuGraphConditionalHandleCreate(C.byref(found), graph, context, 0, 1), "cuGraphConditionalHandleCreate")
        return found

    def node(self, kind, handle, context, side, body):
        """Adds a conditional node behind what was recorded, with what `body` issues on the side stream inside."""
        graph, deps, edges, count = self.info()
        params = Params(type=13)
        params.conditional = Conditional(handle, kind, 1, None, context)
        node = VOID()
        ok(pick("cuGraphAddNode_v2")(C.byref(node), graph, deps, edges, count, C.byref(params)), "cuGraphAddNode")
        inner = VOID(params.conditional.graphs[0])
        ok(
            cuda.cuStreamBeginCaptureToGraph(VOID(side.cuda_stream), inner, None, None, C.c_size_t(0), RELAXED),
            "cuStreamBeginCaptureToGraph",
        )
        with torch.cuda.stream(side):
            body()
        ended = VOID()
        ok(cuda.cuStreamEndCapture(VOID(side.cuda_stream), C.byref(ended)), "cuStreamEndCapture of the body")
        nodes = (VOID * 1)(node)
        ok(
            pick("cuStreamUpdateCaptureDependencies_v2")(VOID(self.stream.cuda_stream), nodes, None, C.c_size_t(1), 1),
            "cuStreamUpdateCaptureDependencies",
        )

    def end(self):
        graph, executable = VOID(), VOID()
        ok(cuda.cuStreamEndCapture(VOID(self.stream.cuda_stream), C.byref(graph)), "cuStreamEndCapture")
        ok(cuda.cuGraphInstantiateWithFlags(C.byref(executable), graph, U64(0)), "cuGraphInstantiate")
        return executable


def main():
    torch.zeros(1, device="cuda")
    torch.manual_seed(0)
    context = VOID()
    ok(cuda.cuCtxGetCurrent(C.byref(context)), "cuCtxGetCurrent")
    module, kernels = load(ptx()), {}
    for name in ("cell", "masked", "begin", "next", "decide"):
        kernels[name] = VOID()
        ok(cuda.cuModuleGetFunction(C.byref(kernels[name]), module, name.encode()), name)

    def launch(name, threads, *values):
        held = [
            VOID(v.data_ptr()) if isinstance(v, torch.Tensor) else v if isinstance(v, U64) else C.c_int(v)
            for v in values
        ]
        pointers = (VOID * len(held))(*(C.cast(C.byref(v), VOID) for v in held))
        blocks, size = (threads + 127) // 128, min(threads, 128)
        stream = VOID(torch.cuda.current_stream().cuda_stream)
        ok(cuda.cuLaunchKernel(kernels[name], blocks, 1, 1, size, 1, 1, 0, stream, pointers, None), name)

    gpu = {"device": "cuda", "dtype": torch.float32}
    weights, start = torch.randn(UNITS, 4 * UNITS, **gpu) / UNITS**0.5, torch.randn(1, UNITS, **gpu)
    gates = torch.empty(1, 4 * UNITS, **gpu)
    c, h, rc, rh = (torch.empty(1, UNITS, **gpu) for _ in range(4))
    count, stop = torch.zeros(1, device="cuda", dtype=torch.int32), torch.zeros(1, device="cuda", dtype=torch.int32)
    main_stream, side = torch.cuda.Stream(), torch.cuda.Stream()

    def turn():
        torch.mm(h, weights, out=gates)
        launch("cell", UNITS, gates, c, h, UNITS)

    def reset():
        for one in (c, h):
            one.copy_(start)

    for stream in (main_stream, side):  # cuBLAS gets its workspaces
        with torch.cuda.stream(stream):
            reset()
            turn()
    torch.cuda.synchronize()
    expected = {}
    for stops in STOPS:
        reset()
        for _ in range(stops):
            turn()
        torch.cuda.synchronize()
        expected[stops] = h.clone()

    def by_masks():
        capture = Capture(main_stream)
        reset()
        rc.copy_(start)
        rh.copy_(start)
        for number in range(TURNS):
            torch.mm(h, weights, out=gates)
            launch("masked", UNITS, gates, c, h, rc, rh, stop, number, UNITS)
        return capture.end(), rh

    def by_while(by):
        def make():
            capture = Capture(main_stream)
            reset()
            handle = capture.handle(context)
            launch("begin", 1, handle, count, stop)

            def body():
                for _ in range(by):
                    turn()
                launch("next", 1, handle, count, stop, by)

            capture.node(WHILE, handle, context, side, body)
            return capture.end(), h

        return make

    def by_ifs():
        """Chunks of turns, each in an IF."""
        capture = Capture(main_stream)
        reset()
        for first in range(0, TURNS, CHUNK):
            handle = capture.handle(context)
            launch("decide", 1, handle, flags[first // CHUNK])
            capture.node(IF, handle, context, side, lambda: [turn() for _ in range(CHUNK)])
        return capture.end(), h

    flags = torch.zeros(TURNS // CHUNK, 1, device="cuda", dtype=torch.int32)

    def plain():
        capture = Capture(main_stream)
        reset()
        for _ in range(TURNS):
            turn()
        return capture.end(), h

    ways = {
        "masked turns": (by_masks, 1),
        "WHILE, 1 turn": (by_while(1), 1),
        f"WHILE, {CHUNK} turns": (by_while(CHUNK), CHUNK),
        f"IF per {CHUNK} turns": (by_ifs, CHUNK),
        "unrolled, never stops": (plain, TURNS),
    }
    rows = []
    for name, (make, grain) in ways.items():
        try:
            with torch.cuda.stream(main_stream):
                graph, result = make()
        except RuntimeError as problem:
            rows.append((name, [f"failed: {problem}"]))
            break  # a capture may still be open
        cells = []
        for stops in STOPS:
            if stops % grain:
                cells.append("-")
                continue
            stop.fill_(stops)
            flags.copy_((torch.arange(0, TURNS, CHUNK, device="cuda", dtype=torch.int32) < stops).int().unsqueeze(1))
            torch.cuda.synchronize()
            run = lambda: ok(cuda.cuGraphLaunch(graph, VOID(main_stream.cuda_stream)), "cuGraphLaunch")  # noqa: B023, E731
            run()
            torch.cuda.synchronize()
            right = torch.allclose(result, expected[stops], rtol=1e-3, atol=1e-4)
            times = []
            for _ in range(REPLAYS):
                one, other = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                one.record(main_stream)
                run()
                other.record(main_stream)
                torch.cuda.synchronize()
                times.append(1000 * one.elapsed_time(other))
            times.sort()
            cells.append(f"{times[REPLAYS // 2]:8.1f} ({times[0]:.1f})" + ("" if right else " WRONG"))
        rows.append((name, cells))
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda)
    print(f"LSTM cell of {UNITS} units, batch 1, bound {TURNS}; us by events: median (least) of {REPLAYS}")
    print(f"{'':24}" + "".join(f"{f'stops after {stops}':>24}" for stops in STOPS))
    for name, cells in rows:
        print(f"{name:24}" + "".join(f"{cell:>24}" for cell in cells))


main()
