"""The method that moves heads: an all-to-all exchange gives every member all positions of some heads, and another one returns
them.

Each member then makes the call of one GPU with fewer heads, so every option works as there.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..attention import attention, attention_backward
from ..boundary.compute import cast
from ..boundary.layouts import named
from ..kernels.merge import accumulate
from ..problem.problem import row_stats_shape
from ..runtime import cupy_runtime, memory
from .channel import Channel, Message, copy
from .configuration import Configuration
from .shards import Layout

Options = Mapping[str, Any]


def heads_forward(config: Configuration, channel: Channel, q: Any, k: Any, v: Any, options: Options) -> tuple[Any, Any]:
    """The output and the log-sum-exp of the member's queries."""
    whole = _to_heads(config, channel, [q], [k, v], "all-to-all: q, k and v")
    stats = cupy_runtime.temporary(q, row_stats_shape(whole[0].shape), config.stats)
    with named():  # parts of the options of the whole call
        out, stats = attention(*whole, stats=stats, **config.head_options(q, options))
    del whole
    return _to_positions(config, channel, [out, stats], [], "all-to-all: out and log-sum-exp")


def heads_backward(
    config: Configuration, channel: Channel, dout: Any, q: Any, k: Any, v: Any, out: Any, stats: Any, options: Options,
    **outputs: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of the member's queries, keys and values."""
    arrays = [dout, q, out, stats]
    dout, q, out, stats, k, v = _to_heads(config, channel, arrays, [k, v], "all-to-all: q, k, v, out, log-sum-exp and gradient")
    given = config.head_options(q, options)
    with named():
        dq, dk, dv = attention_backward(dout, q, k, v, out, stats, **given, **outputs)
    del dout, q, k, v, out, stats
    return _to_positions(config, channel, [dq], [dk, dv], "all-to-all: gradients")


def _axes(config: Configuration, x: Any) -> tuple[int, int]:
    """The axes of the heads and of the positions; the log-sum-exp has one axis less."""
    if x.ndim == (3 if config.packed else 4):
        return 1, 2
    return (0, 1) if config.packed else (1, 0)


def _part(x: Any, axes: tuple[int, int], heads: slice, positions: slice) -> Any:
    """A part of an array along the axes of the heads and of the positions."""
    index = [slice(None)] * x.ndim
    for axis, part in zip(axes, (heads, positions), strict=True):
        index[axis] = part
    return x[tuple(index)]


def _replaced(shape: Sequence[int], axes: tuple[int, int], heads: int, positions: int) -> tuple[int, ...]:
    """A shape with other lengths along the axes of the heads and of the positions."""
    made = list(shape)
    for axis, length in zip(axes, (heads, positions), strict=True):
        made[axis] = length
    return tuple(made)


def _to_heads(
    config: Configuration, channel: Channel, query_arrays: Sequence[Any], key_arrays: Sequence[Any], label: str
) -> list[Any]:
    """Exchange the member's positions of all heads for all positions of the member's heads.

    Args:
        config, channel, label: as in :meth:`Channel.start`.
        query_arrays, key_arrays: arrays with a position for each query, or for each key.
    """
    arrays = [(x, 0, config.queries) for x in query_arrays] + [(x, 1, config.keys) for x in key_arrays]
    own = [
        Message.of([_part(x, _axes(config, x), config.heads(peer)[side], slice(None)) for x, side, _ in arrays])
        for peer in range(config.size)
    ]
    specs = [
        [(_shape(config, x, side, config.rank, layout.share(peer)), x.dtype) for x, side, layout in arrays]
        for peer in range(config.size)
    ]
    messages = channel.all_to_all(own, specs, label)
    made = []
    for index, (x, side, layout) in enumerate(arrays):
        whole = cupy_runtime.temporary(x, _shape(config, x, side, config.rank, layout.total), x.dtype)
        for peer, message in enumerate(messages):
            for local, positions in layout.slices(peer):
                axes = _axes(config, x)
                copy(_part(whole, axes, slice(None), positions), _part(message.arrays[index], axes, slice(None), local))
        made.append(whole)
    return made


def _shape(config: Configuration, x: Any, side: int, rank: int, positions: int) -> tuple[int, ...]:
    """The shape of an array with the heads of a member and a number of positions."""
    heads = config.heads(rank)[side]
    return _replaced(x.shape, _axes(config, x), heads.stop - heads.start, positions)


def _to_positions(
    config: Configuration, channel: Channel, query_arrays: Sequence[Any], key_arrays: Sequence[Any], label: str
) -> tuple[Any, ...]:
    """The inverse of :func:`_to_heads`. Arrays of key/value heads that several members have are added."""
    _, _, hq, hkv, *_ = config.problem.sizes
    arrays = [(x, 0, config.queries, hq) for x in query_arrays] + [(x, 1, config.keys, hkv) for x in key_arrays]
    own = [_message_to(config, peer, [(x, layout) for x, _, layout, _ in arrays]) for peer in range(config.size)]
    specs = [
        [(_shape(config, x, side, peer, layout.share(config.rank)), x.dtype) for x, side, layout, _ in arrays]
        for peer in range(config.size)
    ]
    messages = channel.all_to_all(own, specs, label)
    made = []
    for index, (x, side, layout, heads) in enumerate(arrays):
        shape = _replaced(x.shape, _axes(config, x), heads, layout.share(config.rank))
        if side and heads < config.size:  # several members have the same key/value head
            total = memory.zeros(x, shape, config.sums)
            for peer, message in enumerate(messages):
                part = _part(total, _axes(config, x), config.heads(peer)[side], slice(None))
                accumulate(part, message.arrays[index])
            made.append(cast(total, x.dtype, cupy_runtime.new_result))
            continue
        result = cupy_runtime.new_result(x, shape, x.dtype)
        for peer, message in enumerate(messages):
            copy(_part(result, _axes(config, x), config.heads(peer)[side], slice(None)), message.arrays[index])
        made.append(result)
    return tuple(made)


def _message_to(config: Configuration, peer: int, arrays: Sequence[tuple[Any, Layout]]) -> Message:
    """A message with the positions of a member."""
    specs = []
    for x, layout in arrays:
        shape = list(x.shape)
        shape[_axes(config, x)[1]] = layout.share(peer)
        specs.append((tuple(shape), x.dtype))
    message = Message(arrays[0][0], specs)
    for target, (x, layout) in zip(message.arrays, arrays, strict=True):
        axes = _axes(config, x)
        for local, positions in layout.slices(peer):
            copy(_part(target, axes, slice(None), local), _part(x, axes, slice(None), positions))
    return message
