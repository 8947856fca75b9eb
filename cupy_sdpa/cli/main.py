"""The parser of ``python -m cupy_sdpa``, and the conversion of failures to one line and an exit status."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from .console import CommandError, Help, one_line, output_of

#: The commands and their purposes. Each is a module of this folder such as ``demo_command``, with the texts of its help,
#: ``add_options`` for its parser, and ``command``, which runs it.
COMMANDS = {
    "demo": "attention over a text: result, error, time and plot",
    "info": "versions, libraries, GPUs, and what is missing",
    "explain": "whether a problem can run, and how",
    "plan": "build plans ahead of time, also without the GPU",
    "support": "what each cuDNN version and GPU can run",
    "check": "a randomized self-test of the GPU and cuDNN",
}
_EXAMPLES = """\
examples:
  python -m cupy_sdpa demo
  python -m cupy_sdpa info
  python -m cupy_sdpa explain 128,32,4096,1 --causal --gpu h200
  python -m cupy_sdpa plan 128,32,4096,1 --causal --gpu h200 -o plans/
  python -m cupy_sdpa check --minutes 10

exit status: 0 success; 1 a wrong result, or a problem that cannot run; 2 the
command failed and one line on stderr gives the reason.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default the process's, and return its :func:`exit_status`."""

    def command() -> int:
        parser = _parser(sys.argv[1:] if argv is None else argv)
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:  # with the usage of the command
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return 2
        with output_of(arguments):
            return int(arguments.command(arguments))

    return exit_status(command, "cupy_sdpa")


def exit_status(command: Callable[[], int], program: str) -> int:
    """Run a command and return its exit status; print a failure as one line on stderr, after the name of the program.

    The status is the command's own: 0 for success, 1 for a negative result (a wrong result, a problem that cannot run); 2 if it
    failed, 130 if it was interrupted, 141 if its output was closed.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # core/_interrupt.py set it during the import
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals that cannot print the characters of formulas
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as head(1) does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 141
    except CommandError as error:
        text, status = str(error), 2
    except MemoryError as error:  # the messages of numpy and CuPy contain the requested size
        text, status = f"not enough memory: {error}", 2
    except KeyboardInterrupt:
        text, status = "interrupted", 130
    print(f"{program}: {one_line(text)}", file=sys.stderr)
    return status


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser. Only the module of the command in ``argv`` is imported."""
    parser = argparse.ArgumentParser(
        prog="python -m cupy_sdpa",
        description="Fused scaled dot-product attention: cuDNN on the GPU, numpy on the CPU.",
        epilog=_EXAMPLES,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"cupy_sdpa {__version__}")
    parser.set_defaults(command=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar=f"{{{','.join(COMMANDS)}}}")
    named = next((word for word in argv if not word.startswith("-")), "")
    for name, purpose in COMMANDS.items():
        if name == named:
            module = importlib.import_module(f".{name}_command", __package__)
            usage = getattr(module, "USAGE", None)
            own = commands.add_parser(
                name, usage=usage, description=module.DESCRIPTION, epilog=module.EPILOG, formatter_class=Help
            )
            module.add_options(own)
            own.set_defaults(command=module.command, parser=own)
        else:
            commands.add_parser(name, help=purpose)
    return parser
