"""Route cuDNN's own log to the logger ``cupy_sdpa.cudnn``, if that has a level of its own.

The level selects cuDNN's messages: ERROR, WARNING (why engines are rejected) or DEBUG (every function call). It is read
whenever a plan is built or loaded. Without a level cuDNN's log is left alone: the environment variables ``CUDNN_LOGLEVEL_DBG``
and ``CUDNN_LOGDEST_DBG`` control it.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

logger = logging.getLogger("cupy_sdpa.cudnn")

#: The levels of cuDNN's severities, ``CUDNN_SEV_ERROR`` and others.
_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.DEBUG}
#: The type of the function that cuDNN calls: severity, user data, ``cudnnDebug_t``, and the lines of the message, each ending
#: with a zero byte, the last one empty.
Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def mask_of_level() -> int:
    """Return the logger's severities as the mask for ``cudnnSetCallback``; 0 if the logger has no level of its own."""
    if logger.level == logging.NOTSET:
        return 0
    return sum(1 << severity for severity, level in _LEVELS.items() if logger.isEnabledFor(level))


def lines_at(address: int) -> list[str]:
    """Return the lines of a message without time and process, which log records already have."""
    lines = []
    while line := ctypes.string_at(address):
        address += len(line) + 1
        lines.append(line.decode(errors="replace").rstrip())
    return [line for line in lines if not line.startswith(("Time: ", "Process="))]


def _write(severity: int, _: Any, __: Any, message: int) -> None:
    logger.log(_LEVELS.get(severity, logging.CRITICAL), "%s", "\n".join(lines_at(message)))


#: The function that cuDNN calls. It lives as long as the process.
callback = Callback(_write)
