"""What our kernels give tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def rounded(value, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers on their way into a product. Of float32 the tensor cores take the first 19 bits and cut off the others, which makes every
    product a little too small, layer after layer. Rounded first, as libraries do it, errors cancel out: NASNet's outputs are 0.002 away
    from IEEE precision and not 0.02."""
    if PRECISION == "tf32" and value.dtype == tl.float32:
        value = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    return value
