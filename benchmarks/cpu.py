"""The CPU engine against plain numpy, one matrix product per key/value head, and PyTorch where it is installed.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks cpu [results.csv] [--cases NAME ...] [--rounds N]

A time is the minimum over rounds in which all contenders run once. It needs no GPU, and takes a few minutes. The table of
the docs is of ``benchmarks/results/cpu_engine.csv``: ``python -m benchmarks tables cpu > docs/cpu_table.md``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_sdpa import block_mask, zoo
from cupy_sdpa.attention_functions import attention, attention_backward
from cupy_sdpa.cli.console import CommandError, positive
from cupy_sdpa.core.version import __version__

from . import runner
from .device import largest_difference
from .timing import interleaved

Array = NDArray[Any]
Results = Sequence[Array]

#: The number of rounds, and the seconds of a contender after which it has 5.
ROUNDS, SECONDS = 2000, 1.0
#: The largest accepted difference, relative to the largest magnitude; of 16-bit arrays.
TOLERANCE, TOLERANCE_16 = 1e-4, 1e-2
PAGE = 64


@dataclass(frozen=True)
class Case:
    """A call: ``(queries, keys, query heads, key/value heads, head dim, batch)``, and the options of both contenders.

    Attributes:
        hidden: the keys that a query does not attend to, ``(Sq, Skv)``; None: it attends to all.
        score: the score function on arrays.
        lengths: of packed sequences; the batch is 1.
        passes: ``forward``, and ``backward``, in which numpy computes the softmax weights again, as ours.
    """

    name: str
    sizes: tuple[int, int, int, int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    hidden: Callable[[Array, Array], Array] | None = None
    score: tuple[Callable[[Array], Array], Callable[[Array], Array]] | None = None
    lengths: tuple[int, ...] = ()
    paged: bool = False
    dtype: str = "float32"
    passes: tuple[str, ...] = ("forward", "backward")


def _causal(i: Array, j: Array) -> Array:
    return j > i


def _far(i: Array, j: Array) -> Array:
    return (j > i) | (j < i - 256)


def _softcap(s: Array) -> Array:
    return 20 * np.tanh(s / 20)


def _softcap_derivative(s: Array) -> Array:
    return 1 - np.tanh(s / 20) ** 2


def cases() -> Iterator[Case]:
    """Yield all cases: plain ones without a mask and causal, and one for each kind of option."""
    one = ("forward",)
    for sizes in ((1, 256, 10, 2, 32, 1), (1, 256, 32, 8, 128, 1), (1, 4096, 32, 8, 128, 1)):
        name = f"1 query, {sizes[2]}/{sizes[3]} heads of {sizes[4]}, {sizes[1]} keys"
        yield Case(name, sizes, passes=one)
        yield Case(f"{name}, causal", sizes, {"causal": "bottom_right"}, passes=one)
    for length, heads, d, batch in ((16, 4, 16, 1), (128, 8, 64, 4), (512, 8, 64, 1), (2048, 8, 64, 1)):
        name = f"{heads} heads of {d}, {length} positions" + (f", batch {batch}" if batch > 1 else "")
        sizes = (length, length, heads, heads, d, batch)
        yield Case(name, sizes)
        yield Case(f"{name}, causal", sizes, {"causal": True}, _causal)
    square = (512, 512, 8, 8, 64, 1)
    yield Case("window of 256, 2 heads of 64, 4096 positions", (4096, 4096, 2, 2, 64, 1), {"window": (256, 0)}, _far)
    yield Case("8 heads of 64, 512 positions, float16", square, dtype="float16")
    yield Case("8/2 heads of 64, 512 positions, causal", (512, 512, 8, 2, 64, 1), {"causal": True}, _causal)
    lengths = (100, 300, 512, 112)
    yield Case("packed, 8 heads of 64, 4 sequences", (1024, 1024, 8, 8, 64, 1), lengths=lengths)
    yield Case("pages, 1 query, 32/8 heads of 128, 4 x 1024 keys", (1, 1024, 32, 8, 128, 4), paged=True, passes=one)
    mask = block_mask(zoo.sliding_window(256), 2048, 2048)
    yield Case("block mask, 8 heads of 64, 2048 positions", (2048, 2048, 8, 8, 64, 1), {"block_mask": mask}, _far)
    score = {"score_mod": zoo.softcap(20.0)}
    yield Case("score function, 8 heads of 64, 512 positions", square, score, score=(_softcap, _softcap_derivative))


def weights(q: Array, k: Array, case: Case, hidden: Array | None) -> tuple[Array, Array]:
    """Return the softmax weights of one head of k and its group of heads, ``(G Sq, Skv)``, and the scores."""
    scores = (q @ k) * np.float32(1 / math.sqrt(q.shape[1]))
    p = scores if case.score is None else case.score[0](scores)
    if hidden is not None:
        np.copyto(p.reshape(-1, *hidden.shape), -np.inf, where=hidden)
    p -= p.max(axis=1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=1, keepdims=True)
    return p, scores


def plain(case: Case, hidden: Array | None, q: Array, k: Array, v: Array, dout: Array | None = None) -> Results:
    """``softmax(q k / sqrt(D)) v``, one product per key/value head and sequence; with ``dout`` the gradients of q, k and v."""
    (d, heads, queries, batch), shared = q.shape, k.shape[1]
    group = heads // shared
    results = [np.empty(x.shape, q.dtype, order="F") for x in ((q, k, v) if dout is not None else (q,))]

    def rows(x: Array, h: int, b: int) -> Array:
        return x[:, h * group : (h + 1) * group, :, b].transpose(1, 2, 0).reshape(group * queries, d)

    def store(x: Array, h: int, b: int, value: Array) -> None:
        x[:, h * group : (h + 1) * group, :, b] = value.reshape(group, queries, d).transpose(2, 0, 1)

    for b in range(batch):
        for h in range(shared):
            qs, ks, vs = rows(q, h, b), k[:, h, :, b], v[:, h, :, b]
            p, scores = weights(qs, ks, case, hidden)
            if dout is None:
                store(results[0], h, b, p @ vs.T)
                continue
            do = rows(dout, h, b)
            dp = do @ vs
            dp -= (do * (p @ vs.T)).sum(axis=1, keepdims=True)
            dp *= p
            if case.score is not None:
                dp *= case.score[1](scores)
            dp *= np.float32(1 / math.sqrt(d))
            store(results[0], h, b, dp @ ks.T)
            results[1][:, h, :, b] = qs.T @ dp
            results[2][:, h, :, b] = do.T @ p
    return results


class Contenders:
    """The contenders of a case and a pass: functions without arguments that return the same arrays."""

    def __init__(self, case: Case, direction: str) -> None:
        self.case, self.gradients = case, direction != "forward"
        queries, keys, heads, shared, d, batch = case.sizes
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Array:
            return np.asfortranarray(rng.standard_normal(shape, np.float32).astype(case.dtype))

        shape = (d, heads, queries, batch)
        self.q, self.dout = normal(*shape), normal(*shape)
        self.k, self.v = normal(d, shared, keys, batch), normal(d, shared, keys, batch)
        self.options = dict(case.options)
        self.hidden = case.hidden(np.arange(queries)[:, None], np.arange(keys)) if case.hidden else None
        if case.lengths:
            begins = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
            self.options |= {"cu_seqlens_q": begins, "cu_seqlens_kv": begins}
            self.options |= {f"max_seqlen_{side}": max(case.lengths) for side in ("q", "kv")}
        if case.paged:
            order = rng.permutation(batch * keys // PAGE).astype(np.int32)
            self.table = np.asfortranarray(order.reshape(keys // PAGE, batch))
            self.options |= {"page_table": self.table, "seq_lens_kv": np.full(batch, keys, np.int32)}
            self.pages = [np.empty((d, shared, PAGE, order.size), np.float32, order="F") for _ in "kv"]
            for x, pages in zip((self.k, self.v), self.pages, strict=True):
                for b in range(batch):
                    pages[..., self.table[:, b]] = x[..., b].reshape(d, shared, PAGE, -1, order="F")

        #: The output and the log-sum-exp.
        self.forward = attention(*self.arrays(), return_stats=True, **self.options) if self.gradients else ()

    def arrays(self) -> list[Array]:
        """Return the arrays of our call."""
        arrays = [self.q, *(self.pages if self.case.paged else (self.k, self.v))]
        return [x[..., 0] for x in arrays] if self.case.lengths else arrays

    def functions(self) -> dict[str, Callable[[], Results]]:
        """Return the contenders by name."""
        found = {"ours": self.ours, "numpy": self.numpy}
        simple = not (self.case.lengths or self.case.paged or self.case.score or self.case.dtype != "float32")
        if simple and importlib.util.find_spec("torch"):
            found["torch"] = self.torch()
        return found

    def ours(self) -> Results:
        """Return the CPU engine."""
        arrays = self.arrays()
        if not self.gradients:
            return [attention(*arrays, **self.options)]
        dout = self.dout[..., 0] if self.case.lengths else self.dout
        return list(attention_backward(dout, *arrays, *self.forward, **self.options))

    def numpy(self) -> Results:
        """Plain numpy: of each packed sequence, and of the pages of each sequence in the order of the table."""
        case, dout = self.case, self.dout if self.gradients else None
        if case.paged:
            q, d, shared = self.q, *self.k.shape[:2]
            found = []
            for b in range(q.shape[3]):
                k, v = (x[..., self.table[:, b]].reshape(d, shared, -1, 1, order="F") for x in self.pages)
                found.append(plain(case, None, q[..., b : b + 1], k, v)[0])
            return [np.concatenate(found, axis=3)]
        arrays = [self.q, self.k, self.v, *([] if dout is None else [dout])]
        if case.dtype != "float32":
            arrays = [x.astype(np.float32) for x in arrays]
        if not case.lengths:
            return [x.astype(case.dtype, copy=False) for x in plain(case, self.hidden, *arrays)]
        ends = np.cumsum(case.lengths)
        parts = [plain(case, None, *(x[:, :, e - n : e] for x in arrays)) for n, e in zip(case.lengths, ends, strict=True)]
        return [np.concatenate(xs, axis=2)[..., 0] for xs in zip(*parts, strict=True)]

    def torch(self) -> Callable[[], Results]:
        """PyTorch's scaled_dot_product_attention on the same memory."""
        import torch

        torch.set_num_threads(int(os.environ.get("OPENBLAS_NUM_THREADS") or torch.get_num_threads()))
        q, k, v, dout = (torch.from_numpy(x.transpose(3, 1, 2, 0)) for x in (self.q, self.k, self.v, self.dout))
        mask = None if self.hidden is None else torch.from_numpy(~self.hidden)
        causal = self.case.hidden is _causal
        options = {"is_causal": causal, "attn_mask": None if causal else mask, "enable_gqa": q.shape[1] != k.shape[1]}
        of_torch = functools.partial(torch.nn.functional.scaled_dot_product_attention, **options)

        def call() -> Results:
            if not self.gradients:
                with torch.no_grad():
                    return [of_torch(q, k, v).numpy().transpose(3, 1, 2, 0)]
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            gradients = torch.autograd.grad(of_torch(*leaves), leaves, dout)
            return [x.numpy().transpose(3, 1, 2, 0) for x in gradients]

        return call


def rows(given: argparse.Namespace) -> Iterator[runner.Row]:
    """Yield a row for each case and pass, with the time of every contender.

    Raises:
        CommandError: there is no such case, or the results differ.
    """
    chosen = [case for case in cases() if not given.cases or any(name in case.name for name in given.cases)]
    if not chosen:
        raise CommandError(f"no name of a case contains {' or '.join(map(repr, given.cases))}")
    for case in chosen:
        for direction in case.passes:
            functions = Contenders(case, direction).functions()
            expected = functions["numpy"]()
            for name, function in functions.items():
                difference = largest_difference(function(), expected)
                if not difference < (TOLERANCE if case.dtype == "float32" else TOLERANCE_16):
                    raise CommandError(
                        f"{name} and numpy differ by {difference:.1e} of the largest value: {case.name}, {direction}"
                    )
            timers = {name: functools.partial(_us, function) for name, function in functions.items()}
            times = {name: min(found) for name, found in interleaved(timers, given.rounds or ROUNDS, seconds=SECONDS).items()}
            yield {
                "case": case.name,
                "pass": direction,
                **{
                    f"{name}_us": f"{times[name]:.{0 if times[name] >= 100 else 1}f}" if name in times else ""
                    for name in ("ours", "numpy", "torch")
                },
                "of_numpy": f"{times['ours'] / times['numpy']:.2f}",
                "of_torch": f"{times['ours'] / times['torch']:.2f}" if "torch" in times else "",
                "threads": os.environ.get("OPENBLAS_NUM_THREADS", ""),
                "cpu": platform.processor() or platform.machine(),
                "numpy": np.__version__,
                "cupy_sdpa": __version__,
            }


def _us(call: Callable[[], Any]) -> float:
    """Return a call's microseconds: for one thread its processor time, which other programs disturb less than wall time."""
    clock = time.thread_time if os.environ.get("OPENBLAS_NUM_THREADS") == "1" else time.perf_counter
    begin = clock()
    call()
    return (clock() - begin) * 1e6


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="parts of the names of cases (default: all)")
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help=f"rounds (default: {ROUNDS}, or {SECONDS:g} s per contender)"
    )


def main(words: Sequence[str]) -> int:
    """Run ``cpu``."""
    shown = ("case", "pass", "ours_us", "numpy_us", "torch_us", "of_numpy", "of_torch")
    return runner.run("cpu", __doc__, words, rows, add_options, needs_gpu=lambda given: False, shown=shown)
