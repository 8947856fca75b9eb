"""Random cases: case number k of a run follows from the seed and k alone.

The options of a case are literals. Their values:

==================  ================================================================================================
``scale``           a number
``causal``          ``"top_left"`` or ``"bottom_right"``
``window``          as for the call
``mask``            (axes, kind): axes is a string such as ``"k1h1"`` for the shape (Skv, 1, Hq, 1)
``bias``            (axes, dtype, kind)
``seq_lens_q``      kind of lengths: ``"random"``, ``"zero"``, ``"some_zero"``, ``"full"``; the same for ``seq_lens_kv``
``packed``          (kind of lengths of the queries, of the keys, positions before the first sequence, after the last one,
                    positions by which sequences may exceed ``max_seqlen``, dtype of ``cu_seqlens``)
``alibi_slopes``    ``"usual"`` or ``"random"``
``softcap``         a number
``sinks``           ``"normal"`` or ``"high"``
``dropout``         (p, ``"seed"`` or ``"array"`` or ``"mask"``, seed, offset)
``score_mod``       (name, dtype of its arrays), of :mod:`.functions`; the same for ``mask_mod``
``stats``           True or ``"max_sumexp"``
``preallocated``    True: results are written into given arrays
``bucket``          as for the call; the same for ``max_workspace``, ``deterministic``, ``return_dbias``,
                    ``return_dsinks`` and ``return_dtensors``
==================  ================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from .case import REQUIRES, Case
from .functions import DTYPES, MASKS, SCORES

#: The most scores (B Hq Sq Skv) and elements of an array (B H S D) of a case, by engine: they bound the reference's time.
MOST = {"gpu": (1_500_000, 5_000_000), "cpu": (200_000, 1_000_000), "plan": (2_000_000_000, 50_000_000)}
#: Numbers of keys for a single query; a third of those cases have one of these.
DECODE_KEYS = (1, 2, 64, 127, 128, 129, 163, 255, 256, 257, 276, 384, 1023, 1024, 1025, 4096)
#: The described GPUs that problems are planned for, the one that was read off a card more often.
GPUS = ("h200", "h200", "a100", "b200", "l40s", "rtx5090")


class Draw:
    """Draws the parts of one case.

    Args:
        rng: the source of its randomness.
        engine: of the case.
        fixed: Sq and Skv; None to draw them.
    """

    def __init__(self, rng: np.random.Generator, engine: str, fixed: tuple[int, int] | None = None) -> None:
        self.rng, self.engine, self.fixed = rng, engine, fixed
        self.sizes: dict[str, int] = {}
        self.options: dict[str, Any] = {}
        self.backward = False

    def pick(self, *choices: Any) -> Any:
        """One of some."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, p: float) -> bool:
        """True with a probability."""
        return bool(self.rng.random() < p)

    def below(self, n: int) -> int:
        """A whole number from 0 to n, inclusive."""
        return int(self.rng.integers(n + 1))

    def log_uniform(self, least: int, most: int) -> int:
        """A whole number, small ones as likely as large ones."""
        return min(most, max(least, round(float(np.exp(self.rng.uniform(np.log(least), np.log(most + 0.5)))))))

    def length(self) -> int:
        """A length of a sequence: tiny, near a multiple of the kernels' tiles, or any."""
        return int(
            self.pick(
                self.pick(1, 2, 3, 7, 8, 17),
                64 * self.pick(1, 2, 3, 4) + self.pick(-1, 0, 1),
                128 * self.pick(1, 2, 3, 4, 6) + self.pick(-1, 0, 1),
                self.log_uniform(2, 600),
            )
        )

    def lengths(self) -> tuple[int, int]:
        """Sq and Skv."""
        if self.fixed:
            return self.fixed
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
        """A head dim: a multiple of 8 up to the limit; on the CPU any."""
        if self.engine == "cpu" and self.chance(0.5):
            return int(self.pick(1, 2, 3, 5, 12, 33))
        most = self.pick(64, 128, 128, 128, 256) if self.engine != "cpu" else self.pick(32, 64, 128)
        return 8 * (1 + self.below(most // 8 - 1))

    def draw_sizes(self) -> None:
        """All sizes, within :data:`MOST`."""
        sq, skv = self.lengths()
        d = self.head_dim()
        dv = d if self.chance(0.6) else self.head_dim()
        hkv, group = self.pick(1, 1, 2, 3, 4), self.pick(1, 1, 2, 3, 4, 6, 8)
        b = self.pick(1, 1, 2, 3, 5, 8)
        if self.chance(0.02):
            b, hkv, dv = self.pick((0, hkv, dv), (b, 0, dv), (b, hkv, 0))
        scores, elements = MOST[self.engine]
        while b * hkv * group * sq * skv > scores or max(sq * hkv * group, skv * hkv) * b * max(d, dv) > elements:
            if max(b, hkv, group) > 1:
                largest = max(b, hkv, group)
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
        """The axes that a mask or a bias has, of keys, queries, heads and batch."""
        return "".join(letter if self.chance(0.5) else "1" for letter in "kqhb")

    def float_dtype(self) -> str:
        """A dtype of an array of floating-point numbers."""
        return str(self.pick("float16", "bfloat16", "float32", *(["float64"] if self.engine == "cpu" else [])))

    def function(self, option: str) -> tuple[str, str]:
        """A function's name and the dtype of its arrays."""
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
        """A window; its corner is that of ``causal`` where both are given."""
        sides = [self.pick(None, 0, 1, self.below(20), self.below(300)) for _ in range(2)]
        corner = self.options.get("causal") or self.pick("top_left", "bottom_right")
        return (*sides, corner)

    def layout(self, name: str) -> str:
        """A memory layout, see :mod:`.memory`."""
        packed, stats = "packed" in self.options, name == "stats"
        letters = "hs" if packed else "hsb"
        order = "".join(self.rng.permutation(list(letters)))
        if stats:
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
        """The layouts of some arrays."""
        alike = self.sizes["sq"] == self.sizes["skv"] and self.sizes["d"] == self.sizes["dv"]
        if alike and "packed" not in self.options and self.chance(0.15):
            return dict.fromkeys("qkv", "qkv")
        names = ["q", "k", "v"] + ["dout"] * self.backward + (self.results() if "preallocated" in self.options else [])
        chosen = {name: self.layout(name) for name in names if self.chance(0.5)}
        return chosen or {"q": self.layout("q")}

    def results(self) -> list[str]:
        """The results that may be preallocated."""
        return ["out", *(["dq", "dk", "dv"] if self.backward else [])]


def _mask(draw: Draw) -> Any:
    return draw.axes(), draw.pick("random", "random", "rows", "keys", "none", "all")


def _bias(draw: Draw) -> Any:
    return draw.axes(), draw.float_dtype(), draw.pick("normal", "normal", "normal", "inf", "inf_rows", "min", "min_rows")


def _lengths(draw: Draw) -> Any:
    return draw.pick("random", "random", "random", "some_zero", "some_zero", "zero", "full", "one")


def _packed(draw: Draw) -> Any:
    same = draw.sizes["sq"] == draw.sizes["skv"] and draw.chance(0.5)
    kind = _lengths(draw)
    over = draw.pick(0, 0, 0, 3) if draw.engine == "gpu" else 0
    ends = draw.pick((0, 0), (0, 0), (0, 5), (7, 0), (16, 100))
    return kind, "same" if same else _lengths(draw), *ends, over, draw.pick("int32", "int64")


def _dropout(draw: Draw) -> Any:
    how = draw.pick("seed", "array", *(["mask"] if draw.engine == "cpu" else []))
    return draw.pick(0.1, 0.3, 0.5, 0.9), how, draw.below(2**31), draw.pick(0, 0, 4, 1000)


#: How each option is drawn.
OPTIONS: dict[str, Callable[[Draw], Any]] = {
    "scale": lambda d: d.pick(0.0, 0.05, 0.3, 1.0, -0.1, -0.3),
    "causal": lambda d: d.pick("top_left", "bottom_right"),
    "window": Draw.window,
    "mask": _mask,
    "bias": _bias,
    "seq_lens_q": _lengths,
    "seq_lens_kv": _lengths,
    "packed": _packed,
    "alibi_slopes": lambda d: d.pick("usual", "random"),
    "softcap": lambda d: d.pick(0.5, 2.0, 15.0, 50.0),
    "sinks": lambda d: d.pick("normal", "high"),
    "dropout": _dropout,
    "score_mod": lambda d: d.function("score_mod"),
    "mask_mod": lambda d: d.function("mask_mod"),
    "stats": lambda d: d.pick(True, "max_sumexp"),
    "deterministic": lambda d: True,
    "return_dbias": lambda d: True,
    "return_dsinks": lambda d: True,
    "return_dtensors": lambda d: True,
    "preallocated": lambda d: True,
    "bucket": lambda d: d.pick(16, 128, "power_of_two"),
    "max_workspace": lambda d: d.pick(1 << 24, 1 << 30),
}
#: Pairs of options that no call may have.
CONFLICTS = {frozenset(pair) for pair in (("packed", "seq_lens_q"), ("packed", "seq_lens_kv"))}
#: With bucket and packed sequences the arrays of these would have to be as long as the rounded lengths.
NOT_IN_PACKED_BUCKETS = ("mask", "bias", "dropout", "score_mod", "mask_mod")


def possible(names: set[str]) -> bool:
    """Whether a call may have these options together, as far as the interface goes.

    >>> possible({"packed", "seq_lens_q"}), possible({"causal", "window"})
    (False, True)
    """
    if {"packed", "bucket"} <= names and names & {*NOT_IN_PACKED_BUCKETS, *REQUIRES}:
        return not names & {*NOT_IN_PACKED_BUCKETS, "return_dbias", "return_dtensors"}
    return not any(pair <= names for pair in CONFLICTS)


#: Every pair of options that a call may have.
PAIRS = tuple(pair for pair in itertools.combinations(OPTIONS, 2) if possible({*pair, *(REQUIRES.get(n, n) for n in pair)}))


def draw(seed: int, number: int, engine: str, lengths: tuple[int, int] | None = None) -> Case:
    """Case ``number`` of the run with a seed; every pair of options comes once in ``1.5 len(PAIRS)`` cases.

    Args:
        seed, number: of the case.
        engine: that it is for.
        lengths: Sq and Skv; None to draw them.

    >>> draw(1, 2, "cpu") == draw(1, 2, "cpu")
    True
    """
    rng = np.random.default_rng([seed, number, *engine.encode()])
    it = Draw(rng, engine, lengths)
    it.draw_sizes()
    return _with_options(it, _names(it, seed, number), number)


def draw_options(names: set[str], number: int, engine: str, lengths: tuple[int, int] | None = None) -> Case:
    """A case with some options, and with those that they need."""
    it = Draw(np.random.default_rng([number, *engine.encode()]), engine, lengths)
    it.draw_sizes()
    return _with_options(it, names, number)


def _with_options(it: Draw, names: set[str], number: int) -> Case:
    for name in [*(REQUIRES[name] for name in REQUIRES if name in names), *names]:
        if name in REQUIRES:
            it.options[name] = True  # what the functions are chosen by
    for name in [name for name in OPTIONS if name in names or name in {REQUIRES.get(other) for other in names}]:
        it.options[name] = OPTIONS[name](it)
    it.options = {name: it.options[name] for name in OPTIONS if name in it.options}
    it.backward = any(name in it.options for name in (*REQUIRES, "deterministic")) or it.chance(0.45)
    layouts = it.layouts() if it.chance(0.4) else {}
    dtypes = ("float16", "bfloat16", "float32", "float64") if it.engine == "cpu" else ("float16", "bfloat16")
    gpu = GPUS[number % len(GPUS)] if it.engine == "plan" else ""
    return Case(
        it.engine, it.pick(*dtypes), **it.sizes, backward=it.backward, layouts=layouts, options=it.options,
        seed=number, gpu=gpu,
    )  # fmt: skip


def _names(it: Draw, seed: int, number: int) -> set[str]:
    """The names of a case's options: in two of three cases the next pair in the seed's order, and perhaps one more."""
    if number % 3 == 0:
        names = {name for name in OPTIONS if it.chance(0.04)}
    else:
        order = np.random.default_rng([seed, 1]).permutation(len(PAIRS))
        names = set(PAIRS[order[(number - number // 3 - 1) % len(PAIRS)]])
        if it.chance(0.3):
            names.add(it.pick(*OPTIONS))
            if not possible(names | {REQUIRES.get(name, name) for name in names}):
                names = set(PAIRS[order[(number - number // 3 - 1) % len(PAIRS)]])
    if not possible(names | {REQUIRES.get(name, name) for name in names}):
        return set()
    return names
