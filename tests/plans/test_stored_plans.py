"""Plans of calls: built, refused, stored on disk and loaded by later processes; damaged entries are rejected.

On the fake CuPy engine configs can fail, see :class:`fake_cupy.cudnn.Config`.
"""

import gc
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from fake_cupy import library
from fake_cupy.cudnn import CONFIGS
from planner import child_environment

import cupy_sdpa
from cupy_sdpa import CudnnError, Unsupported, attention, attention_backward, attention_vjp, explain, get_plan_cache, store

on_cudnn = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the disk cache."""
    monkeypatch.setenv("CUPY_SDPA_CACHE_DIR", str(tmp_path / "plans"))
    return tmp_path / "plans"


@pytest.fixture
def cache(fake):
    """The plan cache of the fake GPU."""
    return get_plan_cache()


@on_cudnn
def test_a_stored_plan_is_loaded(engine, folder):
    """It has the same properties and gives the same bits; threads that need the same new plan build it once."""
    q, k, v = (engine.normal(seed, 16, 2, 20, 1) for seed in range(3))
    cache = get_plan_cache()
    cache.clear()
    want, built = engine.get(attention(q, k, v)), explain(q, k, v).plan
    cache.clear()
    loaded = explain(q, k, v).plan
    assert (built.loaded, loaded.loaded) == (False, True)
    assert replace(loaded, loaded=False, build_ms=0) == replace(built, build_ms=0)
    np.testing.assert_array_equal(engine.get(attention(q, k, v)), want)
    ready = threading.Barrier(4)

    def work(_):
        ready.wait(60)
        loaded = explain(q, k, v, causal=True).plan.loaded
        get_plan_cache().clear()
        return loaded

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(work, range(4))) == [False, True, True, True]
    assert len(store.kept().paths()) == 2


#: Changes of the facts of a plan, which are JSON in the first line of its entry.
WRONG = {
    "engine_too_large": {"engine": 2**63}, "engine_a_text": {"engine": "2"}, "engine_a_bool": {"engine": True},
    "one_too_many": {"colour": "red"}, "knobs_a_number": {"knobs": 5}, "knob_of_three": {"knobs": [["TILE_M", 3, 4]]},
    "notes_numbers": {"notes": [1]}, "need_negative": {"need": -1}, "need_a_float": {"need": 4096.0},
    "another_workspace": {"need": 512}, "refused_a_text": {"refused": "no"},
    "uids_a_list": {"uids": [["q", 1]]}, "uid_too_large": {"uids": {"q": 2**64}}, "uid_missing": {"uids": {}},
}  # fmt: skip
#: Changes of the first line.
NO_FACTS = {
    "no_json": lambda head: b"engine 2", "no_utf8": lambda head: b"\xff\xfe", "a_number": lambda head: b"5",
    "a_list": lambda head: b"[]", "nested_deeply": lambda head: b"[" * 200_000,
    "nested_inside": lambda head: head.replace(b'"notes": []', b'"notes": ' + b"[" * 200_000 + b"]" * 200_000),
    "engine_infinite": lambda head: head.replace(b'"engine": 2', b'"engine": 1e400'),
    "engine_nan": lambda head: head.replace(b'"engine": 2', b'"engine": NaN'),
    "engine_of_many_digits": lambda head: head.replace(b'"engine": 2', b'"engine": ' + b"9" * 5000),
    "engine_missing": lambda head: head.replace(b'"engine": 2, ', b""),
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRONG, *NO_FACTS, "empty", "text_no_utf8", "text_no_plan"])
def test_an_entry_with_wrong_facts_is_rejected(name, fake, folder, cache):
    """A valid checksum with impossible facts: one warning, a new plan replaces the entry, and the result is right."""
    x = fake.ones((16, 2, 20, 1), np.float16, order="F")
    attention(x, x, x)
    kept = store.kept()
    (key,) = [path.stem for path in kept.paths()]
    head, _, text = content = kept.get(key).partition(b"\n")
    if name in WRONG:
        head = json.dumps(json.loads(head) | WRONG[name]).encode()
    elif name in NO_FACTS:
        head = NO_FACTS[name](head)
    texts = {"text_no_utf8": b"\xff\xfe", "text_no_plan": b'{"cudnnVersion":1}'}
    wrong = b"" if name == "empty" else head + b"\n" + texts.get(name, text)
    assert wrong != b"".join(content)
    kept.put(key, wrong)
    cache.clear()
    with pytest.warns(cupy_sdpa.DiskCacheWarning, match="is rebuilt") as said:
        out = attention(x, x, x)
    assert len(said) == 1
    assert len(str(said[0].message)) < 1000
    assert (out.get() == 1).all()
    assert not explain(x, x, x).plan.loaded
    assert kept.get(key).partition(b"\n")[2] != wrong.partition(b"\n")[2] or name not in texts
    assert library().live == {"EXECUTION_PLAN": 1}


@pytest.mark.parametrize(("status", "kept"), [(4003, True), (4004, True), (3000, False), (5000, False)])
def test_a_stored_plan_survives_a_lack_of_memory(status, kept, fake, folder, cache):
    """If there is no memory to load it, the error is raised and the entry stays; if cuDNN rejects it, it is built again."""
    x = fake.ones((16, 2, 20, 1), np.float16, order="F")
    library().configs = (replace(CONFIGS[0], fails="load", status=status),)
    attention(x, x, x)
    for _ in range(2):
        cache.clear()
        with pytest.raises(CudnnError, match=str(status)) if kept else pytest.warns(cupy_sdpa.DiskCacheWarning):
            attention(x, x, x)
    assert library().finalized["built"] == (1 if kept else 3)
    assert len(store.kept().paths()) == 1
    assert sum(library().live.values()) == (0 if kept else 1)


REJECTED = {
    "refused": ({"status": 3007}, None), "does_not_compile": ({"status": 4001}, None), "no_host_memory": ({"status": 4003}, CudnnError),
    "no_device_memory": ({"status": 4004}, CudnnError), "interrupted": ({"error": KeyboardInterrupt()}, KeyboardInterrupt),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_a_rejected_engine_config_is_destroyed(name, fake, cache):
    """The next config is used, and the reason is kept; a lack of memory is an error, which is not cached: it may be temporary."""
    x = fake.ones((16, 2, 20, 1), np.float16, order="F")
    changes, error = REJECTED[name]
    library().configs = (replace(CONFIGS[0], fails="finalize", **changes), CONFIGS[1])
    if error:
        with pytest.raises(error):
            attention(x, x, x)
        assert not library().live
        library().configs = CONFIGS
    assert (attention(x, x, x).get() == 1).all()
    plan = explain(x, x, x).plan
    assert plan.engine == (2 if error else 1)
    assert len(plan.refused) == (not error)
    assert library().live == {"EXECUTION_PLAN": 1}


def test_refusals_are_cached_as_text(fake, cache):
    """A refused problem is not planned again; no exception is cached, because its frames keep arrays alive."""
    x = fake.ones((16, 2, 20, 1), np.float16, order="F")
    library().configs = (replace(CONFIGS[0], fails="finalize"), replace(CONFIGS[1], fails="finalize"))
    for _ in range(3):
        with pytest.raises(Unsupported, match=r"engine 2: .*\n.*engine 1: "):
            attention(x, x, x)
        library().configs = CONFIGS
    gc.collect()
    assert not any(type(o) is Unsupported and "engine 2: " in str(o) for o in gc.get_objects())
    assert "refused" in str(cache)
    cache.clear()
    attention(x, x, x)


def test_a_plan_that_cannot_be_stored_is_destroyed(fake, monkeypatch):
    """An exception of the disk cache is raised, and no descriptor is left."""

    def put(self, key, content):
        raise KeyboardInterrupt

    x = fake.ones((16, 2, 20, 1), np.float16, order="F")
    with monkeypatch.context() as patch:
        patch.setattr(store.DiskCache, "put", put)
        with pytest.raises(KeyboardInterrupt):
            attention(x, x, x)
    assert not library().live


def test_entries_differ_by_everything_that_a_plan_depends_on(fake, folder, cache, monkeypatch):
    """Each cuDNN, NVRTC, graph, layout and workspace limit has its own entry; a scale and contents have not."""
    x = fake.ones((16, 2, 20, 2), np.float16, order="F")
    kept, files = store.kept(), 0

    def new(call, count=1):
        nonlocal files
        cache.clear()
        call()
        files, before = len(kept.paths()), files
        assert files - before == count

    new(lambda: attention(x, x, x))
    new(lambda: attention(fake.asfortranarray(2 * x), x, x, scale=0.5), 0)
    new(lambda: attention(x, x[:, :, :12], x[:, :, :12]))
    new(lambda: attention(*(x[..., :1],) * 3))
    other = fake.ones((2, 2, 20, 16), np.float16).transpose(3, 1, 2, 0)
    new(lambda: attention(other, other, other))
    for limit in (1 << 20, 1 << 21):
        new(lambda: attention(x, x, x, max_workspace=limit))  # noqa: B023
    out, stats = attention(x, x, x, return_stats=True)
    files = len(kept.paths())
    for deterministic in (False, True):
        new(lambda: attention_backward(x, x, x, x, out, stats, deterministic=deterministic))  # noqa: B023
    library().build = "another build"
    new(lambda: attention(x, x, x))
    monkeypatch.setattr(sys.modules["cupy_sdpa.core.cudnn_engine.planner"], "nvrtc", lambda: "nvrtc 12.9")
    new(lambda: attention(x, x, x))


def test_a_limit_counts_scratch_memory_of_packed_sequences(fake, folder, cache):
    """Plans do not depend on the total length, but the memory of float32 gradients does, and a limit includes it."""
    counts = []
    for limit in (None, 1 << 20):
        for total in (64, 6400):
            starts = fake.asarray(np.array([0, 30, 64], np.int32))
            packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 64, "max_seqlen_kv": 64}
            x = cupy_sdpa.problem((16, 2, total), (16, 2, total), (16, 2, total), dtype="float16", backward=True, **packed,
                                  max_workspace=limit)  # fmt: skip
            cache.clear()
            explain(x)
            counts.append(len(store.kept().paths()))
    assert counts == [1, 1, 2, 3]


PROGRAM = """
import json, sys, numpy as np, cupy
from cupy_sdpa import attention_vjp, explain, store
q, k, v = (cupy.asarray(np.asfortranarray(np.random.default_rng(n).standard_normal((64, 4, 192, 2)).astype("f2"))) for n in range(3))
out, pullback = attention_vjp(q, k, v, causal=True, deterministic=True)
sums = [int(x.view("u2").astype("u8").sum()) for x in (out, *pullback(q))]
plans = [explain(q, k, v, causal=True, return_stats=True).plan, explain(q, k, v, causal=True, backward=True, deterministic=True).plan]
print(json.dumps({"sums": sums, "loaded": [plan.loaded for plan in plans], "files": len(store.kept().paths())}))
"""


def in_process(folder, code=PROGRAM):
    """Run a program with a cache folder; returns its JSON output and its warnings."""
    environment = child_environment(CUPY_SDPA_CACHE_DIR=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.gpu
def test_another_process_finds_the_plans(cupy, tmp_path):
    """A second process builds no plan and computes the same bits; without the folder, or with damaged files, it builds."""
    first, _ = in_process(tmp_path / "kept")
    assert first["loaded"] == [False, False]
    assert first["files"] == 2
    second, _ = in_process(tmp_path / "kept")
    assert second == {**first, "loaded": [True, True]}
    assert in_process("0")[0] == {**first, "files": 0}
    for path in (tmp_path / "kept").glob("*.plan"):
        path.write_bytes(path.read_bytes()[:-100] + b"x" * 100)
    third, said = in_process(tmp_path / "kept")
    assert third == first
    assert said.count("DiskCacheWarning") == 2


@pytest.mark.gpu
def test_plans_built_ahead_of_time_are_loaded(cupy, plans, folder):
    """Plans that other processes built for the described GPU are loaded by calls on the GPU, and give the same bits."""
    rng = np.random.default_rng(5)
    q, k, v = (cupy.asarray(np.asfortranarray(rng.standard_normal((64, 4, 192, 2)).astype("f2"))) for _ in range(3))
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode().removeprefix("NVIDIA ").lower()
    try:
        explain(cupy_sdpa.problem(q.shape, k.shape, v.shape, dtype="float16"), gpu=name, cudnn="9.19")
    except ValueError as error:
        pytest.skip(f"no description of this GPU: {error}")

    def compute():
        out, pullback = attention_vjp(q, k, v, causal=True)
        return [x.get().tobytes() for x in (out, *pullback(q)[1:])]  # the order of the sums of dq varies

    def loaded():
        reports = explain(q, k, v, causal=True, return_stats=True), explain(q, k, v, causal=True, backward=True)
        return [report.plan.loaded for report in reports]

    here = compute()
    assert loaded() == [False, False]
    plans.clear()
    store.kept().clear()
    shapes = [x.shape for x in (q, k, v)]
    asked = [cupy_sdpa.problem(*shapes, dtype="float16", causal=True, return_stats=True, backward=b) for b in (False, True)]
    built = store.build(asked, name, folder)
    assert all(entry.plan for entry in built), built
    assert compute() == here
    assert loaded() == [True, True]


STRESS = """
import json, threading
import numpy as np, cupy
from cupy_sdpa import attention, attention_vjp, get_plan_cache
from cupy_sdpa.core.cudnn.library import library
lib, made, gone = library(), [], []
create, destroy = lib.cudnnBackendCreateDescriptor, lib.cudnnBackendDestroyDescriptor
lib.cudnnBackendCreateDescriptor = lambda *a: (made.append(1), create(*a))[1]
lib.cudnnBackendDestroyDescriptor = lambda *a: (gone.append(1), destroy(*a))[1]
rng = np.random.default_rng(0)
inputs = [[cupy.asarray(np.asfortranarray(rng.standard_normal((64, 4, 64 + 32 * n, 2)).astype("f2"))) for _ in "qkv"] for n in range(12)]

def run(n, backward):
    if not backward:
        return [attention(*inputs[n], causal=n % 2 == 1)]
    out, pullback = attention_vjp(*inputs[n], causal=n % 2 == 1)
    return [out, *pullback(inputs[n][0])[1:]]

wanted = [run(n, True) for n in range(12)]
get_plan_cache().clear()
cupy.cuda.Device().synchronize()
wrong, largest, errors = [], [], []

def work(seed):
    try:
        plans = get_plan_cache()
        plans.set_limit(16)                      # 24 plans are wanted: they come and go while others run
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for n in np.random.default_rng(seed).integers(0, 12, 625):
                got = run(n, n % 3 == 0)
                if not all(bool((a.view("u2") == b.view("u2")).all()) for a, b in zip(got, wanted[n])):
                    wrong.append(int(n))
            largest.append(plans.size)
            stream.synchronize()
        plans.clear()
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps({"wrong": wrong, "largest": max(largest), "threads": len(largest), "errors": errors, "live": len(made) - len(gone)}))
"""


@pytest.mark.gpu
def test_sixteen_threads_ten_thousand_calls(cupy, tmp_path):
    """Mixed calls on sixteen streams with caches that are too small: right results, no growth, no descriptor left alive."""
    done, _ = in_process(tmp_path, STRESS)
    assert done == {"wrong": [], "largest": 16, "threads": 16, "errors": [], "live": 0}
