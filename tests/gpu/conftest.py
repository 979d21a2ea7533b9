"""What tests on a GPU share."""

from dataclasses import replace

import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from tests.engines.cuda.cases import options_of, scattered


@pytest.fixture
def build():
    """Makes executables of a graph; all are closed at the end."""
    pytest.importorskip("torch")
    from msplit.engines.cuda.engine import CudaEngine
    from msplit.engines.cuda.options import KernelMode

    engine, made = CudaEngine(), []

    def one(flat, feeds, streams=1, state=None, mode=None, **options):
        own = replace(options_of("cuda", **options), mode=mode or KernelMode.PLAIN)
        ids = scattered(flat, streams, streams)
        made.append(
            engine.build(Job(flat, ids, streams, feeds, precision=Precision.IEEE, options=own, state=state or {}))
        )
        return made[-1]

    yield one
    for executable in made:
        executable.close()
