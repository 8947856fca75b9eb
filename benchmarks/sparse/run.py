"""Block masks against FlexAttention's: the same functions and arrays in one run, interleaved; forward, and both passes.

    python -m benchmarks sparse [results.csv] [--only NAME ...] [--lengths N ...] [--compile]

bfloat16, batch 1, 16 heads, head dim 128. Both have their block mask before the measurement; FlexAttention is compiled. Times
are by CUDA events, as in ``compare``. An error is the largest difference from PyTorch in float64 with the whole score matrix,
of two heads and at most 8192 positions, divided by the largest magnitude. Some patterns at a time take less than 100 seconds.
Needs PyTorch and Triton besides CuPy.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cupy_sdpa
from cupy_sdpa._cli.helpers.console import positive

from ..common.device import busy_matrix, free_memory, input_sets, random_normal
from ..common.machine import versions
from ..common.script import add_csv, check_gpu, listed, parser, write_csv
from ..common.timing import device_ms, host_us, interleaved, ratio
from .problems import PATTERNS, Pattern

H, D = 16, 128
LENGTHS = (8192, 32768)
#: The longest problem whose errors are computed, and the number of heads of which they are.
EXACT_LENGTH, EXACT_HEADS = 8192, 2
ROUNDS, PRODUCTS = 11, 24


def bhsd(array: Any) -> Any:
    """A contiguous copy ``(B, H, S, D)``, FlexAttention's fastest layout."""
    return torch.from_dlpack(array).permute(3, 1, 2, 0).contiguous()


def in_torch(pattern: Pattern, arrays: dict[str, Any]) -> Callable[..., Any]:
    """The mask function of a pattern with PyTorch's tensors."""
    tensors = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    return lambda b, h, q_idx, kv_idx: pattern.mask_mod(b, h, q_idx, kv_idx, **tensors)


def exact(mask_mod: Callable[..., Any], inputs: Sequence[Any], dout: Any) -> list[Any]:
    """The output and the gradients in float64, from the whole score matrix of some heads."""
    leaves = [x[:, :EXACT_HEADS].detach().double().requires_grad_() for x in inputs]
    rows = torch.arange(dout.shape[2], device="cuda")
    zero = torch.zeros((), dtype=torch.long, device="cuda")
    attends = mask_mod(zero, zero, rows[:, None], rows[None, :])
    scores = (leaves[0] @ leaves[1].mT / math.sqrt(D)).masked_fill(~attends, -math.inf)
    out = torch.softmax(scores, dim=-1).nan_to_num(0.0) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout[:, :EXACT_HEADS].double())]


def error(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference of any result divided by its largest magnitude."""
    pairs = zip(results, expected, strict=True)
    return max(float((x[:, :EXACT_HEADS].double() - y).abs().max() / y.abs().max()) for x, y in pairs)


class Flex:
    """FlexAttention with a pattern."""

    def __init__(self, mask_mod: Callable[..., Any], length: int) -> None:
        torch._dynamo.reset()
        self.block_mask = create_block_mask(mask_mod, None, None, length, length, device="cuda")
        self._compiled = torch.compile(flex_attention, dynamic=False)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        """The output."""
        return self._compiled(q, k, v, block_mask=self.block_mask)

    def both(self, leaves: Sequence[Any], dout: Any) -> list[Any]:
        """The output and the gradients."""
        out = self.forward(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def ours_both(mask: Any, q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    """Our output and gradients."""
    out, stats = cupy_sdpa.attention(q, k, v, block_mask=mask, return_stats=True)
    return [out, *cupy_sdpa.attention_backward(dout, q, k, v, out, stats, block_mask=mask)]


def measure(pattern: Pattern, length: int, only_compile: bool) -> dict[str, Any]:
    """One row of the table."""
    arrays = {name: cupy.asarray(x) for name, x in pattern.tensors(length, np.random.default_rng(0)).items()}
    mask_mod = in_torch(pattern, arrays)
    flex = Flex(mask_mod, length)
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    mask = cupy_sdpa.block_mask(pattern.mask_mod, length, length, tensors=arrays)
    row: dict[str, Any] = {
        "name": pattern.name, "length": length, "sparsity": round(mask.sparsity, 3), "partial": mask.partial,
        "blocks": mask.blocks, "create_s": round(time.perf_counter() - begin, 3),
    }  # fmt: skip
    timers: dict[str, dict[str, list[Callable[[], Any]]]] = {
        direction: {"ours": [], "flex": []} for direction in ("forward", "both")
    }
    for number in range(input_sets(4 * 2 * length * H * D)):
        q, k, v, dout = (random_normal(D, H, length, 1) for _ in range(4))
        leaves, gradient = [bhsd(x).requires_grad_() for x in (q, k, v)], bhsd(dout)
        inference = [x.detach() for x in leaves]
        results = flex.both(leaves, gradient)
        flex.forward(*inference)
        if only_compile:
            return row
        own = ours_both(mask, q, k, v, dout)
        if number == 0 and length <= EXACT_LENGTH:
            expected = exact(mask_mod, leaves, gradient)
            row["error"] = f"{error([bhsd(x) for x in own], expected):.1e}"
            row["flex_error"] = f"{error(results, expected):.1e}"
            del expected
        elif number == 0:
            row["error"] = row["flex_error"] = ""
        timers["forward"]["ours"].append(functools.partial(cupy_sdpa.attention, q, k, v, block_mask=mask))
        timers["forward"]["flex"].append(functools.partial(flex.forward, *inference))
        timers["both"]["ours"].append(functools.partial(ours_both, mask, q, k, v, dout))
        timers["both"]["flex"].append(functools.partial(flex.both, leaves, gradient))
        del results, own
        free_memory()
    busy, _ = busy_matrix()
    for direction, calls in timers.items():
        for several in calls.values():  # so that repeated calls are captured before the measurement
            for _ in range(4):
                for call in several:
                    call()
        by_name = {name: functools.partial(device_ms, several, busy, PRODUCTS) for name, several in calls.items()}
        times = interleaved(by_name, ROUNDS)
        row[f"{direction}_us"], row[f"{direction}_flex_us"] = (
            round(1e3 * statistics.median(times[x]), 1) for x in ("ours", "flex")
        )
        row[f"{direction}_ratio"] = round(ratio(times["ours"], times["flex"]), 3)
        row[f"{direction}_host_us"] = round(host_us(calls["ours"][0], 30), 1)
    return row


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    arguments = parser("sparse", __doc__)
    add_csv(arguments)
    names = [pattern.name for pattern in PATTERNS]
    arguments.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    arguments.add_argument(
        "--lengths", nargs="*", type=positive, default=LENGTHS, metavar="N", help="the numbers of queries and keys"
    )
    arguments.add_argument("--compile", action="store_true", help="compile FlexAttention only; no measurement")
    chosen = arguments.parse_args(words)
    check_gpu("sparse")
    used = versions(torch=torch.__version__)
    print(listed(used))
    rows = []
    for length in chosen.lengths:
        for pattern in PATTERNS:
            if chosen.only is None or pattern.name in chosen.only:
                row = measure(pattern, length, chosen.compile)
                print(listed(row), flush=True)
                rows.append(row | used)
                free_memory()
    if chosen.csv and rows and not chosen.compile:
        write_csv(chosen.csv, rows)
    return 0
