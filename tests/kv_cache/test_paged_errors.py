"""Invalid arguments of paged attention: every error names the values and the remedy, and nothing is written."""

import re

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import Unsupported, attention


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype, order="F")


def ints(*shape, dtype="int32"):
    return np.zeros(shape, dtype, order="F")


def arguments(**changed):
    """Valid arguments with 2 sequences of up to 3 pages of 4 keys; None removes one."""
    given = {
        "q": zeros(8, 2, 3, 2), "k": zeros(8, 1, 4, 10), "v": zeros(8, 1, 4, 10), "page_table": ints(3, 2),
        "seq_lens_kv": ints(2),
    }  # fmt: skip
    return {name: value for name, value in (given | changed).items() if value is not None}


def packed(**changed):
    """Valid arguments with packed queries."""
    return {"q": zeros(8, 2, 6), "cu_seqlens_q": ints(3), "max_seqlen_q": 3} | changed


#: Changed arguments, the error, and its message.
INVALID = {
    "table_dtype": ({"page_table": ints(3, 2, dtype="int64")}, TypeError, r"page_table is int64; it must be int32: convert"),
    "table_float": ({"page_table": zeros(3, 2)}, TypeError, r"page_table is float32; it must be int32"),
    "table_list": ({"page_table": [[0, 1]]}, TypeError, r"page_table is a list; .* convert with numpy.asarray"),
    "table_rank": (
        {"page_table": ints(3)}, ValueError,
        r"page_table has shape \(3,\); it must be \(pages per sequence, B\) with 2 sequences, as q \(8, 2, 3, 2\)",
    ),
    "table_batch": ({"page_table": ints(3, 4)}, ValueError, r"page_table has shape \(3, 4\); .* 2 sequences, as q \(8, 2, 3, 2\)"),
    "table_batch_packed": (packed(cu_seqlens_q=ints(4)), ValueError, r"shape \(3, 2\); .* 3 sequences, as cu_seqlens_q \(4,\)"),
    "table_entries": (
        {"page_table": np.array([[0, 10], [0, 0], [0, 0]], np.int32), "seq_lens_kv": np.array([5, 3], np.int32)}, ValueError,
        r"page_table has entries from 10 to 10 in sequence 1; there are 10 pages",
    ),
    "negative_entries": (
        {"page_table": np.full((3, 2), -1, np.int32), "seq_lens_kv": np.array([1, 0], np.int32)}, ValueError,
        r"entries from -1 to -1 in sequence 0; there are 10 pages",
    ),
    "no_lengths": ({"seq_lens_kv": None}, ValueError, r"page_table is passed and seq_lens_kv is None: pass the number of keys"),
    "only_query_lengths": ({"seq_lens_kv": None, "seq_lens_q": ints(2)}, ValueError, r"seq_lens_kv is None: pass the number"),
    "lengths_dtype": ({"seq_lens_kv": ints(2, dtype="int64")}, TypeError, r"seq_lens_kv is int64; it must be int32: convert"),
    "lengths_shape": ({"seq_lens_kv": ints(3)}, ValueError, r"seq_lens_kv has shape \(3,\); it must be \(2,\)"),
    "lengths_too_long": ({"seq_lens_kv": np.array([13, 0], np.int32)}, ValueError, r"from 0 to 13; they must be from 0 to 12"),
    "packed_keys": (
        {"cu_seqlens_kv": ints(3)}, ValueError,
        r"cu_seqlens_kv \(3,\) and page_table \(3, 2\) are both passed: .* omit cu_seqlens_kv, and pass seq_lens_kv",
    ),
    "packed_queries_and_keys": (packed(cu_seqlens_kv=ints(3)), ValueError, r"cu_seqlens_kv \(3,\) and page_table \(3, 2\)"),
    "packed_without_maximum": (packed(max_seqlen_q=None), ValueError, r"max_seqlen_q is None; packed queries need the maximum"),
    "maximum_of_keys": (packed(max_seqlen_kv=12), ValueError, r"max_seqlen_kv is 12 and page_table is passed: .*omit max_seqlen"),
    "packed_dense_q": (
        {"cu_seqlens_q": ints(3), "max_seqlen_q": 3}, ValueError,
        r"q has 4 dimensions \(8, 2, 3, 2\); it needs 3: \(head_dim, heads, total\), because cu_seqlens_q is passed",
    ),
    "packed_and_lengths": (packed(seq_lens_q=ints(2)), ValueError, r"seq_lens_q and cu_seqlens_q are both passed"),
    "packed_float": (packed(cu_seqlens_q=zeros(3)), TypeError, r"cu_seqlens_q is float32; it must be int32 or int64: convert"),
    "splits_of_dense_keys": (
        {"page_table": None, "k": zeros(8, 1, 4, 2), "v": zeros(8, 1, 4, 2), "num_splits": 2}, ValueError,
        r"num_splits is 2, which is not supported with page_table=None: omit num_splits",
    ),
    "splits_and_bias": ({"num_splits": 2, "bias": zeros(12, 3, 1, 1)}, ValueError, r"num_splits is 2, .* with bias: omit"),
    "splits_and_mask": ({"num_splits": 2, "mask": zeros(12, 1, 1, 2) == 0}, ValueError, r"num_splits is 2, .* with mask: omit"),
    "splits_and_slopes": ({"num_splits": 2, "alibi_slopes": zeros(2)}, ValueError, r"is 2, .* with alibi_slopes: omit"),
    "splits_and_dropout": ({"num_splits": 2, "dropout_p": 0.5, "seed": 1}, ValueError, r"is 2, .* with dropout_p: omit"),
    "splits_and_score_mod": (
        {"num_splits": 2, "score_mod": lambda s, b, h, i, j: 2 * s}, ValueError, r"is 2, .* with score_mod: omit"
    ),
    "splits_and_mask_mod": (
        {"num_splits": 2, "mask_mod": lambda b, h, i, j: (i + j) % 2 == 0}, ValueError, r"is 2, .* with mask_mod: omit"
    ),
    "splits_of_packed_queries": (packed(num_splits=2), ValueError, r"num_splits is 2, .* with cu_seqlens_q: omit"),
    "splits_of_many_rows": (
        {"num_splits": 2, "q": zeros(8, 2, 257, 2)}, ValueError,
        r"num_splits is 2, which is not supported with 514 rows of a key/value head \(at most 512\): omit num_splits",
    ),
    "no_splits": ({"num_splits": 0}, ValueError, r"num_splits is 0; it must be a number of chunks, 1 or more, or None"),
    "half_a_split": ({"num_splits": 1.5}, ValueError, r"num_splits is 1.5; it must be a number of chunks"),
    "bucket": ({"bucket": 128}, ValueError, r"bucket is 128 and page_table is passed: omit bucket; pass a wider table"),
    "numbers_of_pages": (
        {"v": zeros(8, 1, 4, 11)}, ValueError,
        r"numbers of pages \(axis 3\) of k and v differ, 10 and 11: .*page size, pages\); .*transpose\(0, 2, 1, 3\)",
    ),
    "page_sizes": ({"v": zeros(8, 1, 5, 10)}, ValueError, r"page sizes \(axis 2\) of k and v differ, 4 and 5: .*transpose"),
    "heads_of_pages": ({"v": zeros(8, 2, 4, 10)}, ValueError, r"numbers of heads \(axis 1\) of k and v differ, 1 and 2"),
    "head_dims": ({"k": zeros(16, 1, 4, 10)}, ValueError, r"head dims \(axis 0\) of q and k differ, 8 and 16"),
    "rank_of_pages": (
        {"k": zeros(8, 1, 40)}, ValueError,
        r"k has 3 dimensions \(8, 1, 40\); it needs 4: .*page size, pages\), because page_table is passed",
    ),
    "dtype_of_pages": ({"k": zeros(8, 1, 4, 10, dtype="float64")}, TypeError, r"k is float64 and q is float32; .* convert one"),
    "mask_of_the_pages": ({"mask": zeros(4, 1, 1, 1) == 0}, ValueError, r"mask has shape \(4, 1, 1, 1\); .*\(12, 3, 2, 2\)"),
    "bias_of_dense_keys": ({"bias": zeros(40, 3, 1, 1)}, ValueError, r"bias has shape \(40, 3, 1, 1\); .*\(12, 3, 2, 2\)"),
}  # fmt: skip


def call(function, given):
    given = dict(given)
    return function(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments(name):
    """The message names the argument, its value, and what to pass; out is not written."""
    changed, error, words = INVALID[name]
    given = arguments(**changed)
    out = np.full_like(given["q"], 7)
    with pytest.raises(error, match=words):
        call(attention, given | {"out": out})
    assert (out == 7).all()
    with pytest.raises(error, match=words):
        call(cupy_sdpa.prepare, given)


def test_the_valid_arguments_are_valid():
    """All lengths are 0, so the output is 0."""
    for given in (arguments(), arguments(**packed()), arguments(num_splits=2)):
        assert not call(attention, given).any()


def test_gradients_are_refused():
    """By the backward pass, and by attention_vjp before it computes anything."""
    words = r"gradients are not supported with page_table.*: gather the pages into dense k and v"
    given = arguments()
    q = given["q"]
    with pytest.raises(Unsupported, match=words):
        call(lambda *arrays, **options: cupy_sdpa.attention_backward(q, *arrays, q, zeros(3, 2, 2), **options), given)
    with pytest.raises(Unsupported, match=words):
        call(cupy_sdpa.attention_vjp, given)
    with pytest.raises(Unsupported, match=words):
        call(cupy_sdpa.prepare, given | {"backward": True})


@pytest.mark.parametrize("changed", [{}, packed(), {"num_splits": 2}], ids=["dense", "packed", "split"])
@pytest.mark.parametrize("engine", ["numpy", "fake CuPy", "described GPU"])
def test_a_report_gives_the_reason_against_gradients(engine, changed, request):
    """explain() does not raise: the reason is that of the error, and the steps are those of the forward pass."""
    given, more = arguments(**changed), {}
    if engine == "fake CuPy":
        fake = request.getfixturevalue("fake")
        half = {
            name: x.astype("float16", order="F") if getattr(x, "dtype", "") == "float32" else x for name, x in given.items()
        }
        given = {name: fake.asarray(x) if isinstance(x, np.ndarray) else x for name, x in half.items()}
    elif engine == "described GPU":
        more = {"gpu": "H200", "cudnn": "9.19"}
    for gradients in ({}, {"deterministic": True}, {"return_dtensors": True}):
        report = call(cupy_sdpa.explain, given | {"backward": True} | gradients | more)
        assert not report
        assert report.error is Unsupported
        assert report.engine == ("numpy" if engine == "numpy" else "cuDNN")
        (reason,) = report.reasons
        assert re.search(r"gradients are not supported with page_table.*: gather the pages into dense k and v", reason)
        assert f"cannot run on {report.engine} (the steps are those of the forward pass):" in str(report)
        assert reason in report._repr_html_()


def test_a_report_on_gradients_checks_the_arguments():
    """Invalid arguments raise, as for the call."""
    for name, changed in (("page_table", ints(3, 2, dtype="int64")), ("seq_lens_kv", ints(3)), ("bucket", 16)):
        with pytest.raises((TypeError, ValueError), match=name):
            call(cupy_sdpa.explain, arguments(**{name: changed}) | {"backward": True})


@pytest.mark.parametrize("name", ["q", "k", "v", "page_table", "seq_lens_kv"])
def test_mixed_arrays(name, fake):
    """One CuPy array among numpy arrays, and one numpy array among CuPy arrays: the message lists all."""
    half = {key: x.astype("float16", order="F") if x.dtype == np.float32 else x for key, x in arguments().items()}
    one = half | {name: fake.asarray(half[name])}
    all_but_one = {key: x if key == name else fake.asarray(x) for key, x in half.items()}
    for given, kinds in ((one, ("CuPy", "numpy")), (all_but_one, ("numpy", "CuPy"))):
        with pytest.raises(TypeError, match=r"arrays are mixed: .*Move them to one side with cupy.asarray") as failure:
            call(attention, given)
        assert f"{name} is a {kinds[0]} array" in str(failure.value)
        assert len(re.findall(f"is a {kinds[1]} array", str(failure.value))) == 4


@pytest.mark.parametrize("sq", [1, 3])
def test_page_sizes_of_the_gpu(sq, fake):
    """cuDNN takes powers of two; the message names the next one. The CPU engine takes every size."""
    given = arguments(q=zeros(8, 2, sq, 2), k=zeros(8, 1, 48, 10), v=zeros(8, 1, 48, 10))
    assert not call(attention, given).any()
    half = {name: x.astype("float16", order="F") if x.dtype == np.float32 else x for name, x in given.items()}
    with pytest.raises(Unsupported, match="the page size is 48; cuDNN supports powers of two: use pages of 64 keys"):
        call(attention, {name: fake.asarray(x) for name, x in half.items()})
