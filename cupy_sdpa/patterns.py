"""Problem -> Graph: attention written down once, one formula a step, for both engines.

The steps and their order are those that cuDNN recognizes as flash attention, so nothing of size Sq x Skv ever reaches
memory there. Sources: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Dao 2023, "FlashAttention-2",
section 3.1 for the log-sum-exp.
"""

from __future__ import annotations

import functools
import math

from .graph import Builder, Graph, Role, Tensor, row_major
from .problem import SIZES, Band, Problem, TensorSpec

#: How the caller's (head_dim, heads, seq, batch) becomes (batch, heads, seq, head_dim), or its transpose in the last two.
ROWS = (3, 1, 2, 0)
TRANSPOSED = (3, 1, 0, 2)
#: How (seq, heads, batch) becomes (batch, heads, seq, 1).
PER_ROW = (2, 1, 0, -1)
#: How (batch,) becomes (batch, 1, 1, 1).
PER_ENTRY = (0, -1, -1, -1)


def operand(spec: TensorSpec, axes: tuple[int, ...], role: Role) -> Tensor:
    """The caller's array as a tensor of the graph, with its axes turned and nothing copied."""
    itemsize = SIZES[spec.dtype]
    shape = tuple(spec.shape[axis] if axis >= 0 else 1 for axis in axes)
    strides = tuple(spec.strides[axis] // itemsize if axis >= 0 else 1 for axis in axes)
    b, h, rows, columns = shape
    return Tensor(spec.name, (b, h, rows, columns), spec.dtype, role, strides, axes)


def graph_of(problem: Problem) -> Graph:
    """The graph that computes a problem, on numpy and, where no other is chosen for a reason, on cuDNN."""
    if not problem.backward:
        return forward(problem)
    return backward(problem, direct=problem.deterministic)


@functools.lru_cache(maxsize=1024)
def forward(problem: Problem) -> Graph:
    """``out = softmax(scale Q K^T + mask) V`` and, where asked for, ``stats = log sum exp`` of every row of scores."""
    g = Builder("float64" if problem.dtype == "float64" else "float32")
    q = operand(problem.q, ROWS, "input")
    kt = operand(problem.k, TRANSPOSED, "input")
    v = operand(problem.v, ROWS, "input")
    out = operand(problem.out, ROWS, "output")
    stats = operand(problem.stats, PER_ROW, "output") if problem.stats else None

    queries, keys = lengths(problem)

    # S = Q K^T                             (B, Hq, Sq, Skv)
    s = g.matmul("S = Q Kᵀ", q, kt, "S", m=queries, n=keys)
    # S <- scale S
    s = scaled(g, s, g.scalar("scale", g.accumulate), problem)
    if queries and keys:
        s = within(g, s, queries, keys)
    if problem.band:
        s = banded(g, s, problem.band, queries, keys)
    # P = softmax(S), L = log sum exp(S)    P is rounded to the dtype of v, as the tensor cores need it
    p = g.softmax("P = exp(S − L), L = logsumexp(S)", s, "P", problem.dtype, stats)
    # O = P V                               (B, Hq, Sq, Dv)
    g.matmul("O = P V", p, v, out, m=queries, k=keys)
    return g.graph()


@functools.lru_cache(maxsize=1024)
def backward(problem: Problem, direct: bool = False, guards: frozenset[str] = frozenset()) -> Graph:
    """The gradients of :func:`forward`, from its output and its log-sum-exp; P is computed anew.

    Dao 2023, "FlashAttention-2", algorithm 2: with ``D = rowsum(dO * O)``, ``dS = P * (dO V^T - D)``.

    Args:
        problem: a problem with gradients.
        direct: write dQ as a matmul gives it. Otherwise it is added up in float32 in scratch memory, in any order, which
            needs no memory of size Sq x Skv.
        guards: ``keys`` and ``queries`` mask what lies beyond the last key or query. That is nothing, but some cuDNN kernels
            compute there, and what they compute must not be used (:mod:`cupy_sdpa.support` says which).
    """
    assert problem.dout
    assert problem.stats
    assert problem.dq
    assert problem.dk
    assert problem.dv
    g = Builder("float64" if problem.dtype == "float64" else "float32")
    q, kt, vt, out, dout = (
        operand(spec, axes, "input")
        for spec, axes in (
            (problem.q, ROWS), (problem.k, TRANSPOSED), (problem.v, TRANSPOSED), (problem.out, ROWS), (problem.dout, ROWS),
        )
    )  # fmt: skip
    stats = operand(problem.stats, PER_ROW, "input")
    dq, dk, dv = (operand(spec, ROWS, "output") for spec in (problem.dq, problem.dk, problem.dv))
    b, hq, sq, _ = q.shape
    scale = g.scalar("scale", g.accumulate)
    queries, keys = lengths(problem)

    # D = rowsum(dO * O)                    (B, Hq, Sq, 1); the product with 1 is where dropout's scale will stand
    product = g.pointwise("dO ∘ O", "mul", dout, out, out="dO∘O")
    rows = g.reduction("Σ dO ∘ O", product, g.virtual("Σ", (b, hq, sq, 1)))
    d = g.pointwise("D = 1 · Σ dO ∘ O", "mul", rows, g.scalar("one", g.accumulate, value=1.0), out="D")
    # S = scale Q K^T                       (B, Hq, Sq, Skv)
    s = g.matmul("S = Q Kᵀ", q, kt, "S", m=queries, n=keys)
    s = scaled(g, s, scale, problem)
    # P = exp(S - L)                        masked after L is taken away: a row that sees nothing has L = -inf, and P = 0
    s = g.pointwise(f"{s} − L", "sub", s, stats, out=f"{s}−L")
    if queries and keys:
        s = within(g, s, queries, keys)
    if problem.band:
        s = banded(g, s, problem.band, queries, keys)
    if "keys" in guards and keys is None:
        s = below(g, s, "j", axis=3)
    if "queries" in guards and queries is None:
        s = below(g, s, "i", axis=2)
    p = g.pointwise("P = exp(S − L)", "exp", s, out="P")
    # dV = P^T dO                           summed over the query heads of a group
    pt = g.transpose("Pᵀ", p, "Pᵀ", problem.dtype)
    grouped(g, "dV = Pᵀ dO", pt, dout, dv, m=keys, k=queries)
    # dP = dO V^T
    dp = g.matmul("dP = dO Vᵀ", dout, vt, "dP", m=queries, n=keys)
    # dS = scale P * (dP - D)
    ds = g.pointwise("dP − D", "sub", dp, d, out="dP−D")
    ds = g.pointwise("P ∘ (dP − D)", "mul", ds, p, out="P∘(dP−D)")
    ds = g.pointwise("dS = scale · P ∘ (dP − D)", "mul", ds, scale, out="dS", dtype=problem.dtype)
    # dK = dS^T Q                           summed over the query heads of a group
    dst = g.transpose("dSᵀ", ds, "dSᵀ", problem.dtype)
    grouped(g, "dK = dSᵀ Q", dst, q, dk, m=keys, k=queries)
    # dQ = dS K
    k = g.transpose("K", kt, "K")
    if direct:
        g.matmul("dQ = dS K", ds, k, dq, m=queries, k=keys)
    else:
        total = Tensor("ΣdQ", dq.shape, g.accumulate, "scratch", row_major(dq.shape))
        total = g.matmul("dQ = dS K", ds, k, total, m=queries, k=keys)
        g.pointwise("dQ, rounded", "identity", total, out=dq)
    return g.graph()


def lengths(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """The numbers of queries and of keys of every batch entry, where they are given."""
    if problem.seq_lens_q is None or problem.seq_lens_kv is None:
        return None, None
    return operand(problem.seq_lens_q, PER_ENTRY, "input"), operand(problem.seq_lens_kv, PER_ENTRY, "input")


def scaled(g: Builder, s: Tensor, scale: Tensor, problem: Problem) -> Tensor:
    """``S <- scale S``."""
    s = g.pointwise("S₁ = scale · S", "mul", s, scale, out="S₁")
    if not problem.positive_scale:
        # cuDNN's Hopper kernels fold a scale that comes last into their exponent and mask, and take the maximum, before it,
        # which is right for a positive scale only: 0 and below gave NaN (measured with 9.19). One more step keeps them apart.
        s = g.pointwise("S₁′ = 1 · S₁", "mul", s, g.scalar("unit", g.accumulate, value=1.0), out="S₁′")
    return s


def grouped(
    g: Builder, formula: str, a: Tensor, b: Tensor, out: Tensor, *, m: Tensor | None = None, k: Tensor | None = None
) -> Tensor:
    """``out = a b``, summed in the accumulator's dtype over the heads of ``a`` that share a head of ``out``.

    What is summed is rounded to the dtype of ``out`` first: cuDNN plans float32 there too, and then gives garbage (measured
    with 9.19 and 9.28: it fills half of what it reads).
    """
    if a.shape[1] == out.shape[1]:
        return g.matmul(formula, a, b, out, m=m, k=k)
    every = g.virtual(f"{out.name} of every head", (*a.shape[:3], b.shape[3]), out.dtype)
    return g.reduction(f"{out.name}, summed over the group", g.matmul(formula, a, b, every, m=m, k=k), out)


def banded(g: Builder, s: Tensor, band: Band, queries: Tensor | None, keys: Tensor | None) -> Tensor:
    """``S_ij <- S_ij where p - left <= j <= p + right, else -inf``, with ``p = i``, or bottom right ``p = i + Skv - Sq``.

    Every batch entry has its own diagonal where its lengths are given.
    """
    if band.right is not None:
        # p = i, i + Skv - Sq
        row = positions(g, s, "i", axis=2)
        if band.bottom_right:
            row = counted(g, f"{row} + Skv", "add", row, keys or g.scalar("Skv", "int32", value=s.shape[3]))
            row = counted(g, f"{row} − Sq", "sub", row, queries or g.scalar("Sq", "int32", value=s.shape[2]))
        if band.right:
            row = counted(g, f"{row} + {band.right}", "add", row, g.scalar("right", "int32", value=band.right))
        column = positions(g, s, "j", axis=3)
        s = masked(g, s, g.pointwise(f"visible = {row} ≥ j", "cmp_ge", row, column, out="visible", dtype="bool"))
    if band.left is not None:
        # j + left + 1 > p
        row = positions(g, s, "i‴", axis=2)
        column = positions(g, s, "j‴", axis=3)
        bound = band.left + 1
        if band.bottom_right and queries and keys:
            column = counted(g, f"j‴ + {bound}", "add", column, g.scalar("left", "int32", value=bound))
            column = counted(g, f"{column} − Skv", "sub", column, keys)
            column = counted(g, f"{column} + Sq", "add", column, queries)
        else:
            bound -= s.shape[3] - s.shape[2] if band.bottom_right else 0
            left = g.scalar("left", "float32", value=float(bound))
            column = g.pointwise(f"j‴ + {bound}", "add", column, left, out=f"j‴ + {bound}", dtype="float32")
        s = masked(g, s, g.pointwise(f"near = {column} > i‴", "cmp_gt", column, row, out="near", dtype="bool"))
    return s


def counted(g: Builder, formula: str, mode: str, x: Tensor, b: Tensor) -> Tensor:
    """Positions moved by a number, int32."""
    return g.pointwise(formula, mode, x, b, out=formula, dtype="int32")


def below(g: Builder, s: Tensor, name: str, axis: int) -> Tensor:
    """``S <- S where j < Skv, else -inf`` (or i and Sq): true of every element that exists."""
    length = g.scalar(f"{name} length", "int32", value=s.shape[axis])
    index = positions(g, s, f"{name}′", axis)
    return masked(g, s, g.pointwise(f"{name}′ < {s.shape[axis]}", "cmp_lt", index, length, out=f"{name} exists", dtype="bool"))


def within(g: Builder, s: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """``S_ij <- S_ij where i < seq_lens_q and j < seq_lens_kv, else -inf``: what lies behind a sequence does not exist."""
    row = positions(g, s, "i″", axis=2)
    column = positions(g, s, "j″", axis=3)
    is_query = g.pointwise("i″ < seq_lens_q", "cmp_lt", row, queries, out="is query", dtype="bool")
    is_key = g.pointwise("j″ < seq_lens_kv", "cmp_lt", column, keys, out="is key", dtype="bool")
    return masked(g, s, g.pointwise("exists = both", "logical_and", is_query, is_key, out="exists", dtype="bool"))


def masked(g: Builder, s: Tensor, mask: Tensor) -> Tensor:
    """``S <- S where mask, else -inf``."""
    hidden = g.scalar("-inf", g.accumulate, value=-math.inf)
    return g.pointwise(f"{s} where {mask}, else −∞", "binary_select", s, hidden, mask, out=f"{s} where {mask}")


def positions(g: Builder, like: Tensor, name: str, axis: int) -> Tensor:
    """The index of every element of ``like`` along an axis, int32."""
    what = {2: "query", 3: "key"}[axis]
    return g.pointwise(f"{name} = position of the {what}", "gen_index", like, out=name, dtype="int32", axis=axis)
