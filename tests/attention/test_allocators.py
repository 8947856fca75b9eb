"""Repeated calls with other allocators and with sessions that threads hand over; on the fake CuPy and on the GPU."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
from cases import Case, as_float

from cupy_sdpa import attention, attention_backward, get_plan_cache
from cupy_sdpa.calls import replay_cache

#: Calls with lengths, copies, a large workspace, and sums of gradients.
CASES = [
    Case("plain", d=64, sq=100, skv=130, hkv=2, causal=True),
    Case("lengths", d=64, sq=40, skv=48, seq_lens_q=(20, 33), seq_lens_kv=(40, 3)),
    Case("copies", d=64, sq=40, skv=48, seq_lens_q=(20, 33), seq_lens_kv=(40, 3), dropout=0.25),
    Case("packed", d=64, packed=True, seq_lens_q=(19, 0, 7), seq_lens_kv=(16, 4, 0), b=3, hkv=2, causal=True, tail=3),
    Case("bias", d=64, sq=40, skv=48, bias="hb"),
    Case("sinks", d=64, sq=40, sinks=True),
]


class Calls:
    """Both passes of a case on arrays of their own."""

    def __init__(self, cupy, case):
        self.cupy, self.options = cupy, case.options(cupy)
        self.arrays = [cupy.asarray(x) for x in (*case.arrays(), case.dout())]
        self.more = {"return_dbias": True} if case.bias else {}

    def launch(self):
        """The results, without synchronization."""
        q, k, v, dout = self.arrays
        out, stats = attention(q, k, v, return_stats=True, **self.options)
        return [
            out,
            stats,
            *attention_backward(dout, q, k, v, out, stats, deterministic=not self.more, **self.more, **self.options),
        ]

    def run(self):
        """The contents of the results."""
        return [as_float(x) for x in self.launch()]


def equal(got, want):
    """Assert that results are close and contain no NaN: gradients with a bias are summed in any order."""
    for a, b in zip(got, want, strict=True):
        assert not np.isnan(a).any()
        np.testing.assert_allclose(a, b, atol=2e-2, rtol=2e-2)


@contextlib.contextmanager
def like_rmm(cupy):
    """An allocator that owns its memory outside CuPy's pool, and returns other addresses every time, as RMM may do."""
    turn, pool = itertools.count(1), cupy.cuda.MemoryPool()

    def allocate(size):
        offset = 256 * (next(turn) % 64)
        block = pool.malloc(size + offset)
        block.memset_async(255, size + offset, cupy.cuda.get_current_stream())
        memory = cupy.cuda.UnownedMemory(block.ptr + offset, size, block)
        return cupy.cuda.MemoryPointer(memory, 0)

    with cupy.cuda.using_allocator(allocate):
        yield


@contextlib.contextmanager
def async_pool(cupy):
    """CuPy's pool of stream-ordered memory."""
    with cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc):
        yield


@contextlib.contextmanager
def unpooled(cupy):
    """Memory that is returned to the driver when it is freed, which waits for the device."""
    with cupy.cuda.using_allocator(None):
        yield


def check_allocator(cupy, case, allocator):
    """Repeated calls: at addresses that return, and at new ones; earlier results stay, inputs change in place."""
    problem = Calls(cupy, case)
    want = problem.run()
    with allocator(cupy):
        kept = [problem.launch() for _ in range(3)]
        for _ in range(4 * replay_cache.CAPTURE_AFTER):
            equal(problem.run(), want)
        problem.arrays[2] *= -1
        changed = problem.run()
        np.testing.assert_allclose(changed[0], -want[0], atol=2e-2, rtol=2e-2)
        for results in kept:
            equal([as_float(x) for x in results], want)
        cupy.cuda.Device().synchronize()
        get_plan_cache().clear()  # graphs own memory of this allocator
    del kept


def check_handover(cupy, case):
    """Threads end while their work is running, and the next thread takes over the session: on another stream, with other work."""
    problems = [Calls(cupy, case) for _ in range(2)]
    want = problems[0].run()
    cupy.cuda.Device().synchronize()
    left, busy = [], cupy.ones((512, 512), np.float32)

    def work(turn):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                busy[...] = busy * 1.0001
            results = [problems[turn % 2].launch() for _ in range(replay_cache.CAPTURE_AFTER + 2)]
            left.append((stream, results))

    for turn in range(6):
        thread = threading.Thread(target=work, args=(turn,))
        thread.start()
        thread.join()
    for stream, results in left:
        stream.synchronize()
        for got in results:
            equal([as_float(x) for x in got], want)
    last = threading.Thread(target=lambda: get_plan_cache().clear())
    last.start()
    last.join()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_handed_over_sessions_on_the_fake_cupy(case, fake):
    """Streams are lazy: the work of a thread runs after the next thread has used its session."""
    check_handover(fake, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_handed_over_sessions(case, cupy):
    """With cuDNN."""
    check_handover(cupy, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("allocator", [like_rmm, async_pool, unpooled], ids=lambda x: x.__name__)
def test_allocators(allocator, case, cupy):
    """With cuDNN."""
    check_allocator(cupy, case, allocator)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_allocator_with_changing_addresses(case, fake):
    """No address occurs often enough for a graph; every call is right."""
    turn, held = itertools.count(1), []

    @contextlib.contextmanager
    def changing(cupy):
        def allocate(size):
            pointer = cupy.get_default_memory_pool().malloc(size + 256 * next(turn))  # another size: another block
            held.append(pointer)
            return pointer

        with cupy.cuda.using_allocator(allocate):
            yield

    check_allocator(fake, case, changing)
