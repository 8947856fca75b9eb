"""``info``: versions and paths of the libraries, the GPUs, and the engines that can run on this machine."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import CudnnError, __version__, store
from ..extend.cudnn import Cudnn
from . import machine
from .console import CommandError, add_json, one_line, result, working

DESCRIPTION = "Print versions, the path of each library, the GPUs, and the engines that can run on this machine."
EPILOG = """\
example:
  python -m cupy_sdpa info                         for bug reports
  python -m cupy_sdpa info --describe > card.json  the current GPU, for
                                                   plan --gpu card.json
"""


#: Where each engine runs.
_WHERE = {"numpy": "on the CPU", "CuPy": "on any GPU of CuPy, without cuDNN: engine='cupy'", "cuDNN": "on the GPU"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--describe", action="store_true", help="print only the description of the current GPU, in cuDNN's format"
    )
    add_json(parser)


def command(arguments: argparse.Namespace) -> int:
    """Run ``info``. Missing libraries are not errors; ``--describe`` fails without a GPU."""
    if arguments.describe:
        if obstacles := machine.obstacles():
            raise CommandError(f"there is no GPU to describe: {obstacles[0]}")
        print(Cudnn.installed().describe_gpu())
        return 0
    with working("looking for libraries"):
        facts = _facts()
    if not result(**facts):
        _print_facts(facts)
    return 0


def _facts() -> dict[str, Any]:
    """Return what the command prints; docs/command_line.md lists the keys."""
    here: dict[str, Any] = {"name": "cupy_sdpa", "version": __version__, "path": str(Path(__file__).parents[1])}
    python = {"name": "Python", "version": platform.python_version(), "path": sys.executable}
    packages = [here, python]
    for title, name in (("numpy", "numpy"), ("ml_dtypes", "ml_dtypes"), ("CuPy", "cupy"), ("cuda-python", "cuda.bindings")):
        module = machine.imported(name)
        if isinstance(module, str):
            packages.append({"name": title, "version": None, "reason": module})
            continue
        packages.append({"name": title, "version": module.__version__, "path": str(Path(module.__file__ or "").parent)})
        if name == "cupy":
            packages[-1]["cuda"] = machine.cuda_text(module.cuda.runtime.runtimeGetVersion())
    obstacles, of_cupy = machine.obstacles(), machine.obstacles_of_cupy()
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    return {
        "packages": packages, **_cudnn(), "gpus": _gpus(), "plans": str(store.kept()).removeprefix("plans "),
        "engines": [
            {"name": "numpy", "runs": True, "dtypes": dtypes, "reasons": []},
            {"name": "CuPy", "runs": not of_cupy, "dtypes": dtypes, "reasons": of_cupy},
            {"name": "cuDNN", "runs": not obstacles, "dtypes": ["float16", "bfloat16"], "reasons": obstacles},
        ],
    }  # fmt: skip


def _cudnn() -> dict[str, Any]:
    """Return the libraries of cuDNN."""
    try:
        cudnn = Cudnn.installed()
    except CudnnError as error:
        return {"cudnn": {"name": "cuDNN", "version": None, "reason": one_line(str(error))}, "nvrtc": None}
    return {
        "cudnn": {
            "name": "cuDNN", "version": cudnn.version, "path": cudnn.path,
            "cuda": machine.cuda_text(cudnn.cuda), "found_by": cudnn.found_by,
        },
        "nvrtc": {"name": "NVRTC", "version": cudnn.nvrtc.version, "path": cudnn.nvrtc.path},
    }  # fmt: skip


def _print_facts(facts: Mapping[str, Any]) -> None:
    """Print the facts as aligned lines."""
    for found in (*facts["packages"], facts["cudnn"]):
        cuda = f" (for CUDA {found['cuda']})" if "cuda" in found else ""
        reason = found.get("reason", "").partition(" Searched: ")[0]  # --json has the places that were searched
        _line(found["name"], found["version"] or "-", reason or f"{found['path']}{cuda}")
    if (found := facts["nvrtc"]) is not None:
        _line("", "", f"found by {facts['cudnn']['found_by']}")
        _line("NVRTC", found["version"], found["path"] or "not found: cuDNN cannot compile kernels")
    for gpu in facts["gpus"]:
        _line("GPU", "", gpu)
    _line("plans", "", facts["plans"])
    print("\nthis machine can run:")
    for engine in facts["engines"]:
        *most, last = engine["dtypes"]
        first, *others = engine["reasons"] or [f"{', '.join(most)} and {last}, {_WHERE[engine['name']]}"]
        _line(engine["name"], "yes" if engine["runs"] else "no", first)
        for other in others:
            _line("", "", other)


def _gpus() -> list[str]:
    """Return a line for each GPU, or the reason why no GPU is available."""
    if reason := machine.no_gpu():
        return [reason.replace("no GPU", "none")]
    if isinstance(machine.imported("cupy"), ModuleType):
        return machine.gpus()
    return [f"an NVIDIA driver ({machine.driver()}) is loaded; CuPy is needed to list its GPUs"]


def _line(title: str, version: str, text: str) -> None:
    print(f"  {title:<12}{version:<12}{text}".rstrip())
