"""Sizes of the pieces that the work of our own kernels is cut into, and how they are counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msplit.engines.cuda.ir.windows import Window


class Tiles(NamedTuple):
    """Share of the work that a block of a kernel of convolutions does, and how it does it.

    Attributes:
        pixels: Of a tile.
        results: Output channels of a tile.
        summands: Added up at a time.
        warps: Of a block.
        stages: Of the pipeline of loads.
        parts: Blocks that share a tile's summands.
        turned: True if the filter is to lie with its output channels side by side, not its input channels. The kernel takes both; tiles
            of 64 pixels, whose products (wgmma) read the filter as it lies, are slow with the former.
        early: True if a block starts before the kernel in front is done, and fetches its filter meanwhile, which must be constant.
        across: Of the pixels, how many of a row one thread makes, where each channel is convolved by itself.
    """

    pixels: int
    results: int
    summands: int
    warps: int
    stages: int
    parts: int = 1
    turned: bool = False
    early: bool = False
    across: int = 1


@dataclass(frozen=True)
class Tile:
    """Share of the work that one program of the kernel of products does, and how it does it.

    Attributes:
        rows: Rows; 1 takes the kernel for one row, which multiplies without tensor cores.
        columns: Columns; 1 takes the kernel for few columns, which multiplies without tensor cores.
        inner: How much of the inner dimension at a time.
        warps: Warps that share the work.
        stages: Loads under way at once.
        parts: Blocks that share a tile's summands.
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int = 3
    parts: int = 1

    @property
    def exact(self) -> bool:
        """True if it multiplies in float32, whatever the precision asked for."""
        return self.rows == 1 or self.columns == 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.inner}/{self.warps}" + f" in {self.parts}" * (self.parts > 1)


def reciprocal(divisor: int) -> tuple[int, int]:
    """Multiplier and shift that `code.convolutions._quotient` takes for a divisor from 1 to 2³¹ - 1.

    Granlund and Montgomery, Division by invariant integers using multiplication, PLDI 1994. GPUs have no instruction that divides integers;
    the code for one division takes longer than a multiplication by twenty.

    Returns:
        ``ceil(2 ** (31 + shift) / divisor)`` as the 32 bits of a signed number, and the shift, the bits of ``divisor - 1``.
    """
    shift = (divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // divisor) - (1 << 32), shift


def of_axes(frames: Sequence[Window], *fields: str) -> list[int]:
    """Numbers of windows along height and width, a field of both and then the next, as kernels take them."""
    return [getattr(frame, field) for field in fields for frame in frames]


def constants_of_axes(frames: Sequence[Window], *fields: str) -> dict[str, int]:
    """Constants of kernels with the numbers of windows along height and width, as in ``KERNEL_H`` and ``KERNEL_W``."""
    return {
        f"{field.upper()}_{axis}": getattr(frame, field)
        for field in fields
        for axis, frame in zip("HW", frames, strict=True)
    }


def shares(size: int, share: int) -> int:
    """Number of shares of a size, the last one perhaps not whole."""
    return -(-size // share)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less than a size from 1 on."""
    return 1 << (size - 1).bit_length()


def common(*sizes: int, half: bool = False) -> int:
    """The number that all sizes are multiples of, as far as it matters: four elements of float32, or eight of `half`, fill a load of 16
    bytes."""
    return next(number for number in (8 if half else 16, 4, 1) if all(size % number == 0 for size in sizes))


def vector(size: int, *counts: int) -> int:
    """Number of elements of so many bytes that one load takes, 16 bytes at most, where all counts of elements are multiples of as many."""
    return math.gcd(16 // size, *counts)


LARGEST = 2**31 - 1
"""Positions are counted with 32 bits."""
