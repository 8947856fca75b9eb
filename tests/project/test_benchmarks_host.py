"""The benchmark of the options' host time: its calls on numpy and the fake CuPy, its timers, its rows, and PyTorch's calls."""

import csv
import functools
import importlib
import sys
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.common.captured import CapturedCalls
from benchmarks.host_options import measure, ours, profile, run
from benchmarks.host_options.measure import Mix, Way, choose

KINDS = {kind.name: kind for kind in ours.KINDS}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Two heads, two sets of arrays, few rounds, and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ours, "HEADS", 2)
    for name, value in {"SETS": 2, "ROUNDS": 2, "CALLS": 2, "PIECE": 3}.items():
        monkeypatch.setattr(measure, name, value)


def results(xp, name):
    """The results of our call of a kind, as numpy arrays."""
    found = KINDS[name].call(ours.Inputs(ours.Model(xp), 3))()
    arrays = []
    for x in found if isinstance(found, tuple) else (found,):
        arrays += x.values() if isinstance(x, dict) else [] if x is None else [x]
    return [np.asarray(x if xp is np else x.get(), np.float64) for x in arrays]


# our calls


def test_the_kinds():
    """Names are unique words of a command line, and the mix of the options has the ten forward passes with a limit."""
    assert len(KINDS) == len(ours.KINDS)
    options = [kind for kind in ours.KINDS if kind.mix == ours.OPTIONS]
    assert len(options) == 10
    assert {kind.limit for kind in options} == {ours.FORWARD_LIMIT}
    assert {kind.limit for name, kind in KINDS.items() if name.startswith("gradients")} == {ours.GRADIENT_LIMIT}


@pytest.mark.parametrize("name", KINDS)
def test_our_call_runs_on_cudnns_graph_as_on_numpy(name, fake):
    """Every kind is valid for numpy and CuPy, with results that agree; the two draw different random numbers for dropout."""
    on_numpy, on_gpu = results(np, name), results(fake, name)
    assert len(on_gpu) == len(on_numpy)
    for a, b in zip(on_gpu, on_numpy, strict=True):
        assert a.shape == b.shape
        assert np.isfinite(b).all()
        assert np.abs(b).max() > 0
        if name != "dropout":
            assert np.abs(a - b).max() <= 0.03 * np.abs(b).max()


def test_every_option_changes_the_result():
    """No call of the mix of the options computes plain attention by mistake."""
    (plain,) = results(np, "plain")
    for name, kind in KINDS.items():
        if kind.mix == ours.OPTIONS and name != "plain":
            (out,) = results(np, name)
            assert np.abs(out.reshape(plain.shape, order="F") - plain).max() > 0.01, name


def test_sets_have_their_own_addresses():
    """Two sets share only the arrays of the model."""
    model = ours.Model(np)
    a, b = ours.Inputs(model, 0), ours.Inputs(model, 1)
    for name, x in vars(a).items():
        assert name == "model" or not np.shares_memory(x, vars(b)[name])
    assert not np.array_equal(a.q, b.q)


# the timers


def test_the_first_way_that_runs_is_chosen():
    """The reasons of those before it are returned, of its calls on all sets too."""
    ways = [
        Way("absent", lambda number: importlib.import_module("no_such_module")),
        Way("second set", lambda number: lambda: 1 / (1 - number)),
        Way("works", lambda number: lambda: number),
    ]
    chosen, failures = choose(ways, lambda results: None, 3)
    assert chosen.way.title == "works"
    assert [call() for call in chosen.calls] == [0, 1, 2]
    assert failures == [
        "absent does not run: ModuleNotFoundError: No module named 'no_such_module'",
        "second set does not run: ZeroDivisionError: division by zero",
    ]
    assert choose(ways[:1], lambda results: None, 3) == (None, failures[:1])


def test_a_way_is_made_and_timed_in_its_context():
    """Outside of it nothing is called."""
    inside = []

    @contextmanager
    def active():
        inside.append(True)
        yield
        inside.pop()

    def make(number):
        assert inside
        return lambda: 1 / len(inside)

    chosen, failures = choose([Way("one", make, active)], lambda results: None, 2)
    assert not failures
    assert measure.idle_timer(chosen, lambda results: None)() > 0
    assert not inside


def test_a_mix_takes_turns():
    """Kinds alternate, each on its next set; the device is synchronized after at most PIECE calls; the second round counts."""
    log = []
    calls = {name: [lambda name=name, n=n: log.append(f"{name}{n}") for n in range(2)] for name in "abc"}
    mix = Mix(calls, lambda results: log.append("wait"))
    assert mix() > 0
    assert log == ["wait", "a0", "b0", "c0", "wait", "a1", "b1", "c1", "wait"] * 2
    assert {name: len(several) for name, several in mix.rounds.items()} == dict.fromkeys("abc", 1)


def test_a_mix_is_measured_after_it_is_captured():
    """As many rounds count as requested, and the rounds of two contenders correspond."""
    count = [0]

    def call():
        count[0] += 1

    mixes = {name: Mix({"x": [call]}, lambda results: None) for name in ("ours", "peer")}
    measure.measure_mixes(mixes)
    assert [len(mix.rounds["x"]) for mix in mixes.values()] == [2, 2]
    assert count[0] == 2 * (measure.WARM_UP + 2 * 3)


def test_the_warm_up_ends_when_no_graph_is_captured():
    """After as many rounds without a capture as a capture needs; and after a limit."""
    count = [0]

    def call():
        count[0] += 1

    mix = Mix({"x": [call]}, lambda results: None, captured=lambda: min(count[0] // 2, 5))
    mix.warm_up()
    assert count[0] == 10 + measure.WARM_UP
    mix = Mix({"x": [call]}, lambda results: None, captured=lambda: count[0])
    mix.warm_up()
    assert count[0] == 10 + measure.WARM_UP + measure.MAX_WARM_UP
    assert not mix.rounds["x"]


# rows


def row_of(**cells):
    """A row with some of its cells."""
    row = dict.fromkeys(run.COLUMNS) | {"kind": "plain", "mix": "options", "limit": 0.7, "message": ""} | cells
    run.judge(row)
    return row


def test_ratios_and_limits():
    """The ratio of the mix counts, or alone for a call without one; a missing ratio is reported, and no limit is not."""
    rows = [
        row_of(ratio=0.9, mix_ratio=0.7, peer="SDPA"),
        row_of(ratio=0.1, mix_ratio=0.701, peer="SDPA"),
        row_of(ratio=0.1),
        row_of(kind="prepared", mix="", ratio=1.1, limit=1.25, peer="cudnnBackendExecute"),
        row_of(kind="vjp", mix_ratio=3.0, limit=None),
    ]
    assert [row["holds"] for row in rows] == [True, False, None, True, None]
    assert [" ".join(line.split()) for line in run.acceptance(rows)] == [
        "plain in the mix of SDPA: 0.700 holds, limit 0.7",
        "plain in the mix of SDPA: 0.701 DOES NOT HOLD, limit 0.7",
        "plain in the mix of no peer: not measured, limit 0.7",
        "prepared alone of cudnnBackendExecute: 1.100 holds, limit 1.25",
    ]


class Peer:
    """Stands for PyTorch: one call that runs and one that does not."""

    active = MagicMock()

    @staticmethod
    def ways(kind):
        failing = Way("fails", lambda number: lambda: 1 / 0)
        return {"plain": [failing, Way("runs", lambda number: lambda: None)], "paged": [failing]}.get(kind, [])


@pytest.fixture
def printed(fake, monkeypatch, capsys):
    """A function that runs the command and returns its output and the rows of its file."""
    monkeypatch.setattr(run, "versions", lambda **peers: {"gpu": "a GPU", **peers})

    def of(peers, *words):
        monkeypatch.setattr(run, "load_peers", lambda with_flex: (peers, "", "" if peers else "PyTorch does not run"))
        assert main(["host_options", "x.csv", *words]) == 0
        with open("x.csv", newline="") as file:
            reader = csv.DictReader(file)
            assert tuple(reader.fieldnames) == (*run.COLUMNS, "gpu", "torch")
            return capsys.readouterr().out, {row["kind"]: row for row in reader}

    return of


def test_rows_of_both_contenders(printed):
    """Times of both, ratios where both run, and the reasons where a peer does not."""
    out, rows = printed(Peer, "--only", "plain", "lengths", "paged")
    assert list(rows) == ["plain", "lengths", "paged"]
    for row in rows.values():
        assert float(row["us"]) > 0
        assert float(row["mix_us"]) > 0
    plain, lengths, paged = rows.values()
    assert float(plain["ratio"]) > 0
    assert float(plain["mix_ratio"]) > 0
    assert (plain["peer"], plain["holds"]) == ("runs", "False")
    assert plain["message"] == paged["message"] == "fails does not run: ZeroDivisionError: division by zero"
    assert not any(lengths[name] for name in ("peer", "peer_us", "ratio", "peer_mix_us", "mix_ratio", "holds", "message"))
    assert "lengths            in the mix of no peer: not measured, limit 0.7" in out


def test_rows_without_pytorch(printed, monkeypatch):
    """Our times are measured; the prepared call has no peer, because the steps of a call need PyTorch, too."""
    monkeypatch.setitem(sys.modules, "benchmarks.host", None)
    out, rows = printed(None, "--only", "prepared", "causal")
    assert "PyTorch does not run" in out
    assert [bool(row["us"]) for row in rows.values()] == [True, True]
    assert not rows["causal"]["peer"]
    assert rows["prepared"]["message"].startswith("cudnnBackendExecute does not run: ModuleNotFoundError")


def test_profile(fake, monkeypatch, capsys):
    """The slow steps take time, the steps and the rest are the call, and the launches of all sets are counted."""
    monkeypatch.setattr(run, "versions", dict)
    assert main(["host_options", "--profile", "x.csv", "--only", "plain", "paged"]) == 0
    with open("x.csv", newline="") as file:
        rows = {row["kind"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["plain", "paged"]
    for row in rows.values():
        steps = {step: float(row[step]) for step in (*profile.STEPS, "rest") if step != "busy"}
        assert min(steps[step] for step in ("key", "allocate", "array", "launch")) > 0  # others may be shorter than the clock's
        assert sum(steps.values()) == pytest.approx(float(row["total"]), abs=0.05)
        launches = dict(reversed(part.split(" x ")) for part in row["launches"].split("; "))
        assert sum(map(int, launches.values())) == measure.SETS
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("paged ")
    assert lines[-1].endswith(rows["paged"]["launches"])


def test_captured_calls(fake):
    """The calls are captured in turn, and a launch of the graph takes the time of their kernels."""
    made = []

    def call(name):
        made.append(name)
        return fake.full(8, 1.0, np.float32)

    timer = CapturedCalls([functools.partial(call, name) for name in "ab"], 3)
    assert made == [*"ab", *"ab", *"aba"]  # before the capture on both streams, and captured
    assert timer() == pytest.approx(1.0)  # microseconds of a kernel of the fake


def test_names_are_checked(capsys):
    """An unknown kind is refused."""
    with pytest.raises(SystemExit):
        main(["host_options", "--only", "bert"])
    assert "invalid choice: 'bert'" in capsys.readouterr().err


# PyTorch's calls


class Numbers(np.ndarray):
    """A tensor of numbers that masks are computed from."""

    def abs(self):
        return np.abs(self)

    def to(self, dtype):
        return self

    long = abs


def numbers(values, **_):
    """A tensor of given numbers."""
    return np.asarray(values).view(Numbers)


@pytest.fixture
def pytorch(monkeypatch):
    """The module of PyTorch's calls, with stand-ins that accept every call; functions of scores and masks are called."""
    torch = MagicMock()
    torch.compile = lambda function, **_: function
    torch.arange, torch.tensor, torch.rand = lambda n, **_: numbers(np.arange(n)), numbers, lambda *n, **_: numbers(np.ones(n))
    index = numbers([0])
    flex = torch.nn.attention.flex_attention
    flex.create_block_mask = lambda mask_mod, *sizes, device: mask_mod(index, index, index, index)
    flex.flex_attention = lambda q, k, v, score_mod=None, block_mask=None: (
        score_mod(MagicMock(), index, index, index, index) if score_mod else block_mask
    )
    names = ["torch", "torch.nn", "torch.nn.attention", "torch.nn.functional"]
    for name in [*names, "torch.nn.attention.varlen", "torch.nn.attention.flex_attention"]:
        module = ModuleType(name)
        stand_in = torch
        for part in name.split(".")[1:]:
            stand_in = getattr(stand_in, part)
        module.__getattr__ = lambda attribute, stand_in=stand_in: getattr(stand_in, attribute)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "benchmarks.host_options.pytorch", raising=False)
    module = importlib.import_module("benchmarks.host_options.pytorch")
    yield module
    del sys.modules["benchmarks.host_options.pytorch"]


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_has_ways_for_every_kind(kind, pytorch):
    """Their calls can be made and run on several sets; titles are unique. Without FlexAttention its kinds have none."""
    ways = pytorch.Peers(with_flex=True).ways(kind)
    assert len({way.title for way in ways}) == len(ways) > 0
    for way in ways:
        with way.active():
            for number in range(2):
                way.make(number)()
    by_flex = {way.title for way in ways} == {"FlexAttention, compiled"}
    assert pytorch.Peers(with_flex=False).ways(kind) == [] if by_flex else not any("Flex" in way.title for way in ways)
    assert by_flex == (kind in ("alibi_flex", "score_mod", "mask_mod", "gradients_tensors"))
