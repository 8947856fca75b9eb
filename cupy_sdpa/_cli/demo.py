"""``demo``: attention on real input, end to end: computed, timed, checked against the reference, and shown."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..attention import attention
from ..device import cupy_runtime
from ..problem.tensor_spec import numpy_dtype
from ..version import __version__
from . import picture, text
from .console import CommandError, Help, add_json, milliseconds, positive, say
from .engine import Placed, add_options, place, refuse_if_too_large

Array = NDArray[Any]

#: Multiplications and rows that the check against the reference may take: about a second of either.
CHECK, ROWS = 1 << 32, 1 << 15
#: Calls that are timed on the CPU, and the seconds that they may take, on the GPU too.
CALLS, ENOUGH = 5, 1.0
#: On the GPU: so many batches of at most so many calls.
BATCHES, BATCH = 7, 20

_EPILOG = """\
examples:
  python -m cupy_sdpa demo
  python -m cupy_sdpa demo --causal --dtype float16 --plot causal.png
  python -m cupy_sdpa demo --seq 16384 --heads 32 --kv-heads 8   (on a GPU)
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="attention over a real text, checked, timed and drawn",
        description="Self-attention over the opening of Alice's Adventures in Wonderland: which words attend to which.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--causal", action="store_true", help="each word sees only itself and the words before it")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens (default: the whole text; more repeat it)")
    parser.add_argument("--heads", type=positive, metavar="N", default=8, help="query heads (default 8)")
    parser.add_argument("--kv-heads", type=positive, metavar="N", help="key and value heads (default: a quarter, or as many)")
    parser.add_argument("--head-dim", type=positive, metavar="N", default=64, help="(default 64)")
    add_options(parser, "bfloat16")
    plot = parser.add_mutually_exclusive_group()
    plot.add_argument("--plot", type=Path, metavar="FILE", help="the picture (default: attention.png, with matplotlib)")
    plot.add_argument("--no-plot", action="store_true", help="no picture")
    add_json(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``demo``; gives 1 where the result is wrong.

    Raises:
        CommandError: it cannot be done.
    """
    causal, query_heads, head_dim = arguments.causal, arguments.heads, arguments.head_dim
    key_heads = arguments.kv_heads or (query_heads // 4 if query_heads % 4 == 0 else query_heads)
    if query_heads % key_heads:
        raise CommandError(f"--heads {query_heads} is not a multiple of --kv-heads {key_heads}")
    if arguments.plot and not picture.importable():
        raise CommandError("--plot needs matplotlib: pip install 'cupy-sdpa[plot]'")
    whole = text.tokens()
    count = arguments.seq or len(whole)
    dtype = numpy_dtype(arguments.dtype)
    refuse_if_too_large(2 * (query_heads + key_heads) * head_dim * count * (4 + dtype.itemsize), f"--seq {count}")
    words = [whole[i % len(whole)] for i in range(count)]
    q, k, v = (array.astype(dtype) for array in text.heads(whole, count, query_heads, key_heads, head_dim))
    placed = place(arguments.engine, (q, k, v), causal=causal)

    sees = "itself and those before" if causal else "all words"
    say("cupy_sdpa", f"{__version__}, self-attention over a text: every word attends to {sees}")
    say("text", f"{text.title()}: {count} tokens, {len(set(words))} different")
    say("", "q, k and v are made from which words stand near each other in it; nothing is trained")
    say("engine", str(placed))
    say("shapes", f"q {q.shape}, k and v {k.shape}: (head_dim, heads, seq, batch), {dtype}")
    say("call", f"cupy_sdpa.attention(q, k, v{', causal=True' if causal else ''})")
    out, first, median, repeats = _timed(lambda: attention(*placed.arrays, causal=causal), placed.on_gpu)
    say("time", f"{milliseconds(median)} a call, the median of {repeats}; the first took {milliseconds(first)}")
    say("plan", str(placed.plan).split("\n")[0] if placed.plan else "none needed: numpy computes the steps one by one")
    right = _check(out, q, k, v, causal, placed)

    shown = text.interesting(words, 3)
    lines = text.weights(q, k, 0, np.array(shown), causal)
    for label, i, weight in zip(("attention", "(head 0)", ""), shown, lines, strict=False):
        found = ", ".join(f"{word} {share:.3f}" for word, share in text.strongest(weight, words, i, 3))
        say(label, f"{words[i]!r} attends to {f'{found}, ' if found else ''}itself {weight[i]:.3f}")
    _picture(arguments, words, q, k, shown[0])
    return 0 if right else 1


def _timed(call: Callable[[], Any], on_gpu: bool) -> tuple[Array, float, float, str]:
    """A call's result, as a numpy array; the seconds that the first call took, the median of more, and of how many."""
    started = time.perf_counter()
    out = call()
    if not on_gpu:
        times = [time.perf_counter() - started]
        while len(times) < CALLS and sum(times) < ENOUGH:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return out, times[0], float(np.median(times)), f"{len(times)} call{'s' * (len(times) > 1)}"
    cuda = cupy_runtime.cupy().cuda
    cuda.get_current_stream().synchronize()
    first = time.perf_counter() - started
    call()
    cuda.get_current_stream().synchronize()
    second = time.perf_counter() - started - first  # the first one also loads the kernel
    calls = max(1, min(BATCH, int(ENOUGH / BATCHES / second)))
    events = [cuda.Event() for _ in range(BATCHES + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(calls):  # several, so that it is the GPU that is timed, not Python's launching, where it is slower
            call()
        event.record()
    events[-1].synchronize()
    batches = [cuda.get_elapsed_time(a, b) for a, b in itertools.pairwise(events)]  # milliseconds
    median = float(np.median(batches)) / calls / 1e3
    return cupy_runtime.cupy().asnumpy(out), first, median, f"{BATCHES} batches of {calls}, by CUDA events"


def _check(out: Array, q: Array, k: Array, v: Array, causal: bool, placed: Placed) -> bool:
    """Compare with the float64 reference, where it is quick only in part, and say so."""
    head_dim, heads, count, _ = q.shape
    rows = _rows(count, min(CHECK // (2 * head_dim * heads * count), ROWS // heads), causal)
    exact = _for_rows(lambda *a, **o: reference.attention(*a, **o)[0], q, k, v, rows, causal)
    error = float(np.abs(out[:, :, rows].astype(np.float64) - exact).max())
    allowed = rounding(q, k, v)
    checked = f"{'all' if len(rows) == count else f'{heads * len(rows)} of'} {heads * count} rows checked"
    say("error", f"{error:.1e} at most against the float64 reference ({checked})")
    by_numpy = ""
    if placed.on_gpu:
        naive = _for_rows(attention, q, k, v, rows, causal)
        by_numpy = f"; numpy in {q.dtype} errs by {np.abs(naive.astype(np.float64) - exact).max():.1e}"
    right = error <= allowed
    explained = f"rounding to {q.dtype} explains up to {allowed:.1e} in values up to {np.abs(exact).max():.1f}"
    say("", f"{'right' if right else 'WRONG'}: {explained}{by_numpy}")
    return right


def rounding(q: Array, k: Array, v: Array) -> float:
    """The error that rounding explains.

    The weights and the result are each rounded to the dtype, half an epsilon of at most the largest value; the scores to
    the accumulator's, which the exponential turns from an absolute into a relative error.
    """
    accumulator = np.float64 if q.dtype == np.float64 else np.float32
    longest_q, longest_k = (float(np.linalg.norm(x.astype(np.float64), axis=0).max()) for x in (q, k))
    scores = longest_q * longest_k / math.sqrt(q.shape[0])
    epsilon = float(np.spacing(q.dtype.type(1))) + 2 * float(np.finfo(accumulator).eps) * scores
    return epsilon * float(np.abs(v.astype(np.float64)).max())


def _rows(count: int, affordable: int, causal: bool) -> NDArray[np.intp]:
    """The queries to check: all, or as many as can be afforded, spread evenly with the first and the last among them."""
    if affordable >= count:
        return np.arange(count)
    if causal:  # one by one, each with keys of its own: dearer
        affordable //= 16
    return np.unique(np.linspace(0, count - 1, max(2, affordable)).astype(np.intp))


def _for_rows(attend: Callable[..., Any], q: Array, k: Array, v: Array, rows: NDArray[np.intp], causal: bool) -> Array:
    """The result for some queries only."""
    if len(rows) == q.shape[2]:
        return np.asarray(attend(q, k, v, causal=causal))
    if not causal:
        return np.asarray(attend(q[:, :, rows], k, v))
    parts = [attend(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in rows]
    return np.concatenate(parts, axis=2)


def _picture(arguments: argparse.Namespace, words: list[str], q: Array, k: Array, place: int) -> None:
    """Draw a passage of two heads, the first and one of the last key head, unless nobody wants it or matplotlib is missing."""
    if arguments.no_plot:
        return
    if not picture.importable():
        say("picture", "none, it needs matplotlib: pip install 'cupy-sdpa[plot]'")
        return
    passage = picture.window(len(words), place)
    heads = {0: "mostly by meaning"}
    if k.shape[1] > 1:
        heads[q.shape[1] - q.shape[1] // k.shape[1]] = "mostly by place"
    maps = [
        (f"head {head}, which attends {how}", text.weights(q, k, head, passage, arguments.causal)[:, passage])
        for head, how in heads.items()
    ]
    path = arguments.plot or Path("attention.png")
    try:
        picture.draw(path, [words[i] for i in passage], maps, f"Attention within a passage of {text.title()}")
    except CommandError as error:
        if arguments.plot:
            raise
        say("picture", f"none: {error}")  # nobody asked for it here
    else:
        say("picture", str(path))
