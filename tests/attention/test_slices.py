"""Gradients whose output reaches beyond the limit of cuDNN's kernel are computed in slices, with the results of one launch.

A lower limit stands in for 2^31 elements, so that small problems need several slices.
"""

import numpy as np
import pytest
from engines import numbers, on_cudnn, sliced

from cupy_sdpa import attention, attention_backward, explain, reference

#: Options that are drawn with gradients; each concerns arrays with other axes.
OPTIONS = (
    "causal", "window", "mask", "bias", "seq_lens_q", "packed", "alibi_slopes", "softcap", "sinks", "dropout", "score_mod",
    "mask_mod", "return_dbias", "return_dsinks", "return_dtensors", "preallocated", "bucket", "block_mask", "deterministic",
)  # fmt: skip


@on_cudnn
@pytest.mark.parametrize("number", numbers(10, quick=2))
@pytest.mark.parametrize("name", OPTIONS)
def test_random_slices(name, number, engine):
    """Random gradients in slices of a few heads or of a few batch items have the results of the definition."""
    drawn = engine.draw({name}, number, others=OPTIONS)
    case = drawn.with_(backward=True, b=max(3, drawn.b))
    rows = max(case.sq, 1) * (case.b if case.packed else 1)
    of_head = max(case.dv, 1) * (case.hq // case.hkv) * rows
    with sliced((of_head, of_head * case.hkv, min(2, case.hkv) * of_head)[number % 3]) as made:
        outcome = engine.agrees(case, refused=True)
    in_one_launch = engine.has_cudnn_since(92701)  # the last version of the bug "backward-large-group" is 9.27.0
    assert number > 1 or len(set(made)) > 1 or outcome.kind == "refused" or in_one_launch


def forward(engine, q_shape, kv_shape, **options):
    """dout, q, k, v, and the output and the log-sum-exp."""
    dout, q, k, v = (engine.normal(n, *shape) for n, shape in enumerate((q_shape, q_shape, kv_shape, kv_shape)))
    return dout, q, k, v, *attention(q, k, v, return_stats=True, **options)


def assert_right(engine, arrays, **options):
    """The gradients agree with the definition."""
    truth = reference.attention_backward(*engine.get(arrays[:4]), **options)
    for one, wanted in zip(engine.get(attention_backward(*arrays, **options)), truth, strict=True):
        np.testing.assert_allclose(one.astype(float), wanted, atol=3 * engine.tolerance)


@on_cudnn
def test_slices_of_the_batch_are_views(engine):
    """Dense gradients need no copy: each launch computes some batch items, and explain shows the launches."""
    arrays = forward(engine, (16, 4, 24, 5), (16, 4, 24, 5))
    with sliced(2 * 16 * 4 * 24):
        report = explain(*arrays[1:4], backward=True)
        assert_right(engine, arrays)
    assert [launch.problem.q.shape[3] for launch in report.launches] == [2, 2, 1]
    assert report.temporary_bytes == 0
    assert "slice of the batch" in str(report)


@on_cudnn
def test_only_the_extent_counts(engine):
    """Heads of a larger array are computed in slices, although they have few elements."""
    dout, *others = forward(engine, (16, 8, 25, 3), (16, 8, 25, 3))
    arrays = [x[:, :2] for x in (dout, *others[:4])] + [engine.xp.asfortranarray(others[4][:, :2])]
    with sliced(16 * 8 * 25) as made:
        assert_right(engine, arrays)
    assert [part.batch for part in dict.fromkeys(made)] == [range(1), range(1, 2), range(2, 3)]


@on_cudnn
def test_one_long_sequence_is_computed_by_heads(engine):
    """Where one batch item is too large, each launch computes some key/value heads, with copies of out and dout."""
    arrays = forward(engine, (16, 6, 32, 2), (16, 3, 32, 2), causal=True)
    with sliced(2 * 2 * 16 * 32) as made:
        assert_right(engine, arrays, causal=True)
    assert [(part.heads, part.batch.start) for part in dict.fromkeys(made)] == [
        (range(2), 0),
        (range(2, 3), 0),
        (range(2), 1),
        (range(2, 3), 1),
    ]


@on_cudnn
@pytest.mark.parametrize("of_heads", [False, True], ids=["batch", "heads"])
def test_functions_count_heads_and_entries_of_the_whole_call(of_heads, engine):
    """A score function gets the number of the head and of the batch item in the call, not in the slice."""
    length = 21 if of_heads else 20  # the programs of equal problems are cached
    arrays = forward(engine, (16, 4, length, 3), (16, 2, length, 3), score_mod=of_head_and_entry)
    given = engine.get(arrays[:4])
    number = (np.arange(4)[:, None] + 10.0 * np.arange(3)) / 8
    bias = number * (np.arange(length)[:, None, None, None] > 9)
    truth = reference.attention_backward(*given, bias=bias)
    with sliced(2 * 16 * length if of_heads else 4 * 16 * length) as made:
        gradients = engine.get(attention_backward(*arrays, score_mod=of_head_and_entry))
    for one, wanted in zip(gradients, truth, strict=True):
        np.testing.assert_allclose(one.astype(float), wanted, atol=3 * engine.tolerance)
    assert len(dict.fromkeys(made)) == (6 if of_heads else 3)


def of_head_and_entry(s, b, h, i, j):
    """The scores of the last keys grow with the head and the batch item."""
    return s + np.where(j > 9, (h + 10 * b) / 8, 0)


@on_cudnn
def test_too_large_for_slices(engine):
    """The query heads of one key/value head that reach too far raise Unsupported, with the limit and what to do."""
    arrays = forward(engine, (16, 2, 40, 1), (16, 1, 40, 1))
    if engine.has_cudnn_since(92701):
        pytest.skip("this cuDNN computes them in one launch")
    with sliced(2 * 16 * 40 - 1), pytest.raises(NotImplementedError, match=r"beyond 2\^31 elements .* slices of the queries"):
        attention_backward(*arrays)
