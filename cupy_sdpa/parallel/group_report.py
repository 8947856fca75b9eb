"""Which method a call uses and why, and what it costs: calls, memory and bytes sent, from its program."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import Report, Unsupported
from ..extend import ReadCall
from .configuration import METHODS, Configuration
from .member_steps import bytes_sent
from .parts import Part


class Cost(NamedTuple):
    """What a pass costs one member.

    Attributes:
        sent: the bytes that the member sends.
        memory: the bytes that the member needs in addition to its arguments and results.
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
    """Describe what a call of a group would do; :meth:`ContextParallel.explain` returns it, and ``print`` shows it.

    Attributes:
        method: the method, ``"ring"``, ``"all_gather"`` or ``"all_to_all"``.
        reason: why it was chosen.
        refusals: the methods that cannot run, and why.
        forward, backward: the costs of both passes for this member: ``sent``, the bytes that it sends; ``memory``, the bytes
            that it needs in addition to its arguments and results; ``calls``, the number of calls.
        parts: the calls of this member: the numbers of queries and keys, and the mask.
        launches: for both passes the report on the program of this member, see :func:`cupy_sdpa.explain`: the problems, the
            plans, the steps and the bytes of temporary arrays. Empty if no call is made.
        text: the problem in words.

    >>> import numpy as np
    >>> from cupy_sdpa.parallel import Loopback, context_parallel
    >>> cp = context_parallel(Loopback(2).members[0])
    >>> q = np.ones((64, 4, 512, 1), np.float32, order="F")
    >>> report = cp.explain(q, q, q, causal=True)
    >>> report.method, report.reason
    ('ring', 'its transfers are hidden behind calls')
    >>> report.parts
    ('512 queries, 512 keys, causal from the top left', '256 queries, 512 keys, no mask')
    >>> report.forward.calls, report.forward.sent >= 2 * q.nbytes, report.refusals
    (2, True, {})
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
    """Return the method of a call, or the one that the caller requests.

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
        return Choice("all_to_all", "an option depends on positions or needs whole sequences, and the heads can be divided")
    if config.problem.band and config.problem.band.left is not None:
        method = "all_to_all" if "all_to_all" in possible else "all_gather"
        return Choice(method, "with a window every step of the ring takes several calls")
    if config.positional:
        return Choice("all_gather", "an option depends on positions, and each chunk of queries takes one call with all keys")
    if "ring" not in possible:
        return Choice(possible[0], "the ring cannot run")
    # On two H200s (benchmarks/results/h200x2_cudnn919_parallel.csv) the ring is the fastest method for both passes or takes 1 %
    # longer. With as many key/value heads as query heads all_to_all sends half as much, and takes 4 % less time.
    ring, heads = _sent(config)
    if "all_to_all" in possible and 3 * heads <= 2 * ring:
        return Choice("all_to_all", f"it sends about {_bytes(heads)} in both passes, the ring {_bytes(ring)}")
    return Choice("ring", "its transfers are hidden behind calls")


def _sent(config: Configuration) -> tuple[int, int]:
    """Return the bytes that a member sends in both passes, with the ring and with all-to-all; the same for all members."""
    d, dv, hq, hkv, *_, entries = config.problem.sizes
    size, batch = config.size, 1 if config.packed else entries
    item, wide = np.dtype(config.dtype).itemsize, config.stats.itemsize
    keys = config.keys.total * batch * hkv * (d + dv) // size
    rows = config.queries.total * batch * hq // size
    ring = keys * (2 * (size - 1) * item + size * wide)
    repeated = max(1.0, size / hkv) if hkv else 1.0  # key/value heads that several members need
    heads = 3 * (keys * repeated + rows * (d + dv)) * item + 2 * rows * wide
    return ring, int(heads * (size - 1) / size)


def report(config: Configuration, choice: Choice, forward: ReadCall, backward: ReadCall) -> ParallelReport:
    """Return what the calls of both passes of a member would do."""
    if choice.method == "all_to_all":
        rows, _ = config.heads(config.rank)
        made: tuple[str, ...] = (f"heads {rows.start} to {rows.stop - 1} of whole sequences",)
    else:
        steps = config.ring_calls if choice.method == "ring" else config.gather_calls
        made = tuple(_described(part) for own in steps for part in own)
    text = f"member {config.rank} of {config.size}: {config.problem}"
    calls = {"forward": forward, "backward": backward}
    launches: dict[str, tuple[Report, ...]] = {
        name: (call.report(),) if call.program.launches else () for name, call in calls.items()
    }
    first, second = (Cost(bytes_sent(x), x.program.memory_bytes, len(x.program.launches)) for x in (forward, backward))
    return ParallelReport(choice.method, choice.reason, config.refusals, first, second, made, launches, text)


def _described(part: Part) -> str:
    entries = f"{len(part.lengths)} sequences, " if part.lengths else ""
    return f"{entries}{part.rows.length} queries, {part.keys.length} keys, {part.band or 'no mask'}"


def _bytes(count: int) -> str:
    """Return a number of bytes as text.

    >>> _bytes(1000), _bytes(3 << 20)
    ('1000 bytes', '3.0 MiB')
    """
    for name, unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
