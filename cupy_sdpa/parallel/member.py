"""The program of a member: a call of a group as the calls of the member, copies, and exchanges with the other members."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..extend import Axes, Builder, CallKey, ReadCall, ReadOptions, View, composed, cupy_runtime
from .channel import Channel
from .configuration import Configuration, Request
from .group_report import Choice
from .heads import heads_backward, heads_forward
from .member_steps import MemberSteps, attend
from .ring import gather_backward, gather_forward, ring_backward, ring_forward

Views = Mapping[str, View]

#: The builders of each method, of both passes.
_FORWARD: dict[str, Callable[..., None]] = {"ring": ring_forward, "all_gather": gather_forward, "all_to_all": heads_forward}
_BACKWARD: dict[str, Callable[..., None]] = {"ring": ring_backward, "all_gather": gather_backward, "all_to_all": heads_backward}


class Member:
    """A configuration and a method. Calls with the same ``Member`` differ only in their arrays.

    Args:
        config, choice, channel, of: the configuration, the method, the exchanges, and what the call asks for.
        agree: when a call begins, compares its shapes and options, as text, with the other members'.
        tagged: whether a call's first exchange compares the text's checksum.
    """

    def __init__(
        self,
        config: Configuration,
        choice: Choice,
        channel: Channel,
        of: Request,
        agree: Callable[[str], None],
        *,
        tagged: bool,
    ) -> None:
        self.config, self.choice, self.of, self._channel, self._agree = config, choice, of, channel, agree
        flags = f"deterministic {of.deterministic}, return_dsinks {of.return_dsinks}"
        self._text = f"{config.text}\n{'backward' if of.backward else 'forward'}, method {choice.method}\n{flags}"
        self._tag = zlib.crc32(self._text.encode()) >> 1 if tagged else None

    def read(self, key: CallKey, arrays: dict[str, Any], views: dict[str, View], options: ReadOptions) -> ReadCall:
        """Return the call on operands, without ``compute_dtype``."""
        config, of = self.config, self.of
        arrays, views, options = config.with_dropout_mask(arrays, views, options)
        q, k, v = (views[name] for name in "qkv")
        device = q.storage.device
        shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape, "out": (v.shape[0], *q.shape[1:])}
        new = {name: View.dense(name, shape, q.dtype, device) for name, shape in shapes.items()}
        new["stats"] = View.row_stats("stats", q, config.dtype)
        new["dsinks"] = View.dense("dsinks", q.shape[1:2], np.float32, device)
        build = functools.partial(self._add, views=views, options=options | config.functions)
        return composed(key, arrays, views, {name: new[name] for name in of.results}, build)

    def _add(self, builder: Builder, views: Views, options: ReadOptions) -> None:
        """Add the steps of the call."""
        config, of = self.config, self.of
        steps = MemberSteps(builder, self._channel, self._tag)
        if config.size > 1:
            builder.run(self._agree, self._text, writes=(), on_host=True)
        own, finish = builder.in_dtype(views, of.dtype, of.results)
        given = {"deterministic": of.deterministic} if of.backward else {}
        build = _BACKWARD[self.choice.method] if of.backward else _FORWARD[self.choice.method]
        with Axes("dhsb").context():  # parts of the whole call's options may have any strides
            (_alone if config.size == 1 else build)(steps, config, own, options, **given)
        if of.return_dsinks:
            _sink_gradients(steps, config, own, options["sinks"])
        finish()
        builder.check_lengths(config.problem, views)


def _alone(steps: MemberSteps, config: Configuration, views: Views, options: ReadOptions, **backward: bool) -> None:
    """Add the steps of a single member's call."""
    builder, settings = steps.builder, config.problem.settings
    longest = {"max_seqlen_q": settings.max_seqlen_q, "max_seqlen_kv": settings.max_seqlen_kv}
    given = options | config.everything.packing(builder) | longest
    if backward:
        arrays = {name: views[name] for name in ("dout", "q", "k", "v", "out", "stats", "dq", "dk", "dv")}
        builder.add_pass(arrays, given, given_stats="whole", **backward)
    else:
        attend(builder, (views["q"], views["k"], views["v"]), views["out"], views["stats"], given)


def _sink_gradients(steps: MemberSteps, config: Configuration, views: Views, sinks: View) -> None:
    """Add the steps for the sinks' gradient, summed over the queries of all members in the order of the ranks."""
    builder, heads = steps.builder, sinks.shape
    own = steps.message([(heads, config.stats)])
    arrays = views["dout"], views["out"], views["stats"] if config.packed else views["stats"].transpose(1, 0, 2), sinks
    builder.run(sink_gradient, own.arrays[0], *arrays, writes=own.arrays)
    messages = steps.gather(own, [[(heads, config.stats)]] * config.size, "gradients of sinks")
    builder.run(add_up, views["dsinks"], tuple(message.arrays[0] for message in messages), writes=(views["dsinks"],))


def sink_gradient(target: Any, dout: Any, out: Any, stats: Any, sinks: Any) -> None:
    """The gradient of the sinks ``(Hq,)`` of a member's queries: minus the weight of a sink times the product of dout and out.

    ``stats`` is ``(Hq, Sq, B)``, or packed ``(Hq, Tq)``.
    """
    xp, wide = cupy_runtime.array_module(stats), target.dtype
    heads = (slice(None), *(None,) * (stats.ndim - 1))
    exists = stats > -np.inf
    products = (dout.astype(wide) * out.astype(wide)).sum(axis=0)  # (Hq, Sq, B) or (Hq, Tq)
    products = xp.where(exists, products, 0)  # dout may be NaN in the padding
    weights = xp.exp(xp.where(exists, sinks.astype(wide)[heads] - xp.where(exists, stats, 0), -np.inf))
    target[...] = -(weights * products).sum(axis=tuple(range(1, stats.ndim)))


def add_up(target: Any, parts: Any) -> None:
    """Add arrays in their order."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    target[...] = total
