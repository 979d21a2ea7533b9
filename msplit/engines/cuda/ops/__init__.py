"""One file per family of ops. A file here is found by itself: a new op needs no other change than its function and its test.

Forms of an op that get other inputs as arrays are decorators above each other, the common form lowest, since each one wraps those below it.
"""

import functools
import importlib
import pkgutil


@functools.cache
def load() -> None:
    """Imports every module of this package, which registers its lowerings."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
