"""Whether the bits of a sequence's results depend on the rest of the batch, and whether equal calls give equal bits.

    python -m benchmarks batch_bits [results.csv] [--jobs N]

Every sequence is computed alone, as a batch of one entry, and in batches of 3 and 8, some also of 2 entries, at the first, a
middle and the last place beside random other entries: dense, with lengths, packed, and paged with and without ``num_splits``.
Every call is repeated. All gradients of a sequence are computed from the same output and log-sum-exp.

A row is a problem and a pass. ``runs_differ`` are the results whose bits differ between equal calls, ``batch_differs`` those of
the others whose bits differ from the call alone, ``difference`` the largest of all these differences relative to the largest
magnitude, ``configs`` the engine and the knobs that the batch sizes have in common or the different ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from cupy_sdpa import attention, attention_backward, explain
from cupy_sdpa.cli.console import one_line, positive
from cupy_sdpa.cudnn_engine.engines import knobs_text
from cupy_sdpa.problem.tensor_spec import numpy_dtype

from . import runner
from .device import free_memory

HEADS, PAGE = 8, 64
#: The calls of the same arrays: alone, and in each batch.
ALONE, REPEATS = 4, 2
#: (queries, keys) of dense problems.
LENGTHS = (
    (1, 64), (1, 1000), (1, 8192), (2, 1000), (2, 8192), (3, 1000), (3, 8192), (4, 64), (4, 8192), (16, 1000), (16, 8192),
    (64, 64), (64, 1000), (128, 128), (128, 2048), (512, 512), (512, 2048), (4096, 4096),
)  # fmt: skip
#: Key/value heads, dtype, causal, whether there are lengths, head dim: half of the combinations of the first four.
VARIANTS = tuple(
    (kv_heads, dtype, causal, (kv_heads == HEADS) ^ (dtype == "float16") ^ causal, 64 if dtype == "float16" else 128)
    for kv_heads, dtype, causal in itertools.product((HEADS, 2), ("bfloat16", "float16"), (False, True))
)
PACKED = (
    ("packed", HEADS, "bfloat16", False, 128), ("packed", 2, "bfloat16", True, 128), ("packed", 2, "float16", False, 64),
    ("packed", HEADS, "float16", True, 64), ("packed, own bound", 2, "bfloat16", True, 128),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem.

    Attributes:
        kind: ``dense``, ``paged``, ``packed`` with a bound of all batches, or ``packed, own bound``, the longest sequence.
        sq, skv: the numbers of queries and keys; of packed sequences those of the own one.
        kv_heads, dtype, causal, lengths, d: the key/value heads of 8 heads, ..., whether there are lengths, the head dim.
        splits: ``num_splits``; None for the default.
    """

    kind: str
    sq: int
    skv: int
    kv_heads: int
    dtype: str
    causal: bool
    lengths: bool
    d: int
    splits: int | None = None

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes to compare."""
        deterministic = ("forward, deterministic",) if self.sq == 1 else ()
        gradients = () if self.kind == "paged" else ("backward", "backward, deterministic")
        return ("forward", "forward with stats", *deterministic, *gradients)

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """The batch sizes and the own entry's places."""
        for count in (2, 3, 8) if self.dtype == "bfloat16" and not self.causal else (3, 8):
            for place in {0, count // 2, count - 1}:
                yield count, place


def cases() -> list[Case]:
    """All cases, shuffled so that the processes have equal work."""
    dense = [Case("dense", sq, skv, *variant) for sq, skv in LENGTHS for variant in VARIANTS]
    packed = [
        Case(kind, n, n, kv_heads, dtype, causal, True, d)
        for n in (2, 3, 16, 100, 512, 2048)
        for kind, kv_heads, dtype, causal, d in PACKED
    ]
    paged = [
        Case("paged", sq, skv, kv_heads, dtype, sq > 1, True, 128, splits)
        for sq in (1, 2, 4, 16)
        for skv in (4096, 32768)
        for kv_heads, dtype in ((2, "bfloat16"), (HEADS, "float16"))
        for splits in (None, 1, 4, 16)
    ]
    every = [*dense, *packed, *paged]
    random.Random(0).shuffle(every)
    return every


def normal(dtype: str, *shape: int) -> Any:
    """Normal random numbers in Fortran order."""
    return cupy.asfortranarray(cupy.random.standard_normal(shape, dtype="float32").astype(numpy_dtype(dtype)))


def int32(values: Any) -> Any:
    """Integers on the GPU."""
    return cupy.asfortranarray(cupy.asarray(np.asarray(values).astype(np.int32)))


class Batch:
    """The arrays and options of a call in which one entry is the own one.

    Args:
        case: the problem.
        own: q, k, v and dout of the own entry, ``(D, heads, length)``.
        count, place: the batch size and the own entry's place.
    """

    def __init__(self, case: Case, own: Sequence[Any], count: int, place: int) -> None:
        self.case, self.count, self.place = case, count, place
        self._rng = np.random.default_rng([count, place])
        diagonal = "bottom_right" if case.sq < case.skv else True
        self.options: dict[str, Any] = {"causal": diagonal if case.causal else False}
        self._slice = slice(place, place + 1)
        {"dense": self._dense, "packed": self._packed, "paged": self._paged}[case.kind.split(",")[0]](own)

    def _lengths(self, longest: int, own: int) -> Any:
        lengths = self._rng.integers(1, longest + 1, self.count)
        lengths[self.place] = own
        return lengths

    def _dense(self, own: Sequence[Any]) -> None:
        self.arrays = [self._among_others(x[..., None], self.count) for x in own]
        if self.case.lengths:
            queries, keys = (self._lengths(n, -(-3 * n // 4)) for n in (self.case.sq, self.case.skv))
            self.options |= {"seq_lens_q": int32(queries), "seq_lens_kv": int32(np.maximum(queries, keys))}

    def _packed(self, own: Sequence[Any]) -> None:
        case, bound = self.case, 2 * self.case.sq
        lengths = self._lengths(bound, case.sq)
        ends = [int(n) for n in np.cumsum([0, *lengths])]
        self._slice = slice(ends[self.place], ends[self.place + 1])
        self.arrays = [self._among_others(x, ends[-1]) for x in own]
        if case.kind != "packed":
            bound = int(lengths.max())
        starts = int32(ends)
        self.options |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": bound, "max_seqlen_kv": bound}

    def _paged(self, own: Sequence[Any]) -> None:
        case, pages = self.case, self.case.skv // PAGE
        table = self._rng.permutation(self.count * pages).reshape(pages, self.count)
        self.arrays = [self._among_others(own[0][..., None], self.count)]
        for x in own[1:3]:
            pool = normal(case.dtype, *x.shape[:2], PAGE, self.count * pages)
            for number, page in enumerate(table[:, self.place]):
                pool[..., int(page)] = x[..., number * PAGE : (number + 1) * PAGE]
            self.arrays.append(pool)
        keys = np.maximum(self._lengths(case.skv, case.skv * 3 // 4 + 7), case.sq)
        self.options |= {"page_table": int32(table), "seq_lens_kv": int32(keys)}
        if case.splits:
            self.options["num_splits"] = case.splits

    def _among_others(self, own: Any, total: int) -> Any:
        """A random array with the own entry in its place on the last axis."""
        array = normal(self.case.dtype, *own.shape[:-1], total)
        array[..., self._slice] = own
        return array

    def results(self, name: str, forward: Sequence[Any]) -> dict[str, Any]:
        """The own entry's results of a pass; gradients from the given output and log-sum-exp of the own entry."""
        q, k, v = self.arrays[:3]
        flag: dict[str, Any] = {"deterministic": name.endswith("deterministic")}
        if not name.startswith("backward"):
            found = attention(q, k, v, return_stats=name == "forward with stats", **flag, **self.options)
            return self._own(("out", "stats"), found if isinstance(found, tuple) else (found,))
        out, stats = attention(q, k, v, return_stats=True, **self.options)
        for array, own in zip((out, stats), forward, strict=True):
            array[..., self._slice] = own
        gradients = attention_backward(self.arrays[3], q, k, v, out, stats, **flag, **self.options)
        return self._own(("dq", "dk", "dv"), gradients)

    def _own(self, names: Sequence[str], found: Sequence[Any]) -> dict[str, Any]:
        return {name: x[..., self._slice].get() for name, x in zip(names, found, strict=False)}

    def own_forward(self) -> list[Any]:
        """The own entry's output and log-sum-exp."""
        found = attention(*self.arrays[:3], return_stats=True, **self.options)
        return [x[..., self._slice] for x in found]

    def report(self, name: str) -> Any:
        """The report on a pass."""
        flags: dict[str, Any] = {"deterministic": name.endswith("deterministic"), "backward": name.startswith("backward")}
        q, k, v = self.arrays[:3]
        return explain(q, k, v, return_stats=name == "forward with stats", **flags, **self.options)


def config_of(report: Any) -> str:
    """The engine, its knobs and the chunks of the keys."""
    split = report.problem.settings.split
    chunks = f", {split.chunks} chunks" if split else ""
    return f"{report.plan.engine} {knobs_text(report.plan.knobs)}".strip() + chunks if report.plan else ""


def differing(results: dict[str, Any], others: dict[str, Any]) -> set[str]:
    """The names of the results whose bits differ."""
    return {name for name in results if results[name].tobytes() != others[name].tobytes()}


def relative(result: Any, other: Any) -> float:
    """The largest difference of finite values, divided by the largest magnitude."""
    a, b = result.astype(np.float32), other.astype(np.float32)
    finite = np.isfinite(a) & np.isfinite(b)
    return float(np.abs(a - b, where=finite, out=np.zeros_like(a)).max() / max(np.abs(b[finite]).max(initial=0), 1e-30))


class Comparison:
    """A pass of the call alone and in batches.

    Args:
        name: the pass.
        alone: the call alone.
        forward: the output and the log-sum-exp from which gradients are computed.
    """

    def __init__(self, name: str, alone: Batch, forward: Sequence[Any]) -> None:
        self._name, self._forward = name, forward
        self._first: dict[str, Any] = {}
        self._runs: set[str] = set()
        self._changed: dict[str, float] = {}
        self._configs: dict[str, None] = {}
        self._refused = ""
        self.add(alone, ALONE)

    def add(self, batch: Batch, repeats: int = REPEATS) -> None:
        """Call repeatedly, and compare the own entry's results with each other and with those of the call alone."""
        report = batch.report(self._name)
        if report.reasons:
            self._refused = self._refused or one_line("; ".join(report.reasons))
            return
        self._configs[config_of(report)] = None
        found = [batch.results(self._name, self._forward) for _ in range(repeats)]
        self._first = self._first or found[0]
        for one in found:
            self._runs |= differing(one, found[0])
            for result in differing(one, self._first):
                self._changed[result] = max(self._changed.get(result, 0.0), relative(one[result], self._first[result]))

    def columns(self) -> dict[str, str]:
        """The columns of its row."""
        return {
            "runs_differ": " ".join(sorted(self._runs)), "batch_differs": " ".join(sorted(self._changed.keys() - self._runs)),
            "difference": f"{max(self._changed.values()):.1e}" if self._changed else "",
            "configs": "; ".join(self._configs), "refused": self._refused,
        }  # fmt: skip


def rows(case: Case) -> list[dict[str, Any]]:
    """A row for each pass of a case. Only one batch at a time is in memory."""
    cupy.random.seed(case.sq + case.skv)
    lengths, heads = (case.sq, case.skv, case.skv, case.sq), (HEADS, case.kv_heads, case.kv_heads, HEADS)
    own = [normal(case.dtype, case.d, count, n) for count, n in zip(heads, lengths, strict=True)]
    alone = Batch(case, own, 1, 0)
    forward = alone.own_forward()
    comparisons = {name: Comparison(name, alone, forward) for name in case.passes}
    for count, place in case.places:
        batch = Batch(case, own, count, place)
        for comparison in comparisons.values():
            comparison.add(batch)
        del batch
        free_memory()
    common = {
        "sq": case.sq, "skv": case.skv, "heads": f"{HEADS}/{case.kv_heads}", "d": case.d, "dtype": case.dtype,
        "causal": case.causal, "lengths": case.lengths, "num_splits": case.splits or "",
        "batches": " ".join(str(count) for count in sorted({1, *(count for count, _ in case.places)})),
    }  # fmt: skip
    return [{"kind": case.kind, "pass": name, **common, **found.columns()} for name, found in comparisons.items()]


def every(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all cases, which run in several processes."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.jobs, context) as pool:
        for several in pool.map(rows, cases()):
            yield from several


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--jobs", type=positive, default=8, metavar="N", help="processes (default 8)")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("batch_bits", __doc__, words, every, add_options)
