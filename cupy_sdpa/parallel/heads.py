"""The method that moves heads: an all-to-all exchange gives every member all positions of some heads, and another one returns
them.

Each member then makes the call of one GPU with fewer heads, so every option works as there.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kernels.merge import accumulate
from ..problem.problem import KEY_ARRAYS, row_stats_shape
from ..problem.view import View
from .configuration import Configuration
from .member_steps import MemberSteps, attend, attend_backward
from .shards import Layout

Views = Mapping[str, View]
Options = Mapping[str, Any]


def heads_forward(steps: MemberSteps, config: Configuration, views: Views, options: Options) -> None:
    """Add the steps of the output and the log-sum-exp of the member's queries."""
    builder = steps.builder
    q, k, v = _to_heads(steps, config, views, ("q", "k", "v"), "all-to-all: q, k and v")
    out = builder.temporary((v.shape[0], *q.shape[1:]), q.dtype)
    stats = builder.temporary(row_stats_shape(q.shape), config.stats)
    attend(builder, (q, k, v), out, stats, config.head_options(builder, options))
    _to_positions(steps, config, {"out": out, "stats": stats}, views, "all-to-all: out and log-sum-exp")


def heads_backward(steps: MemberSteps, config: Configuration, views: Views, options: Options, *, deterministic: bool) -> None:
    """Add the steps of the gradients of the member's queries, keys and values."""
    builder, names = steps.builder, ("dout", "q", "k", "v", "out", "stats")
    arrays = _to_heads(steps, config, views, names, "all-to-all: q, k, v, out, log-sum-exp and gradient")
    made = {f"d{name}": builder.temporary(x.shape, x.dtype) for name, x in zip("qkv", arrays[1:4], strict=True)}
    given = config.head_options(builder, options)
    attend_backward(builder, (*arrays, *made.values()), given, deterministic=deterministic, given_stats="whole")
    _to_positions(steps, config, made, views, "all-to-all: gradients")


def _to_heads(steps: MemberSteps, config: Configuration, views: Views, names: Sequence[str], label: str) -> list[View]:
    """Exchange the member's positions of all heads for all positions of the member's heads."""
    arrays = [(views[name], *_side(config, name)) for name in names]
    mine = config.heads(config.rank)
    own, specs = [], []
    for peer in range(config.size):
        own.append(steps.message_of([_part(config, x, heads=config.heads(peer)[side]) for x, side, _ in arrays]))
        specs.append([(_shape(config, x, mine[side], layout.share(peer)), x.dtype) for x, side, layout in arrays])
    messages = steps.all_to_all(own, specs, label)
    made = [steps.builder.temporary(_shape(config, x, mine[side], layout.total), x.dtype) for x, side, layout in arrays]
    for peer, message in enumerate(messages):
        for whole, found, (_, _, layout) in zip(made, message.arrays, arrays, strict=True):
            for local, positions in layout.slices(peer):
                steps.copy(_part(config, whole, positions=positions), _part(config, found, positions=local))
    return made


def _to_positions(steps: MemberSteps, config: Configuration, made: Views, results: Views, label: str) -> None:
    """The inverse of :func:`_to_heads`. Arrays of key/value heads that several members have are added."""
    arrays = [(results[name], x, *_side(config, name)) for name, x in made.items()]
    own, specs = [], []
    for peer in range(config.size):
        parts = [(x, layout) for _, x, _, layout in arrays]
        message = steps.message([(_shape(config, x, slice(None), layout.share(peer)), x.dtype) for x, layout in parts])
        for target, (x, layout) in zip(message.arrays, parts, strict=True):
            for local, positions in layout.slices(peer):
                steps.copy(_part(config, target, positions=local), _part(config, x, positions=positions))
        own.append(message)
        rows = [(_shape(config, result, config.heads(peer)[side], None), result.dtype) for result, _, side, _ in arrays]
        specs.append(rows)
    messages = steps.all_to_all(own, specs, label)
    for index, (result, _, side, _) in enumerate(arrays):
        heads = config.problem.sizes[3]
        target = result
        if side and heads < config.size:  # several members have the same key/value head
            target = steps.builder.temporary(result.shape, config.stats)
            steps.builder.fill(target, 0)
        for peer, message in enumerate(messages):
            part = _part(config, target, heads=config.heads(peer)[side])
            if target is result:
                steps.copy(part, message.arrays[index])
            else:
                steps.builder.run(accumulate, part, message.arrays[index], writes=(part,))
        if target is not result:
            steps.builder.copy(result, target)


def _side(config: Configuration, name: str) -> tuple[int, Layout]:
    """Whether an array has positions of queries (0) or of keys (1), and which member holds which of them."""
    return (1, config.keys) if name in KEY_ARRAYS else (0, config.queries)


def _axes(config: Configuration, x: View) -> tuple[int, int]:
    """The axes of the heads and of the positions; the log-sum-exp has one axis less."""
    if x.ndim == (3 if config.packed else 4):
        return 1, 2
    return (0, 1) if config.packed else (1, 0)


def _part(config: Configuration, x: View, *, heads: slice = slice(None), positions: slice = slice(None)) -> View:
    """A part of an array along the axes of the heads and of the positions."""
    index = [slice(None)] * x.ndim
    for axis, part in zip(_axes(config, x), (heads, positions), strict=True):
        index[axis] = part
    return x[tuple(index)]


def _shape(config: Configuration, x: View, heads: slice, positions: int | None) -> tuple[int, ...]:
    """The shape of some heads of an array; with another number of positions, unless that is None."""
    shape, (_, axis) = list(_part(config, x, heads=heads).shape), _axes(config, x)
    shape[axis] = shape[axis] if positions is None else positions
    return tuple(shape)
