"""`python -m msplit` is `msplit`: the entry that Ctrl-C may meet while the rest is still being imported."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130

_BY_SIGNAL = 128

_LONGEST_EXIT = 10.0
"""Seconds that a command may take to exit when a signal has ended it."""


def entry() -> None:
    """Runs the command line and exits, see `msplit.cli.main.run`; interrupted while importing, it ends without a traceback."""
    try:
        import signal

        from msplit.cli.main import run

        code = run(sys.argv[1:])
        # What others do at exit may take a while; an interrupt ends it quietly.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if code > _BY_SIGNAL:  # nor does it wait for threads of libraries
            from threading import Timer

            last = Timer(_LONGEST_EXIT, os._exit, [code])
            last.daemon = True
            last.start()
    except KeyboardInterrupt:
        os.write(2, b"interrupted\n")
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    entry()
