"""The examples for PyTorch, Thinc and Flux: a function with gradients, and layers; the libraries are stand-ins (:mod:`fake_libraries`).

On a GPU the real PyTorch runs, if it is installed.
"""

import importlib
import sys

import numpy as np
import pytest

from cupy_sdpa import attention, attention_vjp, nnlib, reference
from examples.flux_layer import Dense, MultiHeadAttention

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
    """A bias that needs no gradient gets none; a gradient that was expanded is copied."""
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


def flux_layer(rng, *, bias):
    """A layer of Flux with 3 heads: 10 features of queries, 8 of keys and 6 of values, and 7 of the output."""
    sizes = ((12, 10), (12, 8), (9, 6), (7, 9))
    layers = [Dense(rng.standard_normal(size), rng.standard_normal(size[0]) if bias else None) for size in sizes]
    return MultiHeadAttention(*layers, nheads=3)


@pytest.mark.parametrize("batch", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_layer_of_flux(batch, order):
    """The output and the weights agree with the reference, for arrays in any order and any number of batch dimensions."""
    rng = np.random.default_rng(0)
    layer, count = flux_layer(rng, bias=True), int(np.prod(batch))
    q, k, v = (rng.standard_normal((n, length, *batch)).copy(order=order) for n, length in ((10, 4), (8, 5), (6, 5)))
    y, alpha = layer(q, k, v, alpha=True)
    projected = []
    for dense, x in zip(layer.projections, (q, k, v), strict=True):
        every = np.einsum("ni,isb->nsb", dense.weight, x.reshape((*x.shape[:2], count), order="F")) + dense.bias[:, None, None]
        projected.append(every.reshape((-1, 3, x.shape[1], count), order="F"))
    out, _ = reference.attention(*projected)
    joined = out.reshape((9, 4, count), order="F")
    want = np.einsum("ni,isb->nsb", layer.out_proj.weight, joined) + layer.out_proj.bias[:, None, None]
    np.testing.assert_allclose(y, want.reshape((7, 4, *batch), order="F"), atol=1e-12)
    assert alpha.shape == (5, 4, 3, *batch)
    np.testing.assert_allclose(alpha.sum(axis=0), 1)
    assert layer(q, k, v)[1] is None


def test_gradients_of_a_layer_of_flux():
    """Of the inputs and of all parameters: they agree with differences of the output, with a causal mask and a bias."""
    rng = np.random.default_rng(1)
    layer, x, bias = flux_layer(rng, bias=True), rng.standard_normal((10, 4, 2)), rng.standard_normal((4, 4))
    layer.projections = tuple(Dense(rng.standard_normal((n, 10)), rng.standard_normal(n)) for n in (12, 12, 9))
    mask = nnlib.make_causal_mask(x)
    y, pullback = layer.vjp(x, bias=bias, mask=mask)
    np.testing.assert_array_equal(y, layer(x, bias=bias, mask=mask)[0])
    dy = rng.standard_normal(y.shape)
    (dq, dk, dv, dbias), gradients = pullback(dy)
    pairs = [(x, dq + dk + dv), (bias, dbias)]
    for dense, found in zip((*layer.projections, layer.out_proj), gradients, strict=True):
        pairs += [(dense.weight, found["weight"]), (dense.bias, found["bias"])]
    for array, gradient in pairs:
        assert gradient.shape == array.shape
        step = 1e-6 * rng.standard_normal(array.shape)
        values = []
        for sign in (1, -1):
            array += sign * step
            values.append((layer(x, bias=bias, mask=mask)[0] * dy).sum())
            array -= sign * step
        np.testing.assert_allclose((gradient * step).sum(), (values[0] - values[1]) / 2, rtol=1e-5, atol=1e-12)
