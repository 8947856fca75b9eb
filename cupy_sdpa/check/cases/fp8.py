"""Problems in FP8 that Hopper supports."""

from __future__ import annotations

#: The described GPUs that problems are planned for.
GPUS = ("h200", "b200")
#: The options that can be combined with FP8.
COMBINED = {
    "fp8", "scale", "causal", "window", "seq_lens_q", "seq_lens_kv", "stats", "bucket", "max_workspace", "paged",
}  # fmt: skip


def fit(sizes: dict[str, int], *, paged: bool, lengths: bool) -> None:
    """Change sizes to those that Hopper supports.

    Args:
        sizes: the sizes, changed.
        paged: whether the keys are pages, which also a single query can attend to.
        lengths: whether the number of queries may be changed.

    >>> sizes = {"d": 24, "dv": 200, "sq": 1}
    >>> fit(sizes, paged=False, lengths=True)
    >>> sizes
    {'d': 32, 'dv': 128, 'sq': 2}
    """
    for name in ("d", "dv"):
        sizes[name] = -(-sizes[name] // 16) * 16
    if sizes["d"] <= 128:
        sizes["dv"] = min(sizes["dv"], 128)
    if sizes["sq"] == 1 and not paged and lengths:
        sizes["sq"] = 2
