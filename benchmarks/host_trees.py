"""Host time of repeated calls of this checkout, divided by another checkout's.

    git worktree add ../before COMMIT
    python -m benchmarks host_trees --before ../before [results.csv]

Each tree runs in a process of its own, which loads the package from there. The processes take turns, a few milliseconds each.
The ratio is the median of the ratios of the rounds: the clock of a machine changes more between two runs than the trees differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cupy_sdpa.cli.console import CommandError

from . import runner

ROOT = Path(__file__).resolve().parents[1]
#: What each process runs: it reads the names of calls, one per line, and answers with the microseconds of a call.
WORKER = """
import sys, time
import numpy as np
import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_vjp

assert cupy_sdpa.__file__.startswith(sys.argv[1]), cupy_sdpa.__file__
on_gpu, count = sys.argv[2] == "gpu", int(sys.argv[3])
if on_gpu:
    import cupy
put, wait = (cupy.asarray, cupy.cuda.Device().synchronize) if on_gpu else (lambda x, order="F": x, lambda: None)
rng = np.random.default_rng(0)
normal = lambda *shape: put(np.asfortranarray(rng.standard_normal(shape).astype(np.float16)), order="F")
q, k, v, dout = (normal(64, 4, 64, 2) for _ in range(4))
lengths, bias = put(np.array([64, 40], np.int32)), normal(64, 64, 4, 1)
out, stats = attention(q, k, v, return_stats=True)
of_lengths = attention(q, k, v, return_stats=True, seq_lens_q=lengths, seq_lens_kv=lengths)
written = out.copy(order="F")

def vjp():
    _, pullback = attention_vjp(q, k, v)
    return pullback(dout)

calls = {
    "plain": lambda: attention(q, k, v),
    "causal": lambda: attention(q, k, v, causal=True),
    "out": lambda: attention(q, k, v, out=written),
    "lengths": lambda: attention(q, k, v, seq_lens_kv=lengths),
    "bias": lambda: attention(q, k, v, bias=bias),
    "score_mod": lambda f=(lambda s, b, h, i, j: s + 0.1 * h): attention(q, k, v, score_mod=f),
    "stats": lambda: attention(q, k, v, return_stats=True),
    "layout": lambda x=q.transpose(3, 2, 1, 0): attention(x, x, x, layout="bshd"),
    "gradients": lambda: attention_backward(dout, q, k, v, out, stats),
    "gradients_lengths": lambda: attention_backward(dout, q, k, v, *of_lengths, seq_lens_q=lengths, seq_lens_kv=lengths),
    "vjp": vjp,
}
for call in calls.values():
    for _ in range(5 if count == 1 else 30):
        call()
print("ready", *calls, flush=True)
for line in sys.stdin:
    call, best = calls[line.strip()], float("inf")
    for _ in range(4):
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begin) / count)
    print(best * 1e6, flush=True)
"""


class Worker:
    """A process that times the calls of a tree."""

    def __init__(self, tree: Path, *, on_gpu: bool, count: int) -> None:
        words = [sys.executable, "-W", "ignore", "-c", WORKER, str(tree), "gpu" if on_gpu else "cpu", str(count)]
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


def rows(given: argparse.Namespace) -> Iterator[runner.Row]:
    """Yield one row for each call."""
    before = given.before.resolve()
    if not (before / "cupy_sdpa" / "__init__.py").is_file():
        raise CommandError(f"{given.before} is no tree of this repository: pass the folder that contains cupy_sdpa")
    on_gpu, count = not given.cpu, 1 if given.cpu else 50
    with contextlib.ExitStack() as stack:
        workers = [Worker(tree, on_gpu=on_gpu, count=count) for tree in (before, ROOT)]
        for worker in workers:
            stack.callback(worker.close)
        for name in workers[0].names:
            times: list[list[float]] = [[], []]
            for number in range(given.rounds):
                for i in (0, 1) if number % 2 else (1, 0):
                    times[i].append(workers[i].time(name))
            ratios = [after / earlier for earlier, after in zip(*times, strict=True)]
            yield {
                "call": name, "before_us": round(min(times[0]), 2), "us": round(min(times[1]), 2),
                "ratio": round(statistics.median(ratios), 3),
            }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--before", type=Path, required=True, metavar="TREE", help="the folder of the other tree")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds (default: 9)")
    parser.add_argument("--cpu", action="store_true", help="numpy arrays, to test the benchmark")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    shown = ("call", "before_us", "us", "ratio")
    return runner.run("host_trees", __doc__, words, rows, add_options, needs_gpu=lambda given: not given.cpu, shown=shown)
