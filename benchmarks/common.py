"""What the scripts here share; most of it is what the package's own bench measures with."""

from __future__ import annotations

from cupy_sdpa.bench.facts import versions
from cupy_sdpa.bench.measure import as_torch, device_ms, host_us, interleaved, l2_bytes, random_normal, ratio
from cupy_sdpa.bench.table import write_csv

__all__ = ["L2_BYTES", "as_torch", "device_ms", "host_us", "interleaved", "random_normal", "ratio", "versions", "write_csv"]

L2_BYTES = l2_bytes()
