"""The CPU engine against plain numpy (einsum and softmax): time and memory, forward and backward, without a GPU."""

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

from cupy_sdpa.attention import attention, attention_backward
from cupy_sdpa.version import __version__

from ..common.accuracy import WrongResultError, largest_difference
from ..common.timing import interleaved, ratio

Array = NDArray[Any]

#: The shape (head_dim, heads, seq, batch) of q, k, v and out, and the number of rounds.
SHAPE = (64, 8, 2048, 1)
ROUNDS = 5
#: The largest accepted difference, relative to the largest magnitude.
TOLERANCE = 1e-4


def probabilities(q: Array, k: Array) -> Array:
    """The softmax of the scores, ``(B, H, Sq, Skv)``."""
    scores = _einsum("dhib,dhjb->bhij", q, k) / math.sqrt(q.shape[0])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def _einsum(subscripts: str, *arrays: Array) -> Array:
    """einsum by matrix products where numpy finds them."""
    return np.asarray(np.einsum(subscripts, *arrays, optimize=True))


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


def calls(shape: tuple[int, int, int, int]) -> dict[str, dict[str, Callable[[], Sequence[Any]]]]:
    """The calls of the CPU engine and of plain numpy on the same inputs, by direction."""
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


def measure(
    shape: tuple[int, int, int, int] = SHAPE, rounds: int = ROUNDS, progress: Callable[[int, int, str], None] | None = None
) -> list[dict[str, Any]]:
    """Measure time and memory of both contenders in both directions.

    Args:
        shape: ``(head_dim, heads, seq, batch)``.
        rounds: the number of rounds.
        progress: called with the number of finished directions, their total, and the next one's name.

    Returns:
        A row for each contender and direction.

    Raises:
        WrongResultError: the results differ.
    """
    rows = []
    every = calls(shape)
    for number, (direction, contenders) in enumerate(every.items()):
        if progress:
            progress(number, len(every), f"{_name(shape)} {direction}")
        difference = _difference(contenders, direction)
        times = interleaved({name: functools.partial(_ms, call) for name, call in contenders.items()}, rounds)
        for name, call in contenders.items():
            rows.append({
                **_problem(shape), "direction": direction, "dtype": "float32", "way": name,
                "ms": statistics.median(times[name]), "rounds": rounds, "clock": "wall clock", "peak_bytes": peak_bytes(call),
                "numpy": np.__version__, "python": platform.python_version(), "cupy_sdpa": __version__,
            })  # fmt: skip
            if name != "ours":
                over = ratio(times["ours"], times[name])
                rows[-1] |= {"ours_over_it": over, "best_peer": True, "difference": difference}
    return rows


def _name(shape: tuple[int, int, int, int]) -> str:
    _, h, s, _ = shape
    return f"cpu-{h}-heads-{s}"


def _problem(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """The columns that describe the problem."""
    d, h, s, b = shape
    return {"preset": _name(shape), "b": b, "hq": h, "hkv": h, "sq": s, "skv": s, "d": d, "dv": d, "causal": False}


def _difference(contenders: dict[str, Callable[[], Sequence[Any]]], direction: str) -> float:
    """The difference of the two results.

    Raises:
        WrongResultError: it is above the tolerance, or NaN.
    """
    difference = largest_difference(contenders["ours"](), contenders["numpy"]())
    if not difference < TOLERANCE:
        raise WrongResultError(f"the CPU engine and numpy differ by {difference:.1e} of the largest value, {direction}")
    return difference


def _ms(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3
