"""The CPU engine against plain numpy: einsum and softmax, as in the formula. It needs no GPU."""

from __future__ import annotations

import functools
import math
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_sdpa.attention_functions import attention, attention_backward
from cupy_sdpa.cli.console import CommandError
from cupy_sdpa.version import __version__

from .device import largest_difference
from .timing import interleaved, ratio

Array = NDArray[Any]
Calls = dict[str, Callable[[], Sequence[Any]]]

#: The shape (head_dim, heads, seq, batch) of q, k, v and out, and the number of rounds.
SHAPE, ROUNDS = (64, 8, 2048, 1), 5
#: The largest accepted difference, relative to the largest magnitude.
TOLERANCE = 1e-4


def _einsum(subscripts: str, *arrays: Array) -> Array:
    """einsum by matrix products where numpy finds them."""
    return np.asarray(np.einsum(subscripts, *arrays, optimize=True))


def probabilities(q: Array, k: Array) -> Array:
    """The softmax of the scores, ``(B, H, Sq, Skv)``."""
    scores = _einsum("dhib,dhjb->bhij", q, k) / math.sqrt(q.shape[0])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def plain_forward(q: Array, k: Array, v: Array) -> Sequence[Array]:
    """out = softmax(q k / sqrt(D)) v."""
    return (_einsum("bhij,dhjb->dhib", probabilities(q, k), v),)


def plain_backward(dout: Array, q: Array, k: Array, v: Array) -> Sequence[Array]:
    """The gradients dq, dk and dv."""
    p = probabilities(q, k)
    dv = _einsum("bhij,dhib->dhjb", p, dout)
    dp = _einsum("dhib,dhjb->bhij", dout, v)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) / math.sqrt(q.shape[0])
    return _einsum("bhij,dhjb->dhib", ds, k), _einsum("bhij,dhib->dhjb", ds, q), dv


def peak_bytes(call: Callable[[], Any]) -> int:
    """The peak of the memory that a call allocates, results included."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        results = call()
        _, peak = tracemalloc.get_traced_memory()
        del results
    finally:
        tracemalloc.stop()
    return peak - before


def rows(rounds: int = ROUNDS, shape: tuple[int, int, int, int] = SHAPE) -> Iterator[dict[str, Any]]:
    """A row with the time and memory of each contender and direction.

    Args:
        rounds: the number of rounds.
        shape: ``(head_dim, heads, seq, batch)``.

    Raises:
        CommandError: the results differ.
    """
    rng = np.random.default_rng(0)
    dout, q, k, v = (np.asfortranarray(rng.standard_normal(shape, np.float32)) for _ in range(4))
    out, stats = attention(q, k, v, return_stats=True)
    every: dict[str, Calls] = {
        "forward": {"ours": lambda: (attention(q, k, v),), "numpy": lambda: plain_forward(q, k, v)},
        "backward": {
            "ours": lambda: attention_backward(dout, q, k, v, out, stats),
            "numpy": lambda: plain_backward(dout, q, k, v),
        },
    }
    d, h, s, b = shape
    problem = {"preset": f"cpu-{h}-heads-{s}", "b": b, "hq": h, "hkv": h, "sq": s, "skv": s, "d": d, "dv": d, "causal": False}
    versions = {"numpy": np.__version__, "python": platform.python_version(), "cupy_sdpa": __version__}
    for direction, calls in every.items():
        difference = largest_difference(calls["ours"](), calls["numpy"]())
        if not difference < TOLERANCE:
            raise CommandError(f"the CPU engine and numpy differ by {difference:.1e} of the largest value, {direction}")
        times = interleaved({way: functools.partial(_ms, call) for way, call in calls.items()}, rounds)
        for way, call in calls.items():
            compared = {"ours_over_it": ratio(times["ours"], times["numpy"]), "best_peer": True, "difference": difference}
            yield {
                **problem, "direction": direction, "dtype": "float32", "way": way, "ms": statistics.median(times[way]),
                "rounds": rounds, "clock": "wall clock", "peak_bytes": peak_bytes(call), **versions,
                **(compared if way == "numpy" else {}),
            }  # fmt: skip


def _ms(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
