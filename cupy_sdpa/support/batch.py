"""Whether the bits of a sequence's results depend on the rest of the batch.

The rules were measured on an H200 with cuDNN 9.19: every sequence alone, and in batches of 2 to 8 at several places, as arrays
of equal lengths (``benchmarks/results/h200_cudnn919_batch_bits.csv``). cuDNN documents nothing about it.
"""

from __future__ import annotations

from ..problem.problem import Problem

#: What was measured.
MEASURED = "measured on an H200 with cuDNN 9.19"


def batch_dependence(problem: Problem, *, on_cudnn: bool) -> str:
    """Why the bits of out, the row statistics, dq, dk and dv of a sequence may depend on the rest of the batch.

    Gradients of arrays that several sequences share, such as sinks, are sums over the batch in any case.

    Args:
        problem: the problem of the caller.
        on_cudnn: whether cuDNN runs it; the interpreter computes every head of every sequence by itself.

    Returns:
        The reason and the remedy; empty if the bits do not depend on it.
    """
    *_, sq, _, _ = problem.sizes
    settings = problem.settings
    if problem.trivial:
        return ""
    if settings.dropout:
        return "the weights that are dropped depend on the place in the batch: omit dropout_p"
    if not on_cudnn:
        return ""
    if problem.fp8 or problem.block_bits:
        return "FP8 arrays and blocks were not measured: pass arrays of 16 bits, and mask="
    if problem.paged and settings.num_splits is None:
        return "the batch size determines the number of chunks of the keys: pass num_splits="
    if problem.backward and not problem.deterministic:
        return "dq is a sum in an order that changes: pass deterministic=True"
    if sq == 1 and not problem.paged and not problem.deterministic:
        return "the kernel for one query splits the keys by the size of the batch: pass deterministic=True"
    if settings.max_workspace is not None:
        return "the workspace grows with the batch, and max_workspace may select another kernel: omit it"
    return ""
