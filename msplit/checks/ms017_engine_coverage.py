"""The cuda engine can not run an op.

Finds: An op that the outputs need has no lowering in msplit's cuda engine, or is a host op (strings, tables) between work for the GPU,
while that engine runs host ops before all of that or behind it. Or a step is run for its effect, such as writing a variable. Where `select`
names this code, PyTorch is installed and the graph has loops, conds or lists, the model is also built as the engine does it, without
running it: then it is found, too, that how many turns a loop takes, or which branch is taken where the branches differ in shape, is known
only in the run. Otherwise the check needs no PyTorch, and says what it leaves open. What kernels make of attributes and types is not looked
at: `msplit analyze --engine cuda` tells.

Why: `msplit bench` refuses the whole model on that engine. For graphs that a fork or stock TensorFlow runs it does not matter, which is why
this is only an information.

Example: A custom op, or a table that is asked for the ids of what one layer gives, for the next.

Mend: Use `--engine tensorflow`, or `--part inputs=` and `outputs=` to leave the op outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msplit.checks.subject import NODES_SHOWN, Check, Finding, Severity, Skip, Subject, nodes
from msplit.engines.cuda.coverage import cover

CODE = "MS017"


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per op that has no kernel, per refusal, and per host op between kernels.

    A build, which takes seconds, is made only where the settings name this code.

    Raises:
        Skip: No op is missing, and the loops and branches would have to be built to know more.
    """
    asked = CODE in (subject.settings.select or ())
    covered = cover(subject.flat, subject.shapes, build=None if asked else False)
    if covered.unbuilt and not covered.reasons:
        way = "" if asked else f" (`--select {CODE}` does, and `msplit analyze --engine cuda`)"
        raise Skip(
            f"every op can run; whether the loops and branches can, only a build tells, and {covered.unbuilt}{way}"
        )
    for op, names in sorted(covered.missing.items()):
        yield _finding(f"has no kernel for {op}: ", names)
    if covered.effects:
        yield _finding("does not have the effect that these are run for: ", covered.effects)
    for why, names in covered.refused.items():
        yield _finding("refuses ", names, f": {why}")
    for op, names in sorted(covered.stuck.items()):
        what = f"runs {op} on the host, but it needs results of the GPU, and work for the GPU needs it: "
        yield _finding(what, names)


def _finding(what: str, names: Sequence[str], why: str = "") -> Finding:
    fix = "run the graph with TensorFlow or a fork, or leave the op outside with --part inputs= and outputs="
    text = f"the cuda engine {what}{nodes(names, len(names))}{why}"
    return Finding(text, fix, tuple(names[:NODES_SHOWN]), len(names))


CHECK = Check.of(__name__, __doc__, Severity.INFO, find)
