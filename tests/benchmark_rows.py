"""Rows for the tests of the benchmarks."""

from benchmarks import compare, table
from benchmarks.presets import PRESETS, Preset

SMALL = Preset("small", 2, 4, 2, 6, 6, 16, 8, causal=True)
RATES = compare.Rates(matmul_tflops=700.0, matmul_dtype="bfloat16", copy_gbs=4000.0)


def rows_of(preset, times, direction="forward"):
    """Rows of contenders with the given milliseconds; None is left out."""
    rows = []
    for name, ms in times.items():
        clock = "wall clock of consecutive calls" if name == "flex" else "events"
        figures = {"times": [ms], "host_us": 1000 * (ms or 0), "peak_bytes": 4096, "clock": clock}
        found = {"left_out": "it cannot"} if ms is None else figures
        rows.append({"preset": preset.name, "direction": direction, "way": name, "gpu": "a GPU", **found})
    return [table.complete(row) for row in compare.add_ratios(rows, preset, RATES)]


def two_presets():
    """Rows in which the fastest other contender differs between the presets."""
    return [
        *rows_of(PRESETS[0], {"ours": 2.0, "torch-cudnn": 1.0, "flex": 4.0, "jax": None}),
        *rows_of(PRESETS[1], {"ours": 2.0, "torch-cudnn": 8.0, "flex": 4.0, "jax": None}),
    ]
