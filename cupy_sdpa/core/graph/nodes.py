"""Operation graphs as plain data: tensors, nodes in the order of computation, and shape rules.

A graph contains no pointer, device or plan. :mod:`.core.numpy_engine.interpreter` evaluates every node on arrays;
:mod:`.core.cudnn_engine.lowering` translates it for cuDNN. Every tensor has four dimensions,
``(batch, heads, rows, columns)``: queries are ``(B, Hq, Sq, D)``, scores ``(B, Hq, Sq, Skv)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

Shape = tuple[int, int, int, int]
Role = Literal["input", "output", "scalar", "constant", "scratch", "virtual"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a graph.

    Attributes:
        name: unique in its graph; arrays are passed to an engine by this name.
        shape: ``(batch, heads, rows, columns)``.
        dtype: the name of a numpy dtype, or ``bfloat16``.
        role: ``input`` and ``output`` are the caller's arrays. ``scalar`` is a by-value scalar. ``constant`` is an array of
            the integers ``0, step, 2 step, ...``, which the engine provides. ``scratch`` is memory that the engine provides
            for one call. ``virtual`` is an intermediate result inside the kernel.
        strides: in elements, in the order of ``shape``.
        axes: the axes of the caller's array, ``array.transpose(axes)``; -1 is a new axis of length 1.
        value: the value of a scalar that is the same in every call; None if it is an argument of the call.
        ragged: ``(B+1, 1, 1, 1)``, the offset of each sequence, in elements; ``shape`` is the longest sequence's. Default None.
        elements: the number of elements of ragged scratch memory. It is not part of a plan.
        step: the difference between consecutive integers of a constant.
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
    step: int = field(default=1, repr=False)

    @property
    def size(self) -> int:
        """The number of elements of its memory."""
        return self.elements or math.prod(self.shape)

    @property
    def span(self) -> int:
        """The number of elements in memory from the first to the last element, inclusive."""
        return 1 + sum(step * (length - 1) for step, length in zip(self.strides, self.shape, strict=True))

    def __str__(self) -> str:
        return self.name


#: The tags of tensors that checks and rules look for: the weights, the gradient of the scores before the softmax, and what it
#: subtracts. A tag is the name of the tensor in every graph that has it.
WEIGHTS, SCORE_GRADIENT, SUBTRACTED = "P", "P∘(dP−D)", "D"


@dataclass(frozen=True)
class Node:
    """One step. ``formula`` is the step in the notation of the docs; it is only printed."""

    formula: str
    out: Tensor
    operands: ClassVar[tuple[str, ...]] = ()

    @functools.cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the step reads."""
        tensors = [tensor for name in self.operands if (tensor := getattr(self, name)) is not None]
        return (*tensors, *[t.ragged for t in (*tensors, *self.outputs) if t.ragged is not None])

    @functools.cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that the step writes."""
        return (self.out,)


@dataclass(frozen=True)
class Matmul(Node):
    """``out = a b`` for each batch item and head. Each head of a ``b`` with fewer heads serves a group of heads of ``a``.

    ``m``, ``n`` and ``k`` ``(B, 1, 1, 1)`` are each batch item's number of rows of ``a``, columns of ``b`` and products per
    sum; None for all. Elements beyond them are not read, and the result there is 0.
    """

    a: Tensor
    b: Tensor
    m: Tensor | None = None
    n: Tensor | None = None
    k: Tensor | None = None
    operands: ClassVar[tuple[str, ...]] = ("a", "b", "m", "n", "k")


@dataclass(frozen=True)
class Pointwise(Node):
    """``out = mode(x, b, t)``, elementwise; ``b`` and ``t`` are broadcast to ``x``."""

    mode: str
    x: Tensor
    b: Tensor | None = None
    t: Tensor | None = None
    axis: int | None = None
    operands: ClassVar[tuple[str, ...]] = ("x", "b", "t")


@dataclass(frozen=True)
class Softmax(Node):
    """``out = exp(x - m) / l`` with ``m = max(x)`` and ``l = sum(exp(x - m))`` over the columns; ``stats = m + log(l)``.

    ``sink`` ``(1, H, 1, 1)`` is an additional column, included in m and l but not in ``out``. For a row of -inf, out is 0 and
    stats is -inf. ``stats`` is virtual if the problem does not return it; ``max`` (m) and ``sum_exp`` (l) replace
    it. ``rows`` ``(B, 1, 1, 1)`` is the number of rows of each batch item; rows beyond that have no sink.
    With ``scale`` out is FP8, ``round(scale * exp(x - m)) / l``: kernels divide by l after the matmul that reads ``out``.
    """

    x: Tensor
    stats: Tensor | None = None
    sink: Tensor | None = None
    max: Tensor | None = None
    sum_exp: Tensor | None = None
    rows: Tensor | None = None
    scale: Tensor | None = None
    operands: ClassVar[tuple[str, ...]] = ("x", "sink", "rows", "scale")

    @functools.cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The probabilities and the row statistics."""
        return (self.out, *[tensor for tensor in (self.stats, self.max, self.sum_exp) if tensor is not None])


@dataclass(frozen=True)
class Bernoulli(Node):
    """``out = 1`` with a probability, else 0, elementwise. ``seed`` and ``offset`` determine the random numbers."""

    seed: Tensor
    offset: Tensor
    probability: float
    operands: ClassVar[tuple[str, ...]] = ("seed", "offset")


@dataclass(frozen=True)
class Reduction(Node):
    """``out = sum(x)``, in the compute dtype, over each dimension where out has length 1, and over the heads of a group.

    ``negative`` changes the sign of the sum. ``amax`` is ``out = max |x|`` over all elements instead, 0 without elements.
    """

    x: Tensor
    negative: bool = False
    amax: bool = False
    operands: ClassVar[tuple[str, ...]] = ("x",)


@dataclass(frozen=True)
class Transpose(Node):
    """``out = xᵀ``."""

    x: Tensor
    operands: ClassVar[tuple[str, ...]] = ("x",)


@dataclass(frozen=True)
class PagedLoad(Node):
    """The keys or values of every batch item, gathered from pages: row ``j`` is row ``j % n`` of page ``table[j // n]``.

    ``pages`` is ``(pages, H, n, D)`` with n rows per page, ``table`` is ``(B, 1, P, 1)`` and ``lengths`` ``(B, 1, 1, 1)``.
    ``out`` is ``(B, H, n P, D)``, and ``(B, H, D, n P)`` if ``transposed``. Table entries after the length are not read.
    """

    pages: Tensor
    table: Tensor
    lengths: Tensor
    transposed: bool = False
    operands: ClassVar[tuple[str, ...]] = ("pages", "table", "lengths")


@dataclass(frozen=True)
class Graph:
    """An operation graph: nodes in the order of computation.

    Attributes:
        nodes: the steps.
        compute_dtype: the dtype of intermediate results, ``float32`` or ``float64``.
        no_split: whether to exclude cuDNN's kernel that splits the keys.
        notes: what an engine derived from the graph; not part of it.
    """

    nodes: tuple[Node, ...]
    compute_dtype: str
    no_split: bool = False
    notes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor once, in the order of first use."""
        return (*dict.fromkeys([t for node in self.nodes for t in (*node.inputs, *node.outputs)]),)

    def by_role(self, *roles: Role) -> tuple[Tensor, ...]:
        """Return the tensors with these roles, in the order of first use."""
        return (*[t for t in self.tensors if t.role in roles],)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the printed form: one line per input, then one line per step."""
        width = max(len(node.formula) for node in self.nodes)
        shapes = {t: f"{'x'.join(map(str, t.shape)):>20} {t.dtype}" for t in self.tensors}
        for t in self.by_role("input", "constant"):
            yield f"  {t.role:8} {t.name:<{width}}  {shapes[t]}"
        for number, node in enumerate(self.nodes, 1):
            mark = "".join(f"  {t.role} {t.name}" for t in node.outputs if t.role == "output")
            yield f"  {number:4}.  {node.formula:<{width}}  {shapes[node.out]}{mark}"


def row_major(shape: Shape) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense tensor whose last dimension is contiguous."""
    return (math.prod(shape[1:]), shape[2] * shape[3], shape[3], 1)


@dataclass
class GraphBuilder:
    """Builds a graph step by step, with a method for each node."""

    compute_dtype: str = "float32"
    nodes: list[Node] = field(default_factory=list)
    _names: set[str] = field(default_factory=set, repr=False)

    def graph(self, *, no_split: bool = False) -> Graph:
        """Return the graph of the steps so far."""
        return Graph(tuple(self.nodes), self.compute_dtype, no_split)

    def scalar(self, name: str, dtype: str = "float32", value: float | None = None) -> Tensor:
        """Return a by-value scalar: an argument of the call, or the same ``value`` in every call."""
        return Tensor(name, (1, 1, 1, 1), dtype, "scalar", (1, 1, 1, 1), value=value)

    def virtual(self, name: str, shape: Shape, dtype: str | None = None) -> Tensor:
        """Return an intermediate result inside the kernel, row-major, by default in the compute dtype."""
        return Tensor(name, shape, dtype or self.compute_dtype, "virtual", row_major(shape))

    def add(self, node: Node) -> Tensor:
        """Add a step; its tensors are named once."""
        for tensor in node.outputs:
            if tensor.name in self._names:
                raise ValueError(f"two tensors are named {tensor.name}")
        self._names |= {tensor.name for tensor in node.outputs}
        self.nodes.append(node)
        return node.out

    def matmul(self, formula: str, a: Tensor, b: Tensor, out: Tensor | str, **lengths: Tensor | None) -> Tensor:
        """``a (B, H, M, K)`` times ``b (B, Hb, K, N)``, with H a multiple of Hb, is ``(B, H, M, N)``; see :class:`Matmul`."""
        return self.add(Matmul(formula, self._out(out, (*a.shape[:3], b.shape[3])), a, b, **lengths))

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
        """Elementwise; the operands are broadcast to one shape."""
        shapes = [tensor.shape for tensor in (x, b, t) if tensor is not None]
        rows, heads, queries, keys = (next((n for n in lengths if n != 1), 1) for lengths in zip(*shapes, strict=True))
        return self.add(Pointwise(formula, self._out(out, (rows, heads, queries, keys), dtype), mode, x, b, t, axis))

    def softmax(
        self, formula: str, x: Tensor, out: str, dtype: str, stats: Tensor | None = None, **others: Tensor | None
    ) -> Tensor:
        """Over the columns; ``stats``, or ``max`` and ``sum_exp``, are ``(B, H, rows, 1)``; see :class:`Softmax`."""
        stats = stats or (None if others.get("max") else self.virtual("lse", (*x.shape[:3], 1)))
        return self.add(Softmax(formula, self.virtual(out, x.shape, dtype), x, stats, **others))

    def reduction(self, formula: str, x: Tensor, out: Tensor, *, negative: bool = False, amax: bool = False) -> Tensor:
        """Add the sum over dimensions where ``out`` has length 1, or over groups of heads if ``out`` is ``(B, Hb, M, N)``."""
        return self.add(Reduction(formula, out, x, negative, amax))

    def transpose(self, formula: str, x: Tensor, out: str, dtype: str | None = None) -> Tensor:
        """``(B, H, M, N)`` to ``(B, H, N, M)``; a view with exchanged strides."""
        b, h, m, n = x.shape
        strides = (*x.strides[:2], x.strides[3], x.strides[2])
        view = Tensor(out, (b, h, n, m), dtype or x.dtype, "virtual", strides, ragged=x.ragged)
        return self.add(Transpose(formula, view, x))

    def paged_load(
        self, formula: str, pages: Tensor, table: Tensor, lengths: Tensor, out: str, *, transposed: bool = False
    ) -> Tensor:
        """Return the rows of the pages that a table lists; see :class:`PagedLoad`."""
        (_, h, n, d), (b, _, width, _) = pages.shape, table.shape
        rows = self.virtual(out, (b, h, n * width, d), pages.dtype)
        rows = replace(rows, shape=(b, h, d, n * width), strides=(*rows.strides[:2], 1, d)) if transposed else rows
        return self.add(PagedLoad(formula, rows, pages, table, lengths, transposed))

    def _out(self, out: Tensor | str, shape: Shape, dtype: str | None = None) -> Tensor:
        return self.virtual(out, shape, dtype) if isinstance(out, str) else out
