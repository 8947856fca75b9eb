"""Autotuning: which configs are tried, and how the result is stored and printed. On a GPU: tests/plans/test_gpu_plans.py."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
from cases import Case
from planner import plan_problem
from stand_ins import Descriptor, candidate, fake_plan, uids

import cupy_sdpa.plans.plan
from cupy_sdpa import CudnnError, Unsupported
from cupy_sdpa.calls import autotune
from cupy_sdpa.calls.autotune import Trial, Tuning, tune
from cupy_sdpa.graph.attention_backward import backward
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.plan_cache import PlanCache
from cupy_sdpa.plans.planner import ORDERED_SINCE

ASKED = Case("small", d=64, sq=64).problem()


def candidates_of(problem):
    """In a child: the (engine, knobs) of the plan, and of every other candidate."""
    from cupy_sdpa.calls.autotune import _candidates
    from cupy_sdpa.graph.attention_forward import forward
    from cupy_sdpa.offline.planner import load_target
    from cupy_sdpa.plans.disk_cache import DiskCache
    from cupy_sdpa.plans.planner import engine_search, load_or_build

    target, graph = load_target("h200"), forward(problem)
    plan = load_or_build(graph, target, disk_cache=DiskCache(None))
    found = []
    with engine_search(graph, target) as (search, _):
        for candidate in _candidates(search, plan):
            found.append((candidate.engine, candidate.knobs))
            candidate.close()
    plan.close()
    return (plan.info.engine, plan.info.knobs), found


@pytest.mark.cudnn
def test_every_config_is_tried_once(planner):
    """The configs are distinct, and the existing plan is not among them."""
    own, configs = planner.call(candidates_of, ASKED)
    assert configs
    assert own not in configs
    assert len(configs) == len(set(configs))


def test_settings_of_knobs_are_no_option():
    """autotune is True or False."""
    x = np.zeros((8, 1, 4, 1), np.float32, order="F")
    with pytest.raises(TypeError, match="autotune is 'knobs'; it must be True or False"):
        cupy_sdpa.prepare(x, x, x, autotune="knobs")
    with pytest.raises(TypeError, match="knobs"), cupy_sdpa.autotune(knobs=True):
        pass


def test_the_repr_is_a_table():
    """The fastest first, wrong results marked, the speedup in the title; the same in a notebook."""
    trials = (
        Trial(1, (("KERNEL_CFG", 3),), 0, 5.0),
        Trial(2, (("KERNEL_CFG", 7),), 256, 6.0),
        Trial(1, (("KERNEL_CFG", 25),), 0, None),
    )
    found = Tuning(ASKED, trials, before=6.0, after=5.0)
    lines = str(found).splitlines()
    assert lines[0].endswith("6.0 us before, 5.0 us after, 1.20 times as fast")
    assert lines[1].split() == ["time", "engine", "knobs", "workspace"]
    assert lines[2].startswith("5.0 us")
    assert "wrong results" in lines[4]
    assert found._repr_html_().count("<tr>") == 4


class OutOfMemoryError(MemoryError):
    """A fake of CuPy's error."""


def nearly(array):
    array[...] = 1.001


#: The results of configs, written to an array full of NaN; 1 is right.
COMPUTES = {
    "right": lambda array: array.fill(1),
    "rounded": nearly,
    "wrong": lambda array: array.fill(2),
    "a_tenth_wrong": lambda array: (array.fill(1), array[:2].fill(2)),
    "nothing": lambda array: None,
    "nothing_at_the_end": lambda array: array[:-1].fill(1),
    "unsupported": Unsupported("no"),
    "failure": CudnnError("failed", 5000),
    "no_memory": OutOfMemoryError("too large"),
    "another_allocators_error": RuntimeError("out of memory"),
}


class Gpu:
    """One result of 20 numbers; a config of engine n computes the n-th of some functions, in ``us[n]`` microseconds."""

    def __init__(self, monkeypatch, problem, graph, others=(), us=(8.0, 1.0, 1.0)):
        self.result, self.descriptors = np.zeros(20, np.float32), {}
        self.computes = [COMPUTES["right"], *others]
        library = SimpleNamespace(version=92800, build="test")
        monkeypatch.setattr(cupy_sdpa.plans.plan, "library", lambda: library)
        monkeypatch.setattr(autotune.cupy_runtime, "cupy", lambda: np)
        monkeypatch.setattr(autotune.cupy_runtime, "allocate", lambda size: SimpleNamespace(ptr=1))
        monkeypatch.setattr(autotune, "current", lambda: SimpleNamespace(put=self.put))
        monkeypatch.setattr(autotune, "engine_search", self.engine_search)
        monkeypatch.setattr(autotune, "_candidates", lambda search, plan: self.candidates())
        monkeypatch.setattr(autotune._Bench, "time", lambda bench, plan, rounds: us[plan.info.engine])
        self.asked, self.stored, self.cache = [], [], PlanCache()
        self.plan = fake_plan(self.descriptor(0), graph, engine=0)
        self.found = tune(problem, self.plan, self.cache, self.execute, [self.result])
        self.kept = self.cache.get(problem)

    def descriptor(self, engine):
        self.descriptors[engine] = Descriptor()
        return self.descriptors[engine]

    @contextlib.contextmanager
    def engine_search(self, graph, target, limit=None):
        self.asked.append(limit)
        yield None, uids(graph)

    def candidates(self):
        for engine in range(1, len(self.computes)):
            yield candidate(self.descriptor(engine), engine)

    def execute(self, plan, workspace):
        compute = self.computes[plan.info.engine]
        if isinstance(compute, Exception):
            raise compute
        compute(self.result)

    def put(self, key, content):
        self.stored.append(content)

    def closed(self):
        return {engine: descriptor.closed for engine, descriptor in self.descriptors.items()}


@pytest.mark.parametrize("name", COMPUTES)
def test_only_right_results_are_accepted(name, monkeypatch):
    """A faster config replaces the plan only if its results are equal up to rounding; else it is closed and listed."""
    gpu = Gpu(monkeypatch, ASKED, forward(ASKED), [COMPUTES[name]])
    right = name in ("right", "rounded")
    assert gpu.closed() == {0: 0, 1: 0 if right else 1}
    assert (gpu.kept is None) is not right
    assert {trial.engine: trial.us for trial in gpu.found.trials} == {0: 8.0, 1: 1.0 if right else None}
    assert gpu.found.gain == (8.0 if right else 1.0)
    assert len(gpu.stored) == 1
    assert (gpu.kept or gpu.plan).info.tuned


def test_a_right_config_wins_over_wrong_ones(monkeypatch):
    """Of a wrong, a right and a failing config the right one is used, although it is not the fastest."""
    computes = [COMPUTES["wrong"], COMPUTES["right"], COMPUTES["no_memory"]]
    gpu = Gpu(monkeypatch, ASKED, forward(ASKED), computes, us=(8.0, 1.0, 2.0, 1.0))
    assert gpu.kept.info.engine == 2
    assert gpu.closed() == {0: 0, 1: 1, 2: 0, 3: 1}


def test_a_gain_within_the_noise_changes_nothing(monkeypatch):
    """A config that is 1 % faster is closed; the existing plan stays, marked as autotuned."""
    gpu = Gpu(monkeypatch, ASKED, forward(ASKED), [COMPUTES["right"]], us=(1.01, 1.0))
    assert gpu.kept is None
    assert gpu.closed() == {0: 0, 1: 1}
    assert gpu.plan.info.tuned


@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_tuning_keeps_within_max_workspace(limit, monkeypatch):
    """The limit of the problem applies; the free memory is not queried."""
    problem = Case("limited", d=64, sq=64).gradient_problem(max_workspace=limit)
    gpu = Gpu(monkeypatch, problem, backward(problem), [COMPUTES["right"]])
    assert gpu.asked[0] == limit


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "ordered"])
def test_tuning_keeps_deterministic_gradients_deterministic(direct, monkeypatch):
    """Only the heuristics' configs of the direct graph are tried; the ordered engine is the only one of its graph."""
    problem = Case("deterministic", d=64, sq=64).gradient_problem(deterministic=True)
    gpu = Gpu(monkeypatch, problem, backward(problem, direct), [COMPUTES["right"]])
    assert bool(gpu.asked) is direct
    assert (gpu.kept is None) is not direct
    assert (gpu.kept or gpu.plan).info.tuned


@pytest.mark.cudnn
def test_the_ordered_engine_accumulates_in_scratch_memory(planner):
    """This distinguishes it from the engine that writes dQ directly."""
    case = Case("deterministic", d=128, hq=8, hkv=8, sq=512, b=1)
    direct, ordered = (
        planner.call(plan_problem, case.gradient_problem(deterministic=True, max_workspace=limit), "h200")
        for limit in (None, 3 << 20)
    )
    assert not direct.graph.by_role("scratch")
    if direct.cudnn >= ORDERED_SINCE:
        assert ordered.graph.by_role("scratch")
        assert dict(ordered.knobs)["STAGES"] == 4


@pytest.mark.parametrize("fail", [None, MemoryError()], ids=["recorded", "failed"])
def test_the_stream_is_restored_after_a_plan_was_captured(fail, monkeypatch):
    """A plan is captured to measure its time; afterwards the handle has the caller's stream again."""
    streams, current = [], [7]
    handle = SimpleNamespace(set_stream=streams.append)

    def record(run, own):
        current[0] = 99
        run()
        current[0] = 7
        if fail:
            raise fail
        return own

    monkeypatch.setattr(autotune.cupy_runtime, "stream", lambda: current[0])
    monkeypatch.setattr(autotune.cupy_runtime, "cupy", lambda: np)
    monkeypatch.setattr(autotune, "Recording", record)
    executed = []
    bench = autotune._Bench(handle, lambda plan, workspace: executed.append((plan, workspace, streams[-1])), [])
    workspace = SimpleNamespace(data=SimpleNamespace(ptr=5))
    with pytest.raises(MemoryError) if fail else contextlib.nullcontext():
        assert bench._recorded("plan", workspace) == [workspace]
    assert executed == [("plan", 5, 99)]
    assert streams == [99, 7]
