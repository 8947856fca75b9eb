"""The functions of the zoo against the definitions of the papers, written here as lists of keys."""

import numpy as np
import pytest

from cupy_sdpa import attention, block_mask, zoo

HEIGHT, WIDTH = 7, 8
S = HEIGHT * WIDTH


def shifted(i, length, size, dilation):
    """NATTEN in one dimension: the window around i, moved into the positions with i's remainder."""
    group = list(range(i % dilation, length, dilation))
    first = min(max(group.index(i) - size // 2, 0), len(group) - size)
    return group[first : first + size]


def natten(size, dilation):
    """The keys of an image's query: the keys in its row window and in its column window."""

    def keys(i):
        y, x = divmod(i, WIDTH)
        return [WIDTH * r + c for r in shifted(y, HEIGHT, size, dilation) for c in shifted(x, WIDTH, size, dilation)]

    return keys


def padded_window(reach):
    """Stand-alone self-attention: the pixels of a square around the query's; those outside of the image do not exist."""

    def keys(i):
        y, x = divmod(i, WIDTH)
        offsets = range(-reach, reach + 1)
        pixels = [(y + r, x + c) for r in offsets for c in offsets]
        return [WIDTH * r + c for r, c in pixels if 0 <= r < HEIGHT and 0 <= c < WIDTH]

    return keys


def longformer(width, of_global):
    """Half of the width on each side; global tokens attend to all tokens, and all tokens to them."""

    def keys(i):
        window = [i + n for n in range(-width // 2, width // 2 + 1) if 0 <= i + n < S]
        return range(S) if i < of_global else {*window, *range(of_global)}

    return keys


def fixed(length, summaries):
    """Sparse Transformers: the block of length l, and the last c positions of every block, up to the query."""

    def keys(i):
        first = [j for j in range(i + 1) if j // length == i // length]
        second = [j for j in range(i + 1) if j % length in range(length - summaries, length)]
        return {*first, *second}

    return keys


def strided(length):
    """Sparse Transformers: the last l positions and the query, and every l-th one before it."""
    return lambda i: {*range(max(0, i - length), i + 1), *(j for j in range(i + 1) if (i - j) % length == 0)}


#: The documents of the positions, the images (-1: text), an order, and their mask functions' names for them.
IDS = np.repeat([0, 1, 2, 1], [10, 20, 16, 10])
IMAGE = np.repeat([-1, 0, -1, 1], [9, 21, 7, 19])
ORDER = np.random.default_rng(0).permutation(S)
MASKS = {
    "natten": (zoo.natten(HEIGHT, WIDTH, 3), natten(3, 1), {}),
    "natten of the whole height": (zoo.natten(HEIGHT, WIDTH, 7), natten(7, 1), {}),
    "natten with dilation": (zoo.natten(HEIGHT, WIDTH, 3, 2), natten(3, 2), {}),
    "natten with kernel size 1": (zoo.natten(HEIGHT, WIDTH, 1, 3), natten(1, 3), {}),
    "image window": (zoo.image_window(WIDTH, 2), padded_window(2), {}),
    "nearby": (zoo.nearby(4), longformer(8, 0), {}),
    "with global": (zoo.with_global(3, 5), longformer(6, 5), {}),
    "fixed": (zoo.fixed(8, 2), fixed(8, 2), {}),
    "fixed, uneven": (zoo.fixed(9, 1), fixed(9, 1), {}),
    "strided": (zoo.strided(9), strided(9), {}),
    "causal": (zoo.causal, lambda i: range(i + 1), {}),
    "sliding window": (zoo.sliding_window(9), lambda i: range(max(0, i - 9), i + 1), {}),
    "dilated": (zoo.dilated(12, 3), lambda i: [i - 3 * n for n in range(5) if i >= 3 * n], {}),
    "chunked": (zoo.chunked(10), lambda i: range(i - i % 10, i + 1), {}),
    "streaming": (zoo.streaming(6, 4), lambda i: {*range(min(4, i + 1)), *range(max(0, i - 6), i + 1)}, {}),
    "prefix": (zoo.prefix_lm, lambda i: range(max(11, i + 1)), {"prefix": np.array([11])}),
    "document": (zoo.document, lambda i: [j for j in range(S) if IDS[j] == IDS[i]], {"document_id": IDS[None]}),
    "causal document": (
        zoo.causal_document, lambda i: [j for j in range(i + 1) if IDS[j] == IDS[i]], {"document_id": IDS}
    ),
    "permuted": (
        zoo.permuted, lambda i: np.argsort(ORDER)[: ORDER[i] + 1].tolist(), {"order": ORDER}
    ),
    "valid keys": (zoo.valid_keys, lambda i: np.flatnonzero(IDS > 0).tolist(), {"valid": IDS[None] > 0}),
    "images": (
        zoo.images,
        lambda i: {*range(i + 1), *(j for j in range(S) if IMAGE[i] >= 0 and IMAGE[j] == IMAGE[i])},
        {"image": IMAGE[None]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_the_papers(name):
    """Every pair, in attention and in a block mask; queries with other numbers of keys are as the paper says."""
    mask_mod, keys, tensors = MASKS[name]
    dense = np.zeros((S, S, 1, 1), bool)
    for i in range(S):
        dense[list(keys(i)), i] = True
    mask = block_mask(mask_mod, S, S, heads=1, batch=1, tensors=tensors)
    np.testing.assert_array_equal(mask.to_dense(), dense)
    q, k, v = (np.asfortranarray(np.random.default_rng(n).standard_normal((8, 1, S, 1))) for n in range(3))
    tensors = {key: array.astype(np.int32) if array.dtype.kind == "i" else array for key, array in tensors.items()}
    got = attention(q, k, v, mask_mod=mask_mod, tensors=tensors or None)
    np.testing.assert_allclose(got, attention(q, k, v, mask=dense), atol=1e-12)


def test_every_mask_function_is_compared():
    """A mask function without a definition here fails."""
    compared = {getattr(mask_mod, "__qualname__", "").split(".")[0] for mask_mod, *_ in MASKS.values()}
    of_masks = {"causal", "prefix_lm", "document", "causal_document", "permuted", "valid_keys", "images"}
    made = {"sliding_window", "nearby", "dilated", "chunked", "fixed", "strided", "natten", "image_window"}
    assert compared == of_masks | made | {"with_global", "streaming"}


SCORES = {
    "softcap": (zoo.softcap(3.0), lambda s, i, j: 3 * np.tanh(s / 3)),
    "scalable softmax": (zoo.length_scaled(0.43), lambda s, i, j: s * 0.43 * np.log(i + 1)),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_the_papers(name):
    """One head, against a softmax of the formula; with a causal mask, whose query i has i + 1 keys."""
    function, formula = SCORES[name]
    q, k, v = (np.asfortranarray(np.random.default_rng(n).standard_normal((8, 1, 20, 1))) for n in range(3))
    got = attention(q, k, v, score_mod=function, causal=True)[:, 0, :, 0]
    i, j = np.arange(20)[:, None], np.arange(20)
    scores = np.where(i >= j, formula(q[:, 0, :, 0].T @ k[:, 0, :, 0] / 8**0.5, i, j), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(got, (weights / weights.sum(axis=1, keepdims=True) @ v[:, 0, :, 0].T).T, atol=1e-12)


def test_completion_shows_the_functions_only():
    """dir() and ``import *`` give the functions of the module, and no import."""
    functions = {name for name, x in vars(zoo).items() if name[0] != "_" and getattr(x, "__module__", "") == zoo.__name__}
    assert set(dir(zoo)) == set(zoo.__all__) == functions - {"Function"}
