"""What is asked: the shapes, layouts and options of one attention call, frozen and hashable.

A problem knows no device and no pointer. It holds everything that is baked into a plan and nothing else, so it is the
key of the plan cache. Equal calls get the very same object (:func:`cupy_sdpa.problem.validation.make_problem` is cached), so a look-up compares
by identity.

The legend of every shape: D head dim of q and k, Dv head dim of v, Hq query heads, Hkv key/value heads (Hq a multiple of
Hkv), Sq, Skv lengths, B batch; Tq, Tkv the lengths of all packed sequences together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import _html
from ..score_fn.expression import Program
from .band import Band
from .tensor_spec import ITEMSIZE, TensorSpec

#: The arrays of lengths, and those of the places where packed sequences begin, by their names.
LENGTHS = ("seq_lens_q", "seq_lens_kv")
CU_SEQLENS = ("cu_seqlens_q", "cu_seqlens_kv")
#: What the random numbers of dropout follow from.
SEEDS = ("seed", "offset")
#: The arrays that have a position of a query in every row, and those that have one of a key.
QUERY_ARRAYS = ("q", "out", "stats", "max", "sum_exp", "dout", "dq")
KEY_ARRAYS = ("k", "v", "dk", "dv")
#: The options' arrays whose axes are those of the scores, ``(Skv, Sq, Hq, B)``, each of them full or 1; and the results' too.
SCORE_INPUTS = ("bias", "mask", "dropout_mask")
SCORE_ARRAYS = (*SCORE_INPUTS, "dbias", "rng_dump")
#: The dtypes that score functions' arrays may have.
CAPTURED_DTYPES = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64")
#: A score at or below this counts as masked where a bias or a score function made it: masks of finite numbers, such as
#: finfo.min, mask a whole row, too. float32 numbers of this size are 0.06 apart, so differences between such scores, and the
#: logarithm of the number of keys in the log-sum-exp, would be lost.
MASKED_SCORE = -1e6
#: What the forward pass gives beside its output: one number a row.
ROW_STATS = ("stats", "max", "sum_exp")


class Settings(NamedTuple):
    """What of a call's options is baked into its plan, beside its arrays.

    Attributes:
        band: which keys a query sees, by their distance from the diagonal; None for all.
        positive_scale: whether the scale is a positive normal number; its value is no part of the problem.
        softcap: whether scores are capped; the value of the cap is no part of the problem.
        dropout: the probability with which a weight is dropped.
        max_seqlen_q, max_seqlen_kv: the lengths of the longest packed sequences.
        deterministic: whether the result is to be the same, bit for bit, in every run.
        max_workspace: bytes that cuDNN may use beside the arrays; None for no limit.
        program: what the caller's score and mask functions do; None without them.
        gradient_of: the array in whose gradient a launch takes that of the scores; empty for the scores themselves.
    """

    band: Band | None = None
    positive_scale: bool = True
    softcap: bool = False
    dropout: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    deterministic: bool = False
    max_workspace: int | None = None
    program: Program | None = None
    gradient_of: str = ""


#: No option at all.
PLAIN = Settings()


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    Attributes:
        q: ``(D, Hq, Sq, B)``; of packed sequences ``(D, Hq, Tq)``, and all that follows in the same way.
        k: ``(D, Hkv, Skv, B)``.
        v: ``(Dv, Hkv, Skv, B)``.
        out: ``(Dv, Hq, Sq, B)``.
        settings: the options.
        stats: ``(Sq, Hq, B)``, or None where nobody asked for the log-sum-exp; packed ``(Hq, Tq)``.
        max, sum_exp: of stats' shape, what the log-sum-exp is made of; None where nobody asked for them.
        dout: ``(Dv, Hq, Sq, B)``, the gradient of out; None for the forward pass. Then out and stats are inputs.
        dq, dk, dv: the gradients of q, k and v, of their shapes.
        dbias, dsinks: the gradients of bias and sinks, of their shapes, where asked for.
        rng_dump: ``(Skv, Sq, Hq, B)`` float32, which weights dropout keeps, where the forward pass is to tell.
        seq_lens_q, seq_lens_kv: ``(B,)`` int32, how many queries and keys every batch entry has; None where it has all.
        cu_seqlens_q, cu_seqlens_kv: ``(B+1,)``, where packed sequences begin; None where they are not packed.
        bias, mask: ``(Skv, Sq, Hq, B)``, every axis may be 1: what is added to the scores, and which of them count.
        alibi_slopes, sinks: ``(Hq,)`` float32.
        seed, offset: ``(1,)`` int64, of the random numbers of dropout.
        dropout_mask: ``(Skv, Sq, Hq, B)``, which weights are kept, where the caller says so.
        captured: ``(Skv, Sq, Hq, B)``, every axis may be 1: what score functions read.
        dcaptured: the gradients of some of them, of their shapes, where asked for.
    """

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    out: TensorSpec
    settings: Settings = PLAIN
    stats: TensorSpec | None = None
    max: TensorSpec | None = None
    sum_exp: TensorSpec | None = None
    dout: TensorSpec | None = None
    dq: TensorSpec | None = None
    dk: TensorSpec | None = None
    dv: TensorSpec | None = None
    dbias: TensorSpec | None = None
    dsinks: TensorSpec | None = None
    rng_dump: TensorSpec | None = None
    seq_lens_q: TensorSpec | None = None
    seq_lens_kv: TensorSpec | None = None
    cu_seqlens_q: TensorSpec | None = None
    cu_seqlens_kv: TensorSpec | None = None
    bias: TensorSpec | None = None
    mask: TensorSpec | None = None
    alibi_slopes: TensorSpec | None = None
    sinks: TensorSpec | None = None
    seed: TensorSpec | None = None
    offset: TensorSpec | None = None
    dropout_mask: TensorSpec | None = None
    captured: tuple[TensorSpec, ...] = ()
    dcaptured: tuple[TensorSpec, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((*self.tensors, self.settings)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Problem], tuple[object, ...]]:
        # Made anew in another process: the kept hash is this one's.
        return Problem, tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    @functools.cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every array that the call reads or writes."""
        every = (getattr(self, f.name, None) for f in dataclasses.fields(self))
        return (*(spec for spec in every if isinstance(spec, TensorSpec)), *self.captured, *self.dcaptured)

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """``(D, Dv, Hq, Hkv, Sq, Skv, B)``; of packed sequences the longest lengths, and how many there are."""
        (d, hq, *queries), (dv, hkv, *keys) = self.q.shape, self.v.shape
        sq, skv, b = self.settings.max_seqlen_q, self.settings.max_seqlen_kv, 0
        if self.cu_seqlens_q and sq is not None and skv is not None:
            return d, dv, hq, hkv, sq, skv, max(self.cu_seqlens_q.shape[0] - 1, b)
        return d, dv, hq, hkv, queries[0], keys[0], queries[1]

    @property
    def dtype(self) -> str:
        """The dtype of q, k, v and out."""
        return self.q.dtype

    @property
    def band(self) -> Band | None:
        """Which keys a query sees, by their distance from the diagonal; None for all."""
        return self.settings.band

    @property
    def deterministic(self) -> bool:
        """Whether the result is to be the same, bit for bit, in every run."""
        return self.settings.deterministic

    @property
    def backward(self) -> bool:
        """Whether gradients are asked for."""
        return self.dout is not None

    @property
    def packed(self) -> bool:
        """Whether sequences lie behind one another, without padding."""
        return self.cu_seqlens_q is not None

    @property
    def ragged(self) -> bool:
        """Whether every batch entry has lengths of its own."""
        return self.seq_lens_q is not None or self.packed

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The arrays that the call writes."""
        if self.backward:
            every = (self.dq, self.dk, self.dv, self.dbias, self.dsinks, *self.dcaptured)
        else:
            every = (self.out, self.stats, self.max, self.sum_exp, self.rng_dump)
        return tuple(spec for spec in every if spec is not None)

    @property
    def ds_reductions(self) -> tuple[TensorSpec, ...]:
        """The gradients that are sums of the scores' gradient, each of the shape of what it is of."""
        return (*([self.dbias] if self.dbias else []), *self.dcaptured)

    @functools.cached_property
    def byte_bounds(self) -> dict[str, tuple[int, int]]:
        """For every tensor, the bytes that it reaches from its first element: from (<= 0), to (> 0), which is beyond."""
        reaches = {}
        for t in self.tensors:
            steps = [step * (length - 1) for step, length in zip(t.strides, t.shape, strict=True)]
            reaches[t.name] = (sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + ITEMSIZE[t.dtype])
        return reaches

    @property
    def has_score_mod(self) -> bool:
        """Whether a function of the caller's changes the scores."""
        return self.settings.program is not None and self.settings.program.score is not None

    @property
    def trivial(self) -> bool:
        """Whether there is nothing to compute: no query, no key, or no value and nothing else that is asked for."""
        _, dv, *_, sq, skv, b = self.sizes
        only_values = self.backward or self.results == (self.out,)
        return 0 in (*self.out.shape[1:], sq, self.k.shape[2], skv, b) or (dv == 0 and only_values)

    def __str__(self) -> str:
        d, dv, hq, hkv, sq, skv, b = self.sizes
        group = "" if hq == hkv else f" ({'MQA' if hkv == 1 else 'GQA'}, {hq // hkv} query heads a key head)"
        dims = f"head dim {d}" if d == dv else f"head dim {d} (values {dv})"
        most = "at most " if self.ragged else ""
        batch = f"{b} packed sequences" if self.packed else f"batch {b}"
        kind = f"{'deterministic ' * self.deterministic}backward" if self.backward else "forward"
        return (
            f"{kind} attention, {self.dtype}: {batch}, {hq} query and {hkv} key/value heads{group}, "
            f"{most}{sq} queries, {most}{skv} keys, {dims}, {', '.join(self._also())}"
        )

    def _repr_html_(self) -> str:
        rows = [(spec.name, " x ".join(map(str, spec.shape)), spec.dtype, "" if spec.dense else str(spec.strides))
                for spec in self.tensors]  # fmt: skip
        return _html.with_title(str(self), _html.table(("array", "shape", "dtype", "strides in bytes, where not dense"), rows))

    def _also(self) -> Iterator[str]:
        """The masks and variants, in words."""
        yield str(self.band or ("a mask" if self.mask else "no mask"))
        if self.band and self.mask:
            yield "a mask"
        program = self.settings.program
        words = {
            "a mask function": program and program.mask is not None, "a score function": self.has_score_mod,
            "softcap": self.settings.softcap, "ALiBi": self.alibi_slopes, "a bias": self.bias, "sinks": self.sinks,
            f"dropout {self.settings.dropout:g}": self.settings.dropout,
            "with log-sum-exp": self.stats and not self.backward, "with maximum and sum": self.max,
            "with the bias's gradient": self.dbias, "with the sinks' gradient": self.dsinks,
            "with gradients of tensors": self.dcaptured,
        }  # fmt: skip
        yield from (word for word, there in words.items() if there)


def has_score_axes(name: str) -> bool:
    """Whether an array has the axes of the scores, each of them full or 1: those of :data:`SCORE_ARRAYS`, and what functions read.

    The gradients of both are, too.

    >>> has_score_axes("bias"), has_score_axes("t0"), has_score_axes("dt0"), has_score_axes("q")
    (True, True, True, False)
    """
    return name in SCORE_ARRAYS or (name.lstrip("d")[0] == "t" and name.lstrip("dt").isdigit())


def writes_dq_directly(problem: Problem) -> bool:
    """Whether dQ is written as a matmul gives it: for the same bits in every run; and where a sum of dS is wanted.

    With dQ added up in scratch memory cuDNN plans that gradient, too, and never writes it (measured with 9.19).
    """
    return problem.deterministic or bool(problem.ds_reductions)


def has_ragged_alibi(problem: Problem) -> bool:
    """Whether slopes go by a diagonal that every batch entry has of its own."""
    return problem.alibi_slopes is not None and problem.ragged and problem.band is not None and problem.band.bottom_right
