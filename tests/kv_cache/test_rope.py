"""Rotary position embeddings: of queries, and of keys while they are appended to a cache."""

import pickle
from decimal import Decimal, localcontext

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa import KVCache, Rope, apply_rope

ON_A_GPU = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


def turned(x, rope, positions):
    """The rotation in float64 by complex numbers; x is ``(D, H, n)`` and the positions ``(n,)``."""
    x, n = x.astype(np.float64), rope.dim
    first, second = (slice(0, n, 2), slice(1, n, 2)) if rope.interleaved else (slice(n // 2), slice(n // 2, n))
    angles = np.multiply.outer(np.array(rope.frequencies), np.asarray(positions, np.float64))
    found = rope.factor * (x[first] + 1j * x[second]) * np.exp(1j * angles)[:, None]
    out = x.copy()
    out[first], out[second] = found.real, found.imag
    return out


def close(engine, found, wanted, dtype):
    """Equal up to the rounding of the dtype, which may add to one of float32; in float64, of angles up to 2^22."""
    error = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 4e-7, "float64": 2e-9}[np.dtype(dtype).name]
    x = engine.get(found).astype(np.float64)
    np.testing.assert_allclose(x, wanted, rtol=error, atol=error * max(1, np.abs(wanted).max(initial=0)))


def random_rope(rng, dim):
    """A rotation of at most ``dim`` channels."""
    n = 2 * int(rng.integers(1, dim // 2 + 1))
    frequencies = rng.choice([rng.uniform(-2, 2, n // 2), 10_000.0 ** -np.linspace(0, 1, n // 2)])
    factor = float(rng.choice([1, 1.3]))
    return Rope(n, frequencies=frequencies, interleaved=bool(rng.integers(2)), factor=factor)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("seed", numbers(8, quick=2))
def test_a_position_of_every_token(seed, dtype, engine):
    """Positions of any strides, of one sequence for all or of each, dense or packed, of queries and of appended keys."""
    rng, tokens, batch, size = np.random.default_rng(seed), 7, 3, 4
    rope, counts, packed = random_rope(rng, 12), [7, 2, 5], bool(rng.integers(2))
    shape = (13, 2, sum(counts)) if packed else (13, 2, tokens, batch)
    x = rng.standard_normal(shape).astype(dtype)
    positions = rng.integers(-9, 2000, (sum(counts),) if packed else (tokens, batch)).astype(np.int32)
    shared = not packed and rng.integers(2)
    positions = positions[:, 0] if shared else positions
    listed = engine.put(np.repeat(positions, 2, axis=0))[::2]
    given = engine.put(np.asfortranarray(x))
    rotated = engine.get(apply_rope(given, rope, positions=listed))
    of_batch = positions[:, None] if shared else positions
    if packed:
        wanted = turned(x, rope, positions)
    else:
        wanted = np.stack([turned(x[..., b], rope, of_batch[:, 0 if shared else b]) for b in range(batch)], axis=-1)
    close(engine, rotated, wanted, dtype)
    cache = KVCache(13, 2, pages=12, batch=batch, page_size=size, dtype=dtype, layers=2, numpy=not engine.on_cudnn)
    for layer in range(2):
        cache.append(given, given, layer, seq_lens_q=counts, rope=rope, positions=listed)
        table, keys, starts = engine.get(cache.table), engine.get(cache.keys(layer)), np.cumsum([0, *counts])
        for b, count in enumerate(counts):
            stored = keys[..., table[:, b]].transpose(0, 1, 3, 2).reshape(13, 2, -1)[..., :count]
            own = wanted[..., starts[b] : starts[b + 1]] if packed else wanted[:, :, :count, b]
            close(engine, engine.put(stored), own, dtype)


def test_positions_in_a_layout(engine):
    """With arrays in C order positions are (B, S); also as a list, and with what a view passes for a cache."""
    q, rope = engine.normal(0, 8, 2, 5, 3), Rope(8)
    positions = np.random.default_rng(0).integers(0, 99, (5, 3)).astype(np.int32)
    wanted = engine.get(apply_rope(q, rope, positions=engine.put(positions)))
    found = apply_rope(q.transpose(3, 2, 1, 0), rope, positions=engine.put(np.ascontiguousarray(positions.T)), layout="bshd")
    np.testing.assert_array_equal(engine.get(found).transpose(3, 2, 1, 0), wanted)
    cache = KVCache(8, 2, pages=6, batch=3, page_size=4, dtype=str(engine.dtype), layout="bshd", numpy=not engine.on_cudnn)
    k = q.transpose(3, 2, 1, 0)
    listed = engine.put(np.ascontiguousarray(positions.T))
    cache.append(k, k, seq_lens_q=[5, 2, 0], rope=rope, positions=listed)
    found = apply_rope(k, rope, positions=listed, **cache.view())
    np.testing.assert_array_equal(engine.get(found).transpose(3, 2, 1, 0), wanted)
    stored = engine.get(cache.keys())[int(engine.get(cache.table)[0, 0])]
    np.testing.assert_array_equal(stored.transpose(2, 1, 0), wanted[:, :, :4, 0])
    if not engine.on_cudnn:
        np.testing.assert_array_equal(apply_rope(q, rope, positions=positions.tolist()), wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("seed", numbers(8, quick=1))
def test_random_rotations(seed, dtype, engine):
    """Dense and packed arrays, positions from a start or up to an end, in both forms and any layout."""
    import ml_dtypes

    rng, dtype = np.random.default_rng(seed), np.dtype(getattr(ml_dtypes, dtype, dtype))
    for _ in range(6):
        dim = 2 * int(rng.integers(1, 70)) + int(rng.integers(2))
        heads, tokens, batch = map(int, rng.integers(1, 5, 3))
        rope, packed = random_rope(rng, dim), bool(rng.integers(2))
        counts = rng.integers(0, tokens + 1, batch)
        shape = (dim, heads, int(counts.sum())) if packed else (dim, heads, tokens, batch)
        x = rng.standard_normal(shape).astype(dtype)
        given = (
            engine.put(np.asfortranarray(np.repeat(x, 2, axis=1)))[:, ::2]
            if rng.integers(2)
            else engine.put(np.asfortranarray(x))
        )
        start = rng.integers(-5, 1 << int(rng.integers(1, 21)), batch).astype(np.int32)
        options, form = {}, rng.choice(["none", "number", "start", "seq_lens_kv"])
        own = counts if packed or (form == "seq_lens_kv" and rng.integers(2)) else np.full(batch, tokens)
        if packed:
            options["cu_seqlens_q"] = engine.put(np.concatenate([[0], np.cumsum(counts)]).astype(rng.choice(["i4", "i8"])))
        elif form == "seq_lens_kv" and own is counts:
            options["seq_lens_q"] = engine.put(counts.astype(np.int32))
        if form in ("none", "number"):
            start[:] = start[0] if form == "number" else 0
            options |= {"start": int(start[0])} if form == "number" else {}
        else:
            array = start if form == "start" else start + own
            longer = np.repeat(array.astype(np.int32), 2)
            options[form] = engine.put(longer)[::2]
        found = apply_rope(given, rope, **options)
        assert (found.shape, found.dtype, found.flags.f_contiguous) == (shape, dtype, True)
        wanted, first = np.zeros(shape), 0
        for b in range(batch):
            if packed:
                own_tokens = slice(first, first + counts[b])
                wanted[..., own_tokens] = turned(x[..., own_tokens], rope, start[b] + np.arange(counts[b]))
                first += counts[b]
            else:
                wanted[..., b] = turned(x[..., b], rope, int(start[b]) + np.arange(tokens))
        close(engine, found, wanted, dtype)


def test_the_gradient_is_the_transposed_rotation(engine):
    """The products of dout with a rotation and of its transpose with x are equal; also with a factor."""
    rope = Rope(6, base=3, factor=1.7, interleaved=True)
    x, dout = (engine.normal(i, 8, 2, 5, 2, dtype=np.float32) for i in range(2))
    forward, back = (engine.get(apply_rope(y, r, start=7)) for y, r in ((x, rope), (dout, rope.transposed())))
    np.testing.assert_allclose((forward * engine.get(dout)).sum(), (back * engine.get(x)).sum(), rtol=1e-4)


@ON_A_GPU
def test_captured_rotations_follow_the_lengths(engine):
    """A graph of an append and of a rotation of queries, launched for several steps; its kernel is compiled before."""
    rope, xp = Rope(8), engine.xp
    shape = {"pages": 12, "batch": 2, "page_size": 4, "dtype": "float16"}
    cache, known = KVCache(8, 2, **shape), KVCache(8, 2, **shape, numpy=True)
    k, q = engine.normal(0, 8, 2, 2, 2), engine.normal(1, 8, 4, 2, 2)
    host = engine.get(k)
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        cache.begin_step(2)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="append with rope= once before, to compile the kernel"):
            cache.append(k, k, rope=rope)
        stream.end_capture()
        cache.append(k, k, rope=rope)
        rotated = apply_rope(q, rope, seq_lens_kv=cache.lengths)
        cache.begin_step([2, 1])
        stream.begin_capture()
        cache.append(k, k, rope=rope)
        rotated = apply_rope(q, rope, seq_lens_kv=cache.lengths)
        graph = stream.end_capture()
        known.append(host, host, rope=rope)
        for counts in ([2, 1], [1, 2], [2, 2]):
            if counts != [2, 1]:
                cache.begin_step(counts)
            graph.launch(stream)
            known.append(host, host, seq_lens_q=counts, rope=rope)
            wanted = apply_rope(engine.get(q), rope, seq_lens_kv=known.lengths)
            np.testing.assert_allclose(rotated.get().astype("f4"), wanted.astype("f4"), atol=4e-3)
            np.testing.assert_allclose(cache.keys().get().astype("f4"), known.keys().astype("f4"), atol=4e-3)


def test_rotations_are_values():
    """Equal rotations are equal, hash equally, and survive pickle; they cannot be changed."""
    rope = Rope(8, base=100.0, interleaved=True)
    same = Rope(8, frequencies=np.array(rope.frequencies), interleaved=True)
    assert rope == same == pickle.loads(pickle.dumps(rope)) == rope.transposed().transposed()
    assert len({rope, same, Rope(8)}) == 2
    with pytest.raises(AttributeError):
        rope.factor = 2.0


def test_nothing_to_rotate(engine):
    """Arrays without tokens or sequences give arrays without elements."""
    for shape in ((8, 2, 0, 3), (8, 2, 3, 0)):
        assert apply_rope(engine.nan(*shape), Rope(8)).shape == shape


def test_keys_of_a_layer_are_rotated_alike():
    """A rotation that differs from the layer's earlier keys raises, and nothing changes; an empty cache takes any."""
    cache = KVCache(16, 2, pages=4, batch=1, page_size=4, dtype="float32", layers=2, numpy=True)
    x = np.ones((16, 2, 2, 1), np.float32, order="F")
    one, other = Rope(16), Rope(16, base=500_000)
    for layer, rope in enumerate((one, other)):  # layers may differ
        cache.append(x, x, layer, rope=rope)
    before = cache.keys(0).copy(), cache.lengths.copy()
    with pytest.raises(ValueError, match=r"(?s)rope is Rope\(dim=16.*from 1 to 4.2\d*e-05.*layer 0.*from 1 to 0.00031"):
        cache.append(x, x, rope=Rope(16, base=100_000))
    with pytest.raises(ValueError, match=r"factor=2\.0"):
        cache.append(x, x, rope=Rope(16, factor=2))
    assert cache.host_lengths.tolist() == [2]
    assert all(np.array_equal(*pair) for pair in zip((cache.keys(0), cache.lengths), before, strict=True))
    cache.append(x, x, rope=Rope(16))  # equal
    cache.append(x, x, 1)  # rotated before
    cache.release(0)
    cache.append(x, x, rope=other)


#: 2 pi, in decimal digits.
TWO_PI = Decimal("6.2831853071795864769252867665590057683943387987502116419498891846156328125724179972560696")


@pytest.mark.parametrize(
    "frequencies", [10_000.0 ** -np.linspace(0, 1, 8), [3.0, -1.7, 1e5, 1e30, 123.25, 0.1, 7e-9, 0.0]], ids=["base", "others"]
)
@pytest.mark.parametrize("position", [1, 1_000_000, 2**31 - 2])
def test_angles_of_float64_are_exact(position, frequencies, engine):
    """Apart from float64's error, the only error is the rounding of the turns per position, 2^-65."""
    rope = Rope(16, frequencies=frequencies)
    x = np.zeros((16, 1, 1, 1), order="F")
    x[:8] = 1
    with localcontext() as context:
        context.prec = 80
        angles = [float(Decimal(position) * Decimal(float(frequency)) % TWO_PI) for frequency in rope.frequencies]
    found = engine.get(apply_rope(engine.put(x), rope, start=position)).ravel()
    np.testing.assert_allclose(found, [*np.cos(angles), *np.sin(angles)], atol=1e-15 + position * 2 * np.pi * 2.0**-65)
