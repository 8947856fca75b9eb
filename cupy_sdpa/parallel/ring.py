"""The methods that move keys and values: the ring and the all-gather.

Every member keeps its queries. In the ring, keys and values travel from member to member, and each member computes attention to
the keys that it has while the next ones arrive. In the all-gather, it first receives all keys and values. The partial results
are merged by their log-sum-exps. Gradients are computed from the final output and log-sum-exp, so the gradients for different
keys only need to be added.

Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3 (ring); Grattafiori
et al. 2024, "The Llama 3 Herd of Models", section 3.3.2 (all-gather); Dao 2023, "FlashAttention-2", algorithm 2 (gradients).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..extend import Builder, Parts, ReadOptions, View, cupy_runtime, merge_parts
from .configuration import Configuration
from .heads import to_heads, to_positions
from .member_steps import Exchange, MemberSteps, attend
from .parts import Part, as_bits

Views = Mapping[str, View]
Options = ReadOptions


def ring_forward(steps: MemberSteps, config: Configuration, views: Views, options: Options) -> None:
    """Add the steps of the output and the log-sum-exp of the member's queries."""
    _forward(steps.builder, config, views, options, config.ring_calls, _travelling(steps, config, views))


def gather_forward(steps: MemberSteps, config: Configuration, views: Views, options: Options) -> None:
    """:func:`ring_forward` with an all-gather."""
    _forward(steps.builder, config, views, options, config.gather_calls, iter([_gathered(steps, config, views)]))


def _forward(
    builder: Builder,
    config: Configuration,
    views: Views,
    options: Options,
    made: Sequence[Sequence[Part]],
    sources: Iterator[tuple[View, View]],
) -> None:
    """Add the steps of the partial results, and of their merge; a single one of all rows is the result.

    ``made`` are the calls on the keys and values of each source.
    """
    results, rows = (views["out"], views["stats"]), views["q"].shape[2]
    buffers = 1 + max((part.buffer for own in made for part in own), default=0)
    written = [sum(part.rows.length for own in made for part in own if part.buffer == n) for n in range(buffers)]
    merges = written != [rows] or options.get("sinks") is not None
    partial = [results]
    if merges:
        partial = [(builder.temporary(out.shape, out.dtype), builder.temporary(stats.shape, stats.dtype))
                   for out, stats in [results] * buffers]  # fmt: skip
    for (out, stats), number in zip(partial, written, strict=True):
        if number < rows:  # merging does not read the outputs of rows whose log-sum-exp is -inf
            builder.fill(stats, -np.inf)
        if not number:
            builder.fill(out, 0)
    for own, (keys, values) in zip(made, sources, strict=True):
        for part in own:
            out, stats = partial[part.buffer]
            q, k, v = part.rows.of(builder, views["q"], 2), part.keys.of(builder, keys, 2), part.keys.of(builder, values, 2)
            given = config.part_options(part, builder, options)
            if q.shape[2] == rows:
                attend(builder, (q, k, v), out, stats, given)
                continue
            out_part = builder.temporary((out.shape[0], *q.shape[1:]), out.dtype)
            stats_part = builder.temporary_stats(q)
            attend(builder, (q, k, v), out_part, stats_part, given)
            part.rows.write(builder, out, out_part, 2)
            part.rows.write(builder, stats, stats_part, config.row_axis)
    if merges:
        _merge(builder, config, partial, results, options)


def _merge(
    builder: Builder,
    config: Configuration,
    partial: Sequence[tuple[View, View]],
    results: tuple[View, View],
    options: Options,
) -> None:
    """Add the steps that merge partial results."""
    every = [(x[..., None], y.T[..., None]) if config.packed else (x, y) for x, y in (*partial, results)]
    groups, (out, stats) = [Parts(x[..., None], y[..., None]) for x, y in every[:-1]], every[-1]
    sinks, lengths = options.get("sinks"), options.get("seq_lens_q")
    builder.run(merge_parts, groups, out, stats, sinks, writes=(out, stats))
    if sinks is not None and lengths is not None:  # merging gives rows after the length of a batch item their sink
        builder.run(clear_padding, *results, builder.constant(config.positions, keep=True), lengths, writes=results)


def clear_padding(out: Any, stats: Any, positions: Any, lengths: Any) -> None:
    """Clear the rows whose positions are not within the lengths."""
    xp, bits = cupy_runtime.array_module(out), as_bits(out)
    exists = positions[:, None] < lengths  # (Sq, B)
    bits[...] = xp.where(exists, bits, bits.dtype.type(0))
    stats[...] = xp.where(exists[:, None], stats, -np.inf)


def ring_backward(steps: MemberSteps, config: Configuration, views: Views, options: Options, *, deterministic: bool) -> None:
    """Add the steps for the gradients of the member's queries, keys and values.

    The sums of the gradients of keys and values travel one step behind the keys and values, and arrive at their member at the
    end.
    """
    builder, rank, size = steps.builder, config.rank, config.size
    options = _with_finite_bias(builder, options)
    dq = _zeros(builder, views["q"].shape, config.stats)
    sums = steps.message(config.key_specs(rank, config.stats))
    builder.fill(sums.flat, 0)
    arriving: Exchange | None = None
    for step, (own, (keys, values)) in enumerate(zip(config.ring_calls, _travelling(steps, config, views), strict=True)):
        found = [(part, _gradients(builder, config, part, views, keys, values, options, deterministic)) for part in own]
        if arriving:
            steps.wait(arriving)
        _add(builder, found, [dq, *sums.arrays])
        received = steps.message(config.key_specs((rank - step - 1) % size, config.stats))
        label = f"ring, step {step}: gradients of keys and values"
        arriving = steps.start({(rank + 1) % size: sums}, {(rank - 1) % size: received}, label)
        sums = received
    assert arriving
    steps.wait(arriving)
    for name, total in zip(("dq", "dk", "dv"), (dq, *sums.arrays), strict=True):
        builder.copy(views[name], total)


def gather_backward(steps: MemberSteps, config: Configuration, views: Views, options: Options, *, deterministic: bool) -> None:
    """:func:`ring_backward` with an all-gather; members add the gradients of their keys from all others."""
    builder = steps.builder
    options = _with_finite_bias(builder, options)
    keys, values = _gathered(steps, config, views)
    totals = [_zeros(builder, x.shape, config.stats) for x in (views["q"], keys, values)]
    for part in config.gather_calls_backward:
        found = _gradients(builder, config, part, views, keys, values, options, deterministic)
        _add(builder, [(part, found)], totals)
    made = dict(zip(("dk", "dv"), totals[1:], strict=True))
    to_positions(steps, config, made, views, "all-gather: gradients of keys and values", config.all_heads)
    builder.copy(views["dq"], totals[0])


def _travelling(steps: MemberSteps, config: Configuration, views: Views) -> Iterator[tuple[View, View]]:
    """Yield the keys and values of every step of the ring, while those for the next step are being sent."""
    rank, size = config.rank, config.size
    arrays, message = [views["k"], views["v"]], steps.message_of([views["k"], views["v"]])
    for step in range(1, size):
        received = steps.message(config.key_specs((rank - step) % size))
        label = f"ring, step {step}: keys and values"
        arriving = steps.start({(rank + 1) % size: message}, {(rank - 1) % size: received}, label)
        yield arrays[0], arrays[1]
        steps.wait(arriving)
        arrays, message = received.arrays, received
    yield arrays[0], arrays[1]


def _gathered(steps: MemberSteps, config: Configuration, views: Views) -> tuple[View, View]:
    """Return all keys and values in the order of their positions."""
    keys, values = to_heads(steps, config, views, ("k", "v"), "all-gather: keys and values", config.all_heads)
    return keys, values


def _gradients(
    builder: Builder, config: Configuration, part: Part, views: Views, k: View, v: View, options: Options, deterministic: bool
) -> list[View]:
    """Return the gradients of a part, from the final output and log-sum-exp of its queries."""
    stats, rows = views["stats"], part.rows
    final = rows.of(builder, stats, config.row_axis)
    if final.shape != stats.shape or not final.flags.f_contiguous:  # cuDNN requires addresses that are multiples of 16
        final = builder.copied(final)
    arrays = {name: rows.of(builder, views[name], 2) for name in ("dout", "q", "out")} | {"stats": final}
    arrays |= {"k": part.keys.of(builder, k, 2), "v": part.keys.of(builder, v, 2)}
    made = {f"d{name}": builder.temporary(arrays[name].shape, arrays[name].dtype) for name in "qkv"}
    given = config.part_options(part, builder, options)
    builder.add_pass(arrays | made, given, deterministic=deterministic, given_stats="part")
    return [*made.values()]


def _add(builder: Builder, found: Sequence[tuple[Part, Sequence[View]]], totals: Sequence[View]) -> None:
    """Add the parts' gradients to the gradients of the queries, keys and values."""
    for part, gradients in found:
        for side, total, x in zip((part.rows, part.keys, part.keys), totals, gradients, strict=True):
            side.add(builder, total, x, 2)


def _zeros(builder: Builder, shape: tuple[int, ...], dtype: Any) -> View:
    total = builder.temporary(shape, dtype)
    builder.fill(total, 0)
    return total


def _with_finite_bias(builder: Builder, options: Options) -> Options:
    """Return the backward options of parts, with sinks without -inf in a CuPy bias of one element per query.

    cuDNN reads it as 0 (the bug "sinks-infinite-bias"), and the row's log-sum-exp is finite: its sink. Parts have no sinks, so
    the guard of the bug does not apply.
    """
    bias = options.get("bias")
    if options.get("sinks") is None or bias is None or bias.shape[0] != 1 or not builder.on_gpu:
        return options
    finite = builder.temporary(bias.shape, np.float32)
    builder.copy(finite, bias)
    builder.run(replace_infinite, finite, writes=(finite,))
    return options | {"bias": finite}


def replace_infinite(bias: Any) -> None:
    """Replace -inf in a float32 bias with a finite number that also makes a key's weight 0."""
    cupy_runtime.array_module(bias).maximum(bias, np.float32(-1e30), out=bias)
