"""Score and mask functions beside FlexAttention: the same functions, arrays and run, interleaved; both passes.

    python benchmarks/functions.py [results.csv] [--only NAME ...] [--compile]

The functions are those of :mod:`cupy_sdpa.zoo`; FlexAttention gets the very same code, with PyTorch's functions in the place
of numpy's, compiled, and with a block mask where there is a mask function. Errors are against PyTorch in float64, the whole
matrix of scores and its own derivative, as the largest difference over the largest magnitude. Times are by CUDA events, as in
``cupy_sdpa.bench``; the copies that our calls make of masks and arrays count, making FlexAttention's block mask does not.
``--compile`` has PyTorch compile, and measures nothing: several such processes, each with other functions, fill its cache.
Needs PyTorch and Triton beside CuPy.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np
import torch
from common import L2_BYTES, device_ms, host_us, interleaved, random_normal, ratio, versions, write_csv
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cupy_sdpa
from cupy_sdpa import zoo
from cupy_sdpa.bench.measure import busy_matrix

B, HQ, HKV, S, D = 2, 16, 4, 4096, 128
ROUNDS = 15
RESULTS = ("out", "dq", "dk", "dv")


class Entry(NamedTuple):
    """A function of the zoo, and what makes the arrays that it reads from a generator of random numbers."""

    name: str
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    tensors: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}


def floats(array: Any) -> Any:
    """As float32."""
    return np.asarray(array, np.float32)


def documents(rng: np.random.Generator, *batch: int) -> Any:
    """Eight documents behind one another."""
    return np.sort(rng.integers(0, 8, (*batch, S)), axis=-1).astype(np.int32)


ENTRIES = [
    Entry("softcap", zoo.softcap(2.0), zoo.causal),
    Entry("alibi", zoo.alibi, zoo.causal, lambda rng: {"slopes": cupy_sdpa.alibi_slopes(HQ)}),
    Entry("alibi_by_index", zoo.alibi_by_index(HQ)),
    Entry("relative_position", zoo.relative_position, zoo.causal),
    Entry("relative_causal", zoo.relative_causal),
    Entry("bias", zoo.bias, None, lambda rng: {"bias": floats(rng.standard_normal((HQ, S, S)))}),
    Entry("head_bias", zoo.head_bias, None, lambda rng: {"bias": floats(rng.standard_normal(HQ) / 100)}),
    Entry("key_bias", zoo.key_bias, None, lambda rng: {"weight": floats(rng.standard_normal((B, S)))}),
    Entry("temperature", zoo.temperature, None, lambda rng: {"temperature": floats(rng.random(HQ) + 0.5)}),
    Entry("length_scaled", zoo.length_scaled(0.2)),
    Entry("kerple", zoo.kerple, None, lambda rng: {"r1": floats(rng.random(HQ)), "r2": floats(rng.random(HQ))}),
    Entry("gaussian", zoo.gaussian(200.0)),
    Entry("decayed", zoo.decayed(0.01)),
    Entry("periodic", zoo.periodic(0.3)),
    Entry("clipped", zoo.clipped(-0.7, 1.1)),
    Entry("softsign", zoo.softsign),
    Entry("quadratic", zoo.quadratic(0.3)),
    Entry("squared_relu", zoo.squared_relu),
    Entry("root", zoo.root),
    Entry("same_segment", zoo.same_segment(1.5), zoo.causal, lambda rng: {"segment": documents(rng, B)}),
    Entry("causal", None, zoo.causal),
    Entry("sliding_window", None, zoo.sliding_window(1023)),
    Entry("nearby", None, zoo.nearby(512)),
    Entry("prefix_lm", None, zoo.prefix_lm, lambda rng: {"prefix": rng.integers(0, S, B).astype(np.int32)}),
    Entry("document", None, zoo.document, lambda rng: {"document_id": documents(rng, B)}),
    Entry("causal_document", None, zoo.causal_document, lambda rng: {"document_id": documents(rng)}),
    Entry("document_softcap", zoo.softcap(2.0), zoo.document, lambda rng: {"document_id": documents(rng, B)}),
    Entry("dilated", None, zoo.dilated(1024, 2)),
    Entry("chunked", None, zoo.chunked(1024)),
    Entry("block_sparse", None, zoo.block_sparse(128, 8)),
    Entry("natten", None, zoo.natten(64, 6)),
    Entry("with_global", None, zoo.with_global(512, 64)),
    Entry("streaming", None, zoo.streaming(1024, 4)),
    Entry("head_windows", None, zoo.head_windows, lambda rng: {"size": rng.integers(64, 2048, HQ).astype(np.int32)}),
    Entry("permuted", None, zoo.permuted, lambda rng: {"order": rng.permutation(S).astype(np.int32)}),
    Entry("valid_keys", None, zoo.valid_keys, lambda rng: {"valid": rng.random((B, S)) < 0.7}),
    Entry("images", None, zoo.images, lambda rng: {"image": documents(rng, B) - 1}),
    Entry("checkered", None, zoo.checkered),
]


class Torch:
    """PyTorch's functions by numpy's names, for code that says ``np.tanh``."""

    inf = math.inf
    tanh, exp, cos, sqrt, where, clip = torch.tanh, torch.exp, torch.cos, torch.sqrt, torch.where, torch.clamp

    @staticmethod
    def log(x: Any) -> Any:
        """Of numbers, too."""
        return math.log(x) if isinstance(x, (int, float)) else torch.log(x)


#: A module of its own, for the compiler looks names up in the module that a function says it is of.
ZOO = types.ModuleType("zoo_in_torch")
sys.modules[ZOO.__name__] = ZOO
vars(ZOO).update({name: value for name, value in vars(zoo).items() if name != "__name__"}, np=Torch)


def as_torch_function(function: Callable[..., Any] | None, arrays: dict[str, Any]) -> Any:
    """The same code with PyTorch's functions and arrays; None of None."""
    if function is None:
        return None
    assert isinstance(function, types.FunctionType)
    code = function.__code__
    same = types.FunctionType(code, vars(ZOO), function.__name__, function.__defaults__, function.__closure__)
    wanted = {name: array for name, array in arrays.items() if name in code.co_varnames[: code.co_argcount]}
    if code.co_argcount - len(wanted) == 5:
        return lambda score, b, h, q_idx, kv_idx: same(score, b, h, q_idx, kv_idx, **wanted)
    return lambda b, h, q_idx, kv_idx: same(b, h, q_idx, kv_idx, **wanted)


class Flex:
    """FlexAttention with an entry's functions."""

    def __init__(self, entry: Entry, arrays: dict[str, Any]) -> None:
        torch._dynamo.reset()
        given = {name: torch.from_dlpack(array) for name, array in arrays.items()}
        self.score_mod, mask_mod = (as_torch_function(f, given) for f in (entry.score_mod, entry.mask_mod))
        self.mask_mod, block_mask = mask_mod, None
        if mask_mod:
            of_batch, of_heads = (B, HQ) if given else (None, None)
            block_mask = create_block_mask(mask_mod, of_batch, of_heads, S, S, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        self.options = {"score_mod": self.score_mod, "block_mask": block_mask, "enable_gqa": True}
        self._compiled = compiled

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """The output, ``(B, H, S, D)``."""
        return self._compiled(q, k, v, **self.options)

    def exactly(self, q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
        """The output and the gradients in float64, from the whole matrix of scores."""
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        wide = [leaves[0], *(x.repeat_interleave(HQ // HKV, dim=1) for x in leaves[1:])]
        places = [torch.arange(n, device="cuda").reshape(shape) for n, shape in
                  ((B, (-1, 1, 1, 1)), (HQ, (-1, 1, 1)), (S, (-1, 1)), (S, (-1,)))]  # fmt: skip
        scores = wide[0] @ wide[1].mT / math.sqrt(D)
        if self.score_mod:
            scores = self.score_mod(scores, *places)
        if self.mask_mod:
            scores = scores.masked_fill(~self.mask_mod(*places), -math.inf)
        # a row that sees nothing gives 0
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0) if self.mask_mod else torch.softmax(scores, dim=-1)
        out = weights @ wide[2]
        gradients = torch.autograd.grad(out, leaves, dout.double())
        return [out.detach(), *gradients]


def bhsd(array: Any) -> Any:
    """A copy of an array of ours as FlexAttention likes it best, contiguous ``(B, H, S, D)``."""
    return torch.from_dlpack(array).permute(3, 1, 2, 0).contiguous()


def error(got: Any, truth: Any) -> float:
    """The largest difference over the largest magnitude."""
    return float((got.double() - truth).abs().max() / truth.abs().max())


def measure(entry: Entry, *, only_compile: bool) -> dict[str, Any]:
    """One row of the table."""
    rng = np.random.default_rng(0)
    arrays = {name: cupy.asarray(array) for name, array in entry.tensors(rng).items()}
    functions = {"score_mod": entry.score_mod, "mask_mod": entry.mask_mod, "tensors": arrays}
    options = {name: value for name, value in functions.items() if value}
    size = 2 * 2 * B * S * D * (HQ + HKV)
    sets = [[random_normal(D, h, S, B) for h in (HQ, HKV, HKV, HQ)] for _ in range(1 + -(-2 * L2_BYTES // size))]
    flex = Flex(entry, arrays)
    forwards: dict[str, list[Any]] = {"ours": [], "flex": []}
    backwards: dict[str, list[Any]] = {"ours": [], "flex": []}
    row: dict[str, Any] = {"name": entry.name}
    for number, (q, k, v, dout) in enumerate(sets):
        leaves = [bhsd(x).requires_grad_() for x in (q, k, v)]
        gradient, result = bhsd(dout), flex(*leaves)
        theirs = [result.detach(), *torch.autograd.grad(result, leaves, gradient, retain_graph=True)]
        if only_compile:
            return row
        out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
        given = (dout, q, k, v, out, stats)
        forwards["ours"].append(lambda x=(q, k, v): cupy_sdpa.attention(*x, return_stats=True, **options))
        backwards["ours"].append(lambda x=given: cupy_sdpa.attention_backward(*x, **options))
        forwards["flex"].append(lambda x=leaves: flex(*x))
        backwards["flex"].append(lambda r=result, x=leaves, g=gradient: torch.autograd.grad(r, x, g, retain_graph=True))
        if number == 0:
            truth = flex.exactly(*(x.detach() for x in leaves), gradient)
            ours = [bhsd(out), *map(bhsd, backwards["ours"][0]())]
            for name, one, other, exact in zip(RESULTS, ours, theirs, truth, strict=True):
                row[f"{name}_error"] = f"{error(one, exact):.2e}"
                row[f"{name}_flex_error"] = f"{error(other, exact):.2e}"
            del truth
            torch.cuda.empty_cache()
    busy, _ = busy_matrix()
    for direction, calls in (("forward", forwards), ("backward", backwards)):
        times = interleaved({way: functools.partial(device_ms, several, busy, 24) for way, several in calls.items()}, ROUNDS)
        row[f"{direction}_ms"], row[f"{direction}_flex_ms"] = (
            round(statistics.median(times[way]), 4) for way in ("ours", "flex")
        )
        row[f"{direction}_ratio"] = round(ratio(times["ours"], times["flex"]), 3)
    row["host_us"], row["flex_host_us"] = (round(host_us(forwards[way][0], 50), 1) for way in ("ours", "flex"))
    return row


def main() -> None:
    """Print the table and, where a path is given, write it as CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?")
    parser.add_argument("--only", nargs="*", choices=[entry.name for entry in ENTRIES])
    parser.add_argument("--compile", action="store_true")
    chosen = parser.parse_args()
    used = versions(torch=torch.__version__)
    print(", ".join(f"{name} {value}" for name, value in used.items()))
    rows = []
    for entry in ENTRIES:
        if chosen.only is not None and entry.name not in chosen.only:
            continue
        row = measure(entry, only_compile=chosen.compile)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows.append(row | used)
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    if chosen.path and not chosen.compile:
        write_csv(chosen.path, rows)


if __name__ == "__main__":
    main()
