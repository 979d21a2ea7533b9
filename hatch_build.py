"""Compiles the threads that copy inputs and outputs within the host's memory into the wheel. They are optional: without a C compiler the
wheel is one of Python alone, and Python's own threads copy, of large arrays alone and later.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("msplit/engines/cuda/runtime/copy_threads.c")


def compiled(root: Path) -> Path | None:
    """The library that is made beside its source; None where there is no compiler, or no Linux."""
    library = (root / SOURCE).with_suffix(".so")
    if not sys.platform.startswith("linux"):
        return None
    made = library.with_suffix(f".{os.getpid()}.so")  # another process may have the old one open
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-pthread", str(root / SOURCE), "-o", str(made)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        said = getattr(problem, "stderr", "") or problem
        sys.stderr.write(f"msplit: {SOURCE} is not compiled, and large inputs are copied more slowly: {said}\n")
        return None
    made.replace(library)
    return library


class CopyThreads(BuildHookInterface[Any]):
    """Puts the library into the wheel, which is one of this platform then."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles it and names it, for a wheel and for a checkout that is installed to be edited."""
        library = compiled(Path(self.root))
        if library is None:
            return
        build_data["artifacts"].append(str(SOURCE.with_suffix(".so")))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    sys.exit(compiled(Path(__file__).parent) is None)
