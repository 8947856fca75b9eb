"""Whether cuDNN can run the calls of a member, before anything is sent: otherwise the other members would wait for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..boundary.arguments import call_of_shapes
from ..boundary.call import Call, unsupported_reasons
from ..problem.subproblems import subproblems
from .configuration import Configuration


def refusal(config: Configuration, method: str, like: Any, options: Mapping[str, Any], **outputs: Any) -> str:
    """Why cuDNN or the GPU cannot run a call of this member; empty if they can, and for numpy arrays.

    Args:
        config: the configuration.
        method: the method.
        like: q.
        options: the options of the call.
        outputs: ``backward`` and ``deterministic``.
    """
    if not config.on_gpu:
        return ""
    for call in calls(config, method, like, options, outputs):
        for part in subproblems(call.engine_problem):
            if not part.trivial and (reasons := unsupported_reasons(part, like.data.device_id)):
                return str(reasons[0])
    return ""


def calls(
    config: Configuration, method: str, like: Any, options: Mapping[str, Any], outputs: Mapping[str, Any]
) -> Iterator[Call]:
    """The calls of this member, of views; those that differ in addresses only once."""
    d, dv, hq, hkv, *_ = config.problem.sizes
    found: dict[Any, tuple[int, int, int, int, dict[str, Any]]] = {}
    if method == "all_to_all":
        rows, keys = config.heads(config.rank)
        lengths = config.queries.total, config.keys.total
        given = config.head_options(like, options)
        found[""] = (rows.stop - rows.start, keys.stop - keys.start, *lengths, given)
    else:
        whole = config.whole_backward if outputs.get("backward") else config.whole[0]
        for part in whole if method == "all_gather" else [part for step in config.steps[0] for part in step]:
            key = part.rows.length, part.keys.length, part.band, part.lengths and len(part.lengths)
            if key not in found:
                found[key] = (hq, hkv, *key[:2], config.part_options(part, like, options))
    for query_heads, key_heads, queries, keys_count, given in found.values():
        q = d, query_heads, queries, *config.batch
        k, v = ((width, key_heads, keys_count, *config.batch) for width in (d, dv))
        of_call = {"dtype": config.problem.dtype, "return_stats": True, "on_gpu": config.on_gpu, **outputs}
        yield call_of_shapes(q, k, v, given, **of_call)
