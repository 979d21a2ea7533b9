"""Writes docs/ops.md and msplit/opset/data/lowered.json from the cuda engine's table of lowerings.

    python scripts/make_ops_doc.py

The second is what `analyze` and `check` know of the table: the lowerings themselves need PyTorch. A test compares both files with what
this would write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from msplit.engines.cuda.frontend.partition import BY_THE_ENGINE
from msplit.engines.cuda.ir.lowering import Lowering, table
from msplit.engines.host.table import host_ops
from msplit.opset.traits import DRAWN_ON_DEVICE

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "ops.md"
LISTED = ROOT / "msplit" / "opset" / "data" / "lowered.json"

HEAD = """# Ops of the cuda engine

{count} TensorFlow ops have a lowering, and {own} need none, since the engine itself knows them: {engine}.

- *static* inputs decide shapes. They must follow from constants and shapes, so that they are known before the run; otherwise the model
  runs launch by launch (`--cuda capture=no`).
- The shape of what a *dynamic* op gives depends on values. A model with such an op runs launch by launch, unless the op's inputs
  are known before the run, or the graph proves that what the op is part of is dense: embedding columns over buckets, which have an
  id in every row, and over ids of which some may be missing, as `tf.feature_column` and `safe_embedding_lookup_sparse` write them,
  with or without weights.
  `Unique` of the ids of a sparse gradient gives as many ids as went in, -1 for what has come before, where updates of rows are all
  that reads them: these pass ids over that no row has, as TensorFlow's GPU kernels do. In a training graph the same holds for
  `DynamicPartition` of ids among the parts of a table.
- Loops, conds and lists, those of TensorFlow 1 included (`Enter`, `Switch`, `Merge`, `NextIteration`, `Exit`, `LoopCond`), are *unrolled*
  before the run, all loops of a model to 100,000 ops at most: where in a list a loop writes must
  follow from constants and shapes, and how many turns it takes, too, or [a bound](limits.md#loops-that-end-early), or the model is
  refused. A cond (`If`, `Case`) that they do not decide computes all
  branches and chooses, where the results of all have one shape, and the one by which Keras divides sparse gradients, with a place for
  every row. So are their gradients, with what those keep on stacks, in arrays and in lists. A variable that is written inside of a
  loop, or of a branch that the run chooses, is refused by name.
- Random ops with a state ({random}) draw, step by step, the numbers that TensorFlow's kernels draw for their
  seeds, so that outputs can be compared; one without a seed gets one that follows from its name, in every engine, and `bench` says so.
  In loops and in branches that the run chooses they are refused. Other random ops with a state have no lowering.

Ops without a GPU kernel (strings, lookup tables, parsing) need no lowering: they run on the CPU, before the device starts where
they depend on inputs only, else with all that depends on them when the device is done. Work for the device may not depend
on those. NumPy runs them where it has all of them, else TensorFlow does. It has
{host}, what hands strings on (`Reshape`, `GatherV2`, `Equal`, …), and on numbers each op with a lowering.
A loop, cond or data set whose functions hold such ops is one of them, as a whole. In front the host goes on with
small work on what has another shape in every step (the words of a text, its sparse ids, their rows of a table) until
shapes are fixed again, so that the device's part can be captured. `msplit analyze MODEL --engine cuda` says what of a model
is covered, and whether its steps can be captured, can run launch by launch only, or only be served.
How to add an op stands in `msplit/engines/cuda/ir/lowering.py`.

| op | file | static inputs | dynamic | what it computes |
| --- | --- | --- | --- | --- |
"""


def page(lowerings: Mapping[str, Lowering]) -> str:
    """The whole file. Ops that the engine makes itself are left out: no model has them."""
    lowerings = {op: lowering for op, lowering in lowerings.items() if not lowering.own}
    head = HEAD.format(
        random=", ".join(f"`{op}`" for op in sorted(DRAWN_ON_DEVICE)),
        host=", ".join(f"`{op}`" for op in sorted(host_ops()) if op not in lowerings),
        count=len(lowerings),
        own=len(BY_THE_ENGINE),
        engine=", ".join(f"`{op}`" for op in sorted(BY_THE_ENGINE)),
    )
    return head + "".join(_row(lowerings[op]) for op in sorted(lowerings, key=lambda op: (op.lstrip("_").lower(), op)))


def _row(lowering: Lowering) -> str:
    file = "ops/" + lowering.file.rpartition(".")[2] + ".py"
    static = ", ".join("last" if slot == -1 else str(slot) for slot in lowering.static)
    summary = lowering.summary.replace("``", "`").replace("|", "\\|")
    return f"| `{lowering.op}` | {file} | {static} | {'yes' if lowering.dynamic else ''} | {summary} |\n"


def listed(lowerings: Mapping[str, Lowering]) -> str:
    """The ops as data: all names, and of those whose output shapes depend on values the attribute that may prevent it."""
    theirs = {op: lowerings[op] for op in sorted(lowerings) if not lowerings[op].own}
    dynamic = {op: lowering.unless for op, lowering in theirs.items() if lowering.dynamic}
    return json.dumps({"dynamic": dynamic, "ops": list(theirs)}, indent=0) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page(table()), encoding="utf-8")
    LISTED.write_text(listed(table()), encoding="utf-8")
