"""Accuracy of every pair of options on this GPU, both passes, bfloat16 and float16.

    python -m benchmarks variants [results.csv]

The pairs are those of the support table (cupy_sdpa.offline.survey). The results are compared with those of the CPU engine in
float32 on the same inputs, for dropout with the same dropped weights. Results, workspace and padding are filled with NaN
before the call. The file has a row for every pair, pass and dtype, with the engine and the largest difference of each result,
divided by the largest value; for a pair that the table refuses, the reason. The exit status is 1 if a difference is above the
limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, attention_backward, explain
from cupy_sdpa.offline.problems import OPTIONS, excluded

from ..common.machine import versions
from ..common.script import csv_path, listed, write_csv

D, HQ, HKV, B, SQ, SKV = 128, 4, 2, 2, 150, 200
LENGTHS_Q, LENGTHS_KV, TAIL = (150, 61), (93, 200), 17
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
#: The columns of the results, those of the forward pass first.
RESULTS = ("out", "stats", "max", "sum_exp", "dq", "dk", "dv", "dbias", "dsinks")
#: The largest accepted difference from float32, relative to the largest value.
LIMIT = {"bfloat16": 2e-2, "float16": 3e-3}


def inputs(names: tuple[str, str], dtype: Any, rng: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """q, k, v and dout on the CPU; the options with their arrays; and the options of the backward call only."""
    load_target: dict[str, Any] = {}
    for name in names:
        load_target |= OPTIONS[name]
    packed = "cu_seqlens_q" in load_target
    tq, tkv = (sum(LENGTHS_Q) + TAIL, sum(LENGTHS_KV) + TAIL) if packed else (SQ, SKV)
    batch = () if packed else (B,)
    arrays = [
        np.asfortranarray(rng.standard_normal((D, heads, total, *batch)).astype(dtype))
        for heads, total in ((HQ, tq), (HKV, tkv), (HKV, tkv), (HQ, tq))
    ]
    backward_only = ("return_dbias", "return_dsinks", "deterministic")
    more = {name: load_target.pop(name) for name in backward_only if name in load_target}
    options: dict[str, Any] = {}
    for name, value in load_target.items():
        if name in ("bias", "mask"):
            shape = [n if full > 1 else 1 for n, full in zip((SKV, SQ, HQ, B), value, strict=True)]
            numbers = rng.standard_normal(shape)
            options[name] = np.asfortranarray(numbers.astype(dtype) if name == "bias" else numbers < 0.8)
        elif name == "alibi_slopes":
            options[name] = cupy_sdpa.alibi_slopes(HQ)
        elif name == "sinks":
            options[name] = rng.standard_normal(HQ).astype(np.float32)
        elif name == "seq_lens":
            options |= {"seq_lens_q": np.array(LENGTHS_Q, np.int32), "seq_lens_kv": np.array(LENGTHS_KV, np.int32)}
        elif name.startswith("cu_seqlens"):
            lengths = LENGTHS_Q if name.endswith("q") else LENGTHS_KV
            options[name] = np.cumsum([0, *lengths], dtype=np.int32)
        elif name.startswith("max_seqlen"):
            options[name] = max(LENGTHS_Q if name.endswith("q") else LENGTHS_KV)
        elif name == "window":
            options[name] = (40, 20)
        elif name == "softcap":
            options[name] = 3.0
        else:
            options[name] = value
    return arrays, options, more


def poison(arrays: list[Any], options: dict[str, Any]) -> None:
    """Fill the padding with NaN."""
    for array, lengths in zip(arrays, (LENGTHS_Q, LENGTHS_KV, LENGTHS_KV, LENGTHS_Q), strict=True):
        if "cu_seqlens_q" in options:
            array[:, :, sum(lengths) :] = np.nan
        elif "seq_lens_q" in options:
            for entry, length in enumerate(lengths):
                array[:, :, length:, entry] = np.nan


def on_gpu(values: dict[str, Any]) -> dict[str, Any]:
    """Copy the arrays of the options to the GPU."""
    return {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in values.items()}


def poisoning() -> Any:
    """A context in which new memory is filled with NaN."""
    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        memory.memset_async(255, size, cupy.cuda.get_current_stream())
        return memory

    return cupy.cuda.using_allocator(allocate)


def difference(result: Any, expected: Any) -> float:
    """The largest difference divided by the largest value; equal infinities count as 0."""
    a, b = cupy.asnumpy(result).astype(np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where(a == b, 0, np.abs(a - b))
    finite = np.abs(b[np.isfinite(b)]).max(initial=0)
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0) / max(finite, 1e-2))


def measure(names: tuple[str, str], kind: str, *, backward: bool) -> dict[str, Any] | None:
    """A row of the file; None if the options exclude each other."""
    if excluded(*names, backward=backward):
        return None
    words = names[0] if names[0] == names[1] else " and ".join(names)
    row = {"pass": "backward" if backward else "forward", "options": words, "dtype": kind, "engine": "", "refused": ""}
    row |= dict.fromkeys(RESULTS, "")
    arrays, options, more = inputs(names, DTYPES[kind], np.random.default_rng([*words.encode()]))
    return_stats = options.pop("return_stats", True)
    poison(arrays, options)
    q, k, v, dout = (cupy.asarray(x) for x in arrays)
    gpu_options = on_gpu(options)
    report = explain(q, k, v, **gpu_options, **({**more, "backward": True} if backward else {"return_stats": return_stats}))
    if not report:
        return {**row, "refused": " ".join(report.reasons[0].split())}
    with poisoning():
        result = attention(q, k, v, return_stats=return_stats, **gpu_options)
        if backward:
            result = attention_backward(dout, q, k, v, result[0], result[1], **gpu_options, **more)
    cpu_options = with_dropout_mask(options, gpu_options, q, k)
    q, k, v, dout = (x.astype(np.float32) for x in arrays)
    expected = attention(q, k, v, return_stats=return_stats, **cpu_options)
    if backward:
        expected = attention_backward(dout, q, k, v, expected[0], expected[1], **cpu_options, **more)
    row["engine"] = str(report.plan and report.plan.engine)
    columns = (
        [name for name in RESULTS[4:] if name in ("dq", "dk", "dv") or more.get(f"return_{name}")] if backward else RESULTS
    )
    row |= {name: f"{difference(a, b):.2e}" for name, a, b in zip(columns, result, expected, strict=False)}
    return row


def with_dropout_mask(options: dict[str, Any], gpu_options: dict[str, Any], q: Any, k: Any) -> dict[str, Any]:
    """The options for the CPU engine; with dropout, the mask of the weights that the GPU keeps instead of a seed."""
    if "dropout_p" not in options:
        return options
    arguments = {name: x for name, x in gpu_options.items() if name.startswith(("cu_", "max_seq", "dropout", "seed"))}
    mask = cupy.asnumpy(cupy_sdpa.dropout_mask(q, k, **arguments))
    return {**{name: x for name, x in options.items() if name != "seed"}, "dropout_mask": mask}


def all_rows(report: Callable[[str], None]) -> Iterator[tuple[dict[str, Any], bool]]:
    """The rows, and whether each is within the limit; ``report`` prints those that are not."""
    for kind, backward in itertools.product(LIMIT, (False, True)):
        for one, other in itertools.combinations_with_replacement(OPTIONS, 2):
            try:
                row = measure((one, other), kind, backward=backward)
            except Unsupported as error:
                report(f"{one} and {other}: {error}")
                yield {}, False
                continue
            if row is None:
                continue
            differences = {name: float(row[name]) for name in RESULTS if row[name]}
            wrong = {name: value for name, value in differences.items() if not value <= LIMIT[kind]}
            if wrong:
                report(f"{row['pass']}, {row['options']}, {kind}: {wrong}")
            yield row, not wrong


def main(words: Sequence[str]) -> int:
    """Measure; print what is refused or wrong, and write all rows."""
    path = csv_path("variants", __doc__, words)
    used = versions()
    print(listed(used))
    checked = list(all_rows(print))
    rows = [row for row, _ in checked if row]
    wrong = sum(not correct for _, correct in checked)
    refused = {(row["pass"], row["options"]): row["refused"] for row in rows if row["refused"]}
    for (direction, options), reason in refused.items():
        print(f"refused: {direction}, {options}: {reason[:150]}")
    print(f"{len(rows)} rows, {len(refused)} pairs refused, {wrong} wrong")
    if path:
        write_csv(path, [{**row, **used} for row in rows])
    return int(wrong > 0)
