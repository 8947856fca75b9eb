"""A causal transformer of one layer memorizes a text: the same code on numpy and CuPy arrays.

CuPy has no automatic differentiation. So every step is written with its pullback, the function that maps the gradient of the
step's result to those of its inputs; that of attention is from :func:`cupy_sdpa.attention_vjp`.

The legend of shapes: C words in the vocabulary, S positions (the length of a sequence), B sequences in a batch, N = S*B
columns, one per word of the batch; D head dim, H heads, F = D*H features, M hidden units.

Values are columns in Fortran order, so that the (F, N) features are attention's (D, H, S, B) without a copy. Weights and
everything except attention are float32. numpy's functions also run on CuPy arrays.

Sources: Vaswani et al. 2017, "Attention Is All You Need" (the layer); Kingma and Ba 2015, "Adam", algorithm 1.
"""

import numpy as np

from cupy_sdpa import attention_vjp

#: H, D and M of the model that :func:`train` trains.
HEADS, HEAD_DIM, HIDDEN = 4, 16, 128


def initial_weights(known, features, hidden, seq, seed):
    """Random weights by name, float32; those of ``read`` are small, so that initially all words have about the same
    probability.
    """
    rng = np.random.default_rng(seed)

    def normal(rows, columns, size):
        return np.float32(size) * rng.standard_normal((rows, columns), np.float32)

    square = {name: normal(features, features, features**-0.5) for name in ("q", "k", "v", "mix")}
    return square | {
        "word": normal(features, known, 0.5),  # an embedding per word
        "place": normal(features, seq, 0.5),  # and per position
        "up": normal(hidden, features, features**-0.5),
        "down": normal(features, hidden, hidden**-0.5),
        "read": normal(known, features, 0.1 * features**-0.5),
    }


def times(weight, x):
    """``weight @ x`` in Fortran order, where ``@`` alone would give C order."""
    return (x.T @ weight.T).T


def language_model(weights, words, heads, dtype, **options):
    """The logits of the next word at every position, from the words up to that position.

    Args:
        weights: by name, as from :func:`initial_weights`.
        words: (C, S, B), one-hot columns.
        heads: H.
        dtype: of q, k and v, and of their gradients.
        options: for :func:`cupy_sdpa.attention_vjp`.

    Returns:
        ``(scores, pullback)``: logits (C, N); the pullback maps their gradient to those of the weights, by name.
    """
    (known, seq, batch), features = words.shape, weights["word"].shape[0]
    columns, by_place = (features, seq * batch), (features, seq, batch)
    by_head = (features // heads, heads, seq, batch)

    words = words.reshape(known, -1, order="F")
    x = times(weights["word"], words).reshape(by_place, order="F") + weights["place"][:, :seq, None]
    x = x.reshape(columns, order="F")

    q, k, v = (times(weights[name], x).reshape(by_head, order="F").astype(dtype) for name in "qkv")
    found, attention_pullback = attention_vjp(q, k, v, causal=True, **options)
    found = found.reshape(columns, order="F").astype(x.dtype)
    y = x + times(weights["mix"], found)

    hidden = times(weights["up"], y)
    active = hidden * (hidden > 0)
    z = y + times(weights["down"], active)
    scores = times(weights["read"], z)

    def pullback(dscores):
        gradients = {"read": dscores @ z.T}
        dz = times(weights["read"].T, dscores)

        gradients["down"] = dz @ active.T
        dhidden = times(weights["down"].T, dz) * (hidden > 0)
        gradients["up"] = dhidden @ y.T
        dy = dz + times(weights["up"].T, dhidden)

        gradients["mix"] = dy @ found.T
        dfound = times(weights["mix"].T, dy).reshape(by_head, order="F").astype(dtype)
        dx = dy
        for name, dhead in zip("qkv", attention_pullback(dfound), strict=True):
            dhead = dhead.reshape(columns, order="F").astype(x.dtype)
            gradients[name] = dhead @ x.T
            dx = dx + times(weights[name].T, dhead)

        gradients["word"] = dx @ words.T
        gradients["place"] = np.zeros_like(weights["place"])
        gradients["place"][:, :seq] = dx.reshape(by_place, order="F").sum(axis=2)
        return gradients

    return scores, pullback


def cross_entropy(scores, wanted):
    """The mean of -log(probability) of the target words, and its gradient.

    Args:
        scores, wanted: logits and one-hot targets, (C, N).

    Returns:
        ``(loss, dscores)``; the loss of uniform probabilities is log C.
    """
    scores = scores - scores.max(axis=0)
    logs = scores - np.log(np.exp(scores).sum(axis=0))
    count = scores.shape[1]
    return -(logs * wanted).sum() / count, (np.exp(logs) - wanted) / count


class Adam:
    """The Adam optimizer."""

    def __init__(self, weights, rate=3e-3):
        self.rate, self.steps = rate, 0
        self.mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def step(self, weights, gradients):
        """Update the weights in place."""
        self.steps += 1
        for name, g in gradients.items():
            self.mean[name] += 0.1 * (g - self.mean[name])
            self.square[name] += 0.01 * (g * g - self.square[name])
            mean = self.mean[name] / (1 - 0.9**self.steps)  # bias correction: both start at 0
            square = self.square[name] / (1 - 0.99**self.steps)
            weights[name] -= self.rate * mean / (np.sqrt(square) + 1e-8)


def batches(numbers, known, seq, batch, steps, seed):
    """Random sequences of a text and the next word at every position: both (C, S, B), one-hot columns."""
    rng = np.random.default_rng(seed)
    one_hot = np.eye(known, dtype=np.float32)
    for _ in range(steps):
        starts = rng.integers(0, len(numbers) - seq, batch)
        pieces = one_hot[:, numbers[starts + np.arange(seq + 1)[:, None]]]
        yield pieces[:, :-1], pieces[:, 1:]


def train(text, *, seq=32, batch=16, steps=300, seed=0, xp=np, dtype=np.float32, **options):
    """Train the model on a text.

    Args:
        text: list of words.
        seq, batch, steps: S, B, and the number of updates.
        seed: of the initial weights and of the batches, drawn by numpy for every engine.
        xp: numpy or cupy.
        dtype: of q, k and v; bfloat16 on a GPU.
        options: for :func:`cupy_sdpa.attention_vjp`.

    Returns:
        ``(losses, weights)``: the loss before every update, the trained weights by name.
    """
    vocabulary, numbers = np.unique(text, return_inverse=True)
    known = len(vocabulary)
    weights = initial_weights(known, HEADS * HEAD_DIM, HIDDEN, seq, seed)
    weights = {name: xp.asarray(weight) for name, weight in weights.items()}
    adam, losses = Adam(weights), []
    for pair in batches(numbers, known, seq, batch, steps, seed):
        words, wanted = (xp.asarray(x) for x in pair)
        scores, pullback = language_model(weights, words, HEADS, dtype, **options)
        loss, dscores = cross_entropy(scores, wanted.reshape(known, -1, order="F"))
        adam.step(weights, pullback(dscores))
        losses.append(float(loss))
    return losses, weights


def continued(weights, start, text):
    """A continuation of the start of a text with the most likely words of numpy's engine, up to the trained length."""
    vocabulary = np.unique(text)
    one_hot = np.eye(len(vocabulary), dtype=np.float32)
    numbers = [int(np.searchsorted(vocabulary, word)) for word in start]
    while len(numbers) < weights["place"].shape[1]:
        scores, _ = language_model(weights, one_hot[:, numbers][:, :, None], HEADS, np.float32)
        numbers.append(int(scores[:, -1].argmax()))
    return [str(vocabulary[number]) for number in numbers]
