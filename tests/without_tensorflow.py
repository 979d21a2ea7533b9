"""`python -m tests.without_tensorflow ...`: the command `msplit` where TensorFlow and Keras can not be imported."""

from __future__ import annotations

import sys
from typing import Any


class Missing:
    """Finds no TensorFlow, as where it is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("tensorflow", "keras"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block() -> None:
    """From now on, this process has no TensorFlow."""
    assert "tensorflow" not in sys.modules
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]


if __name__ == "__main__":
    block()
    from msplit.__main__ import entry

    entry()
