"""The problem: the shapes, layouts and options of one attention call, immutable and hashable.

A problem does not depend on a device and contains no pointer. It contains exactly what determines a plan, and is the key of the
plan cache. Because :func:`.core.problem.validation.make_problem` is cached, equal calls get the same object, and the look-up
compares by identity.

Shapes are written with these letters: D head dim of q and k, Dv head dim of v, Hq query heads, Hkv key/value heads (Hq is a
multiple of Hkv), Sq, Skv lengths, B batch; Tq, Tkv total lengths of packed sequences; P pages per sequence.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..options.band import Band
from ..options.table import DEFAULT_SETTINGS, OF_DIAGONAL, OPTIONS, Settings
from .arrays import GRADIENTS, REQUESTED_GRADIENTS, RESULTS, SCORE_GRADIENTS
from .tensor_spec import FP8_LARGEST, TensorSpec

#: The dtypes of captured arrays.
CAPTURED_DTYPES = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    Attributes:
        q: ``(D, Hq, Sq, B)``; packed ``(D, Hq, Tq)``, and all other shapes accordingly.
        k: ``(D, Hkv, Skv, B)``.
        v: ``(Dv, Hkv, Skv, B)``.
        out: ``(Dv, Hq, Sq, B)``.
        settings: the other options.
        stats: ``(Sq, Hq, B)``, packed ``(Hq, Tq)``, the log-sum-exp; None if it was not requested.
        amax_out: ``(1,)`` float32, the largest magnitude of the output before ``scale_out``; None except for FP8.
        max, sum_exp: the maximum and the sum of exponentials in the log-sum-exp, with the shape of stats; None if they were
            not requested.
        dout: ``(Dv, Hq, Sq, B)``, the gradient of out; None for the forward pass. In the backward pass, out and stats are
            inputs.
        dq, dk, dv: the gradients of q, k and v, with their shapes.
        dbias, dsinks: the gradients of bias and sinks, with their shapes; None if they were not requested.
        rng_dump: ``(Skv, Sq, Hq, B)`` float32, the dropout mask as an output of the forward pass; None if it was not requested.
        seq_lens_q, seq_lens_kv: ``(B,)`` int32, the lengths of each batch item; None for full lengths.
        page_table: ``(P, B)`` int32, the pages of each sequence in order. k and v are then ``(D, Hkv, page size, pages)`` and
            ``(Dv, Hkv, page size, pages)``, and Skv is P times the page size. None if the keys are not paged.
        cu_seqlens_q, cu_seqlens_kv: ``(B+1,)``, the cumulative lengths of packed sequences; None for dense arrays. With a page
            table only the queries are packed.
        bias, mask: ``(Skv, Sq, Hq, B)``, broadcast along axes of length 1: added to the scores; True where a query attends.
        alibi_slopes, sinks: ``(Hq,)`` float32.
        seed, offset: ``(1,)`` int64, the state of dropout's random number generator.
        dropout_mask: ``(Skv, Sq, Hq, B)``, the weights to keep, as an input.
        descale_q, descale_k, descale_v, scale_out: ``(1,)`` float32, the factors of FP8 arrays; None for other dtypes, and
            ``scale_out`` also for an output of another dtype.
        captured: ``(Skv, Sq, Hq, B)``, broadcast along axes of length 1: the arrays that score and mask functions read.
        dcaptured: the gradients of some captured arrays, with their shapes.
    """

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    out: TensorSpec
    settings: Settings = DEFAULT_SETTINGS
    stats: TensorSpec | None = None
    amax_out: TensorSpec | None = None
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
    page_table: TensorSpec | None = None
    cu_seqlens_q: TensorSpec | None = None
    cu_seqlens_kv: TensorSpec | None = None
    bias: TensorSpec | None = None
    mask: TensorSpec | None = None
    alibi_slopes: TensorSpec | None = None
    sinks: TensorSpec | None = None
    seed: TensorSpec | None = None
    offset: TensorSpec | None = None
    dropout_mask: TensorSpec | None = None
    descale_q: TensorSpec | None = None
    descale_k: TensorSpec | None = None
    descale_v: TensorSpec | None = None
    scale_out: TensorSpec | None = None
    captured: tuple[TensorSpec, ...] = ()
    dcaptured: tuple[TensorSpec, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((*self.tensors, self.settings)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Problem], tuple[object, ...]]:
        # The object is constructed again in another process, because string hashes differ between processes.
        return Problem, tuple(getattr(self, name) for name in _FIELDS)

    @classmethod
    def of_data(cls, data: Any) -> Problem:
        """Return a problem from the plain data that :meth:`as_data` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: the data is not a problem, or comes from another version.
        """
        from .plain_data import arguments_of  # needed only for files of problems

        return cls(**arguments_of(data, _FIELDS))

    def as_data(self) -> Any:
        """Return the problem as plain data, as in JSON. Fields with their default value are left out.

        >>> import cupy_sdpa
        >>> problem = cupy_sdpa.problem((64, 8, 100, 1), (64, 2, 100, 1), (64, 2, 100, 1), dtype="float16", causal=True)
        >>> Problem.of_data(problem.as_data()) == problem
        True
        """
        from .._data import as_data

        return as_data(self)

    @functools.cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All arrays that the call reads or writes."""
        specs = [spec for name in _FIELDS if isinstance(spec := getattr(self, name), TensorSpec)]
        return (*specs, *self.captured, *self.dcaptured)

    @functools.cached_property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """``(D, Dv, Hq, Hkv, Sq, Skv, B)``; for packed sequences the maximum lengths and the number of sequences."""
        (d, hq, *queries), (dv, hkv, *keys) = self.q.shape, self.v.shape
        if self.cu_seqlens_q:
            queries = [self.settings.max_seqlen_q or 0, max(self.cu_seqlens_q.shape[0] - 1, 0)]
        skv = keys[0]
        if self.page_table:
            skv *= self.page_table.shape[0]
        elif self.cu_seqlens_q:
            skv = self.settings.max_seqlen_kv or 0
        return d, dv, hq, hkv, queries[0], skv, queries[1]

    @property
    def dtype(self) -> str:
        """The dtype of q, k and v; also of out, except for FP8."""
        return self.q.dtype

    @functools.cached_property
    def fp8(self) -> bool:
        """Whether q, k and v have 8 bits."""
        return self.q.dtype in FP8_LARGEST

    @property
    def band(self) -> Band | None:
        """The causal mask or the window, or None."""
        return self.settings.band

    @property
    def deterministic(self) -> bool:
        """Whether gradients must be bitwise reproducible."""
        return self.settings.deterministic

    @functools.cached_property
    def backward(self) -> bool:
        """Whether the problem is a backward pass."""
        return self.dout is not None

    @functools.cached_property
    def packed(self) -> bool:
        """Whether the sequences are packed (varlen)."""
        return self.cu_seqlens_q is not None

    @property
    def paged(self) -> bool:
        """Whether the keys and values are pages that a page table lists."""
        return self.page_table is not None

    @property
    def ragged(self) -> bool:
        """Whether batch items have different lengths: packed sequences, or sequence lengths."""
        return self.seq_lens_q is not None or self.packed

    @functools.cached_property
    def results(self) -> tuple[TensorSpec, ...]:
        """The arrays that the call writes."""
        specs = [getattr(self, row.name) for row in (GRADIENTS if self.backward else RESULTS)]
        return (*[spec for spec in specs if spec is not None], *self.dcaptured)

    @property
    def ds_reductions(self) -> tuple[TensorSpec, ...]:
        """The gradients that are reductions of dS, the gradient of the scores: for the arrays that change the scores."""
        specs = (getattr(self, row.name) for row in SCORE_GRADIENTS)
        return (*(spec for spec in specs if spec is not None), *self.dcaptured)

    @property
    def has_score_mod(self) -> bool:
        """Whether a score function modifies the scores."""
        return self.settings.expression is not None and self.settings.expression.score is not None

    @property
    def has_mask_mod(self) -> bool:
        """Whether a mask function masks scores."""
        return self.settings.expression is not None and self.settings.expression.mask is not None

    @property
    def changes_weights(self) -> bool:
        """Whether an option changes the weights of the keys that the band and the lengths leave."""
        return any(option.of(self) for option in OPTIONS.values() if option.weights)

    @property
    def trivial(self) -> bool:
        """Whether nothing is computed: no queries, no keys, or a head dim of v of 0 and no result but out or gradients."""
        _, dv, *_, sq, skv, b = self.sizes
        only_values = self.backward or self.results == (self.out,)
        return 0 in (*self.out.shape[1:], sq, *self.k.shape[2:], skv, b) or (dv == 0 and only_values)

    def __repr__(self) -> str:
        return f"<Problem: {self}>"

    def __str__(self) -> str:
        d, dv, hq, hkv, sq, skv, b = self.sizes
        group = "" if hq == hkv else f" ({'MQA' if hkv == 1 else 'GQA'}, {hq // hkv} query heads per key/value head)"
        dims = f"head dim {d}" if d == dv else f"head dim {d} (values {dv})"
        most = "at most " if self.ragged else ""
        batch = f"{b} packed sequences" if self.packed else f"batch {b}"
        kind = f"{'deterministic ' * self.deterministic}{'backward' if self.backward else 'forward'}"
        queries, keys = f"{sq} quer{'y' if sq == 1 else 'ies'}", f"{skv} key{'s' * (skv != 1)}"
        return (
            f"{kind} attention, {self.dtype}: {batch}, {hq} query and {hkv} key/value heads{group}, "
            f"{most}{queries}, {most}{keys}, {dims}, {', '.join(self._features())}"
        )

    def _repr_html_(self) -> str:
        rows = [(spec.name, " x ".join(map(str, spec.shape)), spec.dtype, "" if spec.dense else str(spec.strides))
                for spec in self.tensors]  # fmt: skip
        from .. import _html

        return _html.with_title(str(self), _html.table(("array", "shape", "dtype", "strides in bytes, if not dense"), rows))

    def _features(self) -> Iterator[str]:
        """Yield descriptions of the masks and other options."""
        masks = [OPTIONS[name].phrase for name in ("mask", "mask_mod") if OPTIONS[name].of(self)]
        phrases = ((option.phrase, option.of(self)) for option in OPTIONS.values() if option.phrase not in ("", *masks))
        yield from (str(self.band),) if self.band else () if masks else ("no mask",)
        yield from masks
        if self.page_table:
            yield f"pages of {self.k.shape[2]} keys"
        if split := self.settings.split:
            yield f"keys split into {split.chunks} chunks, query heads of a group and queries as rows"
        yield from (phrase.format(value=value) for phrase, value in phrases if value)
        results = {
            f"{self.out.dtype} output": self.fp8 and self.out.dtype != self.dtype,
            "with log-sum-exp": self.stats and not self.backward, "with maximum and sum": self.max,
            **{f"with the gradient of the {row.of}": getattr(self, row.name) for row in REQUESTED_GRADIENTS},
            "with gradients of tensors": self.dcaptured,
        }  # fmt: skip
        yield from (description for description, applies in results.items() if applies)


#: The names of the arguments of :class:`Problem`.
_FIELDS = tuple(f.name for f in dataclasses.fields(Problem) if f.init)


def writes_dq_directly(problem: Problem) -> bool:
    """True if dq is the result of one matmul instead of a sum in scratch memory.

    Deterministic gradients and reductions of dS need it: with a sum in scratch memory, cuDNN plans the reductions but never
    writes them (measured with 9.19).
    """
    return problem.deterministic or bool(problem.ds_reductions)


def has_ragged_diagonal(problem: Problem) -> bool:
    """True if an option measures positions from a bottom-right diagonal that depends on the lengths of each batch item."""
    ragged = problem.ragged and problem.band is not None and problem.band.bottom_right
    return ragged and any(option.of(problem) for option in OF_DIAGONAL)
