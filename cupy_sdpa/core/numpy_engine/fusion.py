"""Fused steps: on CuPy arrays, one kernel computes the scale, the masks, the soft cap and the score function.

A pointwise node gets no array if its result is not the caller's, is not rounded, and is read only by pointwise nodes. Its
expression becomes part of the kernels of the nodes that read it. A kernel is compiled once for each expression and dtypes of
its operands. numpy computes node by node.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..graph.nodes import Graph, Node, Pointwise, Tensor
from ..runtime.cupy_runtime import elementwise
from ..score_fn.modes import CONDITIONS, MODES

#: The C type for each dtype kind; floating-point numbers have the evaluation's dtype.
_INTEGERS = {"b": "bool", "i": "long long"}
#: A tile's place: its first batch item, head, row and column, and its numbers of heads, rows and columns.
_PLACE = ("batch", "head", "row", "column", "heads", "rows", "columns")
#: An element's position along each axis of the mode ``gen_index``; ``i`` counts the tile's elements in C order.
_POSITIONS = (
    "batch + i / (heads * rows * columns)",
    "head + i / (rows * columns) % heads",
    "row + i / columns % rows",
    "column + i % columns",
)


@dataclass(frozen=True, slots=True)
class Fused(Node):
    """Pointwise nodes that one kernel computes, in this order; ``out`` is the result of the last node."""

    parts: tuple[Pointwise, ...]
    #: The kernels by the operands' dtypes and the evaluation's dtype.
    kernels: dict[tuple[tuple[str, ...], str], tuple[Any, str]] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the kernel reads, without the operands of positions, of which only the shape matters."""
        inside = {part.out.name for part in self.parts}
        read = (t for part in self.parts if part.mode != "gen_index" for t in _operands(part))
        return tuple({t.name: t for t in read if t.name not in inside}.values())

    def kernel(self, dtypes: tuple[str, ...], dtype: str) -> tuple[Any, str]:
        """Return the kernel for the dtypes of the operands and of the evaluation, and the dtype of its result.

        Its arguments are the operands, :data:`_PLACE`, and the result.
        """
        if (dtypes, dtype) not in self.kernels:
            self.kernels[dtypes, dtype] = self._kernel(dtypes, dtype)
        return self.kernels[dtypes, dtype]

    def _kernel(self, dtypes: tuple[str, ...], dtype: str) -> tuple[Any, str]:
        real = {"float32": "float", "float64": "double"}[dtype]
        # the variable and the dtype kind of every value: "b", "i" or "f"
        values: dict[str, tuple[str, str]] = {}
        for n, (t, of) in enumerate(zip(self.inputs, dtypes, strict=True)):
            values[t.name] = f"a{n}", np.dtype(of).kind
        lines = []
        for n, part in enumerate(self.parts):
            operands = [] if part.mode == "gen_index" else [values[t.name] for t in _operands(part)]
            text, kind = _expression(part, operands, real)
            lines.append(f"const {_INTEGERS.get(kind, real)} v{n} = {text};")
            values[part.out.name] = f"v{n}", kind
        last, kind = values[self.out.name]
        result = {"b": "bool", "i": "int64"}.get(kind, dtype)
        given = [f"{of} a{n}" for n, of in enumerate(dtypes)] + [f"int64 {name}" for name in _PLACE]
        return elementwise(", ".join(given), f"{result} y", f"{' '.join(lines)} y = {last}", "fused"), result


def _operands(node: Pointwise) -> list[Tensor]:
    """Return a node's operands, without the offsets of packed operands, which the tile reads itself."""
    return [t for t in (node.x, node.b, node.t) if t is not None]


def fuse(graph: Graph) -> list[Node]:
    """Return a graph's nodes with pointwise nodes fused."""
    pointwise = {node.out.name: node for node in graph.nodes if isinstance(node, Pointwise) and _can_be_fused(node)}
    others = (node for node in graph.nodes if node.out.name not in pointwise)
    kept = {t.name for node in others for t in node.inputs}
    kept |= {name for name, node in pointwise.items() if node.out.role == "output" or _is_rounded(node.out, graph)}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.out.name not in pointwise:
            nodes.append(node)
        elif node.out.name in kept:
            inside = _inside(pointwise[node.out.name], pointwise, kept)
            nodes.append(node if len(inside) == 1 else Fused(node.formula, node.out, tuple(inside)))
    return nodes


def exponentials(x: Any, top: Any) -> Any:
    """Return ``exp(x - m)`` for scores x and their row maxima m, with 0 instead of m = -inf."""
    dtype = x.dtype.name
    return elementwise(f"{dtype} x, {dtype} m", f"{dtype} y", f"y = exp(x - ({_FINITE}))", "exponentials")(x, top)


def divide_by_sums(p: Any, total: Any) -> Any:
    """Divide p by its row sums l in place, rows without a key by 1."""
    dtype = p.dtype.name
    kernel = elementwise(f"{dtype} x, {dtype} l", f"{dtype} y", "y = x / (l == 0 ? 1 : l)", "divide_by_sums")
    return kernel(p, total, p)


def log_sum_exp(top: Any, total: Any) -> Any:
    """Return ``m + log(l)``, with 0 instead of m = -inf: a row without a key gives log 0 = -inf."""
    dtype = top.dtype.name
    kernel = elementwise(f"{dtype} m, {dtype} l", f"{dtype} y", f"y = ({_FINITE}) + log(l)", "row_log_sum_exp")
    return kernel(top, total)


#: The maximum m of a row, or 0 instead of -inf.
_FINITE = "isinf(m) && m < 0 ? 0 : m"


def _can_be_fused(node: Pointwise) -> bool:
    """Return True if C has an expression for a node; there is none for numpy's powers of integers."""
    return not (node.mode == "pow" and node.out.dtype.startswith("int"))


def _is_rounded(tensor: Tensor, graph: Graph) -> bool:
    """Return True if a result has a floating-point dtype other than the compute dtype."""
    return "float" in tensor.dtype and tensor.dtype != graph.compute_dtype


def _inside(node: Pointwise, pointwise: dict[str, Pointwise], kept: Collection[str]) -> list[Pointwise]:
    """Return the nodes that a node's kernel computes, each after the nodes that it reads; the node itself is last."""
    found, waiting = {node.out.name}, [node]
    while waiting:  # score functions may chain thousands of nodes
        last = waiting.pop()
        names = [] if last.mode == "gen_index" else [t.name for t in last.inputs]
        added = {name for name in names if name in pointwise and name not in kept} - found
        found |= added
        waiting += [pointwise[name] for name in added]
    return [pointwise[name] for name in pointwise if name in found]


def _expression(node: Pointwise, operands: list[tuple[str, str]], real: str) -> tuple[str, str]:
    """Return a node's C expression and the dtype kind of its value, which is the same as in :data:`.interpreter.POINTWISE`."""
    mode, names, kinds = node.mode, [name for name, _ in operands], [kind for _, kind in operands]
    if mode == "gen_index":
        return _POSITIONS[node.axis or 0], "i"
    of = MODES[mode]
    if mode == "identity":
        return of.code.format(names[0]), kinds[0]
    if mode == "binary_select":
        return of.code.format(names[0], f"({_INTEGERS.get(kinds[0], real)}){names[1]}", names[2]), kinds[0]
    if mode in CONDITIONS:
        mixed = "(double)" if mode.startswith("cmp_") and "f" in kinds and kinds != ["f", "f"] else ""
        return of.code.format(*(f"{mixed}{name}" for name in names)), "b"
    kind = "i" if node.out.dtype.startswith("int") and "f" not in kinds else "f"
    formula = of.integers or of.code if kind == "i" else of.code
    return formula.format(*(f"({_INTEGERS.get(kind, real)}){name}" for name in names)), kind
