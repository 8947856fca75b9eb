"""Draw the parts of a random case: sizes, lengths, axes, layouts and the values of options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .case import SIZES
from .combine import is_valid, with_required
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
#: The probability of a case on the CPU with the limits ``"cpu"``.
LARGE = 0.06
#: The probability that all lengths of a case are 0, 1 or 2; other lengths are as often small or near a multiple of a tile.
TINY = 0.3
#: Numbers of keys with a single query; 40 % of those cases have one of these.
DECODE_KEYS = (1, 2, 64, 127, 128, 129, 163, 255, 256, 257, 276, 384, 1023, 1024, 1025, 4096)


def within(sizes: Mapping[str, int], limits: Limits) -> dict[str, int]:
    """Return the sizes of a case, halved to fit the limits: first the batch and the heads, the head dims, then the lengths.

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
    """Draws the parts of one case. Sq, Skv and limits other than the engine's may be given."""

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
        """Return a random integer from 0 to the maximum, inclusive."""
        return int(self.rng.integers(maximum + 1))

    def log_uniform(self, minimum: int, maximum: int) -> int:
        """Return a random integer, uniform in its logarithm."""
        value = np.exp(self.rng.uniform(np.log(minimum), np.log(maximum + 0.5)))
        return min(maximum, max(minimum, round(float(value))))

    def length(self) -> int:
        """Return a sequence length: very small, near a multiple of the tile sizes of kernels, or arbitrary."""
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
        """Return a head dim: a multiple of 8 up to 256; on the CPU engine up to 128, and also other numbers."""
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
        """Return the names and up to ``count`` others that they can be combined with."""
        for _ in range(count):
            more = names | {self.pick(*others)}
            names = more if is_valid(with_required(more)) else names
        return names

    def axes(self) -> str:
        """Return the axes of a mask or bias: keys, queries, heads, batch; each of full length or length 1."""
        return "".join(letter if self.chance(0.5) else "1" for letter in "kqhb")

    def function(self, option: str) -> tuple[str, str]:
        """Return the name of a score or mask function, and the dtype of its captured arrays."""
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
        """Return a window; with ``causal`` it has the same alignment."""
        sides = [self.pick(None, 0, 1, self.integer(20), self.integer(300)) for _ in range(2)]
        alignment = self.options.get("causal") or self.pick("top_left", "bottom_right")
        return (*sides, alignment)

    def layout(self) -> str:
        """Return a memory layout in the notation of :mod:`.memory`."""
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
