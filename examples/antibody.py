"""A pretrained language model of antibodies on numpy and CuPy arrays: it fills in residues of sequences of different lengths.

The model is Sapiens, a RoBERTa with 4 layers and 8 heads (Prihoda et al. 2022, "BioPhi", mAbs 14(1)). Only the weights of its
package are read; its code needs PyTorch and fairseq, and is not imported::

    pip install --no-deps sapiens==1.0.1

Features are columns ``(F, S B)`` in Fortran order, which is attention's ``(D, H, S, B)`` without a copy.

Shapes: F features, S positions, B sequences.
"""

from __future__ import annotations

import collections
import importlib.util
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from cupy_sdpa import attention

Weights = Mapping[str, Any]
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
BEGIN, PADDING, END, MASK = 0, 1, 2, 24
HEADS = 8
_LAYERS = "decoder.sentence_encoder."


def read_weights(chain: str = "vh") -> dict[str, Any]:
    """Return the float32 weights of heavy (``"vh"``) or light (``"vl"``) chains, by name.

    Raises:
        FileNotFoundError: the package with the weights is not installed.
    """
    spec = importlib.util.find_spec("sapiens")
    path = (
        Path(spec.submodule_search_locations[0], "models", "v1", f"checkpoint_{chain}.pt")
        if spec and spec.submodule_search_locations
        else None
    )
    if path is None or not path.is_file():
        raise FileNotFoundError("the weights of Sapiens are not installed: pip install --no-deps sapiens==1.0.1")
    with path.open("rb") as file:
        return read_checkpoint(file)


class Storage(NamedTuple):
    """The numbers of a tensor: the key and the type of its storage."""

    key: str
    kind: str


class Stored(NamedTuple):
    """A tensor of a checkpoint: its storage, offset, shape and strides, in elements; and what is not used."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    hooks: Any


class Ignored:
    """An object of a checkpoint that is not read, such as the arguments of the training."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Checkpoint(pickle.Unpickler):
    """Reads pickles of PyTorch's older format without PyTorch. It creates no object of any other module."""

    kinds: dict[str, str]

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class."""
        known: dict[str, Any] = {"OrderedDict": collections.OrderedDict, "_rebuild_tensor_v2": Stored}
        return known.get(name) or type(name, (Ignored,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Storage:
        """Note the type of a storage."""
        self.kinds[pid[2]] = pid[1].__name__
        return Storage(pid[2], pid[1].__name__)


def read_checkpoint(file: BinaryIO) -> dict[str, Any]:
    """Return the float32 tensors of ``["model"]`` in a file of PyTorch's format before 1.6, by name."""
    dtypes = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "LongStorage": "<i8"}
    kinds: dict[str, str] = {}

    def load() -> Any:
        reader = Checkpoint(file)
        reader.kinds = kinds
        return reader.load()

    *_, saved, keys = (load() for _ in range(5))  # a magic number, a version, the system, the objects, the keys of storages
    data = {}
    for key in keys:
        (count,) = np.frombuffer(file.read(8), "<i8")
        dtype = np.dtype(dtypes[kinds[key]])
        data[key] = np.frombuffer(file.read(int(count) * dtype.itemsize), dtype)
    tensors = {name: x for name, x in saved["model"].items() if isinstance(x, Stored)}
    return {
        name: np.lib.stride_tricks.as_strided(data[x.storage.key][x.offset :], x.shape, [4 * n for n in x.strides])
        for name, x in tensors.items()
    }


def tokens_of(sequences: Sequence[str]) -> tuple[Any, Any]:
    """Return the tokens ``(S, B)`` of sequences, padded at the end, and their lengths ``(B,)``; ``*`` is a masked residue."""
    lengths = np.array([len(x) + 2 for x in sequences], np.int32)
    tokens = np.full((lengths.max(), len(sequences)), PADDING)
    for b, sequence in enumerate(sequences):
        numbers = [MASK if x == "*" else RESIDUES.index(x) + 4 for x in sequence]
        tokens[: lengths[b], b] = [BEGIN, *numbers, END]
    return tokens, lengths


def gelu(x: Any) -> Any:
    """Return ``x Φ(x)``, with the error function of Abramowitz and Stegun 7.1.26, whose error is below 2e-7."""
    z = abs(x) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * np.exp(-z * z)
    return x * np.where(x < 0, tail / 2, 1 - tail / 2)


def log_probabilities(weights: Weights, tokens: Any, lengths: Any, attend: Callable[..., Any] = attention, xp: Any = np) -> Any:
    """Return the logarithms of the probabilities of each token ``(25, S, B)``, in the dtype of the weights.

    Args:
        weights: from :func:`read_weights`, as arrays of ``xp``.
        tokens, lengths: from :func:`tokens_of`, as arrays of ``xp``; positions beyond the lengths have any values.
        attend: a function of q, k and v ``(D, H, S, B)`` with ``seq_lens_q`` and ``seq_lens_kv``. Default
            :func:`cupy_sdpa.attention`. cuDNN computes in 16 bits: pass
            ``functools.partial(attention, compute_dtype="float16")`` with CuPy arrays.
        xp: numpy or cupy.
    """
    s, b = tokens.shape
    w = {name.removeprefix(_LAYERS): x for name, x in weights.items()}

    def linear(x: Any, name: str) -> Any:
        return (x.T @ w[f"{name}.weight"].T + w[f"{name}.bias"]).T  # Fortran order

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(axis=0)
        return x / np.sqrt((x * x).mean(axis=0) + 1e-5) * w[f"{name}.weight"][:, None] + w[f"{name}.bias"][:, None]

    x = w["embed_tokens.weight"][tokens.T] + w["embed_positions.weight"][PADDING + 1 :][:s]  # (B, S, F)
    x = norm(x.reshape(b * s, -1).T, "emb_layer_norm")
    for layer in range(sum(name.endswith("fc1.weight") for name in w)):
        at = f"layers.{layer}."
        q, k, v = (linear(x, f"{at}self_attn.{name}_proj").reshape((-1, HEADS, s, b), order="F") for name in "qkv")
        out = attend(q, k, v, seq_lens_q=lengths, seq_lens_kv=lengths).reshape((-1, s * b), order="F")
        x = norm(x + linear(out, f"{at}self_attn.out_proj"), f"{at}self_attn_layer_norm")
        x = norm(x + linear(gelu(linear(x, f"{at}fc1")), f"{at}fc2"), f"{at}final_layer_norm")
    x = norm(gelu(linear(x, "decoder.lm_head.dense")), "decoder.lm_head.layer_norm")
    x = linear(x, "decoder.lm_head").reshape((-1, s, b), order="F")
    x = x - x.max(axis=0)
    return x - xp.log(xp.exp(x).sum(axis=0))


def infill(weights: Weights, sequences: Sequence[str], attend: Callable[..., Any] = attention, xp: Any = np) -> list[str]:
    """Replace each ``*`` of the sequences by its most likely residue; arguments are as for :func:`log_probabilities`."""
    tokens, lengths = tokens_of(sequences)
    found = log_probabilities(weights, xp.asarray(tokens), xp.asarray(lengths), attend, xp)[4:MASK].argmax(axis=0)  # (S, B)
    best = found if xp is np else found.get()
    return [
        "".join(RESIDUES[best[i + 1, b]] if x == "*" else x for i, x in enumerate(sequence))
        for b, sequence in enumerate(sequences)
    ]
