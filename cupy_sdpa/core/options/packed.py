"""The options ``max_seqlen_q`` and ``max_seqlen_kv``: the longest of packed sequences, or of ``seq_lens_q``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .values import optional_count

_WHAT = "the length of the longest sequence"


def read_queries(options: Mapping[str, Any]) -> int | None:
    """Read ``max_seqlen_q``; ValueError if there are no lengths that it can be the maximum of."""
    length = optional_count("max_seqlen_q", _WHAT)(options)
    if length is not None and options.get("cu_seqlens_q") is None and options.get("seq_lens_q") is None:
        raise ValueError(
            f"max_seqlen_q is {length}, and cu_seqlens_q and seq_lens_q are None: max_seqlen_q is the maximum of one of them; "
            "omit it, or pass cu_seqlens_q or seq_lens_q"
        )
    return length


def read_keys(options: Mapping[str, Any]) -> int | None:
    """Read ``max_seqlen_kv``; ValueError without packed sequences."""
    length = optional_count("max_seqlen_kv", _WHAT)(options)
    if length is not None and options.get("cu_seqlens_q") is None:
        raise ValueError(f"max_seqlen_kv is {length} and cu_seqlens_q is None: max_seqlen_kv is for packed sequences only")
    return length
