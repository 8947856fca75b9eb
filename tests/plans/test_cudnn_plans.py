"""The real cuDNN accepts and plans the graphs of the package for described GPUs."""

import re
from dataclasses import replace

import numpy as np
import pytest
from cases import FORWARD, Case
from planner import compared, in_child, library_version, plan_graph, plan_problem

import cupy_sdpa
from cupy_sdpa.calls import arguments
from cupy_sdpa.errors import Unsupported
from cupy_sdpa.graph.attention_backward import backward
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.graph.nodes import Builder, Tensor, row_major
from cupy_sdpa.offline.problems import PROBES
from cupy_sdpa.plans.lowering import OperationGraph, crashing_patterns
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.plans.planner import ORDERED, ORDERED_SINCE
from cupy_sdpa.problem.subproblems import subproblems
from cupy_sdpa.problem.validation import make_problem
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import guards, why_not
from cupy_sdpa.version import version_text

pytestmark = pytest.mark.cudnn

#: The cases for GPUs other than the H200.
SOME = [
    c
    for c in FORWARD
    if c.name in {"causal", "d128_gqa_causal_fp16", "mla_192_128", "d256", "odd_lengths", "decode", "bhsd", "negative_scale"}
]

#: Backward plans that cuDNN 9.28 refuses for constructed descriptions, and that the table does not exclude.
REFUSED = {("b200", "d256")}


def _problem(case):
    return arguments.read_shapes(*case.laid_out(case.arrays()), case.options(), return_stats=case.stats)


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_every_forward_case_is_planned_for_the_h200(case, planned):
    """cuDNN finalizes a plan with a compiled kernel for every named case, and the table excludes none."""
    asked = _problem(case)
    if refused := {reason.rule for reason in why_not(asked, planned(library_version), gpus.capability("h200"))}:
        assert refused == {"max-sumexp"}  # which cuDNN plans but does not compute
        return
    plan = planned(plan_graph, forward(asked), "h200")
    assert isinstance(plan, PlanInfo), plan
    assert plan.engine in (1, 2)


@pytest.mark.parametrize("gpu", [name for name in gpus.REPRESENTATIVES if name != "h200"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_other_gpus_are_planned_for_too(case, gpu, planned):
    """The same graphs are planned for Ampere, Ada and Blackwell; where the table refuses one, it has a reason."""
    asked = _problem(case)
    plan = planned(plan_graph, forward(asked), gpu)
    assert isinstance(plan, PlanInfo), plan
    reasons = why_not(asked, plan.cudnn, gpus.capability(gpu))
    assert all(reason.rule == "decode-blackwell" for reason in reasons)


@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
@pytest.mark.parametrize("words", ["forward, bias, ALiBi, softcap", "gradients, ALiBi, softcap, dropout"])
def test_kernels_are_compiled_for_every_gpu(words, gpu, planner):
    """A plan has its kernel: it is finalized, and its serialized form is as long as a kernel."""
    plan = planner.call(plan_problem, PROBES[words], gpu)
    assert isinstance(plan, PlanInfo), plan
    assert plan.size > 20_000


def test_without_kernels_the_choice_is_the_same(planner):
    """What is accepted is what would be planned, but for the kernel; what cuDNN refuses is refused."""
    graph = forward(Case("accepted", d=128, sq=256, causal=True).problem())
    compared(planner, plan_graph, graph, "h200")
    assert planner.accept(plan_graph, graph, "h200").size == 0
    refused = planner.accept(plan_graph, forward(Case("d12", d=12, sq=64).problem()), "h200")
    assert "multiple of 8" in refused
    by_hand = planner.accept(plan_graph, backward(Case("ordered").gradient_problem()), "a100", True, ORDERED)
    assert "engine 6" in by_hand


def limited(asked, size):
    """A copy of the problem with a limit of its workspace."""
    return replace(asked, settings=asked.settings._replace(max_workspace=size))


@pytest.mark.parametrize("way", ["summed", "direct", "ordered"])
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_every_backward_case_is_planned_for_the_h200(case, way, planned):
    """Every method to compute gradients, for every named case, with the guards that the case needs."""
    asked = case.gradient_problem()
    version = planned(library_version)
    if reasons := {reason.rule for reason in why_not(asked, version, 90)}:
        assert reasons <= {"backward-one-row", "bias-gradient", "dropout-sinks-gradient", "packed-sinks-gradient"}
        return
    if asked.dbias and way == "ordered":
        return  # never requested: the gradient of a bias is written directly
    config = ORDERED if way == "ordered" else None
    for part in subproblems(asked):
        graph = backward(part, way == "direct", guards(part, version, 90))
        plan = planned(plan_graph, graph, "h200", True, config)
        if way == "ordered" and version < ORDERED_SINCE:
            assert isinstance(plan, str)
        else:
            assert isinstance(plan, PlanInfo), plan
            assert plan.engine == 6


@pytest.mark.parametrize("gpu", [name for name in gpus.REPRESENTATIVES if name != "h200"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_gradients_are_planned_for_other_gpus(case, gpu, planned):
    """Ampere, Ada and Blackwell; cuDNN refuses what the table refuses."""
    asked = case.gradient_problem()
    plan = planned(plan_graph, backward(asked), gpu)
    reasons = why_not(asked, planned(library_version), gpus.capability(gpu))
    if isinstance(plan, str):
        assert {reason.rule for reason in reasons} == {"backward-head-dim"} or (gpu, case.name) in REFUSED, plan
    else:
        assert not reasons, plan


@pytest.mark.parametrize(("sq", "skv"), [(16, 1), (1, 1), (16, 2)])
def test_subtracting_a_one_element_array_crashes_cudnn(sq, skv, planner):
    """Gradients of a single key whose score function subtracts an array of one element; the remedy of the refusal is planned."""
    q, kv = (64, 2, sq, 2), (64, 2, skv, 2)
    version = planner.call(library_version)
    for function in (lambda s, b, h, i, j, t: s - t, lambda s, b, h, i, j, t: s + (-t)):
        asked = cupy_sdpa.problem(q, kv, kv, dtype="float16", backward=True, score_mod=function, tensors={"t": ()})
        refused = [reason.rule for reason in why_not(asked, version, 90)]
        code = in_child(plan_graph, backward(asked), "h200")
        assert (refused == ["single-key-difference"]) == (code < 0), f"the child ended with {code}, the table says {refused}"
    assert not refused


def test_one_row_crashes_cudnn(planner):
    """Gradients of one query, head and batch entry are refused, and crash cuDNN; with two queries they are planned."""
    row = Case("row", d=128, hq=1, hkv=1, sq=1, skv=64, b=1)
    version = planner.call(library_version)
    refused = [reason.rule for reason in why_not(row.gradient_problem(), version, 90)]
    code = in_child(plan_graph, backward(row.gradient_problem()), "h200")
    assert (refused == ["backward-one-row"]) == (code < 0), f"the child ended with {code}, the table says {refused}"
    two = Case("two_rows", d=128, hq=1, hkv=1, sq=2, skv=64, b=1)
    assert in_child(plan_graph, backward(two.gradient_problem()), "h200") == 0


def test_deterministic_gradients_keep_within_the_memory(planner):
    """The quadratic plan within max_workspace, the ordered engine beyond it, and a refusal with all sizes if neither fits."""
    case = Case("deterministic", d=128, hq=8, hkv=8, sq=2048, b=1)
    quadratic = planner.call(plan_problem, case.gradient_problem(deterministic=True), "h200")
    assert quadratic.workspace > 2 * 8 * 2048 * 2048
    version = planner.call(library_version)
    plan = planner.call(plan_problem, case.gradient_problem(deterministic=True, max_workspace=20 << 20), "h200")
    if version >= ORDERED_SINCE:
        assert plan.workspace <= 20 << 20
        assert any(str(20 << 20) in reason for reason in plan.refused)
    else:
        assert isinstance(plan, str)
    text = planner.call(plan_problem, case.gradient_problem(deterministic=True, max_workspace=1000), "h200")
    assert "1000 are allowed" in text


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_every_backward_method_has_its_guards(deterministic, planner):
    """The plan for gradients of one query masks the padding with every method, including the ordered one."""
    case = Case("one_query", d=128, hq=8, hkv=8, sq=1, skv=4096, b=1)
    asked = case.gradient_problem(deterministic=deterministic)
    plan = planner.call(plan_problem, asked, "h200")
    ways = [plan]
    if deterministic and plan.cudnn >= ORDERED_SINCE:
        ways.append(planner.call(plan_problem, limited(asked, 1 << 20), "h200"))
        assert isinstance(ways[1], PlanInfo), ways[1]
        assert "ΣdQ" in str(ways[1].graph.tensors)
    assert guards(asked, plan.cudnn, 90) == {"queries"}
    for way in ways:
        assert "i′ < 1" in str(way.graph)


def test_max_workspace_refuses_larger_plans(planner):
    """Forward and backward; the message contains the workspace that they need."""
    decode = Case("decode", d=128, hq=8, hkv=2, sq=1, skv=8192)
    free = planner.call(plan_problem, decode.problem(), "h200")
    less = planner.call(plan_problem, limited(decode.problem(), free.workspace - 1), "h200")
    assert isinstance(less, PlanInfo)
    assert less.workspace < free.workspace
    assert f"needs a workspace of {free.workspace} bytes, {free.workspace - 1} are allowed" in less.refused[0]
    text = planner.call(plan_problem, Case("gqa", hkv=2).gradient_problem(max_workspace=10), "h200")
    assert "10 are allowed" in text


def test_the_fast_engine_is_the_first_choice(planner):
    """Large problems on the H200 get the Hopper kernel (engine 2), with a workspace of at most 1 KiB."""
    plan = planner.plan(forward(Case("large", d=128, hq=64, hkv=8, sq=8192, b=1, causal=True).problem()))
    assert plan.engine == 2
    assert plan.workspace <= 1024
    assert plan.refused == ()
    assert "TENSOR_CORE" in plan.notes


def graph_retention(graph, gpu):
    """In a child: the version of cuDNN, and whether captured CUDA graphs own a plan that was built, and one that was loaded."""
    from cupy_sdpa._cudnn.constants import AttributeType
    from cupy_sdpa._cudnn.library import library
    from cupy_sdpa.offline.planner import load_target
    from cupy_sdpa.plans.disk_cache import DiskCache
    from cupy_sdpa.plans.planner import load, load_or_build

    if library().version < 92800:
        return library().version, None
    target = load_target(gpu)
    built = load_or_build(graph, target, disk_cache=DiskCache(None))
    plans = [built, load(built.content(), graph, target, built.key)]
    kinds = [plan._descriptor.get("CUDA_GRAPH_RETENTION", AttributeType.CUDA_GRAPH_RETENTION) for plan in plans]
    for plan in plans:
        plan.close()
    return library().version, kinds


def test_captured_graphs_do_not_own_plans(planner):
    """With cuDNN 9.28 a launch of a captured CUDA graph that owns its plan takes 2 to 6 us longer."""
    version, kinds = planner.call(graph_retention, forward(Case("plain").problem()), "h200")
    assert kinds == (None if version < 92800 else [[1], [1]])


def test_decoding_splits_the_keys(planner):
    """One query and many keys get the kernel that splits the keys, as its workspace shows."""
    plan = planner.plan(forward(Case("decode", d=128, hq=8, hkv=2, sq=1, skv=8192).problem()))
    assert plan.workspace > 100_000


def test_a_refusal_keeps_every_reason(planner):
    """Every engine refuses a head dim that is no multiple of 8; the reason of each is kept."""
    text = planner.plan(forward(Case("d12", d=12, sq=64).problem()))
    assert isinstance(text, str)
    assert "multiple of 8" in text
    assert {"engine 1", "engine 2"} <= set(re.findall(r"engine \d+", text))
    assert len(text.splitlines()) == len(set(text.splitlines()))


def test_the_scale_is_not_part_of_the_graph(planner):
    """The scale is a by-value scalar, so graphs with different scales are equal."""
    one, other = (forward(Case("scaled", scale=scale).problem()) for scale in (0.1, 0.2))
    assert one is other


# Graphs that crash cuDNN (measured with 9.19 and 9.28): they are refused, and cuDNN would crash.


def _head_dim_strided():
    q = np.empty((2, 4, 128, 64), np.float16).T  # (64, 128, 4, 2): axis 0 contiguous
    q = q.transpose(0, 2, 1, 3)
    k = np.empty((64, 4, 128, 2), np.float16)  # C order: axis 0 has the largest stride
    return forward(
        make_problem(tuple((name, ("bfloat16", x.shape, x.strides, 16)) for name, x in zip("qkv", (q, k, q), strict=True)))
    )


def _captured(dtype, mode):
    """Scores combined with a tensor from memory: a mask, or 8-bit numbers."""
    asked = Case("captured", sq=128).problem()
    g = Builder()
    shape = (asked.sizes[-1], 4, 128, 128)
    captured = Tensor("captured", shape, dtype, "input", row_major(shape), (3, 2, 1, 0))
    plain = forward(asked)
    for node in plain.nodes:
        if node.formula.startswith("P ="):
            s = node.x
            if mode == "binary_select":
                s = g.pointwise("captured", mode, s, g.scalar("-inf", value=-np.inf), captured, out="masked")
            else:
                s = g.pointwise("captured", mode, s, captured, out="scaled")
            g.softmax(node.formula, s, "P", "bfloat16")
        else:
            g.nodes.append(node)
    return g.graph()


DEADLY = {
    "head_dim_not_contiguous": (_head_dim_strided, "segmentation fault"),
    "boolean_mask_in_memory": (lambda: _captured("bool", "binary_select"), "floating-point exception"),
    "8_bit_numbers_in_memory": (lambda: _captured("uint8", "mul"), "abort"),
}


@pytest.mark.parametrize("name", DEADLY)
def test_crashing_graphs_are_refused(name, planner):
    """The message names the tensor and the crash, and the process continues."""
    build, words = DEADLY[name]
    graph = build()
    assert crashing_patterns(graph)
    with pytest.raises(Unsupported, match=words):
        OperationGraph(graph)
    assert isinstance(planner.plan(graph), str)


@pytest.mark.parametrize("name", DEADLY)
def test_crashing_graphs_crash_cudnn_without_the_guard(name, planner):
    """The child is ended by a signal. If this test fails, cuDNN has fixed the bug and the guard can be removed."""
    graph = DEADLY[name][0]()
    code = in_child(plan_graph, graph, "h200", False)
    assert code < 0, f"the child ended with {code}"


def test_harmless_graphs_are_planned_without_the_guard(planner):
    """So the crashes above are caused by the graphs."""
    assert in_child(plan_graph, forward(Case("harmless").problem()), "h200", False) == 0


def test_the_children_use_a_supported_cudnn(planner):
    """The version of the planning cuDNN is supported by the package."""
    plan = planner.plan(forward(FORWARD[0].problem()))
    assert plan.cudnn >= 91900, version_text(plan.cudnn)
