"""The CPU engine: evaluates a graph on numpy arrays. It is the living definition of what every node means.

Two precisions. *Declared*: every tensor is rounded to the dtype that the graph states, arithmetic is in the accumulator's
dtype; this is the engine that people use, and the naive computation that cuDNN's error is measured against. *Exact*:
float64 throughout and nothing rounded; this is what the graph means.

The work is cut into tiles, one head of one batch entry and a block of its queries at a time, so that attention of 4096
queries and 4096 keys needs tens of megabytes, not gigabytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..problem.tensor_spec import numpy_dtype
from .nodes import Bernoulli, Graph, Matmul, Node, Pointwise, Reduction, Softmax, Tensor, Transpose

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

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
    views |= {t.name: _numbers(t) for t in graph.by_role("constant")}
    numbers = {t.name: scalars[t.name] if t.value is None else t.value for t in graph.by_role("scalar")}
    work = np.dtype("float64" if exact else graph.compute_dtype)
    whole = {node.b.name for node in graph.nodes if isinstance(node, Matmul)}
    batch, heads, rows, most = map(max, zip(*(node.inputs[0].shape for node in graph.nodes), strict=True))
    separable = _separable(graph, whole)
    plan = _last_uses(graph)
    sums: dict[str, Array] = {}
    totals = {node.out.name: np.zeros(node.out.shape, work) for node in graph.nodes if _across_tiles(node)}
    lengths, columns = _packed_lengths(graph), None
    for b in range(batch):
        if lengths:
            rows, columns = (int(views[tensor.name][b, 0, 0, 0]) for tensor in lengths)
        step = max(1, min(rows, TILE_ELEMENTS // max(1, most if columns is None else columns)) if separable else rows)
        for h in range(heads):
            kept: dict[str, Array] = {}  # the keys and values of this head: the same for every block of queries
            for start in range(0, max(1, rows), step):
                tile = Tile(
                    views, numbers, work, exact, whole, kept, sums, totals,
                    batch=b, head=h, heads=heads, start=start, stop=min(rows, start + step), columns=columns,
                )  # fmt: skip
                with np.errstate(all="ignore"):  # infinities and NaN go where IEEE 754 sends them, as on a GPU
                    for node, spent in plan:
                        tile.spent = spent
                        RULES[type(node)](node, tile)
                        for name in spent:
                            tile.values.pop(name, None)
    for name, total in totals.items():
        views[name][...] = total


@dataclass
class Tile:
    """One head of one batch entry, a block of its rows: the values of every tensor there, as matrices.

    Attributes:
        views, numbers: the caller's arrays and scalars, by name.
        work: the dtype of intermediate results; ``exact`` rounds none of them.
        whole: the tensors of which every tile reads all rows; ``kept`` has their values.
        sums, totals: sums over a group of heads, and over tiles.
        batch, head, heads: the batch entry, and the head out of how many.
        start, stop: the rows.
        columns: the number of keys where batch entries have their own, else None.
        values: the tensors computed or read so far, in the working dtype.
        spent: the tensors that no later node reads; their memory may be written over.
    """

    views: Mapping[str, Array]
    numbers: Mapping[str, float]
    work: np.dtype[Any]
    exact: bool
    whole: set[str]
    kept: dict[str, Array]
    sums: dict[str, Array]
    totals: dict[str, Array]
    batch: int
    head: int
    heads: int
    start: int
    stop: int
    columns: int | None
    values: dict[str, Array] = field(default_factory=dict)
    spent: frozenset[str] = frozenset()

    def __getitem__(self, tensor: Tensor) -> Any:
        """The value of a tensor: a matrix, or a number where it is a scalar."""
        name = tensor.name
        if tensor.role == "scalar":
            return self.numbers[name]
        if name in self.values:
            return self.values[name]
        if name in self.kept:
            return self.kept[name]
        value = self._slice(tensor)
        if value.dtype.kind != "b":
            value = value.astype(np.int64 if value.dtype.kind == "i" else self.work)
        (self.kept if name in self.whole else self.values)[name] = value
        return value

    def __setitem__(self, tensor: Tensor, value: Array) -> None:
        """Keep a result, rounded to its dtype, and write it out where the caller asked for it."""
        if tensor.role == "output" and tensor.ragged is None:
            self._slice(tensor)[...] = value
        elif tensor.role == "output":
            part = self._own(tensor)[self.start : self.start + len(value)]
            part[...] = value[: len(part)]
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

    def sum(self, tensor: Tensor, value: Array) -> None:
        """Add to a sum that goes across tiles: over the batch, the heads or the rows."""
        b, h, rows, columns = tensor.shape
        part = self.totals[tensor.name][self.batch if b > 1 else 0, self.head if h > 1 else 0]
        if rows == 1:
            value = value.sum(axis=0, keepdims=True)
        else:
            part = part[self.start : self.stop]
        if columns > 1:
            part = part[:, : self.columns]
        part += value if columns > 1 else value.sum(axis=1, keepdims=True)

    def memory_of(self, tensor: Tensor, other: Tensor | None = None) -> Array | None:
        """The array of a tensor if it may be written over: nothing reads it any more, and it is not a kept input.

        Nor if an operand of the step is larger: then the result has no room in it.
        """
        value = self.values.get(tensor.name)
        if tensor.name not in self.spent or value is None or value.dtype != self.work:
            return None
        fits = other is None or other.role == "scalar" or np.broadcast_shapes(value.shape, self[other].shape) == value.shape
        return value if fits else None

    def _slice(self, tensor: Tensor) -> Array:
        rows = slice(None) if tensor.name in self.whole or tensor.shape[2] == 1 else slice(self.start, self.stop)
        if tensor.ragged is not None:
            own = self._own(tensor)
            if self.columns is None:
                own = np.pad(own, [(0, full - n) for full, n in zip(tensor.shape[2:], own.shape, strict=True)])
            return own[rows]
        view = self.views[tensor.name]
        if view.shape[2] == 1:  # one row may stand for all
            rows = slice(None)
        b = self.batch if view.shape[0] > 1 else 0
        h = self.head * view.shape[1] // self.heads  # fewer heads: each serves a group of neighbours
        return view[b, h][rows, : self.columns if tensor.shape[3] > 1 else None]  # type: ignore[no-any-return]

    def _own(self, tensor: Tensor) -> Array:
        """What this batch entry has of a tensor of packed sequences."""
        assert tensor.ragged
        view = self.views[tensor.name]
        matrix = view[0, self.head * view.shape[1] // self.heads]
        axis = 1 if tensor.axes[3] == 2 else 0
        begins = self.views[tensor.ragged.name][:, 0, 0, 0] // tensor.strides[2 + axis]
        own = slice(int(begins[self.batch]), int(begins[self.batch + 1]))
        return matrix[:, own] if axis else matrix[own]  # type: ignore[no-any-return]


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
    top = x.max(axis=1, keepdims=True, initial=-np.inf)
    sink = None if node.sink is None else tile[node.sink]
    if sink is not None:
        if node.rows is not None:
            there = np.arange(tile.start, tile.start + len(x))[:, None] < tile[node.rows][0, 0]
            sink = np.where(there, sink, -np.inf).astype(tile.work)
        top = np.maximum(top, sink)
    shift = np.where(np.isneginf(top), 0, top)  # a row of -inf throughout: exp(-inf - 0) = 0, not exp(-inf + inf) = NaN
    p = np.subtract(x, shift, out=tile.memory_of(node.x))
    np.exp(p, out=p)
    total = p.sum(axis=1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - shift)
    p /= np.where(total == 0, 1, total)
    if node.stats is not None:
        tile[node.stats] = shift + np.log(total)  # log 0 = -inf is what such a row is to give
    if node.top is not None:
        tile[node.top] = top
    if node.total is not None:
        tile[node.total] = total
    tile[node.out] = p


def _bernoulli(node: Bernoulli, tile: Tile) -> None:
    """Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"): a number of 32 bits an element.

    Other numbers than cuDNN's, but like them they follow from seed, offset and the place of the element alone.
    """
    *_, columns = node.out.shape
    words = -(-columns // 8) * 4  # 64 bits each, a whole number of Philox's blocks of four
    seed, offset = (int(tile.views[t.name][0, 0, 0, 0]) % 2**64 for t in (node.seed, node.offset))
    source = np.random.Philox(key=[seed, offset], counter=[0, 0, tile.head, tile.batch])
    source.advance(tile.start * words // 4)
    rows = min(tile.stop, node.out.shape[2]) - tile.start
    numbers = source.random_raw(rows * words).view(np.uint32).reshape(rows, 2 * words)[:, :columns]
    tile[node.out] = (numbers[:, : tile.columns] < round(node.probability * 2**32)).astype(tile.work)


def _pointwise(node: Pointwise, tile: Tile) -> None:
    tile[node.out] = MODES[node.mode](node, tile)


def _across_tiles(node: Node) -> bool:
    """Whether a step is a sum that goes across tiles, of which nothing is known before the last."""
    if not isinstance(node, Reduction) or node.out.role != "output":
        return False
    (b, h, m, n), (_, of_h, _, _) = node.x.shape, node.out.shape
    return node.out.shape not in ((b, h, m, 1), (b, of_h, m, n))


def _reduction(node: Reduction, tile: Tile) -> None:
    x = -tile[node.x] if node.negative else tile[node.x]
    if node.out.name in tile.totals:
        tile.sum(node.out, x)
    elif node.out.shape[3] == 1 and node.x.shape[3] > 1:
        tile[node.out] = x.sum(axis=1, keepdims=True)
    else:
        tile.add(node.out, x)


def _transpose(node: Transpose, tile: Tile) -> None:
    tile[node.out] = tile[node.x].T


def _gen_index(node: Pointwise, tile: Tile) -> Array:
    # A row or a column of indices, not a matrix: whoever reads it broadcasts.
    if node.axis == 2:
        return np.arange(tile.start, min(tile.stop, node.x.shape[2]), dtype=np.int64)[:, None]
    if node.axis == 3:
        return np.arange(node.x.shape[3], dtype=np.int64)[None, : tile.columns]
    return np.full((1, 1), tile.batch if node.axis == 0 else tile.head, np.int64)


def _select(node: Pointwise, tile: Tile) -> Array:
    x, other, mask = tile[node.x], tile[_given(node.b)], tile[_given(node.t)] != 0  # a condition may be 1 and 0
    out = tile.memory_of(node.x, node.t)
    if out is None or np.broadcast_shapes(out.shape, np.shape(other)) != out.shape:
        return np.where(mask, x, np.asarray(other, x.dtype))
    np.copyto(out, other, where=~mask)
    return out


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # the builder counts operands
    return tensor


def _truncated(x: Array, b: Array) -> Array:
    """The quotient of integers, rounded towards 0."""
    quotient = x // b  # rounded down, and faster than numpy's remainder
    return quotient + ((quotient < 0) & (quotient * b != x))  # type: ignore[no-any-return]


def _arithmetic(function: np.ufunc, integer: Callable[..., Array] | None = None) -> Callable[[Pointwise, Tile], Array]:
    """Element by element, in the dtype of the accumulator, or in integers of 64 bits where the step gives integers."""

    def compute(node: Pointwise, tile: Tile) -> Array:
        operands = [tile[node.x]] if node.b is None else [tile[node.x], tile[node.b]]
        if node.out.dtype.startswith("int"):
            return (integer or function)(*operands)
        return function(*operands, out=tile.memory_of(node.x, node.b), dtype=tile.work)  # type: ignore[no-any-return]

    return compute


def _comparison(function: np.ufunc) -> Callable[[Pointwise, Tile], Array]:
    def compute(node: Pointwise, tile: Tile) -> Array:
        return function(tile[node.x], tile[_given(node.b)])  # type: ignore[no-any-return]

    return compute


#: numpy has none.
_erf = np.vectorize(math.erf, otypes=[np.float64])

_ARITHMETIC: dict[str, np.ufunc] = {
    "mul": np.multiply, "add": np.add, "sub": np.subtract, "mod": np.fmod, "max": np.maximum, "min": np.minimum,
    "pow": np.power, "neg": np.negative, "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "reciprocal": np.reciprocal,
    "tanh_fwd": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "abs": np.absolute, "floor": np.floor, "ceil": np.ceil,
}  # fmt: skip
_COMPARISONS: dict[str, np.ufunc] = {
    "cmp_eq": np.equal, "cmp_neq": np.not_equal, "cmp_ge": np.greater_equal, "cmp_gt": np.greater, "cmp_le": np.less_equal,
    "cmp_lt": np.less, "logical_and": np.logical_and, "logical_or": np.logical_or,
}  # fmt: skip

#: What every pointwise mode means.
MODES: dict[str, Callable[[Pointwise, Tile], Array]] = {
    **{mode: _arithmetic(function) for mode, function in _ARITHMETIC.items()},
    **{mode: _comparison(function) for mode, function in _COMPARISONS.items()},
    "div": _arithmetic(np.divide, _truncated),
    "rsqrt": lambda node, tile: 1 / np.sqrt(tile[node.x]),
    "erf": lambda node, tile: _erf(tile[node.x]).astype(tile.work),
    "identity": lambda node, tile: tile[node.x],
    "gen_index": _gen_index,
    "binary_select": _select,
}

#: What every node means.
RULES: dict[type[Node], Callable[[Any, Tile], None]] = {
    Bernoulli: _bernoulli,
    Matmul: _matmul,
    Pointwise: _pointwise,
    Reduction: _reduction,
    Softmax: _softmax,
    Transpose: _transpose,
}


def _numbers(tensor: Tensor) -> Array:
    """A constant: the numbers from 0 on, seen with the tensor's strides."""
    numbers = np.arange(tensor.span, dtype=np.int32)
    return np.lib.stride_tricks.as_strided(numbers, tensor.shape, [4 * step for step in tensor.strides], writeable=False)


def _view(array: Array, tensor: Tensor) -> Array:
    """The caller's array with its axes turned as the tensor has them."""
    turned = array.transpose([axis for axis in tensor.axes if axis >= 0])
    for position, axis in enumerate(tensor.axes):
        if axis < 0:
            turned = np.expand_dims(turned, position)
    return turned


def _packed_lengths(graph: Graph) -> tuple[Tensor, Tensor] | None:
    """The numbers of queries and keys of every batch entry, where nothing else needs to be computed.

    That is so where sequences are packed, unless a result has elements for every query and key of the longest one.
    """
    first = next((node for node in graph.nodes if isinstance(node, Matmul)), None)
    if first is None or first.a.ragged is None or first.m is None or first.n is None:
        return None
    sums = {node.out.name for node in graph.nodes if _across_tiles(node)}
    if any(tensor.ragged is None and tensor.name not in sums for tensor in graph.by_role("output")):
        return None
    return first.m, first.n


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
