"""The rules: what a cuDNN version or a GPU cannot run, one :class:`Rule` entry each.

A rule is an entry in :data:`RULES`: a condition and a message (:func:`when`), or a generator function that yields a message for
every violation. The message contains the value, the limit and the fix, in terms of the caller's arguments. Wrong results and
crashes of single versions are known bugs (:mod:`.known_bugs`), not rules.

To add a rule, write the entry, add a case for each side of the limit to ``SIDES`` in tests/support/test_support.py (to
``DOUBTS`` if the rule raises no error), and regenerate docs/support.md:
``python tools/support_table.py page > docs/support.md``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import INSTALL_FOR_GPU, Unsupported
from ..options.table import OF_DIAGONAL, OPTIONS
from ..problem.arrays import CU_SEQLENS, KEY_ARRAYS, QUERY_ARRAYS, REQUESTED_GRADIENTS, ROW_STATS, SCORE_GRADIENTS
from ..problem.problem import Problem, has_ragged_diagonal, writes_dq_directly
from ..problem.tensor_spec import ITEMSIZE, TensorSpec, density_obstacle, stride_obstacle
from ..version import MINIMUM_CUDNN, version_text

#: What runs a call that cuDNN does not, and what it costs.
WITHOUT_CUDNN = (
    "pass engine='cupy', which computes with CuPy's own operations: on any GPU and in float32 and float64, but slower"
)
#: The lowest compute capability with cuDNN's flash attention (Ampere); 8.0 is 80.
MINIMUM_CAPABILITY = 80
#: Head dims must be multiples of this number in 16 bits, and of twice this number in FP8.
HEAD_DIM_MULTIPLE = 8
#: Compute capabilities: of the supported GPUs, of some generations, and of all other generations.
ALL_GPUS, HOPPER, BLACKWELL = range(MINIMUM_CAPABILITY, 130), range(90, 100), range(100, 120)
_ANY = range(130)
_NOT_HOPPER, _NOT_BLACKWELL = ({*_ANY}.difference(gpus) for gpus in (HOPPER, BLACKWELL))

#: (problem, cuDNN version, compute capability) -> a message for every violation.
Violations = Callable[[Problem, int, int], Iterator[str]]


def when(condition: Callable[[Problem], Any], text: str, capabilities: Container[int] = _ANY) -> Violations:
    """Yield the violation of problems with a condition on some GPUs.

    ``text`` is a format of the problem ``p``, the compute capability ``gpu`` and the version ``cudnn``.
    """

    def violations(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
        if capability in capabilities and condition(problem):
            yield text.format(p=problem, gpu=capability / 10, cudnn=version_text(cudnn))

    return violations


@dataclass(frozen=True)
class Rule:
    """A limit of cuDNN or of a GPU.

    Attributes:
        name: a short, stable name; the value that ``CUPY_SDPA_GUARDS_OFF`` takes.
        summary: one sentence for the documentation.
        error: the exception that a call raises.
        violations: yields a message for every violation.
        link: the source. Default: measured.
        refuses: whether a call raises an error. Otherwise it runs if cuDNN can plan it, and is reported as unverified.
        planned: whether cuDNN plans what the rule rules out, with wrong or irreproducible results, so that
            ``tools/support_table.py measure`` cannot confirm the rule. Default False.
    """

    name: str
    summary: str
    error: type[Exception]
    violations: Violations
    link: str = ""
    refuses: bool = True
    planned: bool = False


def _version(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if cudnn < MINIMUM_CUDNN:
        yield (f"cuDNN is {version_text(cudnn)}; {version_text(MINIMUM_CUDNN)} or newer is required: {INSTALL_FOR_GPU}")


def _head_dim(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for name, spec in (("head_dim of q and k", problem.q), ("head_dim of v", problem.v)):
        head_dim, unit = spec.shape[0], HEAD_DIM_MULTIPLE * (2 if problem.fp8 else 1)
        if head_dim % unit or not (head_dim or problem.trivial):
            missing = -head_dim % unit or unit
            advice = f"pad axis 0 with {missing} zeros and pass scale="
            if spec.shape[-1] and not spec.shape[-1] % unit:  # probably in C order
                advice += f"; if the last axis of {spec.name} {spec.shape} is head_dim, pass layout='bshd' or layout='bhsd'"
            yield f"the {name} is {head_dim}; cuDNN supports multiples of {unit}: {advice}"


def _contiguous(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in _large_arrays(problem):
        if spec.strides[0] != ITEMSIZE[spec.dtype]:
            yield stride_obstacle(spec, written=spec in problem.results)


def _negative(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in _large_arrays(problem):
        if spec.strides[0] == ITEMSIZE[spec.dtype] and (text := stride_obstacle(spec, written=spec in problem.results)):
            yield text


def _aligned_strides(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in _large_arrays(problem):
        steps = zip(spec.strides[1:], spec.shape[1:], strict=True)
        unaligned = [step for step, length in steps if step % 16 and length > 1]
        if unaligned and spec.shape[0] and spec.shape[0] % (16 // ITEMSIZE[spec.dtype]) == 0:
            yield (
                f"{spec.name} has strides {spec.strides} bytes; {unaligned[0]} is not a multiple of 16, which cuDNN's kernels "
                f"require and do not check: copy it with cupy.asfortranarray({spec.name})"
            )


def _aligned_memory(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in problem.tensors:
        if spec.alignment < 16 and not spec.dtype.startswith("int"):
            yield (
                f"{spec.name} starts at an address that is a multiple of {spec.alignment} bytes; cuDNN's kernels require 16: "
                f"copy it with {spec.name}.copy(order='F')"
            )


def _dense_stats(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    large = {*QUERY_ARRAYS, *KEY_ARRAYS, *CU_SEQLENS, "page_table"} - set(ROW_STATS)
    for spec in problem.tensors:
        if spec.name not in large and (text := density_obstacle(spec)):
            yield text


def _grid(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    _, _, hq, _, _, _, b = problem.sizes
    for name, value in (("batch size", b), ("number of query heads", hq)):
        if value > 65535:
            yield f"the {name} is {value}; a kernel launch supports at most 65535: split the call"


def _backward_head_dim(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    d, dv, *_ = problem.sizes
    if capability < 90 or capability >= 120:
        supported = max(d, dv) <= 128
    elif capability < 100:
        supported = max(d, dv) <= 256
    else:
        supported = max(d, dv) <= 128 or (d, dv) == (192, 128) or _is_256_on_blackwell(problem, cudnn)
    if problem.backward and not supported:
        yield (
            f"gradients with head dims {d} and {dv} are not supported on compute capability {capability / 10} with cuDNN "
            f"{version_text(cudnn)}: use head dims up to {256 if 90 <= capability < 100 else 128}"
        )


def _is_256_on_blackwell(problem: Problem, cudnn: int) -> bool:
    return problem.sizes[:2] == (256, 256) and cudnn >= 92300


def _backward_256(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.backward and capability in BLACKWELL and _is_256_on_blackwell(problem, cudnn):
        yield f"gradients with head dim 256 were not run on compute capability {capability / 10}"


def _dropout_one_query(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    d, dv, _, _, sq, _, _ = problem.sizes
    planned = max(d, dv) <= 128 or (d == dv == 256 and cudnn >= 92800)
    if capability in BLACKWELL and not problem.backward and problem.settings.dropout and sq == 1 and not planned:
        yield (
            f"one query with dropout and head dims {d} and {dv} is not supported on compute capability {capability / 10}, "
            "which takes head dims up to 128 here: pass the query twice"
        )


def writes_16_bits(capability: int) -> bool:
    """True if a GPU writes outputs of FP8 arrays in 16 bits."""
    return capability in BLACKWELL


def _fp8_head_dim(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    (d, dv, *_), most = problem.sizes, 128 if capability >= 120 else 256
    if problem.fp8 and max(d, dv) > most:
        yield (
            f"the head dims are {d} and {dv}; FP8 supports head dims up to {most} on compute capability {capability / 10}: "
            "pass bfloat16 arrays"
        )


def _fp8_scores(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    names: dict[str, list[str]] = {"max": ["return_stats='max_sumexp'"]} if problem.max else {}
    for option in OPTIONS.values():
        if option.weights and option.of(problem):
            names.setdefault(option.part or option.name, []).append(option.name)
    for one in names.values() if problem.fp8 else ():
        yield (
            f"{' or '.join(one)} is not supported with FP8 arrays: cuDNN does not compile the kernel, or it was seen to return "
            "wrong results on Hopper; omit it, or pass bfloat16 arrays"
        )


def _bias_dtype(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.bias and problem.bias.dtype == "float64":
        yield "bias is float64; cuDNN supports float16, bfloat16 and float32: convert with bias.astype('float32')"
    if any(spec.dtype == "float64" for spec in problem.captured):
        yield "tensors contains a float64 array; cuDNN supports float16, bfloat16 and float32: convert with .astype('float32')"


def _max_sumexp(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.max and problem.sinks:
        yield (
            "return_stats='max_sumexp' is not supported with sinks, for which cuDNN does not write the maximum: use "
            "return_stats=True"
        )
    if problem.max and problem.seq_lens_q:
        yield (
            "return_stats='max_sumexp' is not supported with sequence lengths, for which cuDNN does not write the maximum of "
            "every row: use return_stats=True, or pack the sequences"
        )


def _bias_gradient(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.ds_reductions and problem.packed:
        rows = (f"{row.request}=True" for row in SCORE_GRADIENTS if getattr(problem, row.name))
        option = next(rows, "return_dtensors")
        yield (
            f"{_score_gradient(problem)} is not supported with packed sequences: cuDNN's kernel was seen to access memory "
            f"beyond the arrays. Omit {option}, or pad the sequences and pass seq_lens_q and seq_lens_kv"
        )


def _score_gradient(problem: Problem) -> str:
    return f"the gradient of {next((row.of for row in SCORE_GRADIENTS if getattr(problem, row.name)), 'tensors')}"


def _direct(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    direct = f"{_score_gradient(problem)} is" if problem.ds_reductions else "deterministic gradients are"
    wide = max(problem.sizes[:2]) > 128
    other = "packed sequences" if problem.packed else "dropout" if problem.settings.dropout else "head dims above 128" * wide
    if problem.backward and writes_dq_directly(problem) and other and capability in BLACKWELL:
        yield f"{direct} not supported with {other} on compute capability {capability / 10}: omit one of them"


def _query_numbers(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    *_, sq, skv, _ = problem.sizes
    accumulates = capability in BLACKWELL and not writes_dq_directly(problem)
    if not problem.backward or sq == 1 or 90 <= capability < 100 or accumulates:
        return
    for spec in (problem.bias, problem.mask, *problem.captured):
        if spec and spec.shape[0] == 1 and (spec.shape[1] > 1 or skv == 1):
            name = "an array of a score or mask function" if spec in problem.captured else spec.name
            yield (
                f"{name} has shape {spec.shape}, one element per query; gradients on compute capability "
                f"{capability / 10} do not support that: broadcast it along the key axis before the call"
            )
    if has_ragged_diagonal(problem):
        names = [option.name for option in OF_DIAGONAL if option.of(problem)]
        yield (
            f"{' and '.join(names)} with sequence lengths and a band aligned to the bottom right are not supported in "
            f"gradients on compute capability {capability / 10}: use causal=True, or pass the distances as bias="
        )


def _has_gradients_through_scores(problem: Problem) -> Any:
    """True for gradients of a bias or ``tensors``, or through a softcap or a score function."""
    return problem.backward and (problem.ds_reductions or problem.settings.softcap or problem.has_score_mod)


def _scale(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if _has_gradients_through_scores(problem) and not problem.settings.positive_scale and capability in HOPPER:
        name = "a gradient through softcap" if problem.settings.softcap else "a gradient through score_mod"
        name = _score_gradient(problem) if problem.ds_reductions else name
        yield (
            f"{name} is not supported with a scale of 0 or below, for which cuDNN was seen to return NaN: pass a positive "
            "scale and -q"
        )


def _page_size(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    page = problem.k.shape[2]
    if problem.paged and page & (page - 1):
        yield f"the page size is {page}; cuDNN supports powers of two: use pages of {1 << (page - 1).bit_length()} keys"


def _is_one_query(problem: Problem) -> bool:
    return problem.sizes[4] == 1


def _large_arrays(problem: Problem) -> tuple[TensorSpec, ...]:
    """q, k, v, out and their gradients, which tensor cores read and write in blocks."""
    return tuple(spec for spec in problem.tensors if spec.name in QUERY_ARRAYS + KEY_ARRAYS and spec.name not in ROW_STATS)


FRONTEND = "https://github.com/NVIDIA/cudnn-frontend"
PYTORCH = "https://github.com/pytorch/pytorch"

#: Every rule. Calls report violations in this order.
RULES: tuple[Rule, ...] = (
    Rule("cudnn-version", "cuDNN 9.19 or newer.", Unsupported, _version),
    Rule("gpu-generation", "Compute capability 8.0 (Ampere) or newer.", Unsupported,
         when(lambda p: True, "the GPU has compute capability {gpu}; 8.0 (Ampere) or newer is required: "
              f"{WITHOUT_CUDNN}", range(MINIMUM_CAPABILITY))),
    Rule("dtype", "float16, bfloat16 and FP8; with float32 a float16 kernel would read beyond the data.", TypeError,
         when(lambda p: p.dtype not in ("float16", "bfloat16") and not p.fp8,
              "q, k and v are {p.dtype}; cuDNN's attention supports float16 and bfloat16: pass compute_dtype='bfloat16', "
              f"convert with q.astype(ml_dtypes.bfloat16), or {WITHOUT_CUDNN}"),
         f"{FRONTEND}/issues/424"),
    Rule("head-dim", "Head dims that are multiples of 8, and of 16 for FP8.", Unsupported, _head_dim),
    Rule("fp8-gpu", "FP8: compute capability 9.0 (Hopper) or newer.", Unsupported,
         when(lambda p: p.fp8, "q, k and v are {p.dtype}; compute capability {gpu} does not support FP8, 9.0 (Hopper) and "
              "newer do: pass float16 or bfloat16 arrays", range(90))),
    Rule("fp8-head-dim", "FP8: head dims up to 256, and up to 128 on SM 12.x.", Unsupported, _fp8_head_dim),
    Rule("fp8-wide-values", "FP8: on Hopper head dims of v above 128 only if q and k are also above 128; otherwise the kernel "
         "ends in an illegal memory access.", Unsupported,
         when(lambda p: p.fp8 and p.sizes[0] <= 128 < p.sizes[1],
              "the head_dim of q and k is {p.sizes[0]} and of v {p.sizes[1]}; on compute capability {gpu} values above "
              "128 need q and k above 128 in FP8: pad q and k with zeros to 144 and pass scale=, or pass bfloat16 arrays",
              range(100)), planned=True),
    Rule("fp8-output", "FP8: an output of another dtype on SM 10.x only.", Unsupported,
         when(lambda p: p.fp8 and p.out.dtype != p.dtype,
              "out_dtype is {p.out.dtype}; compute capability {gpu} writes the output of FP8 arrays in FP8: omit out_dtype, "
              "and convert the result with its method dequantize", [gpu for gpu in _ANY if not writes_16_bits(gpu)])),
    Rule("fp8-one-query", "FP8: two or more queries, except on SM 10.x.", Unsupported,
         when(lambda p: p.fp8 and _is_one_query(p), "there is one query; on compute capability {gpu} FP8 needs two or more: "
              "pass the query twice, or pass bfloat16 arrays", _NOT_BLACKWELL)),
    Rule("fp8-scale", "FP8: a positive scale; results are wrong on Hopper.", Unsupported,
         when(lambda p: p.fp8 and not p.settings.positive_scale, "a scale of 0 or below is not supported with FP8 arrays: "
              "results are 0 or NaN; pass a positive scale and -q"), planned=True),
    Rule("fp8-packed", "FP8: packed sequences on SM 10.x only.", Unsupported,
         when(lambda p: p.fp8 and p.packed, "packed sequences of FP8 arrays end in an illegal instruction: pad the sequences "
              "and pass seq_lens_q and seq_lens_kv, or pass bfloat16 arrays", _NOT_BLACKWELL), FRONTEND, planned=True),
    Rule("fp8-scores", "FP8: causal masks, windows and lengths only; softcap and ALiBi are wrong on Hopper.", Unsupported,
         _fp8_scores, planned=True),
    Rule("contiguous-head-dim", "Axis 0 contiguous; otherwise cuDNN crashes with a segmentation fault.", ValueError,
         _contiguous),
    Rule("negative-stride", "No negative strides.", ValueError, _negative),
    Rule("stride-alignment", "Strides that are multiples of 16 bytes; otherwise results are silently wrong, or the kernel "
         "faults.", ValueError, _aligned_strides, FRONTEND),
    Rule("memory-alignment", "Memory aligned to 16 bytes.", ValueError, _aligned_memory, FRONTEND),
    Rule("dense-stats", "stats, bias and all other small arrays dense in Fortran order; cuDNN ignores other strides.",
         ValueError, _dense_stats, "https://github.com/JuliaGPU/CUDA.jl/pull/3238"),
    Rule("grid", "At most 65535 batch items and query heads.", Unsupported, _grid, PYTORCH),
    Rule("backward-head-dim", "Gradients: head dims up to 256 on Hopper; up to 128 on Ampere, Ada and SM 12.x; on SM 10.x up "
         "to 128, 192 with 128 for v, and 256 since 9.23.", Unsupported, _backward_head_dim, FRONTEND),
    Rule("bias-dtype", "A bias of 16 or 32 bits.", TypeError, _bias_dtype),
    Rule("int64-tensors", "32-bit integers in tensors.", TypeError,
         when(lambda p: any(spec.dtype == "int64" for spec in p.captured), "tensors contains an int64 array; cuDNN's kernels "
              "compute with 32-bit integers: convert with .astype('int32')")),
    Rule("bias-gradient", "No gradients of bias or tensors with packed sequences.", Unsupported, _bias_gradient, planned=True),
    Rule("query-numbers", "Gradients: on Ampere, Ada and SM 12.x no bias, mask or tensors with one element per query, and no "
         "ALiBi with lengths and a bottom-right band; on SM 10.x neither with deterministic gradients nor with gradients of "
         "bias or tensors.", Unsupported, _query_numbers),
    Rule("direct-blackwell", "Gradients of bias and tensors, and deterministic gradients: on SM 10.x not with dropout, packed "
         "sequences, or head dims above 128.", Unsupported, _direct),
    Rule("positive-scale", "Gradients of bias and tensors, and gradients with softcap or score_mod: a positive scale on "
         "Hopper.", Unsupported, _scale),
    Rule("dropout-one-query", "One query with dropout: on SM 10.x head dims up to 128, and 256 since 9.28.", Unsupported,
         _dropout_one_query),
    *(Rule(option.name.replace("_", "-"), option.cpu_only.rule, Unsupported,
           when(option.of, f"{option.name} is not supported on the GPU, because {option.cpu_only.instead}"))
      for option in OPTIONS.values() if option.cpu_only),
    *(Rule(f"gradient-of-{row.of.replace('_', '-')}", row.cpu_only.rule, Unsupported,
           when(operator.attrgetter(row.name), f"{row.request} is not supported on the GPU, because {row.cpu_only.instead}"))
      for row in REQUESTED_GRADIENTS if row.cpu_only),
    Rule("max-sumexp", "return_stats='max_sumexp': not with sinks, not with sequence lengths.", Unsupported, _max_sumexp,
         planned=True),
    Rule("page-size", "Pages of a power of two of keys.", Unsupported, _page_size),
    Rule("paged-dropout", "Paged keys and a single query: no dropout.", Unsupported,
         when(lambda p: p.paged and p.settings.dropout and _is_one_query(p), "dropout with page_table and a single query is "
              "not supported: omit dropout_p, or pass the query twice")),
    Rule("deterministic-sinks", "No deterministic gradient of sinks.", Unsupported,
         when(lambda p: p.dsinks and p.deterministic, "the gradient of sinks is not deterministic, because cuDNN sums it in "
              "varying order: omit deterministic=True or return_dsinks=True"), planned=True),
    Rule("one-key-integers", "No int32 tensors with one query and one key.", Unsupported,
         when(lambda p: p.sizes[4:6] == (1, 1) and any(spec.dtype == "int32" for spec in p.captured),
              "tensors contains an int32 array, and there is one query and one key; cuDNN then reads negative integers as "
              "unsigned: pass the array as float32"), planned=True),
    Rule("packed-gradients", "Gradients of packed sequences: run on Hopper only.", Unsupported,
         when(lambda p: p.backward and p.packed, "gradients of packed sequences were not run on compute capability {gpu}",
              _NOT_HOPPER), FRONTEND, refuses=False),
    Rule("positive-scale-elsewhere", "Gradients of bias and tensors, and gradients with softcap or score_mod, with a scale of "
         "0 or below: run on Hopper only.", Unsupported,
         when(lambda p: _has_gradients_through_scores(p) and not p.settings.positive_scale,
              "gradients of bias or tensors, or through a score function or softcap, with a scale of 0 or below, were not run "
              "on compute capability {gpu}; on 9.0 they are NaN", _NOT_HOPPER), refuses=False),
    Rule("backward-256", "Gradients with head dim 256: not run on SM 10.x. cuDNN 9.28 does not compile the kernel for the "
         "description of the B200.", Unsupported, _backward_256, FRONTEND, refuses=False),
    Rule("deterministic", "Deterministic gradients: not run on SM 12.x.", Unsupported,
         when(lambda p: p.backward and p.deterministic, "deterministic gradients were not run on compute capability {gpu}",
              range(120, 130)),
         "https://github.com/NVIDIA/TransformerEngine", refuses=False),
)  # fmt: skip
