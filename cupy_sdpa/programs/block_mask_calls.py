"""Block masks of calls: their keys, their checks, and their description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..block_masks.block_mask import BlockMask
from ..block_masks.entries import Sizes
from ..block_masks.method import method_of
from ..boundary.arguments import read_shapes
from ..problem.problem import Problem
from ..problem.tensor_spec import dtype_name


def key_of(mask: Any) -> tuple[Any, ...]:
    """What the key of a cached call has of a mask: its number, and whether its function has not changed."""
    return (mask.number, mask._has_its_function) if isinstance(mask, BlockMask) else (None, None)


def check_return_stats(return_stats: Any) -> None:
    """Raise ValueError for row statistics that are not computed with a block mask."""
    if return_stats not in (False, True):
        raise ValueError(f"return_stats is {return_stats!r} and block_mask is passed; it must be False or True")


def refuse_gradients(others: Mapping[str, Any]) -> None:
    """Raise ValueError if other gradients than those of q, k and v are requested, by the names of the arguments."""
    for name, value in others.items():
        if value is not False and value is not None:
            raise ValueError(f"{name} is {value!r} and block_mask is passed; only dq, dk and dv are computed with a block mask")


def without_keys(q: Sequence[int], v: Sequence[int], dtype: Any, **outputs: Any) -> Problem:
    """The problem of a call in which no query attends to a key, from shapes: nothing is computed."""
    (d, hq, sq, b), (dv, hkv, *_) = q, v
    return read_shapes((d, hq, sq, b), (d, hkv, 0, b), (dv, hkv, 0, b), {}, dtype=dtype_name(dtype), **outputs)


def description(mask: BlockMask, sizes: Sizes, *, native: bool = False) -> str:
    """How calls of some sizes compute a mask, for :func:`cupy_sdpa.explain`; ``native`` if the kernel skips blocks itself."""
    method = method_of(mask, sizes)
    how = {
        "packed": "computed as packed sequences", "blocks": "computed as batch entries of blocks",
        "slices": f"computed as {len(method.slices)} calls on slices" if method.slices else "nothing is computed",
    }  # fmt: skip
    return f"{repr(mask)[1:-1]}; {'computed by a kernel that skips blocks' if native else how[method.name]}"
