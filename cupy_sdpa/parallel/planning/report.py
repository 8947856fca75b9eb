"""Which method a call uses and why, and what it costs: time, memory and bytes sent, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import Unsupported
from ..groups.channel import message_bytes
from .configuration import METHODS, Configuration
from .parts import Part


class Machine(NamedTuple):
    """The speeds that estimates assume; by default those of an H200 with NVLink.

    Attributes:
        forward, backward: operations of attention per second.
        link: bytes per second that a GPU sends to another one, while it receives as many.
        latency: the seconds of an exchange without bytes.
        launch: the seconds of a call without queries.
        copy: bytes per second that copies, merges and sums read and write in a GPU's memory.
    """

    forward: float = 600e12
    backward: float = 480e12
    link: float = 350e9
    latency: float = 15e-6
    launch: float = 10e-6
    copy: float = 3e12


class Cost(NamedTuple):
    """The estimated costs of a pass for one member.

    Attributes:
        compute: the seconds of the calls on the GPU, and of copies, merges and sums.
        transfer: the seconds of the exchanges.
        exposed: the seconds of the exchanges during which no call runs.
        sent: the bytes that the member sends.
        memory: the bytes that the member needs besides its arguments and results.
        calls: the number of calls.
    """

    compute: float
    transfer: float
    exposed: float
    sent: int
    memory: int
    calls: int

    @property
    def seconds(self) -> float:
        """The time of the pass."""
        return self.compute + self.exposed


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
        forward, backward: the estimated costs of both passes for this member.
        parts: the calls of this member: the numbers of queries and keys, and the mask.
        text: the problem in words.
    """

    method: str
    reason: str
    refusals: dict[str, str]
    forward: Cost
    backward: Cost
    parts: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        lines = [self.text, f"method: {self.method}: {self.reason}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        lines.append(f"calls of this member: {len(self.parts)}")
        lines += [f"  {part}" for part in self.parts[:12]]
        if len(self.parts) > 12:
            lines.append(f"  and {len(self.parts) - 12} more")
        for name, cost in (("forward", self.forward), ("backward", self.backward)):
            lines.append(
                f"{name}: sends {_bytes(cost.sent)}, needs {_bytes(cost.memory)} besides arguments and results; estimate for "
                f"H200 GPUs with NVLink: {cost.seconds * 1e3:.3g} ms, transfers without calls {cost.exposed * 1e3:.3g} ms"
            )
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
    if config.problem.band and config.problem.band.left is not None and "all_to_all" not in possible:
        return Choice("all_gather", "a window takes one call for each chunk of queries with all keys")
    if config.positional:
        return Choice("all_gather", "an option depends on positions, and each chunk of queries takes one call with all keys")
    first = dataclasses.replace(config, rank=0)  # every member must choose the same method
    times = {name: sum(cost(first, name, backward).seconds for backward in (False, True)) for name in possible}
    method = min(times, key=lambda name: times[name])
    listed = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times.items())
    return Choice(method, f"least estimated time of both passes: {listed}")


def report(config: Configuration, requested: str | None) -> ParallelReport:
    """What a call would do."""
    choice = choose(config, requested)
    forward, backward = (cost(config, choice.method, backward) for backward in (False, True))
    made = tuple(_described(config, part) for part in _parts(config, choice.method))
    if choice.method == "all_to_all":
        rows, _ = config.heads(config.rank)
        made = (f"heads {rows.start} to {rows.stop - 1} of whole sequences",)
    text = f"member {config.rank} of {config.size}: {config.problem}"
    return ParallelReport(choice.method, choice.reason, config.refusals, forward, backward, made, text)


def _parts(config: Configuration, method: str) -> Sequence[Part]:
    if method == "ring":
        return [part for step in config.steps[0] for part in step]
    return config.whole[0] if method == "all_gather" else ()


def _described(config: Configuration, part: Part) -> str:
    entries = f"{len(part.lengths)} sequences, " if part.lengths else ""
    return f"{entries}{part.rows.length} queries, {part.keys.length} keys, {part.band or 'no mask'}"


def cost(config: Configuration, method: str, backward: bool, machine: Machine = Machine()) -> Cost:  # noqa: B008 (a tuple)
    """The estimated costs of a pass for one member.

    Args:
        config: the configuration.
        method: the method.
        backward: whether the backward pass is meant.
        machine: the speeds.
    """
    return {"ring": _ring, "all_gather": _gather, "all_to_all": _heads}[method](config, backward, machine)


def _seconds(config: Configuration, work: float, calls: int, backward: bool, machine: Machine) -> float:
    """The time of calls on pairs of a query and a key."""
    d, dv, hq, *_, entries = config.problem.sizes
    batch = 1 if config.packed else entries
    products = (3 * d + 2 * dv) if backward else (d + dv)
    return 2.0 * work * products * hq * batch / (machine.backward if backward else machine.forward) + calls * machine.launch


def _moved(config: Configuration, parts: Sequence[Part], buffers: int, backward: bool) -> float:
    """The bytes that merges and sums read and write."""
    q, out, stats = _sizes(config, config.rank)
    rows, wide = config.queries.share(config.rank), np.dtype(config.sums).itemsize / np.dtype(config.dtype).itemsize
    if not backward:
        written = sum(2 * (out + stats) * part.rows.length / rows for part in parts if part.rows.length < rows)
        return written + ((buffers + 1) * (out + stats) if buffers > 1 else 0)
    keys, share = message_bytes(config.key_specs(config.rank)), config.keys.share(config.rank)
    summed = sum(q * part.rows.length / rows + keys * part.keys.length / share for part in parts) if rows and share else 0
    return float((1 + 2 * wide) * (summed + q + keys))  # sums, which begin as zeros and are rounded


def _sizes(config: Configuration, rank: int) -> tuple[int, int, int]:
    """The bytes of the queries, of the outputs and of the log-sum-exp of a member."""
    d, dv, hq, *_, entries = config.problem.sizes
    rows = config.queries.share(rank) * hq * (1 if config.packed else entries)
    item = np.dtype(config.dtype).itemsize
    return rows * d * item, rows * dv * item, rows * np.dtype(config.stats).itemsize


def _ring(config: Configuration, backward: bool, machine: Machine) -> Cost:
    steps, buffers = config.steps
    size, rank = config.size, config.rank
    keys = [message_bytes(config.key_specs((rank - step) % size)) for step in range(size)]
    sums = [message_bytes(config.key_specs((rank - step) % size, config.sums)) for step in range(size)]
    q, out, stats = _sizes(config, rank)
    compute = transfer = exposed = 0.0
    for step, own in enumerate(steps):
        busy = _seconds(config, sum(part.work for part in own), len(own), backward, machine)
        moved = (keys[step] if step + 1 < size else 0) + (sums[step] if backward and size > 1 else 0)
        time = moved / machine.link + machine.latency if moved else 0.0
        last = sums[step] / machine.link + machine.latency if backward and step + 1 == size > 1 else 0.0
        compute, transfer = compute + busy, transfer + time
        exposed += last if last else max(0.0, time - busy)
    every = [part for own in steps for part in own]
    compute += (_moved(config, every, buffers, backward) + (2 * keys[0] if size > 1 else 0)) / machine.copy
    sent = sum(keys[:-1]) + (sum(sums) if backward and size > 1 else 0)
    memory = 2 * max(keys) if size > 1 else 0
    if backward:
        memory += 2 * max(sums) + q * np.dtype(config.sums).itemsize // np.dtype(config.dtype).itemsize + q + max(keys)
    elif buffers > 1:
        memory += buffers * (out + stats)
    return Cost(compute, transfer, exposed, sent, memory, sum(map(len, steps)))


def _gather(config: Configuration, backward: bool, machine: Machine) -> Cost:
    made, buffers = (config.whole_backward, 1) if backward else config.whole
    size, rank = config.size, config.rank
    own = message_bytes(config.key_specs(rank))
    everything = sum(message_bytes(config.key_specs(peer)) for peer in range(size))
    others = sum(message_bytes(config.key_specs(peer, config.sums)) for peer in range(size) if peer != rank)
    q, out, stats = _sizes(config, rank)
    sent = own * (size - 1) + (others if backward else 0)
    received = everything - own + (message_bytes(config.key_specs(rank, config.sums)) * (size - 1) if backward else 0)
    transfer = max(sent, received) / machine.link + (machine.latency * (1 + backward) if size > 1 else 0.0)
    memory = 2 * everything
    if backward:
        wide = np.dtype(config.sums).itemsize / np.dtype(config.dtype).itemsize
        memory += math.ceil(everything * (3 * wide + 1)) + math.ceil(q * (1 + wide))
    elif buffers > 1:
        memory += buffers * (out + stats)
    copied = 2 * own + 2 * everything + (4 * others if backward else 0)
    compute = _seconds(config, sum(part.work for part in made), len(made), backward, machine)
    compute += (_moved(config, made, buffers, backward) + copied) / machine.copy
    return Cost(compute, transfer, transfer, sent, memory, len(made))


def _heads(config: Configuration, backward: bool, machine: Machine) -> Cost:
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
    transfer = sent / machine.link + (2 * machine.latency if size > 1 else 0.0)
    work = sum(part.work for part in config.whole[0])
    compute = _seconds(config, work, 1, backward, machine)  # zigzag chunks of one member have the average work
    compute += 4 * moved / machine.copy if size > 1 else 0.0  # into messages, and out of them
    return Cost(compute, transfer, transfer, sent, int(3 * moved), 1)


def _bytes(count: int) -> str:
    """A number of bytes as text.

    >>> _bytes(1000), _bytes(3 << 20)
    ('1000 bytes', '3.0 MiB')
    """
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
