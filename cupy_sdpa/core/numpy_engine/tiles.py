"""Tiles: the interpreter computes a block of rows of some heads and batch entries at a time, with the columns they attend to.

Attention of 4096 queries and 4096 keys therefore needs megabytes, not gigabytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..graph.nodes import Bernoulli, Graph, Matmul, Node, PagedLoad, Pointwise, Reduction, Softmax, Tensor
from ..runtime.cupy_runtime import cupy
from ..runtime.interpreted_array import on_host, plain
from . import buffers
from .axes import COLUMNS, ROWS, RowBlocks, matrix_axes
from .bands import Bands, Bound, Linear, masked, scaled_products, without_unread
from .fusion import fuse

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    Array = NDArray[Any]
#: Elements of one tile of scores on the CPU.
TILE_ELEMENTS = buffers.NBYTES // 4
#: The same on a GPU: 64 MiB in float32. Smaller tiles launch more kernels: with a quarter both passes of 16384 queries take 3
#: times as long on an H200; with twice as many elements they take 7 % less.
GPU_TILE_ELEMENTS = 1 << 24
#: With a mask on positions a tile has an eighth of the rows, so that what it excludes is not computed, but at least these.
MASKED_ROWS, GPU_MASKED_ROWS = 64, 1024

_ALL = slice(None)
_NO_MEMORY = buffers.NoMemory()
_DTYPES = {name: np.dtype(name) for name in ("float32", "float64")}


class Place(NamedTuple):
    """A block of some heads of some batch entries.

    Attributes:
        batch, heads, rows, columns: the block.
        all_rows, all_columns: the numbers of rows and columns of its batch entries.
        last: whether it has the last rows of its heads.
        is_whole: whether it is the only one of a graph.
        lengths: of the block, and of all rows and columns: the shapes of all values depend on these alone.
    """

    batch: range
    heads: range
    rows: range
    columns: range
    all_rows: int
    all_columns: int
    last: bool
    is_whole: bool
    lengths: tuple[int, ...]


class Analysis:
    """What all evaluations of a graph have in common.

    Attributes:
        views: name, axes and the index that adds new axes, of the arrays of the caller.
        axes: the last two axes of every tensor; see :func:`.matrix_axes`.
        products: the axes of every product by the name of its result: rows, columns, and what is summed over.
        grouped: the products of every head that only a sum over groups of heads reads, with the heads of a group: the product
            is this sum.
        narrow: the products whose left operand does not depend on the scores: it is a row, a column, or the same in all heads.
        undivided: the softmax weights that only a product reads: the product is divided by the sums of rows in their place.
        on_host: the names of the integers that the interpreter reads one by one: lengths, offsets, page tables and seeds.
        nodes: the nodes that numpy computes; ``is_small``: whether a thread keeps the memory of all their results.
        sums: the shapes of the sums over tiles, by the name of the result; ``over_tiles``: these, and the largest magnitudes.
        lengths: the lengths of each batch entry, if only these are computed.
        by_entry: whether a tile has one batch entry, because entries have lengths of their own.
        blocks: how a block of rows is computed without the other rows; None if it is not.
        scales: the factors of products, by the names of their results.
        inputs: the inputs by name; ``direct``: those that are read without a conversion.
        visible: the conditions on positions that hold where a weight is not 0.
        shape: batch, heads, rows and columns of the scores; ``group``: the heads that are computed together.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.views = [(t.name, *_axes(t)) for t in graph.by_role("input", "output")]
        self.constants = {t.name: _constant(t) for t in graph.by_role("constant")}
        self.scalars = graph.by_role("scalar")
        self.axes = matrix_axes(graph)
        host = {t.name for node in nodes for t in _read_on_host(node)}
        self.on_host = host | {t.name for node in nodes for t in _seeds(node)}
        self.by_entry = bool(host)
        self.sums = {node.out.name: node.out.shape for node in nodes if _sums_over_tiles(node)}
        self.over_tiles = {*self.sums, *(node.out.name for node in nodes if isinstance(node, Reduction) and node.amax)}
        self.packed = {t.name for t in graph.tensors if _is_packed(t)}
        self.lengths = _packed_lengths(graph)
        self.blocks = RowBlocks.of(graph, self.axes)
        self.later = self.blocks.later if self.blocks else frozenset[str]()
        self.bands = Bands(graph, self.axes, host)
        self.visible = self.bands.visible if self.blocks else ()
        self._graph = graph
        kept = without_unread([masked(node, self.bands) for node in nodes])
        rewritten, self.scales = scaled_products(kept, graph.compute_dtype)
        self.nodes = rewritten
        elements = sum(math.prod(node.out.shape) for node in nodes)
        self.is_small = elements * _DTYPES[graph.compute_dtype].itemsize <= buffers.NBYTES
        #: The steps of tiles, by the kind of the tile and of the evaluation; see :func:`.steps.steps_of`.
        self.steps: dict[tuple[bool, ...], list[Any]] = {}
        self.products = {
            node.out.name: (self.axes[node.a.name][0], self.axes[node.b.name][1], self.axes[node.b.name][0])
            for node in (*nodes, *rewritten)
            if isinstance(node, Matmul)
        }
        scores = [node.out.shape for node in nodes if isinstance(node, Matmul)][:1] or [node.out.shape for node in nodes]
        self.shape: tuple[int, ...] = tuple(map(max, zip(*scores, strict=True)))
        self.group = math.lcm(1, *(self.shape[1] // t.shape[1] for node in nodes for t in _grouped(node)))
        self.grouped, self.undivided = _merged_steps(graph)
        self.narrow = _narrow_products(graph)
        self.inputs = {t.name: t for t in graph.by_role("input")}
        self.direct = [n for n, t in self.inputs.items() if t.dtype == graph.compute_dtype and n not in self.packed]
        self._places: dict[tuple[bool, int], list[Place]] = {}

    @functools.cached_property
    def fused_nodes(self) -> list[Node]:
        """The nodes for CuPy arrays, with pointwise nodes fused."""
        return fuse(self._graph)

    def places(self, on_gpu: bool) -> list[Place]:
        """The places of all tiles, if batch entries have no lengths of their own; they are kept."""
        elements = GPU_TILE_ELEMENTS if on_gpu else TILE_ELEMENTS
        found = self._places.get((on_gpu, elements))
        if found is None:
            batch, _, rows, columns = self.shape
            *_, entries = self.block(rows, columns, on_gpu=on_gpu)
            bounds = [Bound(condition.row, condition.column, -condition.number) for condition in self.visible]
            groups = (range(b, min(batch, b + entries)) for b in range(0, batch, entries))
            found = [place for group in groups for place in self.places_of(group, rows, columns, bounds, on_gpu=on_gpu)]
            self._places[on_gpu, elements] = found
        return found

    def places_of(self, batch: range, rows: int, columns: int, bounds: Sequence[Bound], *, on_gpu: bool) -> Iterator[Place]:
        """The places of the tiles of some batch entries, in the order of heads and rows."""
        heads = self.shape[1]
        step, tile_heads, _ = self.block(rows, columns, on_gpu=on_gpu)
        every = range(columns)
        for h in range(0, heads, tile_heads):
            for start in range(0, max(1, rows), step):
                part = range(start, min(rows, start + step))
                visible = _visible_columns(bounds, part, every) if bounds and columns > 1 else every
                block = (batch, range(h, min(heads, h + tile_heads)), part, visible)
                lengths = (*map(len, block),)
                yield Place(*block, rows, columns, part.stop >= rows, lengths == self.shape, (*lengths, rows, columns))

    def block(self, rows: int, columns: int, *, on_gpu: bool) -> tuple[int, int, int]:
        """The rows, heads and batch entries of a tile."""
        batch, heads, *_ = self.shape
        elements, fine = (GPU_TILE_ELEMENTS, GPU_MASKED_ROWS) if on_gpu else (TILE_ELEMENTS, MASKED_ROWS)
        of_row = max(1, columns) * self.group
        step = max(1, min(rows, elements // of_row)) if self.blocks else max(1, rows)
        if any(condition.row and condition.column for condition in self.visible):
            step = min(step, max(fine, -(-rows // 8)))
        groups = max(1, min(heads // self.group, elements // (of_row * step)))
        entries = 1  # on a GPU: a product of more matrices may run another kernel, so bits would depend on the batch
        if groups * self.group == heads and not self.by_entry and not on_gpu:
            entries = max(1, min(batch, elements // (max(1, columns) * heads * step)))
        return step, groups * self.group, entries


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
        row_sums: unfinished sums over the tiles of some heads.
        totals, largest: sums over tiles, and the largest magnitudes so far, by the name of the result.
    """

    def __init__(
        self, graph: Graph, arrays: Mapping[str, Array], scalars: Mapping[str, float], exact: bool, check: Any
    ) -> None:
        analysis: Analysis = graph.notes.get("analysis") or analyze(graph)
        self.analysis = analysis
        self.exact, self.check = exact, check
        self.heads = analysis.shape[1]
        self.views = dict(analysis.constants) if analysis.constants else {}
        self.xp: Any = np
        for name, axes, new_axes in analysis.views:
            array = arrays[name]
            if type(array) is not np.ndarray:
                array = on_host(array) if name in analysis.on_host else plain(array)
                self.xp = self.xp if isinstance(array, np.ndarray) else cupy()
            view = array.transpose(axes)
            self.views[name] = view[new_axes] if new_axes else view
        self.later = analysis.later
        self.partial = analysis.later - analysis.blocks.summed if analysis.blocks else frozenset[str]()
        self.row_sums: dict[str, Array] = {}
        self.scalars: dict[str, Any] = {}
        for t in analysis.scalars:
            self.scalars[t.name] = scalars[t.name] if t.value is None else t.value
        self.dtype_name = "float64" if exact else graph.compute_dtype
        self.dtype = _DTYPES[self.dtype_name]
        self.direct = () if exact and graph.compute_dtype != "float64" else analysis.direct
        self.totals: dict[str, Array] = {}
        for name, shape in analysis.sums.items():
            self.totals[name] = self.xp.zeros(shape, self.dtype)
        self.largest: dict[str, Any] = {}

    def tiles(self) -> Iterator[Tile]:
        """All tiles, in the order of batch entries, heads and rows."""
        cache: dict[str, Array] = {}
        for place in self.analysis.places(self.xp is not np) if not self.analysis.by_entry else self._places_by_entry():
            if place.rows.start == 0:
                cache = {}  # the keys and values of these heads: the same for every block of queries
            yield Tile(self, place, cache)

    def _places_by_entry(self) -> Iterator[Place]:
        """The places of all tiles, with the lengths of each batch entry."""
        analysis, on_gpu = self.analysis, self.xp is not np
        batch, _, rows, columns = analysis.shape
        for b in range(batch):
            if analysis.lengths:
                rows, columns = (int(self.views[tensor.name][b, 0, 0, 0]) for tensor in analysis.lengths)
            bounds = [self.bound(condition, b) for condition in analysis.visible]
            yield from analysis.places_of(range(b, b + 1), rows, columns, bounds, on_gpu=on_gpu)

    def bound(self, condition: Linear, entry: int) -> Bound:
        """A condition with the lengths of a batch entry."""
        number = condition.number
        for name, times in condition.lengths:
            number += times * int(self.views[name][entry, 0, 0, 0])
        return Bound(condition.row, condition.column, -number)


class Tile:
    """A place, and the values of the tensors there: arrays with four axes.

    Attributes:
        batch, heads, rows, columns, all_rows, all_columns, last, is_whole, lengths: see :class:`Place`.
        cache: the values of the tensors without rows, the same for all tiles of the heads.
        values: the tensors computed or read so far, in ``run.dtype``, and the scalars.
        memory: the arrays to which the steps of an earlier tile of the same sizes wrote; see :class:`.buffers.Memory`.
    """

    __slots__ = (
        "all_columns", "all_rows", "batch", "cache", "columns", "heads", "is_whole", "last", "lengths", "memory", "rows", "run",
        "values",
    )  # fmt: skip

    def __init__(self, run: Evaluation, place: Place, cache: dict[str, Array]) -> None:
        self.batch, self.heads, self.rows, self.columns, self.all_rows, self.all_columns = place[:6]
        self.last, self.is_whole, self.lengths = place[6:]
        self.run, self.cache = run, cache
        self.memory: buffers.Memory = _NO_MEMORY
        self.values: dict[str, Any] = {**run.scalars}
        if self.is_whole:
            for name in run.direct:
                self.values[name] = run.views[name]

    def read(self, tensor: Tensor) -> Any:
        """Read an input; tensors without rows that are converted are read once for all tiles of the heads."""
        name, run = tensor.name, self.run
        row_axis, column_axis = run.analysis.axes[name]
        kept = ROWS not in (row_axis, column_axis) and (tensor.dtype != run.dtype_name or name in run.analysis.packed)
        value = self.cache.get(name) if kept else None
        if value is None:
            value = run.xp.asarray(self.part_of(tensor, every_column=kept))
            if value.dtype.kind != "b":
                value = value.astype(np.int64 if value.dtype.kind == "i" else run.dtype, copy=False)
        if kept:
            self.cache[name] = value
            value = value[..., self.part(row_axis, value.shape[2]), self.part(column_axis, value.shape[3])]
        return value

    def number(self, tensor: Tensor) -> int:
        """The integer of this batch entry in an input such as the lengths, which is in the memory of the host."""
        return int(self.run.views[tensor.name][self.batch.start, 0, 0, 0])

    def start(self, axis: str | None) -> int:
        """The first position of the tile along an axis of a matrix."""
        return self.rows.start if axis == ROWS else self.columns.start if axis == COLUMNS else 0

    def part(self, axis: str | None, length: int) -> slice:
        """The part of an axis of an array that the tile reads or writes; an array of length 1 is broadcast."""
        if length == 1 or axis is None:
            return _ALL
        return slice(self.rows.start, self.rows.stop) if axis == ROWS else slice(self.columns.start, self.columns.stop)

    def add_to_rows(self, tensor: Tensor, value: Array) -> Array | None:
        """Add to a sum over the tiles of some heads; returns the sum in the last tile, else None."""
        by_columns = self.run.analysis.axes[tensor.name][0] == COLUMNS
        sums = self.run.row_sums.get(tensor.name)
        if sums is None and self.last and not (by_columns and len(self.columns) < self.all_columns):
            return value
        if sums is None:
            rows = self.all_columns if by_columns else value.shape[2]
            sums = self.run.xp.zeros((*value.shape[:2], rows, value.shape[3]), self.run.dtype)
            self.run.row_sums[tensor.name] = sums
        sums[:, :, self.part(COLUMNS if by_columns else None, sums.shape[2])] += value
        return self.run.row_sums.pop(tensor.name) if self.last else None

    def add_to_total(self, tensor: Tensor, value: Array) -> None:
        """Add to a sum over tiles: over the batch, the heads, the rows or the columns."""
        b, h, rows, columns = tensor.shape
        part = self.run.totals[tensor.name][
            slice(self.batch.start, self.batch.stop) if b > 1 else _ALL,
            slice(self.heads.start, self.heads.stop) if h > 1 else _ALL,
            slice(self.rows.start, self.rows.stop) if rows > 1 else _ALL,
            slice(self.columns.start, self.columns.stop) if columns > 1 else _ALL,
        ]
        summed = tuple(axis for axis, length in enumerate(tensor.shape) if length == 1)
        part += value.sum(axis=summed, keepdims=True) if summed else value

    def add_to_largest(self, tensor: Tensor, value: Array) -> None:
        """Take the largest magnitude of all tiles."""
        largest, name = self.run.largest, tensor.name
        largest[name] = np.maximum(largest.get(name, 0.0), np.abs(value).max(initial=0))  # of FP8, on the CPU only
        self.run.views[name][...] = largest[name]

    def part_of(self, tensor: Tensor, *, writes: bool = False, every_column: bool = False) -> Array:
        """The part of an array that the tile reads or writes. Sums over rows, and what reads them, have all columns."""
        name, run = tensor.name, self.run
        row_axis, column_axis = run.analysis.axes[name]
        if name in run.analysis.packed:
            return self._sequence(tensor, writes=writes, every_column=every_column)
        view: Array = run.views[name]
        if self.is_whole:
            return view
        if every_column or (writes and name in run.later):
            row_axis = column_axis = None
        return view[
            slice(self.batch.start, self.batch.stop) if view.shape[0] > 1 else _ALL,
            self.heads_of(view),
            self.part(row_axis, view.shape[2]),
            self.part(column_axis, view.shape[3]),
        ]

    def _sequence(self, tensor: Tensor, *, writes: bool, every_column: bool) -> Array:
        """The part of a packed tensor that is in the sequence of this batch entry, as far as the graph has positions.

        What is read is padded with zeros if the tile goes beyond the sequence.
        """
        assert tensor.ragged
        view = self.run.views[tensor.name]
        axis = 3 if tensor.axes[3] == 2 else 2
        label = self.run.analysis.axes[tensor.name][axis - 2]
        offsets = self.run.views[tensor.ragged.name][:, 0, 0, 0] // tensor.strides[axis]
        begin, end = int(offsets[self.batch.start]), int(offsets[self.batch.start + 1])
        wanted = self.rows if label == ROWS else range(tensor.shape[axis])
        if label == COLUMNS:
            wanted = range(self.all_columns) if every_column or (writes and tensor.name in self.run.later) else self.columns
        end = min(end, begin + tensor.shape[axis])
        tokens = slice(min(end, begin + wanted.start), min(end, begin + wanted.stop))
        part = view[:, self.heads_of(view), :, tokens] if axis == 3 else view[:, self.heads_of(view), tokens]
        missing = 0 if writes else len(wanted) - part.shape[axis]
        if missing > 0:
            part = self.run.xp.pad(part, [(0, missing if n == axis else 0) for n in range(4)])
        return part

    def heads_of(self, view: Array) -> slice:
        """The heads of a tensor, each of which serves a group of consecutive query heads."""
        heads, every = view.shape[1], self.run.heads
        if heads == 1 or len(self.heads) == every:
            return _ALL
        return slice(self.heads.start * heads // every, -(-self.heads.stop * heads // every))


def _visible_columns(bounds: Sequence[Bound], rows: range, columns: range) -> range:
    """The columns that some row attends to."""
    for bound in bounds:
        rows = bound.rows(rows)
    for bound in bounds:
        columns = bound.columns(rows, columns)
    return columns


def _read_on_host(node: Node) -> Iterator[Tensor]:
    """The integers of batch entries that the interpreter reads one by one."""
    names = {Matmul: ("m", "n", "k"), PagedLoad: ("table", "lengths"), Softmax: ("rows",)}
    yield from (t for name in names.get(type(node), ()) if (t := getattr(node, name)) is not None)
    yield from (t.ragged for t in (*node.inputs, *node.outputs) if t.ragged is not None and t.ragged.role == "input")


def _seeds(node: Node) -> tuple[Tensor, ...]:
    return (node.seed, node.offset) if isinstance(node, Bernoulli) else ()


def _grouped(node: Node) -> tuple[Tensor, ...]:
    """The tensor of a node whose heads serve groups."""
    if isinstance(node, Matmul):
        return (node.b,)
    return (node.out,) if _sums_heads(node) else ()


def _narrow_products(graph: Graph) -> set[str]:
    """The names of :attr:`Analysis.narrow`: a score function may compute with positions and captured arrays alone."""
    wide = {t.name for t in graph.by_role("input")}
    narrow: set[str] = set()
    for node in graph.nodes:
        if isinstance(node, Matmul):
            wide.add(node.out.name)
            if node.a.name not in wide:
                narrow.add(node.out.name)
        elif isinstance(node, Pointwise):
            read = () if node.mode == "gen_index" else node.inputs
            if any(t.name in wide and t.role not in ("input", "scalar") for t in read):
                wide.add(node.out.name)
        elif any(t.name in wide for t in node.inputs[:1]):
            wide.add(node.out.name)
    return narrow


def _merged_steps(graph: Graph) -> tuple[dict[str, int], set[str]]:
    """The names of :attr:`Analysis.grouped` and :attr:`Analysis.undivided`."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for t in node.inputs:
            readers.setdefault(t.name, []).append(node)

    def only(tensor: Tensor) -> Node | None:
        nodes = readers.get(tensor.name, [])
        unrounded = tensor.role == "virtual" and tensor.dtype == graph.compute_dtype
        return nodes[0] if unrounded and len(nodes) == 1 else None

    grouped: dict[str, int] = {}
    undivided: set[str] = set()
    for node in graph.nodes:
        reader = only(node.out)
        if isinstance(node, Matmul) and reader and _sums_heads(reader) and reader.out.shape[2:] == node.out.shape[2:]:
            grouped[node.out.name] = node.out.shape[1] // reader.out.shape[1]
        if isinstance(node, Softmax) and node.scale is None and isinstance(reader, Matmul) and reader.a is node.out:
            undivided.add(node.out.name)
    return grouped, undivided


class TileSize(NamedTuple):
    """The largest tile of an evaluation on a GPU: queries and heads, of how many, and the bytes of all matrices at once."""

    rows: int
    of: int
    heads: int
    of_heads: int
    nbytes: int

    def __str__(self) -> str:
        heads = "all heads" if self.heads == self.of_heads else f"{self.heads} of {self.of_heads} heads"
        part = f"tiles of {self.rows} of {self.of} queries of {heads}" if self.rows < self.of else f"{heads} at a time"
        return f"{part}, {self.nbytes / 1e6:.3g} MB at once"


def tile_of(graph: Graph) -> TileSize:
    """The size of the tiles of a graph on a GPU, for reports."""
    analysis, itemsize = analyze(graph), np.dtype(graph.compute_dtype).itemsize
    _, of_heads, of, columns = analysis.shape
    rows, heads, entries = analysis.block(of, columns, on_gpu=True)
    axes = analysis.axes
    alive: dict[str, int] = {}
    most = 0
    for node, last_reads in last_reads_of(analysis.fused_nodes):
        for t in (*node.inputs, *node.outputs):
            if t.role in ("input", "output", "virtual"):
                lengths = (min(rows, n) if axis == ROWS else n for axis, n in zip(axes[t.name], t.shape[2:], strict=True))
                alive[t.name] = itemsize * min(entries, t.shape[0]) * min(heads, t.shape[1]) * math.prod(lengths)
        most = max(most, sum(alive.values()))
        for name in last_reads:
            if name in analysis.later or ROWS in axes[name] or COLUMNS not in axes[name]:
                alive.pop(name, None)
    return TileSize(rows, of, heads, of_heads, most)


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


def _sums_heads(node: Node | None) -> bool:
    return isinstance(node, Reduction) and not (node.amax or node.negative or _sums_over_tiles(node))


def _sums_over_tiles(node: Node) -> bool:
    """Whether a node sums over tiles, so that its result is complete only after the last tile."""
    if not isinstance(node, Reduction) or node.amax or node.out.role != "output":
        return False
    (b, h, m, n), (_, out_heads, _, _) = node.x.shape, node.out.shape
    return node.out.shape not in ((b, h, m, 1), (b, out_heads, m, n))


def last_reads_of(nodes: Sequence[Node]) -> list[tuple[Node, frozenset[str]]]:
    """Every node with the names of its tensors that no later node reads."""
    read: set[str] = set()
    steps: list[tuple[Node, frozenset[str]]] = []
    for node in reversed(nodes):
        names = {t.name for t in (*node.inputs, *node.outputs) if t.role != "scalar"}
        steps.append((node, frozenset(names - read)))
        read |= names
    return steps[::-1]
