"""Batches with lengths: which are passed to cuDNN without copies, and that the padding does not spread in either form."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from cases import Case
from exact import evaluated
from fake_cupy import DEVICE
from planner import library_version, plan_problem

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, explain, get_plan_cache
from cupy_sdpa.calls import arguments
from cupy_sdpa.device import memory
from cupy_sdpa.graph import attention_backward as backward_graph
from cupy_sdpa.graph import attention_forward as forward_graph
from cupy_sdpa.graph import graph_of
from cupy_sdpa.graph.operands import Operands
from cupy_sdpa.offline.problems import ONE_DIRECTION, OPTIONS, PROBES, pair
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.support import engine_problem as engine
from cupy_sdpa.support import gpus, padding
from cupy_sdpa.support.why_not import why_not
from cupy_sdpa.version import RELEASES


@pytest.fixture
def cupy(fake):
    """Install the fake CuPy."""
    return fake


def asked(d=64, dv=None, sq=40, skv=48, hkv=2, *, arrays=(), **options):
    """The problem that cuDNN runs for a batch with lengths."""
    q, k, v = (np.empty(shape, np.float16, order="F") for shape in ((d, 4, sq, 3), (d, hkv, skv, 3), (dv or d, hkv, skv, 3)))
    given = {"q": q, "k": k, "v": v} | dict(arrays)
    return cupy_sdpa.problem(*given.values(), **{"seq_lens": True, **options})


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
    "bucket": asked(seq_lens=False, bucket=64),
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
                  "batch entries that are interleaved in memory"),
    "interleaved": (asked(arrays={"q": np.empty((64, 4, 3, 40), np.float16, order="F").swapaxes(2, 3)}),
                    "batch entries that are interleaved in memory"),
    "deterministic": (asked(backward=True, deterministic=True), "deterministic=True"),
    "bias gradient": (asked(backward=True, bias=(48, 40, 1, 3), return_dbias=True), "return_dbias=True or return_dtensors"),
    "tensor gradient": (asked(backward=True, return_dtensors=True, **SCORES), "return_dbias=True or return_dtensors"),
    "sinks gradient": (asked(backward=True, sinks=True, return_dsinks=True), "return_dsinks=True"),
    "head dim 72": (asked(72, backward=True), "gradients with a head dim that is not a multiple of 16"),
    "head dims 128 and 64": (asked(128, 64, backward=True), "gradients with different head dims, except 192 and 128"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_COPIES)
def test_problems_without_copies(name):
    """Every large array has constant offsets, one batch stride apart; the log-sum-exp has none."""
    problem = WITHOUT_COPIES[name]
    assert problem.settings.padded
    assert padding.description(problem) == "not read"
    graph = graph_of(problem)
    large = [t for t in graph.by_role("input", "output") if t.name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")]
    assert len(large) == (8 if problem.backward else 4)
    for tensor in large:
        offsets = tensor.ragged
        assert (offsets.role, offsets.dtype, offsets.shape) == ("constant", "int64", (problem.sizes[6] + 1, 1, 1, 1))
        assert offsets.step == tensor.strides[0]
    assert all(t.ragged is None for t in graph.tensors if t not in large and t.role != "virtual")
    assert padding.masked_inputs(problem) == {}


@pytest.mark.parametrize("name", WITH_COPIES)
def test_problems_with_copies(name):
    """The graph is that of dense arrays, and explain() names the copies and the reason."""
    problem, reason = WITH_COPIES[name]
    assert not problem.settings.padded
    names = "q, dout, k, v" if problem.backward else "v"
    assert padding.description(problem) == f"zeros in a copy of {names} ({reason})"
    assert not any(tensor.ragged for tensor in graph_of(problem).tensors)


def test_gradients_of_strided_arrays_are_copied():
    """cuDNN writes dq at the offsets of q."""
    for name in ("q", "dq", "dk", "dv"):
        call = arguments.read_shapes(*(np.empty((64, 4, 40, 3), np.float16, order="F"),) * 3, {}, seq_lens=True, backward=True)
        spec = getattr(call, name)
        strided = replace(spec, strides=(*spec.strides[:3], 2 * spec.strides[3]))
        plain = replace(call, settings=call.settings._replace(padded=False))
        assert padding.obstacle(plain) == ""
        assert padding.obstacle(replace(plain, **{name: strided})) == "gradients of arrays that are not dense"


@pytest.mark.parametrize("problem", [PROBES["forward, one query"], PROBES["forward, packed sequences, causal"],
                                     PROBES["forward, pages of 16 keys, 4 queries, causal bottom-right"]], ids=str)  # fmt: skip
def test_problems_without_padding(problem):
    """Neither form applies to full lengths, packed sequences and pages."""
    assert not problem.settings.padded
    assert padding.description(problem) == ""


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
        for reason in why_not(packed, version, gpus.capability(gpu))
        if reason.rule not in {other.rule for other in why_not(padded, version, gpus.capability(gpu))}
    }
    if refused:
        assert not padded.settings.padded, refused


@contextmanager
def without_offsets(monkeypatch):
    """Leave the offsets away: dense graphs without copies, which are wrong."""

    def clear():
        forward_graph.forward.cache_clear()
        backward_graph.backward.cache_clear()
        get_plan_cache().clear()

    clear()
    with monkeypatch.context() as patch:
        patch.setattr(Operands, "_padded", lambda self, tensor: tensor)
        yield
    clear()


CASES = [
    Case("plain", d=16, sq=40, skv=48, hkv=2, seq_lens_q=(20, 33), seq_lens_kv=(40, 3)),
    Case("causal", d=16, sq=40, skv=48, seq_lens_q=(20, 33), seq_lens_kv=(40, 3), causal=True),
    Case("empty", d=16, sq=24, skv=24, b=4, seq_lens_q=(24, 0, 9, 24), seq_lens_kv=(24, 10, 0, 1)),
    Case("bhsd", d=16, sq=24, skv=40, seq_lens_q=(20, 9), seq_lens_kv=(39, 3), layout="bhsd"),
    Case("sliced", d=16, sq=24, skv=40, seq_lens_q=(20, 9), seq_lens_kv=(39, 3), layout="sliced"),
]


def with_nan(cupy, case):
    """q, k, v and dout with NaN beyond the lengths, in the layout of the case."""
    lengths = case.seq_lens_q, case.seq_lens_kv, case.seq_lens_kv, case.seq_lens_q
    arrays = [*case.arrays(), case.dout()]
    for array, of in zip(arrays, lengths, strict=True):
        for b, length in enumerate(of):
            array[:, :, length:, b] = np.nan
    return case.laid_out([cupy.asarray(array) for array in arrays])


def results(cupy, case):
    """The output, the log-sum-exp and the gradients of a call whose padding is NaN."""
    q, k, v, dout = with_nan(cupy, case)
    out, stats = attention(q, k, v, return_stats=True, **case.options(cupy))
    return [x.get() for x in (out, stats, *attention_backward(dout, q, k, v, out, stats, **case.options(cupy)))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nan_in_the_padding_does_not_spread(case, cupy, monkeypatch):
    """Without the offsets it does: the fake cuDNN reads the padding of dense arrays."""
    got = results(cupy, case)
    assert not any(np.isnan(x).any() for x in got)
    with without_offsets(monkeypatch):
        assert any(np.isnan(x).any() for x in results(cupy, case))


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_the_interpreter_evaluates_the_same_graph(case):
    """Offsets do not change the results of a graph."""
    case = case.with_dtype("float64")
    q, k, v = case.arrays()

    def graph_with_offsets(problem):
        return graph_of(replace(problem, settings=problem.settings._replace(padded=True)))

    def both(call):
        wanted = evaluated(call, graph_of)
        call.arrays |= {name: array.copy("F") for name, array in wanted.items()}
        for name, array in evaluated(call, graph_with_offsets).items():
            np.testing.assert_array_equal(array, wanted[name])
        return wanted

    forward = both(arguments.read_forward(q, k, v, case.options(), return_stats=True))
    both(arguments.read_backward(q, k, v, case.options(), dout=case.dout(), **forward))


@pytest.mark.parametrize("padded", [True, False])
def test_memory_of_a_call(padded, cupy, monkeypatch):
    """Without copies, a call allocates its results and nothing of their size; with copies, those of the arrays."""
    case = Case("memory", d=64, sq=256, skv=256, hq=4, hkv=4, b=2, seq_lens_q=(200, 256), seq_lens_kv=(1, 100), dtype="float16")
    q, k, v, dout = with_nan(cupy, case)
    if not padded:
        monkeypatch.setattr(engine, "obstacle", lambda problem: "this test")
    engine._engine_problem.cache_clear()
    options, sizes = case.options(cupy), []

    def allocate(size):
        sizes.append(size)
        return cupy.get_default_memory_pool().malloc(size)

    def large(function, plan):
        function()  # creates the plan
        sizes.clear()
        with cupy.cuda.using_allocator(allocate):
            function()
        return (sum(sizes) - plan.workspace) // v.nbytes

    out, stats = attention(q, k, v, return_stats=True, **options)
    into = {name: cupy.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    forward, backward = (explain(q, k, v, backward=backward, **options).plan for backward in (False, True))
    assert large(lambda: attention(q, k, v, out=out, stats=stats, **options), forward) == (0 if padded else 1)
    assert large(lambda: attention_backward(dout, q, k, v, out, stats, **into, **options), backward) == (0 if padded else 4)
    engine._engine_problem.cache_clear()


def test_explain_names_the_form(cupy):
    """One line of the report, also of its table."""
    q, k, v, _ = with_nan(cupy, CASES[0])
    options = CASES[0].options(cupy)
    report = explain(q, k, v, **options)
    assert "  padding          not read\n" in f"{report}\n"
    assert "not read" in report._repr_html_()
    assert "  padding          zeros in a copy of q, dout, k, v (deterministic=True)\n" in (
        f"{explain(q, k, v, backward=True, deterministic=True, **options)}\n"
    )
    assert "padding" not in str(explain(q, k, v))
    assert "padding" not in str(explain(*CASES[0].arrays(), **CASES[0].options()))


def test_shapes_give_the_plan_of_a_call(cupy):
    """A plan built ahead of time has the key of that of a call with arrays."""
    q, k, v, _ = with_nan(cupy, CASES[0])
    shapes = [x.shape for x in (q, k, v)]
    for options in ({}, {"backward": True}):
        problem = cupy_sdpa.problem(*shapes, dtype="bfloat16", seq_lens=True, **options)
        assert problem == explain(q, k, v, **CASES[0].options(cupy), **options).problem
        assert problem.settings.padded


def test_a_loaded_plan_has_its_offsets(cupy):
    """The offsets are no part of a stored plan; they are bound when it is loaded."""
    plans = get_plan_cache()
    wanted = results(cupy, CASES[0])
    plans.clear()
    got = results(cupy, CASES[0])
    assert [plan.info.loaded for plan in plans._entries.values()] == [True, True]
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_call_with_large_arrays_is_replayed(cupy):
    """Calls with lengths copied more than 4 MiB of v were parsed every time."""
    case = Case("large", d=64, sq=2, skv=5000, hkv=4, hq=4, b=2, seq_lens_q=(2, 1), seq_lens_kv=(4000, 30), dtype="float16")
    q, k, v, _ = with_nan(cupy, case)
    options = case.options(cupy)
    out = cupy.empty_like(q)
    for _ in range(6):
        attention(q, k, v, out=out, **options)
    DEVICE.wait_for_all()
    assert DEVICE.graphs
    assert not np.isnan(out.get()).any()


def test_multiples(cupy):
    """One array per step and dtype; a longer one is created if needed, and the shorter one stays."""
    first = memory.multiples(512, 5, "int64")
    assert first.dtype == np.int64
    assert first.get()[:5].tolist() == [0, 512, 1024, 1536, 2048]
    assert memory.multiples(512, 9, "int64").data.ptr == first.data.ptr
    assert memory.multiples(1, 5, "int32").get()[:3].tolist() == [0, 1, 2]
    longer = memory.multiples(512, 1000, "int64")
    assert longer.data.ptr != first.data.ptr
    assert longer.get()[999] == 999 * 512
    assert first.get()[:3].tolist() == [0, 512, 1024], "plans may store the address of the shorter one"
    assert memory.multiples(1 << 40, 3, "int64").get()[2] == 2 << 40
    assert not memory.is_constant(first)


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
@pytest.mark.parametrize("name", WITHOUT_COPIES)
def test_cudnn_plans_problems_without_copies(name, gpu, planner):
    """Where the table allows them, and with as much workspace as the dense graph with lengths."""
    problem = WITHOUT_COPIES[name]
    if why_not(problem, planner.call(library_version), gpus.capability(gpu)):
        return
    plan = planner.accept(plan_problem, problem, gpu)
    assert isinstance(plan, PlanInfo), plan
    dense = planner.accept(plan_problem, replace(problem, settings=problem.settings._replace(padded=False)), gpu)
    assert plan.workspace < dense.workspace + 65536
