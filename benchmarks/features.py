"""Time, host time and memory of features, compared with what a user would do without them.

    python -m benchmarks features [--only NAME ...] [--cpu] [results.csv]

All arrays are float16. The features, and what is done without them:

``bias_repeats``: a bias that is repeated in memory, beforehand or in each call. The backward pass returns the bias's gradient;
without the feature it also sums the gradient of the repeated bias over the repeats.

``dstats``: a backward pass without ``dstats``, and dense products of the softmax weights in float32 that add the gradient of
the log-sum-exp. A second row compares with the backward pass alone, which computes less: it shows what ``dstats`` costs.

``scale``, an array with a number per head: q is multiplied before the call, and dq after it. The gradient of the scale is the
sum of q times the gradient of their product.

``beams``: the beams continue a prompt in a ``KVCache``, which shares its pages, and decode one token. Without it, the prompt's
pages are copied for each beam. Our call first truncates one beam to the prompt, which makes it repeatable.

All calls of a case run in interleaved rounds in one process. With ``--cpu``, the problems are small, on numpy arrays.

One row per case and way without the feature. Columns:

- ``feature``, ``case``, ``without``: the feature, the sizes (head dim x heads x positions x batch) and the pass, and the way;
- ``ours_ms``, ``without_ms``: the median milliseconds of a call on the device, on the CPU by the wall clock;
- ``ratio``: the median over the rounds of our time divided by the time without the feature;
- ``ours_host_us``, ``without_host_us``: the median microseconds until a call returns, on an idle device;
- ``ours_bytes``, ``without_bytes``: the peak of what a call allocates, and the arrays made for it beforehand; on the CPU,
  without the memory that a thread keeps between calls;
- ``difference``: the largest difference of the results, relative to their largest magnitude. If one is 0.02 or more, the exit
  status is 1.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_sdpa import KVCache, attention, attention_backward
from cupy_sdpa.core.runtime import cupy_runtime

from . import device, runner, timing

ROUNDS, CPU_ROUNDS = 11, 1
#: The calls of a measurement on the device. All their results are in memory at the same time.
CALLS = 4
#: The largest accepted difference of the results, relative to their largest magnitude.
TOLERANCE = 0.02
#: Head dim, heads, positions, batch, and the numbers of batch items that share a bias.
BIASES = ((32, 4, 256, 512, (256, 64, 8)), (64, 8, 512, 64, (32, 8, 2)))
CPU_BIASES = ((16, 2, 32, 8, (4, 2)),)
#: Head dim, heads, positions, batch.
DSTATS, CPU_DSTATS = (64, 8, 2048, 1), (16, 2, 64, 1)
SCALES, CPU_SCALES = (64, 8, 2048, 2), (16, 2, 64, 2)


class Beams(NamedTuple):
    """A beam search: head dim, query and key/value heads, tokens of the prompt, beams, and tokens per page."""

    head_dim: int
    heads: int
    key_heads: int
    prompt: int
    beams: int
    page: int


BEAMS, CPU_BEAMS = Beams(128, 8, 2, 4096, 8, 64), Beams(16, 4, 2, 64, 3, 16)

Call = Callable[[], Sequence[Any]]


class Way(NamedTuple):
    """A way to compute a case: its name, its call, the bytes made for it beforehand, and whether its results equal ours."""

    name: str
    call: Call
    held: int = 0
    equal: bool = True


class Case(NamedTuple):
    """A case of a feature: our call, and the ways without the feature."""

    feature: str
    name: str
    ours: Way
    without: Sequence[Way]


class Machine(NamedTuple):
    """Where the calls run: numpy or cupy."""

    xp: Any

    @property
    def on_gpu(self) -> bool:
        """Whether this is a GPU."""
        return self.xp is not np

    def array(self, x: Any) -> Any:
        """Return an array of numpy as one of this machine, in Fortran order."""
        return self.xp.asfortranarray(self.xp.asarray(np.asfortranarray(x)))

    def normal(self, number: int, *shape: int, dtype: Any = np.float16) -> Any:
        """Normal random numbers with a seed."""
        return self.array(np.random.default_rng(number).standard_normal(shape, np.float32).astype(dtype))

    def wait(self, results: Any = None) -> None:
        """Wait for the device."""
        if self.on_gpu:
            self.xp.cuda.Device().synchronize()

    def ms(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Return the milliseconds of each call in interleaved rounds. Calls that do not run here are missing."""
        if self.on_gpu:
            return device.timed({name: [call] * CALLS for name, call in calls.items()}, ROUNDS)
        return timing.interleaved({name: timing.WallClock([call], self.wait) for name, call in calls.items()}, CPU_ROUNDS)

    def host_us(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Return the median microseconds until each call returns, in interleaved rounds."""
        timers = {
            name: functools.partial(
                timing.host_us, call, timing.affordable_calls(call, self.wait) if self.on_gpu else 1, self.wait
            )
            for name, call in calls.items()
        }
        rounds = timing.HOST_ROUNDS if self.on_gpu else CPU_ROUNDS
        return {name: statistics.median(several) for name, several in timing.interleaved(timers, rounds).items()}

    def peak(self, call: Call) -> int:
        """Return the peak of the bytes that a call allocates."""
        if self.on_gpu:
            return device.peak_allocation(call)
        tracemalloc.start()
        call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak


def repeated(xp: Any, bias: Any, count: int) -> Any:
    """Return a bias with every batch item repeated, in Fortran order."""
    full = xp.empty((*bias.shape[:3], bias.shape[3] * count), bias.dtype, order="F")
    full.T.reshape((bias.shape[3], count, *bias.T.shape[1:]))[...] = bias.T[:, None]
    return full


def summed(dbias: Any, count: int) -> Any:
    """Return the gradient of a repeated bias, summed over the repeats."""
    batch, *axes = dbias.T.shape
    return dbias.T.reshape((batch // count, count, *axes)).sum(axis=1, dtype="float32").astype(dbias.dtype).T


def bias_cases(machine: Machine, *, small: bool) -> Iterator[Case]:
    """Yield the cases of ``bias_repeats=``, both passes."""
    for head_dim, heads, positions, batch, repeats in CPU_BIASES if small else BIASES:
        q, k, v, dout = (machine.normal(number, head_dim, heads, positions, batch) for number in range(4))
        for count in repeats:
            bias = machine.normal(4, positions, positions, heads, batch // count)
            yield from _bias_cases(machine, (q, k, v, dout), bias, count)


def _bias_cases(machine: Machine, arrays: Sequence[Any], bias: Any, count: int) -> Iterator[Case]:
    q, k, v, dout = arrays
    full = repeated(machine.xp, bias, count)
    out, stats = attention(q, k, v, bias=bias, bias_repeats=count, return_stats=True)
    size = f"{q.shape[0]} x {q.shape[1]} x {q.shape[2]} x {q.shape[3]}, {bias.shape[3]} biases, n {count}"

    def forward(of: Callable[[], Any], **options: Any) -> list[Any]:
        return [attention(q, k, v, bias=of(), **options)]

    def backward(of: Callable[[], Any]) -> list[Any]:
        *gradients, dbias = attention_backward(dout, q, k, v, out, stats, bias=of(), return_dbias=True)
        return [*gradients, summed(dbias, count)]

    def ours_backward() -> Any:
        return attention_backward(dout, q, k, v, out, stats, bias=bias, bias_repeats=count, return_dbias=True)

    ours_forward = functools.partial(forward, lambda: bias, bias_repeats=count)
    for name, ours, without in (("forward", ours_forward, forward), ("backward", ours_backward, backward)):
        ways = (
            Way("repeated beforehand", functools.partial(without, lambda: full), full.nbytes),
            Way("repeated in each call", functools.partial(without, lambda: repeated(machine.xp, bias, count))),
        )
        yield Case("bias_repeats", f"{size}, {name}", Way("ours", ours), ways)


def dstats_cases(machine: Machine, *, small: bool) -> Iterator[Case]:
    """Yield the case of ``dstats=``."""
    head_dim, heads, positions, batch = CPU_DSTATS if small else DSTATS
    xp, scale = machine.xp, head_dim**-0.5
    q, k, v, dout = (machine.normal(number, head_dim, heads, positions, batch) for number in range(4))
    out, stats = attention(q, k, v, return_stats=True)
    dstats = machine.normal(4, *stats.shape, dtype=np.float32)

    def dense() -> list[Any]:
        """Add the gradient of the log-sum-exp by dense products."""
        dq, dk, dv = attention_backward(dout, q, k, v, out, stats)
        rows, keys = (x.transpose(3, 1, 2, 0).astype("float32") for x in (q, k))
        lse, dlse = (x.transpose(2, 1, 0)[..., None] for x in (stats, dstats))
        weights = xp.exp(scale * (rows @ keys.swapaxes(2, 3)) - lse) * (scale * dlse)
        for gradient, term in ((dq, weights @ keys), (dk, weights.swapaxes(2, 3) @ rows)):
            gradient += term.transpose(3, 1, 2, 0).astype(gradient.dtype)
        return [dq, dk, dv]

    ours: Call = functools.partial(attention_backward, dout, q, k, v, out, stats, dstats=dstats)
    alone: Call = functools.partial(attention_backward, dout, q, k, v, out, stats)
    ways = (Way("dense products", dense), Way("only the backward pass", alone, equal=False))
    yield Case("dstats", f"{head_dim} x {heads} x {positions} x {batch}", Way("ours", ours), ways)


def scale_cases(machine: Machine, *, small: bool) -> Iterator[Case]:
    """Yield the cases of ``scale=`` as an array, both passes."""
    head_dim, heads, positions, batch = CPU_SCALES if small else SCALES
    xp = machine.xp
    q, k, v, dout = (machine.normal(number, head_dim, heads, positions, batch) for number in range(4))
    scale = machine.array(np.linspace(0.05, 0.2, heads, dtype=np.float32))
    out, stats = attention(q, k, v, scale=scale, return_stats=True)

    def times_scale(x: Any) -> Any:
        return xp.multiply(x, scale[:, None, None], out=xp.empty_like(x))

    def forward() -> list[Any]:
        return [attention(times_scale(q), k, v, scale=1.0)]

    def backward() -> list[Any]:
        dproduct, dk, dv = attention_backward(dout, times_scale(q), k, v, out, stats, scale=1.0)
        dscale = xp.multiply(q, dproduct, dtype="float32").sum(axis=(0, 2, 3))
        return [times_scale(dproduct), dk, dv, dscale]

    ours: dict[str, Call] = {
        "forward": lambda: [attention(q, k, v, scale=scale)],
        "backward": functools.partial(attention_backward, dout, q, k, v, out, stats, scale=scale, return_dscale=True),
    }
    for (name, call), without in zip(ours.items(), (forward, backward), strict=True):
        case = f"{head_dim} x {heads} x {positions} x {batch}, {name}"
        yield Case("scale", case, Way("ours", call), [Way("q multiplied", without)])


def beam_cases(machine: Machine, *, small: bool) -> Iterator[Case]:
    """Yield the case of beams that share the pages of a prompt."""
    sizes = CPU_BEAMS if small else BEAMS
    head_dim, heads, key_heads, length, beams, page = sizes
    xp, width = machine.xp, length // page
    prompt = [machine.normal(number, head_dim, key_heads, length) for number in (0, 1)]
    q = machine.normal(2, head_dim, heads, 1, beams)
    token = [machine.normal(number, head_dim, key_heads, 1, beams) for number in (3, 4)]

    cache = KVCache(
        head_dim, key_heads, pages=width + 2 * beams, batch=beams, page_size=page, dtype="float16", numpy=not machine.on_gpu
    )
    cache.append(*prompt, seq_lens_q=[length, *[0] * (beams - 1)])

    def share() -> list[Any]:
        cache.truncate(0, length)  # removes the token of the call before
        cache.reorder([0] * beams)
        cache.append(*token)
        return [attention(q, **cache.view())]

    # every beam has its own pages, the prompt's and one more; the prompt is in the pages of the first beam
    pages = [xp.zeros((head_dim, page, key_heads, width + 1, beams), np.float16, order="F") for _ in prompt]
    for own, x in zip(pages, prompt, strict=True):
        in_pages = x.transpose(0, 2, 1).reshape((head_dim, page, width, key_heads), order="F")
        own[:, :, :, :width, 0] = in_pages.transpose(0, 1, 3, 2)
    table = machine.array(np.arange((width + 1) * beams, dtype=np.int32).reshape((width + 1, beams), order="F"))
    lengths = machine.array(np.full(beams, length + 1, np.int32))
    paged = [x.reshape((head_dim, page, key_heads, -1), order="F").transpose(0, 2, 1, 3) for x in pages]

    def copy() -> list[Any]:
        for own, x in zip(pages, token, strict=True):
            own[:, :, :, :width, 1:] = own[:, :, :, :width, :1]
            own[:, 0, :, width] = x[:, :, 0]
        return [attention(q, *paged, page_table=table, seq_lens_kv=lengths)]

    case = f"{heads}/{key_heads} x {head_dim}, {beams} beams of {length} tokens"
    copies = sum(x[..., 1:].nbytes for x in pages)
    yield Case("beams", case, Way("ours", share), [Way("pages copied", copy, copies)])


#: The cases of each feature.
FEATURES = {"bias_repeats": bias_cases, "dstats": dstats_cases, "scale": scale_cases, "beams": beam_cases}


def case_rows(machine: Machine, case: Case) -> Iterator[runner.Row]:
    """Yield one row for each way without the feature that runs here."""
    ways = {way.name: way for way in (case.ours, *case.without)}
    calls = {name: way.call for name, way in ways.items()}
    ms = machine.ms(calls)
    if "ours" not in ms:
        return
    ways = {name: ways[name] for name in ms}
    host = machine.host_us({name: way.call for name, way in ways.items()})
    peaks = {name: way.held + machine.peak(way.call) for name, way in ways.items()}
    for name, way in ways.items():
        if name == "ours":
            continue
        difference = f"{device.largest_difference(case.ours.call(), way.call()):.2e}" if way.equal else ""
        yield {
            "feature": case.feature, "case": case.name, "without": name,
            "ours_ms": round(statistics.median(ms["ours"]), 4), "without_ms": round(statistics.median(ms[name]), 4),
            "ratio": round(timing.ratio(ms["ours"], ms[name]), 3),
            "ours_host_us": round(host["ours"], 1), "without_host_us": round(host[name], 1),
            "ours_bytes": peaks["ours"], "without_bytes": peaks[name], "difference": difference,
        }  # fmt: skip


def rows(given: argparse.Namespace) -> Iterator[runner.Row]:
    """Yield the rows of all features."""
    machine = Machine(np if given.cpu else cupy_runtime.cupy())
    if machine.on_gpu:
        device.busy_matrix()  # imports PyTorch, which must load its cuDNN before a call loads ours
    for name in given.only or FEATURES:
        for case in FEATURES[name](machine, small=given.cpu):
            yield from case_rows(machine, case)


def is_wrong(row: runner.Row) -> bool:
    """True if the results differ."""
    return bool(row["difference"]) and not float(row["difference"]) < TOLERANCE  # NaN is also wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--only", nargs="+", choices=FEATURES, metavar="NAME", help=f"of {', '.join(FEATURES)}")
    parser.add_argument("--cpu", action="store_true", help="small problems with numpy arrays, to test the benchmark")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("features", __doc__, words, rows, add_options, needs_gpu=lambda given: not given.cpu, failed=is_wrong)
