"""Versions of the libraries that the results depend on, and the state of the GPU."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_sdpa._cudnn.library import library
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.version import __version__, version_text

#: Modules of the peers, by the column of their version. A module that is not imported takes no part.
_PEERS = {"torch": "torch", "triton": "triton", "jax": "jax", "cudnn_frontend": "cudnn"}
#: Fields to query from nvidia-smi, by column.
_STATE = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "celsius": "temperature.gpu",
    "throttle": "clocks_throttle_reasons.active",
}
_TIMEOUT_SECONDS = 10


def versions(**peers: str) -> dict[str, str]:
    """The name of the GPU, and the versions of cuDNN, the given peers, CuPy and this package."""
    cupy = cupy_runtime.cupy()
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode(),
        "cudnn": version_text(library().version),
        **peers,
        "cupy": cupy.__version__,
        "cupy_sdpa": __version__,
    }


def all_versions() -> dict[str, str]:
    """:func:`versions` with the driver, Python, numpy and all imported peers; empty strings for missing ones."""
    peers = {column: str(getattr(sys.modules.get(module), "__version__", "")) for column, module in _PEERS.items()}
    (driver,) = nvidia_smi(["driver_version"])
    return versions(driver=driver, python=platform.python_version(), numpy=np.__version__, **peers)


def nvidia_smi(fields: Sequence[str]) -> list[str]:
    """Query nvidia-smi about the current GPU: values without units; empty strings if it fails."""
    runtime = cupy_runtime.cupy().cuda.runtime
    bus_id = runtime.deviceGetPCIBusId(runtime.getDevice())
    command = ["nvidia-smi", f"--id={bus_id}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return [""] * len(fields)
    values = [text.strip() for text in done.stdout.strip().split(",")]
    return values if len(values) == len(fields) else [""] * len(fields)


def state(when: str) -> dict[str, Any]:
    """Clocks, power, temperature and throttle reasons of the GPU; ``when`` is the suffix of the columns."""
    return {f"{column}_{when}": value for column, value in zip(_STATE, nvidia_smi(list(_STATE.values())), strict=True)}


#: The columns of :func:`state` before and after a measurement.
STATE_COLUMNS = tuple(f"{column}_{when}" for when in ("before", "after") for column in _STATE)
