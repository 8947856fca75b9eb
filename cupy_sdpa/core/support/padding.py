"""The padding of a batch with lengths: either cuDNN does not read it, or arrays are copied with zeros as padding.

cuDNN's kernels for dense arrays multiply the padding by a probability of 0, so NaN there would spread. Its kernels for packed
sequences read each sequence only up to its length. A padded batch is a packed batch whose sequences begin at multiples of the
batch stride: with these constants as ragged offsets nothing is copied (``Settings.padded``). Where packed sequences are
unsupported, wrong or not measured, inputs are copied. The form does not depend on the version or the GPU, because arrays are
prepared and plans are stored before they are known.
"""

from __future__ import annotations

from ..problem.problem import Problem
from ..problem.tensor_spec import TensorSpec


def has_padding(problem: Problem) -> bool:
    """True if the problem is a batch of dense arrays with lengths."""
    return problem.seq_lens_q is not None and not problem.paged and not problem.packed


def copy_reason(problem: Problem) -> str:
    """Return why arrays of a batch with lengths are copied; empty if they are not."""
    d, dv, _, _, sq, _, _ = problem.sizes
    settings, backward = problem.settings, problem.backward
    large = (problem.q, problem.k, problem.v, problem.out, problem.dout, problem.dq, problem.dk, problem.dv)
    options = {
        # the kernel for one query splits the keys; packed sequences are planned for two queries
        "one query": sq == 1,
        # its kernel for packed sequences ends in an illegal instruction on Hopper
        "FP8": problem.fp8,
        # the distance of two offsets would be less than the extent of a sequence, which was not measured
        "batch items that are interleaved in memory": any(spec and _is_interleaved(spec) for spec in large),
        # both passes need the same random numbers, and the other pass may need copies
        "dropout_p": settings.dropout,
        "deterministic=True": backward and problem.deterministic,
        "return_dbias=True or return_dtensors": problem.ds_reductions,
        "return_dsinks=True": problem.dsinks,
        # packed-narrow-gradient in the table of known bugs
        "gradients with a head dim that is not a multiple of 16": backward and d % 16,
        # not planned for Ampere, Ada and SM 12.x, which do not support 192 and 128 in any form; packed-narrow-values
        "gradients with different head dims, except 192 and 128": backward and d != dv and (d, dv) != (192, 128),
        # dq is written at the offsets and with the strides of q
        "gradients of arrays that are not dense": backward
        and not all(spec.dense for spec in (problem.q, problem.dq, problem.dk, problem.dv) if spec),
    }
    return next((name for name, applies in options.items() if applies), "")


def _is_interleaved(spec: TensorSpec) -> bool:
    """True if a batch item begins before the previous one ends; also if the array is broadcast along the batch."""
    *shape, batch = spec.shape
    extent = sum(stride * (length - 1) for stride, length in zip(spec.strides, shape, strict=False))
    return batch > 1 and spec.strides[3] <= extent


def masked_inputs(problem: Problem) -> dict[str, str]:
    """Return the inputs that are copied with zeros as padding, each with the array of its lengths.

    The values are multiplied by a probability of 0 in the forward pass, every operand in the backward pass.
    """
    if not has_padding(problem) or problem.settings.padded:
        return {}
    if not problem.backward:
        return {"v": "seq_lens_kv"}
    return {"q": "seq_lens_q", "dout": "seq_lens_q", "k": "seq_lens_kv", "v": "seq_lens_kv"}


def description(problem: Problem) -> str:
    """Return how the engine's problem keeps padding from spreading; empty without padding."""
    if not has_padding(problem):
        return ""
    if problem.settings.padded:
        return "not read"
    reason = copy_reason(problem)
    return f"zeros in a copy of {', '.join(masked_inputs(problem))}{f' ({reason})' if reason else ''}"
