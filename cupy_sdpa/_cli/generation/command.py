"""``demo --generate``: train a small GPT on the text, then generate with a key/value cache, and report tokens per second."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ...device import cupy_runtime
from ...problem.tensor_spec import numpy_dtype
from ...version import __version__
from ..helpers import text
from ..helpers.console import CommandError, print_labeled, result, working
from ..helpers.engine import choose
from .decoder import PAGE, Decoder
from .gpt import GPT, Sizes, Training, one_blas_thread, train, untrained
from .serve import Request, gumbel, serve
from .speculate import NGrams, speculate

#: The default prompt.
PROMPT = "Alice was beginning to get very tired"
#: The number of prompts in the batch, and the words of each: the first words of a sentence.
PROMPTS, WORDS = 10, 6


@one_blas_thread()
def command(arguments: argparse.Namespace) -> int:
    """Run ``demo --generate``.

    Raises:
        CommandError: the command cannot run.
    """
    on_gpu, why = choose(arguments.engine, arguments.dtype or "bfloat16")
    dtype = numpy_dtype(arguments.dtype or ("bfloat16" if on_gpu else "float32"))
    count, temperature, proposals = arguments.tokens, arguments.temperature, arguments.draft
    if proposals > PAGE:
        raise CommandError(f"--draft {proposals} is more than {PAGE}")
    prompt = _encode(untrained(), arguments.prompt)
    if len(prompt) + count > Sizes().context:
        length = f"--prompt and --tokens have {len(prompt)} + {count} tokens"
        raise CommandError(f"{length}; the model is trained on sequences of {Sizes().context}")
    print_labeled("cupy_sdpa", f"{__version__}, a small GPT is trained on a text and continues it")
    engine = {"name": "cuDNN" if on_gpu else "numpy", "reason": why}
    result(engine=engine, dtype=str(dtype), prompt=arguments.prompt, temperature=temperature)
    with working("training"):
        model = _train(arguments.steps, dtype, cupy_runtime.cupy() if on_gpu else np, f"{engine['name']} ({why})")
    decoder, noise = Decoder(model, 1), gumbel(temperature, 0, 0, count, len(model.vocabulary))
    with working("generating"):
        decoder.step(1), decoder.step(proposals + 1)  # captured in CUDA graphs on a GPU
        decoder.prefill({0: prompt})  # not timed: on a GPU the first call builds plans
        greedy, prefill, decoding = _generate(decoder, prompt, count)
        sampled, *_ = _generate(decoder, prompt, count, noise)
    result(greedy=model.decode(greedy), sampled=model.decode(sampled))
    result(tokens_per_second={"prefill": len(prompt) / prefill, "decoding": (count - 1) / decoding})
    print_labeled("prompt", arguments.prompt)
    print_labeled("greedy", model.decode(greedy))
    print_labeled("sampled", f"(temperature {temperature:g}) {model.decode(sampled)}")
    print_labeled("prefill", f"{_rate(len(prompt), prefill)} (a prompt of {len(prompt)})")
    how = "each step is a replayed CUDA graph" if on_gpu else "token by token"
    print_labeled("decoding", f"{_rate(count - 1, decoding)}, {how}")
    with working("decoding with draft tokens"):
        _speculate(decoder, prompt, greedy, proposals, decoding)
    with working("serving a batch"):
        _serve(model, arguments.batch, count, temperature)
    return 0


def _train(steps: int, dtype: np.dtype[Any], xp: Any, engine: str) -> GPT:
    """Train the model, and print the losses."""
    print_labeled("text", f"{text.title()}")
    print_labeled("engine", engine)
    shown: list[str] = []
    started = time.perf_counter()
    training = Training(steps=steps)
    model, losses = train(training=training, dtype=dtype, xp=xp, progress=lambda n, loss: shown.append(f"{loss:.2f} ({n})"))
    seconds, sizes = time.perf_counter() - started, model.sizes
    heads = f"{sizes.layers} layers, {sizes.heads} heads of head dim {sizes.head_dim}"
    weights = sum(int(weight.size) for weight in model.weights.values())
    print_labeled("model", f"{heads}, {len(model.vocabulary)} words, {weights} weights; attention in {dtype}")
    tokens = steps * training.batch * sizes.context
    result(model={
        "layers": sizes.layers, "heads": sizes.heads, "head_dim": sizes.head_dim, "words": len(model.vocabulary),
        "weights": weights,
    })  # fmt: skip
    result(training={"steps": steps, "seconds": seconds, "last_loss": float(np.mean(losses[-10:]))})
    print_labeled("training", f"loss (step): {', '.join(shown)}")
    print_labeled(
        "", f"{steps} steps in {seconds:.1f} s, {_rate(tokens, seconds)}; mean of the last: {np.mean(losses[-10:]):.2f}"
    )
    return model


def _encode(model: GPT, prompt: str) -> Any:
    """The tokens of the prompt.

    Raises:
        CommandError: a word is unknown, or there is none.
    """
    try:
        tokens = model.encode(prompt)
    except ValueError as error:
        raise CommandError(f"--prompt: {error}") from None
    if not len(tokens):
        raise CommandError("--prompt has no words")
    return tokens


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the seconds of a call that returns numbers on the host."""
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.0f} tokens/s"


def _generate(decoder: Decoder, prompt: Any, count: int, noise: Any = None) -> tuple[list[int], float, float]:
    """New tokens of one sequence, and the seconds of prefill and decoding."""
    decoder.clear()
    first, prefill = _timed(lambda: decoder.prefill({0: prompt}, None if noise is None else {0: noise[0]})[0])
    rest, decoding = _timed(lambda: decoder.decode([first], count - 1, None if noise is None else noise[1:, :, None]))
    return [first, *rest[:, 0].tolist()], prefill, decoding


def _speculate(decoder: Decoder, prompt: Any, greedy: list[int], proposals: int, decoding: float) -> None:
    """Decode the same tokens with draft tokens, and print how many were accepted."""
    decoder.clear()
    decoder.prefill({0: prompt})
    draft, count = NGrams(decoder.model.encode(text.passage())), len(greedy) - 1
    (found, accepted, proposed), seconds = _timed(lambda: speculate(decoder, [prompt], greedy[:1], count, draft, proposals))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(found[0], greedy[1:], strict=True)))
    equal = "the greedy text" if same == count else f"the greedy text for {same} tokens, then another one (rounding)"
    result(speculation={
        "tokens_per_second": count / seconds, "draft_tokens": proposals, "accepted": int(accepted), "proposed": int(proposed),
        "equal_tokens": same,
    })  # fmt: skip
    share = f"{accepted} of {proposed} draft tokens accepted ({accepted / max(proposed, 1):.0%})"
    print_labeled("", f"{_rate(count, seconds)} with {proposals} draft tokens per step: {equal}; {share}")


def _serve(model: GPT, batch: int, count: int, temperature: float) -> None:
    """Continue several prompts, of which ``batch`` at a time are decoded, and print the first of the texts."""
    sentences = [part for part in text.passage().replace("\n", ". ").split(". ") if len(part.split()) > WORDS]
    prompts = [" ".join(part.split()[:WORDS]) for part in sentences[:PROMPTS]]
    decoder, end = Decoder(model, batch), int(model.encode("\n")[0])
    decoder.step(1), decoder.prefill({0: model.encode(prompts[0])})
    decoder.clear()
    requests = [Request(model.encode(prompt), count) for prompt in prompts]
    history, seconds = _timed(lambda: serve(decoder, requests, end=end, temperature=temperature))
    total = sum(len(request.tokens) for request in requests)
    print_labeled(
        "batch", f"{len(prompts)} prompts in {batch} sequences: {total} tokens in {len(history)} steps, {_rate(total, seconds)}"
    )
    result(batch={
        "prompts": len(prompts), "sequences": batch, "tokens": total, "steps": len(history),
        "tokens_per_second": total / seconds,
    })  # fmt: skip
    for prompt, request in list(zip(prompts, requests, strict=True))[:2]:
        print_labeled("", f"{prompt} ...{model.decode(request.tokens)}")
