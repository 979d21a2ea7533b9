"""For kernels that are started while the one in front of them still runs (programmatic dependent launch, from compute capability 9.0 on).

Before `go_on` such a kernel may read what no kernel writes, and write nothing. Every block calls it, so that what comes behind the kernel
comes behind all that is in front of it, too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
