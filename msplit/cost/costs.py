"""What the nodes of a flat graph cost, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Floats

if TYPE_CHECKING:
    from msplit.cost.profile import Constants

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Costs:
    """Per node of a flat graph.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes read and written in device memory.
        time_us: Time alone on the device, µs; 0 for nodes that launch no kernel (constants, identities, reshapes, views, host nodes) and
            for those whose work another one's kernel does.
        share: Share of the device that the node's kernel can fill, in (0, 1].
        out_bytes: Bytes of all outputs.
        known: Whether shapes were known; where not, a default was taken and `time_us` is a guess.
        gpu: Name of the data sheet, such as ``"h200"``.
        source: "static" or what the profile that the times come from says of itself.
        inside: Nodes whose work is part of another node's kernel, which carries its time, and views; None: none.
        constants: The device's own, measured; None where there is no profile.
        one_us: A whole step on one stream, by the device's clock, back to back; None: not measured.
        host_us: Time of host nodes that the cuda engine runs on the device all the same (arithmetic on integers, which TensorFlow does in
            host memory). No stream is theirs to choose: it is part of the `time_us` of the kernels that read them; None: none.
        carried_us: Per node the part of its `time_us` that is theirs; None: none.
    """

    flops: Floats
    bytes: Floats
    time_us: Floats
    share: Floats
    out_bytes: Floats
    known: Mask
    gpu: str
    source: str = "static"
    inside: Mask | None = None
    constants: Constants | None = None
    one_us: float | None = None
    host_us: Floats | None = None
    carried_us: Floats | None = None

    @property
    def own_us(self) -> Floats:
        """Time of each node's own kernel, host nodes that the device runs included."""
        if self.host_us is None or self.carried_us is None:
            return self.time_us
        return self.time_us - self.carried_us + self.host_us
