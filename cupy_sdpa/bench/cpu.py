"""The interpreter beside plain numpy, without a GPU: einsum and softmax, forward and backward, time and memory."""

from __future__ import annotations

import functools
import math
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..attention import attention, attention_backward
from ..version import __version__
from .measure import Wrong, farthest, interleaved, ratio

Array = NDArray[Any]

#: Sizes of what is timed, (head_dim, heads, seq, batch), its name in the table, and its rounds.
SHAPE = (64, 8, 2048, 1)
ROUNDS = 5
#: The largest difference over the largest magnitude that is taken for the same result.
TOLERANCE = 1e-4


def probabilities(q: Array, k: Array) -> Array:
    """The softmax of all scores, ``(B, H, Sq, Skv)``."""
    scores = _einsum("dhib,dhjb->bhij", q, k) / math.sqrt(q.shape[0])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _einsum(subscripts: str, *arrays: Array) -> Array:
    """By matrix products, where numpy finds them."""
    return np.asarray(np.einsum(subscripts, *arrays, optimize=True))


def plain_forward(q: Array, k: Array, v: Array) -> Sequence[Array]:
    """Attention as the formula says it."""
    return (_einsum("bhij,dhjb->dhib", probabilities(q, k), v),)


def plain_backward(dout: Array, q: Array, k: Array, v: Array) -> Sequence[Array]:
    """Its gradients as the formulas say them."""
    p = probabilities(q, k)
    dv = _einsum("bhij,dhib->dhjb", p, dout)
    dp = _einsum("dhib,dhjb->bhij", dout, v)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[0])
    return _einsum("bhij,dhjb->dhib", ds, k), _einsum("bhij,dhib->dhjb", ds, q), dv


def calls(shape: tuple[int, int, int, int]) -> dict[str, dict[str, Callable[[], Sequence[Any]]]]:
    """Of both directions, the interpreter's call and plain numpy's, on the same numbers."""
    rng = np.random.default_rng(0)
    dout, q, k, v = (np.asfortranarray(rng.standard_normal(shape, np.float32)) for _ in range(4))
    out, stats = attention(q, k, v, return_stats=True)
    return {
        "forward": {"ours": lambda: (attention(q, k, v),), "numpy": lambda: plain_forward(q, k, v)},
        "backward": {
            "ours": lambda: attention_backward(dout, q, k, v, out, stats),
            "numpy": lambda: plain_backward(dout, q, k, v),
        },
    }


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that a call has allocated at once, its results among them."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        results = call()
        _, most = tracemalloc.get_traced_memory()
        del results
    finally:
        tracemalloc.stop()
    return most - before


def measure(
    shape: tuple[int, int, int, int] = SHAPE, rounds: int = ROUNDS, progress: Callable[[int, int, str], None] | None = None
) -> list[dict[str, Any]]:
    """The rows of the CPU: time and memory of the interpreter and of plain numpy, both directions.

    Raises:
        Wrong: their results differ.
    """
    d, h, s, b = shape
    rows = []
    every = calls(shape)
    for number, (direction, ways) in enumerate(every.items()):
        name = f"cpu-{h}-heads-{s}"
        if progress:
            progress(number, len(every), f"{name} {direction}")
        ours, plain = (ways[way]() for way in ("ours", "numpy"))
        difference = farthest(ours, plain)
        if not difference < TOLERANCE:
            raise Wrong(f"the interpreter and numpy differ by {difference:.1e} of the largest value, {direction}")
        del ours, plain
        timers = {way: functools.partial(_ms, call) for way, call in ways.items()}
        times = interleaved(timers, rounds)
        for way, call in ways.items():
            peer = {"ours_over_it": ratio(times["ours"], times[way]), "best_peer": True, "difference": difference}
            sizes = {"b": b, "hq": h, "hkv": h, "sq": s, "skv": s, "d": d, "dv": d, "causal": False}
            what = {"preset": name, **sizes, "direction": direction, "dtype": "float32", "way": way}
            figures = {
                "ms": statistics.median(times[way]),
                "rounds": rounds,
                "clock": "wall clock",
                "peak_bytes": peak_bytes(call),
            }
            used = {"numpy": np.__version__, "python": platform.python_version(), "cupy_sdpa": __version__}
            rows.append({**what, **figures, **used, **({} if way == "ours" else peer)})
    return rows


def _ms(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
