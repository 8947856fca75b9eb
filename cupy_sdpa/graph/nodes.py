"""A computation as plain data: tensors, nodes in the order of their computation, and the shape rules.

A graph holds no pointer, no device and no plan. :mod:`cupy_sdpa.graph.interpreter` gives every node its meaning on numpy;
:mod:`cupy_sdpa.plans.lowering` says it to cuDNN. ``print(graph)`` shows every step with its formula, shape and dtype.

Every tensor has four dimensions, ``(batch, heads, rows, columns)``: queries are ``(B, Hq, Sq, D)``, scores
``(B, Hq, Sq, Skv)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Shape = tuple[int, int, int, int]
Role = Literal["input", "output", "scalar", "constant", "scratch", "virtual"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a graph.

    Attributes:
        name: unique in its graph; the name by which arrays are handed to an engine.
        shape: ``(batch, heads, rows, columns)``.
        dtype: a numpy dtype's name, ``bfloat16`` among them.
        role: ``input`` and ``output`` are the caller's arrays; ``scalar`` is a number handed over by value; ``constant`` is an
            int32 array of the numbers from 0 on, seen with the tensor's strides, which the engine provides; ``scratch`` is
            memory that the engine provides for the time of the call; ``virtual`` exists only inside the kernel.
        strides: in elements, in the order of ``shape``.
        axes: how the caller's array becomes this tensor, ``array.transpose(axes)``; -1 stands for a new axis of length 1.
        value: of a scalar that is the same in every call; None for one that the caller gives.
        ragged: ``(B+1, 1, 1, 1)``, where each batch entry begins, in elements: entries lie behind one another, each with its
            own number of rows, and ``shape`` has the largest. None where every entry is as long as the shape says.
        elements: of ragged scratch memory, how many elements all entries have together. It is no part of a plan.
    """

    name: str
    shape: Shape
    dtype: str
    role: Role = "virtual"
    strides: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    value: float | None = None
    ragged: Tensor | None = None
    elements: int = field(default=0, repr=False)

    @property
    def size(self) -> int:
        """How many elements its memory has."""
        return self.elements or math.prod(self.shape)

    @property
    def span(self) -> int:
        """How many elements lie between the first and the last one, these included."""
        return 1 + sum(step * (length - 1) for step, length in zip(self.strides, self.shape, strict=True))

    def __str__(self) -> str:
        return self.name


#: The pointwise modes, by cuDNN's names, and how many tensors each reads.
POINTWISE: dict[str, int] = {
    "mul": 2,  # x * b
    "add": 2,  # x + b
    "sub": 2,  # x - b
    "div": 2,  # x / b; truncated where out is of integers
    "mod": 2,  # the rest of the truncated division, which has the sign of x
    "max": 2,  # the greater of x and b
    "min": 2,  # the lesser
    "pow": 2,  # x to the b
    "neg": 1,  # -x
    "exp": 1,  # e to the x
    "log": 1,  # the natural logarithm of x
    "sqrt": 1,  # the root of x
    "rsqrt": 1,  # 1 / the root of x
    "reciprocal": 1,  # 1 / x
    "tanh_fwd": 1,  # tanh x
    "sin": 1,  # sin x
    "cos": 1,  # cos x
    "tan": 1,  # tan x
    "erf": 1,  # the error function of x
    "abs": 1,  # |x|
    "floor": 1,  # x rounded down
    "ceil": 1,  # x rounded up
    "identity": 1,  # x
    "cmp_eq": 2,  # x == b
    "cmp_neq": 2,  # x != b
    "cmp_ge": 2,  # x >= b
    "cmp_gt": 2,  # x > b
    "cmp_le": 2,  # x <= b
    "cmp_lt": 2,  # x < b
    "logical_and": 2,  # x and b
    "logical_or": 2,  # x or b
    "gen_index": 1,  # the position of each element of x along an axis
    "binary_select": 3,  # x where t, else b
}


@dataclass(frozen=True, slots=True)
class Node:
    """One step. ``formula`` is the step in the notation of the docs, for people."""

    formula: str
    out: Tensor
    operands: ClassVar[tuple[str, ...]] = ()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the step reads."""
        found = [tensor for name in self.operands if (tensor := getattr(self, name)) is not None]
        return (*found, *(t.ragged for t in (*found, *self.outputs) if t.ragged is not None))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that the step writes."""
        return (self.out,)


@dataclass(frozen=True, slots=True)
class Matmul(Node):
    """``out = a b``, matrix by matrix; the heads of ``b`` may be fewer, each then serves a group of heads of ``a``.

    ``m``, ``n`` and ``k`` ``(B, 1, 1, 1)`` say for every batch entry how many rows of ``a``, columns of ``b``, and products in
    each sum there are; what lies beyond is not read, and what would be computed there is 0. None stands for all.
    """

    a: Tensor
    b: Tensor
    m: Tensor | None = None
    n: Tensor | None = None
    k: Tensor | None = None
    operands: ClassVar[tuple[str, ...]] = ("a", "b", "m", "n", "k")


@dataclass(frozen=True, slots=True)
class Pointwise(Node):
    """``out = mode(x, b, t)``, element by element; ``b`` and ``t`` are broadcast to ``x``."""

    mode: str
    x: Tensor
    b: Tensor | None = None
    t: Tensor | None = None
    axis: int | None = None
    operands: ClassVar[tuple[str, ...]] = ("x", "b", "t")


@dataclass(frozen=True, slots=True)
class Softmax(Node):
    """``out = exp(x - m) / l`` with ``m = max(x)`` and ``l = sum(exp(x - m))`` over the columns; ``stats = m + log(l)``.

    ``sink`` ``(1, H, 1, 1)`` is one more column, of which nothing is given out: it takes part in m and in l. A row that is -inf
    throughout gives 0 and stats -inf. ``stats`` is virtual where nobody asked for it; or ``top``, which is m, and ``total``,
    which is l, are given out in its place. ``rows`` ``(B, 1, 1, 1)`` says how many rows there are in every batch entry; those
    beyond see no sink either.
    """

    x: Tensor
    stats: Tensor | None = None
    sink: Tensor | None = None
    top: Tensor | None = None
    total: Tensor | None = None
    rows: Tensor | None = None
    operands: ClassVar[tuple[str, ...]] = ("x", "sink", "rows")

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The probabilities, the log-sum-exp of every row, and what it is made of."""
        return (self.out, *(tensor for tensor in (self.stats, self.top, self.total) if tensor is not None))


@dataclass(frozen=True, slots=True)
class Bernoulli(Node):
    """``out = 1`` with a probability, else 0, element by element, by the numbers that follow from ``seed`` and ``offset``."""

    seed: Tensor
    offset: Tensor
    probability: float
    operands: ClassVar[tuple[str, ...]] = ("seed", "offset")


@dataclass(frozen=True, slots=True)
class Reduction(Node):
    """``out = sum of x``, in the accumulator's dtype, over each dimension in which out has 1, and over the heads of a group.

    ``negative`` changes the sign of the sum.
    """

    x: Tensor
    negative: bool = False
    operands: ClassVar[tuple[str, ...]] = ("x",)


@dataclass(frozen=True, slots=True)
class Transpose(Node):
    """``out = x`` with rows and columns exchanged."""

    x: Tensor
    operands: ClassVar[tuple[str, ...]] = ("x",)


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of their computation.

    Attributes:
        nodes: the steps.
        compute_dtype: the dtype of intermediate results, ``float32`` or ``float64``.
        no_split: whether cuDNN's kernel that splits the keys must not compute it.
    """

    nodes: tuple[Node, ...]
    compute_dtype: str
    no_split: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor once, in the order of its first appearance."""
        return tuple(dict.fromkeys(t for node in self.nodes for t in (*node.inputs, *node.outputs)))

    def by_role(self, *roles: Role) -> tuple[Tensor, ...]:
        """The tensors of these roles, in the order of their first appearance."""
        return tuple(t for t in self.tensors if t.role in roles)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The printed form: what goes in, then one line a step."""
        width = max(len(node.formula) for node in self.nodes)
        for t in self.by_role("input", "constant"):
            yield f"  {t.role:8} {t.name:<{width}}  {_described(t)}"
        for number, node in enumerate(self.nodes, 1):
            mark = "".join(f"  {t.role} {t.name}" for t in node.outputs if t.role == "output")
            yield f"  {number:4}.  {node.formula:<{width}}  {_described(node.out)}{mark}"


def _described(tensor: Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape)):>20} {tensor.dtype}"


def row_major(shape: Shape) -> tuple[int, ...]:
    """The strides, in elements, of a dense tensor whose last dimension is contiguous."""
    _, h, rows, columns = shape
    return (h * rows * columns, rows * columns, columns, 1)


@dataclass
class Builder:
    """Writes a graph down step by step, each with its shape rule; :meth:`graph` freezes it.

    Args:
        compute_dtype: the dtype of intermediate results.
    """

    compute_dtype: str = "float32"
    nodes: list[Node] = field(default_factory=list)
    _names: set[str] = field(default_factory=set, repr=False)

    def graph(self, *, no_split: bool = False) -> Graph:
        """The graph of the steps so far."""
        return Graph(tuple(self.nodes), self.compute_dtype, no_split)

    def scalar(self, name: str, dtype: str = "float32", value: float | None = None) -> Tensor:
        """A number handed over by value; a ``value`` given here is the same in every call."""
        return Tensor(name, (1, 1, 1, 1), dtype, "scalar", (1, 1, 1, 1), value=value)

    def virtual(self, name: str, shape: Shape, dtype: str | None = None) -> Tensor:
        """A tensor inside the kernel, row-major, of the accumulator's dtype unless said otherwise."""
        return Tensor(name, shape, dtype or self.compute_dtype, "virtual", row_major(shape))

    def matmul(
        self,
        formula: str,
        a: Tensor,
        b: Tensor,
        out: Tensor | str,
        *,
        m: Tensor | None = None,
        n: Tensor | None = None,
        k: Tensor | None = None,
    ) -> Tensor:
        """``a (B, H, M, K)`` times ``b (B, Hb, K, N)``, H a multiple of Hb, gives ``(B, H, M, N)``; see :class:`Matmul`."""
        for length in (m, n, k):
            if length is not None and length.shape != (a.shape[0], 1, 1, 1):
                raise ValueError(f"matmul {formula}: {length} {length.shape} must be {(a.shape[0], 1, 1, 1)}")
        if a.dtype != b.dtype:
            raise ValueError(f"matmul {formula}: {a} is {a.dtype} and {b} is {b.dtype}; both must have one dtype")
        if a.shape[0] != b.shape[0] or a.shape[1] % max(b.shape[1], 1) or a.shape[3] != b.shape[2]:
            raise ValueError(f"matmul {formula}: {a} {a.shape} and {b} {b.shape} do not fit")
        return self._add(Matmul(formula, self._out(out, (*a.shape[:3], b.shape[3])), a, b, m, n, k))

    def pointwise(
        self,
        formula: str,
        mode: str,
        x: Tensor,
        b: Tensor | None = None,
        t: Tensor | None = None,
        *,
        out: Tensor | str,
        dtype: str | None = None,
        axis: int | None = None,
    ) -> Tensor:
        """Element by element; the operands are broadcast to one shape."""
        operands = [tensor for tensor in (x, b, t) if tensor is not None]
        if len(operands) != POINTWISE[mode]:
            raise ValueError(f"{mode} {formula}: reads {POINTWISE[mode]} tensors, got {len(operands)}")
        dims = [next((n for n in lengths if n != 1), 1) for lengths in zip(*(t.shape for t in operands), strict=True)]
        for tensor in operands:
            if any(n not in (1, full) for n, full in zip(tensor.shape, dims, strict=True)):
                shapes = ", ".join(f"{t} {t.shape}" for t in operands)
                raise ValueError(f"{mode} {formula}: {shapes} do not broadcast to one shape")
        shape = (dims[0], dims[1], dims[2], dims[3])
        return self._add(Pointwise(formula, self._out(out, shape, dtype), mode, x, b, t, axis))

    def softmax(
        self,
        formula: str,
        x: Tensor,
        out: str,
        dtype: str,
        stats: Tensor | None = None,
        *,
        sink: Tensor | None = None,
        top: Tensor | None = None,
        total: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Over the columns; ``stats``, or ``top`` and ``total``, ``(B, H, rows, 1)`` get what :class:`Softmax` says."""
        shape = (*x.shape[:3], 1)
        stats = stats or (None if top else self.virtual("lse", shape))
        for tensor in (stats, top, total):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"softmax {formula}: {tensor} {tensor.shape} must be {shape}")
        if sink is not None and sink.shape != (1, x.shape[1], 1, 1):
            raise ValueError(f"softmax {formula}: {sink} {sink.shape} must be {(1, x.shape[1], 1, 1)}")
        return self._add(Softmax(formula, self.virtual(out, x.shape, dtype), x, stats, sink, top, total, rows))

    def bernoulli(self, formula: str, out: Tensor, seed: Tensor, offset: Tensor, probability: float) -> Tensor:
        """Ones with a probability, else zeros, of the shape of ``out``."""
        return self._add(Bernoulli(formula, out, seed, offset, probability))

    def reduction(self, formula: str, x: Tensor, out: Tensor, *, negative: bool = False) -> Tensor:
        """The sum over the dimensions in which ``out`` has 1, or over groups of heads ``(B, Hb, M, N)``, H a multiple of Hb."""
        (b, h, m, n), (_, hb, _, _) = x.shape, out.shape
        group = out.shape == (b, hb, m, n) and hb and not h % hb
        if not group and any(of not in (1, full) for of, full in zip(out.shape, x.shape, strict=True)):
            raise ValueError(f"reduction {formula}: {x} {x.shape} cannot be summed to {out} {out.shape}")
        return self._add(Reduction(formula, out, x, negative))

    def transpose(self, formula: str, x: Tensor, out: str, dtype: str | None = None) -> Tensor:
        """``(B, H, M, N)`` to ``(B, H, N, M)``; the strides are exchanged too, nothing moves."""
        b, h, m, n = x.shape
        b_step, h_step, m_step, n_step = x.strides
        turned = Tensor(out, (b, h, n, m), dtype or x.dtype, "virtual", (b_step, h_step, n_step, m_step), ragged=x.ragged)
        return self._add(Transpose(formula, turned, x))

    def _out(self, out: Tensor | str, shape: Shape, dtype: str | None = None) -> Tensor:
        if isinstance(out, str):
            return self.virtual(out, shape, dtype)
        if out.shape != shape:
            raise ValueError(f"{out} has shape {out.shape}, the step gives {shape}")
        return out

    def _add(self, node: Node) -> Tensor:
        for tensor in node.outputs:
            if tensor.name in self._names:
                raise ValueError(f"two tensors are named {tensor.name}")
        self._names |= {tensor.name for tensor in node.outputs}
        self.nodes.append(node)
        return node.out
