"""The CPU engine: evaluates a graph on numpy arrays. It is the living definition of what every node means.

Two precisions. *Declared*: every tensor is rounded to the dtype that the graph states, arithmetic is in the accumulator's
dtype; this is the engine that people use, and the naive computation that cuDNN's error is measured against. *Exact*:
float64 throughout and nothing rounded; this is what the graph means.

The work is cut into tiles, one head of one batch entry and a block of its queries at a time, so that attention of 4096
queries and 4096 keys needs tens of megabytes, not gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graph import Graph, Matmul, Node, Pointwise, Reduction, Softmax, Tensor, Transpose

Array = NDArray[Any]

#: Elements of one tile of scores: 4 MiB in float32, so that a tile and its copies stay in the caches of a laptop.
TILE_ELEMENTS = 1 << 20


def evaluate(graph: Graph, arrays: Mapping[str, Array], scalars: Mapping[str, float], *, exact: bool = False) -> None:
    """Compute a graph; the results are written into the arrays of its output tensors.

    Args:
        graph: what to compute.
        arrays: the caller's array of every input and output tensor, by name, in the caller's own axes.
        scalars: the value of every scalar that the graph leaves open.
        exact: compute in float64 and round nothing but the results.
    """
    views = {t.name: _view(arrays[t.name], t) for t in graph.by_role("input", "output")}
    numbers = {t.name: scalars[t.name] if t.value is None else t.value for t in graph.by_role("scalar")}
    work = np.dtype("float64" if exact else graph.accumulate)
    whole = {node.b.name for node in graph.nodes if isinstance(node, Matmul)}
    batch, heads, rows, columns = map(max, zip(*(node.inputs[0].shape for node in graph.nodes), strict=True))
    step = max(1, min(rows, TILE_ELEMENTS // columns)) if _separable(graph, whole) else rows
    plan = _last_uses(graph)
    sums: dict[str, Array] = {}
    for b in range(batch):
        for h in range(heads):
            kept: dict[str, Array] = {}  # the keys and values of this head: the same for every block of queries
            for start in range(0, rows, step):
                tile = Tile(views, numbers, work, exact, (b, h, heads, start, min(rows, start + step)), whole, kept, sums)
                with np.errstate(all="ignore"):  # infinities and NaN go where IEEE 754 sends them, as on a GPU
                    for node, spent in plan:
                        tile.spent = spent
                        RULES[type(node)](node, tile)
                        for name in spent:
                            tile.values.pop(name, None)


class Tile:
    """One head of one batch entry, a block of its rows: the values of every tensor there, as matrices.

    Attributes:
        values: the tensors computed or read so far, in the working dtype.
        spent: the tensors that no later node reads; their memory may be written over.
    """

    def __init__(
        self,
        views: Mapping[str, Array],
        numbers: Mapping[str, float],
        work: np.dtype[Any],
        exact: bool,
        place: tuple[int, int, int, int, int],
        whole: set[str],
        kept: dict[str, Array],
        sums: dict[str, Array],
    ) -> None:
        self.views, self.numbers, self.work, self.exact = views, numbers, work, exact
        self.batch, self.head, self.heads, self.start, self.stop = place
        self.whole, self.kept, self.sums = whole, kept, sums
        self.values: dict[str, Array] = {}
        self.spent: frozenset[str] = frozenset()

    def __getitem__(self, tensor: Tensor) -> Any:
        """The value of a tensor: a matrix, or a number where it is a scalar."""
        name = tensor.name
        if tensor.role == "scalar":
            return self.numbers[name]
        if name in self.values:
            return self.values[name]
        if name in self.kept:
            return self.kept[name]
        value = self._slice(tensor).astype(self.work)
        (self.kept if name in self.whole else self.values)[name] = value
        return value

    def __setitem__(self, tensor: Tensor, value: Array) -> None:
        """Keep a result, rounded to its dtype, and write it out where the caller asked for it."""
        if tensor.role == "output":
            self._slice(tensor)[...] = value
        if not self.exact and value.dtype == self.work and tensor.dtype != self.work.name:
            value = value.astype(numpy_dtype(tensor.dtype)).astype(self.work)
        self.values[tensor.name] = value

    def add(self, tensor: Tensor, value: Array) -> None:
        """Add to a sum over a group of heads; it is kept, and written out, when the last head of the group is added."""
        group = self.heads // tensor.shape[1]
        if self.head % group == 0:
            self.sums[tensor.name] = np.zeros_like(value)
        self.sums[tensor.name] += value
        if self.head % group == group - 1:
            self[tensor] = self.sums.pop(tensor.name)

    def memory_of(self, tensor: Tensor) -> Array | None:
        """The array of a tensor if it may be written over: nothing reads it any more, and it is not a kept input."""
        value = self.values.get(tensor.name)
        return value if tensor.name in self.spent and value is not None and value.dtype == self.work else None

    def _slice(self, tensor: Tensor) -> Array:
        view = self.views[tensor.name]
        b = self.batch if view.shape[0] > 1 else 0
        h = self.head * view.shape[1] // self.heads  # fewer heads: each serves a group of neighbours
        matrix: Array = view[b, h]
        return matrix if tensor.name in self.whole or view.shape[2] == 1 else matrix[self.start : self.stop]


def _matmul(node: Matmul, tile: Tile) -> None:
    a, b = tile[node.a], tile[node.b]
    if node.k is not None:
        length = int(tile[node.k][0, 0])
        a, b = a[:, :length], b[:length]
    out = a @ b
    if node.m is not None:
        out[max(0, int(tile[node.m][0, 0]) - tile.start) :] = 0
    if node.n is not None:
        out[:, int(tile[node.n][0, 0]) :] = 0
    tile[node.out] = out


def _softmax(node: Softmax, tile: Tile) -> None:
    x = tile[node.x]
    top = x.max(axis=1, keepdims=True)
    shift = np.where(np.isneginf(top), 0, top)  # a row of -inf throughout: exp(-inf - 0) = 0, not exp(-inf + inf) = NaN
    p = np.subtract(x, shift, out=tile.memory_of(node.x))
    np.exp(p, out=p)
    total = p.sum(axis=1, keepdims=True)
    p /= np.where(total == 0, 1, total)
    tile[node.stats] = shift + np.log(total)  # log 0 = -inf is what such a row is to give
    tile[node.out] = p


def _pointwise(node: Pointwise, tile: Tile) -> None:
    tile[node.out] = MODES[node.mode](node, tile)


def _reduction(node: Reduction, tile: Tile) -> None:
    if node.out.shape[3] == 1 and node.x.shape[3] > 1:
        tile[node.out] = tile[node.x].sum(axis=1, keepdims=True)
    else:
        tile.add(node.out, tile[node.x])


def _transpose(node: Transpose, tile: Tile) -> None:
    tile[node.out] = tile[node.x].T


def _gen_index(node: Pointwise, tile: Tile) -> Array:
    # A row or a column of indices, not a matrix: whoever reads it broadcasts.
    if node.axis == 2:
        return np.arange(tile.start, min(tile.stop, node.x.shape[2]), dtype=np.int32)[:, None]
    if node.axis == 3:
        return np.arange(node.x.shape[3], dtype=np.int32)[None, :]
    return np.full((1, 1), tile.batch if node.axis == 0 else tile.head, np.int32)


def _select(node: Pointwise, tile: Tile) -> Array:
    x, other, mask = tile[node.x], tile[_given(node.b)], tile[_given(node.t)]
    out = tile.memory_of(node.x)
    if out is None:
        return np.where(mask, x, np.asarray(other, x.dtype))
    np.copyto(out, other, where=~mask)
    return out


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # the builder counts operands
    return tensor


#: What every pointwise mode means.
MODES: dict[str, Callable[[Pointwise, Tile], Array]] = {
    "mul": lambda node, tile: np.multiply(tile[node.x], tile[_given(node.b)], out=tile.memory_of(node.x)),
    "add": lambda node, tile: np.add(tile[node.x], tile[_given(node.b)], out=tile.memory_of(node.x)),
    "sub": lambda node, tile: np.subtract(tile[node.x], tile[_given(node.b)], out=tile.memory_of(node.x)),
    "exp": lambda node, tile: np.exp(tile[node.x], out=tile.memory_of(node.x)),
    "identity": lambda node, tile: tile[node.x],
    "cmp_ge": lambda node, tile: np.greater_equal(tile[node.x], tile[_given(node.b)]),
    "cmp_gt": lambda node, tile: np.greater(tile[node.x], tile[_given(node.b)]),
    "cmp_lt": lambda node, tile: np.less(tile[node.x], tile[_given(node.b)]),
    "logical_and": lambda node, tile: np.logical_and(tile[node.x], tile[_given(node.b)]),
    "gen_index": _gen_index,
    "binary_select": _select,
}

#: What every node means.
RULES: dict[type[Node], Callable[[Any, Tile], None]] = {
    Matmul: _matmul,
    Pointwise: _pointwise,
    Reduction: _reduction,
    Softmax: _softmax,
    Transpose: _transpose,
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of a name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes  # 45 ms to import: only where bfloat16 is met

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return, unused-ignore]  # typed since ml_dtypes 0.6
    return np.dtype(name)


def _view(array: Array, tensor: Tensor) -> Array:
    """The caller's array with its axes turned as the tensor has them."""
    turned = array.transpose([axis for axis in tensor.axes if axis >= 0])
    for position, axis in enumerate(tensor.axes):
        if axis < 0:
            turned = np.expand_dims(turned, position)
    return turned


def _separable(graph: Graph, whole: set[str]) -> bool:
    """Whether a block of rows can be computed alone: no step mixes rows.

    A matmul mixes rows of its right operand only, so every right operand must come from the caller, and must not also be
    read row by row.
    """
    by_rows = {t.name for node in graph.nodes for t in node.inputs if not (isinstance(node, Matmul) and t is node.b)}
    made = {t.name for node in graph.nodes for t in node.outputs}
    return not whole & (by_rows | made)


def _last_uses(graph: Graph) -> list[tuple[Node, frozenset[str]]]:
    """Every node with the names of the tensors that nothing after it reads, its own unread results among them."""
    seen: set[str] = set()
    plan: list[tuple[Node, frozenset[str]]] = []
    for node in reversed(graph.nodes):
        here = {t.name for t in (*node.inputs, *node.outputs)}
        plan.append((node, frozenset(here - seen)))
        seen |= here
    return plan[::-1]
