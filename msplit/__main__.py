"""`python -m msplit` is `msplit`: the entry that Ctrl-C may meet while the rest is still being imported."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130

_BY_SIGNAL = 128

_LONGEST_EXIT = 10.0
"""Seconds that a command may take to exit when a signal has ended it."""

_COLLECTIONS = 20_000, 2, 2
"""New objects after which Python looks for garbage among the youngest, and how many such looks lead to one among the older. By default
it looks every 700 objects, 6 % of a short command's time; at all objects it looks about as often as by default."""


def entry() -> None:
    """Runs the command line and exits, see `msplit.cli.main.run`; interrupted while importing, it ends without a traceback."""
    # Ours are small arrays: a thread for each processor costs more to start than it saves.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        import gc
        import signal

        gc.set_threshold(*_COLLECTIONS)

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
