"""Shrink a failing case: look for the smallest case that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .case import GRADIENTS, Case, Outcome, Paged
from .weight_options import ROWS


def same_failure(a: Outcome, b: Outcome) -> bool:
    """True if two findings are of the same kind: wrong results, a crash, a hang, or the same exception."""
    return a.kind == b.kind and (a.kind != "exception" or a.cause == b.cause)


def shrink(case: Case, outcome: Outcome, run_case: Callable[[Case], Outcome], seconds: float = 60.0) -> tuple[Case, Outcome]:
    """Return the smallest case (found in time) that fails in the same way as a finding, and its outcome."""
    end, tried = time.monotonic() + seconds, {repr(case)}
    progress = True
    while progress:
        progress = False
        for candidate in candidates(case):
            if time.monotonic() > end:
                return case, outcome
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            result = run_case(candidate)
            if result.is_finding and same_failure(result, outcome):
                case, outcome, progress = candidate, result, True
                break
    return case, outcome


def candidates(case: Case) -> Iterator[Case]:
    """Generate simpler cases, the simplest first."""
    for candidate in _all_candidates(case):
        if not candidate.paged or candidate.skv % candidate.paged.page == 0:
            yield candidate


def _all_candidates(case: Case) -> Iterator[Case]:
    """Generate simpler cases; with pages, Skv may not be a multiple of the page size."""
    if case.layouts:
        yield case.with_(layouts={})
    if len(case.options) > 1:
        for name in case.options:
            single = case.without(*(other for other in case.options if other != name))
            if single.options:
                yield single
    for name in case.options:
        yield case.without(name)
    if case.backward and not any(name in case.options for name in (*GRADIENTS, "dstats")):
        yield case.with_(backward=False)
    for name in case.layouts:
        yield case.with_(layouts={other: layout for other, layout in case.layouts.items() if other != name})
    yield from _smaller_sizes(case)
    yield from _simpler_options(case)
    dtype = "float32" if case.is_interpreted else "float16"
    if case.dtype != dtype:
        yield case.with_(dtype=dtype)


def _smaller_sizes(case: Case) -> Iterator[Case]:
    """Generate cases with one smaller size, or with two equal sizes that are both smaller."""
    unit = 1 if case.is_interpreted else 8
    if case.d != case.dv and case.dv:
        yield case.with_(dv=case.d)
    for n in _smaller_numbers(case.b, 1):
        yield case.with_(b=n)
    for n in _smaller_numbers(case.hkv, 1):
        yield case.with_(hkv=n, hq=case.hq // case.hkv * n)
    for n in _smaller_numbers(case.hq // max(case.hkv, 1), 1):
        yield case.with_(hq=case.hkv * n)
    units = {"sq": 1, "skv": case.paged.page if case.paged else 1, "d": unit, "dv": unit}
    for pair in (("sq", "skv"), ("d", "dv")):
        one, other = (getattr(case, name) for name in pair)
        for names in ([pair] if one == other else []) + [pair[:1], pair[1:]]:
            for n in _smaller_numbers(getattr(case, names[0]), units[names[0]]):
                yield case.with_(**dict.fromkeys(names, n))


def _smaller_numbers(n: int, unit: int) -> list[int]:
    """Multiples of a unit below n to try, the smallest first.

    >>> _smaller_numbers(100, 1), _smaller_numbers(64, 8), _smaller_numbers(1, 1)
    ([1, 2, 50, 64, 99], [8, 16, 32, 56], [])
    """
    steps = {unit, 2 * unit, n // 2 // unit * unit, n - unit}
    power = 1 << (n - 1).bit_length() >> 1 if n > 1 else 0
    return sorted(m for m in {*steps, power // unit * unit} if unit <= m < n)


def _simpler_options(case: Case) -> Iterator[Case]:
    """Generate cases with a simpler value of one option."""
    for name, value in _SIMPLEST.items():
        if name in case.options and case.options[name] != value:
            yield case.with_(options=case.options | {name: value})
    if paged := case.paged:
        simplest = Paged(paged.page, "pages", "full", 0, "unowned", shared=False, moved=False)
        simpler = [simplest, *(paged._replace(**{name: getattr(simplest, name)}) for name in Paged._fields)]
        sizes = (page for page in _smaller_numbers(paged.page, 1) if case.is_interpreted or page & (page - 1) == 0)
        simpler += [paged._replace(page=page) for page in sizes]
        yield from (case.with_(options=case.options | {"paged": tuple(value)}) for value in simpler if value != paged)
    for name in ("mask", "bias"):
        if name in case.options:
            axes, *rest = case.options[name]
            for i, axis in enumerate(axes):
                if axis != "1":
                    yield case.with_(options=case.options | {name: (f"{axes[:i]}1{axes[i + 1 :]}", *rest)})
            if name == "bias" and rest[0] != "float32":
                yield case.with_(options=case.options | {name: (axes, "float32", *rest[1:])})


#: The simplest value of each option, except of arrays with axes, which lose one axis after the other.
_SIMPLEST = {
    "scale": 1.0, "head_scales": "random", "causal": "top_left", "window": (0, 0, "top_left"), "seq_lens_q": "zero",
    "seq_lens_kv": "zero",
    "packed": ("full", "full", 0, 0, 0, "int32"), "dropout": (0.5, "seed", 0, 0),
    "score_mod": ("near_key_100", ""), "mask_mod": ("key_100", ""), "tree": "parents", "stats": True, "parallel": ("ring", 2),
    "shared_prefix": 1, "merge": 2, "cache": (1, "full", 1, "", False), "weight_sums": "query heads", "weight_entropy": True,
    "jvp": "q", "dstats": True, "bucket": 128,
    **{name: row.simplest for name, row in ROWS.items() if type(row.simplest) is not tuple},
}  # fmt: skip
