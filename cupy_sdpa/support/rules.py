"""What a cuDNN version or a GPU cannot run, as data: a table of rules, each with its sentence.

Every sentence names both values and the remedy, in the caller's own terms. :mod:`cupy_sdpa.support.why_not` asks them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import Unsupported
from ..problem.problem import CU_SEQLENS, KEY_ARRAYS, QUERY_ARRAYS, ROW_STATS, Problem, has_ragged_alibi, writes_dq_directly
from ..problem.tensor_spec import ITEMSIZE, TensorSpec, dense_strides
from ..version import MINIMUM_CUDNN, version_text

#: The oldest GPU generation with cuDNN's flash attention (Ampere), as major * 10 + minor.
MINIMUM_CAPABILITY = 80


@dataclass(frozen=True)
class Rule:
    """One thing that cuDNN or a GPU cannot do, or does wrongly.

    Attributes:
        name: short and stable.
        summary: one sentence for the documentation.
        error: what the call raises.
        violations: (problem, cuDNN version, compute capability) -> sentences, with both values and the remedy.
        link: where it was found out.
        refuses: whether such a call is refused. Otherwise it runs if cuDNN can plan it, and is reported as not verified.
    """

    name: str
    summary: str
    error: type[Exception]
    violations: Callable[[Problem, int, int], Iterator[str]]
    link: str = ""
    refuses: bool = True


def _version(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if cudnn < MINIMUM_CUDNN:
        yield (
            f"cuDNN is {version_text(cudnn)}, {version_text(MINIMUM_CUDNN)} or newer is needed: "
            "pip install 'cupy-sdpa[cuda12]' (or [cuda13])"
        )


def _generation(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if capability < MINIMUM_CAPABILITY:
        yield (
            f"the GPU has compute capability {capability / 10}, {MINIMUM_CAPABILITY / 10} (Ampere) or newer is needed: "
            "use numpy arrays to compute on the CPU"
        )


def _dtype(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.dtype not in ("float16", "bfloat16"):
        yield (
            f"q, k and v are {problem.dtype}; cuDNN's attention takes float16 and bfloat16: convert with "
            "q.astype(ml_dtypes.bfloat16), or pass numpy arrays to compute on the CPU"
        )


def _head_dim(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for name, spec in (("head_dim of q and k", problem.q), ("head_dim of v", problem.v)):
        if spec.shape[0] % 8 or not (spec.shape[0] or problem.trivial):
            up = -spec.shape[0] % 8 or 8
            yield f"the {name} is {spec.shape[0]}; cuDNN takes multiples of 8: pad axis 0 with {up} zeros, give scale="


def _contiguous(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in _arrays(problem):
        if spec.strides[0] != ITEMSIZE[spec.dtype]:
            yield (
                f"{spec.name} has a stride of {spec.strides[0]} bytes along head_dim, elements have {ITEMSIZE[spec.dtype]}: "
                f"axis 0 must be contiguous. Copy it with cupy.asfortranarray({spec.name}); "
                "an array in C order (batch, seq, heads, head_dim) is passed as x.T"
            )


def _negative(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in _arrays(problem):
        if min(spec.strides) < 0:
            yield (
                f"{spec.name} has strides {spec.strides} bytes, cuDNN takes none below 0: "
                f"copy it with cupy.asfortranarray({spec.name})"
            )


def _aligned_strides(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in _arrays(problem):
        odd = [step for step, length in zip(spec.strides[1:], spec.shape[1:], strict=True) if step % 16 and length > 1]
        if odd and spec.shape[0] and spec.shape[0] % 8 == 0:
            yield (
                f"{spec.name} has strides {spec.strides} bytes; {odd[0]} is not a multiple of 16, which cuDNN's kernels need "
                f"and do not check: copy it with cupy.asfortranarray({spec.name})"
            )


def _aligned_memory(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in problem.tensors:
        if spec.alignment < 16 and not spec.dtype.startswith("int"):
            yield (
                f"{spec.name} begins at an address that is a multiple of {spec.alignment} bytes, cuDNN's kernels need 16: "
                f"copy it with {spec.name}.copy(order='F')"
            )


def _dense_stats(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    large = {*QUERY_ARRAYS, *KEY_ARRAYS, *CU_SEQLENS} - set(ROW_STATS)
    for spec in problem.tensors:
        if spec.name not in large and not spec.dense:
            dense = dense_strides(spec.shape, ITEMSIZE[spec.dtype])
            yield f"{spec.name} has strides {spec.strides} bytes, cuDNN needs {dense}: make it with order='F'"


def _grid(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    _, _, hq, _, _, _, b = problem.sizes
    for what, value in (("batch", b), ("query heads", hq)):
        if value > 65535:
            yield f"{value} {what}; a launch takes at most 65535: call in parts"


def _backward_head_dim(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    d, dv, *_ = problem.sizes
    if capability < 90 or capability >= 120:
        allowed = max(d, dv) <= 128
    elif capability < 100:
        allowed = max(d, dv) <= 256
    else:
        allowed = max(d, dv) <= 128 or (d, dv) == (192, 128) or _wide_on_blackwell(problem, cudnn)
    if problem.backward and not allowed:
        yield (
            f"gradients with head dims {d} and {dv} are not supported on compute capability {capability / 10} with cuDNN "
            f"{version_text(cudnn)}: use head dims up to {256 if 90 <= capability < 100 else 128}"
        )


def _wide_on_blackwell(problem: Problem, cudnn: int) -> bool:
    return problem.sizes[:2] == (256, 256) and cudnn >= 92300


def _backward_256(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.backward and 100 <= capability < 120 and _wide_on_blackwell(problem, cudnn):
        yield f"gradients with head dim 256 were not run on compute capability {capability / 10}"


def _dropout_one_query(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    d, dv, _, _, sq, _, _ = problem.sizes
    planned = max(d, dv) <= 128 or (d == dv == 256 and cudnn >= 92800)
    if 100 <= capability < 120 and not problem.backward and problem.settings.dropout and sq == 1 and not planned:
        yield (
            f"one query, dropout and head dims {d} and {dv} are given; compute capability {capability / 10} supports head dims "
            "up to 128 then: pass the query twice"
        )


def _integers_of_one_key(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    *_, sq, skv, _ = problem.sizes
    if (sq, skv) == (1, 1) and any(spec.dtype == "int32" for spec in problem.captured):
        yield (
            "tensors has an int32 array, and there is one query and one key; cuDNN reads its negative integers as unsigned "
            "then: pass the array as float32"
        )


def _deterministic(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.backward and problem.deterministic and capability >= 120:
        yield f"deterministic gradients were not run on compute capability {capability / 10}"


def _bias_dtype(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.bias and problem.bias.dtype == "float64":
        yield "bias is float64; cuDNN adds float16, bfloat16 and float32: convert with bias.astype('float32')"
    if any(spec.dtype == "float64" for spec in problem.captured):
        yield "tensors has a float64 array; cuDNN reads float16, bfloat16 and float32: convert with .astype('float32')"


def _captured_int64(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if any(spec.dtype == "int64" for spec in problem.captured):
        yield "tensors has an int64 array; cuDNN's kernels compute with integers of 32 bits: convert with .astype('int32')"


def _own_dropout(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.dropout_mask:
        yield "dropout_mask is given; on the GPU dropout draws its own: give seed and offset, or pass numpy arrays"


def _max_sumexp(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.max and problem.sinks:
        yield "return_stats='max_sumexp' and sinks are given; cuDNN writes no maximum beside a sink: take the log-sum-exp alone"
    if problem.max and problem.seq_lens_q:
        yield (
            "return_stats='max_sumexp' and lengths are given; cuDNN does not write the maximum then, or not of every row: "
            "take the log-sum-exp alone, or pack the sequences"
        )


def _deterministic_sinks(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.dsinks and problem.deterministic:
        yield "the gradient of the sinks is added up in any order by cuDNN: leave deterministic=True or return_dsinks=True out"


def _bias_gradient(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.ds_reductions and problem.packed:
        option = "return_dbias=True" if problem.dbias else "return_dtensors"
        yield (
            f"{_sum_of(problem)} is asked for and the sequences are packed; cuDNN's kernel was seen to reach beyond the "
            f"arrays: leave {option} out, or pad the sequences and give seq_lens_q and seq_lens_kv"
        )


def _sum_of(problem: Problem) -> str:
    return "the bias's gradient" if problem.dbias else "the gradient of tensors"


def _direct(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    direct = f"{_sum_of(problem)} is" if problem.ds_reductions else "deterministic gradients are"
    wide = max(problem.sizes[:2]) > 128
    also = "packed sequences" if problem.packed else "dropout" if problem.settings.dropout else "head dims above 128" * wide
    if problem.backward and writes_dq_directly(problem) and also and 100 <= capability < 120:
        yield f"{direct} not supported with {also} on compute capability {capability / 10}: leave one of them out"


def _query_numbers(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    *_, sq, skv, _ = problem.sizes
    added_up = 100 <= capability < 120 and not writes_dq_directly(problem)
    if not problem.backward or sq == 1 or 90 <= capability < 100 or added_up:
        return
    for spec in (problem.bias, problem.mask, *problem.captured):
        if spec and spec.shape[0] == 1 and (spec.shape[1] > 1 or skv == 1):
            what = "what a score or mask function reads" if spec in problem.captured else spec.name
            yield (
                f"{what} has shape {spec.shape}, one number a query, which gradients on compute capability "
                f"{capability / 10} cannot take: give it with the keys' axis in full"
            )
    if has_ragged_alibi(problem):
        yield (
            "alibi_slopes with a diagonal from the bottom right of every entry's own are not supported in gradients on compute "
            f"capability {capability / 10}: use causal=True, or give the distances as bias="
        )


def _scale(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    changed = problem.settings.softcap or problem.has_score_mod
    if (
        problem.backward
        and not problem.settings.positive_scale
        and (problem.ds_reductions or changed)
        and 90 <= capability < 100
    ):
        what = "gradients through a softcap" if problem.settings.softcap else "gradients through score_mod"
        what = _sum_of(problem) if problem.ds_reductions else what
        yield (
            f"{what} and a scale of 0 or below are asked for; cuDNN was seen to give NaN: give a positive scale, and change "
            "the sign of q"
        )


def _scale_elsewhere(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if not 90 <= capability < 100 and next(_scale(problem, cudnn, 90), None):
        yield (
            "gradients through a score function, a softcap, or of a bias or tensors, with a scale of 0 or below, were not run "
            f"on compute capability {capability / 10}; on 9.0 they are NaN"
        )


def _packed_gradients(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.backward and problem.packed and not 90 <= capability < 100:
        yield f"gradients of packed sequences were not run on compute capability {capability / 10}"


def _arrays(problem: Problem) -> tuple[TensorSpec, ...]:
    """The large arrays, which tensor cores read and write in blocks."""
    return tuple(spec for spec in problem.tensors if spec.name in QUERY_ARRAYS + KEY_ARRAYS and spec.name not in ROW_STATS)


FRONTEND = "https://github.com/NVIDIA/cudnn-frontend"
PYTORCH = "https://github.com/pytorch/pytorch"

#: Every rule, in the order in which people should hear of them.
RULES: tuple[Rule, ...] = (
    Rule("cudnn-version", "cuDNN 9.19 or newer.", Unsupported, _version),
    Rule("gpu-generation", "Compute capability 8.0 (Ampere) or newer.", Unsupported, _generation),
    Rule("dtype", "float16 and bfloat16 only; with float32 a float16 kernel would read past the data.", TypeError, _dtype,
         f"{FRONTEND}/issues/424"),
    Rule("head-dim", "Head dims that are multiples of 8.", Unsupported, _head_dim),
    Rule("contiguous-head-dim", "Axis 0 contiguous; all else is a segmentation fault in cuDNN.", ValueError, _contiguous),
    Rule("negative-stride", "No negative strides.", ValueError, _negative),
    Rule("stride-alignment", "Strides that are multiples of 16 bytes; others are silently wrong or fault.", ValueError,
         _aligned_strides, FRONTEND),
    Rule("memory-alignment", "Memory aligned to 16 bytes.", ValueError, _aligned_memory, FRONTEND),
    Rule("dense-stats", "stats, bias and all other small arrays dense in Fortran order; other strides are written as if "
         "dense.", ValueError, _dense_stats,
         "https://github.com/JuliaGPU/CUDA.jl/pull/3238"),
    Rule("grid", "At most 65535 batch entries and query heads.", Unsupported, _grid, PYTORCH),
    Rule("backward-head-dim", "Gradients: head dims up to 256 on Hopper, 128 on Ampere, Ada and SM 12.x; on SM 10.x 128, and "
         "192 with 128 for v, and 256 from 9.23 on.", Unsupported, _backward_head_dim, FRONTEND),
    Rule("bias-dtype", "A bias of 16 or 32 bits.", TypeError, _bias_dtype),
    Rule("int64-tensors", "Integers of 32 bits in tensors.", TypeError, _captured_int64),
    Rule("bias-gradient", "The gradients of a bias and of tensors: not of packed sequences.", Unsupported, _bias_gradient),
    Rule("query-numbers", "Gradients: on Ampere, Ada and SM 12.x no bias, mask or tensors of one number a query, nor slopes "
         "with diagonals of the entries' own; on SM 10.x not deterministic, nor with gradients of bias or tensors.",
         Unsupported, _query_numbers),
    Rule("direct-blackwell", "Gradients of bias and tensors, and deterministic ones: on SM 10.x not with dropout, packed "
         "sequences, or above head dim 128.", Unsupported, _direct),
    Rule("positive-scale", "Gradients of bias and tensors, and with softcap or score_mod: a scale above 0 on Hopper.",
         Unsupported, _scale),
    Rule("dropout-one-query", "One query with dropout: on SM 10.x head dims up to 128, and 256 from 9.28 on.", Unsupported,
         _dropout_one_query),
    Rule("dropout-mask", "Dropout by random numbers only.", Unsupported, _own_dropout),
    Rule("max-sumexp", "The maximum and the sum: not with sinks, and not with lengths.", Unsupported, _max_sumexp),
    Rule("deterministic-sinks", "The sinks' gradient is not deterministic.", Unsupported, _deterministic_sinks),
    Rule("one-key-integers", "No int32 arrays in functions of one query and one key.", Unsupported, _integers_of_one_key),
    Rule("packed-gradients", "Gradients of packed sequences: not run on other GPUs than Hopper.", Unsupported,
         _packed_gradients, FRONTEND, refuses=False),
    Rule("positive-scale-elsewhere", "Gradients of bias and tensors, and with softcap or score_mod, with a scale of 0 or "
         "below: not run on other GPUs than Hopper.", Unsupported, _scale_elsewhere, refuses=False),
    Rule("backward-256", "Gradients with head dim 256: not run on SM 10.x. cuDNN 9.28 does not compile the kernel for the "
         "described B200.", Unsupported, _backward_256, FRONTEND, refuses=False),
    Rule("deterministic", "Deterministic gradients: not run on SM 12.x.", Unsupported, _deterministic,
         "https://github.com/NVIDIA/TransformerEngine", refuses=False),
)  # fmt: skip
