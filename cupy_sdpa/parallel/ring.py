"""The methods that move keys and values: the ring and the all-gather.

Every member keeps its queries. In the ring it passes the keys and values on from member to member, and computes attention to
those that it has while the next ones arrive. With the all-gather it first receives all keys and values. The partial results are
merged by their log-sum-exps. Gradients are computed from the final output and log-sum-exp, so that those of different keys only
need to be added.

Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3 (ring); Grattafiori
et al. 2024, "The Llama 3 Herd of Models", section 3.3.2 (all-gather); Dao 2023, "FlashAttention-2", algorithm 2 (gradients).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..boundary.compute import cast
from ..kernels import ragged
from ..kernels.merge import accumulate
from ..runtime import cupy_runtime, memory
from .channel import Channel, Message, Pending, copy
from .configuration import Configuration
from .group import Transfer
from .parts import Partials, as_bits, gradients

Options = Mapping[str, Any]


def ring_forward(config: Configuration, channel: Channel, q: Any, k: Any, v: Any, options: Options) -> tuple[Any, Any]:
    """The output and the log-sum-exp of the member's queries."""
    steps, buffers = config.steps
    results = Partials(q, v, buffers, config.packed)
    travelling = _Travelling(config, channel, q, k, v)
    for own in steps:
        keys, values = travelling.start_next()
        for part in own:
            results.compute(part, q, keys, values, config.part_options(part, q, options))
        travelling.finish()
    return _without_padding(config, *results.merged(options.get("sinks")), options)


def ring_backward(
    config: Configuration, channel: Channel, dout: Any, q: Any, k: Any, v: Any, out: Any, stats: Any, options: Options,
    **outputs: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of the member's queries, keys and values.

    The sums of the gradients of keys and values travel one step behind the keys and values, and arrive at their member at the
    end.
    """
    options = _with_finite_bias(options)
    steps, _ = config.steps
    dq = memory.zeros(q, q.shape, config.sums)
    travelling = _Travelling(config, channel, q, k, v)
    previous, following = (config.rank - 1) % config.size, (config.rank + 1) % config.size
    sums = Message.zeros(q, config.key_specs(config.rank, config.sums))
    arriving = Pending()
    for step, own in enumerate(steps):
        keys, values = travelling.start_next()
        found = []
        for part in own:
            given = config.part_options(part, q, options)
            found.append((part, gradients(part, (dout, q, out, stats), keys, values, config.packed, given | outputs)))
        travelling.finish()
        arriving.wait()
        for part, (dq_part, *others) in found:
            part.rows.add(dq, dq_part, 2)
            for total, x in zip(sums.arrays, others, strict=True):
                part.keys.add(total, x, 2)
        if config.size > 1:
            received = Message(q, config.key_specs((config.rank - step - 1) % config.size, config.sums))
            transfers = [Transfer(sums.flat, following)], [Transfer(received.flat, previous)]
            arriving, sums = channel.start(*transfers, f"ring, step {step}: gradients of keys and values"), received
    arriving.wait()
    return _rounded([dq, *sums.arrays], q)


class _Travelling:
    """Keys and values on their way around the ring.

    Args:
        config: the configuration.
        channel: the group.
        q, k, v: the member's arrays.
    """

    def __init__(self, config: Configuration, channel: Channel, q: Any, k: Any, v: Any) -> None:
        self._config, self._channel, self._like = config, channel, q
        self._arrays: Any = (k, v)
        self._message = Message.of([k, v]) if config.size > 1 else None
        self._next: Message | None = None
        self._arriving = Pending()
        self._step = 0

    def start_next(self) -> tuple[Any, Any]:
        """Start the transfer of the keys and values of the next step; returns those of this step."""
        config, self._step = self._config, self._step + 1
        if self._message and self._step < config.size:
            previous, following = (config.rank - 1) % config.size, (config.rank + 1) % config.size
            self._next = Message(self._like, config.key_specs((config.rank - self._step) % config.size))
            self._arriving = self._channel.start(
                [Transfer(self._message.flat, following)],
                [Transfer(self._next.flat, previous)],
                f"ring, step {self._step}: keys and values",
            )
        return self._arrays  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Let later work wait for the transfer."""
        self._arriving.wait()
        if self._next:
            self._message, self._arrays, self._next = self._next, self._next.arrays, None


def gather_forward(config: Configuration, channel: Channel, q: Any, k: Any, v: Any, options: Options) -> tuple[Any, Any]:
    """:func:`ring_forward` with an all-gather."""
    made, buffers = config.whole
    results = Partials(q, v, buffers, config.packed)
    keys, values = _gathered(config, channel, k, v)
    for part in made:
        results.compute(part, q, keys, values, config.part_options(part, q, options))
    return _without_padding(config, *results.merged(options.get("sinks")), options)


def gather_backward(
    config: Configuration, channel: Channel, dout: Any, q: Any, k: Any, v: Any, out: Any, stats: Any, options: Options,
    **outputs: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """:func:`ring_backward` with an all-gather; members add the gradients of their keys from all others."""
    options = _with_finite_bias(options)
    keys, values = _gathered(config, channel, k, v)
    dq = memory.zeros(q, q.shape, config.sums)
    totals = [memory.zeros(q, x.shape, config.sums) for x in (keys, values)]
    for part in config.whole_backward:
        given = config.part_options(part, q, options)
        dq_part, *others = gradients(part, (dout, q, out, stats), keys, values, config.packed, given | outputs)
        part.rows.add(dq, dq_part, 2)
        for total, x in zip(totals, others, strict=True):
            part.keys.add(total, x, 2)
    del keys, values
    messages = []
    for peer in range(config.size):
        message = Message(q, config.key_specs(peer, config.sums))
        for target, total in zip(message.arrays, totals, strict=True):
            for local, whole in config.keys.slices(peer):
                copy(target[:, :, local], total[:, :, whole])
        messages.append(message)
    specs = [config.key_specs(config.rank, config.sums)] * config.size
    first, *others = channel.all_to_all(messages, specs, "all-gather: gradients of keys and values")
    for message in others:
        for total, x in zip(first.arrays, message.arrays, strict=True):
            accumulate(total, x)
    return _rounded([dq, *first.arrays], q)


def _gathered(config: Configuration, channel: Channel, k: Any, v: Any) -> list[Any]:
    """All keys and values in the order of their positions."""
    specs = [config.key_specs(peer) for peer in range(config.size)]
    messages = channel.gather(Message.of([k, v]), specs, "all-gather: keys and values")
    arrays = []
    for index, x in enumerate((k, v)):
        whole = cupy_runtime.temporary(x, (*x.shape[:2], config.keys.total, *x.shape[3:]), x.dtype)
        for peer, message in enumerate(messages):
            for local, positions in config.keys.slices(peer):
                copy(whole[:, :, positions], message.arrays[index][:, :, local])
        arrays.append(whole)
    return arrays


def sink_gradients(config: Configuration, channel: Channel, dout: Any, out: Any, stats: Any, sinks: Any) -> Any:
    """The gradient of the sinks, summed over the queries of all members in the order of the ranks.

    A sink has no value, so its gradient is minus its weight times the dot product of dout and out.
    """
    wide = config.sums
    rows = stats if config.packed else stats.transpose(1, 0, 2)
    xp = cupy_runtime.array_module(stats)
    heads = (slice(None), *(None,) * (rows.ndim - 1))
    exists = rows > -np.inf
    products = (dout.astype(wide) * out.astype(wide)).sum(axis=0)  # (Hq, Sq, B) or (Hq, Tq)
    products = xp.where(exists, products, 0)  # dout may be NaN in the padding
    weights = xp.exp(xp.where(exists, sinks.astype(wide)[heads] - xp.where(exists, rows, 0), -np.inf))
    own = -(weights * products).sum(axis=tuple(range(1, rows.ndim)))
    if config.size > 1:
        messages = channel.gather(Message.of([own]), [[(own.shape, own.dtype)]] * config.size, "gradients of sinks")
        own = messages[0].arrays[0].copy()
        for message in messages[1:]:
            own += message.arrays[0]
    return own.astype(np.float32)


def _without_padding(config: Configuration, out: Any, stats: Any, options: Options) -> tuple[Any, Any]:
    """Clear the rows after the length of a batch entry, which merging gives their sink."""
    if options.get("sinks") is not None and (lengths := options.get("seq_lens_q")) is not None:
        xp = cupy_runtime.array_module(out)
        exists = xp.asarray(config.queries.positions(config.rank))[:, None] < lengths  # (Sq, B)
        bits = as_bits(out)
        bits[...] = xp.where(exists, bits, bits.dtype.type(0))
        stats[...] = xp.where(exists[:, None], stats, -np.inf)
    return out, stats


def _with_finite_bias(options: Options) -> Options:
    """The options of the backward pass of parts, without -inf in a CuPy bias of one element per query if there are sinks.

    cuDNN reads it as 0 (the bug "sinks-infinite-bias"), and the log-sum-exp of the row is finite: that of its sink. Parts have
    no sinks, so the guard of the bug does not apply.
    """
    bias = options.get("bias")
    if options.get("sinks") is None or bias is None or bias.shape[0] != 1 or not cupy_runtime.is_array(bias):
        return options
    finite = cast(bias, np.dtype(np.float32), cupy_runtime.temporary)
    ragged.replace_infinite(finite)
    return {**options, "bias": finite}


def _rounded(sums: Sequence[Any], like: Any) -> tuple[Any, Any, Any]:
    """The sums of the gradients of q, k and v as results in the dtype of an array."""
    dq, dk, dv = (cast(total, like.dtype, cupy_runtime.new_result) for total in sums)
    return dq, dk, dv
