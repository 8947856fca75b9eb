"""``python -m benchmarks COMMAND``: run a benchmark, from the repository's root."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from cupy_sdpa.cli.console import CommandError, file_error
from cupy_sdpa.cli.main import exit_status

#: The description of each command. The module of its name has ``main(words) -> int``.
COMMANDS = {
    "compare": "presets against PyTorch, cudnn-frontend, FlexAttention, JAX",
    "cpu": "the CPU engine against plain numpy and PyTorch; needs no GPU",
    "first_use": "what the first call on numpy arrays loads: modules, lines, CPU time; needs no GPU",
    "cold_start": "a new process to the end of its first and second call, against PyTorch",
    "host_options": "host time of every option, alone and in a mix, against PyTorch",
    "host_trees": "host time of repeated calls, compared with another checkout",
    "features": "features against what a user would do without them",
    "sparse": "block masks against FlexAttention",
    "decode": "decoding with paged keys and values against PyTorch and FlashInfer",
    "fp8": "FP8 against bfloat16 and PyTorch: times, and errors against the number of keys",
    "jvp": "directional derivatives against PyTorch's forward-mode differentiation",
    "parallel": "attention over several GPUs: time against ideal, hidden transfers",
    "plans": "plans: first calls, disk cache, buckets of lengths",
    "memcheck": "every kind of call under compute-sanitizer",
    "saved": "the problems of a program (CUPY_SDPA_TRACE)",
    "tables": "the tables and figures of the documentation, from benchmarks/results",
}


def usage() -> str:
    """Return the commands and their descriptions."""
    lines = [f"  {name:16}{description}" for name, description in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m benchmarks COMMAND [options]", "", "commands:", *lines, "", "COMMAND --help lists its options."]
    )


def run(command: str, words: Sequence[str]) -> int:
    """Import the module of a command and run it.

    Raises:
        CommandError: a library that it needs is not installed, or a file cannot be read or written.
    """
    try:
        module = importlib.import_module(f"{__package__}.{command}")
    except ModuleNotFoundError as error:
        raise CommandError(f"{command} needs {error.name}, which is not installed") from error
    try:
        return int(module.main(words))
    except OSError as error:
        if error.filename is None:
            raise
        raise CommandError(file_error(error)) from error


def main(words: Sequence[str]) -> int:
    """Run a command; returns the exit status."""
    if words and words[0] in COMMANDS:
        return exit_status(lambda: run(words[0], words[1:]), "benchmarks")
    requested = bool(words) and words[0] in ("-h", "--help")
    print(usage(), file=sys.stdout if requested else sys.stderr)
    return 0 if requested else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
