"""Padded batches with lengths against the same sequences packed: kernel time, memory and results, both passes.

    python -m benchmarks padded [results.csv] [--lengths N ...]

bfloat16, 32 query and 8 key/value heads, head dim 128, batch 4, lengths between half and all of the padded length. The
padding is full of NaN. Both forms are timed by CUDA events in shuffled order, after other work that hides the host's time; the
ratios are medians of the ratios within a round. ``extra_bytes`` is what a call on the padded batch allocates besides cuDNN's
workspace. The exit status is 1 if a result of the padded batch differs from that of the packed sequences.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cupy
import numpy as np

from cupy_sdpa import attention, attention_backward, explain
from cupy_sdpa.cli.console import positive

from . import runner
from .device import largest_difference, random_normal, timed
from .timing import ratio

HEADS, KEY_HEADS, HEAD_DIM, BATCH = 32, 8, 128, 4
LENGTHS = (512, 2048, 8192)
ROUNDS = 11
#: The largest accepted difference, relative to the largest magnitude.
TOLERANCE = 0.02
Call = Callable[[], Any]


def options() -> dict[str, dict[str, Any]]:
    """The options of each row; all of them are also options of packed sequences."""
    return {
        "none": {}, "causal": {"causal": True}, "bottom_right": {"causal": "bottom_right"},
        "window": {"causal": True, "window": (255, 0)}, "alibi_slopes": {"alibi_slopes": cupy.full(HEADS, 0.1, np.float32)},
        "softcap": {"softcap": 20.0}, "sinks": {"sinks": cupy.full(HEADS, 0.5, np.float32)},
    }  # fmt: skip


class Batch:
    """Sequences of random lengths, padded with NaN and packed.

    Args:
        longest: the padded length; the first sequence has it.
    """

    def __init__(self, longest: int) -> None:
        rng = np.random.default_rng(longest)
        self.lengths = np.array([longest, *rng.integers(longest // 2, longest + 1, BATCH - 1)])
        ends = np.cumsum([0, *self.lengths])
        device = cupy.asarray(self.lengths.astype(np.int32))
        starts = cupy.asarray(ends.astype(np.int32))
        bounds = {"max_seqlen_q": longest, "max_seqlen_kv": longest, "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        self.forms: dict[str, dict[str, Any]] = {"padded": {"seq_lens_q": device, "seq_lens_kv": device}, "packed": bounds}
        padded = [random_normal(HEAD_DIM, heads, longest, BATCH) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
        for x in padded:
            for entry, length in enumerate(self.lengths):
                x[:, :, int(length) :, entry] = cupy.nan
        self.arrays = {"padded": padded, "packed": [self.packed(x) for x in padded]}

    def packed(self, x: Any) -> Any:
        """The sequences of a padded array one after the other, without padding."""
        entries = [x[..., : int(n), entry] for entry, n in enumerate(self.lengths)]
        return cupy.asfortranarray(cupy.concatenate(entries, axis=-1))


def calls(batch: Batch, form: str, given: Mapping[str, Any]) -> dict[str, tuple[Call, list[Any]]]:
    """The call of each pass, and its results."""
    q, k, v, dout = batch.arrays[form]
    every = {**batch.forms[form], **given}
    out, stats = attention(q, k, v, return_stats=True, **every)
    results = [cupy.empty_like(x) for x in (q, k, v)]
    into = dict(zip(("dq", "dk", "dv"), results, strict=True))
    return {
        "forward": (functools.partial(attention, q, k, v, out=out, **every), [out]),
        "backward": (functools.partial(attention_backward, dout, q, k, v, out, stats, **into, **every), results),
    }


def allocated(call: Call) -> int:
    """The bytes that a call allocates."""
    sizes: list[int] = []

    def allocate(size: int) -> Any:
        sizes.append(size)
        return cupy.get_default_memory_pool().malloc(size)

    call()  # creates the plan
    with cupy.cuda.using_allocator(allocate):
        call()
    return sum(sizes)


def rows(longest: int) -> Iterator[dict[str, Any]]:
    """A row for every option and pass of a padded length."""
    batch = Batch(longest)
    for name, given in options().items():
        forms = {form: calls(batch, form, given) for form in batch.forms}
        for direction in ("forward", "backward"):
            made = {form: found[direction] for form, found in forms.items()}
            extra = allocated(made["padded"][0])
            q, k, v, _ = batch.arrays["padded"]
            report = explain(q, k, v, backward=direction == "backward", **batch.forms["padded"], **given)
            times = timed({form: [call] * 4 for form, (call, _) in made.items()}, ROUNDS)
            pairs = [(batch.packed(a), b) for a, b in zip(made["padded"][1], made["packed"][1], strict=True)]
            difference = max(largest_difference([a], [b]) for a, b in pairs)
            yield {
                "length": longest, "option": name, "direction": direction,
                **{f"{form}_ms": round(statistics.median(several), 4) for form, several in times.items()},
                "ratio": round(ratio(times["padded"], times["packed"]), 3),
                "extra_bytes": extra - (report.plan.workspace if report.plan else 0),
                "form": "offsets" if "not read" in str(report) else "copies",
                "difference": f"{difference:.1e}",
            }  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Run the benchmark; returns 1 if results differ."""
    found: list[dict[str, Any]] = []

    def every(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for longest in given.lengths:
            for row in rows(longest):
                found.append(row)
                yield row

    runner.run("padded", __doc__, words, every, lambda parser: parser.add_argument(
        "--lengths", nargs="+", type=positive, default=LENGTHS, metavar="N", help="the padded lengths"
    ))  # fmt: skip
    for direction in ("forward", "backward"):
        ratios = [row["ratio"] for row in found if row["direction"] == direction]
        print(
            f"{direction}: padded / packed: geometric mean {statistics.geometric_mean(ratios):.3f}, largest {max(ratios):.3f}"
        )
    return int(any(not float(row["difference"]) < TOLERANCE for row in found))
