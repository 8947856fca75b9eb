"""Shared prefixes: the same result as attention to all pages, also in CUDA graphs."""

import numpy as np
import pytest
from engines import numbers
from fake_cupy import DEVICE

from cupy_sdpa import KVCache, attention, shared_prefix_attention

ON_A_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
#: The fields of the option ``paged``: sequences of the length of the prefix, or of any other one.
SHORT, RANDOM = (4, "pages", "one", 0, "mixed", False, False), (4, "heads", "random", 0, "mixed", False, False)


@pytest.mark.parametrize("number", numbers(8, quick=1))
def test_random_problems(number, engine):
    """Merged from two parts, with or without the log-sum-exp, and with any number of pages in the prefix."""
    engine.agrees(engine.draw({"shared_prefix"}, number), refused=True)


@pytest.mark.parametrize(("sq", "pages"), [(2, SHORT), (5, SHORT), (12, RANDOM)])
def test_more_queries_than_keys_after_the_prefix(sq, pages, engine):
    """Queries before the end of the prefix attend to the part of it before them."""
    options = {"paged": pages, "shared_prefix": 2, "causal": "bottom_right", "stats": True}
    engine.agrees(engine.case(d=16, dv=16, hq=2, sq=sq, skv=16, b=3, options=options))


def cached(engine, batch=3, prompt=8):
    """A cache whose sequences share a prompt of two pages and have two own tokens."""
    cache = KVCache(16, 1, pages=20, batch=batch, page_size=4, dtype=engine.dtype, numpy=not engine.on_cudnn)
    x, own = engine.normal(0, 16, 1, prompt), engine.normal(1, 16, 1, 2 * batch)
    cache.append(x, x, seq_lens_q=[prompt] + [0] * (batch - 1))
    for b in range(1, batch):
        cache.fork(0, b)
    cache.append(own, own, seq_lens_q=[2] * batch)
    return cache


def arguments(engine, cache, sq):
    """Queries, the keys and values, and the options."""
    q = engine.normal(2, 16, 2, sq, cache.batch)
    pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right"}
    return (q, cache.keys(), cache.values()), pages


@pytest.mark.parametrize("sq", [1, 2])
def test_after_a_release(sq, engine):
    """The prefix's pages are taken from a sequence that has it; the sequences before the last one are released."""
    cache = cached(engine)
    for released in (0, 1):
        cache.release(released)
        arrays, pages = arguments(engine, cache, sq)
        wanted, found = engine.get((attention(*arrays, **pages), shared_prefix_attention(*arrays, 8, **pages)))
        kept = np.s_[..., released + 1 :]
        np.testing.assert_allclose(found[kept], wanted[kept], rtol=1e-2, atol=engine.tolerance)


@pytest.mark.parametrize("pages", [[[0, 1], [2, 3]], [[0, 0], [2, 3]]], ids=["first", "second"])
def test_the_pages_of_a_prefix_are_compared_on_the_cpu(pages):
    """All of them, of every sequence; the message lists the pages."""
    arrays = [np.ones((8, 1, n, m), np.float32, order="F") for n, m in ((1, 2), (4, 4), (4, 4))]
    options = {"page_table": np.array(pages, np.int32), "seq_lens_kv": np.full(2, 8, np.int32)}
    prefix = 4 if pages[0] == [0, 1] else 8
    with pytest.raises(ValueError, match=r"sequence 1 begins with the pages \[.*\], others with \[0"):
        shared_prefix_attention(*arrays, prefix, **options)


@pytest.mark.parametrize("engine", ["fake"], indirect=True)
def test_the_parts_are_branches_of_the_graph(engine, monkeypatch):
    """While a stream is captured, the other keys are a branch; a failure of any launch leaves the capture valid."""
    arrays, pages = arguments(engine, cached(engine), 1)
    wanted = shared_prefix_attention(*arrays, 8, **pages).get()
    submit, works, left = DEVICE.submit, [], [-1]

    def submit_or_fail(stream, work):
        works.append((stream, work.kind))
        left[0] -= 1
        if left[0] == -1:
            raise MemoryError
        submit(stream, work)

    monkeypatch.setattr(DEVICE, "submit", submit_or_fail)
    engine.xp.cuda.Device().synchronize()
    with engine.xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        works.clear()
        out = shared_prefix_attention(*arrays, 8, **pages)
        assert len({on for on, _ in works}) == 2, "there is no branch"
        graph = stream.end_capture()
        numbers = [n for n, (_, kind) in enumerate(works) if kind != "free"]
        in_branch = [n for n in numbers if works[n][0] != works[-1][0]]
        graph.launch(stream)
        np.testing.assert_array_equal(out.get(), wanted)
        for left[0] in [*numbers]:
            stream.begin_capture()
            with pytest.raises(MemoryError):
                shared_prefix_attention(*arrays, 8, **pages)
            number, failed = numbers.pop(0), stream.end_capture()
            for _ in range(2 if number in in_branch else 0):  # it freed its memory, or could be launched only once
                failed.launch(stream)
        del failed
    del graph
    engine.forget_plans()
