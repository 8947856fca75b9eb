"""Groups of threads on numpy arrays: every method, mask and option, both passes, compared with the reference in float64."""

import csv
import os
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from parallel_cases import METHODS, Problem, add_band, add_option, assert_equal, dense, normal, packed, run

import cupy_sdpa
from cupy_sdpa import Unsupported
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
from cupy_sdpa.parallel.groups.channel import message_bytes
from cupy_sdpa.parallel.planning.layout import Interval, Layout
from cupy_sdpa.parallel.planning.report import Machine
from cupy_sdpa.parallel.planning.tiles import tiles
from cupy_sdpa.problem.band import Band

NIGHTLY = os.environ.get("CUPY_SDPA_NIGHTLY", "0") != "0"
ROOT = Path(__file__).parents[2]
SIZES = (1, 2, 3, 4, 8)
BANDS = ("full", "causal", "window", "causal window")
#: Options that are drawn together; each is used with probability 1/2.
OPTIONS = {
    "no option": (),
    "scores": ("scale", "softcap", "sinks"),
    "ALiBi": ("alibi", "softcap", "sinks"),
    "bias and mask": ("bias", "mask", "sinks"),
    "functions": ("score function", "mask function", "alibi"),
    "dropout": ("dropout", "bias"),
    "lengths": ("lengths", "sinks", "alibi"),
}


def heads_for(rng, size, method):
    """The numbers of key/value heads and of query heads per key/value head that the method can share out."""
    if method != "all_to_all":
        return None
    keys = int(rng.choice([n for n in range(1, 2 * size + 1) if n % size == 0 or size % n == 0]))
    return keys, max(1, size // keys) * int(rng.integers(1, 3))


def drawn(seed, name, size, method, band, packing):
    """A random problem."""
    rng = np.random.default_rng([seed, *f"{name} {method} {band} {packing}".encode()])
    heads = heads_for(rng, size, method)
    problem = packed(rng, size, heads=heads) if packing else dense(rng, size, heads=heads)
    add_band(rng, problem, band)
    for option in OPTIONS[name]:
        if rng.random() < 0.5 and not (option == "lengths" and packing):
            add_option(rng, problem, option)
    return problem


@pytest.mark.parametrize("packing", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPTIONS)
def test_groups_equal_the_reference(name, method, band, packing):
    """Both passes of every method equal the reference to 1e-12, for every number of members; a refusal is stated."""
    number = list(OPTIONS).index(name)
    sizes = SIZES if name == "no option" else [SIZES[number % 5], SIZES[(number + 2) % 5]]
    refusals = [refusal(drawn(seed, name, size, method, band, packing), size, method) for seed, size in enumerate(sizes)]
    assert not all(refusals) or name == "lengths"


def refusal(problem, size, method, **options):
    """Compare a problem with the reference; returns why it was refused, if it was."""
    try:
        results, _ = run(problem, size, method, **options)
    except Unsupported as error:
        return str(error)
    assert_equal(results, problem.expected())
    return ""


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2000 if NIGHTLY else 300))
def test_random_groups_equal_the_reference(seed):
    """More random problems over all options at once."""
    rng = np.random.default_rng(seed)
    size, method, packing = int(rng.choice(SIZES)), str(rng.choice(METHODS)), bool(rng.random() < 0.4)
    name, band = str(rng.choice(list(OPTIONS))), str(rng.choice(BANDS))
    problem = drawn(seed, name, size, method, band, packing)
    reason = refusal(problem, size, method, max_delay=0.01 * (rng.random() < 0.2), seed=seed)
    assert not reason or (name == "lengths" and "bottom-right" in reason)


@pytest.mark.parametrize("packing", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_delayed_members_change_nothing(method, size, packing):
    """Results do not depend on the order in which threads run: they have the same bits with random delays, in every repeat."""
    problem = drawn(1, "scores", size, method, "causal", packing)
    wanted, _ = run(problem, size, method)
    for seed in range(3):
        got, _ = run(problem, size, method, max_delay=0.01, seed=seed, repeats=2)
        for one, other in zip(wanted, got, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_precision_is_that_of_one_device(dtype, method):
    """In float32 and float16 the error is at most a few times that of one device: partial outputs are rounded once."""
    rng = np.random.default_rng(0)
    problem = dense(rng, 4, lengths=(64, 64), heads=(4, 2), batch=2)
    problem.options["causal"] = True
    truth = problem.expected()
    given = Problem(*(x.astype(dtype) for x in (problem.q, problem.k, problem.v, problem.dout)), problem.options)
    results, _ = run(given, 4, method)
    out, stats = cupy_sdpa.attention(given.q, given.k, given.v, causal=True, return_stats=True)
    one = (out, stats, *cupy_sdpa.attention_backward(given.dout, given.q, given.k, given.v, out, stats, causal=True))
    for got, alone, wanted in zip(results[0], one, truth, strict=True):
        assert got.dtype == alone.dtype
        floor = np.finfo(dtype).eps * np.abs(wanted).max()
        assert np.abs(got - wanted).max() <= 2 * np.abs(alone - wanted).max() + 2 * floor


def test_a_reference_with_another_mask_is_rejected():
    """The comparison fails if the members use another mask than the reference."""
    problem = dense(np.random.default_rng(0), 2, lengths=(20, 20), heads=(2, 1))
    problem.options["causal"] = True
    results, _ = run(problem, 2, "ring")
    problem.options["causal"] = False
    with pytest.raises(AssertionError, match="out"):
        assert_equal(results, problem.expected())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 33])
def test_layouts_are_partitions(length, size):
    """Every position belongs to one member; shards and positions agree; chunks are those of the zigzag order."""
    layout = Layout((length, 3), size, packed=True)
    whole = [(b, i) for b, n in enumerate((length, 3)) for i in range(n)]
    found = sorted(
        (b, i)
        for rank in range(size)
        for b, own in enumerate(layout.intervals(rank))
        for x in own
        for i in range(x.start, x.stop)
    )
    assert found == whole
    shares = [layout.share(rank) for rank in range(size)]
    assert sum(shares) == length + 3
    assert [layout.positions(rank).size for rank in range(size)] == shares
    if length == 16 and size == 4:
        assert Layout((16,), 4).positions(1).tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_tiles_cover_the_mask(joined, aligned, cut):
    """The tiles of all members and steps include every pair of the mask once, and no other pair, for random bands and lengths."""
    rng = np.random.default_rng(0)
    for _ in range(1500):
        size = int(rng.choice(SIZES))
        sq = int(rng.integers(0, 30))
        skv = sq if rng.random() < 0.5 else int(rng.integers(0, 30))
        left, right = (None if rng.random() < 0.4 else int(rng.integers(0, 10)) for _ in range(2))
        right = 0 if rng.random() < 0.5 else right
        diagonal = int(rng.choice([0, skv - sq]))
        rows, keys = Layout((sq,), size), Layout((skv,), size)
        i, j = np.arange(sq)[:, None] + diagonal, np.arange(skv)
        counts = np.zeros((sq, skv), int)
        for rank in range(size):
            for source in range(size):
                own = tiles(
                    rows.intervals(rank)[0],
                    keys.intervals(source)[0],
                    diagonal,
                    Band(left, right),
                    joined=joined,
                    aligned=aligned,
                    cut=cut,
                )
                for part in own:
                    at = np.ix_(rows.positions(rank)[slice(*part.rows)], keys.positions(source)[slice(*part.keys)])
                    counts[at] += inside(part.band, *counts[at].shape, aligned)
        lower = np.ones((sq, skv), bool) if left is None else j >= i - left
        upper = np.ones((sq, skv), bool) if right is None else j <= i + right
        assert (counts == (lower & upper)).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_a_changed_scale_is_used(method, kind):
    """A repeated call with another scale, of Python or numpy, is not computed with the scale of the first call."""
    q = normal(np.random.default_rng(0), 4, 2, 8, 1)

    def member(own):
        cp = context_parallel(own, method=method)
        x = cp.shard(q)
        return [cp.unshard(cp.attention(x, x, x, scale=kind(scale), causal=True)) for scale in (0.25, 1.0, 0.25)]

    for results in run_threads(Loopback(2, timeout=60).members, member):
        for scale, result in zip((0.25, 1.0, 0.25), results, strict=True):
            assert np.abs(result - cupy_sdpa.attention(q, q, q, scale=scale, causal=True)).max() <= 1e-12


def test_cut_tiles_leave_out_masked_keys():
    """Causal queries in the middle of a sequence take a rectangle without a mask and a causal square."""
    own = tiles((Interval(8, 16, 0),), (Interval(0, 24, 0),), 0, Band(right=0), joined=True, cut=True)
    assert [(part.rows, part.keys, part.band) for part in own] == [((0, 8), (0, 8), None), ((0, 8), (8, 16), Band(None, 0))]


def inside(band, n, m, aligned):
    """The pairs that a band includes; its bounds are not negative."""
    i, j = np.arange(n)[:, None], np.arange(m)
    if band is None:
        return np.ones((n, m), bool)
    assert all(side is None or side >= 0 for side in band[:2])
    assert aligned or not band.bottom_right
    center = i + (m - n if band.bottom_right else 0)
    found = np.ones((n, m), bool)
    if band.left is not None:
        found &= j >= center - band.left
    if band.right is not None:
        found &= j <= center + band.right
    return found


@pytest.mark.parametrize("rank", range(4))
def test_a_causal_ring_has_three_shapes(rank):
    """With a length that 2 P divides, a causal step is one call: causal, all queries with half of the keys, or half with all."""
    layout = Layout((64,), 4)
    for step in range(4):
        source = (rank - step) % 4
        own = tiles(layout.intervals(rank)[0], layout.intervals(source)[0], 0, Band(right=0), joined=True)
        assert len(own) == 1
        sizes = tuple(stop - start for start, stop in (own[0].rows, own[0].keys))
        assert (sizes, own[0].band) == (
            ((16, 16), Band(None, 0)) if source == rank else ((16, 8), None) if source < rank else ((8, 16), None)
        )


def test_intervals_at_the_middle_are_joined():
    """The last member holds the two chunks in the middle, which are one interval."""
    assert Layout((16,), 4).intervals(3) == ((Interval(6, 10, 0),),)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_sent_are_those_of_explain(method):
    """The report states the bytes that each member sends in both passes."""
    rng = np.random.default_rng(0)
    size, length = 4, 64
    problem = Problem(*(normal(rng, 8, heads, length, 2) for heads in (4, 4, 4, 4)), {"causal": True})
    group = Loopback(size)

    def member(own):
        cp = context_parallel(own, method=method, check=False)
        q, k, v, dout = (cp.shard(x) for x in (problem.q, problem.k, problem.v, problem.dout))
        report = cp.explain(q, k, v, causal=True)
        assert group.bytes_sent[own.rank] == 0  # nothing is exchanged
        out, stats = cp.attention(q, k, v, causal=True, return_stats=True)
        forward = group.bytes_sent[own.rank]
        cp.attention_backward(dout, q, k, v, out, stats, causal=True)
        return report, forward, group.bytes_sent[own.rank] - forward

    for report, forward, backward in run_threads(group.members, member):
        assert report.method == method
        assert (report.forward.sent, report.backward.sent) == (forward, backward)
        assert report.forward.calls == len(report.parts)


def explained(size, shape, keys=None, **options):
    """The report of the first member for dense arrays of the given shape."""
    cp = context_parallel(Loopback(size).members[0])
    d, heads, length, batch = shape
    q = np.zeros((d, heads, length // size, batch), np.float16, order="F")
    k = np.zeros((d, keys or heads, length // size, batch), np.float16, order="F")
    return cp.explain(q, k, k, **options)


@pytest.mark.parametrize(
    ("size", "shape", "keys", "options", "method", "reason"),
    [
        (8, (128, 32, 65536, 1), 8, {"causal": True}, "ring", "least estimated time"),
        (4, (128, 6, 4096, 1), 6, {"window": (512, 0)}, "all_gather", "window"),
        (4, (128, 6, 4096, 1), 6, {"alibi_slopes": cupy_sdpa.alibi_slopes(6)}, "all_gather", "positions"),
        (4, (128, 8, 4096, 1), 8, {"alibi_slopes": cupy_sdpa.alibi_slopes(8)}, "all_to_all", "positions"),
        (8, (128, 32, 65536, 1), 8, {"causal": True, "method": "all_gather"}, "all_gather", "requested"),
    ],
    ids=["causal", "window", "ALiBi, heads cannot be shared out", "ALiBi", "requested"],
)
def test_the_choice_of_the_method_is_explained(size, shape, keys, options, method, reason):
    """The report names the method and why it was chosen."""
    report = explained(size, shape, keys, **options)
    assert report.method == method
    assert reason in report.reason
    assert f"method: {method}: " in str(report)
    assert "sends" in str(report)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_all_members_choose_the_same_method(method):
    """The choice does not depend on the rank, though the estimates do."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        size, length = int(rng.choice(SIZES)), int(rng.integers(1, 5000))
        heads = int(rng.choice([1, 2, 4, 8, 6]))
        options = [{}, {"causal": True}, {"window": (100, 0)}, {"softcap": 1.0}][rng.integers(4)]
        chosen = set()
        for own in Loopback(size).members:
            cp = context_parallel(own)
            x = cp.shard(np.zeros((8, heads, length, 1), np.float16, order="F"))
            lengths = {"seqlen_q": length, "seqlen_kv": length}
            try:
                chosen.add(cp.explain(x, x, x, method=method, **lengths, **options).method)
            except Unsupported:
                chosen.add("refused")
        assert len(chosen) == 1


def test_heads_that_cannot_be_shared_out_are_refused():
    """A method that cannot run is refused with the reason and another method."""
    with pytest.raises(Unsupported, match=r"6 query heads cannot be shared out equally among 4 members; use method='ring'"):
        explained(4, (64, 6, 64, 1), method="all_to_all")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": (4, 2, 9, 1), "seqlen_q": 16}, ValueError, "q has shape .* holds 8"),
        ({"seqlen_q": 40}, ValueError, "of 40 positions"),
        ({"k": (4, 3, 8, 1)}, ValueError, "numbers of heads"),
        ({"v": (4, 2, 7, 1)}, ValueError, "of 16 positions"),
        ({"page_table": np.zeros((1, 1), np.int32)}, Unsupported, "page_table"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"causal": "left"}, ValueError, "causal"),
        ({"nothing": 1}, TypeError, "no option nothing"),
        ({"method": "tree"}, ValueError, "method is 'tree'"),
        ({"bias": np.zeros((8, 8, 1, 1))}, ValueError, r"bias has shape \(8, 8, 1, 1\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_invalid_arguments_raise_before_anything_is_sent(change, error, message):
    """Every member raises its own error, and no keys are sent."""
    group = Loopback(2, timeout=10)

    def member(own):
        shapes = {"q": (4, 2, 8, 1), "k": (4, 2, 8, 1), "v": (4, 2, 8, 1)} | {n: s for n, s in change.items() if n in "qkv"}
        arrays = {name: np.zeros(shape, order="F") for name, shape in shapes.items()}
        with pytest.raises(error, match=message):
            context_parallel(own).attention(**arrays, **{n: v for n, v in change.items() if n not in "qkv"})

    run_threads(group.members, member)
    assert max(group.bytes_sent) <= message_bytes([((4096,), np.uint8)])


def test_offsets_on_the_gpu_are_refused(fake):
    """Offsets of packed sequences must be on the host, where sequences are cut."""
    x = np.zeros((4, 1, 4), order="F")
    starts = fake.asarray(np.array([0, 8], np.int32))
    with pytest.raises(TypeError, match="pass a numpy array"):
        context_parallel(Loopback(2).members[0]).explain(x, x, x, cu_seqlens_q=starts, cu_seqlens_kv=starts)


def test_positions_and_shards_of_packed_sequences():
    """position_ids names the positions within the sequences of the member's part; unshard is the inverse of shard."""
    starts = np.array([0, 5, 5, 12])
    x = np.arange(12.0)[None]
    positions = np.concatenate([np.arange(5), np.arange(7)])

    def member(own):
        cp = context_parallel(own)
        part = cp.shard(x, axis=1, cu_seqlens=starts)
        assert (positions[part[0].astype(int)] == cp.position_ids(cu_seqlens=starts)).all()
        assert (cp.unshard(part, axis=1, cu_seqlens=starts) == x).all()

    run_threads(Loopback(3).members, member)


@pytest.mark.parametrize(
    ("starts", "error", "message"),
    [
        ([0, 4, 9], ValueError, "10 positions along axis 2; cu_seqlens has 9"),
        ([0, 4, 12], ValueError, "10 positions along axis 2; cu_seqlens has 12"),
        ([2, 4, 10], ValueError, "begin with 0 and must not decrease"),
        ([0, 6, 4, 10], ValueError, "begin with 0 and must not decrease"),
        ([0.0, 10.0], TypeError, "cu_seqlens is float64"),
        ([], TypeError, r"\(B \+ 1,\)"),
    ],
    ids=str,
)
def test_wrong_offsets_are_refused(starts, error, message):
    """Positions are neither lost nor repeated if the offsets are not those of the array."""
    cp = context_parallel(Loopback(2).members[0])
    with pytest.raises(error, match=message):
        cp.shard(np.zeros((4, 2, 10), order="F"), cu_seqlens=np.array(starts))
    if "begin" in message:
        with pytest.raises(error, match=message):
            cp.position_ids(cu_seqlens=np.array(starts))


def test_an_axis_from_the_end():
    """shard and unshard count negative axes from the end; an axis that does not exist is refused."""
    x = np.arange(2 * 3 * 9.0).reshape(2, 3, 9, order="F")

    def member(own):
        cp = context_parallel(own)
        part = cp.shard(x, axis=-1)
        assert np.array_equal(part, cp.shard(x, axis=2))
        assert np.array_equal(cp.unshard(part, axis=-1, seqlen=9), x)
        with pytest.raises(ValueError, match="axis is 3; x has 3 axes"):
            cp.shard(x, axis=3)

    run_threads(Loopback(2, timeout=20).members, member)


def test_unshard_without_the_length_is_refused_if_it_is_needed():
    """Members that derive different lengths from their parts raise, also in the next call; with the length all is well."""
    x = np.arange(7.0)
    group = Loopback(2, timeout=20)

    def member(own):
        cp = context_parallel(own)
        part = cp.shard(x, axis=0)
        for _ in range(2):
            with pytest.raises(ValueError, match="different shapes or options"):
                cp.unshard(part, axis=0)
            assert np.array_equal(cp.unshard(part, axis=0, seqlen=7), x)
        with pytest.raises(ValueError, match=r"member 0 refused the call|axis is 1"):
            cp.unshard(part, axis=1 if own.rank == 0 else 0)

    run_threads(group.members, member)
    text, part = message_bytes([((4096,), np.uint8)]), message_bytes([((4,), x.dtype)])
    assert max(group.bytes_sent) == 4 * text + 2 * part  # a known length is not compared again


@pytest.mark.parametrize("length", [3.5, -8, True, "8"], ids=repr)
def test_wrong_lengths_are_refused(length):
    """Lengths of whole sequences are integers."""
    cp, x = context_parallel(Loopback(2).members[0]), np.zeros((4, 2, 4, 1), order="F")
    with pytest.raises(ValueError, match=f"seqlen_q is {length!r}; it must be an integer"):
        cp.explain(x, x, x, seqlen_q=length)


def test_pullback():
    """attention_vjp returns the output and the gradients of one device."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (normal(rng, 8, 2, 24, 1) for _ in range(4))

    def member(own):
        cp = context_parallel(own)
        out, pullback = cp.attention_vjp(*(cp.shard(x) for x in (q, k, v)), causal=True)
        return [cp.unshard(x) for x in (out, *pullback(cp.shard(dout)))]

    out, own_pullback = cupy_sdpa.attention_vjp(q, k, v, causal=True)
    for found in run_threads(Loopback(2).members, member):
        for got, wanted in zip(found, (out, *own_pullback(dout)), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_the_example_runs(monkeypatch, capsys):
    """The example runs with threads and numpy arrays, and its results are those of one device."""
    monkeypatch.setattr("sys.argv", ["context_parallel.py", "--cpu", "3", "--length", "50"])
    runpy.run_path(str(ROOT / "examples" / "context_parallel.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "method: " in printed
    assert all(f"member {rank} of 3" in printed for rank in range(3))
    assert float(re.search(r"error (\S+)", printed)[1]) < 1e-4


def test_the_pictures_of_groups_are_those_of_the_layouts():
    """Each equals the output of its script."""
    found = runpy.run_path(str(ROOT / "docs" / "parallel_pictures.py"))
    pictures = found["drawn"]()
    assert {path.stem for path in found["FOLDER"].glob("*.svg")} == set(pictures)
    for name, text in pictures.items():
        assert (found["FOLDER"] / f"{name}.svg").read_text(encoding="utf-8") == text, "python docs/parallel_pictures.py"


def test_the_benchmark_measures_a_small_group(monkeypatch, capsys, tmp_path):
    """The rows of the benchmark have the columns, and the results of the group are those of one device."""
    from benchmarks.__main__ import main
    from benchmarks.parallel import measure

    monkeypatch.setattr(measure, "CALLS", 1)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "WARM_UP", 1)
    path = tmp_path / "x.csv"
    assert main(["parallel", str(path), "--cpu", "--members", "2", "--only", "causal"]) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["method"], row["pass"]) for row in rows] == [(m, p) for m in METHODS for p in ("forward", "backward", "both")]
    timed = [row for row in rows if row["pass"] != "both"]
    assert all(float(row["error"]) < 1e-5 and 0 <= float(row["hidden"]) <= 1 for row in timed)
    assert main(["parallel", "--model", "--only", "causal, 8k", "--link", "350"]) == 0
    assert "members 8" in capsys.readouterr().out


def test_the_model_reaches_the_ideal_without_transfers():
    """With an infinite link and no latencies, all predictions of a causal problem are the ideal time."""
    from benchmarks.parallel import model

    machine = Machine(600e12, 480e12, link=1e30, latency=0.0, launch=0.0, copy=1e30)
    for row in model.rows(model.PROBLEMS[0], machine):
        assert row["forward_of_ideal"] == pytest.approx(1, abs=0.01)
        assert row["both_of_ideal"] == pytest.approx(1, abs=0.01)
