"""A Llama that generates text on numpy and CuPy arrays: padded prompts, decoding and beam search. One file to copy.

Weights have the names and shapes of Hugging Face's checkpoints, ``(out, in)``. Features are columns ``(F, S B)`` in Fortran
order, which is attention's ``(D, H, S, B)`` without a copy. :func:`dense` computes the same in float64, to check a port.

Shapes: C tokens in the vocabulary, S positions, B sequences, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_sdpa import KVCache, Rope, apply_rope, attention

Weights = Mapping[str, Any]
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def linear(x: Any, weight: Any) -> Any:
    """Return ``weight @ x`` in Fortran order."""
    return (x.T @ weight.T).T


def rms_norm(x: Any, weight: Any, eps: float = 1e-5) -> Any:
    """Divide each column by the root of its mean square, and multiply by the weight."""
    return x / np.sqrt((x * x).mean(axis=0) + eps) * weight[:, None]  # numpy's functions call CuPy's


class Llama:
    """A model and the keys and values of a batch of sequences.

    Args:
        weights: by name, of numpy or CuPy.
        heads, kv_heads: the numbers of query heads and of key/value heads.
        batch: B, the number of sequences.
        pages: the number of pages of 16 tokens in the cache.
        theta: the base of the rotation.
        dtype: of queries, keys and values: 16 bits on a GPU.
        xp: numpy or cupy.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        heads: int,
        kv_heads: int,
        batch: int,
        pages: int,
        theta: float = 1e4,
        dtype: Any = "float32",
        xp: Any = np,
    ) -> None:
        self.weights, self.batch, self.xp = weights, batch, xp
        self.layers = sum(name.endswith("q_proj.weight") for name in weights)
        head_dim = weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // heads
        self.rope = Rope(head_dim, base=theta)
        self.cache = KVCache(
            head_dim, kv_heads, pages=pages, page_size=16, batch=batch, layers=self.layers, dtype=dtype, numpy=xp is np
        )

    def step(self, tokens: Any, lengths: Any = None) -> Any:
        """Append tokens ``(S, B)``, the first ``lengths[b]`` of each sequence; return the logits of the next, ``(C, S, B)``."""
        w, columns = self.weights, tokens.size
        self.cache.begin_step(tokens.shape[0] if lengths is None else lengths)
        x = w[_EMBEDDING][tokens.T.ravel()].T
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            y = rms_norm(x, w[f"{name}input_layernorm.weight"])
            q, k, v = (self._split(linear(y, w[f"{name}self_attn.{part}_proj.weight"]), tokens.shape) for part in "qkv")
            self.cache.append(k, v, layer, rope=self.rope)
            view = self.cache.view(layer)
            out = attention(apply_rope(q, self.rope, **view), **view, causal="bottom_right")
            x = x + linear(out.astype(x.dtype).reshape((-1, columns), order="F"), w[f"{name}self_attn.o_proj.weight"])
            y = rms_norm(x, w[f"{name}post_attention_layernorm.weight"])
            gate, up = (linear(y, w[f"{name}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + linear(gate / (1 + np.exp(-gate)) * up, w[f"{name}mlp.down_proj.weight"])
        logits = linear(rms_norm(x, w["model.norm.weight"]), w.get(_HEAD, w[_EMBEDDING]))
        return logits.reshape((-1, *tokens.shape), order="F")

    def _split(self, x: Any, shape: tuple[int, ...]) -> Any:
        """Columns ``(D H, S B)`` as ``(D, H, S, B)``."""
        return x.astype(self.cache.dtype, copy=False).reshape((self.rope.dim, -1, *shape), order="F")


def host(x: Any) -> Any:
    """A numpy array."""
    return x if isinstance(x, np.ndarray) else x.get()


def generate(model: Llama, prompts: Sequence[Sequence[int]], count: int) -> Any:
    """Return the ``count`` most likely tokens after each prompt, int ``(count, B)``. Prompts are padded at the end."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((lengths.max(), len(prompts)), np.int32)
    for b, prompt in enumerate(prompts):
        tokens[: len(prompt), b] = prompt
    logits = model.step(model.xp.asarray(tokens), lengths)
    last, found = logits[:, model.xp.asarray(lengths - 1), model.xp.arange(len(prompts))], []
    for _ in range(count):
        found.append(last.argmax(axis=0))
        last = model.step(found[-1][None])[:, 0]
    return host(model.xp.stack(found))


def beam_search(model: Llama, prompt: Sequence[int], count: int) -> tuple[Any, Any]:
    """Search the most likely ``count`` tokens after a prompt, with as many hypotheses as the model has sequences.

    Returns:
        The tokens of the hypotheses ``(beams, count)``, the best first, and their log-probabilities ``(beams,)``.
    """
    beams, xp, length = model.batch, model.xp, len(prompt)
    tokens = xp.asarray(np.tile(np.array(prompt, np.int32)[:, None], (1, beams)))
    last = model.step(tokens, [length] + [0] * (beams - 1))[:, length - 1, :1]  # the prompt once
    model.cache.reorder([0] * beams)  # all hypotheses share its pages
    scores, found = np.zeros(1), np.zeros((1, 0), np.int32)
    while True:
        logits = host(last).astype(np.float64)
        logs = logits - np.log(np.exp(logits - logits.max(axis=0)).sum(axis=0)) - logits.max(axis=0)
        total = (scores + logs).ravel(order="F")
        chosen = np.argsort(-total, kind="stable")[:beams]
        order, words, scores = chosen // len(logs), chosen % len(logs), total[chosen]
        found = np.concatenate([found[order], words[:, None]], axis=1)
        if found.shape[1] == count:
            return found, scores
        model.cache.reorder(order)
        last = model.step(xp.asarray(words[None].astype(np.int32)))[:, 0]


def dense(weights: Weights, tokens: Sequence[int], *, heads: int, kv_heads: int, theta: float = 1e4) -> Any:
    """Return the logits ``(C, S)`` after each token of one sequence, in float64, with all scores in memory."""
    w = {name: host(x).astype(np.float64) for name, x in weights.items()}
    x, causal = w[_EMBEDDING][list(tokens)].T, np.tri(len(tokens), dtype=bool)
    for layer in range(sum(name.endswith("q_proj.weight") for name in w)):
        name = f"model.layers.{layer}."
        y = rms_norm(x, w[f"{name}input_layernorm.weight"])
        q, k, v = (w[f"{name}self_attn.{part}_proj.weight"] @ y for part in "qkv")
        q, k, v = q.reshape(heads, -1, len(tokens)), *(a.reshape(kv_heads, -1, len(tokens)) for a in (k, v))
        half = q.shape[1] // 2
        turn = np.exp(1j * np.arange(len(tokens)) * theta ** (-np.arange(half) / half)[:, None])
        q, k = ((a[:, :half] + 1j * a[:, half:]) * turn for a in (q, k))
        k, v = (a.repeat(heads // kv_heads, axis=0) for a in (k, v))
        scores = np.einsum("hdi,hdj->hij", q, k.conj()).real / (2 * half) ** 0.5
        p = np.exp(np.where(causal, scores - scores.max(axis=2, keepdims=True), -np.inf))
        out = np.einsum("hij,hdj->hdi", p / p.sum(axis=2, keepdims=True), v).reshape(-1, len(tokens))
        x = x + w[f"{name}self_attn.o_proj.weight"] @ out
        y = rms_norm(x, w[f"{name}post_attention_layernorm.weight"])
        gate, up = (w[f"{name}mlp.{part}_proj.weight"] @ y for part in ("gate", "up"))
        x = x + w[f"{name}mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return w.get(_HEAD, w[_EMBEDDING]) @ rms_norm(x, w["model.norm.weight"])


def random_weights(
    rng: np.random.Generator,
    *,
    vocabulary: int,
    features: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    xp: Any = np,
) -> dict[str, Any]:
    """Return random weights with the names of a checkpoint; the last layer reads the embedding."""
    of_keys = features // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (vocabulary, features), "model.norm.weight": (features,)}
    for layer in range(layers):
        own = {
            "input_layernorm": (features,), "self_attn.q_proj": (features, features), "self_attn.k_proj": (of_keys, features),
            "self_attn.v_proj": (of_keys, features), "self_attn.o_proj": (features, features),
            "post_attention_layernorm": (features,), "mlp.gate_proj": (hidden, features), "mlp.up_proj": (hidden, features),
            "mlp.down_proj": (features, hidden),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    weights = {}
    for name, shape in shapes.items():
        x = 1 + rng.standard_normal(shape) / 10 if len(shape) == 1 else rng.standard_normal(shape) / shape[1] ** 0.5
        weights[name] = xp.asarray(x.astype(np.float32))
    return weights
