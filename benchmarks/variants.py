"""Every pair of options on this GPU, both passes, bfloat16 and float16: how far the results are from float32's.

    python benchmarks/variants.py [results.csv]

The pairs are those of the support table (cupy_sdpa.offline.problems). What they give is compared with the CPU engine's on the
same numbers in float32, for dropout with the very weights that the GPU drops. Results are NaN before the call, so is the
workspace, and so is what lies behind lengths and behind the last packed sequence. The file has a row for every pair, pass and
dtype, with the engine and the worst difference of each result, divided by the largest value; pairs that the table refuses
have its rules instead. Ends with 1 where a difference is above the limit.
"""

from __future__ import annotations

import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from common import versions, write_csv

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, attention_backward, explain
from cupy_sdpa.offline.problems import OPTIONS, excluded

D, HQ, HKV, B, SQ, SKV = 128, 4, 2, 2, 150, 200
LENGTHS_Q, LENGTHS_KV, TAIL = (150, 61), (93, 200), 17
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
#: A result may be so far from float32's, in parts of its largest value.
LIMIT = {"bfloat16": 2e-2, "float16": 3e-3}


def inputs(names: tuple[str, str], dtype: Any, rng: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """q, k, v and dout on the CPU; the options with their arrays; and what else the backward call takes."""
    given: dict[str, Any] = {}
    for name in names:
        given |= OPTIONS[name]
    packed = "cu_seqlens_q" in given
    tq, tkv = (sum(LENGTHS_Q) + TAIL, sum(LENGTHS_KV) + TAIL) if packed else (SQ, SKV)
    batch = () if packed else (B,)
    arrays = [
        np.asfortranarray(rng.standard_normal((D, heads, total, *batch)).astype(dtype))
        for heads, total in ((HQ, tq), (HKV, tkv), (HKV, tkv), (HQ, tq))
    ]
    more = {name: given.pop(name) for name in ("return_dbias", "return_dsinks", "deterministic") if name in given}
    options: dict[str, Any] = {}
    for name, value in given.items():
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
    """NaN where nobody may look."""
    for array, lengths in zip(arrays, (LENGTHS_Q, LENGTHS_KV, LENGTHS_KV, LENGTHS_Q), strict=True):
        if "cu_seqlens_q" in options:
            array[:, :, sum(lengths) :] = np.nan
        elif "seq_lens_q" in options:
            for entry, length in enumerate(lengths):
                array[:, :, length:, entry] = np.nan


def on_gpu(values: dict[str, Any]) -> dict[str, Any]:
    """Options with their arrays on the GPU."""
    return {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in values.items()}


def poisoning() -> Any:
    """An allocator whose memory is full of NaN."""
    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        memory = pool.malloc(size)
        memory.memset(255, size)
        return memory

    return cupy.cuda.using_allocator(allocate)


def difference(got: Any, wanted: Any) -> float:
    """The largest, in parts of the largest value; equal infinities differ by nothing."""
    a, b = cupy.asnumpy(got).astype(np.float64), np.asarray(wanted, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where(a == b, 0, np.abs(a - b))
    finite = np.abs(b[np.isfinite(b)]).max(initial=0)
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0) / max(finite, 1e-2))


def measure(names: tuple[str, str], kind: str, *, backward: bool) -> dict[str, Any] | None:
    """A row of the file; None where the two exclude each other."""
    if excluded(*names, backward=backward):
        return None
    words = names[0] if names[0] == names[1] else " and ".join(names)
    row = {"pass": "backward" if backward else "forward", "options": words, "dtype": kind, "engine": "", "refused": ""}
    results = ("dq", "dk", "dv", "dbias", "dsinks") if backward else ("out", "stats", "max", "sum_exp")
    row |= dict.fromkeys(("out", "stats", "max", "sum_exp", "dq", "dk", "dv", "dbias", "dsinks"), "")
    arrays, options, more = inputs(names, DTYPES[kind], np.random.default_rng([*words.encode()]))
    stats_wanted = options.pop("return_stats", True)
    poison(arrays, options)
    q, k, v, dout = (cupy.asarray(x) for x in arrays)
    theirs = on_gpu(options)
    how = {**theirs, **more, "backward": True} if backward else {**theirs, "return_stats": stats_wanted}
    report = explain(q, k, v, **how)
    if not report:
        return {**row, "refused": " ".join(report.reasons[0].split())}
    known = dict(options)
    if "dropout_p" in options:
        shape = {name: theirs[name] for name in theirs if name.startswith(("cu_", "max_seq", "dropout", "seed"))}
        known = {name: x for name, x in known.items() if name != "seed"}
        known["dropout_mask"] = cupy.asnumpy(cupy_sdpa.dropout_mask(q, k, **shape))
    single = [x.astype(np.float32) for x in arrays]
    wanted = attention(*single[:3], return_stats=stats_wanted, **known)
    with poisoning():
        got = attention(q, k, v, return_stats=stats_wanted, **theirs)
        if backward:
            got = attention_backward(dout, q, k, v, got[0], got[1], **theirs, **more)
    if backward:
        wanted = attention_backward(single[3], *single[:3], wanted[0], wanted[1], **known, **more)
        results = [*results[:3], *(name for name in results[3:] if more.get(f"return_{name}"))]
    row["engine"] = report.plan.engine
    row |= {name: f"{difference(a, b):.2e}" for name, a, b in zip(results, got, wanted, strict=False)}
    return row


def main(path: str | None = None) -> int:
    """Print what is refused or wrong and, where a path is given, write everything as CSV."""
    used = versions()
    print(", ".join(f"{name} {value}" for name, value in used.items()))
    rows, wrong = [], 0
    for kind, limit in LIMIT.items():
        for backward in (False, True):
            for number, one in enumerate(OPTIONS):
                for other in list(OPTIONS)[number:]:
                    try:
                        row = measure((one, other), kind, backward=backward)
                    except Unsupported as error:
                        print(f"{one} and {other}: {error}")
                        wrong += 1
                        continue
                    if row is None:
                        continue
                    rows.append(row)
                    gaps = {name: float(row[name]) for name in list(row)[5:] if row[name]}
                    if bad := {name: gap for name, gap in gaps.items() if not gap <= limit}:
                        print(f"{row['pass']}, {row['options']}, {kind}: {bad}")
                        wrong += 1
    refused = {(row["pass"], row["options"]): row["refused"] for row in rows if row["refused"]}
    for (direction, options), reason in refused.items():
        print(f"refused: {direction}, {options}: {reason[:150]}")
    print(f"{len(rows)} rows, {len(refused)} pairs refused, {wrong} wrong")
    if path:
        write_csv(path, [{**row, **used} for row in rows])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
