"""Every kind of call under compute-sanitizer's memcheck: first, repeated and replayed, both passes, each option alone.

    python benchmarks/memcheck.py [log]

Runs the cases of the self-test (``python -m cupy_sdpa check``) in one process, with every array in an allocation of its own, so
that an access beyond it is seen. CUDA functions that report an error by intention, such as look-ups of symbols, are left out.
Ends with 1 if memcheck or a comparison found anything.
"""

from __future__ import annotations

import subprocess
import sys

from cupy_sdpa.check.cases.case import Case
from cupy_sdpa.check.cases.draw import OPTIONS, draw_options

#: Sq and Skv: one query with few and with many keys, whole tiles, and lengths that no tile divides.
LENGTHS = ((1, 33), (1, 300), (128, 128), (65, 130))
COMMAND = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9")


def cases() -> list[Case]:
    """Every option alone, and no option, with lengths in turn; gradients too."""
    found = []
    for number, name in enumerate(["", *OPTIONS]):
        for lengths in (LENGTHS[number % 2], LENGTHS[2 + number % 2]):
            case = draw_options({name} - {""}, 1000 + number, "gpu", lengths)
            found.append(case.with_(backward=True, b=min(case.b, 2), hq=2, hkv=1))
    return found


def inside() -> int:
    """Run the cases; 1 where a result is wrong."""
    import cupy

    from cupy_sdpa.check.verify.execute import execute

    cupy.cuda.set_allocator(None)
    kinds: dict[str, int] = {}
    for number, case in enumerate(cases()):
        outcome = execute(case)
        kinds[outcome.kind] = kinds.get(outcome.kind, 0) + 1
        print(f"{number:3} {outcome.kind:9} {outcome.calls} calls  {case!r}  {outcome.message[:200]}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return int(bool(kinds.keys() - {"passed", "refused"}))


def main() -> int:
    """Run this file under compute-sanitizer; its output goes to the terminal, and to a file where one is named."""
    command = [*COMMAND, sys.executable, __file__, "--inside"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(inside() if sys.argv[1:] == ["--inside"] else main())
