"""The steps of a score function as pointwise steps of a graph, in the form that cuDNN's fused kernels support.

The first operand of a step, and the value that a ``where`` selects, must be a virtual tensor; inputs and scalars must be second
operands (measured with 9.19 and 9.28). Operands are therefore exchanged, comparisons are flipped, ``c - x`` becomes
``-x + c``, and an input without a virtual operand is added to zeros. Since 9.26 an input that is repeated along the keys by
stride 0 cannot be added, but it can be a factor: it is multiplied by ones first. Conditions are combined by arithmetic on 1
and 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..score_fn.autodiff import gradients
from ..score_fn.expression import AXES, LEAVES, Step, Writer
from ..score_fn.modes import FLIPPED, MODES, OPPOSITE
from .nodes import GraphBuilder, Tensor

#: A factor of at least this size counts as infinite; the largest float32 is 3.4e38.
LARGEST = 3e38
#: The modes whose result may be infinite for finite operands, and the score, which may be infinite.
UNBOUNDED = frozenset({"score", *(mode for mode, row in MODES.items() if row.is_unbounded)})
#: The comparisons that cuDNN recognizes as a band if both sides are positions.
_ORDERS = frozenset({"cmp_ge", "cmp_gt", "cmp_le", "cmp_lt"})
#: Logical modes as arithmetic on conditions, which are 1 or 0.
_LOGICAL = {"logical_and": "mul", "logical_or": "max"}


def _negative(w: Writer, x: int) -> int:
    return w.add("sub", w.constant(0, "int"), x)


#: Modes of integers, composed of exact ones. cuDNN computes these modes in float32, whose integers are exact up to 2**24; its
#: ADD, SUB, MUL, comparisons and BINARY_SELECT of INT32 are exact (measured with 9.19 on an H200).
INTEGER_COMPOSED: dict[str, Callable[..., int]] = {
    "neg": _negative,
    "abs": lambda w, x: w.add("binary_select", x, _negative(w, x), w.add("cmp_ge", x, w.constant(0, "int"))),
    "max": lambda w, x, b: w.add("binary_select", x, b, w.add("cmp_ge", x, b)),
    "min": lambda w, x, b: w.add("binary_select", x, b, w.add("cmp_le", x, b)),
}
#: Integers that are computed with these modes only, such as sums of indices, are below 2**24.
_SMALL = frozenset({"index", "constant", "add", "sub", *INTEGER_COMPOSED, "binary_select", *OPPOSITE, *_LOGICAL})


class Emitter:
    """Emits the steps of a score function, each only once, as tensors whose names begin with ``prefix``.

    ``scores`` is the value of the leaf ``score``, and ``inputs`` are the arrays that the steps read, by the names of their
    leaves. An index among these names is read from memory.
    """

    def __init__(
        self, g: GraphBuilder, writer: Writer, scores: Tensor, inputs: Mapping[str, Tensor], prefix: str = "f"
    ) -> None:
        self.g, self.writer, self.scores, self.inputs, self.prefix = g, writer, scores, inputs, prefix
        self.tensors: dict[int, Tensor] = {}
        self._zeros: Tensor | None = None
        self._ones: dict[str, Tensor] = {}
        self._count = 0

    def __call__(self, root: int) -> Tensor:
        """Emit a step and return its virtual tensor."""
        for number in self.writer.reachable(root, known=self.tensors):
            self.tensors[number] = self._emit(self.writer.steps[number])
        return self._virtual(root)

    def on(self, scores: Tensor, prefix: str) -> Emitter:
        """Return an emitter of the same steps that takes indices from other scores: cuDNN recognizes masks only as a chain."""
        return Emitter(self.g, self.writer, scores, self.inputs, prefix)

    def derivative(self, root: int, of: str = "") -> int:
        """Return the step that is the derivative of ``root`` with respect to the score, or to the array named ``of``."""
        (number,) = gradients(self.writer, root, [self.writer.leaf("captured", of) if of else self.writer.leaf("score")])
        return self.writer.constant(0.0) if number is None else number

    def selects(self, root: int) -> bool:
        """True if a step is computed from a choice between two values."""
        return any(self.writer.steps[number].mode == "binary_select" for number in self.writer.reachable(root))

    def times(self, derivative: int, ds: Tensor, *, finite: bool, always: bool = False) -> Tensor:
        """``dS * derivative``; with ``finite`` an infinite or NaN derivative is replaced by 0.

        Such values occur where a score is masked and the gradient is 0, and beyond the last key or query in the tiles of a
        kernel, where the score itself is infinite.

        A derivative of 1 is no step, unless ``always``. cuDNN takes a choice between a score and a constant for a mask, and
        sums a dS without a factor as if the score were masked (9.19, Hopper: wrong sums, or inf). A tensor of ones as the
        factor prevents it; a scalar, an identity or an added 0 does not.
        """
        if self.writer.value(derivative) == 1:
            if not always:
                return ds
            one = self._load(self.g.scalar("one", self.g.compute_dtype, value=1.0))
            return self._pointwise("mul", ds, one)
        factor = self.tensors[derivative] if self._is_scalar(derivative) else self(derivative)
        if finite and _is_virtual(factor) and self._unbounded(derivative):
            zero, largest = (self.g.scalar(f"{value:g}", self.g.compute_dtype, value=value) for value in (0.0, LARGEST))
            # factor <- factor where |factor| < largest, else 0
            bounded = self._pointwise("cmp_lt", self._pointwise("abs", factor), largest)
            factor = self._pointwise("binary_select", factor, zero, bounded)
        return self._pointwise("mul", ds, factor)

    def not_a_band(self, condition: Tensor) -> Tensor:
        """``condition != 0``, which is the same condition, but not one that cuDNN recognizes as a band."""
        dtype = self.g.compute_dtype
        return self._pointwise("cmp_neq", condition, self.g.scalar(f"0 {dtype}", dtype, value=0.0))

    def _emit(self, step: Step) -> Tensor:
        """Emit one step; its arguments have been emitted."""
        mode = step.mode
        if mode in LEAVES:
            return self._leaf(step)
        if not isinstance(composed := MODES[mode].cudnn, str):
            return self(composed(self.writer, *step.args))
        if mode == "binary_select":
            return self._select(step)
        if step.kind == "int" and mode in ("div", *INTEGER_COMPOSED):
            for arg in step.args:  # load an array once: kernels support few arrays with one element per query
                if self.writer.steps[arg].mode == "captured":
                    self.tensors[arg] = self._virtual(arg)
        if mode in INTEGER_COMPOSED and step.kind == "int" and not self._fits_float32(step.args):
            return self(INTEGER_COMPOSED[mode](self.writer, *step.args))
        if mode in _LOGICAL:
            return self._pointwise(_LOGICAL[mode], *(self.tensors[arg] for arg in step.args))
        if len(step.args) == 1:
            return self._pointwise(mode, self._virtual(step.args[0]), dtype=_dtype(step))
        return self._binary(step)

    def _leaf(self, step: Step) -> Tensor:
        dtype = "int32" if step.kind == "int" else self.g.compute_dtype
        match step.mode:
            case "score":
                return self.scores
            case "index" if step.name not in self.inputs:
                return self._index(step.name)
            case "index" | "captured":
                return self.inputs[step.name]
            case "number":
                return self.g.scalar(step.name, dtype)
            case _:
                return self.g.scalar(f"{step.value:g} {dtype}", dtype, value=step.value)

    def _select(self, step: Step) -> Tensor:
        """``x where condition, else b``.

        cuDNN takes a choice between a score and any number by ``q_idx >= kv_idx`` for a causal mask, and skips the tiles in
        which no element has its score (9.19 and 9.28, Hopper: wrong results beyond the first tile of keys).
        """
        x, b, choice = step.args
        condition = self.tensors[choice]
        if self._is_scalar(b) and self.writer.steps[choice].mode in _ORDERS:
            condition = self.not_a_band(condition)
        chosen, other = self._virtual(x), self.tensors[b] if self._is_scalar(b) else self._virtual(b)
        if step.kind != "int":
            chosen, other = self._to_float(chosen), self._to_float(other)
        return self._pointwise("binary_select", chosen, other, condition, dtype=_dtype(step))

    def _binary(self, step: Step) -> Tensor:
        """``mode(x, b)`` with a virtual x."""
        mode, (x, b) = step.mode, (self.tensors[arg] for arg in step.args)
        if not _is_virtual(x) and _is_virtual(b):
            mode, x, b = self._exchanged(step, x, b)
        x = self._load(x)
        if mode == "add" and is_repeated(b):
            b = self._load(b)
        if mode in OPPOSITE and _is_integer(x) != _is_integer(b):  # comparisons need one type
            x, b = self._to_float(x), self._to_float(self._load(b)) if _is_integer(b) else b
        return self._pointwise(mode, x, b, dtype=_dtype(step))

    def _exchanged(self, step: Step, x: Tensor, b: Tensor) -> tuple[str, Tensor, Tensor]:
        """``mode(x, b)`` as a mode and two operands, the first of them computed from b; unchanged if there is no such form."""
        mode = step.mode
        if MODES[mode].commutes or mode in FLIPPED:
            return FLIPPED.get(mode, mode), b, x
        if mode == "sub" and step.kind != "int":  # x - b = -b + x
            return "add", self._pointwise("neg", b), x
        if mode == "div" and step.kind != "int":  # x / b = 1 / b * x
            return "mul", self._pointwise("reciprocal", b), x
        return mode, x, b

    def _unbounded(self, root: int) -> bool:
        """True if a step may be infinite although the arrays are finite."""
        return any(self.writer.steps[number].mode in UNBOUNDED for number in self.writer.reachable(root))

    def _fits_float32(self, numbers: tuple[int, ...]) -> bool:
        """True if integers are sums and differences of indices, below 2**24."""
        return all(self.writer.steps[number].mode in _SMALL for number in self.writer.reachable(*numbers))

    def _is_scalar(self, number: int) -> bool:
        """True if a step is a scalar; if so, the scalar is emitted."""
        step = self.writer.steps[number]
        if step.mode not in ("number", "constant"):
            return False
        self.tensors.setdefault(number, self._leaf(step))
        return True

    def _virtual(self, number: int) -> Tensor:
        """Return the virtual tensor of a step."""
        return self._load(self.tensors[number])

    def _load(self, tensor: Tensor) -> Tensor:
        """``0 + x``, a virtual tensor of an array or a scalar; ``1 · x`` of an array that is repeated along the keys."""
        if _is_virtual(tensor):
            return tensor
        if self._zeros is None:
            row = self._index("q_idx")
            self._zeros = self._pointwise("sub", row, row, dtype="int32")
        dtype = "int32" if _is_integer(tensor) else self.g.compute_dtype
        if not is_repeated(tensor):
            return self._pointwise("add", self._zeros, tensor, dtype=dtype)
        if dtype not in self._ones:
            self._ones[dtype] = self._pointwise("add", self._zeros, self.g.scalar(f"1 {dtype}", dtype, value=1), dtype=dtype)
        return self._pointwise("mul", self._ones[dtype], tensor, dtype=dtype)

    def _to_float(self, tensor: Tensor) -> Tensor:
        """``x + 0.0``, a virtual tensor of integers in the compute dtype; any other tensor unchanged."""
        if not _is_integer(tensor) or not _is_virtual(tensor):
            return tensor
        dtype = self.g.compute_dtype
        return self._pointwise("add", tensor, self.g.scalar(f"0 {dtype}", dtype, value=0.0))

    def _index(self, axis: str) -> Tensor:
        """Return the index of every element of the scores along an axis, int32."""
        return self._pointwise("gen_index", self.scores, dtype="int32", axis=AXES.index(axis))

    def _pointwise(self, mode: str, *operands: Tensor, dtype: str | None = None, axis: int | None = None) -> Tensor:
        self._count += 1
        name = f"{self.prefix}{self._count}"
        formula = MODES[mode].formula.format(*operands) if axis is None else AXES[axis]
        return self.g.pointwise(f"{name} = {formula}", mode, *operands, out=name, dtype=dtype, axis=axis)


def _dtype(step: Step) -> str | None:
    return "int32" if step.kind == "int" else None


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in ("int32", "int64")


def _is_virtual(tensor: Tensor) -> bool:
    return tensor.role == "virtual"


def is_repeated(tensor: Tensor) -> bool:
    """True if an array is repeated along the keys by stride 0; cuDNN cannot add such an array (9.26 to 9.28)."""
    return tensor.role in ("input", "constant") and tensor.strides[3] == 0
