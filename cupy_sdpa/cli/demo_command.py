"""``demo``: compute attention over a text, time it, compare it with the reference, and print or draw the weights.

Nothing is trained. The vector of a word depends on the words near it: the eigenvectors (Levy and Goldberg 2014) of positive
pointwise mutual information (Church and Hanks 1990). Positions are the sinusoids of Vaswani et al. 2017, section 3.5.
"""

from __future__ import annotations

import argparse
import importlib.resources
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, reference
from ..attention_functions import attention
from ..explanation import explain
from ..extend import FLOAT_DTYPES, cupy_runtime, numpy_dtype
from . import machine
from .console import (
    CommandError,
    command_errors,
    milliseconds,
    one_line,
    output_file,
    pip_install,
    positive,
    print_labeled,
    working,
)

DESCRIPTION = "Self-attention over the opening of Alice's Adventures in Wonderland: which words attend to which."
EPILOG = """\
examples:
  python -m cupy_sdpa demo --causal --dtype float16 --plot causal.png
  python -m cupy_sdpa demo --engine cupy --dtype float32   (without cuDNN)

A small GPT that learns the text and continues it is in the repository:
python -m examples.generation
"""

HEADS, HEAD_DIM = 8, 64
#: The words whose weights are printed, the tokens in the picture, and the longest sequence of which every query is checked.
INTERESTING, WINDOW, CHECKED = ("marmalade", "watch", "garden"), 40, 2048


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add, engines = parser.add_argument, "auto (default): cuDNN if it can run, else numpy; cupy: a GPU without cuDNN"
    add("--causal", action="store_true", help="each word attends only to itself and earlier words")
    add("--seq", type=positive, metavar="N", help="tokens (default: the whole text; a longer N repeats it)")
    add("--dtype", choices=FLOAT_DTYPES, default="bfloat16", help="dtype of the computation (default bfloat16)")
    add("--engine", choices=("auto", "cudnn", "cupy", "numpy"), default="auto", help=engines)
    drawn = "also draw the weights (FILE defaults to attention.png; needs matplotlib)"
    add("--plot", type=output_file, nargs="?", const="attention.png", metavar="FILE", help=drawn)


def command(arguments: argparse.Namespace) -> int:
    """Run ``demo``; returns 1 if the result is wrong."""
    if arguments.plot and isinstance(machine.imported("matplotlib.figure"), str):
        raise CommandError(f"--plot needs matplotlib: {pip_install('plot')}")
    options: dict[str, Any] = {"causal": True} if arguments.causal else {}
    with working("computing"):
        title, words, (q, k, v) = _input(arguments.seq, numpy_dtype(arguments.dtype))
        arrays, engine, plan = _on_engine(arguments.engine, (q, k, v), options)
        out, times = _time(arrays, options)
        error, allowed, checked = _compare(out, q, k, v, arguments.causal)
    attended, count = "itself and earlier" if arguments.causal else "all", HEADS * len(words)
    per_call = f"{milliseconds(float(np.median(times[1:])))} per call, the median of {len(times) - 1}"
    print_labeled("cupy_sdpa", f"{__version__}, self-attention over a text: every word attends to {attended} words")
    print_labeled("text", f"{title}: {len(words)} tokens, {len(set(words))} different")
    print_labeled("", "q, k and v are computed from the co-occurrence of words; nothing is trained")
    print_labeled("engine", engine)
    print_labeled("shapes", f"q {q.shape}, k and v {k.shape}: (head_dim, heads, seq, batch), {q.dtype}")
    print_labeled("call", f"cupy_sdpa.attention(q, k, v{''.join(f', {name}={value!r}' for name, value in options.items())})")
    print_labeled("time", f"{per_call}; first call {milliseconds(times[0])}")
    print_labeled("plan", plan)
    rows = f"{'all' if checked == count else f'{checked} of'} {count} rows checked"
    print_labeled("error", f"{error:.1e} at most against the float64 reference ({rows})")
    print_labeled("", f"{'correct' if error <= allowed else 'WRONG'}: rounding to {q.dtype} explains up to {allowed:.1e}")
    last = {word: i for i, word in enumerate(words) if word[0].isalnum()}
    for label, word in zip(("attention", "(head 0)", ""), [word for word in INTERESTING if word in last], strict=False):
        weights, total = _weights(q, k, 0, [last[word]], arguments.causal)[0].tolist(), dict.fromkeys(words, 0.0)
        for other, weight in zip(words, weights, strict=True):
            total[other] += weight
        strongest = sorted(last.keys() - {word}, key=lambda other: -total[other])[:3]
        others = "".join(f"{other} {total[other]:.3f}, " for other in strongest)
        print_labeled(label, f"{word!r} attends to {others}itself {weights[last[word]]:.3f}")
    if arguments.plot:
        with working("drawing"), command_errors():
            _draw(arguments.plot, title, words, q, k, last.get(INTERESTING[0], 0), arguments.causal)
        print_labeled("picture", str(arguments.plot))
    return 0 if error <= allowed else 1


def _input(seq: int | None, dtype: Any) -> tuple[str, list[str], Any]:
    """Return the title, the tokens, q, k and v: keys are words in head 0, positions in head 1; queries are scaled keys."""
    text = importlib.resources.files(__package__).joinpath("alice.txt").read_text(encoding="utf-8")
    text = text.translate(str.maketrans("’‘—", "''-"))
    words = re.findall(r"\w+(?:['-]\w+)*|[^\w\s]", text.lower())
    ids, places = np.unique(words, return_inverse=True)[1], np.arange(seq or len(words))
    near = np.zeros((ids.max() + 1,) * 2)
    for distance in range(1, 5):
        np.add.at(near, (ids[:-distance], ids[distance:]), 1 / distance)
    near += near.T
    with np.errstate(divide="ignore"):  # PPMI = max(0, log p(a, b) / (p(a) p(b))), 0 for words that are never neighbors
        values, vectors = np.linalg.eigh(np.maximum(0, np.log(near * near.sum() / np.outer(near.sum(0), near.sum(0)))))
    largest = np.argsort(-abs(values))[:HEAD_DIM]
    word = (vectors[:, largest] * np.sqrt(abs(values[largest])))[ids][places % len(words)]
    angle = places[:, None] / 10000 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    k = np.stack([word, np.concatenate([np.sin(angle), np.cos(angle)], axis=1)], axis=1)
    k /= np.linalg.norm(k, axis=2, keepdims=True)
    sharpness = np.linspace(10, 5, HEADS // 2)[:, None] * HEAD_DIM**0.5  # cancels attention's own 1/sqrt(head_dim)
    q = (k[:, :, None] * sharpness).reshape(-1, HEADS, HEAD_DIM)
    v = np.random.default_rng(1865).standard_normal(k.shape)
    tokens = [words[i % len(words)] for i in places]
    return " ".join(text.split("\n")[:2]), tokens, [x[None].astype(dtype).T for x in (q, k, v)]


def _on_engine(requested: str, arrays: Any, options: dict[str, Any]) -> tuple[Any, str, str]:
    """Select the engine, also in the call's options; return the arrays on its device, the reason and the plan."""
    reasons = machine.obstacles_of_cupy() if requested == "cupy" else machine.obstacles()
    if requested != "numpy" and not reasons:
        cupy = cupy_runtime.cupy()
        moved, gpu = [cupy.asarray(x, order="F") for x in arrays], machine.gpus()[cupy.cuda.runtime.getDevice()]
        if requested == "cupy":
            options["engine"] = "cupy"
        report = explain(*moved, **options)  # builds the plan that the call uses
        if requested == "cupy":
            return moved, f"CuPy ({gpu}, without cuDNN)", f"none: {str(report).splitlines()[0].removeprefix('runs with ')}"
        if report:
            first = str(report.plan).splitlines()[0]  # the line begins with the cuDNN version
            return moved, f"cuDNN ({gpu}, {first.partition(', ')[0]})", first
        reasons = [one_line("cuDNN cannot run this:\n" + "\n".join(report.reasons))]
    if requested in ("cudnn", "cupy"):
        raise CommandError(f"--engine {requested} cannot run here: {'; '.join(reasons)}")
    why = "requested by --engine numpy" if requested == "numpy" else reasons[0]
    return arrays, f"numpy ({why})", "none: numpy evaluates the steps one by one"


def _time(arrays: Any, options: dict[str, Any]) -> tuple[Any, list[float]]:
    """Return the result as a numpy array; the seconds of the first call, then of up to seven more, a second in all."""
    times: list[float] = []
    cupy = None if isinstance(arrays[0], np.ndarray) else cupy_runtime.cupy()
    while len(times) < 2 or (len(times) < 8 and sum(times[1:]) < 1):
        count, started = 20 if cupy and times else 1, time.perf_counter()  # in a batch, launches overlap with kernels
        for _ in range(count):
            out = attention(*arrays, **options)
        if cupy:
            cupy.cuda.get_current_stream().synchronize()
        times.append((time.perf_counter() - started) / count)
    return cupy.asnumpy(out) if cupy else out, times


def _compare(out: Any, q: Any, k: Any, v: Any, causal: bool) -> tuple[float, float, int]:
    """Return the largest error, the error that rounding explains, and the number of compared rows: some of a long sequence.

    The weights and the result are each rounded to the dtype: at most half an epsilon times the largest value. The scores
    are rounded to the accumulator's dtype; the exponential turns that absolute error into a relative one.
    """
    count, accumulator = q.shape[2], np.finfo(np.float64 if q.dtype == np.float64 else np.float32)
    rows = np.unique(np.linspace(0, count - 1, max(2, min(count, CHECKED**2 // count))).astype(int))
    mask = (np.arange(count)[:, None] <= rows)[:, :, None, None] if causal else None
    error = abs(out[:, :, rows].astype(np.float64) - reference.attention(q[:, :, rows], k, v, mask=mask)[0]).max()
    scores = np.prod([np.linalg.norm(x.astype(np.float64), axis=0).max() for x in (q, k)]) / HEAD_DIM**0.5
    relative = float(np.spacing(q.dtype.type(1))) + 2 * float(accumulator.eps) * scores
    return float(error), float(relative * abs(v.astype(np.float64)).max()), HEADS * len(rows)


def _weights(q: Any, k: Any, head: int, queries: Any, causal: bool) -> Any:
    """Return the weights of some queries: rows of the softmax of a head, ``(len(queries), keys)`` in float64."""
    query, key = (x.astype(np.float64) for x in (q[:, head, queries, 0], k[:, head * 2 // HEADS, :, 0]))
    visible = np.arange(key.shape[1]) <= (np.asarray(queries)[:, None] if causal else key.shape[1])
    e = np.exp(np.where(visible, query.T @ key / HEAD_DIM**0.5, -np.inf))  # scores are at most 10
    return e / e.sum(axis=1, keepdims=True)


def _draw(path: Path, title: str, words: list[str], q: Any, k: Any, position: int, causal: bool) -> None:
    """Write the figure, in the format of the file: the weights of two heads within a passage around a position."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    start = max(0, min(position - WINDOW // 2, len(words) - WINDOW))
    passage = np.arange(start, min(start + WINDOW, len(words)))
    figure, labels = Figure(figsize=(18, 8.5), layout="constrained"), [words[i] for i in passage]
    figure.suptitle(f"Attention within a passage of {title}", fontsize=15)
    for axes, head, kind in zip(figure.subplots(1, 2), (0, HEADS // 2), ("words", "positions"), strict=True):
        weights = _weights(q, k, head, passage, causal)[:, passage]
        largest = weights[~np.eye(len(passage), dtype=bool)].max(initial=0)  # without the weight of a token on itself
        image = axes.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, largest or 1))
        axes.set(title=f"head {head}: keys are {kind}", xlabel="key", ylabel="query")
        axes.set_xticks(range(len(passage)), labels, rotation=90, fontsize=9)
        axes.set_yticks(range(len(passage)), labels, fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.7, extend="max", label="attention weight")
    figure.savefig(path, dpi=110, format=path.suffix[1:] or "png")
