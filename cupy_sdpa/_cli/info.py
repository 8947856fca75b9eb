"""``info``: versions and paths of the libraries, the GPUs, and the engines that can run on this machine."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path
from types import ModuleType

from .._cudnn.deviceless import read_description
from .._cudnn.library import library
from .._cudnn.nvrtc import nvrtc
from ..errors import CudnnError
from ..plans import disk_cache
from ..version import __version__, version_text
from .helpers import machine
from .helpers.console import CommandError, Help, add_json, one_line, record

_EPILOG = """\
example:
  python -m cupy_sdpa info                         for bug reports
  python -m cupy_sdpa info --describe > card.json  the current GPU, for
                                                   plan --gpu card.json
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "info",
        help="versions, libraries, GPUs, and what is missing",
        description="Print versions, the path of each library, the GPUs, and the engines that can run on this machine.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument(
        "--describe", action="store_true", help="print only the description of the current GPU, in cuDNN's format"
    )
    add_json(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``info``. Missing libraries are not errors; ``--describe`` fails without a GPU."""
    if arguments.describe:
        if obstacles := machine.obstacles():
            raise CommandError(f"there is no GPU to describe: {obstacles[0]}")
        print(read_description())
        return 0
    _line("cupy_sdpa", __version__, str(Path(__file__).parents[1]))
    _line("Python", platform.python_version(), sys.executable)
    for title, name in (("numpy", "numpy"), ("ml_dtypes", "ml_dtypes"), ("CuPy", "cupy"), ("cuda-python", "cuda.bindings")):
        module = machine.imported(name)
        if isinstance(module, str):
            _line(title, "-", module)
        else:
            where = str(Path(module.__file__ or "").parent)
            for_cuda = f" (for CUDA {machine.cuda_text(module.cuda.runtime.runtimeGetVersion())})" if name == "cupy" else ""
            _line(title, module.__version__, where + for_cuda)
    try:
        cudnn = library()
    except CudnnError as error:
        _line("cuDNN", "-", one_line(str(error)))
    else:
        _line("cuDNN", version_text(cudnn.version), f"{cudnn.path} (for CUDA {machine.cuda_text(cudnn.cudart_version)})")
        _line("", "", f"found by {cudnn.found_via}")
        _line("NVRTC", nvrtc().version, nvrtc().path or "not found: cuDNN cannot compile kernels")
    for gpu in _gpus():
        _line("GPU", "", gpu)
    _line("plans", "", str(disk_cache.current()).removeprefix("plans "))
    if not record(what="this machine can run"):
        print("\nthis machine can run:")
    _line("numpy", "yes", "float16, bfloat16, float32 and float64, on the CPU")
    obstacles = machine.obstacles()
    _line("cuDNN", "no" if obstacles else "yes", obstacles[0] if obstacles else "float16 and bfloat16, on the GPU")
    for obstacle in obstacles[1:]:
        _line("", "", obstacle)
    return 0


def _gpus() -> list[str]:
    """A line for each GPU, or the reason why no GPU is available."""
    if reason := machine.no_gpu():
        return [reason.replace("no GPU", "none")]
    if isinstance(machine.imported("cupy"), ModuleType):
        return machine.gpus()
    return [f"an NVIDIA driver ({machine.driver()}) is loaded; CuPy is needed to list its GPUs"]


def _line(title: str, version: str, text: str) -> None:
    if not record(what=title, version=version, text=text):
        print(f"  {title:<12}{version:<12}{text}".rstrip())
