"""The block mask: which blocks of keys each block of queries attends to."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..extend import Array, Recorded, read_number
from . import segments
from .block_size import (
    TILE,
    BlockSize,
    blocks_of_lists,
    kinds_of_blocks,
    read_block,
    read_bool,
    rows_of_blocks,
    tile_kinds,
    with_blocks,
    with_exact_kinds,
)
from .blocks import BLOCK
from .evaluate import (
    EMPTY,
    FULL,
    PARTIAL,
    KeyRanges,
    MaskFunction,
    answers_flex_attention,
    block_kinds,
    evaluate_blocks,
    partial_blocks,
)
from .no_array import NoArray

#: What :func:`numbers_of` returns for full and empty blocks, instead of the number of a partial block.
ALL, NONE = -1, -2
#: Numbers the masks.
_next_number = itertools.count().__next__
#: The fill colors of the picture: an empty, a partial and a full block.
_COLORS = ("#88888822", "#f2a65a", "#3a7fb5")


@answers_flex_attention
def block_mask(
    mask_mod: Callable[..., Any],
    sq: int,
    skv: int,
    *,
    heads: int | None = None,
    batch: int | None = None,
    block: int | tuple[int, int] = BLOCK,
    tensors: Mapping[str, Array] | None = None,
) -> BlockMask:
    r"""Find the blocks of queries and keys in which a query attends to a key, for ``attention(..., block_mask=)``.

    .. math:: M_{ij} = f(b, h, i, j), \qquad \text{computed: } \{(I, J) : M_{ij} \text{ for some } i \in I, j \in J\}

    The function is evaluated once for every query and key, a few rows of blocks at a time, so memory is proportional to the
    number of blocks and to Skv. It runs on the engine of ``tensors``; without arrays, on the GPU if there is one. This
    synchronizes; calls that use the mask do not.

    Args:
        mask_mod: ``f(b, h, q_idx, kv_idx, **tensors) -> condition``, with FlexAttention's signature: True where the query
            attends to the key. Functions that cannot be traced are called with integer arrays that broadcast.
        sq, skv: the numbers of queries Sq and of keys Skv.
        heads: Hq if the mask depends on the head. Default None: all heads share one mask, and the function must not use h.
        batch: B if the mask depends on the sequence. Default None: all sequences share one mask, and the function must not use
            b.
        block: the size of the blocks that the mask reports: a number, or (queries, keys); each a multiple or a divisor of 128.
            Calls compute tiles of 128 queries and 128 keys, so the size does not change the result or the time. Default 128.
        tensors: the arrays that the function reads. They are read now; later changes have no effect. Default None.

    Returns:
        The block mask. It keeps no reference to the arrays.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: Dong et al. 2024, "Flex Attention", section 3.2 (BlockMask).

    >>> import numpy as np, cupy_sdpa
    >>> document = np.repeat(np.arange(4), 256)
    >>> def same_document(b, h, q_idx, kv_idx, document):
    ...     return document[q_idx] == document[kv_idx]
    >>> cupy_sdpa.block_mask(same_document, 1024, 1024, tensors={"document": document})
    <BlockMask 1024 x 1024: 16 of 64 blocks, 0 of them partial; sparsity 75.0 %>
    """
    function = MaskFunction(mask_mod, tensors, per_head=heads is not None, per_entry=batch is not None)
    size, lengths = read_block(block), [read_number(name, value, 0) for name, value in (("sq", sq), ("skv", skv))]
    groups = [1 if value is None else read_number(name, value, 1) for name, value in (("heads", heads), ("batch", batch))]
    kinds = np.zeros((*(-(-n // BLOCK) for n in reversed(lengths)), *groups), np.uint8)
    rows: dict[tuple[int, int], KeyRanges] = {}
    for h, b in np.ndindex(*groups):
        kinds[:, :, h, b], rows[h, b] = block_kinds(function, b, h, lengths[0], lengths[1])
    bits = evaluate_blocks(function, partial_blocks(kinds), lengths[0], lengths[1])
    constant = None if tensors else function.recorded
    return BlockMask(lengths[0], lengths[1], kinds, bits, segments_of(rows, kinds), constant, size)


class BlockMask(NoArray):
    """Which blocks of keys each block of queries attends to: empty, partial or full.

    Create it with :func:`block_mask` from a mask function, or with :meth:`from_blocks` or :meth:`from_kv_blocks` from blocks.
    It is immutable and independent of the arrays that you call attention with. The first call on a GPU creates the tables
    there.

    Attributes:
        sq, skv: the numbers of queries and of keys.
        heads, batch: Hq and B, or 1 if all heads or sequences share one mask.
        block: the size of the blocks that :attr:`blocks`, :attr:`sparsity` and ``repr`` report, (queries, keys).

    Assigning to an attribute raises AttributeError.

    >>> import cupy_sdpa
    >>> mask = cupy_sdpa.block_mask(cupy_sdpa.zoo.causal, 512, 512)
    >>> mask
    <BlockMask 512 x 512: 10 of 16 blocks, 4 of them partial; sparsity 37.5 %>
    >>> mask.shape, mask.blocks, mask.partial, mask.sparsity
    ((512, 512, 1, 1), 10, 4, 0.375)
    """

    #: The end of the error message of a call that takes arrays only.
    _not_an_array = (
        "pass it as block_mask=; its method to_dense() returns a bool array (Skv, Sq, heads, batch). To combine conditions, "
        "pass one function with all of them to cupy_sdpa.block_mask"
    )

    def __init__(
        self,
        sq: int,
        skv: int,
        kinds: NDArray[np.uint8],
        bits: NDArray[np.uint8],
        found: tuple[segments.Segments, ...] | None = None,
        function: Recorded | None = None,
        block: BlockSize = TILE,
    ) -> None:
        for array in (kinds, bits):
            array.flags.writeable = False
        *_, heads, batch = kinds.shape
        self.__dict__.update(
            sq=sq, skv=skv, heads=heads, batch=batch, block=block, kinds=kinds, bits=bits, segments=found, function=function,
            number=_next_number(), tables={},
        )  # fmt: skip

    sq: int
    skv: int
    heads: int
    batch: int
    block: BlockSize
    # (key tiles, query tiles, heads, batch), the tiles of 128 queries and 128 keys: 0 empty, 1 partial, 2 full.
    kinds: NDArray[np.uint8]
    # (partial tiles, 2048), their pairs in the order of kinds, query by query, the first key in the highest bit.
    bits: NDArray[np.uint8]
    # The segments of each batch item if all rows are intervals.
    segments: tuple[segments.Segments, ...] | None
    # The mask function as it was, if it reads no arrays and can be traced.
    function: Recorded | None
    # The number of the mask in this process; no two masks have the same.
    number: int
    # What calls store, by device and shapes.
    tables: dict[Any, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} of a BlockMask cannot be changed, because calls store tables for it: create another mask")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} of a BlockMask cannot be deleted")

    @classmethod
    def from_blocks(
        cls,
        blocks: Array,
        sq: int | None = None,
        skv: int | None = None,
        *,
        full: Array | None = None,
        mask_mod: Callable[..., Any] | None = None,
        block: int | tuple[int, int] = BLOCK,
        tensors: Mapping[str, Array] | None = None,
    ) -> BlockMask:
        """Create a block mask from an array of blocks.

        Args:
            blocks: bool ``(key blocks, query blocks)`` or ``(key blocks, query blocks, Hq, B)``, where the last two axes may be
                1: True where queries attend to keys.
            sq, skv: the numbers of queries and keys. Default None: as many as the blocks have.
            full: bool, with the shape of ``blocks``: in these blocks, every query attends to every key. Default None: all
                blocks without ``mask_mod``, no blocks with it.
            mask_mod, tensors: the mask within the remaining blocks, as for :func:`block_mask`. Default None.
            block: the size of the blocks: a number, or (queries, keys); each a multiple or a divisor of 128. Calls compute
                tiles of 128 queries and 128 keys, with a mask where only some of their blocks are listed. Default 128.

        Returns:
            The block mask.

        Raises:
            TypeError: ``blocks`` or ``full`` is not bool, a length is not an integer, or ``mask_mod`` is not a function.
            ValueError: shapes or lengths do not match, ``block`` is not a multiple or a divisor of 128, or ``full`` excludes
                blocks and ``mask_mod`` is None.

        >>> import numpy as np, cupy_sdpa
        >>> mask = cupy_sdpa.BlockMask.from_blocks(np.tri(4, dtype=bool).T)
        >>> mask
        <BlockMask 512 x 512: 10 of 16 blocks, 0 of them partial; sparsity 37.5 %>
        """
        listed = read_bool("blocks", blocks)
        listed = listed[:, :, None, None] if listed.ndim == 2 else listed
        if listed.ndim != 4:
            raise ValueError(f"blocks has shape {blocks.shape}; it must be (key blocks, query blocks) or (..., Hq, B)")
        size = read_block(block)
        lengths = []
        for name, value, number, n in (("sq", sq, listed.shape[1], size.queries), ("skv", skv, listed.shape[0], size.keys)):
            length = number * n if value is None else read_number(name, value, 0)
            if -(-length // n) != number:
                raise ValueError(f"{name} is {length}, which are {-(-length // n)} blocks of {n}; blocks has {number}")
            lengths.append(length)
        if full is None:
            whole = listed if mask_mod is None else np.zeros_like(listed)
        else:
            whole = read_bool("full", full)
            whole = whole[:, :, None, None] if whole.ndim == 2 else whole
            if whole.shape != listed.shape:
                raise ValueError(f"full has shape {full.shape} and blocks {blocks.shape}; they must be equal")
            whole = whole & listed
        only_full = bool((whole == listed).all())
        if mask_mod is None and not only_full:
            raise ValueError("full excludes blocks, and mask_mod is None: pass the mask function of these blocks")
        kinds = tile_kinds(listed, whole, size, *lengths)
        tiles = partial_blocks(kinds)
        bits = np.zeros((len(tiles), BLOCK * BLOCK // 8), np.uint8)
        if mask_mod is not None:
            function = MaskFunction(mask_mod, tensors, per_head=kinds.shape[2] > 1, per_entry=kinds.shape[3] > 1)
            bits = evaluate_blocks(function, tiles, *lengths)
        if min(size) < BLOCK:
            bits = with_blocks(bits, tiles, listed, whole, size, (lengths[0], lengths[1]))
        kinds, bits = with_exact_kinds(kinds, bits, tiles, (lengths[0], lengths[1]))
        found = None
        if only_full:
            rows = {group: rows_of_blocks(listed[:, :, *group], size, *lengths) for group in np.ndindex(*kinds.shape[2:])}
            found = segments_of(rows, kinds)
        return cls(lengths[0], lengths[1], kinds, bits, found, None, size)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Array,
        kv_indices: Array,
        full_kv_num_blocks: Array | None = None,
        full_kv_indices: Array | None = None,
        *,
        sq: int | None = None,
        skv: int | None = None,
        mask_mod: Callable[..., Any] | None = None,
        block: int | tuple[int, int] = BLOCK,
        tensors: Mapping[str, Array] | None = None,
    ) -> BlockMask:
        """Create a block mask from the fields of FlexAttention's ``BlockMask``.

        The axes have FlexAttention's order. Query block i of head h and sequence b attends to the key blocks ``kv_indices[b, h,
        i, :kv_num_blocks[b, h, i]]`` within the mask function, and to the blocks of ``full_kv_indices`` without it.

        Args:
            kv_num_blocks: integers ``(B, Hq, query blocks)``; B and Hq may be 1.
            kv_indices: integers ``(B, Hq, query blocks, key blocks)``.
            full_kv_num_blocks, full_kv_indices: the same for full blocks. Default None: no full blocks.
            sq, skv, mask_mod, block, tensors: as for :meth:`from_blocks`; ``block`` is FlexAttention's ``BLOCK_SIZE``. Without
                a mask function all blocks are full.

        Returns:
            The block mask.

        Raises:
            TypeError, ValueError: as :meth:`from_blocks`; the numbers and indices are not integers or do not match; or only one
                of ``full_kv_num_blocks`` and ``full_kv_indices`` is passed.

        >>> import numpy as np, cupy_sdpa
        >>> cupy_sdpa.BlockMask.from_kv_blocks(np.array([[[1, 1]]]), np.array([[[[0, 0], [1, 0]]]]))
        <BlockMask 256 x 256: 2 of 4 blocks, 0 of them partial; sparsity 50.0 %>
        """
        listed = blocks_of_lists("kv_", kv_num_blocks, kv_indices)
        full = None
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            passed = "indices" if full_kv_num_blocks is None else "num_blocks"
            raise ValueError(f"of full_kv_num_blocks and full_kv_indices only full_kv_{passed} is passed: pass both or neither")
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            full = blocks_of_lists("full_kv_", full_kv_num_blocks, full_kv_indices)
            if full.shape != listed.shape:
                raise ValueError(f"full_kv_indices gives {full.shape} blocks and kv_indices {listed.shape}; they must be equal")
            listed = listed | full
        full = full if mask_mod is not None else None
        return cls.from_blocks(listed, sq, skv, full=full, mask_mod=mask_mod, block=block, tensors=tensors)

    def __dir__(self) -> list[str]:
        """Return the public names."""
        return [name for name in dir(type(self)) if name[0] != "_"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(Skv, Sq, heads, batch)``, the shape of :meth:`to_dense`."""
        return self.skv, self.sq, self.heads, self.batch

    @property
    def blocks(self) -> int:
        """The number of blocks in which a query attends to a key, over all heads and sequences of the mask."""
        return int(np.count_nonzero(self._block_kinds))

    @property
    def partial(self) -> int:
        """The number of partial blocks."""
        return int(np.count_nonzero(self._block_kinds == PARTIAL))

    @property
    def sparsity(self) -> float:
        """The share of blocks in which no query attends to a key, from 0 to 1."""
        return 1 - self.blocks / self._block_kinds.size if self._block_kinds.size else 0.0

    @property
    def _cache_key(self) -> int:
        """What the keys of repeated calls have of the mask."""
        return self.number

    @functools.cached_property
    def _block_kinds(self) -> NDArray[np.uint8]:
        """The kinds of the blocks of size :attr:`block`, ``(key blocks, query blocks, heads, batch)``."""
        found = kinds_of_blocks(self.kinds, self.bits, self.block, self.sq, self.skv)
        found.flags.writeable = False
        return found

    @property
    def nbytes(self) -> int:
        """The bytes of the mask in host memory.

        >>> import cupy_sdpa
        >>> cupy_sdpa.block_mask(cupy_sdpa.zoo.causal, 256, 256).nbytes  # 4 tiles, and 128 x 128 bits of the 2 partial ones
        4100
        """
        return self.kinds.nbytes + self.bits.nbytes

    def __copy__(self) -> BlockMask:
        """Return the mask itself, which is immutable."""
        return self

    def __deepcopy__(self, _: Any) -> BlockMask:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: without the mask function and the tables. The results of calls are the same."""
        return type(self), (self.sq, self.skv, self.kinds, self.bits, self.segments, None, self.block)

    def to_dense(self) -> NDArray[np.bool_]:
        """Return the mask as a bool array ``(Skv, Sq, heads, batch)``, as ``mask=`` takes it: for tests and small masks.

        Returns:
            A numpy array in Fortran order, True where the query attends to the key.

        >>> import numpy as np, cupy_sdpa
        >>> mask = cupy_sdpa.block_mask(cupy_sdpa.zoo.causal, 200, 200)
        >>> bool((mask.to_dense()[:, :, 0, 0] == np.tri(200, dtype=bool).T).all())
        True
        """
        dense = np.repeat(np.repeat(self.kinds == FULL, BLOCK, axis=0), BLOCK, axis=1)
        for (j, i, h, b), bits in zip(partial_blocks(self.kinds), self.bits, strict=True):
            block = np.unpackbits(bits).reshape(BLOCK, BLOCK).astype(bool)
            dense[j * BLOCK : (j + 1) * BLOCK, i * BLOCK : (i + 1) * BLOCK, h, b] = block.T
        return np.asfortranarray(dense[: self.skv, : self.sq])

    def __repr__(self) -> str:
        groups = "".join(f" x {n} {name}" for n, name in ((self.heads, "heads"), (self.batch, "entries")) if n > 1)
        size = "" if self.block == TILE else f" of {self.block.queries} x {self.block.keys}"
        of = f"{self.blocks} of {self._block_kinds.size} blocks{size}, {self.partial} of them partial"
        return f"<BlockMask {self.sq} x {self.skv}{groups}: {of}; sparsity {100 * self.sparsity:.1f} %>"

    def _repr_html_(self) -> str:
        return f"<div><b>{repr(self)[1:-1]}</b>{self.picture()}</div>"

    def picture(self, head: int = 0, entry: int = 0) -> str:
        """Draw the blocks of one head and sequence as SVG: queries from top to bottom, keys from left to right.

        Full blocks are blue, partial blocks orange. Masks of more than 128 blocks are drawn coarser.

        Args:
            head, entry: the indices of the head and the sequence; negative ones count from the end. Default 0.

        Returns:
            The SVG as text.

        Raises:
            TypeError: an index is not an integer.
            IndexError: the mask has no such head or sequence.

        >>> import numpy as np, cupy_sdpa
        >>> cupy_sdpa.BlockMask.from_blocks(np.eye(2, dtype=bool)).picture()[:4]
        '<svg'
        """
        for name, index, count in (("head", head, self.heads), ("entry", entry, self.batch)):
            if not isinstance(index, numbers.Integral):
                raise TypeError(f"{name} is {index!r}; it must be an integer from 0 to {count - 1}")
            if not -count <= index < count:
                raise IndexError(f"{name} is {index}; the mask has {count}, from 0 to {count - 1}")
        kinds = self._block_kinds[:, :, head, entry]
        step = max(1, -(-max(kinds.shape, default=1) // 128))
        cells = []
        for j, i in np.ndindex(*(-(-n // step) for n in kinds.shape)):
            cell = kinds[j * step : (j + 1) * step, i * step : (i + 1) * step]
            kind = FULL if (cell == FULL).all() else PARTIAL if cell.any() else EMPTY
            cells.append(f'<rect x="{j}" y="{i}" width="0.95" height="0.95" fill="{_COLORS[kind]}"/>')
        width, height = (-(-n // step) for n in kinds.shape)
        size = min(320, 16 * max(width, height, 1))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{size}" '
            f'height="{math.ceil(size * height / max(width, 1))}">{"".join(cells)}</svg>'
        )


def numbers_of(mask: BlockMask) -> NDArray[np.int64]:
    """Return the numbers of the partial tiles, with the shape of ``kinds``; :data:`ALL` for full tiles, else :data:`NONE`."""
    found = np.where(mask.kinds == FULL, ALL, NONE).astype(np.int64)
    found.T[mask.kinds.T == PARTIAL] = np.arange(len(mask.bits))
    return found


def segments_of(rows: Mapping[tuple[int, int], KeyRanges], kinds: NDArray[np.uint8]) -> tuple[segments.Segments, ...] | None:
    """Return the segments of each batch item; None if a row is not an interval, or for masks that differ between heads.

    With more segments than two for each block of queries, tiles of cuDNN's kernels would be mostly empty.
    """
    _, query_blocks, heads, batch = kinds.shape
    if heads > 1:
        return None
    found = []
    for b in range(batch):
        entry = segments.find_segments(rows[0, b], 2 * query_blocks + 2)
        if entry is None:
            return None
        found.append(entry)
    return tuple(found)
