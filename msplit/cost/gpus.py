"""Models of GPUs: their data sheets, and the time of a kernel by them.

Data sheets of GPUs, from `msplit/data/gpus.yaml`.

How long a kernel takes: from its work, its grid and what it waits for.

    launches x launch                     what a tiny kernel takes inside a CUDA graph, of the data sheet
    + waiting                             clock cycles in which nothing flows: see below
    + max(chain, flops / (peak x share))  one block's steps, one after the other, or the arithmetic of all
    + bytes / min(bandwidth, blocks x 64 B x clock)

The first two are what small kernels consist of, the last two what large ones come to. `share` is blocks / SMs, at most 1; 64 bytes per
clock is what one SM takes from the L2 cache, so that a few blocks can not draw the whole bandwidth.

The cycles below are no vendor's figures. They were fitted to kernels that were timed alone on an H200 and to steps on one stream of 27
models (float32 as TF32), by `benchmarks/fit_costs.py`. Fitted to one half of the families of 18 models that nothing else was fitted to,
they predict a step of the other half with a median error of 7 %, at most 20 % (`benchmarks/notes`). They are clock cycles because
that is how they carry over to other GPUs: dependent loads, barriers and products take about as many on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import numpy as np

from msplit.core.graph import Floats
from msplit.errors import MsplitError
from msplit.formats.files import JsonValue, read_file

DEFAULT_GPU = "h200"

SM_BYTES_PER_CYCLE = 64
"""Bytes per clock that one multiprocessor can take from the L2 cache (NVIDIA's architecture white papers since Volta)."""

_Positive = Annotated[float, 1e-9]


@dataclass(frozen=True)
class Gpu:
    """A data sheet.

    Attributes:
        name: Its name, as in ``"h200"``.
        sms: Streaming multiprocessors.
        memory_gb: Device memory, 10^9 bytes.
        bandwidth_gbs: Peak memory bandwidth, 10^9 bytes per second.
        l2_mb: L2 cache, 10^6 bytes.
        clock_mhz: Maximum boost clock.
        tflops: Peak 10^12 operations per second by type; see the data file.
        launch_us: Time of a tiny kernel inside a CUDA graph, µs.
        wait_us: What a wait for another stream adds inside a CUDA graph, µs.
        link_gbs: What a copy to another GPU of the host reaches, 10^9 bytes per second, one way.
        link_us: What such a copy takes beyond its bytes, µs.
        other_gpu_us: By how much later each further GPU starts that one thread launches a step on, µs.
    """

    name: str
    sms: Annotated[int, 1]
    memory_gb: _Positive
    bandwidth_gbs: _Positive
    l2_mb: _Positive
    clock_mhz: _Positive
    tflops: Mapping[str, _Positive]
    launch_us: _Positive
    wait_us: _Positive
    link_gbs: _Positive = 25.0
    link_us: _Positive = 18.0
    other_gpu_us: _Positive = 28.0

    @property
    def bytes_per_us(self) -> float:
        """Peak memory bandwidth in bytes per µs."""
        return self.bandwidth_gbs * 1e3

    @property
    def l2_bytes_per_us(self) -> float:
        """Bytes per µs that all multiprocessors can take from the L2 cache."""
        return self.sms * SM_BYTES_PER_CYCLE * self.clock_mhz

    def flops_per_us(self, dtype: str, product: bool = False) -> float:
        """Peak operations per µs.

        Args:
            dtype: As in ``"float32"``.
            product: Whether this is a product or a convolution, which tensor cores run; in float32 they use TF32, TensorFlow's default.
        """
        double = dtype in ("float64", "complex128")
        if not product:
            keys = ["float64" if double else "float32"]
        elif double:
            keys = ["float64_tensor", "float64"]
        elif dtype in ("float32", "complex64"):
            keys = ["tf32"]
        else:
            keys = ["float8", "float16"] if dtype.startswith("float8") else [dtype]
        return next(self.tflops[key] for key in [*keys, "float32"] if key in self.tflops) * 1e6


_OWN: dict[str, Gpu] = {}
"""Data sheets from files of the user's, by name: costs name their GPU, and what simulates them asks for its sheet again."""

_LARGEST = 1 << 16
_LINKS = ("link_gbs", "link_us", "other_gpu_us")
"""Default of a value that a sheet may leave out: it is that of PCIe 4 then."""
_FIX = f"write it as in msplit/data/gpus.yaml: a name, and below it {', '.join(one.name for one in fields(Gpu)[1:])}"


@cache
def _sheets() -> dict[str, Gpu]:
    import yaml

    data = yaml.safe_load(files("msplit").joinpath("data/gpus.yaml").read_text(encoding="utf-8"))
    return {name: Gpu(name=name, **sheet) for name, sheet in data.items()}


def gpu_names() -> tuple[str, ...]:
    """Names of all data sheets that ship with msplit."""
    return tuple(_sheets())


def gpu_title(name: str) -> str:
    """A GPU's name as people write it."""
    return name.upper() if name in _sheets() else name


def is_sheet_file(name: str) -> bool:
    """True if a name of a GPU is one of a file with a data sheet."""
    return name.lower().endswith((".yaml", ".yml"))


def data_sheet(name: str) -> Gpu:
    """The data sheet of a GPU.

    Args:
        name: One of `gpu_names`, a YAML file with one sheet of the user's own, or the name of a sheet that was read from one.

    Raises:
        MsplitError: There is none of that name, and the message lists what there is; or the file is wrong.
    """
    sheets = _sheets()
    found = sheets.get(name.lower()) or _OWN.get(name)
    if found is None and is_sheet_file(name):
        found = _read(Path(name))
        _OWN[found.name] = found
    if found is not None:
        return found
    near = get_close_matches(name.lower(), sheets, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise MsplitError(
        f"there is no data sheet of a GPU called {name!r}{hint}",
        fix=f"choose one of: {', '.join(sheets)}; or name a file (.yaml) with a data sheet of your own",
    )


def _read(path: Path) -> Gpu:
    """The one data sheet of a file.

    Raises:
        MsplitError: The file can not be read, or what it says is no data sheet.
    """
    import yaml

    source = str(path)
    try:
        data = yaml.safe_load(read_file(path, _LARGEST, what="data sheet", fix=_FIX))
    except (yaml.YAMLError, ValueError, RecursionError):
        raise MsplitError("this is not valid YAML", where=source, fix=_FIX) from None
    sheets = JsonValue(data, "data sheet", source, _FIX).entries()
    if len(sheets) != 1:
        raise MsplitError(f"it has {len(sheets)} data sheets; one is wanted", where=source, fix=_FIX)
    ((name, sheet),) = sheets
    found = sheet.to(Gpu, optional=_LINKS, name=f"{name} ({path})")
    known = {key for own in _sheets().values() for key in own.tflops}
    sheet.at("tflops").object(tuple(sorted(known)), optional=known - {"float32"})
    return found


ACCESS = 430.0
"""Memory wait of a grid of at least one full block: one load, one store. A tiny kernel's are part of its launch."""

HALVING = 240.0
"""A reduction halves what is left: exchange among threads, with a barrier."""

WINDOW_STEP = 210.0
"""One element of the window of a depthwise convolution, in a loop with its address and the load."""

ROW_SETUP = 1200.0
"""Extra time of a product with one row or column: sums of threads are put together, bias and activation follow."""

ROW_STEP = 46.0
"""32 summands of it."""

TILE_SETUP = 950.0
"""Extra time of a product in tiles: the pipeline of loads fills, the tile is written."""

TILE_STEP = 205.0
"""32 summands of a tile of 64 x 64. An H200's tensor cores take 138 for them in TF32 at their peak."""

SUMMANDS = 200
"""A sum that is split among blocks leaves each at least so many."""

JOINING = 4700.0
"""To join them."""

GATHERING = 2700.0
"""Extra cost of a convolution with a window over a product of its size."""

NARROW = 0.2
"""Part of the plain peak that a convolution of fewer channels than a tensor core takes at a time reaches."""

COLUMN_STEP = 170.0
"""A reduction over other axes than the last one: one element of a column, up to `COLUMN` of them one after the other."""

COLUMN = 64

COLUMN_HALVING = 1450.0
"""Longer columns are shared by threads and blocks, which put their parts together."""

BROADCAST = 700.0
"""Extra wait of an elementwise kernel with a smaller operand: it reads single elements, not vectors of them."""

REORDERING = 4800.0
"""A batched product's operand is copied first where its matrices do not lie at equal distances."""

REACHED = 0.42
"""Part of the tensor cores' peak that products reach where that is what limits them, with full tiles: more for the largest."""


def halvings(counts: Floats) -> Floats:
    """Cycles of reductions of so many elements to one."""
    result: Floats = HALVING * np.log2(np.maximum(counts, 1.0))
    return result


def kernel_times(
    sheet: Gpu,
    *,
    peak: Floats,
    flops: Floats,
    nbytes: Floats,
    share: Floats,
    waiting: Floats,
    chain: Floats,
    launches: Floats,
) -> Floats:
    """Times of kernels in µs.

    Args:
        sheet: The device.
        peak: Operations per µs that each can reach on the whole device.
        flops: Operations.
        nbytes: Bytes read and written.
        share: Blocks per multiprocessor, at most 1.
        waiting: Clock cycles before and behind the work.
        chain: Clock cycles that one block takes for its part.
        launches: How many kernels it is.
    """
    drawn = np.minimum(sheet.bytes_per_us, share * sheet.sms * SM_BYTES_PER_CYCLE * sheet.clock_mhz)
    steps = np.maximum(chain / sheet.clock_mhz, flops / (peak * share))
    result: Floats = launches * sheet.launch_us + waiting / sheet.clock_mhz + steps + nbytes / drawn
    return result
