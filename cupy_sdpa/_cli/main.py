"""The parser of ``python -m cupy_sdpa``, and the one place where failures become a line and an exit status."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from ..version import __version__
from . import bench, check, demo, explain, info, plan, run, support
from .console import CommandError, Help, one_line, spoken_as

_EXAMPLES = """\
examples:
  python -m cupy_sdpa demo
  python -m cupy_sdpa run in.npz -o out.npz
  python -m cupy_sdpa explain 128,32,4096,1 --causal --gpu h200
  python -m cupy_sdpa plan --gpu h200 shapes.toml -o plans/
  python -m cupy_sdpa bench --cpu
  python -m cupy_sdpa check --minutes 10

exit status: 0 done; 1 the answer is no: a wrong result, a problem that cannot
run; 2 it could not be done, and one line says why.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after ``python -m cupy_sdpa``; None takes them from the process.

    Returns:
        The exit status: 0 done, 1 the answer is no (a wrong result, a problem that cannot run), 2 it could not be done and one
        line on stderr says why, 130 interrupted, 141 nobody reads the output any more.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the letters of a formula shows the rest
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        with spoken_as(arguments):
            status = int(arguments.command(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has heard enough, as head(1) does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit finds no broken pipe
        return 141
    except CommandError as error:
        text, status = str(error), 2
    except MemoryError as error:  # numpy's and CuPy's say how much was asked for
        text, status = f"not enough memory: {error}", 2
    except KeyboardInterrupt:
        text, status = "interrupted", 130
    print(f"cupy_sdpa: {one_line(text)}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cupy_sdpa",
        description="Fused scaled dot-product attention: cuDNN on the GPU, numpy on the CPU.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"cupy_sdpa {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="{demo,run,info,explain,plan,support,bench,check}")
    for module in (demo, run, info, explain, plan, support, bench, check):
        module.add_to(commands)
    return parser
