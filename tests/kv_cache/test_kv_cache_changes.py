"""What a key/value cache contains after random changes, also interrupted and failing ones; copies are independent."""

import contextlib
import copy
import itertools
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cupy import DEVICE

import cupy_sdpa
from cupy_sdpa import KVCache, OutOfPages, fp8

#: Interrupts are raised in the lines of these files.
PACKAGE = str(Path(cupy_sdpa.__file__).parent)
#: The shapes of the caches: (D, Dv, Hkv, page_size, pages, B, layers, max_length, dtype).
SHAPES = {
    "one_row_pages": (8, 8, 1, 1, 6, 1, 1, None, "float16"),
    "two_row_pages": (8, 4, 2, 2, 9, 3, 2, 7, "bfloat16"),
    "odd": (3, 1, 3, 2, 8, 2, 1, None, "bfloat16"),
    "few_pages": (4, 4, 1, 4, 4, 4, 2, None, "float32"),
    "one_page": (1, 2, 1, 3, 1, 2, 1, 2, "float64"),
    "large": (16, 24, 2, 16, 24, 5, 3, 90, "float16"),
}


def bits(x):
    """The elements as integers: NaN equals itself, and bfloat16 needs no arithmetic."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").copy()


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


class Failing:
    """The n-th launch fails, and all later ones if the device stays broken."""

    def __init__(self, n, error, lasting=False):
        self.left, self.error, self.lasting = n, error, lasting

    def __enter__(self):
        submit = DEVICE.submit

        def submit_or_fail(*given):
            self.left -= 1
            if self.left == -1 or (self.lasting and self.left < 0):
                raise self.error()
            submit(*given)

        DEVICE.submit = submit_or_fail

    def __exit__(self, *_):
        del DEVICE.submit


def seen(engine, cache):
    """What callers see: lengths, pages, scales, and the tokens of every sequence that the lengths on the device include.

    In layer 0, which the lengths follow, the rest of each last page must be 0.
    """
    lengths, table, found = engine.get(cache.lengths), engine.get(cache.full_table), []
    for layer in range(cache.layers):
        for pages in (cache.keys(layer), cache.values(layer)):
            if isinstance(pages, fp8.Fp8Array):
                found.append(engine.get(pages.scale).copy())
                pages = pages.data
            stored = engine.get(pages)
            for b, length in enumerate(lengths):
                rows = stored[..., table[: -(-length // cache.page_size), b]].transpose(0, 1, 3, 2)
                rows = bits(rows.reshape(*stored.shape[:2], -1))
                found.append(rows[..., :length])
                assert layer or not rows[..., length:].any()
    return [cache.host_lengths, lengths.copy(), table.copy(), cache.table.shape, cache.free_pages, repr(cache), *found]


class Model:
    """A cache, and what it must contain: for each sequence a list of tokens, each of which has (k, v) of every layer.

    Args:
        engine: the engine.
        seed: of the operations.
        name: of the shape.
    """

    def __init__(self, engine, seed, name):
        d, dv, heads, size, pages, batch, layers, longest, dtype = SHAPES[name]
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.cache = KVCache(
            d, heads, head_dim_v=dv, page_size=size, pages=pages, batch=batch, layers=layers, max_length=longest,
            dtype=dtype, numpy=not engine.on_cudnn,
        )  # fmt: skip
        self.tokens = [[] for _ in range(batch)]

    def lengths(self):
        """The lengths of the sequences."""
        return [len(x) for x in self.tokens]

    def arrays(self):
        """The keys and the values of every layer."""
        layers = range(self.cache.layers)
        return [(self.cache.keys(layer), self.cache.values(layer)) for layer in layers]

    def columns(self):
        """The pages of each sequence."""
        table, size = self.engine.get(self.cache.full_table), self.cache.page_size
        return [table[: -(-n // size), b].tolist() for b, n in enumerate(self.lengths())]

    def refused(self, error, match, function, *args, **more):
        """Check that a call raises and changes nothing."""
        before = seen(self.engine, self.cache)
        with pytest.raises(error, match=match):
            function(*args, **more)
        np.testing.assert_equal(seen(self.engine, self.cache), before)

    def poison_free_pages(self):
        """Fill the pages without owner with NaN, as an earlier owner could have."""
        for page in {*range(self.cache.pages)} - {page for own in self.columns() for page in own}:
            for pages in itertools.chain(*self.arrays()):
                pages[..., page] = np.array(np.nan, self.cache.dtype)

    def given(self, counts, form, extra=0):
        """Random new tokens as arrays for every layer, dense or packed, in several layouts; and the tokens per sequence."""
        cache, rng, made = self.cache, self.rng, []
        tokens = [[[] for _ in range(n)] for n in counts]
        layout = rng.integers(4)
        for _ in range(cache.layers):
            pair = []
            for dim in (cache.head_dim, cache.head_dim_v):
                each = [rng.standard_normal((dim, cache.heads_kv, n)).astype(cache.dtype) for n in counts]
                for own in each:  # removed tokens must leave nothing behind
                    own[:, :, rng.integers(4, size=own.shape[2]) == 0] = rng.choice([np.nan, np.inf])
                for b, i in ((b, i) for b, n in enumerate(counts) for i in range(n)):
                    tokens[b][i].append(each[b][..., i])
                if form == "packed":
                    x = np.concatenate(each, axis=2)
                else:
                    x = np.full((dim, cache.heads_kv, max(counts) + extra, cache.batch), np.nan, cache.dtype)
                    for b, of in enumerate(each):
                        x[:, :, : counts[b], b] = of
                pair.append(self.strided(x, layout))
            made.append(pair)
        return made, [[tuple(zip(x[::2], x[1::2], strict=True)) for x in of] for of in tokens]

    def strided(self, x, layout):
        """The array on the device: dense, with gaps, with tokens before heads, or at an odd address."""
        put = self.engine.put
        if layout == 0:
            return put(np.asfortranarray(x))
        if layout == 1:
            return put(np.asfortranarray(np.repeat(x, 2, axis=2)))[:, :, ::2]
        if layout == 2:
            return put(np.asfortranarray(x.swapaxes(1, 2))).transpose(0, 2, 1, *range(3, x.ndim))
        return put(np.asfortranarray(np.concatenate([x[:1], x], axis=0)))[1:]

    def step(self, counts, form, *, announce, extra=0, cancelled=False):
        """Append one step in all layers; or in none or some, and cancel it."""
        cache, counts = self.cache, [int(n) for n in counts]
        made, tokens = self.given(counts, form, extra)
        self.poison_free_pages()
        whole = form == "dense" and len(set(counts)) == 1 and not extra
        given = counts[0] if whole and self.rng.integers(2) else counts
        append = [(k, v, layer) for layer, (k, v) in enumerate(made)]
        needs, goal = self.pages_needed(counts), np.add(self.lengths(), counts).tolist()
        error = ""
        if max(goal) > cache.max_length:
            kind, error = ValueError, "max_length"
        elif needs > cache.free_pages:
            kind, error = OutOfPages, rf"needs {needs} pages, but {cache.free_pages} of"
        if error:
            self.refused(kind, error, cache.begin_step, given)
            self.refused(kind, error, cache.append, *append[0], seq_lens_q=given)
            return
        free = cache.free_pages
        layers = int(self.rng.integers(cache.layers)) if cancelled else cache.layers
        if announce or not layers:
            cache.begin_step(given)
        for k, v, layer in append[:layers]:
            cache.append(k, v, layer, **({} if layer or announce or whole else {"seq_lens_q": given}))
        assert cache.free_pages == free - needs
        if cancelled:
            cache.cancel_step()
            return
        for own, new in zip(self.tokens, tokens, strict=True):
            own += new

    def pages_needed(self, counts):
        """The pages that a step takes; partial pages with several owners are copied by all writers but the last owner."""
        size, columns = self.cache.page_size, self.columns()
        owners = np.bincount([page for own in columns for page in own], minlength=self.cache.pages)
        needed, writers = 0, {}
        for b, n in enumerate(counts):
            length = len(self.tokens[b])
            needed += -(-(length + n) // size) - -(-length // size)
            if n and length % size:
                writers.setdefault(columns[b][-1], []).append(b)
        return needed + sum(min(len(of), int(owners[page]) - 1) for page, of in writers.items())

    def operate(self):
        """One random operation, allowed or refused."""
        cache, rng = self.cache, self.rng
        kinds = ["step"] * 4 + ["fork", "keep", "reorder"] * 2 + ["truncate", "release", "cancelled", "swap"]
        kind = rng.choice(kinds) if rng.integers(16) else "reset"
        b = int(rng.integers(cache.batch))
        if kind in ("step", "cancelled"):
            form = rng.choice(["dense", "packed"])
            extra = int(rng.integers(3)) if form == "dense" else 0
            announce = bool(rng.integers(2))
            self.step(self.counts(), form, announce=announce, extra=extra, cancelled=kind == "cancelled")
        elif kind == "fork":
            source = int(rng.choice([i for i, x in enumerate(self.tokens) if x] or [b]))
            b = int(rng.choice([i for i, x in enumerate(self.tokens) if not x] or [b]))
            if self.tokens[b]:
                self.refused(ValueError, f"sequence {b}, has {len(self.tokens[b])} tokens", cache.fork, source, b)
                return
            self.tokens[b] = list(self.tokens[source])
            cache.fork(source, b)
        elif kind in ("reorder", "swap"):
            self.reorder(swap=kind == "swap")
        elif kind == "reset":
            if rng.integers(2) and self.pages_needed(counts := [0] * (cache.batch - 1) + [1]) <= cache.free_pages:
                with contextlib.suppress(ValueError):  # the sequence has its maximum length
                    cache.begin_step(counts)
            cache.reset()
            self.tokens = [[] for _ in self.tokens]
        elif kind == "keep":
            self.keep(b, int(rng.integers(1, 6)))
        else:
            present = len(self.tokens[b])
            self.refused(ValueError, f"has {present} tokens", cache.truncate, b, present + 1)
            if kind == "truncate":
                self.remove(b, int(rng.integers(max(0, present - 3), present + 1)), [], cache.truncate)
            else:
                self.tokens[b] = []
                cache.release(b)

    def reorder(self, *, swap):
        """Let each sequence continue another one: nothing is copied, and the pages of others are free."""
        cache, rng = self.cache, self.rng
        self.refused(ValueError, rf"order\[0\] is {cache.batch}", cache.reorder, [cache.batch, *range(1, cache.batch)])
        order, columns = np.arange(cache.batch), self.columns()
        if swap:
            one, other = rng.integers(cache.batch, size=2)
            order[[one, other]] = order[[other, one]]
            cache.swap(one, other)
        else:
            order = rng.permutation(cache.batch) if rng.integers(3) == 0 else rng.integers(cache.batch, size=cache.batch)
            cache.reorder(order)
        self.tokens = [list(self.tokens[source]) for source in order]
        assert self.columns() == [columns[source] for source in order]

    def keep(self, b, count):
        """Append a draft to a sequence, perhaps share it, and keep a random path; twice."""
        cache, rng = self.cache, self.rng
        before = len(self.tokens[b])
        self.step(np.where(np.arange(cache.batch) == b, count, 0), "packed", announce=True)
        count = len(self.tokens[b]) - before
        if not count:
            return  # the step was refused
        empty = [i for i, x in enumerate(self.tokens) if not x]
        if empty and rng.integers(2):
            cache.fork(b, empty[0])
            self.tokens[empty[0]] = list(self.tokens[b])
        self.refused(ValueError, rf"path contains {count}, .* has {count} tokens", cache.keep, b, [count])
        if rng.integers(3) == 0:  # the tokens of the last step follow their sequence
            other = int(rng.integers(cache.batch))
            cache.swap(b, other)
            self.tokens[b], self.tokens[other] = self.tokens[other], self.tokens[b]
            b = other
        for _ in range(2):
            self.keep_path(b, before, np.flatnonzero(rng.integers(3, size=len(self.tokens[b]) - before)).tolist())

    def keep_path(self, b, before, path):
        """Keep a path of a sequence's tokens from the position ``before``."""
        self.remove(b, before, path, self.cache.keep)

    def remove(self, b, before, path, function):
        """Remove the tokens of a sequence from the position ``before``, except a path; shared pages that are written are copied."""
        cache, size, columns = self.cache, self.cache.page_size, self.columns()
        owners = np.bincount([page for own in columns for page in own], minlength=cache.pages)
        kept = before + len(path)
        moved = [new for new, old in enumerate(path) if new != old]
        first = before + moved[0] if moved else kept
        written = range(first // size, -(-kept // size)) if kept < len(self.tokens[b]) else ()
        copied = [place for place in written if owners[columns[b][place]] > 1]
        given = before if function == cache.truncate else path
        if len(copied) > cache.free_pages:
            self.refused(OutOfPages, f"writes to {len(copied)} pages that sequence {b} shares", function, b, given)
            return
        self.poison_free_pages()
        self.tokens[b][before:] = [self.tokens[b][before + i] for i in path]
        function(b, given)

    def counts(self):
        """Counts of 0, 1 and 2 as often as large ones."""
        rng, most, batch = self.rng, 2 * self.cache.page_size, self.cache.batch
        kind = rng.integers(4)
        if kind == 0:
            return [int(rng.integers(3))] * batch
        if kind == 1:
            return rng.integers(0, 3, batch)
        if kind == 2:
            return rng.integers(0, most + 1, batch)
        return np.where(np.arange(batch) == rng.integers(batch), rng.integers(1, most + 1), 0)

    def check(self):
        """Compare lengths, the table, the free pages and all tokens with the model."""
        cache, get, size = self.cache, self.engine.get, self.cache.page_size
        lengths, full, table = self.lengths(), get(cache.full_table), get(cache.table)
        assert cache.host_lengths.tolist() == get(cache.lengths).tolist() == lengths
        assert get(cache.lengths).dtype == table.dtype == np.int32
        columns = self.columns()
        longest = max(1, *map(len, columns))
        assert full.shape == (min(-(-cache.max_length // size), cache.pages), cache.batch)
        np.testing.assert_array_equal(table, full[: min(1 << (longest - 1).bit_length(), len(full))])
        for b, own in enumerate(columns):
            assert len(set(own)) == len(own)
            assert not full[len(own) :, b].any()
        assert cache.free_pages == cache.pages - len({page for own in columns for page in own})
        full_pages = [own[: n // size] for own, n in zip(columns, lengths, strict=True) if n]
        same = [len(set(of)) == 1 for of in zip(*full_pages, strict=False)]
        assert cache.shared_prefix() == size * [*same, False].index(False)
        for layer, pair in enumerate(self.arrays()):
            for side, pages in enumerate(pair):
                stored = get(pages)
                for own, tokens in zip(columns, self.tokens, strict=True):
                    rows = stored[..., own].transpose(0, 1, 3, 2).reshape(*stored.shape[:2], -1)
                    assert not rows[..., len(tokens) :].astype(float).any()  # also not NaN
                    if tokens:
                        wanted = np.stack([token[layer][side] for token in tokens], axis=-1)
                        np.testing.assert_array_equal(bits(rows[..., : len(tokens)]), bits(wanted))

    def run(self, turns):
        """Operate and check."""
        for _ in range(turns):
            self.operate()
            self.check()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*list(SHAPES)[:-1], pytest.param("large", marks=pytest.mark.slow)])
def test_random_operations(name, seed, engine):
    """After every operation the cache is what the model says; free pages are full of NaN before every step."""
    Model(engine, seed, name).run(36)


# Every point of a change


def tokens(rng, n, *more, d=16):
    """New keys or values of one key/value head."""
    return np.asfortranarray(rng.standard_normal((d, 1, n, *more)).astype(np.float32))


def made(engine, rng, dtype="float32"):
    """A cache of two layers with 5, 5 and 0 tokens in pages of 4, of which the first two sequences share pages; no FP8 scale."""
    cache = KVCache(16, 1, pages=9, batch=3, page_size=4, layers=2, dtype=dtype, numpy=not engine.on_cudnn)
    if dtype == "float32":
        append(engine, cache, rng, [5, 0, 0])
        cache.fork(0, 1)
    return cache


def append(engine, cache, rng, counts):
    """A whole step of packed tokens."""
    for layer in range(cache.layers):
        x = engine.put(tokens(rng, sum(counts)))
        cache.append(x, x, layer, seq_lens_q=counts)


def same(one, other):
    """Whether two lists of what callers see are equal."""
    with contextlib.suppress(AssertionError):
        np.testing.assert_equal(one, other)
        return True
    return False


def continued(engine, cache, x):
    """What callers see after the layers that the present step lacks, and two more steps."""
    for layer in range(2):
        with contextlib.suppress(RuntimeError, ValueError):  # no step has begun, or the layer is not missing
            cache.append(x, x, layer)
    cache.truncate(0, int(cache.host_lengths[0]) // 2)
    for counts in ([1, 0, 1], [0, 1, 0]):
        append(engine, cache, np.random.default_rng(1), counts)
    return seen(engine, cache)


def test_a_page_that_is_shared_is_copied_after_a_truncation(engine):
    """A sequence that is shortened to a page of two owners writes its next token to a copy."""
    rng = np.random.default_rng(0)
    cache = made(engine, rng)
    append(engine, cache, rng, [8, 0, 0])

    def pages():
        return bits(engine.get(cache.keys())[..., engine.get(cache.full_table)[:2, 1]])

    before = pages()
    cache.truncate(0, 3)
    append(engine, cache, rng, [1, 0, 0])
    np.testing.assert_array_equal(pages(), before)


#: Changes: what happens before, and the call.
CHANGES = {
    "append of a new step": (lambda e, c, r: None, lambda e, c, x: c.append(x, x, seq_lens_q=[1, 1, 6])),
    "begin_step": (lambda e, c, r: None, lambda e, c, x: c.begin_step([1, 1, 6])),
    "append of layer 0": (lambda e, c, r: c.begin_step([1, 2, 5]), lambda e, c, x: c.append(x, x)),
    "append of layer 1": (
        lambda e, c, r: c.append(*[e.put(tokens(r, 8))] * 2, seq_lens_q=[2, 2, 4]), lambda e, c, x: c.append(x, x, layer=1)
    ),
    "fork": (lambda e, c, r: append(e, c, r, [1, 0, 0]), lambda e, c, x: c.fork(0, 2)),
    "reorder": (lambda e, c, r: append(e, c, r, [8, 0, 1]), lambda e, c, x: c.reorder([2, 0, 0])),
    "reset": (lambda e, c, r: append(e, c, r, [8, 0, 1]), lambda e, c, x: c.reset()),
    "reset of a step": (lambda e, c, r: c.append(*[e.put(tokens(r, 8))] * 2, seq_lens_q=[1, 3, 4]), lambda e, c, x: c.reset()),
    "truncate": (lambda e, c, r: append(e, c, r, [8, 0, 1]), lambda e, c, x: c.truncate(0, 3)),
    "keep": (lambda e, c, r: append(e, c, r, [8, 0, 1]), lambda e, c, x: c.keep(0, [0, 2, 3, 5, 7])),
    "keep of a shared draft": (
        lambda e, c, r: (c.release(1), append(e, c, r, [5, 0, 0]), c.fork(0, 1)), lambda e, c, x: c.keep(0, [1, 2, 4])
    ),
    "cancel_step": (lambda e, c, r: c.begin_step([3, 4, 9]), lambda e, c, x: c.cancel_step()),
    "cancel_step after layer 0": (
        lambda e, c, r: c.append(*[e.put(tokens(r, 8))] * 2, seq_lens_q=[1, 3, 4]), lambda e, c, x: c.cancel_step()
    ),
}  # fmt: skip


def check(engine, name, dtype, points, error, step, first=0):
    """Raise an exception at every ``step``-th point from the first one on: the state is that before or after the call; the retry completes it.

    Whether the append of a later layer was complete is known by the error of the retry.
    """
    rng = np.random.default_rng(0)
    prepare, call = CHANGES[name]
    start = made(engine, rng, dtype)
    prepare(engine, start, rng)
    x = engine.put(tokens(rng, 8))
    done = copy.deepcopy(start)
    call(engine, done, x)
    before, after = seen(engine, start), seen(engine, done)
    later, begins = name == "append of layer 1", name in ("append of a new step", "begin_step")
    instead = copy.deepcopy(start)
    if begins:
        append(engine, instead, np.random.default_rng(2), [5, 0, 0])
    assert later or not same(before, after)
    wanted = continued(engine, done, x)
    stopped = 0
    while True:
        n, cache = first + stopped * step, copy.deepcopy(start)
        try:
            with points(n, error):
                call(engine, cache, x)
        except error:
            found = seen(engine, cache)
            undone = later or same(found, before)
            assert undone or same(found, after), n
            stopped += 1
            if undone and begins and stopped % 3 == 2:  # a step with the counts of the last one
                append(engine, cache, np.random.default_rng(2), [5, 0, 0])
                assert same(seen(engine, cache), seen(engine, instead)), n
                continue
            if undone:
                with contextlib.suppress(RuntimeError) if later else contextlib.nullcontext():
                    call(engine, cache, x)
            if stopped % 3 == 0:
                assert same(continued(engine, cache, x), wanted), n
            else:
                assert same(seen(engine, cache), after), n
        else:
            return stopped


@pytest.mark.parametrize(
    "name", [*list(CHANGES)[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in list(CHANGES)[1:])]
)
def test_a_change_that_is_interrupted(name, engine):
    """At every eleventh line: it is complete or has not happened, on the host and on the device."""
    assert check(engine, name, "float32", Interrupted, KeyboardInterrupt, 11) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["append of a new step", "append of layer 1"])
def test_an_interrupted_append_that_sets_fp8_scales(name, engine):
    """The scales come from the retry."""
    assert check(engine, name, "float8_e4m3fn", Interrupted, KeyboardInterrupt, 29) > 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dtype", "error", "step"), [("float32", KeyboardInterrupt, 3), ("float8_e4m3fn", MemoryError, 13)], ids=["float32", "FP8"]
)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_is_interrupted_at_many_lines(name, dtype, error, step, engine):
    """The same at more lines, from another one on in each change, with exceptions as well."""
    assert check(engine, name, dtype, Interrupted, error, step, first=[*CHANGES].index(name) % step) > 2


@pytest.mark.parametrize("engine", ["fake"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHANGES)
def test_a_launch_that_fails(name, dtype, engine):
    """The change has not happened, and the retry completes it."""
    assert check(engine, name, dtype, Failing, MemoryError, 1) > 0


@pytest.mark.parametrize("engine", ["fake"], indirect=True)
def test_a_device_that_fails_repeatedly(engine):
    """If restoring also fails, the next call restores first."""
    rng = np.random.default_rng(0)
    start, x = made(engine, rng), engine.put(tokens(rng, 8))
    done = copy.deepcopy(start)
    done.append(x, x, seq_lens_q=[1, 1, 6])
    for n in range(3):
        cache = copy.deepcopy(start)
        with pytest.raises(MemoryError), Failing(n, MemoryError, lasting=True):
            cache.append(x, x, seq_lens_q=[1, 1, 6])
        cache.append(x, x, seq_lens_q=[1, 1, 6])
        assert same(seen(engine, cache), seen(engine, done))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_are_independent(way, dtype, engine):
    """A copy has the same contents, and changes of one do not appear in the other."""
    rng = np.random.default_rng(0)
    cache = KVCache(16, 1, pages=9, batch=2, page_size=4, layers=2, dtype=dtype, numpy=not engine.on_cudnn)
    kind = cache.dtype if dtype == "bfloat16" else np.float32
    given = [engine.put(np.asfortranarray(tokens(rng, 5, 2).astype(kind))) for _ in range(2)]
    for layer in range(2):
        cache.append(*given, layer)
    before, other = seen(engine, cache), way(cache)
    assert same(seen(engine, other), before)
    assert other.keys().strides == cache.keys().strides
    for changed in (other, cache):
        assert same(seen(engine, changed), before)
        for layer in range(2):
            changed.append(*given, layer)
        changed.release(0)
    assert same(seen(engine, cache), seen(engine, other))
