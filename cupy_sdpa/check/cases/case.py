"""A problem of the self-test as plain literals: it prints as Python, and is parsed without evaluating anything."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, fields, replace
from typing import Any

#: The engines that a case can run on: CuPy arrays through cuDNN, numpy arrays, and planning only.
ENGINES = ("gpu", "cpu", "plan")


@dataclass(frozen=True)
class Case:
    """One problem: sizes, memory layouts, options and the seed of its data.

    Attributes:
        engine: ``"gpu"``, ``"cpu"`` or ``"plan"``.
        dtype: of q, k and v.
        d, dv, hq, hkv, sq, skv, b: the sizes; of packed sequences sq and skv are the maximum lengths.
        backward: whether the gradients are computed too.
        layouts: the memory layout of arrays, by name, in the notation of :mod:`.memory`; dense in Fortran order by default.
        options: the options of the call as literals; :mod:`.draw` documents each.
        seed: of the data.
        gpu: the name of the described GPU, for planning.

    >>> Case(sq=1, options={"causal": "bottom_right"})
    Case(sq=1, options={'causal': 'bottom_right'})
    """

    engine: str = "cpu"
    dtype: str = "float32"
    d: int = 8
    dv: int = 8
    hq: int = 1
    hkv: int = 1
    sq: int = 2
    skv: int = 2
    b: int = 1
    backward: bool = False
    layouts: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    gpu: str = ""

    def __repr__(self) -> str:
        changed = (f.name for f in fields(self) if getattr(self, f.name) != getattr(_DEFAULT, f.name))
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def with_(self, **changes: Any) -> Case:
        """The case with other values."""
        return replace(self, **changes)

    def without(self, *names: str) -> Case:
        """The case without some options, and without what needs them."""
        options = {name: value for name, value in self.options.items() if name not in names}
        for name, needed in REQUIRES.items():
            if needed not in options and needed in names:
                options.pop(name, None)
        return replace(self, options=options)

    @property
    def features(self) -> tuple[str, ...]:
        """What the case is counted under in the summary: its options, and other than default layouts."""
        return (*sorted(self.options), *(["layouts"] if self.layouts else []))

    def sentence(self) -> str:
        """The case in words."""
        kind = "forward and backward" if self.backward else "forward"
        where = {"gpu": "on the GPU", "cpu": "on the CPU engine", "plan": f"planned for {self.gpu}"}[self.engine]
        dims = f"head dim {self.d}" if self.d == self.dv else f"head dim {self.d} (values {self.dv})"
        heads = f"{self.hq} heads" if self.hq == self.hkv else f"{self.hq}/{self.hkv} heads"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items()) or "no option"
        layouts = "".join(f", {name} in layout {layout}" for name, layout in self.layouts.items())
        sizes = f"batch {self.b}, {heads}, {self.sq} queries, {self.skv} keys, {dims}"
        return f"{kind} {where}, {self.dtype}: {sizes}; {options}{layouts}"


_DEFAULT = Case()

#: Options of the gradients, and the option that each of them needs.
REQUIRES = {"return_dbias": "bias", "return_dsinks": "sinks", "return_dtensors": "score_mod"}


def parse(text: str) -> Case:
    """The case that a text describes; literals only, nothing is evaluated.

    Raises:
        ValueError: it is not the ``repr`` of a case.

    >>> parse("Case(sq=1, options={'causal': 'top_left'})").sq
    1
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "Case" or call.args:
            raise ValueError("it must have the form Case(name=value, ...)")
        values = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text!r} is not a case: {error}") from None
    known = {f.name for f in fields(Case)}
    if unknown := values.keys() - known:
        raise ValueError(f"a case has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    case = Case(**values)
    if case.engine not in ENGINES:
        raise ValueError(f"engine is {case.engine!r}; it must be one of {', '.join(ENGINES)}")
    return case
