"""Other ways to compute the attention of a case: FP8 arrays, a group of threads, a shared prefix, merged parts, and a cache.

Their results equal one call's results, so they have the same reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

import cupy_sdpa

from .. import fp8
from ..parallel import Loopback, context_parallel, run_threads
from .case import Case
from .data import Data, forked_lengths, tree_pairs
from .drawn_memory import named_layout
from .formats import FORMATS, FP8_SCALE

#: Seconds after which a member of a group gives up.
_TIMEOUT = 60.0
#: The factors that multiply a member's queries before each of its calls. On the GPU the third call is captured as a CUDA graph.
_FACTORS = {"cpu": (1,), "gpu": (-1, -1, -1, -1)}
#: Parts of the seed.
_PARTS_STREAM, _CACHE_STREAM = 79, 80


def _scalings(case: Case, views: dict[str, Any]) -> dict[str, Any]:
    """Return the scalings of q, k and v, which begin at a scale with exact values, and the lengths of the arrays."""
    dtype = case.options["fp8"]
    amax = FORMATS[dtype].largest / FP8_SCALE
    lengths = {"q": views.get("seq_lens_q")} | dict.fromkeys("kv", None if case.paged else views.get("seq_lens_kv"))
    return {
        name: (fp8.DelayedScaling(views[name], 1, dtype, amax=amax), {"lengths": lengths[name], **named_layout(case)})
        for name in "qkv"
    }


def arrays_in_fp8(data: Data, views: dict[str, Any], xp: Any) -> list[Any]:
    """q, k and v in FP8: their values, exactly; v with the mean of the data."""
    scalings = _scalings(data.case, views)
    q, k, v = (scaling.quantize(views[name], **lengths) for name, (scaling, lengths) in scalings.items())
    if data.mean is None:
        return [q, k, v]
    mean = xp.asarray(data.mean, order="F")
    return [q, k, fp8.Fp8Array(v.data, v.descale, scale=v.scale, dtype=v.dtype, mean=mean)]


def wrong_scale(data: Data, views: dict[str, Any]) -> str:
    """Return what is wrong with a second conversion's scale, which the first array's magnitudes set, or with a mean."""
    case = data.case
    if case.dv and case.hkv and case.skv and "mean" in case.options and (wrong := _wrong_mean(data, views)):
        return wrong
    for name, (scaling, lengths) in _scalings(case, views).items():
        magnitudes = np.abs(data.arrays[name].astype(np.float32))
        largest = float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))  # the padding is NaN
        if largest == 0 or (case.paged and name != "q"):
            continue
        scaling.quantize(views[name], **lengths)
        scale, wanted = float(scaling.quantize(views[name], **lengths).scale[0]), FORMATS[case.options["fp8"]].largest / largest
        if not 0.999999 < scale / wanted < 1.000001:
            return f"the scale of {name} after an array of magnitudes up to {largest:g} is {scale:g}, expected {wanted:g}"
    return ""


def _wrong_mean(data: Data, views: dict[str, Any]) -> str:
    """Return what is wrong with the mean that a conversion of v subtracts."""
    lengths = {"lengths": views.get("seq_lens_kv"), **named_layout(data.case)}
    found = as_numpy(fp8.quantize(views["v"], data.case.options["fp8"], center=True, **lengths).mean)[:, :, 0]
    v, counts = data.arrays["v"].astype(np.float64), data.lengths[1]
    counts = np.full(data.case.b, data.case.skv) if counts is None else counts
    inside = np.arange(data.case.skv)[:, None] < counts
    wanted = np.where(inside, v, 0).sum(axis=2) / np.maximum(counts, 1)
    error = np.abs(found - wanted).max(initial=0)
    return f"the mean of v is wrong by {error:g}" if not error < 1e-5 else ""


def forward_function(case: Case) -> Callable[..., Any]:
    """Return the function that computes the forward pass of a case."""
    if "shared_prefix" in case.options:
        return lambda q, k, v, **options: cupy_sdpa.shared_prefix_attention(q, k, v, case.shared_keys, **options)
    return functools.partial(_merged, case) if "merge" in case.options else cupy_sdpa.attention


def with_tree(case: Case, data: Data, k: Any, options: dict[str, Any], xp: Any) -> dict[str, Any]:
    """Return the options of a call, with the mask of :func:`cupy_sdpa.tree_mask` if the case has a tree."""
    if data.parents is None:
        return options
    parents: Any = data.parents
    match case.options["tree"]:
        case "one":
            parents = parents[:, 0].tolist()
        case "device":
            parents = xp.asarray(parents)
        case "mask":
            parents = tree_pairs(parents)
    pages = {name: options.get(name) for name in ("page_table", "seq_lens_kv", "seq_lens_q")}
    mask = cupy_sdpa.tree_mask(parents, k, **pages)
    return options | mask | {"tensors": options.get("tensors", {}) | mask["tensors"]}


def _merged(case: Case, q: Any, k: Any, v: Any, *, return_stats: bool = False, sinks: Any = None, **options: Any) -> Any:
    """Calls on disjoint parts of the keys, and :func:`cupy_sdpa.merge`."""
    rng = np.random.default_rng([case.seed, _PARTS_STREAM])
    ends = [*np.sort(rng.integers(0, case.skv + 1, case.options["merge"] - 1)).tolist(), case.skv]
    outs, stats, begin = [], [], 0
    for end in ends:
        own = {
            name: x[begin:end].copy(order="F") if name in ("mask", "bias") and case.options[name][0][0] == "k" else x
            for name, x in options.items()
        }
        out, log_sum_exp = cupy_sdpa.attention(q, k[:, :, begin:end], v[:, :, begin:end], return_stats=True, **own)
        outs.append(out)
        stats.append(log_sum_exp)
        begin = end
    return cupy_sdpa.merge(outs, stats, sinks=sinks, return_stats=return_stats, engine=options.get("engine"))


def in_group(
    case: Case, views: dict[str, Any], options: dict[str, Any], backward: dict[str, Any], *, vjp: bool
) -> dict[str, Any]:
    """Return the results of a group of threads, each of which has a part of every sequence, as numpy arrays.

    On the GPU a member repeats its calls, with the queries negated in between. ``backward`` are further options of gradients,
    which ``attention_vjp`` or ``attention_backward`` computes.
    """
    method, size = case.options["parallel"]
    packed = "packed" in case.options
    options = {name: as_numpy(x) if name.startswith("cu_seqlens") else x for name, x in options.items()}
    lengths: dict[str, Any] = {} if packed else {"seqlen_q": case.sq, "seqlen_kv": case.skv}
    offsets = [{"cu_seqlens": options[f"cu_seqlens_{side}"]} if packed else {} for side in ("q", "kv")]
    whole = offsets if packed else [{"seqlen": case.sq}, {"seqlen": case.skv}]
    names = ("dq", "dk", "dv", *(["dsinks"] if backward.get("return_dsinks") else []))

    def member(own: Any) -> dict[str, Any]:
        cp = context_parallel(own, method=method)
        q, k, v = (cp.shard(views[name], axis=2, **offsets[name != "q"]) for name in "qkv")
        try:
            for factor in _FACTORS[case.engine]:
                q *= factor
                found = results(cp, q, k, v)
            cp.check()
            return {name: as_numpy(x) for name, x in found.items()}
        finally:
            if case.engine == "gpu":
                cupy_sdpa.get_plan_cache().clear()  # of this thread

    def results(cp: Any, q: Any, k: Any, v: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if case.backward and vjp:
            found["out"], pullback = cp.attention_vjp(q, k, v, **lengths, **options, **backward)
            found |= zip(names, pullback(cp.shard(views["dout"], axis=2, **offsets[0])), strict=True)
        else:
            found["out"], found["stats"] = cp.attention(q, k, v, return_stats=True, **lengths, **options)
            if case.backward:
                dout = cp.shard(views["dout"], axis=2, **offsets[0])
                given = dout, q, k, v, found["out"], found["stats"]
                gradients = cp.attention_backward(*given, **lengths, **options, **backward)
                found |= zip(names, gradients, strict=True)
        for name in found:
            if name == "stats":
                found[name] = cp.unshard(found[name], axis=1 if packed else 0, **whole[0])
            elif name != "dsinks":
                found[name] = cp.unshard(found[name], axis=2, **whole[name in ("dk", "dv")])
        return found

    first: dict[str, Any]
    first, *others = run_threads(Loopback(size, timeout=_TIMEOUT).members, member)
    for other in others:
        if unequal := [name for name in first if first[name].tobytes() != other[name].tobytes()]:
            raise RuntimeError(f"the members of a group have different {', '.join(unequal)}")
    return first


def as_numpy(x: Any) -> Any:
    """Return an array of numpy or CuPy as an array of numpy."""
    return x if isinstance(x, np.ndarray) else x.get()


def rotation(case: Case) -> Any:
    """Return the rotation of queries and keys by quarter turns; None if the case has no rotation."""
    assert case.cache
    *_, form, dim = case.cache
    frequencies = np.pi / 2 * _quarter_turns(dim)
    return cupy_sdpa.Rope(dim, frequencies=frequencies, interleaved=form == "interleaved") if form else None


def _quarter_turns(dim: int) -> Any:
    """Return the quarter turns per position of each pair of channels."""
    return 1 + np.arange(dim // 2) % 3


def turned_back(x: Any, rope: Any, positions: Any) -> Any:
    """Return the array ``(D, H, S, B)`` whose rotation at the positions ``(S, B)`` is x: the same numbers at other places.

    float64 resolves that a frequency is a rounded multiple of pi / 2, so there the rest of the angle is also turned back.
    """
    pairs, quarters = np.arange(rope.dim // 2), _quarter_turns(rope.dim)
    first, second = (2 * pairs, 2 * pairs + 1) if rope.interleaved else (pairs, pairs + len(pairs))
    a, b = x[first], x[second]
    if x.dtype == np.float64:
        # pi / 2 is the float np.pi / 2 plus this; a multiple of the float is rounded again.
        half_pi, rest = Fraction(np.pi / 2), 6.123233995736766e-17
        excess = [float(Fraction(q * (np.pi / 2)) - int(q) * half_pi) - q * rest for q in quarters]
        angles = np.multiply.outer(excess, positions)[:, None]  # below 1e-9, so the cosine is 1
        a, b = a + angles * b, b - angles * a
    turns = (np.multiply.outer(quarters, positions) % 4)[:, None]
    out = x.copy(order="F")
    out[first] = np.select([turns == 0, turns == 1, turns == 2], [a, b, -a], -b)
    out[second] = np.select([turns == 0, turns == 1, turns == 2], [b, -a, -b], a)
    return out


def _positions(case: Case, data: Data) -> tuple[Any, Any]:
    """Return the positions of the queries ``(Sq, B)`` and of the keys ``(Skv, B)``: their places, or those in a tree."""
    assert case.cache
    queries, keys = data.lengths
    first = keys.astype(np.int64) - (case.sq if queries is None else queries)
    depths, of_keys = np.arange(case.sq)[:, None], np.arange(case.skv)[:, None] + np.zeros(case.b, np.int64)
    if data.parents is not None and not case.cache.shares:  # sequences that share keys share their positions
        depths = cupy_sdpa.tree_depths(data.parents).astype(np.int64)
        for b, start in enumerate(first):
            place = np.arange(max(start, 0), keys[b])
            of_keys[place, b] = start + depths[place - start, min(b, depths.shape[1] - 1)]
    return depths + first, of_keys


def _lists_positions(case: Case, data: Data) -> bool:
    """True if positions are passed token by token."""
    return case.cache is not None and (data.parents is not None or case.cache.steps % 2 == 0)


def rotated_queries(case: Case, data: Data, q: Any, cache: Any, xp: Any) -> Any:
    """Return the queries of a case, rotated by :func:`cupy_sdpa.apply_rope` from others."""
    rope = rotation(case)
    if not rope:
        return q
    queries, (positions, _) = data.lengths[0], _positions(case, data)
    before = xp.asarray(turned_back(data.arrays["q"], rope, positions))
    if _lists_positions(case, data):
        return cupy_sdpa.apply_rope(before, rope, positions=xp.asarray(positions.astype(np.int32)))
    return cupy_sdpa.apply_rope(
        before, rope, seq_lens_kv=cache.lengths, seq_lens_q=None if queries is None else xp.asarray(queries)
    )


def filled_cache(case: Case, data: Data, xp: Any) -> Any:
    """Return a cache of two layers with the keys and values of a case in layer 1, and other numbers in layer 0."""
    assert case.cache
    page, _, steps, event, packed, *_ = case.cache
    rope = rotation(case)
    rng, lengths = np.random.default_rng([case.seed, _CACHE_STREAM]), data.lengths[1].astype(np.int64)
    k, v = (data.arrays[name] for name in "kv")
    _, positions = _positions(case, data)
    if rope:
        k = turned_back(k, rope, positions)
    pages = case.b * (-(-2 * max(case.skv, 1) // page) + 1)
    cache = cupy_sdpa.KVCache(
        case.d, case.hkv, pages=pages, batch=case.b, page_size=page, head_dim_v=case.dv, dtype=case.dtype, layers=2,
        numpy=xp is np,
    )  # fmt: skip

    def tokens_of(array: Any, begins: Any, ends: Any) -> Any:
        """Tokens of an array ``(..., S, B)``, packed or padded with NaN."""
        parts = [array[:, :, begin:end, b] for b, (begin, end) in enumerate(zip(begins, ends, strict=True))]
        if packed:
            return np.concatenate(parts, axis=2)
        padding = np.nan if array.dtype.kind != "i" else -7
        tokens = np.full((*array.shape[:2], (ends - begins).max(), case.b), padding, array.dtype)
        for b, part in enumerate(parts):
            tokens[:, :, : part.shape[2], b] = part
        return tokens

    def append(begins: Any, ends: Any, arrays: tuple[Any, Any]) -> None:
        counts, places = ends - begins, tokens_of(positions[None, None].astype(np.int32), begins, ends)[0, 0]
        listed = xp.asarray(places) if rope and _lists_positions(case, data) else None
        for layer in (0, 1):
            tokens = (tokens_of(x, begins, ends) for x in arrays)
            found = [xp.asarray(np.asfortranarray(x if layer else -x)) for x in tokens]
            cache.append(found[0], found[1], layer, seq_lens_q=counts.tolist(), rope=rope, positions=listed)

    def add_others(most: int) -> None:
        ends = rng.integers(0, most + 1, case.b)
        others = tuple(rng.standard_normal((*x.shape[:2], most, case.b)).astype(x.dtype) for x in (k, v))
        append(np.zeros_like(ends), ends, others)  # type: ignore[arg-type]

    if event == "release":
        add_others(case.skv)
        for b in range(case.b if steps % 2 else 0):
            cache.release(b)
        cache.reset()
    begins = np.zeros(case.b, np.int64)
    if case.cache.shares:
        shared = forked_lengths(lengths)
        begins[0] = shared.max()
        append(np.zeros_like(begins), begins, (k, v))
        if event == "beams":
            cache.swap(0, case.b - 1)
            cache.reorder([case.b - 1] * case.b)
        for b in range(1, case.b):
            if event == "fork":
                cache.fork(0, b)
            cache.truncate(b, int(shared[b]))
        begins = np.where(np.arange(case.b) == 0, begins, shared)
    for step in range(steps):
        if step == steps - 1 and event == "truncate":
            add_others(case.skv)
            for b in range(case.b):
                cache.truncate(b, int(begins[b]))
        ends = lengths if step == steps - 1 else begins + rng.integers(0, lengths - begins + 1)
        append(begins, ends, (k, v))
        begins = ends
    return cache
