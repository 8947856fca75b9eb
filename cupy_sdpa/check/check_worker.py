"""A worker process: its requests are cases, and its results their outcomes.

``python -m cupy_sdpa.check.check_worker [MODULE ...]`` imports the modules first. Tests of the self-test inject faults so.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from typing import Any

from .._workers import serve
from .case import Case, parse
from .execute import execute
from .outcome import Outcome


def run_case(case: Case) -> Outcome:
    """Run a case; on the GPU with memory that is full of NaN when it is allocated."""
    if case.engine not in ("gpu", "cupy"):
        return execute(case)
    pool = _poisoned_pool()
    try:
        return execute(case)
    finally:
        pool.free_all_blocks()  # for the other workers


@functools.cache
def _poisoned_pool() -> Any:
    """Make CuPy fill all memory that it allocates, including workspaces, with NaN (bytes of 255); returns the memory pool."""
    import cupy  # type: ignore[import-untyped,unused-ignore]

    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        memory.memset_async(255, size, cupy.cuda.get_current_stream())
        return memory

    cupy.cuda.set_allocator(allocate)
    return pool


def main() -> None:
    """Answer requests: the cases as text, so that a reported case is exactly what ran."""
    warnings.simplefilter("ignore")
    for module in sys.argv[1:]:
        importlib.import_module(module)
    serve(lambda text: run_case(parse(text)))


if __name__ == "__main__":
    main()
