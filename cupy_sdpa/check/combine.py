"""Which options are combined in a case, and how often each feature is drawn."""

from __future__ import annotations

import numpy as np

from ..extend import OPTIONS
from .case import GRADIENTS, REQUIRES

#: The share of each feature in percent. A feature is drawn with up to three of the options that it can be combined with.
#: ``"pairs"`` is the next pair of options, ``"few"`` is each option with a probability of 4 %.
SHARES = {
    "pairs": 24, "few": 6, "block_mask": 14, "fp8": 8, "jvp": 8, "paged": 8, "parallel": 10, "shared_prefix": 4, "merge": 4,
    "cache": 6, "weight_sums": 2, "weight_entropy": 2, "tree": 2, "dstats": 2,
}  # fmt: skip
#: The options that are left out of a run on an engine. Groups plan every call again, in new threads. Block masks are planned by
#: ``tests/block_masks/test_block_plans.py``; the other features are calls with other options. CuPy's own operations compute
#: neither FP8 nor groups. An offset needs float64.
LEFT_OUT: dict[str, set[str]] = {
    "cpu": set(), "gpu": {"parallel", "offset"}, "cupy": {"fp8", "mean", "parallel"},
    "plan": {"block_mask", "parallel", "shared_prefix", "merge", "cache", "offset"},
}  # fmt: skip
#: The described GPUs that problems in FP8 are planned for.
FP8_GPUS = ("h200", "b200")
_OF_SCORES = {"scale", "softcap", "sinks", "stats", "max_workspace", "offset"}
_OF_PAGES = {*_OF_SCORES, "causal", "window", "seq_lens_q"}
#: The options that can be combined with a feature; a feature that is not listed has no such limit.
ONLY_WITH = {
    "fp8": {"scale", "causal", "window", "seq_lens_q", "seq_lens_kv", "stats", "bucket", "max_workspace", "paged", "mean"},
    "shared_prefix": {*_OF_SCORES, "paged", "causal"},
    "merge": {*_OF_SCORES, "mask", "bias", "bias_repeats", "deterministic"},
    "cache": {*_OF_PAGES, "tree", "deterministic", "preallocated"},
    "weight_sums": {
        "scale", "softcap", "sinks", "max_workspace", "causal", "window", "mask", "seq_lens_q", "seq_lens_kv", "packed",
        "paged", "alibi_slopes", "score_mod", "mask_mod", "block_mask", "bucket", "offset",
    },
    "weight_entropy": {
        "scale", "sinks", "max_workspace", "causal", "window", "mask", "seq_lens_q", "seq_lens_kv", "packed", "paged",
        "mask_mod", "block_mask", "bucket", "offset",
    },
    "parallel": {
        *_OF_SCORES, "causal", "window", "mask", "bias", "bias_repeats", "seq_lens_q", "seq_lens_kv", "packed", "alibi_slopes",
        "dropout",
        "score_mod", "mask_mod", "block_mask", "deterministic", "return_dsinks",
    },
}  # fmt: skip
#: Options that cannot be combined with bucket and packed sequences: their arrays would need the rounded lengths.
_NOT_IN_PACKED_BUCKETS = ("mask", "bias", "dropout", "score_mod", "mask_mod", "block_mask", "return_dbias", "return_dtensors")
#: Sets of options that cannot be combined.
CONFLICTS: tuple[set[str], ...] = (
    {"tree", "mask_mod"},
    *({"offset", other} for other in ("score_mod", "cache")),  # derivatives are differences; a rotation changes the offset
    {"mean", "paged"},
    {"weight_sums", "packed", "paged"},
    *({"block_mask", "mask", other} for other in ("mask_mod", "tree")),
    *({"packed", other} for other in ("seq_lens_q", "seq_lens_kv", "tree", "bias_repeats")),
    *({"packed", "bucket", other} for other in _NOT_IN_PACKED_BUCKETS),
    *({"paged", other} for other in ("seq_lens_kv", "bucket", "jvp", "dstats", *GRADIENTS)),
    *({"jvp", other} for other in ("dstats", *GRADIENTS)),
    *({"head_scales", other} for other in ("scale", "jvp", "offset")),
)
#: Options that cannot be combined with ``num_splits``, and calls that do not take it.
NOT_SPLIT = {
    "packed", "tree", "dropout", "weight_sums", "weight_entropy",
    *(name for name, option in OPTIONS.items() if option.weights and not option.split),
}  # fmt: skip


def is_valid(names: set[str]) -> bool:
    """True if the interface accepts a combination of options.

    >>> is_valid({"packed", "seq_lens_q"}), is_valid({"causal", "window"}), is_valid({"fp8", "sinks"})
    (False, True, False)
    """
    if any(name in names and not names <= {name, *others} for name, others in ONLY_WITH.items()):
        return False
    return not any(conflict <= names for conflict in CONFLICTS)


def with_required(names: set[str]) -> set[str]:
    """Return the given options and the options that they require."""
    return names | {REQUIRES[name] for name in names if name in REQUIRES}


def schedule(seed: int, number: int) -> tuple[str, int]:
    """Return the feature of a case, and how many earlier cases have it: every 50 cases contain each feature with its share.

    >>> names = [schedule(1, number)[0] for number in range(50)]
    >>> {name: 2 * names.count(name) for name in SHARES} == SHARES
    True
    """
    features = [name for name, share in SHARES.items() for _ in range(share // 2)]
    rounds, place = divmod(number, len(features))
    order = np.random.default_rng([seed, 2]).permutation(len(features))
    feature = features[order[place]]
    earlier = sum(features[other] == feature for other in order[:place])
    return feature, rounds * features.count(feature) + earlier


def fit_fp8(sizes: dict[str, int], *, paged: bool, lengths: bool) -> None:
    """Change sizes to those that Hopper supports; with ``lengths`` also a single query, which can attend to pages only.

    >>> sizes = {"d": 24, "dv": 200, "sq": 1}
    >>> fit_fp8(sizes, paged=False, lengths=True)
    >>> sizes
    {'d': 32, 'dv': 128, 'sq': 2}
    """
    for name in ("d", "dv"):
        sizes[name] = -(-sizes[name] // 16) * 16
    if sizes["d"] <= 128:
        sizes["dv"] = min(sizes["dv"], 128)
    if sizes["sq"] == 1 and not paged and lengths:
        sizes["sq"] = 2
