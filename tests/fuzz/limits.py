"""A ceiling on the time and the memory of a piece of code, in this process."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_STATUS = Path("/proc/self/status")


class TooSlow(BaseException):
    """It took longer than it may. Not an Exception, so that nothing that catches those can hide it."""


@dataclass
class Used:
    """What a piece of code took.

    Attributes:
        seconds: Processor time of this process, so that a busy machine does not count.
        megabytes: Peak resident memory beyond what the process held before.
    """

    seconds: float = 0.0
    megabytes: float = 0.0


def _status(key: str) -> int:
    """A field of /proc/self/status, bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{_STATUS} has no {key}")


@contextmanager
def limited(seconds: float, megabytes: float, slack: float = 2.0) -> Iterator[Used]:
    """Runs a block with a limit, and afterwards says what it took.

    Beyond `slack` times the limits it is stopped: `TooSlow` after that much processor time, `MemoryError` where the address space would
    grow by that much. Whoever calls asserts the limits themselves on what comes back.

    Args:
        seconds: Processor time.
        megabytes: Memory.
        slack: See above.
    """
    used = Used()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    before, space = _status("VmRSS"), _status("VmSize")
    old = resource.getrlimit(resource.RLIMIT_AS)

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"stopped after {slack * seconds:g} s of processor time")

    handler = signal.signal(signal.SIGVTALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (space + int(slack * megabytes * 2**20), old[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, slack * seconds)
    start = time.process_time()
    try:
        yield used
    finally:
        used.seconds = time.process_time() - start
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, old)
        signal.signal(signal.SIGVTALRM, handler)
        used.megabytes = max(0.0, (_status("VmHWM") - before) / 2**20)
