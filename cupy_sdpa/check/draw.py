"""Random cases: case ``number`` of a run depends only on the seed and the number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from .case import GRADIENTS, Cache, Case, Dropout, Packed, Paged
from .combine import FP8_GPUS, LEFT_OUT, NOT_SPLIT, ONLY_WITH, fit_fp8, is_valid, schedule, with_required
from .sampler import Limits, Sampler
from .weight_options import ROWS

#: The engine whose cases another one has.
_LIKE = {"cupy": "cpu"}
#: The options that have no gradients.
FORWARD_ONLY = {"paged", "jvp", "fp8", "merge", "shared_prefix", "cache", "weight_sums", "weight_entropy"}
#: The described GPUs that problems are planned for. The H200, whose description was read from a real GPU, is more frequent.
GPUS = ("h200", "h200", "a100", "b200", "l40s", "rtx5090", "a10")


def _draw_lengths(sampler: Sampler) -> Any:
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
    of_prefix = rows * (sizes["b"] if "shared_prefix" in names else 1)  # the queries of all sequences attend to the shared keys
    can_split = rows <= 128 and of_prefix <= 512 and not names & NOT_SPLIT
    split = can_split and not (rows == 1 and names & {"causal", "window"})
    num_splits = sampler.pick(0, 1, 2, 3, 7, 40) if split else 0
    order, rest = sampler.pick("pages", "heads"), sampler.pick("large", "negative", "unowned", "mixed")
    return tuple(Paged(page, order, _draw_lengths(sampler), num_splits, rest, sampler.chance(0.3), sampler.chance(0.3)))


def _cache(sampler: Sampler) -> Any:
    page = sampler.pick(1, 2, 8, 16) if sampler.engine != "cpu" else sampler.pick(1, 2, 3, 5, 16, 48)
    sizes = sampler.sizes
    sizes["skv"], sizes["b"] = min(sizes["skv"], 20 * page), max(sizes["b"], 1)
    for name in ("d", "dv", "hkv", "hq"):
        sizes[name] = max(sizes[name], 1)
    event = sampler.pick("", "truncate", "release", "fork", "beams")
    lengths, steps, packed = _draw_lengths(sampler), sampler.pick(1, 2, 3, 5), sampler.chance(0.5)
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


def _draw_packed(sampler: Sampler) -> Any:
    same = sampler.sizes["sq"] == sampler.sizes["skv"] and sampler.chance(0.5)
    kind_q = _draw_lengths(sampler)
    of_group = "parallel" in sampler.names  # a group has no gaps between sequences
    excess = sampler.pick(0, 0, 0, 3) if sampler.engine == "gpu" and not of_group else 0
    before, after = (0, 0) if of_group else sampler.pick((0, 0), (0, 0), (0, 5), (7, 0), (16, 100))
    kind_kv = "same" if same else _draw_lengths(sampler)
    return tuple(Packed(kind_q, kind_kv, before, after, excess, sampler.pick("int32", "int64")))


def _draw_dropout(sampler: Sampler) -> Any:
    source = sampler.pick("seed", "array", *(["mask"] if sampler.engine == "cpu" else []))
    return tuple(Dropout(sampler.pick(0.1, 0.3, 0.5, 0.9), source, sampler.integer(2**31), sampler.pick(0, 0, 4, 1000)))


def _draws_of_rows(*names: str) -> dict[str, Callable[[Sampler], Any]]:
    return {name: ROWS[name].draw for name in names}


#: How each option is drawn. The draws depend on the order: a new row comes last.
OPTIONS: dict[str, Callable[[Sampler], Any]] = {
    "scale": lambda sampler: sampler.pick(*(() if "fp8" in sampler.names else (0.0, -0.1, -0.3)), 0.05, 0.3, 1.0),
    "causal": lambda s: "bottom_right" if "shared_prefix" in s.names else s.pick("top_left", "bottom_right"),
    "window": Sampler.window,
    **_draws_of_rows("mask", "bias"),
    "seq_lens_q": _draw_lengths,
    "seq_lens_kv": _draw_lengths,
    "paged": _paged,
    "packed": _draw_packed,
    **_draws_of_rows("alibi_slopes", "softcap", "sinks"),
    "dropout": _draw_dropout,
    "score_mod": lambda sampler: sampler.function("score_mod"),
    "mask_mod": lambda sampler: sampler.function("mask_mod"),
    "tree": lambda sampler: sampler.pick("parents", "device", "mask", "one"),
    "block_mask": lambda s: (
        s.pick("blocks", "pairs", "documents", "prefix", "segments", "segments", "window"),
        f"kq{s.pick(*'h1')}{s.pick(*'b1')}",
    ),
    "stats": _stats,
    "head_scales": lambda sampler: sampler.pick("random", "zero"),
    **dict.fromkeys(("deterministic", *GRADIENTS), lambda sampler: True),
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
    **_draws_of_rows(*ROWS),
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
    """Return a case's options, which follow from its feature, see :data:`~.combine.SHARES`."""
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
