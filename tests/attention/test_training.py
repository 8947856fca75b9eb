"""A small language model trains with the gradients, and every engine gives the same loss curve."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from training import batches, continued, cross_entropy, initial_weights, language_model, train

from cupy_sdpa.cli.text import tokens

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: How far a loss curve with attention in bfloat16 may be from the one in float32, at any step, in nats.
#: Measured with numpy: over five seeds at most 0.005; in float32, with q, k and v off by an epsilon, 0.002. So it is twice
#: what rounding does. The curve itself jumps by 0.04 from batch to batch. One head's dv lost moves it by 0.06, the last
#: query's dq lost by 0.02. A gradient that is merely too large by 10 % does not show, as Adam divides by its size.
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def words():
    """A page of a real text."""
    return tokens()


@pytest.fixture(scope="module")
def trained(words):
    """The loss curve and the weights of numpy in float32."""
    losses, weights = train(words)
    return np.array(losses), weights


def surprise(words, seen):
    """The conditional entropy of a word given some words before it, in nats: the lowest loss of a model that uses only these."""

    def entropy(length):
        pieces = Counter(tuple(words[i : i + length]) for i in range(len(words) - seen))
        shares = np.array(list(pieces.values())) / pieces.total()
        return -(shares * np.log(shares)).sum()

    return entropy(seen + 1) - entropy(seen)


@pytest.mark.slow
def test_every_gradient_against_finite_differences():
    """In float64 the gradient of every weight equals the difference quotient of the loss, to 1e-6 of the largest."""
    known, seq, batch, heads, head_dim = 5, 4, 2, 2, 3
    weights = initial_weights(known, heads * head_dim, hidden=7, seq=seq, seed=0)
    weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
    text = np.random.default_rng(0).integers(0, known, 50)
    inputs, wanted = (x.astype(np.float64) for x in next(batches(text, known, seq, batch, steps=1, seed=0)))
    wanted = wanted.reshape(known, -1, order="F")

    scores, pullback = language_model(weights, inputs, heads, np.float64)
    gradients = pullback(cross_entropy(scores, wanted)[1])

    def loss():
        return cross_entropy(language_model(weights, inputs, heads, np.float64)[0], wanted)[0]

    step = 1e-5  # its square and float64's epsilon over it are far below what the float32 log-sum-exp leaves, 4e-8
    assert gradients.keys() == weights.keys()
    for name, weight in weights.items():
        quotients = np.zeros_like(weight)
        for place in np.ndindex(weight.shape):
            before = weight[place]
            weight[place] = before + step
            above = loss()
            weight[place] = before - step
            quotients[place] = (above - loss()) / (2 * step)
            weight[place] = before
        np.testing.assert_allclose(gradients[name], quotients, rtol=0, atol=1e-6 * abs(quotients).max(), err_msg=name)


@pytest.mark.slow
def test_the_loss_falls_below_what_a_model_without_attention_could_reach(trained, words):
    """From log C the loss falls below half of the lowest loss of a model that uses only the previous word."""
    losses, _ = trained
    assert abs(losses[0] - np.log(len(set(words)))) < 0.05  # 5.72
    assert losses[-10:].mean() < surprise(words, seen=1) / 2  # 0.15; half of 1.45


@pytest.mark.slow
def test_the_trained_model_recites_the_text(trained, words):
    """Given four words of any part of the text it continues with at least half of the right words, up to the trained length."""
    _, weights = trained
    right = []
    for start in range(0, len(words) - 32, 40):
        piece = words[start : start + 32]
        said = continued(weights, piece[:4], words)
        right += [a == b for a, b in zip(said[4:], piece[4:], strict=True)]
    assert np.mean(right) > 0.5


@pytest.mark.slow
def test_training_is_reproducible(words):
    """Two runs with one seed give the same bits; another seed gives another loss curve."""
    one, again, other = (train(words, steps=10, seed=seed)[0] for seed in (0, 0, 1))
    assert one == again
    assert one != other


@pytest.mark.sweep
def test_attention_in_bfloat16_gives_the_same_loss_curve(trained, words):
    """With q, k, v and their gradients rounded to bfloat16 in every step the loss stays within the tolerance."""
    losses, _ = train(words, dtype=BFLOAT16)
    assert abs(losses - trained[0]).max() < TOLERANCE


@pytest.mark.gpu
def test_cudnn_gives_the_same_loss_curve(trained, words, cupy):
    """On the GPU, with cuDNN's attention in bfloat16, the loss is within the tolerance of numpy's in float32."""
    losses, weights = train(words, xp=cupy, dtype=BFLOAT16)
    assert all(isinstance(weight, cupy.ndarray) for weight in weights.values())
    assert abs(losses - trained[0]).max() < TOLERANCE


@pytest.mark.gpu
def test_deterministic_training_gives_the_same_bits(words, cupy):
    """With deterministic gradients two runs on one GPU give the same losses and weights, bit for bit.

    CuPy's matrix products and sums must be deterministic, too, which they are on one stream. Sequences are long here, so that
    several blocks of keys contribute to each dq.
    """
    if int(cupy.cuda.Device().compute_capability) >= 120:
        pytest.skip("this GPU has no deterministic gradients")
    options = {"seq": 512, "batch": 4, "steps": 30, "xp": cupy, "dtype": BFLOAT16, "deterministic": True}
    (losses, weights), (losses_again, weights_again) = (train(words, **options) for _ in range(2))
    assert losses == losses_again
    for name, weight in weights.items():
        assert (weight.view("u4") == weights_again[name].view("u4")).all(), name
