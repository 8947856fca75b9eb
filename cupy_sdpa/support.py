"""What each cuDNN version and GPU can run, and every known bug, as data: two tables, each row with its sentence.

:func:`why_not` asks every rule and bug about a problem; no reason means that nothing known speaks against it (cuDNN may
still refuse, with its own words). :func:`guards` names the steps that avoid a bug. :func:`deadly` keeps graphs that kill
the process inside cuDNN away from it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .errors import Unsupported
from .graph import Graph, Matmul, Pointwise
from .problem import OF_KEYS, OF_QUERIES, PER_ROW, STARTS, Problem
from .spec import SIZES, TensorSpec, dense_strides
from .version import MINIMUM_CUDNN, RELEASES, version_text

#: The oldest GPU generation with cuDNN's flash attention (Ampere), as major * 10 + minor.
MINIMUM_CAPABILITY = 80
#: The GPU generations, by a compute capability that stands for each.
GENERATIONS = {80: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell", 120: "GeForce Blackwell"}
#: Names the rows of the table that are not to hold, separated by commas.
SWITCH = "CUPY_SDPA_GUARDS_OFF"


class Reason(NamedTuple):
    """Why a problem cannot run: the rule, the class of the exception that says so, the sentence, and what would lift it."""

    rule: str
    error: type[Exception]
    text: str
    lift: str = ""

    def __str__(self) -> str:
        return f"{self.text}. It would run {self.lift}" if self.lift else self.text


@dataclass(frozen=True)
class Rule:
    """One thing that cuDNN or a GPU cannot do, or does wrongly.

    Attributes:
        name: short and stable.
        summary: one sentence for the documentation.
        error: what the call raises.
        violations: (problem, cuDNN version, compute capability) -> sentences, with both values and the remedy.
        link: where it was found out.
    """

    name: str
    summary: str
    error: type[Exception]
    violations: Callable[[Problem, int, int], Iterator[str]]
    link: str = ""


def why_not(problem: Problem, cudnn: int, capability: int) -> list[Reason]:
    """Every known reason why cuDNN cannot run a problem.

    Args:
        problem: what is asked.
        cudnn: cuDNN's version as it counts, 9.19.0 is 91900.
        capability: the GPU's compute capability, 9.0 is 90.
    """
    return [reason._replace(lift=_lift(reason, problem, cudnn, capability)) for reason in _reasons(problem, cudnn, capability)]


def _reasons(problem: Problem, cudnn: int, capability: int) -> list[Reason]:
    off = turned_off()
    reasons = [
        Reason(rule.name, rule.error, text)
        for rule in RULES
        if rule.name not in off
        for text in rule.violations(problem, cudnn, capability)
    ]
    for bug in BUGS:
        if not bug.guards and bug.name not in off and bug.met_by(problem, cudnn, capability):
            text = f"{bug.when}: {bug.effect} with cuDNN {version_text(cudnn)} on this GPU: {bug.remedy} ({bug.link})"
            reasons.append(Reason(bug.name, Unsupported, text))
    return reasons


def _lift(reason: Reason, problem: Problem, cudnn: int, capability: int) -> str:
    """The cuDNN releases and the GPUs on which a reason would fall away; nothing where none would help."""
    if reason.error is not Unsupported:
        return ""

    def free(version: int, gpu: int) -> bool:
        return reason.rule not in {other.rule for other in _reasons(problem, version, gpu)}

    newer = [v for v in RELEASES if v > cudnn and free(v, capability)]
    older = [v for v in RELEASES if v < cudnn and free(v, capability)]
    versions = [f"with cuDNN {version_text(v)}" for v in (newer[:1] or older[-1:])]
    gpus = [name for gpu, name in GENERATIONS.items() if gpu != capability and free(cudnn, gpu)]
    return ", or ".join([*versions, *([f"on {', '.join(gpus)}"] if gpus else [])])


@functools.cache
def turned_off() -> frozenset[str]:
    """The rows of the table that the environment turns off, read once; for whoever knows better, or wants to measure.

    Raises:
        ValueError: a name that is no row, or one of a row that keeps memory safe.
    """
    named = frozenset(filter(None, os.environ.get(SWITCH, "").replace(" ", "").split(",")))
    allowed = {bug.name for bug in BUGS} | {rule.name for rule in RULES if rule.error is Unsupported}
    if unknown := named - allowed:
        raise ValueError(f"{SWITCH} names {', '.join(sorted(unknown))}; it can turn off {', '.join(sorted(allowed))}")
    return named


def _version(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if cudnn < MINIMUM_CUDNN:
        yield (
            f"cuDNN {version_text(cudnn)} is loaded, {version_text(MINIMUM_CUDNN)} or newer is needed: "
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
        if spec.shape[0] % 8:
            up = -spec.shape[0] % 8
            yield f"the {name} is {spec.shape[0]}; cuDNN takes multiples of 8: pad axis 0 with {up} zeros, give scale="


def _contiguous(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    for spec in _arrays(problem):
        if spec.strides[0] != SIZES[spec.dtype]:
            yield (
                f"{spec.name} has a stride of {spec.strides[0]} bytes along head_dim, elements have {SIZES[spec.dtype]}: "
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
        if odd and spec.shape[0] % 8 == 0:
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
    large = {*OF_QUERIES, *OF_KEYS, *STARTS} - set(PER_ROW)
    for spec in problem.tensors:
        if spec.name not in large and not spec.dense:
            dense = dense_strides(spec.shape, SIZES[spec.dtype])
            yield f"{spec.name} has strides {spec.strides} bytes, cuDNN needs {dense}: use cupy.empty(..., order='F')"


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
        allowed = max(d, dv) <= 128 or (d, dv) == (192, 128) or (d == dv == 256 and cudnn >= 92300)
    if problem.backward and not allowed:
        yield (
            f"gradients with head dims {d} and {dv} are not to be had on compute capability {capability / 10} with cuDNN "
            f"{version_text(cudnn)}: use head dims up to {256 if 90 <= capability < 100 else 128}"
        )


def _deterministic(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.backward and problem.deterministic and capability >= 120:
        yield f"deterministic gradients are not to be had on compute capability {capability / 10}: leave deterministic=True out"


def _bias_dtype(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.bias and problem.bias.dtype == "float64":
        yield "bias is float64; cuDNN adds float16, bfloat16 and float32: convert with bias.astype('float32')"


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
    if problem.dbias and problem.settings.softcap:
        yield (
            "the bias's gradient and softcap are asked for; cuDNN gives that of what the cap is taken of: "
            "leave return_dbias=True or softcap out"
        )
    if problem.dbias and problem.packed:
        yield (
            "the bias's gradient is asked for and the sequences are packed; cuDNN's kernel was seen to reach beyond the "
            "arrays: leave return_dbias=True out, or pad the sequences and give seq_lens_q and seq_lens_kv"
        )


def _direct(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    direct = "the bias's gradient is" if problem.dbias else "deterministic gradients are" if problem.deterministic else ""
    also = "packed sequences" if problem.packed else "dropout" if problem.settings.dropout else ""
    if problem.backward and direct and also and 100 <= capability < 120:
        yield f"{direct} not to be had with {also} on compute capability {capability / 10}: leave one of them out"


def _scale(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.backward and not problem.settings.positive_scale and (problem.dbias or problem.settings.softcap):
        what = "the bias's gradient" if problem.dbias else "gradients through a softcap"
        yield (
            f"{what} and a scale of 0 or below are asked for; cuDNN was seen to give NaN: give a positive scale, and change "
            "the sign of q"
        )


def _packed_gradients(problem: Problem, cudnn: int, capability: int) -> Iterator[str]:
    if problem.backward and problem.packed and not 90 <= capability < 120:
        yield (
            f"gradients of packed sequences are not to be had on compute capability {capability / 10}, whose kernel reads the "
            "log-sum-exp of padded arrays only: pad them, and give seq_lens_q and seq_lens_kv"
        )


def _arrays(problem: Problem) -> tuple[TensorSpec, ...]:
    """The large arrays, which tensor cores read and write in blocks."""
    return tuple(spec for spec in problem.tensors if spec.name in OF_QUERIES + OF_KEYS and spec.name not in PER_ROW)


_FRONTEND = "https://github.com/NVIDIA/cudnn-frontend"
_PYTORCH = "https://github.com/pytorch/pytorch"

#: Every rule, in the order in which people should hear of them.
RULES: tuple[Rule, ...] = (
    Rule("cudnn-version", "cuDNN 9.19 or newer.", Unsupported, _version),
    Rule("gpu-generation", "Compute capability 8.0 (Ampere) or newer.", Unsupported, _generation),
    Rule("dtype", "float16 and bfloat16 only; with float32 a float16 kernel would read past the data.", TypeError, _dtype,
         f"{_FRONTEND}/issues/424"),
    Rule("head-dim", "Head dims that are multiples of 8.", Unsupported, _head_dim),
    Rule("contiguous-head-dim", "Axis 0 contiguous; all else is a segmentation fault in cuDNN.", ValueError, _contiguous),
    Rule("negative-stride", "No negative strides.", ValueError, _negative),
    Rule("stride-alignment", "Strides that are multiples of 16 bytes; others are silently wrong or fault.", ValueError,
         _aligned_strides, _FRONTEND),
    Rule("memory-alignment", "Memory aligned to 16 bytes.", ValueError, _aligned_memory, _FRONTEND),
    Rule("dense-stats", "stats, bias and all other small arrays dense in Fortran order; other strides are written as if "
         "dense.", ValueError, _dense_stats,
         "https://github.com/JuliaGPU/CUDA.jl/pull/3238"),
    Rule("grid", "At most 65535 batch entries and query heads.", Unsupported, _grid, _PYTORCH),
    Rule("backward-head-dim", "Gradients: head dims up to 256 on Hopper, 128 on Ampere, Ada and SM 12.x; on SM 10.x 128, and "
         "192 with 128 for v, and 256 from 9.23 on.", Unsupported, _backward_head_dim, _FRONTEND),
    Rule("bias-dtype", "A bias of 16 or 32 bits.", TypeError, _bias_dtype),
    Rule("bias-gradient", "The bias's gradient: not with softcap, and not of packed sequences.", Unsupported, _bias_gradient),
    Rule("direct-blackwell", "The bias's and deterministic gradients: on SM 10.x not with dropout or packed sequences.",
         Unsupported, _direct),
    Rule("positive-scale", "The bias's gradient, and gradients with softcap: a scale above 0.", Unsupported, _scale),
    Rule("dropout-mask", "Dropout by random numbers only.", Unsupported, _own_dropout),
    Rule("packed-gradients", "Gradients of packed sequences: on Hopper and SM 10.x.", Unsupported, _packed_gradients,
         _FRONTEND),
    Rule("max-sumexp", "The maximum and the sum: not with sinks, and not with lengths.", Unsupported, _max_sumexp),
    Rule("deterministic-sinks", "The sinks' gradient is not deterministic.", Unsupported, _deterministic_sinks),
    Rule("deterministic", "Deterministic gradients: not on SM 12.x.", Unsupported, _deterministic,
         "https://github.com/NVIDIA/TransformerEngine"),
)  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """A known bug of cuDNN's that what we offer would meet.

    Attributes:
        name: short and stable.
        first, last: the cuDNN versions that have it.
        capabilities: the compute capabilities that have it.
        condition: which problems meet it.
        when: the same in words.
        effect: what happens.
        guards: of :func:`cupy_sdpa.patterns.backward`, which avoid it; none where it must be refused.
        remedy: what a person can do; for a refusal.
        link: where it was reported.
    """

    name: str
    first: int
    last: int
    capabilities: range
    condition: Callable[[Problem], bool]
    when: str
    effect: str
    guards: frozenset[str]
    remedy: str
    link: str

    def met_by(self, problem: Problem, cudnn: int, capability: int) -> bool:
        """Whether a problem would meet the bug with this cuDNN on this GPU."""
        return self.first <= cudnn <= self.last and capability in self.capabilities and self.condition(problem)


def _one_query(problem: Problem) -> bool:
    *_, sq, _, _ = problem.sizes
    return sq == 1


def _unbounded(problem: Problem) -> bool:
    """Whether the last queries see the last keys for all that is known: no causal mask, and no lengths of the caller's."""
    return not problem.ragged and (problem.band is None or problem.band.right is None)


#: Newer than every cuDNN there is: a bug that no version has been seen without.
_OPEN = 99999

_REFUSE: frozenset[str] = frozenset()

#: Every known bug; those of versions before 9.19, which are refused anyway, are left out. The ranges of the backward bugs
#: were measured: planning with every release from 9.19 to 9.28, running on an H200 with 9.19.0 and 9.28.0. The guards avoid
#: the bug there on both; where they are not needed they would cost time.
BUGS: tuple[Bug, ...] = (
    *(
        Bug("decode-blackwell", first, last, range(100, 120), lambda p: _one_query(p) and not p.backward,
            "one query, forward", "silently wrong", _REFUSE, "use cuDNN 9.25.1 or newer", f"{_PYTORCH}/issues/193893")
        for first, last in ((91900, 92400), (92402, 92500))
    ),
    Bug("packed-decode-stats", 92600, 92700, range(80, 130),
        lambda p: p.packed and not p.backward and p.stats is not None and _one_query(p) and p.sizes[2] != p.sizes[3],
        "packed sequences of one query, grouped heads, with the log-sum-exp", "it is written for one head of each group only",
        _REFUSE, "use cuDNN 9.28.0, or give the keys once a head", f"{_FRONTEND}/issues/1083"),
    Bug("dropout-sinks-gradient", 91900, 92700, range(80, 130), lambda p: p.dsinks is not None and p.settings.dropout > 0,
        "the sinks' gradient, with dropout", "too small by 1 - dropout_p", _REFUSE, "use cuDNN 9.28.0", "docs/design.md"),
    Bug("packed-sinks-gradient", 91900, 92501, range(80, 130), lambda p: p.packed and p.dsinks is not None,
        "the sinks' gradient, packed sequences", "reads beyond the arrays", _REFUSE, "leave return_dsinks=True out, or pad",
        _FRONTEND),
    Bug("backward-one-row", 92600, _OPEN, range(80, 130),
        lambda p: p.backward and _one_query(p) and p.sizes[2] == p.sizes[6] == 1,
        "gradients of one query, one head and one batch entry", "planning is a segmentation fault", _REFUSE,
        "give the batch twice", f"{_FRONTEND}/issues/1071"),
    Bug("backward-key-tail", 91900, 92501, range(90, 100),
        lambda p: p.backward and _unbounded(p) and p.k.shape[2] % 128 == 64,
        "gradients without a mask, a number of keys that leaves 64 when divided by 128, a log-sum-exp below -88.7",
        "dq is NaN", frozenset({"keys"}), "", f"{_PYTORCH}/issues/196678"),
    Bug("backward-query-tail", 91900, _OPEN, range(90, 100),
        lambda p: p.backward and _unbounded(p) and _one_query(p) and p.k.shape[2] % 64 == 0,
        "gradients without a mask of one query, a number of keys that 64 divides, a log-sum-exp below -88.7",
        "dk and dv are NaN", frozenset({"queries"}), "", f"{_FRONTEND}/issues/1072"),
    Bug("backward-scale", 91900, _OPEN, range(90, 100), lambda p: p.backward and not p.settings.positive_scale,
        "gradients with a scale of 0 or below and lengths that 64 does not divide",
        "all gradients are NaN", frozenset({"keys", "queries"}), "", "docs/design.md"),
)  # fmt: skip


def guards(problem: Problem, cudnn: int, capability: int) -> frozenset[str]:
    """The guards that :func:`cupy_sdpa.patterns.backward` needs against known bugs."""
    met = (bug for bug in BUGS if bug.name not in turned_off() and bug.met_by(problem, cudnn, capability))
    return frozenset().union(*(bug.guards for bug in met))


def deadly(graph: Graph) -> list[str]:
    """What in a graph kills the process inside cuDNN (measured with 9.19 and 9.28): none of it may reach the library.

    Users never see these: :func:`why_not` refuses their arrays first, in their own terms.
    """
    reasons = []
    for node in graph.nodes:
        for tensor in (*node.inputs, *node.outputs):
            if tensor.role in ("input", "output") and tensor.dtype in ("bool", "int8", "uint8"):
                reasons.append(f"{tensor} is {tensor.dtype} in memory (a floating-point exception or an abort)")
        if isinstance(node, Matmul):
            for tensor in (node.a, node.b, node.out):
                head_dim = tensor.axes.index(0) if tensor.axes else None  # the caller's axis 0
                if head_dim is not None and tensor.strides[head_dim] != 1:
                    step = tensor.strides[head_dim]
                    reasons.append(f"{tensor} has stride {step} along head_dim, not 1 (a segmentation fault)")
        if isinstance(node, Pointwise) and node.mode == "binary_select" and node.x.role == "scalar":
            reasons.append(f"{node.formula} selects from a number (a segmentation fault with 9.19)")
    return list(dict.fromkeys(reasons))
