"""Packed (varlen) sequences against PyTorch and cudnn-frontend: the same arrays in one run, interleaved; both passes.

    python -m benchmarks packed [results.csv]

Each contender that can compute a problem is timed by CUDA events in shuffled order, on input sets that together are larger
than the L2 cache, after other work that hides the host's time; medians. A contender counts only if its results are close to
those of attention in float32, one sequence at a time; one that fails is listed with its exception. Only attention is timed:
padding, repeating heads and undoing both are not. The host time is the time until the calls return, on an idle device.

The file has a row for every problem, pass and contender; contenders that failed have the reason. Needs PyTorch besides CuPy,
and cudnn-frontend for its rows. The exit status is 1 if our own results are wrong or missing.
"""

from __future__ import annotations

import functools
import math
import statistics
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..common.accuracy import WrongResultError, largest_difference
from ..common.device import busy_matrix, input_sets
from ..common.machine import versions
from ..common.script import csv_path, listed, write_csv
from ..common.timing import device_ms, host_us, interleaved, ratio
from .contenders import Contender, Ours, TorchNested, TorchPadded, TorchVarlen, TorchVarlenCudnn, options, plan_info
from .frontend import Frontend
from .problems import DIRECTIONS, PROBLEMS, Inputs, Problem

CONTENDERS = (Ours, TorchVarlen, TorchVarlenCudnn, TorchNested, TorchPadded, Frontend)
ROUNDS = 25
#: A contender that has used this many seconds for one problem and pass gets no more than the minimum number of rounds.
SECONDS_PER_CONTENDER, MIN_ROUNDS = 2.5, 4
#: The number of calls for the median host time: our calls are cached after a few.
HOST_CALLS = 9
#: Above the first limit of host time, a contender is timed with a single call; above the second one, it is not timed.
SLOW_HOST_MS, SLOWEST_HOST_MS = 20, 100
#: The largest accepted difference, relative to the largest magnitude.
TOLERANCE = 0.02
#: The least milliseconds of a product of the busy matrix with itself.
BUSY_MS = 0.15
#: The columns that a contender may leave empty.
MEASURED = (
    "ms", "tflops", "ours_over_it", "best_other", "host_us", "error", "difference_from_ours", "engine", "workspace_bytes",
    "left_out",
)  # fmt: skip


def reference(problem: Problem, inputs: Inputs) -> dict[str, list[Any]]:
    """Both passes in float32, one sequence and key/value head at a time."""
    results = [torch.zeros(x.shape, device="cuda") for x in (inputs.q, inputs.q, inputs.k, inputs.v)]
    count = problem.hq // problem.hkv
    for begin, end in zip(problem.starts, problem.starts[1:], strict=False):
        for head in range(problem.hkv if begin < end else 0):
            queries, keys = slice(count * head, count * (head + 1)), slice(head, head + 1)
            qkv = (inputs.q[begin:end, queries], inputs.k[begin:end, keys], inputs.v[begin:end, keys])
            leaves = [x.float().transpose(0, 1).requires_grad_() for x in qkv]
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                q, k, v = (x.expand(count, -1, -1) for x in leaves)
                out = scaled_dot_product_attention(q, k, v, is_causal=problem.causal)
            gradients = torch.autograd.grad(out, leaves, inputs.dout[begin:end, queries].float().transpose(0, 1))
            for result, heads, x in zip(results, (queries, queries, keys, keys), (out.detach(), *gradients), strict=True):
                result[begin:end, heads] = x.transpose(0, 1)
    return {"forward": results[:1], "backward": results[1:]}


def difference(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """:func:`largest_difference` of PyTorch tensors."""
    ours, theirs = ([cupy.from_dlpack(x.detach().float().contiguous()) for x in tensors] for tensors in (results, expected))
    return largest_difference(ours, theirs)


class ContenderRun(NamedTuple):
    """A contender with correct results: a call for each input set, the first results, and more columns."""

    calls: list[Callable[[], Any]]
    results: list[Any]
    error: float
    host_ms: float
    facts: dict[str, Any]


def prepare(contender: Contender, direction: str, sets: Sequence[Inputs], expected: Sequence[Any]) -> ContenderRun:
    """Make the calls, compare the results of the first one, and measure the host time.

    Raises:
        WrongResultError: the results differ from those in float32.
    """
    calls = [getattr(contender, direction)(inputs) for inputs in sets]
    results = [x.clone() for x in contender.packed(calls[0](), direction)]
    error = difference(results, expected)
    if not error < TOLERANCE:  # also refuses NaN
        raise WrongResultError(f"its results differ from those in float32 by {error:.3g} of the largest value")
    host_ms = host_us(lambda: [call() for call in calls], HOST_CALLS) / 1000 / len(calls)
    return ContenderRun(calls, results, error, host_ms, contender.facts(direction, sets[0]))


def prepare_all(
    problem: Problem, direction: str, sets: Sequence[Inputs], expected: Any
) -> tuple[dict[str, ContenderRun], dict[str, str]]:
    """The contenders that can compute the problem, and the reasons why the others cannot.

    If a contender fails with grouped-query attention, it is tried with repeated heads.
    """
    runs: dict[str, ContenderRun] = {}
    failures: dict[str, str] = {}
    for kind in CONTENDERS:
        for repeated in (False, True) if kind.can_repeat and problem.hq != problem.hkv else (False,):
            name = f"{kind.name}, repeated heads" if repeated else kind.name
            try:
                runs[name] = prepare(kind(problem, repeated), direction, sets, expected)
                break
            except Exception as error:  # the other contenders continue
                failures[name] = f"{type(error).__name__}: {error}"[:1000]
    return runs, failures


def measure_times(runs: dict[str, ContenderRun]) -> dict[str, list[float]]:
    """The interleaved times of all contenders whose host time can be hidden."""
    busy, _ = busy_matrix()
    names = [name for name, one in runs.items() if one.host_ms < SLOWEST_HOST_MS]
    calls = {name: runs[name].calls[: 1 if runs[name].host_ms > SLOW_HOST_MS else None] for name in names}
    products = {name: 8 + math.ceil(1.5 * runs[name].host_ms * len(calls[name]) / BUSY_MS) for name in names}
    timers = {name: functools.partial(device_ms, calls[name], busy, products[name]) for name in names}
    return interleaved(timers, ROUNDS, seconds=SECONDS_PER_CONTENDER, min_rounds=MIN_ROUNDS)


def measure(problem: Problem, direction: str, sets: Sequence[Inputs], expected: Sequence[Any]) -> list[dict[str, Any]]:
    """Measure one problem and pass, and print its rows."""
    print(f"{problem.name}, {direction}: total length {problem.total}, {problem.hq}/{problem.hkv} heads", flush=True)
    runs, failures = prepare_all(problem, direction, sets, expected)
    times = measure_times(runs) if problem.timed else {}
    ms = {name: statistics.median(values) for name, values in times.items()}
    ours = runs.get(Ours.name)
    best = min((name for name in ms if name != Ours.name), key=ms.__getitem__, default=None)
    rows = []
    for name in (*runs, *failures):
        row = empty_row(problem, direction, name)
        if one := runs.get(name):
            row |= {"error": round(one.error, 5), "host_us": round(1000 * one.host_ms, 1), **one.facts}
            row["difference_from_ours"] = round(difference(ours.results, one.results), 5) if ours else None
        if name in ms:
            tflops = round(problem.operations(direction) / ms[name] / 1e9)
            row |= {"ms": round(ms[name], 4), "tflops": tflops, "best_other": name == best}
            row["ours_over_it"] = round(ratio(times[Ours.name], times[name]), 3) if Ours.name in ms else None
        row["left_out"] = failures[name].partition("\n")[0] if name in failures else None
        rows.append(row)
        print(f"  {name:34} {described(row) if name in runs else f'left out: {failures[name]}'}", flush=True)
    if best and Ours.name in ms:
        print(f"  our time / that of the fastest other contender, {best}: {ratio(times[Ours.name], times[best]):.3f}")
    return rows


def empty_row(problem: Problem, direction: str, contender: str) -> dict[str, Any]:
    """A row with the columns of the problem."""
    return {
        "name": problem.name, "b": len(problem.lengths), "total": problem.total, "longest": problem.longest,
        "hq": problem.hq, "hkv": problem.hkv, "d": problem.d, "causal": problem.causal, "direction": direction,
        "dtype": "bfloat16", "way": contender, **dict.fromkeys(MEASURED),
    }  # fmt: skip


def described(row: dict[str, Any]) -> str:
    """The printed text of a row."""
    times = f"{row['ms']:9.4f} ms {row['tflops']:4} TFLOP/s   ratio {row['ours_over_it']}" if row["ms"] else "not timed"
    plan = f"   engine {row['engine']}, workspace {row['workspace_bytes']}" if row["engine"] else ""
    mark = "WRONG: " if differs(row) else ""
    accuracy = f"error {row['error']}, {mark}difference from ours {row['difference_from_ours']}"
    return f"{times}   host {row['host_us']} us   {accuracy}{plan}"


def differs(row: dict[str, Any]) -> bool:
    """Whether a contender's results differ from ours."""
    value = row["difference_from_ours"]
    return value is not None and not value < TOLERANCE


def print_workspace(problem: Problem, inputs: Inputs) -> None:
    """Print the workspace of our backward pass, also for twice as many sequences of the same total length."""
    middles = ((a + b) // 2 for a, b in zip(problem.starts, problem.starts[1:], strict=False))
    for starts in (problem.starts, sorted({*problem.starts, *middles})):
        workspace = plan_info(inputs, options(problem, starts), "backward").workspace
        print(f"  workspace of the backward pass: {len(starts) - 1:3} sequences, total {problem.total}: {workspace} bytes")


def run(problem: Problem, rows: list[dict[str, Any]]) -> None:
    """Add the rows of a problem, both passes."""
    count = input_sets(2 * problem.d * (problem.hq + 2 * problem.hkv) * problem.total) if problem.timed else 1
    sets = [Inputs(problem) for _ in range(count)]
    expected = reference(problem, sets[0])
    for direction in DIRECTIONS:
        rows += measure(problem, direction, sets, expected[direction])
    print_workspace(problem, sets[0])


def frontend_version() -> str:
    """The version of cudnn-frontend and of its cuDNN."""
    try:
        import cudnn

        return f"{cudnn.__version__} with cuDNN {cudnn.backend_version_string()}"
    except Exception as error:  # every problem reports it again
        return f"none: {type(error).__name__}"


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them; returns 1 if our results are wrong or missing."""
    path = csv_path("packed", __doc__, words)
    used = versions(torch=torch.__version__, cudnn_frontend=frontend_version())
    print(listed(used))
    rows: list[dict[str, Any]] = []
    failed = False
    for problem in PROBLEMS:
        try:
            with torch.no_grad():
                run(problem, rows)
        except Exception:  # the other problems continue, and the rows are written
            failed = True
            traceback.print_exc()
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()
    for direction in DIRECTIONS:
        selected = [row for row in rows if row["direction"] == direction and row["best_other"] and row["ours_over_it"]]
        if ratios := [row["ours_over_it"] for row in selected]:
            mean = statistics.geometric_mean(ratios)
            print(f"{direction}: our time / the fastest other's: geometric mean {mean:.3f}, largest {max(ratios):.3f}")
    if path and rows:
        write_csv(path, [{**row, **used} for row in rows])
    wrong = any(differs(row) or (row["left_out"] and row["way"] == Ours.name) for row in rows)
    return int(failed or wrong)
