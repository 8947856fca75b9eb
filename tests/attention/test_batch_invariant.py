"""``batch_invariant=True``: the call raises Unsupported with the fix, or runs unchanged."""

import numpy as np
import pytest

from cupy_sdpa import (
    Unsupported,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    block_mask,
    explain,
    prepare,
    problem,
)

PAGES = {"page_table": np.arange(6, dtype=np.int32).reshape(2, 3), "seq_lens_kv": np.full(3, 30, np.int32)}
#: The number of queries, the options, and words of the message with cuDNN; no word if the call runs.
CALLS = {
    "two queries": (2, {"causal": "bottom_right", "return_stats": True}, ""),
    "one query": (1, {}, "pass deterministic=True"),
    "one deterministic query": (1, {"deterministic": True}, ""),
    "gradients": (20, {"backward": True}, "the order in which dq is summed varies: pass deterministic=True"),
    "deterministic gradients": (20, {"backward": True, "deterministic": True}, ""),
    "a limit": (20, {"max_workspace": 1 << 30}, "max_workspace"),
    "dropout": (20, {"dropout_p": 0.1, "seed": 1}, "omit dropout_p"),
    "pages": (2, PAGES, "pass num_splits=1, or another number"),
    "split pages": (2, PAGES | {"num_splits": 2}, ""),
    "pages with slopes": (2, PAGES | {"alibi_slopes": np.ones(4, np.float32)}, "gather the pages"),
}


def call_of(name, engine):
    """The arrays of a call, its options on the engine, and words of its message there."""
    queries, options, words = CALLS[name]
    q, k = (
        engine.normal(0, 16, 4, queries, 3),
        engine.normal(1, *((16, 2, 16, 6) if "page_table" in options else (16, 2, 40, 3))),
    )
    refused = engine.on_cudnn or name == "dropout"
    return (q, k, k), {key: engine.put(x) for key, x in options.items()}, words if refused else ""


@pytest.mark.parametrize("name", CALLS)
def test_an_invariant_call_is_refused_or_runs_unchanged(name, engine):
    """The option raises what the report states, and ``explain`` lists it; it changes nothing where the report states nothing."""
    arrays, options, words = call_of(name, engine)
    report = explain(*arrays, **options, batch_invariant=True)
    assert bool(report) is not bool(words)
    if words:
        assert words in report.reasons[0]
        assert report.plan is None
        report = explain(*arrays, **options)
        assert f"may depend on the rest of the batch: {report.batch_dependence}" in str(report)
    else:
        assert report.batch_dependence == ""
        assert "bits of a sequence do not depend on the rest of the batch" in str(report)
    if options.pop("backward", False):
        out, stats = attention(*arrays, return_stats=True)
        function, arrays = attention_backward, (out, *arrays, out, stats)
    else:
        function = attention
    if words:
        with pytest.raises(Unsupported, match=words):
            function(*arrays, **options, batch_invariant=True)
        return
    found, wanted = (function(*arrays, **options, **more) for more in ({"batch_invariant": True}, {}))
    for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, wanted)), strict=True):
        np.testing.assert_array_equal(engine.get(x), engine.get(y))


def test_every_pass_is_checked_before_the_first_one_runs(engine):
    """A pullback, a derivative and a prepared call raise when they are made, not when they run."""
    q, k = engine.normal(0, 16, 4, 20, 3), engine.normal(1, 16, 4, 20, 3)
    calls = {
        "vjp": lambda **flags: attention_vjp(q, k, k, **flags, batch_invariant=True)[1](q),
        "jvp": lambda **flags: attention_jvp(q, k, k, q, **flags, batch_invariant=True),
        "prepare": lambda **flags: prepare(q, k, k, backward=True, **flags, batch_invariant=True),
        "compute_dtype": lambda **flags: attention_vjp(
            *(engine.put(np.ones((16, 4, 20, 3), np.float32, order="F")) for _ in range(3)), compute_dtype="float16", **flags,
            batch_invariant=True,
        ),
    }  # fmt: skip
    for make in calls.values():
        if engine.on_cudnn:
            with pytest.raises(
                Unsupported,
                match=r"^batch_invariant is True, but the order in which dq is summed varies: .* deterministic=True$",
            ):
                make()
        make(deterministic=True)


def test_problems_are_refused_as_on_a_gpu():
    """A problem for plans ahead of time is a GPU's problem; the option is not part of it."""
    shape = (64, 8, 16, 2)
    with pytest.raises(Unsupported, match="pass deterministic=True"):
        problem(shape, shape, shape, dtype="float16", backward=True, batch_invariant=True)
    options = {"dtype": "float16", "backward": True, "deterministic": True}
    assert problem(shape, shape, shape, **options, batch_invariant=True) == problem(shape, shape, shape, **options)


def test_numpy_arrays_are_explained_for_a_gpu():
    """The report for a named GPU has the reason of that GPU."""
    q = np.ones((16, 2, 1, 3), np.float16, order="F")
    assert explain(q, q, q, batch_invariant=True)
    report = explain(q, q, q, batch_invariant=True, gpu="H200", cudnn="9.19")
    assert "pass deterministic=True" in report.reasons[0]


def test_nothing_is_computed_by_blocks(engine):
    """The batch size determines how blocks are computed: a block mask becomes a dense mask."""
    q, k = (engine.normal(seed, 16, 1, 2048, 2) for seed in (0, 1))
    mask = block_mask(lambda b, h, q_idx, kv_idx: q_idx // 128 == kv_idx // 128, 2048, 2048)
    blocks, whole = (explain(q, k, k, block_mask=mask, batch_invariant=flag) for flag in (False, True))
    assert "batch_invariant" in whole.blocks
    assert "batch_invariant" not in blocks.blocks
    assert whole.batch_dependence == ""
    assert len(whole.steps) <= len(blocks.steps)
