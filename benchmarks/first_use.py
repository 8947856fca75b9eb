"""What a first call loads: modules, lines and CPU time of ``from cupy_sdpa import attention`` and a call on numpy arrays.

    python -m benchmarks first_use [--before TREE] [results.csv]

Each run is a process of its own, which has imported numpy and ml_dtypes before. The CPU time is the least of the runs, with
bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cupy_sdpa.cli.console import CommandError

from . import runner

ROOT = Path(__file__).resolve().parents[1]
#: What each process runs. It prints the CPU time in milliseconds, and the names of the modules with their lines.
PROGRAM = """
import json, sys, time
import numpy as np, ml_dtypes
before, begin = {*sys.modules}, time.process_time()
from cupy_sdpa import attention
x = np.ones((8, 1, 4, 1), np.float32, order="F")
attention(x, x, x)
ms = 1e3 * (time.process_time() - begin)
names = [name for name in sys.modules.keys() - before if name.partition(".")[0] == "cupy_sdpa"]
lines = lambda name: len(open(sys.modules[name].__file__, encoding="utf-8").read().splitlines())
print(json.dumps([ms, {name: lines(name) for name in names if not sys.modules[name].__file__.endswith("__init__.py")}]))
"""


def measure(tree: Path) -> tuple[float, dict[str, int]]:
    """The CPU time in milliseconds of a process that uses the package of a tree, and the lines of the modules that it loads.

    ``__init__.py`` is not counted.
    """
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(words, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True)
    if done.returncode:
        raise CommandError(f"the process of {tree} ended with status {done.returncode}: {done.stderr.strip().splitlines()[-1]}")
    ms, lines = json.loads(done.stdout)
    return ms, lines


def rows(given: argparse.Namespace) -> Iterator[runner.Row]:
    """One row for each tree."""
    trees = {"before": given.before.resolve()} if given.before else {}
    for name, tree in {**trees, "now": ROOT}.items():
        if not (tree / "cupy_sdpa" / "__init__.py").is_file():
            raise CommandError(f"{given.before} is no tree of this repository: pass the folder that contains cupy_sdpa")
        _, lines = measure(tree)  # writes the bytecode
        times = [measure(tree)[0] for _ in range(given.runs)]
        yield {"tree": name, "modules": len(lines), "lines": sum(lines.values()), "cpu_ms": round(min(times))}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--before", type=Path, metavar="TREE", help="also measure another tree, in this folder")
    parser.add_argument("--runs", type=int, default=9, metavar="N", help="runs (default: 9)")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    shown = ("tree", "modules", "lines", "cpu_ms")
    return runner.run("first_use", __doc__, words, rows, add_options, needs_gpu=lambda given: False, shown=shown)
