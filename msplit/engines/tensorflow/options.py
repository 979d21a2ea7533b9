"""What the tensorflow engine is told. Needs no TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorFlowOptions:
    """How the tensorflow engine runs a job.

    Attributes:
        xla: Compile the model with XLA; one stream only.
        cpu: Keep it off the GPU.
    """

    xla: bool = False
    cpu: bool = False
