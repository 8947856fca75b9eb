"""The operation graph of the forward pass, one formula per step, for both engines.

cuDNN recognizes the steps in this order as flash attention: no matrix of size Sq x Skv is stored in memory. Sources: Vaswani
et al. 2017, "Attention Is All You Need", equation 1; Dao 2023, "FlashAttention-2", section 3.1, for the log-sum-exp.
"""

from __future__ import annotations

import functools

from ..problem.arrays import SEEDS
from ..problem.problem import Problem
from ..problem.tensor_spec import FP8_LARGEST, row_stats_dtype
from .nodes import WEIGHTS, Bernoulli, Graph, GraphBuilder, Shape, Tensor
from .operands import BATCH_AXES, HEAD_AXES, SCORE_AXES, TABLE_AXES, TRANSPOSED_AXES, GraphOperands, operand
from .scores import Scores, partial_tiles


@functools.lru_cache(maxsize=1024)
def forward(problem: Problem, guards: frozenset[str] = frozenset()) -> Graph:
    """``O = softmax(S) V`` with the modified and masked scores S; ``stats`` is the log-sum-exp of each row of S.

    The guards (:mod:`.core.support.why_not`) avoid bugs of some cuDNN kernels; the result is the same. ``positions`` reads
    the indices of keys and heads from memory, and broadcasts all other inputs of the scores along the keys. ``no-split``
    excludes the kernel that splits the keys.
    """
    g, operands = GraphBuilder(compute_dtype(problem)), GraphOperands(problem, full_keys="positions" in guards)
    q, out, scores = operands("q"), operands("out"), Scores(g, operands)
    kt, v = _keys_and_values(g, operands, scores.keys)
    # S = Q Kᵀ                              (B, Hq, Sq, Skv)
    s = g.matmul("S = Q Kᵀ", q, kt, "S", m=scores.queries, n=scores.keys)
    # S <- f(scale S)
    s, function = scores.modify(s)
    # S <- S where the query attends to the key, else -inf
    s = scores.mask_positions(scores.mask_lengths(s), function)
    if "keys" in partial_tiles(problem):
        s = scores.mask_tail(s, "j", axis=3)
    # P = exp(S − L), L = logsumexp(S)      rounded to the dtype of v for the tensor cores
    probability = problem.settings.dropout
    formula = f"P = round({FP8_LARGEST[problem.dtype]:g} exp(S − m)) / l" if problem.fp8 else "P = exp(S − L)"
    p = g.softmax(
        f"{formula}, L = logsumexp(S)", s, WEIGHTS, g.compute_dtype if probability else problem.dtype,
        None if problem.max else operands.row_stats("stats"),
        sink=operands.optional("sinks", HEAD_AXES), max=operands.row_stats("max"), sum_exp=operands.row_stats("sum_exp"),
        rows=scores.queries, scale=g.scalar("scale of P", value=FP8_LARGEST[problem.dtype]) if problem.fp8 else None,
    )  # fmt: skip
    if probability:
        # P <- P ∘ R / (1 − p)              Srivastava et al. 2014, "Dropout"; the expectation stays the same
        dropout = WeightDropout(g, operands, p.shape)
        p = dropout.rescale(dropout.drop(p, WEIGHTS), "P ∘ R", dtype=problem.dtype)
    # O = P V                               (B, Hq, Sq, Dv)
    if problem.fp8:
        _store_fp8(g, operands, g.matmul("O = P V", p, v, "O₁", m=scores.queries, k=scores.keys), out)
    else:
        g.matmul("O = P V", p, v, out, m=scores.queries, k=scores.keys)
    return g.graph(no_split="no-split" in guards)


def _store_fp8(g: GraphBuilder, operands: GraphOperands, o: Tensor, out: Tensor) -> None:
    """Add the output of FP8 arrays, divided by P's scale and multiplied by v's and out's, and its largest magnitude.

    cuDNN requires all of these steps; the largest magnitude is taken before ``scale_out``.
    """
    unit = g.scalar("1 / scale of P", value=1 / FP8_LARGEST[operands.problem.dtype])
    o = g.pointwise("O₂ = O₁ / scale of P", "mul", o, unit, out="O₂")
    o = g.pointwise("O₃ = descale_v · O₂", "mul", o, operands.factor("descale_v"), out="O₃")
    scale = operands.factor("scale_out") if operands.problem.scale_out else g.scalar("1", value=1.0)
    g.pointwise(f"O = {scale} · O₃", "mul", o, scale, out=out)
    g.reduction("amax_out = max |O₃|", o, operands.factor("amax_out"), amax=True)


def _keys_and_values(g: GraphBuilder, operands: GraphOperands, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """``Kᵀ`` and ``V``: the arrays, or their rows in the pages of each sequence."""
    table = operands.optional("page_table", TABLE_AXES)
    if table is None:
        return operands("k", TRANSPOSED_AXES), operands("v")
    assert lengths
    kt = g.paged_load("Kᵀ = pages of k", operands("k"), table, lengths, "Kᵀ", transposed=True)
    return kt, g.paged_load("V = pages of v", operands("v"), table, lengths, "V")


class WeightDropout:
    """Dropout of the softmax weights, ``(B, Hq, Sq, Skv)``, with probability p."""

    def __init__(self, g: GraphBuilder, operands: GraphOperands, shape: Shape) -> None:
        probability = operands.problem.settings.dropout
        self.g = g
        self.scale = g.scalar("1/(1−p)", g.compute_dtype, value=1 / (1 - probability))
        self.keep = operands.optional("dropout_mask", SCORE_AXES) or self._random(operands, shape, 1 - probability)

    def drop(self, x: Tensor, name: str) -> Tensor:
        """``x ∘ R`` with ``R_ij = 1`` where a weight is kept, else 0."""
        return self.g.pointwise(f"{name} ∘ R", "mul", x, self.keep, out=f"{name}∘R")

    def rescale(self, x: Tensor, name: str, dtype: str | None = None) -> Tensor:
        """``x / (1 − p)``."""
        formula = f"{name} / (1 − p)"
        return self.g.pointwise(formula, "mul", x, self.scale, out=formula.replace(" ", ""), dtype=dtype)

    def _random(self, operands: GraphOperands, shape: Shape, probability: float) -> Tensor:
        """R from random numbers; stored if the problem returns it."""
        seed, offset = (operand(operands.specs[name], BATCH_AXES, "input") for name in SEEDS)
        stored = operands.problem.rng_dump
        keep = operand(stored, SCORE_AXES, "output") if stored else self.g.virtual("R", shape)
        return self.g.add(Bernoulli("R = 1 with probability 1 − p", keep, seed, offset, probability))


def compute_dtype(problem: Problem) -> str:
    """Return the dtype of intermediate results."""
    return row_stats_dtype(problem.dtype)
