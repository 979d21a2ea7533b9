"""Settings of verification, and its choice of inputs: which kinds, in which order, and what is left of a kind that a model refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from msplit.engines.base import Arrays
from msplit.inputs.reference import Reference
from msplit.inputs.special import RANDOM, Fresh, InputKind, InputKindName
from msplit.progress import Progress, Sums
from msplit.verify.results import Settings, Variant


@dataclass(frozen=True, eq=False)
class Verification:
    """Settings of verification: on inputs that `fresh` makes from a seed and, if there is one, against a reference.

    `computed` is as `Reference` has it. `rounding` is, for those that are held to it, as `compare` has it. Where it is `proved` that the
    rewritten graph does what it did op by op, only streams and kernels are left to verify.
    """

    fresh: Callable[[int], Arrays] | Fresh
    settings: Settings
    reference: Reference | None
    tell: Progress
    computed: Mapping[str, str] | None = None
    rounding: Mapping[Variant, Mapping[str, float]] = field(default_factory=dict)
    special: bool = True
    proved: bool = False

    @property
    def kinds(self) -> tuple[InputKind, ...]:
        """Those of special inputs."""
        return self.fresh.kinds if self.special and isinstance(self.fresh, Fresh) else ()

    def made(self, seed: int, kind: InputKind) -> Arrays:
        """Inputs of a kind."""
        return self.fresh(seed, kind) if isinstance(self.fresh, Fresh) else self.fresh(seed)

    def refuse(self, kind: InputKind, why: str) -> None:
        """Notes that nothing can be verified on a kind of inputs."""
        if isinstance(self.fresh, Fresh):
            self.fresh.refused.setdefault(kind.name.value, why)

    def leave_usual(self, kind: InputKind, names: Iterable[str], why: str) -> None:
        """Notes inputs that have usual values in a kind of inputs."""
        if isinstance(self.fresh, Fresh):
            self.fresh.usual.setdefault(kind.name.value, ({}, why))[0].update(dict.fromkeys(names))

    def runs_on(self, kind: InputKind) -> bool:
        """True if the model takes all special values of a kind of inputs."""
        told = (self.fresh.refused, self.fresh.usual) if isinstance(self.fresh, Fresh) else ()
        return all(kind.name.value not in one for one in told)

    def leave_out(self, variables: Iterable[str]) -> None:
        """Notes variables that are not compared since rounding decides what TensorFlow makes of them."""
        if isinstance(self.fresh, Fresh):
            self.fresh.undetermined.update(dict.fromkeys(variables))


SPECIAL = "verifying special inputs"
"""The phase in which that is done."""


def seconds_of(sums: Sums) -> float:
    """Sum up the seconds that special inputs took."""
    return sum(one.seconds for one in sums.phases if one.phase == SPECIAL)


def kinds_for(how: Verification, *, half: bool) -> list[InputKind]:
    """Kinds of inputs for a precision: in half precision those of ordinary size, within float16's range."""
    return [kind for kind in how.kinds if not half or kind.name not in (InputKindName.LARGE, InputKindName.SMALL)]


def sets_of(how: Verification, kinds: Sequence[InputKind], alone: bool) -> list[tuple[InputKind, list[Arrays]]]:
    """Kinds of inputs to verify on, and what is stepped on before each: where a step says nothing of the next (`alone`) the same strings
    beside other numbers, and the same numbers beside other strings; else, of some, a random one."""
    usual, other = how.fresh(how.settings.seed + 1), how.fresh(how.settings.seed + 2)
    words = {name for name, value in usual.items() if value.dtype.kind == "O"}
    parts = (words, usual.keys() - words) if words and alone else ()
    mixed: list[Arrays] = [{**other, **{name: usual[name] for name in part}} for part in parts if part]
    again = [] if alone else [RANDOM, *[kind for kind in kinds if kind.name is InputKindName.EDGES][:1]]
    return [*[(RANDOM, mixed)][: len(mixed)], *((kind, []) for kind in kinds), *((kind, [other]) for kind in again)]


_MOST_RUNS = 24
"""Runs that find which inputs a kind of inputs is refused for: one of 100 takes 14."""

Ran = tuple[Arrays, Arrays]
"""Outputs, and variables after a step."""


def without_refused(
    run: Callable[[Arrays], Ran | None], usual: Arrays, special: Arrays
) -> tuple[Arrays, list[str], Ran] | None:
    """Special inputs as far as the model runs on them: usual values for those that it refuses, their names, and what it gives. None
    where nothing special is left.

    What it refuses is found by halves: a few inputs of many, as a rule.
    """
    kept, refused, found = usual, list[str](), None
    differ = [name for name, value in special.items() if not np.array_equal(value, usual[name])]
    # Numbers first: ids are what is refused most often.
    differ.sort(key=lambda name: special[name].dtype.kind in "iuO")
    waiting = [differ[len(differ) // 2 :], differ[: len(differ) // 2]]
    for _ in range(_MOST_RUNS):
        if not waiting:
            break
        names = waiting.pop()
        tried = {**kept, **{name: special[name] for name in names}}
        made = run(tried) if names else None
        if made is not None:
            kept, found = tried, made
        elif len(names) > 1:
            waiting += [names[len(names) // 2 :], names[: len(names) // 2]]
        else:
            refused += names
    refused += [name for names in waiting for name in names]
    return None if found is None else (kept, refused, found)
