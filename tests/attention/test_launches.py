"""What calls do on a GPU apart from results: streams, memory, captures, threads and plans; on the fake CuPy and on a GPU."""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from engines import Engine, one_in
from fake_cupy import DEVICE, driver
from replayed_calls import OFTEN, REPLAY, calls_of, equal, functions_run

from cupy_sdpa import Unsupported, attention, attention_backward, explain, get_plan_cache

ON_A_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
#: A call with the same addresses is captured as a CUDA graph when it is made this often, see docs/design.md.
CAPTURE_AFTER = 3
#: Rows of the table of calls that stage arrays, convert, sum or clear.
STAGED = ("plain", "lengths", "large copies", "bias", "mask", "sinks", "packed")


# Streams and memory


@pytest.mark.parametrize("name", [*STAGED, "parts"])
def test_a_call_waits_for_nothing_and_leaves_nothing(name, fake):
    """Neither pass synchronizes, all work is on the current stream, and all memory except the results is released."""
    calls, pool = calls_of(Engine("fake", fake), name, preallocated=False), fake.cuda.MemoryPool()
    calls.launch()  # creates the constants of the plans
    fake.cuda.Device().synchronize()
    with fake.cuda.Stream(non_blocking=True) as stream, fake.cuda.using_allocator(pool.malloc):
        waits, launches = DEVICE.waits, len(DEVICE.launches)
        results = calls.launch()
        assert DEVICE.waits == waits
        assert set(DEVICE.launches[launches:]) == {stream.ptr}
        assert pool.used_bytes() == sum(-(-x.nbytes // 512) * 512 for x in results.values())
        stream.synchronize()


@ON_A_GPU
def test_one_allocation_holds_what_explain_predicts(engine):
    """Apart from results, one block is allocated with the user's allocator and released; it is full of NaN before."""
    cupy, sizes = engine.xp, []
    q, k, v, dout = (engine.normal(n, 128, heads, 512, 1) for n, heads in enumerate((8, 2, 2, 8)))
    out, stats = attention(q, k, v, return_stats=True)
    need = explain(q, k, v, backward=True).workspace
    assert need >= q.size * 4  # dq is accumulated in float32
    pool = cupy.cuda.MemoryPool()

    def allocate(size):
        memory = pool.malloc(size)
        memory.memset_async(255, size, cupy.cuda.get_current_stream())
        sizes.append(size)
        return memory

    with cupy.cuda.using_allocator(allocate):
        gradients = attention_backward(dout, q, k, v, out, stats)
    assert sorted(sizes) == sorted([need, *(x.nbytes for x in gradients)])
    assert not any(np.isnan(x).any() for x in engine.get(gradients))
    del gradients
    assert pool.used_bytes() == 0


@pytest.mark.gpu
def test_memory_of_a_forward_call(cupy):
    """Outputs and workspace are allocated with the user's allocator, and released after the call."""
    engine, sizes, pool = Engine("cupy", cupy), [], cupy.cuda.MemoryPool()
    q, k, v = (engine.normal(n, 128, heads, length, 1) for n, (heads, length) in enumerate([(8, 1), (2, 8192), (2, 8192)]))
    need = explain(q, k, v).plan.workspace
    assert need > 50_000
    with cupy.cuda.using_allocator(lambda size: sizes.append(size) or pool.malloc(size)):
        out = attention(q, k, v)
    cupy.cuda.Device().synchronize()
    assert sorted(sizes) == sorted([need, out.nbytes])


@pytest.mark.gpu
def test_work_runs_on_the_current_stream(cupy):
    """On another stream a call waits for the previous work of that stream, and for nothing else."""
    q, k, v = (Engine("cupy", cupy).normal(n, 128, 4, 500, 1) for n in range(3))
    wanted = attention(q, k, v)
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.ones((8192, 8192), np.float32)
    late = [cupy.zeros_like(x) for x in (q, k, v)]
    for rounds in (1, 20):  # once to compile CuPy's kernels, then the test
        for x in late:
            x.fill(0)
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(rounds):
                busy @ busy  # the inputs arrive late
            for source, target in zip((q, k, v), late, strict=True):
                target[...] = source
            out = attention(*late)
            returned_early = not stream.done
    assert returned_early, "the call waited for the GPU"
    stream.synchronize()
    assert (out.view("u2") == wanted.view("u2")).all()


@contextlib.contextmanager
def like_rmm(cupy):
    """An allocator that owns its memory outside CuPy's pool, and returns other addresses every time, as RMM may do."""
    turn, pool = itertools.count(1), cupy.cuda.MemoryPool()

    def allocate(size):
        offset = 256 * (next(turn) % 64)
        block = pool.malloc(size + offset)
        block.memset_async(255, size + offset, cupy.cuda.get_current_stream())
        memory = cupy.cuda.UnownedMemory(block.ptr + offset, size, block)
        return cupy.cuda.MemoryPointer(memory, 0)

    with cupy.cuda.using_allocator(allocate):
        yield


def async_pool(cupy):
    """CuPy's pool of stream-ordered memory."""
    return cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc)


def unpooled(cupy):
    """Memory that is returned to the driver when it is freed, which waits for the device."""
    return cupy.cuda.using_allocator(None)


def changing(cupy):
    """Another address for every allocation: none occurs often enough for a graph."""
    turn, held = itertools.count(1), []

    def allocate(size):
        held.append(cupy.get_default_memory_pool().malloc(size + 256 * next(turn)))  # another size: another block
        return held[-1]

    return cupy.cuda.using_allocator(allocate)


ALLOCATORS = [("fake", changing), *(pytest.param("cupy", x, marks=pytest.mark.gpu) for x in (like_rmm, async_pool, unpooled))]


@pytest.mark.parametrize("name", one_in(4, STAGED))
@pytest.mark.parametrize(("engine", "allocator"), ALLOCATORS, indirect=["engine"])
def test_allocators(allocator, name, engine):
    """Repeated calls: at addresses that return, and at new ones; earlier results stay, inputs change in place."""
    calls = calls_of(engine, name, preallocated=False)
    want = [calls.run(index) for index in (1, 0)]
    with allocator(engine.xp):
        kept = [calls.launch() for _ in range(3)]
        for _ in range(2 * CAPTURE_AFTER):
            equal(engine, calls.run(0), want[1])
        equal(engine, calls.run(1), want[0])
        for results in kept:
            equal(engine, calls.host(results), want[1])
        engine.xp.cuda.Device().synchronize()
        get_plan_cache().clear()  # graphs own memory of this allocator
    del kept


# Threads


@ON_A_GPU
@pytest.mark.parametrize("name", one_in(4, STAGED))
def test_threads_hand_over_their_session(name, engine):
    """Threads end while their work is running, and the next thread takes over: on another stream, with other work."""
    cupy, problems = engine.xp, [calls_of(engine, name, preallocated=False) for _ in range(2)]
    want = problems[0].run()
    cupy.cuda.Device().synchronize()
    left, busy = [], cupy.ones((512, 512), np.float32)

    def work(turn):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                busy[...] = busy * 1.0001
            left.append((stream, [problems[turn % 2].launch() for _ in range(CAPTURE_AFTER + 1)]))

    for turn in range(4):
        thread = threading.Thread(target=work, args=(turn,))
        thread.start()
        thread.join()
    for stream, results in left:
        stream.synchronize()
        for got in results:
            equal(engine, problems[0].host(got), want)
    last = threading.Thread(target=lambda: get_plan_cache().clear())
    last.start()
    last.join()


# Plans


@ON_A_GPU
def test_explain_and_the_calls_share_a_plan(engine, cache):
    """One miss for each report, then only hits; the reports have engine and workspace."""
    q, k, v, dout = (engine.normal(n, 64, heads, 77, 2) for n, heads in enumerate((4, 2, 2, 4)))
    report = explain(q, k, v, causal=True, return_stats=True)
    assert report
    assert (cache.misses, len(cache)) == (1, 1)
    out, stats = attention(q, k, v, causal=True, return_stats=True)
    assert (cache.hits, cache.misses, len(cache)) == (1, 1, 1)
    backward = explain(q, k, v, backward=True, causal=True)
    attention_backward(dout, q, k, v, out, stats, causal=True)
    assert (cache.hits, cache.misses, len(cache)) == (2, 2, 2)
    cache.clear()
    for words in ("runs on cuDNN", f"engine           {report.plan.engine}", "workspace", "S = Q Kᵀ"):
        assert words in str(report)
    for words in ("backward attention", "dK = dSᵀ Q", "workspace"):
        assert words in str(backward)


def test_deterministic_calls_have_plans_of_their_own_where_it_matters(fake):
    """With one query a deterministic call has its own plan; with two there is one plan. Gradients always have their own."""
    for queries, plans in ((1, 2), (2, 1)):
        q, k = fake.ones((16, 2, queries, 1), np.float16, order="F"), fake.ones((16, 2, 300, 1), np.float16, order="F")
        before = get_plan_cache().misses
        for _ in range(4):
            for deterministic in (False, True):
                attention(q, k, k, deterministic=deterministic).get()
        assert get_plan_cache().misses - before == plans
    out, stats = attention(q, k, k, return_stats=True)
    before = get_plan_cache().misses
    for _ in range(4):
        for deterministic in (False, True):
            attention_backward(q, q, k, k, out, stats, deterministic=deterministic)
    assert get_plan_cache().misses - before == 2


#: Arrays that cuDNN cannot read, made of an array (64, 4, 8, 2), and the errors.
UNREADABLE = {
    "every second element": (lambda xp, x: xp.asfortranarray(xp.concatenate([x, x]))[::2], ValueError, "axis 0 must be contiguous"),
    "reversed": (lambda xp, x: x[:, :, ::-1], ValueError, "does not support negative strides"),
    "misaligned": (lambda xp, x: xp.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape, order="F"), ValueError, "multiple of 2 bytes"),
    "a stride of 130 bytes": (lambda xp, x: xp.zeros((65, 4, 8, 2), x.dtype, order="F")[:64], ValueError, "not a multiple of 16"),
    "head dim 12": (lambda xp, x: xp.asfortranarray(x[:12]), Unsupported, "is 12; cuDNN supports multiples of 8: pad axis 0 with 4"),
    "float64": (lambda xp, x: x.astype("float64"), TypeError, "float64"),
}  # fmt: skip


@ON_A_GPU
@pytest.mark.parametrize("name", UNREADABLE)
def test_refused_calls_launch_nothing(name, engine):
    """The call raises with the values and the fix, preallocated results are unchanged, and explain has the same reasons, or raises."""
    make, error, words = UNREADABLE[name]
    x = make(engine.xp, engine.xp.ones((64, 4, 8, 2), np.float16, order="F"))
    out, lengths = engine.nan(*x.shape, dtype=x.dtype), engine.xp.ones(2, np.int32)
    launches = len(DEVICE.launches)
    with pytest.raises(error, match=words):
        attention(x, x, x, seq_lens_q=lengths, out=out)
    assert len(DEVICE.launches) - launches <= 1  # the lengths of the other side
    assert np.isnan(engine.get(out)).all()
    if "contiguous" in words or "negative" in words:  # the strides of another layout
        with pytest.raises(error, match=words):
            explain(x, x, x)
    else:
        report = explain(x, x, x)
        assert not report
        assert "cannot run on cuDNN" in str(report)


@ON_A_GPU
def test_a_workspace_limit_refuses_before_anything_runs(engine):
    """A limit below the need of every engine raises with both sizes; preallocated gradients are unchanged."""
    q, k, v = (engine.normal(n, 64, 2, 128, 2) for n in range(3))
    out, stats = attention(q, k, v, return_stats=True)
    dq = engine.nan(*q.shape)
    with pytest.raises(Unsupported, match=r"needs a workspace of \d+ bytes, and the limit is 1000"):
        attention_backward(out, q, k, v, out, stats, max_workspace=1000, dq=dq)
    assert np.isnan(engine.get(dq)).all()
    assert explain(q, k, v, backward=True, max_workspace=1000).workspace is None


# Other libraries, other devices, and the fake itself


@pytest.mark.gpu
def test_with_pytorch(cupy):
    """A process that has loaded PyTorch's cuDNN uses that one; PyTorch tensors are exchanged by DLPack."""
    pytest.importorskip("torch")
    code = """
import torch, cupy, numpy as np
x = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.bfloat16)          # (batch, seq, heads, head_dim)
torch.nn.functional.conv2d(torch.ones(1, 8, 8, 8, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda"))
from cupy_sdpa import attention
from cupy_sdpa.core.cudnn.library import library
a = cupy.from_dlpack(x).T
out = torch.from_dlpack(attention(a, a, a, causal=True).T)
y = x.transpose(1, 2).float()
want = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2)
assert (out.float() - want).abs().max() < 0.03, (out.float() - want).abs().max()
print(library().found_via)
"""
    environ = {name: value for name, value in os.environ.items() if name != "CUPY_SDPA_CUDNN"}  # another cuDNN is refused here
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "already loaded in this process"


@pytest.mark.multi_gpu
def test_two_gpus_share_nothing(cupy):
    """A call runs on the device of its arrays, whichever is current, with a plan of that device's context; mixed devices raise."""
    arrays = [np.asfortranarray(np.random.default_rng(n).standard_normal((64, 4, 200, 2)).astype("f2")) for n in range(3)]
    outs, caches = [], []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            inputs = [cupy.asarray(x) for x in arrays]
        with cupy.cuda.Device(1 - device):
            outs.append(attention(*inputs))
            keyless = attention(inputs[0], *(x[:, :, :0] for x in inputs[1:]))
            assert keyless.device.id == device
            assert cupy.cuda.runtime.getDevice() == 1 - device
        with cupy.cuda.Device(device):
            caches.append(get_plan_cache())
        assert outs[-1].device.id == device
    assert caches[0] is not caches[1]
    assert all(len(kept) > 0 for kept in caches)
    assert caches[1].get(explain(*inputs).problem).info.loaded  # loaded from the serialized form, not compiled again
    np.testing.assert_array_equal(cupy.asnumpy(outs[0]), cupy.asnumpy(outs[1]))
    with pytest.raises(ValueError, match="different devices: q on device 0"):
        attention(outs[0], outs[1], outs[1])


@pytest.mark.parametrize(
    "engine", ["fake", pytest.param("cupy", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])], indirect=True
)
def test_two_gpus_have_their_own_graphs(engine, cache):
    """The same call on both, whichever is current: it runs on the device of its arrays, captured in that context."""
    xp, devices = engine.xp, [engine.xp.cuda.Device(number) for number in (0, 1)]
    calls, wanted = [], []
    for device in devices:
        with device:
            arrays = [engine.normal([seed, device.id], 64, 2, 100, 1) for seed in range(3)]
            wanted.append(engine.get(attention(*arrays)))
            calls.append(functools.partial(attention, *arrays, out=xp.empty_like(arrays[0])))
    for _ in range(2 * OFTEN):
        for current, device in itertools.product(devices, devices):
            with device:
                calls[device.id].keywords["out"].fill(np.nan)
            with current:
                got = calls[device.id]()
                assert got.device == device
                np.testing.assert_array_equal(engine.get(got), wanted[device.id])
    for device in devices:
        with device:
            for _ in range(OFTEN):  # the memory of these calls has one address
                calls[device.id]()
            assert functions_run(calls[device.id]) <= REPLAY
            assert get_plan_cache().recordings > 0
            get_plan_cache().clear()
            xp.cuda.Device().synchronize()


def test_the_fake_notices_wrong_programs(fake):
    """Work on another stream is late, freed memory is NaN, and writes out of bounds and reads in a capture raise."""
    x = fake.zeros((4, 4), np.float32)
    assert not np.isnan(x.get()).any()
    with fake.cuda.Stream(non_blocking=True) as stream:
        x.fill(7)
    assert not x.get().any()
    stream.synchronize()
    assert (x.get() == 7).all()
    address = x.data.ptr
    del x
    again = fake.empty((4, 4), np.float32)
    assert again.data.ptr == address
    assert np.isnan(again.get()).all()
    driver.cuMemsetD8Async(address, 0, again.nbytes + 1, 0)
    with pytest.raises(fake.cuda.runtime.CUDARuntimeError, match="64 bytes begin"):
        again.get()
    with stream:
        stream.begin_capture()
        with pytest.raises(fake.cuda.runtime.CUDARuntimeError, match="being captured"):
            again.get()
        stream.end_capture()
