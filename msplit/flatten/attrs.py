"""Attributes of a flat graph's nodes, still decoded only when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from msplit.core.graph import Ints

_COLOCATION = "_class"
_LOCATION = "loc:@"


class PickedAttrs(Sequence[Mapping[str, Any]]):
    """The attributes of nodes picked from several sources; `which` has per node its source, `index` its place there."""

    def __init__(self, sources: Sequence[Sequence[Mapping[str, Any]]], which: Ints, index: Ints) -> None:
        self._sources = sources
        self._which = which
        self._index = index

    def __len__(self) -> int:
        return len(self._which)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source: Sequence[Mapping[str, Any]] = self._sources[int(self._which[index])]
        return source[int(self._index[index])]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        sources = self._sources
        for which, index in zip(self._which.tolist(), self._index.tolist(), strict=True):
            yield sources[which][index]

    def kinds(self) -> list[int]:
        """Per node a number; nodes of the same number have the same op and the same attributes, but for the values of constants."""
        kinds_of: list[Sequence[int]] = []
        shifts = []
        shift = 0
        for source in self._sources:
            kinds = getattr(source, "kinds", None)
            kinds_of.append(kinds() if kinds is not None else range(len(source)))
            shifts.append(shift)
            shift += max(kinds_of[-1], default=-1) + 1
        return [
            kinds_of[which][index] + shifts[which]
            for which, index in zip(self._which.tolist(), self._index.tolist(), strict=True)
        ]

    def picked(self, nodes: Ints) -> PickedAttrs:
        """The attributes of some of the nodes."""
        return PickedAttrs(self._sources, self._which[nodes], self._index[nodes])


class CalledAttrs(Sequence[Mapping[str, Any]]):
    """The attributes of a function's body at one place where it is called.

    Args:
        body: Attributes of the body's nodes.
        names: The body's nodes by name.
        prefix: What the call puts in front of a node's name, with its "/".
        arguments: Attributes that the function is instantiated with.
    """

    def __init__(
        self, body: Sequence[Mapping[str, Any]], names: Mapping[str, int], prefix: str, arguments: Mapping[str, Any]
    ) -> None:
        self._body = body
        self._names = names
        self._prefix = prefix
        self._arguments = arguments

    def __len__(self) -> int:
        return len(self._body)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return _CalledNode(self._body[index], self)

    def kinds(self) -> Sequence[int]:
        """Those of the body: what a call makes of a value hangs on the value alone."""
        kinds = getattr(self._body, "kinds", None)
        return range(len(self)) if kinds is None else kinds()

    def translate(self, key: str, value: Any) -> Any:
        """A value as it reads in the flat graph: other nodes under their flat names, type parameters filled in."""
        if key == _COLOCATION and isinstance(value, tuple):
            return tuple(map(self._colocation, value))
        if key == "frame_name" and isinstance(value, str):
            # Each call runs its loops in frames of its own.
            return self._prefix + value
        if isinstance(value, str) and value in self._arguments:
            return self._arguments[value]
        return value

    def _colocation(self, item: Any) -> Any:
        if isinstance(item, str) and item.startswith(_LOCATION) and item.removeprefix(_LOCATION) in self._names:
            return f"{_LOCATION}{self._prefix}{item.removeprefix(_LOCATION)}"
        return item


class _CalledNode(Mapping[str, Any]):
    __slots__ = ("_attrs", "_call")

    def __init__(self, attrs: Mapping[str, Any], call: CalledAttrs) -> None:
        self._attrs = attrs
        self._call = call

    def __getitem__(self, key: str) -> Any:
        return self._call.translate(key, self._attrs[key])

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an attribute, or a default."""
        return self[key] if key in self._attrs else default

    def __contains__(self, key: object) -> bool:
        return key in self._attrs

    def __iter__(self) -> Iterator[str]:
        return iter(self._attrs)

    def __len__(self) -> int:
        return len(self._attrs)

    def __repr__(self) -> str:
        return repr(dict(self))
