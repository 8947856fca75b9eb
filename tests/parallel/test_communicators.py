"""Groups of communicators: any object that sends and receives, MPI, NCCL with its watchdog, and processes of launchers."""

import gc
import queue
import socket
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from parallel_cases import METHODS, Problem, assert_close
from replayed_calls import OF_NCCL, functions_run

from cupy_sdpa.parallel import Environment, GroupError, Loopback, MpiGroup, NcclGroup, environment, launchers, nccl, run_threads
from cupy_sdpa.parallel.channel import Channel
from cupy_sdpa.parallel.convert import as_exchanger
from cupy_sdpa.parallel.group import Transfer


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
    problem = Problem(heads=(size, size), length=11)
    found = run_threads([Rendezvous(rank, size, boxes) for rank in range(size)], problem.member(method))
    assert_close(found, problem.expected())


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


def test_mpi():
    """A communicator of mpi4py is a group; tags follow the labels of exchanges."""
    problem, boxes = Problem(), mpi_boxes(3)
    found = run_threads([FakeMpi(rank, 3, boxes) for rank in range(3)], problem.member("ring"))
    assert_close(found, problem.expected())


def test_mpi_waits_for_a_limited_time():
    """A member of MPI whose peer does not call raises after the timeout, and in every later call."""
    group = MpiGroup(FakeMpi(0, 2, mpi_boxes(2)), timeout=0.1)
    for _ in range(2):
        with pytest.raises(GroupError, match=r"waited 0.1 s for 'keys'"):
            group.exchange([], [Transfer(np.zeros(1, np.uint8), 1)], "keys")


# NCCL


class FakeNccl:
    """``cupy.cuda.nccl.NcclCommunicator``, as far as groups use it; it records the calls."""

    def __init__(self, calls, rank=1, size=4):
        self.calls, self.failure, self._of = calls, None, (rank, size)

    def rank_id(self):
        return self._of[0]

    def size(self):
        return self._of[1]

    def send(self, pointer, count, dtype, peer, stream):
        self.calls.append(("send", count, dtype, peer))

    def recv(self, pointer, count, dtype, peer, stream):
        self.calls.append(("recv", count, dtype, peer))

    def check_async_error(self):
        if self.failure:
            raise self.failure

    def abort(self):
        self.calls.append(("abort",))


FakeNccl.__qualname__ = "NcclCommunicator"
FakeNccl.__module__ = "cupy_backends.cuda.libs.nccl"


@pytest.fixture
def nccl_calls(fake, monkeypatch):
    """The list of the calls of NCCL."""
    calls = []
    functions = SimpleNamespace(NCCL_UINT8=1, groupStart=lambda: calls.append("start"), groupEnd=lambda: calls.append("end"))
    core = SimpleNamespace(group=contextmanager(lambda: iter([calls.append("group")])))
    modules = {"cupy.cuda": SimpleNamespace(nccl=functions), "nccl": SimpleNamespace(core=core), "nccl.core": core}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_an_exchange_is_one_group_of_nccl(fake, nccl_calls):
    """All transfers of an exchange are one group, as bytes."""
    group = as_exchanger(FakeNccl(nccl_calls))
    assert (group.rank, group.size) == (1, 4)
    x = fake.zeros(32, np.uint8)
    group.exchange([Transfer(x, 2)], [Transfer(x[:16], 0)], "keys")
    assert nccl_calls == ["start", ("send", 32, 1, 2), ("recv", 16, 1, 0), "end"]
    group.abort("the end")  # of its watchdog


def test_host_work_of_an_exchange(fake, nccl_calls):
    """An exchange enters as many functions of the package with one message as with several."""
    group = as_exchanger(FakeNccl(nccl_calls))
    for count in (1, 1, 3):
        transfers = [Transfer(fake.zeros(32, np.uint8), peer) for peer in range(count)]
        functions = functions_run(group.exchange, transfers, transfers, "keys")
    assert functions <= OF_NCCL
    group.abort("the end")  # of its watchdog


def threads_that_meet(log, timeout=20.0):
    meeting = threading.Barrier(3)
    return [NcclGroup(nccl.CupyCommunicator(FakeNccl(log, rank, 3)), timeout, meeting) for rank in range(3)]


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
            channel.start_exchange([Transfer(x, (group.rank + 1) % 3)], [], f"step {step}")
            log.append(("end", group.rank))

    members = threads_that_meet(log)
    run_threads(members, member)
    kinds = [kind for kind, *_ in log]
    enqueued = 3 if empty is None else 2
    for step in range(3):
        where = [[i for i, entry in enumerate(log) if entry == (kind, r)][step] for kind in ("begin", "end") for r in range(3)]
        own = [i for i, kind in enumerate(kinds) if kind == "send"][enqueued * step : enqueued * (step + 1)]
        assert max(where[:3]) < min(own) <= max(own) < min(where[3:])
    for group in members:
        group.abort("the end")  # of its watchdog


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
    assert log == [("abort",)]


def test_other_communicators(fake, nccl_calls):
    """A backend of cupyx.distributed is used through its communicator, because its own sends do not know bfloat16. nccl4py has
    functions of other names.
    """
    backend = type("NCCLBackend", (), {"__module__": "cupyx.distributed._nccl_comm"})()
    backend._comm = FakeNccl(nccl_calls)
    assert isinstance(as_exchanger(backend), NcclGroup)
    own = type("Communicator", (), {"__module__": "nccl.core.communicator", "rank": 1, "nranks": 4})()
    own.send = lambda array, peer, stream: nccl_calls.append(("send", array.nbytes, peer))
    own.recv = lambda array, peer, stream: nccl_calls.append(("recv", array.nbytes, peer))
    own.get_async_error = lambda: SimpleNamespace(name="Success")
    own.abort = lambda: nccl_calls.append("abort")
    group = as_exchanger(own)
    assert (group.rank, group.size) == (1, 4)
    group.exchange([Transfer(fake.zeros(8, np.uint8), 2)], [Transfer(fake.zeros(4, np.uint8), 0)], "keys")
    group.check()
    own.get_async_error = lambda: SimpleNamespace(name="RemoteError")
    group._inspect(0.0)
    assert nccl_calls == ["group", ("send", 8, 2), ("recv", 4, 0), "abort"]
    with pytest.raises(GroupError, match="RemoteError"):
        group.check()


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
    assert ("abort",) in nccl_calls
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
    assert nccl_calls == [("abort",)]
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
    assert (own.address, own.port) == ("127.0.0.1", launchers.DEFAULT_PORT)
    assert environment(variables | {"CUPY_SDPA_PORT": "1234", "MASTER_ADDR": "host"})[4:] == ("host", 1234)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rank_0_shares_bytes_with_all_processes():
    """Every process gets the bytes of rank 0, in whichever order they connect."""
    port = free_port()
    members = [Environment("test", rank, 4, rank, "127.0.0.1", port) for rank in (2, 1, 3, 0)]
    found = run_threads(members, lambda own: launchers.share(own, bytes(range(128)) if own.rank == 0 else b"", 20))
    assert found == [bytes(range(128))] * 4


def test_missing_processes_are_named():
    """If a process does not connect in time, rank 0 names its rank."""
    own = Environment("test", 0, 3, 0, "127.0.0.1", free_port())
    with pytest.raises(GroupError, match="missing are the ranks 1, 2"):
        launchers.share(own, b"", 0.2)


def test_a_group_that_ends_after_its_last_exchange(fake):
    """What members received is right, although no call waited for it, and other work reuses the memory of the senders."""
    streams = [fake.cuda.Stream(non_blocking=True) for _ in range(2)]

    def work(member):
        with streams[member.rank]:
            mine, other = fake.full(512, member.rank + 1.0), fake.empty(512)
            member.exchange([Transfer(mine, 1 - member.rank)], [Transfer(other, 1 - member.rank)], "last")
            return other

    received = run_threads(Loopback(2).members, work)
    gc.collect()
    for stream in streams:
        with stream:
            fake.full(512, np.nan)
    streams[1].synchronize()
    streams[0].synchronize()
    assert [set(x.get().tolist()) for x in received] == [{2.0}, {1.0}]
