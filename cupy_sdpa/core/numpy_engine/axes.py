"""Find the tensor axes that are rows and columns of a graph's scores: tiles are blocks along these axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..graph.nodes import Graph, Matmul, Node, PagedLoad, Reduction, Softmax, Tensor, Transpose

#: The axes of the scores (the graph's first product): queries and keys.
ROWS, COLUMNS = "rows", "columns"
#: What a tensor's last two axes are: rows or columns of the scores, or None if every tile has the whole axis.
MatrixAxes = tuple[str | None, str | None]


def matrix_axes(graph: Graph) -> dict[str, MatrixAxes]:
    """Return what the last two axes of every tensor are, by tensor name."""
    # for each axis, the axes that have the same positions
    equal: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for node in graph.nodes:
        for one, other in _equal_axes(node):
            axes, others = equal.setdefault(one, {one}), equal.setdefault(other, {other})
            if axes is not others:
                axes |= others
                equal.update(dict.fromkeys(others, axes))
    names: dict[tuple[str, int], str] = {}
    scores = [node.out.name for node in graph.nodes if isinstance(node, Matmul)][:1]
    for name in scores:
        for axis, label in ((3, COLUMNS), (2, ROWS)):
            names |= dict.fromkeys(equal[name, axis], label)
    return {t.name: (names.get((t.name, 2)), names.get((t.name, 3))) for t in graph.tensors}


def _equal_axes(node: Node) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """Yield the pairs of axes of a node's tensors that have the same positions."""
    out = node.out.name
    if isinstance(node, Matmul):
        yield (node.a.name, 2), (out, 2)
        yield (node.b.name, 3), (out, 3)
        yield (node.a.name, 3), (node.b.name, 2)
    elif isinstance(node, Transpose):
        yield (node.x.name, 2), (out, 3)
        yield (node.x.name, 3), (out, 2)
    elif not isinstance(node, PagedLoad):
        for tensor in (*node.inputs, *node.outputs):
            broadcast = 1 if tensor.role in ("input", "scalar", "constant") else 0  # axes of this length are skipped
            for axis in (2, 3):
                if tensor.shape[axis] == node.out.shape[axis] > broadcast:
                    yield (tensor.name, axis), (out, axis)


class RowBlocks(NamedTuple):
    """How to compute a graph one block of rows at a time: products that sum over rows are added up over the blocks.

    Attributes:
        summed: the products that are summed over the blocks, such as ``dV = P^T dO``.
        later: the summed products and the results of nodes that read them. They are complete after the last block.
    """

    summed: frozenset[str]
    later: frozenset[str]

    @classmethod
    def of(cls, graph: Graph, axes: dict[str, MatrixAxes]) -> RowBlocks | None:
        """Return how to compute a graph in blocks of rows; None if a step needs all rows at once."""
        summed: set[str] = set()
        later: set[str] = set()
        for node in graph.nodes:
            if any(axes[t.name][1] == ROWS for t in _with_all_columns(node)):
                return None
            if later.intersection(t.name for t in node.inputs):
                if any(t.name not in later and axes[t.name] != (None, None) for t in node.inputs):
                    return None
                later |= {t.name for t in node.outputs}
            if isinstance(node, Matmul) and axes[node.a.name][1] == ROWS:
                summed.add(node.out.name)
                later.add(node.out.name)
        return cls(frozenset(summed), frozenset(later))


def _with_all_columns(node: Node) -> tuple[Tensor, ...]:
    """Return the tensors of which a node needs every column."""
    if isinstance(node, Matmul):
        return (node.b,)
    if isinstance(node, Softmax) or (isinstance(node, Reduction) and node.out.shape[3] == 1):
        return (node.inputs[0],)
    return ()
