"""Threads and open files that are there since some moment. Those of tests before may end meanwhile, so nothing is counted."""

import os
import threading


def _open_files() -> set[tuple[str, str]]:
    files = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            files.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # that of the listing itself, or of another thread
            continue
    return files


class Leftovers:
    """What came after this was made, and is still there."""

    def __init__(self) -> None:
        self._threads, self._files = set(threading.enumerate()), _open_files()

    def threads(self) -> list[str]:
        """Names of threads."""
        return sorted(one.name for one in set(threading.enumerate()) - self._threads)

    def files(self) -> list[tuple[str, str]]:
        """Descriptors, and what they are of."""
        return sorted(_open_files() - self._files)
