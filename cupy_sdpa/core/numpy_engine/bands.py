"""Bands: a graph's conditions on positions, which determine the columns that a tile's rows attend to.

Causal masks, windows, lengths and many mask functions compare positions, as in ``i + Skv - Sq >= j``. A column where no row
of the tile satisfies the conditions has weight 0 and is not computed. Where all rows satisfy a condition, nothing is masked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..graph.nodes import WEIGHTS, Graph, Matmul, Node, Pointwise, Reduction, Softmax, Tensor
from .axes import COLUMNS, ROWS, MatrixAxes


class Linear(NamedTuple):
    """The sum ``row i + column j + number + sum(variables)`` for positions i and j.

    A variable has a name and a factor: it is a batch item's length, or an integer that the caller's function captured, whose
    value is not in the graph.
    """

    row: int
    column: int
    number: int
    variables: tuple[tuple[str, int], ...] = ()

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        """Return the sum, or the difference if ``sign`` is -1."""
        variables = dict(self.variables)
        for name, times in other.variables:
            variables[name] = variables.get(name, 0) + sign * times
        rest = tuple((name, times) for name, times in variables.items() if times)
        return Linear(self.row + sign * other.row, self.column + sign * other.column, self.number + sign * other.number, rest)


class Bound(NamedTuple):
    """The condition ``row i + column j <= most``, with coefficients -1, 0 or 1; the variables are part of ``most``."""

    row: int
    column: int
    most: int

    def columns(self, rows: range, columns: range, *, every: bool = False) -> range:
        """Return the columns where some row (with ``every``, each row) satisfies the condition."""
        if not rows:
            return columns if every else columns[:0]
        ends = (self.row * rows[0], self.row * rows[-1])
        most = self.most - (max(ends) if every else min(ends))
        if self.column == 0:
            return columns if most >= 0 else columns[:0]
        if self.column > 0:
            return range(columns.start, max(columns.start, min(columns.stop, most + 1)))
        return range(min(columns.stop, max(columns.start, -most)), columns.stop)

    def rows(self, rows: range) -> range:
        """Return the rows that satisfy the condition if it depends on rows alone, else all rows."""
        if self.column or not self.row:
            return rows
        return Bound(0, self.row, self.most).columns(range(1), rows)


@dataclass(frozen=True, slots=True)
class Masked(Node):
    """``out = x`` where every condition is ``<= 0``, else -inf: a selection without an array for its conditions."""

    x: Tensor
    conditions: tuple[Linear, ...]
    operands = ("x",)


class Bands:
    """A graph's conditions: ``selections`` for each selection of -inf; ``visible`` hold wherever a weight is not 0."""

    def __init__(self, graph: Graph, axes: Mapping[str, MatrixAxes], lengths: Collection[str]) -> None:
        self._axes, self._lengths = axes, lengths
        self._nodes = {t.name: node for node in graph.nodes for t in node.outputs}
        self._linear: dict[str, Linear | None] = {}
        self.selections = {
            node.out.name: conditions
            for node in graph.nodes
            if isinstance(node, Pointwise) and _selects_infinity(node) and (conditions := self._conditions(node.t)) is not None
        }
        self.visible = tuple(dict.fromkeys(self._visible(graph)))

    def _visible(self, graph: Graph) -> Iterator[Linear]:
        """Yield the conditions of selections before the weights; none if a result has an element for each row and column."""
        if any(self._axes[t.name] == (ROWS, COLUMNS) and not _is_sum(self._nodes[t.name]) for t in graph.by_role("output")):
            return
        weights = [node for node in graph.nodes if isinstance(node, Softmax) or node.out.name == WEIGHTS]
        for node in weights[:1]:
            name = node.inputs[0].name
            while (found := self._nodes.get(name)) and (_selects_infinity(found) or _subtracts(found)):
                yield from self.selections.get(name, ())
                name = found.inputs[0].name

    def _conditions(self, tensor: Tensor | None) -> tuple[Linear, ...] | None:
        """Return sums that are all ``<= 0`` exactly where a boolean tensor is true; None if there are no such sums."""
        node = self._nodes.get(tensor.name) if tensor else None
        if not isinstance(node, Pointwise) or node.b is None:
            return None
        if node.mode == "logical_and":
            first, second = self._conditions(node.x), self._conditions(node.b)
            return None if first is None or second is None else first + second
        if node.mode == "cmp_neq" and node.b.value == 0 and node.x.dtype == "bool":
            return self._conditions(node.x)
        x, b = self._positions(node.x), self._positions(node.b)
        if x is None or b is None:
            return None
        strictly = Linear(0, 0, int(node.mode in ("cmp_lt", "cmp_gt")))
        less, more = x.plus(b, -1).plus(strictly), b.plus(x, -1).plus(strictly)
        found = {"cmp_le": (less,), "cmp_lt": (less,), "cmp_ge": (more,), "cmp_gt": (more,), "cmp_eq": (less, more)}
        conditions = found.get(node.mode)
        if conditions is None or abs(less.row) > 1 or abs(less.column) > 1 or less.row * less.column > 0:
            return None
        return conditions

    def _positions(self, tensor: Tensor) -> Linear | None:
        """Return a tensor's value as a sum of positions and variables; None if it is not such a sum."""
        if tensor.name not in self._linear:
            self._linear[tensor.name] = self._sum(tensor)
        return self._linear[tensor.name]

    def _sum(self, tensor: Tensor) -> Linear | None:
        if tensor.role == "scalar":
            if tensor.value is None:
                return Linear(0, 0, 0, ((tensor.name, 1),)) if tensor.dtype.startswith("int") else None
            return None if tensor.value % 1 else Linear(0, 0, int(tensor.value))
        if tensor.name in self._lengths:
            return Linear(0, 0, 0, ((tensor.name, 1),))
        node = self._nodes.get(tensor.name)
        if not isinstance(node, Pointwise):
            return None
        if node.mode == "gen_index" and node.axis in (2, 3):
            axis = self._axes[node.x.name][node.axis - 2]
            return Linear(int(axis == ROWS), int(axis == COLUMNS), 0) if axis else None
        if node.mode in ("add", "sub") and node.b is not None:
            x, b = self._positions(node.x), self._positions(node.b)
            return None if x is None or b is None else x.plus(b, 1 if node.mode == "add" else -1)
        return None


def masked(node: Node, bands: Bands) -> Node:
    """Return a selection by conditions on positions as a :class:`Masked`; return any other node unchanged."""
    conditions = bands.selections.get(node.out.name)
    return node if conditions is None else Masked(node.formula, node.out, node.inputs[0], conditions)


def _selects_infinity(node: Node) -> bool:
    return isinstance(node, Pointwise) and node.mode == "binary_select" and node.b is not None and node.b.value == -math.inf


def _subtracts(node: Node) -> bool:
    """Return True if a node subtracts the log-sum-exp: -inf remains, or becomes NaN, which a later selection replaces."""
    return isinstance(node, Pointwise) and node.mode == "sub" and node.b is not None and node.b.name == "stats"


def _is_sum(node: Node) -> bool:
    return isinstance(node, Reduction)


def without_unread(nodes: list[Node]) -> list[Node]:
    """Return the nodes whose results are read or are outputs."""
    read: set[str] = set()
    kept: list[Node] = []
    for node in reversed(nodes):
        if any(t.role == "output" or t.name in read for t in node.outputs):
            kept.append(node)
            read |= {t.name for t in node.inputs}
    return kept[::-1]


def scaled_products(nodes: list[Node], compute_dtype: str) -> tuple[list[Node], dict[str, Tensor]]:
    """Remove the steps that scale a product; return the nodes, and the scales by the names of the scaled products.

    ``(scale a) b`` is computed instead of ``scale (a b)``: if b is wide, a has fewer elements than the product. A scale that a
    second factor follows may be 0 and stays, because ``(-0 a) b`` is 0 but ``-0 (a b)`` is -0.
    """
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for t in node.inputs:
            readers.setdefault(t.name, []).append(node)

    def scale_after(node: Node) -> Pointwise | None:
        (reader, *more) = readers.get(node.out.name, [node])
        unrounded = node.out.dtype == reader.out.dtype == compute_dtype and node.out.role == reader.out.role == "virtual"
        is_scale = isinstance(reader, Pointwise) and reader.mode == "mul" and reader.b and reader.b.role == "scalar"
        return reader if isinstance(reader, Pointwise) and is_scale and unrounded and not more else None

    result: list[Node] = []
    scales: dict[str, Tensor] = {}
    for node in nodes:
        scale = scale_after(node) if isinstance(node, Matmul) else None
        if isinstance(node, Matmul) and scale and scale.b and not scale_after(scale):
            result.append(Matmul(node.formula, scale.out, node.a, node.b, node.m, node.n, node.k))
            scales[scale.out.name] = scale.b
        elif node.out.name not in scales:
            result.append(node)
    return result, scales
