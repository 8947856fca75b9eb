"""The problems that this process keeps for a file of problems, if an environment variable asks for it."""

from __future__ import annotations

import os

from .problem import Problem

#: The environment variable with the file to which a process adds its problems when it ends.
VARIABLE = "CUPY_SDPA_TRACE"
#: The most problems that :func:`keep` keeps.
MAX_KEPT = 10_000

#: The problems that :func:`keep` was called with, oldest first; None if it keeps nothing.
problems: dict[Problem, None] | None = {} if os.environ.get(VARIABLE) else None


def keep(problem: Problem) -> None:
    """Keep a problem that no plan cache holds, if the environment variable is set; the first :data:`MAX_KEPT` are kept."""
    if problems is not None and len(problems) < MAX_KEPT:
        problems[problem] = None
