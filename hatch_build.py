"""Compiles C into the wheel: the threads that copy inputs and outputs within the host's memory, and hashes and parsers of the host part.

Both are optional: without a C compiler the wheel is one of Python alone. Python's own threads then copy, of large arrays alone and later,
and strings take longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = {
    Path("msplit/engines/cuda/runtime/copy_threads.c"): "large inputs are copied more slowly",
    Path("msplit/engines/host/host_ops.c"): "strings are hashed and examples parsed more slowly",
}
"""C files, and what is the case without each."""
LIBRARY = ".native"  # what ends in .so, Python takes for a module of its own


def compiled(root: Path) -> list[Path]:
    """Libraries that are made beside their sources; none where there is no compiler, or no Linux."""
    return [made for source in SOURCES if (made := _compiled(root, source)) is not None]


def _compiled(root: Path, source: Path) -> Path | None:
    library = (root / source).with_suffix(LIBRARY)
    if not sys.platform.startswith("linux"):
        return None
    made = library.with_suffix(f".{os.getpid()}.native")  # another process may have the old one open
    command = [os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", "-pthread", str(root / source), "-o", str(made)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        said = getattr(problem, "stderr", "") or problem
        sys.stderr.write(f"msplit: {source} is not compiled, and {SOURCES[source]}: {said}\n")
        return None
    made.replace(library)
    return library


class CompiledC(BuildHookInterface[Any]):
    """Puts the libraries into the wheel, which is one of this platform then."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles and names them, for a wheel and for a checkout that is installed to be edited."""
        libraries = compiled(Path(self.root))
        if not libraries:
            return
        build_data["artifacts"] += [str(library.relative_to(self.root)) for library in libraries]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    sys.exit(len(compiled(Path(__file__).parent)) < len(SOURCES))
