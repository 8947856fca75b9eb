"""A small GPT learns the opening of Alice in Wonderland, word by word, and continues it with a key/value cache.

    python -m examples.generation [--prompt TEXT] [--tokens N] [--temperature T] [--batch B] [--draft N] [--branches N]
        [--steps N] [--cpu]

It prints greedy and sampled text, a batch whose sequences finish and join, speculative decoding, and tokens per second. On a
GPU attention runs in bfloat16 through cuDNN, and every step is a replayed CUDA graph. The model is in gpt.py, decoding with the
cache in decoder.py, joining sequences in serve.py, and draft tokens in speculate.py.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .decoder import PAGE, Decoder
from .gpt import GPT, Sizes, Training, one_blas_thread, read_text, train, untrained
from .serve import Request, gumbel, serve
from .speculate import NGrams, branches, speculate

#: The number of prompts in the batch, and the words of each: the first words of a sentence.
PROMPTS, WORDS = 10, 6


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(prog="python -m examples.generation", description=__doc__.split("\n")[0])
    made.add_argument(
        "--prompt", default="Alice was beginning to get very tired", help="text to continue, in words of the text"
    )
    made.add_argument("--tokens", type=int, default=60, help="maximum of new tokens (default 60)")
    made.add_argument("--temperature", type=float, default=1.2, help="of the sampled text (default 1.2)")
    made.add_argument("--batch", type=int, default=4, help="sequences at a time in the batch (default 4)")
    made.add_argument("--draft", type=int, default=4, help="draft tokens in a branch of the tree (default 4)")
    made.add_argument("--branches", type=int, default=2, help="branches of the tree of draft tokens (default 2)")
    made.add_argument("--steps", type=int, default=250, help="training steps (default 250)")
    made.add_argument("--cpu", action="store_true", help="numpy instead of CuPy")
    return made


def check(arguments: argparse.Namespace) -> Any:
    """Return the tokens of the prompt.

    Raises:
        ValueError: an option is invalid.
    """
    for name in ("tokens", "batch", "draft", "branches", "steps"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)} is not positive")
    if not 0 <= arguments.temperature < np.inf:
        raise ValueError(f"--temperature {arguments.temperature} is negative or not finite")
    if arguments.draft * arguments.branches > PAGE:
        raise ValueError(f"--draft {arguments.draft} times --branches {arguments.branches} is more than {PAGE}")
    prompt = untrained().encode(arguments.prompt)
    if not len(prompt):
        raise ValueError("--prompt has no words")
    if len(prompt) + arguments.tokens > Sizes().context:
        length = f"--prompt and --tokens have {len(prompt)} + {arguments.tokens} tokens"
        raise ValueError(f"{length}; the model is trained on sequences of {Sizes().context}")
    return prompt


def engine(cpu: bool) -> Any:
    """CuPy or numpy.

    Raises:
        ValueError: CuPy or a GPU is missing.
    """
    if cpu:
        return np
    try:
        cupy = importlib.import_module("cupy")
        cupy.zeros(1)
    except Exception as error:
        raise ValueError(f"{str(error).splitlines()[0]} (--cpu uses numpy)") from None
    return cupy


@one_blas_thread()
def main(arguments: argparse.Namespace, prompt: Any, xp: Any) -> None:
    """Train, generate, and print."""
    count = arguments.tokens
    model = _train(arguments.steps, np.dtype(np.float32 if xp is np else ml_dtypes.bfloat16), xp)
    decoder, noise = Decoder(model, 1), gumbel(arguments.temperature, 0, 0, count, len(model.vocabulary))
    for parents in ([-1], *(branches(width, arguments.draft) for width in (1, arguments.branches))):
        decoder.tree_step(parents)  # captured in a CUDA graph on a GPU
    decoder.prefill({0: prompt})  # not timed: on a GPU the first call builds plans
    greedy, prefill, decoding = _generate(decoder, prompt, count)
    sampled, *_ = _generate(decoder, prompt, count, noise)
    _print("prompt", arguments.prompt)
    _print("greedy", model.decode(greedy))
    _print("sampled", f"(temperature {arguments.temperature:g}) {model.decode(sampled)}")
    _print("prefill", f"{_rate(len(prompt), prefill)} (a prompt of {len(prompt)})")
    how = "token by token" if xp is np else "each step is a replayed CUDA graph"
    _print("decoding", f"{_rate(count - 1, decoding)}, {how}")
    for width in sorted({1, arguments.branches}):
        _speculate(decoder, prompt, greedy, arguments.draft, width)
    _serve(model, arguments.batch, count, arguments.temperature)


def _print(label: str, text: str) -> None:
    print(f"{label:<10}{text}".rstrip())


def _train(steps: int, dtype: np.dtype[Any], xp: Any) -> GPT:
    """Train the model, and print the losses."""
    started, training = time.perf_counter(), Training(steps=steps)
    print(f"training a GPT for {steps} steps on {xp.__name__}", flush=True)

    def progress(step: int, loss: float) -> None:
        print(f"  step {step}: loss {loss:.2f}", flush=True)

    model, losses = train(training=training, dtype=dtype, xp=xp, progress=progress)
    seconds, sizes = time.perf_counter() - started, model.sizes
    weights = sum(int(weight.size) for weight in model.weights.values())
    heads = f"{sizes.layers} layers, {sizes.heads} heads of head dim {sizes.head_dim}"
    _print("model", f"{heads}, {len(model.vocabulary)} words, {weights} weights; attention in {dtype}")
    tokens = steps * training.batch * sizes.context
    _print("training", f"{seconds:.1f} s, {_rate(tokens, seconds)}; mean loss of the last steps {np.mean(losses[-10:]):.2f}")
    return model


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result and the seconds of a call that returns numbers on the host."""
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


def _speculate(decoder: Decoder, prompt: Any, greedy: list[int], proposals: int, width: int) -> None:
    """Decode the same tokens with draft tokens, and print how many were accepted."""
    decoder.clear()
    decoder.prefill({0: prompt})
    draft, count = NGrams(decoder.model.encode(read_text())), len(greedy) - 1
    done, seconds = _timed(lambda: speculate(decoder, [prompt], greedy[:1], count, draft, proposals, width))
    pairs = zip(done.tokens[0], greedy[1:], strict=True)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    equal = "the greedy text" if same == count else f"the greedy text for {same} tokens, then another one (rounding)"
    drafts = f"{width} branch{'es' * (width > 1)} of {proposals} draft tokens"
    share = f"{done.accepted / max(done.steps, 1):.2f} of {proposals * width} accepted per step"
    _print("", f"{_rate(count, seconds)} with {drafts}: {equal}; {share}")


def _serve(model: GPT, batch: int, count: int, temperature: float) -> None:
    """Continue several prompts, of which ``batch`` at a time are decoded, and print the first of the texts."""
    sentences = [part for part in read_text().replace("\n", ". ").split(". ") if len(part.split()) > WORDS]
    prompts = [" ".join(part.split()[:WORDS]) for part in sentences[:PROMPTS]]
    decoder, end = Decoder(model, batch), int(model.encode("\n")[0])
    decoder.step(1), decoder.prefill({0: model.encode(prompts[0])})
    decoder.clear()
    requests = [Request(model.encode(prompt), count) for prompt in prompts]
    history, seconds = _timed(lambda: serve(decoder, requests, end=end, temperature=temperature))
    total = sum(len(request.tokens) for request in requests)
    _print("batch", f"{PROMPTS} prompts in {batch} sequences: {total} tokens in {len(history)} steps, {_rate(total, seconds)}")
    for prompt, request in list(zip(prompts, requests, strict=True))[:2]:
        _print("", f"{prompt} ...{model.decode(request.tokens)}")


if __name__ == "__main__":
    options = parser()
    given = options.parse_args()
    try:
        asked, module = check(given), engine(given.cpu)
    except ValueError as error:
        options.error(str(error))
    main(given, asked, module)
