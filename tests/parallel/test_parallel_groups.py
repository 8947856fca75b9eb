"""Groups: messages out of order or lost, failed members, different arguments, adapters of communicators, and launchers."""

import queue
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from parallel_cases import METHODS, add_option, assert_equal, dense, packed, run
from parallel_on_gpu import PACKED, assert_as_exact_as_one_gpu, exact, problem_of, results_of, results_of_one_gpu

from cupy_sdpa import Unsupported, attention, attention_backward, get_plan_cache
from cupy_sdpa.parallel import GroupError, Loopback, MpiGroup, NcclGroup, context_parallel, environment, run_threads
from cupy_sdpa.parallel.groups import launch, nccl
from cupy_sdpa.parallel.groups.channel import Channel, message_bytes
from cupy_sdpa.parallel.groups.convert import OrderedExchanges, SingleMember, as_exchanger
from cupy_sdpa.parallel.groups.group import Transfer


def causal(seed=0, size=4):
    """A small causal problem whose heads every method can share out."""
    problem = dense(np.random.default_rng(seed), size, lengths=(20, 20), heads=(size, 1), batch=1)
    problem.options["causal"] = True
    return problem


class Faulty(Loopback):
    """Loses the second message from member 0 to member 1, or exchanges it with the third one."""

    fault = ""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.held = None

    def post(self, source, target, message):
        if (source, target) == (0, 1) and message.number == 1:
            self.held = message
            return
        super().post(source, target, message)
        if (source, target) == (0, 1) and message.number == 2 and self.fault == "swapped":
            super().post(source, target, self.held)


class Swapped(Faulty):
    fault = "swapped"


@pytest.mark.parametrize("loopback", [Faulty, Swapped], ids=["lost", "swapped"])
@pytest.mark.parametrize("method", METHODS)
def test_lost_and_swapped_messages_are_detected(method, loopback):
    """A message that is lost or out of order raises on every member; no result is returned."""
    failures = []

    def member(own):
        try:
            cp = context_parallel(own, method=method, check=False)
            q, k, v = (cp.shard(x) for x in (problem.q, problem.k, problem.v))
            for _ in range(2):
                out, stats = cp.attention(q, k, v, causal=True, return_stats=True, seqlen_q=20)
                cp.attention_backward(cp.shard(problem.dout), q, k, v, out, stats, causal=True, seqlen_q=20)
        except GroupError as error:
            failures.append(str(error))

    problem = causal()
    run_threads(loopback(4, timeout=1.0).members, member)
    assert len(failures) == 4
    assert "out of order" in failures[0] or "did not send it" in failures[0]


def test_a_message_of_another_size_is_detected():
    """Members with different shapes, which are not compared, raise instead of computing with wrong keys."""

    def member(own):
        length = 8 + 8 * (own.rank == 1)
        x = np.ones((4, 1, length, 1), order="F")
        with pytest.raises(GroupError, match="bytes as 'ring, step 1: keys and values'"):
            context_parallel(own, method="ring", check=False).attention(x, x, x)

    run_threads(Loopback(2, timeout=20).members, member)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", ["before", "between the passes"])
def test_every_member_raises_if_one_ends(stage, method):
    """If a member ends, the others raise within the timeout, and name the exchange that they wait for."""
    problem, messages = causal(), []

    def member(own):
        cp = context_parallel(own, method=method)
        q, k, v, dout = (cp.shard(x) for x in (problem.q, problem.k, problem.v, problem.dout))
        if own.rank == 2 and stage == "before":
            return
        try:
            out, stats = cp.attention(q, k, v, causal=True, return_stats=True, seqlen_q=20)
            if own.rank == 2:
                return
            cp.attention_backward(dout, q, k, v, out, stats, causal=True, seqlen_q=20)
        except GroupError as error:
            messages.append(str(error))

    run_threads(Loopback(4, timeout=0.5).members, member)
    assert len(messages) == 3
    assert all("waited 0.5 s" in message and "did not send it" in message for message in messages)


def test_every_member_raises_if_one_fails():
    """The exception of the member that failed is raised; the others do not wait for the timeout, and later calls raise, too."""
    problem, group, messages = causal(), Loopback(4, timeout=600), []

    def member(own):
        cp = context_parallel(own)
        if own.rank == 1:
            raise KeyError("data")
        arrays = [cp.shard(x) for x in (problem.q, problem.k, problem.v)]
        for _ in range(2):
            with pytest.raises(GroupError, match=r"member 1 failed: KeyError: 'data'"):
                cp.attention(*arrays, causal=True, seqlen_q=20)
        messages.append(own.rank)

    with pytest.raises(KeyError, match="data"):
        run_threads(group.members, member)
    assert sorted(messages) == [0, 2, 3]
    with pytest.raises(GroupError):
        context_parallel(group.members[0]).check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": "bottom_right"}, "causal"),
        ({"softcap": 2.0}, "softcap"),
        ({"method": "all_gather"}, "method all_gather"),
        ({"length": 10}, "queries"),
        ({"scale": 0.5}, "scale"),
    ],
    ids=["causal", "softcap", "method", "length", "scale"],
)
def test_different_arguments_raise_on_every_member(changes, message):
    """Members with different shapes or options all raise an error that names both."""
    changes, found = dict(changes), []
    length = changes.pop("length", 8)

    def member(own):
        options = {"causal": True, "method": "ring"} | (changes if own.rank == 1 else {})
        x = np.ones((4, 2, length if own.rank == 1 else 8, 1), order="F")
        with pytest.raises(ValueError, match="different shapes or options") as caught:
            context_parallel(own).attention(x, x, x, **options)
        found.append(str(caught.value))

    run_threads(Loopback(3, timeout=20).members, member)
    assert len(found) == 3
    assert all(message in text for text in found)


def test_a_refused_call_raises_on_every_member():
    """If one member's arguments are invalid, it raises their error, and the others say which member refused and why."""

    def member(own):
        x = np.ones((4, 2, 8, 1), order="F")
        message = r"softcap is -1" if own.rank == 0 else r"member 0 refused the call: ValueError: softcap is -1"
        with pytest.raises(ValueError, match=message):
            context_parallel(own).attention(x, x, x, softcap=-1.0 if own.rank == 0 else 1.0)

    run_threads(Loopback(3, timeout=20).members, member)


def added(score, b, h, q_idx, kv_idx, bias):
    """A bias for every key."""
    return score + bias[kv_idx]


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
        cp = context_parallel(own, method="ring")
        x = np.ones((4, 2, 8, 1), order="F")
        for given in (options, options, options, options | changed):
            before = group.bytes_sent[own.rank]
            cp.attention(x, x, x, **given)
            if own.rank == 0:
                sent.append(group.bytes_sent[0] - before)

    run_threads(group.members, member)
    assert sent[1] == sent[2]
    assert sent[0] == sent[3] == sent[1] + message_bytes([((4096,), np.uint8)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changed", ["causal", "scale"])
@pytest.mark.parametrize("kind", ["numpy", "cupy"])
def test_known_calls_that_differ_raise_on_every_member(kind, changed, method, request):
    """Calls that every member has made before, made at the same time: the results would be wrong without an error."""
    xp = np if kind == "numpy" else request.getfixturevalue("fake")
    calls = [{"causal": True}, {"causal": "bottom_right"} if changed == "causal" else {"causal": True, "scale": 0.3}]
    caught, together = [], threading.Barrier(3)

    def call(cp, x, options, count=1):
        for _ in range(count):
            cp.attention(x, x, x, **options)
            if kind == "cupy":
                xp.cuda.Device().synchronize()  # the tags are compared on the device
            cp.check()

    def member(own):
        cp = context_parallel(own, method=method)
        x = xp.ones((16, 6, 24, 1), np.float16, order="F")
        try:
            for options in (*calls, *calls):
                call(cp, x, options)
            together.wait(20)
            with pytest.raises(GroupError) as error:
                call(cp, x, calls[own.rank == 1], 2)  # a member that received equal tags raises in its next call
            caught.append(str(error.value))
        finally:
            if kind == "cupy":
                get_plan_cache().clear()  # of this thread

    run_threads(Loopback(3, timeout=20).members, member)
    assert len(caught) == 3
    assert all("different shapes or options" in text for text in caught)


def test_a_call_that_raised_before_its_first_exchange_leaves_no_checksum(monkeypatch):
    """One member's call raises, and the others do not make it: the next exchange of all members is compared with nothing."""
    together = threading.Barrier(2)

    def member(own):
        cp = context_parallel(own, method="ring")
        x = np.ones((4, 2, 8, 1), order="F")
        cp.attention(x, x, x)
        cp.unshard(x)
        together.wait(20)
        if own.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(cp._channel, "start", raised)
                with pytest.raises(MemoryError):
                    cp.attention(x, x, x)
        together.wait(20)
        assert cp.unshard(x).shape == (4, 2, 16, 1)

    def raised(*given):
        raise MemoryError

    run_threads(Loopback(2, timeout=20).members, member)


class Rendezvous:
    """A minimal group: blocking sends that wait until the message is received."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes = rank, size, boxes

    def send(self, array, peer):
        box, taken = self.boxes[self.rank, peer]
        box.put(array.copy())
        assert taken.acquire(timeout=20)

    def receive(self, array, peer):
        box, taken = self.boxes[peer, self.rank]
        array[...] = box.get(timeout=20)
        taken.release()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_object_that_sends_and_receives_is_a_group(size, method):
    """Blocking transfers of a minimal group have one order, so no exchange is a deadlock."""
    boxes = {(i, j): (queue.Queue(1), threading.Semaphore(0)) for i in range(size) for j in range(size)}
    problem = causal(size=size)
    expected = problem.expected()

    def member(own):
        cp = context_parallel(own, method=method)
        q, k, v, dout = (cp.shard(x) for x in (problem.q, problem.k, problem.v, problem.dout))
        out, stats = cp.attention(q, k, v, causal=True, return_stats=True, seqlen_q=20)
        found = cp.attention_backward(dout, q, k, v, out, stats, causal=True, seqlen_q=20)
        whole = [cp.unshard(x, seqlen=20) for x in (out, *found)]
        return [whole[0], cp.unshard(stats, axis=0, seqlen=20), *whole[1:]]

    assert_equal(run_threads([Rendezvous(rank, size, boxes) for rank in range(size)], member), expected)


def test_other_objects_are_refused():
    """An object that is no group is refused, and the message names what is."""
    with pytest.raises(TypeError, match=r"pass a member of a group of cupy_sdpa\.parallel"):
        context_parallel(object())
    assert isinstance(as_exchanger(None), SingleMember)
    assert isinstance(as_exchanger(Rendezvous(0, 1, {})), OrderedExchanges)


class FakeMpi:
    """A communicator of mpi4py, as far as groups use it."""

    def __init__(self, rank, size, boxes):
        self._rank, self._size, self._boxes = rank, size, boxes

    def Get_rank(self):
        return self._rank

    def Get_size(self):
        return self._size

    def Isend(self, array, dest, tag):
        self._boxes[self._rank, dest, tag % 7].put(array.copy())
        return SimpleNamespace(Test=lambda: True, Cancel=lambda: None)

    def Irecv(self, array, source, tag):
        def test():
            try:
                array[...] = self._boxes[source, self._rank, tag % 7].get_nowait()
            except queue.Empty:
                return False
            return True

        return SimpleNamespace(Test=test, Cancel=lambda: None)


FakeMpi.__module__ = "mpi4py.MPI"


def mpi_boxes(size):
    return {(i, j, tag): queue.Queue() for i in range(size) for j in range(size) for tag in range(7)}


@pytest.mark.parametrize("method", METHODS)
def test_mpi(method):
    """A communicator of mpi4py is a group; tags follow the labels of exchanges."""
    problem, boxes = causal(size=3), mpi_boxes(3)
    expected = problem.expected()

    def member(own):
        assert isinstance(as_exchanger(own), MpiGroup)
        cp = context_parallel(own, method=method)
        out = cp.attention(*(cp.shard(x) for x in (problem.q, problem.k, problem.v)), causal=True, seqlen_q=20)
        return cp.unshard(out, seqlen=20)

    for out in run_threads([FakeMpi(rank, 3, boxes) for rank in range(3)], member):
        np.testing.assert_allclose(out, expected[0], atol=1e-12)


def test_mpi_waits_for_a_limited_time():
    """A member of MPI whose peer does not call raises after the timeout, and in every later call."""
    group = MpiGroup(FakeMpi(0, 2, mpi_boxes(2)), timeout=0.1)
    for _ in range(2):
        with pytest.raises(GroupError, match=r"waited 0.1 s for 'keys'"):
            group.exchange([], [Transfer(np.zeros(1, np.uint8), 1)], "keys")


# NCCL


class FakeNccl:
    """``cupy.cuda.nccl.NcclCommunicator``, as far as groups use it; it records the calls."""

    def __init__(self, calls):
        self.calls, self.failure = calls, None

    def rank_id(self):
        return 1

    def size(self):
        return 4

    def send(self, pointer, count, dtype, peer, stream):
        self.calls.append(("send", count, dtype, peer))

    def recv(self, pointer, count, dtype, peer, stream):
        self.calls.append(("recv", count, dtype, peer))

    def check_async_error(self):
        if self.failure:
            raise self.failure

    def abort(self):
        self.calls.append("abort")


FakeNccl.__qualname__ = "NcclCommunicator"
FakeNccl.__module__ = "cupy_backends.cuda.libs.nccl"


@pytest.fixture
def nccl_calls(fake, monkeypatch):
    """The list of the calls of NCCL."""
    calls = []
    functions = SimpleNamespace(NCCL_UINT8=1, groupStart=lambda: calls.append("start"), groupEnd=lambda: calls.append("end"))
    monkeypatch.setattr(nccl, "_nccl", lambda: functions)
    monkeypatch.setattr(NcclGroup, "_watch", lambda self: None)
    return calls


def test_an_exchange_is_one_group_of_nccl(fake, nccl_calls):
    """All transfers of an exchange are one group, as bytes."""
    group = as_exchanger(FakeNccl(nccl_calls))
    assert (group.rank, group.size) == (1, 4)
    x = fake.zeros(32, np.uint8)
    group.exchange([Transfer(x, 2)], [Transfer(x[:16], 0)], "keys")
    assert nccl_calls == ["start", ("send", 32, 1, 2), ("recv", 16, 1, 0), "end"]


class RecordingCommunicator:
    """A communicator that notes when its transfers are enqueued."""

    def __init__(self, rank, size, log):
        self.rank, self.size, self._log = rank, size, log

    @contextmanager
    def grouped(self):
        yield

    def send(self, array, peer, stream):
        self._log.append(("enqueue", self.rank))

    receive = send

    def error(self):
        return ""

    def abort(self):
        self._log.append(("abort", self.rank))


def threads_that_meet(log, timeout=20.0):
    meeting = threading.Barrier(3)
    return [NcclGroup(RecordingCommunicator(rank, 3, log), timeout, meeting) for rank in range(3)]


@pytest.mark.parametrize("empty", [None, 0, 2])
def test_threads_start_every_exchange_together(fake, nccl_calls, empty):
    """No thread enqueues a transfer before all have called, or returns before all have enqueued theirs: between the two, none
    of them can allocate memory, which would wait for the kernel of another GPU. One of them may have nothing to transfer."""
    log = []

    def member(group):
        channel = Channel(group)
        for step in range(3):
            time.sleep(0.01 * ((group.rank + step) % 3))
            log.append(("begin", group.rank))
            x = fake.zeros(0 if group.rank == empty else 8, np.uint8)
            channel.start([Transfer(x, (group.rank + 1) % 3)], [], f"step {step}")
            log.append(("end", group.rank))

    run_threads(threads_that_meet(log), member)
    kinds = [kind for kind, _ in log]
    enqueued = 3 if empty is None else 2
    for step in range(3):
        where = [[i for i, entry in enumerate(log) if entry == (kind, r)][step] for kind in ("begin", "end") for r in range(3)]
        own = [i for i, kind in enumerate(kinds) if kind == "enqueue"][enqueued * step : enqueued * (step + 1)]
        assert max(where[:3]) < min(own) <= max(own) < min(where[3:])


def test_a_thread_that_fails_wakes_the_others(fake, nccl_calls):
    """Threads that wait for a thread that failed, or that does not call in time, raise GroupError."""

    def member(group):
        if group.rank == 1:
            raise ValueError("a wrong shape")
        with pytest.raises(GroupError):
            group.exchange([], [], "keys")
        return "raised"

    with pytest.raises(ValueError, match="a wrong shape"):
        run_threads(threads_that_meet([]), member)
    log = []
    first, *_ = threads_that_meet(log, timeout=0.05)
    with pytest.raises(GroupError, match=r"member 0 waited for 'keys'.*did not call within 0.05 s"):
        first.exchange([], [], "keys")
    assert log == [("abort", 0)]


def test_a_backend_of_cupyx_is_converted(nccl_calls):
    """A backend of cupyx.distributed is used through its communicator, because its own sends do not know bfloat16."""
    backend = type("NCCLBackend", (), {"__module__": "cupyx.distributed._nccl_comm"})()
    backend._comm = FakeNccl(nccl_calls)
    assert isinstance(as_exchanger(backend), NcclGroup)


def test_the_watchdog_aborts_an_exchange_that_hangs(nccl_calls):
    """An exchange that has begun and does not end within the timeout is aborted; one that has not begun may wait."""
    group = NcclGroup(nccl.CupyCommunicator(FakeNccl(nccl_calls)), timeout=10.0)
    before, after = SimpleNamespace(done=False), SimpleNamespace(done=False)
    group._running.append(nccl._Exchange("ring, step 1: keys and values", before, after))
    for now in (1.0, 100.0):  # earlier work of this GPU may take any time
        group._inspect(now)
    group.check()
    before.done = True
    group._inspect(101.0)
    group._inspect(110.0)
    group.check()
    group._inspect(112.0)
    assert "abort" in nccl_calls
    with pytest.raises(GroupError, match=r"waited 10 s for 'ring, step 1: keys and values'"):
        group.check()
    with pytest.raises(GroupError):
        group.exchange([], [], "next")


def test_the_watchdog_forgets_exchanges_that_ended(nccl_calls):
    """The time of an exchange counts from when the one before it ended."""
    group = NcclGroup(nccl.CupyCommunicator(FakeNccl(nccl_calls)), timeout=10.0)
    done = SimpleNamespace(done=True)
    ends = [SimpleNamespace(done=False) for _ in range(2)]
    group._running += [nccl._Exchange(f"{n}", done, end) for n, end in enumerate(ends)]
    group._inspect(1.0)
    ends[0].done = True
    group._inspect(10.5)
    group._inspect(20.0)
    group.check()
    group._inspect(21.0)
    with pytest.raises(GroupError, match="'1'"):
        group.check()


def test_an_error_of_nccl_aborts(nccl_calls):
    """An error that NCCL reports, such as a process that ended, fails the group."""
    communicator = FakeNccl(nccl_calls)
    group = NcclGroup(nccl.CupyCommunicator(communicator))
    communicator.failure = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    group._inspect(0.0)
    assert nccl_calls == ["abort"]
    with pytest.raises(GroupError, match="NCCL_ERROR_REMOTE_ERROR; another member ended or failed"):
        group.check()


# Launchers


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, ("Open MPI", 3, 8, 1)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, ("MPICH, Intel MPI", 0, 2, 0)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, ("Slurm", 5, 8, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ("torchrun", 1, 2, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("MPICH, Intel MPI", 1, 2, 1)),
    ],
    ids=["Open MPI", "MPICH", "Slurm", "torchrun within Slurm", "no local rank"],
)
def test_environments_of_launchers(variables, expected):
    """The variables of each launcher are read."""
    own = environment(variables)
    assert own[:4] == expected
    assert (own.address, own.port) == ("127.0.0.1", launch.DEFAULT_PORT)
    assert environment(variables | {"CUPY_SDPA_PORT": "1234", "MASTER_ADDR": "host"})[4:] == ("host", 1234)


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        ({}, RuntimeError, "no launcher"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, ValueError, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ValueError, "the rank must be lower"),
    ],
    ids=["none", "no number", "rank"],
)
def test_invalid_environments(variables, error, message):
    """Missing and invalid variables are named."""
    with pytest.raises(error, match=message):
        environment(variables)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rank_0_shares_bytes_with_all_processes():
    """Every process gets the bytes of rank 0, in whichever order they connect."""
    port = free_port()
    members = [launch.Environment("test", rank, 4, rank, "127.0.0.1", port) for rank in (2, 1, 3, 0)]
    found = run_threads(members, lambda own: launch.share(own, bytes(range(128)) if own.rank == 0 else b"", 20))
    assert found == [bytes(range(128))] * 4


def test_missing_processes_are_named():
    """If a process does not connect in time, rank 0 names its rank."""
    own = launch.Environment("test", 0, 3, 0, "127.0.0.1", free_port())
    with pytest.raises(GroupError, match="missing are the ranks 1, 2"):
        launch.share(own, b"", 0.2)


# CuPy arrays, on the fake CuPy


@contextmanager
def small_call(fake, size, method, options=None, check=True):
    """A causal problem in float16 on the fake CuPy, for every member."""
    problem = dense(np.random.default_rng(0), size, lengths=(24, 24), heads=(size, 2), batch=1)
    shapes = (16, 2 * size, 24, 1), (16, size, 24, 1), (16, size, 24, 1), (16, 2 * size, 24, 1)
    rng = np.random.default_rng(1)
    problem.q, problem.k, problem.v, problem.dout = (
        np.asfortranarray(rng.standard_normal(shape).astype(np.float16)) for shape in shapes
    )
    problem.options |= {"causal": True} | (options or {})
    given = {name: fake.asarray(x) if hasattr(x, "shape") else x for name, x in problem.options.items()}

    def member(own):
        cp = context_parallel(own, method=method, check=check)
        q, k, v, dout = (cp.shard(fake.asarray(x)) for x in (problem.q, problem.k, problem.v, problem.dout))
        try:
            return repeated(cp, q, k, v, dout)
        finally:
            get_plan_cache().clear()  # of this thread

    def repeated(cp, q, k, v, dout):
        found = []
        for _ in range(3):
            out, stats = cp.attention(q, k, v, return_stats=True, **given)
            sinks = {"return_dsinks": True} if "sinks" in given else {}
            gradients = cp.attention_backward(dout, q, k, v, out, stats, **given, **sinks)
            whole = [cp.unshard(out), cp.unshard(stats, axis=0), *(cp.unshard(x) for x in gradients[:3]), *gradients[3:]]
            found.append([x.get() for x in whole])
        for other in found[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(found[0], other, strict=True))
        return found[0]

    yield problem, member


def assert_close(results, expected):
    for found in results:
        for name, got, wanted in zip(("out", "stats", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
            error = np.abs(got.astype(np.float64) - wanted).max()
            assert error <= 4e-3 * max(1.0, np.abs(wanted).max()), f"{name}: {error}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_cupy_arrays(fake, size, method):
    """Exchanges on a stream of their own give the results of one device: no array is read before it arrives or after it is freed."""
    with small_call(fake, size, method) as (problem, member):
        assert_close(run_threads(Loopback(size, timeout=60).members, member), problem.expected())


@pytest.mark.parametrize("method", METHODS)
def test_cupy_arrays_with_sinks(fake, method):
    """Sinks are merged once, and their gradients are summed over the members."""
    sinks = np.random.default_rng(2).standard_normal(4).astype(np.float32)
    with small_call(fake, 2, method, {"sinks": sinks}) as (problem, member):
        assert_close(run_threads(Loopback(2, timeout=60).members, member), problem.expected())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["window", "ALiBi", "score function", *PACKED])
def test_options_of_cupy_arrays(fake, name, method):
    """Masks, functions and packed sequences with CuPy arrays: slices and gathered rows are in the form that cuDNN needs."""
    problem = problem_of(name, "bfloat16" if method == "ring" else "float16", small=True)
    results = run_threads(Loopback(2, timeout=60).members, results_of(fake, problem, method))
    assert_as_exact_as_one_gpu(results, results_of_one_gpu(fake, problem), exact(problem))


@pytest.mark.parametrize("method", METHODS)
def test_what_cudnn_refuses_is_refused_before_anything_is_sent(fake, method):
    """Gradients with a head dim that the GPU does not support raise on every member, and nothing but the comparison is sent."""
    group = Loopback(2, timeout=60)

    def member(own):
        x = fake.zeros((512, 2, 16, 1), np.float16, order="F")
        stats = fake.zeros((16, 2, 1), np.float32, order="F")
        cp = context_parallel(own, method=method)
        with pytest.raises(Unsupported, match="head dims 512 and 512 are not supported"):
            cp.attention_backward(x, x, x, x, x, stats, causal=True)

    run_threads(group.members, member)
    assert max(group.bytes_sent) == message_bytes([((4096,), np.uint8)])


def test_a_missing_wait_is_detected(fake, monkeypatch):
    """Without the wait for an exchange, results are wrong: the tests on the fake CuPy can fail."""
    from cupy_sdpa.parallel.groups.channel import Pending

    monkeypatch.setattr(Pending, "wait", lambda self: None)
    with small_call(fake, 2, "ring", check=False) as (problem, member), pytest.raises(AssertionError):
        assert_close(run_threads(Loopback(2, timeout=60, max_delay=0.01).members, member), problem.expected())


def test_dropout_is_refused_on_the_gpu(fake):
    """cuDNN's random numbers cannot be offset, so dropout is refused with the reason."""
    x = fake.zeros((16, 2, 8, 1), np.float16, order="F")
    with pytest.raises(Unsupported, match="no input for the place of the call"):
        context_parallel(Loopback(2).members[0]).explain(x, x, x, dropout_p=0.25, seed=1)


def test_dropout_of_a_single_member_is_that_of_one_device():
    """One member makes the call of one device."""
    problem = causal(size=1)
    add_option(np.random.default_rng(0), problem, "dropout")
    results, _ = run(problem, 1, "ring")
    assert_equal(results, problem.expected())


def test_an_exchange_waits_for_the_work_of_the_sender(fake):
    """A member sends what its stream computes before the exchange, also if only the receiver waits for its own stream."""
    both, found = threading.Barrier(2), []

    def member(own):
        cp = context_parallel(own)
        with fake.cuda.Stream(non_blocking=True) as stream:
            x = fake.ones((16, 2, 8, 1), np.float16, order="F")
            cp.unshard(x)
            stream.synchronize()
            x *= 2 + own.rank
            whole = cp.unshard(x)
            both.wait(20)
            if own.rank:
                found.append(whole.get())
            both.wait(20)
            stream.synchronize()

    run_threads(Loopback(2, timeout=60).members, member)
    assert sorted(set(found[0].ravel().tolist())) == [2.0, 3.0]


@pytest.mark.parametrize("kind", ["closure", "operation", "mask", "read"])
def test_functions_of_one_name_are_compared(kind):
    """Members whose functions have one name, and another number, operation, mask or index, all raise an error with both."""
    found = []

    def make(rank):
        if kind == "mask":
            return {"mask_mod": lambda b, h, i, j: i >= j if rank else i > j}
        if kind == "read":
            return {"score_mod": lambda s, b, h, i, j, t: s + (t[i] if rank else t[j]), "tensors": {"t": np.ones(8)}}
        return {"score_mod": lambda s, b, h, i, j: s * (rank + 2.0) if kind == "closure" else np.tanh(s) if rank else np.exp(s)}

    def member(own):
        x = np.ones((4, 2, 4, 1), order="F")
        with pytest.raises(ValueError, match="different shapes or options") as error:
            context_parallel(own, method="ring").attention(x, x, x, **make(own.rank))
        found.append(str(error.value))

    run_threads(Loopback(2, timeout=20).members, member)
    assert all("make.<locals>.<lambda>" in text for text in found)
    assert len(found) == 2


@pytest.mark.parametrize("method", METHODS)
def test_the_padding_of_dout_is_not_read_for_the_gradient_of_sinks(method):
    """dsinks is that of one GPU, with NaN after the lengths."""
    problem = dense(np.random.default_rng(3), 2, lengths=(11, 11), heads=(2, 1), batch=2)
    problem.options |= {"seq_lens_q": np.array([4, 0], np.int32), "sinks": np.array([0.5, -1.0], np.float32)}
    out, stats = attention(problem.q, problem.k, problem.v, return_stats=True, **problem.options)
    *_, wanted = attention_backward(
        problem.dout, problem.q, problem.k, problem.v, out, stats, return_dsinks=True, **problem.options
    )
    problem.dout[:, :, 4:, 0] = problem.dout[..., 1] = np.nan
    results, _ = run(problem, 2, method)
    for *_, dsinks in results:
        np.testing.assert_allclose(dsinks, wanted, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_empty_packed_sequences_with_dropout(method):
    """The maximum lengths may be 1 where every sequence is empty; the dropout mask is then empty."""
    problem = packed(np.random.default_rng(0), 2, heads=(2, 1), longest=1)
    problem.options |= {"max_seqlen_q": 1, "max_seqlen_kv": 1, "dropout_p": 0.5, "seed": 3}
    results, _ = run(problem, 2, method)
    assert all(found.size == 0 for result in results for found in result)


@pytest.mark.parametrize(("method", "size"), [*((method, 2) for method in METHODS), ("ring", 1)])
def test_a_bias_of_the_callers_maximum_lengths(method, size):
    """With packed sequences the axes of a bias are max_seqlen_q and max_seqlen_kv, which may exceed the longest sequence."""
    problem = packed(np.random.default_rng(5), size, heads=(2, 1))
    starts = problem.options["cu_seqlens_q"], problem.options["cu_seqlens_kv"]
    longest = [int(np.diff(x).max(initial=0)) for x in starts]
    most = longest[0] + 3, longest[1] + 2
    problem.options |= {"max_seqlen_q": most[0], "max_seqlen_kv": most[1]}
    shape = most[1], most[0], problem.q.shape[1], len(starts[0]) - 1
    problem.options["bias"] = np.asfortranarray(np.random.default_rng(6).standard_normal(shape))
    out, stats = attention(problem.q, problem.k, problem.v, return_stats=True, **problem.options)
    gradients = attention_backward(problem.dout, problem.q, problem.k, problem.v, out, stats, **problem.options)
    results, _ = run(problem, size, method)
    assert_equal(results, [out, stats, *gradients], 1e-6)
    problem.options |= {"max_seqlen_q": longest[0] - 1}
    with pytest.raises(ValueError, match=f"cu_seqlens_q has a sequence of {longest[0]}; max_seqlen_q is {longest[0] - 1}"):
        run(problem, size, method)
