"""Problem -> Graph: attention written down once, one formula a step, for both engines.

The steps and their order are those that cuDNN recognizes as flash attention, so nothing of size Sq x Skv ever reaches
memory there. Sources: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Dao 2023, "FlashAttention-2",
section 3.1 for the log-sum-exp. What is done to the scores is in :mod:`cupy_sdpa.graph.scores`.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ..problem.problem import ROW_STATS, SEEDS, Problem, has_ragged_alibi, writes_dq_directly
from ..problem.subproblems import subproblems
from ..problem.tensor_spec import ITEMSIZE, TensorSpec
from ..problem.varlen import ragged_offset_name, token_stride
from ..score_fn.expression import EMPTY_PROGRAM
from .nodes import Builder, Graph, Role, Shape, Tensor, row_major
from .scores import Scores, below

#: How the caller's (head_dim, heads, seq, batch) becomes (batch, heads, seq, head_dim), or its transpose in the last two;
#: packed sequences (head_dim, heads, total) have no axis of the batch.
ROWS = (3, 1, 2, 0)
TRANSPOSED = (3, 1, 0, 2)
#: How (seq, heads, batch), or packed (heads, total), becomes (batch, heads, seq, 1).
NUMBERS = (2, 1, 0, -1)
PACKED_NUMBERS = (-1, 0, 1, -1)
#: How (batch,) becomes (batch, 1, 1, 1), and (heads,) becomes (1, heads, 1, 1).
PER_ENTRY = (0, -1, -1, -1)
PER_HEAD = (-1, 0, -1, -1)
#: How the caller's (keys, queries, heads, batch) becomes (batch, heads, queries, keys).
OF_SCORES = (3, 2, 1, 0)


def operand(spec: TensorSpec, axes: tuple[int, ...], role: Role) -> Tensor:
    """The caller's array as a tensor of the graph, with its axes turned and nothing copied."""
    itemsize = ITEMSIZE[spec.dtype]
    b, h, rows, columns = (spec.shape[axis] if axis >= 0 else 1 for axis in axes)
    strides = tuple(spec.strides[axis] // itemsize if axis >= 0 else 1 for axis in axes)
    return Tensor(spec.name, (b, h, rows, columns), spec.dtype, role, strides, axes)


class Operands:
    """A problem's arrays as tensors of its graph.

    Args:
        problem: holds the arrays.
        full_keys: give every array of the scores all keys, by stride 0 where it has one element for all of them.
    """

    def __init__(self, problem: Problem, *, full_keys: bool = False) -> None:
        self.problem, self.full_keys = problem, full_keys
        self.specs = {spec.name: spec for spec in problem.tensors}
        *_, self.sq, self.skv, self.batch = problem.sizes
        self.results = {spec.name for spec in problem.results}

    def __call__(self, name: str, axes: tuple[int, ...] = ROWS) -> Tensor:
        """An array that is there."""
        spec = self.specs[name]
        if self.problem.packed:
            axes = PACKED_NUMBERS if name in ROW_STATS else tuple(axis if axis < 3 else -1 for axis in axes)
        tensor = operand(spec, axes, "output" if name in self.results else "input")
        return self._ragged(tensor, token_stride(spec)) if self.problem.packed else tensor

    def given(self, name: str, axes: tuple[int, ...]) -> Tensor | None:
        """An array of an option, if it is there."""
        return operand(self.specs[name], axes, "input") if name in self.specs else None

    def per_head(self, name: str) -> Tensor | None:
        """An array ``(Hq,)`` that takes part in the scores, if it is there."""
        tensor = self.given(name, PER_HEAD)
        return self._broadcast(tensor, keys=True) if tensor and self.full_keys else tensor

    def of_scores(self, name: str) -> Tensor | None:
        """An array with the axes of the scores, if it is there.

        An array that is the same for all queries is broadcast along them by stride 0, unless it is the same for all keys, too.
        cuDNN reads the single row wrongly in the backward pass (measured with 9.19: wrong gradients, an illegal instruction),
        and with one key it reads the elements of another batch entry (9.19 and 9.28).
        """
        tensor = self.given(name, OF_SCORES)
        if tensor is None:
            return None
        one_row, one_column = tensor.shape[2] == 1, tensor.shape[3] == 1
        return self._broadcast(
            tensor, queries=one_row and (self.skv == 1 or not one_column), keys=one_column and self.full_keys
        )

    def positions(self, name: str, heads: int, strides: tuple[int, ...]) -> Tensor | None:
        """The index of every key, or of every head, as an array of the scores, where the graph is to read it from memory."""
        return Tensor(name, (1, heads, 1, self.skv), "int32", "constant", strides) if self.full_keys else None

    def _broadcast(self, tensor: Tensor, *, queries: bool = False, keys: bool = False) -> Tensor:
        """A tensor with the axis of queries, or of keys, in full by stride 0."""
        (b, h, rows, columns), (b_step, h_step, row, column) = tensor.shape, tensor.strides
        rows, row = (self.sq, 0) if queries else (rows, row)
        columns, column = (self.skv, 0) if keys else (columns, column)
        return replace(tensor, shape=(b, h, rows, columns), strides=(b_step, h_step, row, column))

    def numbers(self, name: str) -> Tensor | None:
        """An array of one number a row, if it is there."""
        return self(name, NUMBERS) if name in self.specs else None

    def lengths(self) -> tuple[Tensor | None, Tensor | None]:
        """The numbers of queries and of keys of every batch entry, where they differ."""
        if not self.problem.ragged:
            return None, None
        shape = (self.batch, 1, 1, 1)
        queries, keys = (
            Tensor(name, shape, "int32", "input", (1, 1, 1, 1), PER_ENTRY) for name in ("seq_lens_q", "seq_lens_kv")
        )
        return queries, keys

    def diagonal(self) -> Tensor | None:
        """The key on the diagonal of every query, where that differs from entry to entry and somebody asks."""
        if not has_ragged_alibi(self.problem):
            return None
        if self.sq == 1:  # for every key, because of "one-query-positions" in the table of known bugs
            return Tensor("diagonal", (self.batch, 1, 1, self.skv), "int32", "input", (self.skv, 1, 1, 1), (1, -1, -1, 0))
        return Tensor("diagonal", (self.batch, 1, self.sq, 1), "int32", "input", (self.sq, 1, 1, 1), (1, -1, 0, -1))

    def scratch(self, name: str, of: str, shape: Shape, dtype: str) -> Tensor:
        """Memory for the time of the call; of packed sequences as much as the sequences have together."""
        tensor = Tensor(name, shape, dtype, "scratch", row_major(shape))
        if not self.problem.packed:
            return tensor
        _, h, rows, columns = shape
        moved = Tensor(name, shape, dtype, "scratch", (rows * h * columns, columns, h * columns, 1))
        return self._ragged(moved, h * columns, of, self.specs[of].shape[-1] * h * columns)

    def _ragged(self, tensor: Tensor, factor: int, of: str = "", elements: int = 0) -> Tensor:
        """A tensor of packed sequences: its rows, or columns, are those of the longest."""
        of = of or tensor.name
        name = ragged_offset_name(of, factor)
        begins = Tensor(name, (self.batch + 1, 1, 1, 1), "int64", "input", (1, 1, 1, 1), PER_ENTRY)
        most = self.skv if name.startswith("cu_seqlens_kv") else self.sq
        _, h, rows, columns = tensor.shape
        transposed = bool(tensor.axes) and tensor.axes[3] == 2
        shape = (self.batch, h, rows, most) if transposed else (self.batch, h, most, columns)
        _, *strides = tensor.strides
        strides = [most * factor, *strides]
        return Tensor(
            tensor.name, shape, tensor.dtype, tensor.role, tuple(strides), tensor.axes, ragged=begins, elements=elements
        )


def graph_of(problem: Problem) -> Graph:
    """The graph that computes a problem, on numpy and, where no other is chosen for a reason, on cuDNN."""
    if not problem.backward:
        return forward(problem)
    return backward(problem, direct=writes_dq_directly(problem))


def _scores(g: Builder, problem: Problem, operands: Operands) -> Scores:
    """What takes part in the scores of a problem."""
    queries, keys = operands.lengths()
    return Scores(
        g.scalar("scale", g.compute_dtype),
        problem.settings.positive_scale,
        g.scalar("softcap", g.compute_dtype) if problem.settings.softcap else None,
        operands.per_head("alibi_slopes"),
        operands.of_scores("bias"),
        operands.of_scores("mask"),
        queries,
        keys,
        operands.diagonal(),
        problem.band,
        problem.settings.program or EMPTY_PROGRAM,
        {spec.name: tensor for spec in problem.captured if (tensor := operands.of_scores(spec.name))},
        problem.settings.gradient_of,
        operands.positions("key positions", 1, (0, 0, 0, 1)),
        operands.positions("head positions", problem.sizes[2], (0, 1, 0, 0)),
        floor=not problem.backward and _may_mask_by_value(problem),
    )


def _may_mask_by_value(problem: Problem) -> bool:
    """Whether a bias or a score function may make scores at or below ``MASKED_SCORE``, as masks made of finite numbers do.

    float16 has no such numbers. The backward pass needs no such step: rows that are masked throughout have L = -inf, and in
    other rows such scores have the weight 0.
    """
    wide = [spec for spec in (problem.bias, *problem.captured) if spec and spec.dtype in ("bfloat16", "float32", "float64")]
    program = problem.settings.program
    chooses = program is not None and any(step.mode == "binary_select" for step in program.steps)
    return problem.bias in wide if not problem.has_score_mod else bool(wide) or chooses


def _builder(problem: Problem) -> Builder:
    return Builder("float64" if problem.dtype == "float64" else "float32")


def _kept(g: Builder, problem: Problem, operands: Operands, shape: Shape) -> Tensor:
    """``R_ij = 1`` where dropout keeps a weight, else 0; as the caller says, or by random numbers."""
    if given := operands.given("dropout_mask", OF_SCORES):
        return given
    seed, offset = (operand(operands.specs[name], PER_ENTRY, "input") for name in SEEDS)
    kept = g.virtual("R", shape)
    if problem.rng_dump:
        kept = operand(problem.rng_dump, OF_SCORES, "output")
    return g.bernoulli("R = 1 with probability 1 − p", kept, seed, offset, 1 - problem.settings.dropout)


def _tails(problem: Problem) -> frozenset[str]:
    """Where a function may make something of what is not there: cuDNN's tiles reach beyond the last key and query.

    It masks that before the function, and -s makes inf of -inf (measured with 9.19: NaN); within whole tiles there is none.
    """
    *_, sq, skv, _ = problem.sizes
    tails = {"keys": skv, "queries": sq}
    masked = problem.backward and problem.settings.program is not None  # exp(S + inf) of a row that is masked throughout
    return frozenset(
        name for name, length in tails.items() if (problem.has_score_mod or masked) and not problem.ragged and length % 128
    )


def _ends_first(problem: Problem) -> bool:
    """Whether what lies behind packed sequences is hidden before L is taken away, which is 2 % faster (H200, 9.19).

    Only where ``-inf - -inf`` cannot stay: with nothing but a causal mask a row that sees none of its sequence's keys sees none
    behind them either.
    """
    band, settings = problem.band, problem.settings
    causal = band is not None and band.right is not None and band.left is None
    return problem.packed and causal and not (settings.program or problem.bias or problem.mask)


@functools.lru_cache(maxsize=1024)
def forward(problem: Problem, guards: frozenset[str] = frozenset()) -> Graph:
    """``out = softmax(S) V`` with the scores S as modified and masked; ``stats`` is the log-sum-exp of every row of S.

    Args:
        problem: a problem without gradients.
        guards: ``positions`` reads the positions of keys from an array and gives all other arrays of the scores the axis of
            keys in full. The result is the same; some cuDNN kernels compute positions wrongly (:mod:`cupy_sdpa.support.why_not`).
            ``no-split`` excludes a kernel.
    """
    g, operands = _builder(problem), Operands(problem, full_keys="positions" in guards)
    q, kt, v, out = operands("q"), operands("k", TRANSPOSED), operands("v"), operands("out")
    scores = _scores(g, problem, operands)
    # S = Q K^T                             (B, Hq, Sq, Skv)
    s = g.matmul("S = Q Kᵀ", q, kt, "S", m=scores.queries, n=scores.keys)
    s, changes = scores.modified(g, s)
    s = scores.masked(g, scores.within(g, s), changes)
    if "keys" in _tails(problem):
        s = below(g, s, "j", axis=3)
    # P = softmax(S), L = log sum exp(S)    P is rounded to the dtype of v, as the tensor cores need it
    dropout = problem.settings.dropout
    p = g.softmax(
        "P = exp(S − L), L = logsumexp(S)", s, "P", g.compute_dtype if dropout else problem.dtype,
        None if problem.max else operands.numbers("stats"),
        sink=operands.given("sinks", PER_HEAD), top=operands.numbers("max"), total=operands.numbers("sum_exp"),
        rows=scores.queries,
    )  # fmt: skip
    if dropout:
        # P <- P R / (1 - p)                Srivastava et al. 2014, "Dropout", scaled so that the expectation stays
        p = g.pointwise("P ∘ R", "mul", p, _kept(g, problem, operands, p.shape), out="P∘R")
        share = g.scalar("1/(1−p)", g.compute_dtype, value=1 / (1 - dropout))
        p = g.pointwise("P ∘ R / (1 − p)", "mul", p, share, out="P∘R/(1−p)", dtype=problem.dtype)
    # O = P V                               (B, Hq, Sq, Dv)
    g.matmul("O = P V", p, v, out, m=scores.queries, k=scores.keys)
    return g.graph(no_split="no-split" in guards)


@functools.lru_cache(maxsize=1024)
def backward(problem: Problem, direct: bool = False, guards: frozenset[str] = frozenset()) -> Graph:
    """The gradients of :func:`forward`, from its output and its log-sum-exp; P is computed anew.

    Dao 2023, "FlashAttention-2", algorithm 2: with ``D = rowsum(dO * O)``, ``dS = P * (dO V^T - D)``.

    Args:
        problem: a problem with gradients.
        direct: write dQ as a matmul gives it. Otherwise it is added up in float32 in scratch memory, in any order, which
            needs no memory of size Sq x Skv.
        guards: ``keys`` and ``queries`` mask what lies beyond the last key or query. That is nothing, but some cuDNN kernels
            compute there, and what they compute must not be used (:mod:`cupy_sdpa.support.why_not` says which).
    """
    if subproblems(problem) != (problem,):
        raise ValueError(f"{problem} takes {len(subproblems(problem))} launches, each with a graph of its own")
    g, operands = _builder(problem), Operands(problem)
    q, kt, vt = operands("q"), operands("k", TRANSPOSED), operands("v", TRANSPOSED)
    out, dout, stats = operands("out"), operands("dout"), operands("stats", NUMBERS)
    dq, dk, dv = operands("dq"), operands("dk"), operands("dv")
    scores = _scores(g, problem, operands)
    queries, keys, dropout = scores.queries, scores.keys, problem.settings.dropout

    # D = rowsum(dO * O)                    (B, Hq, Sq, 1)
    product = g.pointwise("dO ∘ O", "mul", dout, out, out="dO∘O")
    rows = g.reduction("Σ dO ∘ O", product, g.virtual("Σ", stats.shape))
    if problem.dsinks:
        _sinks(g, problem, operands, rows, stats)
    # with dropout D (1 - p), for what it is taken from lacks the factor 1 / (1 - p)
    d = operands.scratch("D", "q", stats.shape, g.compute_dtype) if problem.packed else "D"
    d = g.pointwise("D = (1 − p) · Σ dO ∘ O", "mul", rows, g.scalar("1−p", g.compute_dtype, value=1 - dropout), out=d)
    # S = scale Q K^T, modified             (B, Hq, Sq, Skv)
    s = g.matmul("S = Q Kᵀ", q, kt, "S", m=queries, n=keys)
    s, changes = scores.modified(g, s)
    # P = exp(S - L)                        masked after L is taken away: a row that sees nothing has L = -inf, and P = 0
    if ends_first := _ends_first(problem):
        s = scores.within(g, s)
    s = g.pointwise(f"{s} − L", "sub", s, stats, out=f"{s}−L")
    s = scores.masked(g, s if ends_first else scores.within(g, s), changes)
    guards |= _tails(problem)
    if "keys" in guards and keys is None:
        s = below(g, s, "j", axis=3)
    if "queries" in guards and queries is None:
        s = below(g, s, "i", axis=2)
    p = used = g.pointwise("P = exp(S − L)", "exp", s, out="P")
    if dropout:
        kept = _kept(g, problem, operands, s.shape)
        share = g.scalar("1/(1−p)", g.compute_dtype, value=1 / (1 - dropout))
        used = g.pointwise("P ∘ R", "mul", p, kept, out="P∘R")
        used = g.pointwise("P ∘ R / (1 − p)", "mul", used, share, out="P∘R/(1−p)")
    # dV = P^T dO                           summed over the query heads of a group
    pt = g.transpose("Pᵀ", used, "Pᵀ", problem.dtype)
    _grouped(g, operands, "dV = Pᵀ dO", pt, dout, dv, m=keys, k=queries)
    # dP = dO V^T
    dp = g.matmul("dP = dO Vᵀ", dout, vt, "dP", m=queries, n=keys)
    if dropout:
        dp = g.pointwise("dP ∘ R", "mul", dp, kept, out="dP∘R")
    # dS = P * (dP - D), and on to the gradient of Q K^T
    ds = g.pointwise("dP − D", "sub", dp, d, out="dP−D")
    ds = g.pointwise("P ∘ (dP − D)", "mul", ds, p, out="P∘(dP−D)")
    if dropout:
        ds = g.pointwise("P ∘ (dP − D) / (1 − p)", "mul", ds, share, out="P∘(dP−D)/(1−p)")
    # dS <- dS * dS/dx                      x are the scores before all that changed them, or an array that was read
    ds = scores.derivative(g, ds, changes)
    for spec in problem.ds_reductions:
        # dx = sum dS                       over the axes along which x is broadcast
        g.reduction(f"{spec.name} = Σ {ds}", ds, operand(spec, OF_SCORES, "output"))
    ds = g.pointwise(f"dS = scale · {ds}", "mul", ds, scores.scale, out="dS", dtype=problem.dtype)
    # dK = dS^T Q                           summed over the query heads of a group
    dst = g.transpose("dSᵀ", ds, "dSᵀ", problem.dtype)
    _grouped(g, operands, "dK = dSᵀ Q", dst, q, dk, m=keys, k=queries)
    # dQ = dS K
    k = g.transpose("K", kt, "K")
    if direct:
        g.matmul("dQ = dS K", ds, k, dq, m=queries, k=keys)
    else:
        total = operands.scratch("ΣdQ", "q", dq.shape, g.compute_dtype)
        total = g.matmul("dQ = dS K", ds, k, total, m=queries, k=keys)
        g.pointwise("dQ, rounded", "identity", total, out=dq)
    return g.graph()


def _sinks(g: Builder, problem: Problem, operands: Operands, rows: Tensor, stats: Tensor) -> None:
    """``dsinks = -sum exp(sink - L) rowsum(dO * O)``, over the batch and the queries: the sink's weight, which has no value."""
    assert problem.dsinks
    sinks = operands.given("sinks", PER_HEAD)
    assert sinks
    e = g.pointwise("sink − L", "sub", sinks, stats, out="sink−L")
    e = g.pointwise("exp(sink − L)", "exp", e, out="exp(sink−L)")
    e = g.pointwise("exp(sink − L) · Σ dO ∘ O", "mul", e, rows, out="sink·Σ")
    dsinks = operand(problem.dsinks, PER_HEAD, "output")
    g.reduction("dsinks = −Σ exp(sink − L) · Σ dO ∘ O", e, dsinks, negative=True)


def _grouped(
    g: Builder, operands: Operands, formula: str, a: Tensor, b: Tensor, out: Tensor, *, m: Tensor | None, k: Tensor | None
) -> Tensor:
    """``out = a b``, summed in the accumulator's dtype over the heads of ``a`` that share a head of ``out``.

    What is summed is rounded to the dtype of ``out`` first: cuDNN plans float32 there too, and then gives garbage (measured
    with 9.19 and 9.28: it fills half of what it reads).
    """
    if a.shape[1] == out.shape[1]:
        return g.matmul(formula, a, b, out, m=m, k=k)
    name, shape = f"{out.name} of every head", (*a.shape[:3], b.shape[3])
    every = operands.scratch(name, "k", shape, out.dtype) if operands.problem.packed else g.virtual(name, shape, out.dtype)
    return g.reduction(f"{out.name}, summed over the group", g.matmul(formula, a, b, every, m=m, k=k), out)
