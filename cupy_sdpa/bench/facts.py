"""What is known of the machine: versions of everything that has a part in the figures, and the state of the GPU."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._cudnn.library import library
from ..device import cupy_runtime
from ..version import __version__, version_text

#: The modules of the peers, by their columns; those that are imported have a part.
_PEERS = {"torch": "torch", "triton": "triton", "jax": "jax", "cudnn_frontend": "cudnn"}
#: What nvidia-smi is asked, by column.
_STATE = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "celsius": "temperature.gpu",
    "throttle": "clocks_throttle_reasons.active",
}
_SECONDS = 10


def versions(**peers: str) -> dict[str, str]:
    """The GPU and the version of everything that has a part in the figures."""
    cupy = cupy_runtime.cupy()
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode(),
        "cudnn": version_text(library().version),
        **peers,
        "cupy": cupy.__version__,
        "cupy_sdpa": __version__,
    }


def every_version() -> dict[str, str]:
    """The same with the driver, Python, numpy and all peers that are imported; empty for what is not there."""
    peers = {column: str(getattr(sys.modules.get(module), "__version__", "")) for column, module in _PEERS.items()}
    (driver,) = asked(["driver_version"])
    return versions(driver=driver, python=platform.python_version(), numpy=np.__version__, **peers)


def asked(fields: Sequence[str]) -> list[str]:
    """What nvidia-smi says of the current GPU, as numbers without units; empty where it does not."""
    runtime = cupy_runtime.cupy().cuda.runtime
    which = runtime.deviceGetPCIBusId(runtime.getDevice())
    command = ["nvidia-smi", f"--id={which}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return [""] * len(fields)
    said = [text.strip() for text in done.stdout.strip().split(",")]
    return said if len(said) == len(fields) else [""] * len(fields)


def state(when: str) -> dict[str, Any]:
    """Clocks, power, temperature and the mask of reasons for lower clocks, in columns that say when."""
    return {f"{column}_{when}": value for column, value in zip(_STATE, asked(list(_STATE.values())), strict=True)}


#: The columns of :func:`state`.
STATE_COLUMNS = tuple(f"{column}_{when}" for when in ("before", "after") for column in _STATE)
