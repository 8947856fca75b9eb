"""Arrays of other libraries are shared without a copy, results are arrays of the same library, and its stream is used.

The libraries are stand-ins (:mod:`fake_libraries`); on a GPU the real PyTorch, JAX and Numba run.
Refused arrays are in the tables of mistakes.
"""

import fake_libraries
import ml_dtypes
import numpy as np
import pytest
from fake_cupy import DEVICE

from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, explain, prepare, shared_prefix_attention

ON_CPU = ["torch", "jax", "another"]
ON_GPU = ["torch", "jax", "numba", "another"]
SHAPE = (2, 16, 2, 16)


def random_arrays(dtype=np.float32, count=4):
    """Arrays (B, S, H, D)."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SHAPE).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ON_CPU)
def test_on_the_cpu(name, dtype, libraries):
    """Every call, with arrays among the options; the results equal numpy's, in the caller's type and dtype."""
    kind, host = getattr(libraries, name), random_arrays(dtype)
    if name == "another" and dtype is ml_dtypes.bfloat16:
        pytest.skip("numpy's DLPack has no bfloat16")
    theirs = [kind(x) for x in host]
    mask = np.random.default_rng(1).random((2, 1, 16, 16)) < 0.7
    out, pullback = attention_vjp(*theirs[:3], layout="bshd", mask=kind(mask))
    want, own = attention_vjp(*host[:3], layout="bshd", mask=mask)
    found, wanted = [out, *pullback(theirs[3])], [want, *own(host[3])]
    out, stats = attention(*theirs[:3], layout="bshd", return_stats=True)
    found += [stats, *attention_backward(theirs[3], *theirs[:3], out, stats, layout="bshd")]
    out, stats = attention(*host[:3], layout="bshd", return_stats=True)
    wanted += [stats, *attention_backward(host[3], *host[:3], out, stats, layout="bshd")]
    found += attention_jvp(*theirs[:3], theirs[3], layout="bshd")
    wanted += attention_jvp(*host[:3], host[3], layout="bshd")
    table, lengths = np.array([[0, 1], [0, 1]], np.int32), np.array([32, 30], np.int32)
    pages = {"layout": "bshd", "page_table": table, "seq_lens_kv": lengths}
    found.append(shared_prefix_attention(*theirs[:3], 16, **pages | {"page_table": kind(table), "seq_lens_kv": kind(lengths)}))
    wanted.append(shared_prefix_attention(*host[:3], 16, **pages))
    for x, y in zip(found, wanted, strict=True):
        assert type(x) is kind
        assert x.inside.dtype == y.dtype
        np.testing.assert_array_equal(x.inside, y)
    for flags in ({}, {"backward": True}, {"jvp": True}):
        reports = [explain(*x[:3], layout="bshd", **flags) for x in (theirs, host)]
        assert reports[0].problem == reports[1].problem
    found, wanted = (prepare(*x[:3], layout="bshd", backward=True).problem for x in (theirs, host))
    assert found == wanted


def test_gradients_of_tensors(libraries):
    """The dictionary of gradients has arrays of the library."""
    host = random_arrays(np.float64)
    bias = np.random.default_rng(1).standard_normal((16, 16))
    options = {"layout": "bshd", "score_mod": lambda s, b, h, i, j, bias: s + bias[i, j], "return_dtensors": True}
    kind = libraries.torch
    _, pullback = attention_vjp(*map(kind, host[:3]), tensors={"bias": kind(bias)}, **options)
    _, own = attention_vjp(*host[:3], tensors={"bias": bias}, **options)
    *_, found = pullback(kind(host[3]))
    *_, wanted = own(host[3])
    assert type(found["bias"]) is kind
    np.testing.assert_array_equal(found["bias"].inside, wanted["bias"])


def test_nothing_is_copied(libraries):
    """Results are written to the caller's memory, and inputs that change in place are read anew."""
    q, k, v, _ = host = random_arrays()
    out = np.full(SHAPE, np.nan, np.float32)
    theirs, target = [libraries.torch(x) for x in host], libraries.torch(out)
    for _ in range(3):
        assert attention(*theirs[:3], layout="bshd", out=target) is target
        np.testing.assert_array_equal(out, attention(q, k, v, layout="bshd"))
        q *= 2


@pytest.mark.parametrize("name", ON_GPU)
def test_on_the_gpu(name, libraries, fake):
    """Both passes, repeated; arrays share memory, and work is enqueued on the library's stream or is complete."""
    kind, host = getattr(libraries, name), random_arrays(np.float16)
    want, own = attention_vjp(*(x.astype(np.float64) for x in host[:3]), layout="bshd", causal=True)
    wanted = [want, *own(host[3].astype(np.float64))]
    stream = fake.cuda.Stream(non_blocking=True)
    libraries.modules["torch"].state.stream = stream.ptr
    with stream:
        inside = [fake.asarray(x) for x in host]
        if name != "torch":
            stream.synchronize()
    theirs = [kind(x) for x in inside]
    for _ in range(8):
        before = len(DEVICE.launches)
        out, pullback = attention_vjp(*theirs[:3], layout="bshd", causal=True)
        found = [out, *pullback(theirs[3])]
        assert set(DEVICE.launches[before:]) == ({stream.ptr} if name == "torch" else {0})
        if name == "torch":
            stream.synchronize()
        for x, y in zip(found, wanted, strict=True):
            assert type(x) is kind
            np.testing.assert_allclose(x.inside.view_.astype(np.float64), y, atol=0.03)
    if name in ("torch", "numba"):
        streams = {stream.ptr} if name == "torch" else set()
        assert set(fake_libraries.Wrapped.streams) == streams


def test_the_default_stream_of_a_library(libraries, fake):
    """It is CUDA's, also if CuPy's current stream is another one; gradients of float32 tensors are float32 tensors."""
    theirs = [libraries.torch(fake.asarray(x)) for x in random_arrays(np.float16)]
    with fake.cuda.Stream(non_blocking=True):
        before = len(DEVICE.launches)
        attention(*theirs[:3], layout="bshd")
        assert set(DEVICE.launches[before:]) == {0}
    host = random_arrays()
    theirs = [libraries.torch(fake.asarray(x)) for x in host]
    out, pullback = attention_vjp(*theirs[:3], layout="bshd", compute_dtype="float16")
    want, own = attention_vjp(*host[:3], layout="bshd")
    for x, y in zip((out, *pullback(theirs[3])), (want, *own(host[3])), strict=True):
        assert x.inside.dtype == np.float32
        np.testing.assert_allclose(x.inside.get(), y, atol=0.03)


def test_no_gradient_is_lost_inside_of_no_grad(libraries):
    """Tensors that require a gradient raise, see the tables of mistakes, except inside ``torch.no_grad()``."""
    needs = libraries.torch(random_arrays()[0], requires_grad=True)
    libraries.modules["torch"].state.grad = False
    assert attention(needs, needs, needs, layout="bshd").shape == SHAPE


# On a GPU


def on_gpu(name):
    """The module of a library, and its float16 arrays (B, S, H, D) with the same contents as numpy arrays."""
    module = pytest.importorskip({"numba": "numba.cuda"}.get(name, name))
    host = random_arrays(np.float16)
    if name == "torch":
        return module, [module.from_numpy(x).cuda() for x in host], lambda x: x.double().cpu().numpy()
    if name == "jax":
        return module, [module.numpy.asarray(x) for x in host], lambda x: np.asarray(x, np.float64)
    return module, [module.to_device(x) for x in host], lambda x: x.copy_to_host().astype(np.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "jax", "numba"])
def test_real_libraries(name, cupy):
    """The results equal numpy's, in arrays of the library, repeatedly."""
    _, theirs, to_host = on_gpu(name)
    want, own = attention_vjp(*(x.astype(np.float64) for x in random_arrays(np.float16)[:3]), layout="bshd", causal=True)
    wanted = [want, *own(random_arrays(np.float16)[3].astype(np.float64))]
    for _ in range(6):
        out, pullback = attention_vjp(*theirs[:3], layout="bshd", causal=True)
        for x, y in zip((out, *pullback(theirs[3])), wanted, strict=True):
            assert type(x) is type(theirs[0])
            np.testing.assert_allclose(to_host(x), y, atol=0.03)


@pytest.mark.gpu
def test_torch_writes_into_tensors(cupy):
    """``out=`` is the caller's tensor; bool, int32 and float32 tensors are read as options."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(2, 40, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    lengths = torch.tensor([40, 17], device="cuda", dtype=torch.int32)
    sinks = torch.randn(4, device="cuda")
    for _ in range(5):
        options = {"seq_lens_kv": lengths, "sinks": sinks}
        assert attention(q, k, v, layout="bshd", out=out, **options) is out
        rows = [x.float().cpu().numpy() for x in (q, k, v)]
        want = attention(*rows, layout="bshd", seq_lens_kv=lengths.cpu().numpy(), sinks=sinks.cpu().numpy())
        np.testing.assert_allclose(out.float().cpu().numpy(), want, atol=0.03)
        q *= 0.5


@pytest.mark.gpu
def test_another_stream_of_cupy(cupy):
    """Tensors that PyTorch's default stream writes late are read after that, for any current stream of CuPy."""
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 40, 4, 64, device="cuda", dtype=torch.float16)
    attention(x, x, x, layout="bshd")
    with cupy.cuda.Stream(non_blocking=True):
        torch.cuda._sleep(50_000_000)
        x += 1
        out = attention(x, x, x, layout="bshd")
    assert float(out.float().min()) == 1.0


@pytest.mark.gpu
def test_jax_bfloat16(cupy):
    """bfloat16 arrays of JAX are shared in both directions."""
    jax, _, to_host = on_gpu("jax")
    x = jax.random.normal(jax.random.key(0), SHAPE, "bfloat16")
    out = attention(x, x, x, layout="bshd", causal=True)
    want = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    assert out.dtype == x.dtype
    np.testing.assert_allclose(to_host(out), to_host(want), atol=0.06)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of PyTorch's own gradients
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_torch_agrees(dtype, layout, cupy):
    """With PyTorch's own attention and gradients, for tensors with a mask, on a stream of PyTorch."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    q, k, v, dout = (torch.randn(2, 3, 40, 64, device="cuda").to(kind) for _ in range(4))
    mask = torch.rand(2, 1, 40, 40, device="cuda") < 0.7
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    wanted = [want.detach(), *torch.autograd.grad(want, leaves, dout.float())]
    options = {"compute_dtype": "bfloat16"} if dtype == "float32" else {}

    def turned(x):
        return x if layout == "bhsd" else x.transpose(1, 2)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            scaled = [turned(x * 1) for x in (q, k, v, dout)]
            out, pullback = attention_vjp(*scaled[:3], layout=layout, mask=mask, **options)
            found = [turned(x).float() for x in (out, *pullback(scaled[3]))]
        torch.cuda.current_stream().wait_stream(stream)
        assert out.dtype == kind
        for x, y in zip(found, wanted, strict=True):
            assert (x - y).abs().max() < 0.03 * max(1.0, float(y.abs().max()))
