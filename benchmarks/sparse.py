"""Block masks against FlexAttention's: the same functions and arrays in one run, interleaved; forward, and both passes.

    python -m benchmarks sparse [results.csv] [--only NAME ...] [--lengths N ...]

bfloat16, batch 1, 16 heads, head dim 128. Both have their block mask before the measurement; FlexAttention is compiled. Times
are by CUDA events, as in ``compare``. An error is the largest difference from PyTorch in float64 with the whole score matrix,
of two heads and at most 8192 positions, divided by the largest magnitude. Several processes with different names fill PyTorch's
cache of compiled kernels faster. Needs PyTorch and Triton in addition to CuPy.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cupy_sdpa
from cupy_sdpa import zoo
from cupy_sdpa.cli.console import positive

from . import runner
from .device import free_memory, input_sets, random_normal, timed
from .timing import host_us, ratio

#: Heads and head dim, lengths, queries and keys per block, average document length, window size.
H, D, LENGTHS, BLOCK, DOCUMENT, WINDOW = 16, 128, (8192, 32768), 128, 1024, 1024
#: The longest problem whose errors are computed, and the number of heads of which they are.
EXACT_LENGTH, EXACT_HEADS = 8192, 2
ROUNDS = 11

Call = Callable[[], Any]


class Pattern(NamedTuple):
    """A mask function that runs on numpy, CuPy and PyTorch arrays alike; ``tensors`` makes its arrays."""

    name: str
    mask_mod: Callable[..., Any]
    tensors: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}


def patterns(length: int) -> list[Pattern]:
    """Return the sparse masks of a length."""

    def documents_of(rng: np.random.Generator) -> Any:
        return np.sort(rng.integers(0, length // DOCUMENT, length)).astype(np.int32)  # of random lengths

    def one_in_eight(rng: np.random.Generator) -> Any:
        count = length // BLOCK
        return (rng.random((count, count)) < 1 / 8) | np.eye(count, dtype=bool)

    return [
        Pattern("document", same_document, lambda rng: {"document": documents_of(rng)}),
        Pattern("causal_document", zoo.causal_document, lambda rng: {"document_id": documents_of(rng)}),
        Pattern("window", zoo.sliding_window(WINDOW - 1)),
        Pattern("prefix", prefix, lambda rng: {"end": np.array([length // 4], np.int32)}),
        Pattern("dilated", zoo.dilated(WINDOW, 2)),
        Pattern("neighbourhood", zoo.image_window(BLOCK, 8)),
        Pattern("block_diagonal", same_document, lambda rng: {"document": (np.arange(length) // DOCUMENT).astype(np.int32)}),
        Pattern("random", in_blocks, lambda rng: {"blocks": one_in_eight(rng)}),
    ]


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any, document: Any) -> Any:
    """Query and key are in the same document; ``document`` (Sq,)."""
    return document[q_idx] == document[kv_idx]


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any, end: Any) -> Any:
    """``j <= i or j < end``, ``end`` (1,)."""
    return (kv_idx < end[0]) | (q_idx >= kv_idx)


def in_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any, blocks: Any) -> Any:
    """Return the blocks of query and key are listed; ``blocks`` bool (query blocks, key blocks)."""
    return blocks[q_idx // BLOCK, kv_idx // BLOCK]


def bhsd(array: Any) -> Any:
    """Return a contiguous copy ``(B, H, S, D)``, FlexAttention's fastest layout."""
    return torch.from_dlpack(array).permute(3, 1, 2, 0).contiguous()


def error(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference of any result divided by its largest magnitude."""
    pairs = zip(results, expected, strict=True)
    return max(float((x[:, :EXACT_HEADS].double() - y).abs().max() / y.abs().max()) for x, y in pairs)


def exact(mask_mod: Callable[..., Any], inputs: Sequence[Any], dout: Any) -> list[Any]:
    """Return the output and the gradients in float64, from the whole score matrix of some heads."""
    leaves = [x[:, :EXACT_HEADS].detach().double().requires_grad_() for x in inputs]
    rows, zero = torch.arange(dout.shape[2], device="cuda"), torch.zeros((), dtype=torch.long, device="cuda")
    attends = mask_mod(zero, zero, rows[:, None], rows[None, :])
    scores = (leaves[0] @ leaves[1].mT / math.sqrt(D)).masked_fill(~attends, -math.inf)
    out = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout[:, :EXACT_HEADS].double())]


def measure(pattern: Pattern, length: int) -> dict[str, Any]:
    """Return one row of the table."""
    arrays = {name: cupy.asarray(x) for name, x in pattern.tensors(np.random.default_rng(0)).items()}
    tensors = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    mask_mod = functools.partial(pattern.mask_mod, **tensors)
    torch._dynamo.reset()
    block_mask = create_block_mask(lambda b, h, i, j: mask_mod(b, h, i, j), None, None, length, length, device="cuda")
    flex = functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=block_mask)
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    mask = cupy_sdpa.block_mask(pattern.mask_mod, length, length, tensors=arrays)
    row: dict[str, Any] = {
        "name": pattern.name, "length": length, "sparsity": round(mask.sparsity, 3), "partial": mask.partial,
        "blocks": mask.blocks, "create_s": round(time.perf_counter() - begin, 3), "error": "", "flex_error": "",
    }  # fmt: skip
    calls: dict[str, dict[str, list[Call]]] = {name: {"ours": [], "flex": []} for name in ("forward", "both")}
    for number in range(input_sets(4 * 2 * length * H * D)):
        q, k, v, dout = (random_normal(D, H, length, 1) for _ in range(4))
        leaves, gradient = [bhsd(x).requires_grad_() for x in (q, k, v)], bhsd(dout)
        detached = [x.detach() for x in leaves]
        ours, theirs = functools.partial(both, mask, q, k, v, dout), functools.partial(both_by_flex, flex, leaves, gradient)
        results = theirs()
        flex(*detached)
        if number == 0 and length <= EXACT_LENGTH:
            expected = exact(mask_mod, leaves, gradient)
            row["error"], row["flex_error"] = (f"{error(found, expected):.1e}" for found in ([*map(bhsd, ours())], results))
            del expected
        del results
        calls["forward"]["ours"].append(functools.partial(cupy_sdpa.attention, q, k, v, block_mask=mask))
        calls["forward"]["flex"].append(functools.partial(flex, *detached))
        calls["both"]["ours"].append(ours)
        calls["both"]["flex"].append(theirs)
        free_memory()
    for direction, several in calls.items():
        times = timed(several, ROUNDS)
        ms = {name: statistics.median(found) for name, found in times.items()}
        row |= {f"{direction}_us": round(1e3 * ms["ours"], 1), f"{direction}_flex_us": round(1e3 * ms["flex"], 1)}
        row |= {f"{direction}_ratio": round(ratio(times["ours"], times["flex"]), 3)}
        row |= {f"{direction}_host_us": round(host_us(several["ours"][0], 30), 1)}
    return row


def both(mask: Any, q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    """Our output and gradients."""
    out, stats = cupy_sdpa.attention(q, k, v, block_mask=mask, return_stats=True)
    return [out, *cupy_sdpa.attention_backward(dout, q, k, v, out, stats, block_mask=mask)]


def both_by_flex(flex: Callable[..., Any], leaves: Sequence[Any], dout: Any) -> list[Any]:
    """FlexAttention's output and gradients."""
    out = flex(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all patterns."""
    for length in given.lengths:
        for pattern in patterns(length):
            if given.only is None or pattern.name in given.only:
                yield measure(pattern, length)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    names = [pattern.name for pattern in patterns(BLOCK)]
    parser.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--lengths", nargs="*", type=positive, default=LENGTHS, metavar="N", help="the numbers of queries and keys"
    )


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("sparse", __doc__, words, rows, add_options)
