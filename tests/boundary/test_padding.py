"""Batches with lengths: which are passed to cuDNN without copies, and that the padding does not spread in either form."""

from dataclasses import replace

import numpy as np
import pytest
from engines import every_engine, numbers, one_in
from functions import has_plan
from planner import plan_problem

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_jvp, explain, get_plan_cache
from cupy_sdpa.cli.support_problems import PROBES
from cupy_sdpa.core.support import gpus, padding
from cupy_sdpa.core.support.why_not import why_not
from cupy_sdpa.core.version import RELEASES
from tools.support_table import ONE_DIRECTION, OPTIONS, pair

EITHER_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


@every_engine
@pytest.mark.parametrize("number", numbers(8, quick=1, sweep=4))
@pytest.mark.parametrize(
    "names", [("seq_lens_q",), ("seq_lens_q", "seq_lens_kv"), ("seq_lens_kv", "preallocated")], ids="-".join
)
def test_random_problems(names, number, engine):
    """NaN in the padding does not spread, and memory beyond the lengths is not written, with any other options and strides."""
    engine.agrees(engine.draw(names, number), refused=True)


def asked(d=64, dv=None, sq=40, skv=48, hkv=2, *, arrays=(), **options):
    """The problem that cuDNN runs for a batch with lengths."""
    q, k, v = (np.empty(shape, np.float16, order="F") for shape in ((d, 4, sq, 3), (d, hkv, skv, 3), (dv or d, hkv, skv, 3)))
    given = {"q": q, "k": k, "v": v} | dict(arrays)
    return cupy_sdpa.problem(*given.values(), **{"seq_lens_kv": True, **options})


SLICED = {"q": np.empty((64, 4, 64, 3), np.float16, order="F")[:, :, :40]}
SCORES = {"score_mod": lambda s, b, h, i, j, x: s + x[b, j], "tensors": {"x": (3, 48)}}

#: Problems that are passed without copies.
WITHOUT_COPIES = {
    "plain": asked(),
    "log-sum-exp": asked(return_stats=True),
    "causal": asked(causal=True),
    "bottom right": asked(causal="bottom_right"),
    "window": asked(window=(5, 3)),
    "any head dim": asked(72, 40),
    "a slice": asked(arrays=SLICED),
    "heads before positions": asked(arrays={"v": np.empty((64, 48, 2, 3), np.float16, order="F").swapaxes(1, 2)}),
    "bucket": asked(seq_lens_kv=False, bucket=64),
    "gradients": asked(backward=True),
    "gradients, causal": asked(backward=True, causal=True),
    "gradients, 192 and 128": asked(192, 128, backward=True),
    "bias": asked(bias=(48, 40, 1, 3)),
    "mask": asked(mask=(48, 40, 1, 3)),
    "ALiBi": asked(alibi_slopes=True, causal="bottom_right"),
    "softcap": asked(softcap=10.0),
    "scores": asked(**SCORES),
    "sinks": asked(sinks=True),
    "gradients, bias": asked(backward=True, bias=(48, 40, 1, 3)),
    "gradients, scores": asked(backward=True, **SCORES),
    "gradients, sinks": asked(backward=True, sinks=True),
}
#: Problems of which arrays are copied, and the reason.
WITH_COPIES = {
    "one query": (asked(sq=1), "one query"),
    "dropout": (asked(dropout_p=0.1), "dropout_p"),
    "gradients, dropout": (asked(backward=True, dropout_p=0.1), "dropout_p"),
    "broadcast": (asked(arrays={"k": np.broadcast_to(np.empty((64, 2, 48, 1), np.float16, order="F"), (64, 2, 48, 3))}),
                  "batch items that are interleaved in memory"),
    "interleaved": (asked(arrays={"q": np.empty((64, 4, 3, 40), np.float16, order="F").swapaxes(2, 3)}),
                    "batch items that are interleaved in memory"),
    "deterministic": (asked(backward=True, deterministic=True), "deterministic=True"),
    "bias gradient": (asked(backward=True, bias=(48, 40, 1, 3), return_dbias=True), "return_dbias=True or return_dtensors"),
    "tensor gradient": (asked(backward=True, return_dtensors=True, **SCORES), "return_dbias=True or return_dtensors"),
    "sinks gradient": (asked(backward=True, sinks=True, return_dsinks=True), "return_dsinks=True"),
    "head dim 72": (asked(72, backward=True), "gradients with a head dim that is not a multiple of 16"),
    "head dims 128 and 64": (asked(128, 64, backward=True), "gradients with different head dims, except 192 and 128"),
}  # fmt: skip


#: Problems of full lengths, packed sequences and pages.
WITHOUT_PADDING = {
    name: PROBES[name]
    for name in (
        "forward, one query", "forward, packed sequences, causal", "forward, pages of 16 keys, 4 queries, causal bottom-right",
    )
}  # fmt: skip


@pytest.mark.parametrize("name", [*WITHOUT_COPIES, *WITH_COPIES, *WITHOUT_PADDING])
def test_what_is_copied(name):
    """The padding is not read, or explain() names the copies and the reason; neither applies to problems without padding."""
    problem, reason = WITH_COPIES.get(name, (WITHOUT_COPIES.get(name) or WITHOUT_PADDING.get(name), ""))
    copied = f"zeros in a copy of {'q, dout, k, v' if problem.backward else 'v'} ({reason})" if reason else ""
    assert problem.settings.padded == (name in WITHOUT_COPIES)
    assert padding.description(problem) == ("not read" if name in WITHOUT_COPIES else copied)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("lengths", "packed")])
def test_what_is_refused_for_packed_sequences_has_copies(name, backward):
    """A rule or a bug of packed sequences that does not concern dense arrays with lengths."""
    if name in ONE_DIRECTION[not backward]:
        return
    packed, padded = pair("packed", name, backward=backward), pair("lengths", name, backward=backward)
    refused = {
        reason.rule
        for version in RELEASES
        for gpu in gpus.REPRESENTATIVES
        for reason in why_not(packed, version, gpus.capability_of(gpu))
        if reason.rule not in {other.rule for other in why_not(padded, version, gpus.capability_of(gpu))}
    }
    if refused:
        assert not padded.settings.padded, refused


def batch(engine, b=3, sq=40, skv=48, d=64):
    """q, k, v, dout with NaN beyond the lengths, and the options."""
    rng = np.random.default_rng(b)
    shapes = (d, 4, sq, b), (d, 4, skv, b), (d, 4, skv, b), (d, 4, sq, b)
    host = [np.asfortranarray(rng.standard_normal(shape).astype(np.float16)) for shape in shapes]
    lengths = [rng.integers(1, n + 1, b).astype(np.int32) for n in (sq, skv)]
    for array, of in zip(host, (lengths[0], lengths[1], lengths[1], lengths[0]), strict=True):
        array.transpose(3, 2, 0, 1)[np.arange(array.shape[2]) >= of[:, None]] = np.nan
    return engine.put(host), engine.put({"seq_lens_q": lengths[0], "seq_lens_kv": lengths[1]})


@EITHER_GPU
@pytest.mark.parametrize("copied", [False, True])
def test_memory_of_a_call(copied, engine):
    """Without copies, a call allocates its results and nothing of their size; with copies, also copies of the arrays."""
    (q, k, v, dout), options = batch(engine, 2, 256, 256)
    sizes, pool = [], engine.xp.get_default_memory_pool()

    def allocate(size):
        sizes.append(size)
        return pool.malloc(size)

    def large(function, plan):
        function()  # creates the plan
        sizes.clear()
        with engine.xp.cuda.using_allocator(allocate):
            function()
        return (sum(sizes) - plan.workspace) // v.nbytes

    out, stats = attention(q, k, v, return_stats=True, **options)
    into = {name: engine.xp.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    more = {"deterministic": True} if copied else {}
    report = explain(q, k, v, backward=True, **options, **more)
    assert large(lambda: attention_backward(dout, q, k, v, out, stats, **into, **options, **more), report.plan) == 4 * copied
    if copied:
        more = {"dropout_p": 0.1, "seed": 1}
        assert "copy of v (dropout_p)" in str(explain(q, k, v, **options, **more))
    report = explain(q, k, v, return_stats=True, **options, **more)
    assert large(lambda: attention(q, k, v, out=out, stats=stats, **options, **more), report.plan) == copied


def test_explain_names_the_form(fake):
    """One line of the report, also of its table; the problem from shapes equals the problem of a call with arrays."""
    from engines import Engine

    (q, k, v, _), options = batch(Engine("fake", fake))
    report = explain(q, k, v, **options)
    assert "  padding          not read\n" in f"{report}\n"
    assert "not read" in report._repr_html_()
    line = "  padding          zeros in a copy of q, dout, k, v (deterministic=True)\n"
    assert line in f"{explain(q, k, v, backward=True, deterministic=True, **options)}\n"
    assert "padding" not in str(explain(q, k, v))
    assert "padding" not in str(
        explain(*(x.get(order="F") for x in (q, k, v)), **{name: x.get() for name, x in options.items()})
    )
    for more in ({}, {"backward": True}):
        problem = cupy_sdpa.problem(*(x.shape for x in (q, k, v)), dtype="float16", seq_lens_kv=True, **more)
        assert problem == explain(q, k, v, **options, **more).problem


@pytest.mark.slow
@EITHER_GPU
def test_loaded_plans_and_longer_batches(engine):
    """The offsets are not part of a stored plan; a longer batch's offsets replace no memory that replayed calls read."""

    def results(b):
        (q, k, v, dout), options = batch(engine, b, 16, 16)
        out, stats = attention(q, k, v, return_stats=True, **options)
        return engine.get((out, stats, *attention_backward(dout, q, k, v, out, stats, **options)))

    wanted = results(3)
    for longer in (400, None, 700):
        for _ in range(5):
            for x, y in zip(results(3), wanted, strict=True):
                np.testing.assert_array_equal(x, y)
        if longer is None:
            get_plan_cache().clear()
        else:
            (q, k, v, _), options = batch(engine, longer, 16, 16)
            assert np.isfinite(engine.get(attention(q, k, v, **options))).all()


@EITHER_GPU
def test_a_call_with_large_arrays_is_replayed(engine):
    """Calls with lengths copied more than 4 MiB of v were parsed every time."""
    get_plan_cache().clear()
    (q, k, v, _), options = batch(engine, 2, 2, 5000)
    out = engine.xp.empty_like(q)
    for _ in range(6):
        attention(q, k, v, out=out, **options)
    assert np.isfinite(engine.get(out)).all()
    assert get_plan_cache().recordings == 1


@pytest.mark.cudnn
@pytest.mark.parametrize("name", one_in(3, WITHOUT_COPIES))
def test_cudnn_plans_problems_without_copies(name, planner):
    """Where the table allows them, with as much workspace as the dense graph; the H200 always, other GPUs in turn."""
    problem, others = WITHOUT_COPIES[name], [gpu for gpu in gpus.REPRESENTATIVES if gpu != "h200"]
    for gpu in ("h200", others[[*WITHOUT_COPIES].index(name) % len(others)]):
        plan = has_plan(planner.accept, problem, gpu, None)
        if plan is not None:
            dense = replace(problem, settings=problem.settings._replace(padded=False))
            assert plan.workspace < planner.accept(plan_problem, dense, gpu).workspace + 65536


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_lengths_that_are_converted(kind):
    """On numpy, lists, tuples and int64 arrays of lengths, offsets and pages are read by every call, also by repeated ones."""
    q, k, v = (np.asfortranarray(np.random.default_rng(n).standard_normal((8, 2, 6, 3), np.float32)) for n in range(3))
    packed = [x.reshape(8, 2, 18, order="F") for x in (q, k, v)]
    pages = [x.reshape(8, 2, 2, 9, order="F") for x in (k, v)]
    longest = {"max_seqlen_q": 6, "max_seqlen_kv": 6}
    for lengths in ([3, 4, 5], [3, 4, 5], [6, 0, 2], [1, 4, 6]):
        starts, table = [0, *np.cumsum(lengths).tolist()], [[lengths[0], 0, 8], [1, 2, 7], [4, 5, 3]]
        for arrays, options, others in (
            ((q, k, v), {"seq_lens_kv": lengths}, {}),
            (packed, {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}, longest),
            ((q, *pages), {"page_table": table, "seq_lens_kv": lengths}, {}),
        ):
            wanted = attention(*arrays, **{name: np.asfortranarray(x, np.int32) for name, x in options.items()}, **others)
            np.testing.assert_array_equal(
                attention(*arrays, **{name: kind(x) for name, x in options.items()}, **others), wanted
            )
        derivative = attention_jvp(q, k, v, dq=q, seq_lens_kv=kind(lengths))
        for x, y in zip(derivative, attention_jvp(q, k, v, dq=q, seq_lens_kv=np.int32(lengths)), strict=True):
            np.testing.assert_array_equal(x, y)
