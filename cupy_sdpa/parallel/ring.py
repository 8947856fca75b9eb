"""The methods that move keys and values: the ring and the all-gather.

Every member keeps its queries. In the ring it passes the keys and values on from member to member, and computes attention to
those that it has while the next ones arrive. With the all-gather it first receives all keys and values. The partial results are
merged by their log-sum-exps. Gradients are computed from the final output and log-sum-exp, so that those of different keys only
need to be added.

Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3 (ring); Grattafiori
et al. 2024, "The Llama 3 Herd of Models", section 3.3.2 (all-gather); Dao 2023, "FlashAttention-2", algorithm 2 (gradients).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels import ragged
from ..kernels.merge import MAX_GROUPS, Parts, accumulate, merge
from ..problem.problem import row_stats_shape
from ..problem.view import View
from ..programs.program import Builder
from ..runtime import cupy_runtime
from .configuration import Configuration
from .member_steps import MemberSteps, attend, attend_backward
from .parts import Part, as_bits

Views = Mapping[str, View]
Options = Mapping[str, Any]


def ring_forward(steps: MemberSteps, config: Configuration, views: Views, options: Options) -> None:
    """Add the steps of the output and the log-sum-exp of the member's queries."""
    made, buffers = config.steps
    results = _Partials(steps.builder, config, [part for own in made for part in own], buffers, views, options)
    for own, (keys, values) in zip(made, _travelling(steps, config, views), strict=True):
        for part in own:
            results.compute(part, keys, values)
    results.merge()


def gather_forward(steps: MemberSteps, config: Configuration, views: Views, options: Options) -> None:
    """:func:`ring_forward` with an all-gather."""
    made, buffers = config.whole
    results = _Partials(steps.builder, config, made, buffers, views, options)
    keys, values = _gathered(steps, config, views)
    for part in made:
        results.compute(part, keys, values)
    results.merge()


def ring_backward(steps: MemberSteps, config: Configuration, views: Views, options: Options, *, deterministic: bool) -> None:
    """Add the steps of the gradients of the member's queries, keys and values.

    The sums of the gradients of keys and values travel one step behind the keys and values, and arrive at their member at the
    end.
    """
    builder, rank, size = steps.builder, config.rank, config.size
    options = _with_finite_bias(builder, options)
    dq = _zeros(builder, views["q"].shape, config.stats)
    sums = steps.message(config.key_specs(rank, config.stats))
    builder.fill(sums.flat, 0)
    arriving: tuple[Any, ...] = ()
    for step, (own, (keys, values)) in enumerate(zip(config.steps[0], _travelling(steps, config, views), strict=True)):
        found = [(part, _gradients(builder, config, part, views, keys, values, options, deterministic)) for part in own]
        if arriving:
            steps.wait(*arriving)
        _add(builder, found, [dq, *sums.arrays])
        received = steps.message(config.key_specs((rank - step - 1) % size, config.stats))
        arriving = {(rank + 1) % size: sums}, {(rank - 1) % size: received}, f"ring, step {step}: gradients of keys and values"
        steps.start(*arriving)
        sums = received
    steps.wait(*arriving)
    _round(builder, [dq, *sums.arrays], views)


def gather_backward(steps: MemberSteps, config: Configuration, views: Views, options: Options, *, deterministic: bool) -> None:
    """:func:`ring_backward` with an all-gather; members add the gradients of their keys from all others."""
    builder = steps.builder
    options = _with_finite_bias(builder, options)
    keys, values = _gathered(steps, config, views)
    totals = [_zeros(builder, x.shape, config.stats) for x in (views["q"], keys, values)]
    for part in config.whole_backward:
        found = _gradients(builder, config, part, views, keys, values, options, deterministic)
        _add(builder, [(part, found)], totals)
    messages = []
    for peer in range(config.size):
        messages.append(steps.message(config.key_specs(peer, config.stats)))
        for target, total in zip(messages[-1].arrays, totals[1:], strict=True):
            for local, whole in config.keys.slices(peer):
                steps.copy(target[:, :, local], total[:, :, whole])
    specs = [config.key_specs(config.rank, config.stats)] * config.size
    first, *others = steps.all_to_all(messages, specs, "all-gather: gradients of keys and values")
    for message in others:
        for total, x in zip(first.arrays, message.arrays, strict=True):
            builder.run(accumulate, total, x, writes=(total,))
    _round(builder, [totals[0], *first.arrays], views)


def _travelling(steps: MemberSteps, config: Configuration, views: Views) -> Iterator[tuple[View, View]]:
    """The keys and values of every step of the ring; those of the next step are on their way meanwhile."""
    rank, size = config.rank, config.size
    arrays, message = [views["k"], views["v"]], steps.message_of([views["k"], views["v"]])
    for step in range(1, size):
        received = steps.message(config.key_specs((rank - step) % size))
        arriving = {(rank + 1) % size: message}, {(rank - 1) % size: received}, f"ring, step {step}: keys and values"
        steps.start(*arriving)
        yield arrays[0], arrays[1]
        steps.wait(*arriving)
        arrays, message = received.arrays, received
    yield arrays[0], arrays[1]


def _gathered(steps: MemberSteps, config: Configuration, views: Views) -> list[View]:
    """All keys and values in the order of their positions."""
    specs = [config.key_specs(peer) for peer in range(config.size)]
    messages = steps.gather(steps.message_of([views["k"], views["v"]]), specs, "all-gather: keys and values")
    arrays = []
    for index, x in enumerate((views["k"], views["v"])):
        whole = steps.builder.temporary((*x.shape[:2], config.keys.total, *x.shape[3:]), x.dtype)
        for peer, message in enumerate(messages):
            for local, positions in config.keys.slices(peer):
                steps.copy(whole[:, :, positions], message.arrays[index][:, :, local])
        arrays.append(whole)
    return arrays


class _Partials:
    """The partial outputs and log-sum-exps of a member's queries, which are merged; a single one of all rows is the result.

    Args:
        builder: collects the steps.
        config: the configuration.
        made: the calls.
        count: the number of partial results.
        views: the arrays and the results.
        options: the options of the call.
    """

    def __init__(
        self, builder: Builder, config: Configuration, made: Sequence[Part], count: int, views: Views, options: Options
    ) -> None:
        self._builder, self._config, self._views, self._options = builder, config, views, options
        result, rows = (views["out"], views["stats"]), views["q"].shape[2]
        written = [sum(part.rows.length for part in made if part.buffer == index) for index in range(count)]
        self._merged = written != [rows] or options.get("sinks") is not None
        self._results = [self._temporary(*result) for _ in range(count)] if self._merged else [result]
        for (_, stats), number in zip(self._results, written, strict=True):
            if number < rows:  # merging does not read the outputs of rows whose log-sum-exp is -inf
                builder.fill(stats, -np.inf)

    def _temporary(self, *like: View) -> tuple[View, View]:
        out, stats = (self._builder.temporary(x.shape, x.dtype) for x in like)
        return out, stats

    def compute(self, part: Part, k: View, v: View) -> None:
        """Add the steps of a part."""
        builder, config = self._builder, self._config
        q = part.rows.of(builder, self._views["q"], 2)
        keys, values = part.keys.of(builder, k, 2), part.keys.of(builder, v, 2)
        out, stats = self._results[part.buffer]
        whole = q.shape == self._views["q"].shape
        own = out, stats
        if not whole:
            own = (
                builder.temporary((out.shape[0], *q.shape[1:]), out.dtype),
                builder.temporary(row_stats_shape(q.shape), stats.dtype),
            )
        attend(builder, (q, keys, values), *own, config.part_options(part, builder, self._options))
        if not whole:
            part.rows.write(builder, out, own[0], 2)
            part.rows.write(builder, stats, own[1], config.row_axis)

    def merge(self) -> None:
        """Add the steps of the output and the log-sum-exp over all keys."""
        if not self._merged:
            return
        builder, sinks = self._builder, self._options.get("sinks")
        out, stats = self._as_target(self._views["out"], self._views["stats"])
        groups = [Parts(*(x[..., None] for x in self._as_target(*result))) for result in self._results]
        if builder.on_gpu and len(groups) > MAX_GROUPS:  # they are first merged into one group in float32
            several, like = [groups[i : i + MAX_GROUPS] for i in range(0, len(groups), MAX_GROUPS)], groups[0]
            shapes = [(*x.shape[:-1], len(several)) for x in (like.out, like.stats, like.stats)]
            made = Parts(*(builder.temporary(shape, np.float32) for shape in shapes))
            for i, some in enumerate(several):
                target = [x[..., i] for x in made]
                builder.run(merge, some, target[0], target[1], None, None, None, target[2], writes=target)
            groups = [made]
        builder.run(merge, groups, out, stats, sinks, writes=(out, stats))
        self._clear_padding(self._views["out"], self._views["stats"])

    def _as_target(self, out: View, stats: View) -> tuple[View, View]:
        """Results of packed sequences as those of one batch entry."""
        return (out[..., None], stats.T[..., None]) if self._config.packed else (out, stats)

    def _clear_padding(self, out: View, stats: View) -> None:
        """Clear the rows after the length of a batch entry, which merging gives their sink."""
        config, lengths = self._config, self._options.get("seq_lens_q")
        if self._options.get("sinks") is not None and lengths is not None:
            positions = self._builder.constant(config.positions)
            self._builder.run(clear_padding, out, stats, positions, lengths, writes=(out, stats))


def clear_padding(out: Any, stats: Any, positions: Any, lengths: Any) -> None:
    """Clear the rows whose positions are not within the lengths."""
    xp, bits = cupy_runtime.array_module(out), as_bits(out)
    exists = positions[:, None] < lengths  # (Sq, B)
    bits[...] = xp.where(exists, bits, bits.dtype.type(0))
    stats[...] = xp.where(exists[:, None], stats, -np.inf)


def _gradients(
    builder: Builder, config: Configuration, part: Part, views: Views, k: View, v: View, options: Options, deterministic: bool
) -> list[View]:
    """The gradients of a part, from the final output and log-sum-exp of its queries."""
    stats, rows = views["stats"], part.rows
    final = rows.of(builder, stats, config.row_axis)
    if final.shape != stats.shape or not final.flags.f_contiguous:  # cuDNN requires addresses that are multiples of 16
        final = builder.copied(final)
    dout, q, out = (rows.of(builder, views[name], 2) for name in ("dout", "q", "out"))
    arrays = dout, q, part.keys.of(builder, k, 2), part.keys.of(builder, v, 2), out, final
    made = [builder.temporary(x.shape, x.dtype) for x in arrays[1:4]]
    given = config.part_options(part, builder, options)
    attend_backward(builder, (*arrays, *made), given, deterministic=deterministic, given_stats="part")
    return made


def _add(builder: Builder, found: Sequence[tuple[Part, Sequence[View]]], totals: Sequence[View]) -> None:
    """Add the gradients of parts to those of the queries, keys and values."""
    for part, gradients in found:
        for side, total, x in zip((part.rows, part.keys, part.keys), totals, gradients, strict=True):
            side.add(builder, total, x, 2)


def _zeros(builder: Builder, shape: tuple[int, ...], dtype: Any) -> View:
    total = builder.temporary(shape, dtype)
    builder.fill(total, 0)
    return total


def _with_finite_bias(builder: Builder, options: Options) -> Options:
    """The options of the backward pass of parts, without -inf in a CuPy bias of one element per query if there are sinks.

    cuDNN reads it as 0 (the bug "sinks-infinite-bias"), and the log-sum-exp of the row is finite: that of its sink. Parts have
    no sinks, so the guard of the bug does not apply.
    """
    bias = options.get("bias")
    if options.get("sinks") is None or bias is None or bias.shape[0] != 1 or not builder.on_gpu:
        return options
    finite = builder.temporary(bias.shape, np.float32)
    builder.copy(finite, bias)
    builder.run(ragged.replace_infinite, finite, writes=(finite,))
    return {**options, "bias": finite}


def _round(builder: Builder, sums: Sequence[View], views: Views) -> None:
    """Add the steps that write the sums of the gradients into the results."""
    for name, total in zip(("dq", "dk", "dv"), sums, strict=True):
        builder.copy(views[name], total)
