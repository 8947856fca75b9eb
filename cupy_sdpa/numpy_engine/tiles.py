"""Tiles: the interpreter computes one head of one batch entry and a block of its rows at a time.

Attention of 4096 queries and 4096 keys therefore needs tens of megabytes, not gigabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..graph.nodes import Bernoulli, Graph, Matmul, Node, PagedLoad, Reduction, Softmax, Tensor, Transpose
from ..problem.tensor_spec import FP8_LARGEST, rounded
from ..runtime.cupy_runtime import cupy
from ..runtime.interpreted_array import on_host, plain
from .fusion import fuse

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    Array = NDArray[Any]
#: Elements of one tile of scores on the CPU: 4 MiB in float32, so that a tile and its copies fit into the caches of a laptop.
TILE_ELEMENTS = 1 << 20
#: The same on a GPU: 64 MiB in float32. Smaller tiles launch more kernels: with a quarter both passes of 16384 queries take 3
#: times as long on an H200; with twice as many elements they take 7 % less.
GPU_TILE_ELEMENTS = 1 << 24


class Analysis:
    """What all evaluations of a graph have in common.

    Attributes:
        views: name, axes and the index that adds new axes, of the arrays of the caller.
        right_operands: the names of the right operands of matmuls, of which every tile reads all rows.
        steps: every node with the names of the tensors that no later node reads.
        on_host: the names of the integers that the interpreter reads one by one: lengths, offsets, page tables and seeds.
        sums: the shapes of the sums over tiles, by the name of the result.
        lengths: the lengths of each batch entry, if only these are computed.
        by_rows: how a block of rows is computed without the other rows; None if it is not.
        shape: batch, heads, rows and columns.
    """

    def __init__(self, graph: Graph) -> None:
        self.views = [(t.name, *_axes(t)) for t in graph.by_role("input", "output")]
        self.constants = {t.name: _constant(t) for t in graph.by_role("constant")}
        self.scalars = graph.by_role("scalar")
        self.right_operands = {node.b.name for node in graph.nodes if isinstance(node, Matmul)}
        self.steps = _last_reads(graph.nodes)
        self.on_host = {t.name for node in graph.nodes for t in _read_on_host(node)}
        self.sums = {node.out.name: node.out.shape for node in graph.nodes if _sums_over_tiles(node)}
        self.packed = {t.name for t in graph.tensors if _is_packed(t)}
        self.lengths = _packed_lengths(graph)
        self.by_rows = SummedRows.of(graph)
        shapes = (node.inputs[0].shape for node in graph.nodes if not isinstance(node, PagedLoad))
        self.shape: tuple[int, ...] = tuple(map(max, zip(*shapes, strict=True)))
        self._graph = graph

    @functools.cached_property
    def fused_steps(self) -> list[tuple[Node, frozenset[str]]]:
        """The steps for CuPy arrays, with pointwise nodes fused."""
        return _last_reads(fuse(self._graph))


def analyze(graph: Graph) -> Analysis:
    """The analysis of a graph; the graph keeps it."""
    found: Analysis | None = graph.notes.get("analysis")
    if found is None:
        found = graph.notes["analysis"] = Analysis(graph)
    return found


class Evaluation:
    """One evaluation of a graph: the state that all tiles share. Arguments and other attributes are those of :func:`.evaluate`
    and :class:`Analysis`.

    Attributes:
        xp: the module of the arrays, numpy or CuPy.
        views: the caller's arrays with the axes of their tensors, by name.
        dtype: the dtype of intermediate results.
        summed: the products that are summed over the tiles of a head; ``later``: the results of nodes that read such sums.
        whole: the tensors of which a tile reads or writes all rows.
        row_sums, group_sums: unfinished sums over the tiles of a head, and over a group of heads.
        totals, largest: sums over tiles, and the largest magnitudes so far, by the name of the result.
    """

    def __init__(self, graph: Graph, arrays: Mapping[str, Array], scalars: Mapping[str, float], exact: bool) -> None:
        analysis = self._analysis = analyze(graph)
        self.exact, self.right_operands, self.packed = exact, analysis.right_operands, analysis.packed
        self.heads = analysis.shape[1]
        self.views = dict(analysis.constants)
        self.xp: Any = np
        for name, axes, new_axes in analysis.views:
            array = arrays[name]
            if type(array) is not np.ndarray:
                array = on_host(array) if name in analysis.on_host else plain(array)
                self.xp = self.xp if isinstance(array, np.ndarray) else cupy()
            view = array.transpose(axes)
            self.views[name] = view[new_axes] if new_axes else view
        self.steps, self.rows = analysis.steps, analysis.shape[2]
        self.summed, self.later = frozenset[str](), frozenset[str]()
        by_rows = analysis.by_rows
        self.separable = by_rows is not None and (self.xp is not np or not by_rows.products)
        if self.xp is not np:
            self.steps = analysis.fused_steps
            if by_rows and by_rows.products:
                self.right_operands, self.summed, self.later, self.rows = by_rows
        self.whole = {*self.right_operands, *self.summed, *self.later} if self.summed else self.right_operands
        self.row_sums: dict[str, Array] = {}
        self.scalars: dict[str, Any] = {}
        for t in analysis.scalars:
            self.scalars[t.name] = scalars[t.name] if t.value is None else t.value
        self.dtype = np.dtype("float64" if exact else graph.compute_dtype)
        self.totals: dict[str, Array] = {}
        for name, shape in analysis.sums.items():
            self.totals[name] = self.xp.zeros(shape, self.dtype)
        self.group_sums: dict[str, Array] = {}
        self.largest: dict[str, Any] = {}

    def tiles(self) -> Iterator[Tile]:
        """All tiles, in the order of batch entries, heads and rows."""
        batch, heads, _, max_columns = self._analysis.shape
        rows = self.rows
        lengths, columns = self._analysis.lengths, None
        elements = TILE_ELEMENTS if self.xp is np else GPU_TILE_ELEMENTS
        for b in range(batch):
            if lengths:
                rows, columns = (int(self.views[tensor.name][b, 0, 0, 0]) for tensor in lengths)
            width = max(1, max_columns if columns is None else columns)
            step = max(1, min(rows, elements // width) if self.separable else rows)
            for h in range(heads):
                cache: dict[str, Array] = {}  # the keys and values of this head: the same for every block of queries
                for start in range(0, max(1, rows), step):
                    yield Tile(self, b, h, start, min(rows, start + step), start + step >= rows, columns, cache)


@dataclass
class Tile:
    """A block of rows of one head of one batch entry, and the values of the tensors there, as matrices.

    Attributes:
        last: whether it is the last tile of the head.
        columns: the number of keys of this batch entry; None if it equals that of the tensors.
        cache: the values of the tensors ``run.right_operands``, the same for all tiles of a head.
        values: the tensors computed or read so far, in ``run.dtype``.
        last_reads: the tensors that no later node reads; their memory may be reused.
    """

    run: Evaluation
    batch: int
    head: int
    start: int
    stop: int
    last: bool
    columns: int | None
    cache: dict[str, Array]
    values: dict[str, Array] = field(default_factory=dict)
    last_reads: frozenset[str] = frozenset()

    def __getitem__(self, tensor: Tensor) -> Any:
        """The value of a tensor: a matrix, or a number if it is a scalar."""
        name = tensor.name
        if tensor.role == "scalar":
            return self.run.scalars[name]
        for values in (self.values, self.cache):
            if name in values:
                return values[name]
        value = self.run.xp.asarray(self.rows_of(tensor))
        if value.dtype.kind != "b":
            value = value.astype(np.int64 if value.dtype.kind == "i" else self.run.dtype)
        (self.cache if name in self.run.right_operands else self.values)[name] = value
        return value

    def number(self, tensor: Tensor) -> int:
        """The integer of this batch entry in an input such as the lengths, which is in the memory of the host."""
        return int(self.rows_of(tensor)[0, 0])

    def __setitem__(self, tensor: Tensor, value: Array) -> None:
        """Store a result, rounded to its dtype, and write it to the caller's array if it is an output."""
        if tensor.role == "output" and tensor.name not in self.run.packed:
            self.rows_of(tensor)[...] = rounded(value, tensor.dtype) if tensor.dtype in FP8_LARGEST else value
        elif tensor.role == "output":
            start = 0 if tensor.name in self.run.whole else self.start
            part = self._sequence(tensor)[start : start + len(value)]
            part[...] = rounded(value[: len(part)], tensor.dtype) if tensor.dtype in FP8_LARGEST else value[: len(part)]
        if tensor.role == "output" and tensor.name in self.last_reads:  # no later step reads it
            return
        dtype = self.run.dtype
        if not self.run.exact and value.dtype == dtype and tensor.dtype != dtype.name:
            value = rounded(value, tensor.dtype).astype(dtype)
        self.values[tensor.name] = value

    def add_to_rows(self, tensor: Tensor, value: Array) -> None:
        """Add to a sum over the tiles of a head; the last tile stores the sum."""
        sums = self.run.row_sums
        sums[tensor.name] = value if self.start == 0 else sums[tensor.name] + value
        if self.last:
            self[tensor] = sums.pop(tensor.name)

    def add_to_group(self, tensor: Tensor, value: Array) -> None:
        """Add to a sum over a group of heads; the last head of the group stores the sum."""
        sums, group = self.run.group_sums, self.run.heads // tensor.shape[1]
        if self.head % group == 0:
            sums[tensor.name] = self.run.xp.zeros_like(value)
        sums[tensor.name] += value
        if self.head % group == group - 1:
            self[tensor] = sums.pop(tensor.name)

    def add_to_total(self, tensor: Tensor, value: Array) -> None:
        """Add to a sum over tiles: over the batch, the heads or the rows."""
        b, h, rows, columns = tensor.shape
        part = self.run.totals[tensor.name][self.batch if b > 1 else 0, self.head if h > 1 else 0]
        if rows == 1:
            value = value.sum(axis=0, keepdims=True)
        else:
            part = part[self.start : self.stop]
        if columns > 1:
            part = part[:, : self.columns]
        part += value if columns > 1 else value.sum(axis=1, keepdims=True)

    def add_to_largest(self, tensor: Tensor, value: Array) -> None:
        """Take the largest magnitude of all tiles."""
        largest, name = self.run.largest, tensor.name
        largest[name] = np.maximum(largest.get(name, 0.0), np.abs(value).max(initial=0))  # of FP8, on the CPU only
        self.run.views[name][...] = largest[name]

    def is_needed(self, tensor: Tensor) -> bool:
        """Whether a result of the present step is one of the call, or is read by a later step."""
        return tensor.role == "output" or tensor.name not in self.last_reads

    def reusable(self, tensor: Tensor, other: Tensor | None = None) -> Array | None:
        """The memory of a tensor, to store the result of a step; None if a later step reads it or it is cached.

        Also None if the other operand of the step, and therefore the result, is larger.
        """
        value = self.values.get(tensor.name)
        if tensor.name not in self.last_reads or value is None or value.dtype != self.run.dtype:
            return None
        fits = other is None or other.role == "scalar" or np.broadcast_shapes(value.shape, self[other].shape) == value.shape
        return value if fits else None

    def rows_of(self, tensor: Tensor) -> Array:
        """The part of an array that the tile reads or writes: its rows, or all rows of a right operand."""
        rows = slice(None) if tensor.name in self.run.whole or tensor.shape[2] == 1 else slice(self.start, self.stop)
        if tensor.name in self.run.packed:
            matrix = self._sequence(tensor)
            if self.columns is None:
                missing = [(0, full - n) for full, n in zip(tensor.shape[2:], matrix.shape, strict=True)]
                matrix = self.run.xp.pad(matrix, missing)
            return matrix[rows]
        view = self.run.views[tensor.name]
        if view.shape[2] == 1:  # a single row, broadcast
            rows = slice(None)
        b = self.batch if view.shape[0] > 1 else 0
        head = self.head * view.shape[1] // self.run.heads  # as in head_of
        return view[b, head][rows, : self.columns if tensor.shape[3] > 1 else None]  # type: ignore[no-any-return]

    def _sequence(self, tensor: Tensor) -> Array:
        """The part of a packed tensor that is the sequence of this batch entry, as far as the graph has positions."""
        assert tensor.ragged
        view = self.run.views[tensor.name]
        matrix = view[0, self.head_of(view)]
        axis = 1 if tensor.axes[3] == 2 else 0
        offsets = self.run.views[tensor.ragged.name][:, 0, 0, 0] // tensor.strides[2 + axis]
        begin, end = int(offsets[self.batch]), int(offsets[self.batch + 1])
        tokens = slice(begin, min(end, begin + tensor.shape[2 + axis]))
        return matrix[:, tokens] if axis else matrix[tokens]  # type: ignore[no-any-return]

    def head_of(self, view: Array) -> int:
        """The head of a tensor with fewer heads, each of which serves a group of consecutive query heads."""
        return self.head * int(view.shape[1]) // self.run.heads


def _read_on_host(node: Node) -> Iterator[Tensor]:
    """The integers that the interpreter reads one by one."""
    names = {Matmul: ("m", "n", "k"), PagedLoad: ("table", "lengths"), Softmax: ("rows",), Bernoulli: ("seed", "offset")}
    yield from (t for name in names.get(type(node), ()) if (t := getattr(node, name)) is not None)
    yield from (t.ragged for t in (*node.inputs, *node.outputs) if t.ragged is not None)


class TileSize(NamedTuple):
    """The largest tile of an evaluation on a GPU: queries of a head, of how many, and the bytes of all matrices at once."""

    rows: int
    of: int
    nbytes: int

    def __str__(self) -> str:
        part = f"tiles of {self.rows} of {self.of} queries of a head" if self.rows < self.of else "one head at a time"
        return f"{part}, {self.nbytes / 1e6:.3g} MB at once"


def tile_of(graph: Graph) -> TileSize:
    """The size of the tiles of a graph on a GPU, for reports."""
    analysis, itemsize = analyze(graph), np.dtype(graph.compute_dtype).itemsize
    right, (*_, of, width) = analysis.right_operands, analysis.shape
    by_rows = analysis.by_rows
    if by_rows and by_rows.products:
        right, of = by_rows.right_operands | by_rows.products, by_rows.rows
    rows = max(1, min(of, GPU_TILE_ELEMENTS // max(width, 1))) if by_rows else of
    alive: dict[str, int] = {}
    most = 0
    for node, last_reads in analysis.fused_steps:
        for t in (*node.inputs, *node.outputs):
            if t.role in ("input", "output", "virtual"):
                alive[t.name] = itemsize * t.shape[3] * (t.shape[2] if t.name in right else min(rows, t.shape[2]))
        most = max(most, sum(alive.values()))
        for name in last_reads - right:
            alive.pop(name, None)
    return TileSize(rows, of, most)


def _is_packed(tensor: Tensor) -> bool:
    """Whether a tensor holds packed sequences; that of a padded batch has constant offsets, and is read as a dense one."""
    return tensor.ragged is not None and tensor.ragged.role == "input"


def _constant(tensor: Tensor) -> Array:
    """The integers ``0, step, 2 step, ...`` with the strides of the tensor."""
    numbers = tensor.step * np.arange(tensor.span, dtype=tensor.dtype)
    strides = [numbers.itemsize * stride for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides, writeable=False)


def _axes(tensor: Tensor) -> tuple[list[int], tuple[slice | None, ...]]:
    """The axes of the caller's array in the order of the tensor, and the index that adds new axes; empty if there are none."""
    axes = [axis for axis in tensor.axes if axis >= 0]
    index = tuple(None if axis < 0 else slice(None) for axis in tensor.axes)
    return axes, index if None in index else ()


def _packed_lengths(graph: Graph) -> tuple[Tensor, Tensor] | None:
    """The lengths of each batch entry, if only these queries and keys need to be computed.

    This is the case for packed sequences, unless a result has elements for all queries and keys of the longest sequence.
    """
    first = next((node for node in graph.nodes if isinstance(node, Matmul)), None)
    if first is None or not _is_packed(first.a) or first.m is None or first.n is None:
        return None
    sums = {node.out.name for node in graph.nodes if _sums_over_tiles(node)}
    if any(not _is_packed(tensor) and tensor.name not in sums for tensor in graph.by_role("output")):
        return None
    return first.m, first.n


def _sums_over_tiles(node: Node) -> bool:
    """Whether a node sums over tiles, so that its result is complete only after the last tile."""
    if not isinstance(node, Reduction) or node.amax or node.out.role != "output":
        return False
    (b, h, m, n), (_, out_heads, _, _) = node.x.shape, node.out.shape
    return node.out.shape not in ((b, h, m, 1), (b, out_heads, m, n))


class SummedRows(NamedTuple):
    """How a graph is computed one block of queries at a time: products with a transposed block are summed over the blocks.

    Attributes:
        right_operands: the right operands of the other products, of which every tile reads all rows.
        products: the products that are summed, such as ``dV = P^T dO``.
        later: the results of the nodes that read these sums. They are computed with the last tile of a head.
    """

    right_operands: set[str]
    products: frozenset[str]
    later: frozenset[str]
    rows: int

    @classmethod
    def of(cls, graph: Graph) -> SummedRows | None:
        """How blocks of rows of a graph are computed; None if a step needs the rows of all tiles at once.

        A matmul mixes only the rows of its right operand. So every right operand must be an input, rows of pages, or a
        transpose of such, that no step reads by rows.
        """
        matmuls = [node for node in graph.nodes if isinstance(node, Matmul)]
        every = {node.b.name for node in matmuls}
        transposed = {node.out.name: node for node in graph.nodes if isinstance(node, Transpose) and node.x.name not in every}
        summed = [node for node in matmuls if node.a.name in transposed]
        products = {node.out.name for node in summed}
        right = {node.b.name for node in matmuls if node not in summed}
        later: set[str] = set()
        for node in graph.nodes:
            read = {t.name for t in node.inputs}
            if read & (products | later):
                if any(t.shape[2] > 1 and t.name not in products | later for t in node.inputs):
                    return None
                later |= {t.name for t in node.outputs}
        for node in graph.nodes:
            of_all = isinstance(node, PagedLoad) or (isinstance(node, Transpose) and node.x.name in right)
            product = isinstance(node, Matmul) and node not in summed
            by_rows = [t.name for t in node.inputs if not (of_all or (product and t.name == node.inputs[1].name))]
            if right.intersection(by_rows) or (not of_all and right.intersection(t.name for t in node.outputs)):
                return None
            if not isinstance(node, Matmul) and transposed.keys() & set(by_rows):
                return None
            of_group = isinstance(node, Reduction) and not _sums_over_tiles(node) and node.out.shape[3] > 1
            if of_group and node.out.name not in later:
                return None
        rows = {node.x.shape[2] for node in transposed.values()} or {0}
        return cls(right, frozenset(products), frozenset(later), rows.pop()) if len(rows) == 1 else None


def _last_reads(nodes: Sequence[Node]) -> list[tuple[Node, frozenset[str]]]:
    """Every node with the names of its tensors that no later node reads."""
    read: set[str] = set()
    steps: list[tuple[Node, frozenset[str]]] = []
    for node in reversed(nodes):
        names = {t.name for t in (*node.inputs, *node.outputs)}
        steps.append((node, frozenset(names - read)))
        read |= names
    return steps[::-1]
