"""Problems of a trace as cases of the self-test: the same sizes, layouts and options, with random values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ...problem.tensor_spec import FP8_LARGEST
from ..cases.case import Case, Dropout, Packed, Paged
from ..cases.functions import function_of
from .entry import Entry, NotReplayableError

#: The most scores of a problem that is verified; larger ones are verified with fewer heads and batch entries, then with
#: shorter sequences.
MAX_SCORES = 4_000_000
#: Options that are the same in a case.
_SAME = ("scale", "softcap", "bucket", "max_workspace")
#: Flags that are the same in a case.
_FLAGS = ("deterministic", "return_dbias", "return_dsinks", "return_dtensors")
#: The options that a case can have.
_KNOWN = {
    *_SAME, *_FLAGS, "causal", "window", "mask", "bias", "seq_lens_q", "seq_lens_kv", "cu_seqlens_q", "cu_seqlens_kv",
    "max_seqlen_q", "max_seqlen_kv", "page_table", "num_splits", "alibi_slopes", "sinks", "dropout_p", "seed", "offset",
    "dropout_mask", "score_mod", "mask_mod", "tensors", "return_stats", "out_dtype",
}  # fmt: skip


def case_of(entry: Entry, engine: str) -> Case:
    """The case of a problem; arrays whose contents matter, such as lengths and masks, are random.

    Args:
        entry: the problem.
        engine: ``"gpu"`` or ``"cpu"``.

    Raises:
        NotReplayableError: the self-test has no such problem.
    """
    entry.check()
    options = entry.options
    if unknown := options.keys() - _KNOWN:
        raise NotReplayableError(
            f"{', '.join(sorted(unknown))} cannot be repeated: the trace is of another version; record it again"
        )
    sizes: dict[str, Any] = _sizes(entry)
    packed, paged = "cu_seqlens_q" in options, "page_table" in options
    if not packed and len(entry.arrays["q"]["shape"]) == 3:
        raise NotReplayableError("q has 3 axes, but cu_seqlens_q is not passed")
    found: dict[str, Any] = {name: options[name] for name in _SAME if name in options}
    found |= {name: True for name in _FLAGS if options.get(name)}
    if causal := options.get("causal"):
        found["causal"] = "top_left" if causal is True else causal
    if "window" in options:
        found["window"] = tuple(options["window"])
    for name in ("mask", "bias"):
        if name in options:
            axes = "".join("1" if n == 1 else letter for letter, n in zip("kqhb", options[name]["shape"], strict=True))
            found[name] = (axes, "random") if name == "mask" else (axes, options[name]["dtype"], "normal")
    for name in ("seq_lens_q", "seq_lens_kv"):
        if name in options and not (paged and name == "seq_lens_kv"):
            found[name] = "random"
    if paged:
        found["paged"] = _paged(entry)
    if packed:
        same = not paged and options["cu_seqlens_q"] == options["cu_seqlens_kv"] and sizes["sq"] == sizes["skv"]
        found["packed"] = tuple(Packed("random", "same" if same else "random", 0, 0, 0, options["cu_seqlens_q"]["dtype"]))
    found |= {name: value for name, value in (("alibi_slopes", "usual"), ("sinks", "normal")) if name in options}
    if options.get("dropout_p"):
        source = "mask" if "dropout_mask" in options else "array" if isinstance(options.get("seed"), Mapping) else "seed"
        found["dropout"] = tuple(Dropout(options["dropout_p"], source, 1, 0))
    found |= _functions(options)
    if stats := options.get("return_stats") or ("stats" in entry.arrays and entry.call != "attention_backward"):
        found["stats"] = stats
    if entry.call == "attention_jvp":
        found["jvp"] = "".join(letter for letter in "qkv" if f"d{letter}" in entry.arrays)
    dtype, layouts = entry.arrays["q"]["dtype"], _layouts(entry)
    if dtype in FP8_LARGEST:  # converted arrays are dense
        found["fp8"], dtype, layouts = dtype, "bfloat16", {}
    return Case(
        engine, dtype, **sizes, backward=entry.call == "attention_backward", layouts=layouts, options=found, seed=entry.number,
    )  # fmt: skip


def _sizes(entry: Entry) -> dict[str, int]:
    """The sizes of the case; with packed sequences the maximum lengths."""
    options = entry.options
    (d, hq, sq, *_), (_, hkv, skv, *_), (dv, *_) = (entry.arrays[name]["shape"] for name in "qkv")
    *_, b = entry.arrays["q"]["shape"]
    if "cu_seqlens_q" in options:
        b, sq = options["cu_seqlens_q"]["shape"][0] - 1, options["max_seqlen_q"]
        skv = options.get("max_seqlen_kv", skv)
    if "page_table" in options:
        skv *= options["page_table"]["shape"][0]
    return {"d": d, "dv": dv, "hq": hq, "hkv": hkv, "sq": sq, "skv": skv, "b": b}


def _paged(entry: Entry) -> tuple[Any, ...]:
    """The pages of the case."""
    _, heads, page, _ = entry.arrays["k"]["shape"]
    strides = entry.arrays["k"].get("strides")
    order = "pages" if strides and heads > 1 and strides[1] > strides[2] else "heads"
    return tuple(Paged(page, order, "random", entry.options.get("num_splits") or 0, "large", False, False))


def _functions(options: Mapping[str, Any]) -> dict[str, Any]:
    """The functions of the case, as their source code, and the dtype of the arrays that they read."""
    found = {}
    tensors = options.get("tensors") or {}
    for name in ("score_mod", "mask_mod"):
        if name not in options:
            continue
        source = "; ".join(options[name]["source"])
        try:
            function = function_of(name, source)
        except ValueError as error:
            raise NotReplayableError(f"{name}: {error}") from None
        dtypes = {tensors[tensor]["dtype"] for tensor in function.tensors}
        if len(dtypes) > 1:
            raise NotReplayableError(f"{name} reads arrays of several dtypes: {', '.join(sorted(dtypes))}")
        found[name] = source, next(iter(dtypes), "")
    return found


def _layouts(entry: Entry) -> dict[str, str]:
    """The layouts of q, k, v and dout that are not dense, in the notation of the self-test."""
    names = {"attention_jvp": {"q": "q", "k": "k", "v": "v", "dq": "tq", "dk": "tk", "dv": "tv"}}.get(
        entry.call, {"q": "q", "k": "k", "v": "v", "dout": "dout"}
    )
    paged = "page_table" in entry.options
    return {
        other: layout
        for name, other in names.items()
        if name in entry.arrays and not (paged and name in "kv") and (layout := layout_of(entry.arrays[name])) is not None
    }


def layout_of(array: Mapping[str, Any]) -> str | None:
    """The order of the axes in memory, fastest first, with ``+`` at every axis that is a slice; None if dense.

    >>> layout_of({"shape": [8, 2, 5, 1], "dtype": "float16", "strides": [2, 80, 16, 160]})
    'dshb'
    >>> layout_of({"shape": [8, 2, 5, 1], "dtype": "float16", "strides": [2, 16, 96, 480]})
    'dhsb+h'
    """
    strides: Sequence[int] | None = array.get("strides")
    if strides is None:
        return None
    shape, letters = array["shape"], "dhsb"[: len(array["shape"])]
    order = sorted(range(len(shape)), key=lambda axis: (abs(strides[axis]), axis) if shape[axis] > 1 else (1 << 62, axis))
    text, slices = "".join(letters[axis] for axis in order), ""
    for inner, outer in itertools.pairwise(order):
        if shape[outer] > 1 and abs(strides[outer]) != abs(strides[inner]) * shape[inner]:
            slices += f"+{letters[inner]}"
    return text + slices


def reduced(case: Case, most: int = MAX_SCORES) -> Case:
    """The case with at most ``most`` scores, for the reference: fewer heads and batch entries, then shorter sequences."""
    group = case.hq // case.hkv if case.hkv else 1
    page = case.paged.page if case.paged else 1

    def scores(case: Case) -> int:
        return case.b * case.hq * case.sq * case.skv

    for change in ({"b": 2}, {"hkv": 1, "hq": group}, {"b": 1}):
        if scores(case) > most:
            case = case.with_(**{name: min(value, getattr(case, name)) for name, value in change.items()})
    while scores(case) > most and max(case.sq, case.skv) > 128:
        sq = case.sq if case.sq <= 128 else max(128, case.sq // 2)
        skv = case.skv if case.skv <= 128 else max(128, -(-case.skv // 2 // page) * page)
        if (sq, skv) == (case.sq, case.skv):
            break
        case = case.with_(sq=sq, skv=skv)
    return case
