"""Every kind of call under compute-sanitizer's memcheck: first, repeated and replayed calls, both passes, each option alone.

    python -m benchmarks memcheck [log]

Runs cases of the self-test (``python -m cupy_sdpa check``) in one process. Every array has its own allocation, so that
memcheck detects out-of-bounds accesses. Errors that CUDA functions return on purpose, such as failed symbol look-ups, are not
reported. The exit status is 1 if a comparison failed, and compute-sanitizer's if memcheck found an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from cupy_sdpa.check.case import Case
from cupy_sdpa.check.combine import LEFT_OUT
from cupy_sdpa.check.draw import FORWARD_ONLY, OPTIONS, draw_options
from cupy_sdpa.cli.console import CommandError, output_file

from .runner import check_gpu, parser

#: (Sq, Skv): one query with few and with many keys, whole tiles, and lengths that are not multiples of a tile.
LENGTHS = ((1, 33), (1, 300), (128, 128), (65, 130))
COMMAND = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")


def cases() -> list[Case]:
    """No option and each option alone, with alternating lengths, in both passes where the option has gradients."""
    result = []
    for number, name in enumerate(["", *(name for name in OPTIONS if name not in LEFT_OUT["gpu"])]):
        for lengths in (LENGTHS[number % 2], LENGTHS[2 + number % 2]):
            case = draw_options({name} - {""}, 1000 + number, "gpu", lengths)
            result.append(case.with_(backward=not FORWARD_ONLY & {*case.options}, b=min(case.b, 2), hq=2, hkv=1))
    return result


def run_cases() -> int:
    """Run the cases in this process; returns 1 if a result is wrong."""
    import cupy

    from cupy_sdpa.check.execute import execute

    cupy.cuda.set_allocator(None)
    kinds: dict[str, int] = {}
    for number, case in enumerate(cases()):
        outcome = execute(case)
        kinds[outcome.kind] = kinds.get(outcome.kind, 0) + 1
        print(f"{number:3} {outcome.kind:9} {outcome.calls} calls  {case!r}  {outcome.message[:200]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return int(bool(kinds.keys() - {"passed", "refused"}))


def main(words: Sequence[str]) -> int:
    """Run the cases under compute-sanitizer; print the output and write it to the log file."""
    options = parser("memcheck", __doc__)
    options.add_argument("log", nargs="?", type=output_file, metavar="FILE", help="write the output to this file")
    options.add_argument("--inside", action="store_true", help="run the cases in this process without compute-sanitizer")
    arguments = options.parse_args(words)
    check_gpu("memcheck")
    if arguments.inside:
        return run_cases()
    if not shutil.which(COMMAND[0]):
        raise CommandError(f"memcheck needs {COMMAND[0]}, a program of the CUDA toolkit, which is not on PATH")
    command = [*COMMAND, sys.executable, "-m", "benchmarks", "memcheck", "--inside"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    log = open(arguments.log, "w", encoding="utf-8") if arguments.log else contextlib.nullcontext()  # noqa: SIM115
    with (
        log as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process,
    ):
        assert process.stdout
        for line in process.stdout:  # an interrupted run keeps what it printed
            print(line, end="", flush=True)
            if file:
                file.write(line)
                file.flush()
    return process.returncode
