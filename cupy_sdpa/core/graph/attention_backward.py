"""The operation graph of the backward pass, one formula per step, for both engines.

Source: Dao 2023, "FlashAttention-2", algorithm 2. The softmax weights P are recomputed from the log-sum-exp.
"""

from __future__ import annotations

import functools

from ..problem.arrays import has_score_axes
from ..problem.problem import Problem
from .attention_forward import WeightDropout, compute_dtype
from .nodes import SCORE_GRADIENT, SUBTRACTED, WEIGHTS, Graph, GraphBuilder, Tensor
from .operands import HEAD_AXES, SCORE_AXES, STATS_AXES, TRANSPOSED_AXES, GraphOperands, operand
from .scores import ScoreFunction, Scores, partial_tiles


@functools.lru_cache(maxsize=1024)
def backward(problem: Problem, direct: bool = False, guards: frozenset[str] = frozenset()) -> Graph:
    """Return the graph of the gradients, from the output and the log-sum-exp, for a problem that needs a single launch.

    ``D = rowsum(dO ∘ O)``, ``P = exp(S − L)``, ``dV = Pᵀ dO``, ``dS = P ∘ (dO Vᵀ − D)``, ``dK = dSᵀ Q`` and ``dQ = dS K``. With
    ``direct`` dQ is the result of the matmul. Otherwise it is accumulated in float32 scratch memory, in arbitrary order, which
    needs no memory of size Sq x Skv. The guards ``keys`` and ``queries`` (:mod:`.core.support.why_not`) mask the elements
    after the last key or query, where some kernels compute values that must not be used; the result is the same.
    """
    steps = _Backward(problem, guards | partial_tiles(problem))
    # D = rowsum(dO ∘ O)                    (B, Hq, Sq, 1)
    d = steps.row_dot()
    # P = exp(S − L)                        (B, Hq, Sq, Skv)
    p, function = steps.weights()
    dropout = WeightDropout(steps.g, steps.operands, p.shape) if problem.settings.dropout else None
    # dV = Pᵀ dO                            (B, Hkv, Skv, Dv)
    steps.write_dv(p, dropout)
    # dS = P ∘ (dO Vᵀ − D)                  (B, Hq, Sq, Skv)
    ds = steps.dscores(p, d, dropout)
    # dS <- dS ∘ f'(scale Q Kᵀ)
    ds = steps.scores.derivative(ds, function)
    # dbias = Σ dS                          and the other gradients of arrays that change the scores
    steps.write_sums(ds)
    # dS <- scale dS
    ds = steps.g.pointwise(f"dS = scale · {ds}", "mul", ds, steps.scores.scale, out="dS", dtype=problem.dtype)
    # dK = dSᵀ Q                            (B, Hkv, Skv, D)
    steps.write_dk(ds)
    # dQ = dS K                             (B, Hq, Sq, D)
    steps.write_dq(ds, direct)
    return steps.g.graph()


class _Backward:
    """The steps of the backward pass."""

    def __init__(self, problem: Problem, guards: frozenset[str]) -> None:
        self.problem, self.guards = problem, guards
        self.g, self.operands = GraphBuilder(compute_dtype(problem)), GraphOperands(problem)
        self.scores = Scores(self.g, self.operands)
        self.q, self.kt = self.operands("q"), self.operands("k", TRANSPOSED_AXES)
        self.dout, self.stats = self.operands("dout"), self.operands("stats", STATS_AXES)

    def row_dot(self) -> Tensor:
        """``D = (1 − p) rowsum(dO ∘ O)``: the matrix from which D is subtracted lacks the factor 1 / (1 − p) of dropout."""
        g, shape = self.g, self.stats.shape
        product = g.pointwise("dO ∘ O", "mul", self.dout, self.operands("out"), out="dO∘O")
        rows = g.reduction("Σ dO ∘ O", product, g.virtual("Σ", shape))
        if self.problem.dsinks:
            self._write_dsinks(rows)
        keep = g.scalar("1−p", g.compute_dtype, value=1 - self.problem.settings.dropout)
        d = self.operands.scratch(SUBTRACTED, "q", shape, g.compute_dtype) if self.problem.packed else SUBTRACTED
        return g.pointwise("D = (1 − p) · Σ dO ∘ O", "mul", rows, keep, out=d)

    def _write_dsinks(self, rows: Tensor) -> None:
        """``dsinks = −Σ exp(sink − L) · rowsum(dO ∘ O)`` over batch and queries; a sink has no value, so its dP is 0."""
        g, sinks, spec = self.g, self.operands.optional("sinks", HEAD_AXES), self.problem.dsinks
        assert sinks
        assert spec
        p = g.pointwise("sink − L", "sub", sinks, self.stats, out="sink−L")
        p = g.pointwise("exp(sink − L)", "exp", p, out="exp(sink−L)")
        p = g.pointwise("exp(sink − L) · Σ dO ∘ O", "mul", p, rows, out="sink·Σ")
        dsinks = operand(spec, HEAD_AXES, "output")
        g.reduction("dsinks = −Σ exp(sink − L) · Σ dO ∘ O", p, dsinks, negative=True)

    def weights(self) -> tuple[Tensor, ScoreFunction]:
        """``P = exp(S − L)``, masked after L is subtracted: a fully masked row has L = -inf and P = 0."""
        g, scores = self.g, self.scores
        # S = Q Kᵀ
        s = g.matmul("S = Q Kᵀ", self.q, self.kt, "S", m=scores.queries, n=scores.keys)
        # S <- f(scale S)
        s, function = scores.modify(s)
        # S <- S − L
        lengths_first = _mask_lengths_first(self.problem)
        if lengths_first:
            s = scores.mask_lengths(s)
        s = g.pointwise(f"{s} − L", "sub", s, self.stats, out=f"{s}−L")
        if not lengths_first:
            s = scores.mask_lengths(s)
        # S <- S where the query attends to the key, else -inf
        s = scores.mask_positions(s, function)
        if "keys" in self.guards and scores.keys is None:
            s = scores.mask_tail(s, "j", axis=3)
        if "queries" in self.guards and scores.queries is None:
            s = scores.mask_tail(s, "i", axis=2)
        return g.pointwise("P = exp(S − L)", "exp", s, out=WEIGHTS), function

    def write_dv(self, p: Tensor, dropout: WeightDropout | None) -> None:
        """``dV = (P ∘ R / (1 − p))ᵀ dO``."""
        if dropout:
            p = dropout.rescale(dropout.drop(p, WEIGHTS), "P ∘ R")
        self._group_matmul("dV = Pᵀ dO", self.g.transpose("Pᵀ", p, "Pᵀ", self.problem.dtype), self.dout, self.operands("dv"))

    def dscores(self, p: Tensor, d: Tensor, dropout: WeightDropout | None) -> Tensor:
        """``dS = P ∘ (dO Vᵀ ∘ R − D) / (1 − p)``, the gradient of the modified scores."""
        g = self.g
        # dP = dO Vᵀ
        vt = self.operands("v", TRANSPOSED_AXES)
        dp = g.matmul("dP = dO Vᵀ", self.dout, vt, "dP", m=self.scores.queries, n=self.scores.keys)
        if dropout:
            dp = dropout.drop(dp, "dP")
        # dS = P ∘ (dP − D)
        ds = g.pointwise("dP − D", "sub", dp, d, out="dP−D")
        ds = g.pointwise("P ∘ (dP − D)", "mul", ds, p, out=SCORE_GRADIENT)
        return dropout.rescale(ds, "P ∘ (dP − D)") if dropout else ds

    def write_sums(self, ds: Tensor) -> None:
        """``dx = Σ dS`` over the axes along which x, such as a bias or a captured array, is broadcast."""
        for spec in self.problem.ds_reductions:
            axes = SCORE_AXES if has_score_axes(spec.name) else HEAD_AXES
            self.g.reduction(f"{spec.name} = Σ {ds}", ds, operand(spec, axes, "output"))

    def write_dk(self, ds: Tensor) -> None:
        """``dK = dSᵀ Q``."""
        dst = self.g.transpose("dSᵀ", ds, "dSᵀ", self.problem.dtype)
        self._group_matmul("dK = dSᵀ Q", dst, self.q, self.operands("dk"))

    def write_dq(self, ds: Tensor, direct: bool) -> None:
        """``dQ = dS K``."""
        dq, k = self.operands("dq"), self.g.transpose("K", self.kt, "K")
        out = dq if direct else self.operands.scratch("ΣdQ", "q", dq.shape, self.g.compute_dtype)
        self.g.matmul("dQ = dS K", ds, k, out, m=self.scores.queries, k=self.scores.keys)
        if not direct:
            self.g.pointwise("dQ, rounded", "identity", out, out=dq)

    def _group_matmul(self, formula: str, a: Tensor, b: Tensor, out: Tensor) -> None:
        """``out = a b``, summed in the compute dtype over the query heads that share a key/value head.

        The products are rounded to the dtype of ``out`` before the sum: cuDNN also plans float32 products, but the result is
        wrong (9.19 and 9.28: it writes half of the memory that it reads).
        """
        g, m, k = self.g, self.scores.keys, self.scores.queries
        if a.shape[1] == out.shape[1]:
            g.matmul(formula, a, b, out, m=m, k=k)
            return
        name, shape = f"{out.name} of every head", (*a.shape[:3], b.shape[3])
        packed = self.problem.packed
        products = self.operands.scratch(name, "k", shape, out.dtype) if packed else g.virtual(name, shape, out.dtype)
        g.reduction(f"{out.name}, summed over the group", g.matmul(formula, a, b, products, m=m, k=k), out)


def _mask_lengths_first(problem: Problem) -> bool:
    """True to mask beyond the lengths before L is subtracted, which is 2 % faster for packed sequences (H200, 9.19).

    The NaN of ``-inf − -inf`` must not remain. With only a causal mask it does not remain: a row without a key in its sequence
    has no key beyond it either, and the causal mask is applied later.
    """
    band, settings = problem.band, problem.settings
    causal = band is not None and band.right is not None and band.left is None
    return problem.packed and causal and not (settings.expression or problem.bias or problem.mask)
