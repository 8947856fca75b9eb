"""Decide how a call computes ``compute_dtype`` and a layer's option: the options that its program is built with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..boundary.compute import read_compute_dtype
from ..hooks import PassOption, pass_option


def decided_options(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    return_stats: Any = False,
    outputs: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """Decide ``compute_dtype`` and a layer's option; return the options that the program is built and cached with.

    ``compute_dtype`` remains if it names another dtype than q's, and a layer's option if the pass is computed by its steps:
    a block mask that needs all blocks, for example, becomes the option ``mask``. If nothing changes, the result is ``options``
    itself.

    Args:
        arrays: q and k by name.
        options: the caller's options.
        return_stats, outputs: what the call returns in addition to the output; the requested gradients by the names of
            arguments.
    """
    decided = {**options}
    dtype = read_compute_dtype(decided.pop("compute_dtype", None), arrays["q"])
    layer_option = pass_option(decided)
    replaced = None
    if layer_option is not None:
        replaced = layer_option.module.decide(layer_option.value, arrays, decided, return_stats=return_stats, outputs=outputs)
    if replaced is None and dtype is options.get("compute_dtype"):
        return options
    if replaced is not None:
        decided = {**replaced}
    elif layer_option is not None:
        decided[layer_option.name] = layer_option.value
    return decided if dtype is None else decided | {"compute_dtype": dtype}


def split_options(options: Mapping[str, Any]) -> tuple[PassOption | None, str | None, dict[str, Any]]:
    """Split decided options: a layer's option, the dtype to compute in, and the others."""
    others = {**options}
    dtype, layer_option = others.pop("compute_dtype", None), pass_option(others)
    return layer_option, dtype, others
