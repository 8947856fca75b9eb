"""Host time of every option, alone and in a mix of calls, against PyTorch's closest call in the same run.

    python -m benchmarks host_options [results.csv] [--only NAME ...] [--no-flex]

bfloat16, head dim 64, 8 heads, length 128, batch 2: the device is never the limit. Alone, a call is repeated on the same
addresses and an idle device: median microseconds until it returns. In a mix, calls of all kinds take turns, each on the next of
64 sets of arrays, as in a model with many layers: the mean microseconds of the calls of a kind, of the median round. There are
two mixes: the ten options, and the other calls. PyTorch runs its closest calls in the same order, in interleaved rounds, and
each measured round follows one of the same library that is not measured, as in a program that uses one library. Ratios are
medians of the ratios of rounds next to each other.

If PyTorch has several ways to compute a kind, the first that runs is measured: for scaled dot-product attention the backends in
the order cuDNN, flash, efficient, math. FlexAttention is compiled first, which takes most of the time. Needs PyTorch in
addition to CuPy; without it, and where a call fails, cells are empty.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa
from cupy_sdpa import nnlib, zoo
from cupy_sdpa.cli.console import one_line
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype
from cupy_sdpa.core.replay.replay_cache import CAPTURE_AFTER
from cupy_sdpa.core.runtime import cupy_runtime

from . import runner
from .timing import affordable_calls, host_us, interleaved, ratio

#: The sizes of all calls: so small that the device is never the limit.
HEAD_DIM, HEADS, LENGTH, BATCH = 64, 8, 128, 2
#: The lengths of the batch items of a padded batch, and of packed sequences, which have the same total as the other calls.
LENGTHS, SEQUENCES = (128, 80), (64, 96, 64, 32)
#: The keys per page, the window's keys, the dropout probability, the soft cap, and the keys per chunk.
PAGE, WINDOW, DROPOUT, CAP, CHUNK = 64, 32, 0.1, 30.0, 32
#: The mix of the options, and the mix of the other calls.
OPTIONS, OTHERS = "options", "others"
#: The sets of arrays of a mix, and the most calls without synchronization. The launch queue holds 1024 launches, and the
#: gradients of arrays take up to 20: a host that waits for the queue would measure the device.
SETS, PIECE = 64, 48
#: Rounds that count; a contender that has used this many seconds gets fewer. The most calls of a round on an idle device.
ROUNDS, SECONDS, CALLS = 11, 4.0, 50
#: Repetitions of a call before a measurement: until a CUDA graph is captured, and more; and of a mix, in which the addresses of
#: results vary.
WARM_UP, MIX_WARM_UP = 2 * CAPTURE_AFTER, 96
#: The columns of a row, except the versions. ``message`` has the reasons why something did not run.
COLUMNS = (
    "kind", "mix", "us", "peer", "peer_us", "ratio", "mix_us", "peer_mix_us", "mix_ratio", "message",
)  # fmt: skip

Call = Callable[[], Any]
Context = Callable[[], AbstractContextManager[Any]]
Wait = Callable[[Any], Any]

# our calls


class Model:
    """The arrays that all calls of a model share: lengths, offsets, the page table, masks, slopes and the seed.

    Args:
        xp: numpy or cupy.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.lengths = self.array(np.array(LENGTHS, np.int32))
        self.full = self.array(np.full(BATCH, LENGTH, np.int32))
        self.starts = self.array(np.cumsum([0, *SEQUENCES], dtype=np.int32))
        self.slopes = self.array(np.asarray(cupy_sdpa.alibi_slopes(HEADS)))
        self.mask = self.array(np.random.default_rng(0).random((LENGTH, LENGTH, 1, BATCH)) < 0.7)
        self.table = self.array(np.arange(BATCH * LENGTH // PAGE, dtype=np.int32)[::-1].reshape(-1, BATCH))
        self.seed = self.array(np.array([1], np.int64))

    def array(self, x: Any) -> Any:
        """Return an array of numpy as one of the module, in Fortran order."""
        return self.xp.asfortranarray(self.xp.asarray(np.asfortranarray(x)))

    def normal(self, rng: np.random.Generator, *shape: int, dtype: str = "bfloat16") -> Any:
        """Normal random numbers."""
        return self.array(rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype)))


class Inputs:
    """One set of arrays, such as the arrays of one layer.

    Args:
        model: the arrays that all sets share.
        number: the number of the set.
    """

    def __init__(self, model: Model, number: int) -> None:
        self.model = model
        normal = functools.partial(model.normal, np.random.default_rng(number))
        self.q, self.k, self.v, self.dout = (normal(HEAD_DIM, HEADS, LENGTH, BATCH) for _ in range(4))
        self.qkv = self.q, self.k, self.v
        self.one = normal(HEAD_DIM, HEADS, 1, BATCH)
        self.k_pages, self.v_pages = (normal(HEAD_DIM, HEADS, PAGE, BATCH * LENGTH // PAGE) for _ in range(2))
        self.bias = normal(LENGTH, LENGTH, HEADS, 1)
        self.sinks = normal(HEADS, dtype="float32")
        self.learned = normal(HEADS, LENGTH, LENGTH, dtype="float32")
        self.offset = model.array(np.array([4 * number], np.int64))

    def reshaped(self, *shape: int) -> list[Any]:
        """Return the same memory in another shape."""
        return [x.reshape(shape, order="F") for x in self.qkv]


#: The options of a call from its set of arrays.
OptionsOf = Callable[[Inputs], dict[str, Any]]


def forward(options: OptionsOf = lambda x: {}) -> Callable[[Inputs], Call]:
    """:func:`cupy_sdpa.attention` with options."""
    return lambda x: functools.partial(cupy_sdpa.attention, *x.qkv, **options(x))


def learned_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Any) -> Any:
    """Return a score function with an array whose gradient is returned."""
    return score + bias[h, q_idx, kv_idx]


def gradients(options: OptionsOf = lambda x: {}, **outputs: bool) -> Callable[[Inputs], Call]:
    """:func:`cupy_sdpa.attention_backward` with options, after a forward pass."""

    def make(x: Inputs) -> Call:
        found = options(x)
        out, stats = cupy_sdpa.attention(*x.qkv, return_stats=True, **found)
        return functools.partial(cupy_sdpa.attention_backward, x.dout, *x.qkv, out, stats, **found, **outputs)

    return make


def packed(x: Inputs) -> Call:
    """Packed sequences."""
    starts, longest = x.model.starts, max(SEQUENCES)
    bounds = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return functools.partial(cupy_sdpa.attention, *x.reshaped(HEAD_DIM, HEADS, LENGTH * BATCH), **bounds)


def paged(x: Inputs) -> Call:
    """Return one query of each sequence, with paged keys and values."""
    pages = {"page_table": x.model.table, "seq_lens_kv": x.model.full}
    return functools.partial(cupy_sdpa.attention, x.one, x.k_pages, x.v_pages, **pages)


def in_nnlib(x: Inputs) -> Call:
    """NNlib's function; it splits the heads off the first axis."""
    return functools.partial(nnlib.dot_product_attention, *x.reshaped(HEAD_DIM * HEADS, LENGTH, BATCH), nheads=HEADS)


def both_passes(x: Inputs) -> Call:
    """Return the forward pass and the pullback."""

    def call() -> tuple[Any, ...]:
        out, pullback = cupy_sdpa.attention_vjp(*x.qkv)
        return (out, *pullback(x.dout))

    return call


def lengths(x: Inputs) -> dict[str, Any]:
    """Return the lengths of a padded batch."""
    return {"seq_lens_q": x.model.lengths, "seq_lens_kv": x.model.lengths}


class Kind(NamedTuple):
    """A kind of call: its name, its mix, and how it is made on a set of arrays."""

    name: str
    mix: str
    call: Callable[[Inputs], Call]


_FORWARD: dict[str, Callable[[Inputs], Call]] = {
    "plain": forward(),
    "causal": forward(lambda x: {"causal": True}),
    "window": forward(lambda x: {"causal": True, "window": (WINDOW, 0)}),
    "lengths": forward(lengths),
    "packed": packed,
    "bias": forward(lambda x: {"bias": x.bias}),
    "mask": forward(lambda x: {"mask": x.model.mask}),
    "alibi": forward(lambda x: {"alibi_slopes": x.model.slopes}),
    "sinks": forward(lambda x: {"sinks": x.sinks}),
    "dropout": forward(lambda x: {"dropout_p": DROPOUT, "seed": x.model.seed, "offset": x.offset}),
}
_OTHERS: dict[str, Callable[[Inputs], Call]] = {
    "stats": forward(lambda x: {"return_stats": True}),
    "max_sumexp": forward(lambda x: {"return_stats": "max_sumexp"}),
    "alibi_flex": _FORWARD["alibi"],
    "score_mod": forward(lambda x: {"score_mod": zoo.softcap(CAP)}),
    "mask_mod": forward(lambda x: {"mask_mod": zoo.chunked(CHUNK)}),
    "paged": paged,
    "nnlib": in_nnlib,
    "vjp": both_passes,
    "gradients": gradients(),
    "gradients_causal": gradients(lambda x: {"causal": True}),
    "gradients_lengths": gradients(lengths),
    "gradients_bias": gradients(lambda x: {"bias": x.bias}, return_dbias=True),
    "gradients_sinks": gradients(lambda x: {"sinks": x.sinks}, return_dsinks=True),
    "gradients_tensors": gradients(lambda x: {"score_mod": learned_bias, "tensors": {"bias": x.learned}}, return_dtensors=True),
}
KINDS = tuple(Kind(name, mix, call) for mix, calls in ((OPTIONS, _FORWARD), (OTHERS, _OTHERS)) for name, call in calls.items())

# timers


class Way(NamedTuple):
    """A way of computing a kind of call.

    Attributes:
        title: its description.
        make: makes the call on the set of arrays with a number.
        active: the context in which calls are made and run, entered outside of the measured time.
    """

    title: str
    make: Callable[[int], Call]
    active: Context = contextlib.nullcontext


class Chosen(NamedTuple):
    """A way that runs, and its calls on all sets."""

    way: Way
    calls: list[Call]


def choose(ways: Sequence[Way], wait: Wait, sets: int) -> tuple[Chosen | None, list[str]]:
    """Return the first way that runs on all sets, and the reasons why those before it do not run."""
    failures = []
    for way in ways:
        try:
            with way.active(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's reasons why a backend cannot run
                first = way.make(0)
                repeat(first, wait)
                calls = [first, *(way.make(number) for number in range(1, sets))]
                for call in calls:
                    call()
                wait(None)
        except Exception as error:  # a missing library, or a call that it does not support: the next way is tried
            failures.append(f"{way.title} does not run: {type(error).__name__}: {one_line(str(error))[:150]}")
        else:
            return Chosen(way, calls), failures
    return None, failures


def repeat(call: Call, wait: Wait) -> None:
    """Repeat a call until its CUDA graph is captured."""
    for _ in range(WARM_UP):
        call()
        wait(None)


def idle_timer(chosen: Chosen, wait: Wait) -> Callable[[], float]:
    """Return a timer of the first call on an idle device, always on the same addresses: median microseconds."""
    call = chosen.calls[0]
    with chosen.way.active():
        repeat(call, wait)
        count = min(CALLS, affordable_calls(call, wait))

    def timer() -> float:
        with chosen.way.active():
            return host_us(call, count, wait)

    return timer


class Mix:
    """A timer of calls of several kinds in turn, each on the next set of arrays, as in a model with many layers.

    Args:
        calls: the calls of each kind on all sets.
        wait: waits for the device.
        active: the context in which all calls run.

    Attributes:
        rounds: for each kind, the mean microseconds of its calls in every round.
    """

    def __init__(
        self,
        calls: Mapping[str, Sequence[Call]],
        wait: Wait,
        active: Context = contextlib.nullcontext,
    ) -> None:
        self._wait, self._active = wait, active
        sets = len(next(iter(calls.values())))
        self._order = [(name, several[number]) for number in range(sets) for name, several in calls.items()]
        self._counts = {name: len(several) for name, several in calls.items()}
        self.rounds: dict[str, list[float]] = {name: [] for name in calls}

    def warm_up(self) -> None:
        """Run the mix until its CUDA graphs are captured."""
        for _ in range(MIX_WARM_UP):
            self._run()

    def __call__(self) -> float:
        """Run one round; returns the mean microseconds of a call.

        A round that is not measured runs first. The caches of the CPU then contain what a program that uses one library has
        there, and not what the other contender left.
        """
        self._run()
        spent = self._run()
        for name, seconds in spent.items():
            self.rounds[name].append(seconds / self._counts[name] * 1e6)
        return sum(spent.values()) / len(self._order) * 1e6

    def _run(self) -> dict[str, float]:
        """Run one round; returns the seconds of the calls of each kind."""
        spent = dict.fromkeys(self._counts, 0.0)
        with self._active():
            for first in range(0, len(self._order), PIECE):
                self._wait(None)
                for name, call in self._order[first : first + PIECE]:
                    begin = time.perf_counter()
                    result = call()
                    spent[name] += time.perf_counter() - begin
                    del result  # outside of the measured time
            self._wait(None)
        return spent


def measure_mixes(mixes: Mapping[str, Mix]) -> None:
    """Measure the mixes of several contenders in interleaved rounds; the results are in their ``rounds``."""
    for mix in mixes.values():
        mix.warm_up()
    interleaved(mixes, ROUNDS, seconds=SECONDS)
    for mix in mixes.values():
        for several in mix.rounds.values():
            del several[0]  # the first round does not count


# rows

Row = dict[str, Any]


def load_peers(*, with_flex: bool) -> tuple[Any, str]:
    """PyTorch's calls, or why they are missing."""
    try:
        from .host_peers import Peers

        return Peers(with_flex), ""
    except Exception as error:
        return None, f"PyTorch does not run: {type(error).__name__}: {one_line(str(error))}"


def measure_mix(name: str, kinds: Sequence[Kind], sets: Sequence[Inputs], peers: Any) -> list[Row]:
    """Return the rows of the kinds of one mix, alone and in the mix."""
    rows: dict[str, Row] = {}
    sides: dict[str, dict[str, Chosen]] = {"": {}, "peer_": {}}
    for kind in kinds:
        row = rows[kind.name] = dict.fromkeys(COLUMNS) | {"kind": kind.name, "mix": name, "message": ""}
        own = Way("cupy_sdpa", lambda number, kind=kind: kind.call(sets[number]))  # type: ignore[misc]
        for side, ways in (("", [own]), ("peer_", peers.ways(kind.name) if peers else [])):
            chosen, failures = choose(ways, wait, len(sets))
            if chosen:
                sides[side][kind.name] = chosen
            row["message"] = "; ".join(filter(None, [row["message"], *failures]))
        if kind.name in sides["peer_"]:
            row["peer"] = sides["peer_"][kind.name].way.title
    alone = interleaved(
        {(side, kind): idle_timer(chosen, wait) for side, found in sides.items() for kind, chosen in found.items()},
        ROUNDS, seconds=SECONDS,
    )  # fmt: skip
    active = {"": contextlib.nullcontext, "peer_": peers.active if peers else contextlib.nullcontext}
    mixes = {
        side: Mix({kind: x.calls for kind, x in found.items()}, wait, active[side]) for side, found in sides.items() if found
    }
    measure_mixes(mixes)
    in_mix = {(side, kind): several for side, mix in mixes.items() for kind, several in mix.rounds.items()}
    for prefix, times in (("", alone), ("mix_", in_mix)):
        for (side, one), several in times.items():
            rows[one][f"{side}{prefix}us"] = round(statistics.median(several), 2)
        for one in sides[""].keys() & sides["peer_"].keys():
            rows[one][f"{prefix}ratio"] = round(ratio(times["", one], times["peer_", one]), 3)
    return list(rows.values())


def wait(results: Any) -> None:
    """Wait for the device."""
    cupy_runtime.cupy().cuda.Device().synchronize()


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of both mixes."""
    peers, reason = load_peers(with_flex=not given.no_flex)
    if reason:
        print(reason)
    model = Model(cupy_runtime.cupy())
    sets = [Inputs(model, number) for number in range(SETS)]
    for mix in (OPTIONS, OTHERS):
        if kinds := [kind for kind in KINDS if kind.mix == mix and (not given.only or kind.name in given.only)]:
            yield from measure_mix(mix, kinds, sets, peers)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--no-flex", action="store_true", help="without FlexAttention, which has to be compiled")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    return runner.run("host_options", __doc__, words, rows, add_options)
