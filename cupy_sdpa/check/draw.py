"""Random cases: case ``number`` of a run depends only on the seed and the number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .case import GRADIENTS, SIZES, Cache, Case, Dropout, Packed, Paged
from .combine import FP8_GPUS, LEFT_OUT, NOT_SPLIT, ONLY_WITH, fit_fp8, is_valid, schedule, with_required
from .functions import DTYPES, MASKS, SCORES


class Limits(NamedTuple):
    """The largest numbers of elements of the scores, B Hq Sq Skv, and of an array, B H S D: they bound the time of a case."""

    scores: float
    elements: float = math.inf


#: The size limits of each engine. On the CPU most cases have the limits ``"small"``, because small sizes show most faults.
LIMITS = {
    "gpu": Limits(1_500_000, 5_000_000),
    "cpu": Limits(200_000, 1_000_000),
    "small": Limits(10_000, 40_000),
    "plan": Limits(2_000_000_000, 50_000_000),
}
#: The engine whose cases another one has.
_LIKE = {"cupy": "cpu"}
#: The probability of a case on the CPU with the limits ``"cpu"``.
LARGE = 0.06
#: The probability that all lengths of a case are 0, 1 or 2; other lengths are as often small or near a multiple of a tile.
TINY = 0.3
#: Numbers of keys with a single query; 40 % of those cases have one of these.
DECODE_KEYS = (1, 2, 64, 127, 128, 129, 163, 255, 256, 257, 276, 384, 1023, 1024, 1025, 4096)
#: The options that have no gradients.
FORWARD_ONLY = {"paged", "jvp", "fp8", "merge", "shared_prefix", "cache", "weight_sums", "weight_entropy"}
#: The described GPUs that problems are planned for. The H200, whose description was read from a real GPU, is more frequent.
GPUS = ("h200", "h200", "a100", "b200", "l40s", "rtx5090", "a10")


def within(sizes: Mapping[str, int], limits: Limits) -> dict[str, int]:
    """The sizes of a case, halved until they are within limits: the batch and the heads, the head dims, then the lengths.

    >>> within({"d": 8, "dv": 8, "hq": 4, "hkv": 2, "sq": 10, "skv": 10, "b": 3}, Limits(500, 1000))
    {'d': 8, 'dv': 8, 'hq': 4, 'hkv': 2, 'sq': 10, 'skv': 10, 'b': 1}
    """
    d, dv, hq, hkv, sq, skv, b = (sizes[name] for name in SIZES)
    group = hq // max(hkv, 1)
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
    return dict(zip(SIZES, (d, dv, hkv * group, hkv, sq, skv, b), strict=True))


class Sampler:
    """Draws the parts of one case. Sq and Skv may be given, and other limits than those of the engine."""

    def __init__(
        self, rng: np.random.Generator, engine: str, fixed_lengths: tuple[int, int] | None = None, limits: Limits | None = None
    ) -> None:
        self.rng, self.engine, self.fixed_lengths, self.limits = rng, engine, fixed_lengths, limits or LIMITS[engine]
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
        if self.engine == "cpu" and self.chance(0.7):
            return 3 + self.integer(37)
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
        if "block_mask" in self.names and self.chance(0.75):  # several blocks
            few, many = 128 * self.pick(1, 1, 2) + self.pick(-1, 0, 1, 40), 128 * self.pick(1, 2, 3) + self.pick(-1, 0, 1, 60)
            return (few, many) if self.chance(0.5) else (many, few) if self.chance(0.5) else (few, few)
        kind = 1.0 if "parallel" in self.names and self.chance(0.5) else self.rng.random()  # a group has no decoding
        if kind < TINY:
            return self.pick(0, 1, 2), self.pick(0, 1, 2)
        if kind < TINY + 0.3:  # decoding
            most = 70000 if self.chance(0.3 if self.engine != "cpu" else 0.02) else 2000 if self.engine != "cpu" else 300
            skv = self.pick(*DECODE_KEYS) if self.chance(0.4) else self.log_uniform(1, most)
            return 1, int(skv)
        if kind < TINY + 0.37:
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
        """Draw all sizes, within :data:`LIMITS`."""
        sq, skv = self.lengths()
        d = self.head_dim()
        dv = d if self.chance(0.6) else self.head_dim()
        hkv, group = self.pick(1, 1, 2, 3, 4), self.pick(1, 1, 2, 3, 4, 6, 8)
        b = self.pick(1, 1, 2, 3, 5, 8)
        if self.chance(0.03):
            b, hkv, dv = self.pick((0, hkv, dv), (b, 0, dv), (b, hkv, 0))
        if {"block_mask", "parallel"} & self.names:  # of many calls
            hkv, group, b = self.pick((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2))
        limits = LIMITS["small"] if self.engine == "cpu" and not self.chance(LARGE) else self.limits
        if "block_mask" in self.names:
            limits = Limits(max(limits.scores, 300_000), max(limits.elements, 150_000))
            if self.engine == "cpu":
                d, dv = min(d, 16), min(dv, 16)
        self.sizes = within({"d": d, "dv": dv, "hq": hkv * group, "hkv": hkv, "sq": sq, "skv": skv, "b": b}, limits)

    def extended(self, names: set[str], others: list[str], count: int) -> set[str]:
        """The names and up to ``count`` others that they can be combined with."""
        for _ in range(count):
            more = names | {self.pick(*others)}
            names = more if is_valid(with_required(more)) else names
        return names

    def axes(self) -> str:
        """The axes of a mask or bias: keys, queries, heads, batch; each of full length or length 1."""
        return "".join(letter if self.chance(0.5) else "1" for letter in "kqhb")

    def function(self, option: str) -> tuple[str, str]:
        """The name of a score or mask function, and the dtype of its captured arrays."""
        table = SCORES if option == "score_mod" else MASKS
        names = list(table)
        if option == "score_mod" and "return_dtensors" in self.options:
            names = [name for name in names if table[name].tensors and table[name].kind in ("float", "number")]
        if self.sizes["b"] * self.sizes["hq"] * self.sizes["sq"] * self.sizes["skv"] > 4_000_000:
            names = [name for name in names if all(len(axes) < 3 for axes in table[name].tensors.values())]
        if "block_mask" in self.names:  # the mask contains all conditions
            names = [name for name in names if name != "hidden"]
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

    def layout(self) -> str:
        """A memory layout in the notation of :mod:`.memory`."""
        axes = "hs" if "packed" in self.options else "hsb"
        any_strides = self.engine == "cpu" and "shared_prefix" not in self.names  # which takes no layout=
        in_order = not any_strides and 1 in (self.sizes["d"], self.sizes["dv"])
        text = "d" + (axes if in_order else "".join(self.rng.permutation(list(axes))))
        text = "".join(self.rng.permutation(list(text))) if any_strides and self.chance(0.2) else text
        for letter in self.rng.permutation(list(text)):
            kind = self.rng.random()
            if kind < 0.2:
                text += f"+{letter}"
            elif kind < 0.35 and letter != "d":
                text += f"*{letter}"
            elif kind < 0.4 and any_strides:
                text += f"-{letter}"
        return text

    def layouts(self) -> dict[str, str]:
        """Layouts of some of the arrays."""
        same_sizes = self.sizes["sq"] == self.sizes["skv"] and self.sizes["d"] == self.sizes["dv"]
        if same_sizes and not {"packed", "paged", "cache"} & self.names and self.chance(0.15):
            return dict.fromkeys("qkv", "qkv")
        names = ["q", *([] if {"paged", "cache"} & self.names else ["k", "v"]), *["dout"] * self.backward]
        names += [f"t{letter}" for letter in self.options.get("jvp", "")]
        if "preallocated" in self.options:
            names += ["out", *(["dq", "dk", "dv"] if self.backward else []), *(["jvp"] if "jvp" in self.names else [])]
        layouts = {name: self.layout() for name in names if self.chance(0.5)}
        return layouts or {"q": self.layout()}


def _bias(sampler: Sampler) -> Any:
    axes = sampler.axes()
    dtype = sampler.pick("float16", "bfloat16", "float32", *(["float64"] if sampler.engine == "cpu" else []))
    return axes, dtype, sampler.pick("normal", "normal", "normal", "inf", "inf_rows", "min", "min_rows", "low", "low_rows")


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
        while sizes["b"] * sizes["hq"] * sizes["sq"] * sizes["skv"] > sampler.limits.scores and sizes["sq"] > 1:
            sizes["sq"] //= 2
    rows = sizes["hq"] // max(sizes["hkv"], 1) * sizes["sq"]
    split = rows <= 128 and not names & NOT_SPLIT and not (rows == 1 and names & {"causal", "window"})
    num_splits = sampler.pick(0, 1, 2, 3, 7, 40) if split else 0
    order, rest = sampler.pick("pages", "heads"), sampler.pick("large", "negative", "unowned", "mixed")
    return tuple(Paged(page, order, _lengths(sampler), num_splits, rest, sampler.chance(0.3), sampler.chance(0.3)))


def _cache(sampler: Sampler) -> Any:
    page = sampler.pick(1, 2, 8, 16) if sampler.engine != "cpu" else sampler.pick(1, 2, 3, 5, 16, 48)
    sizes = sampler.sizes
    sizes["skv"], sizes["b"] = min(sizes["skv"], 20 * page), max(sizes["b"], 1)
    for name in ("d", "dv", "hkv", "hq"):
        sizes[name] = max(sizes[name], 1)
    event = sampler.pick("", "truncate", "release", "fork", "beams")
    lengths, steps, packed = _lengths(sampler), sampler.pick(1, 2, 3, 5), sampler.chance(0.5)
    rope = sampler.pick("", "half", "interleaved") if sizes["d"] > 1 else ""
    rope_dim = 2 * (1 + sampler.integer(min(sizes["d"], 256) // 2 - 1)) if rope else 0
    return tuple(Cache(page, lengths, steps, event, packed, rope, rope_dim))


def _parallel(sampler: Sampler) -> tuple[str, int]:
    members = sampler.pick(1, 2, 2, 2, 3, 4)
    (own, rest), group = divmod(sampler.sizes["hq"], members), sampler.sizes["hq"] // max(sampler.sizes["hkv"], 1)
    by_heads = own and not rest and (own % group == 0 or group % own == 0)
    return sampler.pick("ring", "all_gather", *(["all_to_all"] if by_heads else [])), members


def _stats(sampler: Sampler) -> Any:
    p = sampler.options.get("paged")
    if sampler.names & {"jvp", "fp8", "parallel", "shared_prefix", "merge"} or (p and Paged(*p).num_splits):
        return True
    return sampler.pick(True, "max_sumexp")


def _packed(sampler: Sampler) -> Any:
    same = sampler.sizes["sq"] == sampler.sizes["skv"] and sampler.chance(0.5)
    kind_q = _lengths(sampler)
    of_group = "parallel" in sampler.names  # a group has no gaps between sequences
    excess = sampler.pick(0, 0, 0, 3) if sampler.engine == "gpu" and not of_group else 0
    before, after = (0, 0) if of_group else sampler.pick((0, 0), (0, 0), (0, 5), (7, 0), (16, 100))
    kind_kv = "same" if same else _lengths(sampler)
    return tuple(Packed(kind_q, kind_kv, before, after, excess, sampler.pick("int32", "int64")))


def _dropout(sampler: Sampler) -> Any:
    source = sampler.pick("seed", "array", *(["mask"] if sampler.engine == "cpu" else []))
    return tuple(Dropout(sampler.pick(0.1, 0.3, 0.5, 0.9), source, sampler.integer(2**31), sampler.pick(0, 0, 4, 1000)))


#: How each option is drawn.
OPTIONS: dict[str, Callable[[Sampler], Any]] = {
    "scale": lambda sampler: sampler.pick(*(() if "fp8" in sampler.names else (0.0, -0.1, -0.3)), 0.05, 0.3, 1.0),
    "causal": lambda s: "bottom_right" if "shared_prefix" in s.names else s.pick("top_left", "bottom_right"),
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
    "tree": lambda sampler: sampler.pick("parents", "device", "mask", "one"),
    "block_mask": lambda s: (
        s.pick("blocks", "pairs", "documents", "prefix", "segments", "segments", "window"),
        f"kq{s.pick(*'h1')}{s.pick(*'b1')}",
    ),
    "stats": _stats,
    "head_scales": lambda sampler: sampler.pick("random", "zero"),
    **dict.fromkeys(
        ("deterministic", "return_dbias", "return_dsinks", "return_dscale", "return_dtensors"), lambda sampler: True
    ),
    "fp8": lambda sampler: sampler.pick("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"),
    "mean": lambda sampler: sampler.pick(0.5, 1.0, 2.0),
    "parallel": _parallel,
    "shared_prefix": lambda sampler: sampler.integer(sampler.sizes["skv"] // sampler.options["paged"][0]),
    "merge": lambda sampler: sampler.pick(1, 2, 3, 8, 9, 20),
    "cache": _cache,
    "weight_sums": lambda sampler: sampler.pick("query heads", "query heads", "key heads"),
    "weight_entropy": lambda sampler: True,
    "jvp": lambda sampler: sampler.pick("qkv", "qkv", "qkv", "q", "k", "v", "qk", "kv"),
    "dstats": lambda sampler: sampler.pick(True, True, "alone"),
    "preallocated": lambda sampler: True,
    "bucket": lambda sampler: sampler.pick(16, 128, "power_of_two"),
    "max_workspace": lambda sampler: sampler.pick(1 << 24, 1 << 30),
    "offset": lambda sampler: sampler.pick(1e5, -3e6),
}
#: Every pair of options that can be combined.
PAIRS = tuple(pair for pair in itertools.combinations(OPTIONS, 2) if is_valid(with_required({*pair})))


def draw(seed: int, number: int, engine: str, lengths: tuple[int, int] | None = None, limits: Limits | None = None) -> Case:
    """Draw case ``number`` of the run with a seed; the features have their shares, see :mod:`.combine`.

    >>> draw(1, 2, "cpu") == draw(1, 2, "cpu")
    True
    """
    sampler = Sampler(np.random.default_rng([seed, number, *engine.encode()]), _LIKE.get(engine, engine), lengths, limits)
    return _draw_case(sampler, _option_names(sampler, seed, number) - LEFT_OUT[engine], number).with_(engine=engine)


def draw_options(
    names: set[str], number: int, engine: str, lengths: tuple[int, int] | None = None, limits: Limits | None = None
) -> Case:
    """Draw a case with certain options, and the options that they require."""
    sampler = Sampler(np.random.default_rng([number, *engine.encode()]), _LIKE.get(engine, engine), lengths, limits)
    return _draw_case(sampler, names, number).with_(engine=engine)


def _draw_case(sampler: Sampler, names: set[str], number: int) -> Case:
    """Draw the sizes, the values of the options, the passes, layouts and dtype."""
    for name in names & GRADIENTS.keys():
        sampler.options[name] = True  # the choice of a function depends on these
    required = sampler.names = with_required(names)
    sampler.draw_sizes()
    if "fp8" in required and sampler.engine != "cpu" and sampler.chance(0.9):
        fit_fp8(sampler.sizes, paged="paged" in required, lengths=not sampler.fixed_lengths)
    for name in OPTIONS:
        if name in required:
            sampler.options[name] = OPTIONS[name](sampler)
    options = {name: sampler.options[name] for name in OPTIONS if name in required}
    sampler.backward = not FORWARD_ONLY & options.keys() and (
        any(name in options for name in (*GRADIENTS, "dstats", "deterministic")) or sampler.chance(0.6)
    )
    layouts = sampler.layouts() if sampler.chance(0.4) else {}
    dtypes = ["float16", "bfloat16"]
    if sampler.engine == "cpu":
        dtypes.append("float32")
        if "fp8" not in options:
            dtypes.append("float64")
        if "offset" in options:
            dtypes = ["float64"]
    gpus = () if sampler.engine != "plan" else FP8_GPUS if "fp8" in options else GPUS
    return Case(
        sampler.engine, sampler.pick(*dtypes), **sampler.sizes, backward=sampler.backward, layouts=layouts,
        options=options, seed=number, gpu=gpus[number % len(gpus)] if gpus else "",
    )  # fmt: skip


def _option_names(sampler: Sampler, seed: int, number: int) -> set[str]:
    """The options of a case: those of its feature, see :data:`~.combine.SHARES`."""
    feature, earlier = schedule(seed, number)
    if feature == "few":
        names = {name for name in OPTIONS if sampler.chance(0.04)}
        return names if is_valid(with_required(names)) else set()
    if feature == "pairs":
        names = set(PAIRS[np.random.default_rng([seed, 1]).permutation(len(PAIRS))[earlier % len(PAIRS)]])
        return sampler.extended(names, list(OPTIONS), int(sampler.chance(0.3)))
    others = sorted(ONLY_WITH.get(feature, OPTIONS.keys()))
    names = sampler.extended(with_required({feature}), others, sampler.integer(6 if feature == "parallel" else 3))
    if feature == "fp8" and "paged" not in names:
        names = sampler.extended(names, ["mean"], int(sampler.chance(0.6)))
    if feature == "parallel" and sampler.chance(0.4):  # the tiles of a mask on packed sequences
        names = sampler.extended(sampler.extended(names, ["packed"], 1), ["causal", "window"], 1)
    if feature == "block_mask":  # the gradients of blocks are then computed on copies
        names = sampler.extended(names, ["deterministic"], int(sampler.chance(0.3)))
    if feature == "tree":
        names = sampler.extended(names, [sampler.pick("paged", "paged", "cache")], 1)
    if feature == "paged" and sampler.chance(0.5):  # as in decoding; the keys can be split
        names = sampler.extended(sampler.extended(names, ["causal", "window"], 1), ["seq_lens_q"], sampler.integer(1))
    return names
