"""Steps: compile a graph once to a list of functions; each takes a tile and returns a tensor's value.

The interpreter's rules (:data:`.interpreter.COMPILER_RULES`) compile the nodes. What does not depend on arrays is decided once:
which inputs a tile reads, which results are rounded and written to the caller's arrays, which operands' memory a result may
overwrite, and when a value is no longer needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..graph.nodes import Node, PagedLoad, Pointwise, Softmax, Tensor, Transpose
from ..problem.tensor_spec import FP8_LARGEST, rounded
from ..score_fn.modes import CONDITIONS
from .fusion import Fused
from .rounding import round_numbers
from .tiles import Evaluation, Tile, last_reads_of

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    Array = NDArray[Any]

#: What a step computes.
Compute = Callable[[Tile], Any]
#: For each of a value's four axes, True if it has the tile's length; the other axes have length 1.
Extent = tuple[bool, bool, bool, bool]


class CompiledStep(NamedTuple):
    """A function of a tile, the name of the tensor whose value it returns, and the tensors that no later step reads."""

    compute: Compute
    name: str
    unread: tuple[str, ...]


def steps_of(run: Evaluation, tile: Tile, rules: Mapping[type[Node], Callable[[Any, Compiler], Compute]]) -> list[CompiledStep]:
    """Return a tile's steps, which the graph's analysis keeps."""
    checks = run.check is not None and run.check.whole, run.check is None
    key = tile.is_whole, tile.last, 0 in tile.lengths, run.xp is np, run.exact, *checks
    found: list[CompiledStep] | None = run.analysis.steps.get(key)
    if found is None:
        compiler = Compiler(run, tile)
        nodes = run.analysis.nodes if run.xp is np else run.analysis.fused_nodes
        if run.check is not None:
            nodes = [*run.check.after(nodes)]
        for node, last_reads in last_reads_of([n for n in nodes if tile.last or n.out.name not in run.analysis.partial]):
            compiler.add(node, last_reads, rules[type(node)])
        found = run.analysis.steps[key] = compiler.steps
    tile.steps = found
    return found


class Compiler:
    """The steps compiled so far, and what rules need to know to compile a node.

    Attributes:
        steps: the steps.
        analysis, xp, dtype, exact: see :class:`.tiles.Evaluation`.
        whole: True if the tile is the graph's only one.
    """

    def __init__(self, run: Evaluation, tile: Tile) -> None:
        self.steps: list[CompiledStep] = []
        self.analysis, self.xp, self.dtype, self.exact = run.analysis, run.xp, run.dtype, run.exact
        self._dtype_name, self._later = run.dtype_name, run.later
        self.whole, self._last = tile.is_whole, tile.last
        self._is_empty = 0 in tile.lengths
        #: The tensors that have a value.
        self._known = set(tile.values)
        self._last_reads: frozenset[str] = frozenset()
        #: The values that are views of other values, and the values with the evaluation's dtype.
        self._views: set[str] = set()
        self._numbers: set[str] = set()
        self._extents: dict[str, Extent] = {}
        #: The results that a rule writes to the caller's arrays.
        self._targets: set[str] = set()

    def add(self, node: Node, last_reads: frozenset[str], rule: Callable[[Any, Compiler], Compute]) -> None:
        """Add a node's steps: read inputs, compute, write and round the results."""
        self._last_reads = last_reads
        compute = rule(node, self)
        self._describe(node)
        self._append(compute, node.out.name)
        self._known.add(node.out.name)
        for tensor in node.outputs:
            if self.is_needed(tensor):
                self._known.add(tensor.name)
                if self._last or tensor.name not in self._later:
                    self._finish(node, tensor)
        unread = (*sorted(last_reads & self._known),)
        self.steps[-1] = self.steps[-1]._replace(unread=unread)

    def read(self, tensor: Tensor) -> str:
        """Return the name of an operand; if it is a caller's array that is not read yet, first add a step that reads it."""
        name = tensor.name
        if name not in self._known:
            self._known.add(name)
            self._append(lambda tile: tile.read(tensor), name)
            self._extents[name] = _extent(tensor)
        return name

    def operands(self, tensors: Sequence[Tensor]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
        """Return a function that picks the tensors' values from all values of a tile."""
        names = [self.read(t) for t in tensors]
        first = names[0] if names else ""
        return operator.itemgetter(*names) if len(names) > 1 else lambda values: [values[first]] if first else []

    def is_needed(self, tensor: Tensor) -> bool:
        """Return True if a result of the node is an output of the graph, or a later step reads it."""
        return tensor.role == "output" or tensor.name not in self._last_reads

    def gives_memory(self, tensor: Tensor, *others: Tensor | None) -> bool:
        """Return True if the node's result may overwrite an operand: no later step reads it, and no other operand is larger."""
        name = tensor.name
        if name not in self._last_reads or name not in self._numbers or name in self._views:
            return False
        if self._is_empty:  # an axis of length 1 is one of the tile, and then empty, or every tile's
            return False
        extents = [self._extents.get(t.name, _extent(t)) for t in others if t is not None]
        return all(mine or not theirs for extent in extents for mine, theirs in zip(self._extents[name], extent, strict=True))

    def is_view(self, tensor: Tensor) -> bool:
        """Return True if a value shares memory with another value."""
        return tensor.name in self._views

    def target(self, tensor: Tensor) -> Compute | None:
        """Return a function that gets the tile's part of the caller's array; the rule then writes the result there itself.

        None if the caller has no array for the result, or if its values are rounded, summed or cut before they are written.
        """
        name = tensor.name
        if tensor.role != "output" or tensor.dtype != self._dtype_name or name in self._later | self.analysis.packed:
            return None
        self._targets.add(name)
        self._views.add(name)  # so that no later step overwrites it
        whole = self.whole
        return lambda tile: tile.run.views[name] if whole else tile.part_of(tensor, writes=True)

    def _append(self, compute: Compute, name: str) -> None:
        self.steps.append(CompiledStep(compute, name, ()))

    def _describe(self, node: Node) -> None:
        """Record the extent of a node's result, whether it has the evaluation's dtype, and whether it is a view."""
        name = node.out.name
        self._extents[name] = _extent(node.out)
        if isinstance(node, Pointwise):
            if node.mode == "gen_index":
                self._extents[name] = (*(axis == node.axis for axis in range(4)),)  # type: ignore[assignment]
            else:
                extents = [self._extents.get(t.name, _extent(t)) for t in (node.x, node.b, node.t) if t is not None]
                self._extents[name] = (*map(any, zip(*extents, strict=True)),)  # type: ignore[assignment]
        if _is_number(node, self._numbers):
            self._numbers.add(name)
        if isinstance(node, (Transpose, PagedLoad)):
            self._views.add(name)
        elif isinstance(node, Pointwise) and node.mode == "identity":
            self._views |= {node.x.name, name}

    def _finish(self, node: Node, tensor: Tensor) -> None:
        """Add the steps that write and round a result."""
        name = tensor.name
        if name in self.analysis.over_tiles:
            return
        if tensor.role == "output" and name not in self._targets:
            self._append(_written(tensor, self), name)
        if not (tensor.role == "output" and name in self._last_reads) and self._is_rounded(node, tensor):
            self._append(_rounded(node, tensor, self), name)

    def _is_rounded(self, node: Node, tensor: Tensor) -> bool:
        """Return True if a result has more digits than its dtype. Views are already rounded, and so is a softmax in FP8."""
        if self.exact or tensor.dtype == self._dtype_name or isinstance(node, PagedLoad):
            return False
        if isinstance(node, Softmax) and node.scale is not None and tensor is node.out:
            return False
        return not isinstance(node, Transpose) or node.x.dtype != tensor.dtype


def _extent(tensor: Tensor) -> Extent:
    batch, heads, rows, columns = tensor.shape
    return batch > 1, heads > 1, rows > 1, columns > 1


def _is_number(node: Node, numbers: set[str]) -> bool:
    """Return True if a node's value has the evaluation's dtype; ``numbers`` are the earlier values that have it."""
    if not isinstance(node, Pointwise):
        return not isinstance(node, Fused)
    if node.mode in CONDITIONS or node.mode == "gen_index":
        return False
    if node.mode in ("binary_select", "identity"):
        return node.x.name in numbers
    return not node.out.dtype.startswith("int")


def _written(tensor: Tensor, compiler: Compiler) -> Compute:
    """Return the step that writes a result to the caller's array; of packed sequences, it writes only the tokens that exist."""
    name, packed = tensor.name, tensor.name in compiler.analysis.packed
    saturates, whole = tensor.dtype in FP8_LARGEST, compiler.whole

    def compute(tile: Tile) -> Array:
        value: Array = tile.values[name]
        part = tile.run.views[name] if whole and not packed else tile.part_of(tensor, writes=True)
        stored = value[:, :, : part.shape[2]] if packed else value
        part[...] = rounded(stored, tensor.dtype) if saturates else stored
        return value

    return compute


def _rounded(node: Node, tensor: Tensor, compiler: Compiler) -> Compute:
    """Return the step that rounds a value to its tensor's dtype, in place unless a view shares its memory; integers stay."""
    name, dtype, working, on_gpu = tensor.name, tensor.dtype, compiler.dtype, compiler.xp is not np
    in_place = not compiler.is_view(tensor)
    weights = isinstance(node, Softmax) and tensor is node.out

    def compute(tile: Tile) -> Any:
        value = tile.values[name]
        if value.dtype != working:
            return value
        if on_gpu:
            return rounded(value, dtype).astype(working)
        return round_numbers(value, dtype, in_place=in_place, weights=weights)

    return compute
