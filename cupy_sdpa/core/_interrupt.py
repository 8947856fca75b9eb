"""Ctrl-C while ``python -m cupy_sdpa`` imports its modules: the process ends without a traceback.

Python imports the package before it runs ``__main__``, and ``sys.argv[0]`` is ``-m`` during this import only.
"""

from __future__ import annotations

import signal
import sys


def is_starting() -> bool:
    """True if Python was started with ``-m`` and has not found the module to run yet."""
    return sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


if is_starting():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
