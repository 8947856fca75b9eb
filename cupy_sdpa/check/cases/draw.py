"""Random cases: case ``number`` of a run depends only on the seed and the number.

The options of a case are literals. Their values:

==================  ================================================================================================
``scale``           a number
``causal``          ``"top_left"`` or ``"bottom_right"``
``window``          as in the call
``mask``            (axes, kind); axes is a string such as ``"k1h1"`` for the shape (Skv, 1, Hq, 1)
``bias``            (axes, dtype, kind)
``seq_lens_q``      kind of lengths: ``"random"``, ``"zero"``, ``"some_zero"``, ``"full"`` or ``"one"``; the same for
                    ``seq_lens_kv``
``paged``           the fields of :class:`~.case.Paged`
``packed``          the fields of :class:`~.case.Packed`
``alibi_slopes``    ``"usual"`` or ``"random"``
``softcap``         a number
``sinks``           ``"normal"`` or ``"high"``
``dropout``         the fields of :class:`~.case.Dropout`
``score_mod``       (name, dtype of the captured arrays), a function of :mod:`.functions`; the same for ``mask_mod``
``block_mask``      (kind, axes): ``"blocks"``, ``"pairs"``, ``"documents"`` or ``"prefix"``; axes as for ``mask``
``stats``           True or ``"max_sumexp"``
``fp8``             the dtype of q, k and v in FP8, whose values the arrays of the case have
``jvp``             the letters of the arrays with tangents, such as ``"qk"``: the call is ``attention_jvp``
``preallocated``    True: results are written to preallocated arrays
``bucket``          as in the call; the same for ``max_workspace``, ``deterministic``, ``return_dbias``,
                    ``return_dsinks`` and ``return_dtensors``
==================  ================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import fp8
from .case import REQUIRES, Case, Dropout, Packed, Paged
from .functions import DTYPES, MASKS, SCORES


class Limits(NamedTuple):
    """The largest sizes of a case, which bound the time of the reference.

    Attributes:
        scores: elements of the scores, B Hq Sq Skv.
        elements: elements of an array, B H S D.
    """

    scores: int
    elements: int


#: The size limits of each engine.
LIMITS = {
    "gpu": Limits(1_500_000, 5_000_000),
    "cpu": Limits(200_000, 1_000_000),
    "plan": Limits(2_000_000_000, 50_000_000),
}
#: Numbers of keys with a single query; 40 % of those cases have one of these.
DECODE_KEYS = (1, 2, 64, 127, 128, 129, 163, 255, 256, 257, 276, 384, 1023, 1024, 1025, 4096)
#: The described GPUs that problems are planned for. The H200, whose description was read from a real GPU, is more frequent.
GPUS = ("h200", "h200", "a100", "b200", "l40s", "rtx5090", "a10")


class Sampler:
    """Draws the parts of one case.

    Args:
        rng: the random number generator.
        engine: the engine of the case.
        fixed_lengths: Sq and Skv; None to draw them.
    """

    def __init__(self, rng: np.random.Generator, engine: str, fixed_lengths: tuple[int, int] | None = None) -> None:
        self.rng, self.engine, self.fixed_lengths = rng, engine, fixed_lengths
        self.sizes: dict[str, int] = {}
        self.options: dict[str, Any] = {}
        self.names: set[str] = set()
        self.backward = False

    def pick(self, *choices: Any) -> Any:
        """Pick one of the choices, with equal probability."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return bool(self.rng.random() < p)

    def integer(self, maximum: int) -> int:
        """A random integer from 0 to the maximum, inclusive."""
        return int(self.rng.integers(maximum + 1))

    def log_uniform(self, minimum: int, maximum: int) -> int:
        """A random integer, uniform in its logarithm."""
        value = np.exp(self.rng.uniform(np.log(minimum), np.log(maximum + 0.5)))
        return min(maximum, max(minimum, round(float(value))))

    def length(self) -> int:
        """A sequence length: very small, near a multiple of the tile sizes of kernels, or arbitrary."""
        return int(
            self.pick(
                self.pick(1, 2, 3, 7, 8, 17),
                64 * self.pick(1, 2, 3, 4) + self.pick(-1, 0, 1),
                128 * self.pick(1, 2, 3, 4, 6) + self.pick(-1, 0, 1),
                self.log_uniform(2, 600),
            )
        )

    def lengths(self) -> tuple[int, int]:
        """Draw Sq and Skv."""
        if self.fixed_lengths:
            return self.fixed_lengths
        kind = self.rng.random()
        if kind < 0.3:  # decoding
            skv = self.pick(*DECODE_KEYS) if self.chance(0.4) else self.log_uniform(1, 70000 if self.chance(0.3) else 2000)
            return 1, int(skv)
        if kind < 0.48:
            return self.pick(0, 1, 2), self.pick(0, 1, 2)
        if kind < 0.55:
            few, many = int(self.pick(0, 1, 2)), self.length()
            return (few, many) if self.chance(0.5) else (many, few)
        sq = self.length()
        return sq, sq if self.chance(0.4) else self.length()

    def head_dim(self) -> int:
        """A head dim: a multiple of 8 up to 256; on the CPU engine up to 128, and also other numbers."""
        if self.engine == "cpu" and self.chance(0.5):
            return int(self.pick(1, 2, 3, 5, 12, 33))
        maximum = self.pick(64, 128, 128, 128, 256) if self.engine != "cpu" else self.pick(32, 64, 128)
        return 8 * (1 + self.integer(maximum // 8 - 1))

    def draw_sizes(self) -> None:
        """Draw all sizes, and halve them until they are within :data:`LIMITS`."""
        sq, skv = self.lengths()
        d = self.head_dim()
        dv = d if self.chance(0.6) else self.head_dim()
        hkv, group = self.pick(1, 1, 2, 3, 4), self.pick(1, 1, 2, 3, 4, 6, 8)
        b = self.pick(1, 1, 2, 3, 5, 8)
        if self.chance(0.02):
            b, hkv, dv = self.pick((0, hkv, dv), (b, 0, dv), (b, hkv, 0))
        limits = LIMITS[self.engine]
        while b * hkv * group * sq * skv > limits.scores or max(sq * hkv * group, skv * hkv) * b * max(d, dv) > limits.elements:
            if (largest := max(b, hkv, group)) > 1:
                if b == largest:
                    b = (b + 1) // 2
                elif group == largest:
                    group = (group + 1) // 2
                else:
                    hkv = (hkv + 1) // 2
            elif max(d, dv) > 64:
                d, dv = min(d, 64), min(dv, 64)
            elif sq > 1 and sq >= skv:
                sq = (sq + 1) // 2
            else:
                skv = (skv + 1) // 2
        self.sizes = {"d": d, "dv": dv, "hq": hkv * group, "hkv": hkv, "sq": sq, "skv": skv, "b": b}

    def axes(self) -> str:
        """The axes of a mask or bias: keys, queries, heads, batch; each of full length or length 1."""
        return "".join(letter if self.chance(0.5) else "1" for letter in "kqhb")

    def float_dtype(self) -> str:
        """The dtype of a floating-point array."""
        return str(self.pick("float16", "bfloat16", "float32", *(["float64"] if self.engine == "cpu" else [])))

    def function(self, option: str) -> tuple[str, str]:
        """The name of a score or mask function, and the dtype of its captured arrays."""
        table = SCORES if option == "score_mod" else MASKS
        names = list(table)
        if option == "score_mod" and "return_dtensors" in self.options:
            names = [name for name in names if table[name].tensors and table[name].kind in ("float", "number")]
        if self.sizes["b"] * self.sizes["hq"] * self.sizes["sq"] * self.sizes["skv"] > 4_000_000:
            names = [name for name in names if all(len(axes) < 3 for axes in table[name].tensors.values())]
        function = table[name := self.pick(*names)]
        if not function.tensors:
            return name, ""
        kinds = [kind for kind in DTYPES[function.kind] if kind not in ("float64", "int64") or self.engine == "cpu"]
        if "return_dtensors" in self.options:
            kinds = [kind for kind in kinds if "float" in kind] if option == "score_mod" else kinds
        return name, str(self.pick(*kinds))

    def window(self) -> tuple[Any, ...]:
        """A window; with ``causal`` it has the same alignment."""
        sides = [self.pick(None, 0, 1, self.integer(20), self.integer(300)) for _ in range(2)]
        alignment = self.options.get("causal") or self.pick("top_left", "bottom_right")
        return (*sides, alignment)

    def layout(self, name: str) -> str:
        """A memory layout in the notation of :mod:`.memory`."""
        packed = "packed" in self.options
        letters = "hs" if packed else "hsb"
        order = "".join(self.rng.permutation(list(letters)))
        if name == "stats":
            return "hs" if packed else "shb"
        text = f"d{order}"
        if self.engine == "cpu" and self.chance(0.2):
            text = "".join(self.rng.permutation(list(text)))
        for letter in self.rng.permutation(list(text)):
            kind = self.rng.random()
            if kind < 0.2:
                text += f"+{letter}"
            elif kind < 0.35 and letter != "d":
                text += f"*{letter}"
            elif kind < 0.4 and self.engine == "cpu":
                text += f"-{letter}"
        return text

    def layouts(self) -> dict[str, str]:
        """Layouts of some of the arrays."""
        same_sizes = self.sizes["sq"] == self.sizes["skv"] and self.sizes["d"] == self.sizes["dv"]
        if same_sizes and not {"packed", "paged"} & self.names and self.chance(0.15):
            return dict.fromkeys("qkv", "qkv")
        names = (
            ["q", *([] if "paged" in self.names else ["k", "v"])]
            + ["dout"] * self.backward
            + [f"t{letter}" for letter in self.options.get("jvp", "")]
            + (self.results() if "preallocated" in self.options else [])
        )
        layouts = {name: self.layout(name) for name in names if self.chance(0.5)}
        return layouts or {"q": self.layout("q")}

    def results(self) -> list[str]:
        """The results that may have a layout if they are preallocated."""
        return ["out", *(["dq", "dk", "dv"] if self.backward else []), *(["jvp"] if "jvp" in self.names else [])]


def _bias(sampler: Sampler) -> Any:
    kinds = ("normal", "normal", "normal", "inf", "inf_rows", "min", "min_rows")
    return sampler.axes(), sampler.float_dtype(), sampler.pick(*kinds)


def _lengths(sampler: Sampler) -> Any:
    return sampler.pick("random", "random", "random", "some_zero", "some_zero", "zero", "full", "one")


def _paged(sampler: Sampler) -> Any:
    """Draw pages; Sq is often small, and Skv becomes a multiple of the page size."""
    sizes, names = sampler.sizes, sampler.names
    pages = [2**n for n in range(8)] if sampler.engine != "cpu" else [1, 2, 3, 5, 8, 16, 48, 64, 100, 128]
    if sampler.fixed_lengths:
        page = sampler.pick(*(page for page in pages if sizes["skv"] % page == 0))
    else:
        page = sampler.pick(*(page for page in pages if page <= max(16, 2 * sizes["skv"])))
        sizes["skv"] = -(-sizes["skv"] // page) * page
        if sizes["sq"] and sampler.chance(0.75):
            sizes["sq"] = sampler.pick(1, 2, 3, 4, 5, 8)
        while sizes["b"] * sizes["hq"] * sizes["sq"] * sizes["skv"] > LIMITS[sampler.engine].scores and sizes["sq"] > 1:
            sizes["sq"] //= 2
    rows = sizes["hq"] // max(sizes["hkv"], 1) * sizes["sq"]
    split = rows <= 128 and not names & NOT_SPLIT and not (rows == 1 and names & {"causal", "window"})
    num_splits = sampler.pick(0, 1, 2, 3, 7, 40) if split else 0
    order, rest = sampler.pick("pages", "heads"), sampler.pick("large", "negative", "unowned", "mixed")
    return tuple(Paged(page, order, _lengths(sampler), num_splits, rest, sampler.chance(0.3), sampler.chance(0.3)))


def _stats(sampler: Sampler) -> Any:
    p = sampler.options.get("paged")
    if sampler.names & {"block_mask", "jvp", "fp8"} or (p and Paged(*p).num_splits):
        return True
    return sampler.pick(True, "max_sumexp")


def _packed(sampler: Sampler) -> Any:
    same = sampler.sizes["sq"] == sampler.sizes["skv"] and sampler.chance(0.5)
    kind_q = _lengths(sampler)
    excess = sampler.pick(0, 0, 0, 3) if sampler.engine == "gpu" else 0
    before, after = sampler.pick((0, 0), (0, 0), (0, 5), (7, 0), (16, 100))
    kind_kv = "same" if same else _lengths(sampler)
    return tuple(Packed(kind_q, kind_kv, before, after, excess, sampler.pick("int32", "int64")))


def _dropout(sampler: Sampler) -> Any:
    source = sampler.pick("seed", "array", *(["mask"] if sampler.engine == "cpu" else []))
    return tuple(Dropout(sampler.pick(0.1, 0.3, 0.5, 0.9), source, sampler.integer(2**31), sampler.pick(0, 0, 4, 1000)))


#: How each option is drawn.
OPTIONS: dict[str, Callable[[Sampler], Any]] = {
    "scale": lambda sampler: sampler.pick(*(() if "fp8" in sampler.names else (0.0, -0.1, -0.3)), 0.05, 0.3, 1.0),
    "causal": lambda sampler: sampler.pick("top_left", "bottom_right"),
    "window": Sampler.window,
    "mask": lambda s: (s.axes(), s.pick("random", "random", "rows", "keys", "none", "all")),
    "bias": _bias,
    "seq_lens_q": _lengths,
    "seq_lens_kv": _lengths,
    "paged": _paged,
    "packed": _packed,
    "alibi_slopes": lambda sampler: sampler.pick("usual", "random"),
    "softcap": lambda sampler: sampler.pick(0.5, 2.0, 15.0, 50.0),
    "sinks": lambda sampler: sampler.pick("normal", "high"),
    "dropout": _dropout,
    "score_mod": lambda sampler: sampler.function("score_mod"),
    "mask_mod": lambda sampler: sampler.function("mask_mod"),
    "block_mask": lambda s: (s.pick("blocks", "pairs", "documents", "prefix"), f"kq{s.pick(*'h11')}{s.pick(*'b11')}"),
    "stats": _stats,
    **dict.fromkeys(("deterministic", "return_dbias", "return_dsinks", "return_dtensors"), lambda sampler: True),
    "fp8": lambda sampler: sampler.pick("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"),
    "jvp": lambda sampler: sampler.pick("qkv", "qkv", "qkv", "q", "k", "v", "qk", "kv"),
    "preallocated": lambda sampler: True,
    "bucket": lambda sampler: sampler.pick(16, 128, "power_of_two"),
    "max_workspace": lambda sampler: sampler.pick(1 << 24, 1 << 30),
}
#: The options that can be combined with a block mask, and pairs of options that cannot be combined.
WITH_BLOCK_MASK = {"block_mask", "scale", "softcap", "sinks", "stats", "deterministic", "preallocated", "max_workspace"}
_EXCLUDED = {"packed": ("seq_lens_q", "seq_lens_kv"), "paged": ("seq_lens_kv", "bucket", "jvp", *REQUIRES), "jvp": REQUIRES}
_EXCLUDED |= {"block_mask": tuple(OPTIONS.keys() - WITH_BLOCK_MASK), "fp8": tuple(OPTIONS.keys() - fp8.COMBINED)}
CONFLICTS = {frozenset((name, other)) for name, others in _EXCLUDED.items() for other in others}
#: Options that cannot be combined with ``num_splits``.
NOT_SPLIT = {"packed", "bias", "mask", "alibi_slopes", "dropout", "score_mod", "mask_mod"}
#: Options that cannot be combined with bucket and packed sequences: their arrays would need the rounded lengths.
NOT_IN_PACKED_BUCKETS = ("mask", "bias", "dropout", "score_mod", "mask_mod")


def is_valid(names: set[str]) -> bool:
    """Whether the interface accepts a combination of options.

    >>> is_valid({"packed", "seq_lens_q"}), is_valid({"causal", "window"})
    (False, True)
    """
    if {"packed", "bucket"} <= names and names & {*NOT_IN_PACKED_BUCKETS, *REQUIRES}:
        return not names & {*NOT_IN_PACKED_BUCKETS, "return_dbias", "return_dtensors"}
    return not any(pair <= names for pair in CONFLICTS)


def _with_required(names: set[str]) -> set[str]:
    """The given options and the options that they require."""
    return names | {REQUIRES[name] for name in names if name in REQUIRES}


#: Every pair of options that can be combined.
PAIRS = tuple(pair for pair in itertools.combinations(OPTIONS, 2) if is_valid(_with_required({*pair})))


def draw(seed: int, number: int, engine: str, lengths: tuple[int, int] | None = None) -> Case:
    """Draw case ``number`` of the run with a seed; ``1.5 len(PAIRS)`` consecutive cases contain every pair of options.

    Args:
        seed: the seed of the run.
        number: the number of the case.
        engine: the engine of the case.
        lengths: Sq and Skv; None to draw them.

    >>> draw(1, 2, "cpu") == draw(1, 2, "cpu")
    True
    """
    sampler = Sampler(np.random.default_rng([seed, number, *engine.encode()]), engine, lengths)
    sampler.draw_sizes()
    return _draw_case(sampler, _option_names(sampler, seed, number), number)


def draw_options(names: set[str], number: int, engine: str, lengths: tuple[int, int] | None = None) -> Case:
    """Draw a case with certain options, and the options that they require."""
    sampler = Sampler(np.random.default_rng([number, *engine.encode()]), engine, lengths)
    sampler.draw_sizes()
    return _draw_case(sampler, names, number)


def _draw_case(sampler: Sampler, names: set[str], number: int) -> Case:
    """Draw the values of the options, the passes, layouts and dtype; the sizes are drawn already."""
    for name in names & REQUIRES.keys():
        sampler.options[name] = True  # the choice of a function depends on these
    required = sampler.names = _with_required(names - {"block_mask"} if sampler.engine == "plan" else names)
    if "fp8" in required and sampler.engine != "cpu" and sampler.chance(0.9):
        fp8.fit(sampler.sizes, paged="paged" in required, lengths=not sampler.fixed_lengths)
    for name in OPTIONS:
        if name in required:
            sampler.options[name] = OPTIONS[name](sampler)
    options = {name: sampler.options[name] for name in OPTIONS if name in required}
    sampler.backward = not {"paged", "jvp", "fp8"} & options.keys() and (
        any(name in options for name in (*REQUIRES, "deterministic")) or sampler.chance(0.45)
    )
    layouts = sampler.layouts() if sampler.chance(0.4) else {}
    dtypes = ["float16", "bfloat16"]
    if sampler.engine == "cpu":
        dtypes.append("float32")
        if not {"block_mask", "fp8"} & options.keys():  # the parts of a block mask are merged by float32 statistics
            dtypes.append("float64")
    gpus = () if sampler.engine != "plan" else fp8.GPUS if "fp8" in options else GPUS
    return Case(
        sampler.engine, sampler.pick(*dtypes), **sampler.sizes, backward=sampler.backward, layouts=layouts,
        options=options, seed=number, gpu=gpus[number % len(gpus)] if gpus else "",
    )  # fmt: skip


def _option_names(sampler: Sampler, seed: int, number: int) -> set[str]:
    """The options of a case: in two of three cases the next pair in the order of the seed, and sometimes one more."""
    if number % 3 == 0:
        names = {name for name in OPTIONS if sampler.chance(0.04)}
    else:
        order = np.random.default_rng([seed, 1]).permutation(len(PAIRS))
        pair = set(PAIRS[order[(number - number // 3 - 1) % len(PAIRS)]])
        names = pair | ({sampler.pick(*OPTIONS)} if sampler.chance(0.3) else set())
        if not is_valid(_with_required(names)):
            names = pair
    if "paged" in names and sampler.chance(0.5):  # as in decoding; the keys can be split
        more = names | {sampler.pick("causal", "window"), *(["seq_lens_q"] if sampler.chance(0.5) else [])}
        names = more if is_valid(_with_required(more)) else names
    return names if is_valid(_with_required(names)) else set()
