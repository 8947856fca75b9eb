"""Which method a call uses and why, and what it costs: calls, memory and bytes sent, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import Unsupported
from ..programs.describe import report_of_views
from ..replay.call_report import Report
from .channel import message_bytes
from .configuration import METHODS, Configuration
from .group_support import calls
from .parts import Part


class Cost(NamedTuple):
    """What a pass costs one member.

    Attributes:
        sent: the bytes that the member sends.
        memory: the bytes that the member needs besides its arguments and results.
        calls: the number of calls.
    """

    sent: int
    memory: int
    calls: int


class Choice(NamedTuple):
    """A method, and why it was chosen."""

    method: str
    reason: str


class ParallelReport(NamedTuple):
    """What a call of a group would do; printed as text.

    Attributes:
        method: the method.
        reason: why it was chosen.
        refusals: the methods that cannot run, and why.
        forward, backward: the costs of both passes for this member.
        parts: the calls of this member: the numbers of queries and keys, and the mask.
        launches: for both passes the reports on the calls of this member, see :func:`cupy_sdpa.explain`: the problem, the plan,
            the steps and the bytes of temporary arrays; calls that differ in addresses only have one.
        text: the problem in words.
    """

    method: str
    reason: str
    refusals: dict[str, str]
    forward: Cost
    backward: Cost
    parts: tuple[str, ...]
    launches: dict[str, tuple[Report, ...]]
    text: str

    def __str__(self) -> str:
        lines = [self.text, f"method: {self.method}: {self.reason}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        lines.append(f"calls of this member: {len(self.parts)}")
        lines += [f"  {part}" for part in self.parts[:12]]
        if len(self.parts) > 12:
            lines.append(f"  and {len(self.parts) - 12} more")
        for name, cost in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"{name}: sends {_bytes(cost.sent)}, needs {_bytes(cost.memory)} besides arguments and results")
            for launch in self.launches[name]:
                lines += [f"  {line}" for line in launch.summary().splitlines()]
        return "\n".join(lines)


def choose(config: Configuration, requested: str | None) -> Choice:
    """The method of a call.

    Args:
        config: the configuration.
        requested: the method that the caller asks for, or None.

    Raises:
        Unsupported: the requested method, or every method, cannot run.
    """
    refusals = config.refusals
    if requested is not None:
        if requested in refusals:
            others = [name for name in METHODS if name not in refusals]
            remedy = f"use method={others[0]!r}" if others else "no other method can run either"
            raise Unsupported(f"method is {requested!r}, which cannot run: {refusals[requested]}; {remedy}")
        return Choice(requested, "requested")
    possible = [name for name in METHODS if name not in refusals]
    if not possible:
        raise Unsupported("no method can run: " + "; ".join(f"{name}: {reason}" for name, reason in refusals.items()))
    if config.size == 1:
        return Choice(possible[0], "there is one member, which computes everything")
    if config.positional and "all_to_all" in possible:
        return Choice("all_to_all", "an option depends on positions or needs whole sequences, and the heads can be shared out")
    if config.problem.band and config.problem.band.left is not None:
        method = "all_to_all" if "all_to_all" in possible else "all_gather"
        return Choice(method, "with a window every step of the ring takes several calls")
    if config.positional:
        return Choice("all_gather", "an option depends on positions, and each chunk of queries takes one call with all keys")
    if "ring" not in possible:
        return Choice(possible[0], "the ring cannot run")
    # On two H200s (benchmarks/results/h200x2_cudnn919_parallel.csv) the ring is the fastest method for both passes or takes 1 %
    # longer. With as many key/value heads as query heads all_to_all sends half as much, and takes 4 % less time.
    first = dataclasses.replace(config, rank=0)  # every member must choose the same method
    sent = {name: sum(cost(first, name, backward).sent for backward in (False, True)) for name in possible}
    if 3 * sent.get("all_to_all", sent["ring"]) <= 2 * sent["ring"]:
        return Choice("all_to_all", f"it sends {_bytes(sent['all_to_all'])} in both passes, the ring {_bytes(sent['ring'])}")
    return Choice("ring", "its transfers are hidden behind calls")


def report(config: Configuration, requested: str | None, like: Any, options: Mapping[str, Any]) -> ParallelReport:
    """What a call would do; ``like`` is its q."""
    choice = choose(config, requested)
    forward, backward = (cost(config, choice.method, one) for one in (False, True))
    made = tuple(_described(config, part) for part in _parts(config, choice.method))
    if choice.method == "all_to_all":
        rows, _ = config.heads(config.rank)
        made = (f"heads {rows.start} to {rows.stop - 1} of whole sequences",)
    text = f"member {config.rank} of {config.size}: {config.problem}"
    launches = {
        name: tuple(report_of_views(call, like) for call in calls(config, choice.method, like, options, {"backward": of}))
        for name, of in (("forward", False), ("backward", True))
    }
    return ParallelReport(choice.method, choice.reason, config.refusals, forward, backward, made, launches, text)


def _parts(config: Configuration, method: str) -> Sequence[Part]:
    if method == "ring":
        return [part for step in config.steps[0] for part in step]
    return config.whole[0] if method == "all_gather" else ()


def _described(config: Configuration, part: Part) -> str:
    entries = f"{len(part.lengths)} sequences, " if part.lengths else ""
    return f"{entries}{part.rows.length} queries, {part.keys.length} keys, {part.band or 'no mask'}"


def cost(config: Configuration, method: str, backward: bool) -> Cost:
    """What a pass costs one member."""
    return {"ring": _ring, "all_gather": _gather, "all_to_all": _heads}[method](config, backward)


def _sizes(config: Configuration, rank: int) -> tuple[int, int, int]:
    """The bytes of the queries, of the outputs and of the log-sum-exp of a member."""
    d, dv, hq, *_, entries = config.problem.sizes
    rows = config.queries.share(rank) * hq * (1 if config.packed else entries)
    item = np.dtype(config.dtype).itemsize
    return rows * d * item, rows * dv * item, rows * np.dtype(config.stats).itemsize


def _ring(config: Configuration, backward: bool) -> Cost:
    steps, buffers = config.steps
    size, rank = config.size, config.rank
    keys = [message_bytes(config.key_specs((rank - step) % size)) for step in range(size)]
    sums = [message_bytes(config.key_specs((rank - step) % size, config.sums)) for step in range(size)]
    q, out, stats = _sizes(config, rank)
    sent = sum(keys[:-1]) + (sum(sums) if backward and size > 1 else 0)
    memory = 2 * max(keys) if size > 1 else 0
    if backward:
        memory += 2 * max(sums) + q * np.dtype(config.sums).itemsize // np.dtype(config.dtype).itemsize + q + max(keys)
    elif buffers > 1:
        memory += buffers * (out + stats)
    return Cost(sent, memory, sum(map(len, steps)))


def _gather(config: Configuration, backward: bool) -> Cost:
    made, buffers = (config.whole_backward, 1) if backward else config.whole
    size, rank = config.size, config.rank
    everything = sum(message_bytes(config.key_specs(peer)) for peer in range(size))
    sent = message_bytes(config.key_specs(rank)) * (size - 1)
    q, out, stats = _sizes(config, rank)
    memory = 2 * everything
    if backward:
        sent += sum(message_bytes(config.key_specs(peer, config.sums)) for peer in range(size) if peer != rank)
        wide = np.dtype(config.sums).itemsize / np.dtype(config.dtype).itemsize
        memory += math.ceil(everything * (3 * wide + 1)) + math.ceil(q * (1 + wide))
    elif buffers > 1:
        memory += buffers * (out + stats)
    return Cost(sent, memory, len(made))


def _heads(config: Configuration, backward: bool) -> Cost:
    size = config.size
    q, out, stats = _sizes(config, config.rank)
    hkv = config.problem.sizes[3]
    item = np.dtype(config.dtype).itemsize
    keys = sum(math.prod(shape) for shape, _ in config.key_specs(config.rank)) * item
    repeated = max(1.0, size / hkv) if hkv else 1.0  # key/value heads that several members need
    moved = q + keys * repeated + out + stats
    if backward:
        moved = 2 * out + 2 * q + stats + 2 * keys * repeated
    sent = int(moved * (size - 1) / size) + 2 * (size - 1) * message_bytes([])  # in two exchanges
    return Cost(sent, int(3 * moved), 1)


def _bytes(count: int) -> str:
    """A number of bytes as text.

    >>> _bytes(1000), _bytes(3 << 20)
    ('1000 bytes', '3.0 MiB')
    """
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
