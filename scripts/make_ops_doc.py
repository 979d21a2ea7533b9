"""Writes docs/ops.md from the cuda engine's table of lowerings.

    python scripts/make_ops_doc.py

A test compares the file with what this would write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msplit.engines.cuda.coverage import BY_THE_ENGINE
from msplit.engines.cuda.registry import Lowering, table

TARGET = Path(__file__).parent.parent / "docs" / "ops.md"

HEAD = """# Ops of the cuda engine

{count} TensorFlow ops have a lowering, and {own} need none, since the engine itself knows them: {engine}.

- *static* inputs decide shapes. They must follow from constants and shapes, so that they are known before the run; otherwise the model
  runs launch by launch (`--no-capture`).
- The shape of what a *dynamic* op gives depends on values. A model with such an op runs launch by launch, unless the op's inputs
  are known before the run, or the graph proves that what the op is part of is dense: embedding columns over buckets, which have an
  id in every row, and over ids of which some may be missing, as `tf.feature_column` and `safe_embedding_lookup_sparse` write them.
- Loops, conds and lists, those of TensorFlow 1 included (`Enter`, `Switch`, `Merge`, `NextIteration`, `Exit`, `LoopCond`), are *unrolled*
  before the run, all loops of a model to 100,000 ops at most: how many turns a loop takes and where in a list it writes must follow from
  constants and shapes, or the model is refused. A cond that they do not decide computes both branches and chooses, where the results
  of both have one shape.

Ops without a GPU kernel (strings, lookup tables, parsing) need no lowering: TensorFlow runs them on the CPU, before the device starts where
they depend on inputs only, else with all that depends on them when the device is done. Work for the device may not depend
on those. `msplit analyze MODEL --engine cuda` says what of a model is covered. How to add an op stands in
`msplit/engines/cuda/registry.py`.

| op | file | static inputs | dynamic | what it computes |
| --- | --- | --- | --- | --- |
"""


def page(lowerings: Mapping[str, Lowering]) -> str:
    """The whole file. Ops that the engine makes itself are left out: no model has them."""
    lowerings = {op: lowering for op, lowering in lowerings.items() if not lowering.own}
    head = HEAD.format(
        count=len(lowerings), own=len(BY_THE_ENGINE), engine=", ".join(f"`{op}`" for op in sorted(BY_THE_ENGINE))
    )
    return head + "".join(_row(lowerings[op]) for op in sorted(lowerings, key=lambda op: (op.lstrip("_").lower(), op)))


def _row(lowering: Lowering) -> str:
    file = "ops/" + lowering.file.rpartition(".")[2] + ".py"
    static = ", ".join("last" if slot == -1 else str(slot) for slot in lowering.static)
    summary = lowering.summary.replace("``", "`").replace("|", "\\|")
    return f"| `{lowering.op}` | {file} | {static} | {'yes' if lowering.dynamic else ''} | {summary} |\n"


if __name__ == "__main__":
    TARGET.write_text(page(table()), encoding="utf-8")
