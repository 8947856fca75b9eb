"""examples/llama.py: prompts of different lengths, decoding and beams are those of the dense computation in float64."""

import ast
import itertools

import numpy as np
import pytest
from command_line import ROOT

from examples.llama import Llama, beam_search, dense, generate, random_weights

HEADS = {"heads": 4, "kv_heads": 2}
SIZES = {"vocabulary": 50, "features": 64, "hidden": 96, "layers": 2, **HEADS}
PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 35], [8, 9, 7, 9]]


def made(engine, batch):
    """A model with random weights on an engine, and its weights on the host."""
    weights = random_weights(np.random.default_rng(0), **SIZES)
    return Llama(engine.put(weights), **HEADS, batch=batch, pages=batch + 4, dtype=engine.dtype, xp=engine.xp), weights


def log_probabilities(weights, tokens):
    """The log-probabilities of the next token after each token, (C, S)."""
    logits = dense(weights, tokens, **HEADS)
    logits = logits - logits.max(axis=0)
    return logits - np.log(np.exp(logits).sum(axis=0))


def test_readers_can_copy_it():
    """It imports nothing besides numpy, the standard library and this package."""
    tree = ast.parse((ROOT / "examples" / "llama.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "collections.abc", "typing", "cupy_sdpa"}


def test_logits(engine):
    """Of a padded batch of prompts, and of the tokens after them."""
    model, weights = made(engine, len(PROMPTS))
    lengths, rng = np.array([len(prompt) for prompt in PROMPTS]), np.random.default_rng(1)
    tokens, given = np.zeros((lengths.max(), len(PROMPTS)), np.int32), [list(prompt) for prompt in PROMPTS]
    for b, prompt in enumerate(PROMPTS):
        tokens[: len(prompt), b] = prompt
    logits = engine.get(model.step(engine.put(tokens), lengths))
    found = [[logits[:, s, b] for s in range(lengths[b])] for b in range(len(PROMPTS))]
    for _ in range(3):
        words = rng.integers(0, SIZES["vocabulary"], (1, len(PROMPTS)), np.int32)
        logits = engine.get(model.step(engine.put(words)))
        for b, sequence in enumerate(given):
            sequence.append(int(words[0, b]))
            found[b].append(logits[:, 0, b])
    for b, sequence in enumerate(given):
        np.testing.assert_allclose(np.transpose(found[b]), dense(weights, sequence, **HEADS), atol=20 * engine.tolerance)


def test_tokens():
    """The most likely tokens after prompts of different lengths are those of the dense computation, one prompt at a time."""
    weights = random_weights(np.random.default_rng(0), **SIZES)
    found = generate(Llama(weights, **HEADS, batch=len(PROMPTS), pages=32), PROMPTS, 10)
    for b, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(10):
            tokens.append(int(dense(weights, tokens, **HEADS)[:, -1].argmax()))
        assert tokens[len(prompt) :] == found[:, b].tolist()


def test_beams(engine):
    """The log-probabilities of the hypotheses; with enough beams the best is the best of all sequences."""
    model, weights = made(engine, 50)
    prompt = PROMPTS[0]
    found, scores = beam_search(model, prompt, 2)
    assert found.shape == (50, 2)
    assert (np.diff(scores) <= 0).all()
    assert len({*map(tuple, found.tolist())}) == len(found)
    for sequence, score in itertools.islice(zip(found, scores, strict=True), 5):
        logs = log_probabilities(weights, [*prompt, int(sequence[0])])[:, len(prompt) - 1 :]
        assert score == pytest.approx(logs[sequence[0], 0] + logs[sequence[1], 1], abs=20 * engine.tolerance)
    if engine.name == "numpy":
        every = log_probabilities(weights, prompt)[:, -1, None] + np.array([
            log_probabilities(weights, [*prompt, word])[:, -1] for word in range(50)
        ])  # fmt: skip
        assert tuple(found[0]) == np.unravel_index(every.argmax(), every.shape)


def test_beams_share_the_prompt():
    """The pages of a long prompt are stored once; each hypothesis then has a page of its own."""
    model = Llama(random_weights(np.random.default_rng(0), **SIZES), **HEADS, batch=4, pages=7)
    found, _ = beam_search(model, list(range(2, 50)), 3)  # three full pages, and one for each beam
    assert found.shape == (4, 3)
