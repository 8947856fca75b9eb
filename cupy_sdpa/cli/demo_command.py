"""``demo``: compute attention over a text, time it, compare it with the reference, and print the result."""

from __future__ import annotations

import argparse
import io
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import reference
from ..attention_functions import attention
from ..cudnn.library import library
from ..errors import pip_install
from ..explanation import explain
from ..problem.tensor_spec import FLOAT_DTYPES, numpy_dtype
from ..runtime import cupy_runtime
from ..version import __version__, version_text
from . import console, demo_text, machine
from .console import CommandError, add_json, milliseconds, output_file, plan_facts, positive, print_labeled, result, working

if TYPE_CHECKING:
    from ..cudnn_engine.plan import PlanInfo

Array = NDArray[Any]

#: The dtypes that cuDNN's attention supports.
CUDNN_DTYPES = ("float16", "bfloat16")

#: The maximum multiplications and rows in the comparison with the reference; either limit takes about a second.
CHECK, ROWS = 1 << 32, 1 << 15

#: The number of measurements, the seconds after which no other one begins, and on the GPU the most calls in a measurement.
ROUNDS, SECONDS, BATCH = 7, 1.0, 20
#: The number of tokens in the picture of a passage.
WINDOW = 40
#: The tokens whose time on numpy is the basis of the estimate for more of them, and the seconds from which it is printed.
SAMPLE, SHOWN = 1024, 2.0

DESCRIPTION = "Self-attention over the opening of Alice's Adventures in Wonderland: which words attend to which."
EPILOG = """\
examples:
  python -m cupy_sdpa demo
  python -m cupy_sdpa demo --causal --dtype float16 --plot causal.png
  python -m cupy_sdpa demo --seq 16384 --heads 32 --kv-heads 8   (on a GPU)
  python -m cupy_sdpa demo --engine cupy --dtype float32         (without cuDNN)

The times of numpy grow with the square of --seq; the command prints an estimate
and refuses what takes longer than --limit. A small GPT that learns the text and
continues it is in the repository: python -m examples.generation
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--causal", action="store_true", help="each word attends only to itself and earlier words")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens (default: the whole text; a longer N repeats it)")
    parser.add_argument("--heads", type=positive, default=8, metavar="N", help="query heads (default 8)")
    parser.add_argument(
        "--kv-heads",
        type=positive,
        metavar="N",
        help="key and value heads (default: a quarter of the query heads, or the same)",
    )
    parser.add_argument("--head-dim", type=positive, default=64, metavar="N", help="head dim (default 64)")
    parser.add_argument("--limit", type=positive, default=60, metavar="SECONDS", help="the longest call on numpy (default 60)")
    parser.add_argument(
        "--plot",
        type=output_file,
        nargs="?",
        const="attention.png",
        metavar="FILE",
        help="also draw the attention map (default of FILE: attention.png; needs matplotlib)",
    )
    parser.add_argument("--dtype", choices=FLOAT_DTYPES, default="bfloat16", help="dtype of the computation (default bfloat16)")
    parser.add_argument(
        "--engine",
        choices=("auto", "cudnn", "cupy", "numpy"),
        default="auto",
        help="auto (default): cuDNN if it can run, which requires float16 or bfloat16, else numpy; cupy: a GPU without cuDNN",
    )
    add_json(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run ``demo``; returns 1 if the result is wrong."""
    causal = arguments.causal
    with working("preparing the text"):
        words, (q, k, v) = _input(arguments)
    with working("planning"):
        placed = _place(arguments.engine, (q, k, v), causal=causal)
    estimate = 0.0 if placed.on_gpu else _seconds(q, k, v, causal, arguments.limit)
    _print_setup(words, q, k, causal, placed)
    if estimate > SHOWN:
        print_labeled("estimate", f"about {estimate:.0f} s per call on numpy")
    with working("timing"):
        timing = _measure(lambda: attention(*placed.arrays, causal=causal, **placed.options), placed.on_gpu)
    times = f"{milliseconds(timing.median)} per call, the median of {timing.repeats}; first call {milliseconds(timing.first)}"
    print_labeled("time", times)
    print_labeled("plan", placed.how)
    result(
        time_ms={"first": 1e3 * timing.first, "median": 1e3 * timing.median},
        plan=None if placed.plan is None else plan_facts(placed.plan),
    )
    with working("comparing with the reference"):
        out = cupy_runtime.cupy().asnumpy(timing.out) if placed.on_gpu else timing.out
        correct = _check(out, q, k, v, causal, placed)
    positions = demo_text.interesting(words, 3)
    _print_attention(words, q, k, positions, causal)
    with working("drawing"):
        _plot(arguments, words, q, k, positions[0])
    return 0 if correct else 1


def _input(arguments: argparse.Namespace) -> tuple[list[str], tuple[Array, Array, Array]]:
    """The tokens, and q, k and v."""
    query_heads, head_dim = arguments.heads, arguments.head_dim
    key_heads = arguments.kv_heads or (query_heads // 4 if query_heads % 4 == 0 else query_heads)
    if query_heads % key_heads:
        raise CommandError(f"--heads {query_heads} is not a multiple of --kv-heads {key_heads}")
    if arguments.plot and isinstance(machine.imported("matplotlib.figure"), str):
        raise CommandError(f"--plot needs matplotlib: {pip_install('plot')}")
    tokens = demo_text.tokens()
    count = arguments.seq or len(tokens)
    dtype = numpy_dtype(arguments.dtype)
    machine.check_memory(2 * (query_heads + key_heads) * head_dim * count * (4 + dtype.itemsize), f"--seq {count}")
    q, k, v = (array.astype(dtype) for array in demo_text.heads(tokens, count, query_heads, key_heads, head_dim))
    return [tokens[i % len(tokens)] for i in range(count)], (q, k, v)


class Placed(NamedTuple):
    """q, k and v on the device of the selected engine: ``cuDNN``, ``CuPy`` or ``numpy``.

    ``why`` is the reason for the selection, and ``how`` it computes, in one line.
    """

    arrays: Sequence[Any]
    engine: str
    why: str
    how: str = "none: numpy evaluates the steps one by one"
    plan: PlanInfo | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on the GPU."""
        return self.engine != "numpy"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a call that select the engine."""
        return {"engine": "cupy"} if self.engine == "CuPy" else {}


def _place(requested: str, arrays: Sequence[Array], **options: Any) -> Placed:
    """Select the engine for a call, and copy q, k and v to its device; a requested one that cannot run it is an error."""
    if requested == "numpy":
        return Placed(arrays, "numpy", "requested by --engine numpy")
    reasons, dtype = machine.obstacles_of_cupy() if requested == "cupy" else machine.obstacles(), arrays[0].dtype.name
    if requested != "cupy" and not reasons and dtype not in CUDNN_DTYPES:
        reasons = [f"cuDNN supports {' and '.join(CUDNN_DTYPES)}, not {dtype}; use --dtype bfloat16"]
    if reasons and requested == "auto":
        return Placed(arrays, "numpy", reasons[0])
    if reasons:
        raise CommandError(f"--engine {requested} cannot run here: {'; '.join(reasons)}")
    cupy = cupy_runtime.cupy()
    gpu, moved = machine.gpus()[cupy.cuda.runtime.getDevice()], [cupy.asarray(array, order="F") for array in arrays]
    if requested == "cupy":
        how = str(explain(*moved, engine="cupy", **options)).split("\n")[0]
        return Placed(moved, "CuPy", f"{gpu}, without cuDNN", f"none: {how.removeprefix('runs with ')}")
    report = explain(*moved, **options)  # builds the plan that the call uses
    if report:
        why = f"{gpu}, cuDNN {version_text(library().version)}"
        return Placed(moved, "cuDNN", why, str(report.plan).split("\n")[0], report.plan)
    refusal = console.one_line("cuDNN cannot run this:\n" + "\n".join(report.reasons))
    if requested == "cudnn":
        raise CommandError(refusal)
    return Placed(arrays, "numpy", refusal)


def _seconds(q: Array, k: Array, v: Array, causal: bool, limit: int) -> float:
    """The estimated seconds of a call on numpy, from the time of a part; 0 for a short sequence. An error above the limit."""
    count = q.shape[2]
    if count <= 2 * SAMPLE:
        return 0.0
    started = time.perf_counter()
    attention(*(np.asfortranarray(x[:, :, :SAMPLE]) for x in (q, k, v)), causal=causal)
    seconds: float = (time.perf_counter() - started) * (count / SAMPLE) ** 2
    if seconds > limit:
        longest = int(count * math.sqrt(limit / seconds)) // 100 * 100
        raise CommandError(
            f"--seq {count} would take about {seconds:.0f} s on numpy: use --seq {longest}, or --limit {math.ceil(seconds)}"
        )
    return seconds


class Timing(NamedTuple):
    """The result of the first call, its seconds, the median seconds of the repeated calls, and their number in words."""

    out: Any
    first: float
    median: float
    repeats: str


def _measure(call: Callable[[], Any], on_gpu: bool) -> Timing:
    """Time a call, first and repeated. On the GPU calls are repeated in batches, so that the launch overhead is hidden."""

    def seconds(count: int) -> tuple[Any, float]:
        started = time.perf_counter()
        for _ in range(count):
            result = call()
        if on_gpu:
            cupy_runtime.cupy().cuda.get_current_stream().synchronize()
        return result, (time.perf_counter() - started) / count

    out, first = seconds(1)
    if on_gpu:  # the first call also loads the kernel
        count = max(1, min(BATCH, int(SECONDS / ROUNDS / seconds(1)[1])))
        times = [seconds(count)[1]]
    else:
        count, times = 1, [first]
    while len(times) < ROUNDS and sum(times) * count < SECONDS:
        times.append(seconds(count)[1])
    repeats = f"{len(times)} times {console.counted(count, 'call')}" if on_gpu else console.counted(len(times), "call")
    return Timing(out, first, float(np.median(times)), repeats)


def _print_setup(words: list[str], q: Array, k: Array, causal: bool, placed: Placed) -> None:
    """Print the input, the engine and the call."""
    attended = "itself and earlier words" if causal else "all words"
    print_labeled("cupy_sdpa", f"{__version__}, self-attention over a text: every word attends to {attended}")
    print_labeled("text", f"{demo_text.title()}: {len(words)} tokens, {len(set(words))} different")
    print_labeled("", "q, k and v are computed from the co-occurrence of words; nothing is trained")
    print_labeled("engine", f"{placed.engine} ({placed.why})")
    print_labeled("shapes", f"q {q.shape}, k and v {k.shape}: (head_dim, heads, seq, batch), {q.dtype}")
    result(
        text={"tokens": len(words), "different": len(set(words))}, engine={"name": placed.engine, "reason": placed.why},
        causal=causal, dtype=str(q.dtype),
        shapes={"q": list(q.shape), "k": list(k.shape), "v": list(k.shape)},
    )  # fmt: skip
    own = ", engine='cupy'" * bool(placed.options)
    print_labeled("call", f"cupy_sdpa.attention(q, k, v{', causal=True' if causal else ''}{own})")


def _check(out: Array, q: Array, k: Array, v: Array, causal: bool, placed: Placed) -> bool:
    """Compare the result with the float64 reference, in some rows if all would take too long; print and return the outcome."""
    head_dim, heads, count, _ = q.shape
    rows = _rows(count, min(CHECK // (2 * head_dim * heads * count), ROWS // heads))
    exact = _for_rows(lambda *a, **o: reference.attention(*a, **o)[0], q, k, v, rows, causal)
    error = float(np.abs(out[:, :, rows].astype(np.float64) - exact).max())
    allowed = rounding(q, k, v)
    checked = f"{'all' if len(rows) == count else f'{heads * len(rows)} of'} {heads * count} rows checked"
    print_labeled("error", f"{error:.1e} at most against the float64 reference ({checked})")
    by_numpy = ""
    if placed.on_gpu:
        naive = _for_rows(attention, q, k, v, rows, causal)
        by_numpy = f"; the error of numpy in {q.dtype} is {np.abs(naive.astype(np.float64) - exact).max():.1e}"
    correct = error <= allowed
    result(error={"maximum": error, "allowed": allowed, "correct": correct, "rows": heads * len(rows), "of": heads * count})
    bound = f"rounding to {q.dtype} explains up to {allowed:.1e} in values up to {np.abs(exact).max():.1f}"
    print_labeled("", f"{'correct' if correct else 'WRONG'}: {bound}{by_numpy}")
    return correct


def rounding(q: Array, k: Array, v: Array) -> float:
    """The error that rounding explains.

    The weights and the result are each rounded to the dtype: at most half an epsilon times the largest value. The scores
    are rounded to the accumulator's dtype; the exponential turns that absolute error into a relative one.
    """
    accumulator = np.float64 if q.dtype == np.float64 else np.float32
    longest_q, longest_k = (float(np.linalg.norm(x.astype(np.float64), axis=0).max()) for x in (q, k))
    scores = longest_q * longest_k / math.sqrt(q.shape[0])
    epsilon = float(np.spacing(q.dtype.type(1))) + 2 * float(np.finfo(accumulator).eps) * scores
    return epsilon * float(np.abs(v.astype(np.float64)).max())


def _rows(count: int, affordable: int) -> NDArray[np.intp]:
    """The queries to check: all, or evenly spaced ones that include the first and the last."""
    if affordable >= count:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, max(2, affordable)).astype(np.intp))


def _for_rows(attend: Callable[..., Any], q: Array, k: Array, v: Array, rows: NDArray[np.intp], causal: bool) -> Array:
    """The result for some queries only, by a mask if it is causal."""
    mask = {"mask": (np.arange(k.shape[2])[:, None] <= rows)[:, :, None, None]} if causal else {}
    return np.asarray(attend(q[:, :, rows], k, v, **mask))


def _print_attention(words: list[str], q: Array, k: Array, positions: list[int], causal: bool) -> None:
    """Print the words that some words attend to most."""
    facts, rows = [], demo_text.weights(q, k, 0, np.array(positions), causal)
    for label, i, weight in zip(("attention", "(head 0)", ""), positions, rows, strict=False):
        strongest = demo_text.strongest(weight, words, i, 3)
        others = "".join(f"{word} {share:.3f}, " for word, share in strongest)
        print_labeled(label, f"{words[i]!r} attends to {others}itself {weight[i]:.3f}")
        found = [{"word": word, "weight": float(share)} for word, share in strongest]
        facts.append({"word": words[i], "position": int(i), "itself": float(weight[i]), "others": found})
    result(attention=facts, picture=None)


def _plot(arguments: argparse.Namespace, words: list[str], q: Array, k: Array, position: int) -> None:
    """Draw the attention maps of a passage for two heads, the first one and one of the last key head."""
    if arguments.plot is None:
        return
    start = max(0, min(position - WINDOW // 2, len(words) - WINDOW))
    passage = np.arange(start, min(start + WINDOW, len(words)))
    heads = {0: "mostly words"}
    if k.shape[1] > 1:
        heads[q.shape[1] - q.shape[1] // k.shape[1]] = "mostly positions"
    maps = [
        (f"head {head}: keys are {kind}", demo_text.weights(q, k, head, passage, arguments.causal)[:, passage])
        for head, kind in heads.items()
    ]
    _draw(arguments.plot, [words[i] for i in passage], maps, f"Attention within a passage of {demo_text.title()}")
    print_labeled("picture", str(arguments.plot))
    result(picture=str(arguments.plot))


def _draw(path: Path, words: Sequence[str], maps: Sequence[tuple[str, NDArray[Any]]], heading: str) -> None:
    """Write the figure with a heading, in the format of the file: a title and the weights ``(queries, keys)`` of each head."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 * len(maps), 8.5), layout="constrained")
    figure.suptitle(heading, fontsize=15)
    for axes, (name, weights) in zip(np.atleast_1d(figure.subplots(1, len(maps))), maps, strict=True):
        # A token attends to itself most, so the color scale covers the other weights only.
        others = weights[~np.eye(len(words), dtype=bool)]
        image = axes.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, others.max(initial=0) or 1))
        axes.set_title(name, fontsize=13)
        axes.set_xticks(range(len(words)), words, rotation=90, fontsize=9)
        axes.set_yticks(range(len(words)), words, fontsize=9)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        figure.colorbar(image, ax=axes, shrink=0.7, extend="max", label="attention weight")
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=110, format=path.suffix[1:] or "png")
        path.write_bytes(drawn.getvalue())  # at once, so that an interrupted command leaves no part of a figure
    except (OSError, ValueError) as error:  # ValueError: unknown format
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"cannot write {path}: {reason}") from error
