"""A problem of the self-test as literals, and its outcome. :func:`parse` reads its ``repr``, which is Python code.

The options of a case are literals. Their values:

==================  ================================================================================================
``scale``           a number
``head_scales``     ``"random"``, a scale for each head; ``"zero"``: the first is 0
``causal``          ``"top_left"`` or ``"bottom_right"``
``window``          as in the call
``mask``            (axes, kind); axes is a string such as ``"k1h1"`` for the shape (Skv, 1, Hq, 1)
``bias``            (axes, dtype, kind)
``bias_repeats``    a number; the call gets its greatest common divisor with the batch, by which the axis ``"b"`` of the bias is
                    shorter; without this axis the call gets the batch
``seq_lens_q``      kind of lengths: ``"random"``, ``"zero"``, ``"some_zero"``, ``"full"`` or ``"one"``; the same for
                    ``seq_lens_kv``
``paged``           the fields of :class:`Paged`
``packed``          the fields of :class:`Packed`
``alibi_slopes``    ``"usual"`` or ``"random"``
``softcap``         a number
``sinks``           ``"normal"`` or ``"high"``
``dropout``         the fields of :class:`Dropout`
``score_mod``       (name, dtype of the captured arrays), a function of :mod:`.functions`; the same for ``mask_mod``
``tree``            how the tree of the newest tokens is passed to ``tree_mask``: ``"parents"``, ``"device"`` or ``"mask"``; or
                    ``"one"``, the parents of one tree for all sequences
``block_mask``      (kind, axes): ``"blocks"``, ``"pairs"``, ``"documents"``, ``"prefix"``, ``"segments"`` or ``"window"``;
                    axes as for ``mask``
``stats``           True or ``"max_sumexp"``
``fp8``             the dtype of q, k and v in FP8, whose values the arrays of the case have
``mean``            the largest magnitude of the mean of v in FP8, which the array v of the case does not contain
``parallel``        (method, members): the call is made by a group of threads
``shared_prefix``   the number of pages that all sequences share; the call is ``shared_prefix_attention``
``merge``           the number of parts of the keys, whose results are merged
``cache``           the fields of :class:`Cache`: the keys are appended to a ``KVCache``
``weight_sums``     ``"query heads"`` or ``"key heads"``: the call is ``weight_sums``, for the sums of these heads
``weight_entropy``  True: the call is ``weight_entropy``
``jvp``             the letters of the arrays with tangents, such as ``"qk"``: the call is ``attention_jvp``; with ``stats``
                    also for the derivative of the log-sum-exp
``dstats``          True: the backward pass also gets a gradient of the log-sum-exp; ``"alone"``: only this
``preallocated``    True: results are written to preallocated arrays
``offset``          a number that is added to the products of all queries and keys, by the first element of the head dim
``bucket``          as in the call; the same for ``max_workspace``, ``deterministic``, ``return_dbias``,
                    ``return_dsinks``, ``return_dscale`` and ``return_dtensors``
==================  ================================================================================================
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from .weight_options import ROWS

#: The engines of a case: CuPy arrays through cuDNN, numpy arrays on the CPU engine, CuPy arrays with ``engine="cupy"``, or
#: planning without execution.
ENGINES = ("gpu", "cpu", "cupy", "plan")
#: The sizes of a case.
SIZES = ("d", "dv", "hq", "hkv", "sq", "skv", "b")
#: The options that return another gradient, and the option that each requires.
GRADIENTS = {f"return_d{name}": name for name, row in ROWS.items() if row.slope is not None}
GRADIENTS |= {"return_dsinks": "sinks", "return_dscale": "head_scales", "return_dtensors": "score_mod"}
#: The options that require another one.
REQUIRES = GRADIENTS | {"shared_prefix": "paged", "mean": "fp8", "bias_repeats": "bias"}


class Packed(NamedTuple):
    """The value of the option ``packed``: varlen (packed) sequences. With ``paged`` only the queries are packed.

    Attributes:
        kind_q, kind_kv: the kind of lengths of the queries and of the keys; ``"same"`` for equal lengths.
        before, after: positions before the first and after the last sequence.
        excess: positions by which sequences may exceed ``max_seqlen``.
        dtype: the dtype of ``cu_seqlens``.
    """

    kind_q: str
    kind_kv: str
    before: int
    after: int
    excess: int
    dtype: str


class Paged(NamedTuple):
    """The value of the option ``paged``: keys and values in pages, with a page table.

    Attributes:
        page: the page size; Skv is a multiple of it.
        order: the memory order of the pages: ``"pages"`` for (D, page size, Hkv, pages), ``"heads"`` for (D, Hkv, page size,
            pages).
        lengths: the kind of lengths of the keys.
        num_splits: the option ``num_splits``; 0 for None.
        rest: the table entries after the lengths: ``"large"`` for 2**30, ``"negative"`` for -1, ``"unowned"`` for pages of NaN,
            ``"mixed"`` for all of these.
        shared: whether sequences share their first pages.
        moved: whether the two sets of values differ in the places of the pages only.
    """

    page: int
    order: str
    lengths: str
    num_splits: int
    rest: str
    shared: bool
    moved: bool


class Cache(NamedTuple):
    """The value of the option ``cache``: keys and values that are appended to a :class:`cupy_sdpa.KVCache`.

    Attributes:
        page: the page size.
        lengths: the kind of lengths of the keys.
        steps: the number of appends.
        event: ``"truncate"``: tokens are appended and removed before the last append; ``"release"``: the sequences had other
            tokens before; ``"fork"``: every sequence begins as a copy of sequence 0; ``"beams"``: the same by ``reorder``;
            ``""``: none of these.
        packed: whether new tokens are packed.
        rope: the form of a rotation of queries and keys, ``"half"`` or ``"interleaved"``; ``""`` for none.
        rope_dim: the number of channels that are rotated.
    """

    page: int
    lengths: str
    steps: int
    event: str
    packed: bool
    rope: str = ""
    rope_dim: int = 0

    @property
    def shares(self) -> bool:
        """Whether every sequence begins as a copy of sequence 0."""
        return self.event in ("fork", "beams")


class Dropout(NamedTuple):
    """The value of the option ``dropout``.

    Attributes:
        p: the probability of dropping a weight.
        source: ``"seed"`` for seed and offset as integers, ``"array"`` for arrays, ``"mask"`` for a ``dropout_mask``.
        seed, offset: the seed and offset of the random numbers.
    """

    p: float
    source: str
    seed: int
    offset: int


@dataclass(frozen=True)
class Case:
    """One problem: sizes, memory layouts, options and the seed of its values.

    Attributes:
        engine: ``"gpu"``, ``"cpu"``, ``"cupy"`` or ``"plan"``.
        dtype: the dtype of q, k and v.
        d, dv, hq, hkv, sq, skv, b: the sizes; with packed sequences sq and skv are the maximum lengths.
        backward: whether gradients are computed.
        layouts: memory layouts by array name, in the notation of :mod:`.memory`; dense Fortran order by default.
        options: the options of the call as literals, see above.
        seed: the seed of the values.
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
        """Return a copy with other values."""
        return replace(self, **changes)

    def without(self, *names: str) -> Case:
        """Return a copy without some options, and without the options that require them."""
        options = {name: value for name, value in self.options.items() if name not in names}
        for name, required in REQUIRES.items():
            if required not in options and required in names:
                options.pop(name, None)
        return replace(self, options=options)

    @property
    def packed(self) -> Packed | None:
        """The option ``packed``, or None."""
        return Packed(*self.options["packed"]) if "packed" in self.options else None

    @property
    def paged(self) -> Paged | None:
        """The option ``paged``, or None."""
        return Paged(*self.options["paged"]) if "paged" in self.options else None

    @property
    def cache(self) -> Cache | None:
        """The option ``cache``, or None."""
        return Cache(*self.options["cache"]) if "cache" in self.options else None

    @property
    def shared_keys(self) -> int:
        """The number of keys that all sequences share through the option ``shared_prefix``."""
        return min(self.options["shared_prefix"], self.skv // self.paged.page) * self.paged.page if self.paged else 0

    @property
    def dropout(self) -> Dropout | None:
        """The option ``dropout``, or None."""
        return Dropout(*self.options["dropout"]) if "dropout" in self.options else None

    @property
    def tangents(self) -> dict[str, str]:
        """The names of the arguments of ``attention_jvp`` that are given, and of their arrays in the case."""
        return {f"d{letter}": f"t{letter}" for letter in self.options.get("jvp", "")}

    @property
    def is_interpreted(self) -> bool:
        """Whether the interpreter computes it: in all dtypes, and without the limits of cuDNN."""
        return self.engine in ("cpu", "cupy")

    @property
    def features(self) -> tuple[str, ...]:
        """The names under which the summary counts the case: its options, and ``"layouts"`` if one is not the default."""
        return (*sorted(self.options), *(["layouts"] if self.layouts else []))

    def describe(self) -> str:
        """Return one sentence with the passes, engine, dtype, sizes, options and layouts."""
        passes = "forward and backward" if self.backward else "derivative" if self.tangents else "forward"
        engines = {"gpu": "on the GPU", "cpu": "on the CPU engine", "cupy": "with CuPy's operations"}
        engine = engines.get(self.engine, f"planned for {self.gpu}")
        dims = f"head dim {self.d}" if self.d == self.dv else f"head dim {self.d} (values {self.dv})"
        heads = f"{self.hq} heads" if self.hq == self.hkv else f"{self.hq}/{self.hkv} heads"
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items()) or "no option"
        layouts = "".join(f", {name} in layout {layout}" for name, layout in self.layouts.items())
        sizes = f"batch {self.b}, {heads}, {self.sq} queries, {self.skv} keys, {dims}"
        return f"{passes} {engine}, {self.dtype}: {sizes}; {options}{layouts}"


_DEFAULT = Case()


@dataclass
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: ``"passed"``, ``"refused"``, ``"wrong"``, ``"exception"``, ``"crash"`` or ``"hang"``.
        message: the error, or the reason of the refusal.
        cause: the names of the wrong results, the type and line of the exception, the signal, or the rule of the refusal.
            Findings of one kind and cause are probably the same bug.
        calls: the number of calls.
        fatal: whether the process must be replaced.
    """

    kind: str = "passed"
    message: str = ""
    cause: str = ""
    calls: int = 0
    fatal: bool = False

    @property
    def is_finding(self) -> bool:
        """Whether the case failed."""
        return self.kind not in ("passed", "refused")

    def set(self, kind: str, message: str, cause: str) -> None:
        """Set the kind, message and cause."""
        self.kind, self.message, self.cause = kind, message, cause


def parse(text: str) -> Case:
    """Parse the ``repr`` of a case. Values are literals; no code is evaluated.

    Raises:
        ValueError: the text is not the ``repr`` of a case.

    >>> parse("Case(sq=1, options={'causal': 'top_left'})").sq
    1
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "Case" or call.args:
            raise ValueError("it must have the form Case(name=value, ...)")
        values = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{text!r} is not a case: {error}") from None
    names = {f.name for f in fields(Case)}
    if unknown := values.keys() - names:
        raise ValueError(f"a case has no {', '.join(sorted(unknown))}; use {', '.join(sorted(names))}")
    case = Case(**values)
    if case.engine not in ENGINES:
        raise ValueError(f"engine is {case.engine!r}; it must be one of {', '.join(ENGINES)}")
    return case
