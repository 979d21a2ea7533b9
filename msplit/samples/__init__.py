"""Models to try msplit on: the benchmark models in any size, with seeded weights.

`build` makes one, `make_inputs` makes values to feed it; `strip` and `fill` let a large one travel as a small file.
TensorFlow is imported only while a model is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from msplit.samples import networks, recommenders
from msplit.samples.layers import Sample, SampleInput, fill, make_inputs, strip

__all__ = ["Sample", "SampleInput", "build", "fill", "make_inputs", "names", "sizes", "strip"]

_BUILDERS: dict[str, Callable[..., Sample]] = {
    "bert": networks.bert,
    "deepfm": recommenders.deepfm,
    "dlrm": recommenders.dlrm,
    "feature_columns": recommenders.build,
    "googlenet": networks.googlenet,
    "inception_v3": networks.inception_v3,
    "lstm": networks.lstm,
    "mmoe": recommenders.mmoe,
    "nasnet_mobile": networks.nasnet_mobile,
    "squeezenet": networks.squeezenet,
    "towers": recommenders.towers,
}


def names() -> list[str]:
    """Return the names of all builders, sorted."""
    return sorted(_BUILDERS)


def build(name: str, *, seed: int = 0, **size: Any) -> Sample:
    """Build a benchmark model as a frozen inference graph.

    Args:
        name: One of `names`.
        seed: Seed of the weights; equal seeds give equal graphs.
        **size: Sizes the builder takes, such as `experts=4`; see its own documentation. All take `batch`; None
            leaves it unknown, but for `lstm`, whose batch is fixed.

    Raises:
        ValueError: There is no builder of that name.
        TypeError: The builder takes no such size.
    """
    return _builder(name)(seed, **size)


def sizes(name: str) -> dict[str, Any]:
    """The sizes that a builder takes, with their defaults.

    Raises:
        ValueError: There is no builder of that name.
    """
    parameters = inspect.signature(_builder(name)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "seed"}


def _builder(name: str) -> Callable[..., Sample]:
    if name not in _BUILDERS:
        raise ValueError(f"there is no sample named {name!r}; there are {', '.join(names())}")
    return _BUILDERS[name]
