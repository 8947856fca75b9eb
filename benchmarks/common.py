"""What the benchmarks share: random inputs, the versions of everything, and the file of results."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cupy_sdpa
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.version import version_text


def random_normal(*shape: int) -> Any:
    """Normal random numbers in bfloat16, in Fortran order."""
    numbers = cupy.random.standard_normal(shape, dtype=np.float32)
    return cupy.asfortranarray(numbers.astype(np.dtype(ml_dtypes.bfloat16)))


def versions(**peers: str) -> dict[str, str]:
    """The GPU and the version of everything that has a part in the figures."""
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "cudnn": version_text(library().version),
        **peers,
        "cupy": cupy.__version__,
        "cupy_sdpa": cupy_sdpa.__version__,
    }


def write_csv(path: str, rows: list[dict[str, Any]]) -> None:
    """Rows of one and the same columns, as CSV."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
