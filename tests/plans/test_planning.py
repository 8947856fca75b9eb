"""The real cuDNN plans the graphs of the package for described GPUs, in processes that may crash or be interrupted."""

import os
import sys

import pytest
from planner import library_version, plan_graph, plan_problem

import cupy_sdpa
from cupy_sdpa import CudnnError
from cupy_sdpa.core.cudnn_engine.described import plan_described
from cupy_sdpa.core.cudnn_engine.plan import PlanInfo, Target
from cupy_sdpa.core.cudnn_engine.planner import ORDERED, ORDERED_SINCE
from cupy_sdpa.core.graph.attention_backward import backward
from cupy_sdpa.core.graph.attention_forward import forward
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.why_not import guards, why_not
from cupy_sdpa.offline import remote_planner as offline
from cupy_sdpa.offline.remote_planner import Planner, kept_planner


def problem(q, kv=None, **options):
    """The problem of shapes; keys and values have the shape of q by default."""
    return cupy_sdpa.problem(q, kv or q, kv or q, **{"dtype": "bfloat16", **options})


ASKED = problem((64, 2, 64, 1))
LARGE = {"q": (128, 8, 2048, 1), "dtype": "bfloat16", "backward": True, "deterministic": True}

#: Compiling a kernel takes a second.
COMPILED = {"h200": pytest.mark.slow, "l40s": pytest.mark.slow, "b200": pytest.mark.slow}

# Plans


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", [pytest.param(gpu, marks=COMPILED.get(gpu, pytest.mark.sweep)) for gpu in gpus.REPRESENTATIVES])
def test_kernels_are_compiled_for_every_gpu(gpu, planner):
    """A plan has its kernel: it is finalized, and its serialized form is as long as a kernel. Without it the choice is the same."""
    small = (64, 2, 64, 1)
    for asked in (
        problem(small, bias=(64, 64, 1, 1), alibi_slopes=True, softcap=30.0),
        problem(small, backward=True, alibi_slopes=True, softcap=30.0, dropout_p=0.5, seed=0),
    ):
        plan, accepted = planner.call(plan_problem, asked, gpu), planner.accept(plan_problem, asked, gpu)
        assert isinstance(plan, PlanInfo), plan
        assert plan.size > 20_000
        assert accepted.size == 0
        assert (plan.engine, plan.workspace, plan.notes) == (accepted.engine, accepted.workspace, accepted.notes)


@pytest.mark.cudnn
def test_deterministic_gradients_keep_within_the_memory(planner):
    """The quadratic plan within max_workspace, the ordered engine beyond it, and a refusal with all sizes if neither fits."""
    asked = [problem(**LARGE, max_workspace=limit) for limit in (None, 20 << 20, 1000)]
    quadratic, ordered, text = (planner.accept(plan_problem, one, "h200") for one in asked)
    assert quadratic.workspace > 2 * 8 * 2048 * 2048
    assert not quadratic.graph.by_role("scratch")
    if quadratic.cudnn >= ORDERED_SINCE:
        assert ordered.workspace <= 20 << 20
        assert ordered.graph.by_role("scratch")
        assert ordered.engine == ORDERED.engine
        assert any(f"{quadratic.workspace} bytes, and the limit is {20 << 20}" in reason for reason in ordered.refused)
        assert "the limit is 1000" in text
    for gpu in ("a100", "l40s", "b200"):
        assert "and a Hopper GPU; this is cuDNN" in planner.accept(plan_problem, asked[1], gpu)
    sums = problem((64, 2, 16, 1), dtype="float16", backward=True, deterministic=True, max_workspace=999, return_dtensors=True,
                   score_mod=lambda s, b, h, i, j, t: s + t[i, j], tensors={"t": (16, 16)})  # fmt: skip
    assert sums.ds_reductions
    text = planner.accept(plan_problem, sums, "h200")
    assert "the limit is 999" in text
    assert "Hopper" not in text


@pytest.mark.cudnn
@pytest.mark.parametrize("limit", [None, 1 << 20])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_every_backward_method_has_its_guards(deterministic, limit, planner):
    """The plan for gradients of one query masks the padding with every method, including the ordered one."""
    more = {"deterministic": deterministic, "max_workspace": limit if deterministic else None}
    asked = problem((128, 8, 1, 1), (128, 8, 4096, 1), backward=True, **more)
    plan = planner.accept(plan_problem, asked, "h200")
    if deterministic and limit and planner.call(library_version) < ORDERED_SINCE:
        assert isinstance(plan, str)
        return
    assert ("ΣdQ" in str(plan.graph.tensors)) or not (deterministic and limit)
    assert guards(asked, plan.cudnn, 90) == {"queries"}
    assert "i′ < 1" in str(plan.graph)


@pytest.mark.slow
@pytest.mark.cudnn
def test_max_workspace_refuses_larger_plans(planner):
    """The key-splitting kernel of one query has a large workspace; with less, another plan is used, and the reason is kept."""
    one = {"q": (128, 8, 1, 1), "kv": (128, 2, 8192, 1)}
    free = planner.accept(plan_problem, problem(**one), "h200")
    assert free.workspace > 100_000
    less = planner.accept(plan_problem, problem(**one, max_workspace=free.workspace - 1), "h200")
    assert less.workspace < free.workspace
    assert f"needs a workspace of {free.workspace} bytes, and the limit is {free.workspace - 1}" in less.refused[0]


@pytest.mark.cudnn
def test_the_fast_engine_is_the_first_choice(planner):
    """Large problems on the H200 get the Hopper kernel (engine 2), with a workspace of at most 1 KiB."""
    plan = planner.accept(plan_problem, problem((128, 64, 8192, 1), (128, 8, 8192, 1), causal=True), "h200")
    assert plan.engine == 2
    assert plan.workspace <= 1024
    assert plan.refused == ()
    assert "TENSOR_CORE" in plan.notes
    assert plan.cudnn >= 91900


def graph_retention(graph, gpu):
    """In a child: the version of cuDNN, and whether captured CUDA graphs own a plan that was built, and one that was loaded."""
    from cupy_sdpa.core.cudnn.constants import AttributeType
    from cupy_sdpa.core.cudnn.library import library
    from cupy_sdpa.core.cudnn_engine.disk_cache import DiskCache
    from cupy_sdpa.core.cudnn_engine.plan import Target
    from cupy_sdpa.core.cudnn_engine.planner import load_or_build

    if library().version < 92800:
        return library().version, None
    target = Target.described(gpu)
    kept = DiskCache(None)
    plans = [load_or_build(graph, target, disk_cache=kept) for _ in range(2)]
    assert [plan.info.loaded for plan in plans] == [False, True]
    kinds = [plan._descriptor.get("CUDA_GRAPH_RETENTION", AttributeType.CUDA_GRAPH_RETENTION) for plan in plans]
    for plan in plans:
        plan.close()
    return library().version, kinds


@pytest.mark.slow
@pytest.mark.cudnn
def test_captured_graphs_do_not_own_plans(planner):
    """With cuDNN 9.28 a launch of a captured CUDA graph that owns its plan takes 2 to 6 us longer."""
    version, kinds = planner.call(graph_retention, forward(ASKED), "h200")
    assert kinds == (None if version < 92800 else [[1], [1]])


@pytest.mark.slow
@pytest.mark.cudnn
def test_a_refusal_keeps_every_reason(planner):
    """Every engine rejects a head dim that is not a multiple of 8; each reason is kept, once."""
    text = planner.call(plan_problem, problem((12, 4, 64, 2)), "h200")
    assert "multiple of 8" in text
    assert "engine 1" in text
    assert "engine 2" in text
    assert len(text.splitlines()) == len(set(text.splitlines()))
    by_hand = planner.accept(plan_graph, backward(problem((64, 4, 64, 2), backward=True)), "a100", ORDERED)
    assert "engine 6" in by_hand
    assert " NOT_SUPPORTED" in by_hand


ONE_ROW = {"q": (128, 1, 1, 1), "kv": (128, 1, 64, 1), "backward": True}
SINGLE_KEY = {"q": (64, 2, 16, 2), "kv": (64, 2, 1, 2), "backward": True, "tensors": {"t": ()}}
#: Gradients that crash cuDNN: the rule that rules them out, and the same with one change that is planned.
CRASHES = {
    "one_row": ("backward-one-row", ONE_ROW, ONE_ROW | {"q": (128, 1, 2, 1)}),
    "difference": (
        "single-key-difference", SINGLE_KEY | {"score_mod": lambda s, b, h, i, j, t: s - t},
        SINGLE_KEY | {"score_mod": lambda s, b, h, i, j, t: s + (-t)},
    ),
    "one_query": (
        "single-key-difference", SINGLE_KEY | {"q": (64, 2, 1, 2), "score_mod": lambda s, b, h, i, j, t: s - t},
        SINGLE_KEY | {"kv": (64, 2, 2, 2), "score_mod": lambda s, b, h, i, j, t: s - t},
    ),
}  # fmt: skip


@pytest.mark.cudnn
@pytest.mark.slow
@pytest.mark.parametrize("name", CRASHES)
def test_gradients_that_crash_cudnn_are_refused(name, planner):
    """Of one row, and of a single key whose score function subtracts an array of one element; with the fix they are planned."""
    rule, deadly, remedy = CRASHES[name]
    version = planner.call(library_version)
    deadly, remedy = problem(**deadly), problem(**remedy)
    refused = [reason.rule for reason in why_not(deadly, version, 90)]
    answer = kept_planner().call(plan_described, deadly, Target.described("h200"))
    assert (refused == [rule]) == ("ended the process inside cuDNN" in str(answer)), f"{answer}; the table says {refused}"
    assert not why_not(remedy, version, 90)
    assert isinstance(kept_planner().call(plan_described, remedy, Target.described("h200")), PlanInfo)


# Processes


#: A fake planner: it prints the version, then behaves as the files in its folder specify.
FAKE = """
import os, pathlib, pickle, sys
from cupy_sdpa.core.support.installed import Cudnn
folder = pathlib.Path({folder!r})
while True:
    try:
        request = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    asks_version = request is Cudnn.planning_version
    answer = 92800 if asks_version else "no engine"
    if not asks_version:
        if (folder / "die").exists():
            (folder / "die").unlink()
            os._exit(7)
        if (folder / "die within").exists():
            (folder / "die within").unlink()
            os.write(1, pickle.dumps("x" * 1000)[:500])
            os._exit(8)
    os.write(1, pickle.dumps(answer))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose files specify the behavior of the planning processes, which do not load cuDNN."""
    monkeypatch.setattr(offline, "_COMMAND", [sys.executable, "-c", FAKE.format(folder=str(tmp_path))])
    return tmp_path


def alive(process):
    """Whether a process exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_process_that_cannot_be_replaced(folder):
    """Each request then reports that no process can be started; later requests start one again."""
    with Planner() as planner:
        (folder / "die").touch()
        program, offline._COMMAND[0] = offline._COMMAND[0], str(folder / "no such program")
        assert "ended the process" in planner.call(plan_described, ASKED, Target.described("h200"))
        for _ in range(2):
            with pytest.raises(CudnnError, match=r"cannot be started: .*no such program"):
                planner.call(plan_described, ASKED, Target.described("h200"))
        offline._COMMAND[0] = program
        assert planner.call(plan_described, ASKED, Target.described("h200")) == "no engine"


def test_one_process_is_kept(folder, monkeypatch):
    """It answers later calls of explain(), also after a crash; another environment, and a forked child, have their own."""
    planners = []
    for value in "12":
        monkeypatch.setenv("CUPY_SDPA_TEST", value)
        planners.append(kept_planner())
    before, kept = planners
    assert kept_planner() is kept is not before
    assert not any(map(alive, before.pids))
    for how, code in (("die", 7), ("die within", 8)):
        assert "no engine" in str(cupy_sdpa.explain(ASKED, gpu="H200"))
        (folder / how).touch()
        assert f"ended the process inside cuDNN (exit status {code})" in str(cupy_sdpa.explain(ASKED, gpu="H200"))
    child = os.fork()
    if child == 0:
        os._exit(kept_planner() is not kept)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert "no engine" in str(cupy_sdpa.explain(ASKED, gpu="H200"))


@pytest.mark.cudnn
def test_unexpected_exceptions_become_answers():
    """The answer of the planning process contains the traceback, and the process continues."""
    with pytest.raises(RuntimeError, match=r"planning failed:\n(.*\n)+AttributeError: "):
        kept_planner().call(plan_described, None, Target.described("h200"))
    assert kept_planner().call(plan_described, ASKED, Target.described("h200")).engine in (1, 2)
