"""Data sheets of GPUs, from `msplit/data/gpus.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from msplit.errors import MsplitError

DEFAULT_GPU = "h200"

SM_BYTES_PER_CYCLE = 64
"""Bytes per clock that one multiprocessor can take from the L2 cache (NVIDIA's architecture white papers since Volta)."""


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
    """

    name: str
    sms: int
    memory_gb: float
    bandwidth_gbs: float
    l2_mb: float
    clock_mhz: float
    tflops: Mapping[str, float]
    launch_us: float
    wait_us: float

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
        keys = [dtype]
        if product:
            keys = {
                "float32": ["tf32"],
                "complex64": ["tf32"],
                "float64": ["float64_tensor", "float64"],
                "complex128": ["float64_tensor", "float64"],
            }.get(dtype, [dtype])
            if dtype.startswith("float8"):
                keys = ["float8", "float16"]
        elif dtype in ("float64", "complex128"):
            keys = ["float64"]
        else:
            keys = ["float32"]
        peak = next((self.tflops[key] for key in keys if key in self.tflops), self.tflops["float32"])
        return peak * 1e6


@cache
def _sheets() -> dict[str, Gpu]:
    import yaml

    data = yaml.safe_load(files("msplit").joinpath("data/gpus.yaml").read_text(encoding="utf-8"))
    return {name: Gpu(name=name, **fields) for name, fields in data.items()}


def gpu_names() -> tuple[str, ...]:
    """Names of all data sheets."""
    return tuple(_sheets())


def data_sheet(name: str) -> Gpu:
    """The data sheet of a GPU.

    Raises:
        MsplitError: There is none of that name; the message lists what there is.
    """
    sheets = _sheets()
    found = sheets.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), sheets, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise MsplitError(
            f"there is no data sheet of a GPU called {name!r}{hint}", fix=f"choose one of: {', '.join(sheets)}"
        )
    return found
