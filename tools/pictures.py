"""Draw what each option lets a query see: ``python tools/pictures.py`` writes ``docs/_static/options/*.svg``, pictures of block
masks to ``docs/_static/sparsity``, and the memory of an array to ``docs/_static/memory.svg``.

The pictures are of the engine's own weights, on numpy arrays: with an identity for the values the output is the weights. A row
is a query, a column a key; white is not seen, the darker the more weight.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import cupy_sdpa

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "_static" / "options"
QUERIES, KEYS, CELL = 12, 12, 8
#: Keys that are not seen: a translucent grey, which is visible on light and dark pages.
EMPTY = 'fill="#888888" fill-opacity="0.13"'
#: The picture of the options' page: names of pictures and their captions.
OVERVIEW = {
    "causal": "causal", "window_causal": "window", "packed_causal": "packed", "mask_mod": "mask function", "alibi": "ALiBi",
    "score_mod": "score function",
}  # fmt: skip
STARTS = np.array([0, 5, 12], np.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS, "max_seqlen_q": 7, "max_seqlen_kv": 7}


def spots(queries: int, keys: int) -> np.ndarray:
    """Return a mask of no particular shape."""
    return np.asfortranarray(np.random.default_rng(2).random((keys, queries, 1, 1)) < 0.6)


#: Name, numbers of queries and keys, and the options.
PICTURES = {
    "none": (QUERIES, KEYS, {}),
    "causal": (QUERIES, KEYS, {"causal": True}),
    "causal_bottom_right": (QUERIES - 4, KEYS, {"causal": "bottom_right"}),
    "window": (QUERIES, KEYS, {"window": (3, 1)}),
    "window_causal": (QUERIES, KEYS, {"window": (3, 0), "causal": True}),
    "window_bottom_right": (QUERIES - 4, KEYS, {"window": (3, 1, "bottom_right")}),
    "seq_lens": (QUERIES, KEYS, {"seq_lens_q": np.array([9], np.int32), "seq_lens_kv": np.array([7], np.int32)}),
    "packed": (QUERIES, KEYS, PACKED),
    "packed_causal": (QUERIES, KEYS, {**PACKED, "causal": True}),
    "mask": (QUERIES, KEYS, {"mask": spots(QUERIES, KEYS)}),
    "alibi": (QUERIES, KEYS, {"alibi_slopes": np.array([0.3], np.float32)}),
    "bias": (QUERIES, KEYS, {"bias": np.asfortranarray(np.linspace(0, 3, KEYS, dtype=np.float32)[:, None, None, None])}),
    "score_mod": (QUERIES, KEYS, {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 2 * np.cos(0.9 * (q_idx - kv_idx))}),
    "mask_mod": (QUERIES, KEYS, {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)}),
    "dropout": (QUERIES, KEYS, {"dropout_p": 0.4, "dropout_mask": spots(QUERIES, KEYS)}),
}  # fmt: skip


def weights(queries: int, keys: int, options: dict[str, object]) -> np.ndarray:
    """Return what every query looks at, (queries, keys), where all scores are 0 but for the options."""
    shape = () if "cu_seqlens_q" in options else (1,)
    q, k = (np.zeros((8, 1, length, *shape), np.float32, order="F") for length in (queries, keys))
    v = np.asfortranarray(np.eye(keys, dtype=np.float32).reshape(keys, 1, keys, *shape))
    return cupy_sdpa.attention(q, k, v, **options).reshape(keys, queries).T


def svg(picture: np.ndarray) -> str:
    """Squares, a row a query."""
    rows, columns = picture.shape
    shade = picture / (picture.max(axis=1, keepdims=True) + 1e-30)  # of each query: how many keys share is of no interest
    width, height = columns * CELL, rows * CELL
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">']
    for (i, j), value in np.ndenumerate(shade):
        paint = f'fill="#1b6ca8" fill-opacity="{0.25 + 0.75 * value:.2f}"' if value > 0 else EMPTY
        parts.append(f'<rect x="{j * CELL}" y="{i * CELL}" width="{CELL - 1}" height="{CELL - 1}" {paint}/>')
    return "\n".join([*parts, "</svg>\n"])


def drawn() -> dict[str, str]:
    """Return the pictures by their names."""
    return {name: svg(weights(queries, keys, options)) for name, (queries, keys, options) in PICTURES.items()}


def overview(pictures: dict[str, str]) -> str:
    """Some of the pictures in a row, with captions in a grey that is readable on light and dark pages."""
    size, gap = KEYS * CELL, 26
    width, height = len(OVERVIEW) * (size + gap) - gap, size + 22
    style = 'font-family="sans-serif" font-size="13" fill="#777777" text-anchor="middle"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">']
    for number, (name, caption) in enumerate(OVERVIEW.items()):
        squares = "\n".join(pictures[name].splitlines()[1:-1])
        x = number * (size + gap)
        parts.append(
            f'<g transform="translate({x})">\n{squares}\n<text x="{size // 2}" y="{size + 16}" {style}>{caption}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


#: The folder and the length of the pictures of block masks, and the masks.
BLOCKS_FOLDER, LENGTH = FOLDER.parent / "sparsity", 2048
DOCUMENTS = np.searchsorted([300, 512, 900, 1500], np.arange(LENGTH), side="right")
LISTED = np.random.default_rng(1).random((16, 16)) < 1 / 8
BLOCK_MASKS = {
    "documents": lambda b, h, q_idx, kv_idx: DOCUMENTS[q_idx] == DOCUMENTS[kv_idx],
    "causal_documents": lambda b, h, q_idx, kv_idx: (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (q_idx >= kv_idx),
    "prefix": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < 450),
    "dilated": cupy_sdpa.zoo.dilated(512, 2),
    "neighbourhood": cupy_sdpa.zoo.image_window(64, 4),
    "random": lambda b, h, q_idx, kv_idx: LISTED[q_idx // 128, kv_idx // 128] | (q_idx // 128 == kv_idx // 128),
}


def drawn_masks() -> dict[str, str]:
    """Return the pictures of block masks by their names."""
    masks = {name: cupy_sdpa.block_mask(function, LENGTH, LENGTH) for name, function in BLOCK_MASKS.items()}
    return {name: f"{mask.picture()}\n" for name, mask in masks.items()}


#: The array in the picture of the memory, (head_dim, heads, seq, batch); the side of an element, and a colour for each head.
DHSB, SIDE, COLOURS = (4, 2, 2, 2), 18, ("#1b6ca8", "#d9822b")


def memory() -> str:
    """Draw an array's elements in the order of their addresses, with each head's first index in both orders of axes."""
    dim, heads, seq, _ = DHSB
    x = np.zeros(DHSB, np.float16, order="F")
    c_order = x.T  # (batch, seq, heads, head_dim)
    left, gap, top, bottom = 4, 6, 104, 140
    text = 'font-family="sans-serif" font-size="13" fill="#777777"'
    index = 'font-family="monospace" font-size="11.5" fill="#777777"'
    captions = {
        74: "(D, H, S, B) in Fortran order: the first index of x[d, h, s, b] changes fastest",
        182: "(B, S, H, D) in C order: the last index of y[b, s, h, d] changes fastest; y = x.T",
    }
    parts = [f'<text x="{left}" y="{y}" {text}>{caption}</text>' for y, caption in captions.items()]
    for address in range(x.size):
        d, h, s, b = (int(i) for i in np.unravel_index(address, DHSB, order="F"))
        assert d * x.strides[0] + h * x.strides[1] + s * x.strides[2] + b * x.strides[3] == address * x.itemsize
        assert np.unravel_index(address, c_order.shape) == (b, s, h, d)
        at = left + address * SIDE + gap * (address // dim + address // (dim * heads) + 2 * (address // (dim * heads * seq)))
        paint = f'fill="{COLOURS[h]}" fill-opacity="{0.9 - 0.2 * d:.1f}"'
        parts.append(f'<rect x="{at}" y="{top}" width="{SIDE - 1}" height="{bottom - top}" {paint}/>')
        labels = {16: f"sequence {b}"} if d == h == s == 0 else {}
        labels |= {32: f"token {s}"} if d == h == 0 else {}
        labels |= {48: f"head {h}"} if d == 0 else {}
        parts += [f'<text x="{at}" y="{y}" {text}>{label}</text>' for y, label in labels.items()]
        if d == 0:
            parts.append(f'<text x="{at}" y="{top - 7}" {index}>[0,{h},{s},{b}]</text>')
            parts.append(f'<text x="{at}" y="{bottom + 16}" {index}>[{b},{s},{h},0]</text>')
    width, height = at + SIDE + left, 192
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, *parts, "</svg>\n"])


if __name__ == "__main__":
    for folder, pictures in ((FOLDER, drawn()), (BLOCKS_FOLDER, drawn_masks())):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pictures.items():
            (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    (FOLDER.parent / "overview.svg").write_text(overview(drawn()), encoding="utf-8")
    (FOLDER.parent / "memory.svg").write_text(memory(), encoding="utf-8")
