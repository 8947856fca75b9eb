"""The method that moves heads: an all-to-all exchange gives every member all positions of some heads, and another one returns
them.

Each member then makes the call of one GPU with fewer heads, so every option works as there.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from ..extend import KEY_ARRAYS, ReadOptions, View
from .configuration import Configuration
from .member_steps import MemberSteps, Message, attend
from .shards import ShardLayout

Views = Mapping[str, View]
Options = ReadOptions
#: The query heads and the key/value heads of a member.
HeadsOf = Callable[[int], tuple[slice, slice]]


def heads_forward(steps: MemberSteps, config: Configuration, views: Views, options: Options) -> None:
    """Add the steps of the output and the log-sum-exp of the member's queries."""
    builder = steps.builder
    q, k, v = to_heads(steps, config, views, ("q", "k", "v"), "all-to-all: q, k and v", config.heads)
    out = builder.temporary((v.shape[0], *q.shape[1:]), q.dtype)
    stats = builder.temporary_stats(q)
    attend(builder, (q, k, v), out, stats, config.head_options(builder, options))
    to_positions(steps, config, {"out": out, "stats": stats}, views, "all-to-all: out and log-sum-exp", config.heads)


def heads_backward(steps: MemberSteps, config: Configuration, views: Views, options: Options, *, deterministic: bool) -> None:
    """Add the steps for the gradients of the member's queries, keys and values."""
    builder, names = steps.builder, ("dout", "q", "k", "v", "out", "stats")
    label = "all-to-all: q, k, v, out, log-sum-exp and gradient"
    arrays = dict(zip(names, to_heads(steps, config, views, names, label, config.heads), strict=True))
    made = {f"d{name}": builder.temporary(arrays[name].shape, arrays[name].dtype) for name in "qkv"}
    given = config.head_options(builder, options)
    builder.add_pass(arrays | made, given, deterministic=deterministic, given_stats="whole")
    to_positions(steps, config, made, views, "all-to-all: gradients", config.heads)


def to_heads(
    steps: MemberSteps, config: Configuration, views: Views, names: Sequence[str], label: str, heads: HeadsOf
) -> list[View]:
    """Exchange the member's positions of all heads for all positions of the member's heads."""
    arrays = [(views[name], *_side(config, name)) for name in names]
    mine, specs = heads(config.rank), []
    own: list[Message] = []
    for peer in range(config.size):
        theirs = heads(peer)
        if peer and theirs == heads(0):
            own.append(own[0])
        else:
            own.append(steps.message_of([_part(config, x, heads=theirs[side]) for x, side, _ in arrays]))
        specs.append([(_shape(config, x, mine[side], layout.share(peer)), x.dtype) for x, side, layout in arrays])
    messages = steps.all_to_all(own, specs, label)
    made = [steps.builder.temporary(_shape(config, x, mine[side], layout.total), x.dtype) for x, side, layout in arrays]
    for peer, message in enumerate(messages):
        for whole, found, (_, _, layout) in zip(made, message.arrays, arrays, strict=True):
            for local, positions in layout.slices(peer):
                steps.builder.copy_part(_part(config, whole, positions=positions), _part(config, found, positions=local))
    return made


def to_positions(steps: MemberSteps, config: Configuration, made: Views, results: Views, label: str, heads: HeadsOf) -> None:
    """Undo :func:`to_heads`. What several members have of the same heads is added, in the order of the ranks."""
    arrays = [(results[name], x, *_side(config, name)) for name, x in made.items()]
    own, specs = [], []
    for peer in range(config.size):
        message = steps.message([(_shape(config, x, slice(None), layout.share(peer)), x.dtype) for _, x, _, layout in arrays])
        for target, (_, x, _, layout) in zip(message.arrays, arrays, strict=True):
            for local, positions in layout.slices(peer):
                steps.builder.copy_part(_part(config, target, positions=local), _part(config, x, positions=positions))
        own.append(message)
        specs.append([(_shape(config, result, heads(peer)[side], None), x.dtype) for result, x, side, _ in arrays])
    messages = steps.all_to_all(own, specs, label)
    for index, (result, _, side, _) in enumerate(arrays):
        ranges = [heads(peer)[side] for peer in range(config.size)]
        shared = any(other.start < one.stop for one, other in itertools.pairwise(ranges))
        target = steps.builder.temporary(result.shape, config.stats) if shared else result
        known = 0  # the heads that an earlier member has
        for own_heads, message in zip(ranges, messages, strict=True):
            part = _part(config, target, heads=own_heads)
            if own_heads.start < known:
                steps.builder.add(part, message.arrays[index])
            else:
                steps.builder.copy_part(part, message.arrays[index])
            known = own_heads.stop
        if shared:
            steps.builder.copy(result, target)


def _side(config: Configuration, name: str) -> tuple[int, ShardLayout]:
    """Return whether an array has positions of queries (0) or of keys (1), and which member holds which of them."""
    return (1, config.keys) if name in KEY_ARRAYS else (0, config.queries)


def _axes(config: Configuration, x: View) -> tuple[int, int]:
    """Return the axes of the heads and of the positions; the log-sum-exp has one axis less."""
    if x.ndim == (3 if config.packed else 4):
        return 1, 2
    return (0, 1) if config.packed else (1, 0)


def _part(config: Configuration, x: View, *, heads: slice = slice(None), positions: slice = slice(None)) -> View:
    """Return a part of an array along the axes of the heads and of the positions."""
    index = [slice(None)] * x.ndim
    for axis, part in zip(_axes(config, x), (heads, positions), strict=True):
        index[axis] = part
    return x[tuple(index)]


def _shape(config: Configuration, x: View, heads: slice, positions: int | None) -> tuple[int, ...]:
    """Return the shape of some heads of an array, with another number of positions unless it is None."""
    shape, (_, axis) = list(_part(config, x, heads=heads).shape), _axes(config, x)
    shape[axis] = shape[axis] if positions is None else positions
    return tuple(shape)
