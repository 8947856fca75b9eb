"""The rules of FP8 arrays: functions of (problem, cuDNN version, compute capability), which :mod:`.rules` lists."""

from __future__ import annotations

from collections.abc import Iterator

from ..problem.problem import Problem


def gpu(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """GPUs without FP8."""
    if problem.fp8 and capability < 90:
        yield (
            f"q, k and v are {problem.dtype}; compute capability {capability / 10} does not support FP8, 9.0 (Hopper) and "
            "newer do: pass float16 or bfloat16 arrays"
        )


def head_dim(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """Head dims that are too large."""
    d, dv, *_ = problem.sizes
    if problem.fp8 and max(d, dv) > (128 if capability >= 120 else 256):
        yield (
            f"the head dims are {d} and {dv}; FP8 supports head dims up to {128 if capability >= 120 else 256} on compute "
            f"capability {capability / 10}: pass bfloat16 arrays"
        )


def wide_values(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """Head dims of v above 128 with a smaller one of q and k, which end in an illegal memory access on Hopper."""
    d, dv, *_ = problem.sizes
    if problem.fp8 and d <= 128 < dv and capability < 100:
        yield (
            f"the head_dim of q and k is {d} and that of v {dv}; on compute capability {capability / 10} values above 128 "
            "need q and k above 128 in FP8: pad q and k with zeros to 144 and pass scale=, or pass bfloat16 arrays"
        )


def writes_16_bits(capability: int) -> bool:
    """Whether a GPU writes outputs of FP8 arrays in 16 bits."""
    return 100 <= capability < 120


def out(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """Outputs of another dtype."""
    if problem.fp8 and problem.out.dtype != problem.dtype and not writes_16_bits(capability):
        yield (
            f"out_dtype is {problem.out.dtype}; compute capability {capability / 10} writes the output of FP8 arrays in FP8: "
            "omit out_dtype, and convert the result with its method dequantize"
        )


def one_query(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """A single query."""
    if problem.fp8 and problem.sizes[4] == 1 and not 100 <= capability < 120:
        yield (
            f"there is one query; on compute capability {capability / 10} FP8 needs two or more: pass the query twice, or pass "
            "bfloat16 arrays"
        )


def scale(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """Scales of 0 and below."""
    if problem.fp8 and not problem.settings.positive_scale:
        yield "a scale of 0 or below is not supported with FP8 arrays: results are 0 or NaN; pass a positive scale and -q"


def packed(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """Packed sequences."""
    if problem.fp8 and problem.packed and not 100 <= capability < 120:
        yield (
            "packed sequences of FP8 arrays end in an illegal instruction: pad the sequences and pass seq_lens_q and "
            "seq_lens_kv, or pass bfloat16 arrays"
        )


def scores(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    """Options that change the scores, or drop weights."""
    options = {
        "sinks": problem.sinks, "bias": problem.bias, "mask or block_mask": problem.mask,
        "score_mod or mask_mod": problem.settings.program,
        "softcap": problem.settings.softcap, "alibi_slopes": problem.alibi_slopes, "dropout_p": problem.settings.dropout,
        "return_stats='max_sumexp'": problem.max,
    }  # fmt: skip
    for name, value in options.items():
        if problem.fp8 and value:
            yield (
                f"{name} is not supported with FP8 arrays: cuDNN does not compile the kernel, or it was seen to return wrong "
                "results on Hopper; omit it, or pass bfloat16 arrays"
            )
