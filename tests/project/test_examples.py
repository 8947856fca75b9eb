"""The examples: gradients, training, decoding with the cache, speculation, continuous batching, and the commands."""

import runpy
import sys
from types import SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from command_line import ROOT, python, run

from examples.generation.decoder import CHUNK, Decoder
from examples.generation.gpt import (
    GPT,
    Sizes,
    Training,
    cast,
    cross_entropy,
    initial,
    read_text,
    rotated_attention,
    split,
    train,
)
from examples.generation.serve import Request, gumbel, serve
from examples.generation.speculate import NGrams, speculate

pytestmark = pytest.mark.usefixtures("folder")
PATH = ROOT / "examples" / "gpt.py"


def program(name):
    """The function that runs an example as a program."""

    def main(words):
        with mock.patch.object(sys, "argv", [name, *words]):
            runpy.run_module(f"examples.{name}", run_name="__main__")
        return 0

    return main


# gpt.py

TEXT = "the cat sat on the mat. " * 20


@pytest.fixture(scope="module")
def gpt():
    """The example's functions."""
    return SimpleNamespace(**runpy.run_path(str(PATH)))


def test_readers_can_copy_it():
    """At most 150 lines, and no import except numpy, the standard library and this package."""
    lines = PATH.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports == [
        "import argparse", "import importlib", "from pathlib import Path", "import numpy as np", "from cupy_sdpa import attention_vjp",
    ]  # fmt: skip


def check_gradients(gradients, weights, loss):
    """Compare every gradient with the directional derivative of a loss of the weights, in float64."""
    rng = np.random.default_rng(0)
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        step = rng.standard_normal(gradient.shape)
        plus, minus = (loss(weights | {name: weights[name] + t * step}) for t in (1e-5, -1e-5))
        np.testing.assert_allclose((gradient * step).sum(), (plus - minus) / 2e-5, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradients_of_gpt(gpt):
    """Of a random function of the logits, for every weight."""
    rng = np.random.default_rng(0)
    weights = {name: x.astype(np.float64) for name, x in gpt.initial(5, rng).items()}
    words = np.eye(5)[rng.integers(0, 5, (2, 7))]
    dlogits = rng.standard_normal((2, 7, 5))
    check_gradients(gpt.gpt(weights, words, None)[1](dlogits), weights, lambda w: (gpt.gpt(w, words, None)[0] * dlogits).sum())


@pytest.mark.slow
@pytest.mark.parametrize("on", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_it_learns_a_sentence(on, gpt, request):
    """The loss falls to a small part, and the continuation is the sentence; with CuPy arrays attention runs in bfloat16."""
    engine = {} if on == "numpy" else {"xp": request.getfixturevalue("cupy"), "dtype": "bfloat16"}
    weights, vocabulary, losses = gpt.train(TEXT, steps=120, **engine)
    text = gpt.generate(weights, vocabulary, "the cat ", 24, temperature=0.1, **engine)
    assert losses[0] > 2
    assert losses[-1] < 0.2
    assert text.startswith("the cat sat on the mat. the")


def test_the_command_of_gpt():
    """It prints the loss and a continuation of the prompt."""
    done = run("--cpu --steps 2 --tokens 3 --prompt", "Alice was ", main=program("gpt"))
    first, last, *rest = done.lines
    assert first.startswith("loss per character: ")
    assert (first[-18:], last[-18:]) == ("after 1 of 2 steps", "after 2 of 2 steps")
    assert "\n".join(rest).startswith("Alice was ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('no CuPy')", "no CuPy (--cpu uses numpy)"),
        ("def zeros(shape): raise RuntimeError('no device')", "no device (--cpu uses numpy)"),
    ],
    ids=["no CuPy", "no GPU"],
)
def test_without_a_gpu(code, message, tmp_path):
    """One line that names --cpu."""
    (tmp_path / "cupy.py").write_text(code, encoding="utf-8")
    done = python(str(PATH), cwd=tmp_path, path=[tmp_path])
    assert done.status == 2
    assert done.err.splitlines()[-1].endswith(message)
    assert "Traceback" not in done.err


# generation

SMALL = Sizes(layers=2, heads=2, head_dim=16, hidden=64, context=64)
#: Prompts of different lengths; the first one takes two chunks.
STARTS = ((0, CHUNK + 8), (100, 3), (200, 17))


@pytest.fixture(scope="module")
def model():
    """A small model in float64 that has learned the text in part."""
    made, losses = train(sizes=SMALL, training=Training(steps=100, batch=4))
    assert losses[-1] < losses[0] / 2
    return cast(made, np.float64)


@pytest.fixture(scope="module")
def words(model):
    """The tokens of the text."""
    return model.encode(read_text())


def on(engine, model):
    """The model on an engine, with q, k and v in 16 bits; on numpy it is unchanged."""
    if not engine.on_cudnn:
        return model
    weights = {name: engine.put(weight.astype(np.float32)) for name, weight in model.weights.items()}
    dtype = np.dtype(ml_dtypes.bfloat16 if engine.name == "cupy" else np.float16)
    return GPT(model.sizes, model.vocabulary, weights, dtype, engine.xp)


def prompts_of(words):
    return {b: words[start : start + length] for b, (start, length) in enumerate(STARTS)}


def random_noise(model, count, batch, seed=0):
    """Gumbel noise, ``(count, C, B)``."""
    return np.stack([gumbel(1.0, seed, b, count, len(model.vocabulary)) for b in range(batch)], axis=2)


def test_gradients_of_generation():
    """Of the loss, for every weight."""
    small = cast(initial(Sizes(2, 2, 4, 8, 6), list("abcde"), np.float32), np.float64)
    tokens = np.random.default_rng(0).integers(0, 5, (7, 3))

    def passes(weights):
        model = GPT(small.sizes, small.vocabulary, weights, small.dtype, np)
        logits, pullback = model.forward(tokens[:-1], rotated_attention(small.sizes.rope))
        loss, dlogits = cross_entropy(logits, tokens[1:], np)
        return loss, lambda: pullback(dlogits)

    check_gradients(passes(small.weights)[1](), small.weights, lambda weights: passes(weights)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-4)])
def test_decoding_equals_a_full_pass(dtype, tolerance, model, words):
    """Logits of prefill in chunks and of single tokens equal one causal pass over the whole sequence."""
    model = cast(model, dtype)
    length, batch = CHUNK + 12, 2
    tokens = np.stack([words[:length], words[300 : 300 + length]], axis=1)
    full, _ = model.forward(tokens, rotated_attention(model.sizes.rope))
    decoder = Decoder(model, batch)
    found = []
    for start, end in ((0, CHUNK), (CHUNK, CHUNK + 5), *((i, i + 1) for i in range(CHUNK + 5, length))):
        decoder.cache.begin_step(end - start)
        found.append(decoder.compute(tokens[start:end]))
    np.testing.assert_allclose(np.concatenate(found, axis=1), full, rtol=0, atol=tolerance * abs(full).max())


@pytest.mark.slow
@pytest.mark.parametrize(("proposals", "width"), [(1, 1), (4, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_speculation_gives_the_same_text(sampled, proposals, width, model, words):
    """Greedy and sampled; some proposals are accepted and some are not."""
    prompts, count = prompts_of(words), 20
    decoder = Decoder(model, len(STARTS))
    noise = random_noise(model, count, len(STARTS)) if sampled else None
    first = list(decoder.prefill(prompts).values())
    wanted = decoder.decode(first, count, noise)
    decoder.clear()
    decoder.prefill(prompts)
    done = speculate(decoder, list(prompts.values()), first, count, NGrams(words), proposals, width, noise=noise)
    np.testing.assert_array_equal(np.array(done.tokens).T, wanted)
    assert 0 < done.accepted < done.proposed == done.steps * proposals * width
    kept = [length + len(tokens) for (_, length), tokens in zip(STARTS, done.tokens, strict=True)]
    assert (decoder.cache.host_lengths >= kept).all()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_continuous_batching_gives_the_text_of_each_prompt_alone(temperature, engine, model, words):
    """Prompts in two sequences, with an end token and different limits; the cache is empty afterwards. Float16 gives the same text."""
    asked = [(words[start : start + 3 + n], 5 + 4 * n) for n, start in enumerate((0, 100, 200, 300))]
    end = int(model.encode(",")[0])
    requests = [Request(*one) for one in asked]
    decoder = Decoder(on(engine, model), 2)
    history = serve(decoder, requests, end=end, temperature=temperature, seed=3)
    assert decoder.cache.host_lengths.tolist() == [0, 0]
    longer = {n for n, request in enumerate(requests) if len(request.tokens) > 1}
    assert {n for step in history for n in step if n is not None} == longer
    for n, (prompt, count) in enumerate(asked):
        noise = gumbel(temperature, 3, n, count, len(model.vocabulary))
        one = Decoder(model, 1)
        first = one.prefill({0: prompt}, {0: noise[0]})[0]
        alone = [first, *one.decode([first], count - 1, noise[1:, :, None])[:, 0].tolist()]
        stop = alone.index(end) + 1 if end in alone else count
        assert engine.name == "cupy" or requests[n].tokens == alone[:stop]  # bfloat16 on a GPU
    engine.forget_plans()


@pytest.mark.slow
def test_captured_steps(engine, model, words):
    """A replayed graph gives the tokens of the step without a graph, also in speculation; float16 gives numpy's tokens."""
    prompts, count = prompts_of(words), 10
    noise = random_noise(model, count, len(STARTS))
    results = []
    for made, graphs in ((on(engine, model), True), (on(engine, model), False), (model, False)):
        decoder = Decoder(made, len(STARTS), graphs=graphs)
        first = list(decoder.prefill(prompts).values())
        greedy = decoder.decode(first, count)
        decoder.clear()
        decoder.prefill(prompts)
        sampled = decoder.decode(first, count, noise)
        speculated = []
        for width in (1, 2):
            decoder.clear()
            decoder.prefill(prompts)
            done = speculate(decoder, list(prompts.values()), first, count, NGrams(words), width=width)
            speculated.append(np.array(done.tokens).T.tolist())
        results.append((first, greedy.tolist(), sampled.tolist(), speculated))
    assert results[0] == results[1]
    assert engine.name == "cupy" or results[0] == results[2]
    engine.forget_plans()


@pytest.mark.slow
def test_tokens_are_the_text(model):
    """The words of the text, joined, are the text; a word without a space before it is found."""
    passage = read_text()
    assert "".join(split(passage)) == passage
    assert model.decode(model.encode(passage)) == passage
    assert model.decode(model.encode("rabbit-hole")) == " rabbit-hole"


#: A short run.
SHORT = "--cpu --steps 3 --tokens 6 --batch 3"


@pytest.mark.slow
def test_the_command_of_generation():
    """It prints the texts and the tokens per second of training, prefill, decoding, speculation and the batch."""
    done = run(f"{SHORT} --temperature 0 --draft 2 --prompt", "Alice was", main=program("generation"))
    assert done.status == 0
    for label in ("greedy", "sampled", "prefill", "decoding", "batch"):
        assert any(line.startswith(label) for line in done.lines)
    assert done.text.count("tokens/s") == 6
    for drafts in ("1 branch of 2 draft tokens: the greedy text; ", "2 branches of 2 draft tokens: the greedy text; "):
        assert f"with {drafts}" in done.text
    assert "of 4 accepted per step" in done.text
    assert "10 prompts in 3 sequences" in done.text


@pytest.mark.gpu
def test_the_command_on_a_gpu():
    """On a GPU attention runs in bfloat16, and the steps are replayed CUDA graphs."""
    done = run("--steps 20 --tokens 20", main=program("generation"))
    assert done.status == 0
    assert "attention in bfloat16" in done.text
    assert "each step is a replayed CUDA graph" in done.text


#: Words of a command line, and the end of the error.
REFUSED = (
    ("gpt", ["--steps", "0"], "1 step or more"),
    ("gpt", ["--prompt", ""], "a prompt of characters of the text"),
    ("gpt", ["--prompt", "日"], "a prompt of characters of the text"),
    ("gpt", ["--text", "missing.txt"], "missing.txt"),
    ("gpt", ["--text", str(PATH.parent)], "directory"),
    ("gpt", ["--text", sys.executable], "can't decode"),
    ("generation", ["--draft", "9"], "--draft 9 times --branches 2 is more than 16"),
    ("generation", ["--steps", "1", "--tokens", "128"], "7 + 128 tokens; the model is trained on sequences of 128"),
    ("generation", ["--steps", "0"], "--steps 0 is not positive"),
    ("generation", ["--prompt", "zebra"], "'zebra' does not occur"),
    ("generation", ["--prompt", " "], "--prompt has no words"),
    ("generation", ["--temperature", "inf"], "--temperature inf is negative or not finite"),
)


@pytest.mark.parametrize(("name", "words", "message"), REFUSED)
def test_mistakes_end_before_training(name, words, message):
    """Invalid options end the command with status 2; the last line has the reason."""
    done = run("--cpu", *words, main=program(name))
    assert (done.status, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]
