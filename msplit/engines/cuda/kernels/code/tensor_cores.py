"""Operands of our kernels' products on tensor cores.

Of float32 the tensor cores take the first 19 bits and cut off the others, which makes every product a little too small, layer after layer.
Rounded first, as libraries do it, errors cancel out: NASNet's outputs are 0.002 away from IEEE precision and not 0.02. A kernel rounds what
it reads, on the way from shared memory to the product, or finds it rounded by the kernel that wrote it, which costs nothing: a product of
64 rows reads shared memory by itself, and has to wait for registers otherwise (Inception-v3 at batch 1: 467 and 376 µs on an H200).

For kernels that are started while the one in front of them still runs (programmatic dependent launch, from compute capability 9.0 on).

Before `go_on` such a kernel may read what no kernel writes, and write nothing. Every block calls it, so that what comes behind the kernel
comes behind all that is in front of it, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def rounded(value, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers on their way into a product: float32 rounded to TF32 where that is the precision."""
    if PRECISION == "tf32" and value.dtype == tl.float32:
        value = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return value


_LIFT = tl.constexpr(1 + 1.3862943611198906 * 2.0**-12)
"""1 + 2 ln 2 / 4096. The last bit that TF32 keeps of a number from m to 2 m, m a power of two, is m / 1024, and half of it is cut off on
average. By as much are numbers raised whose logarithms are spread evenly in there, as those of most data nearly are."""


@triton.jit  # type: ignore[untyped-decorator]
def lifted(value, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same by one instruction instead of two, for innermost loops: raised so that what is left when tensor cores cut it off is right
    on average, at most 0.7 of the last bit away, where rounded numbers are 0.5. What TF32 can hold stays as it is."""
    if PRECISION == "tf32" and value.dtype == tl.float32:
        value *= _LIFT
    return value


LINE = tl.constexpr(128)
"""Bytes that are fetched at once."""


@triton.jit
def go_on():  # type: ignore[no-untyped-def]
    """Waits for all that is in front, and lets the next kernel start: any sooner, several would hold the GPU and wait in a row."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def fetch(places, exist):  # type: ignore[no-untyped-def]
    """Has lines of memory brought into the L2 cache, those that exist. One block does that for all that read the same lines: 1,568 blocks
    that each ask for nine lines take longer than what they then compute."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [places.to(tl.uint64), exist.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
