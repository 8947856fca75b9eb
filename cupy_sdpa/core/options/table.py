"""The options of every call: one row each, in the order of the signatures.

The rows determine defaults, signatures, how settings and scalars are read, the rows of arrays, the score function of a graph,
the descriptions of problems, and which calls reject an option. :class:`Options` repeats the names for type checkers; a test
compares them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from .._typing import Array, Layout
from ..score_fn.expression import Expression
from ..score_fn.tracer import MaskMod, ScoreMod
from . import alibi, band, bias, dropout, packed, scale, softcap
from .band import Band
from .option import OF_FEW_OPTIONS, CpuOnly, Option, ScoreInputs
from .values import optional_count

#: Which gradients of ``tensors`` are requested: all, none, or the gradients of the given names.
DTensors = bool | str | Sequence[str]


class Options(TypedDict, total=False):
    """The options that every call takes in addition to its arrays; :func:`cupy_sdpa.attention` documents them."""

    scale: float | Array | None
    causal: bool | Literal["top_left", "bottom_right"] | None
    window: Sequence[int | None] | tuple[int | None, int | None, Literal["top_left", "bottom_right"]] | None
    mask: Array | None
    bias: Array | None
    bias_repeats: int | None
    seq_lens_q: Array | None
    seq_lens_kv: Array | None
    page_table: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    alibi_slopes: Array | None
    softcap: float | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    tensors: Mapping[str, Array] | None
    block_mask: Any
    sinks: Array | None
    dropout_p: float
    seed: int | Array | None
    offset: int | Array | None
    dropout_mask: Array | None
    num_splits: int | None
    batch_invariant: bool
    max_workspace: int | None
    bucket: int | Literal["power_of_two"] | Callable[[int], int] | None
    layout: Layout | None
    compute_dtype: Literal["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"] | None
    engine: Literal["numpy", "cudnn", "cupy"] | None


class GradientOptions(Options, total=False):
    """The options, and the flags that request more gradients than dq, dk and dv."""

    return_dbias: bool
    return_dsinks: bool
    return_dscale: bool
    return_dtensors: DTensors


class Split(NamedTuple):
    """How the keys of every sequence are split (:mod:`.core.problem.split`).

    Attributes:
        chunks: the number of chunks.
        pages: the number of pages per chunk.
    """

    chunks: int
    pages: int


class Settings(NamedTuple):
    """What a plan depends on in addition to arrays: the values of options, and how a problem is computed.

    The scale and the softcap are passed by value with every call; their values are not part of the problem.

    Attributes:
        band: the causal mask or the window, or None.
        positive_scale: whether the scale is a positive normal number.
        softcap: whether scores are capped.
        dropout: the probability of dropping a weight.
        bias_repeats: how many consecutive batch items share a bias; None in a problem, where it follows from the shapes.
        max_seqlen_q, max_seqlen_kv: the maximum lengths of packed sequences.
        deterministic: whether results must be bitwise reproducible; in the forward pass set for a single query only.
        max_workspace: the limit of cuDNN's workspace in bytes, or None.
        expression: the traced score and mask functions, or None.
        gradient_of: the captured array with respect to which a subproblem differentiates the scores; empty for the scores.
        num_splits: the number of chunks into which paged keys are split; None for the default.
        split: how the keys of this problem were split, if it is a split problem (:mod:`.core.problem.split`).
        padded: whether arrays with lengths are passed to cuDNN as sequences at constant ragged offsets, so that it does not
            read their padding (:mod:`.core.support.padding`).
    """

    band: Band | None = None
    positive_scale: bool = True
    softcap: bool = False
    dropout: float = 0.0
    bias_repeats: int | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    deterministic: bool = False
    max_workspace: int | None = None
    expression: Expression | None = None
    gradient_of: str = ""
    num_splits: int | None = None
    split: Split | None = None
    padded: bool = False


#: The settings of a call without options.
DEFAULT_SETTINGS = Settings()

#: The groups of options in the help of a function, with their text.
GROUPS = {
    "masks": "masks. Default: every query attends to every key.",
    "lengths": "int32 ``(B,)``, the length of each padded sequence.",
    "packed": "packed sequences, ``(B+1,)``; q is then ``(D, Hq, Tq)``.",
    "pages": "paged keys and values, int32 ``(P, B)``; see :class:`cupy_sdpa.KVCache`.",
    "scores": "change the scores, in the order of :doc:`/options`. The scale, ``1/sqrt(D)`` by default, may be ``(Hq,)``.",
    "sinks": "arrays that ``score_mod`` and ``mask_mod`` read; the score of a key without a value, ``(Hq,)``.",
    "dropout": "dropout. Default 0.",
    "batch": "raise Unsupported if the bits of a sequence may depend on the rest of the batch. Default False.",
    "plans": "control how calls are planned.",
    "arrays": 'axes, precision and engine. Default: ``"dhsb"``, q\'s dtype, the engine of the arrays.',
}
_PREFIX, _WIDEN = OF_FEW_OPTIONS


def _refused(names: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


_SUMS = "weight_sums weight_sums_problems weight_entropy"
_NO_PAGES = _refused("attention_backward attention_vjp attention_jvp jvp_problems", "gather the pages into dense k and v")
_GROUPS = "ContextParallel"
_NOT_DROPPED = _refused(_SUMS, "weights are taken before dropout: omit it, seed= and offset=")
_OTHER_MEAN = _refused(
    "weight_entropy",
    "the output with k as values gives the mean score only if scores are scale * q k: omit it. Pass masks as mask= or "
    "mask_mod=",
)

_ROWS = (
    Option(
        "scale", "scores", read=operator.itemgetter("scale"), part="settings.positive_scale", plan_of=scale.is_positive,
        by_value=True, blocks=True, parts="same", taken=(_PREFIX,),
    ),
    Option("causal", "masks", parts="call", default=False, read=band.read, part="settings.band", blocks=True, taken=(_PREFIX,)),
    Option("window", "masks", parts="call", part="settings.band", blocks=True),
    Option("mask", "masks", parts="sliced", axes="Skv Sq Hq B", dtype="bool", phrase="a mask", weights=True),
    Option(
        "bias", "scores", parts="sliced", axes="Skv Sq Hq B", dtype="float", phrase="a bias", weights=True,
        refused=_refused(
            "weight_sums weight_sums_problems",
            "adding the log-sum-exp to it would take an array of size Sq x Skv; pass it as a score function of tensors=",
        ) | _OTHER_MEAN,
    ),
    Option(
        "bias_repeats", "scores", parts="same", read=bias.read_repeats, part="settings.bias_repeats",
        refused=_refused(_SUMS, "bias is not supported: omit both") | _refused("fp8.attention", ""),
    ),
    Option("seq_lens_q", "lengths", parts="sliced", axes="B", dtype="int32"),
    Option("seq_lens_kv", "lengths", parts="sliced", axes="B", dtype="int32", taken=(_PREFIX,)),
    Option(
        "page_table", "pages", parts="call", axes="P B", dtype="int32", taken=(_PREFIX,),
        refused=_NO_PAGES
        | _refused(_GROUPS, "pages are for decoding, where each sequence has few queries: use cupy_sdpa.attention"),
    ),
    Option("cu_seqlens_q", "packed", parts="call", axes="B+1", dtype="int32", taken=(_WIDEN,)),
    Option("cu_seqlens_kv", "packed", parts="call", axes="B+1", dtype="int32"),
    Option("max_seqlen_q", "packed", parts="call", read=packed.read_queries, part="settings.max_seqlen_q"),
    Option("max_seqlen_kv", "packed", parts="call", read=packed.read_keys, part="settings.max_seqlen_kv"),
    Option(
        "alibi_slopes", "scores", axes="Hq", dtype="float32 or wider", phrase="ALiBi", weights=True, diagonal=True,
        parts="sliced", refused=_OTHER_MEAN,
    ),
    Option(
        "softcap", "scores", parts="same", read=softcap.read, part="settings.softcap", plan_of=softcap.is_given, by_value=True,
        phrase="softcap", weights=True, split=True, blocks=True, refused=_OTHER_MEAN, taken=OF_FEW_OPTIONS,
    ),
    Option(
        "score_mod", "scores", part="has_score_mod", phrase="a score function", weights=True, blocks=True, parts="sliced",
        refused=_OTHER_MEAN, taken=(_WIDEN,),
    ),
    Option("mask_mod", "masks", parts="sliced", part="has_mask_mod", phrase="a mask function", weights=True),
    Option("tensors", "sinks", parts="call", part="captured", blocks=True),
    Option("block_mask", "masks", parts="call", part="mask", weights=True, refused=_refused("problem", ""), taken=(_WIDEN,)),
    Option(
        "sinks", "sinks", axes="Hq", dtype="float32 or wider", phrase="sinks", weights=True, split=True, blocks=True,
        parts="call", taken=OF_FEW_OPTIONS,
    ),
    Option(
        "dropout_p", "dropout", default=0.0, read=dropout.read, part="settings.dropout", phrase="dropout {value:g}",
        weights=True, parts="same", refused=_NOT_DROPPED, taken=(_WIDEN,),
    ),
    Option("seed", "dropout", parts="call", axes="1", dtype="int64", refused=_refused(_SUMS, "")),
    Option("offset", "dropout", parts="call", axes="1", dtype="int64", refused=_refused(_SUMS, "")),
    Option(
        "dropout_mask", "dropout", parts="sliced", axes="Skv Sq Hq B", dtype="bool", refused=_NOT_DROPPED,
        cpu_only=CpuOnly(
            "Dropout with random numbers only.",
            "cuDNN draws its own random numbers: pass seed and offset, or pass numpy arrays",
        ),
    ),
    Option(
        "num_splits", "pages", read=optional_count("num_splits", "a number of chunks", least=1), part="settings.num_splits",
        taken=(_PREFIX,),
        refused=_NO_PAGES | _refused(_SUMS, "omit it") | _refused(_GROUPS, "it is an option of paged keys"),
    ),
    Option(
        "batch_invariant", "batch", default=False,
        refused=_refused(_SUMS, "compute each sequence in its own call") | _refused("fp8.attention", "")
        | _refused(_GROUPS, "the parts of sequences were not measured: use cupy_sdpa.attention"),
    ),
    Option(
        "max_workspace", "plans", read=optional_count("max_workspace", "a number of bytes"), part="settings.max_workspace",
        blocks=True, parts="same", taken=(_PREFIX,),
    ),
    Option(
        "bucket", "plans", parts="same", blocks=True,
        refused=_refused(_GROUPS, "every member has the same lengths already: pad the sequence before shard()"),
    ),
    Option(
        "layout", "arrays", parts="call", taken=OF_FEW_OPTIONS,
        refused=_refused(_SUMS, "pass q and k with the axes (head_dim, heads, seq, batch), such as q.T of 'bshd'"),
    ),
    Option(
        "compute_dtype", "arrays", parts="call", taken=(_WIDEN,),
        refused=_refused("problem jvp_problems", "convert q, k and v with .astype(...)")
        | _refused(_SUMS, "convert q and k with .astype()") | _refused("fp8.attention", ""),
    ),
    Option(
        "engine", "arrays", parts="call", refused=_refused("problem jvp_problems weight_sums_problems fp8.attention", ""),
        taken=OF_FEW_OPTIONS,
    ),
)  # fmt: skip
#: The options by name, in the order of the signatures.
OPTIONS = {row.name: row for row in _ROWS}
#: The options that measure positions from the diagonal.
OF_DIAGONAL = tuple(option for option in _ROWS if option.diagonal)
#: How options change the scores, in this order, after the score function.
SCORE_CHANGES: dict[str, Callable[[Any, ScoreInputs], Any]] = {
    "softcap": softcap.change,
    "alibi_slopes": alibi.change,
    "bias": bias.change,
}


def help_of_options() -> str:
    """Return the lines of a docstring that name every option, one for each group."""
    names: dict[str, list[str]] = {group: [] for group in GROUPS}
    for option in OPTIONS.values():
        names[option.group].append(option.name)
    return "".join(f"{', '.join(names[group])}: {text}\n" for group, text in GROUPS.items())
