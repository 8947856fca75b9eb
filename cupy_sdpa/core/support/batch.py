"""Whether the bits of a sequence's results depend on the rest of the batch.

The rules were measured on an H200 with cuDNN 9.19: every sequence alone, and in batches of 2 to 8 at several places, as arrays
of equal lengths (``benchmarks/results/h200_cudnn919_batch_bits.csv``). cuDNN documents nothing about it.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import Unsupported
from ..problem.problem import Problem
from ..problem.split import obstacle, split_of

#: What was measured.
MEASURED = "measured on an H200 with cuDNN 9.19"
#: The reasons and fixes for gradients.
OF_PACKED = "numpy's bits of packed gradients depend on the place in the arrays: pass dense arrays with seq_lens_q="
NOT_DETERMINISTIC = "the order in which dq is summed varies: pass deterministic=True"


def batch_dependence(problem: Problem, *, on_cudnn: bool) -> str:
    """Return why the bits of a sequence's out, stats, dq, dk or dv may depend on the rest of the batch, and the fix.

    Empty if they do not. Gradients of arrays that several sequences share, such as sinks, are sums over the batch in any case.
    The interpreter computes every head of every sequence by itself.
    """
    *_, sq, _, _ = problem.sizes
    settings = problem.settings
    if problem.trivial:
        return ""
    if settings.dropout:
        return "which weights are dropped depends on the place in the batch: omit dropout_p"
    if problem.fp8:
        return "the factors of FP8 arrays depend on the whole batch: pass 16-bit arrays"
    if not on_cudnn:
        return OF_PACKED if problem.packed and problem.backward else ""
    if problem.paged and settings.num_splits is None:
        return _of_pages(problem)
    if problem.backward and not problem.deterministic:
        return NOT_DETERMINISTIC
    if sq == 1 and not problem.paged and not problem.deterministic:
        return "the kernel for one query splits the keys by the size of the batch: pass deterministic=True"
    if settings.max_workspace is not None:
        return "the workspace grows with the batch, and max_workspace may select another kernel: omit it"
    return ""


def _of_pages(problem: Problem) -> str:
    """Return the reason and the fix for pages without ``num_splits``; the fix names this batch's number of chunks."""
    if other := obstacle(problem):
        return (
            f"pages without num_splits were not measured, and num_splits is not supported with {other}: gather the pages into "
            "dense k and v"
        )
    split = split_of(replace(problem, settings=problem.settings._replace(deterministic=True)))
    assert split
    return (
        f"the batch size determines the number of chunks of the keys: pass num_splits={split.chunks}, or another number, "
        "the same for all batches"
    )


def check_batch_invariant(problem: Problem, *, on_cudnn: bool) -> None:
    """Raise Unsupported if ``batch_invariant=True`` does not hold, or if this is unknown; see :func:`batch_dependence`."""
    if reason := batch_dependence(problem, on_cudnn=on_cudnn):
        raise not_invariant(reason)


def not_invariant(reason: str) -> Unsupported:
    """Return the error of a call with ``batch_invariant=True``."""
    return Unsupported(f"batch_invariant is True, but {reason}")
