"""Plans on a GPU: explained, stored on disk, built ahead of time, shared by lengths, autotuned, and captured in CUDA graphs."""

import gc
import json
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
from cases import Case
from planner import child_environment
from tolerance import assert_close

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_vjp, explain, prepare, reference, store
from cupy_sdpa.device import memory
from cupy_sdpa.errors import CudnnError
from cupy_sdpa.support import gpus

pytestmark = pytest.mark.gpu

CASE = Case("plans", d=64, hq=4, hkv=2, sq=192, b=2, causal=True)


@pytest.fixture
def on_gpu(cupy):
    """Random q, k, v and dout on the GPU."""
    rng = np.random.default_rng(5)
    q, k, v = CASE.arrays()
    dout = np.asfortranarray(rng.standard_normal(q.shape).astype(q.dtype))
    return [cupy.asarray(x) for x in (q, k, v, dout)]


def same_bits(a, b):
    """Whether two arrays are equal, with NaN equal to NaN."""
    bits = f"u{a.dtype.itemsize}"
    return bool((a.view(bits) == b.view(bits)).all())


def test_shapes_and_arrays_share_a_plan(on_gpu, plans):
    """Shapes give the plan that arrays of these shapes use; no plan is built twice."""
    q, k, v, _ = on_gpu
    asked = cupy_sdpa.problem(q.shape, k.shape, v.shape, dtype="bfloat16", causal=True)
    report = explain(asked)
    assert report
    assert report.plan.engine == 2
    assert dict(report.plan.knobs)
    assert (plans.misses, plans.hits, plans.size) == (1, 0, 1)
    attention(q, k, v, causal=True)
    assert (plans.misses, plans.hits) == (1, 1)
    assert plans.bytes == report.plan.size > 10_000


PROGRAM = """
import json, sys, numpy as np, cupy, ml_dtypes
sys.path.insert(0, "tests")
from cases import Case
from planner import child_environment
from cupy_sdpa import attention_vjp, get_plan_cache, store
case = Case("plans", d=64, hq=4, hkv=2, sq=192, b=2, causal=True)
q, k, v = (cupy.asarray(x) for x in case.arrays())
out, pullback = attention_vjp(q, k, v, causal=True, deterministic=True)
arrays = [out, *pullback(q)]
plans = [entry for entry in get_plan_cache()._entries.values()]
print(json.dumps({
    "loaded": [plan.info.loaded for plan in plans],
    "sums": [int(x.view("u2").astype("u8").sum()) for x in arrays],
    "files": len(store.kept().paths()),
}))
"""


def in_process(folder, code=PROGRAM, **environment):
    """Run a program with a cache folder; returns its JSON output and its warnings."""
    environment = child_environment(CUPY_SDPA_CACHE_DIR=str(folder), **environment)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_another_process_finds_the_plans(cupy, tmp_path):
    """A second process builds no plan and computes the same bits; without the folder it builds."""
    first, _ = in_process(tmp_path / "kept")
    assert first["loaded"] == [False, False]
    assert first["files"] == 2
    second, _ = in_process(tmp_path / "kept")
    assert second["loaded"] == [True, True]
    assert second["sums"] == first["sums"]
    assert in_process("0")[0] == {**first, "files": 0}


def test_a_damaged_plan_is_built_again(cupy, tmp_path):
    """With a warning and the same result."""
    first, _ = in_process(tmp_path)
    for path in tmp_path.glob("*.plan"):
        path.write_bytes(path.read_bytes()[:-100] + b"x" * 100)
    second, said = in_process(tmp_path)
    assert second == first
    assert said.count("DiskCacheWarning") == 2
    assert in_process(tmp_path)[0]["loaded"] == [True, True]


def test_plans_built_ahead_of_time_are_loaded(cupy, on_gpu, plans, tmp_path, monkeypatch):
    """Plans that other processes built for the described GPU are loaded by calls on the GPU, and give the same bits."""
    q, k, v, dout = on_gpu
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode().removeprefix("NVIDIA ").lower()
    if name not in gpus.NAMES:
        pytest.skip(f"no description of this GPU ({name}) is in the package")

    def compute():
        out, pullback = attention_vjp(q, k, v, causal=True)
        return [out, *pullback(dout)[1:]]  # the order of the sums of dq varies

    here = compute()
    assert not any(plan.info.loaded for plan in plans._entries.values())
    plans.clear()
    shapes = [x.shape for x in (q, k, v)]
    asked = [cupy_sdpa.problem(*shapes, dtype="bfloat16", causal=True, return_stats=True, backward=b) for b in (False, True)]
    built = store.build(asked, name, tmp_path / "plans")
    assert all(entry.plan for entry in built), built
    monkeypatch.setenv("CUPY_SDPA_CACHE_DIR", str(tmp_path / "plans"))
    assert all(map(same_bits, here, compute()))
    assert [plan.info.loaded for plan in plans._entries.values()] == [True, True]


LENGTHS = [65, 100, 127, 128, 129, 200, 256]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lengths_in_buckets_share_a_plan(causal, cupy, plans):
    """Seven lengths, two plans per pass; results are as accurate as with exact lengths, whatever the memory contained."""
    poison = cupy.full(1 << 22, np.nan, np.float32)
    del poison  # released to the pool, from which the padded arrays are allocated
    for length in LENGTHS:
        case = Case("bucket", d=64, hq=4, hkv=2, sq=length, skv=length + 10, b=2, causal=causal)
        q, k, v = case.arrays()
        dout = np.asfortranarray(np.random.default_rng(1).standard_normal(q.shape).astype(q.dtype))
        a, b, c, d = (cupy.asarray(x) for x in (q, k, v, dout))
        out, stats = attention(a, b, c, causal=causal, return_stats=True, bucket=128)
        truth, truth_stats = reference.attention(q, k, v, causal=causal)
        naive, naive_stats = attention(q, k, v, causal=causal, return_stats=True)
        assert_close(cupy.asnumpy(out), truth, naive)
        assert_close(cupy.asnumpy(stats), truth_stats, naive_stats)
        gradients = attention_backward(d, a, b, c, out, stats, causal=causal, bucket=128)
        truths = reference.attention_backward(dout, q, k, v, causal=causal)
        naives = attention_backward(dout, q, k, v, naive, naive_stats, causal=causal)
        for got, right, plain in zip(gradients, truths, naives, strict=True):
            assert_close(cupy.asnumpy(got), right, plain)
    buckets = {(-(-n // 128), -(-(n + 10) // 128)) for n in LENGTHS}
    assert plans.misses == 2 * len(buckets)


def test_tuning_keeps_the_fastest(on_gpu, plans, tmp_path, monkeypatch, cupy):
    """Every config is measured, results stay right, the choice is stored, and another process loads it."""
    monkeypatch.setenv("CUPY_SDPA_CACHE_DIR", str(tmp_path))
    q, k, v, _ = on_gpu
    want = attention(q, k, v, causal=True)
    call = prepare(q, k, v, causal=True, autotune=True)
    assert call.report.plan.tuned
    assert len(call.tuning.trials) > 1
    assert call.tuning.after <= call.tuning.before
    assert str(call.tuning).count("\n") == 1 + len(call.tuning.trials)
    assert cupy.abs(call(q, k, v).astype("f4") - want.astype("f4")).max() < 0.03
    assert prepare(q, k, v, causal=True, autotune=True).tuning is None
    plans.clear()
    again = explain(q, k, v, causal=True).plan
    assert (again.tuned, again.engine, again.knobs) == (True, call.report.plan.engine, call.report.plan.knobs)


def test_tuning_of_gradients(on_gpu, plans):
    """The backward pass is autotuned too, inside the context manager, and only once."""
    q, k, v, dout = on_gpu
    with cupy_sdpa.autotune() as found:
        out, pullback = attention_vjp(q, k, v)
        gradients = pullback(dout)
        pullback(dout)
    assert [tuning.problem.backward for tuning in found] == [False, True]
    again = pullback(dout)
    assert all(same_bits(a, b) for a, b in zip(gradients[1:], again[1:], strict=True))
    assert prepare(q, k, v, backward=True, autotune=True).report.plan.tuned
    del out


@pytest.mark.parametrize("options", [{}, {"bucket": 256}], ids=["exact", "bucket"])
def test_captured_calls_replay(options, on_gpu, plans, cupy):
    """Forward and backward in a CUDA graph: replayed with new data in the same arrays, with other work between the replays."""
    q, k, v, dout = on_gpu
    out, stats = attention(q, k, v, return_stats=True, **options)
    gradients = attention_backward(dout, q, k, v, out, stats, **options)  # everything is planned and compiled now
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        attention(q, k, v, out=out, stats=stats, **options)
        attention_backward(dout, q, k, v, out, stats, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)), **options)
        graph = stream.end_capture()
        for seed in range(3):
            q[...] = cupy.asarray(np.random.default_rng(seed).standard_normal(q.shape).astype(np.float32)).astype(q.dtype)
            graph.launch(stream)
            junk = [
                cupy.full(1 << 20, np.nan, np.float32) for _ in range(8)
            ]  # new allocations must not overlap the memory of the graph
            stream.synchronize()
            del junk
            want, want_stats = attention(q, k, v, return_stats=True, **options)
            right = attention_backward(dout, q, k, v, want, want_stats, **options)
            assert same_bits(out, want)
            assert all(same_bits(a, b) for a, b in zip(gradients[1:], right[1:], strict=True))
            assert float(cupy.abs(gradients[0].astype("f4") - right[0].astype("f4")).max()) < 0.05


def test_a_graph_outlives_the_plan_cache(on_gpu, plans, cupy):
    """A captured graph is replayed correctly after the cache was emptied and other plans were built."""
    q, k, v, _ = on_gpu
    out = attention(q, k, v, causal=True)
    want = out.copy(order="F")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        attention(q, k, v, causal=True, out=out)
        graph = stream.end_capture()
        plans.clear()
        for length in range(30, 40):
            attention(q[:, :, :length], k, v)
        plans.clear()
        gc.collect()
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    assert same_bits(out, want)


def test_a_capture_without_a_plan_raises(on_gpu, plans, cupy):
    """Before anything is captured; the capture continues."""
    q, k, v, _ = on_gpu
    out = cupy.empty_like(q, order="F")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        attention(q, k, v)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="before the capture begins"):
            attention(q, k, v, causal=True)
        with cupy_sdpa.autotune(), pytest.raises(RuntimeError, match="tune before"):
            attention(q, k, v)
        attention(q, k, v, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert same_bits(out, attention(q, k, v))


STRESS = """
import json, threading, sys
import numpy as np, cupy
sys.path.insert(0, "tests")
from cases import Case
from planner import child_environment
from cupy_sdpa import attention, attention_vjp, get_plan_cache
from cupy_sdpa._cudnn.descriptor import live
cases = [Case(f"c{n}", d=64, sq=64 + 32 * n, causal=bool(n % 2)) for n in range(12)]
inputs = [[cupy.asarray(x) for x in case.arrays()] for case in cases]
wanted = []
for x, case in zip(inputs, cases):
    out, pullback = attention_vjp(*x, causal=case.causal)
    wanted.append((out, *pullback(x[0])[1:]))
get_plan_cache().clear()
cupy.cuda.Device().synchronize()
wrong, largest, errors = [], [], []

def work(seed):
    try:
        rng = np.random.default_rng(seed)
        plans = get_plan_cache()
        plans.set_limit(16)                      # 24 plans are wanted: they come and go while others run
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for n in rng.integers(0, len(cases), 625):
                if n % 3:
                    got = [attention(*inputs[n], causal=cases[n].causal)]
                else:
                    out, pullback = attention_vjp(*inputs[n], causal=cases[n].causal)
                    got = [out, *pullback(inputs[n][0])[1:]]
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
print(json.dumps({"wrong": wrong, "largest": max(largest), "threads": len(largest), "errors": errors, "live": live()}))
"""


def test_sixteen_threads_ten_thousand_calls(cupy, tmp_path):
    """Mixed calls on sixteen streams with caches that are too small: right results, no growth, no descriptor left alive."""
    done, _ = in_process(tmp_path, STRESS, CUPY_SDPA_DEBUG="1")
    assert done == {"wrong": [], "largest": 16, "threads": 16, "errors": [], "live": {}}


def test_threads_share_a_plan(on_gpu, plans, cupy):
    """Of eight threads that need the same new plan one builds it, and the others load it."""
    q, k, v = (x[:, :, :150] for x in on_gpu[:3])
    loaded = []
    ready = threading.Barrier(8)

    def work():
        ready.wait()
        loaded.append(explain(q, k, v).plan.loaded)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(loaded) == [False] + [True] * 7


def test_a_plan_that_cudnn_rejects_is_built_again(on_gpu, plans, tmp_path, monkeypatch):
    """The warning contains cuDNN's message."""
    monkeypatch.setenv("CUPY_SDPA_CACHE_DIR", str(tmp_path))
    q, k, v, _ = on_gpu
    want = attention(q, k, v)
    disk_cache = store.kept()
    (path,) = disk_cache.paths()
    key = path.stem
    head, _, text = disk_cache.get(key).partition(b"\n")
    disk_cache.put(key, head + b"\n" + text.replace(b'"cudnnVersion":', b'"cudnnVersion":1', 1))
    plans.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = attention(q, k, v)
    assert same_bits(got, want)
    assert [w.category for w in said] == [cupy_sdpa.DiskCacheWarning]
    assert CudnnError.__name__ in str(said[0].message) or "Unsupported" in str(said[0].message)


def dense(cupy, *shape):
    return cupy.asarray(np.arange(np.prod(shape), dtype=np.int16).reshape(shape, order="F") + 1, order="F")


RESIZED = {
    "longer": (lambda cp: (cp.full((8, 3, 10, 2), -1, np.int16, order="F"), dense(cp, 8, 3, 7, 2), 2)),
    "shorter": (lambda cp: (cp.full((8, 3, 7, 2), -1, np.int16, order="F"), dense(cp, 8, 3, 10, 2), 2)),
    "one_entry": (lambda cp: (cp.full((8, 3, 10, 1), -1, np.int16, order="F"), dense(cp, 8, 3, 7, 1), 2)),
    "first_axis": (lambda cp: (cp.full((11, 3, 2), -1, np.int16, order="F"), dense(cp, 5, 3, 2), 0)),
    "nothing": (lambda cp: (cp.full((8, 3, 10, 2), -1, np.int16, order="F"), dense(cp, 8, 3, 0, 2), 2)),
    "strided_source": (lambda cp: (cp.full((8, 3, 10, 2), -1, np.int16, order="F"), dense(cp, 8, 3, 14, 2)[:, :, ::2], 2)),
    "strided_target": (lambda cp: (cp.full((8, 3, 20, 2), -1, np.int16, order="F")[:, :, ::2], dense(cp, 8, 3, 7, 2), 2)),
    "part_of_a_batch": (lambda cp: (cp.full((8, 3, 10, 2), -1, np.int16, order="F"), dense(cp, 8, 3, 9, 4)[:, :, 1:8, 1:3], 2)),
    "other_batches": (lambda cp: (cp.full((8, 3, 10, 2), -1, np.int16, order="F"), dense(cp, 8, 3, 7, 4)[..., ::2], 2)),
    "c_order": (lambda cp: (cp.full((8, 3, 10, 2), -1, np.int16, order="F"), cp.ascontiguousarray(dense(cp, 8, 3, 7, 2)), 2)),
}


@pytest.mark.parametrize("name", RESIZED)
def test_arrays_are_copied_into_longer_ones(name, cupy):
    """By the driver's 2D copies or element by element: the rest is 0, and the memory around is unchanged."""
    target, source, axis = RESIZED[name](cupy)
    around = target.base if target.base is not None else target
    before = cupy.asnumpy(around).copy()
    memory.resize(target, source, axis)
    n = min(target.shape[axis], source.shape[axis])
    want = np.zeros(target.shape, np.int16)
    part = (slice(None),) * axis + (slice(n),)
    want[part] = cupy.asnumpy(source)[part]
    np.testing.assert_array_equal(cupy.asnumpy(target), want)
    if name == "strided_target":
        np.testing.assert_array_equal(cupy.asnumpy(around)[:, :, 1::2], before[:, :, 1::2])
