"""The steps of a score function as steps of a graph, spelled as cuDNN's fused kernels take them.

What they want (measured with 9.19 and 9.28): the first operand of a step, and what is chosen from, must exist inside the
kernel only; arrays and numbers come second. So operands are exchanged, comparisons turned round, ``c - x`` becomes
``-x + c``, and an array that stands alone is added to zeros. Conditions are joined by arithmetic on ones and zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..score_fn.autodiff import gradients
from ..score_fn.expression import AXES, COMMUTES, FLIPPED, OPPOSITE, Kind, Step, Writer
from .nodes import Builder, Tensor

#: Beyond this float32 has no finite numbers to speak of.
_LARGEST = 3e38
#: What may be infinite, or give what is.
_UNBOUNDED = frozenset(
    {"score", "div", "reciprocal", "log", "sqrt", "rsqrt", "pow", "exp", "tan", "mod", "log1p", "expm1", "hypot"}
)
#: Conditions are numbers, 1 and 0.
_JOINED = {"logical_and": "mul", "logical_or": "max"}
_SIGNS = {
    "add": "{} + {}", "sub": "{} − {}", "mul": "{} · {}", "div": "{} / {}", "max": "max({}, {})", "min": "min({}, {})",
    "pow": "{} ^ {}", "mod": "{} mod {}", "neg": "−{}", "exp": "exp({})", "log": "log({})", "sqrt": "√{}", "rsqrt": "1 / √{}",
    "reciprocal": "1 / {}",
    "tanh_fwd": "tanh({})", "sin": "sin({})", "cos": "cos({})", "tan": "tan({})", "erf": "erf({})", "abs": "|{}|",
    "floor": "⌊{}⌋", "ceil": "⌈{}⌉", "identity": "{}", "cmp_eq": "{} = {}", "cmp_neq": "{} ≠ {}", "cmp_ge": "{} ≥ {}",
    "cmp_gt": "{} > {}", "cmp_le": "{} ≤ {}", "cmp_lt": "{} < {}", "binary_select": "{0} where {2}, else {1}",
}  # fmt: skip


def _log1p(w: Writer, x: int) -> int:
    # log u + (x - (u - 1)) / u with u = 1 + x: what u has lost of x is added (as in GSL's gsl_log1p)
    one = w.constant(1.0)
    u = w.add("add", x, one)
    kept, log = w.add("sub", u, one), w.add("log", u)
    lost = w.add("div", w.add("sub", x, kept), u)
    return w.add("binary_select", w.add("add", log, lost), log, w.add("cmp_neq", x, kept))  # log alone of -1 and infinity


def _expm1(w: Writer, x: int) -> int:
    # tanh(x / 2) (exp(x) + 1)
    half = w.add("tanh_fwd", w.add("mul", x, w.constant(0.5)))
    return w.add("mul", half, w.add("add", w.add("exp", x), w.constant(1.0)))


def _hypot(w: Writer, x: int, b: int) -> int:
    # m sqrt(1 + r^2), m the greater absolute value and r the ratio of the two
    sides = w.add("abs", x), w.add("abs", b)
    most, zero = w.add("max", *sides), w.constant(0.0)
    ratio = w.add("binary_select", w.add("div", w.add("min", *sides), most), zero, w.add("cmp_gt", most, zero))
    return w.add("mul", most, w.add("sqrt", w.add("add", w.add("mul", ratio, ratio), w.constant(1.0))))


#: Steps that cuDNN has not, each as steps that it has. They do not lose small values, and overflow only where the result does.
COMPOSED: dict[str, Callable[..., int]] = {"log1p": _log1p, "expm1": _expm1, "hypot": _hypot}


def _negative(w: Writer, x: int) -> int:
    return w.add("sub", w.constant(0, "int"), x)


#: The same of integers. cuDNN computes these modes in float32, which has 24 bits; its ADD, SUB, MUL, comparisons and
#: BINARY_SELECT of INT32 are exact (measured with 9.19 on an H200).
INTEGER_COMPOSED: dict[str, Callable[..., int]] = {
    "neg": _negative,
    "abs": lambda w, x: w.add("binary_select", x, _negative(w, x), w.add("cmp_ge", x, w.constant(0, "int"))),
    "max": lambda w, x, b: w.add("binary_select", x, b, w.add("cmp_ge", x, b)),
    "min": lambda w, x, b: w.add("binary_select", x, b, w.add("cmp_le", x, b)),
}
#: Steps whose integers stay below 2**24 where they are made of nothing else: sums and differences of positions.
_SMALL = frozenset({"index", "constant", "add", "sub", *INTEGER_COMPOSED, "binary_select", *OPPOSITE, *_JOINED})


class Emitter:
    """Spells steps; what has been spelled is not spelled again.

    Args:
        g: writes the graph.
        writer: the steps.
        score: the score, which the function begins with.
        leaves: the arrays and numbers that are handed over, by their names in the program.
        prefix: of the names of the steps in the graph.
    """

    def __init__(
        self, g: Builder, writer: Writer, score: Tensor, leaves: Mapping[str, Callable[[Kind], Tensor]], prefix: str = "f"
    ) -> None:
        self.g, self.writer, self.score, self.leaves, self.prefix = g, writer, score, leaves, prefix
        self.tensors: dict[int, Tensor] = {}
        self._count = 0

    def __call__(self, root: int) -> Tensor:
        """A step, spelled, as a tensor inside the kernel."""
        for number in self.writer.reachable(root, known=self.tensors):
            self.tensors[number] = self._spelled(self.writer.steps[number])
        return self._inside(root)

    def on(self, score: Tensor, prefix: str) -> Emitter:
        """One that spells the same steps anew, with places taken from the scores as they are by now: cuDNN wants a chain."""
        return Emitter(self.g, self.writer, score, self.leaves, prefix)

    def slope(self, root: int, of: str = "") -> int:
        """The step that is the derivative of another with respect to the score, or to an array that is read."""
        (number,) = gradients(self.writer, root, [self.writer.leaf("captured", of) if of else self.writer.leaf("score")])
        return self.writer.constant(0.0) if number is None else number

    def times(self, slope: int, ds: Tensor, *, finite: bool) -> Tensor:
        """A gradient times a derivative.

        Args:
            slope: the step that is the derivative.
            ds: the gradient.
            finite: have a derivative that is infinite, or no number, count as 0. It may be so where nothing is seen, and the
                gradient is 0; and where nothing is, in the tiles of a kernel, the score itself is infinite.
        """
        if self.writer.value(slope) == 1:
            return ds
        factor = self.tensors[slope] if self._number(slope) else self(slope)
        if finite and _inside(factor) and self._unbounded(slope):
            zero, most = (self.g.scalar(f"{value:g}", self.g.compute_dtype, value=value) for value in (0.0, _LARGEST))
            known = self._pointwise("cmp_lt", None, self._pointwise("abs", None, factor), most)
            factor = self._pointwise("binary_select", None, factor, zero, known)
        return self._pointwise("mul", None, ds, factor)

    def _unbounded(self, root: int) -> bool:
        """Whether what a step gives may be infinite where arrays are not."""
        return any(self.writer.steps[number].mode in _UNBOUNDED for number in self.writer.reachable(root))

    def _number(self, number: int) -> bool:
        step = self.writer.steps[number]
        if step.mode not in ("number", "constant"):
            return False
        self.tensors.setdefault(number, self._spelled(step))
        return True

    def _spelled(self, step: Step) -> Tensor:
        mode, args = step.mode, step.args
        match mode:
            case "score":
                return self.score
            case "index" if step.name in self.leaves:  # read from memory
                return self.leaves[step.name](step.kind)
            case "index":
                return self._pointwise("gen_index", step.name, self.score, dtype="int32", axis=AXES.index(step.name))
            case "constant":
                kind = "int32" if step.kind == "int" else self.g.compute_dtype
                return self.g.scalar(f"{step.value:g} {kind}", kind, value=step.value)
            case "number" | "captured":
                return self.leaves[step.name](step.kind)
            case "binary_select":
                x, b, condition = args
                one, other = self._inside(x), self.tensors[b] if self._number(b) else self._inside(b)
                if step.kind != "int":
                    one, other = self._real(one), self._real(other)
                return self._pointwise(mode, None, one, other, self.tensors[condition], dtype=_dtype(step))
        if mode in COMPOSED:
            return self(COMPOSED[mode](self.writer, *args))
        if step.kind == "int" and mode in ("div", *INTEGER_COMPOSED):
            for arg in args:  # read once: kernels take few arrays of one number a query
                if self.writer.steps[arg].mode == "captured":
                    self.tensors[arg] = self._inside(arg)
        if mode in INTEGER_COMPOSED and step.kind == "int" and not self._small(args):
            return self(INTEGER_COMPOSED[mode](self.writer, *args))
        if mode in _JOINED:
            return self._pointwise(_JOINED[mode], None, *(self.tensors[arg] for arg in args))
        if len(args) == 1:
            return self._pointwise(mode, None, self._inside(args[0]), dtype=_dtype(step))
        return self._binary(step, *args)

    def _binary(self, step: Step, one: int, other: int) -> Tensor:
        mode = step.mode
        x, b = self.tensors[one], self.tensors[other]
        dtype = _dtype(step)
        if not _inside(x) and _inside(b):
            if mode in COMMUTES or mode in FLIPPED:
                x, b, mode = b, x, FLIPPED.get(mode, mode)
            elif mode == "sub" and not dtype:  # c - x = -x + c
                x, b, mode = self._pointwise("neg", None, b), x, "add"
            elif mode == "div" and not dtype:  # c / x = 1 / x * c
                x, b, mode = self._pointwise("reciprocal", None, b), x, "mul"
        if not _inside(x):
            x = self._moved(x)
        if mode in OPPOSITE and _whole(x) != _whole(b):  # one kind of numbers
            x = self._real(x)
            b = self._real(self._moved(b)) if _whole(b) else b
        return self._pointwise(mode, None, x, b, dtype=dtype)

    def _small(self, numbers: tuple[int, ...]) -> bool:
        """Whether integers are sums and differences of positions."""
        return all(self.writer.steps[number].mode in _SMALL for number in self.writer.reachable(*numbers))

    def _inside(self, number: int) -> Tensor:
        """A step as a tensor inside the kernel."""
        return self._moved(self.tensors[number])

    def _moved(self, tensor: Tensor) -> Tensor:
        """``0 + x``: what comes from outside, inside."""
        if _inside(tensor):
            return tensor
        return self._pointwise("add", None, self._zeros(), tensor, dtype="int32" if _whole(tensor) else None)

    def _zeros(self) -> Tensor:
        if -1 not in self.tensors:
            row = self._pointwise("gen_index", "q_idx", self.score, dtype="int32", axis=2)
            self.tensors[-1] = self._pointwise("sub", None, row, row, dtype="int32")
        return self.tensors[-1]

    def _real(self, tensor: Tensor) -> Tensor:
        """A whole number as one of the accumulator's dtype."""
        if not _whole(tensor) or not _inside(tensor):
            return tensor
        return self._pointwise("add", None, tensor, self.g.scalar(f"0 {self.g.compute_dtype}", self.g.compute_dtype, value=0.0))

    def _pointwise(
        self, mode: str, formula: str | None, *operands: Tensor, dtype: str | None = None, axis: int | None = None
    ) -> Tensor:
        self._count += 1
        name = f"{self.prefix}{self._count}"
        text = formula or _SIGNS[mode].format(*(tensor.name for tensor in operands))
        return self.g.pointwise(f"{name} = {text}", mode, *operands, out=name, dtype=dtype, axis=axis)


def _dtype(step: Step) -> str | None:
    return "int32" if step.kind == "int" else None


def _whole(tensor: Tensor) -> bool:
    return tensor.dtype in ("int32", "int64")


def _inside(tensor: Tensor) -> bool:
    return tensor.role == "virtual"
