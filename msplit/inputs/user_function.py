"""Functions of a user's own, named as ``module:function``: they are imported and run, as any program of theirs is."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msplit.errors import LoadError, MsplitError


def is_function(source: str) -> bool:
    """Whether a text names a function; a file of that name comes first."""
    module, colon, name = source.partition(":")
    return (
        bool(colon)
        and not os.path.lexists(source)
        and name.isidentifier()
        and all(map(str.isidentifier, module.split(".")))
    )


def imported(source: str, what: str) -> Callable[..., Any]:
    """The function of a ``module:function``; modules of the present folder are found as by `python -m`.

    Args:
        what: What it must be, to be said where it is not there: "that returns …".

    Raises:
        LoadError: There is no such module or function, or the module raised something.
    """
    module, _, name = source.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    with calling(source):
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
            raise LoadError(
                f"there is no module {module!r}", where=source, fix="run where it is, or set PYTHONPATH"
            ) from None
    if not callable(found):
        raise LoadError(f"module {module!r} has no function {name!r}", where=source, fix=f"give a function {what}")
    made: Callable[..., Any] = found
    return made


@contextmanager
def calling(source: str) -> Iterator[None]:
    """What a user's code raises is no mistake of msplit's."""
    try:
        yield
    except (MsplitError, GeneratorExit):
        raise
    except (Exception, SystemExit) as error:
        raise LoadError(f"raised {type(error).__name__}: {error}", where=source, fix="--debug shows where") from error
