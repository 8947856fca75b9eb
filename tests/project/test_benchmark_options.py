"""The benchmark of the options' host time: its calls on numpy and the fake CuPy, its timers, and its rows."""

import contextlib
import csv
import functools
from unittest.mock import MagicMock

import numpy as np
import pytest
from command_line import run as run_command

from benchmarks import host_options
from benchmarks.__main__ import main
from benchmarks.host_options import Mix, Way
from benchmarks.timing import CapturedCalls

KINDS = {kind.name: kind for kind in host_options.KINDS}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Two heads, two sets of arrays, few rounds, and an empty working directory."""
    for name, value in {"HEADS": 2, "SETS": 2, "ROUNDS": 2, "CALLS": 2, "PIECE": 3, "MIX_WARM_UP": 6}.items():
        monkeypatch.setattr(host_options, name, value)
    with contextlib.chdir(tmp_path):
        yield


@functools.cache
def on_numpy(name):
    """The results of our call of a kind."""
    return results(np, name)


def results(xp, name):
    """The results of our call of a kind, as numpy arrays."""
    found = KINDS[name].call(host_options.Inputs(host_options.Model(xp), 3))()
    arrays = []
    for x in found if isinstance(found, tuple) else (found,):
        arrays += x.values() if isinstance(x, dict) else [] if x is None else [x]
    return [np.asarray(x if xp is np else x.get(), np.float64) for x in arrays]


def test_the_kinds():
    """No option of the mix computes plain attention by mistake."""
    options = [kind for kind in host_options.KINDS if kind.mix == host_options.OPTIONS]
    (plain,) = on_numpy("plain")
    for kind in options:
        if kind.name != "plain":
            (out,) = on_numpy(kind.name)
            assert np.abs(out.reshape(plain.shape, order="F") - plain).max() > 0.01, kind.name


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "plain")) for name in KINDS])
def test_our_call_runs_on_cudnns_graph_as_on_numpy(name, fake):
    """Every kind is valid for numpy and CuPy, with results that agree; the two draw different random numbers for dropout."""
    for a, b in zip(results(fake, name), on_numpy(name), strict=True):
        assert a.shape == b.shape
        assert np.isfinite(b).all()
        assert np.abs(b).max() > 0
        assert name == "dropout" or np.abs(a - b).max() <= 0.03 * np.abs(b).max()


# the timers


def test_a_mix_takes_turns():
    """Kinds alternate, each on its next set; the device is synchronized after at most PIECE calls; the second round counts."""
    log = []
    calls = {name: [lambda name=name, n=n: log.append(f"{name}{n}") for n in range(2)] for name in "abc"}
    mix = Mix(calls, lambda results: log.append("wait"))
    assert mix() > 0
    assert log == ["wait", "a0", "b0", "c0", "wait", "a1", "b1", "c1", "wait"] * 2
    assert {name: len(several) for name, several in mix.rounds.items()} == dict.fromkeys("abc", 1)


def test_a_mix_is_measured_after_it_is_warm():
    """The rounds of contenders correspond; warm-up rounds do not count."""
    count = [0]

    def call():
        count[0] += 1

    mixes = {name: Mix({"x": [call]}, lambda results: None) for name in ("ours", "peer")}
    host_options.measure_mixes(mixes)
    assert [len(mix.rounds["x"]) for mix in mixes.values()] == [2, 2]
    assert count == [2 * (host_options.MIX_WARM_UP + 2 * 3)]


def test_captured_calls(fake):
    """The calls are captured in turn, and a launch of the graph takes the time of their kernels."""
    made = []

    def call(name):
        made.append(name)
        return fake.full(8, 1.0, np.float32)

    timer = CapturedCalls([functools.partial(call, name) for name in "ab"], 3)
    assert made == [*"ab", *"ab", *"aba"]  # before the capture on both streams, and captured
    assert timer() == pytest.approx(1.0)  # microseconds of a kernel of the fake


class Peer:
    """Stands for PyTorch: one call that runs and one that does not."""

    active = MagicMock()

    @staticmethod
    def ways(kind):
        failing = Way("fails", lambda number: lambda: 1 / 0)
        return {"plain": [failing, Way("runs", lambda number: lambda: None)], "paged": [failing]}.get(kind, [])


def test_the_command(fake, monkeypatch):
    """Times of both contenders, ratios where both run, and the reasons where a peer does not."""
    monkeypatch.setattr(host_options, "load_peers", lambda with_flex: (Peer, ""))
    run_command("host_options x.csv --only plain lengths paged", main=main)
    with open("x.csv", newline="") as file:
        rows = {row["kind"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["plain", "lengths", "paged"]
    for row in rows.values():
        assert float(row["us"]) > 0
        assert float(row["mix_us"]) > 0
    plain, lengths, paged = rows.values()
    assert not any(lengths[name] for name in ("peer", "peer_us", "ratio", "peer_mix_us", "mix_ratio", "message"))
    assert min(float(plain["ratio"]), float(plain["mix_ratio"])) > 0
    assert plain["peer"] == "runs"
    assert plain["message"] == paged["message"] == "fails does not run: ZeroDivisionError: division by zero"
