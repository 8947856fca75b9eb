"""Members that disagree, fail or end, and messages that are lost: every member raises, and none gets a wrong result."""

import contextlib
import gc
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import on_cudnn
from parallel_cases import METHODS, TEXT_BYTES, Problem

from cupy_sdpa import get_plan_cache
from cupy_sdpa.parallel import GroupError, Loopback, context_parallel, run_threads

SLOW, GPU = pytest.mark.slow, pytest.mark.gpu


def added(score, b, h, q_idx, kv_idx, bias):
    """A bias for every key."""
    return score + bias[kv_idx]


def ones(length=8, heads=2):
    return np.ones((4, heads, length, 1), order="F")


# Messages and members


class Message(NamedTuple):
    """What a member sends to another one, or receives from it."""

    array: Any
    peer: int


class Lost(Loopback):
    """Loses the second message from member 0 to member 1."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.held = None

    def post(self, source, target, message):
        if (source, target, message.number) == (0, 1, 1):
            self.held = message
        else:
            super().post(source, target, message)


class Swapped(Lost):
    """Exchanges it with the third one."""

    def post(self, source, target, message):
        super().post(source, target, message)
        if (source, target, message.number) == (0, 1, 2):
            super(Lost, self).post(source, target, self.held)


@pytest.mark.parametrize("loopback", [Lost, Swapped])
@pytest.mark.parametrize("method", METHODS)
def test_lost_and_swapped_messages_are_detected(method, loopback):
    """A message that is lost or out of order raises on every member; no result is returned."""
    failures, call = [], Problem(heads=(3, 3)).member(method, calls=2, check=False)

    def member(own):
        with pytest.raises(GroupError) as error:
            call(own)
        failures.append(str(error.value))

    run_threads(loopback(3, timeout=0.5).members, member)
    assert len(failures) == 3
    assert "out of order" in failures[0] or "did not send it" in failures[0]


def test_a_message_of_another_size_is_detected():
    """Members with different shapes, which are not compared, raise instead of computing with wrong keys."""

    def member(own):
        x = ones(8 + 8 * (own.rank == 1))
        with pytest.raises(GroupError, match="bytes as 'ring, step 1: keys and values'"):
            context_parallel(own, method="ring", check=False).attention(x, x, x)

    run_threads(Loopback(2, timeout=20).members, member)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", ["before", "between the passes"])
def test_every_member_raises_if_one_ends(stage, method):
    """If a member ends, the others raise within the timeout, and name the exchange that they wait for."""
    messages = []

    def member(own):
        cp, x = context_parallel(own, method=method), ones(heads=3)
        if own.rank == 2 and stage == "before":
            return
        try:
            out, stats = cp.attention(x, x, x, return_stats=True)
            if own.rank == 2:
                return
            cp.attention_backward(x, x, x, x, out, stats)
        except GroupError as error:
            messages.append(str(error))

    run_threads(Loopback(3, timeout=0.3).members, member)
    assert len(messages) == 2
    assert all("waited 0.3 s" in message and "did not send it" in message for message in messages)


def test_every_member_raises_if_one_fails():
    """The exception of the member that failed is raised; the others do not wait for the timeout, and later calls also raise."""
    group, messages, x = Loopback(4, timeout=600), [], ones()

    def member(own):
        cp = context_parallel(own)
        if own.rank == 1:
            raise KeyError("data")
        for _ in range(2):
            with pytest.raises(GroupError, match=r"member 1 failed: KeyError: 'data'"):
                cp.attention(x, x, x)
        messages.append(own.rank)

    with pytest.raises(KeyError, match="data"):
        run_threads(group.members, member)
    assert sorted(messages) == [0, 2, 3]
    with pytest.raises(GroupError):
        context_parallel(group.members[0]).check()


# Members that disagree


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda rank: {"causal": "bottom_right" if rank else True}, "causal"),
        (lambda rank: {"softcap": 1.0 + rank}, "softcap"),
        (lambda rank: {"method": "all_gather" if rank else "ring"}, "method all_gather"),
        (lambda rank: {"scale": 0.5 + rank}, "scale"),
        (lambda rank: {"length": 8 + 2 * rank}, "queries"),
        (lambda rank: {"mask_mod": lambda b, h, i, j: i >= j if rank else i > j}, "<lambda>"),
        (lambda rank: {"score_mod": lambda s, b, h, i, j: s * (rank + 2.0)}, "<lambda>"),
        (lambda rank: {"score_mod": lambda s, b, h, i, j: np.tanh(s) if rank else np.exp(s)}, "<lambda>"),
        (lambda rank: {"score_mod": lambda s, b, h, i, j, t: s + (t[i] if rank else t[j]), "tensors": {"t": np.ones(24)}}, "<lambda>"),
    ],
    ids=["causal", "softcap", "method", "scale", "length", "mask function", "number of a function", "operation", "index"],
)  # fmt: skip
def test_different_arguments_raise_on_every_member(options, words):
    """Members with different shapes, options or functions of one name all raise an error that names both."""
    found = []

    def member(own):
        given = {"method": "ring", **options(int(own.rank == 1))}
        x = ones(given.pop("length", 8))
        with pytest.raises(ValueError, match="different shapes or options") as caught:
            context_parallel(own).attention(x, x, x, **given)
        found.append(str(caught.value))

    run_threads(Loopback(3, timeout=20).members, member)
    assert len(found) == 3
    assert all(words in text for text in found)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"block_mask": np.ones((16, 16), bool)}, TypeError, "block_mask is"),
        ({"compute_dtype": "float32"}, ValueError, "compute_dtype is 'float32'"),
        ({"layout": "foo"}, ValueError, "layout is 'foo'"),
        ({"engine": "cudnn"}, TypeError, "engine is 'cudnn'"),
        ({"return_stats": 2}, TypeError, "return_stats is 2"),
        ({"seq_lens_kv": np.array([25], np.int32)}, ValueError, "seq_lens_kv has lengths from 25 to 25"),
    ],
    ids=["number", "no block mask", "dtype", "layout", "engine", "flag", "length"],
)
def test_a_refused_call_raises_on_every_member(options, error, words):
    """If one member's arguments are invalid, it raises their error, and the others say which member refused and why."""

    def member(own):
        with pytest.raises((TypeError, ValueError)) as caught:
            context_parallel(own).attention(ones(), ones(), ones(), **(options if own.rank == 0 else {}))
        found = f"member 0 rejected the call: {error.__name__}: {words}" if own.rank else words
        assert found in str(caught.value)
        assert type(caught.value) is (ValueError if own.rank else error)

    run_threads(Loopback(3, timeout=5).members, member)


def test_a_refused_call_names_the_layout_once():
    """The others repeat the error, whose axes are in the caller's order, and do not name the layout again."""

    def member(own):
        x = np.ones((2, 8, 4, 16))
        with pytest.raises(ValueError, match="batch sizes") as caught:
            context_parallel(own).attention(x, x, x[:1] if own.rank == 0 else x, layout="bshd")
        assert str(caught.value).count("[layout='bshd']") == 1

    run_threads(Loopback(3, timeout=5).members, member)


@on_cudnn
def test_a_gradient_on_the_cpu_raises_on_every_member_of_a_pullback(engine):
    """The member sends its error from the device of its other arrays, although the pullback's only argument is not there."""

    def member(own):
        cp, x = context_parallel(own), engine.xp.ones((1, 4, 2, 16), np.float16)
        _, pullback = cp.attention_vjp(x, x, x, layout="bshd")
        with pytest.raises(ValueError, match="dout has 2 axes") as caught:
            pullback(np.ones((4, 16)) if own.rank == 0 else x)
        assert ("member 0 rejected the call" in str(caught.value)) is (own.rank == 1)
        get_plan_cache().clear()  # of this thread

    run_threads(Loopback(2, timeout=20).members, member)


@pytest.mark.parametrize("options", [{"layout": "foo"}, {"engine": "cudnn"}, {"return_stats": 2}, {"softcap": -1.0}], ids=str)
def test_a_member_that_refuses_a_known_call_sends_nothing_of_the_next_one(options):
    """The others also raise; they would otherwise use what the member sends in its next call."""
    refused = []

    def member(own):
        cp = context_parallel(own)
        for step in range(3):
            x = cp.shard(np.asfortranarray(np.random.default_rng(step).standard_normal((8, 4, 12, 1))))
            try:
                cp.attention(x, x, x, causal=True, **(options if (own.rank, step) == (1, 1) else {}))
            except (TypeError, ValueError, GroupError):
                refused.append(step)
                break

    run_threads(Loopback(3, timeout=5).members, member)
    assert len(refused) == 3
    assert max(refused) == 1  # a slower member may still be in the call before


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"softcap": 1.0}, {"softcap": 2.0}),
        ({"bias": np.ones((16, 1, 1, 1))}, {"bias": np.ones((16, 1, 1, 1), np.float32)}),
        ({"score_mod": added, "tensors": {"bias": np.ones(16)}}, {"tensors": {"bias": np.ones(16, np.float32)}}),
    ],
    ids=["number", "dtype of an array", "dtype of tensors"],
)
def test_configurations_are_compared_once(options, changed):
    """A repeated call does not compare again; a changed option does, also if only the dtype of an array is another one."""
    group, sent = Loopback(2), []

    def member(own):
        cp, x = context_parallel(own, method="ring"), ones()
        for given in (options, options, options, options | changed):
            before = group.bytes_sent[own.rank]
            cp.attention(x, x, x, **given)
            if own.rank == 0:
                sent.append(group.bytes_sent[0] - before)

    run_threads(group.members, member)
    assert sent[1] == sent[2]
    assert sent[0] == sent[3] == sent[1] + TEXT_BYTES


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("engine", ["numpy", pytest.param("fake", marks=SLOW), pytest.param("cupy", marks=GPU)], indirect=True)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(({"causal": True}, {"causal": "bottom_right"}), id="causal"),
        pytest.param(({"causal": True}, {"causal": True, "scale": 0.3}), id="scale"),
        pytest.param(({"scale": 0.0}, {"scale": -0.0}), id="zeros of both signs"),
    ],
)
def test_known_calls_that_differ_raise_on_every_member(engine, calls, method):
    """Calls that every member has made before, made at the same time: the results would be wrong without an error."""
    caught, together = [], threading.Barrier(3)

    def call(cp, x, options, count=1):
        for _ in range(count):
            cp.attention(x, x, x, **options)
            if engine.on_cudnn:
                engine.xp.cuda.get_current_stream().synchronize()  # the tags are compared on the device
            cp.check()

    def member(own):
        cp, x = context_parallel(own, method=method), engine.xp.ones((16, 6, 24, 1), np.float16, order="F")
        # a stream for each member: no other work of a thread is captured or waited for
        stream = engine.xp.cuda.Stream(non_blocking=True) if engine.name == "cupy" else contextlib.nullcontext()
        try:
            with stream:
                for options in calls * 5:  # captured, with the comparison
                    call(cp, x, options)
                together.wait(60)
                with pytest.raises(GroupError) as error:
                    call(cp, x, calls[own.rank == 1], 2)  # a member that received equal tags raises in its next call
            caught.append(str(error.value))
        finally:
            if engine.on_cudnn:
                get_plan_cache().clear()  # of this thread

    run_threads(Loopback(3, timeout=60).members, member)
    assert len(caught) == 3
    assert all("different shapes or options" in text for text in caught)


def test_a_call_that_raised_before_its_first_exchange_leaves_no_checksum(fake):
    """One member's call raises, and the others do not make it: the next exchange of all members is compared with nothing."""
    together = threading.Barrier(2)

    def full(size):
        raise MemoryError

    def member(own):
        cp, x = context_parallel(own, method="ring"), fake.ones((16, 2, 8, 1), np.float16, order="F")
        cp.attention(x, x, x)
        cp.unshard(x)
        together.wait(20)
        if own.rank == 0:
            with fake.cuda.using_allocator(full), pytest.raises(MemoryError):
                cp.attention(x, x, x)
        together.wait(20)
        assert cp.unshard(x).shape == (16, 2, 16, 1)
        fake.cuda.Device().synchronize()
        cp.check()
        get_plan_cache().clear()  # of this thread

    run_threads(Loopback(2, timeout=20).members, member)


class Interrupted:
    """A group of three, from which the message of the last member does not come."""

    rank, size = 0, 3

    def send(self, array, peer):
        pass

    def receive(self, array, peer):
        if peer == 2:
            raise ConnectionError("the connection is lost")
        array.data.memset_async(0, array.nbytes)


@pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)
def test_an_exchange_that_fails_writes_to_no_memory_of_others(engine):
    """Messages that come before the failure are written before later work of the stream, which may reuse the memory."""
    x = engine.normal(0, 16, 2, 8, 1)
    group = context_parallel(Interrupted())
    for _ in range(3):
        with pytest.raises(ConnectionError):
            group.attention(x, x, x)
        later = [engine.xp.ones(size, np.uint8) for size in (64, 512, TEXT_BYTES + 4, TEXT_BYTES + 256, 8192) for _ in range(4)]
        engine.xp.cuda.Device().synchronize()
        assert all(bool((y == 1).all()) for y in later)


def test_what_a_failed_exchange_received_is_copied_before_its_sender_ends(fake):
    """The memory of the message belongs to the sender, whose stream and group are destroyed."""
    group, message, received = Loopback(3, timeout=0.01), fake.ones(64, np.uint8), fake.zeros(64, np.uint8)
    stream = fake.cuda.Stream(non_blocking=True)  # of the receiver
    fake.cuda.Device().synchronize()
    with fake.cuda.Stream(non_blocking=True):
        group.members[0].exchange([Message(message, 1)], [], "a label")
    with stream, pytest.raises(GroupError, match="from member 2, which did not send it"):
        group.members[1].exchange([], [Message(received, 0), Message(received, 2)], "a label")
    del group
    gc.collect()
    fake.cuda.Device().synchronize()
    assert (received.get() == 1).all()


class Breaking:
    """A member of a group whose exchanges fail at some time."""

    def __init__(self, member):
        self._member, self.rank, self.size = member, member.rank, member.size
        self.breaks, self.failures = False, 0

    def exchange(self, sends, receives, label):
        if self.breaks:
            self.failures += 1
            raise GroupError("the connection is lost")
        self._member.exchange(sends, receives, label)

    def check(self):
        self._member.check()


def test_an_exchange_that_fails_between_two_graphs(fake):
    """The call raises, and is not repeated: the other members have begun it."""
    x = fake.ones((8, 2, 8, 1), np.float16, order="F")

    def member(own):
        group = Breaking(own)
        cp = context_parallel(group, method="ring")
        for _ in range(8):
            cp.attention(x, x, x)
        assert get_plan_cache().recordings
        group.breaks = True
        with pytest.raises(GroupError, match="the connection is lost"):
            cp.attention(x, x, x)
        assert group.failures == 1
        get_plan_cache().clear()  # of this thread

    run_threads(Loopback(2).members, member)


@pytest.mark.parametrize("method", METHODS)
def test_a_repeated_call_with_wrong_statistics(method):
    """The member that gets them raises the error, and does not make the call again: the other one does not."""
    problem, errors = Problem(length=16, heads=(2, 2)), []

    def member(group):
        cp = context_parallel(group, method=method)
        q, k, v, dout = map(cp.shard, (problem.q, problem.k, problem.v, problem.dout))
        out, stats = cp.attention(q, k, v, return_stats=True, **problem.options)
        for _ in range(3):
            cp.attention_backward(dout, q, k, v, out, stats, **problem.options)
        try:
            cp.attention_backward(dout, q, k, v, out, stats - 50 * (group.rank == 0), **problem.options)
        except (ValueError, GroupError) as error:
            errors.append(error)
            raise

    with pytest.raises(ValueError, match="stats"):
        run_threads(Loopback(2, timeout=5).members, member)
    assert isinstance(errors[0], ValueError)
