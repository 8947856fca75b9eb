"""A recall task: the model sees pairs of a key and a value, then a key, and must return the value of that key.

The model is one attention layer. Gradients are written by hand, except those of attention. Arrays are in Fortran order, so
(F, S B) features are attention's (D, H, S, B) without a copy.

Shapes: V words, F = D H features, S pairs, B sequences.
"""

import numpy as np
from here import dtype, xp

from cupy_sdpa import attention_vjp
from cupy_sdpa.nnlib import dot_product_attention_scores

WORDS, HEADS, HEAD_DIM, PAIRS, BATCH = 16, 2, 16, 8, 64
FEATURES = HEADS * HEAD_DIM


def initial(seed=0):
    """Random float32 weights: embeddings of q and k for each key and of v for each value, and the output projection."""
    rng = np.random.default_rng(seed)
    sizes = dict.fromkeys(("q", "k", "v"), (FEATURES, WORDS)) | {"out": (WORDS, FEATURES)}
    return {name: xp.asarray(0.3 * rng.standard_normal(size, np.float32)) for name, size in sizes.items()}


def questions(rng):
    """Keys and values (S, B) with distinct keys, and the index of the queried pair of each sequence, (B,)."""
    keys = np.argsort(rng.random((WORDS, BATCH)), axis=0)[:PAIRS]
    return keys, rng.integers(0, WORDS, (PAIRS, BATCH)), rng.integers(0, PAIRS, BATCH)


def embedded(weights, words):
    """The embeddings of words (S, B), as (D, H, S, B)."""
    columns = xp.asfortranarray(weights[:, words.ravel(order="F")].astype(dtype))  # CuPy's are in C order
    return columns.reshape((HEAD_DIM, HEADS, *words.shape), order="F")


def parts(weights, keys, values, asked):
    """q of the queried key, k of all keys, v of all values."""
    key = np.take_along_axis(keys, asked[None], axis=0)
    named = {"q": key, "k": keys, "v": values}
    return {name: embedded(weights[name], words) for name, words in named.items()}, named


def step(weights, keys, values, asked):
    """The loss, the accuracy, and the gradients of the weights."""
    x, named = parts(weights, keys, values, asked)
    out, pullback = attention_vjp(x["q"], x["k"], x["v"])
    # logits (V, B) and their cross entropy
    features = out.astype("float32").reshape((FEATURES, BATCH), order="F")
    scores = weights["out"] @ features
    likely = xp.exp(scores - scores.max(axis=0))
    likely /= likely.sum(axis=0)
    right = xp.asarray(np.take_along_axis(values, asked[None], axis=0)[0])
    at = (right, xp.arange(BATCH))
    loss, hits = -xp.log(likely[at]).mean(), (scores.argmax(axis=0) == right).mean()
    # backward: d logits = (likely - one_hot) / B
    likely[at] -= 1
    dscores = likely / BATCH
    dout = xp.asfortranarray((weights["out"].T @ dscores).astype(dtype)).reshape(out.shape, order="F")
    gradients = {"out": dscores @ features.T}
    for (name, words), d in zip(named.items(), pullback(dout), strict=True):
        columns = d.astype("float32").reshape((FEATURES, -1), order="F")
        gradients[name] = columns @ xp.eye(WORDS, dtype="float32")[xp.asarray(words.ravel(order="F"))]
    return float(loss), float(hits), gradients


def train(steps=200, rate=0.01, seed=0):
    """Trained weights, and loss and accuracy of every step; Adam (Kingma and Ba 2015, algorithm 1)."""
    rng, weights = np.random.default_rng(seed), initial(seed)
    first, second = ({name: xp.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    history = []
    for count in range(1, steps + 1):
        loss, hits, gradients = step(weights, *questions(rng))
        history.append((loss, hits))
        for name, g in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.999 * second[name] + 0.001 * g * g
            mean, square = first[name] / (1 - 0.9**count), second[name] / (1 - 0.999**count)
            weights[name] -= rate * mean / (xp.sqrt(square) + 1e-8)
    return weights, np.array(history)


def attention_map(weights, keys, values, asked):
    """Attention weights, (pairs, 1, heads, sequences)."""
    x, _ = parts(weights, keys, values, asked)
    return dot_product_attention_scores(x["q"], x["k"])
