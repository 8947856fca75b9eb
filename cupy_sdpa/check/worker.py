"""A process that runs cases: it reads them from stdin, one a line, and writes outcomes to stdout as JSON.

``python -m cupy_sdpa.check.worker [MODULE]``; MODULE is imported first. Tests of the self-test use it to plant errors.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import warnings
from typing import Any

from .cases.case import Case, parse
from .verify.execute import execute
from .verify.outcome import Outcome


def prepared(case: Case) -> Outcome:
    """Run a case; on the GPU with an allocator whose memory is full of NaN."""
    if case.engine != "gpu":
        return execute(case)
    pool = _poisoned_memory()
    try:
        return execute(case)
    finally:
        pool.free_all_blocks()  # other workers need it


@functools.cache
def _poisoned_memory() -> Any:
    """Let all memory of CuPy's, workspaces too, hold NaN (every byte 255) when it is allocated; gives the pool."""
    import cupy  # type: ignore[import-untyped,unused-ignore]

    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        memory.memset_async(255, size, cupy.cuda.get_current_stream())
        return memory

    cupy.cuda.set_allocator(allocate)
    return pool


def serve() -> None:
    """Answer until there are no more cases, or the process is no longer fit for use."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    warnings.simplefilter("ignore")
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        outcome = prepared(parse(line))
        answers.write(json.dumps(outcome.as_dict()) + "\n")
        answers.flush()
        if outcome.fatal:
            os._exit(0)


if __name__ == "__main__":
    serve()
