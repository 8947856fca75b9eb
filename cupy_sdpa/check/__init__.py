"""A randomized self-test for any GPU and cuDNN: ``python -m cupy_sdpa check``.

It draws random problems, runs each several times in worker processes, compares every result with an independent float64
reference, and shrinks each failure to one line of Python. :func:`reproduce` runs such a line.
"""

from __future__ import annotations

from .case import Case

__all__ = ["Case", "reproduce"]


def reproduce(case: Case) -> None:
    """Run a case in this process and print its outcome.

    Args:
        case: the case, as printed with a finding.

    >>> reproduce(Case(options={"causal": "top_left"}))
    forward on the CPU engine, float32: batch 1, 1 heads, 2 queries, 2 keys, head dim 8; causal='top_left'
    passed: 3 calls
    """
    from .pool import run_case

    print(case.describe())
    outcome = run_case(case)
    print(f"{outcome.kind}: {outcome.message or f'{outcome.calls} calls'}")
