"""Our call of every kind, on the arrays of numpy or CuPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa
from cupy_sdpa import nnlib, zoo
from cupy_sdpa.problem.tensor_spec import numpy_dtype

#: The sizes of all calls: so small that the device is never the limit.
HEAD_DIM, HEADS, LENGTH, BATCH = 64, 8, 128, 2
#: The lengths of the batch entries of a padded batch, and of packed sequences, which have the same total as the other calls.
LENGTHS, SEQUENCES = (128, 80), (64, 96, 64, 32)
#: The keys on a page, the keys of a window, the dropout probability, the soft cap, and the keys of a chunk.
PAGE, WINDOW, DROPOUT, CAP, CHUNK = 64, 32, 0.1, 30.0, 32
#: The mix of the options, and the mix of the other calls.
OPTIONS, OTHERS = "options", "others"

Call = Callable[[], Any]


class Model:
    """The arrays that all calls of a model share: lengths, offsets, the page table, masks, slopes and the seed.

    Args:
        xp: numpy or cupy.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.lengths = self.array(np.array(LENGTHS, np.int32))
        self.full = self.array(np.full(BATCH, LENGTH, np.int32))
        self.starts = self.array(np.cumsum([0, *SEQUENCES], dtype=np.int32))
        self.slopes = self.array(np.asarray(cupy_sdpa.alibi_slopes(HEADS)))
        self.mask = self.array(np.random.default_rng(0).random((LENGTH, LENGTH, 1, BATCH)) < 0.7)
        self.table = self.array(np.arange(BATCH * LENGTH // PAGE, dtype=np.int32)[::-1].reshape(-1, BATCH))
        self.seed = self.array(np.array([1], np.int64))

    def array(self, x: Any) -> Any:
        """An array of numpy as one of the module, in Fortran order."""
        return self.xp.asfortranarray(self.xp.asarray(np.asfortranarray(x)))

    def normal(self, rng: np.random.Generator, *shape: int, dtype: str = "bfloat16") -> Any:
        """Normal random numbers."""
        return self.array(rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype)))


class Inputs:
    """One set of arrays, such as the arrays of one layer.

    Args:
        model: the arrays that all sets share.
        number: the number of the set.
    """

    def __init__(self, model: Model, number: int) -> None:
        self.model = model
        normal = functools.partial(model.normal, np.random.default_rng(number))
        self.q, self.k, self.v, self.dout = (normal(HEAD_DIM, HEADS, LENGTH, BATCH) for _ in range(4))
        self.one = normal(HEAD_DIM, HEADS, 1, BATCH)
        self.k_pages, self.v_pages = (normal(HEAD_DIM, HEADS, PAGE, BATCH * LENGTH // PAGE) for _ in range(2))
        self.bias = normal(LENGTH, LENGTH, HEADS, 1)
        self.sinks = normal(HEADS, dtype="float32")
        self.learned = normal(HEADS, LENGTH, LENGTH, dtype="float32")
        self.offset = model.array(np.array([4 * number], np.int64))

    def qkv(self) -> tuple[Any, Any, Any]:
        """The queries, keys and values."""
        return self.q, self.k, self.v

    def reshaped(self, *shape: int) -> list[Any]:
        """The same memory in another shape."""
        return [x.reshape(shape, order="F") for x in self.qkv()]


#: The options of a call from its set of arrays.
OptionsOf = Callable[[Inputs], dict[str, Any]]


def forward(options: OptionsOf = lambda x: {}) -> Callable[[Inputs], Call]:
    """:func:`cupy_sdpa.attention` with options."""
    return lambda x: functools.partial(cupy_sdpa.attention, *x.qkv(), **options(x))


def gradients(options: OptionsOf = lambda x: {}, **outputs: bool) -> Callable[[Inputs], Call]:
    """:func:`cupy_sdpa.attention_backward` with options, after a forward pass."""

    def make(x: Inputs) -> Call:
        found = options(x)
        out, stats = cupy_sdpa.attention(*x.qkv(), return_stats=True, **found)
        return functools.partial(cupy_sdpa.attention_backward, x.dout, *x.qkv(), out, stats, **found, **outputs)

    return make


def packed(x: Inputs) -> Call:
    """Packed sequences."""
    starts, longest = x.model.starts, max(SEQUENCES)
    bounds = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    qkv = x.reshaped(HEAD_DIM, HEADS, LENGTH * BATCH)
    return functools.partial(cupy_sdpa.attention, *qkv, **bounds)


def paged(x: Inputs) -> Call:
    """One query of each sequence, with paged keys and values."""
    pages = {"page_table": x.model.table, "seq_lens_kv": x.model.full}
    return functools.partial(cupy_sdpa.attention, x.one, x.k_pages, x.v_pages, **pages)


def in_nnlib(x: Inputs) -> Call:
    """NNlib's function; it splits the heads off the first axis."""
    qkv = x.reshaped(HEAD_DIM * HEADS, LENGTH, BATCH)
    return functools.partial(nnlib.dot_product_attention, *qkv, nheads=HEADS)


def both_passes(x: Inputs) -> Call:
    """The forward pass and the pullback."""

    def call() -> tuple[Any, ...]:
        out, pullback = cupy_sdpa.attention_vjp(*x.qkv())
        return (out, *pullback(x.dout))

    return call


def lengths(x: Inputs) -> dict[str, Any]:
    """The lengths of a padded batch."""
    return {"seq_lens_q": x.model.lengths, "seq_lens_kv": x.model.lengths}


def bias(x: Inputs) -> dict[str, Any]:
    """A bias of every head, the same for all batch entries."""
    return {"bias": x.bias}


def sinks(x: Inputs) -> dict[str, Any]:
    """The sinks of the heads."""
    return {"sinks": x.sinks}


def learned(x: Inputs) -> dict[str, Any]:
    """A score function that adds a learned array."""
    return {"score_mod": zoo.bias, "tensors": {"bias": x.learned}}


class Kind(NamedTuple):
    """A kind of call.

    Attributes:
        name: the name in the results.
        mix: the mix that it is part of.
        call: makes the call on a set of arrays.
        limit: the largest accepted ratio of our time in the mix to the peer's; None for no limit.
    """

    name: str
    mix: str
    call: Callable[[Inputs], Call]
    limit: float | None = None


#: The limits of the ratios: forward passes with options, functions, gradients.
FORWARD_LIMIT, FUNCTION_LIMIT, GRADIENT_LIMIT = 0.7, 0.5, 0.3

KINDS = (
    Kind("plain", OPTIONS, forward(), FORWARD_LIMIT),
    Kind("causal", OPTIONS, forward(lambda x: {"causal": True}), FORWARD_LIMIT),
    Kind("window", OPTIONS, forward(lambda x: {"causal": True, "window": (WINDOW, 0)}), FORWARD_LIMIT),
    Kind("lengths", OPTIONS, forward(lengths), FORWARD_LIMIT),
    Kind("packed", OPTIONS, packed, FORWARD_LIMIT),
    Kind("bias", OPTIONS, forward(bias), FORWARD_LIMIT),
    Kind("mask", OPTIONS, forward(lambda x: {"mask": x.model.mask}), FORWARD_LIMIT),
    Kind("alibi", OPTIONS, forward(lambda x: {"alibi_slopes": x.model.slopes}), FORWARD_LIMIT),
    Kind("sinks", OPTIONS, forward(sinks), FORWARD_LIMIT),
    Kind(
        "dropout", OPTIONS,
        forward(lambda x: {"dropout_p": DROPOUT, "seed": x.model.seed, "offset": x.offset}), FORWARD_LIMIT,
    ),
    Kind("stats", OTHERS, forward(lambda x: {"return_stats": True})),
    Kind("max_sumexp", OTHERS, forward(lambda x: {"return_stats": "max_sumexp"})),
    Kind("alibi_flex", OTHERS, forward(lambda x: {"alibi_slopes": x.model.slopes})),
    Kind("score_mod", OTHERS, forward(lambda x: {"score_mod": zoo.softcap(CAP)}), FUNCTION_LIMIT),
    Kind("mask_mod", OTHERS, forward(lambda x: {"mask_mod": zoo.chunked(CHUNK)}), FUNCTION_LIMIT),
    Kind("paged", OTHERS, paged),
    Kind("nnlib", OTHERS, in_nnlib),
    Kind("vjp", OTHERS, both_passes),
    Kind("gradients", OTHERS, gradients(), GRADIENT_LIMIT),
    Kind("gradients_causal", OTHERS, gradients(lambda x: {"causal": True}), GRADIENT_LIMIT),
    Kind("gradients_lengths", OTHERS, gradients(lengths), GRADIENT_LIMIT),
    Kind("gradients_bias", OTHERS, gradients(bias, return_dbias=True), GRADIENT_LIMIT),
    Kind("gradients_sinks", OTHERS, gradients(sinks, return_dsinks=True), GRADIENT_LIMIT),
    Kind("gradients_tensors", OTHERS, gradients(learned, return_dtensors=True), GRADIENT_LIMIT),
)  # fmt: skip
