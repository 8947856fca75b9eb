"""A change of a key/value cache happens completely or not at all; copies of a cache are independent."""

import contextlib
import copy
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cupy import DEVICE

import cupy_sdpa
from cupy_sdpa import KVCache, attention, fp8

#: Interrupts are raised in the lines of these files.
PACKAGE = str(Path(cupy_sdpa.__file__).parent)


@pytest.fixture(params=["numpy", "fake"])
def engine(request):
    """Options and functions that differ between numpy and CuPy arrays."""
    if request.param == "numpy":
        return SimpleNamespace(options={"numpy": True}, put=np.asarray, get=np.asarray)
    fake = request.getfixturevalue("fake")
    return SimpleNamespace(options={}, put=fake.asarray, get=lambda x: x.get() if hasattr(x, "get") else x)


def tokens(rng, n, *more, d=16):
    """New keys or values of one key/value head."""
    return np.asfortranarray(rng.standard_normal((d, 1, n, *more)).astype(np.float32))


def made(engine, rng, dtype="float32"):
    """A cache of two layers with 5, 5 and 0 tokens in pages of 4, of which the first two sequences share pages; no FP8 scale."""
    cache = KVCache(16, 1, pages=9, batch=3, page_size=4, layers=2, dtype=dtype, **engine.options)
    if dtype == "float32":
        append(engine, cache, rng, [5, 0, 0])
        cache.fork(0, 1)
    return cache


def append(engine, cache, rng, counts):
    """A whole step of packed tokens."""
    for layer in range(cache.layers):
        x = engine.put(tokens(rng, sum(counts)))
        cache.append(x, x, layer, counts=counts)


def state(engine, cache):
    """Everything that a call reads: the host, and on the device the table, the lengths, the counts, the factors, and the tokens."""
    host = copy.deepcopy((vars(cache._pages), cache._step, cache._captured, cache._undo, cache.table.shape))
    arrays = [cache._state, *([cache._fp8._factors] if cache._fp8 else [])]
    missing = cache._step.missing
    contents = []
    for layer in range(cache.layers):
        for pages in (cache.keys(layer), cache.values(layer)):
            data = engine.get(getattr(pages, "data", pages) if cache._fp8 else pages)
            for b, length in enumerate(cache.host_lengths):
                rows = data[..., cache._pages.by_sequence[b]].transpose(0, 1, 3, 2).reshape(*data.shape[:2], -1, order="C")
                contents.append(rows[..., : length - (cache._step.counts[b] if layer in missing else 0)].copy())
    known = cache._fp8.known if cache._fp8 else None
    return host, known, [engine.get(x).copy() for x in arrays], contents


def same(one, other):
    """Whether two states are equal."""
    with contextlib.suppress(AssertionError):
        np.testing.assert_equal(one, other)
        return True
    return False


class Interrupted:
    """Raise an exception at the n-th line that is run in the package, also in the standard library's context managers."""

    def __init__(self, n, error):
        self.left, self.error = n, error

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == -1:
                raise self.error()
        return self.trace


#: Changes: what happens before, and the call.
CHANGES = {
    "append of a new step": (lambda e, c, r: None, lambda e, c, x: c.append(x, x, counts=[1, 1, 6])),
    "begin_step": (lambda e, c, r: None, lambda e, c, x: c.begin_step([1, 1, 6])),
    "append of layer 0": (lambda e, c, r: c.begin_step([1, 2, 5]), lambda e, c, x: c.append(x, x)),
    "append of layer 1": (
        lambda e, c, r: c.append(*[e.put(tokens(r, 8))] * 2, counts=[2, 2, 4]), lambda e, c, x: c.append(x, x, layer=1)
    ),
    "fork": (lambda e, c, r: append(e, c, r, [1, 0, 0]), lambda e, c, x: c.fork(0, 2)),
    "truncate": (lambda e, c, r: append(e, c, r, [8, 0, 1]), lambda e, c, x: c.truncate(0, 3)),
    "cancel_step": (lambda e, c, r: c.begin_step([3, 4, 9]), lambda e, c, x: c.cancel_step()),
    "cancel_step after layer 0": (
        lambda e, c, r: c.append(*[e.put(tokens(r, 8))] * 2, counts=[1, 3, 4]), lambda e, c, x: c.cancel_step()
    ),
}  # fmt: skip


def check(engine, name, dtype, points, error, step):
    """Raise an exception at every ``step``-th point: the state is that before or after the call; the retry completes it."""
    rng = np.random.default_rng(0)
    prepare, call = CHANGES[name]
    start = made(engine, rng, dtype)
    prepare(engine, start, rng)
    x = engine.put(tokens(rng, 8))
    done = copy.deepcopy(start)
    call(engine, done, x)
    before, after = state(engine, start), state(engine, done)
    assert not same(before, after)
    stopped = n = 0
    while True:
        cache = copy.deepcopy(start)
        try:
            with points(n, error):
                call(engine, cache, x)
        except error:
            found = state(engine, cache)
            undone = same(found, before)
            assert undone or same(found, after), n
            if undone:
                call(engine, cache, x)
                assert same(state(engine, cache), after), n
            stopped += 1
        else:
            assert same(state(engine, cache), after)
            break
        n += step
    return stopped


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_interrupted(name, engine):
    """At every seventh line: it is complete or has not happened, on the host and on the device."""
    assert check(engine, name, "float32", Interrupted, KeyboardInterrupt, 7) > 2


@pytest.mark.parametrize("name", ["append of a new step", "append of layer 1"])
def test_an_interrupted_append_that_sets_fp8_scales(name, engine):
    """The scales are those of the retry."""
    assert check(engine, name, "float8_e4m3fn", Interrupted, KeyboardInterrupt, 17) > 2


@pytest.mark.sweep
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=["interrupt", "error"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_interrupted_at_every_line(name, dtype, error, engine):
    """The same at every line, with exceptions as well."""
    assert check(engine, name, dtype, Interrupted, error, 1) > 10


class Failing:
    """The n-th launch fails, and all later ones if the device stays broken."""

    def __init__(self, n, error, device, lasting):
        self.left, self.error, self.device, self.lasting = n, error, device, lasting

    def __enter__(self):
        submit = self.device.submit

        def submit_or_fail(*given):
            self.left -= 1
            if self.left == -1 or (self.lasting and self.left < 0):
                raise self.error()
            submit(*given)

        self.device.submit = submit_or_fail

    def __exit__(self, *_):
        del self.device.submit


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_launch_that_fails(name, dtype, fake):
    """The change has not happened, and the retry completes it."""
    engine = SimpleNamespace(options={}, put=fake.asarray, get=lambda x: x.get() if hasattr(x, "get") else x)
    assert check(engine, name, dtype, lambda n, error: Failing(n, error, DEVICE, lasting=False), MemoryError, 1) > 0


def test_a_device_that_fails_repeatedly(fake):
    """If restoring fails too, the next call restores first."""
    engine = SimpleNamespace(options={}, put=fake.asarray, get=lambda x: x.get())
    rng = np.random.default_rng(0)
    start = made(engine, rng)
    x = fake.asarray(tokens(rng, 8))
    done = copy.deepcopy(start)
    done.append(x, x, counts=[1, 1, 6])
    for n in range(3):
        cache = copy.deepcopy(start)
        with pytest.raises(MemoryError), Failing(n, MemoryError, DEVICE, lasting=True):
            cache.append(x, x, counts=[1, 1, 6])
        cache.append(x, x, counts=[1, 1, 6])
        assert same(state(engine, cache), state(engine, done))


def dense(q, k, v):
    """Attention of one query ``(D, H)`` to keys and values ``(D, 1, N)``, in float64."""
    scores = np.einsum("dh,dn->hn", q, k[:, 0]) / len(q) ** 0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True) @ v[:, 0].T).T


class Random:
    """Random operations, all of them interrupted and repeated, and plain lists of what the cache must contain."""

    def __init__(self, engine, seed):
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.cache = KVCache(16, 1, pages=14, batch=3, page_size=4, layers=2, dtype="float32", **engine.options)
        self.lists = [[] for _ in range(3)]  # of each sequence the tokens: (k, v) of every layer

    def complete(self, goal, function, *given, **more):
        """Interrupt a call, and repeat it until the lengths are those of the goal, and the layer is not missing."""
        layer, goal = given[2] if len(given) == 3 else None, list(goal)
        while self.cache.host_lengths.tolist() != goal or layer in self.cache._step.missing:
            with contextlib.suppress(KeyboardInterrupt), Interrupted(int(self.rng.integers(1, 400)), KeyboardInterrupt):
                function(*given, **more)

    def step(self, *, cancelled):
        """Append to all layers; or to none or one, and cancel."""
        rng, cache, counts = self.rng, self.cache, self.rng.integers(0, 4, 3)
        if not counts.any() or sum(-(-(len(x) + n) // 4) for x, n in zip(self.lists, counts, strict=True)) > 14:
            return
        before, new = cache.host_lengths, [[tokens(rng, int(counts.sum())) for _ in range(2)] for _ in range(2)]
        goal, layers = (before + counts).tolist(), int(rng.integers(2)) if cancelled else 2
        if rng.integers(2) or not layers:
            self.complete(goal, cache.begin_step, counts)
        for layer in range(layers):
            given = [self.engine.put(x) for x in new[layer]]
            self.complete(goal, cache.append, *given, layer, **({} if layer else {"counts": counts}))
        if cancelled:
            self.complete(before.tolist(), cache.cancel_step)
            return
        starts = np.cumsum([0, *counts])
        for b, own in enumerate(self.lists):
            own += [[[x[..., i] for x in of_layer] for of_layer in new] for i in range(starts[b], starts[b + 1])]

    def fork(self, source, target):
        """Fork a sequence if the target is empty."""
        if self.lists[source] and not self.lists[target]:
            self.lists[target] = list(self.lists[source])
            self.complete(map(len, self.lists), self.cache.fork, source, target)

    def truncate(self, b, length):
        """Shorten a sequence."""
        del self.lists[b][length:]
        self.complete(map(len, self.lists), self.cache.truncate, b, length)

    def run(self, turns):
        """Operate and check."""
        for _ in range(turns):
            kind, (a, b) = (
                self.rng.choice(["step", "step", "step", "cancelled", "fork", "truncate"]),
                self.rng.integers(0, 3, 2),
            )
            if kind == "fork":
                self.fork(int(a), int(b))
            elif kind == "truncate":
                self.truncate(int(b), int(self.rng.integers(len(self.lists[b]) + 1)))
            else:
                self.step(cancelled=kind == "cancelled")
            self.check()

    def check(self):
        """The contents, the pages, and on numpy attention."""
        cache, get = self.cache, self.engine.get
        assert get(cache.lengths).tolist() == [len(x) for x in self.lists]
        used = {page for pages in cache._pages.by_sequence for page in pages}
        assert sorted([*used, *cache._pages.free]) == list(range(14))
        table = get(cache.table)
        for layer in range(2):
            for b, own in enumerate(self.lists):
                for side, stored in enumerate((cache.keys(layer), cache.values(layer))) if own else ():
                    found = np.concatenate([get(stored)[..., p] for p in table[: -(-len(own) // 4), b]], axis=2)
                    wanted = np.stack([token[layer][side] for token in own], axis=-1)
                    np.testing.assert_array_equal(found[..., : len(own)], wanted)
            if "numpy" in self.engine.options:
                self.check_attention(layer)

    def check_attention(self, layer):
        """Attention to a layer, compared with that to the lists."""
        q = np.asfortranarray(self.rng.standard_normal((16, 2, 1, 3)).astype(np.float32))
        pages = {"page_table": self.cache.table, "seq_lens_kv": self.cache.lengths}
        out = attention(q, self.cache.keys(layer), self.cache.values(layer), **pages)
        for b, own in enumerate(self.lists):
            if own:
                k, v = (np.stack([token[layer][side] for token in own], axis=-1).astype(np.float64) for side in range(2))
                np.testing.assert_allclose(out[:, :, 0, b], dense(q[:, :, 0, b], k, v), rtol=1e-4, atol=1e-5)


def test_random_operations_that_are_interrupted(engine):
    """The contents, and attention on numpy, are those of plain lists."""
    Random(engine, 0).run(12)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(1, 20))
def test_many_random_operations_that_are_interrupted(seed, engine):
    """The same for longer."""
    Random(engine, seed).run(60)


# Copies


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_are_independent(way, dtype, engine):
    """A copy has the same contents, and changes of one do not appear in the other."""
    rng = np.random.default_rng(0)
    cache = KVCache(16, 1, pages=9, batch=2, page_size=4, layers=2, dtype=dtype, **engine.options)
    kind = cache.dtype if dtype == "bfloat16" else np.float32
    given = [engine.put(np.asfortranarray(tokens(rng, 5, 2).astype(kind))) for _ in range(2)]
    for layer in range(2):
        cache.append(*given, layer)
    before = state(engine, cache)
    other = copy.deepcopy(cache) if way == "deepcopy" else pickle.loads(pickle.dumps(cache))
    assert same(state(engine, other), before)
    assert other.keys().strides == cache.keys().strides
    for layer in range(2):
        other.append(*given, layer)
    other.release(0)
    assert same(state(engine, cache), before)
    for layer in range(2):
        cache.append(*given, layer)
    cache.release(0)
    assert same(state(engine, cache), state(engine, other))


def test_a_shallow_copy_is_refused(engine):
    """It would share pages; the message names the remedies."""
    with pytest.raises(TypeError, match=r"share its pages: use copy.deepcopy .*fork\(\)"):
        copy.copy(KVCache(16, 1, pages=2, batch=1, dtype="float32", **engine.options))


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_fp8_arrays(way, engine):
    """They have the elements, the factors and the memory order, in memory of their own."""
    arrays = fp8.quantize_qkv(*[engine.put(tokens(np.random.default_rng(i), 5, 2)) for i in range(3)], rotate=True)
    for x in (*arrays, arrays[0].transpose(3, 2, 1, 0), fp8.Fp8Array(arrays[0].data, 0.5)):
        other = COPIES[way](x)
        wanted = engine.get(x.dequantize()).copy()
        assert (other.dtype, other.rotated, other.axis, other.shape) == (x.dtype, x.rotated, x.axis, x.shape)
        assert other.data.flags.f_contiguous == x.data.flags.f_contiguous
        x.data[...] = 0
        np.testing.assert_array_equal(engine.get(other.scale), engine.get(x.scale))
        np.testing.assert_array_equal(engine.get(other.dequantize()), wanted)


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_delayed_scaling(way, engine):
    """They have the history, and do not share it."""
    scaling = fp8.DelayedScaling(engine.put(np.zeros(1, np.float32)), 2, amax=7.0)
    other = COPIES[way](scaling)
    for amax, wanted in ((14.0, 32.0), (3.5, 32.0), (3.5, 128.0)):
        other.update(engine.put(np.full(1, amax, np.float32)))
        assert float(engine.get(other.scale)[0]) == wanted
        assert float(engine.get(scaling.scale)[0]) == 64
