"""Plant faults one at a time in copies of the repository, and report which ones a command finds.

    python tools/planted_faults.py                                   # the tests of each fault's folder, or check
    python tools/planted_faults.py --numeric --jobs 2                # only faults that make results wrong
    python tools/planted_faults.py --names "window pages" "fp8 merge scale"
    python tools/planted_faults.py --command "python -m pytest -q -x tests/attention/test_merge.py" --list

``planted_faults.json`` has one fault per line: its name, the file, the text that is replaced, the text that replaces it, and
whether it makes results wrong on numpy (``numeric``), so that ``check`` finds it. A change that removes the text of a fault
must replace the fault. The exit status is 0 if every fault is caught, 1 if one survives, 2 if the data or the command are
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).with_suffix(".json")
#: The command for faults that make results wrong on numpy.
CHECK = "python -m cupy_sdpa check --engine cpu --seed 1 --minutes 1.5 --jobs 1 --first"
#: The folders of tests of each folder or module of the package; the longest prefix counts.
TESTS = {
    "benchmarks": ("project",),
    "cupy_sdpa": ("attention",),
    "cupy_sdpa/block_masks": ("block_masks",),
    "cupy_sdpa/derivatives": ("jvp", "attention"),
    "cupy_sdpa/libraries": ("boundary",),
    "cupy_sdpa/core": ("attention",),
    "cupy_sdpa/core/boundary": ("boundary",),
    "cupy_sdpa/core/boundary/read_array.py": ("boundary", "programs"),
    "cupy_sdpa/core/boundary/read_options.py": ("boundary", "programs"),
    "cupy_sdpa/core/boundary/user_functions.py": ("boundary", "score_fn"),
    "cupy_sdpa/check": ("check",),
    "cupy_sdpa/cli": ("cli",),
    "cupy_sdpa/core/cudnn": ("plans",),
    "cupy_sdpa/core/cudnn_engine": ("plans",),
    "cupy_sdpa/explanation.py": ("plans",),
    "cupy_sdpa/extend": ("project", "programs"),
    "cupy_sdpa/fp8": ("fp8", "replay", "boundary"),
    "cupy_sdpa/core/graph": ("graph", "attention"),
    "cupy_sdpa/helpers.py": ("attention", "boundary"),
    "cupy_sdpa/derivatives/jvp.py": ("jvp",),
    "cupy_sdpa/vjp.py": ("attention", "replay"),
    "cupy_sdpa/core/kernels": ("kernels", "attention"),
    "cupy_sdpa/block_masks/blocks.py": ("block_masks",),
    "cupy_sdpa/core/kernels/merge.py": ("attention", "block_masks"),
    "cupy_sdpa/kv_cache/cache_kernels.py": ("kv_cache", "fp8"),
    "cupy_sdpa/derivatives/derivative_terms.py": ("jvp",),
    "cupy_sdpa/fp8/fp8_kernels.py": ("fp8",),
    "cupy_sdpa/fp8/mean_kernels.py": ("fp8",),
    "cupy_sdpa/core/kernels/merge_gradients.py": ("attention",),
    "cupy_sdpa/core/kernels/scale_kernel.py": ("attention",),
    "cupy_sdpa/core/kernels/stats_gradient.py": ("attention",),
    "cupy_sdpa/kv_cache/page_lists.py": ("kv_cache",),
    "cupy_sdpa/core/kernels/paged.py": ("kv_cache",),
    "cupy_sdpa/kv_cache/rope_kernel.py": ("kv_cache",),
    "cupy_sdpa/kv_cache/shared_prefix_kernel.py": ("kv_cache",),
    "cupy_sdpa/kv_cache/tree_kernel.py": ("kv_cache",),
    "cupy_sdpa/kv_cache": ("kv_cache", "fp8", "boundary"),
    "cupy_sdpa/layout.py": ("boundary",),
    "cupy_sdpa/nnlib": ("boundary",),
    "cupy_sdpa/core/numpy_engine": ("graph", "attention"),
    "cupy_sdpa/core/numpy_engine/fusion.py": ("graph", "boundary", "check"),
    "cupy_sdpa/core/numpy_engine/tiles.py": ("graph", "programs"),
    "cupy_sdpa/offline": ("plans",),
    "cupy_sdpa/core/options": ("boundary", "attention"),
    "cupy_sdpa/parallel": ("parallel", "replay"),
    "cupy_sdpa/core/problem": ("problem", "kv_cache", "attention"),
    "cupy_sdpa/offline/problem_file.py": ("check",),
    "cupy_sdpa/core/problem/plain_data.py": ("check",),
    "cupy_sdpa/core/problem/slices.py": ("attention",),
    "cupy_sdpa/core/programs": ("programs", "replay", "block_masks", "jvp", "attention", "kv_cache"),
    "cupy_sdpa/core/replay": ("replay",),
    "cupy_sdpa/core/replay/bound_program.py": ("replay", "score_fn", "boundary"),
    "cupy_sdpa/core/replay/call_report.py": ("support", "plans"),
    "cupy_sdpa/core/replay/replay_cache.py": ("replay", "parallel", "score_fn", "boundary"),
    "cupy_sdpa/kv_cache/rope.py": ("kv_cache",),
    "cupy_sdpa/core/runtime": ("kernels", "replay", "attention"),
    "cupy_sdpa/core/runtime/cupy_runtime.py": ("kernels", "kv_cache", "attention"),
    "cupy_sdpa/core/score_fn": ("score_fn", "boundary"),
    "cupy_sdpa/core/score_fn/modes.py": ("graph", "score_fn"),
    "cupy_sdpa/kv_cache/sequences.py": ("kv_cache",),
    "cupy_sdpa/store.py": ("plans", "check"),
    "cupy_sdpa/core/support": ("support", "boundary"),
    "cupy_sdpa/core/support/batch.py": ("attention",),
    "cupy_sdpa/kv_cache/tree.py": ("kv_cache",),
    "cupy_sdpa/derivatives/weights.py": ("attention",),
    "cupy_sdpa/zoo.py": ("block_masks", "score_fn"),
    "setup.py": ("project",),
    "examples": ("project",),
}
#: What a copy of the repository does not contain.
_NOT_COPIED = (".git", "__pycache__", ".venv", "*.egg-info", "_build", ".mypy_cache", ".pytest_cache", ".ruff_cache")


class Fault(NamedTuple):
    """A mistake that the tests or ``check`` should find.

    Attributes:
        name: what is wrong.
        file: the file, relative to the root of the repository.
        old, new: the text that is replaced, and what replaces it.
        numeric: whether it makes results wrong on numpy.
    """

    name: str
    file: str
    old: str
    new: str
    numeric: bool

    def problem(self, root: Path = ROOT) -> str:
        """Return why the fault cannot be planted; empty if it can be."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: {self.file} does not exist"
        count = path.read_text(encoding="utf-8").count(self.old)
        return "" if count == 1 else f"{self.name}: {self.old!r} occurs {count} times in {self.file}, not once"

    def plant(self, root: Path) -> None:
        """Replace the text in a copy of the repository."""
        path = root / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")

    def command(self) -> str:
        """Return the default command."""
        if self.numeric:
            return CHECK
        folder = max((name for name in TESTS if f"{self.file}/".startswith(f"{name}/")), key=len)
        tests = [f"tests/{name}" for name in TESTS[folder]]
        if self.file.startswith("cupy_sdpa/") and self.file.endswith(".py"):
            tests.append(self.file)  # its doctests
        return f"python -m pytest -q -x {' '.join(tests)}"


def read_faults() -> list[Fault]:
    """Return all faults."""
    return [Fault(**values) for values in json.loads(DATA.read_text(encoding="utf-8"))]


def problems(faults: Sequence[Fault]) -> list[str]:
    """Return what is wrong with the data."""
    names = [fault.name for fault in faults]
    twice = [f"{name}: there are {names.count(name)} faults of this name" for name in sorted({*names}) if names.count(name) > 1]
    return twice + [problem for fault in faults if (problem := fault.problem())]


def run(command: str, fault: Fault | None, limit: float) -> tuple[str, float, str]:
    """Run a command in a copy of the repository with a fault.

    Returns:
        ``"caught"``, ``"survived"`` or ``"time limit"``; the seconds; and the end of the output.
    """
    with tempfile.TemporaryDirectory(prefix="fault") as folder:
        copy = Path(folder, "repository")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
        if fault:
            fault.plant(copy)
        words = shlex.split(command)
        words = [sys.executable if word == "python" else word for word in words]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        start = time.monotonic()
        process = subprocess.Popen(
            words, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            result = "caught" if process.returncode else "survived"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, result = process.communicate()[0], "time limit"
        return result, time.monotonic() - start, output


def main(words: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Plant faults in copies of the repository, and report which ones are found.")
    parser.add_argument("--list", action="store_true", help="list the faults and their commands, and run nothing")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these faults")
    parser.add_argument("--numeric", action="store_true", help="only the faults that make results wrong on numpy")
    parser.add_argument("--command", help="the command (default: check, or the tests of the fault's folder)")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time (default 1)")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="time limit of a command (default 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    arguments = parser.parse_args(words)
    faults = read_faults()
    wrong = problems(faults)
    if unknown := set(arguments.names or ()) - {fault.name for fault in faults}:
        wrong += [f"--names: there is no fault {name!r}" for name in sorted(unknown)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if arguments.names:
        faults = [fault for fault in faults if fault.name in arguments.names]
    if arguments.numeric:
        faults = [fault for fault in faults if fault.numeric]
    commands = [arguments.command or fault.command() for fault in faults]
    if arguments.list:
        for fault, command in zip(faults, commands, strict=True):
            print(f"{fault.name}\n    {fault.file}\n    {command}")
        print(f"{len(faults)} faults")
        return 0
    found = {}
    with ThreadPoolExecutor(arguments.jobs) as threads:
        without = {command: threads.submit(run, command, None, arguments.limit) for command in dict.fromkeys(commands)}
        tasks = [threads.submit(run, command, fault, arguments.limit) for fault, command in zip(faults, commands, strict=True)]
        for command, task in without.items():
            result, _, output = task.result()
            if result != "survived":
                threads.shutdown(wait=False, cancel_futures=True)
                print(f"{command}: {'fails' if result == 'caught' else 'exceeds --limit'} without a fault\n{output[-2000:]}")
                return 2
        for fault, task in zip(faults, tasks, strict=True):
            result, seconds, _ = task.result()
            found[fault.name] = {"result": result, "seconds": round(seconds, 1)}
            print(f"{result:<10} {seconds:6.1f} s  {fault.name} ({fault.file})", flush=True)
    counts = [sum(value["result"] == result for value in found.values()) for result in ("caught", "survived", "time limit")]
    print(f"{counts[0]} caught, {counts[1]} survived, {counts[2]} at the time limit, of {len(found)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(counts[1] > 0)


if __name__ == "__main__":
    sys.exit(main())
