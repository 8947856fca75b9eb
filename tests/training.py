"""A causal transformer of one layer learns a text by heart: the same code on numpy and on CuPy arrays.

CuPy has no automatic differentiation. So every step is written down with its pullback, the function that takes the
gradient of the step's result back to its inputs; attention brings its own, :func:`cupy_sdpa.attention_vjp`.

The legend of every shape: C words that are known, S places (the length of a sequence), B sequences in a batch, N = S*B
columns, one for every word of the batch; D head dim, H heads, F = D*H features, M hidden units.

Numbers are kept as columns in Fortran order, so that the (F, N) features are attention's (D, H, S, B) without a copy.
Weights and all that is not attention are float32. numpy's functions run on CuPy arrays where these are.

Sources: Vaswani et al. 2017, "Attention Is All You Need" (the layer); Kingma and Ba 2015, "Adam", algorithm 1.
"""

import numpy as np

from cupy_sdpa import attention_vjp

#: H, D and M of the model that :func:`train` trains.
HEADS, HEAD_DIM, HIDDEN = 4, 16, 128


def initial_weights(known, features, hidden, seq, seed):
    """Random weights by name, float32; those of ``read`` are small, so that at first all words are about equally likely."""
    rng = np.random.default_rng(seed)

    def normal(rows, columns, size):
        return np.float32(size) * rng.standard_normal((rows, columns), np.float32)

    square = {name: normal(features, features, features**-0.5) for name in ("q", "k", "v", "mix")}
    return square | {
        "word": normal(features, known, 0.5),  # a vector for every word
        "place": normal(features, seq, 0.5),  # and for every place
        "up": normal(hidden, features, features**-0.5),
        "down": normal(features, hidden, hidden**-0.5),
        "read": normal(known, features, 0.1 * features**-0.5),
    }


def times(weight, x):
    """``weight @ x`` in Fortran order, where ``@`` alone would give C order."""
    return (x.T @ weight.T).T


def language_model(weights, words, heads, dtype, **options):
    """What the model expects as the next word, at every place; it sees the words up to and with that place.

    Args:
        weights: by name, as from :func:`initial_weights`.
        words: (C, S, B), a 1 in every column.
        heads: H.
        dtype: of q, k and v, and of their gradients.
        options: for :func:`cupy_sdpa.attention_vjp`.

    Returns:
        ``(scores, pullback)``: scores (C, N), the logarithms of likelihoods up to a constant in every column; pullback
        makes of their gradient those of the weights, by name.
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
    """The mean of -log(likelihood) of the wanted words, and its gradient.

    Args:
        scores, wanted: (C, N); wanted has a 1 in every column.

    Returns:
        ``(loss, dscores)``; the loss of a model that finds all words equally likely is log C.
    """
    scores = scores - scores.max(axis=0)
    logs = scores - np.log(np.exp(scores).sum(axis=0))
    count = scores.shape[1]
    return -(logs * wanted).sum() / count, (np.exp(logs) - wanted) / count


class Adam:
    """Moves weights against the running mean of their gradients, over the root of that of their squares."""

    def __init__(self, weights, rate=3e-3):
        self.rate, self.steps = rate, 0
        self.mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def step(self, weights, gradients):
        """Change the weights in place."""
        self.steps += 1
        for name, g in gradients.items():
            self.mean[name] += 0.1 * (g - self.mean[name])
            self.square[name] += 0.01 * (g * g - self.square[name])
            mean = self.mean[name] / (1 - 0.9**self.steps)  # both began at 0
            square = self.square[name] / (1 - 0.99**self.steps)
            weights[name] -= self.rate * mean / (np.sqrt(square) + 1e-8)


def batches(numbers, known, seq, batch, steps, seed):
    """Random pieces of a text and, for every place, the word that follows: both (C, S, B), a 1 in every column."""
    rng = np.random.default_rng(seed)
    one_hot = np.eye(known, dtype=np.float32)
    for _ in range(steps):
        starts = rng.integers(0, len(numbers) - seq, batch)
        pieces = one_hot[:, numbers[starts + np.arange(seq + 1)[:, None]]]
        yield pieces[:, :-1], pieces[:, 1:]


def train(text, *, seq=32, batch=16, steps=300, seed=0, xp=np, dtype=np.float32, **options):
    """Learn to say the next word of a text.

    Args:
        text: list of words.
        seq, batch, steps: S, B, and how often the weights change.
        seed: of the first weights and of the choice of batches, which numpy draws for every engine.
        xp: numpy or cupy.
        dtype: of q, k and v: bfloat16 on a GPU.
        options: for :func:`cupy_sdpa.attention_vjp`.

    Returns:
        ``(losses, weights)``: the loss before every step as numbers, the trained weights by name.
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
    """The start of a text and the words that numpy's engine finds likeliest after it, up to the length that was trained."""
    vocabulary = np.unique(text)
    one_hot = np.eye(len(vocabulary), dtype=np.float32)
    numbers = [int(np.searchsorted(vocabulary, word)) for word in start]
    while len(numbers) < weights["place"].shape[1]:
        scores, _ = language_model(weights, one_hot[:, numbers][:, :, None], HEADS, np.float32)
        numbers.append(int(scores[:, -1].argmax()))
    return [str(vocabulary[number]) for number in numbers]
