"""Problem -> Graph: attention written down once, one formula a step, for both engines.

The steps and their order are those that cuDNN recognizes as flash attention, so nothing of size Sq x Skv ever reaches
memory there. Sources: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Dao 2023, "FlashAttention-2",
section 3.1 for the log-sum-exp.
"""

from __future__ import annotations

import functools
import math

from .graph import Builder, Graph, Role, Tensor
from .problem import ITEMSIZE, Problem, TensorSpec

#: How the caller's (head_dim, heads, seq, batch) becomes (batch, heads, seq, head_dim), or its transpose in the last two.
ROWS = (3, 1, 2, 0)
TRANSPOSED = (3, 1, 0, 2)
#: How (seq, heads, batch) becomes (batch, heads, seq, 1).
PER_ROW = (2, 1, 0, -1)


def operand(spec: TensorSpec, axes: tuple[int, ...], role: Role) -> Tensor:
    """The caller's array as a tensor of the graph, with its axes turned and nothing copied."""
    itemsize = ITEMSIZE[spec.dtype]
    shape = tuple(spec.shape[axis] if axis >= 0 else 1 for axis in axes)
    strides = tuple(spec.strides[axis] // itemsize if axis >= 0 else 1 for axis in axes)
    b, h, rows, columns = shape
    return Tensor(spec.name, (b, h, rows, columns), spec.dtype, role, strides, axes)


@functools.lru_cache(maxsize=1024)
def forward(problem: Problem) -> Graph:
    """``out = softmax(scale Q K^T + mask) V`` and, where asked for, ``stats = log sum exp`` of every row of scores."""
    g = Builder("float64" if problem.dtype == "float64" else "float32")
    q = operand(problem.q, ROWS, "input")
    kt = operand(problem.k, TRANSPOSED, "input")
    v = operand(problem.v, ROWS, "input")
    out = operand(problem.out, ROWS, "output")
    stats = operand(problem.stats, PER_ROW, "output") if problem.stats else None

    # S = Q K^T                             (B, Hq, Sq, Skv)
    s = g.matmul("S = Q Kᵀ", q, kt, "S")
    # S <- scale S
    s = g.pointwise("S₁ = scale · S", "mul", s, g.scalar("scale", g.accumulate), out="S₁")
    if not problem.positive_scale:
        # cuDNN's Hopper kernel folds a scale that comes last into its exponent and takes the row's maximum before it, which
        # is right for a positive scale only: 0 and below gave NaN (measured with 9.19). One more step keeps them apart.
        s = g.pointwise("S₁′ = 1 · S₁", "mul", s, g.scalar("one", g.accumulate, value=1.0), out="S₁′")
    if problem.causal:
        s = causal(g, s)
    # P = softmax(S), L = log sum exp(S)    P is rounded to the dtype of v, as the tensor cores need it
    p = g.softmax("P = exp(S − L), L = logsumexp(S)", s, "P", problem.dtype, stats)
    # O = P V                               (B, Hq, Sq, Dv)
    g.matmul("O = P V", p, v, out)
    return g.graph()


def causal(g: Builder, s: Tensor) -> Tensor:
    """``S_ij <- S_ij where i >= j, else -inf``: query i sees the keys up to and with i (top-left alignment)."""
    row = positions(g, s, "i", axis=2)
    column = positions(g, s, "j", axis=3)
    visible = g.pointwise("visible = i ≥ j", "cmp_ge", row, column, out="visible", dtype="bool")
    hidden = g.scalar("-inf", g.accumulate, value=-math.inf)
    return g.pointwise(f"S₂ = {s} where visible, else −∞", "binary_select", s, hidden, visible, out="S₂")


def positions(g: Builder, like: Tensor, name: str, axis: int) -> Tensor:
    """The index of every element of ``like`` along an axis, int32."""
    what = {2: "query", 3: "key"}[axis]
    return g.pointwise(f"{name} = position of the {what}", "gen_index", like, out=name, dtype="int32", axis=axis)
