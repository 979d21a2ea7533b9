"""Writes the sample graphs: `python -m msplit.samples OUT_DIR [--only NAME ...]`."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from pathlib import Path

from msplit.samples.exports import EXPORTS, readme


def main(arguments: list[str] | None = None) -> int:
    """Write the sample graphs named on the command line, or all of them, and the table that describes them."""
    parser = argparse.ArgumentParser(prog="python -m msplit.samples", description="Write small sample graphs.")
    parser.add_argument("out_dir", type=Path, help="folder to write to; files of the same names are replaced")
    parser.add_argument(
        "--only",
        action="append",
        choices=[export.name for export in EXPORTS],
        metavar="NAME",
        help="write just this one",
    )
    options = parser.parse_args(arguments)
    out_dir: Path = options.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    for export in EXPORTS:
        if options.only and export.name not in options.only:
            continue
        path = out_dir / export.name
        if path.is_dir():
            shutil.rmtree(path)
        export.write(path)
        sys.stderr.write(f"wrote {path}\n")
    (out_dir / "README.md").write_text(readme(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    # TensorFlow's notes about the CPU and a missing GPU say nothing about the files. Set here and not in `main`, which
    # may share its process with others.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    sys.exit(main())
