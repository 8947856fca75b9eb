"""The examples for PyTorch and Thinc: a function with gradients, and a layer; the libraries are stand-ins (:mod:`fake_libraries`).

On a GPU the real PyTorch runs, if it is installed.
"""

import importlib
import sys

import numpy as np
import pytest

from cupy_sdpa import attention, attention_vjp

#: PyTorch warns, once in a process, if a leaf is used on another stream than its gradient; the tests use streams of their own.
STREAMS = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")


@pytest.fixture
def torch_attention(libraries):
    """The function for the stand-in of PyTorch."""
    return importlib.import_module("examples.torch_attention").attention


def random_arrays(shape=(2, 2, 7, 8)):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for _ in range(4)]


def test_gradients_of_tensors(libraries, torch_attention):
    """The output and the requested gradients, in the layout of PyTorch and in its type."""
    host = random_arrays()
    bias, sinks = np.random.default_rng(1).standard_normal((2, 2, 7, 7)), np.ones(2, np.float32)
    q, k, v = (libraries.torch(x, requires_grad=True) for x in host[:3])
    extra = [libraries.torch(x, requires_grad=True) for x in (bias, sinks)]
    out = torch_attention(q, k, v, bias=extra[0], sinks=extra[1], causal=True)
    gradients = libraries.modules["torch"].state.last(libraries.torch(host[3]))
    options = {"layout": "bhsd", "bias": bias, "sinks": sinks, "causal": True}
    want, pullback = attention_vjp(*host[:3], return_dbias=True, return_dsinks=True, **options)
    assert gradients[5] is None
    for x, y in zip((out, *gradients[:5]), (want, *pullback(host[3])), strict=True):
        assert type(x) is libraries.torch
        np.testing.assert_allclose(x.inside, y, atol=1e-6)


def test_only_the_requested_gradients(libraries, torch_attention):
    """A bias that needs no gradient has none; a gradient that was expanded is copied."""
    host = random_arrays()
    tensors = [libraries.torch(x, requires_grad=True) for x in host[:3]]
    bias = libraries.torch(np.zeros((1, 1, 7, 7)))
    torch_attention(*tensors, bias=bias)
    expanded = libraries.torch(np.broadcast_to(np.ones(()), host[3].shape))
    *gradients, dbias, dsinks, last = libraries.modules["torch"].state.last(expanded)
    assert dbias is dsinks is last is None
    want = attention_vjp(*host[:3], layout="bhsd")[1](np.ones(host[3].shape))
    for x, y in zip(gradients, want, strict=True):
        np.testing.assert_allclose(x.inside, y, atol=1e-6)


@pytest.mark.parametrize("letters", ["bshd", "dhsb", "thd"])
def test_float64_gradients_are_exact(letters, libraries, torch_attention):
    """The log-sum-exp of float64 tensors is float64, in every layout."""
    options = {"layout": letters}
    host = random_arrays((14, 2, 8) if letters == "thd" else (2, 7, 2, 8))
    if letters == "thd":
        starts = np.array([0, 5, 14], np.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    given = {name: libraries.torch(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    torch_attention(*(libraries.torch(x, requires_grad=True) for x in host[:3]), **given)
    found, *_ = libraries.modules["torch"].state.last(libraries.torch(host[3]))
    step = np.random.default_rng(2).standard_normal(host[0].shape)
    plus, minus = ((attention(host[0] + t * step, *host[1:3], **options) * host[3]).sum() for t in (1e-5, -1e-5))
    np.testing.assert_allclose((found.inside * step).sum(), (plus - minus) / 2e-5, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("lengths", [(3, 0, 4), (1,), (), (0,)])
def test_a_layer_of_thinc(lengths, libraries):
    """Self-attention of each sequence, and the gradient of q, k and v in the input's form; without sequences nothing."""
    layer = importlib.import_module("examples.thinc_layer").fused_attention(2, causal=True)
    known = libraries.modules["thinc.api"].registry.known
    assert list(known) == ["cupy_sdpa.FusedAttention.v1"]
    ragged = libraries.modules["thinc.types"].Ragged
    rng = np.random.default_rng(0)
    total, heads, d = sum(lengths), 2, 4
    data = rng.standard_normal((total, 3 * heads * d))
    given = ragged(data, np.array(lengths, np.int32))
    for _ in range(3):
        out, backprop = layer(given, is_train=True)
        dout = rng.standard_normal((total, heads * d))
        found = backprop(ragged(dout, given.lengths))
        assert out.data.shape == dout.shape
        assert found.data.shape == data.shape
        begin = 0
        for length in lengths:
            rows = slice(begin, begin + length)
            parts = data[rows].reshape(1, length, 3, heads, d)
            want, pullback = attention_vjp(*(parts[:, :, i] for i in range(3)), layout="bshd", causal=True)
            np.testing.assert_allclose(out.data[rows], want.reshape(length, heads * d), atol=1e-12)
            gradients = pullback(dout[rows].reshape(1, length, heads, d))
            wanted = np.stack(gradients, axis=2).reshape(length, 3 * heads * d)
            np.testing.assert_allclose(found.data[rows], wanted, atol=1e-6)
            begin += length
        data *= 2  # in place


def test_compute_dtype_of_the_layer(libraries):
    """float32 in and out, for Thinc's parameters."""
    layer = importlib.import_module("examples.thinc_layer").fused_attention(2, compute_dtype="bfloat16")
    ragged = libraries.modules["thinc.types"].Ragged
    data = np.random.default_rng(0).standard_normal((7, 24), np.float32)
    out, backprop = layer(ragged(data, np.array([3, 4], np.int32)), is_train=True)
    found = backprop(out)
    assert (out.data.dtype, found.data.dtype) == (np.float32, np.float32)
    assert np.isfinite(found.data).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"is_causal": True}, TypeError, "causal=True"),
        ({"return_stats": True}, TypeError, "return_stats"),
        ({"alibi_slopes": np.ones(2, np.float32)}, TypeError, r"alibi_slopes requires a gradient.*detach\(\)"),
        ({"tensors": {"x": np.ones(2, np.float32)}}, TypeError, r"tensors\['x'\] requires a gradient"),
    ],
)
def test_options_that_autograd_cannot_differentiate(options, error, words, libraries, torch_attention):
    """They raise, also arrays among tensors; q, k and v must be tensors."""

    def leaf(x):
        return libraries.torch(x, requires_grad=True) if isinstance(x, np.ndarray) else x

    given = {
        name: {key: leaf(x) for key, x in value.items()} if name == "tensors" else leaf(value)
        for name, value in options.items()
    }
    tensors = [libraries.torch(x) for x in random_arrays()[:3]]
    with pytest.raises(error, match=words):
        torch_attention(*tensors, **given)
    with pytest.raises(TypeError, match=r"k is a numpy.ndarray; pass a torch.Tensor"):
        torch_attention(tensors[0], random_arrays()[1], tensors[2])


@pytest.mark.parametrize(
    ("heads", "lengths", "words"), [(5, (2, 4), "width 24; .* 15"), (0, (2, 4), "heads is 0"), (2, (2, 5), "7 rows .* data 6")]
)
def test_mistakes_with_the_layer(heads, lengths, words, libraries):
    """Heads that do not divide the width, and lengths of another batch."""
    fused_attention = importlib.import_module("examples.thinc_layer").fused_attention
    ragged = libraries.modules["thinc.types"].Ragged(np.zeros((6, 24), np.float32), np.array(lengths, np.int32))
    with pytest.raises(ValueError, match=words):
        fused_attention(heads)(ragged, is_train=True)


def test_the_stand_ins_are_removed():
    """Other tests import the real libraries, or none."""
    assert "fake" not in str(sys.modules.get("torch"))
    assert "examples.thinc_layer" not in sys.modules


# On a GPU


@pytest.mark.gpu
def test_gradcheck(cupy):
    """PyTorch's own check of the gradients, in float64 on the CPU."""
    torch = pytest.importorskip("torch")
    from examples.torch_attention import attention as differentiable

    for shape in ((1, 2, 1, 8), (2, 2, 5, 4)):
        leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        bias = torch.randn(1, 2, shape[2], shape[2], dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda q, k, v, bias: differentiable(q, k, v, bias=bias, causal=True), (*leaves, bias))


@STREAMS
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_autograd_agrees_with_torch(dtype, cupy):
    """Gradients of a loss, several times, on a stream of PyTorch that is busy; results of earlier steps stay valid."""
    torch = pytest.importorskip("torch")
    from examples.torch_attention import attention as differentiable

    kind = getattr(torch, dtype)
    leaves = [torch.randn(2, 4, 64, 64, device="cuda").to(kind).requires_grad_() for _ in range(3)]
    exact = [x.detach().float().requires_grad_() for x in leaves]
    want = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    wanted = torch.autograd.grad((want * want).sum(), exact)
    options = {"compute_dtype": "bfloat16"} if dtype == "float32" else {}
    stream = torch.cuda.Stream()
    kept = []
    for _ in range(6):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            out = differentiable(*leaves, causal=True, **options)
            kept.append((out.detach(), *torch.autograd.grad((out * out).sum(), leaves)))
            total = differentiable(*leaves, causal=True, **options).sum()  # its gradient is expanded
            expanded = torch.autograd.grad(total, leaves)
            del out, total  # PyTorch warns if their graph lives on while the leaves are used on another stream
        torch.cuda.current_stream().wait_stream(stream)
    for found in kept:
        for x, y in zip(found, (want.detach(), *wanted), strict=True):
            assert x.dtype == kind
            assert (x.float() - y).abs().max() < 0.03 * max(1.0, float(y.abs().max()))
    assert all(x.isfinite().all() for x in expanded)
