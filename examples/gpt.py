"""A GPT of characters that trains on a text and continues it, on CuPy or numpy arrays: one file to copy.
    python examples/gpt.py [--text FILE] [--steps N] [--prompt TEXT] [--tokens N] [--cpu]

CuPy has no automatic differentiation. Every function therefore returns its result and its pullback, the function from the
gradient of the result to the gradients of the inputs. Attention is computed by cuDNN in bfloat16; all else is float32.
Shapes: C characters in the vocabulary, B sequences, S positions, F = H D features. Arrays are (B, S, F) in C order.
"""

import argparse
import importlib
from pathlib import Path

import numpy as np

from cupy_sdpa import attention_vjp

TEXT = Path(importlib.import_module("cupy_sdpa").__file__).parent / "cli" / "alice.txt"
LAYERS, HEADS, FEATURES, CONTEXT, BATCH, RATE = 2, 2, 64, 64, 8, 3e-3


def linear(x, w):
    """x @ w, as one product of matrices; the gradients of x and w."""
    rows = x.reshape(-1, len(w))
    return (rows @ w).reshape(*x.shape[:-1], -1), lambda dy: (linear(dy, w.T)[0], rows.T @ dy.reshape(-1, w.shape[1]))


def normalize(x):
    """Root mean square normalization; the gradient of x."""
    y = x / (size := np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5))
    return y, lambda dy: (dy - y * (dy * y).mean(axis=-1, keepdims=True)) / size


def self_attention(x, w_qkv, w_mix, dtype):
    """Causal attention of x to itself; the gradients of x and of both weights."""
    b, s, f = x.shape
    qkv, back_qkv = linear(x, w_qkv)
    q, k, v = (qkv.reshape(b, s, 3, HEADS, f // HEADS)[:, :, i] for i in range(3))  # views: nothing is copied
    found, back_attention = attention_vjp(q, k, v, layout="bshd", causal=True, compute_dtype=dtype)
    y, back_mix = linear(found.reshape(b, s, f), w_mix)

    def pullback(dy):
        dfound, dw_mix = back_mix(dy)
        dqkv = np.stack(back_attention(dfound.reshape(found.shape)), axis=2)
        return *back_qkv(dqkv.reshape(b, s, 3 * f)), dw_mix

    return y, pullback


def mlp(x, w_up, w_down, _):
    """A hidden layer with squared rectifiers; the gradients of x and of both weights."""
    hidden, back_up = linear(x, w_up)
    active = hidden * (hidden > 0)
    y, back_down = linear(active * active, w_down)

    def pullback(dy):
        dsquare, dw_down = back_down(dy)
        return *back_up(2 * active * dsquare), dw_down

    return y, pullback


def gpt(w, words, dtype):
    """The logits of the next character at every position, (B, S, C), from one-hot words; the gradients of all weights."""
    x, back_token = linear(words, w["token"])
    x, backs = x + w["place"][: words.shape[1]], []
    for layer in range(LAYERS):
        for part, names in ((self_attention, ("qkv", "mix")), (mlp, ("up", "down"))):
            own = [f"{name}{layer}" for name in names]
            n, back_n = normalize(x)
            y, back = part(n, *(w[name] for name in own), dtype)
            x = x + y
            backs.append((own, back_n, back))
    n, back_n = normalize(x)
    logits, back_read = linear(n, w["read"])

    def pullback(dlogits):
        g = {"place": np.zeros_like(w["place"])}
        dn, g["read"] = back_read(dlogits)
        dx = back_n(dn)
        for own, back_norm, back in reversed(backs):
            dn, g[own[0]], g[own[1]] = back(dx)
            dx = dx + back_norm(dn)
        g["place"][: words.shape[1]] = dx.sum(axis=0)
        _, g["token"] = back_token(dx)
        return g

    return logits, pullback


def initial(known, rng):
    """Random weights by name, float32."""
    f, h = FEATURES, 4 * FEATURES
    shapes = {"token": (known, f), "place": (CONTEXT, f), "read": (f, known)}
    for n in range(LAYERS):
        shapes |= {f"qkv{n}": (f, 3 * f), f"mix{n}": (f, f), f"up{n}": (f, h), f"down{n}": (h, f)}
    return {name: rng.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5) for name, shape in shapes.items()}


def train(text, *, steps=300, xp=np, dtype=None, seed=0):
    """Train on a text with Adam; returns the weights, the vocabulary, and the loss per character of every step."""
    rng, vocabulary = np.random.default_rng(seed), sorted(set(text))
    numbers = np.array([vocabulary.index(c) for c in text])
    w = {name: xp.asarray(x) for name, x in initial(len(vocabulary), rng).items()}
    mean, square = ({name: xp.zeros_like(x) for name, x in w.items()} for _ in range(2))
    one_hot, losses = xp.eye(len(vocabulary), dtype=np.float32), []
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(numbers) - CONTEXT, BATCH)
        pieces = one_hot[xp.asarray(numbers[starts[:, None] + np.arange(CONTEXT + 1)])]
        words, targets = pieces[:, :-1], pieces[:, 1:]
        logits, pullback = gpt(w, words, dtype)
        logits = logits - logits.max(axis=-1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        losses.append(-(logs * targets).sum() / (BATCH * CONTEXT))
        for name, g in pullback((np.exp(logs) - targets) / (BATCH * CONTEXT)).items():
            mean[name] += 0.1 * (g - mean[name])
            square[name] += 0.05 * (g * g - square[name])
            step_size = RATE * min(1, step / 20) / (1 - 0.9**step)  # with warm-up; both means start at 0
            w[name] -= step_size * mean[name] / (np.sqrt(square[name] / (1 - 0.95**step)) + 1e-8)
        if step % 50 == 0 or step in (1, 10, steps):
            print(f"loss per character: {float(losses[-1]):.2f} after {step} of {steps} steps", flush=True)
    return w, vocabulary, [float(x) for x in losses]


def generate(w, vocabulary, prompt, count, *, xp=np, dtype=None, temperature=0.5, seed=0):
    """Continue a prompt by ``count`` characters."""
    rng, one_hot = np.random.default_rng(seed), xp.eye(len(vocabulary), dtype=np.float32)
    numbers = [vocabulary.index(c) for c in prompt]
    for _ in range(count):
        logits, _ = gpt(w, one_hot[xp.asarray(numbers[-CONTEXT:])][None], dtype)
        last = np.asarray(logits[0, -1].tolist())
        numbers.append(int((last / temperature + rng.gumbel(size=last.shape)).argmax()))
    return "".join(vocabulary[n] for n in numbers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    defaults = {"text": TEXT, "prompt": "Alice ", "steps": 800, "tokens": 200}
    helps = "a text file", "characters to continue", "steps of training", "characters to generate"
    for (name, default), words in zip(defaults.items(), helps, strict=True):
        parser.add_argument(f"--{name}", default=default, type=type(default), help=words)
    parser.add_argument("--cpu", action="store_true", help="use numpy; on a busy machine faster with OPENBLAS_NUM_THREADS=1")
    given = parser.parse_args()
    try:
        engine = {"xp": np} if given.cpu else {"xp": importlib.import_module("cupy"), "dtype": "bfloat16"}
        text, _ = given.text.read_text(encoding="utf-8"), engine["xp"].zeros(1)  # an array, to see whether there is a GPU
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        parser.error(f"{error} (--cpu uses numpy)")
    if given.steps < 1 or len(text) < CONTEXT + 2 or not given.prompt or not set(given.prompt) <= set(text):
        parser.error(f"needed: 1 step or more, {CONTEXT + 2} characters of text or more, a prompt of characters of the text")
    print(generate(*train(text, steps=given.steps, **engine)[:2], given.prompt, given.tokens, **engine))
