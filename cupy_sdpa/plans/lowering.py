"""Graph -> a finalized cuDNN operation graph; one rule a node.

Every descriptor made here is destroyed here, in the order opposite to its creation, as soon as the plan that needed it is
finalized: the :class:`OperationGraph` is used in a ``with`` block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from .._cudnn.constants import DataType, PointwiseMode, ReduceTensorOp, RngDistribution
from .._cudnn.descriptor import Descriptor
from ..errors import Unsupported
from ..graph.nodes import Bernoulli, Graph, Matmul, Node, Pointwise, Reduction, Softmax, Tensor, Transpose, row_major
from ..support.why_not import deadly

#: numpy's names of dtypes as cuDNN's.
DATA_TYPES = {
    "float16": DataType.HALF,
    "bfloat16": DataType.BFLOAT16,
    "float32": DataType.FLOAT,
    "float64": DataType.DOUBLE,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
    "bool": DataType.BOOLEAN,
    "uint8": DataType.UINT8,
    "int8": DataType.INT8,
}

#: Comparisons with integers compute in the type of the mask, and steps that give integers in INT32; everything else computes
#: in the accumulator's type.
_COMPARISONS = frozenset({"cmp_eq", "cmp_neq", "cmp_ge", "cmp_gt", "cmp_le", "cmp_lt"})


#: Whole numbers are read one by one; everything else 16 bytes at a time.
_WHOLE = {"int32": 4, "int64": 8}


class OperationGraph:
    """A finalized operation graph of cuDNN's, and how its tensors are named to it.

    Attributes:
        descriptor: the operation graph.
        uids: cuDNN's number of every tensor that an execution hands over, by name.

    Args:
        graph: what to compute.
        handle: the cuDNN handle that the plan will belong to; None plans for a described device.
        guarded: refuse first what would kill the process inside cuDNN. Only the test of that guard turns it off.

    Raises:
        Unsupported: cuDNN has no such graph, or the graph would crash it.
        CudnnError: cuDNN failed.
    """

    def __init__(self, graph: Graph, handle: int | None = None, *, guarded: bool = True) -> None:
        if guarded and (reasons := deadly(graph)):
            raise Unsupported("this graph would crash cuDNN: " + "; ".join(reasons))
        self.uids: dict[str, int] = {}
        self._tensors: dict[str, Descriptor] = {}
        self._operations: list[Descriptor] = []
        with contextlib.ExitStack() as stack:
            self._stack = stack
            for node in graph.nodes:
                RULES[type(node)](node, self)
            self.descriptor = self.make("OPERATIONGRAPH", {"OPS": self._operations}, "finalize the graph", handle=handle)
            self._stack = stack.pop_all()  # all went well: from here on close() is our owner's duty

    def __enter__(self) -> OperationGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def make(self, kind: str, attributes: dict[str, Any], doing: str, handle: int | None = None) -> Descriptor:
        """Create, set and finalize a descriptor that lives as long as the graph; attributes that are None are left out."""
        descriptor = self._stack.enter_context(Descriptor(kind))
        if handle is not None:
            descriptor.set_handle(handle)
        for name, value in attributes.items():
            if value is not None:
                descriptor.set(name, value)
        descriptor.finalize(doing)
        return descriptor

    def operation(self, kind: str, attributes: dict[str, Any], doing: str) -> None:
        """Add an operation; tensors among the attributes become their descriptors."""
        attributes = {name: self.tensor(v) if isinstance(v, Tensor) else v for name, v in attributes.items()}
        self._operations.append(self.make(f"OPERATION_{kind}", attributes, f"accept the step {doing}"))

    def tensor(self, tensor: Tensor) -> Descriptor:
        """The descriptor of a tensor, made at its first use."""
        if tensor.name not in self._tensors:
            ragged = None if tensor.ragged is None else self.tensor(tensor.ragged)
            uid = len(self._tensors) + 1
            self._tensors[tensor.name] = self.make(
                "TENSOR",
                {
                    "UNIQUE_ID": uid,
                    "DATA_TYPE": DATA_TYPES[tensor.dtype],
                    "DIMENSIONS": list(tensor.shape),
                    "STRIDES": list(tensor.strides),
                    "BYTE_ALIGNMENT": _WHOLE.get(tensor.dtype, 16),
                    "IS_VIRTUAL": tensor.role == "virtual",
                    "IS_BY_VALUE": True if tensor.role == "scalar" else None,
                    "RAGGED_OFFSET_DESC": ragged,
                },
                f"accept the tensor {tensor.name} {tensor.shape} {tensor.dtype}",
            )
            if tensor.role != "virtual":
                self.uids[tensor.name] = uid
        return self._tensors[tensor.name]


def _matmul(node: Matmul, lowered: OperationGraph) -> None:
    padding = None if node.n is None else 0.0
    kind = lowered.make("MATMUL", {"COMP_TYPE": DataType.FLOAT, "PADDING_VALUE": padding}, f"describe {node.formula}")
    lengths = {f"GEMM_{name}_OVERRIDE_DESC": tensor for name, tensor in (("M", node.m), ("N", node.n), ("K", node.k))}
    lowered.operation("MATMUL", {"DESC": kind, "ADESC": node.a, "BDESC": node.b, "CDESC": node.out, **lengths}, node.formula)


def _pointwise(node: Pointwise, lowered: OperationGraph) -> None:
    whole = node.mode in _COMPARISONS and node.b is not None and node.b.dtype == "int32"
    counts = node.mode != "gen_index" and node.out.dtype == "int32"
    precision = DataType.BOOLEAN if whole or node.mode == "logical_and" else DataType.INT32 if counts else DataType.FLOAT
    attributes = {"MODE": PointwiseMode[node.mode.upper()], "MATH_PREC": precision, "AXIS": node.axis}
    kind = lowered.make("POINTWISE", attributes, f"describe {node.formula}")
    tensors = {"XDESC": node.x, "BDESC": node.b, "TDESC": node.t, "YDESC": node.out}
    lowered.operation("POINTWISE", {"PW_DESCRIPTOR": kind, **tensors}, node.formula)


def _reduce(lowered: OperationGraph, operator: ReduceTensorOp, x: Tensor, y: Tensor, formula: str) -> None:
    kind = lowered.make("REDUCTION", {"OPERATOR": operator, "COMP_TYPE": DataType.FLOAT}, f"describe {formula}")
    lowered.operation("REDUCTION", {"DESC": kind, "XDESC": x, "YDESC": y}, formula)


def _reduction(node: Reduction, lowered: OperationGraph) -> None:
    # A negative sum is the gradient of the sinks, and nothing else: cuDNN knows its steps, wants a plain sum as the last, and
    # changes the sign itself (measured with 9.19 and 9.28).
    _reduce(lowered, ReduceTensorOp.ADD, node.x, node.out, node.formula)


def _bernoulli(node: Bernoulli, lowered: OperationGraph) -> None:
    attributes = {"DISTRIBUTION": RngDistribution.BERNOULLI, "BERNOULLI_DIST_PROBABILITY": node.probability}
    kind = lowered.make("RNG", attributes, f"describe {node.formula}")
    tensors = {"YDESC": node.out, "SEED": node.seed, "OFFSET_DESC": node.offset}
    lowered.operation("RNG", {"DESC": kind, **tensors}, node.formula)


def _transpose(node: Transpose, lowered: OperationGraph) -> None:
    lowered.operation("RESHAPE", {"XDESC": node.x, "YDESC": node.out}, node.formula)


def _softmax(node: Softmax, lowered: OperationGraph) -> None:
    # As primitive operations: every cuDNN 9 recognizes this chain, its own softmax operation came with 9.21.
    # The log-sum-exp must be in the graph also where nobody asked for it (then it is virtual); but not beside m and l, which
    # are not written then (measured with 9.19 and 9.28).
    def virtual(name: str, like: Tensor) -> Tensor:
        return Tensor(f"{node.out.name}.{name}", like.shape, "float32", "virtual", row_major(like.shape))

    x, row, sink = node.x, node.stats or node.max, node.sink
    assert row
    top, shifted, e = node.max or virtual("m", row), virtual("x-m", x), virtual("e", x)
    total = node.sum_exp or virtual("l", row)
    # m = max x                      (B, Hq, Sq, 1)
    highest = virtual("max x", row) if sink else top
    _reduce(lowered, ReduceTensorOp.MAX, x, highest, "m = max S")
    if sink:
        _pointwise(Pointwise("m = max(m, sink)", top, "max", highest, sink), lowered)
    # e = exp(x - m)                 (B, Hq, Sq, Skv)
    _pointwise(Pointwise("S − m", shifted, "sub", x, top), lowered)
    _pointwise(Pointwise("e = exp(S − m)", e, "exp", shifted), lowered)
    # l = sum e                      (B, Hq, Sq, 1)
    added = virtual("Σ e", row) if sink else total
    _reduce(lowered, ReduceTensorOp.ADD, e, added, "l = Σ e")
    if sink:
        # l <- l + exp(sink - m)
        below, last = virtual("sink-m", row), virtual("exp(sink-m)", row)
        _pointwise(Pointwise("sink − m", below, "sub", sink, top), lowered)
        _pointwise(Pointwise("exp(sink − m)", last, "exp", below), lowered)
        _pointwise(Pointwise("l = Σ e + exp(sink − m)", total, "add", added, last), lowered)
    if node.stats:
        # L = m + log l
        log = virtual("log l", row)
        _pointwise(Pointwise("log l", log, "log", total), lowered)
        _pointwise(Pointwise("L = m + log l", node.stats, "add", top, log), lowered)
    # P = e / l
    _pointwise(Pointwise("P = e / l", node.out, "div", e, total), lowered)


#: How every node is said to cuDNN.
RULES: dict[type[Node], Callable[[Any, OperationGraph], None]] = {
    Bernoulli: _bernoulli,
    Matmul: _matmul,
    Pointwise: _pointwise,
    Reduction: _reduction,
    Softmax: _softmax,
    Transpose: _transpose,
}
