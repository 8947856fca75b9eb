"""Host time of repeated calls of this checkout, divided by another checkout's.

    git worktree add ../before COMMIT
    python -m benchmarks host_trees --before ../before [--pairs N] [--rounds N] [--core N] [--members] [results.csv]

Each tree runs in its own process, which loads the package from there. The two processes take turns, a few milliseconds each, on
the same core of the CPU, to which they are bound after the warm-up. Five such pairs run, one after the other: even on equal
code, the ratio of one pair depends on the two processes.

One row per call. ``mix`` is the mean of ten kinds of calls that take turns, each on the next of 16 sets of arrays (on the CPU,
two), as in a model with many layers. With ``--members``, the calls are a member's calls in a group of two GPUs (with ``--cpu``,
of two threads), with each method. The two members are bound to two cores, and the time is the slower member's.

Columns: ``before_us`` and ``us``, the shortest times of the other tree and of this one in microseconds per call; ``ratio``, the
median over all rounds of all pairs; ``spread``, the smallest and the largest median of a pair.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cupy_sdpa.cli.console import CommandError, positive

from . import runner

ROOT = Path(__file__).resolve().parents[1]
#: The start of what each process runs. Its arguments: the tree, "gpu" or "cpu", the calls of a measurement, and the cores.
START = """
import functools, itertools, os, sys, threading, time, traceback
import numpy as np
import cupy_sdpa

assert cupy_sdpa.__file__.startswith(sys.argv[1]), cupy_sdpa.__file__
on_gpu, count, cores = sys.argv[2] == "gpu", int(sys.argv[3]), [int(x) for x in sys.argv[4].split(",") if x]
if on_gpu:
    import cupy
warm_up = 30 if on_gpu else 2
rng = np.random.default_rng(0)
normal = lambda *shape: np.asfortranarray(rng.standard_normal(shape).astype(np.float16))
put = (lambda x: cupy.asarray(x, order="F")) if on_gpu else (lambda x: x)
wait = lambda: cupy.cuda.Device().synchronize() if on_gpu else None

def best(call, number, best_of=4):
    found = float("inf")
    for _ in range(best_of):
        wait()
        begin = time.perf_counter()
        for _ in range(number):
            call()
        found = min(found, (time.perf_counter() - begin) / number)
    return found * 1e6

def bind(member=0):
    if cores:
        os.sched_setaffinity(0, [cores[member % len(cores)]])

def answer(names, microseconds):
    print("ready", *names, flush=True)
    for line in sys.stdin:
        print(microseconds(line.strip()), flush=True)
"""
#: Repeated calls, alone and in a mix.
CALLS = """
from cupy_sdpa import attention, attention_backward, attention_vjp

def calls_of(function=lambda s, b, h, i, j: s + 0.1 * h):
    q, k, v, dout = (put(normal(64, 4, 64, 2)) for _ in range(4))
    lengths, bias = put(np.array([64, 40], np.int32)), put(normal(64, 64, 4, 1))
    out, stats = attention(q, k, v, return_stats=True)
    of_lengths = attention(q, k, v, return_stats=True, seq_lens_q=lengths, seq_lens_kv=lengths)
    written, x = out.copy(order="F"), q.transpose(3, 2, 1, 0)

    def vjp():
        _, pullback = attention_vjp(q, k, v)
        return pullback(dout)

    return {
        "plain": lambda: attention(q, k, v),
        "causal": lambda: attention(q, k, v, causal=True),
        "out": lambda: attention(q, k, v, out=written),
        "lengths": lambda: attention(q, k, v, seq_lens_kv=lengths),
        "bias": lambda: attention(q, k, v, bias=bias),
        "score_mod": lambda: attention(q, k, v, score_mod=function),
        "stats": lambda: attention(q, k, v, return_stats=True),
        "layout": lambda: attention(x, x, x, layout="bshd"),
        "gradients": lambda: attention_backward(dout, q, k, v, out, stats),
        "gradients_lengths": lambda: attention_backward(dout, q, k, v, *of_lengths, seq_lens_q=lengths, seq_lens_kv=lengths),
        "vjp": vjp,
    }

sets = [calls_of() for _ in range(16 if on_gpu else 2)]
calls = sets[0]
mixed = [calls[name] for calls in sets for name in [*calls][:10]]

def mix():
    for call in mixed:
        call()

for call in [*calls.values(), mix]:
    for _ in range(warm_up):
        call()
bind()
answer([*calls, "mix"], lambda name: best(mix, 1) / len(mixed) if name == "mix" else best(calls[name], count))
"""
#: The repeated calls of a member of a group of two, with every method.
MEMBERS = """
from cupy_sdpa.parallel import ContextParallel, Loopback, run_on_gpus, run_threads

host = [normal(64, 4, 512 if on_gpu else 64, 1) for _ in range(4)]
barrier, chosen, times = threading.Barrier(3), [], {}

def calls_of(group):
    calls = {}
    for method in ("ring", "all_gather", "all_to_all"):
        cp = ContextParallel(group, method=method, check=False)
        q, k, v, dout = (cp.shard(put(x)) for x in host)
        out, stats = cp.attention(q, k, v, return_stats=True, causal=True)
        calls[method + "_forward"] = functools.partial(cp.attention, q, k, v, causal=True)
        calls[method + "_backward"] = functools.partial(cp.attention_backward, dout, q, k, v, out, stats, causal=True)
    return calls

def member(group):
    calls = calls_of(group)
    for call in calls.values():
        for _ in range(warm_up):
            call()
    wait()
    bind(group.rank)
    names[:] = calls
    barrier.wait()
    while True:
        barrier.wait()
        times[group.rank] = best(calls[chosen[-1]], count, 3)
        barrier.wait()

def members():
    try:
        run_on_gpus(member, 2) if on_gpu else run_threads(Loopback(2, timeout=600).members, member)
    except BaseException:
        traceback.print_exc()
    os._exit(1)

def microseconds(name):
    chosen.append(name)
    barrier.wait()
    barrier.wait()
    return max(times.values())

names = []
threading.Thread(target=members, daemon=True).start()
barrier.wait()
answer(names, microseconds)
"""


class Program(NamedTuple):
    """What each process of a pair runs: the code, and its arguments after the tree."""

    code: str
    arguments: Sequence[str]


class Worker:
    """A process that times the calls of a tree."""

    def __init__(self, tree: Path, program: Program) -> None:
        words = [sys.executable, "-W", "ignore", "-c", program.code, str(tree), *program.arguments]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self.tree = tree
        self.process = subprocess.Popen(
            words, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self.names = self._answer().split()[1:]

    def time(self, name: str) -> float:
        """Return the microseconds of a call."""
        assert self.process.stdin
        print(name, file=self.process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout
        if line := self.process.stdout.readline():
            return line
        raise CommandError(f"the process of {self.tree} ended with status {self.process.wait()}")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def measure(trees: Sequence[Path], program: Program, rounds: int, *, first: int) -> dict[str, list[list[float]]]:
    """Return the microseconds of both trees in each round, by the name of the call, from a pair of new processes.

    The tree with the number ``first`` is the first one in even rounds.
    """
    with contextlib.ExitStack() as stack:
        workers = []
        for tree in trees:
            workers.append(Worker(tree, program))
            stack.callback(workers[-1].close)
        times: dict[str, list[list[float]]] = {name: [[], []] for name in workers[0].names}
        for name, several in times.items():
            for number in range(rounds):
                for i in (0, 1) if (number + first) % 2 == 0 else (1, 0):
                    several[i].append(workers[i].time(name))
    return times


def summary(name: str, pairs: Sequence[Sequence[Sequence[float]]]) -> runner.Row:
    """Return the row of a call from the microseconds of both trees in each round of each pair.

    >>> summary("plain", [[[10.0, 20.0], [11.0, 22.0]], [[10.0, 10.0], [9.0, 9.0]]])
    {'call': 'plain', 'before_us': 10.0, 'us': 9.0, 'ratio': 1.0, 'spread': '0.90-1.10'}
    """
    ratios = [[after / before for before, after in zip(*pair, strict=True)] for pair in pairs]
    medians = sorted(map(statistics.median, ratios))
    before, after = (min(x for pair in pairs for x in pair[i]) for i in (0, 1))
    return {
        "call": name, "before_us": round(before, 2), "us": round(after, 2),
        "ratio": round(statistics.median(itertools.chain(*ratios)), 3), "spread": f"{medians[0]:.2f}-{medians[-1]:.2f}",
    }  # fmt: skip


def cores(first: int | None) -> list[int]:
    """Return the cores for the processes, the first one first; none where a process cannot choose its core.

    Raises:
        CommandError: this process must not use the first one.
    """
    if not hasattr(os, "sched_getaffinity"):
        if first is not None:
            raise CommandError("--core has no effect here: this system has no sched_setaffinity; remove it")
        return []
    allowed = sorted(os.sched_getaffinity(0), reverse=True)  # the last one first: the first one often has more interrupts
    if first is None:
        return allowed
    if first not in allowed:
        raise CommandError(f"--core {first} is not one of the cores that this process may use: {', '.join(map(str, allowed))}")
    return [first, *(core for core in allowed if core != first)]


def rows(given: argparse.Namespace) -> Iterator[runner.Row]:
    """Yield one row for each call."""
    before = given.before.resolve()
    if not (before / "cupy_sdpa" / "__init__.py").is_file():
        raise CommandError(f"{given.before} is no tree of this repository: pass the folder that contains cupy_sdpa")
    arguments = ["cpu", "1"] if given.cpu else ["gpu", "30" if given.members else "50"]
    arguments.append(",".join(map(str, cores(given.core))))
    program = Program(START + (MEMBERS if given.members else CALLS), arguments)
    pairs = [measure((before, ROOT), program, given.rounds, first=number % 2) for number in range(given.pairs)]
    for name in pairs[0]:
        yield summary(name, [pair[name] for pair in pairs])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--before", type=Path, required=True, metavar="TREE", help="the folder of the other tree")
    parser.add_argument("--rounds", type=positive, default=9, metavar="N", help="rounds of each pair (default: 9)")
    parser.add_argument("--pairs", type=positive, default=5, metavar="N", help="pairs of new processes (default: 5)")
    parser.add_argument("--core", type=int, metavar="N", help="the core of both processes (default: the last allowed one)")
    parser.add_argument("--members", action="store_true", help="calls of a member of a group of two GPUs instead")
    parser.add_argument("--cpu", action="store_true", help="numpy arrays, to test the benchmark")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    shown = ("call", "before_us", "us", "ratio", "spread")
    return runner.run("host_trees", __doc__, words, rows, add_options, needs_gpu=lambda given: not given.cpu, shown=shown)
