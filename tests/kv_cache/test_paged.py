"""Attention with paged keys and values: the result equals dense attention to the gathered pages.

Pages that no sequence owns are full of NaN, and table entries after the length are arbitrary numbers.
"""

import re

import numpy as np
import pytest
from engines import every_engine, numbers, one_in

import cupy_sdpa
from cupy_sdpa import KVCache, Unsupported, attention, explain, prepare

ON_A_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


@every_engine
@pytest.mark.parametrize("number", numbers(6, quick=1))
@pytest.mark.parametrize("names", ["paged", "paged packed", "paged window"])
def test_random_problems(names, number, engine):
    """Split or not: masks, functions, lengths, packed queries, dropout, layouts of the pages, and results of the caller."""
    engine.agrees(engine.draw(names.split(), number), refused=True)


def pages(page=16, order="heads", lengths="random", num_splits=0, rest="mixed"):
    """The option ``paged``; entries after the lengths are large, negative, and pages of NaN."""
    return page, order, lengths, num_splits, rest, False, False


MASK = {"mask_mod": ("checkered", ""), "stats": True}
PACKED = {"packed": ("random", "full", 0, 0, 0, "int32")}
ONE_PACKED = {"packed": ("one", "full", 3, 5, 0, "int32")}
SINKS = {"sinks": "high", "causal": "bottom_right"}
WIDE = {"window": (20, 2, "bottom_right"), "stats": True}
#: Sizes and options: problems that are split, and others.
CORNERS = {
    "one row in a page": {"skv": 512, "options": {"paged": pages(1), **MASK}},
    "whole tiles": {"skv": 512, "options": {"paged": pages(64), **MASK}},
    "packed queries, whole tiles": {"skv": 512, "options": {"paged": pages(64), **MASK, **PACKED}},
    "packed queries of length 1": {"sq": 1, "skv": 512, "options": {"paged": pages(64), **MASK, **ONE_PACKED}},
    "wide values": {"dv": 16, "skv": 64, "options": {"paged": pages(4, "pages", num_splits=3), **WIDE}},
    "narrow values": {"d": 16, "skv": 64, "options": {"paged": pages(8, num_splits=3), **WIDE, "softcap": 2.0}},
    "a window of few pages": {"sq": 2, "skv": 1024, "options": {"paged": pages(8, lengths="full"), **WIDE}},
    "a window in pages of a tile": {"sq": 2, "skv": 1024, "options": {"paged": pages(128), "window": (126, 0, "bottom_right")}},
    "no keys": {"options": {"paged": pages(8, lengths="zero", num_splits=2), **SINKS}},
    "lengths of both": {"sq": 4, "options": {"paged": pages(4, num_splits=2), "seq_lens_q": "random", **SINKS, "stats": True}},
    "more chunks than pages": {"skv": 32, "options": {"paged": pages(num_splits=40), "causal": "bottom_right"}},
    "more queries than keys": {"sq": 9, "skv": 4, "options": {"paged": pages(2, num_splits=1), "causal": "bottom_right"}},
    "600 rows": {"sq": 150, "skv": 64, "options": {"paged": pages(lengths="some_zero"), "causal": "bottom_right"}},
    "one query": {"sq": 1, "options": {"paged": pages(num_splits=2), "deterministic": True}},
    "one head of a group": {"hq": 2, "options": {"paged": pages(num_splits=2), "causal": "bottom_right"}},
    "a cache and a mask function": {"skv": 48, "options": {"cache": (4, "random", 2, "fork", True), **MASK}},
    "head dim 1": {"d": 1, "dv": 1, "options": {"paged": pages(1)}}, "head dims 1 and 5": {"d": 1, "dv": 5, "options": {"paged": pages(3), "stats": True}},
    "head dims 5 and 1": {"d": 5, "dv": 1, "options": {"paged": pages(3), "stats": True}},
}  # fmt: skip


@pytest.mark.parametrize("seed", numbers(2, quick=1))
@pytest.mark.parametrize("name", one_in(2, CORNERS))
def test_corners(name, seed, engine):
    """Whole tiles, chunks, boundaries of windows, empty sequences, and head dims whose strides show no order."""
    case = engine.case(**{"d": 8, "dv": 8, "hq": 4, "hkv": 2, "sq": 3, "skv": 48, "b": 2, "seed": seed, **CORNERS[name]})
    assert engine.agrees(case, refused="head dim" in name).calls


def decoding(engine, sq=2, batch=3):
    """Queries, keys and values in pages of 4, and options; sequences of 30, 9 and 17 keys."""
    cache, x = KVCache(8, 1, pages=40, batch=batch, page_size=4, dtype=engine.dtype, numpy=not engine.on_cudnn), None
    x = engine.normal(0, 8, 1, 30, batch)
    cache.append(x, x, seq_lens_q=[30, 9, 17][:batch])
    options = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right", "num_splits": 2}
    return engine.normal(1, 8, 4, sq, batch), (cache.keys(), cache.values()), options


@ON_A_GPU
@pytest.mark.parametrize(("sq", "offset"), [(1, 1), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_queries_at_any_address(sq, offset, engine):
    """Vector loads need aligned addresses: queries that begin elsewhere give the same bits."""
    q, arrays, options = decoding(engine, sq)
    values = engine.get(q).ravel(order="F")
    moved = engine.put(np.concatenate([values[:offset], values]))[offset:].reshape(q.shape, order="F")
    assert moved.data.ptr % 16
    found, wanted = engine.get((attention(moved, *arrays, **options), attention(q, *arrays, **options)))
    np.testing.assert_array_equal(found, wanted)


# Gradients


GRADIENTS = r"gradients are not supported with page_table.*: gather the pages into dense k and v"


def zeros(*shape, dtype="float16"):
    """An array of zeros."""
    return np.zeros(shape, dtype, order="F")


def arguments(packed, **options):
    """q, k and v of two sequences in pages of 4, and the options."""
    given = {"page_table": zeros(3, 2, dtype="int32"), "seq_lens_kv": zeros(2, dtype="int32"), **options}
    if packed:
        given |= {"cu_seqlens_q": zeros(3, dtype="int32"), "max_seqlen_q": 3}
    return [zeros(8, 2, 6) if packed else zeros(8, 2, 3, 2), zeros(8, 1, 4, 10), zeros(8, 1, 4, 10)], given


@pytest.mark.parametrize(("packed", "options"), [(False, {}), (True, {}), (False, {"num_splits": 2})], ids=str)
@pytest.mark.parametrize("gpu", [{}, {"gpu": "H200", "cudnn": "9.19"}], ids=["here", "described"])
def test_a_report_gives_the_reason_against_gradients(packed, options, gpu, engine):
    """explain() does not raise: the reason is the error's, and the steps are the forward pass's."""
    arrays, given = engine.put(arguments(packed, **options)) if not gpu else arguments(packed, **options)
    assert not engine.get(attention(*arrays, **given)).any()
    with pytest.raises(Unsupported, match=GRADIENTS):
        prepare(*arrays, **given, backward=True)
    for more in ({}, {"deterministic": True}, {"return_dtensors": True}):
        report = explain(*arrays, **given, backward=True, **more, **gpu)
        assert not report
        assert report.error is Unsupported
        assert report.engine == ("cuDNN" if gpu or engine.on_cudnn else "numpy")
        (reason,) = report.reasons
        assert re.search(GRADIENTS, reason)
        assert f"cannot run on {report.engine} (the steps belong to the forward pass):" in str(report)
        assert reason in report._repr_html_()


def test_a_report_on_gradients_checks_the_arguments():
    """Invalid arguments raise, as for the call."""
    for wrong in ({"page_table": zeros(3, 2, dtype="float32")}, {"seq_lens_kv": zeros(3, dtype="int32")}, {"bucket": 16}):
        arrays, given = arguments(packed=False, **wrong)
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            cupy_sdpa.explain(*arrays, **given, backward=True)
