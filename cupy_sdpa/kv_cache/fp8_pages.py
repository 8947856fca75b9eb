"""The FP8 keys and values of a cache: one factor for the keys and one for the values of each layer, means, and conversion."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..extend import cupy_runtime, dtype_name, in_words
from ..fp8 import fp8_kernels, mean_kernels
from ..fp8.array import Fp8Array, along_keys, is_factor, made, one_of
from ..fp8.quantize import SOURCES
from . import cache_kernels

#: A scale that is set by the first tokens leaves room for values larger by this factor. That costs no bits of the mantissa.
HEADROOM = 2.0


class Fp8Pages:
    """Conversion of the tokens of a cache; ``scales`` are its ``k_scale`` and ``v_scale``, and ``dims`` are D and Dv.

    ``known`` are the sides (0 for keys, 1 for values) and layers whose scale is known. The values of a sequence are stored
    without a mean, the mean of its first tokens (:func:`.mean_kernels.write_first_means`). Each page has it, so that sequences
    that share pages share the mean, and a copied page keeps it.
    """

    def __init__(
        self,
        dtype: str,
        dims: tuple[int, int],
        scales: tuple[Any, Any],
        *,
        heads: int,
        pages: int,
        layers: int,
        rotated: bool,
        on_gpu: bool,
    ) -> None:
        if on_gpu and any(dim % 16 for dim in dims):
            raise ValueError(
                f"head_dim is {dims[0]} and head_dim_v {dims[1]}; on the GPU both must be multiples of 16 for an FP8 cache"
            )
        if rotated and dims[0] % 2:
            raise ValueError(
                f"head_dim is {dims[0]} and rotate is True; an odd head_dim is not rotated: pass rotate=False, or pad q and k "
                "with a channel of zeros and pass scale="
            )
        self.dtype, self.rotated, self._on_gpu = dtype, rotated, on_gpu
        self._rotations = fp8_kernels.rotation_of(dims[0]) if rotated else 1, 1
        known = [_scales(name, given, layers) for name, given in zip(("k_scale", "v_scale"), scales, strict=True)]
        every = [(side, layer) for side, layer in np.ndindex(2, layers)]
        self.known = frozenset((side, layer) for side, layer in every if known[side][layer] is not None)
        factors = np.ones((2, layers, 2 * fp8_kernels.FACTOR_STEP), np.float32)
        for side, layer in every:
            scale = known[side][layer] or 1.0
            factors[side, layer, 0], factors[side, layer, fp8_kernels.FACTOR_STEP] = scale, 1 / scale
        #: The dtypes of tokens whose kernel is compiled.
        self._sources: set[str] = set()
        self._factors: Any = cupy_runtime.cupy().asarray(factors) if on_gpu else factors
        #: In C order, as copies have it.
        means = np.zeros((layers, pages, heads, 1, dims[1]), np.float32)
        self._means: Any = cupy_runtime.cupy().asarray(means) if on_gpu else means
        #: The means of layers as arrays of the shape of the pages: they are created once.
        self._views: dict[int, Any] = {}

    @property
    def means(self) -> Any:
        """The means of the pages of all layers, ``(Dv, 1, Hkv, pages, layers)`` in Fortran order, as pages of one token."""
        return self._means.T

    @property
    def nbytes(self) -> int:
        """The bytes of the scales and the means."""
        return int(self._factors.nbytes + self._means.nbytes)

    def _means_of(self, layer: int) -> Any:
        """Return the means of a layer's pages, ``(Dv, Hkv, pages)``."""
        return self._means[layer, :, :, 0].T

    def array(self, pages: Any, side: int, layer: int) -> Fp8Array:
        """Return the keys (side 0) or values (side 1) of a layer."""
        scale, descale = self._pair(side, layer)
        if side == 0:
            return made(pages, descale, scale, self.dtype, rotated=self.rotated)
        if layer not in self._views:
            self._views[layer] = along_keys(self._means_of(layer)[:, :, None], pages.shape)
        return made(pages, descale, scale, self.dtype, mean=self._views[layer], of_pages=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without views, which a copy would fill."""
        return vars(self) | {"_views": {}}

    def _pair(self, side: int, layer: int) -> tuple[Any, Any]:
        """Return the scale and the descale, float32 ``(1,)``."""
        factors = self._factors[side, layer]
        return one_of(factors, 0), one_of(factors, fp8_kernels.FACTOR_STEP)

    def read(self, k: Any, v: Any) -> tuple[Any, Any, str]:
        """Return the arrays of new keys and values, and their dtype; raise for dtypes that the cache does not take."""
        names = [x.dtype if isinstance(x, Fp8Array) else dtype_name(x.dtype) if hasattr(x, "dtype") else "" for x in (k, v)]
        if names[0] != names[1] or isinstance(k, Fp8Array) is not isinstance(v, Fp8Array):
            raise TypeError(f"k is {names[0] or type(k)} and v is {names[1] or type(v)}; both must have one dtype")
        if not isinstance(k, Fp8Array):
            allowed = SOURCES if self._on_gpu else (*SOURCES, "float64")
            if names[0] not in allowed:
                raise TypeError(
                    f"k is {names[0] or type(k)}; a cache of {self.dtype} takes {', '.join(allowed)}, and arrays of "
                    "cupy_sdpa.fp8.quantize: convert with .astype()"
                )
            return k, v, names[0]
        if names[0] != self.dtype:
            raise TypeError(f"k is {names[0]}, but the cache is {self.dtype}; quantize with dtype={self.dtype!r}")
        if k.mean is not None:
            raise ValueError("k has a mean, which only v may have: quantize k without center")
        if k.rotated != self.rotated or v.rotated:
            raise ValueError(
                f"k.rotated is {k.rotated} and v.rotated {v.rotated}, but rotate of the cache is {self.rotated}: quantize the "
                f"keys with rotate={self.rotated}, and the values without"
            )
        return k.data, v.data, names[0]

    def unknown(self, layer: int) -> bool:
        """True if a scale of a layer is not known yet."""
        return not {(0, layer), (1, layer)} <= self.known

    def restore(self, known: frozenset[tuple[int, int]]) -> None:
        """Forget the scales that were not known."""
        self.known = known
        for side, layer in np.ndindex(self._factors.shape[:2]):
            if (side, layer) not in known:
                self._factors[side, layer] = 1

    def check_capture(self, layer: int, source: str) -> None:
        """Check that tokens can be appended while the stream is being captured: scales are known, kernels compiled."""
        if self.unknown(layer):
            raise RuntimeError(
                f"the stream is being captured and layer {layer} has no scale; append tokens before the capture begins, or "
                "create the cache with k_scale= and v_scale="
            )
        if source not in self._sources:
            raise RuntimeError(f"the stream is being captured; append tokens of {source} once before, to compile the kernel")

    def set_scales(self, k: Any, v: Any, layer: int, counts: Any) -> None:
        """Set the unknown scales of a layer from its first tokens, without infinities and NaN; FP8 arrays keep their scales.

        ``counts`` are the tokens of each sequence, int32 ``(B,)`` in the memory of the cache.
        """
        found = [(side, x) for side, x in enumerate((k, v)) if (side, layer) not in self.known]
        conversions = []
        for side, x in found:
            scale, descale = self._pair(side, layer)
            lengths = counts if x.ndim == 4 else None
            if isinstance(x, Fp8Array):
                scale[...], descale[...] = x.scale, x.descale
            else:
                factors = self._factors[side, layer]
                conversions.append(fp8_kernels.Fp8Conversion(x, None, factors, self._rotations[side], lengths))
        if conversions:
            fp8_kernels.write_factors(conversions, self.dtype, HEADROOM)
        self.known |= {(side, layer) for side, _ in found}

    def append(
        self,
        k: Any,
        v: Any,
        pages: tuple[Any, Any],
        layer: int,
        state: cache_kernels.State,
        *,
        advance: bool,
        may_begin: bool,
    ) -> None:
        """Write new tokens to the pages of the keys and the values of a layer; ``may_begin``: a sequence may be new."""
        factors = [self._factors_of(x, side, layer) for side, x in enumerate((k, v))]
        keys, values = (x.data if isinstance(x, Fp8Array) else x for x in (k, v))
        source, is_fp8 = k.dtype if isinstance(k, Fp8Array) else dtype_name(k.dtype), isinstance(v, Fp8Array)
        if may_begin or source not in self._sources:  # which compiles it
            flags = {"advance": advance, "is_fp8": is_fp8}
            places = state.table, state.lengths, state.counts, state.starts
            mean_kernels.write_first_means(values, factors[1].own, factors[1].means, places, **flags)
        cache_kernels.append(keys, values, *pages, state, advance=advance, factors=factors, dtype=self.dtype)
        self._sources.add(source)

    def _factors_of(self, x: Any, side: int, layer: int) -> cache_kernels.CacheFactors:
        """Return how tokens are converted; FP8 ones are rotated already."""
        scale, _ = self._pair(side, layer)
        is_fp8 = isinstance(x, Fp8Array)
        means, own = (self._means_of(layer), x.mean if is_fp8 else None) if side else (None, None)
        return cache_kernels.CacheFactors(
            scale, x.descale if is_fp8 else None, 1 if is_fp8 else self._rotations[side], means, own
        )


def _scales(name: str, given: Any, layers: int) -> list[float | None]:
    """Return the scale of each layer, or None."""
    if given is None:
        return [None] * layers
    found: Sequence[Any] = [given] * layers if isinstance(given, (numbers.Real, np.generic)) else given
    listed = found.ndim == 1 if isinstance(found, np.ndarray) else isinstance(found, Sequence) and not isinstance(found, str)
    if not listed:
        raise TypeError(f"{name} is {in_words(given)}; pass a number, or a number for each of the {layers} layers")
    if len(found) != layers:
        raise ValueError(f"{name} has {len(found)} numbers; the cache has {layers} layers")
    for number in found:
        if not (isinstance(number, (numbers.Real, np.generic)) and is_factor(number)):
            raise ValueError(f"{name} is {given!r}; scales must be above 0, and they and their inverses finite in float32")
    return [float(number) for number in found]
