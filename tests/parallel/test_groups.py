"""What groups compute: every method, mask and option, both passes; the choice of the method; and shards of arrays."""

import gc
import sys
import threading

import numpy as np
import pytest
from engines import Engine
from parallel_cases import METHODS, TEXT_BYTES, Problem, assert_close
from replayed_calls import OF_NCCL, arguments_read, functions_run
from validated_steps import validated_steps

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, get_plan_cache
from cupy_sdpa.check.combine import ONLY_WITH
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads

#: Random problems of each engine: the number of all and of those that are not slow. Groups plan in every thread on a GPU.
COUNTS = {"numpy": (36, 9), "fake": (7, 1), "cupy": (9, 9)}
PROBLEMS = [
    pytest.param(name, number, marks=[pytest.mark.slow] * (number >= quick) + [pytest.mark.gpu] * (name == "cupy"))
    for name, (count, quick) in COUNTS.items()
    for number in range(count)
] + [pytest.param("numpy", number, marks=pytest.mark.sweep) for number in range(100, 200)]
#: The engines of tests that compile several kernels.
ENGINES = ["numpy", pytest.param("fake", marks=pytest.mark.slow), pytest.param("cupy", marks=pytest.mark.gpu)]
#: Options that meet in a group: parts of masks, empty parts, sinks that are merged once, and sequences without positions.
CORNERS = {
    "causal": {"options": {"causal": "bottom_right"}, "sq": 25, "skv": 33},
    "window": {"options": {"window": (9, 3, "top_left")}, "sq": 33, "skv": 40},
    "window of few keys": {"options": {"causal": "top_left", "window": (2, None, "top_left"), "sinks": "high"}, "sq": 40, "skv": 40},
    "lengths": {"options": {"seq_lens_q": "some_zero", "sinks": "normal", "return_dsinks": True}, "sq": 12, "skv": 12},
    "bias and ALiBi": {"options": {"bias": ("kqh1", "float32", "normal"), "alibi_slopes": "usual"}, "sq": 18, "skv": 18},
    "softcap and ALiBi": {"options": {"softcap": 2.0, "alibi_slopes": "usual"}, "sq": 18, "skv": 18},
    "a bias that masks rows": {"options": {"bias": ("1qh1", "float16", "inf"), "sinks": "normal"}, "sq": 9, "skv": 12},
    "functions": {"options": {"score_mod": ("positions", "float32"), "mask_mod": ("dilated", "")}, "sq": 20, "skv": 21},
    "packed": {"options": {"packed": ("random", "same", 0, 0, 0, "int32"), "causal": "top_left", "window": (6, None, "top_left"),
                           "sinks": "normal"}, "sq": 17, "skv": 17},
    "packed, window on both sides": {"options": {"packed": ("random", "same", 0, 0, 0, "int32"), "window": (9, 3, "top_left")},
                                     "sq": 17, "skv": 17},
    "packed, bottom right": {"options": {"packed": ("random", "same", 0, 0, 0, "int32"), "causal": "bottom_right"},
                             "sq": 17, "skv": 17},
    "packed functions": {"options": {"packed": ("full", "random", 0, 0, 0, "int32"), "score_mod": ("bias_bk", "float32")},
                      "sq": 21, "skv": 10},
    "empty sequences": {"options": {"packed": ("zero", "zero", 0, 0, 0, "int32")}, "sq": 1, "skv": 1},
    "more members than positions of a chunk": {"options": {"causal": "top_left"}, "sq": 13, "skv": 13, "hq": 8, "hkv": 8, "members": 8},
}  # fmt: skip


@pytest.mark.parametrize(("engine", "number"), PROBLEMS, indirect=["engine"])
def test_random_problems(engine, number):
    """Groups of 1 to 4 members give the results of one device."""
    others = ONLY_WITH["parallel"] - ({"seq_lens_q", "seq_lens_kv"} if number % 2 else {"causal", "window"})  # refused together
    engine.agrees(engine.draw({"parallel"}, number, others=others, most=6), refused=True)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CORNERS)
def test_corners(engine, name, method):
    """Every method gives the results of one device where the parts of members are empty, cropped, or share a row."""
    corner = {"hq": 4, "hkv": 2, "members": 2, **CORNERS[name]}
    options = corner["options"] | {"parallel": (method, corner.pop("members"))}
    engine.agrees(engine.case(**{**corner, "options": options}, d=16, dv=16, b=2, backward=True))


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("options", [{}, {"packed": ("full", "same", 0, 0, 0, "int32")}], ids=["dense", "packed"])
def test_parts_begin_at_any_address(engine, options):
    """Chunks of 7 positions: the rows of the log-sum-exp of a part are not at a multiple of 16 bytes, which cuDNN requires."""
    options = {**options, "causal": "top_left", "parallel": ("ring", 3)}
    engine.agrees(engine.case(d=16, dv=16, sq=42, skv=42, backward=True, options=options))


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("lengths", ["random", "zero"])
def test_dropout_and_bias_of_packed_sequences(engine, lengths, members):
    """Random numbers equal one device's; the axes of a bias are the maximum lengths, also without positions."""
    options = {
        "packed": (lengths, "same", 0, 0, 0, "int32"),
        "dropout": (0.5, "seed", 3, 8),
        "bias": ("kqhb", "float32", "normal"),
    }
    case = engine.case(hq=2, sq=9, skv=9, b=3, backward=True, options={**options, "parallel": ("ring", members)})
    engine.agrees(case, refused=True)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_delayed_members_change_nothing(engine, method):
    """Results have the same bits in whichever order threads run, in repeated calls, and with one or several members."""
    size = 4 if method == "all_to_all" else 3
    problem = Problem(length=26, d=16, dtype=engine.dtype if engine.on_cudnn else np.float64)
    put = engine.put if engine.on_cudnn else np.asarray
    wanted = run_threads(Loopback(size, timeout=60).members, problem.member(method, put))
    assert_close(wanted, problem.expected(), 4e-3 if engine.on_cudnn else 1e-12)
    delayed = Loopback(size, timeout=60, max_delay=0.005, seed=1)
    found = run_threads(delayed.members, problem.member(method, put, calls=4))
    for one, other in zip(wanted, found, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_changed_scale_is_used(method):
    """A repeated call with another scale, of Python or numpy, is not computed with the scale of the first call."""
    q, scales = Problem().q, (0.25, np.float32(1.0), np.float64(0.25))

    def member(own):
        cp = context_parallel(own, method=method)
        x = cp.shard(q)
        return [cp.unshard(cp.attention(x, x, x, scale=scale, causal=True, seqlen_q=20), seqlen=20) for scale in scales]

    for results in run_threads(Loopback(2, timeout=60).members, member):
        for scale, result in zip(scales, results, strict=True):
            np.testing.assert_allclose(result, cupy_sdpa.attention(q, q, q, scale=float(scale), causal=True), atol=1e-12)


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


# The report


def explained(size, shape, keys=None, rank=0, **options):
    """The report of a member for dense arrays of the given shape."""
    d, heads, length, batch = shape
    q, k = (np.zeros((d, h, length // size, batch), np.float16, order="F") for h in (heads, keys or heads))
    return context_parallel(Loopback(size).members[rank]).explain(q, k, k, **options)


@pytest.mark.parametrize("engine", ["numpy", "fake"], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_calls_run_as_explained(engine, method):
    """The report has the plans, the steps and the memory of every call, and the bytes that each member sends; it exchanges nothing."""
    lengths, group = engine.put(np.array([40], np.int32)), Loopback(2, timeout=60)

    def member(own):
        cp = context_parallel(own, method=method, check=False)
        q, k, v, dout = (engine.normal(n, 16, 4, 24, 1) for n in range(4))
        options = {
            "causal": True,
            "seq_lens_q": lengths,
            "seq_lens_kv": lengths,
            "sinks": engine.normal(4, 4, dtype=np.float32),
        }
        report = cp.explain(q, k, v, **options)
        assert all(report.launches[name] and all(report.launches[name]) for name in ("forward", "backward")), report
        assert group.bytes_sent[own.rank] == 0
        assert report.method == method
        assert report.forward.calls == (1 if method == "all_to_all" else len(report.parts))
        for name, cost in (("forward", report.forward), ("backward", report.backward)):
            assert cost.memory == report.launches[name][0].temporary_bytes
        launches = [x for found in report.launches.values() for x in found]
        assert all(x.steps for x in launches)
        assert all(str(x.problem) in str(report) for x in launches)
        if engine.on_cudnn:
            assert all(x.plan for x in launches)
            before = get_plan_cache().misses
        out, stats = cp.attention(q, k, v, return_stats=True, **options)
        assert group.bytes_sent[own.rank] == report.forward.sent
        cp.attention_backward(dout, q, k, v, out, stats, **options)
        assert group.bytes_sent[own.rank] == report.forward.sent + report.backward.sent
        if engine.on_cudnn:
            assert get_plan_cache().misses == before
            get_plan_cache().clear()  # of this thread

    run_threads(group.members, member)


@pytest.mark.parametrize("sinks", [False, True])
def test_parts_with_sinks_have_a_finite_bias(fake, sinks):
    """A GPU reads -inf in a bias of one element per query as 0 if there are sinks; the parts of a ring have no sinks."""
    x, options = fake.zeros((16, 2, 24, 1), np.float16, order="F"), {"bias": fake.zeros((1, 48, 2, 1), np.float32, order="F")}
    if sinks:
        options["sinks"] = fake.zeros(2, np.float32)
    report = context_parallel(Loopback(2).members[0], method="ring").explain(x, x, x, **options)
    steps = [str(step) for launch in report.launches["backward"] for step in launch.steps]
    assert any("replace_infinite" in step for step in steps) == sinks, steps


@pytest.mark.parametrize("rank", range(4))
def test_a_causal_ring_has_three_shapes(rank):
    """A causal step is one call: causal, all queries with half of the keys, or half of the queries with all keys."""
    shapes = [
        "16 queries, 16 keys, causal from the top left" if step == 0
        else "16 queries, 8 keys, no mask" if step <= rank else "8 queries, 16 keys, no mask" for step in range(4)
    ]  # fmt: skip
    assert explained(4, (8, 1, 64, 1), rank=rank, method="ring", causal=True).parts == tuple(shapes)


def test_a_causal_gather_joins_neighbors():
    """A call for each chunk of queries; the chunks in the middle, of the last member, are one."""
    parts = explained(4, (8, 1, 64, 1), rank=0, method="all_gather", causal=True).parts
    assert parts == ("8 queries, 8 keys, causal from the top left", "8 queries, 64 keys, causal from the bottom right")
    parts = explained(4, (8, 1, 64, 1), rank=3, method="all_gather", causal=True).parts
    assert parts == ("16 queries, 40 keys, causal from the bottom right",)


#: The members, the shape, the key/value heads and the options of calls; the method, and words of the reason.
CHOICES = {
    "causal": (2, (128, 32, 65536, 1), 8, {"causal": True}, "ring", "hidden behind calls"),
    "multi-head": (2, (128, 32, 65536, 1), 32, {"causal": True}, "all_to_all", "in both passes, the ring 3"),
    "window": (4, (128, 8, 4096, 1), 8, {"window": (512, 0)}, "all_to_all", "window"),
    "window, heads cannot be shared out": (4, (128, 6, 4096, 1), 6, {"window": (512, 0)}, "all_gather", "window"),
    "ALiBi, heads cannot be shared out": (4, (128, 6, 4096, 1), 6, {"alibi_slopes": cupy_sdpa.alibi_slopes(6)}, "all_gather", "positions"),
    "ALiBi": (4, (128, 8, 4096, 1), 8, {"alibi_slopes": cupy_sdpa.alibi_slopes(8)}, "all_to_all", "positions"),
    "requested": (8, (128, 32, 65536, 1), 8, {"causal": True, "method": "all_gather"}, "all_gather", "requested"),
    "one member": (1, (128, 32, 4096, 1), 8, {"causal": True}, "ring", "one member"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_of_the_method_is_explained(name):
    """The report names the method and why it was chosen."""
    size, shape, keys, options, method, reason = CHOICES[name]
    report = explained(size, shape, keys, **options)
    assert report.method == method
    assert reason in report.reason
    assert f"method: {method}: " in str(report)
    assert "sends" in str(report)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (100, 0)}, {"softcap": 1.0, "method": "all_to_all"}], ids=str
)
def test_all_members_choose_the_same_method(options):
    """The choice does not depend on the rank, though the bytes that are sent do."""
    rng = np.random.default_rng(0)
    for _ in range(3):
        size, length, heads = int(rng.choice([2, 3, 4, 8])), int(rng.integers(1, 5000)), int(rng.choice([1, 2, 4, 8, 6]))
        chosen = set()
        for own in Loopback(size).members:
            cp = context_parallel(own)
            x = cp.shard(np.zeros((8, heads, length, 1), np.float16, order="F"))
            try:
                chosen.add(cp.explain(x, x, x, seqlen_q=length, seqlen_kv=length, **options).method)
            except Unsupported:
                chosen.add("refused")
        assert len(chosen) == 1


@pytest.mark.parametrize("method", METHODS)
def test_what_cudnn_refuses_is_refused_before_anything_is_sent(fake, method):
    """Gradients with a head dim that the GPU does not support raise on every member; only the comparison is sent."""
    group = Loopback(2, timeout=60)

    def member(own):
        x = fake.zeros((512, 2, 16, 1), np.float16, order="F")
        stats = fake.zeros((16, 2, 1), np.float32, order="F")
        with pytest.raises(Unsupported, match="head dims 512 and 512 are not supported"):
            context_parallel(own, method=method).attention_backward(x, x, x, x, x, stats, causal=True)

    run_threads(group.members, member)
    assert max(group.bytes_sent) == TEXT_BYTES


# Shards


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 33])
def test_shards_are_partitions(length, size):
    """Every position of every packed sequence belongs to one member; position_ids names the positions of its part."""
    starts, members = np.cumsum([0, length, 0, 3]), [context_parallel(own) for own in Loopback(size).members]
    ids, positions = np.arange(length + 3.0)[None], np.concatenate([np.arange(length), np.arange(3)])
    parts = [cp.shard(ids, axis=-1, cu_seqlens=starts)[0].astype(int) for cp in members]
    assert sorted(np.concatenate(parts)) == list(range(length + 3))
    for cp, part in zip(members, parts, strict=True):
        assert (np.diff(part) > 0).all()
        assert (positions[part] == cp.position_ids(cu_seqlens=starts)).all()
        assert (cp.position_ids(length) == positions[part[part < length]]).all()
    if (length, size) == (16, 4):  # the zigzag order
        assert members[1].position_ids(16).tolist() == [2, 3, 12, 13]


def test_unshard_without_the_length_is_refused_if_it_is_needed():
    """Members that derive different lengths from their parts raise, also in the next call; with the length all is well."""
    x, group = np.arange(7.0), Loopback(2, timeout=20)

    def member(own):
        cp = context_parallel(own)
        part = cp.shard(x, axis=0)
        for _ in range(2):
            with pytest.raises(ValueError, match="different shapes or options"):
                cp.unshard(part, axis=0)
            assert np.array_equal(cp.unshard(part, axis=0, seqlen=7), x)
        with pytest.raises(ValueError, match=r"member 0 rejected the call|axis is 1"):
            cp.unshard(part, axis=1 if own.rank == 0 else 0)

    run_threads(group.members, member)
    assert max(group.bytes_sent) < 5 * TEXT_BYTES  # a known length is not compared again


@pytest.mark.slow
def test_a_configuration_in_use_is_not_compared_again():
    """Also if more others are compared in between than a group remembers."""
    group, sent = Loopback(2, timeout=20), []

    def member(own):
        cp = context_parallel(own)
        for length in range(1100):
            others = cp.shard(np.arange(float(length)), axis=0)
            cp.unshard(others, axis=0, seqlen=length)
            part = cp.shard(np.arange(7.0), axis=0)
            before = group.bytes_sent[own.rank]
            cp.unshard(part, axis=0, seqlen=7)
            sent.append(group.bytes_sent[own.rank] - before)

    run_threads(group.members, member)
    assert max(sent[20:]) < TEXT_BYTES


@pytest.mark.parametrize("method", METHODS)
def test_validated_steps(method):
    """Every step of a member is compared with numpy; exchanges are not repeated."""
    problem = Problem(length=26, heads=(3, 3))
    with validated_steps():
        results = run_threads(Loopback(3, timeout=20).members, problem.member(method))
    assert_close(results, problem.expected())


@pytest.mark.parametrize("size", [1, 2])
def test_a_repeated_call_is_not_parsed(size, engine):
    """It computes with the call's arrays, lengths and offsets, and enters a third as many functions as a parsed call."""
    arrays = [engine.normal(n, 16, 2, 24, 2) for n in range(6)]
    lengths = [engine.put(np.array(x, np.int32)) for x in ([24, 7], [11, 0])]
    expected = [attention(*arrays[:3], seq_lens_kv=x) for x in lengths] + [attention(*arrays[3:], seq_lens_kv=lengths[0])]

    def member(group):
        cp = context_parallel(group)
        calls = [(arrays[:3], lengths[0]), (arrays[:3], lengths[1]), (arrays[3:], lengths[0])]
        for _ in range(3):
            found = [cp.unshard(cp.attention(*map(cp.shard, x), seq_lens_kv=n)) for x, n in calls]
        if not engine.on_cudnn:
            with pytest.raises(ValueError, match="seq_lens_kv"):
                cp.attention(*map(cp.shard, arrays[:3]), seq_lens_kv=np.array([24, 25], np.int32))
        else:
            get_plan_cache().clear()  # of this thread
        return found

    for found in run_threads(Loopback(size).members, member):
        for one, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(engine.get(one), engine.get(want), atol=engine.tolerance)
    if size == 1:
        cp = context_parallel(Loopback(1).members[0])
        first = functions_run(cp.attention, *arrays[:3])
        assert functions_run(cp.attention, *arrays[:3]) < first / 3


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_call_reads_its_arguments_once(method, size):
    """Each array and the options are read once, also in another dtype: the member's calls are built from what was read."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((8, 4, 16, 1)).astype(np.float32, order="F") for _ in range(4)]
    options = {
        "causal": True, "softcap": 2.0, "seq_lens_kv": np.full(1, 15, np.int32), "score_mod": lambda s, b, h, i, j, x: s * x[h],
        "tensors": {"x": np.ones(4, np.float32)}, "compute_dtype": "float16",
    }  # fmt: skip

    def member(group):
        cp = context_parallel(group, method=method)
        q, k, v, dout = map(cp.shard, arrays)
        results = []
        forward = arguments_read(lambda: results.extend(cp.attention(q, k, v, return_stats=True, **options)))
        return forward, arguments_read(lambda: cp.attention_backward(dout, q, k, v, *results, **options))

    for passes in run_threads(Loopback(size).members, member):
        for read in passes:
            assert {name for _, name in read} >= {"q", "k", "v", "options", "seq_lens_kv", "tensors['x']"}
            assert set(read.values()) == {1}, read


class Counted:
    """A member of a group that counts its exchanges, and hides its own functions from the profiler.

    How many functions an exchange enters is a property of the group: a loopback group copies every message in Python, and NCCL
    takes all of them in one call.
    """

    def __init__(self, member):
        self._member, self.rank, self.size, self.exchanges = member, member.rank, member.size, 0

    def exchange(self, *arguments):
        self.exchanges += 1
        self._hidden(self._member.exchange, *arguments)

    def check(self):
        self._hidden(self._member.check)

    @staticmethod
    def _hidden(function, *arguments):
        profiler = sys.getprofile()
        sys.setprofile(None)
        try:
            function(*arguments)
        finally:
            sys.setprofile(profiler)


#: The most functions of the package that a repeated call of a member enters outside its exchanges, and for each exchange; and
#: the most of a whole call of two GPUs.
OF_CALL, OF_EXCHANGE, OF_TWO_GPUS = 20, 2, 40
#: The number of calls that are counted. At least one of them gets the addresses of an earlier one.
TIMES = 12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_host_work_of_repeated_calls(size, method, fake):
    """What a member computes between two exchanges is one CUDA graph, in both passes, with the comparison of the calls."""
    engine = Engine("fake", fake)
    arrays = [engine.normal(n, 8, 4, 16, 1) for n in range(4)]
    options = {"causal": True, "seq_lens_kv": fake.full(1, 16, np.int32)}

    def member(own):
        with fake.cuda.Stream() as stream:  # on which addresses do not depend on what other threads allocate
            count(Counted(own))
            stream.synchronize()
            get_plan_cache().clear()  # of this thread

    def count(group):
        cp = context_parallel(group, method=method)
        q, k, v, dout = map(cp.shard, arrays)

        def forward():
            return cp.attention(q, k, v, return_stats=True, **options)

        def backward():
            return cp.attention_backward(dout, q, k, v, *results, **options)

        for call in (forward, backward):
            results = forward()
            for _ in range(8):
                kept = call()
            group.exchanges = 0
            counts = [functions_run(call) for _ in range(TIMES)]
            exchanges = group.exchanges // TIMES
            most = OF_CALL + OF_EXCHANGE * exchanges
            assert min(counts) <= most, (call.__name__, counts, most)
            assert size > 2 or most + OF_NCCL * exchanges <= OF_TWO_GPUS
            del kept

    fake.cuda.Device().synchronize()  # the arrays are written
    run_threads(Loopback(size).members, member)


def test_host_work_of_repeated_calls_on_numpy():
    """A group of one enters few more functions than the same call on one device."""
    x = [np.ones((8, 1, 4, 1), np.float32, order="F") for _ in range(3)]
    cp = context_parallel()
    for _ in range(2):
        attention(*x, return_stats=True)
        cp.attention(*x)
    assert functions_run(cp.attention, *x) <= functions_run(attention, *x, return_stats=True) + 11


def test_repeated_calls_keep_no_memory(fake):
    """A captured call allocates its messages in every call: between two calls other work uses their memory."""
    x = np.ones((64, 2, 64, 2), np.float16, order="F")

    def member(group):
        cp = context_parallel(group, method="ring")
        with fake.cuda.Stream(non_blocking=True) as stream:
            q = cp.shard(fake.asarray(x))
            for _ in range(8):
                cp.attention(q, q, q)
            stream.synchronize()
            recorded = get_plan_cache().recording_bytes
            get_plan_cache().clear()
        return recorded

    pool = fake.get_default_memory_pool()
    before = pool.used_bytes()
    recorded = run_threads(Loopback(2).members, member)
    assert 0 < max(recorded) < 20 * (128 << 10), "graphs own the messages"
    gc.collect()
    assert pool.used_bytes() <= before + 2 * x.nbytes


def test_offsets_of_packed_sequences_are_in_the_key():
    """They are read on the host: a call with other offsets of the same shape is another call."""
    x = np.random.default_rng(0).standard_normal((8, 2, 12), np.float32).copy(order="F")
    cp = context_parallel(Loopback(1).members[0])
    for starts in ([0, 4, 12], [0, 9, 12]) * 2:
        options = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), np.array(starts, np.int32))
        want = attention(x, x, x, **options, max_seqlen_q=9, max_seqlen_kv=9)
        np.testing.assert_allclose(cp.attention(x, x, x, **options), want, atol=1e-5)
