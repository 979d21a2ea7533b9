"""Models to try msplit on: the benchmark models in any size, with seeded weights.

`build` makes one, `make_inputs` makes values to feed it; `strip` and `fill` let a large one travel as a small file.
TensorFlow is imported only while a model is built.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from msplit.samples.feature_columns import write_feature_columns
from msplit.samples.types import Input, Sample, make_inputs
from msplit.samples.weights import fill, strip

__all__ = ["Input", "Sample", "build", "fill", "make_inputs", "names", "sizes", "strip", "write_feature_columns"]

# Builder -> (module, function): the modules are imported when asked for.
_BUILDERS: dict[str, tuple[str, str]] = {
    "bert": ("bert", "build"),
    "deepfm": ("deepfm", "build"),
    "dlrm": ("dlrm", "build"),
    "feature_columns": ("feature_columns", "build"),
    "googlenet": ("googlenet", "build"),
    "inception_v3": ("keras_applications", "inception_v3"),
    "lstm": ("lstm", "build"),
    "mmoe": ("mmoe", "build"),
    "nasnet_mobile": ("keras_applications", "nasnet_mobile"),
    "squeezenet": ("squeezenet", "build"),
    "towers": ("towers", "build"),
}


def names() -> list[str]:
    """Return the names of all builders, sorted."""
    return sorted(_BUILDERS)


def build(name: str, *, seed: int = 0, **size: Any) -> Sample:
    """Build a benchmark model as a frozen inference graph.

    Args:
        name: One of `names()`.
        seed: Seed of the weights; equal seeds give equal graphs.
        **size: Sizes the builder takes, such as `batch=128` or `experts=4`; see the builder's own documentation.

    Raises:
        ValueError: There is no builder of that name.
        TypeError: The builder takes no such size.
    """
    return cast(Sample, _builder(name)(seed, **size))


def sizes(name: str) -> dict[str, Any]:
    """The sizes that a builder takes, with their defaults.

    Args:
        name: One of `names()`.

    Raises:
        ValueError: There is no builder of that name.
    """
    parameters = inspect.signature(_builder(name)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "seed"}


def _builder(name: str) -> Any:
    if name not in _BUILDERS:
        raise ValueError(f"there is no sample named {name!r}; there are {', '.join(names())}")
    module, function = _BUILDERS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), function)
