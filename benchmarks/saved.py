"""The problems of a program (CUPY_SDPA_TRACE), timed on this machine.

    python -m benchmarks saved [results.csv] --problems problems.jsonl [--cpu]

Contents of arrays are random, and sequences have their full lengths. A problem of gradients is timed together with its forward
pass.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import cupy_sdpa
from cupy_sdpa import store
from cupy_sdpa.check.calls import CaseRunner
from cupy_sdpa.check.case import Case, Packed
from cupy_sdpa.check.saved import case_of
from cupy_sdpa.cli.console import CommandError, one_line
from cupy_sdpa.core.runtime import cupy_runtime

from . import runner, timing

#: The number of measurements, of which the median counts.
ROUNDS = 5


def full(case: Case) -> Case:
    """Return the case with full sequence lengths.

    >>> full(Case(options={"seq_lens_q": "random", "causal": "top_left"})).options
    {'seq_lens_q': 'full', 'causal': 'top_left'}
    """
    options = {name: "full" if name.startswith("seq_lens") else value for name, value in case.options.items()}
    if packed := case.packed:
        options["packed"] = tuple(Packed("full", "full", *packed[2:]))
    if paged := case.paged:
        options["paged"] = tuple(paged._replace(lengths="full"))
    return case.with_(options=options)


def rows(arguments: argparse.Namespace) -> Iterator[runner.Row]:
    """Yield the time of each problem, or the reason why it was not timed.

    Raises:
        CommandError: the file is not one of problems.
    """
    try:
        problems = store.read_problems(arguments.problems)
    except ValueError as error:
        raise CommandError(str(error)) from error
    wait = (lambda: None) if arguments.cpu else cupy_runtime.cupy().cuda.Device().synchronize
    for number, problem in enumerate(problems, 1):
        found: runner.Row = {"number": number, "ms": None, "reason": "", "problem": str(problem)}
        try:
            calls = CaseRunner(full(case_of(problem, "cpu" if arguments.cpu else "gpu")))
            memory = calls.allocate()
            calls.load(memory, 0)
            timer = timing.WallClock([functools.partial(calls.call, memory, 0)], lambda results: wait())
            timer()
            ms = statistics.median(timer() for _ in range(ROUNDS))
        except (TypeError, ValueError, NotImplementedError, MemoryError, cupy_sdpa.CudnnError) as error:
            yield found | {"reason": one_line(str(error))}
        else:
            yield found | {"ms": round(ms, 4)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--problems", type=Path, required=True, metavar="FILE", help="a file written by CUPY_SDPA_TRACE")
    parser.add_argument("--cpu", action="store_true", help="numpy arrays")


def main(words: Sequence[str]) -> int:
    """Time the problems, print the rows and write them."""
    return runner.run("saved", __doc__, words, rows, add_options, needs_gpu=lambda given: not given.cpu)
