"""Score and mask functions against FlexAttention: the same functions and arrays in one run, interleaved; both passes.

    python -m benchmarks functions [results.csv] [--only NAME ...] [--compile]

The functions are those of :mod:`cupy_sdpa.zoo`. FlexAttention runs the same code with PyTorch's functions instead of numpy's,
compiled, with a block mask for mask functions. The reference is PyTorch in float64 with the whole score matrix and autograd;
an error is the largest difference divided by the largest magnitude. Times are by CUDA events, as in ``compare``. They include
the copies that our calls make of masks and captured arrays, but not the creation of FlexAttention's block mask. ``--compile``
compiles without measuring: several such processes with different functions fill PyTorch's cache faster. Needs PyTorch and
Triton besides CuPy.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cupy_sdpa
from cupy_sdpa import zoo

from .common.device import busy_matrix, input_sets, random_normal
from .common.machine import versions
from .common.script import add_csv, check_gpu, listed, parser, write_csv
from .common.timing import device_ms, host_us, interleaved, ratio

B, HQ, HKV, S, D = 2, 16, 4, 4096, 128
ROUNDS = 15
RESULTS = ("out", "dq", "dk", "dv")


class Entry(NamedTuple):
    """A function of the zoo; ``tensors`` makes its captured arrays from a random generator."""

    name: str
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    tensors: Callable[[np.random.Generator], dict[str, Any]] = lambda rng: {}


def floats(array: Any) -> Any:
    """Convert to float32."""
    return np.asarray(array, np.float32)


def documents(rng: np.random.Generator, *batch: int) -> Any:
    """The ids of eight documents, one after the other."""
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
    Entry("image_window", None, zoo.image_window(64, 6)),
    Entry("with_global", None, zoo.with_global(512, 64)),
    Entry("streaming", None, zoo.streaming(1024, 4)),
    Entry("head_windows", None, zoo.head_windows, lambda rng: {"size": rng.integers(64, 2048, HQ).astype(np.int32)}),
    Entry("permuted", None, zoo.permuted, lambda rng: {"order": rng.permutation(S).astype(np.int32)}),
    Entry("valid_keys", None, zoo.valid_keys, lambda rng: {"valid": rng.random((B, S)) < 0.7}),
    Entry("images", None, zoo.images, lambda rng: {"image": documents(rng, B) - 1}),
    Entry("checkered", None, zoo.checkered),
]


class Torch:
    """PyTorch's functions under numpy's names, for code that calls ``np.tanh``."""

    inf = math.inf
    tanh, exp, cos, sqrt, where, clip = torch.tanh, torch.exp, torch.cos, torch.sqrt, torch.where, torch.clamp

    @staticmethod
    def log(x: Any) -> Any:
        """The logarithm of a tensor or a number."""
        return math.log(x) if isinstance(x, (int, float)) else torch.log(x)


#: A separate module, because the compiler looks names up in the module of a function.
ZOO = types.ModuleType("zoo_in_torch")
sys.modules[ZOO.__name__] = ZOO
vars(ZOO).update({name: value for name, value in vars(zoo).items() if name != "__name__"}, np=Torch)


def as_torch_function(function: Callable[..., Any] | None, arrays: dict[str, Any]) -> Any:
    """The same code with PyTorch's functions and tensors; None for None."""
    if function is None:
        return None
    assert isinstance(function, types.FunctionType)
    code = function.__code__
    in_torch = types.FunctionType(code, vars(ZOO), function.__name__, function.__defaults__, function.__closure__)
    captured = {name: array for name, array in arrays.items() if name in code.co_varnames[: code.co_argcount]}
    if code.co_argcount - len(captured) == 5:
        return lambda score, b, h, q_idx, kv_idx: in_torch(score, b, h, q_idx, kv_idx, **captured)
    return lambda b, h, q_idx, kv_idx: in_torch(b, h, q_idx, kv_idx, **captured)


class Flex:
    """FlexAttention with the functions of an entry."""

    def __init__(self, entry: Entry, arrays: dict[str, Any]) -> None:
        torch._dynamo.reset()
        tensors = {name: torch.from_dlpack(array) for name, array in arrays.items()}
        self.score_mod, mask_mod = (as_torch_function(f, tensors) for f in (entry.score_mod, entry.mask_mod))
        self.mask_mod, block_mask = mask_mod, None
        if mask_mod:
            batch, heads = (B, HQ) if tensors else (None, None)
            block_mask = create_block_mask(mask_mod, batch, heads, S, S, device="cuda")
        self._compiled = torch.compile(flex_attention, dynamic=False)
        self.options = {"score_mod": self.score_mod, "block_mask": block_mask, "enable_gqa": True}

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        """The output, ``(B, H, S, D)``."""
        return self._compiled(q, k, v, **self.options)

    def reference(self, q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
        """The output and the gradients in float64, from the whole score matrix."""
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        wide = [leaves[0], *(x.repeat_interleave(HQ // HKV, dim=1) for x in leaves[1:])]
        indices = [torch.arange(n, device="cuda").reshape(shape) for n, shape in
                  ((B, (-1, 1, 1, 1)), (HQ, (-1, 1, 1)), (S, (-1, 1)), (S, (-1,)))]  # fmt: skip
        scores = wide[0] @ wide[1].mT / math.sqrt(D)
        if self.score_mod:
            scores = self.score_mod(scores, *indices)
        if self.mask_mod:
            scores = scores.masked_fill(~self.mask_mod(*indices), -math.inf)
        # a fully masked row gives 0
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0) if self.mask_mod else torch.softmax(scores, dim=-1)
        out = weights @ wide[2]
        gradients = torch.autograd.grad(out, leaves, dout.double())
        return [out.detach(), *gradients]


def bhsd(array: Any) -> Any:
    """A contiguous copy ``(B, H, S, D)``, FlexAttention's fastest layout."""
    return torch.from_dlpack(array).permute(3, 1, 2, 0).contiguous()


def error(result: Any, expected: Any) -> float:
    """The largest difference divided by the largest magnitude."""
    return float((result.double() - expected).abs().max() / expected.abs().max())


class Calls:
    """The calls of both contenders in both directions, one for each input set."""

    def __init__(self, flex: Flex, options: dict[str, Any]) -> None:
        self.flex, self.options = flex, options
        self.by_direction: dict[str, dict[str, list[Callable[[], Any]]]] = {
            direction: {"ours": [], "flex": []} for direction in ("forward", "backward")
        }

    def add_flex(self, q: Any, k: Any, v: Any, dout: Any) -> tuple[list[Any], Any]:
        """Add FlexAttention's calls; returns its results, and its inputs ``(leaves, gradient)``."""
        leaves = [bhsd(x).requires_grad_() for x in (q, k, v)]
        gradient, out = bhsd(dout), self.flex(*leaves)
        backward = functools.partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True)
        self.by_direction["forward"]["flex"].append(functools.partial(self.flex, *leaves))
        self.by_direction["backward"]["flex"].append(backward)
        return [out.detach(), *backward()], (leaves, gradient)

    def add_ours(self, q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
        """Add our calls; returns our results."""
        out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **self.options)
        forward = functools.partial(cupy_sdpa.attention, q, k, v, return_stats=True, **self.options)
        backward = functools.partial(cupy_sdpa.attention_backward, dout, q, k, v, out, stats, **self.options)
        self.by_direction["forward"]["ours"].append(forward)
        self.by_direction["backward"]["ours"].append(backward)
        return [bhsd(out), *map(bhsd, backward())]


def prepare(entry: Entry) -> tuple[Calls, list[tuple[Any, Any, Any, Any]]]:
    """The calls of an entry, empty as yet, and the input sets."""
    arrays = {name: cupy.asarray(array) for name, array in entry.tensors(np.random.default_rng(0)).items()}
    options = {"score_mod": entry.score_mod, "mask_mod": entry.mask_mod, "tensors": arrays}
    count = 1 + input_sets(2 * 2 * B * S * D * (HQ + HKV))
    sets = [(*(random_normal(D, h, S, B) for h in (HQ, HKV, HKV)), random_normal(D, HQ, S, B)) for _ in range(count)]
    return Calls(Flex(entry, arrays), {name: value for name, value in options.items() if value}), sets


def compile_once(entry: Entry) -> None:
    """Call FlexAttention once in both directions."""
    calls, sets = prepare(entry)
    calls.add_flex(*sets[0])


def measure(entry: Entry) -> dict[str, Any]:
    """One row of the table."""
    calls, sets = prepare(entry)
    row: dict[str, Any] = {"name": entry.name}
    for number, inputs in enumerate(sets):
        flex_results, (leaves, gradient) = calls.add_flex(*inputs)
        our_results = calls.add_ours(*inputs)
        if number == 0:
            q, k, v = (x.detach() for x in leaves)
            expected = calls.flex.reference(q, k, v, gradient)
            for name, ours, flex, exact in zip(RESULTS, our_results, flex_results, expected, strict=True):
                row[f"{name}_error"] = f"{error(ours, exact):.2e}"
                row[f"{name}_flex_error"] = f"{error(flex, exact):.2e}"
            del expected
            torch.cuda.empty_cache()
    busy, _ = busy_matrix()
    for direction, by_contender in calls.by_direction.items():
        timers = {name: functools.partial(device_ms, several, busy, 24) for name, several in by_contender.items()}
        times = interleaved(timers, ROUNDS)
        row[f"{direction}_ms"] = round(statistics.median(times["ours"]), 4)
        row[f"{direction}_flex_ms"] = round(statistics.median(times["flex"]), 4)
        row[f"{direction}_ratio"] = round(ratio(times["ours"], times["flex"]), 3)
    first = {name: several[0] for name, several in calls.by_direction["forward"].items()}
    row["host_us"], row["flex_host_us"] = (round(host_us(first[name], 50), 1) for name in ("ours", "flex"))
    return row


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    arguments = parser("functions", __doc__)
    add_csv(arguments)
    names = [entry.name for entry in ENTRIES]
    arguments.add_argument("--only", nargs="*", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    arguments.add_argument("--compile", action="store_true", help="compile FlexAttention only; no measurement")
    chosen = arguments.parse_args(words)
    check_gpu("functions")
    used = versions(torch=torch.__version__)
    print(listed(used))
    rows = []
    for entry in ENTRIES:
        if chosen.only is not None and entry.name not in chosen.only:
            continue
        if chosen.compile:
            compile_once(entry)
        else:
            row = measure(entry)
            print(listed(row), flush=True)
            rows.append(row | used)
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    if chosen.csv and rows:
        write_csv(chosen.csv, rows)
    return 0
