"""A GPT of words on numpy or CuPy arrays: the model, its gradients, and its training on the bundled text.

CuPy has no automatic differentiation. So every operation returns its result and its pullback: the function from the gradient
of the result to the gradients of the inputs. Features are columns ``(F, S B)`` in Fortran order, which is attention's
``(D, H, S, B)`` without a copy. Weights and everything except attention are float32.

Shapes: C words and punctuation marks in the vocabulary, F = D H features, S positions, B sequences, N = S B columns.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (the model); Zhang and Sennrich 2019, "Root
Mean Square Layer Normalization"; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cupy_sdpa
from cupy_sdpa import Rope, apply_rope, attention_vjp

#: The opening of Alice's Adventures in Wonderland, the text of the package's demo.
TEXT = Path(cupy_sdpa.__file__).parent / "cli" / "alice.txt"
#: Weights and gradients by name.
Arrays = dict[str, Any]
#: Attention of a layer: from the layer's number, q, k and v, which it rotates, to the output and the pullback.
Attend = Callable[[int, Any, Any, Any], tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]]
#: A matrix product.
Product = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Attributes:
        layers, heads, head_dim: of attention.
        hidden: hidden units per layer.
        context: the maximum length of a sequence.
    """

    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    hidden: int = 256
    context: int = 128

    @property
    def features(self) -> int:
        """F."""
        return self.heads * self.head_dim

    @property
    def rope(self) -> Rope:
        """The rotation of queries and keys by their positions."""
        return Rope(self.head_dim, base=200.0)


@dataclass(frozen=True)
class GPT:
    """A model.

    Attributes:
        sizes: its sizes.
        vocabulary: words with the space before them, punctuation marks and the newline, sorted; a token is an index of it.
        weights: by name.
        dtype: of q, k and v.
        xp: numpy or cupy.
    """

    sizes: Sizes
    vocabulary: list[str]
    weights: Arrays
    dtype: np.dtype[Any]
    xp: Any

    def encode(self, passage: str) -> Any:
        """Return the tokens of a text, int32 ``(n,)`` on the host.

        Raises:
            ValueError: a word is not in the vocabulary.
        """
        known = {word: token for token, word in enumerate(self.vocabulary)}
        words = split(passage)
        if words and words[0] not in known:
            words[0] = f" {words[0]}"  # a word that does not begin a paragraph of the training text
        if unknown := [word for word in words if word not in known]:
            raise ValueError(f"{unknown[0].strip()!r} does not occur in the training text")
        return np.array([known[word] for word in words], np.int32)

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens on the host."""
        return "".join(self.vocabulary[int(token)] for token in tokens)

    def forward(self, tokens: Any, attend: Attend, product: Product = operator.matmul) -> tuple[Any, Callable[[Any], Arrays]]:
        """Logits of the next word at every position.

        Args:
            tokens: int32 ``(S, B)``.
            attend: rotates queries and keys, and computes attention; it may read the keys of a cache.
            product: the matrix product, or :func:`sum_of_products`.

        Returns:
            ``(logits, pullback)``: logits ``(C, S, B)``; the pullback maps their gradient to the weights' gradients.
        """
        w, xp, shape = self.weights, self.xp, (*tokens.shape,)
        x = xp.take(w["token"].T, tokens.ravel(order="F"), axis=0).T  # (F, N) in Fortran order
        pullbacks = []
        for layer in range(self.sizes.layers):
            for part in (self._attention, self._perceptron):
                change, pullback = part(layer, x, shape, attend, product)
                x = x + change
                pullbacks.append(pullback)
        y, dnorm = normalized(x, xp)
        logits, dread = times(w["read"], y, product)

        def pullback_of_all(dlogits: Any) -> Arrays:
            dread_weight, dy = dread(dlogits.reshape((-1, dlogits.shape[1] * dlogits.shape[2]), order="F"))
            gradients, dx = {"read": dread_weight}, dnorm(dy)
            for pullback in reversed(pullbacks):
                dchange, of_weights = pullback(dx)
                dx = dx + dchange
                gradients |= of_weights
            one_hot = xp.eye(len(self.vocabulary), dtype=dx.dtype)[tokens.ravel(order="F")]  # (N, C)
            gradients["token"] = dx @ one_hot
            return gradients

        return logits.reshape((-1, *shape), order="F"), pullback_of_all

    def _attention(self, layer: int, x: Any, shape: tuple[int, ...], attend: Attend, product: Product) -> tuple[Any, Any]:
        """Return the change of x by attention, ``(F, N)``; and the pullback to x and the weights."""
        sizes, w, xp = self.sizes, self.weights, self.xp
        heads = (sizes.head_dim, sizes.heads)
        y, dnorm = normalized(x, xp)
        qkv, dqkv_product = times(w[f"{layer}.qkv"], y, product)
        qkv = qkv.astype(self.dtype, copy=False).reshape((*heads, 3, *shape), order="F")  # the same memory, split
        out, dattend = attend(layer, *(qkv[:, :, i] for i in range(3)))
        found = out.astype(x.dtype, copy=False).reshape((sizes.features, -1), order="F")
        change, dmix = times(w[f"{layer}.mix"], found, product)

        def pullback(dchange: Any) -> tuple[Any, Arrays]:
            dmix_weight, dfound = dmix(dchange)
            parts = dattend(dfound.astype(self.dtype, copy=False).reshape((*heads, *shape), order="F"))
            dqkv = xp.empty((*heads, 3, *shape), x.dtype, order="F")
            for i, part in enumerate(parts):
                dqkv[:, :, i] = part
            dweight, dy = dqkv_product(dqkv.reshape((3 * sizes.features, -1), order="F"))
            return dnorm(dy), {f"{layer}.mix": dmix_weight, f"{layer}.qkv": dweight}

        return change, pullback

    def _perceptron(self, layer: int, x: Any, shape: tuple[int, ...], attend: Attend, product: Product) -> tuple[Any, Any]:
        """Return the change of x by the hidden units; and the pullback to x and the weights."""
        y, dnorm = normalized(x, self.xp)
        hidden, dup = times(self.weights[f"{layer}.up"], y, product)
        active = self.xp.maximum(hidden, 0)
        change, ddown = times(self.weights[f"{layer}.down"], active, product)

        def pullback(dchange: Any) -> tuple[Any, Arrays]:
            ddown_weight, dactive = ddown(dchange)
            dup_weight, dy = dup(dactive * (hidden > 0))
            return dnorm(dy), {f"{layer}.down": ddown_weight, f"{layer}.up": dup_weight}

        return change, pullback


def read_text(path: Path = TEXT) -> str:
    """Read a text, without its two title lines, with ASCII quotes and dashes; paragraphs end with one newline."""
    text = path.read_text(encoding="utf-8").split("\n", 2)[2]
    return re.sub(r"\n+", "\n", text.translate(str.maketrans({"’": "'", "‘": "'", "—": "-"}))).strip() + "\n"


def split(passage: str) -> list[str]:
    r"""Words with the space before them, punctuation marks, and newlines.

    >>> split("Oh dear! (she said)\n")
    ['Oh', ' dear', '!', ' (', 'she', ' said', ')', '\n']
    """
    return re.findall(r"\n| ?\w+(?:['-]\w+)*| ?[^\w\s]", passage)


def times(weight: Any, x: Any, product: Product = operator.matmul) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """``weight @ x`` in Fortran order, and its pullback."""
    return product(x.T, weight.T).T, lambda d: (d @ x.T, (d.T @ weight).T)


def sum_of_products(a: Any, b: Any) -> Any:
    """``a @ b`` without cuBLAS, which CuPy does not call while it captures a stream; for small arrays."""
    return (a[:, :, None] * b[None]).sum(axis=1)


def normalized(x: Any, xp: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return each column divided by the root of its mean square, and the pullback."""
    scale = 1 / xp.sqrt((x * x).mean(axis=0) + 1e-5)
    y = x * scale
    return y, lambda dy: (dy - y * (dy * y).mean(axis=0)) * scale


def initial(sizes: Sizes, vocabulary: list[str], dtype: Any, xp: Any = np, seed: int = 0) -> GPT:
    """Return a model with random weights, drawn by numpy for every engine."""
    rng, features = np.random.default_rng(seed), sizes.features

    def normal(rows: int, columns: int, size: float) -> Any:
        return xp.asarray(np.float32(size) * rng.standard_normal((rows, columns), np.float32))

    small = (2 * sizes.layers * features) ** -0.5  # for the products that are added to x
    weights = {"token": normal(features, len(vocabulary), 0.5)}
    for layer in range(sizes.layers):
        weights |= {
            f"{layer}.qkv": normal(3 * features, features, features**-0.5),
            f"{layer}.mix": normal(features, features, small),
            f"{layer}.up": normal(sizes.hidden, features, features**-0.5),
            f"{layer}.down": normal(features, sizes.hidden, small),
        }
    weights["read"] = normal(len(vocabulary), features, 0.1 * features**-0.5)
    return GPT(sizes, vocabulary, weights, np.dtype(dtype), xp)


def rotated_attention(rope: Rope) -> Attend:
    """Causal attention of queries and keys that are rotated by their positions, from 0 to S - 1."""
    back = rope.transposed()

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        out, pullback = attention_vjp(apply_rope(q, rope), apply_rope(k, rope), v, causal=True)

        def pullback_of_all(dout: Any) -> tuple[Any, Any, Any]:
            dq, dk, dv = pullback(dout)
            return apply_rope(dq, back), apply_rope(dk, back), dv

        return out, pullback_of_all

    return attend


def cross_entropy(logits: Any, wanted: Any, xp: Any) -> tuple[Any, Any]:
    """Return the mean of -log(probability) of the next words, and its gradient.

    Args:
        logits: ``(C, S, B)``.
        wanted: ``(S, B)``, the words.
        xp: numpy or cupy.
    """
    logits = logits - logits.max(axis=0)
    logs = logits - xp.log(xp.exp(logits).sum(axis=0))
    one_hot = xp.arange(len(logits))[:, None, None] == wanted
    return -(logs * one_hot).sum() / wanted.size, (xp.exp(logs) - one_hot) / np.float32(wanted.size)


@dataclass
class Training:
    """The settings of :func:`train`: AdamW; the rate increases over the first steps, then decreases to 0 as a cosine."""

    steps: int = 250
    batch: int = 4
    rate: float = 1.2e-2
    decay: float = 0.01
    warmup: int = 20
    seed: int = 0

    def rate_of(self, step: int) -> float:
        """Return the rate of a step."""
        done = step / self.steps
        return self.rate * min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * done))


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let the matrix library of numpy use one thread within a ``with`` block, if threadpoolctl is installed.

    The matrices are small. On a busy machine threads wait for each other: 100 s of training instead of 9 s (two cores).
    """
    try:
        threadpoolctl: Any = importlib.import_module("threadpoolctl")
    except ImportError:
        yield
        return
    with threadpoolctl.threadpool_limits(1, "blas"):
        yield


@one_blas_thread()
def untrained(
    passage: str | None = None, *, sizes: Sizes | None = None, dtype: Any = np.float32, xp: Any = np, seed: int = 0
) -> GPT:
    """Return a model with random weights and the vocabulary of a text; see :func:`train`."""
    passage = read_text() if passage is None else passage
    return initial(sizes or Sizes(), sorted(set(split(passage))), dtype, xp, seed)


def train(
    passage: str | None = None,
    *,
    sizes: Sizes | None = None,
    training: Training | None = None,
    dtype: Any = np.float32,
    xp: Any = np,
    progress: Callable[[int, float], None] | None = None,
) -> tuple[GPT, list[float]]:
    """Train a model to predict the next word of a text.

    Args:
        passage: the text; by default the bundled one.
        sizes, training: the settings.
        dtype: of q, k and v; float16 or bfloat16 on a GPU.
        xp: numpy or cupy.
        progress: called every 50 steps and at the end with the step and the loss.

    Returns:
        The model, and the loss of every step.
    """
    passage = read_text() if passage is None else passage
    sizes, training = sizes or Sizes(), training or Training()
    model = untrained(passage, sizes=sizes, dtype=dtype, xp=xp, seed=training.seed)
    weights, losses = model.weights, []
    mean, square = ({name: xp.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    for step, pieces in enumerate(_pieces(model.encode(passage), sizes, training)):
        tokens, wanted = xp.asarray(pieces[:-1]), xp.asarray(pieces[1:])
        logits, pullback = model.forward(tokens, rotated_attention(sizes.rope))
        loss, dlogits = cross_entropy(logits, wanted, xp)
        rate = training.rate_of(step)
        for name, g in pullback(dlogits).items():
            mean[name] += 0.1 * (g - mean[name])
            square[name] += 0.02 * (g * g - square[name])
            corrected = mean[name] / (1 - 0.9 ** (step + 1)), square[name] / (1 - 0.98 ** (step + 1))
            weights[name] -= rate * (corrected[0] / (xp.sqrt(corrected[1]) + 1e-8) + training.decay * weights[name])
        losses.append(loss)
        if progress and (step + 1 == training.steps or step % 50 == 0):
            progress(step + 1, float(loss))
    return model, [float(loss) for loss in losses]


def _pieces(tokens: Any, sizes: Sizes, training: Training) -> Iterator[Any]:
    """Random pieces of the text, ``(S + 1, B)``; the text begins again after its end, so that all words are as frequent."""
    rng = np.random.default_rng(training.seed)
    for _ in range(training.steps):
        places = rng.integers(0, len(tokens), training.batch) + np.arange(sizes.context + 1)[:, None]
        yield tokens[places % len(tokens)]


def cast(model: GPT, dtype: Any) -> GPT:
    """Return the same model with all weights, and q, k and v, in another dtype."""
    weights = {name: weight.astype(dtype) for name, weight in model.weights.items()}
    return replace(model, weights=weights, dtype=np.dtype(dtype))
