"""MS017: ops that the cuda engine can not run."""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.base import NODES_SHOWN, Check, Finding, Severity, Skip
from msplit.checks.subject import Subject
from msplit.checks.words import nodes


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per op."""
    # Here and not above: the engine's kernels are PyTorch's, and nothing else in checks needs it.
    try:
        from msplit.engines.cuda.coverage import cover

        covered = cover(subject.flat)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise Skip("PyTorch is not installed, and the list of ops is made of its kernels") from None
    fix = "run the graph with TensorFlow or a fork, or cut it with --inputs and --outputs so that the op is outside"
    for op, names in sorted(covered.missing.items()):
        text = f"the cuda engine has no kernel for {op}: {nodes(names, len(names))}"
        yield Finding(text, fix, tuple(names[:NODES_SHOWN]), len(names))
    for op, names in sorted(covered.stuck.items()):
        text = (
            f"the cuda engine runs {op} on the host, but it needs results of the GPU, and work for the GPU needs it: "
        )
        yield Finding(text + nodes(names, len(names)), fix, tuple(names[:NODES_SHOWN]), len(names))


CHECK = Check(
    code="MS017",
    name="engine-coverage",
    severity=Severity.INFO,
    title="The cuda engine can not run an op",
    what="An op that the outputs need has no lowering in msplit's cuda engine, or is a host op (strings, tables) "
    "between work for the GPU, "
    "while that engine runs host ops before all of that or behind it. Ops that only effects need are "
    "not looked at: the engine does not run them. Whether a loop can be unrolled is not looked at either: `msplit bench` "
    "tells.",
    why="`msplit bench` refuses the whole model on that engine. For graphs that a fork or stock TensorFlow runs "
    "it does not matter, "
    "which is why this is only an information.",
    example="A custom op, or a table that is asked for the ids of what one layer gives, for the next.",
    mend="Use `--engine tensorflow`, or `--inputs` and `--outputs` to leave the op outside.",
    find=find,
)
