"""Cold start: from a new process to the end of its first and second call, compared with PyTorch.

    python -m benchmarks cold_start [--runs N] [results.csv]

Each run is a new process that calls causal attention twice on float16 zeros, 1024 positions, 8 heads of 128, batch 1: ours on
CuPy, and PyTorch's cuDNN and flash backends. The processes of the contenders alternate, and each column is its minimum over the
runs. So files are in the system's cache, and our plans in the disk cache, unless ``CUPY_SDPA_CACHE_DIR=0`` turns that off. With
``--cpu``: ours on numpy with 64 positions, and PyTorch on the CPU if it is installed.

Columns: ``contender``; ``library``, with its version; in milliseconds ``process_ms``, from the start of the process to its end,
``library_ms``, the import of CuPy, numpy or PyTorch, and the first array on the device, ``import_ms``, the import of attention,
``first_ms`` and ``second_ms``, the two calls, until their results are ready; and ``message``, why a contender did not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cupy_sdpa.cli.console import CommandError, one_line, positive

from . import runner

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("process_ms", "library_ms", "import_ms", "first_ms", "second_ms")
#: What each process runs: it prints the library's version and the seconds of each part. ``CONTENDERS`` fills the blanks.
PROGRAM = """
import time
begin = time.perf_counter()
import {library} as xp
{zero}
loaded = time.perf_counter()
{load}
imported = time.perf_counter()
x = {array}
seconds = []
with {context}:
    for _ in range(2):
        start = time.perf_counter()
        {call}
        seconds.append(time.perf_counter() - start)
print(xp.__version__, loaded - begin, imported - loaded, *seconds)
"""
_OURS = {"load": "from cupy_sdpa import attention; from contextlib import nullcontext", "context": "nullcontext()"}
_PYTORCH = {
    "library": "torch",
    "load": "from torch.nn.functional import scaled_dot_product_attention; "
    "from torch.nn.attention import sdpa_kernel, SDPBackend",
}
_PYTORCH_ON_GPU = {
    **_PYTORCH,
    "zero": "xp.zeros(1, device='cuda'); xp.cuda.synchronize()",
    "array": "xp.zeros(1, 8, 1024, 128, dtype=xp.float16, device='cuda')",
    "call": "scaled_dot_product_attention(x, x, x, is_causal=True); xp.cuda.synchronize()",
}
#: What each contender fills into the program, on a GPU and on the CPU.
CONTENDERS = {
    "ours": {
        **_OURS,
        "library": "cupy",
        "zero": "xp.zeros(1); xp.cuda.Device().synchronize()",
        "array": "xp.zeros((128, 8, 1024, 1), xp.float16, order='F')",
        "call": "attention(x, x, x, causal=True); xp.cuda.Device().synchronize()",
    },
    "PyTorch, cuDNN": {**_PYTORCH_ON_GPU, "context": "sdpa_kernel(SDPBackend.CUDNN_ATTENTION)"},
    "PyTorch, flash": {**_PYTORCH_ON_GPU, "context": "sdpa_kernel(SDPBackend.FLASH_ATTENTION)"},
}
CPU_CONTENDERS = {
    "ours": {
        **_OURS,
        "library": "numpy",
        "zero": "xp.zeros(1)",
        "array": "xp.zeros((128, 8, 64, 1), xp.float16, order='F')",
        "call": "attention(x, x, x, causal=True)",
    },
    "PyTorch": {
        **_PYTORCH,
        "zero": "xp.zeros(1)",
        "array": "xp.zeros(1, 8, 64, 128, dtype=xp.float16)",
        "call": "scaled_dot_product_attention(x, x, x, is_causal=True)",
        "context": "sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])",
    },
}


def start(code: str) -> tuple[str, list[float]]:
    """Run a program in a new process; returns the library's version and the milliseconds of each column.

    Raises:
        CommandError: the process failed; the message is the last line of its errors.
    """
    begin = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise CommandError(one_line((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]))
    version, *parts = done.stdout.split()
    return version, [1e3 * seconds, *(1e3 * float(x) for x in parts)]


def rows(given: argparse.Namespace) -> Iterator[runner.Row]:
    """Yield one row for each contender."""
    contenders = CPU_CONTENDERS if given.cpu else CONTENDERS
    programs = {
        name: PROGRAM.format(**blanks)
        for name, blanks in contenders.items()
        if blanks["library"] != "torch" or importlib.util.find_spec("torch")
    }
    if programs.keys() != contenders.keys():
        print("PyTorch is not installed")
    versions: dict[str, str] = {}
    times: dict[str, list[list[float]]] = {name: [] for name in programs}
    messages = dict.fromkeys(programs, "")
    for number in range(given.runs):
        for name in programs if number % 2 else reversed(programs):
            if messages[name]:
                continue
            try:
                versions[name], one = start(programs[name])
            except CommandError as error:
                if name == "ours":
                    raise
                messages[name] = str(error)
            else:
                times[name].append(one)
    for name, several in times.items():
        least = [round(min(column), 2) for column in zip(*several, strict=True)] or [""] * len(COLUMNS)
        library = f"{contenders[name]['library']} {versions.get(name, '')}".strip()
        yield {"contender": name, "library": library, **dict(zip(COLUMNS, least, strict=True)), "message": messages[name]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="processes of each contender (default: 5)")
    parser.add_argument("--cpu", action="store_true", help="numpy arrays, and PyTorch on the CPU, to test the benchmark")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("cold_start", __doc__, words, rows, add_options, needs_gpu=lambda given: not given.cpu)
