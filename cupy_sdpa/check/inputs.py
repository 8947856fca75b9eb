"""The values of a case in the shapes of the oracle: scores are ``(B, Hkv, G, Sq, Skv)``, G query heads per key head.

This module uses no code of the package but the self-test and the reference.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from ..reference import diagonal, visible
from .data import Data, tree_pairs
from .functions import COMPUTED, function_of

Array = np.ndarray[Any, np.dtype[Any]]


class Inputs:
    """The values of a case in the shapes of the oracle.

    Attributes:
        q, dout: ``(B, Hkv, G, Sq, D)`` and ``(B, Hkv, G, Sq, Dv)`` in float64.
        k, v: ``(B, Hkv, 1, Skv, D)`` and ``(B, Hkv, 1, Skv, Dv)`` in float64.
        lengths: the lengths of the queries and of the keys, ``(B,)`` each.
        group: the number of query heads per key head.
        shape, merged_shape: the shape of the scores, and with merged heads, ``(B, Hq, Sq, Skv)``.
        scale: the factor of q k^T.
        keep: the factors of dropout, 0 or 1 / (1 - p), in the shape of the scores; 1.0 without dropout.
    """

    def __init__(self, data: Data) -> None:
        self.data, self.case = data, data.case
        case = data.case
        self.group = case.hq // case.hkv if case.hkv else 1
        self.scale = case.options.get("scale", case.d**-0.5)
        self.lengths = [
            np.full(case.b, maximum) if lengths is None else lengths
            for lengths, maximum in zip(data.lengths, (case.sq, case.skv), strict=True)
        ]
        self.shape = case.b, case.hkv, self.group, case.sq, case.skv
        self.merged_shape = case.b, case.hq, case.sq, case.skv
        self.q, self.dout, self.k, self.v = (self._padded(name) for name in ("q", "dout", "k", "v"))
        p = case.dropout.p if case.dropout else 0.0
        self.keep: Any = 1.0 if data.keep is None else self.expand_scores(data.keep) / (1 - p)

    def tangent(self, name: str) -> Array:
        """The tangent of q, k or v in the shape of the array; 0 if it is not given."""
        if name not in self.case.options["jvp"]:
            return np.zeros_like(getattr(self, name))
        return self._padded(f"t{name}")

    def _padded(self, name: str) -> Array:
        """An array as ``(B, Hkv, G, S, D)`` in float64, 0 beyond the lengths; keys and values have G = 1."""
        array, side = self.data.dense.get(name, self.data.arrays[name]), int(name[-1] in "kv")
        lengths, maximum, starts = self.lengths[side], (self.case.sq, self.case.skv)[side], self.data.starts[side]
        if starts is None:
            transposed = array.transpose(3, 1, 2, 0)
            inside = (np.arange(maximum) < lengths[:, None])[:, None, :, None]
            padded = np.where(inside, transposed, 0).astype(np.float64)
        else:
            padded = np.zeros((len(lengths), array.shape[1], maximum, array.shape[0]))
            for b, (start, length) in enumerate(zip(starts, lengths, strict=False)):
                padded[b, :, :length] = array[:, :, start : start + length].transpose(1, 2, 0)
        b, _, *rest = padded.shape
        return padded.reshape(b, self.case.hkv, 1 if side else self.group, *rest)

    def merge_heads(self, array: Array) -> Array:
        """Reshape ``(B, Hkv, G, Sq, ...)`` to ``(B, Hq, Sq, ...)``."""
        return array.reshape(self.case.b, self.case.hq, *array.shape[3:])

    def expand_scores(self, array: Array) -> Array:
        """Reshape an array that broadcasts to ``(Skv, Sq, Hq, B)`` so that it broadcasts to the scores."""
        transposed = array.transpose(3, 2, 1, 0)
        b, h, *rest = transposed.shape
        groups = (1, 1) if h == 1 and self.case.hq != 1 else (self.case.hkv, self.group)
        return transposed.reshape(b, *groups, *rest)

    def expand_heads(self, array: Array) -> Array:
        """Reshape ``(Hq,)`` so that it broadcasts to the scores."""
        return array.reshape(1, self.case.hkv, self.group, 1, 1)

    def diagonal(self) -> Array:
        """The key index on the diagonal for each batch entry and query, ``(B, 1, 1, Sq, 1)``."""
        i, (lengths_q, lengths_kv) = np.arange(self.case.sq)[:, None], self.lengths
        found = [diagonal(i, n, m, **self._band) for n, m in zip(lengths_q, lengths_kv, strict=True)]
        return np.array(found).reshape(self.case.b, 1, 1, self.case.sq, 1)

    @property
    def _band(self) -> dict[str, Any]:
        """The options of the reference that are a band."""
        return {name: self.case.options[name] for name in ("causal", "window") if name in self.case.options}

    def visible(self) -> Array:
        """Whether each query attends to each key, according to the lengths and the mask options."""
        case, options = self.case, self.case.options
        i, (lengths_q, lengths_kv) = np.arange(case.sq)[:, None], self.lengths
        band = {**self._band, "seq_lens_q": lengths_q, "seq_lens_kv": lengths_kv}
        entries = [visible(i, b, case.sq, case.skv, **band) for b in range(case.b)]
        in_band = np.array(entries, bool).reshape(case.b, 1, 1, case.sq, case.skv)
        found = np.broadcast_to(in_band, self.shape).copy()
        if "mask" in options:
            found &= self.expand_scores(self.data.arrays["mask"])
        if self.data.attends is not None:
            found &= self.expand_scores(self.data.attends)
        if self.data.parents is not None:
            found &= self.tree()
        if "mask_mod" in options:
            found &= self.call_function("mask_mod")
        return found

    def tree(self) -> Array:
        """Whether each key is before the tree of the newest tokens, or visible within it, ``(B, 1, 1, Sq, Skv)``."""
        case, pairs = self.case, tree_pairs(self.data.parents)
        found = np.zeros((case.b, 1, 1, case.sq, case.skv), bool)
        for b, (count, length) in enumerate(zip(*self.lengths, strict=True)):
            start = int(length) - int(count)
            found[b, ..., : max(start, 0)] = True
            tokens = np.arange(max(start, 0), length) - start
            found[b, 0, 0, :, max(start, 0) : length] = pairs[tokens, :, min(b, pairs.shape[2] - 1)].T
        return found

    def call_function(self, option: str, scores: Array | None = None, **tensors: Array) -> Array:
        """Call the score or mask function of the case with whole arrays; ``tensors`` replace captured ones."""
        function = function_of(option, self.case.options[option][0]).call
        parameters = inspect.signature(function).parameters
        captured = {name: _widened(array) for name, array in self.data.tensors.items() if name in parameters}
        first = [] if scores is None else [scores.reshape(self.merged_shape)]
        indices = np.ix_(*(np.arange(n) for n in self.merged_shape))
        with np.errstate(all="ignore"):
            result = function(*first, *indices, **(captured | tensors))
        return np.broadcast_to(np.asarray(result), self.merged_shape).reshape(self.shape)

    def to_call_shape(self, array: Array, side: int, fill_value: float = 0.0) -> Array:
        """A result ``(B, H, S, ...)`` of the queries (side 0) or keys (1) in the call's shape, with a value in the padding."""
        lengths = self.lengths[side]
        inside = (np.arange(array.shape[2]) < lengths[:, None])[:, None, :]
        array = np.where(inside.reshape(*inside.shape, *(1,) * (array.ndim - 3)), array, fill_value)
        if (starts := self.data.starts[side]) is None:
            return array.transpose(3, 1, 2, 0) if array.ndim == 4 else array.transpose(2, 1, 0)
        total = self.data.arrays["k" if side else "q"].shape[2]
        packed = np.full((array.shape[1], total, *array.shape[3:]), fill_value)
        for b, (start, length) in enumerate(zip(starts, lengths, strict=False)):
            packed[:, start : start + length] = array[b, :, :length]
        return packed.transpose(2, 0, 1) if packed.ndim == 3 else packed

    def sum_to_shape(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Sum an array of the shape of the scores to one that broadcasts to ``(Skv, Sq, Hq, B)``."""
        full = array.reshape(self.merged_shape).transpose(3, 2, 1, 0)
        axes = tuple(axis for axis, n in enumerate(shape) if n == 1)
        result: Array = full.sum(axis=axes, keepdims=True)
        return result

    def sum_to_tensor(self, array: Array, axes: str, shape: tuple[int, ...]) -> Array:
        """Sum an array of the shape of the scores to a captured array; an axis of fixed length is read at its last index."""
        full = array.reshape(self.merged_shape)
        if any(axis in COMPUTED for axis in axes):
            position = dict(zip("bhqk", np.ix_(*(np.arange(n) for n in full.shape)), strict=True))
            found = (COMPUTED[axis].index(*position.values()) if axis in COMPUTED else position[axis] for axis in axes)
            sums = np.zeros(shape)
            np.add.at(sums, tuple(np.broadcast_to(index, full.shape) for index in found), full)
            return sums
        letters = [axis for axis in axes if not axis.isdigit()]
        sums = np.einsum(full, list(range(4)), ["bhqk".index(axis) for axis in letters])
        result = np.zeros(shape)
        result[tuple(-1 if axis.isdigit() else slice(None) for axis in axes)] = sums
        return result


def _widened(array: Array) -> Array:
    """Convert floating-point numbers to float64 and integers to int64; boolean arrays are unchanged."""
    if array.dtype.kind == "b":
        return array
    return array.astype(np.int64 if array.dtype.kind in "iu" else np.float64)
