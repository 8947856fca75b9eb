"""``python -m benchmarks COMMAND``: run a benchmark, from the repository's root."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from cupy_sdpa._cli.helpers.console import CommandError, file_error
from cupy_sdpa._cli.main import exit_status

#: The module and the description of each command. A module has ``main(words) -> int``.
COMMANDS = {
    "compare": ("compare.command", "named problems against PyTorch, cudnn-frontend, FlexAttention and JAX; CPU engine"),
    "functions": ("functions", "score and mask functions against FlexAttention"),
    "sparse": ("sparse.run", "block masks against FlexAttention"),
    "packed": ("packed.run", "packed (varlen) sequences against PyTorch and cudnn-frontend"),
    "padded": ("packed.padded", "padded batches with lengths against packed sequences"),
    "host": ("host", "host time of a call and of its steps, against PyTorch"),
    "host_options": ("host_options.run", "host time of every option, alone and in a mix, against PyTorch"),
    "graphs": ("graphs", "captured CUDA graphs: launched as graphs or kernel by kernel"),
    "plans": ("plans", "plans: first calls, disk cache, buckets of lengths, autotuning"),
    "deterministic": ("deterministic", "time and workspace of deterministic gradients"),
    "decode": ("decode", "decoding with paged keys and values against PyTorch and FlashInfer"),
    "fp8": ("fp8.run", "FP8 against bfloat16 and PyTorch: times, and errors against the number of keys"),
    "jvp": ("derivatives.run", "directional derivatives against PyTorch's forward-mode differentiation"),
    "small_gradients": ("derivatives.small", "gradients of short sequences against FlexAttention, kernel by kernel"),
    "parallel": ("parallel.run", "attention over several GPUs: time against ideal, hidden transfers"),
    "one_query": ("checks.one_query", "all engine configs for a single query"),
    "batch_bits": ("checks.batch_bits", "whether the bits of a sequence's results depend on the rest of the batch"),
    "variants": ("checks.variants", "accuracy of every pair of options"),
    "memcheck": ("checks.memcheck", "every kind of call under compute-sanitizer"),
    "newer_cudnn": ("checks.newer_cudnn", "graph retention, offsets with multipliers, float32 outputs"),
    "shape_override": ("checks.shape_override", "whether one plan can run several shapes"),
    "saved": ("saved", "the problems of a program (CUPY_SDPA_TRACE)"),
    "tables": ("tables", "the tables of the documentation, from benchmarks/results"),
}


def usage() -> str:
    """The commands and their descriptions."""
    lines = [f"  {name:16}{description}" for name, (_, description) in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m benchmarks COMMAND [options]", "", "commands:", *lines, "", "COMMAND --help lists its options."]
    )


def run(command: str, words: Sequence[str]) -> int:
    """Import the module of a command and run it.

    Raises:
        CommandError: a library that it needs is not installed, or a file cannot be read or written.
    """
    name, _ = COMMANDS[command]
    try:
        module = importlib.import_module(f"{__package__}.{name}")
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
