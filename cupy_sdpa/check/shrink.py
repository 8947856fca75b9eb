"""Make a finding as small as it goes while it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .cases.case import Case
from .verify.outcome import Outcome

#: Asks what a case comes to.
Ask = Callable[[Case], Outcome]


def alike(one: Outcome, other: Outcome) -> bool:
    """Whether two findings are of one kind: wrong results, a crash, a hang, or the same exception."""
    return one.kind == other.kind and (one.kind != "exception" or one.what == other.what)


def shrink(case: Case, outcome: Outcome, ask: Ask, seconds: float = 60.0) -> tuple[Case, Outcome]:
    """The smallest case that was found to fail in the same way, and what it comes to.

    Args:
        case, outcome: the finding.
        ask: runs a case in a process of its own.
        seconds: after which the smallest so far is given.
    """
    end, tried = time.monotonic() + seconds, {repr(case)}
    progress = True
    while progress:
        progress = False
        for smaller in candidates(case):
            if time.monotonic() > end:
                return case, outcome
            if repr(smaller) in tried:
                continue
            tried.add(repr(smaller))
            found = ask(smaller)
            if found.found and alike(found, outcome):
                case, outcome, progress = smaller, found, True
                break
    return case, outcome


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, those that take most away first."""
    if case.layouts:
        yield case.with_(layouts={})
    if len(case.options) > 1:
        for name in case.options:  # one option alone, with what it needs
            others = [other for other in case.options if other != name]
            alone = case.without(*others)
            if alone.options:
                yield alone
    for name in case.options:
        yield case.without(name)
    gradients = ("return_dbias", "return_dsinks", "return_dtensors")
    if case.backward and not any(name in case.options for name in gradients):
        yield case.with_(backward=False)
    for name in case.layouts:
        yield case.with_(layouts={other: layout for other, layout in case.layouts.items() if other != name})
    yield from _smaller_sizes(case)
    yield from _plainer_options(case)
    plain = "float32" if case.engine == "cpu" else "float16"
    if case.dtype != plain:
        yield case.with_(dtype=plain)


def _smaller_sizes(case: Case) -> Iterator[Case]:
    unit = 1 if case.engine == "cpu" else 8
    if case.d != case.dv and case.dv:
        yield case.with_(dv=case.d)
    for n in _less(case.b, 1):
        yield case.with_(b=n)
    for n in _less(case.hkv, 1):
        yield case.with_(hkv=n, hq=case.hq // case.hkv * n)
    if case.hkv:
        for n in _less(case.hq // case.hkv, 1):
            yield case.with_(hq=case.hkv * n)
    if case.sq == case.skv:
        for n in _less(case.sq, 1):
            yield case.with_(sq=n, skv=n)
    for n in _less(case.sq, 1):
        yield case.with_(sq=n)
    for n in _less(case.skv, 1):
        yield case.with_(skv=n)
    if case.d == case.dv:
        for n in _less(case.d, unit):
            yield case.with_(d=n, dv=n)
    for n in _less(case.d, unit):
        yield case.with_(d=n)
    for n in _less(case.dv, unit):
        yield case.with_(dv=n)


def _less(n: int, unit: int) -> list[int]:
    """Numbers below n to try, the smallest first.

    >>> _less(100, 1), _less(64, 8), _less(1, 1)
    ([1, 2, 50, 64, 99], [8, 16, 32, 56], [])
    """
    steps = {unit, 2 * unit, n // 2 // unit * unit, n - unit}
    power = 1 << (n - 1).bit_length() >> 1 if n > 1 else 0
    return sorted(m for m in {*steps, power // unit * unit} if unit <= m < n)


def _plainer_options(case: Case) -> Iterator[Case]:
    """Options with simpler values."""
    for name, plainer in _PLAINER.items():
        if name in case.options and case.options[name] != plainer:
            yield case.with_(options=case.options | {name: plainer})
    for name in ("mask", "bias"):
        if name in case.options:
            axes, *rest = case.options[name]
            for i, axis in enumerate(axes):
                if axis != "1":
                    yield case.with_(options=case.options | {name: (f"{axes[:i]}1{axes[i + 1 :]}", *rest)})
            if name == "bias" and rest[0] != "float32":
                yield case.with_(options=case.options | {name: (axes, "float32", *rest[1:])})


_PLAINER = {
    "scale": 1.0,
    "causal": "top_left",
    "window": (0, 0, "top_left"),
    "seq_lens_q": "zero",
    "seq_lens_kv": "zero",
    "packed": ("full", "full", 0, 0, 0, "int32"),
    "softcap": 2.0,
    "dropout": (0.5, "seed", 0, 0),
    "score_mod": ("near_key_100", ""),
    "mask_mod": ("key_100", ""),
    "stats": True,
    "bucket": 128,
}
