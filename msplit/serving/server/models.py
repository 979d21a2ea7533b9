"""Models of a server: their versions and signatures, each signature with the pool that answers it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import count
from typing import Any, Protocol

from msplit.flatten.flat import FlatGraph
from msplit.formats.endpoints import DEFAULT_SIGNATURE
from msplit.serving.pool.drivers import LoopDriver
from msplit.serving.pool.pool import Pool
from msplit.serving.pool.ports import Port
from msplit.serving.server.tensors import Refusal, StatusCode, invalid

PREDICT = "tensorflow/serving/predict"
"""Method name of a signature that `Predict` can run, in TensorFlow."""


@dataclass(frozen=True)
class Signature:
    """A way to ask a model.

    Attributes:
        name: As clients call it.
        pool: Pool that answers. Its inputs and outputs are the signature's keys.
        tensors: Key of an input or an output -> TensorFlow's name of the tensor, as in ``"dense/MatMul:0"``.
        method: TensorFlow's name of the method that it was exported for.
    """

    name: str
    pool: Pool
    tensors: Mapping[str, str] = field(default_factory=dict)
    method: str = PREDICT

    @cached_property
    def driver(self) -> LoopDriver:
        """Driver that has the event loop work for the pool."""
        return LoopDriver(self.pool.drive, self.pool.polls)


@dataclass(eq=False)
class Version:
    """One version of a model.

    Attributes:
        model: Its name.
        number: Number of the version.
        signatures: By name; the first is what is asked where a request names none and there is no ``serving_default``.
        others: Signatures that the model has and that are not served.
        users: Who needs it: requests that are being answered by it, and processes that take some.
        retired: True when no more requests are for it.
        serial: Number that no other version of this process has.
    """

    model: str
    number: int
    signatures: Mapping[str, Signature]
    others: Sequence[str] = ()
    users: dict[Any, None] = field(default_factory=dict, repr=False)
    retired: bool = False
    serial: int = field(default_factory=count().__next__)

    @property
    def ready(self) -> bool:
        """True while all its pools can answer; where they have processes, one of each is enough."""
        return all(signature.pool.ready for signature in self.signatures.values())

    def close(self, finish: bool = False) -> None:
        """Closes its pools; see `Pool.close`."""
        for signature in self.signatures.values():
            signature.pool.close(finish=finish)

    def signature(self, name: str) -> Signature:
        """The signature asked for, "" for the default.

        Raises:
            Refusal: It is not there.
        """
        known = ", ".join(self.signatures)
        if not name:
            if DEFAULT_SIGNATURE in self.signatures or len(self.signatures) == 1:
                return self.signatures.get(DEFAULT_SIGNATURE) or next(iter(self.signatures.values()))
            raise invalid(f"{self.model} has no {DEFAULT_SIGNATURE}: signature_name has to be one of {known}")
        if name in self.others:
            raise invalid(f'signature "{name}" of {self.model} is not served; the server was started without it')
        if name not in self.signatures:
            raise invalid(f'Serving signature name: "{name}" not found in signature def; {self.model} has {known}')
        return self.signatures[name]


class VersionState(IntEnum):
    """State of a version, with TensorFlow Serving's numbers."""

    START = 10
    LOADING = 20
    AVAILABLE = 30
    UNLOADING = 40
    END = 50


@dataclass(frozen=True)
class Status:
    """Status of a version.

    Attributes:
        state: State of now.
        why: Reason why it could not be opened; "" if it could.
    """

    state: VersionState
    why: str = ""


Control = Callable[[str, Any, Any], Future[Any]]
"""Changes what is served: takes what to do (``reload`` with a ModelServerConfig, in place of all models; ``reread`` with None, the same
with what the server was configured with; ``load`` or ``unload`` with the name of a model) and the result of the future that it returns.
Futures that raise `Refusal` have changed nothing."""


FOLLOWED = ("versions", "labels", "opening", "statuses")
"""Attributes of `Models` that say what is served."""


class Follower(Protocol):
    """Other processes that serve the same."""

    def change(self, name: str, value: Any) -> None:
        """Tells them that one of `FOLLOWED` has another value."""

    def settle(self) -> None:
        """Returns when they have followed all changes."""


@dataclass
class Models:
    """All models of a server: by name, by version number. Attributes are replaced, never changed, so that any thread may read them.

    Attributes:
        versions: By model, number -> version.
        labels: By model, label of a version -> its number.
        opening: Names of models that are yet to be opened for the first time.
        statuses: By model and version, also those that are not served.
        control: Changes what is served; None: nothing does.
        closing: Called with each version that is closed while others are served.
        follower: Told of each change; None: nobody is.
    """

    versions: Mapping[str, Mapping[int, Version]]
    labels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    opening: Sequence[str] = ()
    statuses: Mapping[str, Mapping[int, Status]] = field(default_factory=dict)
    control: Control | None = None
    closing: list[Callable[[Version], None]] = field(default_factory=list)
    follower: Follower | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if self.follower is not None and name in FOLLOWED:
            self.follower.change(name, value)

    @property
    def ready(self) -> bool:
        """True while each of them can answer."""
        return not self.unready

    @property
    def unready(self) -> tuple[str, ...]:
        """Names of those that can not answer now."""
        return tuple(name for name in {**self.versions, **dict.fromkeys(self.opening)} if not self.can_answer(name))

    def can_answer(self, name: str) -> bool:
        """True while the versions of a model are there, and can answer."""
        found = self.versions.get(name, {})
        return bool(found) and all(version.ready for version in found.values())

    def __iter__(self) -> Iterator[Version]:
        return (version for versions in self.versions.values() for version in versions.values())

    def states(self, name: str) -> dict[int, Status]:
        """Statuses of the versions of a model, the highest first; none where it was never served."""
        served = dict.fromkeys(self.versions.get(name, ()), Status(VersionState.AVAILABLE))
        return dict(sorted({**self.statuses.get(name, {}), **served}.items(), reverse=True))

    def find(self, name: str, number: int | None = None, label: str = "") -> Version:
        """The version asked for; without a number or a label the latest.

        Raises:
            Refusal: There is none, or it is yet to be opened.
        """
        versions = self.versions.get(name, {})
        if not versions and name in self.opening:
            raise Refusal(StatusCode.UNAVAILABLE, f"model {name} is being opened")
        if label:
            if label not in self.labels.get(name, {}):
                raise invalid(f"Unrecognized servable version label: {label}")
            number = self.labels[name][label]
        asked = max(versions, default=0) if number is None else number
        if asked not in versions:
            said = f"Latest({name})" if number is None else f"Specific({name}, {number})"
            raise Refusal(StatusCode.NOT_FOUND, f"Servable not found for request: {said}")
        return versions[asked]


def signature_of(pool: Pool, flat: FlatGraph | None, method: str = "") -> Signature:
    """Signature that a pool answers: that of the model's graph; ``serving_default`` where it has none, or there is a build (None), which
    was exported for a method, too."""
    if flat is None:
        return Signature(DEFAULT_SIGNATURE, pool, method=method or PREDICT)
    tensors = {end.name: end.tensor for end in (*flat.model.inputs, *flat.model.outputs)}
    return Signature(flat.model.signature or DEFAULT_SIGNATURE, pool, tensors, flat.model.method or PREDICT)


def known_as(name: str, ports: Mapping[str, Port]) -> str | None:
    """The input or output that a client means: tensors go with and without ``:0``. None where there is none."""
    if name in ports:
        return name
    other = name.removesuffix(":0") if name.endswith(":0") else f"{name}:0"
    return other if other in ports else None


def place_for(name: str, ports: Mapping[str, Port], found: Collection[str]) -> str:
    """The input that a client brings a value for.

    Args:
        name: Name that the client uses.
        ports: The model's inputs.
        found: Those that it has brought values for already.

    Raises:
        Refusal: There is none, or it has a value already.
    """
    place = known_as(name, ports)
    if place is None:
        raise invalid(f"the model has no input {name!r}; the inputs are: {', '.join(ports)}")
    if place in found:
        raise invalid(f"input {place} is there twice" + ("" if name == place else f", once as {name}"))
    return place


def refuse_missing(found: Collection[str], ports: Mapping[str, Port]) -> None:
    """Refuses a request that leaves an input out.

    Raises:
        Refusal: It does.
    """
    if missing := [name for name in ports if name not in found]:
        raise invalid(f"no value for input {missing[0]}; the inputs are: {', '.join(ports)}")
