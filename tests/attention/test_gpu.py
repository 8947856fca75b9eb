"""cuDNN's results on a GPU are as accurate as their precision allows; and the behavior of calls."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from cases import DTYPES, FORWARD, Case
from on_gpu import check_forward, poisoned
from tolerance import assert_close

from cupy_sdpa import Unsupported, attention, explain, get_plan_cache, reference
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.support.why_not import why_not

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_every_forward_case(case, cupy):
    """Output and row statistics within twice the naive computation's error, or refused by the table."""
    if why_not(case.problem(), library().version, 90):
        with pytest.raises(Unsupported):
            check_forward(cupy, case)
    else:
        check_forward(cupy, case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_long_sequences(dtype, causal, cupy):
    """Many tiles in both directions: 2000 queries and 3000 keys."""
    check_forward(cupy, Case("long", d=128, hq=2, hkv=1, sq=2000, skv=3000, b=1, dtype=dtype, causal=causal))


def test_new_and_preallocated_results_are_the_same(cupy):
    """With and without out= and stats the output has the same bits, in Fortran order, on the device of the inputs."""
    q, k, v = (cupy.asarray(x) for x in FORWARD[0].arrays())
    plain = attention(q, k, v)
    out, stats = attention(q, k, v, return_stats=True)
    assert plain.flags.f_contiguous
    assert stats.flags.f_contiguous
    assert plain.dtype == q.dtype
    assert stats.dtype == np.float32
    assert (plain.view("u2") == out.view("u2")).all()


def test_integers_come_out_exactly(cupy):
    """With a saturated softmax every output is a row of V, bit for bit."""
    rng = np.random.default_rng(1)
    d, hq, hkv, s, b = 64, 4, 2, 50, 2
    wanted = rng.integers(0, s, (hq, s, b))
    keys, queries = np.zeros((d, hkv, s, b)), np.zeros((d, hq, s, b))
    keys[np.arange(s), :, np.arange(s)] = 1
    for h, i, n in np.ndindex(wanted.shape):
        queries[wanted[h, i, n], h, i, n] = 1000
    q, k, v = (x.astype("float16") for x in (queries, keys, rng.integers(-50, 50, (d, hkv, s, b))))
    out = cupy.asnumpy(attention(*(cupy.asarray(np.asfortranarray(x)) for x in (q, k, v)), scale=1.0))
    for h, i, n in np.ndindex(wanted.shape):
        np.testing.assert_array_equal(out[:, h, i, n], v[:, h // 2, wanted[h, i, n], n])


def test_keys_broadcast_with_stride_0(cupy):
    """Keys and values that are broadcast over the batch are not copied."""
    q, k, v = (cupy.asarray(x) for x in Case("shared", sq=100).arrays())
    wide = [cupy.broadcast_to(x[..., :1], x.shape) for x in (k, v)]
    assert wide[0].strides[3] == 0
    dense = [cupy.asfortranarray(x) for x in wide]
    assert (attention(q, *wide).view("u2") == attention(q, *dense).view("u2")).all()


def test_empty_and_keyless(cupy):
    """Empty inputs give empty outputs; without keys the output is 0 and the log-sum-exp -inf."""
    x = cupy.ones((64, 4, 8, 2), np.float16, order="F")
    assert attention(x[..., :0], x[..., :0], x[..., :0]).shape == (64, 4, 8, 0)
    out, stats = attention(x, x[:, :, :0], x[:, :, :0], return_stats=True)
    assert (out == 0).all()
    assert (stats == -np.inf).all()
    assert explain(x, x[:, :, :0], x[:, :, :0])


def bad(name, error, words, change):
    return pytest.param(change, error, words, id=name)


def _misaligned(cp, x):
    flat = cp.zeros(x.size + 1, x.dtype)
    return flat[1:].reshape(x.shape, order="F")


def _unaligned_stride(cp, x):
    d, h, s, b = x.shape
    return cp.zeros((d + 1, h, s, b), x.dtype, order="F")[:d]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        bad("float32", TypeError, r"q, k and v are float32; .*astype", lambda cp, x: x.astype("float32")),
        bad("float64", TypeError, r"float64", lambda cp, x: x.astype("float64")),
        bad("c_order", ValueError, r"axis 0 must be contiguous.*layout=", lambda cp, x: cp.ascontiguousarray(x)),
        bad("d_sliced", ValueError, r"axis 0 must be contiguous", lambda cp, x: cp.asfortranarray(cp.concatenate([x, x]))[::2]),
        bad("reversed", ValueError, r"does not support negative strides", lambda cp, x: x[:, :, ::-1]),
        bad("misaligned", ValueError, r"multiple of 2 bytes", _misaligned),
        bad("stride_not_16_bytes", ValueError, r"not a multiple of 16", _unaligned_stride),
        bad(
            "head_dim_12",
            Unsupported,
            r"is 12; cuDNN supports multiples of 8: pad axis 0 with 4",
            lambda cp, x: cp.asfortranarray(x[:12]),
        ),
    ],
)
def test_bad_arguments_raise_before_any_launch(change, error, words, cupy):
    """The call raises with values and remedy, the output is unchanged, and explain raises too, or has the same reasons."""
    x = change(cupy, cupy.ones((64, 4, 8, 2), np.float16, order="F"))
    out = poisoned(cupy, x.shape, x.dtype)
    with pytest.raises(error, match=words):
        attention(x, x, x, out=out)
    assert cupy.isnan(out).all()
    if "contiguous" in words or "negative" in words:  # the strides of another layout
        with pytest.raises(error, match=words):
            explain(x, x, x)
        return
    report = explain(x, x, x)
    assert not report
    assert "cannot run on cuDNN" in str(report)


def test_out_must_not_overlap_an_input(cupy):
    """Overlap is distinguished from interleaving, on the GPU too."""
    whole = cupy.asarray(np.asfortranarray(np.random.default_rng(0).standard_normal((64, 2, 4, 16, 2)).astype(np.float16)))
    q, k, v, out = (whole[:, :, i] for i in range(4))
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(q, k, v, out=q)
    wanted = attention(*(cupy.asfortranarray(x) for x in (q, k, v)))
    assert attention(q, k, v, out=out) is out
    assert (out == wanted).all()


def test_explain_and_the_call_share_a_plan(cupy, plans):
    """One miss for the report, then only hits; the report has engine, workspace and time, and can be pickled."""
    q, k, v = (cupy.asarray(x) for x in Case("explained", sq=77).arrays())
    report = explain(q, k, v, causal=True)
    assert report
    assert (plans.misses, len(plans)) == (1, 1)
    attention(q, k, v, causal=True)
    assert (plans.hits, plans.misses, len(plans)) == (1, 1, 1)
    plans.clear()
    assert report.plan.workspace >= 0
    for words in ("runs on cuDNN", f"engine           {report.plan.engine}", "workspace", "S = Q Kᵀ"):
        assert words in str(report)


def test_scale_needs_no_new_plan(cupy, plans):
    """The scale is a by-value scalar: one plan and right results, also in calls without synchronization."""
    q, k, v = (cupy.asarray(x) for x in Case("scaled").arrays())
    scales = [0.05 * (n + 1) for n in range(20)]
    outs = [attention(q, k, v, scale=scale) for scale in scales]
    assert len(plans) == 1
    for scale, out in zip(scales, outs, strict=True):
        on_host = [x.get(order="F") for x in (q, k, v)]
        truth, _ = reference.attention(*on_host, scale=scale)
        naive = attention(*on_host, scale=scale)
        assert_close(cupy.asnumpy(out), truth, naive)


def test_eviction_while_kernels_run(cupy, plans):
    """With a limit of one plan every call destroys the previous plan, whose kernel may still run: results are right."""
    plans.set_limit(1)
    cases = [Case(f"evicted_{sq}", d=128, sq=sq, b=1, causal=True) for sq in (512, 640, 768)]
    inputs = [[cupy.asarray(x) for x in case.arrays()] for case in cases]
    wanted = [attention(*x, causal=True).copy() for x in inputs]
    got = [[attention(*x, causal=True) for x in inputs] for _ in range(5)]
    assert len(plans) == 1
    for outs in got:
        for out, want in zip(outs, wanted, strict=True):
            assert (out.view("u2") == want.view("u2")).all()


def test_work_runs_on_the_current_stream(cupy):
    """On another stream a call waits for the previous work of that stream, and for nothing else."""
    case = Case("streamed", d=128, sq=500, b=1)
    q, k, v = (cupy.asarray(x) for x in case.arrays())
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


def test_memory_comes_from_cupys_allocator(cupy, plans):
    """Outputs and workspace are allocated with the user's allocator, and released after the call."""
    q, k, v = (cupy.asarray(x) for x in Case("decoding", d=128, hq=8, hkv=2, sq=1, skv=8192).arrays())
    need = explain(q, k, v).plan.workspace
    assert need > 100_000
    pool, sizes = cupy.cuda.MemoryPool(), []

    def allocate(size):
        sizes.append(size)
        return pool.malloc(size)

    with cupy.cuda.using_allocator(allocate):
        out = attention(q, k, v)
    cupy.cuda.Device().synchronize()
    assert sorted(sizes) == sorted([need, out.nbytes])
    del out
    assert pool.used_bytes() == 0


def test_threads_on_their_own_streams(cupy):
    """Eight threads with a stream each run 100 calls of mixed shapes: every result is right."""
    cases = [Case(f"threaded_{n}", d=64, sq=64 + 32 * n, causal=bool(n % 2)) for n in range(6)]
    inputs = [[cupy.asarray(x) for x in case.arrays()] for case in cases]
    wanted = [attention(*x, causal=case.causal) for x, case in zip(inputs, cases, strict=True)]
    cupy.cuda.Device().synchronize()
    wrong, caches = [], []

    def work(seed):
        rng = np.random.default_rng(seed)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            caches.append(get_plan_cache())
            for n in rng.integers(0, len(cases), 100):
                out = attention(*inputs[n], causal=cases[n].causal)
                if not (out.view("u2") == wanted[n].view("u2")).all():
                    wrong.append(n)
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(caches) == 8
    assert not wrong


def test_with_pytorch(cupy):
    """A process that has loaded PyTorch's cuDNN uses that one; PyTorch tensors are exchanged by DLPack."""
    pytest.importorskip("torch")
    code = """
import torch, cupy, numpy as np
x = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.bfloat16)          # (batch, seq, heads, head_dim)
torch.nn.functional.conv2d(torch.ones(1, 8, 8, 8, device="cuda"), torch.ones(8, 8, 3, 3, device="cuda"))
from cupy_sdpa import attention
from cupy_sdpa._cudnn.library import library
a = cupy.from_dlpack(x).T
out = torch.from_dlpack(attention(a, a, a, causal=True).T)
y = x.transpose(1, 2).float()
want = torch.nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2)
assert (out.float() - want).abs().max() < 0.03, (out.float() - want).abs().max()
print(library().found_via)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "already loaded in this process"


@pytest.mark.multi_gpu
def test_two_gpus_share_nothing(cupy):
    """A call runs on the device of its arrays, whichever is current, with a plan of that device's context; mixed devices raise."""
    case = Case("two_gpus", sq=200)
    arrays = case.arrays()
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
    np.testing.assert_array_equal(cupy.asnumpy(outs[0]).view("u2"), cupy.asnumpy(outs[1]).view("u2"))
    with pytest.raises(ValueError, match="different devices: q on device 0"):
        attention(outs[0], outs[1], outs[1])
    assert DTYPES[case.dtype] == outs[0].dtype
