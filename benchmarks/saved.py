"""The problems of a program (CUPY_SDPA_TRACE), timed on this machine.

    python -m benchmarks saved problems.jsonl [results.csv] [--cpu]

Contents of arrays are random, and sequences have their full lengths. A problem of gradients is timed together with its forward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupy_sdpa
from cupy_sdpa import store
from cupy_sdpa._cli.helpers.console import CommandError, milliseconds, one_line
from cupy_sdpa._cli.helpers.timing import measure
from cupy_sdpa.check.cases.case import Case, Packed
from cupy_sdpa.check.cases.saved import case_of
from cupy_sdpa.check.verify.execute import CaseRunner

from .common.script import add_csv, check_gpu, listed, parser, write_csv


def full(case: Case) -> Case:
    """The case with full sequence lengths.

    >>> full(Case(options={"seq_lens_q": "random", "causal": "top_left"})).options
    {'seq_lens_q': 'full', 'causal': 'top_left'}
    """
    options = {name: "full" if name.startswith("seq_lens") else value for name, value in case.options.items()}
    if packed := case.packed:
        options["packed"] = tuple(Packed("full", "full", *packed[2:]))
    if paged := case.paged:
        options["paged"] = tuple(paged._replace(lengths="full"))
    return case.with_(options=options)


def row(number: int, problem: cupy_sdpa.Problem, engine: str) -> dict[str, Any]:
    """The time of a problem, or the reason why it has none."""
    found: dict[str, Any] = {"number": number, "problem": str(problem), "ms": None, "reason": ""}
    try:
        runner = CaseRunner(full(case_of(problem, engine)))
        memory = runner.allocate()
        runner.load(memory, 0)
        timing = measure(lambda: runner.call(memory, 0), engine == "gpu")
    except (TypeError, ValueError, NotImplementedError, MemoryError, cupy_sdpa.CudnnError) as error:
        return found | {"reason": one_line(str(error))}
    return found | {"ms": 1e3 * timing.median}


def main(words: Sequence[str]) -> int:
    """Time the problems, print the rows and write them; returns 1 if a problem was not timed.

    Raises:
        CommandError: there is no GPU, or the file is not one of problems.
    """
    options = parser("saved", __doc__)
    options.add_argument("problems", type=Path, metavar="PROBLEMS", help="a file written by CUPY_SDPA_TRACE")
    add_csv(options)
    options.add_argument("--cpu", action="store_true", help="numpy arrays")
    arguments = options.parse_args(words)
    if not arguments.cpu:
        check_gpu("saved")
    try:
        problems = store.read_problems(arguments.problems)
    except ValueError as error:
        raise CommandError(str(error)) from error
    rows = []
    for number, problem in enumerate(problems, 1):
        rows.append(found := row(number, problem, "cpu" if arguments.cpu else "gpu"))
        time = found["reason"] if found["ms"] is None else milliseconds(found["ms"] / 1e3)
        print(listed({"problem": number, "time": time}) + f": {problem}", flush=True)
    if arguments.csv:
        write_csv(arguments.csv, rows)
    return int(any(found["ms"] is None for found in rows))
