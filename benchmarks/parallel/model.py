"""The performance model: times of a group from the rate of one GPU, the bandwidth of a link, and the shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cupy_sdpa.parallel.planning.arguments import configure
from cupy_sdpa.parallel.planning.configuration import METHODS, Configuration
from cupy_sdpa.parallel.planning.report import Cost, Machine, cost
from cupy_sdpa.problem.tensor_spec import numpy_dtype


class Problem(NamedTuple):
    """A problem of the benchmark.

    Attributes:
        name: the name.
        length: the number of positions of every member.
        heads, key_heads: the numbers of query heads and of key/value heads.
        head_dim: the head dim.
        options: the options of the call.
        dtype: the dtype.
    """

    name: str
    length: int
    heads: int
    key_heads: int
    head_dim: int
    options: Mapping[str, Any]
    dtype: str = "bfloat16"

    def shapes(self, length: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of q, k and v with some number of positions."""
        q, k = (self.head_dim, self.heads, length, 1), (self.head_dim, self.key_heads, length, 1)
        return q, k, k


#: Llama 3 8B's attention.
_LLAMA: dict[str, Any] = {"heads": 32, "key_heads": 8, "head_dim": 128}
#: Twice as many query heads, as in Llama 3 70B.
_WIDE: dict[str, Any] = {"heads": 64, "key_heads": 8, "head_dim": 128}
#: The problems on GPUs, with lengths per member.
PROBLEMS = (
    *(
        Problem(f"{name}, {length}k per GPU{suffix}", length << 10, **heads, options=options)
        for heads, suffix in ((_LLAMA, ""), (_WIDE, ", 64 heads"))
        for name, options in (("causal", {"causal": True}), ("full", {}))
        for length in (8, 16, 32)
    ),
    Problem("causal, 64k per GPU", 65536, **_LLAMA, options={"causal": True}),
    Problem("window of 4096, 16k per GPU", 16384, **_LLAMA, options={"causal": True, "window": (4096, 0)}),
    Problem("multi-head, causal, 8k per GPU", 8192, heads=32, key_heads=32, head_dim=128, options={"causal": True}),
)
#: The problems on the CPU, which test the benchmark.
CPU_PROBLEMS = (
    Problem("causal, 64 per member", 64, heads=8, key_heads=8, head_dim=16, options={"causal": True}, dtype="float32"),
    Problem("full, 64 per member", 64, heads=8, key_heads=8, head_dim=16, options={}, dtype="float32"),
)


def configuration(problem: Problem, members: int) -> Configuration:
    """The configuration of the first member, without arrays of that size."""
    one = np.empty(1, numpy_dtype(problem.dtype))
    arrays = {
        name: np.lib.stride_tricks.as_strided(one, shape, (one.itemsize,) * 4)
        for name, shape in zip("qkv", problem.shapes(problem.length), strict=True)
    }
    return configure(0, members, arrays, problem.options, (None, None))


def operations(problem: Problem, members: int, backward: bool) -> float:
    """The operations of the whole problem on one GPU."""
    whole = configuration(problem._replace(length=problem.length * members), 1)
    work = sum(part.work for part in whole.whole[0])
    return 2.0 * work * (5 if backward else 2) * problem.head_dim * problem.heads


def predicted(problem: Problem, members: int, method: str, backward: bool, machine: Machine) -> Cost | None:
    """The cost of a pass for one member; None if the method cannot run."""
    config = configuration(problem, members)
    return None if method in config.refusals else cost(config, method, backward, machine)


def rows(problem: Problem, machine: Machine, sizes: tuple[int, ...] = (2, 4, 8)) -> Iterator[dict[str, Any]]:
    """The predictions for several numbers of GPUs and every method.

    ``of_ideal`` is the time of one GPU divided by the number of GPUs, by the predicted time.
    """
    for members in sizes:
        for method in METHODS:
            costs = [predicted(problem, members, method, backward, machine) for backward in (False, True)]
            times, ideals = [], []
            for backward, found in enumerate(costs):
                if found is None:
                    continue
                rate = machine.backward if backward else machine.forward
                times.append(found.seconds)
                ideals.append(operations(problem, members, bool(backward)) / rate / members)
            if len(times) < 2:
                continue
            forward, backward_cost = costs
            assert forward is not None
            assert backward_cost is not None
            yield {
                "kind": "model", "problem": problem.name, "members": members, "gpus": members, "method": method,
                "forward_ms": round(times[0] * 1e3, 3), "forward_of_ideal": round(ideals[0] / times[0], 3),
                "both_ms": round(sum(times) * 1e3, 3), "both_of_ideal": round(sum(ideals) / sum(times), 3),
                "forward_sent_mib": round(forward.sent / 2**20, 1), "backward_sent_mib": round(backward_cost.sent / 2**20, 1),
                "memory_mib": round(max(forward.memory, backward_cost.memory) / 2**20, 1),
            }  # fmt: skip
