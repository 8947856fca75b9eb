"""Train a small GPT on the bundled text and continue a prompt: ``python notebooks/generate.py [PROMPT]``.

It runs on a GPU if there is one, else on numpy. The model and the loops are those of ``python -m cupy_sdpa demo --generate``.
"""

import sys
import time

import ml_dtypes
import numpy as np
from here import xp

from cupy_sdpa._cli.generation.decoder import Decoder
from cupy_sdpa._cli.generation.gpt import train
from cupy_sdpa._cli.generation.serve import Request, gumbel, serve
from cupy_sdpa._cli.generation.speculate import NGrams, speculate
from cupy_sdpa._cli.helpers import text

TOKENS, TEMPERATURE = 60, 1.2
PROMPTS = ("Alice was", "Just then", "In another moment", "There was nothing", "Poor Alice", "the White Rabbit")


def main() -> None:
    """Train, and print every kind of output with its tokens per second."""
    dtype = np.float32 if xp is np else ml_dtypes.bfloat16
    model, _ = train(dtype=dtype, xp=xp, progress=lambda step, loss: print(f"step {step}: loss {loss:.2f}"))
    given = " ".join(sys.argv[1:]) or "Alice was beginning to get very tired"
    prompt = model.encode(given)

    # Prefill appends the prompt to the cache. On a GPU a step of decoding is a CUDA graph, which is captured here.
    decoder = Decoder(model, batch=1)
    decoder.step(1), decoder.step(5)
    first = decoder.prefill({0: prompt})[0]
    started = time.perf_counter()
    greedy = decoder.decode([first], TOKENS)
    show("greedy", given + model.decode([first, *greedy[:, 0]]), TOKENS, started)

    # The same with noise, which makes the choice random.
    decoder.clear()
    decoder.prefill({0: prompt})
    noise = gumbel(TEMPERATURE, seed=0, request=0, count=TOKENS, words=len(model.vocabulary))[:, :, None]
    started = time.perf_counter()
    sampled = decoder.decode([first], TOKENS, noise)
    show(f"temperature {TEMPERATURE}", given + model.decode([first, *sampled[:, 0]]), TOKENS, started)

    # The greedy text again: a step checks four draft tokens.
    decoder.clear()
    decoder.prefill({0: prompt})
    draft = NGrams(model.encode(text.passage()))
    started = time.perf_counter()
    found, accepted, proposed = speculate(decoder, [prompt], [first], TOKENS, draft, proposals=4)
    what = f"{accepted} of {proposed} draft tokens accepted, text equal: {found[0] == greedy[:, 0].tolist()}"
    show("speculative decoding", what, TOKENS, started)

    # Six prompts in three sequences: a finished sequence is released, and the next prompt joins.
    batch = Decoder(model, batch=3)
    requests = [Request(model.encode(prompt), count=30) for prompt in PROMPTS]
    started = time.perf_counter()
    history = serve(batch, requests, end=int(model.encode("\n")[0]))
    total = sum(len(request.tokens) for request in requests)
    show("batch", f"{len(PROMPTS)} prompts in {len(history)} steps", total, started)
    for start, request in zip(PROMPTS, requests, strict=True):
        print(f"  {start}{model.decode(request.tokens).rstrip()}")


def show(label: str, what: str, tokens: int, started: float) -> None:
    """Print a result and its tokens per second."""
    print(f"{label} ({tokens / (time.perf_counter() - started):.0f} tokens/s): {what}")


if __name__ == "__main__":
    main()
