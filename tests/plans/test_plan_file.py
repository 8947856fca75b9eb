# mypy: disable-error-code="arg-type, operator"
"""Plans from the disk cache: their keys, and the validation of their contents."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from cases import Case

from cupy_sdpa import DiskCacheWarning, Unsupported, problem
from cupy_sdpa.graph.attention_backward import backward
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans import plan, plan_file, planner
from cupy_sdpa.plans.disk_cache import DiskCache
from cupy_sdpa.plans.engines import EngineConfig
from cupy_sdpa.plans.plan import Target

KEY = "0123456789abcdef" * 4
TARGET = Target("NVIDIA H200", 90, handle=SimpleNamespace(pointer=1))
GRAPH = forward(Case("plain").problem())
FACTS = {
    "uids": {t.name: n for n, t in enumerate(GRAPH.tensors, 1)}, "engine": 2, "knobs": [["TILE_M", 3]], "notes": ["TENSOR_CORE"],
    "need": 256, "build_ms": 500.5, "refused": ["engine 8: no"], "tuned": False,
}  # fmt: skip


class LoadedPlan:
    """A fake descriptor of a plan with a workspace of 256 bytes."""

    made = ()

    def __init__(self, kind):
        assert kind == "EXECUTION_PLAN"
        self.closed = False
        LoadedPlan.made += (self,)

    def set_handle(self, pointer):
        """Accept the handle."""

    def set(self, name, value):
        """Accept the attribute."""

    def finalize(self, doing):
        """Accept the plan."""

    def get(self, name, kind):
        """The size of the workspace."""
        assert name == "WORKSPACE_SIZE"
        return [256]

    def close(self):
        """Mark as closed."""
        self.closed = True


@pytest.fixture
def cudnn(monkeypatch):
    """A stand-in for cuDNN that takes every serialized plan, and has no engine for any graph."""

    def none(*_, **__):
        raise Unsupported("built anew, in vain")

    monkeypatch.setattr(LoadedPlan, "made", ())
    monkeypatch.setattr(planner, "Descriptor", LoadedPlan)
    monkeypatch.setattr(plan, "Launcher", lambda *_: None)
    for module in (plan, planner):
        monkeypatch.setattr(module, "library", lambda: SimpleNamespace(version=92800, build="9.28 abc"))
    monkeypatch.setattr(planner, "nvrtc", lambda: "nvrtc 12.9 def")
    monkeypatch.setattr(planner, "engine_search", none)
    return LoadedPlan


def content(text='{"cudnnVersion":92800}', **facts):
    """An entry with some facts replaced."""
    return json.dumps(FACTS | facts).encode() + b"\n" + text.encode()


def test_a_valid_entry_is_loaded(cudnn):
    """The facts of the plan are read from the entry, and written back unchanged."""
    loaded = planner.load(content(), GRAPH, TARGET, KEY)
    assert (loaded.info.engine, loaded.info.knobs, loaded.info.workspace) == (2, (("TILE_M", 3),), 256)
    assert (loaded.info.notes, loaded.info.refused, loaded.info.loaded) == (("TENSOR_CORE",), ("engine 8: no",), True)
    facts, text = plan_file.read(content())
    assert facts.content(text.decode()) == content()


def raw(head):
    return head.encode() + b"\n{}"


WRONG = {
    "empty": b"",
    "no_json": raw("engine 2"),
    "no_utf8": b"\xff\xfe\n{}",
    "a_number": raw("5"),
    "a_list": raw("[]"),
    "nested_deeply": raw("[" * 200_000),
    "nested_deeply_inside": raw(json.dumps(FACTS).replace('["TENSOR_CORE"]', "[" * 200_000 + "]" * 200_000)),
    "engine_infinite": raw(json.dumps(FACTS).replace('"engine": 2', '"engine": 1e400')),
    "engine_nan": raw(json.dumps(FACTS).replace('"engine": 2', '"engine": NaN')),
    "engine_of_many_digits": raw(json.dumps(FACTS).replace('"engine": 2', '"engine": ' + "9" * 5000)),
    "engine_too_large": content(engine=2**63),
    "engine_a_text": content(engine="2"),
    "engine_a_bool": content(engine=True),
    "engine_missing": raw(json.dumps({name: value for name, value in FACTS.items() if name != "engine"})),
    "one_too_many": content(colour="red"),
    "knobs_a_number": content(knobs=5),
    "knob_of_three": content(knobs=[["TILE_M", 3, 4]]),
    "knob_infinite": raw(json.dumps(FACTS).replace('["TILE_M", 3]', '["TILE_M", 1e400]')),
    "notes_numbers": content(notes=[1]),
    "need_negative": content(need=-1),
    "need_a_float": content(need=256.0),
    "need_another": content(need=512),
    "build_ms_infinite": raw(json.dumps(FACTS).replace("500.5", "1e400")),
    "refused_a_text": content(refused="no"),
    "tuned_a_number": content(tuned=1),
    "uids_a_list": content(uids=[["q", 1]]),
    "uid_too_large": content(uids=FACTS["uids"] | {"q": 2**64}),
    "uid_missing": content(uids={}),
    "text_no_utf8": json.dumps(FACTS).encode() + b"\n\xff\xfe",
}


@pytest.mark.parametrize("name", WRONG)
def test_an_entry_with_wrong_facts_is_rejected(name, cudnn):
    """A valid checksum with impossible facts: one warning, the entry is removed, its plan is destroyed, a new one is built."""
    disk_cache = DiskCache(None)
    key = planner.disk_cache_key(GRAPH, TARGET, None, None)
    disk_cache.put(key, WRONG[name])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(Unsupported, match="built anew, in vain"):
            planner.load_or_build(GRAPH, TARGET, disk_cache=disk_cache)
    assert [warning.category for warning in said] == [DiskCacheWarning]
    assert len(str(said[0].message)) < 1000
    assert disk_cache.get(key) is None
    assert all(made.closed for made in cudnn.made)


def test_a_different_workspace_is_rejected(cudnn):
    """The workspace limit was checked when the plan was built, so a loaded plan must need the recorded workspace."""
    with pytest.raises(ValueError, match="its workspace is 256 bytes, the entry has 512"):
        planner.load(content(need=512), GRAPH, TARGET, KEY)
    assert [made.closed for made in cudnn.made] == [True]


DIFFERENT = {
    "cudnn": lambda patch: patch.setattr(planner, "library", lambda: SimpleNamespace(build="9.28 xyz")),
    "nvrtc": lambda patch: patch.setattr(planner, "nvrtc", lambda: "nvrtc 12.8 def"),
    "no_nvrtc": lambda patch: patch.setattr(planner, "nvrtc", lambda: "nvrtc none"),
}
DENSE = np.zeros((64, 4, 128, 2), np.float16, order="F")
HEADS_FIRST = np.zeros((2, 4, 128, 64), np.float16).transpose(3, 1, 2, 0)
ARGUMENTS = {
    "model": {"target": Target("NVIDIA H100", 90)},
    "graph": {"graph": forward(Case("shorter", skv=48).problem())},
    "dtype": {"graph": forward(problem(DENSE, DENSE, DENSE))},
    "layout": {"graph": forward(problem(HEADS_FIRST, HEADS_FIRST, HEADS_FIRST))},
    "config": {"config": EngineConfig(6, ())},
    "knobs": {"config": EngineConfig(6, (("TILE_M", 1),))},
    "no_workspace": {"limit": 0},
    "workspace": {"limit": 1 << 20},
    "more_workspace": {"limit": 1 << 21},
}


@pytest.mark.usefixtures("cudnn")
def test_the_key_depends_on_everything_that_a_plan_depends_on(monkeypatch):
    """Each cuDNN, NVRTC, GPU model, graph, layout, engine config and workspace limit has its own key."""
    usual = {"graph": GRAPH, "target": TARGET, "config": None, "limit": None}
    keys = {
        "usual": planner.disk_cache_key(**usual),
        "again": planner.disk_cache_key(**(usual | {"graph": forward(Case("plain").problem())})),
    }
    assert keys.pop("again") == keys["usual"]
    for name, other in ARGUMENTS.items():
        keys[name] = planner.disk_cache_key(**(usual | other))
    for name, change in DIFFERENT.items():
        with monkeypatch.context() as patch:
            change(patch)
            keys[name] = planner.disk_cache_key(**usual)
    assert len(set(keys.values())) == len(keys) == 1 + len(ARGUMENTS) + len(DIFFERENT)


@pytest.mark.usefixtures("cudnn")
def test_a_limit_counts_scratch_memory_of_packed_sequences():
    """Plans do not depend on the total length, but the memory of float32 gradients does, and a limit includes it."""

    def keys(total):
        starts = {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": 64, "max_seqlen_kv": 64}
        packed = problem((64, 2, total), (64, 2, total), (64, 2, total), dtype="float16", backward=True, **starts)
        graph = backward(packed)
        return [planner.disk_cache_key(graph, TARGET, None, limit) for limit in (None, 1 << 20)]

    (usual, limited), (longer, longer_limited) = keys(64), keys(6400)
    assert usual == longer
    assert limited != longer_limited
