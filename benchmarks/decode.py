"""Decoding with a paged key/value cache: one and four queries, and a shared prefix, against PyTorch and FlashInfer.

    python -m benchmarks decode [results.csv] [--only BATCH,KEYS ...]

bfloat16, 32 query and 8 key/value heads, head dim 128, pages of 64 keys. Every contender is captured in a CUDA graph of several
calls on different keys, so that no key is in the L2 cache. Times are medians over rounds in shuffled order. The rate is the
bytes of the keys and values by the time, relative to a copy on the device in the same run. PyTorch reads dense keys and values;
FlashInfer and this package read pages in random order.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupy_sdpa
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype

from . import runner
from .device import copy_gbs, input_sets
from .timing import CapturedCalls, interleaved, ratio

HEADS, KEY_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
#: (batch, keys)
PROBLEMS = ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768), (32, 4096), (32, 8192), (32, 32768))
#: (batch, keys of the shared prefix, other keys)
PREFIXES = ((32, 32768, 64), (32, 32768, 1024))
ROUNDS = 11
#: The smallest number of calls in a graph.
CALLS = 8

Call = Callable[[], Any]


class Keys:
    """Random keys and values of a batch, in pages in random order, and dense for PyTorch.

    Args:
        batch: the number of sequences.
        keys: their length.
        pages: the number of pages; by default the pages of all sequences.
        dense: whether the dense copy is needed.
    """

    def __init__(self, batch: int, keys: int, pages: int | None = None, *, dense: bool = True) -> None:
        width = keys // PAGE
        count = pages or width * batch
        self.k, self.v = (_normal(HEAD_DIM, PAGE, KEY_HEADS, count).transpose(0, 2, 1, 3) for _ in range(2))
        order = np.random.default_rng(0).permutation(count).astype(np.int32)
        self.order = cupy.asarray(order)
        if pages is None:
            self.table = cupy.asarray(np.asfortranarray(order.reshape(width, batch)))
        self.lengths = cupy.full(batch, keys, np.int32)
        if dense:
            self.dense = [torch.randn(batch, KEY_HEADS, keys, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)]


def _normal(*shape: int) -> Any:
    """Random bfloat16 numbers, made by PyTorch, which needs no float32 copy."""
    made = torch.randn(*reversed(shape), dtype=torch.bfloat16, device="cuda")
    bits = cupy.from_dlpack(made.view(torch.int16))
    return bits.view(numpy_dtype("bfloat16")).T


def ours(sets: Sequence[Keys], queries: int, **options: Any) -> list[Call]:
    """Return one call for each set."""
    calls: list[Call] = []
    for keys in sets:
        q = cupy.asfortranarray(_normal(HEAD_DIM, HEADS, queries, keys.lengths.size))
        pages = {"page_table": keys.table, "seq_lens_kv": keys.lengths, "out": cupy.empty_like(q), **options}
        if queries > 1:
            pages["causal"] = "bottom_right"
        calls.append(functools.partial(cupy_sdpa.attention, q, keys.k, keys.v, **pages))
    return calls


def pytorch(sets: Sequence[Keys], queries: int, backend: Any) -> list[Call]:
    """PyTorch's attention on dense keys and values; a causal mask for several queries would be aligned top left."""

    def call(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    shape = (sets[0].lengths.size, HEADS, queries, HEAD_DIM)
    return [functools.partial(call, torch.randn(shape, dtype=torch.bfloat16, device="cuda"), *keys.dense) for keys in sets]


def flashinfer(sets: Sequence[Keys], queries: int) -> list[Call]:
    """FlashInfer's kernels for paged keys and values; the plan on the host is made before."""
    library: Any = importlib.import_module("flashinfer")

    batch, keys = sets[0].lengths.size, int(sets[0].lengths[0])
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    width = keys // PAGE
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * width
    last = torch.full((batch,), PAGE, dtype=torch.int32, device="cuda")
    indices = torch.from_dlpack(sets[0].table.ravel(order="F"))
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if queries == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(starts, indices, last, HEADS, KEY_HEADS, HEAD_DIM, PAGE, **types)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        query_starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * queries
        wrapper.plan(query_starts, starts, indices, last, HEADS, KEY_HEADS, HEAD_DIM, PAGE, causal=True, **types)
    q = torch.randn(batch * queries, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    calls: list[Call] = []
    for one in sets:
        pages = tuple(torch.from_dlpack(x.transpose(0, 2, 1, 3).T.view(np.int16)).view(torch.bfloat16) for x in (one.k, one.v))
        calls.append(functools.partial(wrapper.run, q, pages))
    return calls


def timers(batch: int, keys: int) -> dict[str, CapturedCalls]:
    """Return the timer of every contender that runs here."""
    size = 4 * batch * keys * KEY_HEADS * HEAD_DIM
    sets = [Keys(batch, keys) for _ in range(min(8, input_sets(size)))]
    made: dict[str, CapturedCalls] = {}
    contenders: dict[str, tuple[str, Callable[[], list[Call]]]] = {}
    for queries in (1, 4):
        contenders |= {
            f"ours, {queries}": ("cupy", functools.partial(ours, sets, queries)),
            f"PyTorch cuDNN, {queries}": ("torch", functools.partial(pytorch, sets, queries, SDPBackend.CUDNN_ATTENTION)),
            f"PyTorch flash, {queries}": ("torch", functools.partial(pytorch, sets, queries, SDPBackend.FLASH_ATTENTION)),
            f"FlashInfer, {queries}": ("torch", functools.partial(flashinfer, sets, queries)),
        }
    contenders["ours, 1, num_splits"] = ("cupy", functools.partial(ours, sets, 1, num_splits=max(1, 16 // batch)))
    for name, (captured_by, make) in contenders.items():
        try:
            made[name] = CapturedCalls(make(), CALLS, captured_by)
        except Exception as error:  # a peer that is missing, or cannot run this
            print(f"  {name} does not run: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    return made


def decode_rows(batch: int, keys: int) -> Iterator[dict[str, Any]]:
    """Yield a row for every contender of one problem."""
    times = interleaved(timers(batch, keys), ROUNDS)
    copy_rate = copy_gbs() * 1e3  # bytes per microsecond
    size = 4 * batch * keys * KEY_HEADS * HEAD_DIM
    for name, measured in times.items():
        contender, _, rest = name.partition(", ")
        queries, _, option = rest.partition(", ")
        us = statistics.median(measured)
        yield {
            "problem": "decode", "batch": batch, "keys": keys, "queries": int(queries), "contender": contender,
            "option": option, "us": round(us, 1), "of_copy": round(size / us / copy_rate, 3),
            "of_one_query": round(ratio(measured, times[f"{contender}, 1"]), 2) if f"{contender}, 1" in times else "",
            "of_ours": round(ratio(measured, times[f"ours, {queries}"]), 2),
        }  # fmt: skip


def prefix_rows(batch: int, prefix: int, rest: int) -> Iterator[dict[str, Any]]:
    """Yield a shared prefix: read once, read by every sequence, and alone by one sequence."""
    own = rest // PAGE * batch
    keys = Keys(batch, prefix + rest, prefix // PAGE + own, dense=False)
    shared, others = keys.order[: prefix // PAGE], keys.order[prefix // PAGE :]
    columns = [cupy.broadcast_to(shared[:, None], (shared.size, batch)), others.reshape((rest // PAGE, batch), order="F")]
    keys.table = cupy.asfortranarray(cupy.concatenate(columns))
    alone, suffix = Keys(1, prefix, dense=False), Keys(batch, rest, dense=False)
    q = cupy.asfortranarray(_normal(HEAD_DIM, HEADS, 1, batch))
    call = functools.partial(
        cupy_sdpa.shared_prefix_attention, q, keys.k, keys.v, prefix, page_table=keys.table, seq_lens_kv=keys.lengths
    )
    made = {
        "shared prefix": CapturedCalls([call], CALLS),
        "not shared": CapturedCalls(ours([keys], 1), CALLS),
        "one sequence, the prefix": CapturedCalls(ours([alone], 1), CALLS),
        "the other keys": CapturedCalls(ours([suffix], 1), CALLS),
    }
    times = interleaved(made, ROUNDS)
    for name, measured in times.items():
        yield {
            "problem": "prefix", "batch": batch, "keys": prefix + rest, "queries": 1, "contender": "ours", "option": name,
            "us": round(statistics.median(measured), 1), "of_copy": "", "of_one_query": "",
            "of_ours": round(ratio(measured, times["one sequence, the prefix"]), 2),
        }  # fmt: skip


def _problem(text: str) -> tuple[int, int]:
    """Parse a batch size and a number of keys."""
    try:
        batch, keys = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a batch size and a number of keys such as 8,4096") from None
    return batch, keys


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all problems and of shared prefixes."""
    for problem in given.only or PROBLEMS:
        yield from decode_rows(*problem)
    for prefix in PREFIXES:
        yield from prefix_rows(*prefix)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--only", nargs="+", type=_problem, metavar="BATCH,KEYS", help="only these problems")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("decode", __doc__, words, rows, add_options)
